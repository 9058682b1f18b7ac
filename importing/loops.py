"""Loops of Python over a dimension, which capture unrolls: their steps are put together again as the one of a `scan`.

Steps follow each other in the order of the program, each as long as the others, and read the parts of a dimension one
after the other. The second step is what remains. It reads

    scan_slice(x, dim)      the part of x at the position
    scan_carry(begin)       what the step before has made, or what there is before the first

and a `scan_result(x, nexts)` is the values of x at all positions, in front of all other dimensions; `nexts` are what
the next step reads. Steps are unrolled in vain where nothing is carried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import torch
from attrs import Factory, define, evolve, field

from partita.importing.graph import Call, Captured, Value, is_op, order, replaced_in

SCAN = "scan"  # the kind of the calls that hold a step
LEAST = 3  # steps that are known as a loop
COMMUTE = ("add.Tensor", "mul.Tensor")


@define(eq=False)
class Loop:
    """The leaves of the step of a loop: what it carries, and what it reads of each position."""

    carries: list[Value] = Factory(list)
    slices: list[Value] = Factory(list)
    backward: bool = False


@define(eq=False)
class _Part:
    """A part of size 1 of a dimension of a value: its index, and whether the dimension stays."""

    x: Value
    dim: int
    index: int
    stays: bool


def roll(graph: Captured) -> bool:
    """Put the steps of all loops together; returns whether there was one."""
    any_rolled = False
    while _rolled(graph):
        any_rolled = True
    return any_rolled


def _rolled(graph: Captured) -> bool:
    values = sorted(order(graph.written), key=lambda value: value.position)
    parts = {value: part for value in values if (part := _part_of(value)) is not None}
    apart = {*parts, *(value.args["x"] for value in parts if value.op == "getitem")}
    program = [value for value in values if value not in apart]
    place = {value: i for i, value in enumerate(program)}
    marks: dict[tuple[Value, int], dict[int, int]] = {}  # where each part of a dimension is read first
    for value in program:
        for each in value.inputs:
            if each in parts:
                part = parts[each]
                marks.setdefault((part.x, part.dim), {}).setdefault(part.index, place[value])
    for (x, dim), read in sorted(marks.items(), key=lambda each: min(each[1].values())):
        found = [each for each in _likely(program, parts, read, x.shape[dim]) if each.matched()]
        # A step begins where least of all steps is left out, and where it hands on the least.
        best = min(found, key=lambda each: (-sum(map(len, each.made)), len(each.begins)), default=None)
        if best is not None and best.begins:
            best.rewrite(graph, values)
            return True
    return False


def _likely(
    program: Sequence[Value], parts: Mapping[Value, _Part], read: Mapping[int, int], size: int
) -> Iterator[_Steps]:
    """Steps that there may be, by where each part of a dimension is `read` first. What is before and behind a loop may
    read the first and the last part, too; and of the last step nothing may be read but what it made of the one before.
    """
    every = sorted(read)
    for some in (every, every[1:], every[:-1]):
        if len(some) < LEAST:
            continue
        usual = some[1:-1] if len(some) > LEAST else some
        periods = {read[b] - read[a] for a, b in pairwise(usual)}
        if len(periods) != 1 or some != [*range(some[0], some[-1] + 1)]:
            continue
        (period,) = periods
        step = 1 if period > 0 else -1
        period, first = abs(period), some[0] if period > 0 else some[-1]
        near = usual[0] if step > 0 else usual[-1]  # the first of those that are read in the loop alone
        begin = read[near] - abs(near - first) * period
        for count in (len(some) + 1, len(some)):
            if count <= size and period:
                for before in range(min(period, begin + 1)):
                    yield _Steps(program, parts, begin - before, period, count, step)


def _part_of(value: Value) -> _Part | None:
    """Which part of another value one is."""
    x = value.args.get("self")
    if value.op == "getitem" and is_op(value.args["x"], "unbind.int", "split.Tensor"):
        source = value.args["x"]
        size, dim = source.args.get("split_size", 1), source.args.get("dim", source.defaults.get("dim", 0))
        x = source.args["self"]
        return _Part(x, dim % x.rank, value.args["index"], source.op != "unbind.int") if size == 1 else None
    if not isinstance(x, Value) or not x.rank:
        return None
    dim = value.args.get("dim", 0)
    if value.op == "select.int":
        return _Part(_whole(x), dim % x.rank, value.args["index"] % x.shape[dim], False)
    if value.op == "slice.Tensor" and value.shape[dim] == 1 and x.shape[dim] > 1:
        return _Part(_whole(x), dim % x.rank, (value.args.get("start") or 0) % x.shape[dim], True)
    return None


def _whole(x: Value) -> Value:
    """What a slice is of that has all of it."""
    while x.op == "slice.Tensor" and x.args["self"].shape == x.shape:
        x = x.args["self"]
    return x


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same, or are made alike of the same."""
    if isinstance(a, Value) and isinstance(b, Value):
        if a is b:
            return True
        if a.constant is not None and b.constant is not None:
            return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.constant, b.constant)
        alike = a.op == b.op and a.shape == b.shape and a.args.keys() == b.args.keys()
        return alike and a.inputs != [] and all(_same(a.args[name], b.args[name]) for name in a.args)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return not isinstance(a, Value) and not isinstance(b, Value) and bool(a == b)


