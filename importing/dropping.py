"""What modules drop by numbers that they draw uniformly, as many drop the paths of layers:

    x.div(share) * (share + torch.rand(shape)).floor_()        x / share * (torch.rand(shape) < share)

A graph has these numbers, and drops in evaluation, too. Here zeros and ones are drawn instead, which the importer knows
as a dropout, where what they are multiplied with is divided by the share that stays.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import define
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partita.importing.draws import Draws, is_draw

NEAR = 1e-6
# Functions and methods by their names, without underscores, which in place and reflected are the same.
PRODUCTS, QUOTIENTS = ("mul", "multiply"), ("div", "truediv", "divide", "true_divide")
BELOW, ABOVE, CASTS = ("lt", "le", "less"), ("gt", "ge", "greater"), ("to", "float", "type", "type_as")


@define(eq=False)
class _Mask:
    """Zeros and ones, a share of which are ones: as they are drawn, and as a draw of their own."""

    drawn: Tensor
    share: float
    ones: Tensor | None = None


@define(eq=False)
class _Known:
    """What a result is, by its `kind`: `uniform` numbers and a number; a `mask`; a mask divided by a number (`scaled`);
    `x` divided by a number (`quotient`); the `product` of `x` and a mask.
    """

    result: Tensor
    kind: str
    number: float = 0.0
    mask: _Mask | None = None
    x: Tensor | None = None


class Dropping(TorchFunctionMode):
    """Within it, what is dropped so is dropped by zeros and ones that are drawn, and not by samples of `draws`."""

    def __init__(self, draws: Draws | None = None) -> None:
        super().__init__()
        self.draws = draws
        self.known: dict[int, _Known] = {}  # by identity of the results, which are kept

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "").strip("_")
        before = [self.known.get(id(each)) for each in args[:2]]
        replaced = self._replaced(function, name, args, before)
        if replaced is not None:
            return replaced
        made = function(*args, **kwargs)
        if isinstance(made, Tensor) and (function in (torch.rand, torch.rand_like) or any(before) or name in QUOTIENTS):
            found = self._kind(function, name, args, before, made)
            if found is not None:
                self.known[id(made)] = found
        return made

    def _kind(self, function: Any, name: str, args: Any, before: list[_Known | None], made: Tensor) -> _Known | None:
        """What a function makes of what is known."""
        if function in (torch.rand, torch.rand_like):
            return _Known(made, "uniform")
        one, other = before[0], args[1] if len(args) > 1 else None
        number = float(other) if isinstance(other, int | float) and not isinstance(other, bool) else None
        if one is not None and one.kind == "uniform":
            if name == "add" and number is not None:
                return _Known(made, "uniform", one.number + number)
            if name == "floor" and one.number:
                return _Known(made, "mask", mask=_Mask(made, one.number))
            if name in (*BELOW, *ABOVE) and number is not None and not one.number:
                return _Known(made, "mask", mask=_Mask(made, number if name in BELOW else 1 - number))
        if one is not None and one.kind == "mask" and name in CASTS:
            return _Known(made, "mask", mask=one.mask)
        if name in QUOTIENTS and number is not None and (one is None or one.kind == "mask"):
            if one is not None and one.mask is not None:
                return _Known(made, "scaled", number, one.mask) if abs(number - one.mask.share) < NEAR else None
            return _Known(made, "quotient", number, x=args[0])
        masks = [each for each in before if each is not None and each.kind == "mask"]
        if name in PRODUCTS and len(masks) == 1 and len(args) == 2:
            return _Known(made, "product", mask=masks[0].mask, x=args[1] if before[0] is masks[0] else args[0])
        return None

    def _replaced(self, function: Any, name: str, args: Any, before: list[_Known | None]) -> Tensor | None:
        """What is multiplied with zeros and ones, and divided by their share, in whichever order."""
        if name in PRODUCTS and len(args) == 2:
            for mine, theirs, x in ((before[0], before[1], args[1]), (before[1], before[0], args[0])):
                if mine is None or mine.mask is None:
                    continue
                if mine.kind == "scaled" and isinstance(x, Tensor):
                    return x * (self._ones(mine.mask) / mine.number)
                divided = theirs if mine.kind == "mask" and theirs is not None and theirs.kind == "quotient" else None
                if divided is not None and abs(divided.number - mine.mask.share) < NEAR:
                    return divided.result * self._ones(mine.mask)
        one = before[0] if before else None
        if name not in QUOTIENTS or one is None or one.kind != "product" or one.mask is None or one.x is None:
            return None
        if isinstance(args[1], float) and abs(args[1] - one.mask.share) < NEAR:
            return one.x * self._ones(one.mask) / args[1]
        return None

    def _ones(self, mask: _Mask) -> Tensor:
        """Zeros and ones of their own, drawn once."""
        if mask.ones is None:
            with torch._C.DisableTorchFunction():
                mask.ones = mask.drawn.new_empty(mask.drawn.shape, dtype=torch.get_default_dtype())
                mask.ones.bernoulli_(mask.share)
            if self.draws is not None:
                self.draws.samples.pop()  # which nothing reads
        return mask.ones


def without_samples(graph: torch.fx.Graph) -> None:
    """Erase numbers that are drawn, and all that is made of them, if nothing else is."""
    for draw in [node for node in graph.nodes if is_draw(str(node.target).removeprefix("aten."))]:
        found, waiting = {draw: None}, [draw]
        while waiting:
            new = [each for each in waiting.pop().users if each not in found]
            found |= dict.fromkeys(new)
            waiting += new
        if all(node.op == "call_function" for node in found):
            for node in [each for each in reversed(graph.nodes) if each in found]:
                graph.erase_node(node)
