"""Typing rules of functions that rename axes or change sizes: an arrow says which axes become which.

New axes take the position of the (first) axis that they come from; `expand` appends them.
"""

from __future__ import annotations

from math import prod

from partita.dsl.functions.signatures import (
    AXES,
    NUMBER,
    TENSORS,
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
from partita.dsl.types import Axis, Type

# An example of each function that needs an arrow.
EXAMPLES = {
    "rename": "rename(x, seq -> keys)",
    "split": "split(x, embed -> [heads, key])",
    "merge": "merge(x, [heads, key] -> embed)",
    "concat": "concat(a, b, [left, right] -> both)",
    "slice": "slice(x, seq -> half, start = 0)",
    "sum_by": "sum_by(x, ids, edges -> nodes)",
    "mean_by": "mean_by(x, ids, edges -> nodes)",
    "max_by": "max_by(x, ids, edges -> nodes)",
    "softmax_by": "softmax_by(x, ids, edges -> nodes)",
}


def unique(use: Use, type: Type) -> Type:
    """The type, if it has each axis once. Raises Refused (E0216)."""
    seen: set[str] = set()
    for name in type.names:
        if name in seen:
            raise use.refuse("E0216", f"the result would have axis `{name}` twice", "->")
        seen.add(name)
    return type


def _replaced(use: Use, x: Type, removed: tuple[str, ...], added: tuple[Axis, ...]) -> Type:
    """The type of x with some axes removed, and others in place of the first of those."""
    axes: list[Axis] = []
    for axis in x.axes:
        if axis.name == removed[0]:
            axes.extend(added)
        elif axis.name not in removed:
            axes.append(axis)
    return unique(use, Type(x.dtype, tuple(axes)))


def _with_lists(function: str, x: str, arrow: Arrow) -> str | None:
    """What to write for an arrow with lists."""
    left, right = names(arrow.left), names(arrow.right)
    pairs = [f"{one} -> {other}" for one, other in zip(left, right, strict=False)]
    if len(left) == len(right):
        if function == "rename":
            return f"`rename({x}, {', '.join(pairs)})`, which does it all at once"
        for pair in pairs:
            x = f"{function}({x}, {pair})"
        return f"`{x}`"
    if function != "rename" or 1 not in (len(left), len(right)):
        return None
    return (
        f"`merge({x}, [{', '.join(left)}] -> {right[0]})`"
        if len(right) == 1
        else (f"`split({x}, {left[0]} -> [{', '.join(right)}])`")
    )


def _one_to_one(use: Use, arrow: Arrow) -> tuple[Axis, Axis]:
    if len(arrow.left) != 1 or len(arrow.right) != 1:
        message = f"`{use.function}` takes one axis on each side of the arrow"
        raise use.refuse("E0223", message, "->", _with_lists(use.function, use["x"].text, arrow))
    return arrow.left[0], arrow.right[0]


def _add_up(use: Use, axis: Axis, size: int, parts: str, also: tuple[Axis, ...]) -> None:
    """Require that an axis has the size of its parts together (E0215)."""
    if size != axis.size:
        message = f"`{axis.name}` has size {axis.size}, but {parts} together have {size}"
        raise use.refuse("E0215", message, "->", also=also)


@function("expand", slots=["x", Slot("axes", AXES)])
def _expand(use: Use) -> Typed:
    x, added = use["x"].type, use["axes"]
    for axis in added:
        if x.has(axis.name):
            message = f"`{use['x'].text}` already has axis `{axis.name}`"
            raise use.refuse("E0204", message, "axes", axis=(use["x"], axis.name))
    return Type(x.dtype, (*x.axes, *added)), {"axes": names(added)}


@function("rename", slots=["x"], arrows=(1, None))
def _rename(use: Use) -> Typed:
    x = use["x"].type
    pairs: dict[str, Axis] = {}
    for arrow in use.arrows:
        use.has("x", arrow.left, "->")
        left, right = _one_to_one(use, arrow)
        if left.name in pairs:
            raise use.refuse("E0223", f"axis `{left.name}` is renamed twice", "->")
        if left.size != right.size:
            raise use.refuse("E0215", f"`{left.name}` and `{right.name}` differ in size", "->", also=(left, right))
        pairs[left.name] = right
    renamed = Type(x.dtype, tuple(pairs.get(axis.name, axis) for axis in x.axes))
    return unique(use, renamed), {"pairs": tuple((left, right.name) for left, right in pairs.items())}


@function("split", slots=["x"], arrows=(1, 1))
def _split(use: Use) -> Typed:
    (arrow,) = use.arrows
    if len(arrow.left) != 1 or not arrow.right:
        raise use.refuse("E0223", "`split` takes one axis on the left, a list on the right", "->", "`a -> [b, c]`")
    use.has("x", arrow.left, "->")
    (axis,) = arrow.left
    _add_up(use, axis, prod(part.size for part in arrow.right), "its parts", arrow.right)
    type = _replaced(use, use["x"].type, (axis.name,), arrow.right)
    return type, {"axis": axis.name, "into": names(arrow.right)}


@function("merge", slots=["x"], arrows=(1, 1))
def _merge(use: Use) -> Typed:
    (arrow,) = use.arrows
    if len(arrow.right) != 1 or not arrow.left:
        raise use.refuse("E0223", "`merge` takes a list on the left, one axis on the right", "->", "`[a, b] -> c`")
    use.has("x", arrow.left, "->")
    if len(set(names(arrow.left))) < len(arrow.left):
        raise use.refuse("E0223", "`merge` names an axis twice", "->")
    (axis,) = arrow.right
    _add_up(use, axis, prod(part.size for part in arrow.left), "the merged axes", (*arrow.left, axis))
    x = use["x"].type
    first = min(names(arrow.left), key=x.position)
    removed = (first, *(name for name in names(arrow.left) if name != first))
    return _replaced(use, x, removed, (axis,)), {"axes": names(arrow.left), "into": axis.name}


@function("concat", slots=[Slot("tensors", TENSORS)], arrows=(1, 1))
def _concat(use: Use) -> Typed:
    (arrow,) = use.arrows
    tensors = use["tensors"]
    if len(arrow.left) != len(tensors) or len(arrow.right) != 1:
        raise use.refuse(
            "E0223",
            f"`concat` of {len(tensors)} tensors takes as many axes on the left, one on the right",
            "->",
            "`concat(a, b, [left, right] -> both)`",
        )
    first, (into,) = tensors[0], arrow.right
    for tensor, axis in zip(tensors, arrow.left, strict=True):
        if not tensor.type.has(axis.name):
            message = f"`{tensor.text}` has no axis `{axis.name}`"
            raise use.refuse("E0203", message, "->", axis=(tensor, axis.name))
        if tensor.type.dtype != first.type.dtype:
            raise use.refuse("E0205", f"`{tensor.text}` is {tensor.type.dtype}, the first {first.type.dtype}")
        rest, other = tensor.type.without([axis.name]), first.type.without([arrow.left[0].name])
        if set(rest.names) != set(other.names):
            raise use.refuse("E0204", "joined tensors must have the same axes except for the joined ones")
    _add_up(use, into, sum(axis.size for axis in arrow.left), "the joined axes", (*arrow.left, into))
    type = _replaced(use, first.type, (arrow.left[0].name,), (into,))
    return type, {"axes": names(arrow.left), "into": into.name}


@function("slice", slots=["x", Slot("start", NUMBER, 0)], arrows=(1, 1))
def _slice(use: Use) -> Typed:
    (arrow,) = use.arrows
    use.has("x", arrow.left, "->")
    axis, into = _one_to_one(use, arrow)
    start = use["start"]
    if start != int(start) or start < 0:
        raise use.refuse("E0214", "`start` must be a non-negative integer", "start")
    if start + into.size > axis.size:
        message = f"`{into.name}` from {int(start)} extends past the end of `{axis.name}`"
        raise use.refuse("E0215", message, "start", also=(axis, into))
    type = _replaced(use, use["x"].type, (axis.name,), (into,))
    return type, {"axis": axis.name, "into": into.name, "start": int(start)}


# ---------------------------------------------------------------- by ids


def _grouped(use: Use) -> tuple[tuple[Axis, ...], Axis]:
    """The axes of elements, each of which has an id, and the axis of which the ids are positions."""
    (arrow,) = use.arrows
    if not arrow.left or len(arrow.right) != 1:
        message = f"`{use.function}` takes the axes that have ids, and the one axis that the ids index"
        raise use.refuse("E0223", message, "->", f"`{EXAMPLES[use.function]}`")
    use.ids("ids")
    use.has("x", arrow.left, "->")
    use.has("ids", arrow.left, "->")
    use.within("ids", use["x"].type.names, f"the axes of `{use['x'].text}`")
    (group,) = arrow.right
    use.lacks("x", [group], "that the ids index")
    return arrow.left, group


@function("sum_by", "mean_by", "max_by", slots=["x", "ids"], arrows=(1, 1))
def _by(use: Use) -> Typed:
    left, group = _grouped(use)
    if use.function != "sum_by" or use["x"].type.dtype == "bool":
        use.floating("x")
    use.summed("x")
    return _replaced(use, use["x"].type, names(left), (group,)), {"along": names(left), "into": group.name}


@function("softmax_by", slots=["x", "ids"], arrows=(1, 1))
def _softmax_by(use: Use) -> Decomposition:
    left, group = _grouped(use)
    use.floating("x")
    x, ids = use["x"], use["ids"]
    by = {"along": names(left), "into": group.name}
    grouped = _replaced(use, x.type, names(left), (group,))
    rest = tuple(axis for axis in x.type.axes if not ids.type.has(axis.name))
    looked_up = Type(x.type.dtype, (*ids.type.axes, *rest))
    along = {"along": group.name}
    return Decomposition(
        (
            PrimitiveCall("stop_gradient", (x.value,), x.type, {}),
            PrimitiveCall("max_by", (PrimitiveResult(0), ids.value), grouped, by),
            PrimitiveCall("gather", (PrimitiveResult(1), ids.value), looked_up, along),
            PrimitiveCall("subtract", (x.value, PrimitiveResult(2)), x.type, {}),
            PrimitiveCall("exp", (PrimitiveResult(3),), x.type, {}),
            PrimitiveCall("sum_by", (PrimitiveResult(4), ids.value), grouped, by),
            PrimitiveCall("gather", (PrimitiveResult(5), ids.value), looked_up, along),
            PrimitiveCall("divide", (PrimitiveResult(4), PrimitiveResult(6)), x.type, {}),
        ),
        (7,),
    )
