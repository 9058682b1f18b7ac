"""Slices of the sequence as microbatches: whatever causal model goes through its sequence slice by slice, it computes
what one device computes of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from partita.compiler.fit.schedule import planned_with
from partita.compiler.graph import Node
from partita.compiler.ops.slices import GatherSlices, OfSlices
from partita.compiler.pipeline import assembled, compile_spec
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import validate
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.runtime import kernels
from partita.runtime.rank import CompiledRun
from partita.runtime.training import VirtualRun
from partita.runtime.verification.verify import verify
from partita.testing import mutants, random_orders, shapes
from tests.commands import computed, partita
from tests.compiler.test_text import check_every_pass
from tests.files import checked
from tests.marks import examples, soak
from tests.programs import LINES, Program, axes, endings, recomputations
from tests.training.test_partition import check

BLOCKS = """
block attention(x: [batch, seq, embed]) {
  param wq, wk, wv: [embed, heads, key] ~ kaiming()
  param wo: [heads, key, embed] ~ kaiming()
  let h = layer_norm(x, over = embed)
  let q = rope(dot(h, wq, over = embed), over = seq, pairs = key, base = 50)
  let k = rope(dot(h, wk, over = embed), over = seq, pairs = key, base = 50)
  let a = attend(q, k, dot(h, wv, over = embed), over = seq, along = key, causal = true)
  return x + dot(a, wo, over = [heads, key])
}
block special(x: [batch, seq, embed], tokens: i64[batch, seq]) {
  param wq: [embed, heads, key] ~ kaiming()
  param wk, wv: [embed, key] ~ kaiming()
  param near: [heads, seq] ~ normal(0.5)
  param sink: [heads] ~ normal(0.5)
  param wo: [heads, key, embed] ~ kaiming()
  let h = rms_norm(x, over = embed)
  let q = dot(h, wq, over = embed)
  let a = attend(q, dot(h, wk, over = embed), dot(h, wv, over = embed), over = seq, along = key, causal = true, OPTION)
  return x + dot(a, wo, over = [heads, key])
}
block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ kaiming()
  param down: [ffn, embed] ~ kaiming()
  return x + dot(silu(dot(rms_norm(x, over = embed), up, over = embed)), down, over = ffn)
}
"""
OPTIONS = {
    "sink = sink": "near",
    "bias = near": "sink",
    "window = 3": "near sink",
    "softcap = 2.0": "near sink",
    "segments = tokens": "near sink",
    "dropout = 0.25": "near sink",
    "mask = tokens > 1, bias = near, window = 5": "sink",
}
NOT_CAUSAL = ("seq -> left", "over = [seq, embed]", "seq -> spot", "over = seq)", "grouped")
CAUSAL = (
    *(line for line in LINES if not any(each in line for each in NOT_CAUSAL)),
    "let x = special(x, tokens)",
    "let x = x * (spot + 1.0) + row * 0.1",
    # Keys of the first stage on all later ones.
    "let x = x + attend(x, skip, tanh(skip), over = seq, along = embed, causal = true)",
    "let x = x + merge(attend(split(x, embed -> [heads, key]), split(x, embed -> [heads, key]), "
    "split(y, embed -> [heads, key]), over = seq, along = key, causal = true), [heads, key] -> embed)",
)


@st.composite
def sliced_programs(draw: st.DrawFn) -> Program:
    """A random causal model, in slices, on a pipeline of up to three ranks."""
    ranks, microbatches, slices = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from((2, 3, 4)))
    name = draw(st.sampled_from(("one_f_one_b", "gpipe")))
    iterations = [draw(st.integers(1, 2)) for _ in range(draw(st.integers(1, 2)))]
    iterations[0] += max(0, ranks - sum(iterations))
    lines = [draw(st.lists(st.sampled_from(CAUSAL), min_size=1, max_size=4, unique=True)) for _ in iterations]
    used = " ".join(" ".join(each) for each in lines)
    option = draw(st.sampled_from(sorted(OPTIONS)))
    blocks = BLOCKS.replace("OPTION", option)
    for unused in OPTIONS[option].split():
        blocks = blocks.replace(f"  param {unused}: [heads, seq] ~ normal(0.5)\n", "")
        blocks = blocks.replace(f"  param {unused}: [heads] ~ normal(0.5)\n", "")
    text = blocks + "model m(tokens: i64[batch, seq], targets: i64[batch, seq], row: [batch], spot: [seq]) {\n"
    text += "  param wte: [vocab, embed] ~ kaiming()\n"
    text += "  let x = embedding(tokens, wte, over = vocab)\n  let skip = tanh(x)\n  let y = x * 0.5\n"
    text += "  let aux = mean(x)\n"
    if "dot(x, w," in used:
        text += "  param w: [embed, ffn] ~ kaiming()\n"
    if "+ u" in used:
        text += "  param v: [seq, embed] ~ normal(0.5)\n  let u = exp(v) * 0.1\n"
    for count, body in zip(iterations, lines, strict=True):
        text += f"  repeat {count} as layer {{\n" + "".join(f"    {line}\n" for line in body) + "  }\n"
    text += "  let logits = dot(x + y, wte, over = embed)\n"
    weights = draw(st.sampled_from(["", ", weights = cast(targets > 0, f32) + 0.25"]))
    more = draw(st.sampled_from(["", " + 0.1 * aux", " + 0.01 * sum(wte * wte)", " + mean(row) * mean(wte)"]))
    text += f"  loss cross_entropy(logits, targets, over = vocab{weights}){more}\n"
    text += "  metric accuracy = accuracy(logits, targets, over = vocab)\n  metric size = sqrt(mean(logits * logits))\n"
    text += "  metric most = max(logits, over = [batch, seq, vocab])\n  metric weight = sum(wte)\n"
    text += "  metric squares = mean(row * row)\n  metric places = sum(spot * spot)\n}\n"
    sizes = {"batch": microbatches * draw(st.integers(1, 2)), "seq": slices * draw(st.integers(1, 2))}
    text = axes({**sizes, "embed": 4, "heads": 2, "key": 2, "ffn": 6, "vocab": 5}) + text
    text += f"mesh line(pipe = {ranks})\nlayout cut on line {{\n  stage layer -> pipe\n"
    text += f"  {draw(recomputations(text))}\n}}\nlayout whole on line {{ }}\n"
    text += f"schedule s = {name}(microbatches = {microbatches}, over = [batch, seq], slices = {slices})\n"
    text += draw(endings())
    return Program(text, ("line.pipe=1", "layout=whole", "schedule=gpipe(microbatches=1)"))


@given(program=sliced_programs(), seed=st.integers(0, 1000))
@examples(4, suppress_health_check=list(HealthCheck))
def test_the_numbers_are_those_of_one_device(program: Program, seed: int, tmp_path_factory):
    note(program.text)
    check(program, seed, tmp_path_factory.getbasetemp())


@pytest.mark.soak
@given(program=sliced_programs(), seed=st.integers(0, 1000))
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_numbers_are_those_of_one_device_at_length(program: Program, seed: int, tmp_path_factory):
    note(program.text)
    check(program, seed, tmp_path_factory.getbasetemp())


# ---------------------------------------------------------------- one model

FILE = (
    BLOCKS.replace("OPTION", "window = 5")
    .replace("  param near: [heads, seq] ~ normal(0.5)\n", "")
    .replace("  param sink: [heads] ~ normal(0.5)\n", "")
    + """
