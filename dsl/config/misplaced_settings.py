"""Settings of a file that are given as options of a command or as arguments of a function: how they are written."""

from __future__ import annotations

from collections.abc import Iterable

from partita.dsl.advice.foreign import FOLLOWS
from partita.dsl.advice.report import Full, Report
from partita.dsl.config.overrides import PLACE, likely_keys
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.dsl.names.declarations import Declarations, gather
from partita.dsl.syntax.reader import Reader
from partita.dsl.syntax.source import Source

MOST_READ = 60  # characters of a value that is repeated


def declared_in(file: str) -> Declarations:
    """What a file declares, as far as it can be read."""
    reader = Reader()
    try:
        return gather(reader.source(file, file), file, None, reader, Report())
    except (Refused, Full):
        return Declarations(Source(file, ""))


def overrides_of(file: str, key: str, value: str | None) -> tuple[list[str], str | None]:
    """The overrides that a key and its value may stand for in a file; and what to do about the value, in whose place
    they have `…` then. It is `key=value` where it stands for both: `--mesh data=2`, which is of a mesh's axes.
    """
    declared = declared_in(file)
    keys, _ = likely_keys(declared, key)
    if value is not None and "=" in value and (key == "mesh" or (not keys and key not in FOLLOWS)):
        part, _, value = value.partition("=")
        keys, instead = likely_keys(declared, f"mesh.{part}" if key == "mesh" else part)
        value = None if instead else value
    if value is None or len(value) > MOST_READ or "=" in value:
        return [f"{each}=…" for each in keys], None
    written = [f"{each}={value}" for each in keys]
    wrong = _refused(file, written)
    return ([f"{each}=…" for each in keys], wrong) if wrong is not None else (written, None)


def _refused(file: str, overrides: Iterable[str]) -> str | None:
    """What to do about the value of overrides, if the file takes it in none of them."""
    help = None
    for override in overrides:
        errors = [each for each in load(file, [override], fitting=False)[1] if each.severity == "error"]
        wrong = next((each for each in errors if each.span and each.span.source.name == PLACE), None)
        if wrong is None:
            return None
        help = help or wrong.help or wrong.message
    return help
