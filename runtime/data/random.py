"""`random()`: standard normal floats, integers within the axis that they index, fair coins for booleans.

For measuring speed and trying layouts. Element i of an input at a step is a function of word i of the stream of
(seed, step, name), so the data never ends, and evaluation has streams of its own.
"""

from __future__ import annotations

from partita.runtime.data.registry import Source, opened_by, register

register(Source("random", open=opened_by("noise", "open_noise"), named=False))
