"""Every pass does what its cases say (`tests/compiler/passes`)."""

from __future__ import annotations

import pytest

from tests.compiler.passes.cases import Case, cases

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pass_makes_what_is_expected(case: Case) -> None:
    difference = case.difference()
    assert not difference, f"{case.file}\n{difference}"


def test_there_are_cases_of_every_pass() -> None:
    from tests.compiler.passes.steps import STEPS

    assert {case.file.parent.name for case in CASES} == set(STEPS)
