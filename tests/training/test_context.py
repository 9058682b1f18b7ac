"""`shard seq -> context by …`: a sequence over several ranks, in zigzag order, however keys and values get there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.compiler.analysis.traffic import traffic
from partita.compiler.ops.attend import Attend, AttendGradient
from partita.compiler.pipeline import compile_spec
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.runtime.inference.ranks import LocalRanks
from partita.runtime.outputs import Outputs
from partita.runtime.transports.virtual import VirtualCluster
from partita.runtime.verification.verify import verify
from tests.commands import computed, partita
from tests.compiler.test_text import check_every_pass
from tests.marks import examples

FILE = """\
axis batch = 4, seq = 24, embed = 6, groups = 6, heads = 2, key = 4, vocab = 12, docs = 3
model lm(tokens: i64[batch, seq], targets: i64[batch, seq], doc: i64[batch, seq]) {
  param wte: [vocab, embed] ~ normal(0.3)
  param wpe: [seq, embed] ~ normal(0.3)
  param lean: [seq] ~ normal(0.3)
  param table: [docs, embed] ~ normal(0.3)
  let x = embedding(tokens, wte, over = vocab) + wpe + embedding(doc, table, over = docs) * mean(lean)
  repeat 2 as layer {
    param wq: [embed, groups, heads, key] ~ normal(0.4)
    param wk, wv: [embed, groups, key] ~ normal(0.4)
    param wo: [groups, heads, key, embed] ~ normal(0.4)
    let h = layer_norm(x, over = embed)
    let q = rope(dot(h, wq, over = embed), over = seq, pairs = key)
    let k = rope(dot(h, wk, over = embed), over = seq, pairs = key)
    let a = attend(q, k, dot(h, wv, over = embed), over = seq, along = key, causal = true)
    let x = x + dot(a, wo, over = [groups, heads, key])
  }
  output hidden = x
  output right = arg_max(dot(x, wte, over = embed), over = vocab)
  loss cross_entropy(dot(x, wte, over = embed), targets, over = vocab)
}
mesh ranks(data = 1, context = 2, tensor = 1, pipe = 1)
layout cut on ranks {
  RULE
  stage layer -> pipe
}
layout alone on ranks { }
schedule s = one_f_one_b(microbatches = 2)
train {
  model = lm layout = cut schedule = s data = random()
  optimizer = adamw(lr = 0.01, eps = 0.01)
  precision = f64 steps = 3 eval = every(3, batches = 1)
}
"""
ZIGZAG = "shard seq -> context by zigzag"
CAUSAL = "causal = true"


def text_of(rule: str = ZIGZAG, **changes: str) -> str:
    text = FILE.replace("RULE", rule)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def spec_of(text: str, *overrides: str) -> Any:
    given, diagnostics = load_text(text, "lm.par", overrides)
    assert given is not None, [each.render() for each in diagnostics]
    return given


# ---------------------------------------------------------------- the numbers


@frozen
class Case:
    """A file and what replaces its settings."""

    text: str
    overrides: tuple[str, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Attention of all kinds, on meshes that split the sequence and other axes."""
    mesh = {"context": draw(st.sampled_from([2, 3])), "pipe": draw(st.sampled_from([1, 1, 2]))}
    mesh |= {draw(st.sampled_from(["data", "tensor"])): draw(st.sampled_from([1, 2]))}
    words = [
        *draw(st.sampled_from([["zigzag"], ["zigzag"], []])),
        *draw(st.sampled_from([[], ["gather"], ["heads"], ["ring"]])),
    ]
    over = "context" if "ring" in words else draw(st.sampled_from(["context", "context, tensor"]))
    rules = ["shard batch -> data", f"shard seq -> {over}" + (f" by {', '.join(words)}" if words else "")]
    if over == "context":
        rules.append("shard heads, vocab -> tensor")
    rules += draw(st.sampled_from([[], ["shard state -> context"], ["shard param -> context"]]))
    kind = draw(
        st.sampled_from(
            [
                CAUSAL,
                f"{CAUSAL}, window = 5",
                "window = 4",
                f"{CAUSAL}, segments = doc",
                f"{CAUSAL}, bias = lean, softcap = 2.0",
                f"{CAUSAL}, dropout = 25%",
                "dropout = 25%",
            ]
        )
    )
    if "ring" in words:
        kind = draw(st.sampled_from([CAUSAL, "causal = false"]))
    text = FILE.replace("RULE", "\n  ".join(draw(st.permutations(rules)))).replace(CAUSAL, kind)
    if "heads" in words and over != "context":
        text = text.replace("groups = 6", "groups = 12")
    return Case(text, tuple(f"ranks.{axis}={size}" for axis, size in mesh.items()))


