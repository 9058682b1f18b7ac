"""`partita predict` and `partita evaluate` as a user calls them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import partita
from partita.runtime.inference.archive import write_archive
from tests.commands import here
from tests.servers import http

TEXT = """
axis batch = 4, pixels = 3, hidden = 5, classes = 2
model m(x: [batch, pixels], y: i64[batch]) {
  param w: [pixels, hidden] ~ kaiming()
  param v: [classes, hidden] ~ kaiming()
  let h = relu(dot(x, w, over = pixels))
  let logits = dot(h, v, over = hidden)
  loss cross_entropy(logits, y, over = classes)
  metric accuracy = accuracy(logits, y, over = classes)
  output logits = logits
  output hidden = h
  output most = max(logits, over = [batch, classes])
}
mesh pair(data = 2)
layout cut on pair { shard batch -> data }
train {
  data = arrays("all.npz", holdout = 30%) optimizer = sgd(lr = 0.1) steps = 2
  checkpoint = every(1) eval = every(2, batches = 1)
}
"""
ROWS, HELD_OUT = 30, 9


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file, its data, and the run that has trained it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "m.par").write_text(TEXT)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 3)).astype(np.float32)
    np.savez(folder / "all.npz", x=x, y=(x.sum(1) > 0).astype(np.int64))
    np.savez(folder / "inputs.npz", x=x)
    np.savez(folder / "narrow.npz", x=x[:, :2], y=np.zeros(ROWS, np.int64))
    np.savez(folder / "no_items.npz", x=x[:0], y=np.zeros(0, np.int64))
    np.savez(folder / "wrong.npz", x=x, y=np.full(ROWS, 2))
    np.savez(folder / "negative.npz", x=x, y=np.full(ROWS, -2))
    np.savez(folder / "integers.npz", x=x.astype(np.int64))
    np.savez(folder / "uneven.npz", x=x, y=np.zeros(ROWS - 1, np.int64))
    (folder / "empty.npz").touch()
    partita.train(folder / "m.par", run_dir=folder / "runs" / "m")
    return folder


def test_numbers_in_the_layout_of_the_file_are_those_of_one_process(trained: Path) -> None:
    """Rows are split over two ranks, which have neither gradients nor states of the optimizer."""
    found = []
    for transport in ((), ("--transport", "virtual")):
        done = here("evaluate", "m.par", "--run-dir", "runs/m", "--json", *transport, cwd=trained)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["numbers"])
        asked = ("-o", "split.npz", "--outputs", "logits,hidden", "--from", "runs/m", "--data", "inputs.npz")
        done = here("predict", "m.par", *asked, *transport, cwd=trained)
        assert done.returncode == 0, done.stderr
        with np.load(trained / "split.npz") as arrays:
            found.append({name: arrays[name].sum() for name in arrays.files})
    assert found[2] == pytest.approx(found[0], rel=1e-6)
    assert found[3] == pytest.approx(found[1], rel=1e-5)


def expected(trained: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of all rows, and their labels."""
    weights = partita.load_model(trained / "m.par", names=["logits"], run=trained / "runs" / "m").parameters
    with np.load(trained / "all.npz") as data:
        x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    return (x @ weights["m.w"]).relu() @ weights["m.v"].T, y


def test_outputs_of_all_rows_are_written(trained: Path) -> None:
    """Also of data that only has the inputs that they need, with a last batch that is not full."""
    command = ("predict", "m.par", "--data", "inputs.npz", "-o", "out.npz", "--outputs", "logits,hidden")
    done = here(*command, cwd=trained)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out.npz: logits [30, 2], hidden [30, 5], from runs/m/checkpoints/step-00000002")
    logits, _ = expected(trained)
    with np.load(trained / "out.npz") as found:
        assert sorted(found) == ["hidden", "logits"]
        torch.testing.assert_close(torch.from_numpy(found["logits"]), logits)


