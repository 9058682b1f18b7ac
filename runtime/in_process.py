"""A run with all ranks in this process, as `partita run --transport virtual` and `partita.train` start it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from partita.dsl.diagnostic import Diagnostic
from partita.runtime.checkpoint.checkpoints import Checkpoints
from partita.runtime.checkpoint.settings import Settings
from partita.runtime.data.dataset import Dataset
from partita.runtime.data_files import DataFile
from partita.runtime.executor import never
from partita.runtime.rank import CompiledRun
from partita.runtime.supervision.cores import usable
from partita.runtime.supervision.launcher import rank_environment
from partita.runtime.training import ClusterOf, Observer, VirtualRun
from partita.runtime.transports.virtual import VirtualCluster


def run_in_process(
    plan: CompiledRun,
    dataset: Dataset | None,
    settings: Settings | None,
    observer: Observer,
    report: Callable[[Diagnostic], None],
    data: Sequence[DataFile] = (),
    strict: bool = True,
    stop_requested: Callable[[], bool] = never,
    cluster: ClusterOf = VirtualCluster,
) -> tuple[VirtualRun, bool]:
    """Do the whole run, with checkpoints if there are settings for them.

    Returns the ranks with their final state, and whether the last checkpoint was saved. `observer` is rank 0's,
    `report` gets the diagnostics of checkpoints. However the run ends, nothing of it remains; a pending save is
    completed if possible.
    """
    with _threads_of_a_rank(plan.ranks):
        run = VirtualRun(plan, strict, cluster=cluster)
        checkpoints = [Checkpoints(rank, settings, report, data) for rank in run.ranks] if settings is not None else []
        try:
            run.train(dataset, [observer], checkpoints, report, stop_requested)
        finally:
            for each in reversed(checkpoints):  # rank 0 last: it commits what the others have written
                each.abort()
            for each in checkpoints:
                each.close()
    return run, not any(each.unsaved for each in checkpoints)


@contextmanager
def _threads_of_a_rank(ranks: int) -> Iterator[None]:
    """Use as many threads as each rank would have as a process of its own: sums depend on it."""
    before = torch.get_num_threads()
    threads = rank_environment(os.environ, ranks)["OMP_NUM_THREADS"].split(",")[0].strip()
    torch.set_num_threads(max(1, min(int(threads), len(usable()))) if threads.isdecimal() else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
