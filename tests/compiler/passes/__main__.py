"""`python -m tests.compiler.passes`: rewrite what cases expect with what passes make now, and name the files."""

from __future__ import annotations

import argparse

from tests.compiler.passes.cases import FOLDER, cases


def main() -> None:
    """Rewrite the cases whose names contain one of the words; all without any."""
    parser = argparse.ArgumentParser(prog="python -m tests.compiler.passes", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only cases with this in their name")
    words = parser.parse_args().words
    for case in cases():
        if (not words or any(word in str(case) for word in words)) and case.difference():
            case.file.write_text(case.updated(), encoding="utf-8")
            print(case.file.relative_to(FOLDER))


if __name__ == "__main__":
    main()
