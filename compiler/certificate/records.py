"""What a program says of inputs, parameters and accumulators: the same as the graphs that it was assembled from.

By these records the runtime cuts inputs and parameters into parts, and makes buffers.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define

from partita.compiler.certificate.report import Checker
from partita.compiler.certificate.rules import demand
from partita.compiler.certificate.whole import Whole
from partita.compiler.graph import Parameter
from partita.compiler.partition.cut import PartitionedGraph, StageGraph
from partita.compiler.partition.update import UpdateGraph
from partita.compiler.program import AccumulatorRecord, InputPart, ParameterRecord, Program, StageProgram
from partita.compiler.sharding.shard import ParameterLayouts


@define(eq=False)
class Records:
    """The records of a program, held against its graphs."""

    partitioned: PartitionedGraph
    layouts: Mapping[str, ParameterLayouts]
    update: UpdateGraph
    whole: Whole
    program: Program
    check: Checker

    def run(self) -> None:
        """Check all of them."""
        with self.check.at():
            names = [record.name for record in self.program.parameters]
            read = self.partitioned.stage_sets()
            demand(
                names == [name for name in self.whole.parameters if name in read], "the program has other parameters"
            )
            stages = [stage.index for stage in self.program.stages]
            demand(stages == [stage.index for stage in self.partitioned.stages], "the program has other stages")
            entries = [name for name, _, _ in self.update.statistics]
            demand(list(self.program.statistics) == entries, "the program has other statistics")
        stage_sets = self.partitioned.stage_sets()
        states = {each.name: each.state_names for each in self.update.parameters}
        for record in self.program.parameters:
            declared, _ = self.whole.parameters[record.name]
            with self.check.at(declared.span, f"the record of `{record.name}`"):
                own = states.get(record.name, ())
                self._parameter(record, declared, stage_sets[record.name], own)
        for stage, graph in zip(self.program.stages, self.partitioned.stages, strict=True):
            with self.check.at(where=f"the record of stage {stage.index}"):
                _stage(stage, graph)

    def _parameter(
        self, record: ParameterRecord, declared: Parameter, stages: tuple[int, ...], states: tuple[str, ...]
    ) -> None:
        layouts = self.layouts[record.name]
        partial = any(layout.partial for layout in (layouts.param, layouts.grad, layouts.state))
        demand(not partial, f"`{record.name}` is said to be stored as parts of a sum")
        demand(record.layout == layouts.param, f"`{record.name}` is stored as {record.layout}, not {layouts.param}")
        there = f"the optimizer's state of `{record.name}` is stored as {record.state_layout}, not {layouts.state}"
        demand(record.state_layout == layouts.state, there)
        same = record.type == declared.master and record.initial is declared.initial and record.fans == declared.fans
        demand(same, f"`{record.name}` is another parameter than declared")
        demand(record.stages == stages, f"`{record.name}` is on stages {stages}, not {record.stages}")
        demand(record.states == states, f"`{record.name}` has the optimizer's {', '.join(states) or 'nothing'}")


def _stage(stage: StageProgram, graph: StageGraph) -> None:
    demand(stage.parameters == tuple(each.name for each in graph.parameters), "the stage has other parameters")
    wanted = {(each.name, each.batch, each.value.layout) for each in graph.inputs}
    found = [_part(each) for each in (*stage.inputs, *stage.whole_inputs)]
    demand(set(found) == wanted and len(found) == len(graph.inputs), "the stage reads other parts of the inputs")
    accumulators = tuple(
        AccumulatorRecord(each.name, each.value.type, each.parameter, each.maximum) for each in graph.accumulators
    )
    demand(stage.accumulators == accumulators, "the stage has other accumulators")


def _part(each: InputPart) -> tuple[object, ...]:
    return each.name, each.batch, each.layout