@define(eq=False)
class _Steps:
    """Steps that may be those of a loop, `count` of them, each a `period` of the program."""

    program: Sequence[Value]
    parts: Mapping[Value, _Part]
    first: int
    period: int
    count: int
    step: int
    made: list[dict[Value, Value]] = field(factory=list)  # by step: what stands for the values of the second
    begins: dict[Value, Any] = field(factory=dict)  # by what the next step reads: what there is before the first
    slices: dict[Value, _Part] = field(factory=dict)  # parts that each step reads further on, as the second does
    roles: dict[Value, Value] = field(factory=dict)  # of values of the first step: those of the second

    def matched(self) -> bool:
        """Whether all steps do what the second does."""
        every = [self.program[self.first + t * self.period :][: self.period] for t in range(self.count)]
        self.roles = dict(zip(every[0], every[1], strict=False))
        self.made = [{} for _ in range(self.count)]
        self.made[1] = {value: value for value in every[1]}
        for t in (0, *range(2, self.count)):
            here = iter(every[t])
            other = next(here, None)
            for value in every[1]:
                if other is not None and self._fits(value, other, t):
                    self.made[t][value] = other
                    other = next(here, None)
                elif t != self.count - 1:  # of the last step, what the next would read may be left out
                    return False
        return bool(self.made[-1])

    def _fits(self, value: Value, other: Value, t: int) -> bool:
        if value.op != other.op or value.shape != other.shape or value.args.keys() != other.args.keys():
            return False
        if (value.constant is None) != (other.constant is None) and t:
            return False
        slices, begins = dict(self.slices), dict(self.begins)
        if all(self._agree(value.args[name], other.args[name], t) for name in value.args):
            return True
        self.slices, self.begins = slices, begins
        if value.op not in COMMUTE or t:
            return False
        # `total = 0` before the first step, and `total + x` in each
        swapped = {**other.args, "self": other.args["other"], "other": other.args["self"]}
        if all(self._agree(value.args[name], swapped[name], t) for name in value.args):
            return True
        self.slices, self.begins = slices, begins
        return False

    def _agree(self, a: Any, b: Any, t: int) -> bool:
        """Whether an argument of the second step is what another one is of step `t`."""
        if isinstance(a, list | tuple) and isinstance(b, list | tuple):
            return len(a) == len(b) and all(self._agree(one, other, t) for one, other in zip(a, b, strict=True))
        if not isinstance(a, Value):
            return not isinstance(b, Value) and bool(a == b)
        if a in self.made[1]:
            return self.made[t].get(a) is b
        if a in self.roles:
            role = self.roles[a]
            if t:
                return self.made[t - 1].get(role) is b
            return bool(_same(self.begins.setdefault(role, b), b))
        if a in self.parts:
            return isinstance(b, Value) and b in self.parts and self._parts_agree(a, b, t)
        return isinstance(b, Value) and _same(a, b)

    def _parts_agree(self, a: Value, b: Value, t: int) -> bool:
        one, other = self.parts[a], self.parts[b]
        if one.dim != other.dim or one.stays != other.stays:
            return False
        if one.x in self.made[1]:
            if self.made[t].get(one.x) is not other.x or one.index != other.index:
                return False
            self.made[t][a] = b
            self.made[1][a] = a
            return True
        if one.x in self.roles or not _same(one.x, other.x):
            return False
        if one.index == other.index:
            return a not in self.slices
        if other.index - one.index != (t - 1) * self.step:
            return False
        self.slices[a] = one
        return True

    # ------------------------------------------------------------ rewriting

    def rewrite(self, graph: Captured, values: Sequence[Value]) -> None:
        """Put the one step in the place of all."""
        made = self.made[1]
        calls = common([value.place.calls for value in made])
        path = ".".join(filter(None, (next((call.path for call in reversed(calls) if call.path), ""), SCAN)))
        taken = {call.path for value in values for call in value.place.calls}
        path = next(each for each in (path, *(f"{path}_{n}" for n in range(2, 1000))) if each not in taken)
        call = Call(path, SCAN)
        begin = min(made, key=lambda value: value.position)
        loop = Loop(backward=self.step < 0)
        place = evolve(begin.place, calls=(*calls, call))
        replaced: dict[Value, Value] = {}
        for role, first in self.begins.items():
            carry = begin.make("scan_carry", role.shape, role.dtype, begin=_begun(begin, first, role))
            carry.place = evolve(role.place, calls=(*calls, call))
            loop.carries.append(carry)
            replaced[next(old for old, new in self.roles.items() if new is role)] = carry
        sliced: dict[tuple[Value, int, int], Value] = {}
        for value, part in self.slices.items():
            start = part.index - self.step
            start = start - self.count + 1 if self.step < 0 else start
            key = (part.x, part.dim, start)
            if key not in sliced:
                shape = [size for i, size in enumerate(part.x.shape) if i != part.dim]
                whole = _run(part, start, self.count)
                sliced[key] = begin.make("scan_slice", shape, part.x.dtype, x=whole, dim=part.dim)
                sliced[key].place = place
                loop.slices.append(sliced[key])
            replaced[value] = sliced[key]
            if part.stays:
                replaced[value] = begin.make(
                    "view.default", value.shape, value.dtype, self=sliced[key], size=[*value.shape]
                )
                replaced[value].place = place
        for value in made:
            value.place = evolve(value.place, calls=(*calls, call, *value.place.calls[len(calls) :]))
            value.args = replaced_in(value.args, replaced)
        nexts = [*self.begins]
        results = _Results(self, loop, nexts, max(value.position for value in self.made[-1].values()), calls)
        for value in values:
            if value not in results.role:
                value.args = {name: results.of(each) for name, each in value.args.items()}
                results.whole(value)
        graph.outputs = [results.of(each) for each in graph.outputs]
        graph.changes = [results.of(each) for each in graph.changes]


