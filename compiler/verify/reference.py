"""The value numbers of the single-device program: what a partitioned program must compute."""

from __future__ import annotations

from attrs import field, frozen

from partita.compiler.graph import Accumulator, Graph, Parameter, Value
from partita.compiler.ops.op import Op
from partita.compiler.ops.optimizer import target_of
from partita.compiler.verify.value_numbering import ValueNumbering

# A contribution to an accumulator: the accumulating operation, and the value number of its operand.
Contribution = tuple[Op, int]


@frozen(eq=False)
class Reference:
    """The graph of one microbatch and of the end of the step, with the value numbers of its interface.

    `contributions` are by accumulator and stage, in program order; `values` all values of the graph; `step_metrics` the
    loss and the metrics, `updates` the new values of buffers.
    """

    graph: Graph
    inputs: dict[tuple[str, str | None], int] = field(factory=dict)
    parameters: dict[str, tuple[Parameter, int]] = field(factory=dict)
    accumulators: dict[str, tuple[Accumulator, int]] = field(factory=dict)
    contributions: dict[tuple[str, int | None], list[Contribution]] = field(factory=dict)
    values: dict[Value, int] = field(factory=dict)
    step_metrics: dict[str, int] = field(factory=dict)
    updates: dict[str, int] = field(factory=dict)

    @staticmethod
    def of(graph: Graph, numbering: ValueNumbering) -> Reference:
        """Number a graph."""
        whole = Reference(graph)
        numbers = whole.values
        for each in graph.inputs:
            number = numbering.given("input", each.name, each.batch, type=each.value.type)
            numbers[each.value] = whole.inputs[each.name, each.batch] = number
        for parameter in graph.parameters:
            number = numbers[parameter.value] = numbering.given("parameter", parameter.name, type=parameter.value.type)
            whole.parameters[parameter.name] = parameter, number
        for total in graph.accumulators:
            number = numbers[total.value] = numbering.given("total", total.name, type=total.value.type)
            whole.accumulators[total.name] = total, number
        for master in graph.masters:
            type = whole.parameters[master.parameter][0].master
            numbers[master.value] = numbering.given(master.kind, master.parameter, type=type)
        for node in graph.nodes:
            operands = tuple(numbers[value] for value in node.inputs)
            target = target_of(node.op)
            if target is not None:
                key = target, node.stage
                whole.contributions.setdefault(key, []).append((node.op, operands[0]))
            else:
                numbers.update(zip(node.outputs, numbering.of(node.op, operands), strict=True))
        for name, value in (("loss", graph.loss), *graph.metrics):
            whole.step_metrics[name] = numbers[value]
        whole.updates.update((each.buffer, numbers[each.value]) for each in graph.updates)
        return whole
