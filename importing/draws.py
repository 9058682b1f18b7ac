"""Random numbers that a module draws: samples of the file, which in a proof are given to both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations of ATen that draw numbers, in place and not, without their overloads.
DRAWN = re.compile(r"(rand|randn|randint)(_like)?|(normal|uniform|exponential|bernoulli)(_functional)?_?")


@frozen
class Draw:
    """A sample of the language: `normal` with a deviation, `uniform` up to a bound, or `integers` below one."""

    kind: str
    size: float

    def __str__(self) -> str:
        return f"{self.kind}({self.size:g})"

    def tensor(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """A sample of this shape."""
        if self.kind == "integers":
            return torch.randint(int(self.size), shape, generator=generator)
        if self.kind == "normal":
            return torch.randn(shape, generator=generator, dtype=torch.float64) * self.size
        return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * self.size


def is_draw(operation: str) -> bool:
    """Whether an operation of ATen, such as `rand.default`, draws random numbers."""
    return DRAWN.fullmatch(operation.partition(".")[0]) is not None


def is_dropping(operation: str) -> bool:
    """Whether one draws zeros and ones with a given probability."""
    return operation in ("bernoulli.p", "bernoulli_.float")


def drawn(operation: str, a: Mapping[str, Any]) -> tuple[Draw, list[tuple[str, Any]]]:
    """What an operation draws: a sample, and elementwise functions of it, each with its second operand."""
    kind = operation.partition(".")[0].removesuffix("_").removesuffix("_functional")
    if kind.startswith("randint"):
        low = a.get("low") or 0
        return Draw("integers", a["high"] - low), [("add", low)]
    if kind.startswith("randn"):
        return Draw("normal", 1.0), []
    if kind.startswith("rand"):
        return Draw("uniform", 0.5), [("add", 0.5)]
    if kind == "uniform":
        low, high = a.get("from", 0.0), a.get("to", 1.0)
        return Draw("uniform", (high - low) / 2), [("add", (low + high) / 2)]
    if kind == "normal":
        mean, deviation = a.get("mean", 0.0), a.get("std", 1.0)
        if isinstance(deviation, int | float):
            return Draw("normal", deviation), [("add", mean)]
        return Draw("normal", 1.0), [("multiply", deviation), ("add", mean)]
    if kind == "exponential":  # of torch it is neither zero nor infinite
        bounds = [("maximum", 1e-7), ("minimum", 1 - 1e-7)]
        return Draw("uniform", 0.5), [("add", 0.5), *bounds, ("log", None), ("multiply", -1 / a.get("lambd", 1.0))]
    return Draw("uniform", 0.5), [("add", 0.5), ("less", a.get("p", a["self"]))]  # bernoulli, with probabilities


class Draws(TorchDispatchMode):
    """Within it, the random numbers of a module are those of a seed, in the order in which they are drawn; `samples`
    has what they are made of. Nothing is dropped: each that stays with a probability is that probability, which a
    module divides by.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.samples: list[Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = str(function).removeprefix("aten."), dict(kwargs or {})
        if not is_draw(name):
            return function(*args, **kwargs)
        given = {each.name: own for each, own in zip(function._schema.arguments, args, strict=False)} | kwargs
        tensors = [each for each in given.values() if isinstance(each, Tensor)]
        like = next(iter(tensors), None)
        shape = torch.Size(given["size"]) if "size" in given else sum(tensors[1:], tensors[0]).shape
        usual = torch.int64 if name.startswith("randint") else torch.get_default_dtype()
        dtype = given.get("dtype") or (usual if like is None else like.dtype)
        if is_dropping(name):
            made = torch.full(shape, given.get("p", 0.5), dtype=dtype)
        else:
            draw, made_of = drawn(name, given)
            generator = torch.Generator().manual_seed(1000 * self.seed + len(self.samples))
            made = draw.tensor(shape, generator)
            self.samples.append(made)
            for each, other in made_of:
                made = getattr(torch, each)(made, *([] if other is None else [torch.as_tensor(other)]))
            made = made.to(dtype)
        return args[0].copy_(made) if function._schema.is_mutable else made
