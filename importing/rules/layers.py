"""Norms, embeddings and losses."""

from __future__ import annotations

import re

import torch
from attrs import evolve

from partita.importing.factors import Dim, Solver, factors
from partita.importing.graph import Value
from partita.importing.said import CALL, PRODUCT, SUM, Said, call, listed, number_text, says
from partita.importing.writing.body import Declared
from partita.importing.writing.tree import base
from partita.importing.writing.writer import Writer


@factors("norm")
def _norm(solver: Solver, value: Value) -> list[Dim]:
    dims = solver.dims[value.args["x"]]
    for slot in ("scale", "shift"):
        vector = value.args[slot]
        if vector is not None:
            for own, dim in zip(solver.dims[vector], value.args["dims"], strict=True):
                solver.unify(own, dims[dim], value)
    return dims


@says("norm")
def _say_norm(write: Writer, value: Value) -> Said:
    x = write(value.args["x"])
    if x.dtype == "number":
        x = write.filled(x, value)
    over = [name for dim in value.args["dims"] for name in x.dims[dim]]
    vectors = {}
    for slot in ("scale", "shift"):
        vector = value.args[slot]
        if vector is not None:
            vectors[slot] = write(vector).renamed([x.dims[dim] for dim in value.args["dims"]]).text
    eps = write.constant("eps", value.args["eps"])
    return evolve(x, text=call(value.args["function"], x.text, over=listed(over), **vectors, eps=eps), binds=CALL)


@factors("group_norm")
def _group_norm(solver: Solver, value: Value) -> list[Dim]:
    dims = solver.dims[value.args["x"]]
    for slot in ("scale", "shift"):
        if value.args[slot] is not None:
            solver.unify(solver.dims[value.args[slot]][0], dims[1], value)
    return dims


