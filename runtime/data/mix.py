"""`mix([source -> share, …])`: rows of several sources, each in its own order."""

from __future__ import annotations

from pathlib import Path

from partita.dsl.config.builtins import DATA, Setting, SharesOf
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Call
from partita.runtime.data.registry import SOURCES, Source, opened_by, register


def mixed_files(call: Call, root: Path) -> list[tuple[str, Path]]:
    """The files of all sources, each once."""
    return list(dict.fromkeys(file for each in _calls(call) for file in SOURCES[each.name].files(each, root)))


def mixed_warnings(call: Call, root: Path) -> list[Diagnostic]:
    """Warnings about the data of all sources."""
    return [doubt for each in _calls(call) for doubt in SOURCES[each.name].warnings(each, root)]


def _calls(call: Call) -> list[Call]:
    return [each.call for each in call.arguments["sources"]]


register(
    Source(
        "mix",
        (Setting("sources", SharesOf(DATA)),),
        example='mix([text("a.txt") -> 70%, text("b.txt") -> 30%])',
        open=opened_by("mixture", "open_mixture"),
        files=mixed_files,
        warnings=mixed_warnings,
    )
)
