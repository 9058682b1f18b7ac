"""What a command line is parsed by: argparse, with the nearest word in place of one that is none of a set."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from partita.dsl.declarations import Declarations, gather
from partita.dsl.diagnostic import Refused
from partita.dsl.foreign import FOLLOWS
from partita.dsl.overrides import likely_keys
from partita.dsl.reader import Reader
from partita.dsl.report import Full, Report, nearest
from partita.dsl.source import Source

_OPTION = re.compile(r"--([a-z][\w.-]*)(?:=(.*))?", re.DOTALL | re.IGNORECASE)
MOST_READ = 60  # characters of a value that is repeated


class Parser(argparse.ArgumentParser):
    """A parser of a command, or of all. Words are never abbreviated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = nearest(str(value), map(str, action.choices or ()))
            if near is None:
                raise
            raise argparse.ArgumentError(action, f"{error.message}; did you mean `{near}`?") from None

    def called(self, parsed: argparse.Namespace) -> Parser:
        """The parser of the innermost command that was parsed."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                inner = action.choices.get(str(getattr(parsed, action.dest, None)))
                return inner.called(parsed) if isinstance(inner, Parser) else self
        return self

    def advice(self, words: Sequence[str], strays: Sequence[str]) -> str | None:
        """What is meant by the first option, of the words of a command, that this has not; None if nothing is known."""
        found = next((match for word in strays if (match := _OPTION.fullmatch(word))), None)
        if found is None:
            return None
        name, value = found.groups()
        if option := self._option(name):
            return f"did you mean `{option}`?"
        if not any(action.dest == "overrides" for action in self._actions):
            return None
        key = name.replace("-", "_")
        keys, _ = likely_keys(declared_in(words), key)
        if not keys:
            return FOLLOWS.get(key)
        given = value if value is not None else _after(found[0], words)
        given = given if given is not None and len(given) <= MOST_READ else "…"
        return f"settings take no dashes: {' or '.join(f'{each}={given}' for each in keys)}"

    def _option(self, name: str) -> str | None:
        """The option that a word resembles, or is the beginning of."""
        known = [each for each in self._option_string_actions if each.startswith("--")]
        begun = [each for each in known if each.startswith(f"--{name}")]
        near = nearest(name, [each[2:] for each in known])
        return begun[0] if len(begun) == 1 else f"--{near}" if near is not None else None


def _after(option: str, words: Sequence[str]) -> str | None:
    """The word after an option, if it may be its value."""
    following = words[words.index(option) + 1 :]
    value = following[0] if following else "-"
    return None if value.startswith("-") or "=" in value or value.endswith(".par") else value


def declared_in(words: Iterable[str]) -> Declarations:
    """What the file on a command line declares, as far as it can be read."""
    reader = Reader()
    file = next((os.path.expanduser(word) for word in words if word.endswith(".par")), "")
    try:
        source = reader.source(file, file)
        return gather(source, file, None, reader, Report())
    except (Refused, Full):
        return Declarations(Source(file, ""))
