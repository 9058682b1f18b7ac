"""Batches that are read ahead are those that are asked for, and the next is read while the caller computes."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from partita.dsl.diagnostic import Refused
from partita.runtime.data.dataset import Batch
from partita.runtime.data.prefetcher import Prefetcher
from partita.runtime.data.registry import open_dataset
from tests.runtime.data.test_data import NOISE, call, equal


class Noted:
    """A dataset that says when it has read something."""

    def __init__(self) -> None:
        self.dataset = open_dataset(call("random"), NOISE, 3, Path())
        self.read: list[int] = []
        self.done = threading.Semaphore(0)

    def batch(self, step: int, rows: range | None = None) -> Batch:
        self.read.append(step)
        if step == 13:
            raise Refused(())
        found = self.dataset.batch(step, rows)
        self.done.release()
        return found


def test_in_any_order(tmp_path: Path):
    noted = Noted()
    ahead = Prefetcher(noted, 20)  # type: ignore[arg-type]
    for step in (1, 2, 3, 7, 8, 3, 4, 20, 5):
        assert equal(ahead.batch(step), noted.dataset.batch(step))
    assert equal(ahead.batch(5, range(2, 4)), noted.dataset.batch(5, range(2, 4)))
    ahead.close()
    assert 21 not in noted.read


def test_the_next_is_read_before_it_is_asked_for():
    noted = Noted()
    ahead = Prefetcher(noted, 20)  # type: ignore[arg-type]
    ahead.batch(1)
    assert noted.done.acquire(timeout=30)
    assert noted.done.acquire(timeout=30)  # by itself
    assert noted.read == [1, 2]
    ahead.batch(2)
    assert noted.done.acquire(timeout=30)
    assert noted.read == [1, 2, 3]
    ahead.close()


def test_what_reading_raises_is_raised_at_its_step():
    noted = Noted()
    ahead = Prefetcher(noted, 20)  # type: ignore[arg-type]
    assert isinstance(ahead.batch(12)["x"], np.ndarray)
    with pytest.raises(Refused):
        ahead.batch(13)
    ahead.batch(14)
    ahead.close()
