"""A run's checkpoints at an address: a commit is there when its manifest is, which is written last.

Object stores neither rename nor lock. So the files of a save stand where those of the commit will, with the attempt in
their names, and what has no manifest is not a commit: a run that dies at any moment leaves the earlier commits intact,
and files that nobody reads. Instead of a lock there is an object that names the run that began last: a run that no
longer finds itself in it commits nothing more.

    DIR/lock                                        which run writes here
    DIR/step-00000010/rank-0-81f3….safetensors …    the parts that each rank saved
    DIR/step-00000010/rank-0-81f3….json …           markers: this rank's file is complete
    DIR/step-00000010/manifest.json                 the commit
    DIR/step-00000008/manifest.json.damaged         instead of it: a commit that could not be read and was skipped
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar, TypeAlias

from attrs import define, field

from partita.dsl.diagnostic import Diagnostic
from partita.runtime import addresses
from partita.runtime.addresses import Address, PathOrUrl, check_writable, names_in
from partita.runtime.checkpoint.folders import Folder, RemoteFolder, unreadable, unwritable
from partita.runtime.checkpoint.manifest import NAME
from partita.runtime.checkpoint.store import Store, commit_name, steps_of
from partita.runtime.locks import LOCK

DAMAGED = f"{NAME}.damaged"


@define(eq=False)
class AddressStore:
    """A directory of checkpoints at an address, with the methods of `Store`."""

    poll_seconds: ClassVar[float] = 0.5
    bounded: ClassVar[bool] = True
    place: Address
    attempt: int = 0
    _tried: int | None = field(default=None, init=False)  # a step whose manifest may have been written
    _token: bytes = field(factory=lambda: secrets.token_hex(16).encode(), init=False)

    def lock(self) -> Diagnostic | None:
        """Take the address over from whichever run wrote there before. Raises Refused (E0602, E0802, E0617)."""
        check_writable(self.place)
        try:
            addresses.put(self.place / LOCK, self._token)
        except OSError as error:
            raise unwritable(self.place, error) from error
        return None

    def hold(self) -> None:
        """Check that no other run has begun since. Raises OSError."""
        try:
            token = addresses.read_range(self.place / LOCK, 0, len(self._token))
        except FileNotFoundError:  # everything was removed
            addresses.put(self.place / LOCK, self._token)
            return
        if token != self._token:
            raise OSError(errno.EBUSY, f"another run now writes to {self.place}")

    def close(self) -> None:
        """Nothing is held."""

    def clean(self) -> None:
        """Remove the files of saves that never became commits."""
        for step in steps_of(names_in(self.place)):
            if not {NAME, DAMAGED} & {*names_in(self._at(step))}:
                self._empty(step)

    # ------------------------------------------------------------ a save

    @property
    def suffix(self) -> str:
        """The attempt: a surviving rank of an earlier run writes files that no manifest of this one names."""
        return f"-{self.attempt:x}"

    @contextmanager
    def save(self, step: int) -> Iterator[Folder]:
        """The folder of the commit that is to be."""
        yield RemoteFolder(self._at(step))

    def commit(self, step: int, manifest: bytes, markers: Sequence[str]) -> None:
        """Turn a save into a commit: by its manifest."""
        self.hold()
        self._tried = step
        addresses.put(self._at(step) / NAME, manifest)
        self._tried = None
        with suppress(OSError):  # they are in nobody's way
            for name in markers:
                addresses.remove(self._at(step) / name)

    def abandon(self, step: int) -> None:
        """Remove the files of this attempt, after the manifest, should the server have it without having said so."""
        if self._tried == step:
            addresses.remove(self._at(step) / NAME)
        for name in names_in(self._at(step)):
            if f"{self.suffix}." in name:
                addresses.remove(self._at(step) / name)

    # ------------------------------------------------------------ commits

    def steps(self) -> list[int]:
        """The steps of the commits; none if nothing is at the address."""
        return [step for step in steps_of(names_in(self.place)) if addresses.exists(self._at(step) / NAME)]

    def remove(self, step: int) -> None:
        """Remove a commit, its manifest first: what is half removed must not look like a commit."""
        addresses.remove(self._at(step) / NAME)
        self._empty(step)

    def quarantine(self, step: int) -> None:
        """Give the manifest another name."""
        folder = RemoteFolder(self._at(step))
        size = folder.size(NAME)
        addresses.put(folder.address / DAMAGED, addresses.read_range(folder.address / NAME, 0, size))
        folder.remove(NAME)

    def remove_damaged(self, before: int | None = None) -> list[str]:
        """Remove commits that were set aside, unless their step has been saved again: all, or those before `before`."""
        removed = []
        for step in steps_of(names_in(self.place)):
            if (before is None or step < before) and addresses.exists(self._at(step) / DAMAGED):
                addresses.remove(self._at(step) / DAMAGED)
                if not addresses.exists(self._at(step) / NAME):
                    self._empty(step)
                removed.append(f"{commit_name(step)}/{DAMAGED}")
        return removed

    def _at(self, step: int) -> Address:
        return self.place / commit_name(step)

    def _empty(self, step: int) -> None:
        for name in names_in(self._at(step)):
            addresses.remove(self._at(step) / name)


CheckpointStore: TypeAlias = Store | AddressStore


def store_at(place: PathOrUrl, attempt: int = 0) -> CheckpointStore:
    """A directory of checkpoints, for writing."""
    return AddressStore(place, attempt) if isinstance(place, Address) else Store(place, attempt)


def steps_in(place: PathOrUrl) -> list[int]:
    """The steps of the commits in a directory, ascending; none if there is no directory.

    Raises Refused (E0602, E0617, E0819) if it is at an address that cannot be read.
    """
    if not isinstance(place, Address):
        return Store(place).steps()
    try:
        return AddressStore(place).steps()
    except OSError as error:
        raise unreadable(place, error) from error