model lm(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(0.5)
  param places: [seq, embed] ~ normal(0.5)
  let x = embedding(tokens, table, over = vocab) + places
  repeat 2 as layer { let x = mlp(special(attention(x), tokens)) }
  let logits = dot(rms_norm(x, over = embed), table, over = embed)
  loss cross_entropy(logits, targets, over = vocab)
  metric right = accuracy(logits, targets, over = vocab)
}
mesh line(pipe = 2, data = 1)
layout cut on line { stage layer -> pipe RULES }
layout whole on line { }
schedule s = CALL
train { model = lm layout = cut schedule = s data = random() optimizer = adamw(lr = 0.01) precision = f64 clip = 0.5
  steps = 2 eval = every(1, batches = 1) }
"""
)
CALL = "one_f_one_b(microbatches = 2, over = [batch, seq], slices = 3)"
WHOLE = ("line.pipe=1", "line.data=1", "layout=whole", "schedule=gpipe(microbatches=1)")


def text_of(changes: Mapping[str, str] | None = None, call: str = CALL, rules: str = "") -> str:
    sizes = {"batch": 8, "seq": 12, "embed": 8, "heads": 4, "key": 2, "ffn": 6, "vocab": 12}
    text = axes(sizes) + FILE.replace("CALL", call).replace("RULES", rules)
    for old, new in (changes or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    return text


CASES = [
    ("", CALL.replace("one_f_one_b(", "interleaved_1f1b(chunks = 2, "), {"repeat 2": "repeat 4"}),
    ("shard heads, ffn, vocab -> data", CALL, {"data = 1": "data = 2"}),
    *soak(
        ("recompute layer", CALL, {}),
        ("recompute auto", CALL, {}),
        ("shard batch, state -> data", CALL.replace("3", "4"), {"data = 1": "data = 2"}),
        ("shard batch, param -> data\n  recompute all", CALL, {"data = 1": "data = 2"}),
        # What is cut into slices is split over ranks besides.
        ("shard seq -> data", CALL, {"data = 1": "data = 2"}),
        ("shard seq -> data", CALL.replace("slices = 3", "slices = 2"), {"data = 1": "data = 3", "12,": "24,"}),
    ),
]


@pytest.mark.soak
@pytest.mark.parametrize(("rules", "call", "changes"), CASES)
def test_layouts_and_orders_change_no_number(rules: str, call: str, changes: dict[str, str], tmp_path) -> None:
    text = text_of(changes, call, rules)
    check(Program(text, WHOLE), 3, tmp_path)
    state = compile_spec(checked(text, "lm.par"))
    assert validate(state).passed, [each.render() for each in validate(state).problems]


@pytest.mark.soak
def test_verify_runs_slices_too() -> None:
    """The proxy has fewer of them, of a shorter sequence."""
    found = verify(checked(text_of({"seq = 12": "seq = 48"}, CALL.replace("slices = 3", "slices = 8")), "lm.par"))
    assert found.passed, [each.render() for each in found.diagnostics]
    assert found.execution.microbatches == 6


@pytest.mark.soak
def test_its_passes_read_back_as_the_same() -> None:
    check_every_pass(checked(text_of(), "lm.par"))


# ---------------------------------------------------------------- what cannot be cut


def refused(text: str):
    given, diagnostics = load_text(text, "lm.par")
    if given is None:
        return next(each for each in diagnostics if each.severity == "error")
    with pytest.raises(Refused) as found:
        compile_spec(given)
    return found.value.diagnostics[0]


LAST = "let logits = dot(rms_norm(x, over = embed), table, over = embed)"


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("changes", "code", "place", "words", "help"),
    [
        (
            {"along = key, causal = true)": "along = key)"},
            "E0407",
            "attend(q, k,",
            "needs all of `seq`",
            "causal = true",
        ),
        ({LAST: f"let x = softmax(x, over = seq)  {LAST}"}, "E0407", "softmax(", "a sum over `seq`", "over = batch"),
        ({LAST: f"let x = cumsum(x, over = seq)  {LAST}"}, "E0407", "cumsum(", "needs all of `seq`", "over = batch"),
        (
            {LAST: f"let x = x * mean(x, over = seq)  {LAST}"},
            "E0407",
            "x * mean(",
            "a sum over `seq`",
            "only be scaled",
        ),
        (
            {"loss cross": "loss exp(cross", "= vocab)\n  m": "= vocab))\n  m"},
            "E0407",
            "exp(cross",
            "sum over",
            "scaled",
        ),
        (
            {"= vocab)\n  m": "= vocab)\n  metric spread = mean(sqrt(mean(logits * logits, over = batch)))\n  m"},
            "E0407",
            "sqrt(",
            "that still has the axis `seq`, which is cut into slices",
            "reduce over `seq`",
        ),
        (
            {"slices = 3": "slices = 5"},
            "E0406",
            "one_f_one_b",
            "`seq` of 12 does not divide into 5 slices",
            "divides 12",
        ),
        (
            {"[batch, seq], slices": "[batch, key], slices", "= 3)": "= 2)"},
            "E0407",
            "",
            "no input of model `lm`",
            "seq]",
        ),
        ({", slices = 3": ""}, "E0210", "one_f_one_b", "needs the number of slices of `seq`", "slices = 2"),
        ({"over = [batch, seq]": "over = [batch, batch]"}, "E0306", "[batch, batch]", "or a list of 2", None),
        ({"over = [batch, seq]": "over = seq"}, "E0306", "one_f_one_b", "into slices of it", "over = [batch"),
        ({CALL: "zb_h1(microbatches = 2, slices = 3)"}, "E0209", "slices", "takes no argument `slices`", "over"),
        ({"{ stage": "{ shard vocab -> pipe stage"}, "E0505", "one_f_one_b", "cannot have slices yet", "over = batch"),
    ],
)
def test_wrong_files(changes: dict[str, str], code: str, place: str, words: str, help: str | None) -> None:
    found = refused(text_of(changes))
    assert found.code == code, found.render()
    assert words in found.message, found.render()
    assert found.span.text.startswith(place), found.render()
    assert help is None or help in found.help, found.render()


def test_a_buffer_that_steps_update_needs_the_whole_sequence() -> None:
    changes = {
        "  let x = emb": "  buffer seen: [embed] ~ zeros()\n  let x = emb",
        "  metric": "  update seen = M\n  metric",
    }
    found = refused(text_of(changes).replace("= M", "= seen * 0.5 + mean(x, over = [batch, seq])"))
    assert (found.code, "`lm.seen` is updated in every step" in found.message) == ("E0407", True), found.render()


# ---------------------------------------------------------------- defects


def planned(state: Compilation, **changes: object) -> Compilation:
    return assembled(planned_with(state, evolve(state.schedule, **changes)))


def with_nodes(state: Compilation, change: Callable[[Node], Node]) -> Compilation:
    """The compilation with another node for each of the stages' nodes."""
    partitioned = state.partitioned
    stages = tuple(evolve(stage, nodes=tuple(map(change, stage.nodes))) for stage in partitioned.stages)
    return evolve(state, partitioned=evolve(partitioned, stages=stages))


