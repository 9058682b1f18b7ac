"""What the public functions return is shown in a line or two, however large the program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import partita
from partita.dsl.reprs import MOST
from tests.files import SPECS

FILES = sorted(SPECS.glob("*.par"))
SMALL = SPECS / "mlp.par"


def records(value: object, seen: set[int]) -> Iterator[object]:
    """A value and the records in it, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    within: list[object] = []
    if attrs.has(type(value)):
        yield value
        within = [getattr(value, each.name, None) for each in attrs.fields(type(value))]
    elif isinstance(value, (tuple, list, set, frozenset)):
        within = list(value)
    elif isinstance(value, dict):
        within = [*value.keys(), *value.values()]
    for each in within:
        yield from records(each, seen)


@pytest.mark.soak
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_results_of_every_spec(path: Path) -> None:
    state = partita.compile(path)
    results = {"Spec": partita.load(path), "Compilation": state, "Summary": partita.summary(state)}
    for kind, result in results.items():
        assert repr(result).startswith(f"<{kind} ")
    # Of what there is very much of the same kind, one of each kind is enough; operations and instructions show all.
    kinds: dict[type, object] = {}
    for each in records(tuple(results.values()), set()):
        kinds.setdefault(type(each), each)
    assert len(kinds) > 50
    for kind, each in kinds.items():
        limit = MOST if not kind.__module__.startswith(("partita.compiler.ops", "partita.compiler.instr")) else 2 * MOST
        assert len(repr(each)) <= limit, (kind, repr(each))
    assert len(repr(partita.check(path))) <= MOST


def test_a_compilation_says_what_it_is() -> None:
    path = next(each for each in FILES if each.name == "tiny.par")
    assert repr(partita.compile(path)).startswith("<Compilation of tiny.par: 2 ranks, ")
    assert repr(partita.compile(path)).endswith(" operations, interleaved_1f1b>")
    assert repr(partita.load(path)) == "<Spec tiny.par: model tiny, layout stages, schedule fast, 2 ranks>"


@pytest.mark.soak
def test_plans_and_verifications() -> None:
    for plan in partita.plan(SMALL, devices=2, within=1.0, top=2):
        assert repr(plan).startswith("<Plan of ")
        assert len(repr(plan)) <= MOST
    found = partita.verify(SMALL)
    assert repr(found).startswith("<Verification of mlp: ")
    assert len(repr(found)) <= MOST


def test_names_of_any_length(tmp_path: Path) -> None:
    name = "n" * 200
    path = tmp_path / f"{name}.par"
    text = SMALL.read_text()
    path.write_text(text)
    assert len(repr(partita.load(path))) <= MOST
    assert len(repr(partita.compile(path))) <= MOST


def test_a_diagnostic_is_shown_in_short(tmp_path: Path) -> None:
    path = tmp_path / "wrong.par"
    path.write_text("axis a = 1\nmodel m(x: [a]) {\n  loss sum(y)\n}\n" + "# comment\n" * 1000)
    (found, *_) = partita.check(path)
    assert "E0201" in repr(found)
    assert len(repr(found)) <= 2 * MOST
