"""Validates the stages of a microbatch: each computes only values of the single-device program.

All stages are walked together. A stage waits at a receive until the sender has reached the matching send, so every
value is numbered after its operands. Resharding, sends and receives keep the number. Invariants:

- A value is an input, a parameter or the result of one node, and is defined before its uses. A node reads values of
  its own phase or of an earlier one (P, F, B, W in this order), since each phase is a separate function.
- Its value number is one of the single-device program: the same operation on operands with the same numbers.
- The accumulators of a stage get the contributions that the single-device program gives them there, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field

from partita.compiler.graph import Accumulator, Node, Parameter, Phase, Value
from partita.compiler.layout import MAX, SUM
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.ops.host import HostCopy
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.passes.shard.shard import ParameterLayouts
from partita.compiler.verify.checker import Checker, quoted
from partita.compiler.verify.messages import Key, Messages, key_of
from partita.compiler.verify.reference import Contribution, Reference
from partita.compiler.verify.rules import require
from partita.compiler.verify.value_numbering import UNKNOWN

ORDER = {Phase.PROLOGUE: 0, Phase.FORWARD: 1, Phase.BACKWARD: 2, Phase.WEIGHT: 3}


@define(eq=False)
class _Stage:
    """The walk through a stage. `values` maps those defined so far to their value number and phase."""

    graph: StageGraph
    accumulators: dict[str, Accumulator]
    values: dict[Value, tuple[int, int]] = field(factory=dict)
    contributions: dict[str, list[Contribution]] = field(factory=dict)
    position: int = 0


@define(eq=False)
class Stages:
    """Checks all stages of a partitioned program against the single-device one."""

    partitioned: PartitionedGraph
    layouts: Mapping[str, ParameterLayouts]
    whole: Reference
    messages: Messages
    check: Checker
    arrived: dict[Key, int] = field(factory=dict)

    def run(self) -> None:
        """Check all stages, running each until it waits for a message."""
        check = self.check
        with check.at():
            declared = [parameter for parameter, _ in self.whole.parameters.values()]
            alike = all(map(_same, self.partitioned.graph.parameters, declared))
            require(alike and len(declared) == len(self.partitioned.graph.parameters), "the parameters differ")
        stages = [self._begun(index, graph) for index, graph in enumerate(self.partitioned.stages)]
        waiting: dict[Key, _Stage] = {}
        ready = list(reversed(stages))
        while ready:
            stage = ready.pop()
            nodes = stage.graph.nodes
            while stage.position < len(nodes):
                node = nodes[stage.position]
                if isinstance(node.op, Receive):
                    key = key_of(node, stage.graph.index)
                    if key in self.messages.sent and key not in self.arrived:
                        waiting[key] = stage
                        break
                stage.position += 1
                self._node(stage, node)
                if isinstance(node.op, Send):
                    woken = waiting.pop(key_of(node, stage.graph.index), None)
                    ready += [woken] if woken else []
        for key, stage in waiting.items():
            node = stage.graph.nodes[stage.position]
            check.report(f"`{key[0]}` is sent only after what follows from it", node.span, node.outputs, "")
        for stage in stages:
            with check.at(where=f"on stage {stage.graph.index}"):
                self._accumulated(stage)

    # ------------------------------------------------------------ inputs and parameters

    def _begun(self, index: int, graph: StageGraph) -> _Stage:
        check = self.check
        stage = _Stage(graph, {each.name: each for each in graph.accumulators})
        with check.at():
            require(graph.index == index, f"stage {graph.index} is the {index + 1}th")
        for each in graph.inputs:
            with check.at(each.span, f"on stage {index}"):
                self._add(stage, each.value, UNKNOWN, ORDER[Phase.FORWARD if each.batch else Phase.PROLOGUE])
                number = check.given(self.whole.inputs[each.name, each.batch], each.value)
                partial = any(state in (SUM, MAX) for _, state in each.value.layout.states)
                require(not partial, f"inputs cannot be partial, as `{each.name}` claims to be", each.value)
                self._set(stage, each.value, number)
        for parameter in graph.parameters:
            with check.at(parameter.span, f"on stage {index}"):
                value = parameter.value
                self._add(stage, value, UNKNOWN, ORDER[Phase.PROLOGUE])
                declared, number = self.whole.parameters[parameter.name]
                check.given(number, value)
                require(value.layout == self.layouts[parameter.name].param, "a parameter is not as it is stored", value)
                require(_same(parameter, declared), f"`{parameter.name}` is another parameter than declared", value)
                self._set(stage, value, number)
        return stage

    def _add(self, stage: _Stage, value: Value, number: int, phase: int) -> None:
        require(value not in stage.values, f"`{value.name}` is made twice", value)
        stage.values[value] = number, phase

    def _set(self, stage: _Stage, value: Value, number: int) -> None:
        stage.values[value] = number, stage.values[value][1]

    # ------------------------------------------------------------ one node

    def _node(self, stage: _Stage, node: Node) -> None:
        where = f"on stage {stage.graph.index}"
        numbers: tuple[int, ...] = (UNKNOWN,) * len(node.outputs)
        with self.check.at(node.span, where):
            numbers = self._meaning(stage, node)
        with self.check.at(node.span, where):
            for value, number in zip(node.outputs, numbers, strict=True):
                self._add(stage, value, number, ORDER.get(node.phase, 0))

    def _meaning(self, stage: _Stage, node: Node) -> tuple[int, ...]:
        require(node.phase in ORDER, f"{quoted(node)} does not belong to a microbatch")
        phase = ORDER[node.phase]
        require(node.stage == stage.graph.index, f"{quoted(node)} is said to be on stage {node.stage}")
        operands = []
        for value in node.inputs:
            require(value in stage.values, f"`{value.name}` is read before it is made, or is not made at all", value)
            number, source_phase = stage.values[value]
            require(
                source_phase <= phase, f"`{value.name}` is made after phase {node.phase}, in which it is read", value
            )
            operands.append(number)
        op = node.op
        if isinstance(op, Receive):
            return (self.arrived.get(key_of(node, stage.graph.index), UNKNOWN),)
        if isinstance(op, Send):
            self.arrived[key_of(node, stage.graph.index)] = operands[0]
            return ()
        if isinstance(op, Accumulate):
            self._accumulate(stage, node, op, operands[0])
            return ()
        require(phase != 0 or not op.microbatch_dependent, "the prologue has no microbatch", *node.outputs)
        return self.check.results(node, tuple(operands), new=isinstance(op, HostCopy))

    # ------------------------------------------------------------ accumulation

    def _accumulate(self, stage: _Stage, node: Node, op: Accumulate, number: int) -> None:
        (value,) = node.inputs
        require(node.phase is not Phase.PROLOGUE, f"`{value.name}` is accumulated before the first microbatch", value)
        whole = self.check.rules.operation(op, node.inputs, ())
        self.check.nodes += 1
        stage.contributions.setdefault(op.target, []).append((whole, number))
        require(op.target in stage.accumulators, f"stage {stage.graph.index} has no accumulator `{op.target}`", value)
        total = stage.accumulators[op.target].value
        alike = total.layout == value.layout and total.type == op.type
        require(alike, f"`{value.name}` is accumulated in another layout than its own", value, total)

    def _accumulated(self, stage: _Stage) -> None:
        """The stage's accumulators and their contributions are those of the single-device program."""
        index = stage.graph.index
        expected = {
            target: contributions for (target, at), contributions in self.whole.contributions.items() if at == index
        }
        names = [each.name for each in stage.graph.accumulators]
        require(len(set(names)) == len(names), f"stage {index} has two accumulators of one name")
        require(
            set(names) == expected.keys(),
            f"stage {index} has other accumulators than the single-device program gives it",
        )
        for each in stage.graph.accumulators:
            declared, number = self.whole.accumulators[each.name]
            with self.check.at(where=f"on stage {index}"):
                self.check.given(number, each.value)
                kind = (each.parameter, each.term, each.maximum) == (
                    declared.parameter,
                    declared.term,
                    declared.maximum,
                )
                require(kind and each.stage == index, f"`{each.name}` is accumulated as something else", each.value)
                if each.parameter is not None and each.term is None:
                    self._stored(each, each.parameter)
                actual, reference = stage.contributions.get(each.name, []), expected[each.name]
                count = f"{len(actual)} contributions, and {len(reference)} in the single-device program"
                require(len(actual) == len(reference), f"`{each.name}` gets {count}", each.value)
                require(
                    actual == reference,
                    f"`{each.name}` gets other contributions than in the single-device program",
                    each.value,
                )

    def _stored(self, each: Accumulator, parameter: str) -> None:
        """A gradient is stored sharded where the layout says so; along other mesh axes it may stay partial."""
        stored, layout = self.layouts[parameter].grad, each.value.layout
        require(layout.flat == stored.flat, f"the gradient of `{parameter}` is not stored as {stored}", each.value)
        for over in self.check.rules.mesh.sharding:
            state, expected = layout.state(over), stored.state(over)
            require(
                state == expected or (expected is None and state == SUM),
                f"the gradient of `{parameter}` is not stored as {stored}",
                each.value,
            )


def _same(a: Parameter, b: Parameter) -> bool:
    """Whether two records describe the same parameter, layout aside."""
    alike = (a.name, a.master, a.fans, a.decays, a.buffer) == (b.name, b.master, b.fans, b.decays, b.buffer)
    return alike and a.initial is b.initial