def test_the_certificate_refuses_wrong_slices() -> None:
    state = compile_spec(checked(text_of(), "lm.par"))
    keys: list[str] = []

    def one_tensor(node: Node) -> Node:
        """Keys and values of one layer in one tensor."""
        if not isinstance(node.op, OfSlices):
            return node
        keys.append(node.op.key)
        return evolve(node, op=evolve(node.op, key=keys[0]))

    def at_the_start(node: Node) -> Node:
        """All slices in the place of the first."""
        return evolve(node, op=evolve(node.op, shards=())) if isinstance(node.op, GatherSlices) else node

    def alone(node: Node) -> Node:
        """Attention to the shared tensor, without what this slice adds to it."""
        held = {
            n.output: n.inputs[0] for s in state.partitioned.stages for n in s.nodes if n.op.name == "gather_slices"
        }
        return evolve(node, inputs=tuple(held.get(value, value) for value in node.inputs))

    for change in (one_tensor, at_the_start, alone):
        assert not validate(with_nodes(state, change), program=False).passed, change.__doc__
    assert not validate(evolve(state, schedule=evolve(state.schedule, slices=2)), program=False).passed
    assert not validate(evolve(state, program=evolve(state.program, slices=2))).passed


@cache
def compiled(ranks: int, chunks: int, microbatches: int, slices: int) -> Compilation:
    call = f"gpipe(microbatches = {microbatches}, slices = {slices})"
    if chunks > 1:
        call = f"interleaved_1f1b(microbatches = {microbatches}, chunks = {chunks}, slices = {slices})"
    changes = {"repeat 2": f"repeat {ranks * chunks}", "pipe = 2": f"pipe = {ranks}", "batch = 8": "batch = 12"}
    return compile_spec(checked(text_of(changes, call), "lm.par"))


