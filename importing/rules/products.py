"""Products and reductions."""

from __future__ import annotations

from attrs import evolve

from partita.importing.factors import Dim, Solver, factors
from partita.importing.graph import Value
from partita.importing.said import CALL, SUM, Said, call, listed, number_text, says
from partita.importing.writing.writer import Writer


@factors("einsum")
def _einsum(solver: Solver, value: Value) -> list[Dim]:
    known: dict[str, Dim] = {}
    for names, x in zip(value.args["letters"], value.args["xs"], strict=True):
        solver.unify_letters(known, names, x, value)
    return [known.get(letter, []) for letter in value.args["out"]]


@says("einsum")
def _say_einsum(write: Writer, value: Value) -> Said:
    xs, letters, out = value.args["xs"], value.args["letters"], value.args["out"]
    if len(xs) == 1:
        x = write(xs[0])
        gone = [name for letter, names in zip(letters[0], x.dims, strict=True) if letter not in out for name in names]
        dims = tuple(x.dims[letters[0].index(letter)] for letter in out)
        axes = tuple(name for name in x.axes if name not in gone)
        return Said(call("sum", x.text, over=listed(gone)), dims, axes) if gone else evolve(x, dims=dims)
    one, two = (write(x) for x in xs)
    known = {letter: names for letter, names in zip(letters[0], one.dims, strict=True) if names}
    wanted, back, taken = [], [], {name for names in known.values() for name in names}
    for letter, names in zip(letters[1], two.dims, strict=True):
        if letter in known and names:
            wanted.append(known[letter])
            continue
        # An axis that both have, without being the same: the second has another name.
        fresh = write.apart(names, taken)
        wanted.append(fresh)
        if fresh != names:
            back.append((letter, fresh, names))
        if names:
            known[letter] = fresh
    two = write.parameter_as(xs[1], two, wanted)
    over = [name for letter in known if letter not in out for name in known[letter]]
    one, two = write.of_one_dtype([one, two])
    one, two = (write.expanded(x, [name for name in over if name not in x.axes]) for x in (one, two))
    axes = tuple(dict.fromkeys(name for name in (*one.axes, *two.axes) if name not in over))
    dims_made = tuple(known.get(letter, ()) for letter in out)
    made = Said(call("dot", one.text, two.text, over=listed(over)), dims_made, axes)
    if not over:
        made = write.times(one, two, dims_made)
    made = evolve(made, dtype=one.dtype)
    # The axis that is gone by now gives its name back.
    for letter, fresh, names in back:
        given = write.apart(names, {*made.axes} - {*fresh})
        if letter in out and given != fresh:
            made = made.renamed([given if each == fresh else each for each in made.dims])
    return made


@factors("reduce")
def _reduce(solver: Solver, value: Value) -> list[Dim]:
    return [[] if i in value.args["dims"] else dim for i, dim in enumerate(solver.dims[value.args["x"]])]


@says("reduce")
def _say_reduce(write: Writer, value: Value) -> Said:
    x, function, dims = write(value.args["x"]), value.args["function"], value.args["dims"]
    over = [name for dim in dims for name in x.dims[dim]]
    repeated = [name for name in over if name not in x.axes]
    over = [name for name in over if name in x.axes]
    axes = tuple(name for name in x.axes if name not in over)
    kept = tuple(() if i in dims else names for i, names in enumerate(x.dims))
    if repeated and function == "sum":
        x = write.expanded(x, repeated)
        over = [*over, *repeated]
    if not over:
        return evolve(x, dims=kept)
    everything = not axes
    return Said(call(function, x.text, over=None if everything else listed(over)), kept, axes, dtype=x.dtype)


@factors("degrees")
def _degrees(solver: Solver, value: Value) -> list[Dim]:
    return []


@says("degrees")
def _say_degrees(write: Writer, value: Value) -> Said:
    """How many numbers a variance is of, less a correction."""
    dims = write.names_of(value.args["x"])
    sizes = [f"size({name})" for dim in value.args["dims"] for name in dims[dim]]
    return Said(f"{' * '.join(sizes)} - {number_text(value.args['correction'])}", binds=SUM, dtype="number")


@factors("along")
def _along(solver: Solver, value: Value) -> list[Dim]:
    return solver.dims[value.args["x"]]


@says("along")
def _say_along(write: Writer, value: Value) -> Said:
    x, dim = write(value.args["x"]), value.args["dim"]
    if value.args["function"] in ("softmax", "log_softmax"):
        return evolve(x, text=call(value.args["function"], x.text, over=listed(x.dims[dim])), binds=0)
    one, (over,) = write.single(x, [dim])
    made = evolve(one, text=call(value.args["function"], one.text, over=over), binds=0)
    return write.split(made, dim, x.dims[dim])


@factors("arg_max")
def _arg_max(solver: Solver, value: Value) -> list[Dim]:
    return [[] if i == value.args["dim"] else dim for i, dim in enumerate(solver.dims[value.args["x"]])]


@says("arg_max")
def _say_arg_max(write: Writer, value: Value) -> Said:
    dim = value.args["dim"]
    x, (over,) = write.single(write(value.args["x"]), [dim])
    kept = tuple(() if i == dim else names for i, names in enumerate(x.dims))
    return Said(call("arg_max", x.text, over=over), kept, tuple(n for n in x.axes if n != over), dtype="i64")


@factors("linear_scan")
def _linear_scan(solver: Solver, value: Value) -> list[Dim]:
    return solver.broadcast(value, [value.args["a"], value.args["x"]])


@says("linear_scan")
def _say_linear_scan(write: Writer, value: Value) -> Said:
    dim = value.args["dim"]
    (a, x), dims = write.aligned(value, [value.args["a"], value.args["x"]])
    x, (over,) = write.single(evolve(x, dims=dims), [dim])
    a, _ = write.single(a, [dim])
    x = write.expanded(x, [name for name in a.axes if name not in x.axes])
    a = write.expanded(a, [name for name in (over,) if name not in a.axes])
    return write.split(evolve(x, text=call("linear_scan", a.text, x.text, over=over), binds=CALL), dim, dims[dim])
