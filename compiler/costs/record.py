"""Profiles of machines, as `partita profile` writes and `profile("machine.json")` reads: device, link and timings.

JSON: `{"records": [{"ranks": 2, "device": {…}, "link": {…}, "timings": [[kernel, dtype, [feature, …], work, seconds],
…], "collectives": [[kind, bytes, seconds], …]}]}`; keys are the fields of `Record`, `Device` and `Link`, and a timing
has the fields of `Timing` in their order.
Ranks on one machine share its caches, memory and power, so each number of ranks has a record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from math import dist, exp, log
from typing import Any

from attrs import define, field, frozen

from partita.compiler.ops.op import Kernel
from partita.dsl.diagnostic import refuse
from partita.dsl.limits import NAME_CHARACTERS
from partita.dsl.reprs import Shortened
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Source

# The number of nearest timings to interpolate between.
NEAREST = 4


@frozen
class Timing:
    """A measurement: seconds of a kernel with these features, which does `work` (FLOPs or bytes)."""

    kernel: str
    dtype: str
    features: tuple[float, ...]
    work: float
    seconds: float


@define(eq=False, repr=False)
class Timings(Shortened):
    """Timings, interpolated: the time for each unit of work is averaged over the nearest, in the log space of
    features. A kernel that was not measured takes as long as one that is alike or, if nothing but bytes counts, as
    those that move about as many.
    """

    all: tuple[Timing, ...] = ()
    _found: dict[tuple[str, Kernel], float | None] = field(factory=dict, init=False)

    def seconds(self, kernel: Kernel, dtype: str) -> float | None:
        """The time of a kernel; None if no timing has the name, dtype and number of features of it or of one alike."""
        key = dtype, kernel
        if key not in self._found:
            self._found[key] = self._known(kernel, dtype)
        return self._found[key]

    def _known(self, kernel: Kernel, dtype: str) -> float | None:
        one: Kernel | None = kernel
        while one is not None:
            # Another version may have profiled this kernel with other features.
            key = one.name, dtype, len(one.features)
            timings = [each for each in self.all if (each.kernel, each.dtype, len(each.features)) == key]
            if timings:
                return _interpolated(timings, one)
            one = one.alike
        moving = [each for each in self.all if each.dtype == dtype and each.features == (each.work,)]
        return _interpolated(moving, kernel) if moving and kernel.only_moves else None


def _interpolated(timings: Sequence[Timing], kernel: Kernel) -> float:
    place = _logarithms(kernel.features)
    # Of the same features, those with the most similar work are the nearest.
    near = sorted(
        (dist(place, _logarithms(each.features)), abs(log(each.work / max(kernel.work, 1.0))), i)
        for i, each in enumerate(timings)
    )[:NEAREST]
    if near[0][0] < 1e-6:
        same = timings[near[0][-1]]
        return same.seconds * kernel.work / same.work
    weights = [(1 / distance**2, timings[i]) for distance, _, i in near]
    total = sum(weight for weight, _ in weights)
    rate = exp(sum(weight * log(each.seconds / each.work) for weight, each in weights) / total)
    return rate * kernel.work


def _logarithms(features: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(log(max(each, 1.0)) for each in features)


@frozen(eq=False)
class Record:
    """The profile of a machine with `ranks` ranks running on it: arguments of `Device` and `Link`, timings, and for
    collectives among all ranks their kind (a method of `Link`), the bytes that it is given there, and seconds.
    """

    ranks: int
    device: Mapping[str, Any]
    link: Mapping[str, Any]
    timings: Timings
    collectives: tuple[tuple[str, float, float], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The object that `read` parses."""
        return {
            "ranks": self.ranks,
            "device": self.device,
            "link": self.link,
            "timings": [
                [each.kernel, each.dtype, [*map(_short, each.features)], _short(each.work), _short(each.seconds)]
                for each in self.timings.all
            ],
            "collectives": [[kind, *map(_short, figures)] for kind, *figures in self.collectives],
        }


