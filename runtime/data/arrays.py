"""`arrays(path, holdout)`: a `.npz` file with one array per model input, by name.

The first axis of an array counts items and takes the place of the batch axis (wherever the model declares that); the
others are as declared. An input without the batch axis is one array of exactly its shape. Training goes through all
items that are not held out in a new order every epoch, a permutation that depends only on (seed, epoch). A batch may
span two epochs. Evaluation cycles through the held-out items in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partita.dsl.config.builtins import HOLDOUT, Setting, Text
from partita.dsl.spec import Call
from partita.runtime.data.files import matched
from partita.runtime.data.registry import Source, Use, register

if TYPE_CHECKING:
    from partita.runtime.data.dataset import Input
    from partita.runtime.data.items import Items


def open_arrays(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Items:
    """The items of a `.npz` file, as its arrays."""
    from partita.runtime.data.items import open_items

    return open_items(call, inputs, seed, root, use)


register(
    Source(
        "arrays",
        (Setting("path", Text()), HOLDOUT),
        open=open_arrays,
        endings=(".npz",),
        files=matched("path"),
    ),
)