def ran(schedule: Schedule) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step with a schedule. Refused where it breaks a law."""
    slices = schedule.slices
    state = compiled(schedule.ranks, schedule.chunks, schedule.microbatches // slices, slices)
    run = VirtualRun(CompiledRun(state.spec, assembled(planned_with(state, schedule)), None))
    batch = {name: torch.arange(144).reshape(12, 12) * step % 12 for name, step in (("tokens", 5), ("targets", 7))}
    loss, _ = run.step(1, batch)
    for rank in run.ranks:
        assert not any(stage.in_flight for stage in rank.training.stages.values()), "a slice is left over"
    return loss, run.gradients()


FEW = shapes(3, 2, 3, max_slices=3)


@examples(4)
@given(random_orders(FEW))
def test_every_order_sums_the_same(schedule: Schedule) -> None:
    """To the last bit, wherever stages are, and B and W apart too."""
    state = compiled(schedule.ranks, schedule.chunks, schedule.microbatches // schedule.slices, schedule.slices)
    loss, gradients = ran(state.schedule)
    other, found = ran(schedule)
    assert other == loss
    for name, gradient in gradients.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.soak
def test_a_mutant_of_an_order_is_refused_or_computes_the_same() -> None:
    @settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
    @given(mutants(random_orders(FEW)))
    def refused_or_the_same(mutant: tuple[Schedule, Schedule, str]) -> None:
        original, changed, mistake = mutant
        try:
            loss, gradients = ran(changed)
        except Refused as refused:
            codes = {each.code for each in refused.diagnostics}
            assert codes <= {"E0501", "E0502", "E0503", "E0504"}, mistake
            return
        expected, wanted = ran(original)
        assert loss == expected, mistake
        assert all(torch.equal(gradients[name], gradient) for name, gradient in wanted.items()), mistake

    refused_or_the_same()


def test_slices_out_of_turn_are_refused() -> None:
    state = compile_spec(checked(text_of(), "lm.par"))
    ascending = make("one_f_one_b", 2, 1, 6)
    with pytest.raises(Refused, match="invariant 6"):
        planned(state, actions=ascending.actions, bound=(6, 6))


@pytest.mark.soak
def test_two_real_processes_train_on_slices(tmp_path: Path) -> None:
    """The same losses as of one process on whole sequences."""
    (tmp_path / "lm.par").write_text(text_of())
    runs = {"slices": (), "whole": WHOLE}
    for name, overrides in runs.items():
        done = partita("run", "lm.par", *overrides, "--transport", "gloo", f"--run-dir={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    found, expected = (computed(tmp_path / name) for name in runs)
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.soak
def test_verify_names_the_first_value_that_slices_get_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of all slices are put together before they are compared."""

    def of_this_slice_alone(total: Tensor, term: Tensor, dim: int, start: int, size: int) -> Tensor:
        return term.narrow(dim, start, size)

    monkeypatch.setattr(kernels, "scatter_slices", of_this_slice_alone)
    first = verify(checked(text_of(), "lm.par")).diagnostics[0]
    assert (first.code, first.span.text) == ("E0702", "dot(h, wv, over = embed)"), first.render()
