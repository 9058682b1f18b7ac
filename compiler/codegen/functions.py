"""The functions of a stage: their nodes, split into runs, and the values kept between them.

A run is a sequence of consecutive nodes of one iteration of a repeat, so that equal iterations can share a function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from partita.compiler.codegen.segments import compiled_units
from partita.compiler.graph import Input, Node, Phase, Value, inputs_of, outputs_of, producers_of
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Receive, Send, Transfer
from partita.compiler.ops.host import ASYNC_COPIES
from partita.compiler.ops.optimizer import target_of
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.passes.early_collectives import EarlyCollectives, split_early_collectives
from partita.compiler.passes.place import iteration_of

Run = tuple[str | None, list[Node], set[Value]]  # its iteration, nodes and live-out values


class StageFunctions:
    """The nodes of a stage by function. `kinds` are those of the schedule's actions; `compiled`: uses torch.compile."""

    def __init__(
        self, partitioned: PartitionedGraph, stage: StageGraph, kinds: Collection[str], compiled: bool
    ) -> None:
        self.stage = stage
        self.compiled = compiled
        self.repeats = {s.path: s.name for s in partitioned.graph.scopes if s.repeat}
        prologue = [node for node in stage.nodes if node.phase is Phase.PROLOGUE]
        self.read = {v for node in stage.nodes if node.phase is not Phase.PROLOGUE for v in node.inputs}
        # What is gathered from the stage's masters.
        masters = {parameter.value for parameter in stage.parameters}
        self.gathered = split_early_collectives(prologue, masters, self.read)
        self.prologue = list(self.gathered.others)
        self.groups = {
            kind: [node for node in stage.nodes if node.phase in phases]
            for kind, phases in (
                ("F", (Phase.FORWARD,)),
                ("B", (Phase.BACKWARD,)),
                ("W", (Phase.WEIGHT,)),
                ("BW", (Phase.BACKWARD, Phase.WEIGHT)),
            )
        }
        self.kinds = [kind for kind, nodes in self.groups.items() if nodes and kind in kinds]
        self.literal = {v for node in stage.nodes if is_literal(node) for v in node.outputs}

    @property
    def full_inputs(self) -> list[Input]:
        """Inputs of the prologue, over the whole batch."""
        return [each for each in self.stage.inputs if each.batch is None]

    @property
    def saved(self) -> set[Value]:
        """What a microbatch keeps from F for the backward pass."""
        return (outputs_of(self.groups["F"]) & inputs_of(self.groups["BW"])) - self.literal

    @property
    def kept(self) -> set[Value]:
        """What a microbatch keeps from B to W."""
        return (
            (outputs_of(self.groups["F"]) | outputs_of(self.groups["B"])) & inputs_of(self.groups["W"])
        ) - self.literal

    def reduced(self, kind: str, nodes: Sequence[Node], totals: Collection[Value]) -> EarlyCollectives:
        """The nodes that reduce the stage's gradients, by when they run; the first in its last action, of this kind."""
        collectives = split_early_collectives(
            nodes, {accumulator.value for accumulator in self.stage.accumulators}, totals
        )
        # In what torch compiles, a copy cannot stand between segments and read what a collective is still to bring.
        return collectives if self.compiled else collectives.with_copies(self._places(kind, collectives.start))

    @property
    def opening(self) -> list[Node]:
        """F of the step's first microbatch: what follows from gathers stands where it is first read, but for further
        collectives, which start at once.
        """
        makers = producers_of(self.gathered.follow)
        ordered: dict[Node, None] = {}

        def stand(node: Node) -> None:
            for value in node.inputs:
                if value in makers and makers[value] not in ordered:
                    stand(makers[value])
            ordered[node] = None

        for node in (*(node for node in self.gathered.follow if isinstance(node.op, Collective)), *self.groups["F"]):
            if node not in ordered:
                stand(node)
        for node in self.gathered.follow:
            if node not in ordered:
                stand(node)
        return list(ordered)

    def closing(self, kind: str, reduced: EarlyCollectives) -> list[Node]:
        """The stage's last action, in which the reduction of gradients starts."""
        behind = self.behind(kind, reduced.start)
        rest = (each for node in self.groups[kind] for each in (node, *behind.get(node, ())))
        return [*behind.get(None, ()), *rest]

    def behind(self, kind: str, start: Iterable[Node]) -> dict[Node | None, list[Node]]:
        """Nodes that reduce gradients, by the node of the stage's last action behind which they can run: the last that
        adds to what they read, or the last of its iteration of a repeat. None: at the action's beginning. A copy of
        what a collective makes stands behind the collective before it.
        """
        nodes = self.groups[kind]
        by_node: dict[Node | None, list[Node]] = {}
        for node, place in self._places(kind, start).items():
            by_node.setdefault(nodes[place] if place >= 0 else None, []).append(node)
        return by_node

    def _places(self, kind: str, start: Iterable[Node]) -> dict[Node, int]:
        """The positions of the nodes behind which nodes can run that reduce gradients, in the stage's last action."""
        sums = {each.name: each.value for each in self.stage.accumulators}
        places: dict[Value, int] = {}
        nodes = self.groups[kind]
        end = len(nodes)
        following: str | None = None
        for i in reversed(range(len(nodes))):
            if isinstance(nodes[i].op, Transfer):
                continue
            iteration = iteration_of(nodes[i].scope, self.repeats)
            if iteration is None or iteration != following:
                end = i
            following = iteration
            target = target_of(nodes[i].op)
            if target is not None:
                places.setdefault(sums[target], end)
        positions: dict[Node, int] = {}
        begun: set[Value] = set()
        last = -1
        for node in start:
            place = max((places.get(value, -1) for value in node.inputs), default=-1)
            if isinstance(node.op, ASYNC_COPIES) and node.inputs[0] in begun:
                place = max(place, last)
            if isinstance(node.op, Collective):
                begun.update(node.outputs)
                last = place
            places.update(dict.fromkeys(node.outputs, place))
            positions[node] = place
        return positions

    def runs(self, nodes: Iterable[Node], live_out: set[Value]) -> list[Run]:
        """Runs of nodes of one iteration of a repeat, or of none, with the live-out values of each."""
        runs: list[tuple[str | None, list[Node]]] = []
        for node in nodes:
            if isinstance(node.op, Transfer):
                continue
            iteration = iteration_of(node.scope, self.repeats)
            if runs and runs[-1][0] == iteration:
                runs[-1][1].append(node)
            else:
                runs.append((iteration, [node]))
        # Live-out values, limited to those that the run reads or makes: a stage may have thousands of runs.
        after: list[set[Value]] = []
        needed = set(live_out)
        for _, run in reversed(runs):
            own = inputs_of(run)
            after.append((own | outputs_of(run)) & needed)
            needed |= own
        after.reverse()
        return [(iteration, run, keep) for (iteration, run), keep in zip(runs, after, strict=True)]

    def units(self, nodes: Iterable[Node], keep: set[Value]) -> list[list[list[Node]]]:
        """The nodes of a function by run and unit (one node, or a compiled segment); `keep` outlives the function."""
        runs = self.runs(nodes, keep)
        if not self.compiled:
            return [[[node] for node in run] for _, run, _ in runs]
        return [compiled_units(run, left, self.literal) for _, run, left in runs]


def is_literal(node: Node) -> bool:
    """Whether a node is a constant, which is written inline."""
    return node.op.literal is not None


def sends(nodes: Iterable[Node]) -> Iterator[tuple[Node, Send]]:
    """The sends among nodes."""
    return ((node, node.op) for node in nodes if isinstance(node.op, Send))


def receives(nodes: Iterable[Node]) -> Iterator[tuple[Node, Receive]]:
    """The receives among nodes."""
    return ((node, node.op) for node in nodes if isinstance(node.op, Receive))
