"""Initial values of parameters: they depend on coordinates alone, never on the layout (docs/random.md).

The element with row-major index `i` (in the declared axis order) of a tensor is a function of word `i` of the stream of
(seed, name). Any region of a tensor can therefore be drawn alone, and equals the slice of the full tensor bit for bit.
Each element takes one word:

- uniform on [0, 1): its leading 53 bits;
- normal: Box-Muller on its two halves, z = sqrt(-2 ln u) cos(2 pi v). (The ziggurat is faster but takes a varying
  number of words, so an element would depend on its neighbors.) |z| is at most 6.8.

Values are computed in float64 and rounded once to the requested dtype.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod, sqrt

import numpy as np

from partita.compiler.ops.four_bits import FOUR_BITS, matrix_of
from partita.dsl.spec import Call
from partita.dsl.types import Type
from partita.runtime.dtypes import NUMPY
from partita.runtime.philox import stream, words
from partita.runtime.supervision.cores import usable

Region = tuple[slice, ...]
Fan = tuple[int, int]

SLAB = 1 << 18  # elements drawn at a time: 2 MiB of words, which fit in the caches
MANY = 16 * SLAB  # elements from which threads share the work
MAX_THREADS = 32
# Where in a region, the index of its first word, its shape, and which part of it belongs to the region.
Slab = tuple[tuple[int | slice, ...], int, tuple[int, ...], tuple[slice, ...]]


def unit_uniform(word: np.ndarray) -> np.ndarray:
    """Map words to float64 in [0, 1)."""
    return (word >> np.uint64(11)) * 2.0**-53


def unit_normal(word: np.ndarray) -> np.ndarray:
    """Map words to standard normal float64."""
    radius = (word >> np.uint64(32)).astype(np.float64)
    radius += 0.5  # never zero, so that the logarithm is finite
    radius *= 2.0**-32
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle = (word & np.uint64(0xFFFFFFFF)).astype(np.float64)
    angle *= 2.0 * np.pi * 2.0**-32
    return np.multiply(radius, np.cos(angle, out=angle), out=radius)


def _symmetric(word: np.ndarray, bound: float) -> np.ndarray:
    return (unit_uniform(word) * 2.0 - 1.0) * bound


# The value of an element by distribution, from its word, the one argument and the parameter's (fan-in, fan-out).
RANDOM: dict[str, Callable[[np.ndarray, float, Fan], np.ndarray]] = {
    "uniform": lambda word, bound, fan: _symmetric(word, bound),
    "normal": lambda word, deviation, fan: unit_normal(word) * deviation,
    "xavier": lambda word, _, fan: _symmetric(word, sqrt(6.0 / (fan[0] + fan[1]))),
    "kaiming": lambda word, _, fan: unit_normal(word) * sqrt(2.0 / fan[0]),
}
FIXED = {"zeros": 0.0, "ones": 1.0}
USES_FAN = ("xavier", "kaiming")


def initial(
    call: Call, type: Type, seed: int, name: str, fan: Fan | None = None, region: Region | None = None
) -> np.ndarray:
    """The initial value of the parameter with full name `name`, or of a region of it.

    `zeros()`, `ones()`, `constant(c)`, `uniform(a)` on [-a, a), `normal(s)` with standard deviation s, `xavier()`:
    uniform with a = sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010), `kaiming()`: normal with
    s = sqrt(2 / fan_in) (He et al. 2015). `fan` is (fan_in, fan_out), required by the last two. `region` has one slice
    (of step 1) per axis. The result has the region's shape in the declared axis order; bf16 is returned as float32.
    A copy is drawn under the name of what it is `like`. `four_bits(…)`: a part of a matrix in four bits. `file(path,
    name)`: the tensor of a safetensors file, relative to the file that says so. Raises Refused (E0601, E0602, E0603,
    E0607) if there is none of this shape.
    """
    if call.name == "file":
        from partita.runtime.initial_files import read_initial  # with torch, which a supervisor does without

        return read_initial(call, type, name, region)
    if call.name == FOUR_BITS:
        from partita.runtime.initial_files import quantized_initial

        matrix = matrix_of(name, call)
        part = quantized_initial(call, (matrix, seed), lambda own, whole: initial(own, whole, seed, matrix, fan))
        return np.asarray(part[region]) if region else part
    name = str(call.arguments.get("like", name))
    return _draw(call, type, stream(seed, "initial", 0, name), fan, region)


def random_elements(
    type: Type, key: np.ndarray, region: Region | None, make: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """A region of the tensor whose elements are `make` of a stream's words, in the dtype of `type`."""
    bounds = _bounds(type.shape, region)
    out = np.empty([stop - start for start, stop in bounds], NUMPY[type.dtype])
    # A scalar is drawn as a tensor of one element.
    flat = out if type.axes else out.reshape(1)

    def draw(slab: Slab) -> None:
        place, start, shape, inner = slab
        # Contiguous, so that numpy uses the same instructions for a region as for the full tensor.
        flat[place] = make(np.ascontiguousarray(words(key, start, prod(shape)).reshape(shape)[inner]))

    slabs = _slabs(type.shape or (1,), bounds or [(0, 1)])
    threads = _threads() if out.size >= MANY else 1
    if threads == 1:
        for slab in slabs:
            draw(slab)
    else:
        # numpy lets other threads run while it computes: a billion elements take minutes on one.
        with ThreadPoolExecutor(threads) as pool:
            deque(pool.map(draw, slabs), maxlen=0)  # raises what a thread has
    return out


