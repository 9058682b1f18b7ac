"""Times of actions on the command line: `F=1,B=1,W=1,comm=0`, or a JSON file that may have them by stage."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from attrs import fields, frozen

from partita.cli.argument_types import known, number, numbers
from partita.compiler.instructions import Message
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, FULL_BACKWARD, WEIGHT, SharedVocabulary
from partita.compiler.schedules.simulator import Costs

Amount = float | tuple[float, ...]
# What a file must say: with times of its own, no default is right.
NEEDED = ("F", "B", "W")
PASSES = ("S", "T")


@frozen
class StageTimes:
    """Times of one microbatch: of F, B and W on a rank, over all its chunks, or of each stage; `comm` of a transfer, or
    of each pair of adjacent stages; `FB` of an overlapped forward and full backward; `copy` of a copy of what a rank
    keeps of the microbatch to the host's memory, or back, if it is copied there. Any unit.
    """

    F: Amount = 1.0
    B: Amount = 1.0
    W: Amount = 1.0
    comm: Amount = 0.0
    FB: float | None = None
    S: Amount | None = None
    T: Amount | None = None
    copy: Amount | None = None

    def copies(self, ranks: int, chunks: int) -> dict[int, float]:
        """The time of each stage's copy; empty if none is copied."""
        return {} if self.copy is None else dict(enumerate(self._each("copy", ranks * chunks, chunks)))

    def spread(self, ranks: int, chunks: int) -> SharedVocabulary | None:
        """The stages of such a pipeline and of the ranks' parts of the vocabulary, if they share it."""
        return None if self.S is None else SharedVocabulary(ranks, ranks * chunks, outputs=True)

    def problem(self, ranks: int, chunks: int) -> str | None:
        """Why these are not the times of so many stages; None if they are."""
        stages = ranks * chunks
        counts = [
            *((key, stages, "stages") for key in NEEDED),
            ("comm", stages - 1, "pairs of stages"),
            *((key, ranks, "ranks") for key in PASSES),
            ("copy", stages, "stages"),
        ]
        if (self.S is None) != (self.T is None):
            return "S and T are those of one vocabulary: give both"
        for key, count, what in counts:
            times = getattr(self, key)
            if isinstance(times, tuple) and len(times) != count:
                return f"`{key}` has {len(times)} times, but there are {count} {what}"
        if self.FB is None:
            return None
        forward, backward, weight = (self._each(key, stages, chunks) for key in NEEDED)
        whole = map(sum, zip(backward, weight, strict=True))
        if self.FB / chunks < max(*forward, *whole):
            return f"FB={self.FB:g} is less than a forward or a full backward alone"
        return None

    def costs(self, ranks: int, chunks: int) -> Costs:
        """The costs of a schedule of so many stages."""
        stages = ranks * chunks
        forward, backward, weight = (self._each(key, stages, chunks) for key in NEEDED)
        whole = tuple(map(sum, zip(backward, weight, strict=True)))
        if self.S is not None:
            # The parts of all ranks, and the loss, whose time is among theirs. T is not divided into B and W.
            forward = (*forward, *self._each("S", ranks), 0.0)
            whole = (*whole, *self._each("T", ranks), 0.0)
            backward = (*backward, *self._each("T", ranks), 0.0)
            weight = (*weight, *(0.0,) * (ranks + 1))
        seconds = {FORWARD: forward, BACKWARD: backward, WEIGHT: weight, FULL_BACKWARD: whole}
        pair = None if self.FB is None else self.FB / chunks
        copies = self.copies(ranks, chunks)
        return Costs(
            lambda stage, kind: seconds[kind][stage],
            self._transfer,
            None if pair is None else lambda first, second: pair,
            copy=lambda stage: copies.get(stage, 0.0),
        )

    def _each(self, key: str, count: int, chunks: int = 1) -> tuple[float, ...]:
        """The time of each stage or rank; one that is given for a rank is shared by its chunks."""
        times = getattr(self, key)
        return times if isinstance(times, tuple) else (times / chunks,) * count

    def _transfer(self, message: Message) -> float:
        """The times of transfers are by the lower stage; what the parts of a vocabulary exchange takes the longest."""
        if isinstance(self.comm, tuple):
            lower = min(message.source, message.destination)
            return self.comm[lower] if lower < len(self.comm) else max(self.comm, default=0.0)
        return self.comm


NAMES = [each.name for each in fields(StageTimes)]


def stage_times(text: str) -> StageTimes:
    """Times as `F=18.5,B=18.1`, where others keep their defaults, or the name of a JSON file.

    Raises argparse.ArgumentTypeError.
    """
    if text.endswith(".json"):
        return _read(Path(text))
    return StageTimes(**numbers(text, NAMES))


def _read(path: Path) -> StageTimes:
    try:
        times = json.loads(path.read_bytes())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{path} is not JSON: {error}") from error
    if not isinstance(times, dict):
        raise argparse.ArgumentTypeError(f'{path} is not an object such as {{"F": [18.5, 20.1], "B": 18, "W": 9}}')
    for key in times:
        known(key, NAMES)
    missing = [key for key in NEEDED if key not in times]
    if missing:
        raise argparse.ArgumentTypeError(f"{path} has no times of {' and '.join(missing)}")
    return StageTimes(**{key: _amount(value, key, path) for key, value in times.items()})


def _amount(value: Any, key: str, path: Path) -> Any:
    """A time, or a time for each stage."""
    if isinstance(value, list) and value and key != "FB":
        return tuple(_time(each, key, path) for each in value)
    return _time(value, key, path)


def _time(value: Any, key: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise argparse.ArgumentTypeError(f"{path}: `{key}` is {json.dumps(value)[:40]}, not a time")
    return number(str(value))
