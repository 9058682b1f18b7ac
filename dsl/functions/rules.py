"""Typing rules of arithmetic: elementwise functions, products, reductions, norms, losses, positions.

A result's axes are in the order of the operand that has them all; `dot` puts the first operand's before the second's,
`embedding` the ids' before the table's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

from partita.dsl.advice.corrected_calls import named
from partita.dsl.advice.report import listed
from partita.dsl.config.builtins import ROPE_SCALINGS, OneOf
from partita.dsl.functions.signatures import (
    AXES,
    AXIS,
    DTYPE,
    FLAG,
    NUMBER,
    NUMBERS,
    OPERAND,
    Constant,
    Decomposition,
    PrimitiveCall,
    PrimitiveResult,
    Slot,
    Tensor,
    Typed,
    Use,
    function,
    names,
)
from partita.dsl.spec import Call, Literal
from partita.dsl.types import BYTES, FLOATS, INTEGERS, Axis, Type

OVER_ONE, OVER = Slot("over", AXIS), Slot("over", AXES)
OPTIONAL_OVER = Slot("over", AXES, None)

ARITHMETIC = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
COMPARISONS = {"<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal", "==": "equal", "!=": "not_equal"}
OPERATORS = ARITHMETIC | COMPARISONS | {"and": "logical_and", "or": "logical_or"}
# The comparisons, and the functions of booleans, as they are for constants.
COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}
LOGIC: Mapping[str, Callable[..., bool]] = {
    "logical_and": operator.and_,
    "logical_or": operator.or_,
    "logical_not": operator.not_,
}


# ---------------------------------------------------------------- elementwise


def widest(use: Use, *slots: str) -> tuple[Axis, ...]:
    """The axes of the operand whose axes include those of all others. Raises Refused (E0204) if there is none."""
    tensors = [use[slot] for slot in slots if isinstance(use[slot], Tensor)]
    everything = {name for tensor in tensors for name in tensor.type.names}
    for tensor in tensors:
        if len(tensor.type.axes) == len(everything):
            axes: tuple[Axis, ...] = tensor.type.axes
            return axes
    largest = max(tensors, key=lambda tensor: len(tensor.type.axes))
    missing = sorted(everything - set(largest.type.names))
    raise use.refuse(
        "E0204",
        f"no operand of `{use.called}` has all axes of the others",
        help=f"`expand({largest.text}, {named(missing)})`",
        axis=next((each, missing[0]) for each in tensors if each.type.has(missing[0])),
    )


def common_dtype(use: Use, *slots: str) -> str:
    """The dtype that the tensors of the slots share; constants take it. Raises Refused (E0205, E0213)."""
    tensors = [(slot, use[slot]) for slot in slots if isinstance(use[slot], Tensor)]
    if not tensors:
        raise use.refuse("E0213", f"an operand of `{use.called}` must be a tensor")
    dtype: str = tensors[0][1].type.dtype
    for slot, tensor in tensors[1:]:
        if tensor.type.dtype != dtype:
            message = f"`{use.called}` of {dtype} and {tensor.type.dtype}"
            floats = [each for each in (dtype, tensor.type.dtype) if each in FLOATS]
            target = floats[0] if floats else max(dtype, tensor.type.dtype, key=lambda each: BYTES[each])
            wrong = tensor if tensor.type.dtype != target else tensors[0][1]
            raise use.refuse("E0205", message, slot, f"`cast({wrong.text}, {target})`")
    for slot in slots:
        if isinstance(use[slot], Constant):
            use[slot].literal(dtype)
    return dtype


def _numeric(use: Use, dtype: str, slot: str) -> None:
    if dtype == "bool":
        raise use.refuse("E0205", f"`{use.called}` needs numbers, not booleans", slot, "`cast(x, f32)`")


@function(*ARITHMETIC.values(), "maximum", "minimum", slots=[Slot("a", OPERAND), Slot("b", OPERAND)])
def _arithmetic(use: Use) -> Typed:
    dtype = common_dtype(use, "a", "b")
    _numeric(use, dtype, "a")
    if use.function == "divide" and dtype in INTEGERS:
        raise use.refuse("E0205", "integers cannot be divided", help="cast them first: `cast(x, f32)`")
    return Type(dtype, widest(use, "a", "b")), {}


@function("floor_divide", "remainder", slots=[Slot("a", OPERAND), Slot("b", OPERAND)])
def _integer_division(use: Use) -> Typed:
    dtype = common_dtype(use, "a", "b")
    if dtype not in INTEGERS:
        instead = "`floor(a / b)`" if use.function == "floor_divide" else "`a - b * floor(a / b)`"
        raise use.refuse("E0205", f"`{use.called}` is of integers, not of {dtype}", help=instead)
    if not isinstance(use["b"], Constant) or use["b"].literal(dtype).value <= 0:
        raise use.refuse("E0214", f"`{use.called}` is by a number greater than zero", "b")
    return use["a"].type, {}


@function("atan2", slots=[Slot("y", OPERAND), Slot("x", OPERAND)])
@function("power", slots=[Slot("x", OPERAND), Slot("p", OPERAND)])
def _of_two_floats(use: Use) -> Typed:
    dtype = common_dtype(use, *use.arguments)
    use.floating(*use.arguments)
    return Type(dtype, widest(use, *use.arguments)), {}


@function("logaddexp", slots=["a", "b"])
def _logaddexp(use: Use) -> Decomposition:
    """max(a, b) + log(1 + exp(−|a − b|)): neither is lost beside the other, however low that is."""
    type = Type(use.floating("a", "b"), widest(use, "a", "b"))
    both = (use["a"].value, use["b"].value)
    return Decomposition(
        (
            PrimitiveCall("subtract", both, type, {}),
            PrimitiveCall("abs", (PrimitiveResult(0),), type, {}),
            PrimitiveCall("log_sigmoid", (PrimitiveResult(1),), type, {}),
            PrimitiveCall("maximum", both, type, {}),
            PrimitiveCall("subtract", (PrimitiveResult(3), PrimitiveResult(2)), type, {}),
        ),
        (4,),
    )


@function(*COMPARISONS.values(), slots=[Slot("a", OPERAND), Slot("b", OPERAND)])
def _comparison(use: Use) -> Typed:
    dtype = common_dtype(use, "a", "b")
    if use.function not in ("equal", "not_equal"):
        _numeric(use, dtype, "a")
    return Type("bool", widest(use, "a", "b")), {}


@function("training", slots=())
def _training(use: Use) -> Typed:
    return Type("bool"), {}


@function("logical_and", "logical_or", slots=[Slot("a", OPERAND), Slot("b", OPERAND)])
@function("logical_not", slots=[Slot("a", OPERAND)])
def _logical(use: Use) -> Typed:
    for slot, value in use.arguments.items():
        if isinstance(value, Constant):
            value.literal("bool")
        elif value.type.dtype != "bool":
            message = f"`{use.called}` needs booleans, and `{value.text}` is {value.type.dtype}"
            raise use.refuse("E0205", message, slot, f"compare it: `{value.text} != 0`")
    if not use.tensors:
        raise use.refuse("E0213", f"an operand of `{use.called}` must be a tensor")
    return Type("bool", widest(use, *use.arguments)), {}


@function("where", slots=[Slot("condition", OPERAND), Slot("a", OPERAND), Slot("b", OPERAND)])
def _where(use: Use) -> Typed:
    condition = use["condition"]
    if isinstance(condition, Constant):
        if not isinstance(condition.value, bool):
            message = f"the condition of `where` is a number: `{condition.text}`"
            raise use.refuse("E0205", message, "condition", f"compare it: `{condition.text} == 0`")
    elif condition.type.dtype != "bool":
        message = f"the condition of `where` is {condition.type.dtype}, not bool"
        raise use.refuse("E0205", message, "condition", f"compare it: `{condition.text} != 0`")
    a, b = use["a"], use["b"]
    if isinstance(a, Constant) and isinstance(b, Constant):
        dtype = "bool" if isinstance(a.value, bool) else "f32"
        a.literal(dtype), b.literal(dtype)
    else:
        dtype = common_dtype(use, "a", "b")
    return Type(dtype, widest(use, "condition", "a", "b")), {}


@function(
    *("relu", "silu", "sigmoid", "log_sigmoid", "tanh", "softplus", "erf"),
    *("exp", "log", "sqrt", "rsqrt", "sin", "cos", "floor", "round"),
    slots=["x"],
)
def _pointwise(use: Use) -> Typed:
    use.floating("x")
    return use["x"].type, {}


@function("gelu", slots=["x", Slot("exact", FLAG, False)])
def _gelu(use: Use) -> Typed:
    use.floating("x")
    return use["x"].type, {"exact": True} if use["exact"] else {}


@function("abs", "negate", "sign", slots=["x"])
def _signed(use: Use) -> Typed:
    _numeric(use, use["x"].type.dtype, "x")
    return use["x"].type, {}


@function("cast", slots=["x", Slot("dtype", DTYPE)])
def _cast(use: Use) -> Typed:
    return use["x"].type.with_dtype(use["dtype"]), {"dtype": use["dtype"]}


@function("stop_gradient", "zeros_like", slots=["x"])
def _alike(use: Use) -> Typed:
    return use["x"].type, {}


@function("grad", slots=["y", "x"])
def _grad(use: Use) -> Typed:
    for slot in ("y", "x"):
        if use[slot].type.dtype not in FLOATS:
            message = f"`{use[slot].text}` is {use[slot].type.dtype}, through which no gradient flows"
            raise use.refuse("E0205", message, slot, "a gradient is of floats by floats")
    return use["x"].type, {}


@function("dropout", slots=["x", Slot("rate", NUMBER)])
def _dropout(use: Use) -> Typed:
    use.floating("x")
    if not 0 <= use["rate"] < 1:
        raise use.refuse("E0214", "the rate of `dropout` must be at least 0 and below 1", "rate")
    return use["x"].type, {"rate": float(use["rate"])}


# ---------------------------------------------------------------- products


@function("dot", slots=["a", "b", OVER])
def _dot(use: Use) -> Typed:
    dtype = use.floating("a", "b")
    a, b, over = use["a"].type, use["b"].type, names(use["over"])
    shared = [name for name in a.names if b.has(name)]
    for tensor in (use["a"], use["b"]):
        for name in over:
            if not tensor.type.has(name):
                raise use.refuse(
                    "E0203",
                    f"`{tensor.text}` has no axis `{name}` to sum over",
                    "over",
                    f"axes they share: {', '.join(shared) or 'none'}",
                    axis=(tensor, name),
                )
    axes = [axis for axis in a.axes if axis.name not in over]
    axes += [axis for axis in b.axes if axis.name not in over and not a.has(axis.name)]
    return Type(dtype, tuple(axes)), {"over": over}


def _values(use: Use) -> Axis:
    """The axis of attended values that takes the place of `along`: that one, or one that only `v` has."""
    q: Type = use["q"].type
    v: Type = use["v"].type
    over: Axis = use["over"]
    along: Axis = use["along"]
    if v.has(along.name):
        use.within("v", (*q.names, over.name), "the axes of the query")
        return along
    own = [axis for axis in v.axes if axis.name != over.name and not q.has(axis.name)]
    if not own:
        help = f"give it `{along.name}`, or an axis of its own that is summed over afterwards"
        raise use.refuse("E0203", f"`{use['v'].text}` has no axis of values", "v", help)
    if len(own) > 1:
        message = f"`{use['v'].text}` has several axes of values: {listed(names(own))}"
        raise use.refuse("E0204", message, "v", f"`merge(v, [{', '.join(names(own))}] -> values)`")
    return own[0]


@function(
    "attend",
    slots=[
        "q",
        "k",
        "v",
        OVER_ONE,
        Slot("along", AXIS),
        Slot("causal", FLAG, False),
        Slot("mask", default=None),
        Slot("bias", default=None),
        Slot("scale", NUMBER, None),
        Slot("window", NUMBER, None),
        Slot("softcap", NUMBER, None),
        Slot("segments", default=None),
        Slot("sink", default=None),
        Slot("dropout", NUMBER, 0),
    ],
)
def _attend(use: Use) -> Typed:
    dtype = use.floating("q", "k", "v", "bias", "sink")
    q, over, along = use["q"].type, use["over"], use["along"]
    use.apart("over", "along")
    for slot in ("q", "k"):
        use.has(slot, [along], "along")
    for slot in ("k", "v"):
        use.has(slot, [over])
    use.within("k", (*q.names, over.name), "the axes of the query")
    values = _values(use)
    for slot in ("causal", "window", "segments"):
        if use[slot] not in (None, False) and not q.has(over.name):
            help = "between two sequences, `mask =` says which positions see each other" if slot == "segments" else None
            raise use.refuse("E0203", f"`{slot}` needs axis `{over.name}` on `{use['q'].text}` too", slot, help)
    if use["mask"] is not None and use["mask"].type.dtype != "bool":
        raise use.refuse("E0205", f"a mask must be bool, not {use['mask'].type.dtype}", "mask")
    for slot in ("mask", "bias", "segments"):
        if use[slot] is not None:
            allowed = [name for name in (*q.names, over.name) if name != along.name]
            use.within(slot, allowed, "the axes of the scores")
    if use["segments"] is not None:
        use.ids("segments")
        use.has("segments", [over], "segments")
    if use["sink"] is not None:
        use.within("sink", q.without([over.name, along.name]).names, "the batch axes of the query")
    scale = 1 / sqrt(along.size) if use["scale"] is None else float(use["scale"])
    return Type(dtype, tuple(values if axis.name == along.name else axis for axis in q.axes)), {
        "over": over.name,
        "along": along.name,
        "causal": use["causal"],
        "scale": scale,
        "mask": use["mask"] is not None,
        "bias": use["bias"] is not None,
        **({} if values.name == along.name else {"values": values.name}),
        **_limits(use, over),
        **{slot: True for slot in ("segments", "sink") if use[slot] is not None},
    }


def _limits(use: Use, over: Axis) -> dict[str, Any]:
    """What bounds the scores of an attention and their weights, if given."""
    window, softcap, dropout = use["window"], use["softcap"], use["dropout"]
    if window is not None and (window != int(window) or window < 1):
        raise use.refuse("E0214", "`window` must be a positive integer", "window")
    if softcap is not None and softcap <= 0:
        raise use.refuse("E0214", "`softcap` must be positive", "softcap")
    if not 0 <= dropout < 1:
        raise use.refuse("E0214", "`dropout` must be at least 0 and below 1", "dropout")
    # A window that is no shorter than the axis is none: it says the same, and fused kernels know nothing of it.
    options: dict[str, Any] = {} if window is None or window >= over.size else {"window": int(window)}
    options |= {} if softcap is None else {"softcap": float(softcap)}
    return options | ({"dropout": float(dropout)} if dropout else {})


@function("embedding", slots=["ids", "table", OVER_ONE, Slot("padding", NUMBER, None)])
def _embedding(use: Use) -> Typed | Decomposition:
    use.ids("ids")
    dtype = use.floating("table")
    ids, table, over = use["ids"].type, use["table"].type, use["over"]
    use.has("table", [over])
    _not_indexed(use, over)
    rest = [axis for axis in table.axes if axis.name != over.name and not ids.has(axis.name)]
    type, options = Type(dtype, (*ids.axes, *rest)), {"over": over.name}
    padding = use["padding"]
    if padding is None:
        return type, options
    if padding != int(padding) or not 0 <= padding < over.size:
        message = f"`padding` is an id of `{over.name}`: an integer from 0 to {over.size - 1}"
        raise use.refuse("E0214", message, "padding")
    # Rows that are looked up by the id are read, and not trained.
    return Decomposition(
        (
            PrimitiveCall("embedding", (use["ids"].value, use["table"].value), type, options),
            PrimitiveCall("stop_gradient", (PrimitiveResult(0),), type, {}),
            PrimitiveCall("equal", (use["ids"].value, Literal(int(padding))), Type("bool", ids.axes), {}),
            PrimitiveCall("where", (PrimitiveResult(2), PrimitiveResult(1), PrimitiveResult(0)), type, {}),
        ),
        (3,),
    )


@function("gather", slots=["x", Slot("ids", OPERAND), Slot("along", AXIS)])
def _gather(use: Use) -> Typed | Decomposition:
    x, along = use["x"].type, use["along"]
    use.has("x", [along], "along")
    if isinstance(use["ids"], Constant):
        return _at(use, along)
    use.ids("ids")
    ids = use["ids"].type
    _not_indexed(use, along)
    rest = [axis for axis in x.axes if axis.name != along.name and not ids.has(axis.name)]
    return Type(x.dtype, (*ids.axes, *rest)), {"along": along.name}


def _at(use: Use, along: Axis) -> Decomposition:
    """What is at one position of an axis: a slice of size 1, whose axis no file can name, without that axis."""
    position, x = use["ids"], use["x"]
    index = -1 if isinstance(position.value, bool) else position.value.value
    if index != int(index) or not 0 <= index < along.size:
        message = f"`{position.text}` is not a position of `{along.name}`, which are 0 to {along.size - 1}"
        help = f"`size({along.name}) - 1` is the last one"
        raise use.refuse("E0214", message, "ids", help)
    one = Axis("1", 1)
    part = Type(x.type.dtype, tuple(one if axis.name == along.name else axis for axis in x.type.axes))
    options = {"axis": along.name, "into": one.name, "start": int(index)}
    rest = x.type.without([along.name])
    first = PrimitiveCall("slice", (x.value,), part, options)
    if x.type.dtype != "bool":
        return Decomposition((first, PrimitiveCall("sum", (PrimitiveResult(0),), rest, {"over": (one.name,)})), (1,))
    number, whole = part.with_dtype("i32"), rest.with_dtype("i32")
    return Decomposition(
        (
            first,
            PrimitiveCall("cast", (PrimitiveResult(0),), number, {"dtype": "i32"}),
            PrimitiveCall("sum", (PrimitiveResult(1),), whole, {"over": (one.name,)}),
            PrimitiveCall("not_equal", (PrimitiveResult(2), Literal(0)), rest, {}),
        ),
        (3,),
    )


@function("one_hot", slots=["ids", Slot("axis", AXIS)])
def _one_hot(use: Use) -> Typed:
    use.ids("ids")
    _not_indexed(use, use["axis"])
    return Type("f32", (*use["ids"].type.axes, use["axis"])), {"axis": use["axis"].name}


def _not_indexed(use: Use, axis: Axis) -> None:
    if use["ids"].type.has(axis.name):
        message = f"`{use['ids'].text}` must not have the axis `{axis.name}` that it indexes"
        raise use.refuse("E0204", message, "ids", axis=(use["ids"], axis.name))


@function(
    "rope",
    slots=[
        "x",
        OVER_ONE,
        Slot("pairs", AXIS),
        Slot("base", NUMBER, 10_000.0),
        Slot("scaling", OneOf(ROPE_SCALINGS), None),
        Slot("interleaved", FLAG, False),
        Slot("part", NUMBER, 1.0),
        Slot("positions", default=None),
        Slot("sections", NUMBERS, None),
    ],
)
def _rope(use: Use) -> Typed:
    use.floating("x")
    over, pairs = use["over"], use["pairs"]
    use.has("x", [over])
    use.has("x", [pairs], "pairs")
    use.apart("over", "pairs")
    part = float(use["part"])
    if not 0 < part <= 1:
        help = f"`part = {part:g}%`" if 1 < part <= 100 else None
        raise use.refuse("E0214", "the part that `rope` rotates must be above 0 and at most 1", "part", help=help)
    turned = pairs.size * part
    if turned % 2:
        what, slot = f"`{pairs.name}` has the odd size {pairs.size}", "pairs"
        if part < 1:
            what, slot = f"{part:.0%} of `{pairs.name}` is {turned:g}", "part"
        raise use.refuse("E0215", f"{what}: it has no two halves", slot)
    if use["base"] <= 0:
        raise use.refuse("E0214", "the base of `rope` must be positive", "base")
    options: dict[str, Any] = {"over": over.name, "pairs": pairs.name, "base": float(use["base"])}
    if use["scaling"] is not None:
        options["scaling"] = _scaling(use, use["scaling"])
    if use["interleaved"]:
        options["interleaved"] = True
    if part < 1:
        options["part"] = part
    sections = use["sections"]
    if sections is not None:
        options["sections"] = _sections(use, sections if isinstance(sections, tuple) else (sections,), turned // 2)
    if use["positions"] is not None:
        use.ids("positions")
        x, ids = use["x"].type, use["positions"].type
        own = [axis for axis in ids.axes if axis.name != pairs.name and not x.has(axis.name)]
        alone = own[0] if sections is not None and len(own) == 1 else None
        for axis in ids.axes:
            if axis.name == pairs.name or not (x.has(axis.name) or axis is alone):
                message = f"`{use['positions'].text}` must not have the axis `{axis.name}`"
                help = f"positions have some of the axes of `{use['x'].text}`, and not `{pairs.name}`"
                if len(own) == 1:
                    help += f"; with `sections`, `{axis.name}` may say which position turns which pairs"
                raise use.refuse("E0204", message, "positions", help=help)
        if sections is not None and (alone is None or alone.size != len(options["sections"])):
            count = len(options["sections"])
            message = f"{count} sections are turned by {count} positions: `{use['positions'].text}` has no axis of them"
            raise use.refuse("E0215", message, "sections")
    elif sections is not None:
        raise use.refuse("E0213", "`sections` say which of several `positions` turns which pairs", "sections")
    return use["x"].type, options


def _sections(use: Use, sections: tuple[Any, ...], pairs: float) -> tuple[int, ...]:
    """How many pairs each position turns, in order."""
    if any(isinstance(each, tuple) or each != int(each) or each < 1 for each in sections) or sum(sections) != pairs:
        message = f"`sections` are whole numbers of pairs, {pairs:g} together"
        raise use.refuse("E0215", message, "sections")
    return tuple(map(int, sections))


def _scaling(use: Use, call: Call) -> tuple[Any, ...]:
    """The name of a scaling, and its arguments in their order."""
    for low, high in (("low", "high"), ("slow", "fast")):
        if low in call.arguments and call.arguments[low] >= call.arguments[high]:
            raise use.refuse("E0214", f"`{low}` of `{call.name}` must be below `{high}`", "scaling")
    if call.name == "yarn" and use["base"] <= 1:
        raise use.refuse("E0214", "`yarn` needs a base above 1", "base")
    return (call.name, *call.arguments.values())


@function("zeros", slots=[Slot("axes", AXES)])
def _zeros(use: Use) -> Typed:
    return Type("f32", tuple(use["axes"])), {}


@function("iota", slots=[Slot("axis", AXIS)])
def _iota(use: Use) -> Typed:
    return Type("i64", (use["axis"],)), {"axis": use["axis"].name}


# ---------------------------------------------------------------- reductions, norms, losses


@function("sum", "mean", "max", "min", slots=["x", OPTIONAL_OVER])
def _reduction(use: Use) -> Typed:
    x = use["x"].type
    _numeric(use, x.dtype, "x")
    if use.function == "mean":
        use.floating("x")
    if use.function == "sum":
        use.summed("x")
    over = x.axes if use["over"] is None else use["over"]
    use.has("x", over)
    return x.without(names(over)), {"over": names(over)}


@function("arg_max", "cumsum", slots=["x", OVER_ONE])
def _along_one(use: Use) -> Typed:
    x, over = use["x"].type, use["over"]
    _numeric(use, x.dtype, "x")
    use.has("x", [over])
    if use.function == "cumsum":
        use.summed("x")
    type = x.without([over.name]).with_dtype("i64") if use.function == "arg_max" else x
    return type, {"over": over.name}


@function("logsumexp", "softmax", "log_softmax", slots=["x", OVER])
def _softmax(use: Use) -> Typed:
    use.floating("x")
    use.has("x", use["over"])
    x, over = use["x"].type, names(use["over"])
    return x.without(over) if use.function == "logsumexp" else x, {"over": over}


@function(
    "layer_norm",
    "rms_norm",
    slots=["x", OVER, Slot("scale", default=None), Slot("shift", default=None), Slot("eps", NUMBER, 1e-5)],
)
def _norm(use: Use) -> Typed:
    use.floating("x", "scale", "shift")
    use.has("x", use["over"])
    for slot in ("scale", "shift"):
        if use[slot] is not None:
            use.within(slot, use["x"].type.names, f"those of `{use['x'].text}`")
    if use["eps"] < 0:
        raise use.refuse("E0214", "`eps` must not be negative", "eps")
    options: dict[str, Any] = {"over": names(use["over"]), "eps": float(use["eps"])}
    return use["x"].type, options | {slot: use[slot] is not None for slot in ("scale", "shift")}


# What functions of logits and targets take.
LABELLED: list[Slot | str] = ["logits", "targets", OVER_ONE]
IGNORE = Slot("ignore", NUMBER, None)


@function("cross_entropy", slots=[*LABELLED, Slot("weights", default=None), IGNORE, Slot("smoothing", NUMBER, 0)])
def _cross_entropy(use: Use) -> Typed:
    type, options = _counted(use)
    if not 0 <= use["smoothing"] < 1:
        raise use.refuse("E0214", "`smoothing` is a part of one, such as 10%", "smoothing")
    return type, {**options, **({"smoothing": float(use["smoothing"])} if use["smoothing"] else {})}


@function("accuracy", slots=[*LABELLED, Slot("weights", default=None), IGNORE])
def _accuracy(use: Use) -> Typed:
    return _counted(use)


def _counted(use: Use) -> Typed:
    """A mean over the targets that count, with weights."""
    options = _targets(use)
    if use["weights"] is not None:
        if not use["weights"].type.is_float:
            message = f"the weights are {use['weights'].type.dtype}"
            raise use.refuse("E0205", message, "weights", f"`cast({use['weights'].text}, f32)`")
        use.within("weights", use["targets"].type.names, "those of the targets")
    return Type("f32"), options | {"weights": use["weights"] is not None}


@function("token_nll", slots=[*LABELLED, IGNORE])
def _token_nll(use: Use) -> Typed:
    options = _targets(use)
    return use["targets"].type.with_dtype("f32"), options


def _targets(use: Use) -> dict[str, Any]:
    """The options of float logits, and of integer targets that have the axes of the logits except `over`."""
    use.floating("logits")
    use.ids("targets")
    use.has("logits", [use["over"]])
    rest = use["logits"].type.without([use["over"].name])
    if set(rest.names) != set(use["targets"].type.names):
        message = f"the targets must have the axes of the logits without `{use['over'].name}`"
        extra = [(use["logits"], name) for name in rest.names if not use["targets"].type.has(name)]
        extra += [(use["targets"], name) for name in use["targets"].type.names if not rest.has(name)]
        raise use.refuse("E0204", message, "targets", f"expected [{', '.join(rest.names)}]", axis=extra[0])
    ignore = use["ignore"]
    if ignore is None:
        return {"over": use["over"].name}
    if ignore != int(ignore) or abs(ignore) >= 2**31:
        raise use.refuse("E0214", "`ignore` is an id, such as -1: an integer of 32 bits", "ignore")
    return {"over": use["over"].name, "ignore": int(ignore)}


@function("binary_cross_entropy", slots=["logits", "targets"])
@function("mse", slots=["a", "b"])
def _elementwise_loss(use: Use) -> Typed:
    use.floating(*use.arguments)
    widest(use, *use.arguments)
    return Type("f32"), {}


@function("linear_scan", slots=[Slot("a", OPERAND), Slot("b", OPERAND), OVER_ONE, Slot("backward", FLAG, False)])
def _linear_scan(use: Use) -> Typed:
    dtype = common_dtype(use, "a", "b")
    use.floating("a", "b")
    axes = widest(use, "a", "b")
    over = use["over"].name
    if over not in names(axes):
        help = f"axes they have: {', '.join(names(axes)) or 'none'}"
        raise use.refuse("E0203", f"neither operand of `linear_scan` has axis `{over}`", "over", help)
    return Type(dtype, axes), {"over": over, "backward": use["backward"]}


@function("inverse", slots=["x", OVER])
def _inverse(use: Use) -> Typed:
    use.floating("x")
    over = use["over"]
    use.has("x", over)
    if len(over) != 2 or over[0].size != over[1].size or over[0].name == over[1].name:
        message = "`inverse` is of square matrices: `over` names two axes of one size"
        raise use.refuse("E0215" if len(over) == 2 else "E0204", message, "over", also=tuple(over))
    return use["x"].type, {"rows": over[0].name, "columns": over[1].name}


@function(
    "delta_rule",
    slots=["q", "k", "v", Slot("beta", OPERAND), Slot("decay", OPERAND, None), OVER_ONE, Slot("along", AXIS)],
)
def _delta_rule(use: Use) -> Typed:
    dtype = use.floating("q", "k", "v")
    over, along = use["over"], use["along"]
    use.apart("over", "along")
    for slot in ("q", "k"):
        use.has(slot, [along], "along")
    for slot in ("q", "k", "v"):
        use.has(slot, [over])
    tensors = [use[slot] for slot in ("q", "k", "v", "beta", "decay") if isinstance(use[slot], Tensor)]
    use.floating(*(slot for slot in ("beta", "decay") if isinstance(use[slot], Tensor)))
    for slot in ("v", "beta"):
        if isinstance(use[slot], Tensor) and use[slot].type.has(along.name):
            message = f"`{use[slot].text}` must not have the axis `{along.name}` of the keys"
            raise use.refuse("E0204", message, slot, axis=(use[slot], along.name))
    axes = {axis.name: axis for tensor in tensors for axis in tensor.type.axes if axis.name != along.name}
    return Type(dtype, tuple(axes.values())), {"over": over.name, "along": along.name}


@function("flip", slots=["x", OVER_ONE])
def _flip(use: Use) -> Typed:
    use.has("x", [use["over"]])
    return use["x"].type, {"over": use["over"].name}


@function("roll", "shift", slots=["x", OVER_ONE, Slot("by", NUMBER, 1)])
def _moved(use: Use) -> Typed:
    use.has("x", [use["over"]])
    if use.function == "shift":
        _numeric(use, use["x"].type.dtype, "x")
    by = use["by"]
    if by != int(by):
        raise use.refuse("E0214", "`by` must be an integer", "by")
    return use["x"].type, {"over": use["over"].name, "by": int(by)}