def _threads() -> int:
    """The cores that this rank may use."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(len(usable()), int(requested) if requested.isdecimal() else MAX_THREADS, MAX_THREADS))


def _draw(call: Call, type: Type, key: np.ndarray, fan: Fan | None, region: Region | None) -> np.ndarray:
    argument = float(next((value for name, value in call.arguments.items() if name != "like"), 0.0))
    if call.name in RANDOM:
        assert fan is not None or call.name not in USES_FAN, f"{call.name}() needs the fan of the parameter"
        make = RANDOM[call.name]
        return random_elements(type, key, region, lambda word: make(word, argument, fan or (1, 1)))
    value = argument if call.name == "constant" else FIXED[call.name]
    return np.full([stop - start for start, stop in _bounds(type.shape, region)], value, NUMPY[type.dtype])


def _bounds(shape: tuple[int, ...], region: Region | None) -> list[tuple[int, int]]:
    if region is None:
        return [(0, size) for size in shape]
    assert len(region) == len(shape), "one slice per axis"
    bounds = [part.indices(size) for part, size in zip(region, shape, strict=True)]
    assert all(step == 1 and start <= stop for start, stop, step in bounds), "a region is contiguous along each axis"
    return [(start, stop) for start, stop, _ in bounds]


def _slabs(shape: tuple[int, ...], bounds: list[tuple[int, int]]) -> Iterator[Slab]:
    """Cut a region into slabs of contiguous words.

    A slab spans a few indices of one axis, all of the axes after it and one index of each before it. Yields its place
    in the region, the index of its first word, its shape, and the part of it that belongs to the region. Words outside
    the region are drawn and dropped: that is cheap next to the arithmetic that follows.
    """
    axis = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= SLAB or d == len(shape) - 1)
    inner_shape = shape[axis + 1 :]
    inner_size = prod(inner_shape)
    thick = max(1, SLAB // max(1, inner_size))
    inner = (slice(None), *(slice(start, stop) for start, stop in bounds[axis + 1 :]))
    first, last = bounds[axis]
    for outer in product(*(range(start, stop) for start, stop in bounds[:axis])):
        row = 0
        for size, index in zip(shape[:axis], outer, strict=True):
            row = row * size + index
        place = tuple(index - start for index, (start, _) in zip(outer, bounds[:axis], strict=True))
        for index in range(first, last, thick):
            count = min(thick, last - index)
            start = (row * shape[axis] + index) * inner_size
            yield (*place, slice(index - first, index - first + count)), start, (count, *inner_shape), inner
