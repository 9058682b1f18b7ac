"""What a path of a rule, or a name on the command line, refers to: full names, or the ends of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

from partita.compiler.graph import Scope, within, without_iterations
from partita.dsl.advice.report import nearest
from partita.dsl.names.paths import has_ranges, is_end, split_part, without_ranges

MAX_NAMED = 4  # of many names


def chunks(axis: str) -> str:
    """The axis of the chunks into which an operation divides an axis: a layout splits it in its place."""
    return f"{axis}~chunk"


def matches(path: Sequence[str], name: str) -> bool:
    """Whether a rule's path names a scope or tensor: in all iterations, or in those that it says."""
    if not has_ranges(path):
        return is_end(path, without_iterations(name))
    return is_end(without_ranges(path), without_iterations(name)) and in_ranges(path, name)


@lru_cache(maxsize=1 << 16)
def around(path: str) -> tuple[str, ...]:
    """A path and all scopes around it, inner ones first: each in its iteration, then without iterations."""
    parts = path.split(".")
    own = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
    return tuple(scope for each in own for scope in (each, without_iterations(each)))


def is_in(path: str, scope: str) -> bool:
    """Whether a path is that of a scope that a rule names, or inside of it; `scope` may be without iterations."""
    return any(within(f"{each}.", scope) for each in (path, without_iterations(path)))


def in_ranges(path: Sequence[str], name: str) -> bool:
    """Whether a name that ends as a path does, or whose declared name does, is of the iterations that the path says."""
    numbers: list[int | None] = []  # by part of the name without iterations
    for part in name.split("."):
        if part.isdigit():
            numbers[-1] = int(part)
        else:
            numbers.append(None)
    ranges = [split_part(part)[1] for part in path]
    found = zip(ranges, numbers[-len(path) :], strict=True)
    return all(chosen is None or number in chosen for chosen, number in found)


def means(name: str, tensor: str) -> bool:
    """Whether a name, with iteration numbers or without, refers to a tensor. `d(h)` is the cotangent of `h`."""
    if name.startswith("d(") != tensor.startswith("d("):
        return False
    name, tensor = _inner(name), _inner(tensor)
    return is_end(name.split("."), tensor) or matches(name.split("."), tensor)


def end_of(name: str, parts: int = 1) -> str:
    """The last `parts` of a tensor's name, without iteration numbers; `d(h)` for a cotangent."""
    split = without_iterations(_inner(name)).split(".")
    end = ".".join(split[-parts - (split[-1] == "again") :])  # `h.again` is a recomputed `h`
    return f"d({end})" if name.startswith("d(") else end


def instead_of(name: str, tensors: Sequence[str]) -> str:
    """A suggestion for a name that refers to no tensor: another iteration, a tensor inside a block, or a similar
    name.
    """
    inner = without_iterations(_inner(name))
    if iterations := [each for each in tensors if means(without_iterations(name), each)]:
        return f": it has {len(iterations)} iterations, the first is `{iterations[0]}`"
    if inside := [each for each in map(without_iterations, tensors) if f".{inner}." in f".{each}"]:
        return f", but is a part of the model: name a tensor in it, such as `{end_of(inside[0], inner.count('.') + 2)}`"
    near = nearest(without_iterations(name), dict.fromkeys(end_of(each, inner.count(".") + 1) for each in tensors))
    if near:
        return f"; did you mean `{near}`?"
    first = [f"`{each}`" for each in islice(dict.fromkeys(end_of(each, 1) for each in tensors), MAX_NAMED)]
    return f"\n  there are {len(tensors):,}, such as {', '.join(first)}" if first else ""


def _inner(name: str) -> str:
    """A tensor's name; for a cotangent, that of the tensor it belongs to."""
    return name[2:].replace(")", "", 1) if name.startswith("d(") else name


def named_scopes(scopes: Sequence[Scope], path: Sequence[str]) -> list[str]:
    """Paths of the blocks and repeats that a rule's path names: by their full names alone, or else by the ends of these
    and of the names that they are declared with, which all calls of a block have. They are without iterations; of a
    path that says some, each has its own.
    """
    if has_ranges(path):
        named, found = set(named_scopes(scopes, without_ranges(path))), []
        for each in scopes:
            if without_iterations(each.path) in named:
                alone = split_part(path[-1])[1] is None
                own = [each.path] if alone else [f"{each.path}.{i}" for i in range(each.iterations or 0)]
                found += [scope for scope in own if in_ranges(path, scope)]
        return found
    ends = []
    declared = {without_iterations(scope.path): scope.name for scope in scopes}
    if ".".join(path) in declared:
        return [".".join(path)]
    for scope in declared:
        parts = scope.split(".")
        names = [declared.get(".".join(parts[: i + 1]), part) for i, part in enumerate(parts)]
        if is_end(path, scope) or names[-len(path) :] == list(path):
            ends.append(scope)
    return ends
