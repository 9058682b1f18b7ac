"""`python`: rows of a function, by its own numbers; and what is wrong with them, named by the call that made them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from partita.cli.main import main
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load, spec_of
from partita.runtime.data.binding import bind
from partita.runtime.data.dataset import Dataset
from partita.runtime.rank import prepare

FILE = """axis batch = 4, wide = 3, vocab = 50
model m(x: [batch, wide], id: i64[batch]) {
  param table: [vocab, wide] ~ normal(1.0)
  loss mean(dot(x, embedding(id, table, over = vocab), over = wide))
}
train { data = DATA  optimizer = sgd(lr = 0.1)  steps = 2  EVAL }
"""
CODE = """import numpy
def row(seed, number):
    return {"x": numpy.full(3, seed % 1000 + number / 1000, numpy.float32), "id": number, "unused": "text"}
"""


def opened(folder: Path, data: str = 'python("source.py:row")', code: str = CODE, eval: str = "") -> Dataset:
    (folder / "source.py").write_text(code)
    (folder / "m.par").write_text(FILE.replace("DATA", data).replace("EVAL", eval))
    plan = prepare(spec_of(load(folder / "m.par")))
    dataset = bind(plan.program, plan.train, folder, allow_python=True).dataset
    assert dataset is not None
    return dataset


def test_rows_without_end_are_functions_of_the_seed_and_their_number(tmp_path: Path):
    data = opened(tmp_path, eval="seed = 7")
    batch = data.batch(3)
    assert batch["id"].tolist() == [8, 9, 10, 11]
    assert np.array_equal(batch["x"], np.float32(7 + np.arange(8, 12)[:, None] / 1000).repeat(3, 1))
    assert batch["x"].dtype == np.float32
    assert np.array_equal(data.batch(3, range(1, 3))["id"], [9, 10])


def test_each_epoch_has_all_rows_in_an_order_and_with_a_seed_of_its_own(tmp_path: Path):
    data = opened(tmp_path, 'python("source.py:row", rows = 20, holdout = 20%)', eval="eval = every(1, batches = all)")
    epochs = [[data.batch(4 * epoch + step) for step in range(1, 5)] for epoch in range(2)]
    first, second = (np.concatenate([batch["id"] for batch in each]) for each in epochs)
    assert sorted(first) == sorted(second) == [*range(16)]
    assert first.tolist() != second.tolist()
    seeds = [
        np.concatenate([batch["x"][:, 0] for batch in each]) - ids / 1000
        for each, ids in zip(epochs, (first, second), strict=True)
    ]
    assert [len(set(each.round(2))) for each in seeds] == [1, 1]
    assert abs(seeds[0][0] - seeds[1][0]) > 0.5
    assert data.holdout_batch(0)["id"].tolist() == [16, 17, 18, 19]
    assert data.row_names(1)[0] == f"row {first[0]}"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("return 3", "E0622", "`row(0, 0)` is `int`, not a dictionary"),
        ("return {'x': [0.0] * 3}", "E0622", "`row(0, 0)` has no `id`"),
        ("return {'x': [0.0] * 2, 'id': 1}", "E0622", "`x` of `row(0, 0)` is float64[2], and the model wants f32[3]"),
        ("return {'x': [1, 2, 3], 'id': 1}", "E0622", "`x` of `row(0, 0)` is int64[3], and the model wants f32[3]"),
        ("return {'x': [0.0] * 3, 'id': 50}", "E0605", "`id` of `row(0, 0)` has the id 50, which is out of range"),
        ("return {'x': [[0.0], 1], 'id': 1}", "E0622", "`row` raised ValueError"),
        ("return 1 / number", "E0622", "`row` raised ZeroDivisionError"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(body: str, code: str, words: str, tmp_path: Path):
    data = opened(tmp_path, code=f"def row(seed, number):\n    {body}\n")
    with pytest.raises(Refused) as refused:
        data.batch(1)
    assert [each.code for each in refused.value.diagnostics] == [code]
    assert words in refused.value.diagnostics[0].message


@pytest.mark.parametrize(
    ("data", "eval", "code", "words"),
    [
        ('python("source.py")', "", "E0306", "`function` is a Python file and the name of a function in it"),
        ('python("source.py:if")', "", "E0306", "`if` is not the name of a Python function"),
        ('python("source.py:rows")', "", "E0330", "`source.py` has no `rows`"),
        (
            'python("source.py:row", holdout = 5%)',
            "eval = every(1)",
            "E0608",
            "of rows without end nothing is held out",
        ),
        ('python("source.py:row", rows = 4)', "eval = every(1)", "E0608", "there is no `holdout`"),
        ('python("source.py:row", rows = 4, holdout = 5%)', "eval = every(1)", "E0604", "less than one of the 4 rows"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(data: str, eval: str, code: str, words: str, tmp_path: Path):
    with pytest.raises(Refused) as refused:
        opened(tmp_path, data, eval=eval)
    assert [each.code for each in refused.value.diagnostics] == [code]
    assert words in refused.value.diagnostics[0].message


def test_nothing_of_it_runs_unless_it_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "source.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{CODE}")
    for data in ('python("source.py:row", rows = 9)', 'mix([python("source.py:row") -> 1, random() -> 1])'):
        (tmp_path / "m.par").write_text(FILE.replace("DATA", data).replace("EVAL", ""))
        for command in ("data", "run"):
            options = ["--transport", "virtual", "--run-dir", str(tmp_path / "run")] if command == "run" else []
            assert main([command, str(tmp_path / "m.par"), *options]) == 1
            assert "error[E0620]: data by `row` runs Python code from" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert main(["data", str(tmp_path / "m.par"), "--allow-python"]) == 0
    assert (tmp_path / "ran").exists()
