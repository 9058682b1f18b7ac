"""The measure: every mistake planted, and what was found of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from attrs import frozen

from tests.copies import Copy
from tests.definitions import Sources
from tests.files import ROOT
from tests.planted.planted import Planted
from tests.planted.trial import Outcome, Result, tried, with_mistake


class Verdict(StrEnum):
    """Whether a mistake was found."""

    FOUND = "found"
    NOT_FOUND = "NOT FOUND"
    # What must fail with the mistake fails without it: nothing can be said.
    UNTRIED = "fails without it"


@frozen
class Finding:
    """What came of one mistake, and by which result."""

    planted: Planted
    verdict: Verdict
    result: Result

    @property
    def note(self) -> str:
        """What is not as it should be, in words."""
        if self.verdict is Verdict.FOUND:
            return ""
        return "unaffected" if self.result.outcome is Outcome.PASSED else str(self.result.outcome)


def measure(
    mistakes: Sequence[Planted],
    told: Callable[[Finding], None],
    jobs: int = 1,
    checked: Callable[[str, Result], None] = lambda caught, result: None,
) -> list[Finding]:
    """Try mistakes, `jobs` at a time, each job in a copy of its own; `told` hears of each as it is done.

    First every command is run once without any mistake, of which `checked` hears: it must pass.
    """
    sources = Sources.read(ROOT)
    with TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for i in range(jobs):
            copies.put(Copy.made(Path(folder) / str(i)))

        @contextmanager
        def free() -> Iterator[Copy]:
            copy = copies.get()
            try:
                yield copy
            finally:
                copies.put(copy)

        def without(caught: str) -> Result:
            with free() as copy:
                result = tried(copy, caught)
            checked(caught, result)
            return result

        def found(planted: Planted) -> Finding:
            if passing[planted.caught].outcome is not Outcome.PASSED:
                finding = Finding(planted, Verdict.UNTRIED, passing[planted.caught])
            else:
                with free() as copy, with_mistake(copy, sources, planted):
                    result = tried(copy, planted.caught)
                failed = result.outcome is Outcome.FAILED
                finding = Finding(planted, Verdict.FOUND if failed else Verdict.NOT_FOUND, result)
            told(finding)
            return finding

        commands = list(dict.fromkeys(planted.caught for planted in mistakes))
        passing = dict(zip(commands, pool.map(without, commands), strict=True))
        return list(pool.map(found, mistakes))
