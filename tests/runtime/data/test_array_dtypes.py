"""Arrays of another kind than the model wants: the help names dtypes that there are, and both of its ways work."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.dsl.spec import Call
from partita.dsl.types import DTYPES, Axis, Type
from partita.runtime.data.dataset import Input
from partita.runtime.data.registry import open_dataset

WANTED = ("f32", "i64", "i32", "u8", "bool")
THERE = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint16", "bool", "complex64", "U3")
CALL = Call("arrays", {"path": "data.npz", "holdout": 0.0})
BATCH, PIXELS = Axis("batch", 4), Axis("pixels", 3)


def opened(dtype: str, array: np.ndarray, root: Path) -> None:
    np.savez(root / "data.npz", image=array)
    open_dataset(CALL, (Input("image", Type(dtype, (BATCH, PIXELS)), "batch"),), 0, root)


@pytest.mark.few(21)
@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("there", THERE)
def test_the_help_leads_on(wanted: str, there: str, tmp_path: Path) -> None:
    array = np.ones((8, 3)).astype(there)
    try:
        opened(wanted, array, tmp_path)
    except Refused as refused:
        (diagnostic,) = refused.diagnostics
    else:
        return
    assert diagnostic.code == "E0607"
    help = diagnostic.help or ""
    convert = re.search(r"astype\(numpy\.(\w+)\)", help)
    assert convert is not None
    if there == "U3":
        array = np.ones((8, 3), "U1")  # text that reads as numbers
    opened(wanted, array.real.astype(getattr(np, convert[1])), tmp_path)
    declared = re.search(r"declare it as `image: (\w+)\[batch, pixels\]`", help)
    assert (declared is None) == (there in ("complex64", "U3"))
    if declared is None:
        return
    assert declared[1] in DTYPES
    opened(declared[1], array, tmp_path)
    cast = re.search(r"use `([^`]+)` in the model", help)
    assert cast is not None
    text = (
        f"axis batch = 4, pixels = 3\nmodel m(image: {declared[1]}[batch, pixels]) {{\n"
        f"  param w: [pixels] ~ ones()\n  let x = {cast[1]}\n  loss mean(where(x == x, w, 0.0))\n}}\n"
    )
    found, diagnostics = load_text(text)
    assert found is not None, [each.render() for each in diagnostics]


def test_a_scalar_stays_one(tmp_path: Path) -> None:
    """An input without axes, beside one of items."""
    np.savez(tmp_path / "a.npz", x=np.arange(8.0), s=np.float32(2))
    inputs = (Input("x", Type("f32", (Axis("batch", 4),)), "batch"), Input("s", Type("f32", ())))
    dataset = open_dataset(Call("arrays", {"path": "a.npz", "holdout": 0.0}), inputs, 0, tmp_path)
    batch = dataset.batch(1)
    assert batch["s"].shape == ()
    assert batch["x"].shape == (4,)
