"""The states of a compilation, in order: its inputs, and the results of the passes so far.

Each state extends the one before by the results of its own passes; what takes a state takes any later one too.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, TypeVar

from attrs import field, fields, frozen

from partita.compiler.costs.devices import Device
from partita.compiler.graph import Graph
from partita.compiler.mesh import Mesh
from partita.compiler.ops.optimizer import Update
from partita.compiler.passes.assign import Unfit
from partita.compiler.passes.cut import PartitionedGraph
from partita.compiler.passes.decode import NotInParts
from partita.compiler.passes.offload import parameters_on_host
from partita.compiler.passes.place import Iterations, Pipeline
from partita.compiler.passes.shard.shard import ShardedGraph
from partita.compiler.passes.sparse import Tables
from partita.compiler.passes.update import UpdateGraph
from partita.compiler.program import Program, StepPlan
from partita.compiler.schedules.conditions import Placement
from partita.compiler.schedules.generator import size_of
from partita.compiler.schedules.schedule import Schedule, SharedVocabulary
from partita.dsl import spec as language
from partita.dsl.check.groups import Groups
from partita.dsl.check.language_model import LanguageModel
from partita.dsl.check.layouts import PARAM, STATE
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.reprs import Pictured, count, outline


@frozen(eq=False, kw_only=True)
class Configured:
    """The inputs of a compilation. `groups` are those that train apart, if any do.

    `training` is false for the evaluation program: its stages are placed by `placement` and have the `iterations` of
    training's, and it processes `batches` as if they were one, the last of which may lack rows; or it computes
    `outputs` instead of the loss. `sparse` are the tables that training updates by rows, with the axis of these: it
    stores them for that. A program of outputs may run along with a training program, `beside` it: its stages are the
    same, and it reads parameters where that one stores them. With `compiled`, torch compiles the program's functions.
    `again` are the calls and iterations that `recompute auto` has chosen. `hoist` is whether parameters that are stored
    in parts are gathered once a step; if it is not given, they are if they fit. `times` are seconds by pass.
    """

    spec: language.Spec
    model: language.Model
    train: language.Train
    schedule_call: language.Schedule
    pipeline: Pipeline
    mesh: Mesh
    device: Device
    groups: Groups | None = None
    training: bool = True
    placement: Placement | None = None
    iterations: Iterations | None = None
    hoist: bool | None = None
    batches: Fraction = Fraction(1)
    sparse: Mapping[str, str] = field(factory=dict)
    outputs: tuple[str, ...] = ()
    beside: Scheduled | None = None
    compiled: bool = False
    again: frozenset[str] = frozenset()
    warnings: tuple[Diagnostic, ...] = ()
    times: tuple[tuple[str, float], ...] = ()

    @property
    def batch(self) -> str:
        """The axis that is split into microbatches."""
        return self.schedule_call.batch

    @property
    def compiles(self) -> bool:
        """Whether torch compiles the program where it runs: by default on the GPUs that its mesh declares."""
        preferred = self.train.compile
        return self.compiled or (self.device.gpu if preferred is None else preferred)

    @property
    def reads_means(self) -> bool:
        """Whether it is the program of an evaluation that reads means in place of trained parameters, those over time
        (`weights = ema`) or over replica groups; or runs along with that.
        """
        evaluation = self.train.eval
        reads = evaluation is not None and evaluation.arguments["weights"] == "ema"
        reads = reads or self.groups is not None
        return reads and not self.training and (not self.outputs or self.beside is not None)

    @property
    def offload_rules(self) -> list[language.OffloadRule]:
        """The rules that keep tensors in the host's memory."""
        return language.rules_of(self.spec.layout, language.OffloadRule)

    @property
    def offload_rule(self) -> language.OffloadRule | None:
        """The rule that keeps the optimizer's tensors in the host's memory, if there is one: all of them. That of
        parameters implies it.
        """
        return next((rule for rule in self.offload_rules if (STATE,) in rule.paths or (PARAM,) in rule.paths), None)

    @property
    def offloads_state(self) -> bool:
        """Whether what the optimizer keeps lies in the host's memory."""
        return self.offload_rule is not None

    @property
    def overlap_rules(self) -> tuple[language.OverlapRule, ...]:
        """The rules that cut collectives beside products into pieces."""
        rules = self.spec.layout.rules if self.spec.layout else ()
        return tuple(rule for rule in rules if isinstance(rule, language.OverlapRule))

    @property
    def batch_parts(self) -> int:
        """Into how many parts a batch is cut: microbatches, or what has `slices` of them."""
        return size_of(self.schedule_call.call)[1]

    @property
    def replicas_per_rank(self) -> int:
        """The number of groups that each rank trains apart, one after the other; 1 if none do."""
        return self.groups.members if self.training and self.groups is not None else 1

    @property
    def every(self) -> int:
        """In how many steps replica groups are averaged once."""
        return int(self.train.local.arguments["every"]) if self.train.local is not None else 1

    @property
    def microbatches(self) -> int:
        """The number of microbatches per batch, slices counted."""
        return self.batch_parts * self.slices

    @property
    def sequence(self) -> tuple[str, int] | None:
        """The axis along which training cuts microbatches into slices, and their number; None if it does not."""
        return self.schedule_call.sequence if self.training else None

    @property
    def slices(self) -> int:
        """The number of slices of each part."""
        return self.sequence[1] if self.sequence is not None else 1


