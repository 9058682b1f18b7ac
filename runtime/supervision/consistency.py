"""Checks that all ranks run the same program: they compare hashes of file and program before sending anything else.

Every rank reads and compiles the file itself. If one has a different file (an old copy on another machine), other
overrides or another version of Partita, ranks would wait for each other forever, or train something nobody wrote. So
the first thing that ranks exchange are hashes, as text, through the store of the rendezvous. With them goes whether a
rank has kernels in C++: without them it computes the same up to rounding only.

A hash covers meaning, not spelling: source locations, comments and the order of keys do not count. The file's hash
covers what the file and the command line say together; the program's covers all that ranks execute: emitted functions,
instructions, tensors and channels. A third hash covers the data files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from fractions import Fraction
from functools import cache
from typing import Any, cast

import attrs
from attrs import evolve, frozen

from partita.compiler.program import Program, RankProgram
from partita.compiler.schedules.schedule import Schedule
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.grouping import grouped
from partita.dsl.spec import Model, Spec
from partita.dsl.syntax.source import Source
from partita.runtime.data_files import DataFile, unlike
from partita.runtime.naming import ranks_text
from partita.runtime.supervision.identity import Identity
from partita.runtime.supervision.store import Store
from partita.runtime.transports.failures import post

KEY = "partita/agreement"
MAX_SHOWN = 8  # lines
DIGITS = 12  # digits of a hash in messages
LEAVE_SECONDS = 10.0  # for the others to read rank 0's result: rank 0 may host the store


def agree(
    store: Store,
    rank: int,
    ranks: int,
    spec: Spec,
    programs: Sequence[Program | None],
    data: Sequence[DataFile] = (),
    no_kernels: str = "",
) -> None:
    """Compare what all ranks are about to run: the file, the programs that are compiled already, and data files; and
    whether all have kernels in C++, or `no_kernels` says, in a line, why this one has none.

    Raises Refused on all ranks if programs (E0612), kernels (E0625) or data (E0615) differ, and ConnectionLost.
    """
    files = [[each.name, each.size, each.sha256] for each in data]
    own = Statement(digest(spec), digest(programs), digest(files) if files else "", no_kernels)
    statements = post("comparing what the ranks run", _said, store, rank, ranks, own)
    difference = compared(statements) or compared_kernels(statements)
    difference = difference or post("comparing the data", _compared_data, store, rank, statements, data)
    if difference is None:
        return
    with suppress(RuntimeError):  # a rank that no longer comes has ended
        store.set(f"{KEY}/{rank}/read", "yes")
        if rank == 0:
            store.wait([f"{KEY}/{each}/read" for each in range(ranks)], timedelta(seconds=LEAVE_SECONDS))
    raise difference


def run_on_rank0(store: Store, identity: Identity, what: str, act: Callable[[], str | None]) -> str:
    """Run `act` on rank 0 while all others wait for it; all return its text. Raises Refused on all ranks if rank 0's
    `act` does, with the diagnostics on rank 0 only, and ConnectionLost.
    """
    key = f"{KEY}/{what}"
    if identity.rank > 0:
        answer: str = post(f"waiting for rank 0 ({what})", store.get, key).decode()
        if answer == "refused":
            store.set(f"{key}/{identity.rank}", "read")
            raise Refused(())
        return answer.removeprefix("done ")
    try:
        text = act() or ""
    except Refused:
        store.set(key, "refused")
        with suppress(RuntimeError):  # rank 0 may host the store; a rank that no longer comes has ended
            store.wait([f"{key}/{each}" for each in range(1, identity.ranks)], timedelta(seconds=LEAVE_SECONDS))
        raise
    store.set(key, f"done {text}")
    return text


def _said(store: Store, rank: int, ranks: int, own: Statement) -> list[Statement]:
    """The statements of all ranks. Rank 0 collects them, so that each rank makes one request."""
    store.set(f"{KEY}/{rank}", f"{own.file} {own.program} {own.data} {own.no_kernels}".rstrip())
    if rank == 0:
        store.set(KEY, "\n".join(store.get(f"{KEY}/{each}").decode() for each in range(ranks)))
    return [Statement(*line.split(" ", 3)) for line in store.get(KEY).decode().split("\n")]


@frozen
class Statement:
    """The hashes of a rank's file, its program and, if it has data files, its data; and why it has no kernels in C++,
    if so.
    """

    file: str
    program: str
    data: str = ""
    no_kernels: str = ""


def compared(statements: Sequence[Statement]) -> Refused | None:
    """The error if ranks' statements, in rank order, differ: which ranks differ from the majority."""
    groups = grouped(range(len(statements)), lambda rank: evolve(statements[rank], data="", no_kernels=""))
    if len(groups) == 1:
        return None
    common, *others = sorted(groups, key=lambda each: -len(groups[each]))
    differing = sorted(rank for each in others for rank in groups[each])
    verb = "has" if len(differing) == 1 else "have"
    what, help = "a different file", "copy the same file to all machines, and start all ranks with the same overrides"
    if all(each.file == common.file for each in others):
        what, help = (
            "compiled a different program from the same file",
            "use the same version of Partita on all machines",
        )
    notes = [
        f"{ranks_text(groups[each])}: file {each.file[:DIGITS]}, program {each.program[:DIGITS]}"
        for each in (common, *others[: MAX_SHOWN - 1])
    ]
    message = f"{ranks_text(differing)} {verb} {what} than {ranks_text(groups[common])}"
    return refuse("E0612", message, notes=notes, help=help)


