"""However the models that are shipped are laid out, `verify` passes: none fails for want of a rule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from partita.compiler.pipeline import schedule_spec
from partita.dsl.diagnostic import Refused
from partita.runtime.verification.verify import verify
from tests.zoo.layouts import FILES, MISFITS, WHOLE_BATCH, Drawn, draw


def holds(path: Path, seed: int, uneven: bool = False) -> str:
    """Verify a file under a random layout; `uneven`: under one that is refused for its sizes, with padding. Returns
    `verified`, or why there was nothing to verify.
    """
    random = Random(f"{path.stem} {seed}")
    drawn = draw(random, path)
    try:
        if uneven:
            drawn = drawn.with_rows(random.randint(3, 13))
            if not refused_for_its_sizes(drawn):
                return "fits"
            drawn = drawn.padded()
        found = verify(drawn.spec())
    except Refused as refused:
        if not {each.code for each in refused.diagnostics} <= MISFITS | WHOLE_BATCH:
            refused.add_note(str(drawn))
            raise
        return "does not fit"
    except Exception as error:
        error.add_note(str(drawn))
        raise
    assert found.passed, f"{drawn}\n" + "\n\n".join(each.render() for each in found.diagnostics)
    return "verified" if found.execution is not None else "undecided"


def refused_for_its_sizes(drawn: Drawn) -> bool:
    """Whether a layout is refused because sizes do not divide, and for nothing else."""
    try:
        schedule_spec(drawn.spec())
    except Refused as refused:
        return {each.code for each in refused.diagnostics} <= {"E0406", "E0411"}
    return False


@pytest.mark.soak
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_does_not_divide_is_padded(path: Path):
    """Three hundred over all files that are refused without. (A batch that no rule splits is not padded.)"""
    counts = Counter(holds(path, seed, uneven=True) for seed in range(40))
    print(path.stem, dict(counts))
    assert counts["verified"] + counts["fits"] >= 10, counts


@pytest.mark.soak
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_any_layout_of_a_shipped_model_is_verified(path: Path):
    """A thousand over all files."""
    counts: Counter[str] = Counter()
    seed = 0
    while counts["verified"] < -(-1000 // len(FILES)):
        counts.update([holds(path, seed)])
        seed += 1
        assert seed < 200 or counts["verified"] > seed / 20, counts
    print(path.stem, dict(counts))
    assert counts["undecided"] <= 0.1 * counts["verified"]