@frozen(eq=False, kw_only=True)
class Built(Configured):
    """Adds the model as a graph, the same for training and evaluation except for what is random and frozen; of each
    parameter, the rule of the optimizer, the rules before it that are `unfit` and, if it is trained, its update.
    Programs that make no updates have them for the layout of what they read, if that is stored as states are. `parts`
    are the axes that it goes through part by part.
    """

    forward: Graph
    parts: frozenset[str] = frozenset()
    rules: Mapping[str, language.OptimizerRule] = field(factory=dict)
    unfit: Mapping[str, tuple[Unfit, ...]] = field(factory=dict)
    updates: Mapping[str, Update] = field(factory=dict)

    @property
    def updated(self) -> Mapping[str, Update]:
        """The updates that a step makes."""
        return self.updates if self.training else {}


@frozen(eq=False, kw_only=True)
class Placed(Built):
    """Adds the graph of the kind of step, with its nodes on pipeline stages, and has its `iterations`."""

    placed: Graph


@frozen(eq=False, kw_only=True)
class Differentiated(Placed):
    """Adds the gradients, over a full batch; `flops` are those of a step's matrix products, recomputation excluded.
    `spread` are the stages of an axis that all ranks of the pipeline share, and `undivided` the graph before they do.
    """

    joint: Graph
    flops: float
    spread: SharedVocabulary | None = None
    undivided: Graph | None = None

    @property
    def stages(self) -> int:
        """The number of stages, those of parts included."""
        return self.pipeline.stages if self.spread is None else self.spread.total


@frozen(eq=False, kw_only=True)
class Microbatched(Differentiated):
    """Adds the graph of one microbatch, and of the end of the step; which parameters are sparse, whose updates are of
    some of their rows from here on.
    """

    step: Graph
    tables: Tables

    @property
    def prefetched(self) -> frozenset[str]:
        """The parameters that lie in the host's memory, and are copied to the device before each use."""
        return parameters_on_host(self.step, self.offload_rules)

    @property
    def mapped(self) -> frozenset[str]:
        """Those of them that are files, mapped into memory."""
        return parameters_on_host(self.step, [rule for rule in self.offload_rules if rule.mapped])

    @property
    def on_host(self) -> frozenset[str]:
        """The parameters whose masters, as the program reads them, lie in the host's memory."""
        offloaded = self.offloads_state and (self.train.mixed or self.reads_means)
        return self.prefetched | (frozenset(self.updates) if offloaded else frozenset())

    @property
    def states_on_host(self) -> frozenset[str]:
        """The parameters of which the host's memory has what the optimizer keeps."""
        return frozenset(self.updates) & (frozenset(self.updates) if self.offloads_state else self.prefetched)


@frozen(eq=False, kw_only=True)
class Sharded(Microbatched):
    """Adds a layout for every value."""

    sharded: ShardedGraph


@frozen(eq=False, kw_only=True)
class Cut(Sharded):
    """Adds a graph for each stage, with sends and receives."""

    partitioned: PartitionedGraph


@frozen(eq=False, kw_only=True)
class Partitioned(Cut):
    """Adds the end of the step: reductions, clipping, updates."""

    update: UpdateGraph


@frozen(eq=False, kw_only=True)
class Scheduled(Partitioned):
    """Adds the order of every rank's actions, and the plan of stages and ranks that follows from it. A training program
    may know the `evaluation` of its run, and what `writes` the answers that it trains on.
    """

    schedule: Schedule
    plan: StepPlan
    evaluation: Scheduled | None = None
    writes: Scoring | None = None


@frozen(eq=False, kw_only=True)
class Compilation(Pictured, Scheduled):
    """Adds the program: the last state."""

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


@frozen(eq=False)
class Scoring:
    """What computes the logits of a language model. `anew` is why each id takes the whole window; None if it takes one
    position.
    """

    model: LanguageModel
    compiled: tuple[Compilation, ...]
    anew: NotInParts | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """For one position, and for several of a prompt at once; or one for the whole window."""
        return tuple(each.program for each in self.compiled)

    @property
    def warning(self) -> Diagnostic | None:
        """W1001: each token computes the whole window."""
        if self.anew is None:
            return None
        what = f"each token computes all of `{self.model.sequence.name}` anew: {self.anew.what}"
        return Diagnostic("W1001", what, self.anew.span)


State = TypeVar("State", bound=Configured)


def extended(kind: type[State], state: Configured, **more: Any) -> State:
    """A later state: what `state` knows, and `more`."""
    known = {each.name: getattr(state, each.name) for each in fields(kind) if hasattr(state, each.name)}
    return kind(**{**known, **more})
