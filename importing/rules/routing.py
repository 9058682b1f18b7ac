"""Experts, and what ids choose."""

from __future__ import annotations

from partita.importing.factors import Dim, Solver, factors
from partita.importing.graph import Value
from partita.importing.said import Said, call, listed, says
from partita.importing.writing.writer import Writer


@factors("routed")
def _routed(solver: Solver, value: Value) -> list[Dim]:
    args = value.args
    known = dict(zip(args["letters"][1:], solver.dims[args["w"]][1:], strict=True))
    known[args["letters"][0]] = solver.dims[args["ids"]][0]
    solver.unify_letters(known, args["names"], args["x"], value)
    return [known.get(letter, []) for letter in args["out"]]


@says("routed")
def _say_routed(write: Writer, value: Value) -> Said:
    args = value.args
    x, ids = write(args["x"]), write(args["ids"])
    w, (along,) = write.single(write(args["w"]), [0])
    x = x.renamed(
        [
            ids.dims[0] if letter == args["letters"][0] and own else own
            for letter, own in zip(args["names"], x.dims, strict=True)
        ]
    )
    known = {letter: dim for letter, dim in zip(args["names"], x.dims, strict=True) if dim}
    for letter, dim in zip(args["letters"][1:], w.dims[1:], strict=True):
        known.setdefault(letter, dim)
    known[args["letters"][0]] = ids.dims[0]
    over = [name for letter in args["letters"][1:] if letter not in args["out"] for name in known[letter]]
    text = call("routed_dot", x.text, w.text, ids.text, over=listed(over), along=along)
    every = dict.fromkeys((*x.axes, *ids.axes, *w.axes))
    axes = tuple(name for name in every if name not in (*over, along))
    return Said(text, tuple(known.get(letter, ()) for letter in args["out"]), axes)


@factors("top")
def _top(solver: Solver, value: Value) -> list[Dim]:
    dims = list(solver.dims[value.args["x"]])
    key = (value.args["x"], value.args["dim"], value.args["count"])
    if key not in solver.chosen:
        solver.chosen[key] = solver.fresh([value.args["count"]])[0]
    dims[value.args["dim"]] = solver.chosen[key]
    return dims


@says("top")
def _say_top(write: Writer, value: Value) -> Said:
    """Of values and ids, which are bound together."""
    raise value.refuse("`topk` whose results are not bound")


@factors("one_hot")
def _one_hot(solver: Solver, value: Value) -> list[Dim]:
    return [*solver.dims[value.args["ids"]], solver.fresh(value.shape[-1:])[0]]


@says("one_hot")
def _say_one_hot(write: Writer, value: Value) -> Said:
    ids = write(value.args["ids"])
    names = write.apart(write.names_of(value)[-1], {name for own in ids.dims for name in own})
    axis = write.merged_name(names)
    made = Said(call("one_hot", ids.text, axis), (*ids.dims, (axis,)), (*ids.axes, axis))
    return write.split(made, value.rank - 1, names)


@factors("take")
def _take(solver: Solver, value: Value) -> list[Dim]:
    dims, at = list(solver.dims[value.args["x"]]), value.args["dim"]
    return [*dims[:at], *solver.dims[value.args["ids"]], *dims[at + 1 :]]


@says("take")
def _say_take(write: Writer, value: Value) -> Said:
    at = value.args["dim"]
    x, (along,) = write.single(write(value.args["x"]), [at])
    ids = write(value.args["ids"])
    ids = ids.renamed([write.apart(own, x.axes) for own in ids.dims])
    axes = (*(name for name in x.axes if name != along), *ids.axes)
    return Said(
        call("gather", x.text, ids.text, along=along), (*x.dims[:at], *ids.dims, *x.dims[at + 1 :]), axes, dtype=x.dtype
    )


@factors("pick")
def _pick(solver: Solver, value: Value) -> list[Dim]:
    """Elements that ids choose along a dimension, at the same place of all others."""
    x, ids, at = value.args["x"], value.args["ids"], value.args["dim"]
    dims: list[Dim] = []
    for i, (own, other) in enumerate(zip(solver.dims[ids], solver.dims[x], strict=True)):
        if i != at and ids.shape[i] != 1 and x.shape[i] != 1:
            solver.unify(own, other, value)
        dims.append(own if i == at or ids.shape[i] != 1 else other)
    return dims


@says("pick")
def _say_pick(write: Writer, value: Value) -> Said:
    at = value.args["dim"]
    x, (along,) = write.single(write(value.args["x"]), [at])
    ids = write(value.args["ids"])
    ids = ids.renamed([x.dims[i] if i != at and own and x.dims[i] else own for i, own in enumerate(ids.dims)])
    if along in ids.axes:  # ids of as many places as there are have its name
        second = write.second(along)
        x = x.renamed([(second,) if i == at else names for i, names in enumerate(x.dims)])
        along = second
    axes = tuple(dict.fromkeys((*ids.axes, *(name for name in x.axes if name != along))))
    dims = tuple(names if i == at or names else x.dims[i] for i, names in enumerate(ids.dims))
    return Said(call("gather", x.text, ids.text, along=along), dims, axes, dtype=x.dtype)


@factors("sum_by")
def _sum_by(solver: Solver, value: Value) -> list[Dim]:
    x, ids, dim = value.args["x"], value.args["ids"], value.args["dim"]
    dims = list(solver.dims[x])
    solver.unify(dims[dim], solver.dims[ids][0], value)
    dims[dim] = solver.fresh([value.shape[dim]])[0]
    return dims


@says("sum_by")
def _say_sum_by(write: Writer, value: Value) -> Said:
    dim = value.args["dim"]
    x = write(value.args["x"])
    if x.dtype == "number":
        x = write.filled(x, value.args["x"])
    x, (old,) = write.single(x, [dim])
    x = write.expanded(x, [name for name in (old,) if name not in x.axes])
    ids, _ = write.single(write(value.args["ids"]), [0])
    ids = write.expanded(ids.renamed([(old,)]), [name for name in (old,) if name not in ids.axes])
    others = {name for i, own in enumerate(x.dims) if i != dim for name in own}
    names = write.apart(write.names_of(value)[dim], others)
    new = write.merged_name(names)
    new = write.second(old) if new == old else new  # rows that are summed into as many
    axes = tuple(new if name == old else name for name in x.axes)
    dims = tuple((new,) if i == dim else own for i, own in enumerate(x.dims))
    return write.split(
        Said(call(value.args.get("function", "sum_by"), x.text, ids.text, f"{old} -> {new}"), dims, axes), dim, names
    )
