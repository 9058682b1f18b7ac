"""Views, casts, and parts of dimensions."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from partita.importing.factors import Dim, Factor, Solver, factors
from partita.importing.graph import Value
from partita.importing.said import Said, call, says
from partita.importing.writing.writer import Writer


@factors("view")
def _view(solver: Solver, value: Value) -> list[Dim]:
    return solver.viewed(value, value.args["x"])


@says("view")
def _say_view(write: Writer, value: Value) -> Said:
    """Its operand; names are grouped anew, or, where they do not line up, split from one axis anew."""
    x = write(value.args["x"])
    for before, behind in reversed(write.solver.regrouped[value]):
        names = [name for dim in x.dims[before] for name in dim]
        x = evolve(x, dims=(*x.dims[: before.start], tuple(names), *x.dims[before.stop :]))
        x, _ = write.single(x, [before.start])
        x = write.split(x, before.start, [name for dim in write.names_of(value)[behind] for name in dim])
    flat = [name for dim in x.dims for name in dim]
    dims = []
    for axes in write.solver.axes(value):
        dims.append(tuple(flat[: len(axes)]))
        flat = flat[len(axes) :]
    assert not flat, value
    return evolve(x, dims=tuple(dims))


@factors("enlarge")
def _enlarge(solver: Solver, value: Value) -> list[Dim]:
    """Larger dimensions, which are axes of their own: places of an image are none of a smaller one's."""
    dims = solver.dims[value.args["x"]]
    pairs = zip(value.shape[2:], dims[2::2], dims[3::2], strict=True)
    return [*dims[:2], *(solver.fresh([size])[0] if own and copies else own or copies for size, own, copies in pairs)]


@says("enlarge")
def _say_enlarge(write: Writer, value: Value) -> Said:
    x, names = write(value.args["x"]), write.names_of(value)
    x = write.expanded(x, [name for dim in x.dims[2:] for name in dim if name not in x.axes])
    dims = list(x.dims[:2])
    for i, new in enumerate(names[2:]):
        old = (*x.dims[2 * i + 2], *x.dims[2 * i + 3])
        if x.dims[2 * i + 2] and x.dims[2 * i + 3]:
            axes = tuple(new[0] if name == old[0] else name for name in x.axes if name not in old[1:])
            x = evolve(x, text=call("merge", x.text, f"[{', '.join(old)}] -> {new[0]}"), axes=axes, binds=0)
            old = new
        dims.append(old)
    return evolve(x, dims=tuple(dims))


@factors("permute")
def _permute(solver: Solver, value: Value) -> list[Dim]:
    return [solver.dims[value.args["x"]][dim] for dim in value.args["order"]]


@says("permute")
def _say_permute(write: Writer, value: Value) -> Said:
    x = write(value.args["x"])
    return evolve(x, dims=tuple(x.dims[dim] for dim in value.args["order"]))


@factors("expand")
def _expand(solver: Solver, value: Value) -> list[Dim]:
    x = value.args["x"]
    dims = solver.dims[x]
    lacks = value.rank - x.rank
    made: list[Dim] = []
    for i, size in enumerate(value.shape):
        if i >= lacks and x.shape[i - lacks] == size:
            made.append(dims[i - lacks])
        else:
            made += solver.fresh([size])
    return made


@says("expand")
def _say_expand(write: Writer, value: Value) -> Said:
    """Its operand, which has fewer axes."""
    x = write(value.args["x"])
    names, lacks = write.names_of(value), value.rank - value.args["x"].rank
    own = value.args["x"].shape
    dims = [
        x.dims[i - lacks] if i >= lacks and own[i - lacks] == value.shape[i] else names[i] for i in range(value.rank)
    ]
    return evolve(x, dims=tuple(dims))


@factors("cast", "stop_gradient")
def _cast(solver: Solver, value: Value) -> list[Dim]:
    return solver.dims[value.args["x"]]


@says("cast")
def _say_cast(write: Writer, value: Value) -> Said:
    x = write(value.args["x"])
    wanted = write.dtype_of(value)
    return x if x.dtype == wanted else evolve(x, text=call("cast", x.text, wanted), binds=0, dtype=wanted)


@says("stop_gradient")
def _say_stop(write: Writer, value: Value) -> Said:
    x = write(value.args["x"])
    return evolve(x, text=call("stop_gradient", x.text), binds=0)


@factors("part")
def _part(solver: Solver, value: Value) -> list[Dim]:
    """A part of a weight: an axis of its own."""
    dims = list(solver.dims[value.args["of"]])
    dims[value.args["dim"]] = solver.fresh([value.shape[value.args["dim"]]])[0]
    return dims


@factors("slice")
def _slice(solver: Solver, value: Value) -> list[Dim]:
    dims = list(solver.dims[value.args["x"]])
    dims[value.args["dim"]] = solver.fresh([value.shape[value.args["dim"]]])[0]
    return dims


