"""A compiled file that is ready to run, and one rank of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cached_property, partial
from math import isfinite, sqrt
from pathlib import Path
from typing import TypeAlias

import torch
from attrs import frozen

from partita.compiler.analysis.time import end_seconds, stage_seconds
from partita.compiler.graph import Guard
from partita.compiler.instructions import Channel, Compute, Traffic
from partita.compiler.partition.update import SQUARE
from partita.compiler.pipeline import compile_run
from partita.compiler.program import Program
from partita.compiler.state import Compilation
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.spec import Spec, Train
from partita.runtime.bad_steps import Judge
from partita.runtime.executor import Executor
from partita.runtime.initial import initial
from partita.runtime.inputs import Batch
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.pace import Sums
from partita.runtime.regions import region_of, shape_of
from partita.runtime.stages import Memory
from partita.runtime.tracing.flight import CONNECTING, STARTING, Flight
from partita.runtime.transports.transport import Transport

# How many ids were beyond the axis that they index, by guard; and loss, metrics and those of an evaluation.
Outside: TypeAlias = Mapping[Guard, float]
Figures: TypeAlias = tuple[float, dict[str, float], Outside]


@frozen(eq=False)
class Plan:
    """A compiled file, ready to run: the programs of training and of evaluation, and the settings."""

    spec: Spec
    training: Compilation
    evaluation: Compilation | None

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
        """Those of both programs, with the more that either sends."""
        found = dict(self.program.channels)
        evaluation = self.evaluation.program if self.evaluation else None
        for channel, traffic in evaluation.channels.items() if evaluation else ():
            found[channel] = traffic.or_more(found.get(channel, traffic))
        return found

    @cached_property
    def predicted(self) -> tuple[float, ...]:
        """Seconds that each rank of the pipeline is predicted to work in a step."""
        seconds = stage_seconds(self.training)
        return tuple(
            end_seconds(self.training, rank)
            + sum(seconds[each.stage, each.action.kind] for each in rank.instructions if isinstance(each, Compute))
            for rank in self.program.ranks
        )

    @property
    def ranks(self) -> int:
        """The number of ranks, those of the whole mesh."""
        return self.program.mesh.ranks


def prepare(spec: Spec, gpu: bool = False) -> Plan:
    """Compile what a run needs, on GPUs or on CPUs. Raises Refused with what is wrong with the file."""
    return Plan(spec, *compile_run(spec, gpu))


def check_ranks(plan: Plan, ranks: int) -> None:
    """Refuse (E0610) a launcher that has started another number of ranks than the mesh has."""
    if ranks != plan.ranks:
        raise refuse(
            "E0610",
            f"the mesh has {plan.ranks} ranks, but {ranks} were started",
            plan.spec.mesh.span if plan.spec.mesh else None,
            help=f"start {plan.ranks} processes, or change the mesh",
        )


class Rank:
    """One rank of the mesh: its executors for training and evaluation over its parts of the same parameters.

    With `keep_totals`, gradients outlive their step. With `times`, a file, the times of training steps go there.
    `paced`: the ranks find out which of them are slow.
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
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.device = device
        self.transport = transport
        self.memory = Memory()
        self.failed = False  # a bad step has ended the run
        self.unsound = False  # the loss of an evaluation was not finite
        self.judge = Judge(plan.train.on_bad_step)
        self.ended = False  # before the last step, because a rank was asked to
        evaluation = plan.evaluation.program if plan.evaluation else None
        self.flight = flight or Flight(None)
        self.flight.begin(CONNECTING)
        transport.open(plan.program.mesh, plan.channels)
        self.flight.begin(STARTING)
        self._initialise()
        seed = plan.train.seed
        self.training = Executor(
            plan.program, rank, transport, self.memory, seed, device, keep_totals, times, self.flight, paced
        )
        self.sums: Sums | None = None  # what all ranks did since the start of the run
        self.evaluation = (
            Executor(evaluation, rank, transport, self.memory, seed, device, flight=self.flight) if evaluation else None
        )

    def _initialise(self) -> None:
        """The rank's parts of parameters, by (seed, name, coordinates), and of optimizer states, at zero."""
        program = self.plan.program
        mesh = program.mesh
        coordinates = mesh.coordinates(self.rank)
        for name in program.ranks[mesh.pipe_rank(self.rank)].parameters:
            record = program.parameter(name)
            dtype = DTYPES[record.type.dtype]
            self.memory.masters[name] = self._initial(name).contiguous()
            shape = shape_of(region_of(record.type, record.state_layout, mesh.sizes, coordinates))
            for state in record.states:
                self.memory.states[state, name] = torch.zeros(shape, dtype=dtype, device=self.device)

    def _initial(self, name: str) -> torch.Tensor:
        """The initial value of the rank's part of a parameter."""
        program = self.plan.program
        record, mesh = program.parameter(name), program.mesh
        region = region_of(record.type, record.layout, mesh.sizes, mesh.coordinates(self.rank))
        array = initial(record.initial, record.type, self.plan.train.seed, name, record.fans, region)
        return torch.from_numpy(array).to(device=self.device, dtype=DTYPES[record.type.dtype])

    def restart(self) -> None:
        """Parameters and optimizer states as they were before the first step."""
        for name, master in self.memory.masters.items():
            master.copy_(self._initial(name))
        for state in self.memory.states.values():
            state.zero_()

    def tensors(self, batch: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """A whole batch of the dataset, still on the host, floats in the dtype of the computation."""
        types = {each.name: each.type for each in self.plan.program.inputs}
        return {
            name: torch.as_tensor(array).to(DTYPES[types[name].dtype]) for name, array in batch.items() if name in types
        }

    def step(
        self, number: int, batch: Mapping[str, torch.Tensor], rate: float, judge: Judge | None = None
    ) -> Iterator[None]:
        """One training step; a bad one raises BadStep without a judge that lets it pass."""
        return self.training.step(number, batch, rate, judge)

    def evaluate(self, count: int, batches: Callable[[int], Batch]) -> Generator[None, None, Figures]:
        """An evaluation of so many batches; returns loss and metrics, of all batches as of one, or the mean of those of
        each where they need a whole batch; and how many ids were no index.

        Its random numbers are those of a step before the first, the same every time and no training step's.
        `unsound_from` is then the first batch of the first round whose loss is not finite, None where all are.
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
        """How many ids an executor's last step has computed beyond the axis that they index, by guard."""
        named = executor.named_statistics()
        return {guard: named[guard.name] for guard in executor.program.guards}


def check_ids(outside: Outside, when: str) -> None:
    """Refuse (E0605) computed ids beyond the axis that they index."""
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
    """A batch of a later round."""
    return batches(first + index)
