"""Texts of blocks: one block for all that differ only in axes, which calls rename, or in numbers, which calls give."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from string import ascii_lowercase

from attrs import Factory, define

from partita.dsl.functions.signatures import FUNCTIONS
from partita.importing.writing.names import owners, snake, valid

# Axes that a call renames stand behind the block's name until the file is whole: `mix⟦seq -> target⟧(x)`.
ARROWS = re.compile(r"(\w+)⟦([^⟧]*)⟧")
TOKEN = re.compile(r"\w+⟦[^⟧]*⟧|size\(\w+\)|\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)|\w+|\s+|.")
ARGUMENT = re.compile(r"(\w+: \w*)\[([^\]]*)\]")
Argument = tuple[str, list[str]]  # its name and dtype, and its axes
NUMBER = re.compile(r"size\(\w+\)|\d.*")


@define
class Form:
    """A block's text, in tokens, in which some are numbers that calls give, by name."""

    tokens: list[str]
    numbers: dict[int, str] = Factory(dict)


@define
class Blocks:
    """The blocks of a file: texts by name. `forms` are known of having written it before."""

    axes: Collection[str]
    constants: Collection[str]
    forms: dict[str, list[Form]]
    apart: bool = False  # whether blocks are one only where texts are the same
    texts: dict[str, str] = Factory(dict)
    named: dict[str, list[str]] = Factory(dict)  # the blocks that were to be called so
    paths: dict[str, str] = Factory(dict)  # of their modules
    first: dict[str, list[Form]] = Factory(dict)  # as blocks were to be written, by their names

    def defined(self, wanted: str, text: str, taken: Collection[str], path: str = "") -> tuple[str, list[str]]:
        """The name of a block with this text, with axes that a call renames, and numbers that it gives. `path` is that
        of its module, whose names tell it from other blocks that are to be called so.
        """
        form, given = self._formed(wanted, text)
        before = [name for name in self.named.setdefault(wanted, []) if name in self.texts]
        for name in before:
            pairs = None if self.apart else self.renamed(self.texts[name], form)
            pairs = [] if self.texts[name] == form else pairs
            if pairs is not None:
                return f"{name}⟦{', '.join(pairs)}⟧" if pairs else name, given
        letters = (f"{wanted}_{one}{last}" for one in ("", *ascii_lowercase) for last in ascii_lowercase[not one :])
        told = [n for n in _told_apart(wanted, path, self.paths[before[0]]) if n not in self.axes] if before else []
        name = next(n for n in chain([wanted], told, letters) if n not in {*self.texts, *taken})
        self.texts[name], self.paths[name] = form, path
        self.named[wanted].append(name)
        return name, given

    def renamed(self, text: str, other: str) -> list[str] | None:
        """The axes that a call renames of a block with the one text, to be one of that with another; None if more
        differs.
        """
        (own, ours), (its, theirs) = _taken(text), _taken(other)
        found = self._differing(TOKEN.findall(ours), TOKEN.findall(theirs))
        if found is None or found[1] or not self._take_alike(own, its, found[0]):
            return None
        return [f"{one} -> {its}" for one, its in found[0].items() if one != its]

    def _take_alike(self, ours: Sequence[Argument], theirs: Sequence[Argument], pairs: dict[str, str]) -> bool:
        """Whether blocks whose bodies differ in axes take the same arguments, whose axes may have any order. Adds to
        these axes those that only arguments have.
        """
        if [each[0] for each in ours] != [each[0] for each in theirs]:
            return False
        for (_, one), (_, its) in zip(ours, theirs, strict=True):
            left = [name for name in one if name not in pairs]
            rest = [name for name in its if name not in {pairs.get(each) for each in one}]
            if len(one) != len(its) or len(left) != len(rest):
                return False
            pairs.update(zip(left, rest, strict=True))
        return len({*pairs.values()}) == len(pairs)

    def learned(self) -> bool:
        """Whether more is known now of which texts differ only in axes and in numbers."""
        more = False
        if self.apart:
            return False
        for name, several in self.first.items():
            forms = self.forms.setdefault(name, [])
            for each in several:
                if any(self._given(form, each.tokens) is not None for form in forms):
                    continue
                more = True
                for form in forms:
                    found = self._differing(form.tokens, each.tokens, form.numbers)
                    if found is not None:
                        form.numbers |= found[1]
                        break
                else:
                    forms.append(each)
        return more

    def _formed(self, wanted: str, text: str) -> tuple[str, list[str]]:
        """A block's text where calls give its numbers, and those of a call."""
        tokens = TOKEN.findall(text)
        self.first.setdefault(wanted, []).append(Form(tokens))
        for form in self.forms.get(wanted, []):
            given = self._given(form, tokens)
            if given:
                named = "".join(form.numbers.get(i, token) for i, token in enumerate(tokens))
                head = "".join(f", {name}: number" for name in given)
                return named.replace(")", f"{head})", 1), [f"{name} = {number}" for name, number in given.items()]
        return text, []

    def _given(self, form: Form, tokens: Sequence[str]) -> dict[str, str] | None:
        """The numbers that a text has where a form has names; None if more differs but axes."""
        found = self._differing(form.tokens, tokens, form.numbers)
        if found is None or found[1]:
            return None
        given: dict[str, str] = {}
        for i, name in form.numbers.items():
            if given.setdefault(name, tokens[i]) != tokens[i]:
                return None
        return given

    def _differing(
        self, ours: Sequence[str], theirs: Sequence[str], numbers: Mapping[int, str] | None = None
    ) -> tuple[dict[str, str], dict[int, str]] | None:
        """The axes that another text has instead, and what differing numbers are called, but those that are known; None
        if more differs.
        """
        if len(ours) != len(theirs):
            return None
        pairs: dict[str, str] = {}
        names: dict[int, str] = {}
        called: dict[tuple[str, str], str] = {}
        for i, (one, its) in enumerate(zip(ours, theirs, strict=True)):
            if i in (numbers or ()):
                continue
            if self._is_number(one) and self._is_number(its) and one != its and not self._are_sizes(one, its):
                word = ours[i - 4]
                if not word.isidentifier() or "".join(ours[i - 3 : i]) != " = ":
                    return None
                names[i] = called.setdefault((one, its), word if word not in called.values() else f"{word}_{i}")
                continue
            for own, other in self._axes_of(one, its):
                if own not in self.axes or other not in self.axes:
                    if own != other:
                        return None
                elif pairs.setdefault(own, other) != other:
                    return None
        return None if len({*pairs.values()}) < len(pairs) else (pairs, names)

    def _axes_of(self, one: str, its: str) -> Iterator[tuple[str, str]]:
        """Words of two tokens that must be the same, or axes. Of calls of a block, these are all axes in it."""
        (name, own), (other, theirs) = _call(one), _call(its)
        if name in self.texts and name not in self.axes and name == other:
            for axis in dict.fromkeys(each for each in self._inside(name) if each in self.axes):
                yield own.get(axis, axis), theirs.get(axis, axis)
        elif self._are_sizes(one, its):
            yield one[5:-1], its[5:-1]
        else:
            yield one, its

    def _inside(self, name: str) -> Iterator[str]:
        """The words of a block, and of those that it calls."""
        for token in TOKEN.findall(self.texts[name]):
            called, arrows = _call(token)
            if called in self.texts and called not in self.axes and called != name:
                yield from (arrows.get(each, each) for each in self._inside(called))
            elif token.startswith("size("):
                yield token[5:-1]
            else:
                yield token

    def _is_number(self, token: str) -> bool:
        return NUMBER.fullmatch(token) is not None or token in self.constants

    def _are_sizes(self, one: str, its: str) -> bool:
        return one.startswith("size(") and its.startswith("size(")


