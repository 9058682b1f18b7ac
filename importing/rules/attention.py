"""Attention and rotary positions."""

from __future__ import annotations

from attrs import evolve

from partita.importing.factors import Dim, Solver, factors
from partita.importing.graph import Value
from partita.importing.said import AND, CALL, Said, call, number_text, says
from partita.importing.writing.writer import Writer


@factors("attend")
def _attend(solver: Solver, value: Value) -> list[Dim]:
    q, k, v = (solver.dims[value.args[name]] for name in "qkv")
    shapes = {name: value.args[name].shape for name in "qkv"}
    batch: list[Dim] = []
    for i in range(value.rank - 2):
        there = [dims[i] for dims, name in ((q, "q"), (k, "k"), (v, "v")) if shapes[name][i] != 1]
        for each in there[1:]:
            solver.unify(there[0], each, value)
        batch.append(there[0] if there else [])
    solver.unify(q[-1], k[-1], value)
    solver.unify(k[-2], v[-2], value)
    if value.args["causal"] or value.args["window"] is not None:
        solver.unify(q[-2], k[-2], value)
    whole = [*batch, q[-2], k[-2]]
    for name in ("mask", "bias", "sink"):
        x = value.args[name]
        if x is not None:
            for own, size, dim in zip(reversed(solver.dims[x]), reversed(x.shape), reversed(whole), strict=False):
                if size != 1:
                    solver.unify(own, dim, value)
    return [*batch, q[-2], v[-1]]


@says("attend")
def _say_attend(write: Writer, value: Value) -> Said:
    args = value.args
    q, _ = write.single(write(args["q"]), [-1])
    k, (over, along) = write.single(write(args["k"]), [-2, -1])
    v, _ = write.single(write(args["v"]), [-2])
    one_q, (query, _) = write.single(q, [-2, -1])
    window = None if args["window"] is None else write.constant("window", args["window"])
    lower: dict[str, bool | str | None] = {"causal": True if args["causal"] else None, "window": window}
    if args["causal"] and query == over and args["window"] is None and write.differ(value, "window"):
        lower["window"] = f"size({over})"  # so that it is the same block as that with a window
    tables = {name: args[name] for name in ("mask", "bias") if args[name] is not None}
    extra: dict[str, str] = {}
    if (tables and query == over) or over in {name for own in one_q.dims[:-2] for name in own}:
        # The mask has the axis of queries and of keys, which is one, or queries have it beside their own: keys have
        # another name.
        other = write.second(over)
        k, v = (x.renamed([*x.dims[:-2], (other,), x.dims[-1]]) for x in (k, v))
        over = other
    whole = [*one_q.dims[:-1], (over,)]
    if tables and over != query and (args["causal"] or args["window"]):
        extra["mask"] = write.lower(query, over, args["causal"], args["window"])
        lower = {"causal": None, "window": None}
    for name, table in tables.items():
        said = write.in_f32(write(table))
        said, _ = write.single(said, [i for i in (-2, -1) if len(said.dims[i]) > 1])
        wanted = whole[len(whole) - len(said.dims) :]
        fitted = said.renamed([new if own else () for own, new in zip(said.dims, wanted, strict=True)])
        if name in extra:
            both = Said(extra[name], tuple(whole[-2:]), (query, over), AND, "bool")
            if not {query, over} <= {*fitted.axes}:
                both = write.expanded(both, [own for own in fitted.axes if own not in both.axes])
            extra[name] = f"{both.text} and {fitted.within(AND)}"
        else:
            extra[name] = fitted.text
    lacking = [name for own in k.dims[:-2] for name in own if name in (*k.axes, *v.axes) and name not in q.axes]
    q, one_q = write.expanded(q, lacking), write.expanded(one_q, lacking)
    q = one_q if len(q.dims[-2]) > 1 else q
    k, v = (x if over in x.axes else write.expanded(x, [over]) for x in (k, v))
    value_axes = v.dims[-1]
    options = {
        "softcap": write.constant("softcap", args["softcap"]) if args["softcap"] else None,
        "sink": None if args["sink"] is None else write(args["sink"]).text,
        "scale": None if args["scale"] is None else number_text(args["scale"]),
        "dropout": write.constant("drop", args["dropout"]) if args["dropout"] else None,
    }
    text = call("attend", q.text, k.text, v.text, over=over, along=along, **lower, **extra, **options)
    axes = tuple(each for name in q.axes for each in (value_axes if name == along else [name]))
    made = Said(text, (*q.dims[:-1], value_axes), axes)
    return write.split(made, value.rank - 2, write.names_of(value)[-2])


@factors("rope")
def _rope(solver: Solver, value: Value) -> list[Dim]:
    return solver.dims[value.args["x"]]


@says("rope")
def _say_rope(write: Writer, value: Value) -> Said:
    position = value.args["position"]
    x, (over, pairs) = write.single(write(value.args["x"]), [position, -1])
    base, part = value.args["base"], value.args["part"]
    options = {
        "scaling": value.args["scaling"],
        "base": write.constant("base", base) if base != 10_000 or write.differ(value, "base") else None,
        "interleaved": True if value.args["interleaved"] else None,
        "part": None if part == 1 else number_text(part),
    }
    made = evolve(x, text=call("rope", x.text, over=over, pairs=pairs, **options), binds=CALL)
    names = write.names_of(value)
    return write.split(write.split(made, position, names[position]), value.rank - 1, names[-1])
