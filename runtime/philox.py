"""Random words by address: word `i` of the stream of a key, for any `i`, without the ones before it.

Everything random outside the emitted program (initial values, samples, batches) comes from here, so that a
shard, a restarted run or another layout draws the same numbers. The generator is Philox4x64-10 (Salmon et
al., SC'11), whose output numpy guarantees to stay the same; one counter gives four words.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.random import Philox

WORDS_PER_COUNTER = 4


def stream(seed: int, purpose: str, step: int, name: str = "") -> np.ndarray:
    """The key of a stream, u64[2]: a hash of what the stream is for.

    Different arguments, independent streams.
    """
    # The name stands last, so that no two different tuples give the same text.
    text = f"{seed}/{purpose}/{step}/{name}"
    return np.frombuffer(blake2b(text.encode(), digest_size=16).digest(), dtype="<u8").astype(np.uint64)


def words(key: np.ndarray, start: int, count: int) -> np.ndarray:
    """The words `start` to `start + count` of a stream, u64[count]."""
    counter, skipped = divmod(start, WORDS_PER_COUNTER)
    return Philox(key=key, counter=counter).random_raw(skipped + count)[skipped:]


def below(word: int, limit: int) -> int:
    """A word as an integer in [0, limit), by its leading bits; biased by less than limit / 2^64."""
    return (int(word) * limit) >> 64
