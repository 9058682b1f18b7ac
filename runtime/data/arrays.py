"""`arrays(path, holdout)`: a `.npz` file with one array per model input, by name.

The first axis of an array counts items and takes the place of the batch axis (wherever the model declares that); the
others are as declared. An input without the batch axis is one array of exactly its shape. Training goes through all
items that are not held out in a new order every epoch, a permutation that depends only on (seed, epoch). A batch may
span two epochs. Evaluation cycles through the held-out items in order.
"""

from __future__ import annotations

from partita.dsl.config.builtins import HOLDOUT, Setting, Text
from partita.runtime.data.files import matched
from partita.runtime.data.registry import Source, opened_by, register

register(
    Source(
        "arrays",
        (Setting("path", Text()), HOLDOUT),
        open=opened_by("items", "open_items"),
        endings=(".npz",),
        files=matched("path"),
    ),
)
