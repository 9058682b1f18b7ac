"""Layers of a list that drop more the deeper they are: one that drops nothing, as the first, does so at a rate of 0."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from partita.importing.graph import Call, Value, is_op, order, replaced_in, users


def level(outputs: Sequence[Value]) -> None:
    """Let layers that do what the next of their list does, but for dropouts, have these."""
    values = sorted(order(outputs), key=lambda value: value.position)
    layers: dict[tuple[tuple[Call, ...], str, str], dict[int, list[Value]]] = {}
    for value in values:
        for depth, call in enumerate(value.place.calls):
            path, _, last = call.path.rpartition(".")
            if last.isdigit() and value.constant is None:
                key = value.place.calls[:depth], path, call.kind
                layers.setdefault(key, {}).setdefault(int(last), []).append(value)
    readers = users(values)
    for numbered in layers.values():
        for number in sorted(numbered, reverse=True):
            own, following = numbered[number], numbered.get(number + 1, [])
            if len(own) < len(following):
                made = _levelled(own, following, readers)
                numbered[number] = made or own


def _levelled(own: list[Value], following: Sequence[Value], readers: dict[Value, list[Value]]) -> list[Value] | None:
    """The values of a layer with the dropouts of the next one; None if they differ in more."""
    same: dict[Value, Value] = {}  # of the next layer's values: this one's
    left = iter(own)
    value = next(left, None)
    dropped: list[Value] = []
    for other in following:
        if value is not None and _are_alike(value, other, same):
            same[other] = value
            value = next(left, None)
        elif (x := _dropped(other)) is not None and (x.constant is not None or x in same):
            dropped.append(other)
            same[other] = same.get(x, x)
        else:
            return None
    if value is not None:
        return None
    for other in dropped:
        if is_op(other, "dropout") and other.args["x"].constant is not None:
            same[other] = other.make("dropout", x=other.args["x"], rate=0.0)
            continue
        x = same[_dropped(other) or other]
        inside = [same[each] for each in readers.get(other, []) if each in same and each not in dropped]
        args = {**replaced_in(other.args, same), **({"rate": 0.0} if is_op(other, "dropout") else {})}
        made = other.make(other.op, **args)
        for new in (made, *(each for each in made.inputs if is_op(each, "dropout"))):
            new.position = x.position
            new.place = evolve(other.place, calls=(inside[0] if inside else x).place.calls)
        ends = any(each not in same for each in readers.get(other, []))
        for each in [*inside, *((each for each in readers[x] if each not in own) if ends else ())]:
            each.args = replaced_in(each.args, {x: made})
        same[other] = made
    return [same[each] for each in following]


def _are_alike(one: Value, other: Value, same: dict[Value, Value]) -> bool:
    """Whether two layers compute a value alike."""
    if (one.op, one.shape, one.args.get("function")) != (other.op, other.shape, other.args.get("function")):
        return False
    pairs = zip(one.inputs, other.inputs, strict=False)
    return len(one.inputs) == len(other.inputs) and all(same[b] is a for a, b in pairs if b in same)


def _dropped(value: Value) -> Value | None:
    """What a dropout is of, or what is multiplied with one of ones."""
    if is_op(value, "dropout"):
        x: Value = value.args["x"]
        return x
    if is_op(value, "pointwise") and value.args["function"] == "multiply":
        found = [x for x in value.args["xs"] if not (is_op(x, "dropout") and x.args["x"].constant is not None)]
        return found[0] if len(found) == 1 and isinstance(found[0], Value) else None
    return None
