"""The outputs of a model, computed with given parameters batch by batch: on one device, or in the file's own layout."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

import torch

from partita.compiler.layout import global_type
from partita.compiler.passes.microbatch import OUTPUT
from partita.compiler.pipeline import compile_outputs
from partita.compiler.program import AccumulatorRecord, InputRecord, Program
from partita.compiler.verify.proxy import single
from partita.dsl.advice.report import nearest
from partita.dsl.reprs import kind_of
from partita.dsl.spec import Spec
from partita.dsl.types import Type
from partita.runtime.evaluation import check_ids, outside
from partita.runtime.inference.ranks import ForwardRank, LocalRanks, all_ranks_local, ranks_of
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.python_functions import functions_of
from partita.runtime.regions import in_slabs, region_of, shape_of, whole_region

Tensors = Mapping[str, torch.Tensor]
# Bytes of an output that ranks exchange at once.
MAX_AT_ONCE = 1 << 22


def outputs(spec: Spec, parameters: Tensors, inputs: Tensors, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The outputs of these `names`, or all, for one batch (`Outputs`)."""
    compiled = Outputs(spec, names)
    compiled.set_parameters(parameters)
    return compiled(inputs)


def output_of(program: Program, name: str) -> tuple[int, AccumulatorRecord]:
    """The stage of an output and the accumulator that holds it."""
    return next(
        (stage.index, record)
        for stage in program.stages
        for record in stage.accumulators
        if record.name == f"{OUTPUT}{name}"
    )


