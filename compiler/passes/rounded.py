"""Graph → warnings of positions, angles and indices that are computed in bf16.

`f32` in a file means the dtype of the computation. bf16 has eight bits: of the integers it holds all up to 256, of
those up to 512 every second one, and so on. Activations can do with that, but a position that is rounded is another
position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from partita.compiler.graph import Graph, Node, Value
from partita.compiler.ops.intervals import Interval
from partita.compiler.ops.pointwise import Cast, Pointwise
from partita.compiler.passes.guard import bounds_of
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.syntax.source import Span
from partita.dsl.types import INTEGERS

EXACT = 256  # bf16 holds all integers up to here
MAX_IDS = EXACT // 4  # two bits are for what is computed on the way
ANGLES = (Pointwise("sin"), Pointwise("cos"))
TO_BF16, TO_INTEGERS = Cast("bf16"), tuple(map(Cast, INTEGERS))
EIGHT_BITS = "bf16, which has eight bits"
HELP = "compute it in f64, from `cast(i, f64)` or `sample u: f64[…]`, and cast the result to f32"


def rounded(graph: Graph) -> tuple[Diagnostic, ...]:
    """Warnings (W0305), one for each place and what is rounded there."""
    producers = graph.producers()
    casts = {node for node in graph.nodes if node.op == TO_BF16 and node.inputs[0].type.dtype in INTEGERS}
    known = bounds_of(graph) if casts else {}
    warnings: dict[tuple[Span | None, str], None] = {}
    for node in graph.nodes:
        if node.op in ANGLES and node.output.type.dtype == "bf16":
            warnings[node.span, f"angles are rounded to {EIGHT_BITS}"] = None
        elif node in casts:
            integers = _large(known.get(node.inputs[0]))
            if integers:
                warnings[node.span, f"{integers} are rounded to {EIGHT_BITS}"] = None
        lookup = node.op.ids([value.type for value in node.inputs])
        if lookup is not None and lookup[1].size > MAX_IDS:
            position, axis = lookup
            for place in _from_bf16(node.inputs[position], producers):
                warnings[place, f"ids of `{axis.name}`, of size {axis.size:,}, are computed in {EIGHT_BITS}"] = None
    return tuple(Diagnostic("W0305", message, place, (), HELP) for place, message in warnings)


def _large(interval: Interval | None) -> str | None:
    """What integers of an interval are called, if bf16 does not hold all of them."""
    if interval is None:
        return "integers"
    largest = int(max(-interval[0], interval[1]))
    if largest <= EXACT:
        return None
    return f"integers up to {largest:,}" if largest < 2**31 - 1 else "integers"


def _from_bf16(ids: Value, producers: Mapping[Value, Node]) -> Iterator[Span | None]:
    """The places where numbers in bf16 become integers that ids are computed from."""
    waiting, met = [ids], {ids}
    while waiting:
        node = producers.get(waiting.pop())
        if node is None:
            continue
        if node.op in TO_INTEGERS and node.inputs[0].type.dtype == "bf16":
            yield node.span
            continue
        for value in node.inputs:
            if value.type.dtype in INTEGERS and value not in met:
                met.add(value)
                waiting.append(value)
