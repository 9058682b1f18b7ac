"""Mutants of a compiled program: what a defect of the compiler would make of it, one defect at a time.

A change of layout (each tensor of a bucket for itself), a send or a receive is dropped, doubled or redirected, or one
value is said to lie otherwise. Dropped, its readers read its operand; doubled, it is applied to its own result, or
done again; redirected, it goes along another mesh axis, another axis of the tensor, to another stage, takes another
value of the same type, or sums what it should compare. Sends and receives are mutated twice: where stages exchange
values, and where ranks are told to post and wait (*wired*). A mutant is a finished compilation, which the certificate
can check and the virtual cluster run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen

from partita.compiler import pipeline
from partita.compiler.fit.schedule import planned_with
from partita.compiler.graph import Node, Value
from partita.compiler.instructions import Channel, PostReceive, PostSend, WaitReceive, WaitSend
from partita.compiler.mesh import Mesh
from partita.compiler.ops.collective import AllGather, AllReduce, AllToAll, Part, ReduceScatter, Reshard
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.program import Program, RankProgram
from partita.compiler.state import Compilation
from partita.compiler.streams import launches_of
from partita.compiler.verify.equivalence import validate
from partita.dsl.types import Type
from partita.runtime.rank import CompiledRun
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import Experiment, batches
from partita.runtime.verification.figures import TOLERANCE, Figure, Figures, compare
from tests.compiler.verify.changes import Exchange, Place, places


@frozen(eq=False)
class Mutant:
    """One mutant. `kind` is `drop`, `double`, `redirect` or `layout`; `op` the operation that is hit, or `value`.

    `wired`: what is mutated is the program or a record, not what it is assembled from. `value` is the result of the
    change of layout that is hit, `instead` the operation in its place, and `nodes` what stands around it.
    """

    kind: str
    op: str
    what: str
    build: Callable[[], Compilation]
    wired: bool = False
    value: Value | None = None
    instead: Reshard | None = None
    nodes: tuple[Node, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.op}: {self.what}"


def some(mutants: Iterable[Mutant], of_each: int) -> list[Mutant]:
    """Of each kind of mutant so many, at equal distances."""
    kinds: dict[tuple[str, str, bool], list[Mutant]] = {}
    for mutant in mutants:
        kinds.setdefault((mutant.kind, mutant.op, mutant.wired), []).append(mutant)
    found = []
    for own in kinds.values():
        count = min(of_each, len(own))
        found += [own[i * len(own) // count] for i in range(count)]
    return found


def communication_mutants(state: Compilation) -> Iterator[Mutant]:
    """All mutants of a compilation's changes of layout, sends and receives."""
    for place in places(state):
        for node in place.nodes:
            if isinstance(node.op, Reshard) and not node.op.reforms:
                for i in range(node.op.count):
                    yield from _of_move(place, node, i)
            elif isinstance(node.op, (Send, Receive)):
                ends = _of_send if isinstance(node.op, Send) else _of_receive
                for kind, what, replacement, values in ends(place, node):
                    build = partial(place.changed, values, {node: replacement})
                    yield Mutant(kind, node.op.name, f"{what} in {place.name}", build)
    yield from wired_mutants(state)


# ---------------------------------------------------------------- communication

# A mutant of one end of a message: kind, description, what stands in the node's place, what is read for its result.
End = tuple[str, str, Sequence[Node], Exchange]


def _of_move(place: Place, node: Node, i: int) -> Iterator[Mutant]:
    source, result = node.inputs[i], node.outputs[i]
    rest = _without(node, i)
    what = f"`{result.name}` along {node.op.over}"

    def mutant(kind: str, what: str, nodes: Sequence[Node], values: Exchange, instead: Reshard | None = None) -> Mutant:
        build = partial(place.changed, values, {node: nodes})
        name = f"{what} in {place.name}"
        return Mutant(kind, node.op.name, name, build, value=result, instead=instead, nodes=place.nodes)

    yield mutant("drop", what, rest, {result: source})
    op = _alone(node.op, i)
    again = evolve(result, name=f"{result.name} again", type=op.infer(result.type)[0])
    twice = (node, evolve(node, op=op, inputs=(result,), outputs=(again,)))
    yield mutant("double", what, twice, {result: again}, op)
    for new in _redirected(op, source.type, place.state.mesh):
        other = evolve(result, type=new.infer(source.type)[0])
        values = {} if other.type == result.type else {result: other}
        there = evolve(node, op=new, inputs=(source,), outputs=(values.get(result, result),))
        yield mutant("redirect", f"{what} to {new}", (*rest, there), values, new)


