"""Ids in several files and in numpy arrays; what is wrong with a file is said with its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.dsl.diagnostic import Refused
from partita.runtime.data.ids import Joined, joined
from partita.runtime.data.registry import SOURCES, Use, open_dataset
from tests.runtime.data.test_data import SPAN, call, equal, ids

IDS = np.random.default_rng(0).integers(0, 60_000, 4_000)
INPUTS = (ids("tokens", limit=1 << 16), ids("targets", limit=1 << 16))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.data())
def test_several_arrays_are_read_as_one(sizes: list[int], data: st.DataObject):
    whole = np.arange(sum(sizes))
    parts = np.split(whole, np.cumsum(sizes)[:-1])
    ids = joined(parts)
    for _ in range(2):
        assert len(ids) == len(whole)
        np.testing.assert_array_equal(np.asarray(ids), whole)
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, len(whole) + 2))
        ids, whole = ids[start:stop], whole[start:stop]


def test_shards_are_one_text_in_the_order_of_their_paths(tmp_path: Path):
    for number, part in enumerate(np.split(IDS, [1500, 1507, 3000])):
        np.save(tmp_path / f"mixed-{number}.npy", part.astype([np.uint16, "<i8", ">u4", np.int32][number]))
        part.astype("<u2").tofile(tmp_path / f"part-{number}.bin")
    IDS.astype("<u2").tofile(tmp_path / "all.bin")
    one, parts, mixed = (
        open_dataset(call("tokens", path=path, holdout=0.3), INPUTS, 1, tmp_path, use=Use.HOLD_OUT)
        for path in ("all.bin", "part-*.bin", "mixed-*.npy")
    )
    assert isinstance(parts.training, Joined)
    for step in range(1, 300):
        assert equal(one.batch(step), parts.batch(step))
        assert equal(one.batch(step), mixed.batch(step))
        assert equal(one.holdout_batch(step), parts.holdout_batch(step))
    names = [name for name, _ in SOURCES["tokens"].files(call("tokens", path="part-*.bin"), tmp_path)]
    assert names == [f"part-{number}.bin" for number in range(4)]


def npy(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


def cut_off(path: Path) -> None:
    np.save(path, IDS)
    path.write_bytes(path.read_bytes()[:-1])


# Of each: the file, how it is written, the `dtype` of the call, the code, and words of the message and the help.
WRONG: dict[str, tuple[str, Callable[[Path], object], str | None, str, str, str]] = {
    "an array that is not named so": ("a.bin", lambda path: npy(IDS)(path.open("wb")), "u16", "E0603",
        "`a.bin` is a numpy array", "name it `….npy`"),
    "no array": ("a.npy", lambda path: path.write_bytes(b"\0" * 64), None, "E0603",
        "cannot read `a.npy`: it does not", ""),
    "an empty file": ("a.npy", lambda path: path.write_bytes(b""), None, "E0603", "`a.npy` is empty", ""),
    "an empty .bin": ("a.bin", lambda path: path.write_bytes(b""), None, "E0603",
        "`a.bin` has 0 bytes", "the file is empty"),
    "an empty array": ("a.npy", npy(IDS[:0]), None, "E0603", "`a.npy` has no ids", ""),
    "cut off": ("a.npy", cut_off, None, "E0603", "cannot read `a.npy`: ", "numpy.save"),
    "floats": ("a.npy", npy(IDS / 2), None, "E0607", "`a.npy` holds float64, and ids are integers", ""),
    "rows": ("a.npy", npy(IDS.reshape(4, -1)), None, "E0607", "`a.npy` has shape [4, 1000]", "array.ravel()"),
    "objects": ("a.npy", npy(np.array([{}], dtype=object)), None, "E0603", "cannot read `a.npy`: ", ""),
    "another dtype": ("a.npy", npy(IDS.astype(np.int32)), "u16", "E0607",
        "`a.npy` holds int32, and `dtype` is u16", "leave out `dtype`"),
    "negative": ("a.npy", npy(IDS - 60_001), None, "E0605", "ids must not be negative", ""),
    "too large": ("a.npy", npy(IDS + 6_000), None, "E0605",
        "which is out of range for `tokens`", "make that axis larger"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_among_others_is_named(name: str, tmp_path: Path):
    file, write, dtype, code, message, help = WRONG[name]
    IDS.astype("<u2").tofile(tmp_path / "0.bin")
    np.save(tmp_path / "0.npy", IDS.astype(np.uint16))
    write(tmp_path / file)
    pattern = f"*{Path(file).suffix}"
    with pytest.raises(Refused) as caught:
        open_dataset(call("tokens", path=pattern, dtype=dtype, holdout=0.0), INPUTS, 0, tmp_path)
    diagnostic = caught.value.diagnostics[0]
    assert (diagnostic.code, diagnostic.span) == (code, SPAN), diagnostic.render()
    assert message in diagnostic.message
    assert help in (diagnostic.help or "")


def test_ids_that_alternate_are_doubted_by_file(tmp_path: Path):
    IDS.astype("<u2").tofile(tmp_path / "0.bin")
    np.stack([IDS, IDS * 0 + 3], 1).astype("<u2").tofile(tmp_path / "1.bin")
    (found,) = SOURCES["tokens"].warnings(call("tokens", path="*.bin"), tmp_path)
    assert "positions of `1.bin`" in found.message
