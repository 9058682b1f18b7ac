"""The text of values and of views of them in one emitted function.

User names reach the source only as parts of local names, which never shadow names of Python, torch or the program.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import evolve, frozen

from partita.compiler.graph import Node, Value
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Argument, as_tensor
from partita.compiler.ops.traits import legalized
from partita.dsl.syntax.source import Span


@frozen
class View:
    """A view of a tensor; `how` is the suffix that makes it, `.t()`."""

    of: Value
    how: str


class Names:
    """The text of every value of a function, and of its named views.

    Views of `lent` values come from the caller: `lend` returns the name of a view when it is first taken.
    """

    def __init__(
        self,
        arguments: Iterable[str] = (),
        known: Mapping[Value, Argument] | None = None,
        lend: Callable[[View], str] | None = None,
    ) -> None:
        self.texts: dict[Value, Argument] = dict(known or {})
        self.local: set[Value] = set()
        self.fixed: set[Value] = set()  # local tensors whose views may copy, so they are made where they are used
        self.lend = lend
        self.lent: set[Value] = set(self.texts) if lend is not None else set()
        self.views: dict[View, str] = {}
        self._taken = set(arguments)
        self._counts: dict[str, int] = {}  # the last suffix tried for each stem

    def name(self, value: Value, stem: str | None = None) -> str:
        """A new local name for a value, from `stem` or its own name."""
        return self.named(value, self.free(stem or local_stem(value.name)))

    def named(self, value: Value, text: str) -> str:
        """Makes a value the local tensor of this name."""
        self.texts[value] = Argument(text, value.type)
        self.local.add(value)
        return text

    def free(self, stem: str) -> str:
        """A local name that is not yet taken."""
        text = stem
        count = self._counts.get(stem, 1)
        while text in self._taken:
            count += 1
            text = f"{stem}_{count}"
        self._taken.add(text)
        self._counts[stem] = count
        return text

    def taken(self, node: Node) -> tuple[View | None, ...]:
        """The view that a node takes of each operand, None for one taken directly; empty if it takes no views."""
        suffixes = node.op.views([value.type for value in node.inputs]) if isinstance(node.op, Dot) else ()
        views = tuple(
            View(value, how) if how and not self.texts[value].literal else None
            for value, how in zip(node.inputs, suffixes, strict=bool(suffixes))
        )
        for view in views:
            if view is not None:
                self.take(view)
        return views

    def take(self, view: View) -> None:
        """Asks the caller for a view of a lent value."""
        if self.lend is not None and view.of in self.lent and view not in self.views:
            self.views[view] = self.lend(view)

    # ------------------------------------------------------------ texts

    def text(self, value: Value | View) -> str:
        """The text of a value, or of a view: its name, or the expression that makes it."""
        if isinstance(value, View):
            return self.views.get(value) or self.making(value)
        return self.texts[value].text

    def list(self, values: Iterable[Value | View]) -> str:
        """The texts, separated by commas."""
        return ", ".join(map(self.text, values))

    def bound(self, values: Sequence[Value]) -> str:
        """The left side of an assignment to these values; empty without values."""
        return f"{self.list(values)} = " if values else ""

    def making(self, view: View) -> str:
        """The expression that makes a view."""
        return as_tensor(self.texts[view.of]).text + view.how

    def tensor(self, value: Value | View) -> str:
        """The text of a value as a tensor, even if it is a literal; views are made inline."""
        return self.making(value) if isinstance(value, View) else as_tensor(self.texts[value]).text

    def arguments(self, node: Node, views: Sequence[View | None] = ()) -> Sequence[Argument]:
        """A node's operands in the form it takes them; `views` are the views among them."""
        arguments = legalized(
            node.op, [self.texts[value] for value in node.inputs], [value.type for value in node.outputs]
        )
        for i, view in enumerate(views):
            if view in self.views:
                arguments[i] = evolve(arguments[i], views={view.how: self.views[view]})
        return arguments


# ---------------------------------------------------------------- from user names


def place(span: Span | None) -> str:
    """`  # gpt.par:31`; characters of the file's name that could end the comment are replaced."""
    if not span:
        return ""
    name = "".join(each if each.isalnum() or each in "_./ -" else "_" for each in span.source.name)
    return f"  # {name[-80:]}:{span.line}"


def identifier(name: str) -> str:
    """A name with characters that are invalid in Python names replaced."""
    return "".join(each if each.isalnum() or each == "_" else "_" for each in name)


def local_stem(name: str) -> str:
    """A Python name from a value's name: `d_h` from `d(gpt.layer.3.mlp.h)`."""
    prefix = ""
    while (call := _call(name)) is not None:
        prefix += f"{call[0]}_"
        name = call[1]
    parts = [part for part in name.partition("~")[0].replace("@", ".").split(".") if part and not part.isdigit()]
    stem = parts[-1] if parts else "value"
    if stem in ENDINGS and len(parts) > 1:
        stem = f"{parts[-2]}_{stem}"
    stem = prefix + identifier(stem)
    # A trailing underscore avoids collisions with Python's names and those of emitted functions.
    return f"{stem}_" if stem in RESERVED or _is_functions(stem) else stem


def _call(name: str) -> tuple[str, str] | None:
    """Splits `d(gpt.layer.3.mlp.h)` into function and argument, which includes any suffix after the parenthesis."""
    function, opened, rest = name.partition("(")
    inner, closed, behind = rest.rpartition(")")
    return (function, inner + behind) if opened and closed and function and identifier(function) == function else None


def _is_functions(stem: str) -> bool:
    """Whether an emitted function could have this name."""
    parts = stem.split("_")
    if parts[-1].isdecimal():
        parts.pop()
    return len(parts) > 1 and parts[-1] in FUNCTIONS


# Suffixes that the compiler appends to the name of the value that another is derived from.
ENDINGS = ("again", "portion", "rate", "denominator", "keep", "total", "whole", "part", "gathered", "reduced", "moved")
RESERVED = frozenset((*keyword.kwlist, "torch", "kernels", "float"))
FUNCTIONS = (
    "forward",
    "backward",
    "weight",
    "gather",
    "prologue",
    "opening",
    "closing",
    "reduce",
    "finish",
    "update",
    "segment",
)
