"""The Python functions of operations that a file defines (`op`), and what they return.

Whatever goes wrong in them, or is wrong with what they return, is a diagnostic (E0622) at the `op`, with the lines of
the user's own that led there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, TypeAlias

import torch
from attrs import define
from torch import Tensor

from partita.dsl.spec import Model, Operation, PythonFunction
from partita.runtime.python_files import OperationFailed, imported, problem, raised, require_allowed

NAMES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
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
            given = [_alias(each) for each in operands]
            with self._guarded(function):
                found = self.forward(*given)
            return self._results(found, function, wanted, given)

    def gradients(self, ds: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of the float operands, given the cotangents of the float results. Raises OperationFailed."""
        function = self.operation.backward or self.operation.forward
        with _ordinary(), torch.no_grad():
            cotangents, given = [_alias(each) for each in ds], [_alias(each) for each in operands]
            if self.backward is None:
                return self._autograd(cotangents, given)
            with self._guarded(function):
                found = self.backward(*cotangents, *given)
            return self._gradients(found, function, cotangents, given)

    def _gradients(
        self, found: object, function: PythonFunction, ds: Sequence[Tensor], operands: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """What a function returned, if it is a gradient for each float operand."""
        floats = [each for each in operands if each.is_floating_point()]
        found = (found,) if isinstance(found, Tensor) else found
        if not isinstance(found, (tuple, list)) or len(found) != len(floats):
            have = f"{len(found)} values" if isinstance(found, (tuple, list)) else f"`{type(found).__name__}`"
            count = f"{len(floats)} gradient{'s' * (len(floats) > 1)}"
            message = f"`{function.name}` must return {count}, one for each float operand, not {have}"
            self._fail(function, message, [self._signature(operands)])
        names = [name for name, type in self.operation.operands if type.is_float]
        return tuple(
            self._result(each, function, f"gradient of `{name}`", tuple(x.shape), x.dtype, (*ds, *operands))
            for each, name, x in zip(found, names, floats, strict=True)
        )

    def _autograd(self, ds: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradients by torch, which runs the forward again."""
        function = self.operation.forward
        floats = [each.requires_grad_() for each in operands if each.is_floating_point()]
        with torch.enable_grad(), self._guarded(function):
            made = self.forward(*operands)
        made = (made,) if isinstance(made, Tensor) else made
        results = [x for x in made if x.is_floating_point()]
        pairs = [(x, d) for x, d in zip(results, ds, strict=True) if x.requires_grad]
        if not pairs:
            message = (
                f"autograd finds no path from the operands of `{function.name}` to its result, so there is no gradient"
            )
            self._fail(function, message, (), "write a `backward`, or call it with `stop_gradient`")
        with self._guarded(function):
            found = torch.autograd.grad([x for x, _ in pairs], floats, [d for _, d in pairs], allow_unused=True)
        return tuple(torch.zeros_like(x) if each is None else each for each, x in zip(found, floats, strict=True))

    # ------------------------------------------------------------ what functions return

    def _results(
        self, found: object, function: PythonFunction, wanted: Wanted, operands: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """What a function returned, if they are the results."""
        if len(wanted) == 1:
            return (self._result(found, function, "result", *wanted[0], operands),)
        if not isinstance(found, (tuple, list)) or len(found) != len(wanted):
            have = f"{len(found)} values" if isinstance(found, (tuple, list)) else f"`{type(found).__name__}`"
            message = f"`{function.name}` must return {len(wanted)} results, not {have}"
            self._fail(function, message, [self._signature(operands)])
        results: list[Tensor] = []
        for number, (each, want) in enumerate(zip(found, wanted, strict=True), 1):
            results.append(self._result(each, function, f"result {number}", *want, (*results, *operands)))
        return tuple(results)

    def _result(
        self,
        found: object,
        function: PythonFunction,
        what: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        operands: Sequence[Tensor],
    ) -> Tensor:
        """What a function returned, if it is a tensor of this shape and dtype on the device of the operands."""
        wanted = f"{NAMES[dtype]}{list(shape)}"
        if not isinstance(found, Tensor):
            have = "nothing" if found is None else f"`{type(found).__name__}`"
            self._fail(function, f"the {what} is {have}, not a tensor {wanted}", [self._signature(operands)])
        if tuple(found.shape) != shape or found.dtype != dtype:
            have = f"{NAMES.get(found.dtype, str(found.dtype))}{list(found.shape)}"
            self._fail(function, f"the {what} is {have}, not {wanted}", [self._signature(operands)])
        if operands and found.device != operands[0].device:
            devices = f"the {what} is on {found.device}, and the operands are on {operands[0].device}"
            self._fail(function, devices, [])
        memory = {each.untyped_storage().data_ptr() for each in operands}
        found = found.detach() if found.requires_grad else found
        # The program owns its tensors, and may add to them in place.
        return found.clone() if found.untyped_storage().data_ptr() in memory else found.contiguous()

    def _signature(self, operands: Sequence[Tensor]) -> str:
        """The operands of a call, for messages."""
        texts = [
            f"{NAMES.get(x.dtype, str(x.dtype))}{list(x.shape)}" for x in operands[-len(self.operation.operands) :]
        ]
        given = ", ".join(f"{name}: {text}" for (name, _), text in zip(self.operation.operands, texts, strict=False))
        return f"called with {given}"

    def _fail(self, function: PythonFunction, message: str, notes: Sequence[str], help: str | None = None) -> NoReturn:
        raise OperationFailed([problem("E0622", self.operation, function, message, notes, help)])

    @contextmanager
    def _guarded(self, function: PythonFunction) -> Iterator[None]:
        """Turns what the user's code raises into a diagnostic."""
        try:
            yield
        except (Exception, SystemExit) as error:
            message = f"`{function.name}` raised {type(error).__name__}"
            raise OperationFailed(
                [problem("E0622", self.operation, function, message, raised(error, function.source))]
            ) from error


def _ordinary() -> AbstractContextManager[object]:
    """What runs here makes ordinary tensors: those of inference mode, in which programs run, autograd does not take."""
    return torch.inference_mode(False)


def _alias(x: Tensor) -> Tensor:
    """The tensor as an ordinary one, contiguous; in the same memory if it is contiguous already."""
    x = x.contiguous()
    made = torch.empty(0, dtype=x.dtype, device=x.device)
    return made.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


Functions = Mapping[str, CustomFunction]
NO_FUNCTIONS: Functions = {}


def functions_of(model: Model | None, allowed: bool) -> Functions:
    """The functions of a model's operations, by name. Imports their files, if that is `allowed`.

    Raises Refused: E0620 if it is not; E0621 for a file that cannot be imported, or has no such function.
    """
    require_allowed(model, allowed)
    operations = model.operations.values() if model is not None else ()
    found = {}
    for each in operations:
        forward, *backward = (imported(each, function) for function in each.functions)
        found[each.name] = CustomFunction(each, forward, backward[0] if backward else None)
    return found