def holds(case: Case) -> None:
    found = verify(spec_of(case.text, *case.overrides))
    assert found.passed, [each.render() for each in (*found.diagnostics, *([found.reason] if found.reason else []))]


@given(case=cases())
@examples(2, suppress_health_check=list(HealthCheck))
def test_the_numbers_are_those_of_one_device(case: Case):
    """To 1e-10, in float64: losses, gradients, parameters after updates; and the program is proven equivalent."""
    holds(case)


def test_three_ranks_turn_a_ring():
    holds(Case(text_of(f"{ZIGZAG}, ring"), ("ranks.context=3",)))


@pytest.mark.soak
@given(case=cases())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_numbers_are_those_of_one_device_in_many_layouts(case: Case):
    holds(case)


def test_outputs_stand_in_their_own_order():
    given = spec_of(text_of(), "ranks.context=3")
    one, several = Outputs(given), Outputs(given, here=LocalRanks(range(3), VirtualCluster(3)))
    torch.manual_seed(1)
    parameters = {name: torch.randn(type.shape, dtype=torch.float64) for name, type in one.parameters.items()}
    inputs = {each.name: torch.randint(0, 3, each.type.shape) for each in one.inputs}
    for each in (one, several):
        each.set_parameters(parameters)
    expected, found = one(inputs), several(inputs)
    torch.testing.assert_close(found["hidden"], expected["hidden"], rtol=1e-10, atol=1e-12)
    assert torch.equal(found["right"], expected["right"])


@pytest.mark.soak
@pytest.mark.parametrize("rule", [ZIGZAG, f"{ZIGZAG}, ring"])
def test_what_the_passes_make_reads_back_as_the_same(rule: str):
    check_every_pass(spec_of(text_of(rule)))


