"""What a run writes after each evaluation: the same in any layout, when it resumes, and as `sample` would write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import partita
from partita.compiler.pipeline import scoring_of
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.runtime.inference import sampling
from tests.commands import computed, here
from tests.commands import partita as command
from tests.runtime.inference.test_layouts import TEXT as MODEL

TEXT = (
    MODEL.replace("BLOCK", "causal")
    .replace("RULES", "heads, vocab, seq")
    .replace("random()", 'text("all.txt", alphabet = chars, holdout = 20%)')
    .replace("vocab = 12", "vocab = 6")
    .replace(
        "steps = 1",
        'layout = own precision = f64 steps = 4 eval = every(2, batches = 1, sample = "ab") checkpoint = every(1)',
    )
)
LENGTH = 10
ALONE = ("layout=alone", "schedule=one_f_one_b(microbatches=1)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file and its text."""
    folder = tmp_path_factory.mktemp("samples")
    (folder / "m.par").write_text(f"{TEXT}\nmesh one(data = 1)\nlayout alone on one {{ shard batch -> data }}\n")
    (folder / "all.txt").write_text("abcdef" * 50 + "ace" * 30)
    return folder


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are short."""
    monkeypatch.setattr(sampling, "LENGTH", LENGTH)


def texts(records: list[dict[str, Any]]) -> dict[int, str]:
    """The samples of a run by step."""
    return {record["step"]: record["sample"] for record in records if "sample" in record}


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, str]:
    """The texts of a run on one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "LENGTH", LENGTH)
        return texts(partita.train(folder / "m.par", *ALONE, "train.checkpoint=none"))


@pytest.mark.soak
def test_the_text_is_the_same_in_every_layout(folder: Path, alone: dict[int, str]) -> None:
    """Sequence, tensor and data parallel with parameters split, on two stages of two chunks; and one device."""
    assert alone.keys() == {2, 4}
    for text in alone.values():
        assert text.startswith("ab")
        assert len(text) == 2 + LENGTH
        assert set(text) <= set("abcdef")
    assert alone[2][2:] != alone[4][2:]
    assert texts(partita.train(folder / "m.par", "train.checkpoint=none")) == alone


@pytest.mark.soak
def test_the_text_is_the_same_when_the_run_resumes(folder: Path, alone: dict[int, str]) -> None:
    """In another layout, and after evaluations at other steps."""
    partita.train(folder / "m.par", *ALONE, "train.steps=3", run_dir=folder / "runs" / "resumed")
    partita.train(folder / "m.par", "cluster.data=1", run_dir=folder / "runs" / "resumed")
    written = {each["step"]: each for each in computed(folder / "runs" / "resumed") if "sample" in each}
    assert written.keys() == {2, 3, 4}
    for step, text in alone.items():
        assert written[step] == {"step": step, "sample": text}


def test_the_mean_of_the_weights_writes_where_it_is_evaluated(folder: Path, alone: dict[int, str]) -> None:
    means = ("train.ema=0.9", "train.eval.weights=ema", "train.checkpoint=none")
    found = texts(partita.train(folder / "m.par", *means, "cluster.tensor=1"))
    assert found == texts(partita.train(folder / "m.par", *means, *ALONE))
    assert found[4] != alone[4]


def test_the_text_is_shown(folder: Path) -> None:
    done = here(
        "run", "m.par", *ALONE, "train.steps=1", "--transport", "virtual", "--run-dir", "runs/shown", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    (record,) = (each for each in computed(folder / "runs" / "shown") if "sample" in each)
    assert f"step 1/1  sample\n  {record['sample']}\n" in done.stdout


WRONG = {
    "E1002 the prompt has 'x', which is not in the text": ('train.eval.sample="axb"',),
    "E1002 the prompt has 9 tokens, and `seq` has 8": ('train.eval.sample="abcabcabc"',),
    "E1003 does not say how text becomes ids": ("train.data=random()", 'train.eval=every(2, sample = "ab")'),
    "E0302 model `other` has no output `logits`": ("model=other",),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("expected", WRONG)
def test_a_prompt_that_cannot_be_is_refused_before_the_run_at_its_place(expected: str, folder: Path) -> None:
    text = (folder / "m.par").read_text()
    other = text[text.index("model m(") : text.index("mesh cluster")].replace("model m(", "model other(")
    other = other.replace("output logits", "output others")
    (folder / "two.par").write_text(text.replace("train {", f"{other}\ntrain {{ model = m "))
    with pytest.raises(Refused) as refused:
        partita.train(folder / "two.par", *ALONE, *WRONG[expected])
    code, _, message = expected.partition(" ")
    (found,) = refused.value.diagnostics
    assert found.code == code
    assert message in found.message
    assert found.span is not None
    assert found.span.text in ('"ab"', '"axb"', '"abcabcabc"')


@pytest.mark.soak
def test_groups_that_train_apart_write_one_text(folder: Path) -> None:
    """Of a single row, of which no group has a part: while training, and of the file alone."""
    given = (*ALONE, "train.checkpoint=none", "train.sync=local(groups = 2, every = 2)")
    assert texts(partita.train(folder / "m.par", *given)).keys() == {2, 4}
    spec, _ = load(folder / "m.par", given)
    assert spec is not None
    assert scoring_of(spec).programs


def test_a_model_that_sees_what_follows_is_refused_before_the_first_step(folder: Path) -> None:
    text = (folder / "m.par").read_text().replace("causal = true", "causal = false")
    (folder / "ahead.par").write_text(text)
    with pytest.raises(Refused, match="the model sees what follows"):
        partita.train(folder / "ahead.par", "train.checkpoint=none")


@pytest.mark.soak
def test_processes_write_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While training, and afterwards with the checkpoint: on eight ranks that are processes, and in one."""
    done = command("run", "m.par", "--transport", "gloo", "--run-dir", "runs/gloo", cwd=folder)
    assert done.returncode == 0, done.stderr
    written = {each["step"]: each["sample"] for each in computed(folder / "runs" / "gloo") if "sample" in each}
    monkeypatch.undo()  # in processes texts are as long as ever
    assert written == texts(partita.train(folder / "m.par", *ALONE, "train.checkpoint=none"))
    asked = ("--from", "runs/gloo", "--prompt", "ab", "--length", "12", "--temperature", "0")
    one = command("sample", "m.par", *asked, cwd=folder)
    assert one.returncode == 0, one.stderr
    for transport in ("gloo", "virtual"):
        several = command("sample", "m.par", *asked, "--transport", transport, cwd=folder)
        assert several.returncode == 0, several.stderr
        assert several.stdout == one.stdout
    numbers = [
        command("evaluate", "m.par", "--from", "runs/gloo", *more, cwd=folder).stdout.split()[:2]
        for more in ((), ("--transport", "gloo"))
    ]
    assert numbers[0] == numbers[1]
    assert numbers[0][0] == "loss"
