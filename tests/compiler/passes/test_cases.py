"""Every pass does what its cases say (`tests/compiler/passes`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiler.passes.cases import Case, cases, read
from tests.compiler.passes.steps import STEPS

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pass_makes_what_is_expected(case: Case) -> None:
    difference = case.difference()
    assert not difference, f"{case.file}\n{difference}"


def test_there_are_cases_of_every_pass() -> None:
    assert {case.file.parent.name for case in CASES} == set(STEPS)


def test_a_difference_is_shown_and_can_be_taken_over(tmp_path: Path) -> None:
    case = next(case for case in CASES if str(case) == "microbatch/does_not_divide")
    file = tmp_path / "wrong.txt"
    file.write_text(case.file.read_text(encoding="utf-8").replace("error[E0406]", "error[E0407]"), encoding="utf-8")
    wrong = read(file)
    removed, added = wrong.difference().splitlines()[-2:]
    assert removed.startswith("-error[E0407]")
    assert added.startswith("+error[E0406]")
    assert wrong.updated() == case.file.read_text(encoding="utf-8")


def test_what_is_no_case_is_named(tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("graph m\n")
    with pytest.raises(ValueError, match=r"none\.txt is no case"):
        read(tmp_path / "none.txt")
