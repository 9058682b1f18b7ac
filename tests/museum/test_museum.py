"""Mistakes that others reported: each file of this folder has the situation of some report, and its number comes from a
script that uses nothing of Partita (`exhibits.py`). The page that tells of them is `docs/museum.md`.
"""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from partita.dsl.diagnostic import Refused
from partita.runtime.data.binding import bind
from partita.runtime.rank import CompiledRun, prepare
from tests.files import ROOT, checked
from tests.marks import soak
from tests.museum import exhibits
from tests.museum.numbers import Numbers
from tests.planted.lists import SUBJECTS
from tests.runtime.checkpoint.runs import Outcome, trained, without_checkpoints

FOLDER = Path(__file__).parent
# A file, what its run is given otherwise, and the script that has its number, if that has another name.
QUICK = (
    "tied_embedding",
    "final_norm",
    "shared_norm",
    "few_kv_heads",
    "twice",
    "twice layout=zero3",
    "twice layout=again",
    "twice layout=host",
    "twice ranks.data=1",
    "long_context",
    "sliced_loss",
    "sliced_loss layout=gathered schedule=parts",
    "unequal_tokens",
    "unequal_tokens layout=stages ranks.data=1 ranks.pipe=2",
    "microbatches",
    "microbatches parts.microbatches=2",
    "microbatches schedule=whole",
    "packed",
    "whole_evaluation",
    "whole_evaluation layout=context",
    "global_norm",
    "global_norm layout=plain",
    "experts",
    "experts layout=each",
    "expert_bias",
    "batch_balance",
    "decay",
    "decay train.optimizer=mixed",
    "bad_rank",
    "dropout",
    "initial",
    "few_rows",
)
LONGER = (
    "final_norm layout=stored",
    "shared_norm layout=both",
    "few_kv_heads layout=stored",
    "long_context layout=gathered",
    "long_context layout=exchanged",
    "microbatches schedule=bubbles",
    "packed layout=rows",
    "experts layout=copies",
    "dropout layout=plain",
)
SCRIPTS = {"initial": exhibits.initial_values, "decay train.optimizer=mixed": exhibits.mixed_rules}


@cache
def expected(case: str) -> Numbers:
    name = case.split()[0]
    script = SCRIPTS.get(case) or SCRIPTS.get(name) or getattr(exhibits, name)
    found = script()
    assert isinstance(found, Numbers)
    return found


def plan_of(case: str) -> CompiledRun:
    name, *overrides = case.split()
    plan = prepare(checked((FOLDER / f"{name}.par").read_text(), f"{name}.par", overrides))
    return plan.evaluating(bind(plan.program, plan.train, FOLDER).rows)


def same(found: Outcome, numbers: Numbers, first: int = 1) -> None:
    steps = range(first, len(numbers.losses) + 1)
    assert list(found.steps) == list(steps)
    reported = torch.tensor([found.steps[step][:2] for step in steps], dtype=torch.float64)
    pairs = list(zip(numbers.losses, numbers.norms, strict=True))[first - 1 :]
    torch.testing.assert_close(
        reported, torch.tensor(pairs, dtype=torch.float64), rtol=1e-9, atol=1e-12, equal_nan=True
    )
    parameters = found.run.parameters()
    assert set(parameters) == set(numbers.parameters)
    for name, value in numbers.parameters.items():
        assert torch.allclose(parameters[name].double(), value, rtol=1e-8, atol=1e-11), name


@pytest.mark.parametrize("case", [*QUICK, *soak(*LONGER)])
def test_the_number_is_that_of_the_script(case: str):
    numbers = expected(case)
    found = trained(without_checkpoints(plan_of(case)), FOLDER)
    same(found, numbers)
    if numbers.evaluation is not None:
        assert list(found.evaluations.values()) == [pytest.approx(numbers.evaluation, rel=1e-12)]


def test_a_loss_that_microbatches_would_change_is_refused():
    with pytest.raises(Refused) as refused:
        plan_of("batch_balance parts.microbatches=4")
    assert [each.code for each in refused.value.diagnostics] == ["E0407"]


def test_a_ring_that_would_mix_documents_is_refused():
    text = (FOLDER / "packed.par").read_text().replace("by zigzag, gather", "by zigzag, ring")
    with pytest.raises(Refused) as refused:
        prepare(checked(text, "packed.par"))
    assert [each.code for each in refused.value.diagnostics] == ["E0419"]


@pytest.mark.parametrize("how", ["same", "layout", "torn"])
def test_an_interrupted_run_has_the_numbers_of_the_script(how: str, tmp_path: Path):
    """Interrupted in the second epoch, at step 5 of 8; checkpoints are of steps 2, 4 and 5. Of a torn
    file the end was not written: it has zeros there, as some filesystems leave behind."""
    shutil.copy(FOLDER / "resumed.npz", tmp_path)
    trained(plan_of("resumed train.steps=5"), tmp_path)
    first = 6
    if how == "torn":
        for file in (tmp_path / "checkpoints").glob("*5/**/*.safetensors"):
            file.write_bytes(file.read_bytes()[:-64] + bytes(64))
        first = 5
    other = "layout=other schedule=parts parts.microbatches=4 ranks.data=1" if how == "layout" else ""
    same(trained(plan_of(f"resumed {other}"), tmp_path), expected("resumed"), first)


@pytest.mark.parametrize("what", ["means", "half_precision"])
def test_what_half_precision_would_lose_is_kept(what: str):
    """By how much parameters, and their mean, have moved; each product alone is in half precision."""
    numbers = expected(what)
    run = trained(plan_of(what), FOLDER).run
    begun = exhibits.initial("m.w", *numbers.parameters["m.w"].shape, std=1.0)
    for found, right in ((run.parameters(), numbers.parameters), (run.means(), numbers.buffers)):
        for name, value in right.items():
            moved = (value - begun).norm()
            assert (found[name].double() - value).norm() < 0.02 * moved, (name, found[name].dtype)


def test_the_page_tells_of_every_file_and_every_mistake():
    page = (ROOT / "docs" / "museum.md").read_text()
    assert set(re.findall(r"museum/(\w+\.par)\)", page)) == {path.name for path in FOLDER.glob("*.par")}
    rows = [line.rpartition(" | ")[2] for line in page.splitlines() if line.startswith("| [")]
    told = [name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)]
    assert len(rows) >= 40
    assert set(told) == {planted.name for planted in SUBJECTS["museum"]}