def compared_kernels(statements: Sequence[Statement]) -> Refused | None:
    """The error if some ranks, in rank order, have kernels in C++ and others have none: who, and why."""
    having = [rank for rank, each in enumerate(statements) if not each.no_kernels]
    without = [rank for rank, each in enumerate(statements) if each.no_kernels]
    if not having or not without:
        return None
    by_reason = grouped(without, lambda rank: statements[rank].no_kernels)
    has, have = ("has" if len(each) == 1 else "have" for each in (without, having))
    return refuse(
        "E0625",
        f"{ranks_text(without)} {has} no kernels in C++, and {ranks_text(having)} {have}",
        notes=[f"{ranks_text(ranks)}: {why}" for why, ranks in list(by_reason.items())[:MAX_SHOWN]],
        help="install a C++ compiler on all machines, or set PARTITA_NATIVE=0 on all",
    )


def _compared_data(
    store: Store, rank: int, statements: Sequence[Statement], data: Sequence[DataFile]
) -> Refused | None:
    """The error if ranks have different data files: which ranks differ from the majority, and how the first does."""
    groups = grouped(range(len(statements)), lambda number: statements[number].data)
    if len(groups) == 1:
        return None
    common, other, *_ = sorted(groups.values(), key=lambda each: -len(each))
    differing = sorted(number for each in groups.values() if each is not common for number in each)
    first = other[0]
    # Only now the files are listed, by one rank of each group.
    if rank in (common[0], first):
        store.set(
            f"{KEY}/{rank}/data", json.dumps([[each.name, each.size, each.sha256, each.modified] for each in data])
        )
    files, others = (
        [DataFile(*entry) for entry in json.loads(store.get(f"{KEY}/{number}/data"))] for number in (common[0], first)
    )
    verb = "has" if len(differing) == 1 else "have"
    return refuse(
        "E0615",
        f"{ranks_text(differing)} {verb} different data than {ranks_text(common)}",
        notes=unlike(files, common[0], others, first),
        help="copy the same files to all machines",
    )


# ---------------------------------------------------------------- hashes


def digest(value: object) -> str:
    """The SHA-256 of plain values and records of them, independent of the order of keys and sets."""
    return _digest(value, {}).hex()


def _digest(value: object, known: dict[int, bytes]) -> bytes:
    """`known` caches the digests of records, many of which are shared, such as the bodies of blocks."""
    if isinstance(value, (tuple, list)):
        return _hash("list", *(_digest(each, known) for each in value))
    if isinstance(value, Mapping):
        return _hash("table", *sorted(_digest(key, known) + _digest(each, known) for key, each in value.items()))
    if isinstance(value, (set, frozenset)):
        return _hash("set", *sorted(_digest(each, known) for each in value))
    if isinstance(value, Source):
        return _hash("text", value.text.encode("utf-8", "surrogatepass"))
    if not attrs.has(type(value)):
        assert value is None or isinstance(value, (bool, int, float, Fraction, str, Enum)), value
        return _hash(type(value).__name__, repr(value).encode())
    result = known.get(id(value))
    if result is None:
        parts = (_digest(each, known) for each in _meant(value))
        result = known[id(value)] = _hash(type(value).__name__, *parts)
    return result


def _hash(kind: str, *parts: bytes) -> bytes:
    hasher = hashlib.sha256(kind.encode())
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


# Fields that do not change the meaning, although they take part in comparisons: the text of a whole, names. Those that
# take no part, such as locations, do not either.
_ASIDE: Mapping[type, frozenset[str]] = {
    Program: frozenset(("source",)),
    RankProgram: frozenset(("instructions",)),
    Schedule: frozenset(("actions", "name")),
    Spec: frozenset(("source", "weights")),
    Model: frozenset(("formulas",)),  # how sizes are written; what they come to is in the types
}
# Long records, whose text has their full meaning.
_TEXTS: Mapping[type, Callable[[Any], str]] = {
    Program: lambda program: re.sub(r"  # .*", "", program.source),  # without the locations at the ends of its lines
    RankProgram: lambda rank: "\n".join(map(str, rank.instructions)),
    Schedule: str,
}


def _meant(record: Any) -> list[object]:
    """The parts of a record that count: the values of its fields, and its text."""
    kind = type(record)
    values = [getattr(record, name) for name in _fields(cast(Hashable, kind))]
    return [*values, _TEXTS[kind](record)] if kind in _TEXTS else values


@cache
def _fields(kind: Hashable) -> tuple[str, ...]:
    aside = _ASIDE.get(cast(type, kind), frozenset())
    return tuple(each.name for each in attrs.fields(cast(type, kind)) if each.eq and each.name not in aside)