def _alone(op: Reshard, i: int) -> Reshard:
    """The operation on one tensor of its bucket."""
    if isinstance(op, AllReduce):
        return evolve(op, tensors=1)
    if isinstance(op, AllToAll):
        return evolve(op, source=op.source[i : i + 1], axes=op.axes[i : i + 1])
    if isinstance(op, (AllGather, ReduceScatter)):
        return evolve(op, axes=op.axes[i : i + 1])
    return op


def _without(node: Node, i: int) -> tuple[Node, ...]:
    """The bucket without one tensor."""
    kept = [j for j in range(len(node.inputs)) if j != i]
    if not kept:
        return ()
    op = _alone(node.op, kept[0]).together([_alone(node.op, j) for j in kept])
    inputs, outputs = (tuple(values[j] for j in kept) for values in (node.inputs, node.outputs))
    return (evolve(node, op=op, inputs=inputs, outputs=outputs),)


def _redirected(op: Reshard, type: Type, mesh: Mesh) -> Iterator[Reshard]:
    for over in mesh.sharding:
        if over != op.over:
            yield evolve(op, over=over, parts=mesh.sizes[over])
    if isinstance(op, AllReduce):
        yield evolve(op, maximum=not op.maximum)
    for name in type.names:
        gathers = isinstance(op, AllGather)
        if not gathers and type.axis(name).size % op.parts:
            continue
        if isinstance(op, Part) and name != op.axis:
            yield evolve(op, axis=name)
        elif isinstance(op, (AllGather, ReduceScatter, AllToAll)) and (name,) != op.axes:
            yield evolve(op, axes=(name,))


def _of_send(place: Place, node: Node) -> Iterator[End]:
    (value,) = node.inputs
    what = f"`{value.name}` to stage {node.op.destination}"
    yield "drop", what, (), {}
    yield "double", what, (node, evolve(node)), {}
    for stage in range(len(place.state.partitioned.stages)):
        if stage not in (place.stage, node.op.destination):
            op = evolve(node.op, destination=stage)
            yield "redirect", f"{what} to stage {stage}", (evolve(node, op=op),), {}
    made = [v for n in place.nodes[: place.nodes.index(node)] if n.phase is node.phase for v in n.outputs]
    alike = [v for v in made if v is not value and (v.type, v.layout) == (value.type, value.layout)]
    for other in alike[-2:]:
        yield "redirect", f"{what}, `{other.name}` in its place", (evolve(node, inputs=(other,)),), {}


def _of_receive(place: Place, node: Node) -> Iterator[End]:
    (value,) = node.outputs
    # Doubled where ranks post and wait: here it would be two names for what has arrived.
    what = f"`{value.name}` from stage {node.op.source}"
    yield "drop", what, (), {}
    for stage in range(len(place.state.partitioned.stages)):
        if stage not in (place.stage, node.op.source):
            op = evolve(node.op, source=stage)
            yield "redirect", f"{what} from stage {stage}", (evolve(node, op=op),), {}
    before = place.nodes[: place.nodes.index(node)]
    there = [v for n in before if n.phase is node.phase for v in n.outputs if v.type == value.type]
    for other in there[-2:]:
        yield "redirect", f"{what}, `{other.name}` read in its place", (node,), {value: other}
    for other in place.nodes:
        if isinstance(other.op, Receive) and other is not node and other.op.type == node.op.type:
            yield "redirect", f"{what} as `{other.op.value}`", (evolve(node, op=other.op),), {}


# ---------------------------------------------------------------- what ranks are told


