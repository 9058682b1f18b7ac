"""Saving in the background: a rank writes its file while training continues, and rank 0 makes the commit.

Ranks communicate through the directory, which all must see: a rank whose file is written puts a marker next to it,
`rank-3.json`, with its size and hash. Rank 0 waits for the markers of all, writes the manifest from them, and commits.
If a rank cannot write, because the disk is full for example, there is no commit: the space is freed, earlier commits
stay, and training continues.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event, Thread

from attrs import define, evolve, field

from partita.dsl.diagnostic import Refused
from partita.runtime.checkpoint.address_store import CheckpointStore
from partita.runtime.checkpoint.checksummed import MAX_BYTES, checked, with_checksum
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.folders import Folder
from partita.runtime.checkpoint.manifest import DIGEST, File, Manifest, file_name
from partita.runtime.checkpoint.shards import Shard, write_file

POLL_SECONDS = 1.0  # between reports of progress
# How long a file written by another machine may take to become visible here after that machine has reported it.
VISIBLE_SECONDS = 60.0
MAX_MARKER = 1 << 12
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def marker_name(rank: int, suffix: str) -> str:
    """The name of a rank's marker."""
    return f"rank-{rank}{suffix}.json"


@define(eq=False)
class Save:
    """One save of one rank, in a thread of its own from the start. Rank 0's thread also commits.

    First every rank waits in `written`; when all have returned, each calls `conclude`. `error` is why this rank's part
    could not be written. On rank 0, `trouble` is why there is no commit although all parts were written, or what went
    wrong after it, and `full` is whether that was for lack of space.
    """

    store: CheckpointStore
    manifest: Manifest
    rank: int
    shard: Shard
    keep: int
    error: OSError | None = field(default=None, init=False)
    trouble: str | None = field(default=None, init=False)
    full: bool = field(default=False, init=False)
    committed: bool = field(default=False, init=False)
    _blocks: int = field(default=0, init=False)  # written so far
    _handed_over: bool = field(default=False, init=False)  # all of them, to the operating system
    _written: Event = field(factory=Event, init=False)
    _all_written: float | None = field(default=None, init=False)  # since when
    _abandoned: bool = field(default=False, init=False)
    _bug: BaseException | None = field(default=None, init=False)
    _thread: Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        # A daemon: a rank that exits because a peer is gone must not wait for a save that cannot be completed.
        self._thread = Thread(target=self._run, name="partita-checkpoint", daemon=True)
        self._thread.start()

    def written(self, moved: Callable[[], None]) -> OSError | None:
        """Wait until this rank's part is on disk or has failed; `moved` is called as long as it makes progress.

        Once the operating system has all the data, waiting for the disk counts as progress, however long it takes. So
        does waiting for a server, since every call of a client ends.
        """
        before = 0
        while not self._written.wait(POLL_SECONDS):
            if self._blocks > before or self._handed_over or self.store.bounded:
                before = self._blocks
                moved()
        self._raise_bug()
        return self.error

    def abort(self) -> None:
        """Wait for the end of a save that will not be concluded. On rank 0 it becomes a commit if all other ranks have
        written their parts by then; otherwise its files remain until the next run starts.
        """
        self._abandoned = True
        self._thread.join()

    def conclude(self, all_written: bool, moved: Callable[[], None]) -> None:
        """Wait for the end, on rank 0 for the commit, calling `moved` meanwhile. A save not committed is removed."""
        if all_written:
            self._all_written = time.monotonic()
        else:
            self._abandoned = True
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            moved()
        self._raise_bug()
        if self.rank == 0 and not self.committed:
            try:
                self.store.abandon(self.manifest.step)
            except OSError as error:
                self.trouble = f"{self.trouble or 'it was abandoned'}; it could not be removed: {error.strerror}"

    def _raise_bug(self) -> None:
        if self._bug is not None:
            raise self._bug

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._write()
            self._written.set()
            if self.rank == 0 and self.error is None:
                self._commit()
        except BaseException as error:  # raised again in the rank's own thread
            self._bug = error
        finally:
            self._written.set()

    def _write(self) -> None:
        name, suffix = file_name(self.rank, self.store.suffix), self.store.suffix
        try:
            with self.store.save(self.manifest.step) as folder:
                try:
                    file = write_file(name, folder, self._counted())
                    marker = with_checksum({"size": file.size, "sha256": file.sha256})
                    folder.put(marker_name(self.rank, suffix), marker)
                except OSError:
                    with suppress(OSError):
                        folder.remove(name)  # other ranks may need the space
                    raise
        except OSError as error:
            self.error = error

    def _counted(self) -> Iterator[bytes | memoryview]:
        for block in self.shard.blocks():
            yield block
            self._blocks += 1
        self._handed_over = True

    def _commit(self) -> None:
        step, suffix = self.manifest.step, self.store.suffix
        try:
            files = self._files()
            if files is None:
                return
            text = with_checksum(evolve(self.manifest, files=files, suffix=suffix, time=int(time.time())).as_json())
            if len(text) > MAX_BYTES:
                raise Corrupt(f"the manifest has {len(text):,} bytes; at most {MAX_BYTES:,} are read again")
            self.store.commit(step, text, [marker_name(rank, suffix) for rank in range(len(files))])
            self.committed = True
            prune(self.store, self.keep)
        except OSError as error:
            if self.committed:
                self.trouble = f"older ones could not be removed: {error.strerror}"
            else:
                self.trouble, self.full = f"rank 0: {error.strerror}", error.errno in NO_ROOM
        except (Corrupt, Refused) as problem:
            self.trouble = str(problem)

    def _files(self) -> tuple[File, ...] | None:
        """Wait for the markers of all ranks; returns their contents, or None if abandoned. Raises Corrupt."""
        files: list[File] = []
        ranks = self.manifest.mesh.ranks
        with self.store.save(self.manifest.step) as folder:
            while True:
                ended = self._abandoned  # read before the markers, so that none is missed
                while len(files) < ranks and folder.has(name := marker_name(len(files), self.store.suffix)):
                    files.append(_marker(name, folder))
                if len(files) == ranks:
                    return tuple(files)
                if ended:
                    return None
                if self._all_written is not None and time.monotonic() > self._all_written + VISIBLE_SECONDS:
                    raise Corrupt(f"the file of rank {len(files)} is missing: all machines must share the directory")
                time.sleep(self.store.poll_seconds)


def prune(store: CheckpointStore, keep: int) -> None:
    """Remove all but the newest `keep` commits, and damaged ones that would be gone by now if they were intact."""
    steps = store.steps()
    for step in steps[:-keep]:
        store.remove(step)
    if len(steps) >= keep:
        store.remove_damaged(before=steps[-keep])


def _marker(name: str, folder: Folder) -> File:
    try:
        size, sha256 = checked(folder.read(name, MAX_MARKER)).record("size", "sha256")
        return File(size.integer(0, 1 << 62), sha256.text(DIGEST))
    except Corrupt as damage:
        text = str(damage)
        raise Corrupt(text if text.startswith(name) else f"{name}: {text}") from damage
