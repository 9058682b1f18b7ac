"""Operations of torch.distributed, posted in the current stream."""

from __future__ import annotations

from typing import Any

import torch
from attrs import define

from partita.runtime.transports.failures import post, wait


@define(eq=False, slots=True)
class Posted:
    """A posted operation; a `Handle`. Keeps its tensors alive until it is done."""

    work: Any
    tensors: Any
    description: str

    def done(self) -> bool:
        """Wait for it and return True. Raises `ConnectionLost`."""
        if self.work is not None:
            wait(self.work, self.description)
        return True


def posted(description: str, tensors: Any, operation: Any, *arguments: Any, **options: Any) -> Posted:
    """Start an operation on tensors that are on the host."""
    return Posted(post(description, operation, *arguments, **options), tensors, description)


def enqueued(description: str, tensors: Any, operation: Any, *arguments: Any, **options: Any) -> Posted:
    """Enqueue an operation on tensors of a GPU in the current stream.

    torch runs a collective there that is not `async_op`.
    """
    options.pop("async_op", None)
    work = post(description, operation, *arguments, **options)
    if work is not None:
        wait(work, description)
    return Posted(None, tensors, description)


def posting(device: torch.device) -> Any:
    """How operations on tensors of a device are posted."""
    return enqueued if device.type == "cuda" else posted
