"""Runs ranks of a program as they would run on GPUs, one after the other, and says what is wrong.

The rank is the runtime's own: its executors, kernels and transport, over tensors without numbers. It trains for two
steps, the second of which finds what the first has left, evaluates, and does the device's part of a checkpoint: all of
it but the files. Of steps that are captured there is a third, since the second is where they are; and where reductions
are awaited steps later, there is one more than it takes until each step leaves as many as it awaits.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from attrs import evolve, field, frozen

from partita.compiler.analysis.liveness import tables
from partita.compiler.analysis.memory import peak_memory, workspace
from partita.compiler.program import InputRecord
from partita.dsl.grouping import grouped
from partita.runtime import kernels, stages
from partita.runtime import rank as ranks
from partita.runtime.checkpoint.checkpoints import load, shard_of
from partita.runtime.checkpoint.identity import manifest_of
from partita.runtime.checkpoint.loading import Commit, entries_of
from partita.runtime.checkpoint.shards import Entry
from partita.runtime.data.dataset import Dataset
from partita.runtime.dtypes import NUMPY
from partita.runtime.fake_gpu.device import fake_gpu
from partita.runtime.fake_gpu.nccl import fake_transport
from partita.runtime.fake_gpu.watch import Fault, Kind, Launch, Stopped, Watch, of
from partita.runtime.kernels import compiling
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.python_functions import CustomFunction
from partita.runtime.rank import CompiledRun, Rank
from partita.runtime.rehearsal import leaves_nothing, rehearse
from partita.runtime.training import Observer, StepResult, train
from partita.runtime.transports.transport import run_alone

STEPS, STEPS_OF_GRAPHS = 2, 3


@frozen(eq=False)
class FakeGpuResult:
    """What came of running a rank: what is wrong, the kernels of its last training step, why the host waited in it, and
    its peak of allocated bytes beside the bound.
    """

    rank: int
    faults: tuple[Fault, ...]
    launches: tuple[Launch, ...] = field(repr=False)
    waits: tuple[str, ...]
    peak: int
    bound: int

    @property
    def moved(self) -> int:
        """The bytes that the kernels read and write."""
        return sum(each.read + each.written for each in self.launches)

    def as_json(self) -> dict[str, Any]:
        """An object of `gpu` of `verify --json`."""
        return {
            "rank": self.rank,
            "passed": not self.faults,
            "kernels": len(self.launches),
            "moved": self.moved,
            "waits": dict(Counter(self.waits)),
            "peak_memory": self.peak,
            "bound": self.bound,
        }


def representatives(plan: CompiledRun) -> list[int]:
    """A rank of each rank of the pipeline: their programs are those of all. Coordinates on the mesh differ by turns."""
    mesh = plan.program.mesh
    return [own[-(i % 2)] for i, own in enumerate(grouped(range(mesh.ranks), mesh.pipe_rank).values())]


def try_ranks(plan: CompiledRun) -> list[FakeGpuResult]:
    """Run one of each rank of the pipeline of a plan that is compiled for GPUs."""
    return [try_rank(plan, rank) for rank in representatives(plan)]


def try_rank(plan: CompiledRun, number: int) -> FakeGpuResult:
    """Run one rank."""
    spec, program = plan.spec, plan.program
    count = STEPS_OF_GRAPHS if program.captured else max(STEPS, 2 * program.delay + 1)
    plan = evolve(plan, spec=evolve(spec, train=evolve(plan.train, steps=count)))
    watch = Watch(*_dtypes(plan))
    size = program.mesh.ranks
    # Each rank's statistics, which come together in every rank, are too small for the bound to count.
    step_metrics = 2 * size * (len(program.step_metrics) * program.mesh.groups + 2) * torch.float64.itemsize
    bound = peak_memory(plan.training, plan.training.plan.ranks[program.mesh.pipe_rank(number)]) + step_metrics
    bound -= workspace(plan.training)  # there are no libraries
    steps = None
    with (
        fake_gpu(watch) as device,
        _no_values(),
        own_tables(),
        _not_compiled(watch),
        _no_autograd(),
        fake_transport(watch, number, size, device) as transport,
    ):
        try:
            rank = Rank(plan, number, transport, device, alone=True, paced=True)
            steps = _Steps(watch, rank)
            watch.limit = bound
            if leaves_nothing(rank):
                run_alone(rehearse(rank, transport))
            run_alone(train(rank, _Zeros(plan), steps))
            _save_and_load(rank)
        except Stopped:
            pass  # a fault says why
        # The program is under test: whatever it raises is a finding.
        except Exception as error:
            what = str(error).strip().partition("\n")[0]
            watch.fault(Kind.FAILURE, f"{type(error).__name__}: {what}", of(error))
    if steps is None:
        return FakeGpuResult(number, tuple(watch.faults), (), (), 0, bound)
    above, place = watch.above
    peak = max(steps.peak, above)  # the latter also of a step that has failed
    if above:
        watch.fault(Kind.MEMORY, f"{peak} bytes are allocated, of at most {bound}", place)
    return FakeGpuResult(number, tuple(watch.faults), tuple(steps.launches), tuple(steps.waits), peak, bound)


class _Steps(Observer):
    """Observes a rank's steps: what the last of them has launched and waited for, and the greatest peak. What is alive
    between steps stays as it is, once as many reductions are in flight as may be; but for tables that only the first
    evaluation makes.
    """

    def __init__(self, watch: Watch, rank: Rank) -> None:
        self._watch, self._rank = watch, rank
        self.launches: list[Launch] = []
        self.waits: list[str] = []
        self.peak = 0
        self._left: int | None = None
        self._tables = _tables_of_evaluation(rank)
        self._begin()

    def _begin(self) -> None:
        self._watch.taken()
        self._watch.waits.clear()
        self._watch.peak = self._watch.live

    def step(self, result: StepResult) -> None:
        """A step is done."""
        watch = self._watch
        self.launches, self.waits, self.peak = watch.taken(), list(watch.waits), max(self.peak, watch.peak)
        for stage in self._rank.training.stages.values():
            if stage.in_flight:
                watch.fault(Kind.LIFETIME, f"microbatches {stage.in_flight} are in flight between steps")
        left = watch.live - watch.reserved
        plan = self._rank.plan
        # The inputs of a captured step stay, and what a first update makes.
        new = plan.program.captured and result.step == STEPS
        new = new or result.step in {update.first for update in plan.training.updates.values()}
        if self._left is not None and left > self._left and not new:
            watch.fault(Kind.MEMORY, f"a step leaves {left - self._left} bytes that were not there before it")
        if result.step >= 2 * plan.program.delay:  # before, some are awaited at once
            self._left = left if self._left is None else max(self._left, left)
        self._begin()
        if result.step == self._rank.plan.train.steps:
            watch.limit = sys.maxsize  # the bound is that of steps

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""
        if self._left is not None:
            self._left += self._tables
        self._tables = 0


def _tables_of_evaluation(rank: Rank) -> int:
    """Bytes of the tables that an evaluation makes beside those of training."""
    both = [each for each in (rank.plan.training, rank.plan.evaluation) if each is not None]
    nodes = [[node for stage in each.partitioned.stages for node in stage.nodes] for each in both]
    return tables(chain.from_iterable(nodes)) - tables(nodes[0])


class _Zeros(Dataset):
    """A dataset of zeros."""

    def __init__(self, plan: CompiledRun) -> None:
        self._inputs = plan.program.inputs
        self._evaluated = plan.evaluation.program.inputs if plan.evaluation is not None else ()

    def batch(self, step: int, rows: range | None = None) -> dict[str, np.ndarray]:
        """Of a training step."""
        return _zeros(self._inputs)

    def holdout_batch(self, index: int, rows: range | None = None) -> dict[str, np.ndarray]:
        """Of an evaluation."""
        return _zeros(self._evaluated)


def _zeros(inputs: Sequence[InputRecord]) -> dict[str, np.ndarray]:
    return {each.name: np.zeros(each.type.shape, NUMPY[each.type.dtype]) for each in inputs}


def _save_and_load(rank: Rank) -> None:
    """Take the snapshot of a checkpoint, and read all that the rank would read of one."""
    manifest = manifest_of(rank.plan.spec, rank.plan.program)
    shard_of(manifest, rank).take()
    with _Nowhere(Path(), manifest) as commit:
        load(rank, commit)


class _Nowhere(Commit):
    """A commit whose files are zeros."""

    def _file(self, rank: int) -> _File:
        return _File({each.name: each for each in entries_of(self.manifest, rank)})


@frozen
class _File:
    """As `safetensors` opens one."""

    entries: Mapping[str, Entry]

    def get_slice(self, name: str) -> torch.Tensor:
        """A tensor, of which regions can be read."""
        entry = self.entries[name]
        return torch.zeros(entry.shape, dtype=DTYPES[entry.dtype])

    get_tensor = get_slice


def _dtypes(plan: CompiledRun) -> tuple[torch.dtype, bool, set[torch.dtype], bool]:
    """The dtype of arithmetic, whether anything is in the host's memory, the dtypes of products that the file names,
    and whether it names f64.
    """
    products = (
        [value.type for value in node.inputs]
        for node in plan.training.sharded.graph.nodes
        if node.op.matrices([each.type for each in node.inputs], [each.type for each in node.outputs]) is not None
    )
    wide = {DTYPES[each.dtype] for operands in products for each in operands[:2] if each.is_float}
    records = plan.program.parameters
    offloads = any(each.host or any(state.host for state in (*each.states, *each.companions)) for each in records)
    doubles = any(value.type.dtype == "f64" for node in plan.training.forward.nodes for value in node.outputs)
    return DTYPES[plan.train.dtype], offloads, wide, doubles


def _no_values() -> AbstractContextManager[object]:
    """Initial values are zeros, which take no time to draw."""

    def zeros(initial: object, type: object, seed: int, name: str, fans: object, region: Sequence[slice]) -> np.ndarray:
        return np.zeros([each.stop - each.start for each in region], np.float32)

    return patch.object(ranks, "initial", zeros)


def _not_compiled(watch: Watch) -> AbstractContextManager[object]:
    """Segments are run as they are written: torch compiles nothing without a GPU."""

    def as_written(function: Callable[..., Any], tensors: Any) -> tuple[Callable[[list[torch.Tensor]], Any], bool]:
        def run(operands: list[torch.Tensor]) -> Any:
            with watch.segment():
                return function(*operands)

        return run, False

    return patch.object(compiling, "_compile", as_written)


def _no_autograd() -> AbstractContextManager[object]:
    """Gradients that torch would find of a file's own operations are zeros: its engine needs a GPU to be there."""

    def zeros(function: CustomFunction, ds: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> Any:
        return tuple(torch.zeros_like(each) for each in operands if each.is_floating_point())

    return patch.object(CustomFunction, "_autograd", zeros)


@contextmanager
def own_tables() -> Iterator[None]:
    """Tables that are kept from call to call, and compiled segments, are neither found nor left."""
    modules = [module for name, module in sys.modules.items() if name.startswith(kernels.__name__)]
    caches = [each for module in modules for each in vars(module).values() if hasattr(each, "cache_clear")]
    caches.append(stages.load_source)
    for each in caches:
        each.cache_clear()
    try:
        yield
    finally:
        for each in caches:
            each.cache_clear()
