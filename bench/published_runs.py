"""Published and predicted: what the cost model says of runs that others have measured.

    python bench/published_runs.py [FAMILY ...] [--rows N ...]

Each row is its family's file with the row's sizes, compiled and predicted with the presets of docs/costs.md; nothing
else differs between rows. The share of peak that large products reach on A100 was chosen with some of these rows in
view, and that on H100 follows from it. Leave-one-family-out chooses both again for each family, by all the others, and
predicts it with those.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from published.rows import families, rows
from published.scores import Compared, compared, fitted, line
from rich.console import Console
from rich.table import Table


def main() -> None:
    """Print each table, measured and predicted, with what a constant would score; then all together."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(families())} (default: all)")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="only these rows of each family, from 1")
    arguments = parser.parse_args()
    found: dict[str, list[Compared]] = {}
    for family in arguments.families or families():
        shown = Table("table", "row", "counts", "fitted", "measured", "predicted", "off", title=family)
        for i, row in enumerate(rows(family), 1):
            if arguments.rows is None or i in arguments.rows:
                one = compared(row)
                found.setdefault(family, []).append(one)
                kinds = ("hardware" if row.hardware else "model", "yes" if row.fitted else "")
                figures = (f"{one.measured:.1f}%", f"{one.predicted:.1f}%", f"{one.off:+.1f}")
                shown.add_row(row.table, row.name, *kinds, *figures)
        if family in found:
            Console().print(shown)
            print(scored(family, found[family], {}))
    everything = [one for each in found.values() for one in each]
    if len(found) > 1:
        print(scored("all", everything, {}))
        left: list[tuple[float, float]] = []
        for family, own in found.items():
            factors = fitted([one for one in everything if one.row.family != family])
            print(scored(f"{family} by the others ({listed(factors)})", own, factors))
            left += [one.points(factors) for one in own]
        print(line("all, leave-one-family-out", left, [one.row.name for one in everything]))


def listed(factors: Mapping[str, float]) -> str:
    """The factors by name."""
    return ", ".join(f"{name} × {factor:.3f}" for name, factor in factors.items())


def scored(title: str, found: Sequence[Compared], factors: Mapping[str, float]) -> str:
    """Scores of rows, in points of MFU."""
    return line(title, [one.points(factors) for one in found], [one.row.name for one in found])


if __name__ == "__main__":
    main()
