"""Validates a program's records of inputs, parameters and accumulators against the graphs it was assembled from.

The runtime shards inputs and parameters and allocates buffers by these records.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define

from partita.compiler.graph import Parameter, Value
from partita.compiler.ops.optimizer import EMA
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.passes.shard.shard import ParameterLayouts
from partita.compiler.passes.update import UpdateGraph
from partita.compiler.program import AccumulatorRecord, InputPart, ParameterRecord, Program, StageProgram
from partita.compiler.verify.checker import Checker
from partita.compiler.verify.reference import Reference
from partita.compiler.verify.rules import require


@define(eq=False)
class Records:
    """Checks the records of a program against its graphs."""

    partitioned: PartitionedGraph
    layouts: Mapping[str, ParameterLayouts]
    update: UpdateGraph
    whole: Reference
    program: Program
    check: Checker

    def run(self) -> None:
        """Check all records."""
        with self.check.at():
            names = [record.name for record in self.program.parameters]
            read = self.partitioned.stage_sets()
            require(
                names == [name for name in self.whole.parameters if name in read], "the program has other parameters"
            )
            stages = [stage.index for stage in self.program.stages]
            require(stages == [stage.index for stage in self.partitioned.stages], "the program has other stages")
            entries = [name for name, _, _ in self.update.statistics]
            require(list(self.program.statistics) == entries, "the program has other statistics")
        stage_sets = self.partitioned.stage_sets()
        states = {each.name: tuple(zip(each.state_names, each.states, strict=True)) for each in self.update.parameters}
        for record in self.program.parameters:
            declared, _ = self.whole.parameters[record.name]
            with self.check.at(declared.span, f"the record of `{record.name}`"):
                own = states.get(record.name, ())
                self._parameter(record, declared, stage_sets[record.name], own)
        for stage, graph in zip(self.program.stages, self.partitioned.stages, strict=True):
            with self.check.at(where=f"the record of stage {stage.index}"):
                _stage(stage, graph)

    def _parameter(
        self,
        record: ParameterRecord,
        declared: Parameter,
        stages: tuple[int, ...],
        states: tuple[tuple[str, Value], ...],
    ) -> None:
        layouts = self.layouts[record.name]
        partial = any(layout.partial for layout in (layouts.param, layouts.grad, layouts.state))
        require(not partial, f"`{record.name}` is said to be stored as parts of a sum")
        require(record.layout == layouts.param, f"`{record.name}` is stored as {record.layout}, not {layouts.param}")
        there = f"the optimizer's state of `{record.name}` is stored as {record.state_layout}, not {layouts.state}"
        require(record.state_layout == layouts.state, there)
        same = record.type == declared.master and record.initial is declared.initial and record.fans == declared.fans
        require(same, f"`{record.name}` is another parameter than declared")
        require(record.stages == stages, f"`{record.name}` is on stages {stages}, not {record.stages}")
        names = tuple(name for name, _ in states)
        found = tuple(state.name for state in record.states)
        require(found == names, f"`{record.name}` has the optimizer's {', '.join(names) or 'nothing'}")
        for state, (name, value) in zip(record.states, states, strict=True):
            same = record.stored(state) == value.layout and state.type == self.check.rules.whole(value)
            require(same, f"`{name}` of `{record.name}` is stored as {record.stored(state)}, not {value.layout}", value)
            require(state.copy == (name == EMA), f"`{name}` of `{record.name}` begins as something else", value)


def _stage(stage: StageProgram, graph: StageGraph) -> None:
    require(stage.parameters == tuple(each.name for each in graph.parameters), "the stage has other parameters")
    wanted = {(each.name, each.batch, each.value.layout) for each in graph.inputs}
    found = [_part(each) for each in (*stage.inputs, *stage.full_inputs)]
    require(set(found) == wanted and len(found) == len(graph.inputs), "the stage reads other parts of the inputs")
    accumulators = tuple(
        AccumulatorRecord(each.name, each.value.type, each.parameter, each.maximum, each.value.layout)
        for each in graph.accumulators
    )
    require(stage.accumulators == accumulators, "the stage has other accumulators")


def _part(each: InputPart) -> tuple[object, ...]:
    return each.name, each.batch, each.layout
