"""Runs a program's steps on one rank: a loop over the rank's instructions.

Everything static is decided beforehand: the loop calls closures bound once, and runs the generators that they return if
they have to wait. A step is a generator that yields while a handle is not done; real transports block inside `done`, so
with them it never yields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import torch

from partita.compiler.instructions import Channel, Transfer
from partita.compiler.program import InputPart, Program, late_name
from partita.runtime.bad_steps import BadStepPolicy
from partita.runtime.context import Context, begun
from partita.runtime.data.own_rows import Rows
from partita.runtime.declared import waits
from partita.runtime.delayed_gradients import DelayedGradients, Estimate
from partita.runtime.graphs import StepGraph
from partita.runtime.inputs import Batch, Inputs
from partita.runtime.instructions import Binder, Bound, Coroutine
from partita.runtime.pace import StragglerDetector
from partita.runtime.peak_memory import peak_memory
from partita.runtime.python_functions import NO_FUNCTIONS, Functions
from partita.runtime.stages import ParameterStore, Stage, allocator, load
from partita.runtime.tracing.flight import BETWEEN, EVALUATING, TRAINING, Flight
from partita.runtime.tracing.stopwatch import Stopwatch
from partita.runtime.transports.transport import Collective, Handle, Tensors, Transport, awaited

# Learning rates, one for each rule of the optimizer that updates.
Rates: TypeAlias = tuple[float, ...]
# Between the seeds of replica groups: of the golden ratio, as in docs/random.md, by which they are far apart.
SEED_STEP, SEEDS = 0x9E3779B97F4A7C15, 1 << 63


class Executor:
    """One rank's part of a program. `step_metrics` holds the last step's loss, metrics and squared norms (f64).

    A step is `run` as a whole, or in parts, between which the caller may do something else: the step is `compute`d; its
    metrics are summed over all ranks (`start_metrics`, `finish_metrics`); parameters are `update`d.

    With replica groups (DiLoCo), `memory` and the `extra_replicas` are the parameters of this rank's groups, which
    compute and update one after the other, each with its own metrics; `step_metrics` are then the means over all
    groups. Every few steps the groups are averaged. Where updates have gradients of earlier steps, `flush` saves these
    gradients, and `restore` loads them. If each update has the gradients of two steps, the parameters that are
    estimated from the first have a memory of their own.

    Tensors created here are inference tensors: without autograd's bookkeeping, a view takes half the time.

    `custom` are the functions of operations that the file defines. With `keep_totals`, `kept` holds the last step's
    totals by (stage, accumulator), for each memory. The `flight` recorder is marked at the end of each instruction.
    With `times`, a file, `stopwatch` records the times of these marks; if `paced`, `pace` adds up durations. With
    `peaks`, a step also finds the peak memory of every rank. A program that is to be captured as a graph is not
    captured with `times`, and has no durations without.
    """

    @torch.inference_mode()
    def __init__(
        self,
        program: Program,
        rank: int,
        transport: Transport,
        memory: ParameterStore,
        seed: int,
        device: torch.device,
        keep_totals: bool = False,
        times: Path | None = None,
        flight: Flight | None = None,
        paced: bool = False,
        custom: Functions = NO_FUNCTIONS,
        peaks: bool = False,
        extra_replicas: Sequence[ParameterStore] = (),
        averages: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self.program = program
        self.record = program.ranks[program.mesh.pipe_rank(rank)]
        self.transport = transport
        coordinates = program.mesh.coordinates(rank)
        self.context = Context(seed, device, coordinates=coordinates, transport=transport, functions=custom)
        functions = load(program)
        self.stages = {
            i: Stage(program.stages[i], functions, memory, device, program.microbatches, program.slices, program.delay)
            for i in self.record.stages
        }
        self._finish = functions[self.record.finish]
        self._factor = functions[program.factor] if program.factor else None
        self._update = functions[self.record.update] if self.record.update else None
        self._tied = tuple(allocator(each.type, device)() for each in self.record.receives)
        self.one = torch.ones((), dtype=torch.float64, device=device)
        self._totals: Tensors = ()  # of the step that is computed, and this rank's part of its statistics
        records = [stage.record for stage in self.stages.values()]
        self.stop_requested: Callable[[], bool] = never  # whether this rank was asked to end
        self._peaks = peaks
        # A row of statistics for each group along the mesh axis. An extra element tells all ranks in the same step
        # whether any was asked to end, and another is the rank's peak memory.
        own = len(program.step_metrics)
        self._part = torch.zeros(own * program.mesh.groups + 1 + peaks, dtype=torch.float64, device=device)
        self._set(torch.zeros(own + 1 + peaks * program.mesh.ranks, dtype=torch.float64, device=device))
        self._reads = Inputs(program, records, self.context.coordinates, device)
        self._reducing: dict[int, Coroutine] = {}
        self._late = DelayedGradients(program, self.record, self.stages)
        self._streams = self.context.streams = transport.streams(device)
        binder = Binder(program, self.record, self.stages, transport, self._streams, self.context, self._reducing)
        bound = binder.bind()
        self._flight = self.context.flight = flight or Flight(None)
        self._activity = TRAINING if self.record.update else EVALUATING
        capture = self._streams.capture if program.captured and times is None else None
        self._graph = StepGraph(capture, self._reads) if capture is not None else None
        self._marks = 0  # of a step that is captured
        self.pace = StragglerDetector(program, rank, self.context) if paced and self._graph is None else None
        self._mark = self._flight.mark if self.pace is None else _together(self._flight.mark, self.pace.mark)
        self._instructions = _with_marks(bound, self._mark)
        self.stopwatch: Stopwatch | None = None
        if times is not None:
            self.stopwatch = Stopwatch(times, len(bound), device)
            self._recorded = _together(self._mark, self.stopwatch.mark)
            self._timed = _with_marks(bound, self._recorded)
        self._memories = (memory, *extra_replicas)
        self._estimate = Estimate.of(program, self.record.parameters, memory) if program.paired else None
        self._seed = seed
        self._outer = functions[self.record.outer] if self.record.outer else None
        self._averages = averages
        self._coordinate = self.context.coordinates[program.mesh.replica_axis] if program.mesh.replica_axis else 0
        self._of_groups: list[torch.Tensor] = []  # the statistics of groups that have been heard
        self._held = -1  # which of the memories is computed with
        self._activate_replica(0)
        self._keep_totals = keep_totals
        self.kept: list[dict[tuple[int, str], torch.Tensor]] = []

    @property
    def totals(self) -> dict[tuple[int, str], torch.Tensor]:
        """The last step's totals of the last memory, if they are kept."""
        return self.kept[-1] if self.kept else {}

    @property
    def rows(self) -> Rows:
        """The rows of a batch that this rank reads."""
        members = len(self._memories)
        return self._reads.rows(range(self._coordinate * members, (self._coordinate + 1) * members))

    def _activate_replica(self, member: int) -> None:
        """Compute with one of the memories, unless it does already."""
        if member == self._held:
            return
        self._held = member
        self._use(self._memories[member])
        group = self._coordinate * len(self._memories) + member
        self.context.group, self.context.seed = group, seed_of(self._seed, group)
        self._reads.group = group

    def _use(self, memory: ParameterStore) -> None:
        """Compute with a memory, and update it."""
        names = self.record.parameters
        for stage in self.stages.values():
            stage.masters = tuple(memory.masters[name] for name in stage.record.parameters)
        self._masters = tuple(memory.masters[name] for name in names)
        records = [self.program.parameter(name) for name in names]
        self._states = tuple(memory.states[each.name, record.name] for record in records for each in record.states)

    def _set(self, vector: torch.Tensor) -> None:
        """Set what the last step's sums over all ranks are. The host has not read them."""
        self._vector, self.step_metrics = vector, vector[: len(self.program.step_metrics)]
        self._numbers: list[float] | None = None

    @waits("all ranks decide by the statistics of a step whether it is good")
    def _metrics_on_host(self) -> list[float]:
        """The last step's sums as numbers, in one read, once per step."""
        if self._numbers is None:
            self._numbers = self._vector.tolist()
        return self._numbers

    @property
    def ends(self) -> bool:
        """Whether any rank was asked to end before the last step; the same on all ranks."""
        return self._metrics_on_host()[len(self.program.step_metrics)] != 0.0

    @property
    def peaks(self) -> tuple[int, ...]:
        """The peak memory of each rank in bytes, as of the last step; empty if not requested."""
        return tuple(map(int, self._metrics_on_host()[len(self.program.step_metrics) + 1 :]))

    def step(
        self, number: int, batch: Batch, rates: Rates = (), bad_step_policy: BadStepPolicy | None = None
    ) -> Coroutine:
        """Run step `number` on a full batch: set `step_metrics`, and update parameters if the policy accepts the step.
        `rates` are the learning rates of the optimizer's rules. Without a policy, a step that is not finite raises
        BadStep.
        """
        return self.run(number, lambda _: batch, rates, bad_step_policy)

    @torch.inference_mode()
    def run(
        self,
        number: int,
        batches: Callable[[int], Batch],
        rates: Rates = (),
        bad_step_policy: BadStepPolicy | None = None,
    ) -> Coroutine:
        """Run step `number` over the batches of the program's rounds; `batches` gives each by its index. With padding,
        the first is a batch of copies of one row, with which the last is filled up.
        """
        if bad_step_policy is None and self._update is not None:
            bad_step_policy = BadStepPolicy()
        yield from self.compute(
            number, batches, rates, number if bad_step_policy is None else bad_step_policy.updates(number)
        )
        yield from self.end(number, bad_step_policy)

    @torch.inference_mode()
    def end(self, number: int, bad_step_policy: BadStepPolicy | None) -> Coroutine:
        """End the step that is computed: wait for its sums, and update parameters if the policy accepts it."""
        yield from self.finish_metrics(self.start_metrics())
        self.marked()
        own = self.step_metrics
        self._take_mean()
        # All ranks have the same statistics and reach the same verdict. On a GPU this synchronizes with the device.
        good = bad_step_policy is not None and bad_step_policy.accepts(number, self.named_step_metrics())
        yield from self.update(self._factor_of(own) if good and self._late.ready else None, self._averages(number))

    @torch.inference_mode()
    def compute(self, number: int, batches: Callable[[int], Batch], rates: Rates, update: int) -> Coroutine:
        """Run the microbatches of step `number`, whose update would be number `update`, up to its totals and this
        rank's part of the metrics; for all memories but the last, also the update.
        """
        self.kept = []
        for member in range(len(self._memories) - 1):
            self._activate_replica(member)
            yield from self._compute(number, batches, rates, update)
            yield from self.finish_metrics(self.start_metrics())
            self.marked()
            fine = not BadStepPolicy().fault(number, self.named_step_metrics())
            yield from self.update(self.clip_coefficient if fine else None)
        self._activate_replica(len(self._memories) - 1)
        yield from self._compute(number, batches, rates, update)

    def _compute(self, number: int, batches: Callable[[int], Batch], rates: Rates, update: int) -> Coroutine:
        context = self.context
        applied = update - self.program.delay
        context.step, context.rates, context.update = (
            number,
            rates,
            (applied + 1) // 2 if self.program.paired else applied,
        )
        mark = self.marked
        if self._graph is not None:
            totals, scalars = yield from self._launched_whole(self._graph, number, batches)
        else:
            for index in range(self.program.rounds):
                context.first = index * self.program.batch_parts
                if index:
                    # No rank sends anything of the next batch before all have received everything of this one.
                    yield from self._barrier()
                self._flight.begin(self._activity, number - index - 1 if self._update is None else number)
                if not index:
                    self.gather_ahead()
                    yield from self._prologues(self._reads.whole(batches))
                yield from self._microbatches(self._reads.load(batches(index)))
                if self.program.padding and index == 0:
                    for stage in self.stages.values():
                        stage.scale(-self.program.padding)
                if index + 1 < self.program.rounds:
                    mark(), mark(), mark()  # now at the mark of a sum over ranks, with which the next batch begins
            totals, scalars = yield from self._ended()
        own = len(self.program.step_metrics)
        count, first = own * self.program.mesh.groups, own * self._coordinate
        vector = torch.zeros_like(self._part)
        for index, scalar in zip(self.record.step_metrics, scalars, strict=True):
            vector[first + index] = scalar
        if self.stop_requested():
            vector[count] = 1.0
        if self._peaks:
            vector[count + 1] = peak_memory(context.device)
        mark()
        self._totals, self._part = totals, vector
        if self._keep_totals:
            last = len(self.kept) == len(self._memories) - 1  # what is reset for the next memory is copied
            sums = totals[: len(self.record.totals)]
            saved = sums if last else tuple(total.clone() for total in sums)
            self.kept.append(dict(zip(self.record.totals, saved, strict=True)))

    def _launched_whole(self, graph: StepGraph, number: int, batches: Callable[[int], Batch]) -> Coroutine:
        """The result of `_ended`, for a step that is one graph. Its marks are set as if it were not."""
        self._flight.begin(self._activity, number)
        before = self._flight.marks
        result = yield from graph.run(batches, self._whole)
        self._marks = max(self._marks, self._flight.marks - before)
        while self._flight.marks < before + self._marks:
            self._mark()
        return result

    def _whole(self, whole: Mapping[InputPart, torch.Tensor], cut: Mapping[InputPart, torch.Tensor]) -> Coroutine:
        """The part of a step of one batch before its metrics are summed."""
        self._gather()
        yield from self._prologues(whole)
        yield from self._microbatches(cut)
        return (yield from self._ended())

    def _microbatches(self, inputs: Mapping[InputPart, torch.Tensor]) -> Coroutine:
        """Run the rank's instructions."""
        instructions = self._instructions
        if self.stopwatch is not None and self.stopwatch.recording:
            instructions = self._timed
        for stage in self.stages.values():
            stage.fill(inputs)
        self.marked()
        for run in instructions:
            waits = run()
            if waits is not None:
                yield from waits
        rest = self._streams.drained()
        if rest is not None:
            yield from rest

    def _ended(self) -> Coroutine:
        """The totals of the rank's microbatches, and its metrics."""
        totals = yield from self._all_totals()
        self.marked()
        yield from self._exchange_tied(totals)
        if self._estimate is not None:
            totals = self._late.completed(totals, self.context.step, self._estimate.first)
        self.marked()
        return totals, (yield from begun(self._finish(totals, self.context), self.context))

    @torch.inference_mode()
    def start_metrics(self) -> Collective:
        """Begin to sum the metrics of the computed step over all ranks."""
        return self.transport.gather_over_ranks(self._part)

    @torch.inference_mode()
    def finish_metrics(self, sums: Collective) -> Iterator[None]:
        """Wait for the sums of a step: sets `step_metrics` to those of the own group."""
        (parts,) = yield from awaited(sums)
        rows, own = self.program.mesh.groups, len(self.program.step_metrics)
        total = parts[:, : rows * own + 1].sum(0)
        groups = total[: rows * own].view(rows, own)
        if self.program.groups > 1:
            self._of_groups.append(groups)
        self._set(torch.cat((groups[self._coordinate], total[rows * own :], parts[:, rows * own + 1 :].flatten())))

    def _take_mean(self) -> None:
        """Set `step_metrics` to the means over all groups, added in order; of counts that must be zero, to the sums."""
        if self.program.groups == 1:
            return
        groups, self._of_groups = self._of_groups, []
        total, *others = torch.stack(groups, 1).flatten(0, 1).unbind()
        for each in others:
            total = total + each
        mean = total / (1 + len(others))
        for guard in self.program.guards:
            i = self.program.step_metrics.index(guard.name)
            mean[i] = total[i]
        self._set(torch.cat((mean, self._vector[len(mean) :])))

    @property
    def clip_coefficient(self) -> torch.Tensor:
        """The factor of clipping, with these `step_metrics`: `one` if they are not clipped."""
        return self._factor_of(self.step_metrics)

    def _factor_of(self, step_metrics: torch.Tensor) -> torch.Tensor:
        return self.one if self._factor is None else self._factor(step_metrics, self.context)

    @torch.inference_mode()
    def update(self, clip_coefficient: torch.Tensor | None, average: bool = False) -> Coroutine:
        """End the step that is computed: update parameters with its gradients times a factor, or not at all; then
        average all groups, if that is due.
        """
        context = self.context
        totals, self._totals = self._totals, ()
        if clip_coefficient is not None and self._update is not None:
            if self._estimate is not None:
                self._use(self._estimate.begun() if self._late.estimates(context.step) else self._memories[0])
            yield from begun(self._update(self._masters, totals, self._states, clip_coefficient, context), context)
        if clip_coefficient is not None and average:
            yield from self._average()
        self._end()
        self.marked()
        self._flight.begin(BETWEEN, context.step)

    def _average(self) -> Coroutine:
        """Average all groups, which continue from the result."""
        if self._outer is None:
            return
        first, names = self._memories[0], self.record.parameters
        masters = tuple(memory.masters[name] for memory in self._memories for name in names)
        records = [self.program.parameter(name) for name in names]
        companions = tuple(first.states[each.name, record.name] for record in records for each in record.companions)
        yield from begun(self._outer(masters, companions, self.context), self.context)

    @torch.inference_mode()
    def flush(self) -> Coroutine:
        """Finish the reductions of gradients whose updates are still to come, and store these gradients among the
        states.
        """
        names = self.record.parameters
        for age, totals in (yield from self._late.settled()).items():
            yield from self._exchange_tied((*totals, *self._tied))
            gradients = self._late.gradients((*totals, *self._tied))
            for name in names:
                if name in gradients:
                    self._memories[0].states[late_name(age), name].copy_(gradients[name])
            if any(rank.sends for rank in self.program.ranks):
                # Channels are for what a step sends; between two of these, all ranks meet.
                yield from self._barrier()

    @torch.inference_mode()
    def restore(self, step: int) -> None:
        """Load the gradients that are stored among the states, as after a step."""
        states = self._memories[0].states
        self._late.restore(step, lambda age, name: states[late_name(age), name])
        if self._estimate is not None:
            self._use(self._estimate.memory if self._late.estimates(step) else self._memories[0])

    def discard(self) -> None:
        """End the step that is computed as if it had not begun."""
        self._streams.join()  # what is gathered or copied for it is free then
        self._totals = ()
        self._end()
        if self.stopwatch is not None:
            self.stopwatch.discard()
        self._flight.begin(BETWEEN, self.context.step)

    def _end(self) -> None:
        for stage in self.stages.values():
            stage.constants = ()  # the next step makes its own
        self.context.arriving.clear()  # what was copied for an update that is not made

    @property
    def marked(self) -> Callable[[], None]:
        """Marks the end of an instruction."""
        recording = self.stopwatch is not None and self.stopwatch.recording
        return self._recorded if recording else self._mark

    @torch.inference_mode()
    def gather_ahead(self) -> None:
        """Start to gather the parameters of the next step, unless its graph does so. Until that step runs, nothing may
        write to parameters.
        """
        if self._graph is None:
            self._gather()

    def _gather(self) -> None:
        for stage in self.stages.values():
            stage.gather(self.context)

    def _barrier(self) -> Iterator[None]:
        """Wait until all ranks have arrived here."""
        handle = self.transport.gather_over_ranks(self.one)
        while not handle.done():
            yield

    def named_step_metrics(self) -> dict[str, float]:
        """The last step's metrics by name."""
        return dict(zip(self.program.step_metrics, self._metrics_on_host(), strict=False))

    def _prologues(self, inputs: Mapping[InputPart, torch.Tensor]) -> Coroutine:
        """Reset the stages' accumulators and compute their constants, as far as they need not be gathered."""
        for stage in self.stages.values():
            stage.reset()
            whole = tuple(inputs[each] for each in stage.record.full_inputs)
            stage.constants = yield from begun(stage.functions["P"](stage.masters, whole, self.context), self.context)

    def _all_totals(self) -> Coroutine:
        """The reduced totals of the rank's stages, the buffers of the tied totals that it receives, and the gradients
        that are on their way to the host.
        """
        reducing = dict(self._reducing)  # in the order they began, the same on all ranks of a column
        self._reducing.clear()
        own, offloaded = yield from self._late.totals(reducing)
        return (*own, *self._tied, *offloaded)

    def _exchange_tied(self, totals: Tensors) -> Iterator[None]:
        """Send totals of tied parameters to every rank that holds the parameter: post all, each on the stream of its
        channel, then wait for all.

        The first transfer of every channel is posted, then the second: where streams share a hardware queue, a transfer
        that waits for another on its channel blocks later operations, which that other may be waiting for.
        """
        positions = {key: i for i, key in enumerate(self.record.totals)}
        posts: list[tuple[Transfer, Callable[[Channel, torch.Tensor], Handle], torch.Tensor]] = [
            (each.transfer, self.transport.receive, buffer)
            for each, buffer in zip(self.record.receives, self._tied, strict=True)
        ]
        for each in self.record.sends:
            total = totals[positions[each.stage, each.accumulator]]
            posts.append((each.transfer, self.transport.send, total.contiguous()))
        posts.sort(key=lambda post: post[0].index)
        streams = self.program.streams
        handles = [
            self._streams.launch(streams[str(transfer.channel)], partial(post, transfer.channel), tensor)
            for transfer, post, tensor in posts
        ]
        for handle in handles:
            while not handle.done():
                yield


def seed_of(seed: int, group: int) -> int:
    """The seed with which a group draws samples and dropout masks of its own: that of the file, for the first."""
    return (seed + group * SEED_STEP) % SEEDS


def never() -> bool:
    """Always False: nothing asks the run to end."""
    return False


def _together(one: Callable[[], None], other: Callable[[], None]) -> Callable[[], None]:
    """A mark that makes both marks."""

    def mark() -> None:
        one()
        other()

    return mark


def _with_marks(bound: Iterable[Bound], mark: Bound) -> tuple[Bound, ...]:
    """The closures of all instructions in order, with a mark after each instruction."""
    return tuple(chain.from_iterable((own, mark) for own in bound))
