"""Each wrong file gives exactly the diagnostics that its last lines name: `#! CODE LINE:COLUMN`."""

import re
from pathlib import Path

import pytest

from partita.dsl.diagnostic import Diagnostic
from partita.dsl.load import load, load_text
from tests.docs.errors import CODES
from tests.dsl.advice import followed
from tests.files import ROOT

FOLDER = Path(__file__).parent / "wrong"
FILES = sorted(FOLDER.glob("*.par"))
EXPECTED = re.compile(r"^#! (\w+) (\S+)$", re.MULTILINE)


def place(diagnostic):
    if diagnostic.span is None:
        return "-"
    name = Path(diagnostic.span.source.name).relative_to(FOLDER).as_posix()
    position = f"{diagnostic.span.line}:{diagnostic.span.column}"
    return position if name.count("/") == 0 else f"{name}:{position}"


PARTS = (
    "axis batch = 4\nmesh line(pipe = 2)\nmodel m(x: [batch]) { "
    + " ".join(f"param a{i}: [batch] ~ ones()" for i in range(13))
    + f" loss mean(x * ({' + '.join(f'a{i}' for i in range(13))})) }}"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_wrong_file(path):
    expected = EXPECTED.findall(path.read_text())
    assert expected, f"{path.name} does not say what is wrong with it"
    spec, diagnostics = load(path)
    shown = "\n".join(diagnostic.render() for diagnostic in diagnostics)
    assert [(d.code, place(d)) for d in diagnostics] == expected, shown
    assert (spec is None) == any(code.startswith("E") for code, _ in expected), shown
    assert all(d.code in CODES for d in diagnostics)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_help_proposes_mends_the_file(path):
    """What was wrong there no longer is, and nothing else is wrong in its place."""
    _, before = load(path)
    for diagnostic in before:
        text = followed(diagnostic)
        if text is None or diagnostic.span.source.name != str(path):
            continue
        _, after = load_text(text, str(path), path=path)
        left = {(each.code, each.message) for each in after}
        assert (diagnostic.code, diagnostic.message) not in left, diagnostic.render()
        new = [each for each in after if each.severity == "error" and each.span.start == diagnostic.span.start]
        assert new == [], "\n\n".join(each.render() for each in (diagnostic, *new))


def test_most_codes_of_the_front_end_have_a_wrong_file():
    covered = {code for path in FILES for code, _ in EXPECTED.findall(path.read_text())}
    elsewhere = {"E0002", "E0004", "E0013", "E0108", "E0315", "E0408"}  # other tests, or other parts
    front = {code for code in CODES if code < "E04" or code.startswith("W02")}
    assert front - covered - elsewhere == set()


def test_every_reported_code_is_in_the_index():
    found = set()
    for folder in ("dsl", "compiler", "runtime", "cli"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "codes.py":
                found |= set(re.findall(r'"([EW]0\d{3})"', path.read_text()))
    assert found
    assert found - set(CODES) == set()


def test_an_error_without_a_help_of_its_own_has_the_fix_of_its_code():
    """But no example from another file."""
    assert Diagnostic("E0301", "axis `a` is declared twice").advice == "rename one of them"
    assert Diagnostic("E0301", "axis `a` is declared twice", help="`axis b`").advice == "`axis b`"
    assert Diagnostic("E0306", "expected a number").advice is None
    assert Diagnostic("W0201", "axis `a` is not used").advice is None


@pytest.mark.parametrize(
    ("text", "code", "help"),
    [
        ("axis batch = 4, mesh = 8", "E0104", "choose another name"),
        ("axis batch = 4, axis seq = 8", "E0104", "remove the comma before it"),
        ("axis batch = 4QiB", "E0107", "units are as in `8%`, `80GiB`, `900GB/s`, `989TFLOP/s` and `5us`"),
        ("schedule s = staggered(microbatches = 2)", "E0309", "there are "),
        (
            "axis a = 4\nmodel m(x: [a]) { param w: [a] ~ ones()  update u = w  loss mean(x * w) }",
            "E0225",
            "`buffer u: … ~ zeros()` declares one in this body",
        ),
        (f"{PARTS}\nlayout l on line {{ place zzz -> pipe[0] }}", "E0317", "it has: `a0`, `a1`, `a10`, "),
        (f"{PARTS}\nlayout l on line {{ stage zzz -> pipe }}", "E0317", "it has none"),
        (f"{PARTS}\noptimizer o {{ freeze zzz }}", "E0317", "it has: `a0`, `a1`, `a10`, "),
    ],
)
def test_help_says_what_there_is(text: str, code: str, help: str):
    _, diagnostics = load_text(text)
    assert help in {each.code: each.help for each in diagnostics}[code]
