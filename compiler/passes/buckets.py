"""Buckets small collectives: several tensors in one message, for one latency.

Takes the nodes of one function in order, and merges collectives. A collective waits for others of its kind, mesh axis
and dtype until something reads one of the results, or until the bucket is full. A bucket takes the place of its last
collective, so that it starts as soon as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attrs import evolve

from partita.compiler.graph import Node, Value
from partita.compiler.mesh import Mesh
from partita.compiler.ops.collective import Collective

# The largest collective that is bucketed within a microbatch.
SMALL_BYTES = 64 * 2**10
# The largest size of a bucket at the end of a step, as in torch's DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20


def bucket_limits(mesh: Mesh) -> Callable[[str], float]:
    """The size of a bucket at the end of a step, by its mesh axis: no larger than latency asks for, since the last one
    cannot overlap with anything; but among many ranks as large as what a ring moves while its steps take their time.
    """

    def full(axis: str) -> float:
        link = mesh.link(axis)
        return max(min(BUCKET_BYTES, max(SMALL_BYTES, link.amortizing)), link.waiting(mesh.sizes[axis]))

    return full


def bucketed(nodes: Iterable[Node], limit: int, full: Callable[[str], float] = lambda axis: BUCKET_BYTES) -> list[Node]:
    """Merge collectives of at most `limit` bytes each into buckets; one that is `full` takes no more."""
    merged: list[Node | None] = []  # None: a place for a bucket
    places: dict[tuple[object, ...], int] = {}
    waiting: dict[tuple[object, ...], list[tuple[Node, Collective]]] = {}
    owner: dict[Value, tuple[object, ...]] = {}

    def flush(key: tuple[object, ...]) -> None:
        bucket = waiting.pop(key)
        for node, _ in bucket:
            for value in node.outputs:
                del owner[value]
        merged[places[key]] = _joined(bucket)

    for node in nodes:
        for key in dict.fromkeys(owner[value] for value in node.inputs if value in owner):
            flush(key)
        if not isinstance(node.op, Collective) or transferred_bytes(node) > limit:
            merged.append(node)
            continue
        key = node.op.bucket, node.inputs[0].type.dtype, node.phase, node.stage
        bucket = waiting.setdefault(key, [])
        bucket.append((node, node.op))
        places[key] = len(merged)
        merged.append(None)
        owner.update(dict.fromkeys(node.outputs, key))
        if sum(value.type.bytes for each, _ in bucket for value in each.inputs) > full(node.op.over):
            flush(key)
    for key in list(waiting):
        flush(key)
    return [node for node in merged if node is not None]


def transferred_bytes(node: Node) -> int:
    """The bytes that a collective transfers: the average of its operands and its results."""
    return sum(value.type.bytes for value in (*node.inputs, *node.outputs)) // 2


def by_depth(nodes: Sequence[Node]) -> list[Node]:
    """The nodes reordered: first those that need no collective, then those that need one before them, and so on.

    So collectives of the same depth are adjacent, and the other nodes keep their order.
    """
    depth: dict[Value, int] = {}
    order: list[tuple[int, Node]] = []
    for node in nodes:
        level = max((depth.get(value, 0) for value in node.inputs), default=0)
        order.append((level, node))
        depth.update(dict.fromkeys(node.outputs, level + isinstance(node.op, Collective)))
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
