"""Which ranks are left, and which mesh is theirs."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.cli.training.elastic import fitted
from partita.dsl.load import load
from partita.dsl.syntax.reader import Reader
from partita.runtime.run_directory import RunDirectory
from partita.runtime.supervision.attempts import RankProcess
from partita.runtime.supervision.fleet import ElasticGroup, WorkerGroup
from partita.runtime.supervision.launcher import _Supervision
from partita.runtime.supervision.statuses import SECONDARY

TEXT = """
axis batch = 24, width = 12, hidden = 24

model m(x: [batch, width]) {{
  repeat 4 as layer {{
    param up: [width, hidden] ~ normal(0.1)
    param down: [hidden, width] ~ normal(0.1)
    let x = x + dot(relu(dot(x, up, over = width)), down, over = hidden)
  }}
  loss mean(x * x)
}}

mesh cluster({mesh})

layout cut on cluster {{
  shard batch -> data
  {rules}
}}

schedule fast = one_f_one_b(microbatches = 2)

train {{
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 4
  checkpoint = every(2)
}}
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mesh", "rules", "ranks", "overrides"),
    [
        ("data = 4", "", 3, ("cluster.data=3", "schedule.microbatches=4")),
        ("data = 4", "", 2, ("cluster.data=2", "schedule.microbatches=4")),
        ("data = 4", "", 4, ()),
        ("data = 2, pipe = 2", "stage layer -> pipe", 3, ("cluster.data=1", "schedule.microbatches=4")),
        ("data = 2, pipe = 2", "stage layer -> pipe", 1, None),
        # Five does not divide the batch: a rank is left over.
        ("data = 6", "", 5, ("cluster.data=4", "schedule.microbatches=3")),
        # Three ranks along `tensor` are more than two, but nobody asked for that: no axis grows.
        ("data = 2, tensor = 2", "shard hidden -> tensor", 3, ("cluster.data=1", "schedule.microbatches=4")),
    ],
)
def test_the_mesh_of_the_ranks_that_are_left(
    tmp_path: Path, mesh: str, rules: str, ranks: int, overrides: tuple[str, ...] | None
) -> None:
    path = tmp_path / "m.par"
    path.write_text(TEXT.format(mesh=mesh, rules=rules))
    reader = Reader()
    spec, diagnostics = load(path, reader=reader)
    assert spec is not None, diagnostics
    arguments = argparse.Namespace(file=str(path), overrides=["train.steps=5"], root=None, elastic=2)
    assert spec.mesh is not None
    found = fitted(arguments, spec, spec.mesh, reader, ranks, gpu=False)
    assert (found.overrides[1:] if found is not None else None) == overrides
    if found is not None:
        assert found.state.program.mesh.ranks == prod(size for _, size in found.spec.mesh.axes) <= ranks


def fleet_of(
    directory: RunDirectory, restarts: int = 0, crew: Callable[[int], WorkerGroup | None] | None = None
) -> ElasticGroup:
    return ElasticGroup(2, 4, restarts, crew or (lambda ranks: WorkerGroup(("true",), ranks)), directory)


@given(restarts=st.integers(0, 3), failures=st.lists(st.integers(0, 3), max_size=12))
def test_a_rank_is_gone_after_more_failures_than_restarts(
    tmp_path_factory: pytest.TempPathFactory, restarts: int, failures: list[int]
) -> None:
    with RunDirectory.open(tmp_path_factory.getbasetemp()) as directory:
        fleet = fleet_of(directory, restarts)
        count = 0
        for rank in failures:
            gone = fleet.lose([rank])
            assert fleet.size == 4 - (count := count + len(gone))
            assert (fleet.crew(fleet.size) is None) == (fleet.size < 2)
            if gone:
                break
        assert (count > 0) == any(failures.count(rank) > restarts for rank in set(failures))


def test_the_failures_of_a_rank_are_not_those_of_the_one_that_gets_its_number(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as directory:
        fleet = fleet_of(directory, restarts=1)
        assert [fleet.lose([rank]) for rank in (2, 1, 1, 2, 2)] == [[], [], [1], [], [2]]
        assert fleet.size == 2


def test_a_rank_that_only_lost_another_is_not_to_blame() -> None:
    watched = object.__new__(_Supervision)
    watched.stall = None
    statuses = (-signal.SIGKILL, *SECONDARY)
    watched.causes = [RankProcess(i, SimpleNamespace(returncode=each)) for i, each in enumerate(statuses)]  # type: ignore[arg-type]
    assert watched.failed_ranks == [0]


def test_ranks_return_when_somebody_says_so(tmp_path: Path) -> None:
    file = tmp_path / "ranks"
    file.write_text("3")  # of an earlier run
    with RunDirectory.open(tmp_path) as directory:
        fleet = fleet_of(directory)
        assert fleet.asked() == (None, "")
        assert fleet.lose([1, 2]) == [1, 2]
        for text, said in (
            ("4\n", (4, "")),
            ("five", (None, f"{file} must be a number of ranks from 2 to 4, not 'five'")),
            ("1", (None, f"{file} must be a number of ranks from 2 to 4, not '1'")),
            ("", (None, "")),
            ("3 ", (3, "")),
        ):
            file.unlink()
            file.write_text(text)
            assert fleet.asked() == said
            assert fleet.asked() == (None, "")  # once
        assert fleet.size == 3
