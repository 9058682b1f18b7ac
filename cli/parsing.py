"""What a command line is parsed by: argparse, with the nearest word in place of one that is none of a set."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from partita.dsl.advice.foreign import FOLLOWS, OPTIONS
from partita.dsl.advice.report import nearest
from partita.dsl.config.misplaced_settings import overrides_of

_OPTION = re.compile(r"--([a-z][\w.-]*)(?:=(.*))?", re.DOTALL | re.IGNORECASE)


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
        flag = next((match for word in strays if (match := _OPTION.fullmatch(word))), None)
        if flag is None:
            return None
        name, value = flag.groups()
        key = name.replace("-", "_")
        option = self._option(name) or self._meant(key)
        if option is not None:
            return f"did you mean `{option}`?" if option.startswith("-") else f"it takes no option: `{option}`"
        if not any(action.dest == "overrides" for action in self._actions):
            return None
        argument = value if value is not None else _after(flag[0], words)
        written, wrong = overrides_of(file_in(words), key, argument)
        if not written:
            return FOLLOWS.get(key)
        return f"{f'{wrong}; ' if wrong else ''}settings take no dashes: {' or '.join(written)}"

    def _option(self, name: str) -> str | None:
        """The option that a word resembles, or is the beginning of."""
        known = [each for each in self._option_string_actions if each.startswith("--")]
        begun = [each for each in known if each.startswith(f"--{name}")]
        near = nearest(name, [each[2:] for each in known])
        return begun[0] if len(begun) == 1 else f"--{near}" if near is not None else None

    def _meant(self, word: str) -> str | None:
        """The option that other tools, or other commands, call so; or the argument that has none."""
        actions = {action.dest: action for action in self._actions}
        option = next((actions[each] for each in OPTIONS.get(word, ()) if each in actions), None)
        return (option.option_strings or [str(option.metavar)])[0] if option is not None else None

    def _match_argument(self, action: argparse.Action, pattern: str) -> int:
        try:
            return super()._match_argument(action, pattern)
        except argparse.ArgumentError as error:
            if not action.option_strings or action.metavar is None:
                raise
            raise argparse.ArgumentError(
                action, f"{error.message}: `{action.option_strings[0]} {action.metavar}`"
            ) from None


def _after(option: str, words: Sequence[str]) -> str | None:
    """The word after an option, if it may be its value."""
    following = words[words.index(option) + 1 :]
    value = following[0] if following else "-"
    return None if value.startswith("-") or value.endswith(".par") else value


def file_in(words: Iterable[str]) -> str:
    """The file on a command line; empty if there is none."""
    return next((os.path.expanduser(word) for word in words if word.endswith(".par")), "")
