"""What operations take as the compiler emits them: each kind and size that programs have, alone, again and again.

Operands come from several sets in turn, and the results of each live until its next turn, so that most of them are not
in a core's own cache: a program, too, reads what it has made long before, and makes it where something else has been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from time import perf_counter

import torch
from attrs import frozen

from partita.compiler.costs.nodes import kernel_of
from partita.compiler.costs.record import Timing
from partita.compiler.emission.segments import fused
from partita.compiler.emission.writer import HEADER, Writer
from partita.compiler.graph import Node, Phase, Value
from partita.compiler.ops.lookup import Gather, ScatterAdd
from partita.compiler.ops.loss import NegativeLogLikelihood, NegativeLogLikelihoodGradient
from partita.compiler.ops.op import Argument, Kernel
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Constant
from partita.compiler.pipeline import Compilation
from partita.compiler.report.traffic import update_nodes
from partita.dsl.types import Type
from partita.runtime.context import Context
from partita.runtime.kernels.dtypes import DTYPES

CACHE_BYTES = 32 << 20
MOST_SETS = 24
PASSES, PASS_SECONDS = 7, 1.5e-3


@frozen(eq=False)
class Sample:
    """An operation of a program, the accumulation that it adds into, and the text of operands that are numbers."""

    kernel: Kernel
    dtype: str
    node: Node
    accumulation: Node | None
    numbers: dict[Value, str]


def samples(programs: Iterable[Compilation]) -> list[Sample]:
    """One operation of each kernel and dtype that programs have."""
    found: dict[tuple[Kernel, str], Sample] = {}
    for state in programs:
        for nodes in _together(state):
            numbers = {n.output: n.op.emit((), (n.output.type,)) for n in nodes if isinstance(n.op, Constant)}
            adding = fused(nodes, ())
            added = set(adding.values())
            for node in nodes:
                known = None if node in added else kernel_of(node, node in adding)
                if known is not None and known not in found:
                    own = {value: numbers[value] for value in node.inputs if value in numbers}
                    found[known] = Sample(*known, node, adding.get(node), own)
    return list(found.values())


def _together(state: Compilation) -> Iterator[Sequence[Node]]:
    """Nodes that run one after the other, without what other groups have."""
    assert state.partitioned is not None
    assert state.update is not None
    assert state.program is not None
    for stage in state.partitioned.stages:
        yield [node for node in stage.nodes if node.phase is Phase.PROLOGUE]
        yield [node for node in stage.nodes if node.phase is not Phase.PROLOGUE]
    for _, nodes in state.update.reduce:
        yield nodes
    for rank in state.program.ranks:
        yield update_nodes(state, rank)


def measure(sample: Sample, device: torch.device) -> Timing:
    """The time of one operation."""
    run, given = _function(sample)
    size = sum(value.type.bytes for value in given) or 1
    count = max(1, min(MOST_SETS, CACHE_BYTES // size))
    sets = [[_operand(value.type, sample.node, device) for value in given] for _ in range(count)]
    context = Context(0, device, step=1, rate=1e-3)

    results: list[object] = [None] * count

    def once() -> float:
        start = perf_counter()
        for i, operands in enumerate(sets):
            results[i] = run(operands, context)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter() - start

    once()
    times = max(1, round(PASS_SECONDS / once()))
    # A mean, as a step is a sum: what the machine does meanwhile takes time there too. The longest pass is left out.
    found = sorted(sum(once() for _ in range(times)) / times / count for _ in range(PASSES))
    kernel = sample.kernel
    return Timing(kernel.name, sample.dtype, kernel.features, max(kernel.work, 1.0), fmean(found[:-1]))


def _function(sample: Sample) -> tuple[Callable[[Sequence[torch.Tensor], Context], object], list[Value]]:
    """The operation as the compiler emits it, of operands in order."""
    node, accumulation = sample.node, sample.accumulation
    given = [value for value in dict.fromkeys(node.inputs) if value not in sample.numbers]
    known = {value: Argument(f"x[{i}]", value.type) for i, value in enumerate(given)}
    known |= {value: Argument(text, value.type, literal=True) for value, text in sample.numbers.items()}
    writer = Writer("x, c", known)
    nodes = [node] if accumulation is None else [node, accumulation]
    target = next((each.op for each in nodes if isinstance(each.op, Accumulate)), None)
    accumulators = {}
    if target is not None:
        value = Value("total", target.type)
        accumulators[target.target] = (f"x[{len(given)}]", value)
        given = [*given, value]
    made = () if accumulation is not None else node.outputs
    writer.block(nodes, set(made), accumulators)
    lines = [*writer.lines, f"return {', '.join(writer.argument(value).text for value in made) or None}"]
    source = HEADER.format(name="profile") + "\n\ndef run(x, c):\n" + "\n".join(f"    {line}" for line in lines)
    namespace: dict[str, Callable[[Sequence[torch.Tensor], Context], object]] = {}
    exec(compile(source, "<profile>", "exec"), namespace)
    return namespace["run"], given


def _operand(type: Type, node: Node, device: torch.device) -> torch.Tensor:
    """Random numbers; integers within what they index."""
    dtype = DTYPES[type.dtype]
    if dtype == torch.bool:
        return torch.rand(type.shape, device=device) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, _limit(node), type.shape, dtype=dtype, device=device)
    # Not negative: the optimizer's second moment, and what a root is taken of.
    return torch.rand(type.shape, dtype=dtype, device=device)


def _limit(node: Node) -> int:
    op = node.op
    if isinstance(op, Gather):
        return node.inputs[1].type.axis(op.over).size
    if isinstance(op, ScatterAdd):
        return node.output.type.axis(op.over).size
    if isinstance(op, NegativeLogLikelihood):
        return node.inputs[0].type.axis(op.over).size
    if isinstance(op, NegativeLogLikelihoodGradient):
        return next(value.type.axis(op.over).size for value in node.inputs if value.type.has(op.over))
    return 2
