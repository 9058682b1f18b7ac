"""Where the first NaN or infinity of a step or an evaluation came from.

The loss and the squared gradients are summed over all ranks before parameters are updated. If a sum is not finite,
nothing is updated; the same step is repeated with a program that reports every value it computes, and every rank notes
its first value that is not finite. The earliest of these is named, with the rows of the batch that have it and their
place in the data.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from time import time
from typing import TYPE_CHECKING

import torch
from attrs import define, evolve, field, frozen

from partita.compiler.graph import Node, Phase, Value
from partita.compiler.layout import global_type
from partita.compiler.program import Program
from partita.compiler.state import Compilation
from partita.runtime.executor import Executor
from partita.runtime.inputs import Batch
from partita.runtime.regions import region_of
from partita.runtime.tracing.recording import traced
from partita.runtime.transports.transport import awaited

if TYPE_CHECKING:
    from partita.runtime.rank import Rank

MAX_ROWS = 4  # named in a message
NEVER = 1e30
SUMS = "no single value: only sums over microbatches and ranks overflow"


@frozen(eq=False)
class Replay:
    """The step to repeat: step `number` of a compiled program, over the batches of its rounds.

    `rows` gives the names of a batch's rows, by the batch's index.
    """

    state: Compilation
    number: int
    batches: Callable[[int], Batch]
    rows: Callable[[int], Sequence[str]]


@define(eq=False)
class _First:
    """The first value that is not finite: its name, time, microbatch and group, and a mask of the elements that are
    not.
    """

    name: str = ""
    time: float = NEVER
    microbatch: int = -1
    group: int = 0
    wrong: torch.Tensor = field(factory=lambda: torch.zeros(0, dtype=torch.bool))

    def note(self, name: str, tensor: torch.Tensor, microbatch: int = -1, group: int = 0) -> None:
        if not self.name and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            self.name, self.time, self.microbatch, self.group = name, time(), microbatch, group
            self.wrong = ~tensor.isfinite().cpu()


def origin(rank: Rank, trial: Replay) -> Generator[None, None, str | None]:
    """Returns a description of the first value that is not finite, on the rank that had it; None on all others.

    If clocks of machines differ by more than a message's latency, it may be a rank that only received the value.
    """

    state = traced(trial.state)
    ranks = tuple(evolve(each, update=None) for each in state.program.ranks)
    program = evolve(state.program, ranks=ranks)
    first = _First()
    description = ""
    for index in range(program.rounds):
        for name, tensor in trial.batches(index).items():
            first.note(f"the input `{name}`", tensor)
            if first.name and not description:
                description = f"{first.name}{wrong_rows(program, name, first.wrong, trial.rows(index))}"
    memory = rank.parameters_for(trial.state)
    for name, tensor in memory.masters.items():
        first.note(f"the parameter `{name}`", tensor)
    executor = Executor(
        program,
        rank.rank,
        rank.transport,
        memory,
        rank.plan.train.seed,
        rank.device,
        keep_totals=True,
        custom=rank.plan.functions,
        extra_replicas=rank.extra_replicas if trial.state.training else (),
    )
    context = executor.context
    context.record = lambda name, tensor: first.note(name, tensor, context.microbatch, context.group)
    yield from executor.run(trial.number, trial.batches)
    for totals in executor.kept:
        for (_, name), tensor in totals.items():
            first.note(f"the gradient of `{name}`", tensor)
    time = torch.tensor(first.time, dtype=torch.float64, device=rank.device)
    (times,) = yield from awaited(rank.transport.gather_over_ranks(time))
    if int(times.argmin()) != rank.rank:
        return None
    if not first.name:
        return SUMS
    if first.microbatch < 0:
        return f"{description or first.name} on rank {rank.rank}"
    return _described(first, trial, state, program, rank.rank)


def _described(first: _First, trial: Replay, state: Compilation, program: Program, rank: int) -> str:
    node, value = _made(state, first.name)
    rows = _rows_of(first, node, value, trial, program, rank)
    place = f" ({node.span.place})" if node.span is not None else ""
    where = f"in {node.phase} of microbatch {first.microbatch} of stage {node.stage}"
    return f"`{first.name}` {where} on rank {rank}{rows}{place}"


def _made(state: Compilation, name: str) -> tuple[Node, Value]:
    """The node that computes the value of a name, and the value."""
    return next(
        (node, value)
        for stage in state.partitioned.stages
        for node in stage.nodes
        for value in node.outputs
        if value.name == name
    )


# ---------------------------------------------------------------- rows


def wrong_inputs(program: Program, batch: Batch, names: Sequence[str]) -> Iterator[str]:
    """The inputs of a batch that are not finite, and in which rows; `names` are the names of the rows."""
    for name, tensor in batch.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            yield f"the input `{name}` is not finite{wrong_rows(program, name, ~tensor.isfinite(), names)}"


def wrong_rows(program: Program, name: str, wrong: torch.Tensor, names: Sequence[str]) -> str:
    """In words, the batch rows in which a full input is wrong; empty if it has no batch axis or all rows are wrong."""
    type = next(each.type for each in program.inputs if each.name == name)
    if not type.has(program.batch):
        return ""
    return _named(_along(wrong, type.position(program.batch)), type.axis(program.batch).size, 0, names)


def _rows_of(first: _First, node: Node, value: Value, trial: Replay, program: Program, rank: int) -> str:
    """Like `wrong_rows`, for a rank's shard of a value of one microbatch, or of a value made once a step."""
    if not value.type.has(program.batch):
        return ""
    mesh, position = program.mesh, value.type.position(program.batch)
    whole = global_type(value.type, value.layout, mesh.sizes)
    start = region_of(whole, value.layout, mesh.sizes, mesh.coordinates(rank))[position].start
    index, microbatch = divmod(first.microbatch, program.batch_parts)
    if node.phase is not Phase.PROLOGUE:
        start += (first.group * program.batch_parts + microbatch) * whole.axis(program.batch).size
    return _named(_along(first.wrong, position), first.wrong.shape[position], start, trial.rows(index))


def _along(wrong: torch.Tensor, position: int) -> list[int]:
    """The indices along an axis at which anything is wrong."""
    return wrong.movedim(position, 0).reshape(wrong.shape[position], -1).any(1).nonzero().flatten().tolist()


def _named(wrong: Sequence[int], rows: int, first: int, names: Sequence[str]) -> str:
    """`, row 3 of the batch (item 17)`: the wrong places among `rows` rows, the first of which is row `first`."""
    if len(wrong) == rows > 1:
        return ""
    shown = [str(first + place) for place in wrong[:MAX_ROWS]]
    more = f" and {len(wrong) - MAX_ROWS} more" if len(wrong) > MAX_ROWS else ""
    where = f" ({', '.join(names[first + place] for place in wrong[:MAX_ROWS])})" if names else ""
    return f", row{'s' if len(wrong) > 1 else ''} {', '.join(shown)}{more} of the batch{where}"
