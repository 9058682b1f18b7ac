"""Modules that return outputs alone: a loss in words, `cross_entropy(logits, targets)`, becomes part of `forward`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from copy import copy
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from partita.dsl.diagnostic import Refused, refuse, shown

FORMS = "`cross_entropy(logits, targets)`, `mse(a, b)` or `binary_cross_entropy(logits, targets)`"


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Classes are the last axis of logits, or else the second, as torch has it."""
    if logits.shape[:-1] == targets.shape:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    return F.cross_entropy(logits, targets)


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "mse": F.mse_loss,
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
}


def with_loss(module: nn.Module, inputs: Mapping[str, Tensor], text: str) -> nn.Module:
    """The module with the same parameters, whose `forward` takes all inputs, and returns a loss after its outputs.

    Names in the loss are keys of what the module returns, `outputs[0]` of a tuple, or inputs. Where it returns one
    tensor, a name that is no input is that of this tensor. Raises Refused (E1204) for other texts.
    """
    function, operands = _read(text)
    taken = inspect.signature(module.forward).parameters
    every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    named = {each for each, _ in operands}
    own = [name for name in inputs if name in taken or (every and name not in named)]

    def forward(self: nn.Module, **given: Tensor) -> object:
        return _measured(inner(self, **{name: given[name] for name in own}), given)

    def _measured(result: Any, given: Mapping[str, Tensor]) -> object:
        if isinstance(result, Tensor):
            result = {next((name for name, _ in operands if name not in given), "output"): result}
        values = [_value(name, index, result, given) for name, index in operands]
        loss = LOSSES[function](*values)
        return {**result, "loss": loss} if isinstance(result, Mapping) else {"outputs": result, "loss": loss}

    inner: Callable[..., Any] = getattr(module.forward, "__func__", type(module).forward)
    measured = copy(module)
    vars(measured)["forward"] = MethodType(forward, measured)
    return measured


def _read(text: str) -> tuple[str, list[tuple[str, int | None]]]:
    """The function of a loss, and its operands: names, with an index of those that are of a tuple."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unusable(text) from None
    operands: list[tuple[str, int | None]] = []
    match tree:
        case ast.Call(func=ast.Name(id=function), args=args, keywords=[]) if function in LOSSES and len(args) == 2:
            for each in args:
                match each:
                    case ast.Name(id=name):
                        operands.append((name, None))
                    case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(index))):
                        operands.append((name, index))
                    case _:
                        raise _unusable(text)
            return function, operands
    raise _unusable(text)


def _unusable(text: str) -> Refused:
    return refuse("E1204", f"the loss `{shown(text)}` is none of {FORMS}")


def _value(name: str, index: int | None, result: Any, given: Mapping[str, Tensor]) -> Tensor:
    if name in given and index is None:
        return given[name]
    if isinstance(result, Mapping):
        found = result.get(name)
        if isinstance(found, Tensor):
            return found
        known = [f"`{each}`" for each in (*result, *given)]
        raise refuse("E1204", f"the loss names `{name}`, which is neither returned nor an input: {', '.join(known)}")
    each = result[index] if isinstance(result, list | tuple) and index is not None and index < len(result) else None
    if not isinstance(each, Tensor):
        message = f"the loss names `{name}`, and the module returns a {type(result).__name__}"
        raise refuse("E1204", message, help="of a tuple, `outputs[0]` is the first; of a dictionary, a key names one")
    return each
