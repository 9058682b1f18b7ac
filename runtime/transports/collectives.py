"""Reference semantics of the collectives: maps the tensors of all ranks of a group to the results of all.

The virtual transport runs these; the process transport must give the same results (on Gloo: the same bits).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Parts = Sequence[torch.Tensor]

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
TURN = "turn"
# An all-to-all of tensors that are lists along their last dimension but those that only the later ones have. The first
# has ids, −1 after the last of each list; where it has −1 the others have zeros, and nothing needs to be sent.
EXCHANGE_ROWS = "exchange of rows"


def total(parts: Parts, maximum: bool = False) -> torch.Tensor:
    """A new tensor: the sum (or maximum) of the parts, in order and in their dtype."""
    combine = torch.maximum if maximum else torch.add
    result = parts[0].clone()
    for part in parts[1:]:
        combine(result, part, out=result)
    return result


def all_gather(parts: Parts, dim: int) -> list[torch.Tensor]:
    """Every rank gets the parts concatenated along `dim`."""
    whole = torch.cat(tuple(parts), dim)
    return [_own(whole) for _ in parts]


def reduce_scatter(parts: Parts, dim: int) -> list[torch.Tensor]:
    """Every rank gets its part of the sum, cut along `dim`."""
    return [_own(part) for part in _cut(total(parts), len(parts), dim)]


def all_reduce(parts: Parts, maximum: bool) -> list[torch.Tensor]:
    """Every rank gets the sum or maximum."""
    whole = total(parts, maximum)
    return [_own(whole) for _ in parts]


def all_to_all(parts: Parts, gathered: int, cut: int) -> list[torch.Tensor]:
    """Part j along `cut` goes to rank j, which concatenates what it receives along `gathered`."""
    pieces = zip(*(_cut(part, len(parts), cut) for part in parts), strict=True)
    return [_own(torch.cat(arriving, gathered)) for arriving in pieces]


def turn(parts: Parts) -> list[torch.Tensor]:
    """Every rank gets the part of the one before it, the first that of the last."""
    return [_own(part) for part in (parts[-1], *parts[:-1])]


# Arguments after the parts are specific to each tensor.
COLLECTIVES: Mapping[str, Callable[..., list[torch.Tensor]]] = {
    ALL_GATHER: all_gather,
    REDUCE_SCATTER: reduce_scatter,
    ALL_REDUCE: all_reduce,
    ALL_TO_ALL: all_to_all,
    TURN: turn,
    EXCHANGE_ROWS: all_to_all,
}


def collect(
    kind: str, buckets: Sequence[Sequence[torch.Tensor]], arguments: Sequence[tuple[Any, ...]]
) -> list[tuple[torch.Tensor, ...]]:
    """Each rank's results, from each rank's bucket and the arguments of each tensor in it."""
    function = COLLECTIVES[kind]
    results = [function(parts, *own) for parts, own in zip(zip(*buckets, strict=True), arguments, strict=True)]
    return list(zip(*results, strict=True))


def _cut(tensor: torch.Tensor, parts: int, dim: int) -> tuple[torch.Tensor, ...]:
    assert tensor.shape[dim] % parts == 0, f"{tuple(tensor.shape)} does not cut into {parts} along {dim}"
    return tensor.chunk(parts, dim)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: ranks share no memory."""
    return tensor.clone(memory_format=torch.contiguous_format)
