"""What is fuzzed: each way into the system, as a function of arbitrary bytes that holds the law.

The law: whatever comes in, nothing but diagnostics comes out, and what is accepted keeps its meaning. An exception of
any other kind, a hang and a lack of memory are found by whoever runs a target: the tests, or `tests.fuzz.driver`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from attrs import frozen

from partita.compiler.schedules.forms import read
from partita.compiler.schedules.forms.text import write
from partita.compiler.schedules.registry import make
from partita.dsl import limits
from partita.dsl.advice.report import Full, Report
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.load import Loaded, load_text
from partita.dsl.syntax import tree
from partita.dsl.syntax.format import format_text
from partita.dsl.syntax.parser import parse_file
from partita.dsl.syntax.reader import decode
from partita.dsl.syntax.source import Source
from partita.runtime.checkpoint.checksummed import _tail, with_checksum
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.manifest import parse
from partita.testing import assert_lawful
from tests.docs.errors import CODES
from tests.fuzz import seeds
from tests.fuzz.seeds import SPECS

BESIDE = str(SPECS / "any.par")  # where a text is said to stand, so that it can import what is there
NAME = "any.par"


@frozen
class Target:
    """A way in: `run` raises nothing while the law holds. `seeds` are inputs to begin from."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    mebibytes: int = 1024  # of address space, the fuzzer's own included


def told(diagnostics: Iterable[Diagnostic]) -> None:
    """Hold diagnostics to their form: a known code, words, and both ways to show them."""
    found = tuple(diagnostics)
    assert found
    assert len(found) <= 1000
    for each in found:
        assert each.code in CODES, each
        assert each.message
        assert each.render()
        json.dumps(each.as_json())


def text_of(data: bytes) -> str | None:
    """The text of a file with these bytes; None where it has none, which must have been told."""
    try:
        return decode(data, NAME).text
    except Refused as refused:
        told(refused.diagnostics)
        return None


# ---------------------------------------------------------------- files


def parser(data: bytes) -> None:
    """Any bytes are a tree, or errors at their places."""
    text = text_of(data)
    if text is not None:
        parsed(text)


def parsed(text: str) -> tree.File | None:
    """The tree of a text; None where it is wrong, which must have been told."""
    report = Report()
    try:
        file = parse_file(Source(NAME, text), report)
    except Full:
        assert report.errors
        file = None
    if report.errors:
        told(report.diagnostics())
        return None
    return file


def checker(data: bytes) -> None:
    """Any text has a meaning, or errors."""
    text = text_of(data)
    if text is not None:
        loaded(load_text(text, NAME, path=BESIDE))


def loaded(found: Loaded) -> None:
    """There is a meaning exactly where there is no error."""
    spec, diagnostics = found
    errors = [each for each in diagnostics if each.severity == "error"]
    assert (spec is None) == bool(errors)
    assert len(errors) <= limits.ERRORS + 1
    if diagnostics:
        told(diagnostics)


def formatter(data: bytes) -> None:
    """What parses has a canonical form, which is its own and means the same; the formatter has no errors of its own."""
    text = text_of(data)
    if text is None:
        return
    before = parsed(text)
    try:
        once = format_text(text, NAME)
    except Refused as refused:
        if before is not None:
            raise
        told(refused.diagnostics)
        return
    assert before is not None
    assert format_text(once, NAME) == once
    assert parsed(once) == before


def overrides(data: bytes) -> None:
    """Each line is an override of a file that is right."""
    text = data.decode("utf-8", "surrogateescape")  # as the command line's arguments are
    loaded(load_text(tiny(), NAME, text.split("\n"), path=BESIDE))


@cache
def tiny() -> str:
    """The file that is overridden."""
    return (SPECS / "tiny.par").read_text()


# ---------------------------------------------------------------- schedules


def schedule(data: bytes) -> None:
    """A text is a schedule that keeps all laws, or is refused."""
    try:
        for suffix in (".csv", ".json"):
            with suppress(Refused):
                read(decode(data, f"any{suffix}"))
        source = decode(data, "any.sched")
        found = read(source)
        size = found.ranks, found.chunks, found.microbatches
        made = [make("from_file", *size, path=source)]
        if "placement" not in source.text and "shared" not in source.text:
            made += [make("from_file", *size, path=source, placement=word) for word in ("loop", "v")]
        for each in made:
            assert read(Source("any.sched", write(each))) == each
        for each in made:
            assert_lawful(each)
        make("from_file", 2, 1, 2, path=source)
    except Refused as refused:
        told(refused.diagnostics)


# ---------------------------------------------------------------- checkpoints


def manifest(data: bytes) -> None:
    """Bytes are a manifest that says again what it says, or Damaged; sealed as anyone can seal them, too."""
    for sealed in (data, data + _tail(data)):
        try:
            found = parse(sealed, "it")
        except Corrupt:
            continue
        except Refused as refused:
            told(refused.diagnostics)
            continue
        assert parse(with_checksum(found.as_json()), "it") == found


def tensors(data: bytes) -> None:
    """Bytes are a file of tensors that can be read whole, or Damaged."""
    from partita.runtime.checkpoint.shards import Entry, check_entries, opened, read_region

    path = _folder() / "rank-0.safetensors"
    path.write_bytes(data)
    try:
        with opened(path) as file:
            for name in sorted(file.keys()):
                part = file.get_slice(name)
                if part.get_dtype() in ("F32", "I64"):
                    read_region(file, name, ())
                    read_region(file, name, tuple(slice(0, size) for size in part.get_shape()))
            check_entries(file, path.name, [Entry("w", "f32", (2, 3)), Entry("b", "i64", (1,))])
    except Corrupt:
        pass


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="partita-fuzz-"))


TARGETS: Mapping[str, Target] = {
    "parser": Target(parser, seeds.par_seeds),
    "checker": Target(checker, seeds.par_seeds),
    "formatter": Target(formatter, seeds.par_seeds),
    "overrides": Target(overrides, seeds.override_seeds),
    "schedule": Target(schedule, seeds.schedule_seeds),
    "manifest": Target(manifest, seeds.manifest_seeds),
    "tensors": Target(tensors, seeds.tensor_seeds, mebibytes=8192),  # torch maps more than it uses
}


def broken(data: bytes) -> None:
    """Breaks the law on purpose, in each of three ways: for tests of those who look for that."""
    if data.startswith(b"exception"):
        raise KeyError("on purpose")
    while data.startswith(b"hang"):
        pass
    if data.startswith(b"memory"):
        bytearray(1 << 40)


# What the driver can run: the targets, and one for the test of the fuzzing itself, which brings its seeds.
RUNNABLE: Mapping[str, Target] = {**TARGETS, "broken": Target(broken, lambda: [])}
