"""Grades what was written for an exercise: `solved`, or what is still wrong with it."""

from __future__ import annotations

from collections.abc import Callable

import partita
from partita.runtime.verification.verify import Verification


def graded(check: Callable[[], object]) -> None:
    """Print what a check says, which raises AssertionError with what is wrong, or Refused for an invalid file."""
    try:
        check()
    except partita.Refused as refused:
        print(f"not yet: {refused.diagnostics[0].render()}")
    except Exception as wrong:
        kind = "" if isinstance(wrong, AssertionError) else f"{type(wrong).__name__}: "
        print(f"not yet: {kind}{wrong}")
    else:
        print("solved")


def verified(path: str, *claims: str) -> Verification:
    """What `partita verify` finds, if it finds nothing wrong, of a file that makes these claims, in f64 if any."""
    spec = partita.load(path)
    assert spec.train is not None, "there is no `train`"
    assert not claims or spec.train.precision == "f64", f"the precision is {spec.train.precision}"
    found = partita.verify(path)
    made = [each.text for each in found.claims]
    for claim in claims:
        assert claim in made, f"the file does not claim `{claim}`"
    problems = [*found.diagnostics, *([found.reason] if found.reason else [])]
    assert found.passed, problems[0].render()
    return found
