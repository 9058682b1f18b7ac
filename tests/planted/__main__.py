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
    everything = [(subject, planted) for subject, mistakes in SUBJECTS.items() for planted in mistakes]
    for name in arguments.names:
        if not any(name in (subject, planted.name) for subject, planted in everything):
            parser.error(f"there is no mistake or subject `{name}`")
    names = set(arguments.names)
    wanted = [planted for subject, planted in everything if not names or names & {subject, planted.name}]

    def told(first: str, result: Result, last: str, good: bool) -> None:
        print(f"{first:<10} {result.seconds:5.1f} s  {last}", flush=True)
        if arguments.verbose and not good:
            print(result.output)

    def found(finding: Finding) -> None:
        words = (finding.planted.name, f"({finding.note})" if finding.note else "", finding.planted.caught)
        told(finding.verdict, finding.result, "  ".join(filter(None, words)), finding.verdict is Verdict.FOUND)

    def checked(caught: str, result: Result) -> None:
        told(result.outcome, result, caught, result.outcome is Outcome.PASSED)

    start = perf_counter()
    findings = measure(wanted, found, arguments.jobs, checked)
    print(summary(findings, perf_counter() - start))
    return int(any(finding.verdict is not Verdict.FOUND for finding in findings))


def summary(findings: list[Finding], seconds: float) -> str:
    """How many of each subject were found, and which were not."""
    verdicts = {finding.planted.name: finding.verdict for finding in findings}
    lines = [""]
    for subject, mistakes in [*SUBJECTS.items(), ("all", [finding.planted for finding in findings])]:
        if own := [verdicts[planted.name] for planted in mistakes if planted.name in verdicts]:
            lines.append(f"{subject:<16} {own.count(Verdict.FOUND):3} of {len(own):3}")
    lines[-1] += f" found in {seconds:.0f} s"
    return "\n".join(
        [*lines, *(f"{verdict}: {name}" for name, verdict in verdicts.items() if verdict != Verdict.FOUND)]
    )


if __name__ == "__main__":
    sys.exit(main())
