"""Products: all are sums over letters that name dimensions."""

from __future__ import annotations

from string import ascii_lowercase

import torch

from partita.importing.graph import Value, number
from partita.importing.normal.arguments import Arguments, aten
from partita.importing.normal.pointwise import pointwise


def einsum(value: Value, letters: list[str], out: str, *xs: Value) -> Value:
    """A product at a value's place. A dimension of size 1 is repeated along that of the other operand."""
    sizes: dict[str, int] = {}
    for names, x in zip(letters, xs, strict=True):
        for letter, size in zip(names, x.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    if any(number(x) == 0 for x in xs):
        return value.make_constant(torch.zeros([sizes[letter] for letter in out], dtype=torch.float64))
    return value.make("einsum", [sizes[letter] for letter in out], xs=list(xs), letters=letters, out=out)


@aten("linear.default")
def _linear(value: Value, a: Arguments) -> Value:
    x, weight, bias = a["input"], a["weight"], a["bias"]
    names = ascii_lowercase[: x.rank]
    made = einsum(value, [names, f"z{names[-1]}"], f"{names[:-1]}z", x, weight)
    return made if bias is None else pointwise(value, "add", made, bias)


@aten("addmm.default", "baddbmm.default")
def _addmm(value: Value, a: Arguments) -> Value:
    bias, x, y = (
        a["self"],
        a["mat1" if "mat1" in value.args else "batch1"],
        a["mat2" if "mat2" in value.args else "batch2"],
    )
    alpha, beta = a["alpha"], a["beta"]
    made = matmul(value, x, y)
    made = made if alpha == 1 else pointwise(value, "multiply", made, alpha)
    if beta == 0:
        return made
    return pointwise(value, "add", made, bias if beta == 1 else pointwise(bias, "multiply", bias, beta))


@aten("mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default")
def _matmul(value: Value, a: Arguments) -> Value:
    names = {"mm.default": "mat2", "bmm.default": "mat2", "mv.default": "vec", "dot.default": "tensor"}
    return matmul(value, a["self"], a[names.get(value.op, "other")])


def matmul(value: Value, x: Value, y: Value) -> Value:
    """The product of matrices, of which there may be many."""
    batch = ascii_lowercase[: max(x.rank, y.rank) - 2] if max(x.rank, y.rank) > 2 else ""
    left = (batch[len(batch) - (x.rank - 2) :] if x.rank > 2 else "") + ("xy" if x.rank > 1 else "y")
    right = (batch[len(batch) - (y.rank - 2) :] if y.rank > 2 else "") + ("yz" if y.rank > 1 else "y")
    out = batch + ("x" if x.rank > 1 else "") + ("z" if y.rank > 1 else "")
    return einsum(value, [left, right], out, x, y)


@aten("einsum.default")
def _einsum(value: Value, a: Arguments) -> Value:
    a.ignored("path")
    inputs, arrow, out = a["equation"].replace(" ", "").partition("->")
    xs, letters = a["tensors"], inputs.split(",")
    if "..." in inputs:
        free = [letter for letter in ascii_lowercase if letter not in inputs][: max(x.rank for x in xs)]
        most = max(x.rank - len(names) + 3 for names, x in zip(letters, xs, strict=True) if "..." in names)
        rest = "".join(free[:most])
        letters = [
            names.replace("...", rest[len(rest) - (x.rank - len(names) + 3) :])
            for names, x in zip(letters, xs, strict=True)
        ]
        out = out.replace("...", rest)
    if not arrow:
        out = "".join(sorted(c for c in set("".join(letters)) if "".join(letters).count(c) == 1))
    if any(len(set(names)) != len(names) for names in letters):
        raise value.refuse("a diagonal: `einsum` with a letter twice")
    while len(xs) > 2:  # two at a time, from the left
        kept = "".join(
            c for c in dict.fromkeys(letters[0] + letters[1]) if c in out or any(c in rest for rest in letters[2:])
        )
        xs = [einsum(value, letters[:2], kept, *xs[:2]), *xs[2:]]
        letters = [kept, *letters[2:]]
    return einsum(value, letters, out, *xs)


@aten("outer.default")
def _outer(value: Value, a: Arguments) -> Value:
    return einsum(value, ["x", "y"], "xy", a["self"], a["vec2"])
