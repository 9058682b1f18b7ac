"""A compiled file that is ready to run, and one rank of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cached_property, partial
from math import isfinite, sqrt
from pathlib import Path
from typing import TypeAlias

import torch
from attrs import evolve, field, frozen

from partita.compiler.analysis.time import end_seconds, stage_seconds
from partita.compiler.graph import Guard
from partita.compiler.instructions import Channel, Compute, Traffic
from partita.compiler.layout import Layout
from partita.compiler.ops.optimizer import EMA
from partita.compiler.passes.update import SQUARE
from partita.compiler.pipeline import compile_evaluation, compile_run
from partita.compiler.program import Program
from partita.compiler.state import Compilation
from partita.dsl.builtins import ALL
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.spec import Spec, Train
from partita.runtime.bad_steps import BadStepPolicy
from partita.runtime.executor import Executor, Rates
from partita.runtime.initial import initial
from partita.runtime.inputs import Batch
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.pace import Sums
from partita.runtime.python_functions import Functions, functions_of
from partita.runtime.regions import region_of, shape_of
from partita.runtime.stages import Memory
from partita.runtime.tracing.flight import CONNECTING, STARTING, Flight
from partita.runtime.transports.transport import Transport

# Number of ids out of range of the axis they index, by guard; and loss, metrics and `Outside` of an evaluation.
Outside: TypeAlias = Mapping[Guard, float]
EvaluationResult: TypeAlias = tuple[float, dict[str, float], Outside]


@frozen(eq=False)
class Plan:
    """A compiled file, ready to run: the programs for training and evaluation, the settings, and the `functions` of the
    operations that it defines; `rows` are those of the evaluation set, if all of it is evaluated.
    """

    spec: Spec
    training: Compilation
    evaluation: Compilation | None
    functions: Functions = field(factory=dict)
    rows: int | None = None

    def evaluating(self, rows: int | None, gpu: bool = False) -> Plan:
        """The same, but evaluating a whole set with that many rows. Raises Refused (E0623) if that cannot be."""
        if rows is None:
            return self
        return evolve(self, rows=rows, evaluation=compile_evaluation(self.spec, self.training, rows, gpu))

    @property
    def evaluated(self) -> list[int]:
        """The indices of the batches of an evaluation, in order. Before a set whose last batch is not full comes one of
        the row alone with which it is filled up: the batch after the last. Empty if the file does not evaluate.
        """
        if self.train.eval is None or self.evaluation is None:
            return []
        count = self.train.eval.arguments["batches"]
        if self.rows is not None:
            rows = max(
                e.type.axis(self.program.batch).size for e in self.program.inputs if e.type.has(self.program.batch)
            )
            count = -(-self.rows // rows)
        first = [count] if self.evaluation.program.padding else []
        return [*first, *range(1 if count == ALL else count)]

    @property
    def train(self) -> Train:
        """The train block."""
        _, train = self.spec.trained
        return train

    @property
    def program(self) -> Program:
        """The training program."""
        return self.training.program

    @property
    def channels(self) -> Mapping[Channel, Traffic]:
        """The channels of both programs, each with the larger traffic of the two."""
        found = dict(self.program.channels)
        evaluation = self.evaluation.program if self.evaluation else None
        for channel, traffic in evaluation.channels.items() if evaluation else ():
            found[channel] = traffic.or_more(found.get(channel, traffic))
        return found

    @cached_property
    def predicted(self) -> tuple[float, ...]:
        """The predicted working time per step of each pipeline rank, in seconds."""
        seconds = stage_seconds(self.training)
        return tuple(
            end_seconds(self.training, rank)
            + sum(seconds[each.stage, each.action.kind] for each in rank.instructions if isinstance(each, Compute))
            for rank in self.program.ranks
        )

    def peak_flops(self, device: torch.device) -> float | None:
        """The peak FLOP/s of all ranks' devices; None if it is not known: the mesh names no device, or a GPU, and the
        ranks compute on CPUs.
        """
        mesh, declared = self.spec.mesh, self.training.device
        if mesh is None or mesh.device is None or (declared.gpu and device.type != "cuda"):
            return None
        return declared.flops[self.train.precision] * self.ranks

    @property
    def ranks(self) -> int:
        """The number of ranks in the mesh."""
        return self.program.mesh.ranks


def prepare(spec: Spec, gpu: bool = False, allow_python: bool = False) -> Plan:
    """Compile what a run needs, for GPUs or CPUs, and import the Python files that it names, if that is allowed.

    Raises Refused with the errors in the file.
    """
    compiled = compile_run(spec, gpu)
    return Plan(spec, *compiled, functions_of(spec.model, allow_python))


def check_ranks(plan: Plan, ranks: int) -> None:
    """Refuse (E0610) a launcher that started a different number of ranks than the mesh has."""
    if ranks != plan.ranks:
        raise refuse(
            "E0610",
            f"the mesh has {plan.ranks} ranks, but {ranks} were started",
            plan.spec.mesh.span if plan.spec.mesh else None,
            help=f"start {plan.ranks} processes, or change the mesh",
        )


class Rank:
    """One rank of the mesh: its executors for training and evaluation, which share its shards of the parameters.

    With `keep_totals`, gradients outlive their step. With `times`, a file, the times of training steps are written
    there. If `paced`, the ranks find out which of them are slow. If it is `alone` in its process, a step also finds how
    much memory each rank uses, and how much of the devices' peak.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        transport: Transport,
        device: torch.device,
        keep_totals: bool = False,
        times: Path | None = None,
        flight: Flight | None = None,
        paced: bool = False,
        alone: bool = False,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.device = device
        self.transport = transport
        self.memory = Memory()
        self.failed = False  # whether a bad step has ended the run
        self.unsound = False  # whether the loss of an evaluation was not finite
        self.judge = BadStepPolicy(plan.train.on_bad_step)
        self.ended = False  # before the last step, because some rank was asked to
        self.flight = flight or Flight(None)
        self.flight.begin(CONNECTING)
        transport.open(plan.program.mesh, plan.channels)
        self.flight.begin(STARTING)
        self._initialise()
        seed = plan.train.seed
        self.training = Executor(
            plan.program,
            rank,
            transport,
            self.memory,
            seed,
            device,
            keep_totals,
            times,
            self.flight,
            paced,
            plan.functions,
            peaks=alone,
        )
        self.peak_flops = plan.peak_flops(device) if alone else None
        self.sums: Sums | None = None  # of all ranks, since the start of the run
        self.evaluation = (
            Executor(
                plan.evaluation.program,
                rank,
                transport,
                self.read_by(plan.evaluation),
                seed,
                device,
                flight=self.flight,
                custom=plan.functions,
            )
            if plan.evaluation
            else None
        )

    def _initialise(self) -> None:
        """Make the rank's shards of parameters, by (seed, name, coordinates), and of states: zeros or copies."""
        program = self.plan.program
        mesh = program.mesh
        coordinates = mesh.coordinates(self.rank)
        for name in program.ranks[mesh.pipe_rank(self.rank)].parameters:
            record = program.parameter(name)
            self.memory.masters[name] = self._initial(name, record.layout).contiguous()
            for state in record.states:
                if state.copy:
                    self.memory.states[state.name, name] = self._initial(name, record.stored(state)).contiguous()
                    continue
                shape = shape_of(region_of(state.type, record.stored(state), mesh.sizes, coordinates))
                zeros = torch.zeros(shape, dtype=DTYPES[state.type.dtype], device=self.device)
                self.memory.states[state.name, name] = zeros

    def _initial(self, name: str, layout: Layout) -> torch.Tensor:
        """The initial value of the rank's shard of a parameter, or of a copy, in a layout."""
        program = self.plan.program
        record, mesh = program.parameter(name), program.mesh
        region = region_of(record.type, layout, mesh.sizes, mesh.coordinates(self.rank))
        array = initial(record.initial, record.type, self.plan.train.seed, name, record.fans, region)
        return torch.from_numpy(array).to(device=self.device, dtype=DTYPES[record.type.dtype])

    def read_by(self, state: Compilation) -> Memory:
        """The rank's tensors as a program of the plan reads them: evaluation may read means in place of parameters."""
        if not state.reads_means:
            return self.memory
        masters = dict(self.memory.masters)
        for name in masters:
            mean = self.memory.states.get((EMA, name))
            if mean is not None:
                stored = self.plan.program.parameter(name).state_layout
                assert state.program.parameter(name).layout == stored, name
                masters[name] = mean
        return Memory(masters)

    def restart(self) -> None:
        """Reset parameters and optimizer states to their values before the first step."""
        program = self.plan.program
        for name, master in self.memory.masters.items():
            record = program.parameter(name)
            master.copy_(self._initial(name, record.layout))
            for state in record.states:
                tensor = self.memory.states[state.name, name]
                tensor.copy_(self._initial(name, record.stored(state))) if state.copy else tensor.zero_()

    def tensors(self, batch: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """A full batch of the dataset as tensors on the host, floats in the dtype of the computation."""
        types = {each.name: each.type for each in self.plan.program.inputs}
        return {
            name: torch.as_tensor(array).to(DTYPES[types[name].dtype]) for name, array in batch.items() if name in types
        }

    def step(
        self, number: int, batch: Mapping[str, torch.Tensor], rates: Rates, judge: BadStepPolicy | None = None
    ) -> Iterator[None]:
        """Run one training step. A bad step raises BadStep unless the judge lets it pass."""
        return self.training.step(number, batch, rates, judge)

    def evaluate(self, count: int, batches: Callable[[int], Batch]) -> Generator[None, None, EvaluationResult]:
        """Evaluate `count` batches. Returns loss and metrics, of all batches as if they were one or, if they need full
        batches, their mean; and the number of ids out of range.

        Random numbers are those of steps before the first: the same every time, and no training step's. Afterwards
        `unsound_from` is the first batch of the first round whose loss is not finite, or None.
        """
        assert self.evaluation is not None
        rounds = self.evaluation.program.rounds
        loss, metrics, outside = 0.0, dict[str, float](), dict[Guard, float]()
        share = rounds / count
        self.unsound_from: int | None = None
        for first in range(0, count, rounds):
            yield from self.evaluation.run(-first, partial(shifted, batches, first))
            one, named, _ = self.results(self.evaluation)
            if not isfinite(one) and self.unsound_from is None:
                self.unsound_from = first
            for guard, number in self.outside(self.evaluation).items():
                outside[guard] = outside.get(guard, 0.0) + number
            loss += one * share
            for name, value in named.items():
                metrics[name] = metrics.get(name, 0.0) + value * share
        return loss, metrics, outside

    def results(self, executor: Executor) -> tuple[float, dict[str, float], float]:
        """Loss, metrics and gradient norm of an executor's last step."""
        named = executor.named_statistics()
        squares = sum(value for name, value in named.items() if name.startswith(SQUARE))
        loss = named.pop("loss")
        guards = {guard.name for guard in executor.program.guards}
        metrics = {name: value for name, value in named.items() if not name.startswith(SQUARE) and name not in guards}
        return loss, metrics, sqrt(squares) if squares >= 0 else float("nan")

    @staticmethod
    def outside(executor: Executor) -> Outside:
        """Number of ids out of range that an executor's last step computed, by guard."""
        named = executor.named_statistics()
        return {guard: named[guard.name] for guard in executor.program.guards}


def check_ids(outside: Outside, when: str) -> None:
    """Refuse (E0605) computed ids out of range of the axis they index."""
    wrong = [(guard, count) for guard, count in outside.items() if count]
    if wrong:
        raise Refused(
            Diagnostic(
                "E0605",
                f"{count:,.0f} of the ids computed here are out of range for `{guard.axis.name}`, {when}",
                guard.span,
                (f"`{guard.axis.name}` has size {guard.axis.size}: ids go from 0 to {guard.axis.size - 1}",),
                f"keep them there: `minimum(maximum(ids, 0), size({guard.axis.name}) - 1)`",
            )
            for guard, count in wrong
        )


def shifted(batches: Callable[[int], Batch], first: int, index: int) -> Batch:
    """The batch at `index` after `first`: a later round's."""
    return batches(first + index)
