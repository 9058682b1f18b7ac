"""Random programs stay within the bound of their memory on a GPU, whatever is most of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.dsl.diagnostic import Refused
from partita.runtime.fake_gpu.rank import representatives, try_rank
from partita.runtime.fake_gpu.watch import Kind
from tests.runtime.fake_gpu.programs import drawn

FEW = {"expressions": 2, "layers": 1, "files": 1}
MANY = {"expressions": 1000, "layers": 600, "files": 400}
FOUND = ("layers", range(116, 146, 29))  # delayed reductions; slices, and evaluations without them
CHUNK = 50
CHUNKS = [(kind, range(first, first + CHUNK)) for kind, count in MANY.items() for first in range(0, count, CHUNK)]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [*((kind, range(count)) for kind, count in FEW.items()), FOUND, *CHUNKS],
    ids=lambda given: given if isinstance(given, str) else f"{given.start}-{given.stop}",
)
def test_memory_of_random_programs_is_within_its_bound(kind: str, numbers: range, tmp_path: Path):
    """One of the ranks of each, by turns."""
    tried, above = 0, []
    for number in numbers:
        try:
            program, plan = drawn(kind, number, tmp_path)
        except Refused:
            continue
        tried += 1
        ranks = representatives(plan)
        found = try_rank(plan, ranks[number % len(ranks)])
        faults = [each for each in found.faults if each.kind is Kind.MEMORY]
        above += [f"{kind} {number}, {each.message}\n  {each.place}\n{program}" for each in faults]
    assert tried > len(numbers) // 4
    assert not above, "\n\n".join(above)
