"""Typing rules of mixtures of experts: choices, products with the matrix that an index names, slots with capacity.

Ids have the axes of what they choose for, and may have one more: that of several choices, in order of precedence.
"""

from __future__ import annotations

from partita.dsl.check.formulas import Size
from partita.dsl.functions.rules import OVER, OVER_ONE
from partita.dsl.functions.signatures import (
    AXES,
    AXIS,
    Arrow,
    Decomposition,
    PrimitiveCall,
    PrimitiveResult,
    Slot,
    Typed,
    Use,
    function,
    names,
)
from partita.dsl.spec import Literal
from partita.dsl.types import Axis, Type

# An example of each function that needs an arrow.
EXAMPLES = {"top_k": "top_k(p, experts -> chosen)"}


@function("top_k", slots=["x", Slot("by", default=None)], arrows=(1, 1))
def _top_k(use: Use) -> Decomposition:
    x = use["x"].type
    over, into = _chosen(use, use.arrows[0])
    use.floating("x")
    by = use["x"] if use["by"] is None else use["by"]
    if by.type.dtype == "bool":
        raise use.refuse("E0205", "`by` needs numbers, not booleans", "by", f"`cast({by.text}, f32)`")
    if set(by.type.names) != set(x.names):
        raise use.refuse("E0204", f"`{by.text}` must have the axes of `{use['x'].text}`", "by")
    ids = Type("i64", tuple(into if axis.name == over.name else axis for axis in by.type.axes))
    weights = Type(x.dtype, ids.axes)
    return Decomposition(
        (
            PrimitiveCall("top_k", (by.value,), ids, {"over": over.name, "into": into.name}),
            PrimitiveCall("embedding", (PrimitiveResult(0), use["x"].value), weights, {"over": over.name}),
        ),
        (1, 0),
    )


def _chosen(use: Use, arrow: Arrow) -> tuple[Axis, Axis]:
    """The axis that is chosen from, and that of the choices."""
    if len(arrow.left) != 1 or len(arrow.right) != 1:
        raise use.refuse("E0223", "`top_k` takes one axis on each side of the arrow", "->")
    (over,), (into,) = arrow.left, arrow.right
    use.has("x", [over], "->")
    if use["x"].type.has(into.name):
        raise use.refuse("E0216", f"the result would have axis `{into.name}` twice", "->")
    if into.size > over.size:
        message = f"`{into.name}` has {into.size} choices of {over.size} in `{over.name}`"
        raise use.refuse("E0215", message, "->", also=(over, into))
    return over, into


@function("routed_dot", slots=["x", "w", "ids", OVER, Slot("along", AXIS)])
def _routed_dot(use: Use) -> Typed:
    use.ids("ids")
    dtype = use.floating("x", "w")
    x, w, ids = (use[slot].type for slot in ("x", "w", "ids"))
    over, along = use["over"], use["along"]
    use.has("x", over)
    use.has("w", over)
    use.has("w", [along], "along")
    if along.name in names(over):
        raise use.refuse("E0204", "`over` and `along` name the same axis", "along")
    use.lacks("x", [along], "multiplied by the matrices that it chooses from")
    use.lacks("ids", [along], "that it indexes")
    for axis in over:
        if ids.has(axis.name):
            message = f"`{use['ids'].text}` must not have the axis `{axis.name}`, which is summed over"
            raise use.refuse("E0204", message, "ids")
    axes = list(x.without(names(over)).axes)
    for axis in (*ids.axes, *w.without([along.name, *names(over)]).axes):
        if axis not in axes:
            axes.append(axis)
    return Type(dtype, tuple(axes)), {"over": names(over), "along": along.name}


# ---------------------------------------------------------------- with capacity


def _experts(use: Use, slot: str) -> tuple[Axis, Axis]:
    """`[experts, slots]`."""
    if len(use[slot]) != 2:
        message = f"`{slot}` names two axes: the experts, and the slots of each"
        raise use.refuse("E0212", message, slot, f"`{slot} = [experts, slots]`")
    experts, slots = use[slot]
    return experts, slots


