"""Outputs of a trained model for any number of rows, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Spec
from partita.dsl.types import Type
from partita.runtime.data.binding import inputs_of
from partita.runtime.data.dataset import Dataset, Input
from partita.runtime.inference.ranks import LocalRanks
from partita.runtime.outputs import Outputs, check_shape, require_tensor


class Predictor:
    """The outputs of these `names`, or all, for any number of rows: each has the batch axis. They are computed on one
    device or, with the ranks that are `here`, in the file's layout; a process without the first rank has none of them.

    Rows go through the model in batches of the file's size. The last batch is filled up with its last row, and cut.
    Raises Refused (E0302, E1004).
    """

    def __init__(
        self, spec: Spec, names: Sequence[str] = (), allow_python: bool = False, here: LocalRanks | None = None
    ) -> None:
        self.outputs = Outputs(spec, names, allow_python, here)
        model, batch = self.outputs.model, self.outputs.program.batch
        self._types: dict[str, Type] = {
            name: model.answering.types[number] for name, number in model.outputs if not names or name in names
        }
        whole = [f"output {name}: {type}" for name, type in self._types.items() if not type.has(batch)]
        if whole or not any(each.type.has(batch) for each in self.outputs.inputs):
            raise refuse(
                "E1004",
                f"`{model.name}` has outputs that are not of one row each",
                model.span,
                notes=whole or [f"no input that they read has the axis `{batch}`"],
                help="name others: `--outputs`; or `partita.outputs`, for one batch",
            )
        self.batch = batch

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The inputs that are needed."""
        return inputs_of(self.outputs.inputs, self.batch)

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs for inputs by name, with any number of rows. Raises ValueError if one is missing, has another
        shape but for the rows, or ids out of range, and TypeError for what is no tensor.
        """
        in_rows = {each.name: each.batch_position for each in self.inputs if each.batch_axis is not None}
        tensors = {each.name: require_tensor("input", each.name, inputs) for each in self.inputs}
        for each in self.inputs:
            check_shape("input", each.name, tensors[each.name], each.type.shape, in_rows.get(each.name))
        counts = {name: tensors[name].shape[place] for name, place in in_rows.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"inputs have different numbers of rows: {counts}")

        def rows(numbers: Sequence[int]) -> Mapping[str, Tensor]:
            index = torch.tensor(numbers)
            return {
                name: value.index_select(in_rows[name], index) if name in in_rows else value
                for name, value in tensors.items()
            }

        return self._joined(self._parts(next(iter(counts.values())), rows))

    def of_data(self, dataset: Dataset, count: int) -> dict[str, Tensor]:
        """The outputs for all rows that are held out of a dataset."""

        def rows(numbers: Sequence[int]) -> Mapping[str, Tensor]:
            return {name: torch.as_tensor(array) for name, array in dataset.held_out_rows(numbers).items()}

        return self._joined(self._parts(count, rows))

    def _parts(self, count: int, rows: Callable[[Sequence[int]], Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """The outputs of each batch."""
        size = next(each.batch for each in self.inputs if each.batch_axis is not None)
        for first in range(0, count, size):
            numbers = list(range(first, min(first + size, count)))
            filled = [*numbers, *[numbers[-1]] * (size - len(numbers))]
            outputs = self.outputs(rows(filled))
            yield {
                name: value.narrow(self._types[name].position(self.batch), 0, len(numbers))
                for name, value in outputs.items()
            }

    def _joined(self, parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The outputs of all batches."""
        all = list(parts)
        if not all:
            raise ValueError("the inputs have no rows")
        return {
            name: torch.cat([part[name] for part in all], self._types[name].position(self.batch)) for name in all[0]
        }
