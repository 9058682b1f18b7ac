"""The textual forms of the last passes' results, based on that of graphs (`partita.compiler.text.graph`).

A partitioned graph: a part for each stage, in which sends and receives are nodes, and then the messages.

    stage 0
    input %tiny.tokens: i64[batch=8]
    %tiny.x: f32[batch=8] = gather(%tiny.tokens, %tiny.wte; over='vocab') F0
    send(%tiny.x; value='tiny.x', destination=1, direction='forward') F0
    stage 1
    %tiny.x: f32[batch=8] = receive(value='tiny.x', source=0, direction='forward', type=<f32[batch=8]>) F1
    message 0 -> 1 forward 32 B tiny.x

A line `offload %tiny.x, %tiny.h` says which values of the stage may lie in the host's memory between F and the backward
pass.

A line `first 4` says of a stage that it comes before stage 0, as those that look a shared vocabulary up do.

The end of a step: for each stage, the nodes that reduce its accumulators, the resulting totals, and the nodes that
compute its share of the squared norm; for each parameter, the nodes that sum its gradient, and those that update it;
and the nodes that compute the new values of all buffers. A gradient may be coming to the host's memory: reductions
start to copy it there. A line `given` declares a value from elsewhere: an
accumulator, a master, an optimizer state.

    reduce 0
    given %total(d(tiny.w))@0: f32[embed=64] {+/data}
    %total(d(tiny.w))@0^2: f32[embed=64] = all_reduce(%total(d(tiny.w))@0; over='data', parts=2) R0 @stage 0
    totals 0 %total(d(tiny.w))@0^2
    parameter tiny.w stages 0 compute {} param {} grad {} state {} decays
    …
    buffers
    read tiny.bias %master(tiny.bias): f32[experts=8]
    %tiny.add.after: f32[experts=8] = add(%master(tiny.bias), %total(statistic tiny.counts)) U @tiny
    buffer tiny.bias stages 0 stores %tiny.add.after over %master(tiny.bias)
    of 0 %total(statistic tiny.counts) = statistic tiny.counts

Where groups train apart, the average of each parameter follows: the copies of the rank's groups, what is kept besides
them, and the nodes.

    outer tiny.w stages 0
    copy %master(tiny.w)@0: f32[embed=64]
    kept anchor %anchor(tiny.w): f32[embed=64]
    %total(tiny.w): f32[embed=64] {+/data_groups} = sum_of_groups(%master(tiny.w)@0) O @tiny.w
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from attrs import evolve, field, frozen

from partita.compiler.graph import Accumulator, Graph, Input, Master, Node, Parameter, Value
from partita.compiler.instructions import Direction, Message
from partita.compiler.ops.communication import Receive
from partita.compiler.ops.op import Op
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.passes.shard.shard import ParameterLayouts
from partita.compiler.passes.stacked import Stacked
from partita.compiler.passes.update import BufferUpdate, OuterUpdate, ParameterUpdate, UpdateGraph
from partita.compiler.text.graph import GraphReader, GraphWriter, matched, parse_layout, read_lines
from partita.compiler.text.sharded import LAYOUTS, layouts_text

# ---------------------------------------------------------------- stages


def stage_text(stage: StageGraph, root: str, places: bool = True) -> str:
    """A stage of the graph `root` as text."""
    writer = GraphWriter(root, places)
    lines = [
        f"stage {stage.index}",
        *map(writer.input, stage.inputs),
        *map(writer.parameter, stage.parameters),
        *map(writer.accumulator, stage.accumulators),
        *map(writer.node, stage.nodes),
        *([f"offload {writer.names(stage.offloaded)}"] if stage.offloaded else ()),
    ]
    return "\n".join(lines) + "\n"


def stages_text(partitioned: PartitionedGraph, places: bool = True) -> str:
    """All stages and messages as text, without the graph that they were cut from."""
    stages = (stage_text(stage, partitioned.graph.name, places) for stage in partitioned.stages)
    messages = (
        f"message {each.source} -> {each.destination} {each.direction} {each.bytes} B {each.value}\n"
        for each in partitioned.messages
    )
    first = (f"first {stage}\n" for stage in sorted(partitioned.first))
    return "".join((*stages, *messages, *first))


def parse_stages(text: str, graph: Graph) -> PartitionedGraph:
    """Parses stages and messages; `graph` is what they were cut from. Raises ValueError with the offending line."""
    reader = _StagesReader(graph)
    words: dict[str, Callable[[str], object]] = {
        "stage": reader.stage,
        "message": reader.message,
        "first": lambda text: reader.first.add(int(text)),
        "input": lambda text: reader.last.inputs.append(reader.last.reader.input(text)),
        "parameter": lambda text: reader.last.parameters.append(reader.last.reader.parameter(text)),
        "accumulator": lambda text: reader.last.accumulators.append(reader.last.reader.accumulator(text)),
        "offload": lambda text: reader.last.offloaded.extend(reader.last.reader.named(text)),
    }
    read_lines(text, words, lambda line: reader.last.nodes.append(reader.last.reader.node(line)))
    stages = tuple(stage.graph() for stage in reader.stages)
    return PartitionedGraph(graph, stages, tuple(reader.messages), frozenset(reader.first))


class _StageReader(GraphReader):
    """Maps a stage's values to the graph's of the same name, except received ones, which are separate tensors."""

    def __init__(self, root: str, known: Mapping[str, Value]) -> None:
        super().__init__(root)
        self.known = known

    def made(self, op: Op, name: str, value: Value) -> Value:
        return super().defined(name, value) if isinstance(op, Receive) else self.defined(name, value)

    def defined(self, name: str, value: Value) -> Value:
        known = self.known.get(value.name)
        same = known is not None and (known.type, known.layout, known.host) == (value.type, value.layout, value.host)
        return super().defined(name, known if known is not None and same else value)


@frozen
class _Stage:
    index: int
    reader: _StageReader
    inputs: list[Input] = field(factory=list)
    parameters: list[Parameter] = field(factory=list)
    accumulators: list[Accumulator] = field(factory=list)
    nodes: list[Node] = field(factory=list)
    offloaded: list[Value] = field(factory=list)

    def graph(self) -> StageGraph:
        """The stage that was read."""
        return StageGraph(
            self.index,
            tuple(self.inputs),
            tuple(self.parameters),
            tuple(self.nodes),
            tuple(self.accumulators),
            tuple(self.offloaded),
        )


class _StagesReader:
    def __init__(self, graph: Graph) -> None:
        self.root = graph.name
        whole = (graph.inputs, graph.parameters, graph.accumulators)
        self.known = {each.value.name: each.value for kind in whole for each in kind}
        self.known |= {value.name: value for node in graph.nodes for value in node.outputs}
        self.stages: list[_Stage] = []
        self.messages: list[Message] = []
        self.first: set[int] = set()

    @property
    def last(self) -> _Stage:
        """The stage being read."""
        return self.stages[-1]

    def stage(self, text: str) -> None:
        """Reads the heading of a stage."""
        self.stages.append(_Stage(int(text), _StageReader(self.root, self.known)))

    def message(self, text: str) -> None:
        """Reads a message."""
        match = matched(r"(\d+) -> (\d+) (\w+) (\d+) B (.+)", text)
        self.messages.append(Message(match[5], int(match[1]), int(match[2]), cast(Direction, match[3]), int(match[4])))


# ---------------------------------------------------------------- the end of a step


def update_text(update: UpdateGraph, places: bool = True) -> str:
    """The end of a step as text."""
    return "\n".join(_UpdateWriter(places).update(update)) + "\n"


class _UpdateWriter(GraphWriter):
    def __init__(self, places: bool) -> None:
        super().__init__("", places)
        self.lines: list[str] = []

    def update(self, update: UpdateGraph) -> list[str]:
        """The parts in execution order; sums first, since many parts read them."""
        for sum, stage in update.sums:
            self.lines.append(f"sum {stage} {self.accumulator(sum).removeprefix('accumulator ')}")
        for stage, nodes in update.reduce:
            self.part(f"reduce {stage}", nodes)
        for stage, totals in enumerate(update.totals):
            self.given(totals)
            self.lines.append(f"totals {stage} {self.names(totals)}".rstrip())
        for each in update.parameters:
            self.parameter_update(each)
        for stage, nodes in update.finish:
            self.part(f"squares {stage}", nodes)
        if update.metrics:
            self.part("metrics", update.metrics)
        for name, value, stage in update.step_metrics:
            self.given([value])
            self.lines.append(f"statistic {stage} {name} {self.name(value)}")
        self.lines += [f"norm {self.value(value)}" for value in update.norms]
        if update.clip:
            self.part("clip", update.clip)
        for each in update.parameters:
            if each.prepare:
                self.part(f"prepare {each.name}", each.prepare)
        for stacked in update.stacked:
            self.part(f"stacked {', '.join(map(str, stacked.stages))} of {' '.join(stacked.parameters)}", stacked.nodes)
        for each in update.parameters:
            self.part(f"update {each.name}", each.update)
        if update.buffers:
            self.lines += [self.read_text(each) for each in update.masters]
            self.part("buffers", update.buffer_nodes)
            for buffer in update.buffers:
                self.buffer_update(buffer)
        for outer in update.outer:
            self.lines.append(f"outer {outer.name} stages {', '.join(map(str, outer.stages))}")
            self.lines += [f"copy {self.value(value)}" for value in outer.masters]
            states = zip(outer.state_names, outer.states, strict=True)
            self.lines += [f"kept {name} {self.value(value)}" for name, value in states]
            self.lines += map(self.node, outer.nodes)
        return self.lines

    def read_text(self, each: Master) -> str:
        """A master that updates read."""
        return f"read {each.parameter} {self.value(each.value)}{' after' * each.after}"

    def buffer_update(self, each: BufferUpdate) -> None:
        """Writes a buffer's stages, what is stored over it, and the statistics that this is made of."""
        self.given((*(value for *_, value in each.totals), each.master, each.new))
        stages = ", ".join(map(str, each.stages))
        stored = f"{self.name(each.new)} over {self.name(each.master)}"
        self.lines.append(f"buffer {each.name} stages {stages} stores {stored}{' after' * each.after}")
        self.lines += [f"of {stage} {self.name(value)} = {name}" for stage, name, value in each.totals]

    def parameter_update(self, each: ParameterUpdate) -> None:
        """Writes a parameter's stages and layouts, the nodes that sum its gradient, and its master and states."""
        stages = ", ".join(map(str, each.stages))
        decays = " decays" if each.decays else ""
        self.part(f"parameter {each.name} stages {stages}{layouts_text(each.layouts)}{decays}", each.finish)
        touched = () if each.touched is None else (each.touched,)
        in_flight = () if each.in_flight is None else (each.in_flight,)
        self.given((*(value for *_, value in each.totals), each.gradient, *touched, *in_flight))
        totals = ", ".join(
            f"{stage} {self.name(value)}{f' = {name}' if name != each.name else ''}"
            for stage, name, value in each.totals
        )
        rows = f" at {self.name(each.touched)}" if each.touched is not None else ""
        way = f" coming as {self.name(each.in_flight)}" if each.in_flight is not None else ""
        self.lines.append(f"gradient {self.name(each.gradient)}{rows}{way} of {totals}")
        self.lines.append(f"master {self.value(each.master)}")
        self.lines += [
            f"state {name} {self.value(value)}" for name, value in zip(each.state_names, each.states, strict=True)
        ]

    def part(self, heading: str, nodes: Sequence[Node]) -> None:
        """Writes a heading and nodes."""
        self.lines.append(heading)
        for node in nodes:
            self.given(node.inputs)
            self.lines.append(self.node(node))

    def given(self, values: Iterable[Value]) -> None:
        """Declares the values that were not written before."""
        self.lines += [f"given {self.value(value)}" for value in dict.fromkeys(values) if not self.knows(value)]


