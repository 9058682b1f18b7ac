"""What a layer computes of no input, for itself and for others, is computed before all of them: of T5, the first layer
makes the biases of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from partita.importing.graph import LEAVES, Call, Value, order
from partita.importing.loops import common


def hoist(outputs: Sequence[Value]) -> None:
    """Move what is made of no input, and read both in the module that makes it and elsewhere, to the module around all
    that read it; with it what is read for it alone.
    """
    values = order(list(outputs))
    readers: dict[Value, list[Value]] = {}
    free: set[Value] = set()
    begins: dict[tuple[Call, ...], int] = {}
    for value in values:
        for each in value.inputs:
            readers.setdefault(each, []).append(value)
        if value.op != "input" and all(each in free for each in value.inputs):
            free.add(value)
        for depth in range(len(value.place.calls)):
            scope = value.place.calls[: depth + 1]
            begins[scope] = min(begins.get(scope, value.position), value.position)
    moved: set[Value] = set()
    for value in reversed(values):
        own, read = value.place.calls, readers.get(value, [])
        inside = [each.place.calls[: len(own)] == own for each in read]
        if value not in free or value.op in LEAVES or value.constant is not None or all(inside):
            continue
        if any(inside) or all(each in moved for each in read):
            calls = common([own, *(each.place.calls for each in read)])
            value.position = begins[own[: len(calls) + 1]] - 1
            value.place = evolve(value.place, calls=calls)
            moved.add(value)