def _told_apart(wanted: str, path: str, other: str) -> list[str]:
    """What a block is called beside another one: after its module, if that one is called otherwise, or after the module
    that it is in; not after lists of modules.
    """
    path, other = (re.sub(r"\.?\w+\.\d+(?=\.|$)", "", each).strip(".") for each in (path, other))
    own, its = (snake(each.rpartition(".")[2]) for each in (path, other))
    names = [own, *owners(path, other)] if own != its else owners(path, other)
    kinds = {word[:3] for word in wanted.split("_")}
    return [
        name if kinds & {word[:3] for word in name.split("_")} else f"{name}_{wanted}"
        for name in names
        if name.isidentifier() and valid(name) == name and name not in FUNCTIONS and not name[-1].isdigit()
    ]


def _taken(text: str) -> tuple[list[Argument], str]:
    """The arguments of a block, each with its axes, and its body."""
    head, _, body = text.partition(") {")
    return [(name, axes.split(", ")) for name, axes in ARGUMENT.findall(head)], body


def _call(token: str) -> tuple[str, dict[str, str]]:
    """A block's name, and the axes that a call renames."""
    found = ARROWS.fullmatch(token)
    if found is None:
        return token, {}
    return found[1], dict(each.split(" -> ") for each in found[2].split(", "))


def placed(text: str) -> str:
    """A text in which the axes that calls rename stand where the language has them."""
    while (found := ARROWS.search(text)) is not None:
        at, depth = found.end(), 0
        while True:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            if depth == 0:
                break
            at += 1
        text = f"{text[: found.start()]}{found[1]}{text[found.end() : at]}, {found[2]}{text[at:]}"
    return text
