"""The error index is what the table of codes says, and names every code."""

from __future__ import annotations

import re

from partita.dsl.codes import CODES
from tests.docs.errors import PAGE, page_text


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_text(), "`make docs` writes it anew"


def test_every_code_has_its_section() -> None:
    assert sorted(re.findall(r"(?m)^### (\w+)$", PAGE.read_text(encoding="utf-8"))) == sorted(CODES)
