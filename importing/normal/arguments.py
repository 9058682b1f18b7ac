"""What an operation of ATen is, by a function for each; an argument that no function consumed is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from partita.importing.graph import Value


class Arguments:
    """The arguments of an operation. Each is consumed by being read; those left must be what they are by default."""

    def __init__(self, value: Value) -> None:
        self.value, self.left = value, dict(value.args)

    def __getitem__(self, name: str) -> Any:
        self.left.pop(name, None)
        return self.value.args.get(name, self.value.defaults.get(name))

    def ignored(self, *names: str) -> None:
        """Consume what does not change any number: a device, a memory format."""
        for name in names:
            self.left.pop(name, None)

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """A dimension, counted from the front."""
        return int(self[name]) % (self.value.args["self"].rank if rank is None else rank)

    def settle(self) -> None:
        """Raises NotUnderstood if an argument is left."""
        for name, given in self.left.items():
            default = self.value.defaults.get(name)
            if given is not None and (isinstance(given, Value) or given != default):
                shown = "a tensor" if isinstance(given, Value) else given
                operation = self.value.op.partition(".")[0]
                raise self.value.refuse(f"{operation}({name} = {shown}): argument not understood")


Saying: TypeAlias = Callable[[Value, Arguments], Value]
OPERATIONS: dict[str, Saying] = {}
PLACES = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "implicit")


def aten(*names: str) -> Callable[[Saying], Saying]:
    """Register what operations of ATen are, by their names with overload."""

    def register(function: Saying) -> Saying:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return register


Part: TypeAlias = Callable[[Value, Arguments, int], Value]
SEVERAL: dict[str, Part] = {}


def several(*names: str) -> Callable[[Part], Part]:
    """Register what the results of operations of ATen are that have several, each by its index."""

    def register(function: Part) -> Part:
        SEVERAL.update(dict.fromkeys(names, function))
        return function

    return register


def known() -> set[str]:
    """The names of all operations of ATen that are understood."""
    return OPERATIONS.keys() | SEVERAL.keys()


def normal(value: Value) -> Value | None:
    """What an operation of ATen is; None for what is none, or one without a function, which the solver refuses."""
    function = OPERATIONS.get(value.op)
    if function is None:
        return None
    arguments = Arguments(value)
    made = function(value, arguments)
    arguments.ignored(*PLACES)
    arguments.settle()
    if value.constant is not None and made.constant is None and made.op != "constant":
        made.constant = value.constant
    made.varies = made.varies or (value.varies and made.constant is not None)
    return made