class _Results:
    """What stands behind a loop for what its steps have made."""

    def __init__(self, steps: _Steps, loop: Loop, nexts: list[Value], position: int, calls: tuple[Call, ...]) -> None:
        self.steps, self.loop, self.nexts = steps, loop, nexts
        self.position, self.calls = position, calls
        self.known: dict[Value, Value] = {}
        self.role: dict[Value, tuple[Value, int]] = {
            value: (role, t) for t, each in enumerate(steps.made) for role, value in each.items()
        }

    def _new(self, like: Value, op: str, shape: Sequence[int], /, **args: Any) -> Value:
        made = like.make(op, shape, like.dtype, **args)
        made.place, made.position = evolve(like.place, calls=self.calls), self.position
        return made

    def every(self, role: Value) -> Value:
        """The values of one of the step at all positions, these first."""
        if role not in self.known:
            shape = (self.steps.count, *role.shape)
            self.known[role] = self._new(role, "scan_result", shape, x=role, nexts=self.nexts, loop=self.loop)
        return self.known[role]

    def of(self, x: Any) -> Any:
        """An argument of what is computed behind the loop."""
        if isinstance(x, list | tuple):
            return self._list(list(x))
        if not isinstance(x, Value) or x not in self.role:
            return x
        role, t = self.role[x]
        index = self.steps.count - 1 - t if self.loop.backward else t
        index = -1 if index == self.steps.count - 1 else index
        return self._new(role, "select.int", role.shape, self=self.every(role), dim=0, index=index)

    def _list(self, xs: list[Any]) -> list[Any]:
        found = [self.role.get(x) if isinstance(x, Value) else None for x in xs]
        if len(xs) == self.steps.count and found and all(each is not None for each in found):
            roles, times = zip(*(each for each in found if each is not None), strict=True)
            steps = [*range(self.steps.count)]
            if len(set(roles)) == 1 and [*times] in (steps, steps[::-1]):
                role, dim = roles[0], None
                if role.op == "unsqueeze.default" and role.args["self"] in self.steps.made[1]:
                    role, dim = role.args["self"], role.args["dim"] % role.rank
                every = self.every(role)
                if ([*times] == steps) == self.loop.backward:
                    every = self._new(every, "flip.default", every.shape, self=every, dims=[0])
                return [_All(every, dim)]
        return [self.of(x) for x in xs]

    def whole(self, value: Value) -> None:
        """Let what puts all steps together be what the loop has made."""
        tensors = value.args.get("tensors")
        if not isinstance(tensors, list) or len(tensors) != 1 or not isinstance(tensors[0], _All):
            return
        every, more, dim = tensors[0].value, tensors[0].more, value.args.get("dim", 0)
        at = dim % value.rank
        dims = [*range(1, at + 1), 0, *range(at + 1, every.rank)]
        if (value.op == "stack.default" and more is None) or more == at:
            value.op, value.args = "permute.default", {"self": every, "dims": dims}
        else:  # cat: what is put together has the dimension already
            shape = [every.shape[i] for i in dims]
            moved = self._new(every, "permute.default", shape, self=every, dims=dims)
            moved.position = value.position
            value.op, value.args = "view.default", {"self": moved, "size": [*value.shape]}
        value.defaults = {}


@define(eq=False)
class _All:
    """All steps of one value, in a list, perhaps each with another dimension."""

    value: Value
    more: int | None = None


def _begun(like: Value, first: Any, role: Value) -> Value:
    """What there is before the first step, in the shape of what steps hand on."""
    if not isinstance(first, Value):
        return like.make_constant(torch.full(role.shape, first, dtype=role.dtype))
    if first.shape == role.shape:
        return first
    return like.make("expand.default", role.shape, first.dtype, self=first, size=[*role.shape])


def _run(part: _Part, start: int, count: int) -> Value:
    """The positions of a dimension over which a loop runs."""
    if start == 0 and count == part.x.shape[part.dim]:
        return part.x
    shape = [count if i == part.dim else size for i, size in enumerate(part.x.shape)]
    args = {"self": part.x, "dim": part.dim, "start": start, "end": start + count, "step": 1}
    return part.x.make("slice.Tensor", shape, **args)


def common(calls: Sequence[tuple[Call, ...]]) -> tuple[Call, ...]:
    """What all calls begin with."""
    same = takewhile(lambda column: len({*column}) == 1, zip(*calls, strict=False))
    return tuple(each for each, *_ in same)
