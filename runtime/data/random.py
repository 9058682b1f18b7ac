"""`random()`: standard normal floats, integers within the axis that they index, fair coins for booleans.

For measuring speed and trying layouts. Element i of an input at a step is a function of word i of the stream of
(seed, step, name), so the data never ends, and evaluation has streams of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partita.dsl.spec import Call
from partita.runtime.data.registry import Source, Use, register

if TYPE_CHECKING:
    from partita.runtime.data.dataset import Input
    from partita.runtime.data.noise import Noise


def open_random(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Noise:
    """Random numbers for the inputs."""
    from partita.runtime.data.noise import open_noise

    return open_noise(call, inputs, seed, root, use)


register(Source("random", open=open_random, named=False))
