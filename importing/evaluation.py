"""What a module computes otherwise in evaluation, where it draws no numbers: `mean + spread * noise if self.training
else mean` becomes `where(training(), mean + spread * noise, mean)`. Dropouts and batch norms are so by themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from attrs import evolve

from partita.importing.draws import is_draw, is_dropping
from partita.importing.graph import Captured, Value, order, replaced_in

KEPT = (
    "dropout.default",
    "native_dropout.default",
    "clone.default",
    "alias.default",
)  # what evaluation leaves as it is
NORM = ("input", "weight", "bias", "running_mean", "running_var")  # what batch norms read in both


def draws_in_training_alone(graph: Captured, evaluated: Captured) -> bool:
    """Whether a module draws numbers, other than what it drops, and none in evaluation."""
    drawn, none = ([each.op for each in order(one.outputs) if is_draw(each.op)] for one in (graph, evaluated))
    return bool(drawn) and not none and not any(map(is_dropping, drawn))


def in_evaluation(graph: Captured, evaluated: Captured) -> None:
    """Let the outputs of a graph be those of another one in evaluation."""
    numbers: dict[object, int] = {}  # the same for what is computed alike of the same
    ours, theirs = (_numbered(order(one.outputs), numbers) for one in (graph, evaluated))
    known = {number: value for value, number in ours.items()}  # what is in evaluation, by the numbers of theirs
    shared = {*ours.values()} & {*theirs.values()}
    layers: dict[object, list[Value]] = {}
    for value in ours:
        layers.setdefault(_layer(value, ours, shared), []).append(value)
    chosen: dict[tuple[Value, Value], Value] = {}
    waiting: list[tuple[Value, Value]] = []
    met: set[tuple[Value, Value]] = set()

    def meet(one: Value, other: Value) -> Value:
        """What stands for a value of ours beside one of theirs; it is looked into if both do the same."""
        if ours[one] == theirs[other]:
            return one
        inside = _kept(one), _kept(other)
        if _shape(inside[0]) == _shape(inside[1]):
            if inside not in met:
                met.add(inside)
                waiting.append(inside)
                known.setdefault(theirs[other], one)
            return one
        if (one, other) not in chosen:
            xs = [one.make("training", (), torch.bool), one, other]
            chosen[one, other] = one.make("pointwise", function="where", xs=xs)
            behind, left = {*order([one])} - {one}, [other]
            while left:  # what evaluation computes by the same weights, on the way to what training alone computes
                each = left.pop()
                if theirs[each] in known:
                    continue
                found = layers.get(_layer(each, theirs, shared), [])
                if len(found) == 1 and found[0] in behind:
                    meet(found[0], each)
                else:
                    left += each.inputs
        return chosen[one, other]

    graph.outputs = [meet(*each) for each in zip(graph.outputs, evaluated.outputs, strict=True)]
    while waiting:
        one, other = waiting.pop()
        pairs = dict(zip(one.inputs, other.inputs, strict=True))
        one.args = replaced_in(one.args, {x: meet(x, its) for x, its in pairs.items()})
    for (one, other), choice in chosen.items():
        for each in order([other]):
            if theirs[each] not in known:
                args = replaced_in(each.args, {x: known[theirs[x]] for x in each.inputs})
                known[theirs[each]] = evolve(each, args=args, position=one.position)
        choice.args["xs"][2] = known[theirs[other]]


def _layer(value: Value, numbers: Mapping[Value, int], shared: Collection[int]) -> object:
    """What an operation is, with the weights that it reads; nothing if it reads none."""
    weights = tuple(numbers[each] if numbers[each] in shared else None for each in value.inputs)
    return (_shape(value), weights) if any(each is not None for each in weights) else value


def _numbered(values: list[Value], numbers: dict[object, int]) -> dict[Value, int]:
    """Numbers of values, the same where the same is computed in evaluation."""
    found: dict[Value, int] = {}
    for value in values:
        kept = _kept(value)
        found[value] = numbers.setdefault(_key(value, found), len(numbers)) if kept is value else found[kept]
    return found


def _kept(value: Value) -> Value:
    """What evaluation leaves as it is of a value."""
    while (whole := value.args["x"] if value.op == "getitem" else value).op in KEPT and whole.inputs:
        value = whole.inputs[0]
    return value


def _key(value: Value, found: Mapping[Value, int]) -> object:
    name = value.args.get("names", [value.args.get("name")])[0]
    if not value.inputs and name:
        return name
    if value.constant is not None:
        return value.constant.dtype, value.shape, value.constant.numpy().tobytes()
    return _shape(value), tuple(found[each] for each in value.inputs)


def _shape(value: Value) -> object:
    """What an operation is, without the values that it reads."""
    if value.op.startswith("_native_batch_norm"):
        return "batch_norm", value.shape, *(isinstance(value.args.get(name), Value) for name in NORM)
    return value.op, value.shape, str([(name, _without_values(each)) for name, each in value.args.items()])


def _without_values(x: Any) -> Any:
    if isinstance(x, Value):
        return ...
    return [_without_values(each) for each in x] if isinstance(x, list | tuple) else x
