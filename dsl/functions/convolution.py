"""Typing rules of what looks at an image through a sliding window: `patches` and `conv`.

A window slides along some axes, and an arrow says which axis has its positions along which:
`[height, width] -> [rows, columns]`. A position's axis stands where the axis that it comes from stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from partita.dsl.advice.report import listed
from partita.dsl.functions.reshaping import unique
from partita.dsl.functions.signatures import AXES, NUMBER, NUMBERS, Slot, Typed, Use, function, names
from partita.dsl.types import INTEGERS, Axis, Type, integers

# How the window slides: how far at a time, how much lies outside at either end, how far apart its elements are.
SLIDING = (Slot("stride", NUMBERS, 1), Slot("padding", NUMBERS, 0), Slot("dilation", NUMBERS, 1))
MOST_AXES = 3  # of torch's convolution

# What is meant by a number where an axis is named.
SIZES = {
    "size": "declare the axes of the window: `axis kh = 3, kw = 3`, and write `size = [kh, kw]`",
    "groups": "split the channels: `split(x, channels -> [groups, part])`, and write `groups = groups, over = part`",
}
EXAMPLES = {
    "patches": "patches(image, [height, width] -> [rows, columns], size = [kh, kw])",
    "conv": "conv(image, kernel, [height, width] -> [rows, columns], over = channels)",
}


@frozen
class Window:
    """A window along one axis: its elements are `size`, its positions `into`, and `padding` is (before, after)."""

    axis: Axis
    into: Axis
    size: Axis
    stride: int
    padding: tuple[int, int]
    dilation: int

    @property
    def extent(self) -> int:
        """The elements that it spans."""
        return self.dilation * (self.size.size - 1) + 1

    @property
    def positions(self) -> int:
        """How many positions it has."""
        return (self.axis.size + sum(self.padding) - self.extent) // self.stride + 1


def _slid(use: Use, size: Sequence[Axis]) -> list[Window]:
    """The windows along the axes on the left of the arrow, without regard to their positions. Raises Refused."""
    left, right = use.arrows[0].left, use.arrows[0].right
    strides = [_integer(use, "stride", each, 1) for each in _for_each(use, "stride")]
    paddings = [_ends(use, each) for each in _for_each(use, "padding")]
    dilations = [_integer(use, "dilation", each, 1) for each in _for_each(use, "dilation")]
    return [Window(*each) for each in zip(left, right, size, strides, paddings, dilations, strict=True)]


def _for_each(use: Use, slot: str) -> Sequence[Any]:
    """A number for each axis on the left of the arrow: one for all of them, or a list."""
    axes, value = use.arrows[0].left, use[slot]
    if not isinstance(value, tuple):
        return [value] * len(axes)
    if len(value) != len(axes):
        along = listed(names(axes), "and")
        raise use.refuse("E0212", f"`{slot}` is one number, or a list with one for each of {along}", slot)
    return value


def _integer(use: Use, slot: str, value: Any, minimum: int) -> int:
    if isinstance(value, tuple):
        raise use.refuse("E0212", f"`{slot}` is one number, or a list of numbers", slot)
    if value != int(value) or value < minimum or value >= 1 << 31:
        kind = "positive" if minimum else "non-negative"
        raise use.refuse("E0214", f"`{slot}` must be a {kind} integer", slot)
    return int(value)


def _ends(use: Use, value: Any) -> tuple[int, int]:
    """Padding before and after an axis: a number for both, or a list of two."""
    if isinstance(value, tuple) and len(value) != 2:
        raise use.refuse("E0212", "padding of two different ends is a list of two: `[[before, after], …]`", "padding")
    before, after = value if isinstance(value, tuple) else (value, value)
    return _integer(use, "padding", before, 0), _integer(use, "padding", after, 0)


def _arrow(use: Use, slot: str) -> None:
    """Check the arrow: as many axes on the right as on the left, each once, and those on the left on the image."""
    (arrow,) = use.arrows
    if len(arrow.left) != len(arrow.right) or not arrow.left:
        message = f"`{use.function}` takes as many axes on the right of the arrow as on the left"
        raise use.refuse("E0223", message, "->", "`[height, width] -> [rows, columns]`")
    for side in (arrow.left, arrow.right):
        if len(set(names(side))) < len(side):
            raise use.refuse("E0223", f"`{use.function}` names an axis twice", "->")
    use.has(slot, arrow.left, "->")


def _positions(use: Use, windows: Sequence[Window], guessed: bool = False) -> None:
    """Check that windows fit, and that their positions have the axes that they need (E0215). `guessed`: the axes of the
    window are the kernel's first.
    """
    for each in windows:
        padded = each.axis.size + sum(each.padding)
        other = f"`size = […]`, if `{each.size.name}` is not the window's axis along `{each.axis.name}`"
        if each.extent > padded:
            message = f"a window of {each.extent} along `{each.axis.name}` does not fit into {padded}"
            raise use.refuse("E0215", message, "->", other if guessed else None, (each.axis, each.size))
        if each.into.size != each.positions:
            count = f"({padded} - {each.extent}) / {each.stride} + 1"
            count += ", rounded down" if (padded - each.extent) % each.stride else ""
            message = f"a window along `{each.axis.name}` has {each.positions} positions ({count}), "
            message += f"and `{each.into.name}` has size {each.into.size}"
            help = "; or ".join([*_fitting(each), *([other] if guessed else [])])
            raise use.refuse("E0215", message, "->", help, (each.axis, each.size, each.into))


def _fitting(window: Window) -> list[str]:
    """What makes the positions as many as the size of their axis."""
    missing = (window.into.size - 1) * window.stride + window.extent - window.axis.size
    sized = [f"`axis {window.into.name} = {window.positions}`"] if window.into != window.axis else []
    if missing < 0:
        return sized or ["give the positions an axis of their own"]
    before, after = missing - missing // 2, missing // 2
    return [*sized, f"padding of {before}" if before == after else f"padding of {before} before and {after} after"]


def _patches(use: Use, image: Type, windows: Sequence[Window]) -> Type:
    """The type of the patches: the positions in place of the axes slid along, then the axes of the windows."""
    into = {each.axis.name: each.into for each in windows}
    axes = [into.get(axis.name, axis) for axis in image.axes]
    return unique(use, Type(image.dtype, (*axes, *(each.size for each in windows))))


def _options(windows: Sequence[Window]) -> dict[str, Any]:
    return {
        "axes": tuple(each.axis.name for each in windows),
        "into": tuple(each.into.name for each in windows),
        "size": tuple(each.size.name for each in windows),
        "stride": tuple(each.stride for each in windows),
        "padding": tuple(each.padding for each in windows),
        "dilation": tuple(each.dilation for each in windows),
    }


@function("patches", slots=["image", Slot("size", AXES), *SLIDING, Slot("fill", NUMBER, 0)], arrows=(1, 1))
def _patches_of(use: Use) -> Typed:
    _arrow(use, "image")
    image, left, size = use["image"].type, use.arrows[0].left, use["size"]
    if len(size) != len(left):
        message = f"`size` names the axes of a window: one for each of {listed(names(left), 'and')}"
        raise use.refuse("E0212", message, "size")
    windows = _slid(use, size)
    type = _patches(use, image, windows)
    _positions(use, windows)
    return type, _options(windows) | {"fill": _fill(use, image.dtype)}


def _fill(use: Use, dtype: str) -> float:
    """What lies outside of the image."""
    fill = use["fill"]
    if dtype in INTEGERS and (fill != int(fill) or int(fill) not in integers(dtype)):
        raise use.refuse("E0214", f"`fill` must be an integer: `{use['image'].text}` is {dtype}", "fill")
    if dtype == "bool" and fill:
        raise use.refuse("E0205", f"`{use['image'].text}` is bool: outside of it is false", "fill")
    return int(fill) if dtype in INTEGERS else float(fill)


@function(
    "conv",
    slots=[*("image", "kernel"), Slot("over", AXES, ()), *SLIDING, Slot("groups", AXES, ()), Slot("size", AXES, None)],
    arrows=(1, 1),
)
def _conv(use: Use) -> Typed:
    """`dot` of the patches and the kernel, over the channels and the axes of the window."""
    dtype = use.floating("image", "kernel")
    _arrow(use, "image")
    image, kernel, left = use["image"].type, use["kernel"].type, use.arrows[0].left
    if len(left) > MOST_AXES:
        raise use.refuse("E0223", f"`conv` slides along at most {MOST_AXES} axes", "->")
    over, groups = use["over"], use["groups"]
    for slot in ("over", "groups"):
        for axis in use[slot]:
            if axis in left:
                raise use.refuse("E0204", f"the window slides along `{axis.name}`", slot)
            use.has("image", [axis], slot)
            use.has("kernel", [axis], slot)
            if slot == "groups" and axis in over:
                raise use.refuse("E0204", f"`{axis.name}` is in `over` and in `groups`", slot)
    windows = _slid(use, _window_of(use, image, kernel))
    patches = _patches(use, image, windows)
    shared = (*over, *groups, *(each.size for each in windows))
    filters = tuple(axis for axis in kernel.axes if axis not in shared)
    for axis in filters:
        if image.has(axis.name):
            message = f"both `{use['image'].text}` and `{use['kernel'].text}` have `{axis.name}`"
            help = "the window slides along it" if axis in left else f"`over = {axis.name}`, or `groups = {axis.name}`"
            raise use.refuse("E0204", message, "kernel", help)
    first = next((axis for axis in image.axes if axis in over), None)
    axes: list[Axis] = []
    for axis, position in zip(image.axes, patches.axes, strict=False):
        if axis == first:
            axes.extend(filters)
        if axis not in over:
            axes.append(position)
    if first is None:
        axes.extend(filters)
    type = unique(use, Type(dtype, tuple(axes)))
    _positions(use, windows, use["size"] is None)
    return type, _options(windows) | {"over": names(over)}


def _window_of(use: Use, image: Type, kernel: Type) -> tuple[Axis, ...]:
    """The axes of the window, in the order of those that it slides along: as `size` says, or the kernel's first ones
    that the image does not have.
    """
    left, text = use.arrows[0].left, use["kernel"].text
    along = listed(names(left), "and")
    if use["size"] is None:
        own = tuple(axis for axis in kernel.axes if not image.has(axis.name))
        if len(own) < len(left):
            message = f"`{text}` has too few axes of its own for a window along {along}"
            raise use.refuse("E0204", message, "kernel", f"axes of `{text}`: {', '.join(kernel.names) or 'none'}")
        return own[: len(left)]
    size: tuple[Axis, ...] = use["size"]
    use.has("kernel", size, "size")
    if len(size) != len(left):
        message = f"`size` names the axes of the window: one for each of {along}"
        raise use.refuse("E0212", message, "size")
    for axis in size:
        if axis in use["over"] or axis in use["groups"]:
            raise use.refuse("E0204", f"`{axis.name}` is an axis of the window, and cannot be shared", "size")
    return size
