"""However the models that are shipped are laid out, `verify` passes: none fails for want of a rule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from partita.dsl.diagnostic import Refused
from partita.runtime.verification.verify import verify
from tests.zoo.layouts import FILES, MISFITS, WHOLE_BATCH, draw


def holds(path: Path, seed: int) -> str:
    """Verify a file under a random layout. Returns `verified`, or why there was nothing to verify."""
    drawn = draw(Random(f"{path.stem} {seed}"), path)
    try:
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
