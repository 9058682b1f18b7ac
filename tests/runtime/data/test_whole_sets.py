"""Evaluation of a whole set is exactly that: its mean, also where the last batch is not full, under any layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from partita.dsl.diagnostic import Refused
from partita.runtime.data.binding import bind
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.files import checked

MODEL = """axis batch = 4, seq = 8, vocab = 256, embed = 8, positions = batch * seq
model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(0.5)
  let x = embedding(tokens, table, over = vocab)
  repeat 2 as layer {
    param w: [embed] ~ normal(1.0)
    let x = x + tanh(x * w)
  }
  let logits = dot(x, table, over = embed)
  loss cross_entropy(logits, targets, over = vocab IGNORE)
  metric perplexity = exp(cross_entropy(logits, targets, over = vocab IGNORE))
  metric right = accuracy(logits, targets, over = vocab IGNORE)
  let flat = tanh(merge(x, [batch, seq] -> positions))                       # what is made of the batch grows with it
  metric flat = sqrt(mean(flat * flat))
  metric apart = mean(max(split(flat, positions -> [batch, seq]), over = [seq, embed]))
  metric largest = max(x, over = [batch, seq, embed])
  metric below = max(0.0 - 1.0 - x * x, over = [batch, seq, embed])
  metric spread = sqrt(mean(x * x))
  metric size = sum(x * 0.0 + 1.0)
  metric ids = sum(targets)
  metric half = cast(sum(targets), f64) / 2
  metric found = sum(embedding(cast(cast(tokens, f64), i64), table, over = vocab))   # ids that are counted
  MORE
}
mesh laptop(data = 2, pipe = 2)
mesh alone(data = 1)
layout plain on alone { }
layout split on laptop { shard batch -> data   shard vocab -> data   stage layer -> pipe }
schedule s = one_f_one_b(microbatches = PARTS)
train {
  layout = LAYOUT
  data = text("train.txt", holdout = 10%)
  optimizer = sgd(lr = 0.1)
  steps = 2
  precision = f64
  eval = every(1, EVAL)
}
"""
LAYOUTS = ("plain", "split")


def text(eval: str, layout: str = "plain", ignore: str = "", more: str = "") -> str:
    found = MODEL.replace("EVAL", eval).replace("LAYOUT", layout)
    # What needs a whole batch cannot be split.
    return found.replace("IGNORE", ignore).replace("MORE", more).replace("PARTS", "1" if "softmax" in more else "2")


def fill(root: Path, length: int) -> bytes:
    (root / "train.txt").write_text("some text to train on, long enough. " * 40)
    held = (b"a text that is evaluated, of which no two windows are alike: 0123456789 " * 9)[:length]
    (root / "valid.txt").write_bytes(held)
    return held


def evaluated(root: Path, written: str) -> tuple[float, dict[str, float], list[str]]:
    """Loss and metrics of the evaluation after two steps, as a run reports it, and the codes of its doubts."""
    plan = prepare(checked(written, "m.par"))
    data = bind(plan.program, plan.train, root)
    plan = plan.evaluating(data.rows)
    told: list[tuple[float, dict[str, float]]] = []

    class Observer:
        def resumed(self, found: object) -> None: ...
        def step(self, result: object) -> None: ...
        def slow(self, step: int, ranks: object) -> None: ...
        def evaluation(self, step: int, loss: float, metrics: dict[str, float]) -> None:
            told.append((loss, dict(metrics)))

    VirtualRun(plan).train(data.dataset, [Observer()])  # type: ignore[list-item]
    return (*told[-1], [each.code for each in data.warnings])


def of_one_batch(root: Path, written: str, rows: int) -> tuple[float, dict[str, float]]:
    """The same of a model whose batch has all rows, with the parameters that the run has in the end."""
    plan = prepare(checked(written, "m.par"))
    data = bind(plan.program, plan.train, root)
    run = VirtualRun(plan.evaluating(data.rows))
    run.train(data.dataset)
    alone = ("layout=plain", f"batch={rows}", "schedule.microbatches=1")
    other = prepare(checked(written, "m.par", (*alone, "train.eval.batches=1")))
    whole = VirtualRun(other)
    whole.set_parameters(run.parameters())
    assert data.dataset is not None
    batch = whole.ranks[0].tensors(data.dataset.held_out_rows(range(rows)))
    loss, metrics, _ = whole.evaluate(batch)
    return loss, metrics


@pytest.mark.few(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 11])
def test_a_whole_set_is_one_batch(layout: str, rows: int, tmp_path: Path):
    fill(tmp_path, 8 * rows + 1)
    written = text('data = text("valid.txt"), batches = all', layout)
    loss, metrics, warnings = evaluated(tmp_path, written)
    expected, others = of_one_batch(tmp_path, written, rows)
    assert loss == pytest.approx(expected, rel=1e-10)
    assert metrics == pytest.approx(others, rel=1e-10)
    assert metrics["size"] == pytest.approx(rows * 8 * 8)
    assert warnings == []


@pytest.mark.parametrize("rows", [3, 7])
def test_terms_without_the_batch_count_once(rows: int, tmp_path: Path):
    fill(tmp_path, 8 * rows + 1)
    written = text('data = text("valid.txt"), batches = all').replace(
        "  loss cross_entropy(logits, targets, over = vocab )",
        "  loss 0.5 * sum(table * table) + cross_entropy(logits, targets, over = vocab)",
    )
    assert "0.5 * sum" in written
    loss, metrics, _ = evaluated(tmp_path, written)
    expected, others = of_one_batch(tmp_path, written, rows)
    assert (loss, metrics) == (pytest.approx(expected, rel=1e-10), pytest.approx(others, rel=1e-10))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_row_may_end_early_if_targets_can_be_ignored(layout: str, tmp_path: Path):
    held = fill(tmp_path, 8 * 5 + 4)  # 43 targets: five rows, and three of a sixth
    loss, _, warnings = evaluated(tmp_path, text('data = text("valid.txt"), batches = all', layout, ", ignore = -1"))
    assert warnings == []
    # The mean over each target alone: in rows of one id, as the model sees no other position.
    ids = np.frombuffer(held, np.uint8).astype(int)
    np.savez(tmp_path / "pairs.npz", tokens=ids[:-1, None], targets=ids[1:, None])
    single = text('data = arrays("pairs.npz"), batches = all', layout, ", ignore = -1")
    plan = prepare(checked(single, "m.par", ("seq=1",)))
    run = VirtualRun(plan.evaluating(43))
    trained = VirtualRun(prepare(checked(text("batches = 1", layout, ", ignore = -1"), "m.par")))
    data = bind(trained.plan.program, trained.plan.train, tmp_path)
    trained.train(data.dataset)
    run.set_parameters(trained.parameters())
    pairs = bind(plan.program, plan.train, tmp_path)
    assert pairs.rows == 43
    assert pairs.dataset is not None
    order = run.plan.evaluated
    assert order == [11, *range(11)]
    found, _, _ = run.evaluate(*(run.ranks[0].tensors(pairs.dataset.holdout_batch(i)) for i in order))
    assert loss == pytest.approx(found, rel=1e-10)


@pytest.mark.soak
def test_without_that_what_is_left_out_is_said(tmp_path: Path):
    fill(tmp_path, 8 * 5 + 4)
    written = text('data = text("valid.txt"), batches = all')
    loss, metrics, warnings = evaluated(tmp_path, written)
    assert warnings == ["W0605"]
    expected, others = of_one_batch(tmp_path, written, 5)
    assert (loss, metrics) == (pytest.approx(expected), pytest.approx(others))


@pytest.mark.soak
def test_a_holdout_can_be_evaluated_as_a_whole(tmp_path: Path):
    fill(tmp_path, 100)
    written = text("batches = all")
    loss, _, warnings = evaluated(tmp_path, written)
    rows = (round(36 * 40 * 0.1) - 1) // 8
    assert warnings == ["W0605"]
    assert loss == pytest.approx(of_one_batch(tmp_path, written, rows)[0], rel=1e-10)


@pytest.mark.soak
def test_some_batches_of_a_set_of_its_own(tmp_path: Path):
    fill(tmp_path, 500)
    loss, _, _ = evaluated(tmp_path, text('data = text("valid.txt"), batches = 3'))
    same, _, _ = evaluated(tmp_path, text('data = text("valid.txt"), batches = 3', "split"))
    other, _, _ = evaluated(tmp_path, text("batches = 3"))
    assert loss == pytest.approx(same, rel=1e-10)
    assert loss != other


@pytest.mark.soak
def test_packed_rows_are_weighed_by_their_targets(tmp_path: Path):
    fill(tmp_path, 100)
    documents = ["a" * 3, "bcdefg", "hi", "jklmnopqrst", "uv", "wxyz0"]
    (tmp_path / "valid.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    packed = 'data = jsonl("valid.jsonl", pack = PACK), batches = all'
    losses = [
        evaluated(tmp_path, text(packed.replace("PACK", "true"), layout, ", ignore = -1"))[0] for layout in LAYOUTS
    ]
    pairs = [pair for each in documents for pair in zip(each.encode(), each.encode()[1:], strict=False)]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps({"text": chr(a) + chr(b)}) + "\n" for a, b in pairs))
    one = evaluated(tmp_path, text('data = jsonl("one.jsonl", pack = true), batches = all', ignore=", ignore = -1"))[0]
    assert losses == pytest.approx([one, one], rel=1e-10)


WRONG = {
    "no end": ('data = random(), batches = all', "", 'this data has no end', "E0608", "random()"),
    "a holdout": (
        'data = text("valid.txt", holdout = 10%)', "", "and has no `holdout`", "E0608",
        'text("valid.txt", holdout = 10%)'
    ),
    "no file": ('data = text("none.txt")', "", "no file matches `none.txt`", "E0601", 'text("none.txt")'),
    "too short": ('data = text("short.txt")', "", "`short.txt` is too short: 3 ids", "E0604", 'text("short.txt")'),
    "a row's place": (
        'data = text("valid.txt"), batches = all',
        "metric n = sum(cast(iota(batch), f32) * mean(x, over = [seq, embed]))",
        "the evaluation set has 3 rows, and this model needs full batches of 4", "E0623", None,
    ),
    "a sample": (
        'data = text("valid.txt"), batches = all',
        "sample noise: [batch] ~ normal(1.0)  metric n = sum(noise * mean(x, over = [seq, embed]))",
        "the evaluation set has 3 rows, and this model needs full batches of 4", "E0623", None,
    ),
    "a whole batch": (
        'data = text("valid.txt"), batches = all',
        "metric n = max(softmax(mean(x, over = [seq, embed]), over = batch))",
        "the evaluation set has 3 rows, and this model needs full batches of 4", "E0623", None,
    ),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("name", sorted(WRONG))
def test_what_cannot_be_evaluated_is_refused(name: str, tmp_path: Path):
    eval, more, message, code, place = WRONG[name]
    fill(tmp_path, 25)
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(Refused) as caught:
        evaluated(tmp_path, text(eval, more=more))
    found = caught.value.diagnostics[0]
    assert (found.code, message in found.message) == (code, True), found.render()
    if place is not None:
        assert found.span is not None
        assert found.span.text == place
    if code == "E0623":  # what needs full batches can be had where they are
        assert found.help == "`batch = 3`, which divides the set"
        assert "m.par:" in found.notes[0], "where in the model"
        evaluated(tmp_path, text("batches = 2", more=more))
        fill(tmp_path, 33)
        evaluated(tmp_path, text(eval, more=more))


def test_wrong_settings_of_an_evaluation():
    for eval, code, place in (
        ("batches = some", "E0306", "some"),
        ("batches = 0", "E0308", "0"),
        ('batches = "all"', "E0306", '"all"'),
        ('data = "valid.txt"', "E0306", '"valid.txt"'),
        ("data = texts()", "E0309", "texts"),
    ):
        with pytest.raises(Refused) as caught:
            checked(text(eval), "m.par")
        (found,) = [each for each in caught.value.diagnostics if each.severity == "error"]
        assert (found.code, found.span.text if found.span else None) == (code, place), found.render()
