"""What an operation allocates, besides its results, is at most what it says (`workspace`): on a CPU, where it runs, and
on a GPU that is not there, where sizes can be those at which it matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random

import pytest
import torch
from attrs import define, field, frozen
from memory import Live

from partita.compiler.analysis.traffic import outer_nodes, update_nodes
from partita.compiler.codegen.sums import accumulated
from partita.compiler.graph import Node
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Transfer
from partita.compiler.ops.host import HostCopy
from partita.compiler.ops.op import Argument, Op
from partita.compiler.ops.optimizer import Accumulate, Update, target_of
from partita.compiler.ops.traits import CachesTable, DenseOperands
from partita.compiler.pipeline import compile_run
from partita.compiler.state import Compilation
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.dsl.types import Type
from partita.runtime import kernels
from partita.runtime.context import Context
from partita.runtime.fake_gpu.device import DEVICE, fake_gpu
from partita.runtime.fake_gpu.rank import own_tables
from partita.runtime.fake_gpu.watch import Watch
from partita.runtime.kernels.dtypes import DTYPES
from tests.files import SPECS
from tests.reference.compare import accepted
from tests.reference.programs import Maker

NUMBERS = 64  # bytes of scalars, which nothing counts
CPU = torch.device("cpu")


def compiled(seeds: range, folder: Path) -> Iterator[Compilation]:
    """What random programs compile to, training and evaluation."""
    for seed in seeds:
        with suppress(Refused):
            program = Maker(Random(seed), cutting=seed % 3 != 0).program()
            yield from (each for each in compile_run(accepted(program, folder)[1]) if each is not None)


def operand(type: Type, device: torch.device, strided: bool = False) -> torch.Tensor:
    """Numbers of which every operation can do with; ids are in range. A `strided` one is a part of a larger tensor."""
    dtype = DTYPES[type.dtype]
    made = torch.full if dtype.is_floating_point else torch.zeros
    fill = (0.5,) if dtype.is_floating_point else ()
    shape = (*type.shape[:-1], 2 * type.shape[-1]) if strided else type.shape
    return made(shape, *fill, dtype=dtype, device=device)[tuple(map(slice, type.shape))]


@frozen
class Bytes:
    """At most at once, and in the end."""

    most: int
    kept: int


@define
class Measured:
    """What operations allocate on a CPU, or on a GPU that is watched: for each, by its name, operands and the sum that
    it adds to, the bytes that it has allocated and those that it says.
    """

    watch: Watch | None = None
    found: dict[tuple[str, tuple[Type, ...], Type | None, bool], tuple[Bytes, Bytes]] = field(factory=dict)

    @property
    def over(self) -> dict[str, str]:
        """Operations that allocate more than they say."""
        return {
            op.partition("(")[0]: f"{found} of {said}: {op} of {[*map(str, operands)]} into {into}, strided: {strided}"
            for (op, operands, into, strided), (found, said) in self.found.items()
            if found.most > said.most + NUMBERS or found.kept > said.kept + NUMBERS
        }

    def measure_all(self, states: Iterable[Compilation | None]) -> None:
        """Run all that ranks do in a step, each operation by itself."""
        for state in filter(None, states):
            for stage in state.partitioned.stages:
                added = accumulated(stage.nodes, ())
                for node in stage.nodes:
                    self.measure(node, state, added.get(node))
            for rank in state.plan.ranks:
                for node in (*update_nodes(state, rank), *outer_nodes(state, rank)):
                    self.measure(node, state)
                    if isinstance(node.op, Update) and len(node.inputs[1].type.axes) > 1:
                        self.measure(node, state, strided=True)

    def measure(self, node: Node, state: Compilation, into: Node | None = None, strided: bool = False) -> None:
        """Run a node's source, if it is one that runs by itself; given `into`, as it adds its result to that sum; or
        with a gradient that is `strided`.
        """
        op, operands, results = node.op, *([value.type for value in each] for each in (node.inputs, node.outputs))
        alone = not (isinstance(op, (Collective, Transfer)) or op.is_view or target_of(op) is not None)
        on_host = isinstance(op, HostCopy) or any(value.host for value in (*node.inputs, *node.outputs))
        if not alone or on_host or op.literal is not None or op.name.startswith("custom"):
            return
        target = into.op.type if into is not None and isinstance(into.op, Accumulate) else None
        key = (repr(op), tuple(operands), target, strided)
        if key not in self.found:
            table = op.kernel_table(operands) if isinstance(op, CachesTable) else None
            kept = sum(type.bytes for type in results if op.allocates) + (0 if table is None else table[1])
            if target is None:
                dense = strided and isinstance(op, DenseOperands)
                said = op.workspace_strided(operands, results) if dense else op.workspace(operands, results)
            else:
                said = op.workspace_to_add(target, operands, results[0])
            self.found[key] = self.allocated(op, operands, results, target, state, strided), Bytes(said + kept, kept)

    def allocated(
        self, op: Op, operands: list[Type], results: list[Type], target: Type | None, state: Compilation, strided: bool
    ) -> Bytes:
        """Without operands."""
        device = CPU if self.watch is None else DEVICE
        context = Context(0, device)
        context.step, context.update, context.coordinates = 1, 1, dict.fromkeys(state.mesh.sizes, 0)
        if isinstance(op, Update):
            context.update = op.first
        context.rates = (0.1,) * len(state.train.optimizer.rules)
        types = operands if target is None else [*operands, target]
        given = {f"x{i}": operand(type, device, strided and i == 1) for i, type in enumerate(types)}
        arguments = [Argument(name, type) for name, type in zip(given, types, strict=True)]
        if target is None:
            source = compile(op.emit(arguments, results), op.name, "eval")
        else:
            source = compile(op.emit_added(arguments[-1], arguments[:-1], results[0]), op.name, "exec")
        names = {"kernels": kernels, "torch": torch, "c": context, **given}
        with torch.inference_mode():
            eval(source, names)  # kernels cache tables
            if self.watch is not None:
                before = self.watch.peak = self.watch.live
                _made = eval(source, names)
                return Bytes(self.watch.peak - before, self.watch.live - before)
            with Live() as live:
                live.aside = [range(each.data_ptr(), each.data_ptr() + each.nbytes + 1) for each in given.values()]
                _made = eval(source, names)
                return Bytes(live.peak, live.now)


@contextmanager
def measuring(gpu: bool) -> Iterator[Measured]:
    """Measures on a CPU, or on a GPU that is not there."""
    watch = Watch(torch.float32)
    with ExitStack() as stack:
        if gpu:
            stack.enter_context(own_tables())
            stack.enter_context(fake_gpu(watch))
        yield Measured(watch if gpu else None)


@pytest.mark.soak
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("seeds", [range(1, 9), range(9, 160)], ids=["few", "many"])
def test_operations_of_random_programs_allocate_what_they_say(seeds: range, gpu: bool, tmp_path: Path) -> None:
    with measuring(gpu) as measured:
        measured.measure_all(compiled(seeds, tmp_path))
    assert len(measured.found) > 100
    assert not measured.over, "\n".join(measured.over.values())


GPT = ("batch=64", "seq=64", "embed=64", "heads=4", "key=16", "vocab=512")
LLAMA = ("batch=16", "seq=64", "embed=64", "groups=4", "heads=2", "key=8", "ffn=48", "vocab=256")


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("name", "overrides"), [("gpt", GPT), ("llama", (*LLAMA, "layout=everything")), ("llama", LLAMA)], ids=str
)
def test_operations_of_language_models_allocate_what_they_say(
    name: str, overrides: tuple[str, ...], precision: str
) -> None:
    spec, diagnostics = load(SPECS / f"{name}.par", (*overrides, f"train.precision={precision}"))
    assert spec is not None, [each.message for each in diagnostics]
    with measuring(False) as measured:
        measured.measure_all(compile_run(spec))
    assert not measured.over, "\n".join(measured.over.values())