@says("slice")
def _say_slice(write: Writer, value: Value) -> Said:
    dim, start = value.args["dim"], value.args["start"]
    x, (old,) = write.single(write(value.args["x"]), [dim])
    size = value.shape[dim]
    if old not in x.axes:  # repeated along the dimension: so is every part of it
        return evolve(x, dims=tuple(write.names_of(value)[i] if i == dim else each for i, each in enumerate(x.dims)))
    if size == 1:
        taken = call("gather", x.text, _place(write, value, old), along=old)
        axes = tuple(name for name in x.axes if name != old)
        return Said(taken, tuple(() if i == dim else each for i, each in enumerate(x.dims)), axes, dtype=x.dtype)
    others = {name for i, own in enumerate(x.dims) if i != dim for name in own}
    names = write.apart(write.names_of(value)[dim], others)
    new = write.merged_name(names)
    text = call("slice", x.text, f"{old} -> {new}", start=_place(write, value, old) if start else None)
    axes = tuple(new if name == old else name for name in x.axes)
    made = Said(text, tuple((new,) if i == dim else each for i, each in enumerate(x.dims)), axes, dtype=x.dtype)
    return write.split(made, dim, names)


def _place(write: Writer, value: Value, axis: str) -> str:
    """Where a slice begins; from the end, if the module counts from there."""
    back, follows = value.args["back"], value.args.get("follows")
    return f"size({axis}) - {-back}" if back else write(follows or value.args["start"]).text


@factors("select")
def _select(solver: Solver, value: Value) -> list[Dim]:
    dims = list(solver.dims[value.args["x"]])
    del dims[value.args["dim"]]
    return dims


@says("select")
def _say_select(write: Writer, value: Value) -> Said:
    dim = value.args["dim"]
    x, (old,) = write.single(write(value.args["x"]), [dim])
    dims = tuple(each for i, each in enumerate(x.dims) if i != dim)
    if old not in x.axes:
        return evolve(x, dims=dims)
    axes = tuple(name for name in x.axes if name != old)
    index = f"size({old}) - {-value.args['back']}" if value.args["back"] else value.args["index"]
    return Said(call("gather", x.text, index, along=old), dims, axes, dtype=x.dtype)


@factors("concat")
def _concat(solver: Solver, value: Value) -> list[Dim]:
    xs, dim = value.args["xs"], value.args["dim"]
    dims = list(solver.dims[xs[0]])
    for i in range(value.rank):
        if i != dim:
            wide = [solver.dims[x][i] for x in xs if x.shape[i] != 1]
            for each in wide[1:]:
                solver.unify(wide[0], each, value)
            dims[i] = wide[0] if wide else []
    # A part of size 1 is an axis of its own, too.
    solver.pieces[value] = [solver.dims[x][dim] or [Factor(1)] for x in xs]
    dims[dim] = solver.fresh([value.shape[dim]])[0]
    return dims


@says("concat")
def _say_concat(write: Writer, value: Value) -> Said:
    dim, xs = value.args["dim"], value.args["xs"]
    wide, pieces = [], []
    whole = write.dtype_of(value) == "i64"
    said = [write(x) for x in xs]
    wanted = [next((x.dims[i] for x in said if x.dims[i] and i != dim), ()) for i in range(value.rank)]
    taken = {name for names in wanted for name in names}
    for k, x in enumerate(said):
        renamed = [wanted[i] if names and i != dim else names for i, names in enumerate(x.dims)]
        renamed[dim] = write.apart(renamed[dim], taken)
        said[k] = write.parameter_as(xs[k], x, renamed)
    others = [name for x in said for i, names in enumerate(x.dims) if i != dim for name in names if name in x.axes]
    for own, piece in zip(said, write.pieces_of(value), strict=True):
        one = own
        if own.dims[dim]:
            one, (name,) = write.single(own, [dim])
        else:
            name = write.merged_name(piece)
        missing = [each for each in dict.fromkeys([*others, name]) if each not in one.axes]
        wide.append(write.expanded(one, missing))
        pieces.append(name)
    if whole:
        parts = [call("cast", each.text, "i64") if each.dtype == "f32" else each.text for each in wide]
    else:
        wide = write.of_one_dtype(wide)
        parts = [each.text for each in wide]
    names = write.apart(write.names_of(value)[dim], others)
    new = write.merged_name(names)
    dims = tuple((new,) if i == dim else names for i, names in enumerate(wanted))
    axes = tuple(dict.fromkeys([*others, new]))
    order = [name for each in dims for name in each if name in axes]
    made = Said(
        call("concat", *parts, f"[{', '.join(pieces)}] -> {new}"),
        dims,
        tuple(order),
        dtype="i64" if whole else _dtype(wide),
    )
    return write.split(made, dim, names)


def _dtype(said: Sequence[Said]) -> str:
    return next((each.dtype for each in said if each.dtype != "number"), "f32")


@factors("roll")
def _roll(solver: Solver, value: Value) -> list[Dim]:
    return solver.dims[value.args["x"]]


@says("roll")
def _say_roll(write: Writer, value: Value) -> Said:
    x, (over,) = write.single(write(value.args["x"]), [value.args["dim"]])
    made = evolve(x, text=call("roll", x.text, over=over, by=write(value.args["by"]).text), binds=0)
    return write.split(made, value.args["dim"], write.names_of(value)[value.args["dim"]])
