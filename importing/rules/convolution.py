"""Convolutions and windows."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from partita.importing.axes import lie_side_by_side
from partita.importing.factors import Dim, Solver, factors
from partita.importing.graph import Value
from partita.importing.said import Said, call, listed, number_text, says
from partita.importing.writing.writer import Writer


@factors("conv")
def _conv(solver: Solver, value: Value) -> list[Dim]:
    x, kernel = solver.dims[value.args["x"]], solver.dims[value.args["kernel"]]
    groups, out = value.args["groups"], value.shape[1]
    if groups == 1:
        solver.unify(x[1], kernel[1], value)
    else:
        (group,), (each,) = solver.fresh([groups]), solver.fresh([out // groups])
        solver.unify(x[1], [*group, *kernel[1]], value)
        solver.unify(kernel[0], [*group, *each], value)
    return [x[0], kernel[0], *_places(solver, value, x[2:], value.args["x"].shape[2:])]


def _places(solver: Solver, value: Value, dims: Sequence[Dim], sizes: Sequence[int]) -> list[Dim]:
    """The places at which a window stands: those of the image where it stands at each."""
    made = []
    for i, (dim, size) in enumerate(zip(dims, sizes, strict=True)):
        wide = value.shape[2 + i]
        made.append(dim if wide == size else solver.fresh([wide])[0])
    return made


@says("conv")
def _say_conv(write: Writer, value: Value) -> Said:
    places = list(range(2, value.rank))
    args = value.args
    x = write(args["x"])
    x = evolve(x, dims=tuple(own or usual for own, usual in zip(x.dims, write.names_of(args["x"]), strict=True)))
    x = write.expanded(x, [name for names in x.dims[1:] for name in names if name not in x.axes])
    x, old = write.single(x, places)
    kernel = write(args["kernel"])
    groups, summed = x.dims[1], x.dims[1]
    if args["groups"] == 1:
        groups = ()
    else:
        size, count = 1, 0
        while size < args["groups"]:
            size, count = size * write.size_of(groups[count]), count + 1
        groups, summed = groups[:count], groups[count:]
    taken = {name for names in x.dims for name in names}
    rest = write.names_of(args["kernel"])[0][len(groups) :]
    out = (*groups, *write.apart(rest, taken))
    sides = [own or (write.unit(i),) for i, own in enumerate(kernel.dims[2:])]
    kernel = write.parameter_as(args["kernel"], kernel, [out, summed, *sides])
    kernel = write.expanded(kernel, [name for name in (*groups, *summed) if name not in kernel.axes])
    kernel, window = write.single(kernel, places)
    new = write.axes_named(write.names_of(value)[2:], old)
    options = {
        "over": listed(summed) if summed else None,
        "groups": listed(groups) if groups else None,
        "stride": listed([f"size({name})" for name in window]) if lie_side_by_side(value) else _same(args["stride"], 1),
        "padding": _padding(args["padding"]),
        "dilation": _same(args["dilation"], 1),
        "size": None if _first(kernel, x) == window else f"[{', '.join(window)}]",
    }
    arrow = f"{listed(old)} -> {listed(new)}"
    names = write.names_of(value)
    axes = (*(name for name in x.axes if name not in (*old, *x.dims[1])), *out, *new)
    made = Said(call("conv", x.text, kernel.text, arrow, **options), (x.dims[0], out, *((name,) for name in new)), axes)
    for dim, own in enumerate(names[2:], 2):
        made = write.split(made, dim, own)
    # Channels that are gone by now give their name back.
    return made if out == names[1] else made.renamed([made.dims[0], names[1], *made.dims[2:]])


def _first(kernel: Said, image: Said) -> list[str]:
    """The axes of a kernel that are those of its window, if nothing says otherwise."""
    own = [name for name in kernel.axes if name not in image.axes]
    return own[: len(kernel.dims) - 2]


def _same(numbers: Sequence[int], usual: int) -> str | None:
    if all(each == usual for each in numbers):
        return None
    return number_text(numbers[0]) if len({*numbers}) == 1 else f"[{', '.join(map(number_text, numbers))}]"


def _padding(around: Sequence[tuple[int, int]]) -> str | None:
    """What is added before and after; a number, where that is the same."""
    if all(before == after for before, after in around):
        return _same([before for before, _ in around], 0)
    return f"[{', '.join(f'[{before}, {after}]' for before, after in around)}]"


@factors("patches")
def _patches(solver: Solver, value: Value) -> list[Dim]:
    x, count = solver.dims[value.args["x"]], len(value.args["size"])
    first = value.args["x"].rank - count
    made = list(x[:first])
    for i, dim in enumerate(x[first:], first):
        made.append(dim if value.shape[i] == value.args["x"].shape[i] else solver.fresh([value.shape[i]])[0])
    return [*made, *solver.fresh(value.args["size"])]


@says("patches")
def _say_patches(write: Writer, value: Value) -> Said:
    args, count = value.args, len(value.args["size"])
    first = args["x"].rank - count
    x, old = write.single(write(args["x"]), list(range(first, args["x"].rank)))
    names = write.names_of(value)
    new = write.axes_named(names[first : first + count], old)
    window = [each[0] for each in names[first + count :]]
    dilation = args["dilation"] if isinstance(args["dilation"], list) else [args["dilation"]]
    options = {
        "size": f"[{', '.join(window)}]",
        "stride": _same(args["stride"], 1),
        "padding": _padding(args["padding"]),
        "dilation": _same(dilation, 1),
        "fill": number_text(args["fill"]) if args["fill"] and any(map(any, args["padding"])) else None,
    }
    arrow = f"{listed(old)} -> {listed(new)}"
    dims = (*x.dims[:first], *((name,) for name in (*new, *window)))
    axes = (*(name for name in x.axes if name not in old), *new, *window)
    made = Said(call("patches", x.text, arrow, **options), dims, axes)
    for dim in range(first, first + count):
        made = write.split(made, dim, names[dim])
    return made
