"""Validates a program's records of inputs, parameters and accumulators against the graphs it was assembled from.

The runtime shards inputs and parameters and allocates buffers by these records.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import define, evolve, field

from partita.compiler.codegen.stored_parameters import as_computed, as_stored
from partita.compiler.graph import Parameter, Part, Value
from partita.compiler.layout import of_part
from partita.compiler.ops.groups import ANCHOR
from partita.compiler.ops.optimizer import EMA
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.passes.shard.shard import ParameterLayouts
from partita.compiler.passes.update import UpdateGraph
from partita.compiler.program import (
    ESTIMATE,
    AccumulatorRecord,
    InputPart,
    ParameterRecord,
    Program,
    StageProgram,
    StateRecord,
    older_names,
)
from partita.compiler.verify.checker import Checker
from partita.compiler.verify.reference import Reference
from partita.compiler.verify.rules import require


@define(eq=False)
class Records:
    """Checks the records of a program against its graphs; masters `on_host` lie in the host's memory. `late`: updates
    may be made before their step is validated. They have gradients of `delay` steps before, and if `paired`, of two
    steps each. A rank trains `replicas_per_rank` groups. `own_sizes` are those of axes that are padded.
    """

    partitioned: PartitionedGraph
    layouts: Mapping[str, ParameterLayouts]
    update: UpdateGraph
    whole: Reference
    program: Program
    check: Checker
    on_host: Collection[str] = ()
    late: bool = False
    delay: int = 0
    paired: bool = False
    replicas_per_rank: int = 1
    own_sizes: Mapping[str, int] = field(factory=dict)

    def run(self) -> None:
        """Check all records."""
        with self.check.at():
            names = [record.name for record in self.program.parameters]
            read = self.partitioned.stage_sets()
            known = dict.fromkeys(self._name(name) for name in self.whole.parameters if name in read)
            require(names == list(known), "the program has other parameters")
            stages = [stage.index for stage in self.program.stages]
            require(stages == [stage.index for stage in self.partitioned.stages], "the program has other stages")
            require(self.program.slices == self.program.schedule.slices, "the program has other slices")
            entries = [name for name, _, _ in self.update.step_metrics]
            require(self.program.delay == self.delay, f"updates have gradients of {self.program.delay} steps before")
            require(self.program.paired == self.paired, "updates have gradients of another number of steps")
            trains = f"a rank trains {self.replicas_per_rank} groups, and not {self.program.replicas_per_rank}"
            require(self.program.replicas_per_rank == self.replicas_per_rank, trains)
            require(list(self.program.step_metrics) == entries, "the program has other statistics")
        stage_sets = self.partitioned.stage_sets()
        states = {each.name: tuple(zip(each.state_names, each.states, strict=True)) for each in self.update.parameters}
        companions = {each.name: tuple(zip(each.state_names, each.states, strict=True)) for each in self.update.outer}
        records = {record.name: record for record in self.program.parameters}
        for name, (declared, _) in self.whole.parameters.items():
            record = records.get(self._name(name))
            if record is None or name not in stage_sets:
                continue
            with self.check.at(declared.span, f"the record of `{record.name}`"):
                own = as_computed(record)
                require(as_stored(own, self.own_sizes) == record, f"`{record.name}` is stored with another padding")
                if declared.part is not None:
                    own = self._of_part(own, declared, declared.part, stage_sets[name])
                older = older_names(self.delay, self.paired) if name in states else ()
                self._besides(own, companions.get(name, ()), older)
                self._parameter(own, declared, stage_sets[name], states.get(name, ()))
        for stage, graph in zip(self.program.stages, self.partitioned.stages, strict=True):
            with self.check.at(where=f"the record of stage {stage.index}"):
                self._stage(stage, graph)
        for rank in self.program.ranks:
            with self.check.at(where=f"the copies of rank {rank.rank}"):
                written = self._written() & set(rank.parameters) if self.late else set[str]()
                copied = set(rank.copied)
                require(not written - copied, f"no copies are kept of {', '.join(sorted(written - copied))}")
                require(
                    not copied - written, f"nothing writes to {', '.join(sorted(copied - written))}, which is copied"
                )

    def _written(self) -> set[str]:
        """The parameters and buffers of which an update overwrites the master or a state."""
        update = self.update
        owners = {value: each.name for each in update.parameters for value in (each.master, *each.states)}
        owners |= {each.master: each.name for each in update.buffers}
        nodes = [
            *(each.store for each in update.buffers),
            *(node for each in update.parameters for node in each.update),
        ]
        over = {value for node in nodes if node.op.overwrites for value in node.inputs}
        return {self._name(name) for value, name in owners.items() if value in over}

    def _name(self, name: str) -> str:
        """The name of a parameter's record: that of the whole, if it is a part of one."""
        part = self.whole.parameters[name][0].part if name in self.whole.parameters else None
        return part.name if part is not None else name

    def _of_part(
        self, record: ParameterRecord, declared: Parameter, part: Part, stages: tuple[int, ...]
    ) -> ParameterRecord:
        """The record of one of the parts that the record of a whole parameter describes: those of ranks, along their
        mesh axis.
        """
        outer = ((part.over, part.axis),)
        for layout in (record.layout, record.state_layout):
            require(layout.states[:1] == outer, f"the parts of `{record.name}` are not said to be those of ranks")
        size = declared.master.axis(part.axis).size
        parts = part.master.axis(part.axis).size // size
        same = parts == self.check.rules.mesh.sizes[part.over] and record.type == part.master
        require(
            same and part.master.resized(part.axis, size) == declared.master,
            f"`{record.name}` is another parameter than its parts are of",
        )
        ranks = {self.program.stages[stage].rank for stage in stages}
        require(ranks == {part.rank}, f"part {part.rank} of `{record.name}` is on ranks {sorted(ranks)}")
        require(set(stages) <= set(record.stages), f"`{record.name}` is not on stages {stages}")

        def cut(records: tuple[StateRecord, ...]) -> tuple[StateRecord, ...]:
            return tuple(
                evolve(each, type=each.type.resized(part.axis, size)) if each.type.has(part.axis) else each
                for each in records
            )

        return evolve(
            record,
            name=declared.name,
            type=declared.master,
            stages=stages,
            layout=of_part(record.layout, part.over, part.axis, size),
            state_layout=of_part(record.state_layout, part.over, part.axis, size),
            states=cut(record.states),
            companions=cut(record.companions),
        )

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
        message = f"the optimizer's state of `{record.name}` is stored as {record.state_layout}, not {layouts.state}"
        require(record.state_layout == layouts.state, message)
        same = record.type == declared.master and record.initial is declared.initial and record.fans == declared.fans
        require(same, f"`{record.name}` is another parameter than declared")
        require(record.host == (record.name in self.on_host), f"`{record.name}` is kept in the wrong memory")
        require(record.stages == stages, f"`{record.name}` is on stages {stages}, not {record.stages}")
        names = tuple(name for name, _ in states)
        state_names = tuple(state.name for state in record.states)
        require(state_names == names, f"`{record.name}` has the optimizer's {', '.join(names) or 'nothing'}")
        for state, (name, value) in zip(record.states, states, strict=True):
            same = record.stored(state) == value.layout and state.type == self.check.rules.tensor(value)
            require(same, f"`{name}` of `{record.name}` is stored as {record.stored(state)}, not {value.layout}", value)
            require(state.host == value.host, f"`{name}` of `{record.name}` is kept in the wrong memory", value)
            require(state.copy == (name == EMA), f"`{name}` of `{record.name}` begins as something else", value)

    def _besides(
        self, record: ParameterRecord, companions: tuple[tuple[str, Value], ...], older: Sequence[str]
    ) -> None:
        """What is kept besides the optimizer's states: for the average of groups, gradients of earlier steps, and what
        is estimated of them.
        """
        names = [each.name for each in record.companions]
        right = names == [*(name for name, _ in companions), *older]
        require(right, f"`{record.name}` has {', '.join(names) or 'nothing'} besides its states")
        for each in record.companions[len(companions) :]:
            same = each.type == record.type and not each.copy
            require(same, f"`{each.name}` of `{record.name}` is not like it")
            host = record.host and each.name == ESTIMATE
            require(each.host == host, f"`{each.name}` of `{record.name}` is kept in the wrong memory")
        for each, (name, value) in zip(record.companions, companions, strict=False):
            same = record.stored(each) == value.layout and each.type == self.check.rules.tensor(value)
            require(same, f"`{name}` of `{record.name}` is stored as {record.stored(each)}, not {value.layout}", value)
            require(each.host == value.host, f"`{name}` of `{record.name}` is kept in the wrong memory", value)
            require(each.copy == (name == ANCHOR), f"`{name}` of `{record.name}` begins as something else", value)

    def _stage(self, stage: StageProgram, graph: StageGraph) -> None:
        names = tuple(self._name(each.name) for each in graph.parameters)
        require(stage.parameters == names, "the stage has other parameters")
        expected = {(each.name, each.batch, each.value.layout) for each in graph.inputs}
        inputs = [_part(each) for each in (*stage.inputs, *stage.full_inputs)]
        require(
            set(inputs) == expected and len(inputs) == len(graph.inputs), "the stage reads other parts of the inputs"
        )
        accumulators = tuple(
            AccumulatorRecord(
                self._name(each.name),
                each.value.type,
                each.parameter and self._name(each.parameter),
                each.maximum,
                each.value.layout,
                each.term,
            )
            for each in graph.accumulators
        )
        require(stage.accumulators == accumulators, "the stage has other accumulators")


def _part(each: InputPart) -> tuple[object, ...]:
    return each.name, each.batch, each.layout
