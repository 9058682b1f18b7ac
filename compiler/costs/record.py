"""What `partita profile` writes of a machine and `profile("machine.json")` reads: a device, a link, and timings.

JSON: `{"records": [{"ranks": 2, "device": {…}, "link": {…}, "timings": [[kernel, dtype, [feature, …], work, seconds],
…]}]}`; keys are the fields of `Record`, `Device` and `Link`, and a timing has the fields of `Timing` in their order.
Ranks that share a machine share its caches, its memory and its power, so each number of them has a record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from math import dist, exp, log
from typing import Any

from attrs import define, field, frozen

from partita.compiler.ops.op import Kernel
from partita.dsl.brief import shortened
from partita.dsl.diagnostic import refuse
from partita.dsl.limits import NAME_CHARACTERS
from partita.dsl.source import Source
from partita.dsl.spec import Call

# How many of the nearest timings are asked.
NEAREST = 4


@frozen
class Timing:
    """What an operation took: seconds of a kernel with these features, which does `work` (FLOPs or bytes)."""

    kernel: str
    dtype: str
    features: tuple[float, ...]
    work: float
    seconds: float


@define(eq=False)
class Timings:
    """Timings, asked for what lies between them: the time for each unit of work is interpolated between the nearest, in
    the space of the features' logarithms.
    """

    all: tuple[Timing, ...] = ()
    _found: dict[tuple[str, Kernel], float | None] = field(factory=dict, init=False)

    __repr__ = shortened

    def seconds(self, kernel: Kernel, dtype: str) -> float | None:
        """The time of a kernel; None where no timing is like it."""
        key = dtype, kernel
        if key not in self._found:
            self._found[key] = self._interpolated(kernel, dtype)
        return self._found[key]

    def _interpolated(self, kernel: Kernel, dtype: str) -> float | None:
        # Another version may have known a kernel by more features.
        alike = kernel.name, dtype, len(kernel.features)
        found = [each for each in self.all if (each.kernel, each.dtype, len(each.features)) == alike]
        if not found:
            return None
        place = _logarithms(kernel.features)
        near = sorted((dist(place, _logarithms(each.features)), i) for i, each in enumerate(found))[:NEAREST]
        if near[0][0] < 1e-6:
            return found[near[0][1]].seconds * kernel.work / found[near[0][1]].work
        weights = [(1 / distance**2, found[i]) for distance, i in near]
        total = sum(weight for weight, _ in weights)
        rate = exp(sum(weight * log(each.seconds / each.work) for weight, each in weights) / total)
        return rate * kernel.work


def _logarithms(features: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(log(max(each, 1.0)) for each in features)


@frozen(eq=False)
class Record:
    """A machine as it was profiled with so many ranks at work on it: what `Device` and `Link` are made of; timings."""

    ranks: int
    device: Mapping[str, Any]
    link: Mapping[str, Any]
    timings: Timings

    def as_json(self) -> dict[str, Any]:
        """The object that `read` reads."""
        return {
            "ranks": self.ranks,
            "device": self.device,
            "link": self.link,
            "timings": [
                [each.kernel, each.dtype, [*map(_short, each.features)], _short(each.work), _short(each.seconds)]
                for each in self.timings.all
            ],
        }


def _short(value: float) -> float:
    """A whole number as it is; of others six digits, which is more than is known."""
    return int(value) if value.is_integer() else float(f"{value:.6g}")


# What is measured of a device.
DEVICE = {"name": str, "gpu": bool, "flops": dict, "memory": int} | dict.fromkeys(
    ("bandwidth", "streaming", "launch", "action", "step"), float
)
LINK = dict.fromkeys(("bandwidth", "latency", "post", "collective_bandwidth", "collective_latency"), float)
_MAY_BE_NOTHING = ("launch", "action", "step", "post", "latency", "collective_latency")
# Smaller ones are slips, and would make sums of seconds infinite.
_LEAST, _MOST = 1e-15, 1e30


@cache
def read(text: str) -> tuple[Record, ...]:
    """The records that a text holds, by ascending ranks. ValueError with what is wrong with it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not valid JSON") from None
    records = [_record(each) for each in _checked(found, {"records": list}, "the file")["records"]]
    if not records:
        raise ValueError("it holds no profile")
    return tuple(sorted(records, key=lambda each: each.ranks))


def _record(found: object) -> Record:
    parts = _checked(found, {"ranks": int, "device": dict, "link": dict, "timings": list}, "a record")
    device = _checked(parts["device"], DEVICE, "`device`")
    flops = _checked(device["flops"], dict.fromkeys(("f32", "bf16", "f64"), float), "`flops`")
    if not (device["name"].isprintable() and len(device["name"]) <= NAME_CHARACTERS):
        raise ValueError("`name` is printable, and not long")
    timings = [_timing(each) for each in parts["timings"]]
    return Record(
        parts["ranks"],
        {**device, "flops": flops},
        _checked(parts["link"], LINK, "`link`"),
        Timings(tuple(timings)),
    )


def _timing(found: object) -> Timing:
    match found:
        case [str(kernel), str(dtype), [*features], work, seconds]:
            each = tuple(_number(value, "a feature") for value in features)
            return Timing(kernel, dtype, each, _number(work, "work"), _number(seconds, "seconds"))
    raise ValueError("a timing is [kernel, dtype, [feature, …], work, seconds]")


def recorded(call: Call, ranks: int) -> Record:
    """The record that a call of `profile(…)` names, for so many ranks: that of most ranks that are no more, or else the
    first. Refused: E0413.
    """
    source: Source = call.arguments["path"]
    try:
        records = read(source.text)
        return max((each for each in records if each.ranks <= ranks), key=lambda each: each.ranks, default=records[0])
    except ValueError as error:
        help = "write it with `partita profile -o machine.json`"
        message = f"`{source.name}` is not a profile of a machine: {error}"
        raise refuse("E0413", message, call.span, help=help) from None


def _checked(found: object, wanted: Mapping[str, type], what: str) -> dict[str, Any]:
    if not isinstance(found, dict) or found.keys() != wanted.keys():
        raise ValueError(f"{what} has the keys {', '.join(wanted)}")
    for key, kind in wanted.items():
        if kind in (int, float):
            _number(found[key], f"`{key}`")
        elif not isinstance(found[key], kind):
            raise ValueError(f"`{key}` is no {kind.__name__}")
    return found


def _number(value: object, what: str) -> float:
    """Not so small or large that sums end in nothing or in infinity; what is divided by is above nothing."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MOST:
        raise ValueError(f"{what} must be a non-negative number")
    if value < _LEAST and (value or what.strip("`") not in _MAY_BE_NOTHING):
        raise ValueError(f"{what} must be positive, and at least {_LEAST:g}")
    return float(value)
