"""A compiled file that is ready to run, and one rank of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from attrs import evolve, field, frozen

from partita.compiler.analysis.time import end_seconds, stage_seconds
from partita.compiler.instructions import Channel, Compute, Traffic
from partita.compiler.layout import Layout, local_type
from partita.compiler.ops.groups import ANCHOR
from partita.compiler.ops.optimizer import EMA
from partita.compiler.pipeline import compile_evaluation, compile_run
from partita.compiler.program import Program
from partita.compiler.state import Compilation, Scoring
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.spec import Spec, Train
from partita.dsl.types import Type
from partita.runtime.bad_steps import BadStepPolicy
from partita.runtime.checkpoint.parts import SavedTensor, state_name, state_tensors
from partita.runtime.data.dataset import Dataset
from partita.runtime.data.own_rows import OwnRows
from partita.runtime.declared import waits
from partita.runtime.evaluation import EvaluationResult, evaluation, order_of
from partita.runtime.executor import Executor, Rates
from partita.runtime.global_tensors import piece_view
from partita.runtime.inference.ranks import ForwardRank, joined
from partita.runtime.inference.rollouts import Rollout, Rollouts, rollouts_of
from partita.runtime.inference.sampling import Samples, samples_of
from partita.runtime.inference.scoring import Scorer
from partita.runtime.initial import initial
from partita.runtime.inputs import Batch, tensors_of
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.mapped import mapped_tensor
from partita.runtime.pace import Sums
from partita.runtime.python_functions import Functions, all_functions
from partita.runtime.regions import in_slabs, pieces_of
from partita.runtime.stages import ParameterStore, copy_of
from partita.runtime.tracing.flight import CONNECTING, STARTING, Flight
from partita.runtime.transports.transport import Transport
from partita.runtime.validation import UpdateBackup, Validation


@frozen(eq=False)
class CompiledRun:
    """A compiled file, ready to run: the programs for training and evaluation, the settings, and the `functions` of the
    operations that it defines; `rows` is the size of the evaluation set, if all of it is evaluated; `samples` describes
    the text that is written after each evaluation, if any, and `rollouts` what answers the prompts that are its data.
    """

    spec: Spec
    training: Compilation
    evaluation: Compilation | None
    functions: Functions = field(factory=dict)
    rows: int | None = None
    samples: Samples | None = None
    rollouts: Rollouts | None = None

    def evaluating(self, rows: int | None, gpu: bool = False) -> CompiledRun:
        """The same run, but evaluating a whole set with that many rows. Raises Refused (E0623) if it cannot."""
        if rows is None:
            return self
        return evolve(self, rows=rows, evaluation=compile_evaluation(self.spec, self.training, rows, gpu))

    @property
    def evaluated(self) -> list[int]:
        """The indices of the batches of an evaluation, in order; empty if the file does not evaluate."""
        return order_of(self.train, self.evaluation.program, self.program, self.rows) if self.evaluation else []

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
    def programs(self) -> list[Program | None]:
        """All programs, in an order from which the purpose of each follows."""
        evaluation = self.evaluation.program if self.evaluation is not None else None
        writing = (each.scoring for each in (self.samples, self.rollouts) if each is not None)
        return [self.program, evaluation, *(program for scoring in writing for program in scoring.programs)]

    @property
    def channels(self) -> Mapping[Channel, Traffic]:
        """The channels of all programs, each with the largest traffic of any."""
        return joined([program for program in self.programs if program is not None])

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """Warnings about the text that is written."""
        return tuple(doubt for each in (self.samples, self.rollouts) if each is not None for doubt in each.warnings)

    def writing(self, folder: Path, gpu: bool = False) -> CompiledRun:
        """The same run, but writing text after each evaluation if the file, which is in `folder`, asks for it. Raises
        Refused (E06xx, E1001 to E1003).
        """
        return evolve(self, samples=samples_of(self.spec, self.training, folder, gpu))

    def answering(self, data: Dataset | None, folder: Path, allow_python: bool = False) -> CompiledRun:
        """The same run, but answering the prompts that are its data, if they are. Raises Refused, as `rollouts_of`."""
        return evolve(self, rollouts=rollouts_of(self.training, data, folder, allow_python))

    @cached_property
    def predicted(self) -> tuple[float, ...]:
        """The predicted working time per step of each pipeline rank, in seconds."""
        seconds = stage_seconds(self.training)
        return tuple(
            end_seconds(self.training, rank, seconds[rank.stages[0], "F"])
            + sum(seconds[each.stage, each.action.kind] for each in rank.instructions if isinstance(each, Compute))
            for rank in self.training.plan.ranks
        )

    def peak_flops(self, device: torch.device) -> float | None:
        """The peak FLOP/s of all ranks' devices; None if it is not known: the mesh names no device, or a GPU, and the
        ranks compute on CPUs.
        """
        mesh, declared = self.spec.mesh, self.training.device
        if mesh is None or mesh.device is None or (declared.gpu and device.type != "cuda"):
            return None
        return declared.flops[self.train.dtype] * self.ranks

    @property
    def ranks(self) -> int:
        """The number of ranks in the mesh."""
        return self.program.mesh.ranks


def prepare(spec: Spec, gpu: bool = False, allow_python: bool = False) -> CompiledRun:
    """Compile what a run needs, for GPUs or CPUs, and import the Python files that it names, if that is allowed.

    Raises Refused with the errors in the file.
    """
    compiled = compile_run(spec, gpu)
    return CompiledRun(spec, *compiled, all_functions(spec, allow_python))


def check_ranks(spec: Spec, ranks: int) -> None:
    """Refuse (E0610) a launcher that started a different number of ranks than the file's mesh has."""
    needed = spec.mesh.ranks if spec.mesh is not None else 1
    if ranks != needed:
        raise refuse(
            "E0610",
            f"the mesh has {needed} ranks, but {ranks} were started",
            spec.mesh.span if spec.mesh else None,
            help=f"start {needed} processes, or change the mesh",
        )


