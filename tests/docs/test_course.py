"""The course as somebody takes it: every notebook runs in a real kernel; an exercise is unsolved as it stands, and
solved with the solution that is folded below it.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.files import ROOT

COURSE = ROOT / "docs" / "course"
NOTEBOOKS = sorted(COURSE.glob("*.ipynb"))
SOLUTION = re.compile(r"<details>.*?\n```\n(.*?)\n```", re.DOTALL)
QUICK = "01_one_rank"


def run(path: Path, solved: bool) -> list[str]:
    """What the cells of a notebook print, as it stands or with its solutions. Fails with what a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    if solved:
        for i, cell in enumerate(notebook.cells):
            if found := SOLUTION.search(cell.source):
                first = notebook.cells[i - 2].source.partition("\n")[0]
                assert first.startswith("%%writefile "), first
                notebook.cells[i - 2].source = f"{first}\n{found[1]}"
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": COURSE}}).execute()
    outputs = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    return [line for each in outputs for line in each.get("text", "").splitlines()]


@pytest.mark.parametrize("solved", [False, True], ids=["as-it-stands", "solved"])
@pytest.mark.parametrize(
    "path", [pytest.param(each, marks=[pytest.mark.soak] * (each.stem != QUICK), id=each.stem) for each in NOTEBOOKS]
)
def test_exercises_are_graded(path: Path, solved: bool) -> None:
    graded = [line for line in run(path, solved) if line.startswith(("not yet: ", "solved"))]
    assert len(graded) == 1
    assert (graded[0] == "solved") == solved, graded


def test_there_are_eight_and_none_has_outputs() -> None:
    assert len(NOTEBOOKS) == 8
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        assert not [cell for cell in notebook.cells if cell.get("outputs")], path
