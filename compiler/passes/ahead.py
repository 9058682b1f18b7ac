"""Collectives at the ends of a step that start in one function and are waited for in a later one.

What is gathered from masters starts before the step's first microbatch, and is waited for where that first reads it.
What reduces a stage's gradients starts within its last microbatch, as soon as that has added the last contribution, and
is waited for after it. All ranks along a mesh axis run the same functions, so they start these in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import frozen

from partita.compiler.graph import Node, Value
from partita.dsl.reprs import count


@frozen(eq=False)
class Ahead:
    """Nodes, by when they run: `start` are the `collectives` that need no other, with what they are computed from;
    `follow` what is computed from their results; `others` all that is left, as far as it is read.
    """

    start: tuple[Node, ...]
    collectives: tuple[Node, ...]
    follow: tuple[Node, ...]
    others: tuple[Node, ...]

    def __repr__(self) -> str:
        return f"<Ahead: {count(len(self.collectives), 'collective')}>"

    @property
    def late(self) -> set[Value]:
        """The values that are not there until a collective has arrived."""
        return {value for node in (*self.collectives, *self.follow) for value in node.outputs}


def ahead(nodes: Sequence[Node], given: Collection[Value], wanted: Collection[Value]) -> Ahead:
    """Divide nodes in order. Those that start read `given` values alone, and nothing of the step; `wanted` values are
    read afterwards.
    """
    early: set[Value] = set(given)
    late: set[Value] = set()
    collectives, follow = [], []
    for node in nodes:
        if not late.isdisjoint(node.inputs):
            follow.append(node)
            late.update(node.outputs)
        elif early.issuperset(node.inputs) and not _of_the_step(node):
            if node.op.communicates:
                collectives.append(node)
                late.update(node.outputs)
            else:
                early.update(node.outputs)
    begun = {*collectives, *follow}
    rest = [node for node in nodes if node not in begun]
    return Ahead(
        tuple(_needed([*rest, *collectives], {value for node in collectives for value in node.outputs}, nodes)),
        tuple(collectives),
        tuple(follow),
        tuple(_needed(rest, {*wanted, *(value for node in follow for value in node.inputs)}, nodes)),
    )


def _of_the_step(node: Node) -> bool:
    """Whether a node reads more of the context than the rank's coordinates."""
    return node.op.random or (node.op.reads_context and not node.op.reshards)


def _needed(nodes: Collection[Node], wanted: set[Value], order: Sequence[Node]) -> list[Node]:
    """Those of the nodes that `wanted` values are made by, or made from, in order."""
    among, needed, found = set(nodes), set(wanted), []
    for node in reversed(order):
        if node in among and not needed.isdisjoint(node.outputs):
            found.append(node)
            needed.update(node.inputs)
    return found[::-1]
