"""What the documentation shows is so: its files check, its commands run and print what stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from partita.dsl.load import load
from partita.dsl.syntax.format import format_text
from tests.docs.pages import PAGES, ROOT, Command, Fence, Session, commands, fences, files, pictures, same_picture
from tests.marks import soak

FILES = [each for page in PAGES for each in files(page)]
# Whole files; `loose.par` is what `fmt` is shown with.
CANONICAL = [(fence, text) for fence, text in FILES if fence.text == text and fence.words != ("loose.par",)]
SESSIONS = [page for page in PAGES if commands(page)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(("fence", "text"), [pytest.param(*each, id=str(each[0])) for each in FILES])
def test_a_file_in_the_documentation_checks(fence: Fence, text: str, tmp_path: Path) -> None:
    Session(fence.page, tmp_path)  # a file may import others of its page
    path = tmp_path / "example.par"
    path.write_text(text, encoding="utf-8")
    _, diagnostics = load(path)
    errors = [each for each in diagnostics if each.severity == "error"]
    assert not errors, "\n\n".join(each.render() for each in errors)


@pytest.mark.parametrize(("fence", "text"), [pytest.param(*each, id=str(each[0])) for each in CANONICAL])
def test_a_file_in_the_documentation_is_in_canonical_form(fence: Fence, text: str) -> None:
    assert format_text(text, str(fence)) == text


# Pages whose sessions train, verify or search for long; `make docs` runs all of them, too.
LONG = {
    *("tutorial.md", "run.md", "plan.md", "verify.md", "checkpoint.md", "checkpoints.md", "finetuning.md"),
    *("experts.md", "from_pytorch.md", "layouts.md", "operations.md", "preferences.md", "python.md", "recurrences.md"),
}


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "page", [each for page in SESSIONS for each in (soak(page) if page.name in LONG else [page])], ids=name_of
)
def test_a_session_in_the_documentation_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    session = Session(page, tmp_path)
    for command in commands(page):
        status, output = session.run(command)
        assert status == command.status, f"{name_of(page)}: `{command.text}` ends with {status}:\n{output}"
        assert command.shows(output), (
            f"{name_of(page)} shows for `{command.text}`\n{command.output}\nand it prints\n{output}\n"
            "`make docs` writes what is printed into the page"
        )
    for picture in pictures(page):
        made = tmp_path / picture.name
        assert same_picture(picture, made), f"{name_of(picture)} is not what the page draws: `make docs` draws it"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links {link}"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)} links {link}, and there is no such heading"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_block_is_marked_as_something_known() -> None:
    kinds = {"par", "console", "pycon", "diff", "text", "sh", "bash", "python", "json", "yaml", ""}
    for page in PAGES:
        for fence in fences(page):
            assert fence.language in kinds, f"{fence}: ```{fence.language}"


@pytest.mark.parametrize(
    ("command", "expected", "actual", "alike"),
    [
        ("partita run a.par", "step 1  loss 2.30  9 tokens/s", "step 1 loss 2.31 1,203 tokens/s", True),
        ("partita run a.par", "step 1  loss 2.30", "step 1 loss 2.51", False),
        ("partita run a.par", "step 100  loss 2.30", "step 101 loss 2.30", False),
        ("partita compile a.par", "step 1.03 s\ncompiled in 3 ms", "step 1.03 s\ncompiled in 1.20 s", True),
        ("partita compile a.par", "step 1.03 s", "step 1.04 s", False),
        ("partita compile a.par", "2  1.0 MiB  943 µs", "2  1.0 MiB  1.2 ms", False),
        ("partita compile a.par", "compiled in 3 ms: a 1 ms,\nb 2 ms", "compiled in 9 ms: a 4 ms, b\n5 ms", True),
        ("partita compile a.par", "first\n…\nlast", "first\nsecond\nthird\nlast", True),
        ("partita compile a.par", "first\n…\nlast", "first\nsecond", False),
        ("partita compile a.par", "[0]", "0", False),
        ("cat a.txt", "(11908,)", "(13988,)", False),
    ],
)
def test_outputs_are_compared_up_to_what_varies(command: str, expected: str, actual: str, alike: bool) -> None:
    assert Command(command, expected, 0, (0, len(expected))).shows(actual) is alike


def test_numbers_that_have_changed_are_written_without_what_was_left_out() -> None:
    shown = Command("partita compile a.par", "peak 82.48GiB of 80\n…\ncompiled in 3 ms\n", 0, (0, 0))
    assert shown.changes("peak 82.58GiB of 80\nmore\ncompiled in 9 s\n") == [(5, 13, "82.58GiB")]
    assert shown.changes("peaks 82.58GiB of 80\nmore\ncompiled in 9 s\n") is None