def _short(value: float) -> float:
    """Integers unchanged; others to six digits, which exceeds their accuracy."""
    return int(value) if value.is_integer() else float(f"{value:.6g}")


# The measured fields of a device and a link.
DEVICE = {"name": str, "gpu": bool, "flops": dict, "memory": int, "workspace": int, "cache": int} | dict.fromkeys(
    ("bandwidth", "streaming", "launch", "action", "step"), float
)
LINK = dict.fromkeys(("bandwidth", "latency", "post", "collective_bandwidth", "collective_latency", "beside"), float)
_MAY_BE_NOTHING = ("launch", "action", "step", "post", "latency", "collective_latency", "workspace", "cache")
# Smaller numbers are mistakes, and would make sums of seconds infinite.
_LEAST, _MOST = 1e-15, 1e30


@cache
def read(text: str) -> tuple[Record, ...]:
    """The records in a text, by ascending ranks. Raises ValueError if it is invalid."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not valid JSON") from None
    records = [_record(each) for each in _checked(data, {"records": list}, "the file")["records"]]
    if not records:
        raise ValueError("it holds no profile")
    return tuple(sorted(records, key=lambda each: each.ranks))


def _record(data: object) -> Record:
    lists = {"timings": list, "collectives": list}
    parts = _checked(data, {"ranks": int, "device": dict, "link": dict} | lists, "a record")
    device = _checked(parts["device"], DEVICE, "`device`")
    flops = _checked(device["flops"], dict.fromkeys(("f32", "bf16", "f64"), float), "`flops`")
    if not (device["name"].isprintable() and len(device["name"]) <= NAME_CHARACTERS):
        raise ValueError("`name` is printable, and not long")
    link = _checked(parts["link"], LINK, "`link`")
    if link["beside"] > 1:
        raise ValueError("`beside` must be a share")
    timings = [_timing(each) for each in parts["timings"]]
    return Record(
        parts["ranks"],
        {**device, "flops": flops},
        link,
        Timings(tuple(timings)),
        tuple(map(_collective, parts["collectives"])),
    )


def _timing(data: object) -> Timing:
    match data:
        case [str(kernel), str(dtype), [*features], work, seconds]:
            each = tuple(_number(value, "a feature") for value in features)
            return Timing(kernel, dtype, each, _number(work, "work"), _number(seconds, "seconds"))
    raise ValueError("a timing is [kernel, dtype, [feature, …], work, seconds]")


def _collective(data: object) -> tuple[str, float, float]:
    match data:
        case [str(kind), bytes, seconds]:
            return kind, _number(bytes, "bytes"), _number(seconds, "seconds")
    raise ValueError("a collective is [kind, bytes, seconds]")


def recorded(call: Call, ranks: int) -> Record:
    """The record that a call of `profile(…)` names, for `ranks` ranks: the one with the most ranks up to that number,
    or else the first. Raises Refused (E0413).
    """
    source: Source = call.arguments["path"]
    try:
        records = read(source.text)
        return max((each for each in records if each.ranks <= ranks), key=lambda each: each.ranks, default=records[0])
    except ValueError as error:
        help = "write it with `partita profile -o machine.json`"
        message = f"`{source.name}` is not a profile of a machine: {error}"
        raise refuse("E0413", message, call.span, help=help) from None


def _checked(data: object, schema: Mapping[str, type], what: str) -> dict[str, Any]:
    if not isinstance(data, dict) or data.keys() != schema.keys():
        raise ValueError(f"{what} has the keys {', '.join(schema)}")
    for key, kind in schema.items():
        if kind in (int, float):
            _number(data[key], f"`{key}`")
        elif not isinstance(data[key], kind):
            raise ValueError(f"`{key}` is no {kind.__name__}")
    return data


def _number(value: object, what: str) -> float:
    """A number in a range in which sums neither vanish nor overflow; divisors must be positive."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MOST:
        raise ValueError(f"{what} must be a non-negative number")
    if value < _LEAST and (value or what.strip("`") not in _MAY_BE_NOTHING):
        raise ValueError(f"{what} must be positive, and at least {_LEAST:g}")
    return float(value)
