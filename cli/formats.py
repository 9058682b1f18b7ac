"""Diagnostics in the formats of other programs, by `--format`: SARIF 2.1.0 (OASIS), JUnit's XML, and GitHub's commands.

What a command would print is left out; its status stays.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from functools import wraps
from pathlib import PurePath
from time import perf_counter
from typing import Any

from attrs import frozen

from partita.cli.command import UsageError
from partita.cli.output import deliver
from partita.cli.source import files_and_overrides, gathered, printable
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.version import __version__

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ESCAPED = {"%": "%25", "\r": "%0D", "\n": "%0A"}


@frozen
class Examined:
    """What a command has found in some files: its exit status, and how long it took, in seconds."""

    command: str
    files: Sequence[str]
    diagnostics: Sequence[Diagnostic]
    status: int
    seconds: float


def add_format(parser: argparse.ArgumentParser) -> None:
    """Adds `--format`."""
    parser.add_argument("--format", choices=FORMATS, help="the diagnostics alone, for other programs")


def formatted(run: Callable[[argparse.Namespace], int | None]) -> Callable[[argparse.Namespace], int | None]:
    """A command that has `--format`, too. Of several files each is in the diagnostics by its name."""

    @wraps(run)
    def either(arguments: argparse.Namespace) -> int | None:
        if arguments.format is None:
            return run(arguments)
        if arguments.json:
            raise UsageError("--json and --format are two formats: choose one")
        output, arguments.output = arguments.output, None
        start = perf_counter()
        with gathered() as found, redirect_stdout(io.StringIO()):
            try:
                status = run(arguments) or 0
            except Refused as refused:
                found.extend(refused.diagnostics)
                status = 1
        files, _ = files_and_overrides(arguments)
        examined = Examined(arguments.command, files, found, status, perf_counter() - start)
        deliver(FORMATS[arguments.format](examined), output)
        return status

    return either


def _text(diagnostic: Diagnostic) -> str:
    """The message, with notes and the fix on lines of their own."""
    advice = diagnostic.advice
    help = () if advice is None else (f"help: {advice}",)
    return printable("\n".join((diagnostic.message, *diagnostic.notes, *help)))


def _file(diagnostic: Diagnostic, examined: Examined) -> str:
    """The file that a diagnostic is about: the first, if it is about none."""
    return PurePath(examined.files[0] if diagnostic.span is None else diagnostic.span.source.name).as_posix()


# ---------------------------------------------------------------- SARIF


def sarif(examined: Examined) -> str:
    """One run, with a rule for each code that occurs."""
    codes = list(dict.fromkeys(each.code for each in examined.diagnostics))
    driver = {"name": "partita", "version": __version__, "rules": [{"id": code} for code in codes]}
    results = [
        {
            "ruleId": each.code,
            "ruleIndex": codes.index(each.code),
            "level": each.severity,
            "message": {"text": _text(each)},
            "locations": [{"physicalLocation": _location(each, examined)}],
        }
        for each in examined.diagnostics
    ]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _location(diagnostic: Diagnostic, examined: Examined) -> dict[str, Any]:
    from urllib.parse import quote  # which `check` need not load

    place: dict[str, Any] = {"artifactLocation": {"uri": quote(_file(diagnostic, examined))}}
    span = diagnostic.span
    if span is not None:
        end = min(span.end, span.start + len(span.source.line(span.line)) - span.column + 1)
        columns = {"startColumn": span.column, "endColumn": span.column + max(1, end - span.start)}
        place["region"] = {"startLine": span.line, **columns}
    return place


# ---------------------------------------------------------------- JUnit


def junit(examined: Examined) -> str:
    """A case for each file: it fails with its errors, or is skipped where nothing could be decided."""
    from xml.etree import ElementTree  # which `check` need not load

    name, seconds = f"partita {examined.command}", f"{examined.seconds:.3f}"
    whole = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(whole, "testsuite", name=name, time=seconds)
    counts = dict.fromkeys(("failures", "skipped"), 0)
    for file in examined.files:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=printable(file), time=seconds)
        own = [each for each in examined.diagnostics if _file(each, examined) == PurePath(file).as_posix()]
        if len(examined.files) == 1:
            own = list(examined.diagnostics)  # those in what it imports
        errors = [each for each in own if each.severity == "error"]
        what = {"failures": "failure", "skipped": "skipped"}
        kind = "failures" if errors else "skipped" if examined.status == 4 else None
        if kind is not None:
            said = errors or own
            counts[kind] += 1
            attributes = {"message": printable(said[0].message) if said else "not decided"}
            attributes |= {"type": errors[0].code} if errors else {}
            ElementTree.SubElement(case, what[kind], attributes).text = _rendered(said)
        elif own:
            ElementTree.SubElement(case, "system-out").text = _rendered(own)
    for kind, count in {"tests": len(examined.files), "errors": 0, **counts}.items():
        suite.set(kind, str(count))
    ElementTree.indent(whole)
    return ElementTree.tostring(whole, encoding="unicode", xml_declaration=True) + "\n"


def _rendered(diagnostics: Iterable[Diagnostic]) -> str:
    return printable("\n\n".join(each.render() for each in diagnostics))


# ---------------------------------------------------------------- GitHub


def github(examined: Examined) -> str:
    """Commands of a workflow, which show each diagnostic at its line of a change."""
    return "".join(f"{_command(each, examined)}\n" for each in examined.diagnostics)


def _command(diagnostic: Diagnostic, examined: Examined) -> str:
    properties: dict[str, object] = {"file": _file(diagnostic, examined)}
    if diagnostic.span is not None:
        properties |= {"line": diagnostic.span.line, "col": diagnostic.span.column}
    properties["title"] = diagnostic.code
    given = ",".join(f"{name}={_escaped(str(each), (':', ','))}" for name, each in properties.items())
    return f"::{diagnostic.severity} {given}::{_escaped(_text(diagnostic))}"


def _escaped(text: str, more: Sequence[str] = ()) -> str:
    for character, code in ESCAPED.items():
        text = text.replace(character, code)
    for character in more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


FORMATS: dict[str, Callable[[Examined], str]] = {"sarif": sarif, "junit": junit, "github": github}
