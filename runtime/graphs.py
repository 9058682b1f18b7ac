"""A step that is captured: enqueued once as a CUDA graph, and launched as a whole from then on (`graphs = true`).

The first step is run as any other: it makes what is made once, such as code that torch compiles, communicators and
tables. The second is captured, which runs nothing, and launched, as all later ones are. What a graph reads and writes
stays where it is: the inputs of each step are copied to where those of the captured one are, and what it makes has
memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from partita.compiler.program import InputPart
from partita.runtime.inputs import Batch, Inputs
from partita.runtime.streams import Capture, Coroutine

Parts: TypeAlias = Mapping[InputPart, torch.Tensor]


class StepGraph:
    """Steps that a device's streams capture and that read some inputs."""

    def __init__(self, capture: Capture, reads: Inputs) -> None:
        self._capture, self._reads = capture, reads
        self._begun = False
        # The inputs of the captured step, what it returns, and what launches it.
        self._captured: tuple[tuple[Parts, Parts], Any, Callable[[], None]] | None = None

    def run(self, batches: Callable[[int], Batch], enqueued: Callable[[Parts, Parts], Coroutine]) -> Coroutine:
        """What `enqueued` returns of the whole parts of a step's inputs and those of its microbatches: the same tensors
        in every step from the second on.
        """
        if self._captured is not None:
            (whole, cut), outputs, launch = self._captured
            self._reads.whole(batches, whole)
            self._reads.load(batches(0), cut)
        else:
            whole, cut = self._reads.whole(batches), self._reads.load(batches(0))
            if not self._begun:
                self._begun = True
                return (yield from enqueued(whole, cut))
            outputs, launch = self._capture(partial(enqueued, whole, cut))
            self._captured = (whole, cut), outputs, launch
        launch()
        return outputs
