"""Tensor types (named axes with sizes, and a dtype), shared by the language, the graph and the runtime."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache
from math import prod

from attrs import frozen

FLOATS = ("f32", "bf16", "f64")
INTEGERS = ("i64", "i32", "i8", "u8")
INDICES = ("i64", "i32")  # what ids are, and what sums of integers are kept in
DTYPES = (*FLOATS, *INTEGERS, "bool")
BYTES = {"f32": 4, "bf16": 2, "f64": 8, "i64": 8, "i32": 4, "i8": 1, "u8": 1, "bool": 1}


def integers(dtype: str) -> range:
    """The integers that a dtype holds, one of `INTEGERS`."""
    bits = 8 * BYTES[dtype]
    return range(1 << bits) if dtype.startswith("u") else range(-(1 << bits - 1), 1 << bits - 1)


@frozen
class Axis:
    """A named axis; within a program an axis name has one size (except for the microbatch's part of it)."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@frozen(cache_hash=True)
class Type:
    """The type of a tensor. The order of `axes` is the memory order, slowest first; it has no other meaning. What is
    derived is kept: a program has few types, each of many values.
    """

    dtype: str
    axes: tuple[Axis, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.axes))}]"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Axis names in order."""
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes in order."""
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @cached_property
    def bytes(self) -> int:
        """The number of bytes, densely packed."""
        return self.elements * BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        """Whether the dtype is one of the floating-point ones."""
        return self.dtype in FLOATS

    def has(self, name: str) -> bool:
        """Whether one of the axes is called `name`."""
        return name in self.names

    def axis(self, name: str) -> Axis:
        """The axis called `name`. Raises KeyError if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(name)

    def position(self, name: str) -> int:
        """The index of the axis called `name`."""
        return self.names.index(name)

    def without(self, names: Iterable[str]) -> Type:
        """This type with the named axes removed."""
        removed = frozenset(names)
        return Type(self.dtype, tuple(axis for axis in self.axes if axis.name not in removed))

    def with_dtype(self, dtype: str) -> Type:
        """The same axes with another dtype."""
        return self if dtype == self.dtype else Type(dtype, self.axes)

    def resized(self, name: str, size: int) -> Type:
        """This type with the size of one axis changed; unchanged if it has no such axis."""
        return _resized(self, name, size) if self.has(name) else self


@lru_cache(maxsize=4096)
def _resized(type: Type, name: str, size: int) -> Type:
    """The same object for the same arguments, so that what is derived of it is computed once."""
    return Type(type.dtype, tuple(Axis(name, size) if axis.name == name else axis for axis in type.axes))
