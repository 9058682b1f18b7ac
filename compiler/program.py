"""The program: what the runtime loads. Emitted Python for every stage and rank, and a list of instructions per rank.

Without its text it is a plan: what each stage and rank needs and does. Analyses and searches ask for no more.

Functions of a stage, in the emitted module (all are plain Python over torch):

    stage{s}_prologue(m, x, c) -> p     once a step: masters and whole inputs to what the stage computes with
    stage{s}_forward(p, f, a, c)        F of one microbatch
    stage{s}_backward(p, f, a, c)       B: cotangents of activations
    stage{s}_weight(p, f, a, c)         W: the rest of the gradients
    stage{s}_whole_backward(p, f, a, c) B and W together
    stage{s}_reduce(a, c) -> totals     once a step, after the stage's last microbatch: the accumulators in the
                                        layout in which the update wants them
    rank{r}_finish(t, c) -> scalars     once a step, after the last microbatch: this rank's statistics
    rank{r}_update(m, t, v, s, c)       after their sum over ranks: the optimizer, in place

A function that communicates along the mesh is a generator: it starts a collective with `c.all_gather(…)` and the
like, and yields what it gets where it needs the result, which is sent back in. `stage{s}_reduce` is run up to its
first such wait as soon as its stage is done, and to its end after the last microbatch of all stages.

`m` are master parameters, `x` whole inputs, `p` what the prologue returned, `f` the frame of this stage and
microbatch (a list whose slots hold what crosses from one function or stage to another), `a` the stage's
accumulators, `t` the totals that the rank holds (what its stages' `reduce` returned, and the totals of tied
parameters that it was sent), `v` optimizer states, `s` the statistics vector, `c` the context: `seed`, `step`,
`microbatch`, `rate`, `device`, `coordinates` by mesh axis, and the collectives.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from partita.compiler.graph import Guard
from partita.compiler.instructions import Channel, Instruction, Message, Traffic, Transfer
from partita.compiler.layout import Layout
from partita.compiler.mesh import Mesh
from partita.compiler.schedules.schedule import Schedule
from partita.dsl.brief import count, outline, shortened
from partita.dsl.source import Span
from partita.dsl.spec import Call
from partita.dsl.types import Axis, Type


@frozen
class InputRecord:
    """A model input over the whole batch. `limit`: the axis that its integers index."""

    name: str
    type: Type
    limit: Axis | None
    span: Span | None = field(default=None, eq=False, repr=False)

    __repr__ = shortened


@frozen(cache_hash=True)
class InputPart:
    """What a stage gets of an input: for each microbatch, cut along `batch`; or, where `batch` is None, whole and once
    a step. `layout` says which part of that. Stages that read the same share it."""

    name: str
    batch: str | None
    layout: Layout

    __repr__ = shortened


@frozen
class ParameterRecord:
    """A parameter: its master type, how it begins, its stage set, and the names of the optimizer's tensors.

    `type` is the whole tensor's. Each rank keeps the part of the master that `layout` says, and of each of the
    optimizer's tensors the part that `state_layout` says.
    """

    name: str
    type: Type
    layout: Layout
    state_layout: Layout
    initial: Call
    fans: tuple[int, int]
    stages: tuple[int, ...]
    states: tuple[str, ...]

    __repr__ = shortened


@frozen
class AccumulatorRecord:
    """An accumulator of a stage. `parameter` names the parameter whose gradient it sums."""

    name: str
    type: Type
    parameter: str | None
    maximum: bool

    __repr__ = shortened


@frozen
class HandOver:
    """After a function of this stage, frame slot `slot` is also slot `target_slot` of `stage` on the same rank."""

    kind: str
    slot: int
    stage: int
    target_slot: int


@frozen(kw_only=True)
class StagePlan:
    """One stage. `parameters` and `whole_inputs` are the operands of its prologue, `inputs` the microbatch's part of
    each input. `saved` is what one microbatch keeps from F for the backward pass, in bytes; `kept` what is left of it
    from B to W, with what B adds; `peaks` the most that each kind of function (F, B, W, BW) holds beyond what its
    microbatch has there before it or after it, whichever is more.
    """

    index: int
    rank: int
    chunk: int
    parameters: tuple[str, ...]
    whole_inputs: tuple[InputPart, ...]
    inputs: tuple[InputPart, ...]
    accumulators: tuple[AccumulatorRecord, ...]
    saved: int
    kept: int
    peaks: Mapping[str, int]

    __repr__ = shortened


@frozen(kw_only=True)
class StageProgram(StagePlan):
    """With the slots of its `frame`: of inputs (`input_slots`), of messages (`sends` and `receives`), and those of sent
    values that no later function of this stage reads (`released`). `functions` names those that are not empty, by kind
    (P, F, B, W, BW, R).
    """

    frame: int
    input_slots: tuple[int, ...]
    sends: Mapping[Message, int]
    receives: Mapping[Message, tuple[int, Type]]
    hand_overs: tuple[HandOver, ...]
    released: frozenset[int]
    functions: Mapping[str, str]

    __repr__ = shortened


@frozen
class TiedTransfer:
    """A total of a tied parameter that another rank needs: `accumulator` of `stage`, sent on `transfer`'s channel."""

    transfer: Transfer
    stage: int
    accumulator: str
    type: Type

    __repr__ = shortened


