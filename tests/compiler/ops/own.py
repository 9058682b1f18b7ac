"""Operations of one's own for cases of operations, and their functions."""

from __future__ import annotations

import torch

from partita.dsl.spec import Literal, Operation, PythonFunction
from partita.dsl.syntax.source import Source, Span
from partita.dsl.types import Axis, Type
from partita.runtime.python_functions import CustomFunction, CustomUpdate

_PLACE = Span(Source("own.py", ""), 0, 0)
_A, _B = Axis("a", 6), Axis("b", 6)
_MATRIX, _ROW = Type("f64", (_A, _B)), Type("f64", (_B,))
_COLUMN, _COUNTS = Type("f64", (_A,)), Type("i64", (_A, _B))


def weighted(x, w):
    return torch.softmax(x, -1) * w


def weighted_backward(d, x, w):
    p = torch.softmax(x, -1)
    g = d * w
    return p * (g - (p * g).sum(-1, keepdim=True)), (d * p).sum(0)


def both(x, w):
    return torch.softmax(x, -1) * torch.tanh(w), (x * x).sum(-1), (x > 0).long()


def scaled(x, ids):
    return x * (ids + 1)[:, None]


def _operation(name: str, second: Type, backward: bool, more: tuple[Type, ...] = ()) -> Operation:
    function = PythonFunction(_PLACE.source, name, _PLACE)
    operands = (("x", _MATRIX), ("y", second))
    return Operation(
        name,
        operands,
        results=(_MATRIX, *more),
        forward=function,
        backward=function if backward else None,
        split=(),
        linear=(),
        flops=Literal(1),
        ties={},
        span=_PLACE,
        split_spans=(),
        linear_spans=(),
    )


def descended(parameter, gradient, mean, *, lr, step, weight_decay):
    mean.mul_(0.5).add_(gradient)
    parameter.mul_(1 - lr * weight_decay).sub_(mean / step, alpha=lr)


FUNCTIONS = {
    "descended": CustomUpdate(PythonFunction(_PLACE.source, "descended", _PLACE), descended),
    "weighted": CustomFunction(_operation("weighted", _ROW, True), weighted, weighted_backward),
    "by_autograd": CustomFunction(_operation("by_autograd", _ROW, False), weighted, None),
    "both": CustomFunction(_operation("both", _ROW, False, (_COLUMN, _COUNTS)), both, None),
    "scaled": CustomFunction(_operation("scaled", Type("i64", (_A,)), False), scaled, None),
}