class Rank:
    """One rank of the mesh: its executors for training and evaluation, which share its shards of the parameters.

    With `keep_totals`, gradients outlive their step. With `times`, a file, the times of training steps are written
    there. If `paced`, the ranks find out which of them are slow. Ranks that train several groups do neither. If the
    rank is `alone` in its process, a step also finds how much memory each rank uses, and how much of the devices' peak.
    Tensors that are mapped into memory are files in a `folder`, or in a temporary one that is removed with the rank.
    """

    def __init__(
        self,
        plan: CompiledRun,
        rank: int,
        transport: Transport,
        device: torch.device,
        keep_totals: bool = False,
        times: Path | None = None,
        flight: Flight | None = None,
        paced: bool = False,
        alone: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.rank = rank
        self.device = device
        self.transport = transport
        self.memory = ParameterStore()
        # Of the other groups that this rank trains apart.
        self.extra_replicas = tuple(ParameterStore() for _ in range(plan.program.replicas_per_rank - 1))
        self.failed = False  # whether a bad step has ended the run
        self.eval_nonfinite = False  # whether the loss of an evaluation was not finite
        self.unsound_from: int | None = None
        self.bad_step_policy = BadStepPolicy(plan.train.on_bad_step, others=plan.train.sync is None)
        self.ended = False  # before the last step, because some rank was asked to
        self.saved: int | None = None  # the step after which it has ended, if that is saved: on rank 0, which knows
        self.flight = flight or Flight(None)
        self.flight.begin(CONNECTING)
        transport.open(plan.program.mesh, plan.channels, plan.program.streams)
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
            None if self.extra_replicas else times,
            self.flight,
            paced and not self.extra_replicas,
            plan.functions,
            peaks=alone,
            extra_replicas=self.extra_replicas,
            averages=plan.train.averages,
        )
        record = plan.program.ranks[plan.program.mesh.pipe_rank(rank)]
        copies = UpdateBackup(record, self.memory)
        self.validation = Validation(plan.train.validate, self.training, self.bad_step_policy, copies)
        self.peak_flops = plan.peak_flops(device) if alone else None
        self.sums: Sums | None = None  # of all ranks, since the start of the run
        self.evaluation = (
            Executor(
                plan.evaluation.program,
                rank,
                transport,
                self.parameters_for(plan.evaluation),
                seed,
                device,
                flight=self.flight,
                custom=plan.functions,
            )
            if plan.evaluation
            else None
        )

    @waits("before the first step, initial values arrive from the host")
    def _initialise(self) -> None:
        """Make the rank's shards of parameters, by (seed, name, coordinates), and of states: zeros or copies."""
        program = self.plan.program
        mesh = program.mesh
        for name in program.ranks[mesh.pipe_rank(self.rank)].parameters:
            record = program.parameter(name)
            type = local_type(record.type, record.layout, mesh.sizes)
            self.memory.masters[name] = self._kept(name, type, record.host, record.mapped)
            self._begin(name, record.layout, self.memory.masters[name])
            for state in (*record.states, *record.companions):
                type = local_type(state.type, record.stored(state), mesh.sizes)
                tensor = self._kept(state_name(state.name, name), type, state.host, record.mapped and state.host)
                self.memory.states[state.name, name] = tensor
                if state.copy:
                    self._begin(name, record.stored(state), tensor)
            for other in self.extra_replicas:
                # Groups begin alike, and share what is not trained.
                own, master = bool(record.companions), self.memory.masters[name]
                other.masters[name] = copy_of(master) if own else master
                for state in record.states:
                    other.states[state.name, name] = copy_of(self.memory.states[state.name, name])

    def _kept(self, name: str, type: Type, host: bool, mapped: bool) -> torch.Tensor:
        """Zeros in the memory in which a tensor is kept between steps."""
        dtype, pinned = DTYPES[type.dtype], self.device.type == "cuda"
        if not mapped:
            device, pinned = ("cpu", pinned) if host else (self.device, False)
            return torch.zeros(type.shape, dtype=dtype, device=device, pin_memory=pinned)
        if self.folder is None:
            self._temporary = TemporaryDirectory(prefix="partita-")
            self.folder = Path(self._temporary.name)
        path = self.folder / f"rank-{self.rank}" / name
        tensor = mapped_tensor(path, type.shape, dtype)
        self.memory.files[name] = path
        return tensor

    def _begin(self, name: str, layout: Layout, part: torch.Tensor) -> None:
        """Set the rank's shard of a parameter, or of a copy, in a layout, to its initial value. A large one is computed
        some rows at a time.
        """
        program = self.plan.program
        record, mesh = program.parameter(name), program.mesh
        begin = partial(initial, record.initial, record.type, self.plan.train.seed, name, record.fans)
        for piece in pieces_of(record.type, layout, mesh.sizes, mesh.coordinates(self.rank)):
            own = piece_view(part, layout, piece)
            for rows, region in in_slabs(piece.region):
                own[rows].copy_(torch.from_numpy(begin(region)))

    @property
    def memories(self) -> tuple[ParameterStore, ...]:
        """The rank's tensors for training; with replica groups, those of each group."""
        return (self.memory, *self.extra_replicas)

    def kept(self) -> Iterator[tuple[SavedTensor, torch.Tensor]]:
        """Yields the tensors that the rank keeps between steps, and the names under which they are saved."""
        program = self.plan.program
        place = (
            program.mesh.coordinates(self.rank)[program.mesh.replica_axis]
            if program.mesh.replica_axis is not None
            else 0
        )
        for each in state_tensors(program):
            coordinate, member = divmod(each.group or 0, program.replicas_per_rank)
            memory = self.memories[member]
            if each.parameter in memory.masters and (each.group is None or coordinate == place):
                yield (
                    each,
                    (
                        memory.masters[each.parameter]
                        if each.state is None
                        else memory.states[each.state, each.parameter]
                    ),
                )

    def parameters_for(self, state: Compilation) -> ParameterStore:
        """The rank's tensors as a program of the plan reads them: evaluation may read means in place of parameters,
        over time or over replica groups.
        """
        if not state.reads_means:
            return self.memory
        masters, which = dict(self.memory.masters), EMA if state.groups is None else ANCHOR
        for record in state.program.parameters:  # those that it reads
            mean = self.memory.states.get((which, record.name))
            if mean is not None and record.name in masters:
                stored = self.plan.program.parameter(record.name).state_layout
                assert record.layout == stored, record.name
                masters[record.name] = mean
        return ParameterStore(masters)

    def scorer(self, samples: Samples) -> Scorer:
        """Computes the logits of samples, from the rank's own parameters or from their means. The state that it keeps
        of a text lives as long as the scorer.
        """
        store = self.memory if self.plan.evaluation is None else self.parameters_for(self.plan.evaluation)
        return self._scorer(samples.scoring, store)

    @cached_property
    def rollout(self) -> Rollout | None:
        """Answers prompts with the rank's own parameters."""
        rollouts = self.plan.rollouts
        return None if rollouts is None else Rollout(rollouts, partial(self._scorer, rollouts.scoring, self.memory))

    def _scorer(self, scoring: Scoring, store: ParameterStore) -> Scorer:
        functions, seed = self.plan.functions, self.plan.train.seed
        own = self.rank, self.transport, self.device
        return Scorer(scoring, ForwardRank(scoring.programs, *own, seed, functions, store.masters, self.flight))

    def restart(self) -> None:
        """Reset parameters and optimizer states to their values before the first step."""
        program = self.plan.program
        for name, master in self.memory.masters.items():
            record = program.parameter(name)
            self._begin(name, record.layout, master)
            for state in record.states:
                tensor = self.memory.states[state.name, name]
                self._begin(name, record.stored(state), tensor) if state.copy else tensor.zero_()

    def reads(self, dataset: Dataset) -> Dataset:
        """A dataset of which batches have the rows that the rank computes with."""
        return OwnRows(dataset, self.training.rows, self.evaluation.rows if self.evaluation is not None else None)

    def tensors(self, batch: Mapping[str, object]) -> Batch:
        """A batch of the dataset as tensors on the host."""
        return tensors_of(self.plan.program, batch)

    def step(
        self, number: int, batch: Mapping[str, torch.Tensor], rates: Rates, bad_step_policy: BadStepPolicy | None = None
    ) -> Iterator[None]:
        """Run one training step. A bad step raises BadStep unless its policy lets it pass."""
        return self.training.step(number, batch, rates, bad_step_policy)

    def evaluate(self, count: int, batches: Callable[[int], Batch]) -> Generator[None, None, EvaluationResult]:
        """Evaluate `count` batches (`evaluation`). Afterwards `unsound_from` is the first batch of the first round
        whose loss is not finite, or None.
        """
        assert self.evaluation is not None
        outcome = yield from evaluation(self.evaluation, count, batches)
        self.unsound_from = outcome.unsound_from
        return outcome.result