@frozen(kw_only=True)
class RankPlan:
    """One pipeline rank: its stages by chunk, its instructions for the microbatches, the tied totals it sends and is
    sent afterwards, and the order of its totals.

    `reductions` gives, by the index of an instruction, the stages that have accumulated all they will once it has
    run, and whose `reduce` can begin.
    """

    rank: int
    stages: tuple[int, ...]
    instructions: tuple[Instruction, ...] = field(repr=False)
    reductions: Mapping[int, tuple[int, ...]] = field(repr=False)
    parameters: tuple[str, ...]
    sends: tuple[TiedTransfer, ...]
    receives: tuple[TiedTransfer, ...]
    totals: tuple[tuple[int, str], ...]  # (stage, accumulator)
    statistics: tuple[int, ...]  # which entries of the vector `finish` returns

    __repr__ = shortened


@frozen(kw_only=True)
class RankProgram(RankPlan):
    """With the names of its functions for the end of the step."""

    finish: str
    update: str | None

    __repr__ = shortened


@frozen(eq=False, kw_only=True)
class StepPlan:
    """One kind of step (training, or evaluation) for every rank, but for the functions that are run."""

    name: str
    inputs: tuple[InputRecord, ...]
    batch: str
    microbatches: int  # of a batch
    rounds: int  # batches of a step: one, or all of an evaluation's set, of which `inputs` have the rows
    mesh: Mesh
    parameters: tuple[ParameterRecord, ...]
    stages: tuple[StagePlan, ...]
    ranks: tuple[RankPlan, ...]
    channels: Mapping[Channel, Traffic]  # in order
    statistics: tuple[str, ...]
    guards: tuple[Guard, ...]  # those of the statistics that must be zero
    schedule: Schedule

    def __repr__(self) -> str:
        facts = (count(self.mesh.ranks, "rank"), count(len(self.stages), "stage"), f"microbatches {self.microbatches}")
        return outline(type(self).__name__, self.name, facts)

    @property
    def tokens(self) -> int:
        """What throughput counts: elements of the largest integer input, else rows of the batch."""
        counts = [each.type.elements for each in self.inputs if each.type.dtype in ("i64", "i32")]
        if counts:
            return max(counts)
        return max((e.type.axis(self.batch).size for e in self.inputs if e.type.has(self.batch)), default=1)

    def parameter(self, name: str) -> ParameterRecord:
        """The record of a parameter by its full name."""
        for record in self.parameters:
            if record.name == name:
                return record
        raise KeyError(name)


@frozen(eq=False, kw_only=True, repr=False)
class Program(StepPlan):
    """With them: `source` is a module of Python."""

    stages: tuple[StageProgram, ...]
    ranks: tuple[RankProgram, ...]
    source: str