def _order(use: Use, others: Type) -> tuple[str, ...]:
    """The axes along which slots are given out, the slowest first: choices, if there are several, then positions.

    `others` has all axes of the ids that each have their own slots.
    """
    ids, over = use["ids"], use["over"]
    use.has("ids", [over])
    choices = [name for name in ids.type.names if name != over.name and not others.has(name)]
    if len(choices) > 1:
        message = f"`{ids.text}` has several axes of choices: {', '.join(choices)}"
        raise use.refuse("E0204", message, "ids", "`merge` makes one of them, in order of precedence")
    return (*choices, over.name)


@function("dispatch", slots=["x", "ids", OVER_ONE, Slot("into", AXES)])
def _dispatch(use: Use) -> Typed:
    use.ids("ids")
    dtype = use.floating("x")
    experts, slots = _experts(use, "into")
    x, over = use["x"].type, use["over"]
    use.has("x", [over])
    use.lacks("x", (experts, slots), "of `into`")
    use.lacks("ids", (experts, slots), "of `into`")
    order = _order(use, x)
    axes: list[Axis] = []
    for axis in x.axes:
        axes += [experts, slots] if axis.name == over.name else [axis]
    return Type(dtype, tuple(axes)), {"order": order, "experts": experts.name, "slots": slots.name}


@function("combine", slots=["y", "ids", "weight", OVER_ONE, Slot("from", AXES)])
def _combine(use: Use) -> Typed:
    use.ids("ids")
    dtype = use.floating("y", "weight")
    experts, slots = _experts(use, "from")
    y, over = use["y"].type, use["over"]
    use.has("y", (experts, slots), "from")
    use.lacks("y", (over,), "of `over`")
    use.lacks("ids", (experts, slots), "of `from`")
    use.within("weight", use["ids"].type.names, f"those of `{use['ids'].text}`")
    order = _order(use, y)
    axes: list[Axis] = []
    for axis in y.axes:
        if axis.name == experts.name:
            axes.append(over)
        elif axis.name != slots.name:
            axes.append(axis)
    return Type(dtype, tuple(axes)), {"order": order, "experts": experts.name, "slots": slots.name}


@function("dropped", slots=["ids", OVER_ONE, Slot("into", AXES), Slot("choices", AXIS, None)])
def _dropped(use: Use) -> Decomposition:
    use.ids("ids")
    ids, over = use["ids"].type, use["over"]
    experts, slots = _experts(use, "into")
    use.has("ids", [over])
    use.lacks("ids", (experts, slots), "of `into`")
    choices = use["choices"]
    if choices is not None:
        use.has("ids", [choices], "choices")
        use.apart("over", "choices")
    elif ids.axes[-1].name != over.name:
        choices = ids.axes[-1]
    order = ((choices.name,) if choices else ()) + (over.name,)
    size = Literal(slots.size, Size(slots.name, slots.size))
    return Decomposition(
        (
            PrimitiveCall("slot_index", (use["ids"].value,), ids.with_dtype("i64"), {"order": order}),
            PrimitiveCall("greater_equal", (PrimitiveResult(0), size), ids.with_dtype("bool"), {}),
            PrimitiveCall("cast", (PrimitiveResult(1),), ids.with_dtype("f32"), {"dtype": "f32"}),
            PrimitiveCall("mean", (PrimitiveResult(2),), Type("f32"), {"over": ids.names}),
        ),
        (3,),
    )


@function("load", slots=["ids", OVER, Slot("into", AXIS)])
def _load(use: Use) -> Typed:
    use.ids("ids")
    ids, into = use["ids"].type, use["into"]
    use.has("ids", use["over"])
    use.lacks("ids", [into], "that it indexes")
    rest = ids.without(names(use["over"]))
    return Type("f32", (*rest.axes, into)), {"over": names(use["over"])}
