"""Elementwise functions."""

from __future__ import annotations

from attrs import evolve

from partita.importing.factors import Dim, Solver, factors
from partita.importing.graph import Value
from partita.importing.said import AND, CALL, COMPARISON, NOT, OR, PRODUCT, SIGN, SUM, Said, call, says
from partita.importing.writing.writer import Writer

SIGNS = {
    "add": ("+", SUM, SUM),
    "subtract": ("-", SUM, PRODUCT),
    "multiply": ("*", PRODUCT, PRODUCT),
    "divide": ("/", PRODUCT, SIGN),
    "less": ("<", COMPARISON, SUM),
    "less_equal": ("<=", COMPARISON, SUM),
    "greater": (">", COMPARISON, SUM),
    "greater_equal": (">=", COMPARISON, SUM),
    "equal": ("==", COMPARISON, SUM),
    "not_equal": ("!=", COMPARISON, SUM),
    "and": ("and", AND, AND),
    "or": ("or", OR, OR),
}
BOOLEAN = {"less", "less_equal", "greater", "greater_equal", "equal", "not_equal", "and", "or", "not"}


@factors("pointwise")
def _factors(solver: Solver, value: Value) -> list[Dim]:
    return solver.broadcast(value, [x for x in value.args["xs"] if isinstance(x, Value)])


@says("pointwise")
def _say(write: Writer, value: Value) -> Said:
    function, xs = value.args["function"], value.args["xs"]
    said, dims = write.aligned(value, xs)
    if function in ("multiply", "divide") and len(xs) == 2:
        said = [
            write.formula(x, text, said[1 - i].axes, function == "divide" and i == 1)
            if text.dtype == "number"
            else text
            for i, (x, text) in enumerate(zip(xs, said, strict=True))
        ]
    if value.is_float and {x.dtype for x in said[function == "where" :]} == {"i64", "number"}:
        wanted = write.dtype_of(value)
        said = [
            evolve(x, text=call("cast", x.text, wanted), binds=CALL, dtype=wanted) if x.dtype == "i64" else x
            for x in said
        ]
    dtype = (
        "bool"
        if function in BOOLEAN
        else next((x.dtype for x in said[function == "where" :] if x.dtype != "number"), "f32")
    )
    axes = max((x.axes for x in said), key=len)
    if len(said) == 1:
        (x,) = said
        if function == "negate":
            return evolve(x, text=f"-{x.within(SIGN)}", dims=dims, binds=SIGN)
        if function == "not":
            return evolve(x, text=f"not {x.within(NOT)}", dims=dims, binds=NOT)
        exact = True if function == "exact_gelu" else None
        return evolve(x, text=call(function.removeprefix("exact_"), x.text, exact=exact), dims=dims, binds=CALL)
    if function == "multiply" and (by := said[1].text.removeprefix("1 / ")) != said[1].text:
        function, said[1] = "divide", evolve(said[1], text=by, binds=CALL)
    if function in SIGNS:
        sign, binds, right = SIGNS[function]
        one, two = said
        own = COMPARISON if binds == COMPARISON else binds
        left = SUM if binds == COMPARISON else own
        return Said(f"{one.within(left)} {sign} {two.within(right)}", dims, axes, binds, dtype)
    return Said(call(function, *(x.text for x in said)), dims, axes, dtype=dtype)


@factors("dropout")
def _dropout(solver: Solver, value: Value) -> list[Dim]:
    return solver.dims[value.args["x"]]


@says("dropout")
def _say_dropout(write: Writer, value: Value) -> Said:
    x = write(value.args["x"])
    if not x.axes:  # ones
        x = write.filled(x, value)
    rate = write.constant("drop", value.args["rate"])
    return evolve(x, text=call("dropout", x.text, rate), binds=CALL)


@says("constant")
def _say_constant(write: Writer, value: Value) -> Said:
    return write.table(value)