def test_without_data_rows_are_those_held_out(trained: Path) -> None:
    done = here("predict", "m.par", "-o", "held.npz", "--outputs", "logits", cwd=trained)
    assert done.returncode == 0, done.stderr
    with np.load(trained / "held.npz") as found:
        torch.testing.assert_close(torch.from_numpy(found["logits"]), expected(trained)[0][-HELD_OUT:])


@pytest.mark.parametrize(("data", "rows"), [((), HELD_OUT), (("--data", "all.npz"), ROWS)])
def test_an_evaluation_is_the_mean_of_the_whole_set(data: tuple[str, ...], rows: int, trained: Path) -> None:
    done = here("evaluate", "m.par", *data, "--json", cwd=trained)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    logits, labels = (each[-rows:] for each in expected(trained))
    assert found["rows"] == rows
    loss = torch.nn.functional.cross_entropy(logits, labels)
    right = (logits.argmax(1) == labels).float().mean()
    assert found["numbers"] == pytest.approx({"loss": float(loss), "accuracy": float(right)}, rel=1e-5)
    shown = here("evaluate", "m.par", *data, cwd=trained).stdout
    assert shown.startswith(f"loss {float(loss):.5g}"[:10])
    assert f"({rows} rows, runs/m/checkpoints/step-00000002)" in shown


@pytest.mark.soak
def test_data_may_be_at_an_address(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))
    with http(trained) as url:
        done = here("evaluate", "m.par", "--data", f"{url}/all.npz", cwd=trained)
        gone = here("evaluate", "m.par", "--data", f"{url}/gone.npz", cwd=trained)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == here("evaluate", "m.par", "--data", "all.npz", cwd=trained).stdout
    assert (gone.returncode, f"E0601]: nothing is at `{url}/gone.npz`" in gone.stderr) == (1, True)


def test_data_that_the_user_names_may_lie_anywhere(trained: Path, tmp_path: Path) -> None:
    """As a file, or by a pattern: only what a file names has to lie in its directory."""
    shutil.copy(trained / "all.npz", tmp_path / "other[1].npz")
    expected = here("evaluate", "m.par", "--data", "all.npz", cwd=trained).stdout
    for place in (tmp_path / "other[1].npz", f"../{trained.name}/al?.npz"):
        assert here("evaluate", "m.par", "--data", str(place), cwd=trained).stdout == expected


def test_what_is_not_finite_is_null_in_json(trained: Path) -> None:
    np.savez(trained / "nan.npz", x=np.full((3, 3), np.nan), y=np.zeros(3, np.int64))
    done = here("evaluate", "m.par", "--data", "nan.npz", "--json", cwd=trained)
    assert json.loads(done.stdout, parse_constant=pytest.fail)["numbers"]["loss"] is None


@pytest.mark.parametrize("name", ["file", "allow_pickle"])
def test_an_output_may_have_any_name(name: str, tmp_path: Path) -> None:
    write_archive(tmp_path / "out.npz", {name: torch.arange(3)})
    with np.load(tmp_path / "out.npz") as found:
        assert found[name].tolist() == [0, 1, 2]


