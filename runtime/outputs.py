"""The outputs of a model, computed with given parameters batch by batch, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from partita.compiler.passes.microbatch import OUTPUT
from partita.compiler.pipeline import compile_outputs
from partita.compiler.program import InputRecord, Program
from partita.compiler.verify.proxy import single
from partita.dsl.spec import Spec
from partita.dsl.types import Type
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.python_functions import functions_of
from partita.runtime.rank import Plan, check_ids
from partita.runtime.training import VirtualRun

Tensors = Mapping[str, torch.Tensor]


def outputs(given: Spec, parameters: Tensors, inputs: Tensors, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The outputs of these `names`, or all, for one batch (`Outputs`)."""
    found = Outputs(given, names)
    found.set_parameters(parameters)
    return found(inputs)


class Outputs:
    """A compiled program for outputs of these `names`, or all, with axes in the order of their types.

    Random numbers are those of an evaluation. Raises Refused if there are no such outputs, or if Python code of the
    file is not allowed.
    """

    def __init__(self, given: Spec, names: Sequence[str] = (), allow_python: bool = False) -> None:
        self.model, _ = given.trained
        functions = functions_of(self.model, allow_python)
        plan = Plan(given, compile_outputs(single(given), names), None, functions)
        self.program: Program = plan.program
        (self._stage,) = self.program.stages
        self._run = VirtualRun(plan, strict=False)

    @property
    def parameters(self) -> dict[str, Type]:
        """The types of the parameters and buffers that the outputs need, by full name."""
        return {name: self.program.parameter(name).type for name in self._stage.parameters}

    @property
    def inputs(self) -> tuple[InputRecord, ...]:
        """The inputs that the outputs need."""
        read = {part.name for part in (*self._stage.inputs, *self._stage.full_inputs)}
        return tuple(each for each in self.program.inputs if each.name in read)

    def set_parameters(self, parameters: Tensors) -> None:
        """Take parameters by full name; others than are needed may be given. Raises ValueError if one is missing or has
        another shape.
        """
        needed = self.parameters
        for name, type in needed.items():
            _check("parameter", name, type.shape, parameters)
        self._run.set_parameters({name: parameters[name] for name in needed})

    def __call__(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """The outputs for one batch of inputs by name. Raises ValueError if one is missing, has another shape, or ids
        out of range.
        """
        batch = {record.name: _fitting(record, inputs) for record in self.inputs}
        (rank,) = self._run.ranks
        self._run.cluster.run([rank.step(0, batch, ())])
        check_ids(rank.outside(rank.training), "in the outputs")
        found = {}
        for name, number in self.model.outputs:
            total = rank.training.totals.get((self._stage.index, f"{OUTPUT}{name}"))
            if total is not None:
                record = next(each for each in self._stage.accumulators if each.name == f"{OUTPUT}{name}")
                order = [record.type.position(axis) for axis in self.model.answering.types[number].names]
                found[name] = total.permute(order).contiguous().clone()
        return found


def _fitting(record: InputRecord, inputs: Tensors) -> torch.Tensor:
    """An input, in the dtype of the program."""
    _check("input", record.name, record.type.shape, inputs)
    value = inputs[record.name].to(DTYPES[record.type.dtype])
    limit = record.limit.size if record.limit is not None else None
    ids = value[~torch.isin(value, torch.tensor(record.ignored))] if record.ignored and limit is not None else value
    if limit is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise ValueError(f"`{record.name}` has ids that are not below {limit}, the size of `{record.limit}`")
    return value


def _check(what: str, name: str, shape: tuple[int, ...], given: Tensors) -> None:
    if name not in given:
        raise ValueError(f"the outputs need the {what} `{name}`")
    if tuple(given[name].shape) != shape:
        raise ValueError(f"the {what} `{name}` has shape {tuple(given[name].shape)}, not {shape}")
