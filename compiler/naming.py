"""Which tensors a name means: a full one or the end of one, with or without turn numbers, as rules take it."""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.graph import without_turns
from partita.dsl.report import nearest


def means(name: str, tensor: str) -> bool:
    """Whether a name means a tensor. `d(h)` is the cotangent of `h`."""
    if name.startswith("d(") != tensor.startswith("d("):
        return False
    name, tensor = _inner(name), _inner(tensor)
    return any(each == name or each.endswith("." + name) for each in (tensor, without_turns(tensor)))


def end_of(name: str, parts: int = 1) -> str:
    """The last parts of a tensor's name, turns aside; `d(h)` of a cotangent."""
    split = without_turns(_inner(name)).split(".")
    end = ".".join(split[-parts - (split[-1] == "again") :])  # what is computed again has its name by what it was
    return f"d({end})" if name.startswith("d(") else end


def instead_of(name: str, tensors: Sequence[str]) -> str:
    """What else might be meant by the name of no tensor: another turn, a tensor in a block, or a name that is near."""
    inner = without_turns(_inner(name))
    if turns := [each for each in tensors if means(without_turns(name), each)]:
        return f": it has {len(turns)} iterations, the first is `{turns[0]}`"
    if inside := [each for each in map(without_turns, tensors) if f".{inner}." in f".{each}"]:
        return f", but is a part of the model: name a tensor in it, such as `{end_of(inside[0], inner.count('.') + 2)}`"
    near = nearest(without_turns(name), dict.fromkeys(end_of(each, inner.count(".") + 1) for each in tensors))
    return f"; did you mean `{near}`?" if near else ""


def _inner(name: str) -> str:
    """A tensor's name, or that of the one whose cotangent it is."""
    return name[2:].replace(")", "", 1) if name.startswith("d(") else name
