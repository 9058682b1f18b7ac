"""Mutants of records: one field has another value of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve, fields, has

from partita.compiler.graph import Node, Phase, SparseGradientPart, Value
from partita.compiler.layout import SUM, Layout
from partita.compiler.passes.shard.shard import ParameterLayouts
from partita.compiler.program import ParameterRecord, StateRecord
from partita.dsl.spec import Call
from partita.dsl.types import Type

# What is no matter of layouts: how a file in the host's memory is kept.
UNCHECKED = {(ParameterRecord, "mapped")}


def other(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return f"{value}x"
        case Type():
            return value.with_dtype("f64" if value.dtype == "f32" else "f32")
        case Layout():
            return evolve(value, states=() if value.states else (("data", SUM),))
        case Call():
            return evolve(value)  # an equal one of another declaration
        case SparseGradientPart():
            return evolve(value, number=other(value.number))
        case None:
            return SparseGradientPart(0, True)
        case tuple():
            return (*value[:-1], other(value[-1])) if value else (StateRecord("more", Type("f32", ())),)
        case Value():
            return evolve(value, layout=other(value.layout))
        case Node():
            return evolve(value, phase=Phase.FORWARD)
        case ParameterLayouts():
            return evolve(value, state=other(value.state))
    return evolve(value, name=other(value.name))


def changed(record: Any) -> Iterator[tuple[str, Any]]:
    """A record with another value of each of its fields, one at a time, and of those of the records in it."""
    for field in fields(type(record)):
        value = getattr(record, field.name)
        if (type(record), field.name) not in UNCHECKED:
            yield f"{type(record).__name__}.{field.name}", evolve(record, **{field.name: other(value)})
        if isinstance(value, tuple):
            yield from ((what, evolve(record, **{field.name: new})) for what, new in others(value))


def others(records: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Records with one that is another."""
    for i, each in enumerate(records):
        if has(type(each)) and not isinstance(each, (Node, Value)):
            yield from ((f"{i}: {what}", (*records[:i], new, *records[i + 1 :])) for what, new in changed(each))
