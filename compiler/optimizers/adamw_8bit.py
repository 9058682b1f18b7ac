"""AdamW with states of eight bits an element, each block of elements scaled by its largest."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from partita.compiler.ops.op import Argument, ShardingRule, agree, op
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.traits import CachesTable
from partita.compiler.optimizers.adamw import SETTINGS, adamw
from partita.compiler.optimizers.registry import Optimizer, Trained, register, with_larger_eps
from partita.dsl.config.builtins import COUNT, DECAY, INDEX, Setting
from partita.dsl.types import BYTES, Axis, Type

# Blocks in `verify`'s small tensors.
PROXY_BLOCK = 2


@op("adamw_8bit")
class AdamW8bit(CachesTable, Update):
    """AdamW with quantized states (Dettmers et al., arXiv 2110.02861): each element is a code of the dynamic map of
    eight bits, times the largest magnitude of its block of `block` elements.

    Blocks are of the whole parameter, in the order of its axes, so that a layout does not change them: shards consist
    of whole blocks.
    """

    beta1: float
    beta2: float
    eps: float
    decay: float
    block: int
    states = ("mean", "mean_scale", "square", "square_scale")
    results = ("", "mean", "mean_scale", "square", "square_scale")

    def _scales(self, parameter: Type) -> Type:
        """One number for each block: the axes around blocks, and that of which a block has several entries."""
        inside = 1
        for i, axis in reversed(list(enumerate(parameter.axes))):
            if inside * axis.size >= self.block:
                entries = self.block // inside
                if self.block % inside == 0 and axis.size % entries == 0:
                    return Type(parameter.dtype, (*parameter.axes[:i], Axis(axis.name, axis.size // entries)))
                break
            inside *= axis.size
        return Type(parameter.dtype, (Axis("block", -(-parameter.elements // self.block)),))

    def state_types(self, parameter: Type) -> tuple[Type, ...]:
        """Codes of the elements and scales of the blocks."""
        codes, scales = parameter.with_dtype("u8"), self._scales(parameter)
        return codes, scales, codes, scales

    def splits(self, parameter: Type, axis: str, parts: int) -> bool:
        """Along axes around whole blocks."""
        scales = self._scales(parameter)
        whole = len(scales.axes) > 1 or scales.names[0] == parameter.names[0]
        return whole and scales.has(axis) and scales.axis(axis).size % parts == 0

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The updated parameter and states."""
        parameter, gradient, mean, mean_scale, square, square_scale = types
        assert agree(parameter, gradient, mean, square), types
        assert self._scales(parameter) == mean_scale == square_scale, (self, types)
        return (parameter, mean, mean_scale, square, square_scale)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Axes around whole blocks."""
        parameter, scales = operands[0], operands[3]
        names = [name for name in parameter.names if scales.has(name) and self.splits(parameter, name, 1)]
        return tuple(ShardingRule((name,) * len(operands), (name,) * len(results)) for name in names)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """About 30 operations for each element: those of AdamW, and looking codes up and finding them."""
        return 30 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Both states as floats, in whole blocks, one of them again if it is filled up, and divided by scales; and the
        indices of its codes.
        """
        whole, scales = operands[0], operands[3]
        missing = -whole.elements % self.block
        elements = whole.elements + missing
        return (3 + (missing > 0)) * elements * BYTES[whole.dtype] + 4 * elements + 2 * scales.bytes

    def kernel_table(self, operands: Sequence[Type]) -> tuple[Hashable, int] | None:
        """Of either state, the 256 values of the map, and the bounds between them."""
        dtype = operands[0].dtype
        return ("dynamic map", dtype), 2 * (256 + 255) * BYTES[dtype]

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        texts = ", ".join(argument.text for argument in arguments)
        constants = f"{self.beta1}, {self.beta2}, {self.eps}, {self.decay}, {self.block}"
        return f"kernels.adamw_8bit({texts}, {self.learning_rate}, {self.number}, {constants})"


def _update(arguments: Mapping[str, Any], parameter: Trained) -> Update:
    """Small parameters keep whole states, as they hardly cost any memory."""
    whole = adamw(arguments, parameter)
    if parameter.type.elements < max(1, arguments["min_size"]) or not parameter.type.axes:
        return whole
    return AdamW8bit(whole.beta1, whole.beta2, whole.eps, whole.decay, int(arguments["block_size"]))


def _proxy(arguments: Mapping[str, Any], norm: float) -> Mapping[str, Any]:
    """Also with smaller blocks, and none of the small parameters apart."""
    return {**with_larger_eps(arguments, norm), "block_size": PROXY_BLOCK, "min_size": 0}


register(
    Optimizer(
        "adamw_8bit",
        (
            *SETTINGS,
            Setting("block_size", COUNT, 256),
            Setting("min_size", INDEX, 4096),
            DECAY,
        ),
        update=_update,
        proxy=_proxy,
        scaled=True,
    )
)
