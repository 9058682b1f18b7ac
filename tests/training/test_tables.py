"""Sparse parameters: gradients of tables stay rows, and an update touches no others; in exact arithmetic, and on every
split, that is what it was with all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, note
from hypothesis import strategies as st

from partita.compiler.graph import Phase, substitute
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.pipeline import compile_spec
from partita.compiler.verify.equivalence import validate
from partita.compiler.verify.proxy import single
from partita.dsl.diagnostic import Refused
from partita.dsl.spec import Spec
from partita.runtime.kernels import sparse as sparse_kernels
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.compiler.test_text import check_every_pass
from tests.files import checked
from tests.marks import examples

FILE = """\
axis batch = BATCH, words = 4, tables = 4, rows = ROWS, others = 8, embed = 4, hidden = 6, one = 1

model m(id: i64[batch, tables], bag: i64[batch, words], last: i64[batch], y: [batch]) {
  param table: [tables, rows, embed] ~ normal(0.5)
  param shared: [embed, others] ~ normal(0.5)
  param w: [embed, hidden] ~ normal(0.5)
  param v: [hidden] ~ normal(0.5)
  let a = sum(embedding(id, table, over = rows), over = tables)
  let b = mean(embedding(bag, shared, over = others), over = words) * embedding(last, shared, over = others)
  repeat 2 as layer {
    param u: [embed] ~ normal(0.5)
    let a = tanh(a * u)
  }
  loss mse(dot(tanh(dot(a + b, w, over = embed)), v, over = hidden), y)
}
MESH
schedule s = SCHEDULE
optimizer o {
  update m.table -> FIRST
  update m.shared -> SECOND
  update all -> sgd(lr = 0.1)
}
train {
  LAYOUT
  schedule = s
  data = random()
  optimizer = o
  precision = f64
  clip = 0.5
  steps = 3
}
"""
RATES = (0.1, 0.2, 0.3)
SAME = ("rowwise_adagrad(lr = 0.1)", "adagrad(lr = 0.1)", "sgd(lr = 0.1)")
LAZY = (
    "adamw(lr = 0.1, weight_decay = 0.1, sparse = true)",
    "sgd(lr = 0.1, momentum = 0.9, sparse = true)",
    "lion(lr = 0.1, sparse = true)",
    "rowwise_adagrad(lr = 0.1, weight_decay = 0.1, decay = all, sparse = true)",
)
RULES = (
    "shard batch -> x",
    "shard rows, others -> x",
    "shard batch, rows, others -> x",
    "shard batch, rows -> x shard others -> y",
    "shard batch -> x shard rows, others -> x, y",
    "shard batch, rows -> x shard embed -> y",
    "shard tables, words -> x shard batch, rows -> y",
    "shard batch -> x, y shard rows -> y shard others -> x",
    "shard batch, others -> y shard state -> x",
    "shard batch, rows, others -> x stage layer -> y",
    "shard rows -> x stage layer -> y offload state",
    "shard batch, rows -> x shard embed -> y offload param",
    "shard tables, words -> x shard batch, rows -> y offload m.table by mmap",
)


def text_of(
    rule: str | None = None,
    first: str = SAME[0],
    second: str = SAME[1],
    microbatches: int = 2,
    rows: int = 8,
    mesh: tuple[int, int] = (2, 2),
) -> str:
    words: Mapping[str, str] = {
        "BATCH": str(4 * microbatches),
        "ROWS": str(rows),
        "MESH": "" if rule is None else f"mesh c(x = {mesh[0]}, y = {mesh[1]})\nlayout l on c {{ {rule} }}",
        "LAYOUT": "" if rule is None else "layout = l",
        "SCHEDULE": f"one_f_one_b(microbatches = {microbatches})",
        "FIRST": first,
        "SECOND": second,
    }
    text = FILE
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def spec_of(rule: str | None, **more: object) -> Spec:
    if rule is not None and " y" not in rule and "x, y" not in rule:
        more["mesh"] = (2, 1)
    return checked(text_of(rule, **more), "tables.par")  # type: ignore[arg-type]


def batches(spec: Spec, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Random ones, in which many ids occur more than once, some in several microbatches."""
    generator = np.random.default_rng(3)
    sizes = {name: axis.size for name, axis in spec.axes.items()}
    return [
        {
            "id": torch.from_numpy(generator.integers(0, sizes["rows"], (sizes["batch"], 4))),
            "bag": torch.from_numpy(generator.integers(0, 6, (sizes["batch"], 4))),
            "last": torch.from_numpy(generator.integers(2, 4, (sizes["batch"],))),
            "y": torch.from_numpy(generator.normal(size=sizes["batch"])),
        }
        for _ in range(count)
    ]


