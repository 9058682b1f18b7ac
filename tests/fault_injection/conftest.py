"""Runs to be struck, and what they must come to all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.fault_injection.runs import ALL, Run


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes the test's run, with its story so far; nothing of it remains, and what happened is printed."""
    made: list[Run] = []

    def make(layout: str, keep: int = ALL, story: Sequence[str] = ()) -> Run:
        made.append(Run(tmp_path, layout, keep, story=list(story)))
        return made[-1]

    yield make
    for run in made:
        run.clear()
        print("\n".join(run.story))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[dict], dict]]:
    """The run of a layout that nobody strikes: what it computed, and the hashes of all that it saved, by step.

    In this process: its bits are those of two.
    """

    @cache
    def of(layout: str) -> tuple[list[dict], dict[int, tuple[str, ...]]]:
        run = Run(tmp_path_factory.mktemp(layout), layout)
        # Every step, since a run that is asked to end may save any.
        run.alone(f"train.checkpoint=every(1, keep = {ALL})")
        return run.records(), run.commits()

    return of
