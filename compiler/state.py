"""The states of a compilation, in their order: what went in, and what passes have made of it so far.

Each state has all of the one before and what its own passes add. What asks for a state takes any later one too.
"""

from __future__ import annotations

from typing import Any, TypeVar

from attrs import fields, frozen

from partita.compiler.costs.devices import Device
from partita.compiler.graph import Graph
from partita.compiler.lowering.placement import Pipeline
from partita.compiler.mesh import Mesh
from partita.compiler.partition.cut import PartitionedGraph
from partita.compiler.partition.update import UpdateGraph
from partita.compiler.program import Program, StepPlan
from partita.compiler.schedules.conditions import Placement
from partita.compiler.schedules.generator import size_of
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.sharding.shard import ShardedGraph
from partita.dsl import spec as language
from partita.dsl.brief import count, outline
from partita.dsl.diagnostic import Diagnostic


@frozen(eq=False, kw_only=True)
class Settled:
    """What is to be compiled.

    `placement` is that of the training program's stages, for the program of evaluation (`training` is false), which
    goes over `rounds` batches as if they were one. With `compiled`, torch compiles what the program's functions
    compute. `again` are the calls and turns that `recompute auto` has chosen. `times` are seconds by pass.
    """

    spec: language.Spec
    model: language.Model
    train: language.Train
    schedule_call: language.Schedule
    pipeline: Pipeline
    mesh: Mesh
    device: Device
    training: bool = True
    placement: Placement | None = None
    rounds: int = 1
    compiled: bool = False
    again: frozenset[str] = frozenset()
    warnings: tuple[Diagnostic, ...] = ()
    times: tuple[tuple[str, float], ...] = ()

    @property
    def batch(self) -> str:
        """The axis that microbatches cut."""
        return str(self.schedule_call.call.arguments.get("over", "batch"))

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a batch."""
        return size_of(self.schedule_call.call)[1]


@frozen(eq=False, kw_only=True)
class Built(Settled):
    """The model as a graph."""

    forward: Graph


@frozen(eq=False, kw_only=True)
class Placed(Built):
    """Its nodes on the stages of the pipeline."""

    placed: Graph


@frozen(eq=False, kw_only=True)
class Differentiated(Placed):
    """With its gradients, over a whole batch; `flops` are those of a step's products on all ranks, none twice."""

    joint: Graph
    flops: float


@frozen(eq=False, kw_only=True)
class Microbatched(Differentiated):
    """The graph of one microbatch, and of the end of a step."""

    step: Graph


@frozen(eq=False, kw_only=True)
class Sharded(Microbatched):
    """Every value laid out over the mesh."""

    sharded: ShardedGraph


@frozen(eq=False, kw_only=True)
class Cut(Sharded):
    """A graph for each stage, with sends and receives."""

    partitioned: PartitionedGraph


@frozen(eq=False, kw_only=True)
class Partitioned(Cut):
    """With what ends a step: reductions, clipping, updates."""

    update: UpdateGraph


@frozen(eq=False, kw_only=True)
class Scheduled(Partitioned):
    """The order of every rank's actions, and what follows from it for stages and ranks."""

    schedule: Schedule
    plan: StepPlan


@frozen(eq=False, kw_only=True)
class Compilation(Scheduled):
    """The end: a program."""

    program: Program

    def __repr__(self) -> str:
        return outline(
            "Compilation of",
            self.spec.source.name,
            (
                count(self.mesh.ranks, "rank"),
                count(len(self.sharded.graph.nodes), "operation"),
                self.schedule_call.call.name,
                None if self.training else "evaluation",
            ),
        )


State = TypeVar("State", bound=Settled)


def extended(kind: type[State], state: Settled, **more: Any) -> State:
    """A state of some kind: what a state knows, and more."""
    known = {each.name: getattr(state, each.name) for each in fields(kind) if hasattr(state, each.name)}
    return kind(**{**known, **more})
