"""Counter-based random words: word `i` of a key's stream for any `i`, without the words before it.

Everything random outside the emitted program (initial values, samples, batches) comes from here, so that a shard, a
resumed run or another layout draws the same numbers. The generator is Philox4x64-10 (Salmon et al., SC'11), whose
output numpy guarantees to remain the same; one counter gives four words.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.random import Philox

WORDS_PER_COUNTER = 4


def stream(seed: int, purpose: str, step: int, name: str = "") -> np.ndarray:
    """The key of a stream, u64[2]: a hash of its purpose. Streams of different arguments are independent."""
    # The name comes last, so that no two different tuples give the same text.
    text = f"{seed}/{purpose}/{step}/{name}"
    return np.frombuffer(blake2b(text.encode(), digest_size=16).digest(), dtype="<u8").astype(np.uint64)


def words(key: np.ndarray, start: int, count: int) -> np.ndarray:
    """Words `start` up to `start + count` of a stream, u64[count]."""
    counter, skipped = divmod(start, WORDS_PER_COUNTER)
    return Philox(key=key, counter=counter).random_raw(skipped + count)[skipped:]


def below(word: int, limit: int) -> int:
    """Map a word to an integer in [0, limit), by its leading bits; biased by less than limit / 2^64."""
    return (int(word) * limit) >> 64
