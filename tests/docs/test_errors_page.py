"""The error index explains every code, and gives the advice that errors without a help of their own have."""

from __future__ import annotations

import re

from partita.dsl.codes import ADVICE
from tests.docs.errors import CODES, PAGE


def test_every_section_explains_its_code() -> None:
    assert re.findall(r"(?m)^### (.+)$", PAGE.read_text(encoding="utf-8")) == list(CODES)
    assert list(CODES) == sorted(CODES, key=lambda code: (code[0] == "W", code))


def test_errors_advise_what_the_page_says() -> None:
    """In words that go on from `help`; an example may not be of the file that is wrong."""
    fixes = {code: fix for code, fix in CODES.items() if code.startswith("E") and fix[0].isalpha()}
    assert {code: fix[0].lower() + fix[1:].removesuffix(".") for code, fix in fixes.items()} == ADVICE
