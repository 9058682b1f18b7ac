"""Small collectives of one kind travel together: several tensors in one message, at the price of one latency.

Comes in: the nodes of one function in order. Goes out: the same with collectives joined. A collective waits for
others of its kind, mesh axis and dtype until something reads one of the results, or until the bucket is full. A bucket
stands where the last of it stood, so that it starts as soon as it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import evolve

from partita.compiler.graph import Node, Value
from partita.compiler.ops.collective import Collective

# What waits for company within a microbatch: more than this is worth a message of its own.
SMALL_BYTES = 64 * 2**10
# The size of a bucket at the end of a step: as torch's DistributedDataParallel has it.
BUCKET_BYTES = 25 * 2**20


def bucketed(nodes: Iterable[Node], waits: int, full: int = BUCKET_BYTES) -> list[Node]:
    """Join collectives of at most `waits` bytes each into buckets of at most `full` bytes."""
    found: list[Node | None] = []  # None where a bucket may come to stand
    places: dict[tuple[object, ...], int] = {}
    waiting: dict[tuple[object, ...], list[tuple[Node, Collective]]] = {}
    owner: dict[Value, tuple[object, ...]] = {}

    def flush(key: tuple[object, ...]) -> None:
        bucket = waiting.pop(key)
        for node, _ in bucket:
            for value in node.outputs:
                del owner[value]
        found[places[key]] = _joined(bucket)

    for node in nodes:
        for key in dict.fromkeys(owner[value] for value in node.inputs if value in owner):
            if key in waiting:
                flush(key)
        if not isinstance(node.op, Collective) or carried(node) > waits:
            found.append(node)
            continue
        key = node.op.bucket, node.inputs[0].type.dtype, node.phase, node.stage
        bucket = waiting.setdefault(key, [])
        bucket.append((node, node.op))
        places[key] = len(found)
        found.append(None)
        owner.update(dict.fromkeys(node.outputs, key))
        if sum(value.type.bytes for each, _ in bucket for value in each.inputs) > full:
            flush(key)
    for key in list(waiting):
        flush(key)
    return [node for node in found if node is not None]


def carried(node: Node) -> int:
    """The size of what a collective is about: between that of its operands and of its results."""
    return sum(value.type.bytes for value in (*node.inputs, *node.outputs)) // 2


def by_depth(nodes: Sequence[Node]) -> list[Node]:
    """The nodes in another order: first what needs no collective, then what needs one before it, and so on.

    So collectives of the same depth stand together, and the rest keeps its order.
    """
    depth: dict[Value, int] = {}
    order: list[tuple[int, Node]] = []
    for node in nodes:
        level = max((depth.get(value, 0) for value in node.inputs), default=0)
        order.append((level, node))
        depth.update(dict.fromkeys(node.outputs, level + node.op.communicates))
    return [node for _, node in sorted(order, key=lambda pair: pair[0])]


def _joined(bucket: Sequence[tuple[Node, Collective]]) -> Node:
    first, op = bucket[0]
    if len(bucket) == 1:
        return first
    return evolve(
        first,
        op=op.together([each for _, each in bucket]),
        inputs=tuple(value for node, _ in bucket for value in node.inputs),
        outputs=tuple(value for node, _ in bucket for value in node.outputs),
    )
