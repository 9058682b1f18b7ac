"""Names that the paths of rules may use: a model's blocks, repeats, parameters and values; and what a path names.

A checked path is a tuple of names. One of a repeat may be followed by iterations: `("layer[0..7]", "attention")`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache

from attrs import frozen

from partita.dsl import spec
from partita.dsl.advice.report import suggestion
from partita.dsl.check import constants
from partita.dsl.check.constants import Lookup
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax import tree
from partita.dsl.syntax.units import PLAIN
from partita.dsl.syntax.unparse import expression_text

MOST_SHOWN = 12  # parts of a model
# The parameters of an adapter, in the scope of what they are beside.
ADAPTER = DOWN, UP, MAGNITUDE = "lora_a", "lora_b", "magnitude"
ADAPTER_ENDS = tuple(f".{each}" for each in ADAPTER)
PART = re.compile(r"(\w+)\[(\d+)(?:\.\.(\d+))?\]")


def adapters_in(names: Collection[str]) -> set[str]:
    """The parameters that are an adapter's: they stand within what has its first matrix."""
    first = {name.rpartition(".")[0] for name in names if name.endswith(f".{DOWN}")}
    return {name for name in names if name.rpartition(".")[0] in first and name.endswith(ADAPTER_ENDS)}


@cache
def split_part(part: str) -> tuple[str, range | None]:
    """The name in a part of a path, and the iterations that follow it, if any."""
    found = PART.fullmatch(part)
    if found is None:
        return part, None
    name, first, last = found.groups()
    return name, range(int(first), int(last or first) + 1)


def joined_part(name: str, iterations: range | None) -> str:
    """A part of a path, as `split_part` reads it."""
    if iterations is None:
        return name
    last = f"..{iterations[-1]}" if len(iterations) > 1 else ""
    return f"{name}[{iterations[0]}{last}]"


def path_of(text: str) -> tuple[str, ...]:
    """The path that is written so."""
    return tuple(re.findall(r"\w+(?:\[[\d.]+\])?", text))


def without_ranges(path: Sequence[str]) -> tuple[str, ...]:
    """A path that names all iterations."""
    return tuple(split_part(part)[0] for part in path)


def has_ranges(path: Sequence[str]) -> bool:
    """Whether a path names some iterations alone."""
    return any(part.endswith("]") for part in path)


def is_end(path: Sequence[str], name: str) -> bool:
    """Whether a path is the end of a name, whole parts of it."""
    return name.split(".")[-len(path) :] == list(path)


@frozen
class ModelNames:
    """The names of one model."""

    model: str
    names: frozenset[str]
    parts: frozenset[str]
    repeats: Mapping[str, int]  # with their iterations; of several of a name the most
    losses: tuple[str, ...]

    def check(self, path: tree.Path, others: Iterable[str] = ()) -> None:
        """Refuse (E0317) a path of which a part is no name of the model; it may be meant as one of `others`."""
        for part in path.parts:
            if part.text not in self.names:
                message = f"model `{self.model}` has no part called `{part.text}`"
                help = suggestion(part.text, [*self.names, *others]) or self.some(self.parts)
                raise refuse("E0317", message, part.span, help=help)
        for part, iterations in zip(path.parts, path.iterations, strict=False):
            if iterations is not None and part.text not in self.repeats:
                message = f"`{part.text}` is no repeat, and has no iterations"
                raise refuse("E0317", message, iterations.span, help=self.some(self.repeats, "repeats:"))

    @staticmethod
    def some(names: Collection[str], they: str = "it has:") -> str:
        """Help that names the first of them."""
        more = ", …" if len(names) > MOST_SHOWN else ""
        some = ", ".join(f"`{name}`" for name in sorted(names)[:MOST_SHOWN])
        return f"{they} {some}{more}" if names else f"{they.removesuffix(':')} none"


def checked_path(path: tree.Path, number: Lookup, known: ModelNames | None) -> tuple[str, ...]:
    """A path as rules have it, of the names of a model if these are `known`. Raises Refused (E0317)."""
    parts = []
    for part, written in zip(path.parts, path.iterations or (None,) * len(path.parts), strict=True):
        iterations = None
        if written is not None:
            first = _iteration(written.first, number)
            iterations = range(first, (first if written.last is None else _iteration(written.last, number)) + 1)
            count = known.repeats[part.text] if known is not None and part.text in known.repeats else None
            if not iterations or (count is not None and iterations[-1] >= count):
                message = f"`{part.text}{written.span.text}` is no iteration of `{part.text}`"
                help = f"it has {count}, 0 to {count - 1}" if count is not None else "the first is 0"
                if not iterations:
                    help = f"from the smaller to the larger: `{part.text}[{iterations.stop - 1}..{iterations.start}]`"
                raise refuse("E0317", message, written.span, help=help)
        parts.append(joined_part(part.text, iterations))
    return tuple(parts)


def _iteration(written: tree.Expression, number: Lookup) -> int:
    quantity = constants.evaluate(written, number)
    if quantity.dimension != PLAIN or quantity.value != int(quantity.value) or quantity.value < 0:
        message = f"`{expression_text(written)}` is not the number of an iteration: these count from 0"
        raise refuse("E0317", message, written.span)
    return int(quantity.value)


def known_paths(model: spec.Model) -> ModelNames:
    """Collect the names of a model."""
    names, parts, repeats = {model.name, *model.body.inputs}, set[str](), dict[str, int]()
    for step in spec.steps(model.body):
        match step:
            case spec.CallBlock():
                names |= {*step.body.inputs}
                parts |= {step.scope, step.block}
            case spec.Repeat():
                names |= {*step.names}
                for name in (step.scope, step.name):
                    repeats[name] = max(repeats.get(name, 0), step.count)
            case spec.Scan():
                names |= {*step.names}
            case spec.Parameter():
                parts.add(step.name)
            case spec.Sample():
                names.add(step.name)
            case spec.Apply() if step.name is not None:
                names.add(step.name)
    parts |= repeats.keys()
    names |= {*ADAPTER} if model.adapters else set()
    return ModelNames(model.name, frozenset(names | parts), frozenset(parts), repeats, model.losses)