@pytest.mark.soak
def test_two_processes_train_as_one_does(tmp_path: Path):
    (tmp_path / "lm.par").write_text(text_of("shard seq -> context by zigzag, gather"))
    runs = {"gloo": (), "alone": ("layout=alone", "ranks.context=1")}
    for name, overrides in runs.items():
        done = partita("run", "lm.par", *overrides, f"--run-dir={name}", "--transport", "gloo", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    found, expected = (computed(tmp_path / name) for name in runs)
    assert len(found) == len(expected) == 4
    for a, b in zip(found, expected, strict=True):
        assert dict(a) == pytest.approx(dict(b), rel=1e-10)


# ---------------------------------------------------------------- operations that need positions one after the other

MIXED = """\
axis batch = 4, seq = 24, embed = 6, wide = 6, taps = 4, near = 3, rows = 8, some = 5, docs = 3, experts = 2, slots = 24
axis first = 16, rest = seq - first, quarters = 4, quarter = seq / quarters
model mixed(x: [batch, seq, embed], at: i64[batch, some], doc: i64[batch, seq]) {
  param a: [embed] ~ normal(0.5)
  param position: [seq, embed] ~ normal(0.5)
  param kernel: [taps, embed] ~ normal(0.5)
  param full: [near, embed, wide] ~ normal(0.5)
  param router: [embed, experts] ~ normal(1)
  let x = x * a + position
  let id = arg_max(dot(x, router, over = embed), over = experts)
  let far = gather(position, at, along = seq)
  repeat 2 as layer {
    param m: [embed] ~ normal(1)
    let x = x + BODY * m
  }
  output hidden = x
  loss mean(x * x) + 0.01 * (mean(far * far) + sum(kernel) + sum(full) + sum(router))
}
mesh ranks(data = 1, context = 2, pipe = 1)
layout cut on ranks {
  shard seq -> context by zigzag
  shard batch -> data
  stage layer -> pipe
}
layout alone on ranks { }
schedule s = one_f_one_b(microbatches = 2)
train {
  layout = cut schedule = s data = random()
  optimizer = adamw(lr = 0.01, eps = 0.01)
  precision = f64 steps = 3 eval = every(3, batches = 1)
}
"""
SEQUENTIAL = [
    "shift(x, over = seq)",
    "shift(x, over = seq, by = -2)",
    "shift(x, over = seq, by = 9)",
    "shift(shift(x, over = seq, by = 3) * a, over = seq, by = 40)",
    "conv(x, kernel, seq -> seq, groups = embed, padding = [[3, 0]])",
    "conv(x, kernel, seq -> seq, groups = embed, padding = [[1, 5]], dilation = 2)",
    "rename(conv(tanh(x), full, seq -> seq, over = embed, padding = 1), wide -> embed)",
    "max(patches(x, seq -> seq, size = near, padding = 1, fill = -5), over = near)",
    "mean(patches(x, seq -> seq, size = near, padding = [[0, 2]]), over = near)",
    "mean(patches(x, seq -> rows, size = near, stride = 3), over = [near, rows])",
    "mean(gather(x, at, along = seq), over = some)",
    "sum_by(gather(x, at, along = seq), at, some -> seq)",
    "softmax(gather(sum_by(x, doc, seq -> docs), doc, along = docs), over = embed)",
    "sum(max_by(x, doc, seq -> docs), over = docs)",
    "cumsum(x, over = seq)",
    "cumsum(shift(cumsum(0.1 * x, over = seq), over = seq), over = seq)",
    "flip(x, over = seq)",
    "roll(x, over = seq, by = 5)",
    "linear_scan(sigmoid(x), x, over = seq)",
    "sum(dispatch(x, id, over = seq, into = [experts, slots]), over = [experts, slots])",
    "concat(slice(x, seq -> first, start = 8), slice(x, seq -> rest), [first, rest] -> seq)",
    "merge(tanh(cumsum(split(x, seq -> [quarters, quarter]), over = quarters)), [quarters, quarter] -> seq)",
    "cast(arg_max(x, over = seq), f32)",
]


@pytest.mark.parametrize("body", SEQUENTIAL)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_operations_that_are_not_attention_see_positions_in_their_order(body: str, ranks: int):
    holds(Case(MIXED.replace("BODY", body), (f"ranks.context={ranks}",)))


@pytest.mark.soak
@given(bodies=st.lists(st.sampled_from(SEQUENTIAL), min_size=2, max_size=3), mesh=st.sampled_from(["", "data", "pipe"]))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_operations_one_after_the_other_do_too(bodies: list[str], mesh: str):
    text = MIXED.replace("BODY", bodies[0])
    for body in bodies[1:]:
        text = text.replace("let x = x +", f"let x = x + {body} * m\n    let x = tanh(x) +", 1)
    holds(Case(text, (f"ranks.{mesh}=2",) if mesh else ()))


def test_means_of_a_buffer_stand_in_their_own_order():
    """And so does what its update reads, which `verify` compares too."""
    holds(
        Case(
            """axis batch = 8, channels = 8
model m(x: [batch, channels]) {
  param w: [channels] ~ ones()
  buffer usual: [channels] ~ zeros()
  let y = x * w
  update usual = 0.9 * usual + 0.1 * mean(y, over = batch)
  loss mean(y * y)
}
mesh ranks(context = 2)
layout l on ranks { shard channels -> context by zigzag }
train { layout = l data = random() optimizer = sgd(lr = 0.1) steps = 3 }
""",
            (),
        )
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_neighbours_exchange_their_ends_alone(ranks: int):
    """In each layer and microbatch, forward: three positions of the 2N parts, of which a rank has two."""
    text = MIXED.replace("BODY", "conv(x, kernel, seq -> seq, groups = embed, padding = [[3, 0]])")
    state = compile_spec(spec_of(text, f"ranks.context={ranks}", "seq=96"))
    sent = [each for each in traffic(state) if each.axis == "context" and str(each.phase) == "F" and not each.parameter]
    layers = [each for each in sent if "layer" in str(each.tensor)]
    word, rows, embed = 8, 2, 6
    assert sum(each.bytes for each in layers) / (2 * 2) == (ranks - 1) / ranks * 2 * ranks * 3 * word * rows * embed


# ---------------------------------------------------------------- work and volumes


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_cost_model_knows_that_the_work_is_even(ranks: int):
    """Contiguous shards wait for the last one, which sees N − ½ of N parts; in zigzag order each has N/2."""

    def flops(rule: str, ranks: int = ranks) -> list[int]:
        state = compile_spec(spec_of(text_of(rule), f"ranks.context={ranks}"))
        nodes = [node for node in state.sharded.graph.nodes if isinstance(node.op, Attend | AttendGradient)]
        assert len(nodes) == 4
        return [node.op.flops(*([v.type for v in ends] for ends in (node.inputs, node.outputs))) for node in nodes]

    even, uneven = flops(f"{ZIGZAG}, gather"), flops("shard seq -> context by gather")
    assert even == [each // ranks for each in flops(ZIGZAG, ranks=1)]
    assert uneven == [each * (2 * ranks - 1) // ranks for each in even]


@pytest.mark.few(1)
@pytest.mark.parametrize("slices", [2, 3])
def test_slices_together_cost_what_the_sequence_does(slices: int):
    def flops(order: str) -> list[int]:
        text = text_of(ZIGZAG, **{"one_f_one_b(microbatches = 2)": order})
        state = compile_spec(spec_of(text, "ranks.context=1"))
        nodes = [node for node in state.sharded.graph.nodes if isinstance(node.op, Attend | AttendGradient)]
        return [node.op.flops(*([v.type for v in ends] for ends in (node.inputs, node.outputs))) for node in nodes]

    whole = flops("one_f_one_b(microbatches = 2)")
    assert [
        slices * each for each in flops(f"one_f_one_b(microbatches = 2, over = [batch, seq], slices = {slices})")
    ] == whole


def volumes(exchange: str, ranks: int) -> dict[str, dict[str, float]]:
    """Bytes that a rank sends for the attention of a layer and microbatch, by phase and collective."""
    state = compile_spec(spec_of(text_of(f"{ZIGZAG}, {exchange}"), f"ranks.context={ranks}", "embed=60"))
    found: dict[str, dict[str, float]] = {}
    for each in traffic(state):
        if each.axis != "context" or not each.type.has("key") or each.parameter:
            continue
        of = found.setdefault(str(each.phase), {})
        of[each.kind] = of.get(each.kind, 0) + each.bytes / (2 * state.microbatches)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
def test_volumes_are_those_of_the_formulas(ranks: int):
    """For K and V of all positions, Q and O: gathering sends (N−1)/N of K + V, and as much again, and their gradients
    reduced, in the backward pass; heads send 1/N of that, of Q, K, V and O, and of four gradients. A ring sends as much
    as gathering: N − 1 times a block of K and V, and of their gradients.
    """
    word, rows, seq, groups, heads, key = 8, 2, 24, 6, 2, 4
    kv, qo = (2 * word * rows * seq * groups * each * key for each in (1, heads))
    part = (ranks - 1) / ranks
    gathered = volumes("gather", ranks)
    assert gathered["F"] == {"all_gather": part * kv}
    assert gathered["B"] == {"all_gather": part * kv, "reduce_scatter": part * kv}
    assert set(gathered) == {"F", "B"}
    exchanged = volumes("heads", ranks)
    assert exchanged["F"] == {"all_to_all": part / ranks * (kv + qo)}
    assert exchanged["B"] == {"all_to_all": part / ranks * (kv + qo)}
    assert set(exchanged) == {"F", "B"}
    turned = volumes("ring", ranks)
    assert turned == {"F": {"turn": part * kv}, "B": {"turn": 2 * part * kv}}


# ---------------------------------------------------------------- wrong files


def refused(text: str):
    given, diagnostics = load_text(text, "lm.par")
    if given is None:
        return next(each for each in diagnostics if each.severity == "error")
    with pytest.raises(Refused) as found:
        compile_spec(given)
    return found.value.diagnostics[0]


@pytest.mark.parametrize(
    ("text", "code", "line", "column", "words"),
    [
        (text_of("shard seq -> context by spiral"), "E0419", 24, 27, "not split by `spiral`"),
        (text_of("shard seq -> context by zigzag, zigzag"), "E0419", 24, 35, "more than one thing"),
        (text_of("shard seq -> context by heads, gather"), "E0419", 24, 34, "more than one thing"),
        (text_of("shard seq, batch -> context by zigzag"), "E0419", 24, 3, "one axis"),
        (text_of("shard state -> context by zigzag"), "E0419", 24, 3, "one axis"),
        (text_of("shard lm.wpe: seq -> context by zigzag"), "E0419", 24, 3, "one axis"),
        (text_of(f"shard seq -> tensor\n  {ZIGZAG}"), "E0419", 25, 3, "in different ways"),
        (text_of("shard batch -> context by zigzag"), "E0419", 24, 3, "split into microbatches"),
        (text_of().replace("seq = 24", "seq = 22"), "E0411", 24, 3, "does not divide over `context` of 2 by zigzag"),
        (
            text_of(f"{ZIGZAG}, heads").replace("groups = 6, heads = 2", "groups = 3, heads = 5"),
            "E0419",
            24,
            3,
            "heads",
        ),
        (text_of(f"{ZIGZAG}, ring").replace(CAUSAL, f"{CAUSAL}, window = 5"), "E0419", 24, 3, "by `ring`"),
        (
            text_of(f"{ZIGZAG}, ring").replace("(microbatches = 2)", "(microbatches = 2, slices = 2)"),
            "E0419",
            24,
            3,
            "slices",
        ),
    ],
)
def test_wrong_files(text: str, code: str, line: int, column: int, words: str):
    found = refused(text)
    assert (found.code, found.span.line, found.span.column) == (code, line, column), found.render()
    assert words in found.message
    assert found.help
