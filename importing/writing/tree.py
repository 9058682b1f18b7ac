"""The calls of modules as a tree, with what each computes, in the order of the program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property

from attrs import Factory, define

from partita.importing.graph import LEAVES, Call, Value, is_op
from partita.importing.loops import SCAN

VIEWS = ("view", "permute", "expand", "cast")
NUMBERED = re.compile(r"(?:(.*)\.)?(\d+)")


@define(eq=False, slots=False)
class Scope:
    """A call of a module. `items`: values and calls in it, in order."""

    call: Call
    parent: Scope | None
    items: list[Value | Scope] = Factory(list)

    def __repr__(self) -> str:
        return f"<{self.call.path or 'module'}>"

    @property
    def path(self) -> str:
        """The path of the module."""
        return self.call.path

    @property
    def kind(self) -> str:
        """The class of the module, without its package."""
        return self.call.kind.rsplit(".", 1)[-1]

    @property
    def is_torch(self) -> bool:
        """Whether the module is one of torch's own."""
        return self.call.kind.startswith("torch.nn.")

    @property
    def is_loop(self) -> bool:
        """Whether it is the step of a loop."""
        return self.call.kind == SCAN

    @property
    def children(self) -> list[Scope]:
        """The calls in it."""
        return [each for each in self.items if isinstance(each, Scope)]

    @cached_property
    def values(self) -> list[Value]:
        """All values that it computes, in order."""
        found: list[Value] = []
        for each in self.items:
            found += each.values if isinstance(each, Scope) else [each]
        return found

    @property
    def number(self) -> int | None:
        """The number of a module in a list."""
        found = NUMBERED.fullmatch(self.path)
        return int(found[2]) if found is not None else None

    @property
    def list_path(self) -> str:
        """The path of the list that a numbered module is in."""
        found = NUMBERED.fullmatch(self.path)
        return found[1] or "" if found is not None else self.path

    def around(self) -> Iterator[Scope]:
        """It and the calls around it, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


class Tree:
    """The tree of calls, and where values are made and used."""

    def __init__(self, values: list[Value], users: dict[Value, list[Value]], outputs: list[Value]) -> None:
        self.users, self.outputs = users, outputs
        self.root = Scope(Call("", ""), None)
        self.home: dict[Value, Scope] = {}
        index = {value: i for i, value in enumerate(values)}
        self.values = [value for value in values if value.op not in LEAVES and not is_written_in_place(value)]
        self.values.sort(key=lambda value: (value.position, index[value]))
        self.place = {value: i for i, value in enumerate(self.values)}
        scopes: dict[tuple[Scope, Call], Scope] = {}
        for value in self.values:
            scope = self.root
            for call in value.place.calls:
                if not call.path:
                    continue
                key = (scope, call)
                if key not in scopes:
                    scopes[key] = Scope(call, scope)
                    scope.items.append(scopes[key])
                scope = scopes[key]
            scope.items.append(value)
            self.home[value] = scope
        self.kinds: dict[str, list[Scope]] = {}
        waiting = [self.root]
        while waiting:
            scope = waiting.pop()
            self.kinds.setdefault(scope.call.kind, []).append(scope)
            waiting += scope.children

    def readers(self, value: Value) -> list[Value]:
        """The values that are made of a value, seen through those that are written in place."""
        found: dict[Value, None] = {}
        for user in self.users.get(value, []):
            if is_written_in_place(user):
                found.update(dict.fromkeys(self.readers(user)))
            else:
                found[user] = None
        return list(found)

    def cells_of(self, value: Value) -> Value | None:
        """The cells of an LSTM, if something reads them."""
        return next((each for each in self.users.get(value, []) if each.op == "cells"), None)

    def is_output(self, value: Value) -> bool:
        """Whether the module returns a value, or a view of it."""
        return any(each is value or base(each) is value for each in self.outputs)

    def same(self, scope: Scope) -> list[Scope]:
        """All calls of a module."""
        return [each for each in self.kinds[scope.call.kind] if each.path == scope.path]

    def inputs_of(self, scope: Scope, shared: Sequence[Scope] = ()) -> list[Value]:
        """What a call reads of what is made outside of it: values, and parameters that others read than calls of the
        same module which share them.
        """
        inside = set(scope.values)
        sharing = inside.union(*(each.values for each in shared))
        found: dict[Value, None] = {}
        for value in scope.values:
            for each in made_of(value):
                if each in inside or each in found:
                    continue
                own = each.op in ("parameter", "part", "buffer")
                if own and all(reader in sharing for reader in self.readers(each)):
                    continue
                found[each] = None
        return list(found)

    def outputs_of(self, scope: Scope) -> list[Value]:
        """What a call makes that is read outside of it."""
        inside = set(scope.values)
        return [
            value
            for value in scope.values
            if self.is_output(value) or any(reader not in inside for reader in self.readers(value))
        ]


def is_written_in_place(value: Value) -> bool:
    """Whether a value is no statement: a number, a formula of constants, a view or a cast."""
    return value.op in VIEWS or value.constant is not None


def base(value: Value) -> Value:
    """What a value is a view of."""
    while value.op in VIEWS and value.constant is None:
        value = value.args["x"]
    return value


def made_of(value: Value) -> list[Value]:
    """The values that a value is made of, seen through views; no constants."""
    found: dict[Value, None] = {}
    for each in value.inputs:
        each = base(each)
        if each.constant is None or is_op(each, *LEAVES):
            found[each] = None
    return list(found)
