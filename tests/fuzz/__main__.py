"""`python -m tests.fuzz [--seconds S] [TARGET …]`: fuzz, and print the totals of all runs so far.

`--totals` prints them only. Exit status 1 where this run has found anything.
"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.soak import WANTED_SECONDS, fuzz, totals, written
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=WANTED_SECONDS, help="in all")
    parser.add_argument("--totals", action="store_true", help="of the runs so far")
    arguments = parser.parse_args()
    for target in arguments.targets:
        if target not in TARGETS:
            parser.error(f"there is no target {target}")
    turns = [] if arguments.totals else fuzz(arguments.seconds, arguments.targets or tuple(TARGETS))
    print(totals(written()))
    return int(any(turn.found for turn in turns))


if __name__ == "__main__":
    sys.exit(main())
