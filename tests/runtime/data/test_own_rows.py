"""A rank reads the rows that it computes with, and computes the same as if it had read all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note

from partita.runtime.data import own_rows
from partita.runtime.data.binding import open_data
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.training import VirtualRun
from tests.files import checked
from tests.marks import examples
from tests.programs import Program, programs, sharded_programs

FILE = """\
axis batch = 8, embed = 4
model m(x: [batch, embed], scale: [embed], y: i64[batch]) {{
  param w: [embed] ~ ones()
  {body}
}}
mesh ranks(data = 2, other = 2)
layout split on ranks {{ {rules} }}
schedule s = gpipe(microbatches = {microbatches})
train {{ layout = split  schedule = s  data = random()  optimizer = sgd(lr = 0.1)  steps = 2 {train} }}
"""
LOSS = "loss mean(x * w * scale) + 0 * mean(cast(y, f32))"
DATA = "shard batch -> data shard embed -> other"


@pytest.mark.parametrize(
    ("microbatches", "rules", "body", "train", "expected"),
    [
        (1, DATA, LOSS, "", [[range(4)], [range(4, 8)]]),
        (2, DATA, LOSS, "", [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]),
        (4, DATA, LOSS, "", [[range(i, i + 1) for i in range(j, 8, 2)] for j in (0, 1)]),
        (2, "shard embed -> data, other", LOSS, "", [[range(8)], [range(8)]]),
        (2, DATA, LOSS, "sync = local(groups = 2, every = 2)", [[range(4)], [range(4, 8)]]),
        (2, DATA, "loss mean(w * scale)", "", [[], []]),
    ],
)
def test_a_rank_reads_its_rows(microbatches, rules, body, train, expected):
    plan = prepare(checked(FILE.format(body=body, rules=rules, microbatches=microbatches, train=train), "m.par"))
    run = VirtualRun(plan)
    for rank in run.ranks:
        rows = rank.training.rows
        assert list(rows.own) == expected[rank.rank // 2]  # of four, those of one coordinate of `data`
        assert rows.count == 8


def trained(plan: CompiledRun, folder: Path) -> list[float]:
    """The losses of a run."""
    found: list[float] = []

    class Seen:
        def step(self, result) -> None:
            found.append(result.loss)

        def __getattr__(self, name: str):
            return lambda *given: None

    VirtualRun(plan).train(open_data(plan.program, plan.train, folder), [Seen()])
    return found


@given(program=programs() | sharded_programs(8))
@examples(3, suppress_health_check=list(HealthCheck))
def test_what_others_read_does_not_matter(program: Program):
    note(program.text)
    plan = prepare(checked(program.text, "random.par"))

    def wrong(shape, dtype) -> np.ndarray:
        return np.full(shape, np.nan, dtype) if np.issubdtype(dtype, np.floating) else ~np.zeros(shape, dtype)

    def alone(self, from_rows):
        return from_rows(range(self.count))

    with patch.object(own_rows.Rows, "read", alone):
        expected = trained(plan, Path())
    with patch.object(own_rows, "np", SimpleNamespace(empty=wrong)):
        assert trained(plan, Path()) == expected
