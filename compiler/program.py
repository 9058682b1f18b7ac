"""The program that the runtime loads: emitted Python for every stage and rank, and a list of instructions per rank.

Without its source text it is a plan of what each stage and rank needs and does: enough for analyses and searches.

Functions of a stage, in the emitted module (all plain Python over torch):

    stage{s}_gather(m, c) -> h          ahead of a step: starts to gather what the stage computes with
    stage{s}_prologue(m, x, c) -> p     once a step: from masters and unsplit inputs to what the stage computes with
    stage{s}_opening(p, h, f, a, c)     F of the first microbatch: waits for what is gathered where it first reads it,
                                        and fills it in
    stage{s}_forward(p, f, a, c)        F of one microbatch
    stage{s}_backward(p, f, a, c)       B: cotangents of activations
    stage{s}_weight(p, f, a, c)         W: the other gradients
    stage{s}_whole_backward(p, f, a, c) B and W together
    stage{s}_closing(p, f, a, c) -> h   the stage's last W, or B and W: starts to reduce each accumulator once it has
                                        its last contribution
    stage{s}_reduce(a, h, c) -> totals  once a step, after that: the accumulators in the layout that the update needs
    rank{r}_finish(t, c) -> scalars     once a step, after the last microbatch: this rank's statistics
    factor(s, c) -> k                   after their sum over ranks: by what clipping multiplies gradients
    rank{r}_update(m, t, v, k, c)       the optimizer, in place
    rank{r}_outer(m, v, c)              where groups train apart, once in several steps: the average of the groups

A function that communicates along the mesh is a generator: it starts a collective with `c.all_gather(…)` or the like,
yields the returned handle where it needs the result, and is sent the result. Handles `h` pass from one function to a
later one, which waits. `stage{s}_reduce` runs to its first wait as soon as its stage is done, and to its end after the
last microbatch of all stages.

`m` are master parameters, `x` unsplit inputs, `p` the result of the prologue, `f` the frame of this stage and
microbatch (a list whose slots hold values passed between functions or stages), `a` the stage's accumulators, `t` the
totals that the rank holds (the results of its stages' `reduce`, and received totals of tied parameters), `v` optimizer
states (of `outer`: what is kept besides those), `s` the statistics vector, `k` the factor (None if the file does not
clip), `c` the context: `seed`, `step`, `microbatch`, `rates`, `device`, `coordinates` by mesh axis, and the
collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil

from attrs import field, frozen

from partita.compiler.graph import Guard, SparseGradientPart
from partita.compiler.instructions import Channel, Compute, Instruction, Message, Traffic, Transfer
from partita.compiler.layout import REPLICATED, Layout, within_axes
from partita.compiler.mesh import Mesh
from partita.compiler.schedules.schedule import OFFLOAD, Schedule
from partita.compiler.streams import Launch
from partita.dsl.reprs import Shortened, count, outline
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.dsl.types import INTEGERS, Axis, Type


@frozen(repr=False)
class InputRecord(Shortened):
    """A model input over the full batch; programs have it as `computed`, with the rows of one replica group and padded.
    `limit`: the axis that its integers index, except those that are `ignored`.
    """

    name: str
    type: Type
    computed: Type
    limit: Axis | None
    span: Span | None = field(default=None, eq=False, repr=False)
    ignored: tuple[int, ...] = ()


@frozen(cache_hash=True, repr=False)
class InputPart(Shortened):
    """A stage's part of an input: per microbatch, split along `batch`; or unsplit and once a step, if `batch` is None.
    `layout` gives its shard. Stages with equal parts share them.
    """

    name: str
    batch: str | None
    layout: Layout


@frozen
class StateRecord:
    """A tensor that the optimizer keeps for a parameter, zero at first, or a copy of the parameter; `type` is the
    global type, and `host` whether it lies in the host's memory.
    """

    name: str
    type: Type
    copy: bool = False
    host: bool = False


# What is kept of a parameter where an update has the gradients of two steps: the first gradient, and the parameter as
# estimated from it.
FIRST, ESTIMATE = "first", "estimate"


def late_name(age: int) -> str:
    """What the gradient of so many steps before the next one is called, among what is kept of a parameter."""
    return f"late{age}"


def older_names(delay: int, paired: bool) -> tuple[str, ...]:
    """What is kept of a parameter where updates have gradients of `delay` steps before, or of two steps each."""
    return (*(late_name(age) for age in range(1, delay + 1)), *((FIRST, ESTIMATE) if paired else ()))


@frozen(repr=False)
class ParameterRecord(Shortened):
    """A parameter: its master type, initializer, stages, and its optimizer states.

    `type` is the global type. Each rank stores the shard of the master given by `layout`, and updates the shard given
    by `state_layout`; of each optimizer state it stores what belongs to that shard (`stored`). `host`: whether the
    master lies in the host's memory; if it is `mapped`, it is there as a file, and so are the states. `companions` are
    tensors that are kept besides these: what replica groups are averaged with, gradients of earlier steps, and
    an estimate.
    """

    name: str
    type: Type
    layout: Layout
    state_layout: Layout
    initial: Call
    fans: tuple[int, int]
    stages: tuple[int, ...]
    states: tuple[StateRecord, ...]
    host: bool = False
    mapped: bool = False
    companions: tuple[StateRecord, ...] = ()

    def stored(self, state: StateRecord) -> Layout:
        """The layout of one of its states, or of what is kept besides."""
        return self.layout if state.name == ESTIMATE else within_axes(self.state_layout, state.type)


@frozen(repr=False)
class AccumulatorRecord(Shortened):
    """An accumulator of a stage. `parameter` names the parameter whose gradient it sums, or of whose gradient it is a
    `term`; `type` is that of a rank's part in the `layout`.
    """

    name: str
    type: Type
    parameter: str | None
    maximum: bool
    layout: Layout = REPLICATED
    term: SparseGradientPart | None = None


@frozen
class LocalTransfer:
    """After a function of this stage, frame slot `slot` is also slot `target_slot` of `stage` on the same rank."""

    kind: str
    slot: int
    stage: int
    target_slot: int


# Elements of a large tensor that are made or read at a time, before the first step.
SLAB = 1 << 23


@frozen(kw_only=True)
class StageNeeds:
    """What a stage needs of memory, in bytes. `saved` is what one microbatch keeps from F for the backward pass; `kept`
    what it keeps from B to W, including what B adds; `peaks` the most that each kind of function (F, B, W, BW, C) holds
    in addition to what its microbatch holds before or after it, whichever is more, with the buffers of reductions that
    have started. `shared` is what the slices of a part of the batch share: from the first F on, and from the first B
    on. `offloaded` is what of `saved` lies in the host's memory between O and L. `gathering` is what gathers that start
    ahead of a step send, until the first F waits for them, and `opening` the most that this F holds, with them and with
    what it has saved. Of its gradients, `in_flight` is what the last action leaves: what the collectives that it has
    started send and receive; `reducing` is the most that there is of it until all have arrived, and `reduced` what they
    leave.
    """

    saved: int
    kept: int
    offloaded: int
    shared: Mapping[str, int]
    peaks: Mapping[str, int]
    gathering: int
    opening: int
    in_flight: int
    reducing: int
    reduced: int


@frozen(kw_only=True, repr=False)
class StagePlan(Shortened, StageNeeds):
    """One stage. `parameters` and `full_inputs` are the operands of its prologue, `inputs` those of a microbatch."""

    index: int
    rank: int
    chunk: int
    parameters: tuple[str, ...]
    full_inputs: tuple[InputPart, ...]
    inputs: tuple[InputPart, ...]
    accumulators: tuple[AccumulatorRecord, ...]


@frozen(kw_only=True, repr=False)
class StageProgram(StagePlan):
    """A stage plan with its functions, and the slots of its `frame`: those of inputs (`input_slots`), of messages
    (`sends` and `receives`), of sent values that no later function of this stage reads (`released`), and of what is
    copied to the host's memory (`copied`). `functions` names the non-empty ones, by kind (G, P, O, F, B, W, BW, C, R).
    """

    frame: int
    input_slots: tuple[int, ...]
    sends: Mapping[Message, int]
    receives: Mapping[Message, tuple[int, Type]]
    local_transfers: tuple[LocalTransfer, ...]
    released: frozenset[int]
    copied: tuple[int, ...]
    functions: Mapping[str, str]


@frozen(repr=False)
class TiedTransfer(Shortened):
    """A total of a tied parameter that another rank needs: `accumulator` of `stage`, sent on `transfer`'s channel."""

    transfer: Transfer
    stage: int
    accumulator: str
    type: Type


