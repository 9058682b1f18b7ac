"""Bodies of blocks, repeats and the model: statements, parameters, and the names that stand for values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from attrs import Factory, define, frozen

from partita.importing.graph import Value
from partita.importing.said import Said
from partita.importing.writing.tree import Scope

NESTED = ("repeat", "scan")  # kinds of bodies that see what is around them


@frozen
class Declared:
    """A parameter or buffer: its name, the names of its axes by dimension, how it begins, its value in the graph."""

    name: str
    dims: tuple[tuple[str, ...], ...]
    initial: str
    value: Value
    keyword: str = "param"
    dtype: str = ""  # that of the train block, unless it is a table of integers
    first: tuple[int, ...] = ()  # dimensions that are declared first: those that products sum over

    @property
    def axes(self) -> tuple[str, ...]:
        """Its axes, in memory order."""
        order = [*self.first, *(i for i in range(len(self.dims)) if i not in self.first)]
        return tuple(name for i in order for name in self.dims[i])


@define(eq=False)
class Body:
    """What is being written. `kind`: model, block, repeat or scan. Of a repeat, `scopes` are the modules of an
    iteration.
    """

    kind: str
    scopes: list[Scope]
    parent: Body | None = None
    name: str = ""
    lines: list[str] = Factory(list)
    said: dict[Value, Said] = Factory(dict)
    bound: dict[str, Value | None] = Factory(dict)
    parameters: dict[Value, Declared] = Factory(dict)
    calls: dict[str, list[Body | list[Body]]] = Factory(dict)  # by path element
    taken: set[str] = Factory(set)
    local: set[str] = Factory(set)  # names of values in scans, which parameters cannot have
    read: Counter[Value] = Factory(Counter)  # how often each parameter is
    outputs: list[str] = Factory(list)
    computed: set[Value] | None = None
    shared: dict[str, tuple[str, str]] = Factory(dict)  # modules that are called several times → name, and block

    def lookup(self, value: Value) -> Said | None:
        """What stands for a value here: repeats and scans also read what is around them."""
        found = self.said.get(value)
        if found is None and self.kind in NESTED and self.parent is not None:
            return self.parent.lookup(value)
        return found

    def around(self) -> Iterator[Body]:
        """It, and the bodies around it up to that of a block or the model."""
        body: Body | None = self
        while body is not None:
            yield body
            body = body.parent if body.kind in NESTED else None

    @property
    def inside(self) -> set[Value] | None:
        """What the block around computes; None in the model."""
        block = list(self.around())[-1]
        if block.kind == "block" and block.computed is None:
            block.computed = {each for scope in block.scopes for each in scope.values}
        return block.computed

    def is_free(self, name: str) -> bool:
        """Whether nothing is called so here, nor around a repeat."""
        for body in self.around():
            if any(name == own for own, _ in body.shared.values()):
                return False
            if (
                name in body.bound
                or name in body.taken | body.local
                or any(name == each.name for each in body.parameters.values())
            ):
                return False
        return True

    def declarations(self) -> list[str]:
        """Lines that declare parameters and buffers; those of the same type and beginning in one."""
        groups: dict[tuple[str, str, tuple[str, ...], str], list[str]] = {}
        for each in self.parameters.values():
            groups.setdefault((each.keyword, each.dtype, each.axes, each.initial), []).append(each.name)
        shares = [f"share {name} = {block}" for name, block in self.shared.values()]
        return shares + [
            f"{keyword} {', '.join(names)}: {dtype}[{', '.join(axes)}] ~ {initial}"
            for (keyword, dtype, axes, initial), names in groups.items()
        ]

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join([*self.declarations(), *self.lines, *self.outputs])
