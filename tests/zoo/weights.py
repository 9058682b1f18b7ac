"""The table that says which of our parameters stands where in theirs.

A line is as the language writes names of the outside:

    llama.table              = model.embed_tokens.weight [vocab, embed]
    llama.layer.attention.wq = model.layers.{layer}.self_attn.q_proj.weight [groups * heads * key, embed]
    gpt.layer.wq, gpt.layer.wk, gpt.layer.wv = h.{layer}.attn.c_attn.weight [embed, + heads * key]
    llama.layer.moe.up       = model.layers.{layer}.experts.{experts}.up_proj.weight [ffn, embed]
    skip = *.inv_freq

Ours are named without the numbers of iterations; their axes stand in their order. `a * b` is one axis of theirs that
has both, the first slowest, and `1` one that none of ours is; nothing in brackets is a scalar. `{layer}` is the number
of the iteration of the repeat `layer`, or a formula of such (`{2 * pair + 1}`); `{experts}`, an axis of ours, is a
tensor of theirs for each index. Several of ours are joined in theirs along the axis with `+`. What we lack is skipped
by a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from itertools import chain
from math import prod

import torch
from attrs import frozen
from torch import Tensor, nn

from partita.dsl.types import Type


@frozen
class Line:
    """One line: our names, theirs, and the axes of theirs, each a product of ours. `joined` is the one with `+`."""

    ours: tuple[str, ...]
    theirs: str
    axes: tuple[tuple[str, ...], ...]
    joined: int | None


def line_of(text: str) -> Line:
    """Read a line."""
    match = re.fullmatch(r"(.+?)\s*=\s*(.+?)\s*(?:\[(.*)\])?", text)
    assert match, f"not a line of weights: {text}"
    ours, theirs, axes = match.groups()
    groups = [group.strip() for group in axes.split(",")] if axes and axes.strip() else []
    joined = [i for i, group in enumerate(groups) if group.startswith("+")]
    return Line(
        tuple(name.strip() for name in ours.split(",")),
        theirs,
        tuple(_axes(group) for group in groups),
        joined[0] if joined else None,
    )


def _axes(group: str) -> tuple[str, ...]:
    """Our axes in a product; none in `1`."""
    names = (name.strip() for name in group.removeprefix("+").split("*"))
    return tuple(name for name in names if name != "1")


@frozen(eq=False)
class Weights:
    """The table of a model whose parameters have these types."""

    types: Mapping[str, Type]
    text: str

    def of(self, module: nn.Module, gradients: bool = False) -> dict[str, Tensor]:
        """Their weights, or their gradients, as ours. Raises AssertionError unless each of both has a counterpart."""
        lines = [line_of(text) for text in filter(None, map(str.strip, self.text.splitlines()))]
        state = dict(chain(module.named_buffers(), module.named_parameters()))
        found: dict[str, Tensor] = {}
        used: set[str] = set()
        for line in lines:
            for numbers in self._iterations(line) if line.ours != ("skip",) else ():
                names = [numbered(name, numbers) for name in line.ours]
                for name in names:
                    assert name in self.types, f"none of ours is `{name}`"
                    assert name not in found, f"{name} is named twice"
                theirs = self._their_names(line, self.types[names[0]], numbers)
                for name in theirs:
                    assert name in state, f"theirs has no {name}, but {sorted(state)}"
                used.update(theirs)
                found |= self._read(line, names, [_values(state[name], gradients) for name in theirs])
        assert found.keys() == self.types.keys(), f"nothing is said of {sorted(self.types.keys() - found.keys())}"
        skipped = [line.theirs for line in lines if line.ours == ("skip",)]
        unread = [name for name, _ in module.named_parameters() if name not in used]
        lost = [name for name in unread if not any(fnmatch(name, pattern) for pattern in skipped)]
        assert not lost, f"of theirs nothing is said of {lost}"
        return found

    def _iterations(self, line: Line) -> Iterator[dict[str, int]]:
        """The numbers of iterations, by the name of the repeat, of each parameter that a line names."""
        found = False
        for name in self.types:
            parts = name.split(".")
            if ".".join(part for part in parts if not part.isdecimal()) == line.ours[0]:
                found = True
                yield {parts[i - 1]: int(part) for i, part in enumerate(parts) if part.isdecimal()}
        assert found, f"none of ours is `{line.ours[0]}`"

    @staticmethod
    def _their_names(line: Line, type: Type, numbers: Mapping[str, int]) -> list[str]:
        """One, or one for each index of an axis of ours."""
        axis = _index(line, type)
        indices = [{}] if axis is None else [{axis: index} for index in range(type.axis(axis).size)]

        def name(values: Mapping[str, int]) -> str:
            return re.sub(r"\{(.+?)\}", lambda match: str(eval(match[1], {}, dict(values))), line.theirs)

        return [name({**numbers, **index}) for index in indices]

    def _read(self, line: Line, names: list[str], tensors: list[Tensor]) -> dict[str, Tensor]:
        """Our tensors of these names, from theirs."""
        types = [self.types[name] for name in names]
        axis = _index(line, types[0])
        groups = line.axes if axis is None else ((axis,), *line.axes)
        whole = tensors[0] if axis is None else torch.stack(tensors)
        parts = [whole]
        if line.joined is not None:
            at = line.joined + (axis is not None)
            parts = list(whole.split([_size(groups[at], type) for type in types], at))
        return {
            name: _ordered(part, groups, type, f"{name} = {line.theirs}")
            for name, part, type in zip(names, parts, types, strict=True)
        }


def numbered(name: str, numbers: Mapping[str, int]) -> str:
    """A name of ours with the numbers of iterations."""
    return ".".join(f"{part}.{numbers[part]}" if part in numbers else part for part in name.split("."))


def _index(line: Line, type: Type) -> str | None:
    """The axis of ours for each index of which theirs is a tensor."""
    return next((name for name in re.findall(r"\{(\w+)\}", line.theirs) if type.has(name)), None)


def _size(group: tuple[str, ...], type: Type) -> int:
    return prod(type.axis(name).size for name in group)


def _values(tensor: Tensor, gradients: bool) -> Tensor:
    if not gradients:
        return tensor.detach()
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _ordered(tensor: Tensor, groups: tuple[tuple[str, ...], ...], type: Type, what: str) -> Tensor:
    """Their tensor, whose axes are products of ours, with our axes."""
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted(type.names), f"{what}: {names} are not the axes of {type}"
    shape = tuple(_size(group, type) for group in groups)
    assert tuple(tensor.shape) == shape, f"{what}: {tuple(tensor.shape)} is not {shape}"
    split = tensor.reshape([type.axis(name).size for name in names])
    return split.permute([names.index(name) for name in type.names]).contiguous()