@frozen(kw_only=True, repr=False)
class RankPlan(Shortened):
    """One pipeline rank: its stages by chunk, its instructions for the microbatches, the tied totals that it then sends
    and receives, and the order of its totals.

    `reductions` gives, by the index of an instruction, the stages whose reduction begins in it: they accumulate nothing
    after it. `copied` are the parameters and buffers that the update writes, with their states, if it may be made
    before the step is validated: then the rank keeps copies of them.
    """

    rank: int
    stages: tuple[int, ...]
    instructions: tuple[Instruction, ...] = field(repr=False)
    reductions: Mapping[int, tuple[int, ...]] = field(repr=False)
    parameters: tuple[str, ...]
    sends: tuple[TiedTransfer, ...]
    receives: tuple[TiedTransfer, ...]
    totals: tuple[tuple[int, str], ...]  # (stage, accumulator)
    step_metrics: tuple[int, ...]  # the entries of the statistics vector that `finish` returns
    copied: tuple[str, ...] = ()


@frozen(kw_only=True, repr=False)
class RankProgram(RankPlan):
    """A rank plan with the names of its functions for the end of the step, and for the average of groups. `launches`
    says of each instruction on which stream it runs, and behind which events.
    """

    launches: tuple[Launch, ...] = field(repr=False)
    finish: str
    update: str | None
    outer: str | None = None


