"""Rows of a Python function: what `python` yields (`partita.runtime.data.python`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import Factory, field, frozen

from partita.dsl.check.exclusions import nothing_held_out
from partita.dsl.diagnostic import Refused, refuse, shown
from partita.dsl.spec import Call, PythonFunction
from partita.runtime.data.dataset import Batch, Dataset, Input, check_rows, positions
from partita.runtime.data.epochs import Order
from partita.runtime.data.items import KINDS, split_items
from partita.runtime.data.registry import Use
from partita.runtime.data.windows import check_limit
from partita.runtime.dtypes import NUMPY, outside
from partita.runtime.philox import stream
from partita.runtime.python_files import OperationFailed, guarded, imported, problem

OWNER = "data `python`"
MAX_KEYS = 12  # shown


@frozen(eq=False)
class PythonRows(Dataset):
    """A `Dataset` of rows that `make` makes of a seed and a number: `count` of them, of which the first `training` are
    trained on; or, if that is None, as many as are asked for.
    """

    inputs: tuple[Input, ...]
    function: PythonFunction
    make: Callable[[int, int], Any]
    seed: int
    count: int | None
    training: int
    _order: Order = field(init=False, default=Factory(lambda self: Order(self.seed, self.training), takes_self=True))

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The rows of a training step."""
        assert step >= 1, "steps count from 1"
        places = positions(self.inputs, step - 1, rows)
        if self.count is None:
            return self._made([(self.seed, int(number)) for number in places])
        epochs, numbers = places // self.training, self._order.at(places)
        seeds = {
            int(epoch): int(stream(self.seed, "python", int(epoch))[0] >> np.uint64(1)) for epoch in np.unique(epochs)
        }
        return self._made([(seeds[int(epoch)], int(number)) for epoch, number in zip(epochs, numbers, strict=True)])

    def row_names(self, step: int) -> list[str]:
        """The numbers of the rows."""
        places = positions(self.inputs, step - 1, None)
        return [f"row {number}" for number in (places if self.count is None else self._order.at(places))]

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The rows of an evaluation batch."""
        return self._made([(0, number) for number in self._held_out(index, rows)])

    def holdout_row_names(self, index: int) -> list[str]:
        """The numbers of the rows."""
        return [f"row {number}" for number in self._held_out(index, None)]

    def _held_out(self, index: int, rows: range | None) -> list[int]:
        places = positions(self.inputs, index, rows)
        held_out = self.held_out
        numbers: list[int] = (places if held_out is None else self.training + places % held_out).tolist()
        return numbers

    @property
    def held_out(self) -> int | None:
        """The rows that are evaluated; None if there is no end to them."""
        return None if self.count is None else self.count - self.training

    def held_out_rows(self, numbers: Sequence[int]) -> Batch:
        """Rows that are evaluated."""
        return self._made([(0, self.training + number) for number in numbers])

    # ------------------------------------------------------------ what the function makes

    def _made(self, chosen: Sequence[tuple[int, int]]) -> Batch:
        """The rows of these seeds and numbers. Raises Refused (E0605, E0622)."""
        made = [self._row(seed, number) for seed, number in chosen]
        batch: Batch = {}
        for model_input in self.inputs:
            shape = (len(made), *_row_type(model_input).shape)
            rows = np.array([row[model_input.name] for row in made]).reshape(shape)
            ordered = np.moveaxis(rows, 0, model_input.batch_position)
            batch[model_input.name] = np.ascontiguousarray(ordered, NUMPY[model_input.type.dtype])
        return batch

    def _row(self, seed: int, number: int) -> dict[str, np.ndarray]:
        called = f"{self.function.name}({seed}, {number})"
        with guarded(OWNER, self.function, f"it is called as `{called}`"):
            row = self.make(seed, number)
        if not isinstance(row, dict):
            raise self._failed(f"`{called}` is `{type(row).__name__}`, not a dictionary")
        return {each.name: self._value(each, row, called) for each in self.inputs}

    def _value(self, model_input: Input, row: dict[Any, Any], called: str) -> np.ndarray:
        """What a row has for an input. Raises Refused."""
        name, type = model_input.name, _row_type(model_input)
        if name not in row:
            has = ", ".join(shown(str(each)) for each in [*row][:MAX_KEYS]) or "nothing"
            raise self._failed(f"`{called}` has no `{name}`", (f"it has: {has}",), "keys are the names of inputs")
        with guarded(OWNER, self.function, f"`{name}` of `{called}` is to be a number or an array"):
            value = np.asarray(row[name])
        if value.dtype.kind not in KINDS[type.dtype] or value.shape != type.shape:
            has, wanted = f"{value.dtype}{list(value.shape)}", f"{type.dtype}{list(type.shape)}"
            what = f"`{name}` of `{called}` is {has}, and the model wants {wanted}"
            raise self._failed(what, (f"{name}: {model_input.type}",), "a row has no batch axis")
        if value.dtype.kind in "iu":
            check_limit(value, model_input, f"`{name}` of `{called}`", self.function.span)
            if wrong := outside(value, type.dtype):
                raise self._failed(f"`{name}` of `{called}` {wrong}")
        return value

    def _failed(self, message: str, notes: Sequence[str] = (), help: str | None = None) -> OperationFailed:
        return OperationFailed([problem("E0622", OWNER, self.function, message, notes, help)])


def _row_type(model_input: Input) -> Any:
    return model_input.type.without([model_input.batch_axis] if model_input.batch_axis else [])


def open_python(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> PythonRows:
    """The rows of a function. Raises Refused (E0604, E0607, E0608, E0621)."""
    function, count = call.arguments["function"], call.arguments["rows"]
    check_rows(inputs, "`python` makes rows", call.span)
    if count is None and use is Use.HOLD_OUT:
        if call.arguments["holdout"]:
            raise refuse("E0608", "of rows without end nothing is held out", call.span, help="`rows = 10_000`")
        raise Refused([nothing_held_out(call)])
    training = 0 if count is None else split_items(call, use, count, f"`{function.name}`", "rows")
    return PythonRows(inputs, function, imported(OWNER, function), seed, count, training)
