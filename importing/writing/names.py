"""What values, parameters and blocks are called: as in the source of the module, where it has names for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, product

from partita.dsl.functions.signatures import FUNCTIONS
from partita.dsl.syntax.lexer import RESERVED_WORDS
from partita.importing.graph import Line, Value
from partita.importing.writing.tree import Scope, Tree, base

# Shorter names for what transformers calls at length.
SHORT = {
    "attn_output": "a",
    "attn_weights": "a",
    "hidden_states": "x",
    "inputs_embeds": "x",
    "key_states": "k",
    "position_embeds": "p",
    "query_states": "q",
    "residual": "x",
    "value_states": "v",
    "hidden_state": "x",
    "input": "x",
    "inputs": "x",
    "out": "y",
    "output": "y",
    "query": "q",
    "value": "v",
}
ATTENDED = ("q", "k", "v")
GENERIC = ("x", "y", "h")  # what says nothing
RESERVED = {*RESERVED_WORDS, "state", "grad", "all", "auto", "and", "or", "not"}


def called(tree: Tree) -> dict[Value, list[str]]:
    """Names that lines of the module assign to values, the best first: those of the innermost `forward` before those of
    the others, and these before those of functions that one calls, as what these return has a better name there.
    """
    names: dict[Value, list[str]] = {}
    lines = {value: own_lines(value) for value in tree.values}
    depth = max(map(len, lines.values()), default=0)
    for forward, level in product((True, False), reversed(range(depth))):
        group: dict[Value, Line] = {}
        last: tuple[tuple[str, int], ...] = ()
        for value, own in lines.items():
            inside = level < len(own) and own[level].forward == forward
            place = tuple((line.file, line.number) for line in own[: level + 1]) if inside else ()
            if place != last:
                _assign(tree, names, group)
                group, last = {}, place
            if inside:
                group[value] = own[level]
        _assign(tree, names, group)
    for several in names.values():
        if several[0] in GENERIC:
            several.sort(key=lambda name: name not in ATTENDED)
    return names


def own_lines(value: Value) -> list[Line]:
    """The lines of the module's source that a value comes from, outermost first, without those of torch."""
    return [line for line in value.place.lines if "/torch/" not in line.file]


def _assign(tree: Tree, names: dict[Value, list[str]], group: Mapping[Value, Line]) -> None:
    """Names of a line are those of values that others read: of several results each has its own."""
    made = [v for v in group if tree.is_output(v) or any(reader not in group for reader in tree.readers(v))]
    wanted = next((line.names for line in group.values()), ())
    if len(wanted) == 1:
        found = dict.fromkeys(made[-1:], wanted[0])
    else:
        indexed = [(value, group[value].index) for value in made]
        found = {value: wanted[index] for value, index in indexed if index is not None}
        several = dict.fromkeys(map(base, made))
        # Else which of them is which is not known: a cell makes its state `c` before `h`, which it returns first.
        if not found and len(wanted) - len(several) < 2 and not _are_made_of_another(several, group):
            found = dict(zip(several, wanted, strict=False))
    for value, name in found.items():
        names.setdefault(base(value), []).append(SHORT.get(name, name))


def formula_name(value: Value) -> str:
    """The name that a line of the module assigns to a constant."""
    names = (line.names[0] for line in reversed(own_lines(value)) if len(line.names) == 1)
    return valid(next(names, "table"))


def _are_made_of_another(values: Iterable[Value], group: Mapping[Value, Line]) -> bool:
    """Whether one of some values is made of another, by lines of one group."""
    several = {*values}
    for value in several:
        waiting, met = list(value.inputs), set(value.inputs)
        while waiting:
            each = waiting.pop()
            if each in several and each is not value:
                return True
            more = [x for x in each.inputs if x in group and x not in met] if each in group else []
            met.update(more)
            waiting += more
    return False


def block_name(kind: str, roots: Sequence[str], model: str) -> str:
    """A block's name, of its class; with that of the model, where the language has the name itself."""
    name = snake(kind, roots)
    return f"{model}_{name.rstrip('_')}" if name.endswith("_") or name in FUNCTIONS else name


def snake(kind: str, roots: Sequence[str] = ()) -> str:
    """A class's name as one of a value: `Qwen3MLP` is `mlp` in a `Qwen3Model`."""
    name = kind
    for root in roots:
        length = 0
        while length < min(len(root), len(kind)) and root[length] == kind[length]:
            length += 1
        while length and not ((root + "A")[length].isupper() and kind[length : length + 1].isupper()):
            length -= 1
        name = min(name, kind[length:], key=len)
    return valid(re.sub(r"(?<=[a-z0-9])(?=[A-Z](?!$))|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower())


def numbered(name: str) -> Iterator[str]:
    """A name, and then with numbers, until one of them is free."""
    yield name
    yield from (f"{name}_{number}" for number in count(2))


def owners(path: str, other: str) -> list[str]:
    """Modules of a path that another one lacks, innermost first, which tell two of the same name apart."""
    theirs = other.split(".")
    own = [each for each in path.split(".")[:-1] if each not in theirs and not each.isdigit()]
    return [valid(each.removesuffix("_model").lower()) for each in reversed(own)]


def valid(name: str) -> str:
    """A name that the language takes."""
    name = re.sub(r"\W", "_", name).strip("_") or "x"
    return f"{name}_" if name in RESERVED or name[0].isdigit() else name


def parameter_name(names: Sequence[str], scope: Scope) -> str:
    """A parameter's name in the body that declares it: the module that has it, or its own where it is not a weight."""
    path = next((name for name in names if name.startswith(f"{scope.path}.")), names[0]).split(".")
    inside = [part for part in scope.path.split(".") if part]
    if path[: len(inside)] == inside:
        path = path[len(inside) :]
    modules, leaf = path[:-1], path[-1]
    words = [part for part in modules if not part.isdigit()]
    name = words[-1] if words else leaf
    if modules and modules[-1].isdigit() and words:
        name = f"{words[-1]}_{modules[-1]}"
    if leaf == "bias" and words:
        return valid(f"{name}_bias")
    if leaf != "weight" and words:
        return valid(leaf if name in leaf else f"{name}_{leaf}")
    return valid(name)