OUT = ("-o", "none.npz")
WRONG = {
    "E0807 there is no checkpoint in nowhere": ("predict", *OUT, "--outputs", "logits", "--from", "nowhere"),
    "E0804 is of another model": ("predict", *OUT, "--outputs", "logits", "hidden=6"),
    "E0302 has no output `logit`": ("predict", *OUT, "--outputs", "logit"),
    "E1004 output most": ("predict", *OUT),
    "E0601 there is no file `gone.npz`": ("predict", *OUT, "--outputs", "logits", "--data", "gone.npz"),
    "E0607 shape [30, 2]": ("predict", *OUT, "--outputs", "logits", "--data", "narrow.npz"),
    "E0606 has no array called `y`": ("evaluate", "--data", "inputs.npz"),
    "E0605 out of range for `y`": ("evaluate", "--data", "wrong.npz"),
    "E0605 ids must not be negative": ("evaluate", "--data", "negative.npz"),
    "E0607 holds int64": ("predict", *OUT, "--outputs", "logits", "--data", "integers.npz"),
    "E0607 different numbers of items": ("evaluate", "--data", "uneven.npz"),
    "E0603 `empty.npz` is not a numpy archive": ("evaluate", "--data", "empty.npz"),
    "E0603 is not a numpy archive": ("evaluate", "--data", "m.par"),
    "E0608 no other is named": ("evaluate", 'train.data=arrays("all.npz")', "train.eval=none"),
    "E0604 has no items": ("predict", *OUT, "--outputs", "logits", "--data", "no_items.npz"),
    "E0608 is held out of this data": ("predict", *OUT, "--outputs", "logits", "train.data=random()"),
    "E0816 has no mean": ("evaluate", "--weights", "ema"),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("expected", WRONG)
def test_wrong_input_is_said(expected: str, trained: Path) -> None:
    command, *arguments = WRONG[expected]
    done = here(command, "m.par", *arguments, cwd=trained)
    code, _, message = expected.partition(" ")
    assert done.returncode == 1
    assert f"error[{code}]" in done.stderr
    assert message in done.stderr
    assert "help: " in done.stderr
    assert not (trained / "none.npz").exists()


OF_FLOATS = """
axis batch = 4, vocab = 5, embed = 3
model m(x: [batch], y: [batch]) {
  param table: [vocab, embed] ~ normal(1.0)
  let e = embedding(cast(x, i64), table, over = vocab)
  loss mse(mean(e, over = embed), y)
  output e = e
}
train { data = arrays("all.npz", holdout = 20%) optimizer = sgd(lr = 0.1) steps = 1 checkpoint = every(1) }
"""


def test_ids_that_are_made_of_floats_are_checked_where_they_are_used(tmp_path: Path) -> None:
    (tmp_path / "m.par").write_text(OF_FLOATS)
    x = np.arange(19, dtype=np.float32) % 5
    for name, values in {"all": x, "large": x + 3, "negative": x - 3, "nan": x * np.nan}.items():
        np.savez(tmp_path / f"{name}.npz", x=values, y=x)
    partita.train(tmp_path / "m.par", run_dir=tmp_path / "runs" / "m")
    for command in (("predict", *OUT), ("evaluate",)):
        command, *arguments = command
        good = here(command, "m.par", *arguments, "--data", "all.npz", cwd=tmp_path)
        assert (good.returncode, good.stderr) == (0, ""), "the last batch is not full"
        for name in ("large", "negative", "nan"):
            done = here(command, "m.par", *arguments, "--data", f"{name}.npz", cwd=tmp_path)
            assert done.returncode == 1
            assert "of the ids computed here are out of range for `vocab`" in done.stderr
            assert "--> m.par:5:11" in done.stderr
            assert "help: keep them there" in done.stderr


def test_a_place_that_cannot_be_written_is_status_2(trained: Path) -> None:
    done = here("predict", "m.par", "--outputs", "logits", "-o", "gone/out.npz", cwd=trained)
    assert done.returncode == 2
    assert "partita: cannot write gone/out.npz" in done.stderr
    done = here("predict", "m.par", "--outputs", "logits", "-o", "runs", cwd=trained)
    assert done.returncode == 2


@pytest.mark.parametrize(
    "command",
    [["predict", "m.par", "--outputs", "logits", "-o", "m.par"], ["checkpoint", "export", "runs/m", "-o", "m.par"]],
    ids=" ".join,
)
def test_what_is_of_another_kind_is_not_written_over(command: list[str], trained: Path) -> None:
    before = (trained / "m.par").read_bytes()
    done = here(*command, cwd=trained)
    assert done.returncode == 2
    assert "m.par: it is a file of another kind; name a new one, or remove it" in done.stderr
    assert (trained / "m.par").read_bytes() == before


def test_a_run_has_a_directory_and_no_file(trained: Path) -> None:
    done = here("run", "m.par", "--run-dir", "m.par", cwd=trained)
    assert done.returncode == 2
    assert "partita: cannot write to m.par: there is a file of that name" in done.stderr
