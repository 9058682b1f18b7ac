"""Planted mistakes: each still applies (`make test`), and each is found (`make soak`)."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterator
from functools import cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType

import pytest

from tests import fragments
from tests.copies import Copy
from tests.definitions import NATIVE, Definition, Sources
from tests.files import ROOT
from tests.planted.lists import SUBJECTS
from tests.planted.measure import Verdict, measure
from tests.planted.planted import VERIFY
from tests.planted.trial import Outcome, tried, with_mistake

MISTAKES = [planted for mistakes in SUBJECTS.values() for planted in mistakes]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources.read(ROOT)


def test_the_measure_is_wide():
    names = [planted.name for planted in MISTAKES]
    assert len(set(names)) == len(names)
    assert len(MISTAKES) >= 1000
    assert len(SUBJECTS["partitioning"]) >= 40
    assert all(planted.by_verify for planted in SUBJECTS["partitioning"])


def test_mistakes_can_be_planted(sources: Sources):
    for planted in MISTAKES:
        file, text = planted.planted(sources)
        assert text != sources.texts[file], planted


def test_who_must_notice_is_there():
    """A file to verify; or a test, which `make test` runs."""
    for caught in {planted.caught for planted in MISTAKES}:
        if caught.startswith(VERIFY):
            file, *overrides = caught.removeprefix(VERIFY).removeprefix("--gpu ").split()
            assert (ROOT / file).is_file(), caught
            assert all("=" in override for override in overrides), caught
            continue
        file, _, name = caught.partition("::")
        function, case, _ = name.partition("[")
        assert not name or not marks(file)[function] & ({"soak", "few"} if case else {"soak"}), caught


@cache
def marks(file: str) -> dict[str, set[str]]:
    """The names of the marks of a file's functions."""
    functions = [each for each in ast.parse((ROOT / file).read_text()).body if isinstance(each, ast.FunctionDef)]
    texts = {each.name: " ".join(map(ast.unparse, each.decorator_list)) for each in functions}
    return {name: set(re.findall(r"(?:^| )pytest\.mark\.(\w+)", text)) for name, text in texts.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(12))
def test_places_go_with_what_is_renamed_and_moved(sources: Sources, part: int):
    """All that mistakes are planted in moves to one file, backwards, and all locals in it get other names: each mistake
    is then the same but for these.
    """
    mistakes = [planted for planted in MISTAKES[part::12] if not planted.place.endswith(NATIVE)]
    changes = [planted.change(sources) for planted in mistakes]
    moved, left = list[str](), dict(sources.texts)
    for file in {definition.file for definition, _ in changes}:
        own = [definition.lines.start for definition, _ in changes if definition.file == file]
        lines = left[file].split("\n")
        for statement in reversed(ast.parse(left[file]).body):
            span = Definition(file, ast.Module([statement], [])).lines
            if any(span.start <= start < span.stop for start in own):
                moved.append(renamed("\n".join(lines[span])))
                lines[span] = []
        left[file] = "\n".join(lines)
    assert len(moved) > 50
    tree = ast.parse("\n".join(moved))
    own = (each for each in ast.walk(tree) if isinstance(each, (ast.ClassDef, ast.alias)))
    kept = {(getattr(each, "asname", None) or each.name).partition(".")[0] for each in own}
    assert set(bound(compile(tree, "moved.py", "exec"))) <= {"self", "cls", *kept}
    elsewhere = Sources.of({**left, "moved.py": "\n".join(moved)})
    for planted, (definition, text) in zip(mistakes, changes, strict=True):
        node = definition.holder.body[0]
        names = fragments.local_names(node) if isinstance(node, ast.FunctionDef) else None
        assert planted.change(elsewhere)[1] == renamed(text, names), planted


def renamed(text: str, names: Collection[str] | None = None) -> str:
    """Functions and methods with an underscore after names: the locals of each, if none are given."""
    tree = ast.parse(text)
    for top in tree.body:
        for each in top.body if isinstance(top, ast.ClassDef) else [top]:
            own = fragments.local_names(each) if names is None else names
            for node in ast.walk(each):
                field = fragments.NAMES.get(type(node), "")
                if isinstance(node, ast.Nonlocal):
                    node.names = [f"{name}_" for name in node.names]
                elif node is not each and getattr(node, field, None) in own:
                    setattr(node, field, f"{getattr(node, field)}_")
    return ast.unparse(tree)


def bound(code: CodeType, inside: bool = False) -> Iterator[str]:
    """The variables of all functions that are called as they were."""
    if inside:
        yield from (name for name in (*code.co_varnames, *code.co_cellvars) if name[0] not in "._" and name[-1] != "_")
    for each in code.co_consts:
        if isinstance(each, CodeType) and (inside or each.co_name[0] != "<"):
            yield from bound(each, inside or bool(each.co_flags & CO_OPTIMIZED))


def test_a_mistake_is_in_the_copy_and_then_it_is_gone(tmp_path: Path):
    """What runs is the copy, whatever is installed."""
    copy = Copy.made(tmp_path)
    planted = next(planted for planted in MISTAKES if planted.name == "warm-up-begins-at-zero")
    with with_mistake(copy, Sources.read(copy.tree), planted):
        assert tried(copy, planted.caught).outcome is Outcome.FAILED
    assert tried(copy, planted.caught).outcome is Outcome.PASSED


@pytest.mark.soak
def test_every_mistake_is_found():
    findings = measure(MISTAKES, told=lambda finding: print(f"{finding.verdict}: {finding.planted}"), jobs=_jobs())
    assert [finding.planted.name for finding in findings if finding.verdict is not Verdict.FOUND] == []


def _jobs() -> int:
    """As many at a time as there are cores."""
    return max(1, len(os.sched_getaffinity(0)))
