"""Reads a run's `metrics.jsonl` while it is being written (`partita.runtime.telemetry`)."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any, TypeAlias

from attrs import define, field

from partita.runtime.telemetry import FILE_NAME

MAX_STEPS = 1 << 62
NOT_NUMBERS = ("step", "unix_time")
LONGEST_READ = 1 << 24  # bytes of one look; the rest is read by the next

# A line's values by name.
MetricsRecord: TypeAlias = Mapping[str, Any]
# What tells one file from another that takes its place: device and inode.
File: TypeAlias = tuple[int, int]


@define(eq=False)
class MetricsReader:
    """Follows the `metrics.jsonl` of a directory: `read` returns its new records, in order, each once.

    A run that begins or resumes puts a new file in the place of the old one: `file` says which one is read, and the new
    one's records come from its first line on. Lines that are not objects with a step are skipped, as is a half line
    until it is whole.
    """

    directory: Path
    file: File | None = field(default=None, init=False)
    first: str = field(default="", init=False)  # the file's first line
    _offset: int = field(default=0, init=False)

    def read(self) -> list[MetricsRecord]:
        """The records since the last call; none if there is no file. Raises OSError if it cannot be read."""
        try:
            handle = os.open(self.directory / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:
            return []
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if (status.st_dev, status.st_ino) != self.file or status.st_size < self._offset:
                self.file, self.first, self._offset = (status.st_dev, status.st_ino), "", 0
            file.seek(self._offset)
            data = file.read(LONGEST_READ)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.split(b"\n")[:-1]
        if lines and not self.first:
            self.first = lines[0].decode("utf-8", "replace")
        return [record for record in map(_record, lines) if record is not None]


def file_of(directory: Path) -> File | None:
    """Which `metrics.jsonl` is in a directory; None if there is none."""
    try:
        status = os.stat(directory / FILE_NAME)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def numbers(record: MetricsRecord) -> dict[str, float]:
    """The numbers of a record by name, those of a list as `NAME.0`, and NaN for what was not finite; without its step
    and time.
    """
    values: dict[str, float] = {}
    for name, value in record.items():
        if name not in NOT_NUMBERS:
            parts = {f"{name}.{i}": each for i, each in enumerate(value)} if isinstance(value, list) else {name: value}
            values |= {part: number for part, each in parts.items() if (number := number_of(each)) is not None}
    return values


def number_of(value: Any) -> float | None:
    """A number of a record: NaN for null, which stands for what was not finite; None for anything else."""
    if value is None:
        return nan
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:  # no number of ours
        return nan


def _record(line: bytes) -> MetricsRecord | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and 0 <= step < MAX_STEPS else None
