"""Initial values from files: `~ file("tables.safetensors", "name")`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from partita.compiler.ops.four_bits import FourBits
from partita.dsl.advice.report import suggestion
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Call
from partita.dsl.types import Type
from partita.runtime.dtypes import NUMPY, outside
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.kernels.four_bits import quantize
from partita.runtime.regions import Region

# The last matrix that was put into four bits, of which four parts begin, one after the other.
_LAST: dict[tuple[str, int], dict[str, np.ndarray]] = {}

# What the names of dtypes of floats begin with.
FLOATS, INTEGERS = ("F", "BF"), ("I", "U")


def read_initial(call: Call, type: Type, parameter: str, region: Region | None) -> np.ndarray:
    """The tensor that a call names, or a region of it, in the dtype of `type`. Raises Refused: E0601 without the file,
    E0602 if it is outside of the folder, E0603 if it cannot be read, E0607 if the tensor has another shape or kind.
    """
    folder = Path(call.span.source.name).parent if call.span is not None else Path()
    path, name = folder / str(call.arguments["path"]), str(call.arguments["name"])
    if not path.resolve().is_relative_to(folder.resolve()):
        raise refuse("E0602", f"{path} is outside of the directory of the file", call.span, help="copy it there")
    if not path.is_file():
        raise refuse("E0601", f"there is no file {path}", call.span, help="its path is relative to the .par file")
    try:
        with safe_open(path, framework="pt") as file:
            if name not in file.keys():  # noqa: SIM118  (no mapping)
                help = suggestion(name, file.keys(), "there are")
                raise refuse("E0603", f"{path} has no tensor `{name}`", call.span, help=help)
            part = file.get_slice(name)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            if shape != type.shape or not dtype.startswith(FLOATS if type.is_float else INTEGERS):
                kind = "floats" if type.is_float else "integers"
                notes = [f"{parameter}: {type}", f"`{name}` of {path.name}: {list(shape)}, {dtype}"]
                message = f"`{name}` is not {kind} of the shape of `{parameter}`"
                raise refuse("E0607", message, call.span, notes=notes)
            value: torch.Tensor = part[region] if region else file.get_tensor(name)
    except SafetensorError as error:
        message = f"{path} is no file of tensors: {error}"
        raise refuse("E0603", message, call.span, help="safetensors writes them") from error
    array = value.to(torch.float64 if type.is_float else torch.int64).numpy()
    wrong = None if type.is_float else outside(array, type.dtype)
    if wrong:
        raise refuse("E0607", f"`{name}` of {path.name} {wrong}", call.span, help=f"declare `{parameter}` as i64")
    return array.astype(NUMPY[type.dtype])


def quantized_initial(call: Call, key: tuple[str, int], begin: Callable[[Call, Type], np.ndarray]) -> np.ndarray:
    """A part of a matrix in four bits, by its name and the seed of the run: all of it begins first, as `begin` says."""
    form, part, own = FourBits.of(call)
    if key not in _LAST:
        whole = torch.from_numpy(begin(own, form.whole)).to(DTYPES[form.whole.dtype])
        _LAST.clear()
        _LAST[key] = {each: tensor.numpy() for each, tensor in quantize(whole, form).items()}
    return _LAST[key][part]
