"""The directory of a run: held by one run at a time, and written without following links.

Nothing in it is touched before its lock is held. Each file a run writes is opened relative to the open directory, is
new, and gets its name by a rename: a link that somebody put there is replaced, never followed. All processes of the run
inherit the lock, so it is held until the last of them exits.

`run.json` records how the run began: its checkpoints' directory, and the texts of its files, which later attempts read.
`fault.json` records why the last one that failed did.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, fields, frozen

from partita.dsl.diagnostic import Diagnostic
from partita.runtime import locks
from partita.runtime.checkpoint.files import Corrupt, create, directory, put, read, write

RECORD = "run.json"
FAULT = "fault.json"
MAX_RECORD = 1 << 26


@frozen
class Origin:
    """The command of a run: its file and the directory that imports may not leave (by real path), overrides, whether it
    runs on GPUs, the directory of its trace, and how many cores its ranks share, if they are all on one machine.
    """

    file: str
    overrides: tuple[str, ...] = ()
    root: str | None = None
    gpu: bool = False
    trace: str | None = None
    cores: int | None = None


@frozen
class Record:
    """How a run began: the texts of its files by path, and where its checkpoints go, if anywhere: a path is relative to
    the run's directory if it is in it, so that this may be copied and moved.

    `run` identifies the run; all its attempts share it. `origin` is its command, None if Python started it.
    """

    run: str
    files: Mapping[str, str] = field(repr=False)
    checkpoints: str | None
    origin: Origin | None = None


@define(eq=False)
class RunDirectory:
    """The open directory of a run. Methods raise OSError where the system does."""

    path: Path
    handle: int
    _lock: int | None = field(default=None, init=False)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the directory, and create it if missing. Nothing in it is touched."""
        path.mkdir(parents=True, exist_ok=True)
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    @classmethod
    def inherited(cls, path: Path, text: str) -> RunDirectory:
        """The directory that the parent process holds open: `text` is its `text`."""
        handle, *others = map(int, text.split(","))
        for each in (handle, *others):
            os.set_inheritable(each, False)
        return cls(path, handle)

    @property
    def text(self) -> str:
        """The descriptors as text, for a child process that inherits them."""
        return ",".join(map(str, self.descriptors))

    def lock(self) -> Diagnostic | None:
        """Hold the directory until `close`. Returns a warning (W0806) if its file system has no locks.

        Raises Refused (E0803) if another run holds it.
        """
        self._lock, warning = locks.hold(self.handle, self.path)
        return warning

    @property
    def held(self) -> bool | None:
        """Whether a run holds the directory; None if its file system has no locks."""
        return locks.held(self.handle)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that the run's other processes inherit: the directory, and its lock."""
        return (self.handle,) if self._lock is None else (self.handle, self._lock)

    def close(self) -> None:
        """Release the directory."""
        os.close(self.handle)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ files

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically."""
        put(name, self.handle, data)

    def begin(self, name: str, data: bytes) -> int:
        """Create a file with this content, to be appended to; returns its descriptor."""
        aside = f"{name}.new"
        handle = create(aside, self.handle, os.O_APPEND)
        try:
            write(handle, data)
            os.rename(aside, name, src_dir_fd=self.handle, dst_dir_fd=self.handle)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def read(self, name: str, limit: int) -> bytes | None:
        """The content of a regular file of at most `limit` bytes; None if there is no such file."""
        try:
            return read(name, self.handle, limit)
        except Corrupt:
            return None

    @contextmanager
    def folder(self, name: str) -> Iterator[int]:
        """Open a directory in this one, created if missing. Raises OSError if it is a link."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.handle)
        with directory(name, self.handle) as handle:
            yield handle

    # ------------------------------------------------------------ the record

    def keep(self, record: Record) -> None:
        """Write the record of how the run begins."""
        content: dict[str, Any] = {"run": record.run, "checkpoints": record.checkpoints}
        if record.origin is not None:
            content["command"] = asdict(record.origin)
        content["files"] = dict(record.files)
        self.put(RECORD, json.dumps(content, indent=2).encode("utf-8", "surrogatepass") + b"\n")

    def fail(self, cause: str, ranks: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Write why the run fails and, if known, what each rank was doing; returns whether that was possible."""
        content = {"cause": cause, "unix_time": time.time(), "ranks": list(ranks)}
        try:
            self.put(FAULT, (json.dumps(content, indent=2) + "\n").encode())
        except OSError:
            return False  # best effort: what is said of the failure matters more
        return True

    def record(self) -> Record | None:
        """The record of the last run here; None if missing or not valid."""
        data = self.read(RECORD, MAX_RECORD)
        try:
            content: Any = json.loads(data) if data is not None else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(content, dict):
            return None
        run, files, checkpoints = (content.get(name) for name in ("run", "files", "checkpoints"))
        if not isinstance(run, str) or not isinstance(files, dict) or not isinstance(checkpoints, str | None):
            return None
        if not all(isinstance(text, str) for text in files.values()):
            return None
        return Record(run, files, checkpoints, _origin(content.get("command")))


def _origin(command: Any) -> Origin | None:
    """The command of a record; None if it has none, or no valid one."""
    if not isinstance(command, dict):
        return None
    file, overrides, root, gpu, trace, cores = (command.get(each.name) for each in fields(Origin))
    if not isinstance(file, str) or not isinstance(overrides, list) or not isinstance(gpu, bool):
        return None
    if not all(isinstance(each, str) for each in overrides):
        return None
    if not isinstance(root, str | None) or not isinstance(trace, str | None) or not isinstance(cores, int | None):
        return None
    return Origin(file, tuple(overrides), root, gpu, trace, cores)