def wired_mutants(state: Compilation) -> Iterator[Mutant]:
    """Each transfer of a rank's instructions, and of totals afterwards, at one of its ends."""
    program = state.program

    def mutant(kind: str, op: str, what: str, rank: RankProgram, **changes: Any) -> Mutant:
        build = partial(_wired, state, evolve(rank, **changes))
        return Mutant(kind, op, f"{what} on rank {rank.rank}", build, wired=True)

    for rank in program.ranks:
        own = rank.instructions
        for i, post in enumerate(own):
            if not isinstance(post, (PostSend, PostReceive)):
                continue
            op = "send" if isinstance(post, PostSend) else "receive"
            waits = WaitSend if isinstance(post, PostSend) else WaitReceive
            j = own.index(waits(post.transfer))
            what = f"{post.transfer}"
            less = (*own[:i], *own[i + 1 : j], *own[j + 1 :])
            yield mutant("drop", op, what, rank, instructions=less)
            more = (*own[:i], post, post, *own[i + 1 : j], own[j], own[j], *own[j + 1 :])
            yield mutant("double", op, what, rank, instructions=more)
            for channel in _other_channels(program, post.transfer.channel, rank.rank):
                other = evolve(post.transfer, channel=channel)
                there = (*own[:i], evolve(post, transfer=other), *own[i + 1 : j], waits(other), *own[j + 1 :])
                yield mutant("redirect", op, f"{what} on {channel}", rank, instructions=there)
        for field in ("sends", "receives"):
            totals = getattr(rank, field)
            for i, each in enumerate(totals):
                op, what = field[:-1], f"the total {each.transfer}"
                yield mutant("drop", op, what, rank, **{field: (*totals[:i], *totals[i + 1 :])})
                yield mutant("double", op, what, rank, **{field: (*totals[:i], each, *totals[i:])})
                for channel in _other_channels(program, each.transfer.channel, rank.rank):
                    other = evolve(each, transfer=evolve(each.transfer, channel=channel))
                    there = {field: (*totals[:i], other, *totals[i + 1 :])}
                    yield mutant("redirect", op, f"{what} on {channel}", rank, **there)


def _other_channels(program: Program, channel: Channel, rank: int) -> Iterator[Channel]:
    """The program's other channels of which a rank has the same end."""
    end = "source" if channel.source == rank else "destination"
    yield from (each for each in program.channels if each != channel and getattr(each, end) == rank)


def _wired(state: Compilation, rank: RankProgram) -> Compilation:
    """A compilation with one rank told otherwise, on streams and behind events as the compiler has it."""
    rank = evolve(rank, launches=launches_of(rank.instructions))
    ranks = tuple(rank if each.rank == rank.rank else each for each in state.program.ranks)
    return evolve(state, program=evolve(state.program, ranks=ranks))


# ---------------------------------------------------------------- certificate and execution


def refused(mutant: Mutant) -> bool:
    """Whether the certificate refuses a mutant. Its program, where it has none of its own yet, is not looked at."""
    return not validate(mutant.build(), program=mutant.wired).passed


def executed(experiment: Experiment, expected: Figures, mutant: Mutant) -> str | None:
    """How a mutant of an experiment's training program fails when it is run; None where it computes the same."""
    try:
        state = mutant.build()
        found = first_step(experiment, state if mutant.wired else assembled(state))
    # A mutant may be refused, get stuck, or break in any way: each is a failure that is seen.
    except Exception as error:
        return type(error).__name__
    wrong = [what for what, error in compare(found, expected).items() if not error <= TOLERANCE]
    return f"{len(wrong)} figures differ" if wrong else None


def assembled(state: Compilation) -> Compilation:
    """A mutated compilation with the program that comes of it."""
    return pipeline.assembled(planned_with(state, state.schedule))


def first_step(experiment: Experiment, state: Compilation) -> Figures:
    """Loss, metrics, gradients, their norm, and the parameters after an update, of a training program."""
    plan = CompiledRun(experiment.plan.spec, state, None)
    run = VirtualRun(plan)
    loss, norm = run.step(1, batches(plan.program, plan.train.seed)[0], *experiment.rates)
    found = {"loss": loss, **run.metrics(), "gradient norm": norm}
    figures = {name: Figure(torch.as_tensor(value, dtype=torch.float64)) for name, value in found.items()}
    for name, gradient in run.gradients().items():
        figures[f"gradient of {name}"] = Figure(gradient.double(), norm)
    for name, value in run.parameters().items():
        figures[name] = Figure(value.double())
    return figures
