"""Grades what was written for an exercise: `solved`, or what is still wrong with it, in a line."""

from __future__ import annotations

from collections.abc import Callable

import partita
from partita.runtime.verification.verify import Verification


def graded(check: Callable[[], object]) -> None:
    """Print what a check says, which raises AssertionError with what is wrong, or Refused for an invalid file."""
    try:
        check()
    except partita.Refused as refused:
        print(f"not yet: {refused.diagnostics[0].message}")
    except AssertionError as wrong:
        print(f"not yet: {wrong}")
    else:
        print("solved")


def verified(path: str, *overrides: str) -> Verification:
    """What `partita verify` finds, if it finds nothing wrong."""
    found = partita.verify(path, *overrides)
    problems = [*found.diagnostics, *([found.reason] if found.reason else [])]
    assert found.passed, problems[0].message
    return found
