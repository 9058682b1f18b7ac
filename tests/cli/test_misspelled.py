"""Words with one letter dropped or two swapped, wherever the command line looks one up: the nearest is suggested, and
what is suggested works in its place.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

from partita.cli.command import COMMANDS
from partita.cli.main import _parser, main
from partita.cli.parsing import Parser
from partita.dsl.advice.report import Report
from partita.dsl.config.builtins import DEVICES, LINKS, OPTIMIZERS, SCHEDULES, TRAIN, Keyword, OneOf, OrWord
from partita.dsl.config.overrides import full_names
from partita.dsl.load import load_text
from partita.dsl.names.declarations import gather
from partita.dsl.syntax.reader import Reader
from partita.dsl.syntax.source import Source
from tests.files import SPECS
from tests.marks import soak

LONG = 4  # letters from which on a misspelled word is always recognised
MEANT = re.compile(r"did you mean (`[^`]+`(?:(?:, | or )`[^`]+`)*)\?")


def misspelled(word: str) -> Iterator[str]:
    """A word with one letter less, or two neighbours swapped; the first letter stays."""
    for i in range(1, len(word)):
        if word[i].isalnum():
            yield word[:i] + word[i + 1 :]
        if i + 1 < len(word) and word[i : i + 2].isalnum() and word[i] != word[i + 1]:
            yield word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def near(word: str) -> set[str]:
    """Options that a word is a misspelling of, or that are one of it."""
    options = {option for _, parser in PARSERS.values() for option in parser._option_string_actions}
    return {each for each in options if word in {*misspelled(each)} or each in {*misspelled(word)}}


def suggested(text: str) -> list[str]:
    """What a message suggests."""
    return [each for found in MEANT.findall(text) for each in re.findall("`([^`]+)`", found)]


def parsers() -> Iterator[tuple[list[str], Parser]]:
    """The words that call each command, and what parses its arguments."""
    for name in COMMANDS:
        _, called, _ = _parser([name])
        inner = [action for action in called._actions if isinstance(action, argparse._SubParsersAction)]
        if not inner:
            yield [name], called
        for action in inner:
            yield from (([name, each], parser) for each, parser in action.choices.items())


PARSERS = {" ".join(words): (words, parser) for words, parser in parsers()}


def needed(parser: Parser) -> list[str]:
    """What must be there besides."""
    found = []
    for action in parser._actions:
        word = str(next(iter(action.choices))) if action.choices else "x"
        if not action.option_strings and action.nargs not in ("?", "*"):
            found.append(word)
        elif action.required and action.option_strings:
            found += [action.option_strings[-1], word]
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.few(6)
@pytest.mark.parametrize("name", PARSERS)
def test_every_option_of_every_command(name: str, capsys: pytest.CaptureFixture[str]):
    words, parser = PARSERS[name]
    known = set(parser._option_string_actions)
    for option in (each for each in known if each.startswith("--")):
        for wrong in {*misspelled(option)} - known:
            if wrong.startswith("--") and len(wrong) > len("--"):
                found = suggested(refused(capsys, *words, *needed(parser), wrong))
                assert len(found) <= 1
                assert {*found} <= known
                assert found or len(option) - 2 <= LONG, (wrong, option)
                # Of two options that are one letter apart, either may be meant.
                assert not found or found[0] == option or found[0] in near(wrong) or found[0].startswith(wrong)


@pytest.mark.few(23)
@pytest.mark.parametrize("name", PARSERS)
def test_every_choice_of_every_option(name: str, capsys: pytest.CaptureFixture[str]):
    words, parser = PARSERS[name]
    for action in parser._actions:
        if not action.choices or isinstance(action.choices, range) or action.help == argparse.SUPPRESS:
            continue
        before = action.option_strings[-1:]
        for choice in map(str, action.choices):
            for wrong in {*misspelled(choice)} - {*map(str, action.choices)}:
                rest = needed(parser) if before else []
                found = suggested(refused(capsys, *words, *rest, *before, wrong))
                assert {*found} <= {*map(str, action.choices)}
                assert found or len(choice) <= LONG, (wrong, choice)


@pytest.mark.soak
def test_every_command(capsys: pytest.CaptureFixture[str]):
    names = [*COMMANDS, *(" ".join(words) for words, _ in PARSERS.values() if len(words) > 1)]
    for name in names:
        *before, last = name.split()
        for wrong in {*misspelled(last)} - {each.split()[-1] for each in names}:
            found = suggested(refused(capsys, *before, wrong))
            assert found or len(last) <= LONG, wrong
            assert {each.removeprefix("partita ") for each in found} <= {
                each.removeprefix("checkpoint ") for each in names
            }


# ---------------------------------------------------------------- overrides

TEXT = (SPECS / "llama.par").read_text()
SPEC = gather(Source("llama.par", TEXT), None, None, Reader(), Report())
UNKNOWN = {"E0302", "E0306", "E0309"}  # what is said of a word that is none of a set
KEYS = [*dict.fromkeys(full_names(SPEC))]
OF_KEYS = {"E0209", "E0303", "E0313", "E0315"}  # what is said of a key, and not of its value


def wrong_key(override: str) -> list[tuple[str, int]]:
    """What is suggested instead of a key, and where in the override it stands; nothing if the key is right."""
    _, diagnostics = load_text(TEXT, overrides=[override])
    found = [each for each in diagnostics if each.code in OF_KEYS and each.span.source.name == "command line"]
    return [(each, one.span.start) for one in found for each in suggested(one.help or "")] or [("", 0)] * bool(found)


@pytest.mark.few(2)
@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_an_override(key: str):
    assert not wrong_key(f"{key}=1")
    for wrong in {*misspelled(key)} - {*KEYS}:
        found = wrong_key(f"{wrong}=1")
        for each, start in found:
            if not each:
                changed = max((part for part in key.split(".") if part not in wrong.split(".")), key=len, default="")
                assert len(changed) <= LONG, wrong
                continue
            end = next((i for i in range(start, len(wrong)) if wrong[i] == "."), len(wrong))
            applied = each if each in KEYS else wrong[:start] + each + wrong[end:]
            assert not wrong_key(f"{applied}=1"), (wrong, applied)


def is_refused(override: str) -> bool:
    found = load_text(TEXT, overrides=[override])[1]
    return any(each.severity == "error" and each.span and each.span.source.name == "command line" for each in found)


@pytest.mark.parametrize("name", ["check", *soak("run", "compile", "plan")])
def test_a_setting_with_dashes_is_said_as_a_key_that_the_file_has(name: str, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("m.par").write_text(TEXT)
    _, parser, _ = _parser([name])
    for key in KEYS if name != "check" else KEYS[::4]:
        for option in {key, key.rpartition(".")[2], key.rpartition(".")[2].replace("_", "-")}:
            if f"--{option}" in parser._option_string_actions:
                continue
            err = refused(capsys, name, "m.par", f"--{option}", "1")
            if found := suggested(err):
                assert {*found} <= {*parser._option_string_actions}
                continue
            keys = re.search(r"settings take no dashes: (.*)", err)[1].split(" or ")
            assert {each.rpartition("=")[0] for each in keys} <= {*KEYS}
            assert not [each for each in keys if wrong_key(each)]
            values = {each.rpartition("=")[2] for each in keys}
            assert values == ({"…"} if all(map(is_refused, [each.replace("…", "1") for each in keys])) else {"1"})
    assert "settings take" not in refused(capsys, name, "m.par", "--nothing-like-it", "1")


def words_of(kind: object) -> Collection[str]:
    """The words that a value of a kind begins with."""
    match kind:
        case OneOf():
            return [*kind.signatures]
        case Keyword():
            return kind.choices
        case OrWord():
            return [kind.word]
    return []


WORDS: Mapping[str, Collection[str]] = {
    **{f"train.{each.name}": words_of(each.kind) for each in TRAIN.settings},
    "train.optimizer": [*OPTIMIZERS, "mixed"],
    "schedule": [*SCHEDULES, *SPEC.schedules],
    "layout": [*SPEC.layouts, "other_layout"],
    "model": [*SPEC.models, "other_model"],
    "cluster.device": [*DEVICES],
    "cluster.link": [*LINKS],
}


@pytest.mark.soak
@pytest.mark.parametrize("key", [key for key, words in WORDS.items() if len(words) > 1])
def test_every_word_that_a_value_may_be(key: str):
    more = "optimizer mixed { update all -> sgd(lr = 0.1) }\nlayout other_layout on cluster { shard batch -> data }\n"
    model = re.search(r"^model \w+(\(.*?^}\n)", TEXT, re.MULTILINE | re.DOTALL)
    text = f"{TEXT}{more}model other_model{model[1]}"
    for word in WORDS[key]:
        for wrong in {*misspelled(word)} - {*WORDS[key]}:
            _, diagnostics = load_text(text, overrides=[f"{key}={wrong}"])
            found = [each for one in diagnostics if one.code in UNKNOWN for each in suggested(one.help or "")]
            assert {*found} <= {*WORDS[key]}
            assert found or len(word) <= LONG, (key, wrong)