PARTS = ("reduce", "squares", "metrics", "clip", "prepare", "stacked", "update", "buffers")


def parse_update(text: str) -> UpdateGraph:
    """Parses the end of a step. Raises ValueError with the offending line."""
    reader = _UpdateReader()
    words: dict[str, Callable[[str], object]] = {
        "sum": reader.sum,
        "given": reader.value,
        "totals": reader.of_stage,
        "parameter": reader.parameter_update,
        "gradient": reader.total_gradient,
        "master": reader.own_master,
        "state": reader.state,
        "statistic": reader.statistic,
        "norm": lambda text: reader.norms.append(reader.value(text)),
        "read": reader.read,
        "buffer": reader.buffer,
        "of": reader.buffer_total,
        "outer": reader.outer_update,
        "copy": lambda text: reader.outer[-1]["masters"].append(reader.value(text)),
        "kept": reader.kept,
        **{word: partial(reader.part, word) for word in PARTS},
    }
    read_lines(text, words, lambda line: reader.nodes.append(reader.node(line)))
    return reader.update()


class _UpdateReader(GraphReader):
    def __init__(self) -> None:
        super().__init__("")
        self.parts: dict[tuple[str, str], list[Node]] = {}  # by kind and by stage or parameter
        self.nodes: list[Node] = []  # of the part being read
        self.sums: list[tuple[Accumulator, int]] = []
        self.totals: list[tuple[Value, ...]] = []
        self.parameters: list[dict[str, Any]] = []
        self.step_metrics: list[tuple[str, Value, int]] = []
        self.norms: list[Value] = []
        self.masters: list[Master] = []
        self.buffers: list[BufferUpdate] = []
        self.outer: list[dict[str, Any]] = []

    def update(self) -> UpdateGraph:
        """The graph that was read."""
        parameters = (
            ParameterUpdate(
                finish=self.of("parameter", each["name"]),
                prepare=self.of("prepare", each["name"]),
                update=self.of("update", each["name"]),
                **each,
            )
            for each in self.parameters
        )
        return UpdateGraph(
            tuple(parameters),
            self.by_stage("reduce"),
            tuple(self.totals),
            tuple(self.step_metrics),
            tuple(self.sums),
            self.of("metrics", ""),
            self.by_stage("squares"),
            tuple(self.norms),
            self.of("clip", ""),
            tuple(self.buffers),
            tuple(self.masters),
            self.of("buffers", ""),
            tuple(self.stacked()),
            tuple(
                OuterUpdate(
                    each["name"],
                    each["stages"],
                    tuple(each["masters"]),
                    tuple(each["states"].values()),
                    tuple(each["states"]),
                    self.of("outer", each["name"]),
                )
                for each in self.outer
            ),
        )

    def part(self, kind: str, of: str) -> None:
        """Starts a part; the nodes that follow belong to it."""
        self.nodes = self.parts[kind, of] = []

    def of(self, kind: str, of: str) -> tuple[Node, ...]:
        """The nodes of a part."""
        return tuple(self.parts.get((kind, of), ()))

    def by_stage(self, kind: str) -> tuple[tuple[int, tuple[Node, ...]], ...]:
        """The parts of a kind, by stage."""
        return tuple((int(of), tuple(nodes)) for (each, of), nodes in self.parts.items() if each == kind)

    def stacked(self) -> Iterator[Stacked]:
        """What several parameters' updates share."""
        for (kind, of), nodes in self.parts.items():
            if kind == "stacked":
                stages, _, parameters = of.partition(" of ")
                yield Stacked(tuple(parameters.split()), tuple(map(int, stages.split(", "))), tuple(nodes))

    def sum(self, text: str) -> None:
        """Reads an accumulator that is not a gradient."""
        stage, _, accumulator = text.partition(" ")
        self.sums.append((self.accumulator(accumulator), int(stage)))

    def of_stage(self, text: str) -> None:
        """Reads the totals of a stage; stages come in order."""
        stage, _, names = text.partition(" ")
        if int(stage) != len(self.totals):
            raise ValueError("stages stand in order")
        self.totals.append(self.named(names))

    def parameter_update(self, text: str) -> None:
        """Reads the heading of a parameter."""
        match = matched(rf"(\S+) stages ([\d, ]+){LAYOUTS}( decays)?", text)
        *layouts, decays = match.groups()[2:]
        self.part("parameter", match[1])
        self.parameters.append(
            {
                "name": match[1],
                "stages": tuple(map(int, match[2].split(", "))),
                "layouts": ParameterLayouts(*map(parse_layout, layouts)),
                "states": (),
                "state_names": (),
                "decays": bool(decays),
            }
        )

    def total_gradient(self, text: str) -> None:
        """Reads a parameter's gradient and the totals that it sums."""
        name, _, totals = text.partition(" of ")
        name, _, in_flight = name.partition(" coming as ")
        name, _, touched = name.partition(" at ")
        matches = (matched(r"(\d+) (%.+?)(?: = (.+))?", each) for each in totals.split(", "))
        own = self.parameters[-1]
        own |= {
            "gradient": self.values[name],
            "totals": tuple((int(each[1]), each[3] or own["name"], self.values[each[2]]) for each in matches),
            "touched": self.values[touched] if touched else None,
            "in_flight": self.values[in_flight] if in_flight else None,
        }

    def own_master(self, text: str) -> None:
        """Reads a parameter's master."""
        self.parameters[-1]["master"] = self.value(text)

    def state(self, text: str) -> None:
        """Reads a named optimizer state."""
        name, _, value = text.partition(" ")
        self.parameters[-1]["state_names"] += (name,)
        self.parameters[-1]["states"] += (self.value(value),)

    def read(self, text: str) -> None:
        """Reads a master that updates of buffers read."""
        self.masters.append(self.master(text))

    def buffer(self, text: str) -> None:
        """Reads the update of a buffer, before its statistics."""
        match = matched(r"(\S+) stages ([\d, ]+) stores (%.+?) over (%.+?)( after)?", text)
        stages = tuple(map(int, match[2].split(", ")))
        master, new = self.values[match[4]], self.values[match[3]]
        self.buffers.append(BufferUpdate(match[1], stages, (), master, new, bool(match[5])))

    def outer_update(self, text: str) -> None:
        """Reads the heading of the average of a parameter over groups."""
        name, _, stages = text.partition(" stages ")
        self.part("outer", name)
        outer = {"name": name, "stages": tuple(map(int, stages.split(", "))), "masters": [], "states": {}}
        self.outer.append(outer)

    def kept(self, text: str) -> None:
        """Reads what is kept of it besides the copies of groups."""
        name, _, value = text.partition(" ")
        self.outer[-1]["states"][name] = self.value(value)

    def buffer_total(self, text: str) -> None:
        """Reads a statistic of the last buffer."""
        match = matched(r"(\d+) (%.+) = (.+)", text)
        last = self.buffers[-1]
        self.buffers[-1] = evolve(last, totals=(*last.totals, (int(match[1]), match[3], self.values[match[2]])))

    def statistic(self, text: str) -> None:
        """Reads an entry of the statistics."""
        match = matched(r"(\d+) ([^%]+) (%.+)", text)
        self.step_metrics.append((match[2], self.values[match[3]], int(match[1])))