class Outputs:
    """A compiled program for outputs of these `names`, or all, with axes in the order of their types: on one device or,
    with the ranks that are `here`, in the file's layout.

    Random numbers are those of an evaluation. Raises Refused if there are no such outputs, or if Python code of the
    file is not allowed.
    """

    def __init__(
        self, spec: Spec, names: Sequence[str] = (), allow_python: bool = False, here: LocalRanks | None = None
    ) -> None:
        self.model, _ = spec.trained
        names = names_of(names)
        functions = functions_of(self.model, allow_python)
        gpu = here is not None and here.device.type == "cuda"
        self.program = compile_outputs(single(spec) if here is None else spec, names, gpu=gpu).program
        self.ranks = ranks_of(all_ranks_local(1) if here is None else here, [self.program], spec, functions)
        self._names = [name for name, _ in self.model.outputs if not names or name in names]

    @property
    def parameters(self) -> dict[str, Type]:
        """The types of the parameters and buffers that the outputs need, by full name."""
        return {each.name: each.type for each in self.program.parameters}

    @property
    def inputs(self) -> tuple[InputRecord, ...]:
        """The inputs that the outputs need: those that the stages read."""
        read = {part.name for stage in self.program.stages for part in (*stage.inputs, *stage.full_inputs)}
        return tuple(each for each in self.program.inputs if each.name in read)

    def set_parameters(self, parameters: Tensors) -> None:
        """Set parameters by full name; further names are ignored. Raises ValueError for a name that is missing or
        another shape, and TypeError for what is no tensor.
        """
        tensors = {name: require_tensor("parameter", name, parameters) for name in self.parameters}
        for name, type in self.parameters.items():
            check_shape("parameter", name, tensors[name], type.shape)
        self.ranks.set_parameters(tensors)

    def __call__(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """The outputs for one batch of inputs by name; none in a process that does not have the first rank. Raises
        ValueError if one is missing, has another shape, or ids out of range, and TypeError for what is no tensor.
        """
        batch = {record.name: _fitting(record, inputs) for record in self.inputs}

        def part(rank: ForwardRank) -> Generator[None, None, dict[str, torch.Tensor]]:
            (executor,) = rank.executors
            yield from executor.step(0, batch)
            check_ids(outside(executor), "in the outputs")
            results = {}
            for name in self._names:
                whole = yield from self._whole(rank, name)
                if whole is not None:
                    results[name] = whole
            return results

        return self.ranks.run(part)

    def _whole(self, rank: ForwardRank, name: str) -> Generator[None, None, torch.Tensor | None]:
        """An output as a whole, on the first rank."""
        (executor,) = rank.executors
        stage, record = output_of(self.program, name)
        total = executor.totals.get((stage, record.name))
        mesh = self.program.mesh
        type = global_type(record.type, record.layout, mesh.sizes)
        order = [type.position(axis) for axis in self.model.answering.types[dict(self.model.outputs)[name]].names]
        if mesh.ranks == 1 and total is not None:
            return total.permute(order).contiguous().clone()
        # Parts go from rank to rank by sums: of each element all ranks but its owner give zero.
        dtype = DTYPES[type.dtype] if type.dtype != "bool" else torch.int32
        whole = torch.zeros(type.shape, dtype=DTYPES[type.dtype]) if rank.rank == 0 else None
        region = region_of(type, record.layout, mesh.sizes, rank.coordinates)
        owner = total is not None and all(
            rank.coordinates[over] == 0 for over in mesh.sharding if record.layout.state(over) is None
        )
        for _, block in in_slabs(whole_region(type.shape), MAX_AT_ONCE // dtype.itemsize):
            part = torch.zeros(shape_of(block), dtype=dtype)
            if owner and total is not None:
                _copy(part, block, total, region)
            part = yield from rank.sum(part)
            if whole is not None:
                whole[block] = part
        return None if whole is None else whole.permute(order).contiguous()


def _copy(into: torch.Tensor, block: Sequence[slice], part: torch.Tensor, region: Sequence[slice]) -> None:
    """Copy what a block of a tensor has of a region of it."""
    both = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(block, region, strict=True)]
    if all(start < stop for start, stop in both):
        inner, outer = (
            tuple(slice(start - each.start, stop - each.start) for (start, stop), each in zip(both, of, strict=True))
            for of in (block, region)
        )
        into[inner] = part[outer].cpu()


def _fitting(record: InputRecord, inputs: Tensors) -> torch.Tensor:
    """An input, in the dtype of the program."""
    tensor, dtype = require_tensor("input", record.name, inputs), DTYPES[record.type.dtype]
    check_shape("input", record.name, tensor, record.type.shape)
    value = tensor.to(dtype)
    if not dtype.is_floating_point and tensor.is_floating_point() and not torch.equal(value.to(tensor.dtype), tensor):
        raise ValueError(f"the input `{record.name}` has numbers that are no integers, which {record.type} needs")
    limit = record.limit.size if record.limit is not None else None
    ids = value[~torch.isin(value, torch.tensor(record.ignored))] if record.ignored and limit is not None else value
    if limit is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise ValueError(f"`{record.name}` has ids that are not below {limit}, the size of `{record.limit}`")
    return value


# ---------------------------------------------------------------- what callers give


def names_of(names: object) -> tuple[str, ...]:
    """Names of outputs. Raises TypeError."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        example = f"[{names!r}]" if isinstance(names, str) else '["logits"]'
        raise TypeError(f"`names` is a list of names, such as {example}, not {kind_of(names)}")
    output_names = tuple(names)
    for each in output_names:
        if not isinstance(each, str):
            raise TypeError(f"`names` is a list of names, and has {kind_of(each)}")
    return output_names


def require_tensor(what: str, name: str, tensors: Tensors) -> torch.Tensor:
    """A tensor that is needed, of those that are given by name. Raises ValueError if it is missing, and TypeError for
    what is no tensor.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"`{what}s` are tensors by name, such as {{{name!r}: …}}, not {kind_of(tensors)}")
    if name not in tensors:
        near = nearest(name, [each for each in tensors if isinstance(each, str)])
        raise ValueError(f"the outputs need the {what} `{name}`{f', and not `{near}`' if near else ''}")
    value = tensors[name]
    if not isinstance(value, torch.Tensor):
        help = "; `torch.as_tensor` makes one" if not isinstance(value, str | None) else ""
        raise TypeError(f"the {what} `{name}` is a tensor, not {kind_of(value)}{help}")
    if value.is_complex():
        raise TypeError(f"the {what} `{name}` is of real numbers, not {value.dtype}")
    return value


def check_shape(what: str, name: str, value: torch.Tensor, shape: Sequence[int], rows: int | None = None) -> None:
    """Refuse (ValueError) another shape than is needed, in which any number will do at the place of the `rows`."""
    needed = [size if place != rows else "rows" for place, size in enumerate(shape)]
    actual = [size if place != rows else "rows" for place, size in enumerate(value.shape)]
    if actual != needed:
        text = f"({', '.join(map(str, needed))}{',' * (len(needed) == 1)})"
        raise ValueError(f"the {what} `{name}` has shape {tuple(value.shape)}, not {text}")
