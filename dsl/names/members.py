"""What paths name: the parameters, values, blocks and repeats in a body, from syntax trees.

A path is a full name without the numbers of iterations, or the end of one. Each part names a member of the body that
the part before it names: a parameter, an input, a value, a repeat or the call of a block, which have members in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from attrs import define, field, frozen

from partita.dsl.syntax import tree

Body: TypeAlias = tree.Block | tree.Model | tree.Repeat


@frozen(eq=False)
class Member:
    """A member of a body. `segment` is its part of full names (`mlp`; of the second call in a body, `mlp_2`)."""

    segment: str
    declared: tree.Name
    kind: str
    inside: Body | None = None

    def is_called(self, part: str) -> bool:
        """Whether a part of a path means it: by the segment, or the name that it is declared by."""
        return part in (self.segment, self.declared.text)

    @property
    def key(self) -> tuple[int, int]:
        """What it is: calls of one block in a body, or in several, are the same."""
        return id(self.declared), id(self.inside)

    @property
    def number(self) -> str:
        """What its segment has behind its name: nothing, or the number of a call (`_2`)."""
        return self.segment.removeprefix(self.declared.text)


@define(eq=False)
class Members:
    """The members of bodies, entered in the order of the text."""

    _bodies: list[Body] = field(factory=list)
    # By the identity of a body's node: its members; and its segments, with the last number that each name was given.
    _of: dict[int, dict[tuple[str, int, int], Member]] = field(factory=dict)
    _taken: dict[int, dict[str, int]] = field(factory=dict)
    _open: list[Body] = field(factory=list)

    def begin(self, body: Body) -> None:
        """Begin a body, whose members are entered until it ends."""
        self._of[id(body)] = {}
        self._bodies.append(body)
        self._taken[id(body)] = {}
        self._open.append(body)
        self.reserve(body.body)

    def end(self) -> None:
        """End the body that was begun last."""
        self._open.pop()

    def reserve(self, statements: Sequence[tree.Statement]) -> None:
        """The names of parameters, buffers and samples, which calls and repeats cannot have as segments."""
        for statement in statements:
            if isinstance(statement, tree.Param | tree.Buffer | tree.Sample):
                self._taken[id(self._open[-1])].update((name.text, 1) for name in statement.names)

    def enter(self, declared: tree.Name, kind: str, inside: Body | None = None) -> None:
        """A parameter, input or value of the open body, if there is one; or a repeat or called block, which gets the
        first free segment.
        """
        if not self._open:
            return
        body = self._open[-1]
        taken, segment, text = self._taken[id(body)], declared.text, declared.text
        while inside is not None and segment in taken:
            taken[text] += 1
            segment = f"{text}_{taken[text]}"
        if inside is not None:
            taken[segment] = 1
        member = Member(segment, declared, kind, inside)
        self._of[id(body)].setdefault((segment, *member.key), member)

    def __iter__(self) -> Iterator[Member]:
        for body in self._bodies:
            yield from self.of(body)

    def here(self) -> Iterable[Member]:
        """The members of the open body so far."""
        return self.of(self._open[-1])

    def of(self, body: Body) -> Iterable[Member]:
        """The members of a body."""
        return self._of[id(body)].values()

    def named(self, parts: Sequence[str]) -> tuple[tuple[Member, ...], ...]:
        """What each part of a path may mean: from any body of a model on, or from any at all if there is no model."""
        models = [body for body in self._bodies if isinstance(body, tree.Model)]
        first = [Member(model.name.text, model.name, "model", model) for model in models]
        first += [member for body in self._reached(models or self._bodies) for member in self.of(body)]
        meanings = [_called(first, parts[0])]
        for part in parts[1:]:
            meanings.append(_called((each for member in meanings[-1].values() for each in self._inside(member)), part))
        # What the path goes on from has what comes next in it.
        for i in range(len(parts) - 2, -1, -1):
            after = meanings[i + 1]
            meanings[i] = {
                key: member
                for key, member in meanings[i].items()
                if any(each.key in after and each.is_called(parts[i + 1]) for each in self._inside(member))
            }
        return tuple(tuple(each.values()) for each in meanings)

    def _inside(self, member: Member) -> Iterable[Member]:
        return self.of(member.inside) if member.inside is not None else ()

    def _reached(self, bodies: Sequence[Body]) -> Iterable[Body]:
        """The bodies, and those in them."""
        reached: dict[int, Body] = {}
        waiting = list(bodies)
        while waiting:
            body = waiting.pop()
            if id(body) not in reached:
                reached[id(body)] = body
                waiting += [each.inside for each in self.of(body) if each.inside is not None]
        return reached.values()

    def repeats_around(self, named: Sequence[Sequence[Member]]) -> list[Member]:
        """The repeats in which what a path names is, and those that it names itself."""
        repeats = [each for part in named for each in part if isinstance(each.inside, tree.Repeat)]
        first = {each.key for each in named[0]}
        inside = {id(body) for body in self._bodies if any(each.key in first for each in self.of(body))}
        grown = True
        while grown:
            around = [
                (id(body), member)
                for body in self._bodies
                for member in self.of(body)
                if member.inside is not None and id(member.inside) in inside
            ]
            repeats += [member for _, member in around if isinstance(member.inside, tree.Repeat)]
            grown = not inside.issuperset(body for body, _ in around)
            inside |= {body for body, _ in around}
        return repeats


def _called(members: Iterable[Member], part: str) -> dict[tuple[int, int], Member]:
    return {member.key: member for member in members if member.is_called(part)}
