"""The Python functions of operations that a file defines (`op`), and what they return.

Whatever goes wrong in them, or is wrong with what they return, is a diagnostic (E0622) at the `op`, with the lines of
the user's own that led there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeAlias

import torch
from attrs import define
from torch import Tensor

from partita.compiler.optimizers.python import update_functions
from partita.dsl.spec import Model, Operation, PythonFunction, Spec
from partita.runtime.python_files import (
    OperationFailed,
    called,
    guarded,
    imported,
    problem,
    require_allowed,
    require_python,
)

# What messages call an optimizer of a file's own.
UPDATE = "optimizer `python`"
NAMES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


# The shape and dtype of each result.
Wanted: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]


@define(eq=False)
class CustomFunction:
    """An operation's functions, ready to be called. Tensors come with their axes as declared, contiguous."""

    operation: Operation
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None

    def __call__(self, operands: Sequence[Tensor], wanted: Wanted) -> tuple[Tensor, ...]:
        """The results, of these shapes and dtypes. Raises OperationFailed."""
        function = self.operation.forward
        with _ordinary(), torch.no_grad():
            aliases = [_alias(each) for each in operands]
            with self._guarded(function):
                returned = self.forward(*aliases)
            return self._results(returned, function, wanted, aliases)

    def gradients(self, ds: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of the float operands, given the cotangents of the float results. Raises OperationFailed."""
        function = self.operation.backward or self.operation.forward
        with _ordinary(), torch.no_grad():
            cotangents, aliases = [_alias(each) for each in ds], [_alias(each) for each in operands]
            if self.backward is None:
                return self._autograd(cotangents, aliases)
            with self._guarded(function):
                returned = self.backward(*cotangents, *aliases)
            return self._gradients(returned, function, cotangents, aliases)

    def _gradients(
        self, returned: object, function: PythonFunction, ds: Sequence[Tensor], operands: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """What a function returned, if it is a gradient for each float operand."""
        floats = [each for each in operands if each.is_floating_point()]
        returned = (returned,) if isinstance(returned, Tensor) else returned
        if not isinstance(returned, (tuple, list)) or len(returned) != len(floats):
            have = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"`{type(returned).__name__}`"
            count = f"{len(floats)} gradient{'s' * (len(floats) > 1)}"
            message = f"`{function.name}` must return {count}, one for each float operand, not {have}"
            self._fail(function, message, [self._signature(operands)])
        names = [name for name, type in self.operation.operands if type.is_float]
        return tuple(
            self._result(each, function, f"gradient of `{name}`", tuple(x.shape), x.dtype, (*ds, *operands))
            for each, name, x in zip(returned, names, floats, strict=True)
        )

    def _autograd(self, ds: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradients by torch, which runs the forward again."""
        function = self.operation.forward
        floats = [each.requires_grad_() for each in operands if each.is_floating_point()]
        with torch.enable_grad(), self._guarded(function):
            returned = self.forward(*operands)
        returned = (returned,) if isinstance(returned, Tensor) else returned
        results = [x for x in returned if x.is_floating_point()]
        pairs = [(x, d) for x, d in zip(results, ds, strict=True) if x.requires_grad]
        if not pairs:
            message = (
                f"autograd finds no path from the operands of `{function.name}` to its result, so there is no gradient"
            )
            self._fail(function, message, (), "write a `backward`, or call it with `stop_gradient`")
        with self._guarded(function):
            gradients = torch.autograd.grad([x for x, _ in pairs], floats, [d for _, d in pairs], allow_unused=True)
        return tuple(torch.zeros_like(x) if each is None else each for each, x in zip(gradients, floats, strict=True))

    # ------------------------------------------------------------ what functions return

    def _results(
        self, returned: object, function: PythonFunction, expected: Wanted, operands: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """What a function returned, if they are the results."""
        if len(expected) == 1:
            return (self._result(returned, function, "result", *expected[0], operands),)
        if not isinstance(returned, (tuple, list)) or len(returned) != len(expected):
            have = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"`{type(returned).__name__}`"
            message = f"`{function.name}` must return {len(expected)} results, not {have}"
            self._fail(function, message, [self._signature(operands)])
        results: list[Tensor] = []
        for number, (each, want) in enumerate(zip(returned, expected, strict=True), 1):
            results.append(self._result(each, function, f"result {number}", *want, (*results, *operands)))
        return tuple(results)

    def _result(
        self,
        returned: object,
        function: PythonFunction,
        what: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        operands: Sequence[Tensor],
    ) -> Tensor:
        """What a function returned, if it is a tensor of this shape and dtype on the device of the operands."""
        expected = f"{NAMES[dtype]}{list(shape)}"
        if not isinstance(returned, Tensor):
            have = "nothing" if returned is None else f"`{type(returned).__name__}`"
            self._fail(function, f"the {what} is {have}, not a tensor {expected}", [self._signature(operands)])
        if tuple(returned.shape) != shape or returned.dtype != dtype:
            have = f"{NAMES.get(returned.dtype, str(returned.dtype))}{list(returned.shape)}"
            self._fail(function, f"the {what} is {have}, not {expected}", [self._signature(operands)])
        if operands and returned.device != operands[0].device:
            devices = f"the {what} is on {returned.device}, and the operands are on {operands[0].device}"
            self._fail(function, devices, [])
        memory = {each.untyped_storage().data_ptr() for each in operands}
        returned = returned.detach() if returned.requires_grad else returned
        # The program owns its tensors, and may add to them in place.
        return returned.clone() if returned.untyped_storage().data_ptr() in memory else returned.contiguous()

    def _signature(self, operands: Sequence[Tensor]) -> str:
        """The operands of a call, for messages."""
        texts = [
            f"{NAMES.get(x.dtype, str(x.dtype))}{list(x.shape)}" for x in operands[-len(self.operation.operands) :]
        ]
        inputs = ", ".join(f"{name}: {text}" for (name, _), text in zip(self.operation.operands, texts, strict=False))
        return f"called with {inputs}"

    def _fail(self, function: PythonFunction, message: str, notes: Sequence[str], help: str | None = None) -> NoReturn:
        raise OperationFailed([problem("E0622", called(self.operation), function, message, notes, help)])

    def _guarded(self, function: PythonFunction) -> AbstractContextManager[None]:
        return guarded(called(self.operation), function)


def _ordinary() -> AbstractContextManager[object]:
    """What runs here makes ordinary tensors: those of inference mode, in which programs run, autograd does not take."""
    return torch.inference_mode(False)


def _alias(x: Tensor) -> Tensor:
    """The tensor as an ordinary one, contiguous; in the same memory if it is contiguous already."""
    x = x.contiguous()
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


@define(eq=False)
class CustomUpdate:
    """An optimizer's function, which updates tensors in place, each element by itself."""

    function: PythonFunction
    run: Callable[..., Any]

    def update(
        self, parameter: Tensor, gradient: Tensor, states: Sequence[Tensor], rate: float, number: int, decay: float
    ) -> None:
        """Update a parameter and its states, the `number`-th time. Raises OperationFailed."""
        written = (parameter, *states)
        with _ordinary(), torch.no_grad():
            aliases = [_alias(each) for each in written]
            with guarded(UPDATE, self.function, f"it is called as `{self.signature(len(states))}`"):
                self.run(aliases[0], _alias(gradient), *aliases[1:], lr=rate, step=number, weight_decay=decay)
        for tensor, alias in zip(written, aliases, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(alias)

    def signature(self, states: int) -> str:
        """How it is called, with so many states."""
        names = "".join(f", state{number}" for number in range(1, states + 1))
        return f"{self.function.name}(parameter, gradient{names}, lr=…, step=…, weight_decay=…)"


Functions = Mapping[str, CustomFunction | CustomUpdate]
NO_FUNCTIONS: Functions = {}


def functions_of(model: Model | None, allowed: bool) -> dict[str, CustomFunction]:
    """The functions of a model's operations, by name. Imports their files, if that is `allowed`.

    Raises Refused: E0620 if it is not; E0621 for a file that cannot be imported, or has no such function.
    """
    require_allowed(model, allowed)
    operations = model.operations.values() if model is not None else ()
    functions: dict[str, CustomFunction] = {}
    for each in operations:
        forward, *backward = (imported(called(each), function) for function in each.functions)
        functions[each.name] = CustomFunction(each, forward, backward[0] if backward else None)
    return functions


def all_functions(spec: Spec, allowed: bool) -> Functions:
    """The functions of a file's operations and of its optimizer. Raises Refused, as `functions_of`."""
    require_python(spec, allowed)
    operations = functions_of(spec.model, allowed)
    updates = update_functions(spec.train)
    return {**operations, **{key: CustomUpdate(each, imported(UPDATE, each)) for key, each in updates.items()}}
