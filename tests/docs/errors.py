"""The index of errors, docs/errors.md: a section for each code, which explains it and says how it is fixed."""

from __future__ import annotations

import re

from tests.files import ROOT

PAGE = ROOT / "docs" / "errors.md"
SECTION = re.compile(r"^### (\w+)\n\n\*\*[A-Z].+\.\*\* .+\.\n\nFix: (.+)\n", re.MULTILINE)

# Code -> fix, in the order of the page.
CODES: dict[str, str] = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))