@says("group_norm")
def _say_group_norm(write: Writer, value: Value) -> Said:
    """A layer norm of each group of channels, and of all places."""
    x, (channels,) = write.single(write(value.args["x"]), [1])
    groups, whole = value.args["groups"], value.shape[1]
    rest = [name for dim in x.dims[2:] for name in dim]
    eps = write.constant("eps", value.args["eps"])
    if groups in (1, whole):
        over = listed(rest if groups == whole else [channels, *rest])
        made = evolve(x, text=call("layer_norm", x.text, over=over, eps=eps), binds=CALL)
        made = write.split(made, 1, write.names_of(value)[1])
        for slot, sign, binds in (("scale", "*", PRODUCT), ("shift", "+", SUM)):
            if value.args[slot] is not None:
                vector = write(value.args[slot])
                made = evolve(made, text=f"{made.within(binds)} {sign} {vector.within(binds)}", binds=binds)
        return made
    parts = write.parts_of(channels, ("norm_groups", groups), ("norm_part", whole // groups))
    inside, names = f"[{', '.join(parts)}]", [slot for slot in ("scale", "shift") if value.args[slot] is not None]
    vectors = [value.args[slot] for slot in names]
    declared = [
        Declared(slot, ((channels,),), write.initial(own), own) for slot, own in zip(names, vectors, strict=True)
    ]
    result = call("merge", "h", f"{inside} -> {channels}")
    result += "".join(f" {sign} {slot}" for slot, sign in (("scale", "*"), ("shift", "+")) if slot in names)
    lines = [
        f"let h = {call('split', 'x', f'{channels} -> {inside}')}",
        f"let h = {call('layer_norm', 'h', over=listed([parts[1], *rest]), eps=eps)}",
        f"return {result}",
    ]
    made = evolve(x, text=write.own_block(value, "group_norm", [x], declared, lines), binds=CALL)
    return write.split(made, 1, write.names_of(value)[1])


@factors("batch_norm")
def _batch_norm(solver: Solver, value: Value) -> list[Dim]:
    dims = solver.dims[value.args["x"]]
    for slot in ("scale", "shift", "mean", "variance"):
        if value.args[slot] is not None:
            solver.unify(solver.dims[value.args[slot]][0], dims[1], value)
    return dims


@says("batch_norm")
def _say_batch_norm(write: Writer, value: Value) -> Said:
    """A block, which keeps running statistics."""
    x, args = write(value.args["x"]).renamed(write.names_of(value)), value.args
    over = [name for i, dim in enumerate(x.dims) if i != 1 for name in dim]
    names, declared = {}, []
    for slot, name, initial in STATISTICS:
        own = args[slot]
        if own is not None:
            names[slot] = name
            keyword = "buffer" if slot in ("mean", "variance") else "param"
            dims = tuple(write.names_of(own))
            declared.append(Declared(name, dims, initial or write.initial(own), own, keyword))
    count = " * ".join(f"size({name})" for name in over)
    lines = [f"let m = mean(x, over = {listed(over)})", f"let v = mean((x - m) * (x - m), over = {listed(over)})"]
    center, spread = "m", "v"
    if "mean" in names:
        mean, variance = names["mean"], names["variance"]
        keep, rate = number_text(round(1 - args["momentum"], 12)), number_text(args["momentum"])
        lines += [
            f"update {mean} = {keep} * {mean} + {rate} * m",
            f"update {variance} = {keep} * {variance} + {rate} * v * ({count} / ({count} - 1))",
            f"let center = where(training(), m, {mean})",
            f"let spread = where(training(), v, {variance})",
        ]
        center, spread = "center", "spread"
    result = f"(x - {center}) * rsqrt({spread} + {write.constant('eps', args['eps'])})"
    result += f" * {names['scale']}" if "scale" in names else ""
    result += f" + {names['shift']}" if "shift" in names else ""
    return evolve(x, text=write.own_block(value, "batch_norm", [x], declared, [*lines, f"return {result}"]), binds=CALL)


# Of a batch norm: arguments, what they are called, and how they begin if that is always the same.
STATISTICS = (
    ("scale", "scale", None),
    ("shift", "shift", None),
    ("mean", "running_mean", "zeros()"),
    ("variance", "running_variance", "ones()"),
)


@factors("training")
def _training(solver: Solver, value: Value) -> list[Dim]:
    return []


@says("training")
def _say_training(write: Writer, value: Value) -> Said:
    return Said("training()", (), (), dtype="bool")


@factors("update")
def _update(solver: Solver, value: Value) -> list[Dim]:
    dims = solver.dims[value.args["buffer"]]
    for own, new in zip(dims, solver.dims[value.args["x"]], strict=True):
        solver.unify(own, new, value)
    return dims


@factors("embedding")
def _embedding(solver: Solver, value: Value) -> list[Dim]:
    ids, table = value.args["ids"], value.args["table"]
    fixed = ids.constant is not None and ids.twin == ids.shape == table.shape[:1]
    if fixed and torch.equal(ids.constant, torch.arange(len(ids.constant))):  # the whole table, whose rows are places
        solver.unify(solver.dims[ids][0], solver.dims[table][0], value)
    return [*solver.dims[value.args["ids"]], *solver.dims[value.args["table"]][1:]]


@says("embedding")
def _say_embedding(write: Writer, value: Value) -> Said:
    ids, table, padding = value.args["ids"], write(value.args["table"]), value.args["padding"]
    (over,) = table.dims[0] if len(table.dims[0]) == 1 else (None,)
    if over is None:
        table, (over,) = write.single(table, [0])
    of_ids = write(ids)
    if not of_ids.axes and of_ids.text.lstrip("-").isdigit():
        dims = (*of_ids.dims, *table.dims[1:])
        return Said(call("gather", table.text, of_ids.text, along=over), dims, table.axes[1:], dtype=table.dtype)
    counted = re.fullmatch(r"iota\((\w+)\)(?: \+ (\d+))?", of_ids.text)
    taken = set(of_ids.axes)
    rest = [write.apart(names, taken) for names in table.dims[1:]]
    table = table.renamed([table.dims[0], *rest])
    dims = (*of_ids.dims, *table.dims[1:])
    axes = (*of_ids.axes, *(name for name in table.axes if name != over))
    if counted is not None:
        if counted[1] == over and counted[2] is None:
            return evolve(table, dims=dims)
        text = call("slice", table.text, f"{over} -> {counted[1]}", start=counted[2])
        return Said(text, dims, axes, dtype=table.dtype)
    if over in of_ids.axes:  # each of as many rows chooses one
        table = table.renamed([(write.second(over),), *rest])
        over = table.dims[0][0]
    if not value.is_float:
        return Said(call("gather", table.text, of_ids.text, along=over), dims, axes, dtype=write.dtype_of(value))
    return Said(call("embedding", of_ids.text, table.text, over=over, padding=padding), dims, axes, dtype=table.dtype)


@factors("cross_entropy", "token_nll")
def _cross_entropy(solver: Solver, value: Value) -> list[Dim]:
    dims = solver.dims[value.args["x"]]
    classes = 1 if len(dims) > 1 else 0
    rest = [dim for i, dim in enumerate(dims) if i != classes]
    for one, other in zip(rest, solver.dims[value.args["targets"]], strict=True):
        solver.unify(one, other, value)
    return [] if value.op == "cross_entropy" else rest


@says("cross_entropy", "token_nll")
def _say_cross_entropy(write: Writer, value: Value) -> Said:
    x, targets = write(value.args["x"]), write(value.args["targets"])
    classes = 1 if len(x.dims) > 1 else 0
    one, (over,) = write.single(x, [classes])
    rest = [names for i, names in enumerate(one.dims) if i != classes]
    if targets.dtype == "number":
        targets = write.expanded(targets, [name for dim in rest for name in dim])
        targets = evolve(targets, text=call("cast", targets.text, "i64"), dims=tuple(rest), dtype="i64", binds=CALL)
    targets = targets.renamed(rest)
    targets = write.expanded(targets, [name for dim in rest for name in dim if name not in targets.axes])
    ignore, smoothing = value.args["ignore"], value.args.get("smoothing") or None
    # torch's default is an id that data may not have.
    whole = base(value.args["targets"])
    known = bool((whole.constant >= 0).all()) if whole.constant is not None else not whole.args.get("negative", True)
    without = ignore == -100 and known
    ignored = None if without else write(ignore).text
    text = call(value.op, one.text, targets.text, over=over, ignore=ignored, smoothing=smoothing)
    if value.op == "cross_entropy":
        return Said(text)
    return Said(text, tuple(rest), tuple(name for name in one.axes if name != over))


@factors("mse", "binary_cross_entropy")
def _mean_of_errors(solver: Solver, value: Value) -> list[Dim]:
    for one, other in zip(solver.dims[value.args["x"]], solver.dims[value.args["targets"]], strict=True):
        solver.unify(one, other, value)
    return []


@says("mse", "binary_cross_entropy")
def _say_mean_of_errors(write: Writer, value: Value) -> Said:
    x = write(value.args["x"])
    return Said(call(value.op, x.text, write(value.args["targets"]).renamed(x.dims).text))
