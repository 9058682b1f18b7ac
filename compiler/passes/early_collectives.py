"""Collectives at the ends of a step, and copies to the host's memory, that start in one function and are waited for in
a later one.

What is gathered from masters starts before the step's first microbatch, and is waited for where that first reads it.
What reduces a stage's gradients starts within its last microbatch, as soon as that has added the last contribution, and
is waited for after it. All ranks along a mesh axis run the same functions, so they start these in the same order.

A gradient that an update in the host's memory reads starts its way there within the last microbatch as well: if nothing
reduces it, behind its last contribution; otherwise where the next collectives start, behind them. By then the one that
reduces it has had the time that it took to make what those send.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from attrs import frozen

from partita.compiler.graph import Node, Value, inputs_of, outputs_of, producers_of
from partita.compiler.ops.collective import Collective, is_reshard
from partita.compiler.ops.host import ASYNC_COPIES
from partita.dsl.reprs import count


@frozen(eq=False)
class EarlyCollectives:
    """Nodes, by when they run: `start` are the `collectives` that need no other, with what they are computed from, and
    the `copies` to the host's memory that can start among them; `follow` what is computed from their results; `others`
    all that is left, as far as it is read. The copies wait for those collectives that are not `in_flight` afterwards.
    """

    start: tuple[Node, ...]
    collectives: tuple[Node, ...]
    follow: tuple[Node, ...]
    others: tuple[Node, ...]
    copies: tuple[Node, ...] = ()

    @property
    def in_flight(self) -> tuple[Node, ...]:
        """The collectives that are waited for later."""
        waited = inputs_of(self.copies)
        return tuple(node for node in self.collectives if waited.isdisjoint(node.outputs))

    @property
    def made(self) -> tuple[Value, ...]:
        """The results of collectives that have been waited for, and of copies that have started."""
        flying = set(self.in_flight)
        nodes = (*(node for node in self.collectives if node not in flying), *self.copies)
        return tuple(value for node in nodes for value in node.outputs)

    def with_copies(self, places: Mapping[Node, int]) -> EarlyCollectives:
        """Copies of what collectives make start among them as well, if others come after theirs, at a later place."""
        makers = producers_of(self.collectives)
        last = {places[node]: node for node in self.start if isinstance(node.op, Collective)}
        order = {node: number for number, node in enumerate(self.start)}
        behind: dict[Node, list[Node]] = {}
        for node in self.follow:
            if isinstance(node.op, ASYNC_COPIES) and node.inputs[0] in makers:
                maker = makers[node.inputs[0]]
                later = [p for p, other in last.items() if p > places[maker] and order[other] > order[maker]]
                if later:
                    behind.setdefault(last[min(later)], []).append(node)
        moved = dict.fromkeys(node for own in behind.values() for node in own)
        start = tuple(each for node in self.start for each in (node, *behind.get(node, ())))
        follow = tuple(node for node in self.follow if node not in moved)
        return EarlyCollectives(start, self.collectives, follow, self.others, (*self.copies, *moved))

    def __repr__(self) -> str:
        return f"<Ahead: {count(len(self.collectives), 'collective')}>"

    @property
    def late(self) -> set[Value]:
        """The values that are not there until a collective has arrived."""
        return outputs_of((*self.collectives, *self.follow))


def split_early_collectives(
    nodes: Sequence[Node], available: Collection[Value], live_out: Collection[Value]
) -> EarlyCollectives:
    """Divide nodes in order. Those that start read `available` values alone, and nothing of the step; `live_out` values
    are read afterwards.
    """
    early: set[Value] = set(available)
    late: set[Value] = set()
    collectives, copies, follow = list[Node](), list[Node](), list[Node]()
    for node in nodes:
        if not late.isdisjoint(node.inputs):
            follow.append(node)
            late.update(node.outputs)
        elif early.issuperset(node.inputs) and not _of_the_step(node):
            if isinstance(node.op, Collective):
                collectives.append(node)
                late.update(node.outputs)
            elif isinstance(node.op, ASYNC_COPIES):
                copies.append(node)
            else:
                early.update(node.outputs)
    begun = [*collectives, *copies]
    placed = {*begun, *follow}
    rest = [node for node in nodes if node not in placed]
    return EarlyCollectives(
        tuple(_backward_slice([*rest, *begun], outputs_of(begun), nodes)),
        tuple(collectives),
        tuple(follow),
        tuple(_backward_slice(rest, {*live_out, *(value for node in follow for value in node.inputs)}, nodes)),
        tuple(copies),
    )


def copied_ahead(nodes: Sequence[Node]) -> list[Node]:
    """The nodes of an update, in which copies to the host's memory start before the parameter that comes before their
    own is updated, if what they are made of is there, and so run beside that. They start earlier yet as long as those
    that no update has read take no more than those of the largest parameter.
    """
    parts = [list(part) for _, part in groupby(nodes, key=lambda node: node.scope)]
    produced = outputs_of(nodes)
    available: set[Value] = set()
    order: list[Node] = []
    started: list[set[Node]] = []
    sizes = [sum(node.output.type.bytes for node in part if isinstance(node.op, ASYNC_COPIES)) for part in parts]
    under_way = 0
    for i, part in enumerate(parts):
        while len(started) < len(parts):
            following = len(started)
            if following > i + 1 and under_way + sizes[following] > max(sizes):
                break
            start = _begun(parts[following], produced, available)
            order += start
            started.append(set(start))
            under_way += sizes[following]
        order += (node for node in part if node not in started[i])
        available.update(value for node in part for value in node.outputs)
        under_way -= sizes[i]
    return order


def _begun(part: Sequence[Node], produced: Collection[Value], available: set[Value]) -> list[Node]:
    """The copies to the host's memory among nodes, with what they are made of, as far as all that is `produced` for
    these is `available`, to which their own results are added.
    """
    nodes = []
    copies = {value for node in part if isinstance(node.op, ASYNC_COPIES) for value in node.outputs}
    for node in _backward_slice(part, copies, part):
        if not isinstance(node.op, Collective) and all(
            value in available or value not in produced for value in node.inputs
        ):
            nodes.append(node)
            available.update(node.outputs)
    return nodes


def _of_the_step(node: Node) -> bool:
    """Whether a node reads more of the context than the rank's coordinates."""
    return node.op.random or (
        node.op.reads_context and not is_reshard(node.op) and not isinstance(node.op, ASYNC_COPIES)
    )


def _backward_slice(nodes: Collection[Node], values: set[Value], order: Sequence[Node]) -> list[Node]:
    """Those of the nodes that `values` values are made by, or made from, in order."""
    among, needed, selected = set(nodes), set(values), []
    for node in reversed(order):
        if node in among and not needed.isdisjoint(node.outputs):
            selected.append(node)
            needed.update(node.inputs)
    return selected[::-1]
