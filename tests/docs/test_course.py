"""The course as somebody takes it: every notebook runs in a real kernel, in long runs; an exercise is unsolved as it
stands, and solved with the solution that is folded below it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.files import ROOT

COURSE = ROOT / "docs" / "course"
NOTEBOOKS = sorted(COURSE.glob("*.ipynb"))
SOLUTION = re.compile(r"<details>.*?\n```\n(.*?)\n```", re.DOTALL)


def read(path: Path, solved: bool = False) -> dict[str, Any]:
    """A notebook, as it stands or with its solutions: each takes the place of the file two cells above."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cells = notebook["cells"]
    for cell in cells:
        cell["source"] = "".join(cell["source"])
    found = [(i, each) for i, cell in enumerate(cells) if (each := SOLUTION.search(cell["source"]))]
    for i, solution in found if solved else ():
        first = cells[i - 2]["source"].partition("\n")[0]
        cells[i - 2]["source"] = f"{first}\n{solution[1]}"
    return notebook


def run(path: Path, solved: bool) -> list[str]:
    """What the cells of a notebook print. Fails with what a cell raises."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.from_dict(read(path, solved))
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": COURSE}}).execute()
    outputs = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    return [line for each in outputs for line in each.get("text", "").splitlines()]


@pytest.mark.soak
@pytest.mark.parametrize("solved", [False, True], ids=["as-it-stands", "solved"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_exercises_are_graded(path: Path, solved: bool) -> None:
    graded = [line for line in run(path, solved) if line.startswith(("not yet: ", "solved"))]
    assert len(graded) == 1
    assert (graded[0] == "solved") == solved, graded


def test_there_are_eight_each_with_an_exercise_and_without_outputs() -> None:
    assert len(NOTEBOOKS) == 8
    for path in NOTEBOOKS:
        cells = read(path)["cells"]
        assert not [cell for cell in cells if cell.get("outputs")], path
        (solution,) = (i for i, cell in enumerate(cells) if SOLUTION.search(cell["source"]))
        assert cells[solution - 2]["source"].startswith("%%writefile "), path
        assert "graded(" in cells[solution - 1]["source"], path