def figures(spec: Spec) -> dict[str, torch.Tensor]:
    run = VirtualRun(prepare(spec))
    found = {}
    for i, batch in enumerate(batches(spec)):
        loss, norm = run.step(i + 1, batch, *RATES)
        found |= {f"loss {i}": torch.tensor(loss), f"norm {i}": torch.tensor(norm)}
        found |= {f"gradient of {name} {i}": each for name, each in run.gradients().items()}
    return found | run.parameters()


def sparse(spec: Spec) -> set[str]:
    return set(compile_spec(spec).tables.over)


def same(spec: Spec, reference: Spec) -> None:
    compare(spec, figures(reference))


def compare(spec: Spec, expected: dict[str, torch.Tensor]) -> None:
    for name, each in figures(spec).items():
        torch.testing.assert_close(each, expected[name], rtol=1e-10, atol=1e-12, msg=lambda text: f"{name}: {text}")  # noqa: B023


def dense(spec: Spec) -> Spec:
    """The file on one device, with all rows of gradients."""
    _, train = spec.trained
    return single(evolve(spec, train=evolve(train, dense=True)))


@cache
def of_all_rows() -> dict[str, torch.Tensor]:
    """What the file computes on one device, whatever splits it, with all rows of gradients."""
    spec = dense(spec_of(RULES[0]))
    assert not sparse(spec)
    return figures(spec)


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", RULES)
def test_on_every_split_rows_alone_make_the_update_of_all(rule: str):
    spec = spec_of(rule)
    state = compile_spec(spec)
    assert {*state.tables.over} == {"m.table", "m.shared"}
    assert validate(state).problems == ()
    compare(spec, of_all_rows())


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", [None, *RULES[:3]])
def test_with_bf16_rows_are_cast_after_they_are_looked_up(rule: str | None):
    """No copy of a table is made. What computes has few digits, of which the last may differ."""
    spec = spec_of(rule)
    _, train = spec.trained
    spec = evolve(spec, train=evolve(train, precision="bf16"))
    assert sparse(spec) == {"m.table", "m.shared"}
    casts = [node for node in compile_spec(spec).sharded.graph.nodes if node.op.name == "cast"]
    assert not [node for node in casts if node.inputs[0].name in ("m.table", "m.shared")]
    expected = figures(dense(spec))
    for name, each in figures(spec).items():
        torch.testing.assert_close(each, expected[name], rtol=0.05, atol=0.05, msg=lambda text: f"{name}: {text}")  # noqa: B023


@given(
    st.sampled_from(RULES),
    st.sampled_from((*SAME, *LAZY)),
    st.sampled_from((*SAME, *LAZY)),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((4, 8, 100)),
)
@examples(3, suppress_health_check=list(HealthCheck))
def test_a_split_changes_nothing(rule: str, first: str, second: str, microbatches: int, rows: int):
    """Not with optimizers that are told to leave other rows either: a split computes what one device does."""
    spec = spec_of(rule, first=first, second=second, microbatches=microbatches, rows=rows)
    note(text_of(rule, first, second, microbatches, rows))
    same(spec, single(spec))
    assert validate(compile_spec(spec)).problems == ()


