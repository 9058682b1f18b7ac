"""Random numbers as a dataset: what `random` yields and `verify` runs on (`partita.runtime.data.random`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from attrs import frozen

from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.spec import Call
from partita.dsl.types import INDICES, integers
from partita.runtime.data.dataset import Batch, Dataset, Input
from partita.runtime.data.registry import Use
from partita.runtime.initial import random_elements, unit_normal
from partita.runtime.philox import stream


@frozen(eq=False)
class Noise(Dataset):
    """A `Dataset` of random numbers."""

    inputs: tuple[Input, ...]
    seed: int

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The numbers of a training step."""
        assert step >= 1, "steps count from 1"
        return self._draw("batch", step, rows)

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The numbers of an evaluation batch."""
        return self._draw("holdout", index, rows)

    def _draw(self, purpose: str, step: int, rows: range | None) -> Batch:
        batch: Batch = {}
        for model_input in self.inputs:
            region = None
            if rows is not None:
                assert rows.step == 1, "rows follow each other"
                region = tuple(
                    slice(rows.start, rows.stop) if axis.name == model_input.batch_axis else slice(None)
                    for axis in model_input.type.axes
                )
            # An input without the batch axis is part of every microbatch, but redrawn each step.
            key = stream(self.seed, purpose, step, model_input.name)
            batch[model_input.name] = random_elements(
                model_input.type, key, region, partial(_value, model_input=model_input)
            )
        return batch


def _value(word: np.ndarray, model_input: Input) -> np.ndarray:
    if model_input.type.is_float:
        return unit_normal(word)
    dtype, limit = model_input.type.dtype, model_input.limit
    held = range(2) if dtype == "bool" else range(limit) if limit is not None else integers(dtype)
    # The leading 32 bits scaled to the limit; the product fits in 64 bits, as indexed axes are smaller than 2^32.
    drawn = ((word >> np.uint64(32)) * np.uint64(len(held))) >> np.uint64(32)
    return drawn.astype(np.int64) + held.start


def open_noise(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Noise:
    """Random numbers for the inputs. Refuses (E0609) integers without a limit."""
    boundless = [
        model_input for model_input in inputs if model_input.type.dtype in INDICES and model_input.limit is None
    ]
    if boundless:
        raise Refused(
            Diagnostic(
                "E0609",
                f"`random()` cannot determine the range of the integers of `{model_input.name}`",
                call.span,
                (f"{model_input.name}: {model_input.type}, with which no `embedding` or `cross_entropy` indexes",),
                "use data of your own: `arrays(…)`",
            )
            for model_input in boundless
        )
    assert all(model_input.limit is None or model_input.limit < 1 << 32 for model_input in inputs)
    return Noise(inputs, seed)
