"""Results as notebooks show them: HTML without scripts, from a real kernel in long runs."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import partita
from partita.cli.notebook import CLASS
from tests.files import SPECS
from tests.marks import soak

TINY = SPECS / "tiny.par"
MLP = SPECS / "mlp.par"


class Elements(HTMLParser):
    """The elements of a text, which must be closed in order, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def shown(result: Any) -> Elements:
    text = result._repr_html_()
    found = Elements(text)
    assert text.startswith(f'<div class="{CLASS}"')
    assert not {"script", "iframe", "link"} & set(found.seen)
    return found


def test_what_is_compiled_is_a_timeline() -> None:
    state = partita.compile(TINY)
    found = shown(state)
    assert "svg" in found.seen
    for word in ("Compilation of tiny.par", "interleaved_1f1b", "memory bound", "rank 1", "forward"):
        assert word in found.words
    summary = partita.summary(state)
    assert "svg" in shown(summary).seen
    assert "svg" in shown(summary.timeline).seen


def test_files_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    path = tmp_path / "<b>.par"
    path.write_text("axis a = <script>\n")
    (found, *_) = partita.check(path)
    assert "E0101" in shown(found).words or "E0103" in shown(found).words
    assert "<b>.par" in shown(found).words
    assert MLP.read_text().split("\n")[0] in shown(partita.load(MLP)).words


def test_a_training_is_lines_of_its_records() -> None:
    trained = partita.train(MLP, "train.steps=5")
    assert repr(trained).startswith("<Training of mlp.par: 5 steps, loss ")
    found = shown(trained)
    assert found.seen.count("path") >= 2
    for word in ("loss", "first", "last", f"{trained[-1]['loss']:.4f}".rstrip("0")):
        assert word in found.words
    verified = shown(partita.verify(MLP))
    assert "verified" in verified.words


CELLS = (
    "import partita",
    f"partita.compile({str(TINY)!r})",
    f"partita.load({str(MLP)!r})",
    f"partita.train({str(MLP)!r}, 'train.steps=3')",
)


@pytest.mark.parametrize("cells", soak((CELLS[1:],)), ids=["kernel"])
def test_a_real_kernel_shows_them(cells: tuple[str, ...]) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in (CELLS[0], *cells)])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for cell in notebook.cells[1:]:
        (output,) = [each for each in cell.outputs if each.output_type == "execute_result"]
        assert output.data["text/plain"].startswith("<")
        assert CLASS in output.data["text/html"]
        assert {"svg", "pre"} & set(Elements(output.data["text/html"]).seen)
