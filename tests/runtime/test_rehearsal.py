"""A rehearsal leaves nothing behind: runs of two ranks compute the same bits after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.files import SPECS
from tests.marks import soak
from tests.runtime.transports.test_process import PROGRAMS, records, supervised

SMALL = ("batch = 32, seq = 128", "batch = 16, seq = 8"), ("embed = 128", "embed = 16"), ("key = 32", "key = 8")
# A frozen table of numbers that a step changes besides is what an update must not see twice.
MORE = "mesh two(data = 2)\nlayout rows on two { shard batch -> data  RULES }\n"


def texts() -> list[str]:
    """Two stages on each rank under interleaved 1F1B, and in a V; and rows on two ranks, with all state split."""
    tiny = (SPECS / "tiny.par").read_text()
    for before, after in SMALL:
        assert before in tiny
        tiny = tiny.replace(before, after)
    tiny = tiny.replace("stdlib(holdout = 5%)", "random()").replace("eval = every(50, batches = 10)", "")
    rows = MORE.replace("RULES", "shard param -> data")
    split = tiny.replace("layout = stages", "layout = rows").replace("schedule = fast", "schedule = whole")
    return [
        tiny,
        tiny.replace("interleaved_1f1b(microbatches = 8, chunks = 2)", "zb_v(microbatches = 8)"),
        split.replace("train {", f"{rows}schedule whole = one_f_one_b(microbatches = 2)\ntrain {{"),
    ]


@pytest.mark.parametrize("first", [2, *soak(0)])
def test_runs_compute_the_same_after_a_rehearsal(first: int, tmp_path: Path) -> None:
    tried = texts()[first:]
    (file := tmp_path / "texts.json").write_text(json.dumps(tried))
    done = supervised(str(PROGRAMS / "rehearsed.py"), str(file))
    assert done.returncode == 0, done.stderr
    found = records(done.stdout)
    assert len(found) == 2 * 2 * len(tried)
    for rank in range(2):
        own = [(each["losses"], each["state"]) for each in found if each["rank"] == rank]
        assert own[::2] == own[1::2]
        assert len({state for _, state in own}) == len(tried)