def test_an_evaluation_reads_tables_as_training_stores_them():
    """What is updated by rows is not flat, even where no axis divides over `y`; and an evaluation has no gradients."""
    found = []
    for rule in ("shard batch -> x shard param -> x, y", None):
        text = text_of(rule, SAME[2], SAME[2], mesh=(2, 8)).replace(
            "steps = 3", "steps = 3  eval = every(1, batches = 1)"
        )
        spec = checked(text, "tables.par")
        plan = prepare(spec)
        assert plan.evaluation is not None
        assert validate(plan.evaluation, training=plan.training).passed
        untold = validate(compile_spec(spec, training=False), training=plan.training).problems
        assert [("stored as" in each.message) for each in untold] == ([True] if rule else [])
        found.append(VirtualRun(plan).evaluate(batches(spec, 1)[0]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", RULES)
def test_its_text_reads_back(rule: str):
    check_every_pass(spec_of(rule))


@pytest.mark.parametrize("optimizer", [*SAME, *LAZY])
def test_rows_that_are_not_looked_up_stay_as_they_are_to_the_bit(optimizer: str):
    """And so do their states; of those that are looked up, every row changes."""
    spec = spec_of("shard batch, rows -> x", first=optimizer, rows=100)
    run = VirtualRun(prepare(spec))
    batch, *_ = batches(spec)
    touched = torch.zeros(4, 100, dtype=torch.bool)
    for table in range(4):
        touched[table, batch["id"][:, table]] = True

    def kept() -> dict[str, torch.Tensor]:
        found = {"": run.parameters()["m.table"]}
        for rank in run.ranks:
            for (state, name), tensor in rank.memory.states.items():
                if name == "m.table":
                    found[f"{state} of {rank.rank}"] = tensor.clone()
        return found

    before = kept()
    run.step(1, batch, *RATES)
    for name, tensor in kept().items():
        changed = (tensor != before[name]).reshape(4, tensor.shape[1], -1).any(-1)
        rows = touched if not name else touched[:, 50 * int(name[-1]) : 50 * int(name[-1]) + 50]
        assert torch.equal(changed, rows), name


def test_a_lazy_update_is_that_of_the_rows_alone():
    """AdamW by its formula, of the rows of each step; corrections count steps."""
    first = "adamw(lr = 0.1, betas = [0.8, 0.95], eps = 0.01, weight_decay = 0.1, sparse = true)"
    spec = spec_of(None, first=first, rows=12)
    run = VirtualRun(prepare(spec))
    value, mean, square = run.parameters()["m.table"].clone(), torch.zeros(4, 12, 4), torch.zeros(4, 12, 4)
    mean, square = mean.double(), square.double()
    for i, batch in enumerate(batches(spec)):
        _, norm = run.step(i + 1, batch, *RATES)
        gradient = run.gradients()["m.table"] * min(1.0, 0.5 / (norm + 1e-6))
        for table in range(4):
            for row in set(batch["id"][:, table].tolist()):
                at = table, row
                mean[at] = 0.8 * mean[at] + 0.2 * gradient[at]
                square[at] = 0.95 * square[at] + 0.05 * gradient[at] ** 2
                root = (square[at] / (1 - 0.95 ** (i + 1))).sqrt() + 0.01
                value[at] -= 0.1 * (0.1 * value[at] + mean[at] / (1 - 0.8 ** (i + 1)) / root)
    torch.testing.assert_close(run.parameters()["m.table"], value, rtol=1e-10, atol=1e-12)


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", [rule for rule in RULES if "state" not in rule])
def test_nothing_but_tables_and_their_states_grows_with_their_rows(rule: str):
    """No tensor of a step is larger for a thousand times as many rows: neither in time nor in memory do they count."""

    def sizes(rows: int) -> list[tuple[str, str, int]]:
        state = compile_spec(spec_of(rule, rows=rows))
        nodes = [node for stage in state.partitioned.stages for node in stage.nodes]
        nodes += [node for _, own in state.update.reduce for node in own]
        nodes += [node for _, own in state.update.finish for node in own]
        nodes += [node for each in state.update.parameters for node in (*each.finish, *each.update)]
        made = [(n.op.name, v.name, v.type.elements) for n in nodes if not n.op.overwrites for v in n.outputs]
        sums = [(n.op.name, n.op.target, n.op.type.elements) for n in nodes if isinstance(n.op, Accumulate)]
        assert any(node.phase is Phase.UPDATE for node in nodes)
        return [*made, *sums]

    assert sizes(10_000) == sizes(10_000_000)


def test_an_update_of_other_rows_than_the_gradient_has_is_reported():
    """As if of two lookups in a table, the rows of the first were added at the ids of the second."""
    state = compile_spec(spec_of("shard batch, rows, others -> x"))
    shared = next(each for each in state.update.parameters if each.name == "m.shared")
    (merge,) = shared.finish
    first, second, *rows = merge.inputs
    wrong = evolve(shared, finish=(evolve(merge, inputs=(second, first, *rows)),))
    mapping = {shared.touched: first}
    other = evolve(shared, touched=first, update=tuple(substitute(node, mapping) for node in shared.update))
    for each in (wrong, other):
        parameters = tuple(each if own is shared else own for own in state.update.parameters)
        found = validate(evolve(state, update=evolve(state.update, parameters=parameters)), program=False)
        assert found.problems


ALL, EMA = "its optimizer updates all rows", "`ema` keeps a mean of all rows"
WRONG = [
    ("adamw(lr = 0.1)", "", ALL),
    ("adagrad(lr = 0.1, weight_decay = 0.1, decay = all)", "", ALL),
    ("rowwise_adagrad(lr = 0.1, weight_decay = 0.1, decay = all)", "", ALL),
    ("sgd(lr = 0.1, momentum = 0.9)", "", ALL),
    ("adagrad(lr = 0.1)", "ema = 0.9", EMA),
    ("adagrad(lr = 0.1)", "sum", "it is not only looked up in, along one axis"),
    ("adagrad(lr = 0.1, sparse = true)", "ema = 0.9", EMA),
    ("adamw(lr = 0.1, sparse = true)", "sum", "it is not only looked up in, along one axis"),
]


@pytest.mark.parametrize(("optimizer", "more", "why"), WRONG)
def test_what_cannot_be_sparse_says_why(optimizer: str, more: str, why: str):
    """Where the file does not ask for it, by the way; where it does, as an error."""
    text = text_of(None, first=optimizer)
    if more.startswith("ema"):
        text = text.replace("clip = 0.5", f"clip = 0.5 {more}")
    elif more:
        text = text.replace("loss mse", "loss mean(sum(sum(table, over = tables), over = embed)) + mse")
    if "sparse" not in optimizer:
        assert compile_spec(checked(text, "tables.par")).tables.dense["m.table"] == why
        return
    with pytest.raises(Refused) as refused:
        compile_spec(checked(text, "tables.par"))
    error, *_ = refused.value.diagnostics
    assert error.code == "E0416"
    assert error.message == f"the update of `m.table` cannot be sparse: {why}"


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", RULES[::2])
def test_gpus_which_go_through_entries_without_ids_make_the_same(rule: str, monkeypatch: pytest.MonkeyPatch):
    """To leave these out, the host would have to be told how many there are."""
    spec = spec_of(rule, first=LAZY[len(rule) % len(LAZY)], second=SAME[len(rule) % len(SAME)])
    expected = figures(spec)
    monkeypatch.setattr(sparse_kernels, "exact", lambda x: False)
    found = figures(spec)
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def test_rows_along_another_axis_than_the_optimizer_tells_apart_are_not_sparse():
    """The lookup that it goes by is the first, which nothing reads."""
    text = """axis batch = 4, seq = 3, rows = 5, slots = 2, embed = 6
model m(x: i64[batch, seq], y: i64[batch, seq]) {
  param t: [rows, slots, embed] ~ normal(0.5)
  let unused = embedding(x, t, over = rows)
  let used = gather(t, y, along = slots)
  loss mean(used * used)
}
train { data = random() optimizer = rowwise_adagrad(lr = 0.1) steps = 2 precision = f64 }
"""
    assert not prepare(checked(text, "m.par")).training.tables.over