@frozen(eq=False, kw_only=True)
class StepPlan:
    """One kind of step (training or evaluation) for every rank, without the functions. `streams` are those of
    communicators on which no instruction posts (`partita.compiler.streams.communicators`).
    """

    name: str
    inputs: tuple[InputRecord, ...]
    batch: str
    microbatches: int  # per batch, slices counted
    slices: int  # per part of the batch
    batches: Fraction  # per step: one, or all of an evaluation; `inputs` have the rows of all
    mesh: Mesh
    parameters: tuple[ParameterRecord, ...]
    stages: tuple[StagePlan, ...]
    ranks: tuple[RankPlan, ...]
    channels: Mapping[Channel, Traffic]  # sorted
    step_metrics: tuple[str, ...]
    guards: tuple[Guard, ...]  # statistics that must be zero
    schedule: Schedule
    streams: Mapping[str, str]
    replicas_per_rank: int = 1  # replica groups on each rank
    delay: int = 0  # how many steps old the gradients of an update are
    paired: bool = False  # an update has the gradients of two steps, and is estimated from the first of them
    captured: bool = False  # on GPUs, what comes before a rank's statistics are summed is launched as one graph

    def __repr__(self) -> str:
        facts = (count(self.mesh.ranks, "rank"), count(len(self.stages), "stage"), f"microbatches {self.microbatches}")
        return outline(type(self).__name__, self.name, facts)

    @property
    def padding(self) -> Fraction:
        """The part of a batch by which the last one is too short. It is filled up with copies of a row; the sums of a
        batch of this row alone, times this part, are subtracted from those of the step.
        """
        return ceil(self.batches) - self.batches

    @property
    def rounds(self) -> int:
        """How often a step runs the schedule: for each batch; with `padding`, first for the batch of copies."""
        return ceil(self.batches) + (self.padding > 0)

    @property
    def groups(self) -> int:
        """The number of replica groups; `inputs` have the rows of all."""
        return self.replicas_per_rank * self.mesh.groups

    @property
    def tokens(self) -> int | None:
        """The elements of the largest integer input; None without sequences of integers. Those are none that have a
        number for each row, as classes, or for each place of what is not integers, as of an image.
        """
        of_rows = [each.type for each in self.inputs if each.type.has(self.batch)]
        named = [(each.dtype in INTEGERS, {axis.name for axis in each.axes}, each.elements) for each in of_rows]
        counts = [
            elements
            for integers, axes, elements in named
            if integers and len(axes) > 1 and not any(axes < others for apart, others, _ in named if not apart)
        ]
        return max(counts, default=None)

    @property
    def counted(self) -> tuple[int, str]:
        """What throughput counts, of a step, and its name: tokens, or else rows of the batch."""
        if (tokens := self.tokens) is not None:
            return tokens, "tokens"
        return self.rows, "rows"

    @property
    def rows(self) -> int:
        """The rows of a batch, of all groups; one where no input has any."""
        sizes = [each.type.axis(self.batch).size / self.batches for each in self.inputs if each.type.has(self.batch)]
        return int(max(sizes, default=1))

    @property
    def batch_parts(self) -> int:
        """Into how many parts a batch is cut: microbatches, or what has `slices` of them."""
        return self.microbatches // self.slices

    def offloads(self, stage: int) -> int:
        """The microbatches of a batch that a stage copies to the host's memory."""
        rank, chunk = self.schedule.position(stage)
        return sum(each.kind == OFFLOAD and each.chunk == chunk for each in self.schedule.actions[rank])

    def parameter(self, name: str) -> ParameterRecord:
        """The record of a parameter by its full name. Raises KeyError."""
        for record in self.parameters:
            if record.name == name:
                return record
        raise KeyError(name)


@frozen(eq=False, kw_only=True, repr=False)
class Program(StepPlan):
    """A step plan with its functions: `source` is a Python module, and `factor` the name of the function that computes
    by what gradients are multiplied, if they are clipped.
    """

    stages: tuple[StageProgram, ...]
    ranks: tuple[RankProgram, ...]
    source: str
    factor: str | None = None

    def function(self, rank: int, index: int) -> str | None:
        """The name of the function that an instruction of a pipeline rank runs in the first batch of a step; None if it
        runs none.
        """
        record = self.ranks[rank]
        instruction = record.instructions[index]
        if not isinstance(instruction, Compute):
            return None
        functions, kind = self.stages[instruction.stage].functions, instruction.action.kind
        before = record.instructions[:index]
        if instruction.stage in record.reductions.get(index, ()):
            kind = "C"
        elif not any(isinstance(each, Compute) and each.stage == instruction.stage for each in before):
            kind = "O" if "O" in functions else kind
        return functions.get(kind)
