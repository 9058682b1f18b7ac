"""What an operation allocates on a CPU, besides its results, is at most what it says (`workspace`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from attrs import define, field
from memory import Live

from partita.compiler.graph import Node
from partita.compiler.ops.op import Argument, Op
from partita.compiler.pipeline import compile_run
from partita.compiler.state import Compilation
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.dsl.types import Type
from partita.runtime import kernels
from partita.runtime.context import Context
from partita.runtime.kernels.dtypes import DTYPES
from tests.files import SPECS
from tests.marks import soak
from tests.reference.compare import accepted
from tests.reference.programs import Maker

NUMBERS = 64  # bytes of scalars, which nothing counts


def compiled(seeds: range, folder: Path) -> Iterator[Compilation]:
    """What random programs compile to, training and evaluation."""
    for seed in seeds:
        with suppress(Refused):
            program = Maker(Random(seed), cutting=seed % 3 != 0).program()
            yield from (each for each in compile_run(accepted(program, folder)[1]) if each is not None)


def operand(type: Type) -> torch.Tensor:
    """Numbers of which every operation can do with; ids are in range."""
    dtype = DTYPES[type.dtype]
    return torch.full(type.shape, 0.5, dtype=dtype) if dtype.is_floating_point else torch.zeros(type.shape, dtype=dtype)


@define
class Measured:
    """What operations allocate; `over` has those that allocate more than they say."""

    seen: set[Any] = field(factory=set)
    over: dict[str, str] = field(factory=dict)

    def measure(self, node: Node, state: Compilation) -> None:
        """Run a node's source, if it is one that runs by itself."""
        op, operands, results = node.op, *([value.type for value in each] for each in (node.inputs, node.outputs))
        alone = not (op.communicates or op.sends or op.receives or op.is_view or op.accumulator is not None)
        if not alone or op.literal is not None or op.name.startswith("custom"):
            return
        key = (repr(op), tuple(operands))
        if key in self.seen:
            return
        self.seen.add(key)
        found, said = self.allocated(op, operands, results, state), sum(type.bytes for type in results)
        table = op.kernel_table(operands)
        workspace = op.workspace(operands, results) + (table[1] if table is not None else 0)
        if found > said + workspace + NUMBERS:
            self.over.setdefault(op.name, f"{found - said} of {workspace} bytes: {op} of {operands}")

    def allocated(self, op: Op, operands: list[Type], results: list[Type], state: Compilation) -> int:
        """The most bytes that are alive at once, without those of operands."""
        given = {f"x{i}": operand(type) for i, type in enumerate(operands)}
        context = Context(0, torch.device("cpu"))
        context.step, context.coordinates = 1, dict.fromkeys(state.mesh.sizes, 0)
        names = {"kernels": kernels, "torch": torch, "c": context, **given}
        source = op.emit([Argument(name, type) for name, type in zip(given, operands, strict=True)], results)
        with torch.inference_mode():
            eval(source, names)  # kernels cache tables
            with Live() as live:
                live.aside = [range(each.data_ptr(), each.data_ptr() + each.nbytes + 1) for each in given.values()]
                eval(source, names)
        return live.peak


@pytest.mark.parametrize("seeds", [range(1, 9), *soak(range(9, 160))], ids=["few", "many"])
def test_operations_of_random_programs_allocate_what_they_say(seeds: range, tmp_path: Path) -> None:
    measured = Measured()
    for state in compiled(seeds, tmp_path):
        for stage in state.partitioned.stages:
            for node in stage.nodes:
                measured.measure(node, state)
    assert len(measured.seen) > 100
    assert not measured.over, "\n".join(measured.over.values())


GPT = ("batch=64", "seq=64", "embed=64", "heads=4", "key=16", "vocab=512")
LLAMA = ("batch=16", "seq=64", "embed=64", "groups=4", "heads=2", "key=8", "ffn=48", "vocab=256")


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("name", "overrides"), [("gpt", GPT), ("llama", (*LLAMA, "layout=everything")), ("llama", LLAMA)], ids=str
)
def test_operations_of_language_models_allocate_what_they_say(
    name: str, overrides: tuple[str, ...], precision: str
) -> None:
    spec, diagnostics = load(SPECS / f"{name}.par", (*overrides, f"train.precision={precision}"))
    assert spec is not None, [each.message for each in diagnostics]
    measured = Measured()
    for state in compile_run(spec):
        for stage in state.partitioned.stages if state is not None else ():
            for node in stage.nodes:
                measured.measure(node, state)
    assert not measured.over, "\n".join(measured.over.values())
