"""`python -m tests.planted [NAME …]`: plant mistakes in a copy of the sources, and see whether they are found.

Of all mistakes, or of those that have one of the names, or are of one of the subjects. Exit status 1 where one is not
found.
"""

from __future__ import annotations

import argparse
import sys
from time import perf_counter

from tests.planted.lists import SUBJECTS
from tests.planted.measure import Finding, Verdict, measure
from tests.planted.trial import Outcome, Result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of a mistake, or: {', '.join(SUBJECTS)}")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (1)")
    parser.add_argument(
        "--verbose", action="store_true", help="show what commands printed that did not do as they must"
    )
    arguments = parser.parse_args()
    known = {planted.name for mistakes in SUBJECTS.values() for planted in mistakes} | SUBJECTS.keys()
    for name in arguments.names:
        if name not in known:
            parser.error(f"there is no mistake or subject `{name}`")
    wanted = [
        planted
        for subject, mistakes in SUBJECTS.items()
        for planted in mistakes
        if not arguments.names or not {planted.name, subject}.isdisjoint(arguments.names)
    ]

    def told(finding: Finding) -> None:
        words = f"{finding.verdict:<10} {finding.result.seconds:5.1f} s  {finding.planted.name}"
        note = f"  ({finding.note})" if finding.note else ""
        print(f"{words}{note}  {finding.planted.caught}", flush=True)
        if arguments.verbose and finding.verdict is not Verdict.FOUND:
            print(finding.result.output)

    def checked(caught: str, result: Result) -> None:
        print(f"{result.outcome:<10} {result.seconds:5.1f} s  {caught}", flush=True)
        if arguments.verbose and result.outcome is not Outcome.PASSED:
            print(result.output)

    start = perf_counter()
    findings = measure(wanted, told, arguments.jobs, checked)
    print(summary(findings, perf_counter() - start))
    return int(any(finding.verdict is not Verdict.FOUND for finding in findings))


def summary(findings: list[Finding], seconds: float) -> str:
    """How many of each subject were found, and which were not."""
    lines = [""]
    found = {finding.planted.name for finding in findings if finding.verdict is Verdict.FOUND}
    tried = {finding.planted.name for finding in findings}
    for subject, mistakes in SUBJECTS.items():
        own = [planted.name for planted in mistakes if planted.name in tried]
        if own:
            lines.append(f"{subject:<16} {sum(name in found for name in own):3} of {len(own):3}")
    lines.append(f"{'all':<16} {len(found):3} of {len(tried):3} found in {seconds:.0f} s")
    lines += [f"{finding.verdict}: {finding.planted.name}" for finding in findings if finding.planted.name not in found]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
