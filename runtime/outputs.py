"""The outputs of a model, computed with given parameters for one batch, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from partita.compiler.passes.microbatch import OUTPUT
from partita.compiler.pipeline import compile_outputs
from partita.compiler.program import Program
from partita.compiler.verify.proxy import single
from partita.dsl.spec import Spec
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.rank import Plan, check_ids
from partita.runtime.training import VirtualRun

Tensors = Mapping[str, torch.Tensor]


def outputs(given: Spec, parameters: Tensors, inputs: Tensors, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The outputs of these `names`, or all, with axes in the order of their types.

    `parameters` are those of the model by full name, buffers included; those that no output reads may be left out, and
    so may `inputs`. Random numbers are those of an evaluation. Raises Refused, and ValueError if a tensor is missing or
    has another shape than the file says.
    """
    model, _ = given.trained
    if model.operations:
        raise ValueError("outputs of a model with operations of its own are not supported yet")
    plan = Plan(given, compile_outputs(single(given), names), None)
    program = plan.program
    (stage,) = program.stages
    for parameter in stage.parameters:
        _check("parameter", parameter, program.parameter(parameter).type.shape, parameters)
    read = {part.name for part in (*stage.inputs, *stage.full_inputs)}
    batch = _batch(program, inputs, read)
    run = VirtualRun(plan, strict=False)
    run.set_parameters({name: parameters[name] for name in stage.parameters})
    (rank,) = run.ranks
    run.cluster.run([rank.step(0, batch, ())])
    check_ids(rank.outside(rank.training), "in the outputs")
    found = {}
    for name, number in model.outputs:
        total = rank.training.totals.get((stage.index, f"{OUTPUT}{name}"))
        if total is not None:
            record = next(each for each in stage.accumulators if each.name == f"{OUTPUT}{name}")
            order = [record.type.position(axis) for axis in model.answering.types[number].names]
            found[name] = total.permute(order).contiguous().clone()
    return found


def _batch(program: Program, inputs: Tensors, read: set[str]) -> dict[str, torch.Tensor]:
    """The inputs that are read, in the dtypes of the program."""
    batch = {}
    for record in program.inputs:
        if record.name not in read:
            continue
        _check("input", record.name, record.type.shape, inputs)
        batch[record.name] = value = inputs[record.name].to(DTYPES[record.type.dtype])
        limit = record.limit.size if record.limit is not None else None
        if limit is not None and value.numel() and not 0 <= int(value.min()) <= int(value.max()) < limit:
            raise ValueError(f"`{record.name}` has ids that are not below {limit}, the size of `{record.limit}`")
    return batch


def _check(what: str, name: str, shape: tuple[int, ...], given: Tensors) -> None:
    if name not in given:
        raise ValueError(f"the outputs need the {what} `{name}`")
    if tuple(given[name].shape) != shape:
        raise ValueError(f"the {what} `{name}` has shape {tuple(given[name].shape)}, not {shape}")
