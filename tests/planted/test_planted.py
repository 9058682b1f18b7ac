"""Planted mistakes: each still applies (`make test`), and each is found (`make soak`)."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests.planted.lists import SUBJECTS
from tests.planted.measure import Verdict, measure
from tests.planted.planted import VERIFY, Planted
from tests.planted.trial import ROOT, Copy, Outcome

MISTAKES = [planted for mistakes in SUBJECTS.values() for planted in mistakes]


def without_comments(source: str) -> list[str]:
    """The lines of a piece of Python."""
    lines = (line.partition("#")[0].rstrip() for line in source.splitlines())
    return [line for line in lines if line]


def test_the_measure_is_wide():
    names = [planted.name for planted in MISTAKES]
    assert len(set(names)) == len(names)
    assert len(MISTAKES) >= 115
    assert len(SUBJECTS["partitioning"]) >= 40
    assert all(planted.by_verify for planted in SUBJECTS["partitioning"])


@pytest.mark.parametrize("planted", MISTAKES, ids=str)
def test_a_mistake_can_be_planted(planted: Planted):
    text = planted.planted((ROOT / planted.file).read_text(encoding="utf-8"))
    if planted.file.endswith(".py"):
        ast.parse(text)
        assert without_comments(planted.old) != without_comments(planted.new), "it changes nothing that runs"


@pytest.mark.parametrize("caught", sorted({planted.caught for planted in MISTAKES}))
def test_who_must_notice_is_there(caught: str):
    """A file to verify; or a test, which `make test` runs."""
    if caught.startswith(VERIFY):
        file, *overrides = caught.removeprefix(VERIFY).split()
        assert (ROOT / file).is_file()
        assert all("=" in override for override in overrides)
        return
    file, _, name = caught.partition("::")
    assert (ROOT / file).is_file()
    if name:
        functions = {each.name: each for each in ast.parse((ROOT / file).read_text()).body if hasattr(each, "name")}
        function = functions[name.partition("[")[0]]
        assert not any(ast.unparse(each) == "pytest.mark.soak" for each in function.decorator_list)


def test_a_mistake_is_in_the_copy_and_then_it_is_gone(tmp_path: Path):
    """What runs is the copy, whatever is installed."""
    copy = Copy.made(tmp_path)
    planted = next(planted for planted in MISTAKES if planted.name == "warm-up-begins-at-zero")
    with copy.with_mistake(planted):
        assert copy.run(planted.caught).outcome is Outcome.FAILED
    assert copy.run(planted.caught).outcome is Outcome.PASSED


@pytest.mark.soak
def test_every_mistake_is_found():
    findings = measure(MISTAKES, told=lambda finding: print(f"{finding.verdict}: {finding.planted}"), jobs=_jobs())
    assert [finding.planted.name for finding in findings if finding.verdict is not Verdict.FOUND] == []


def _jobs() -> int:
    """As many at a time as there are cores."""
    return max(1, len(os.sched_getaffinity(0)))
