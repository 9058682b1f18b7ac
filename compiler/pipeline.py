"""The compiler: a tuple of passes, each a function from one frozen state to the next.

`PASSES` is the order; what each adds to the state is its subject's own module. Every form on the way prints as text
(`partita compile --emit`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from attrs import evolve, field, frozen

from partita.compiler.costs.devices import Device, device_of
from partita.compiler.costs.nodes import product_flops, seconds
from partita.compiler.fitting import program_of, schedule_of
from partita.compiler.graph import Graph, Node
from partita.compiler.lowering.build import build
from partita.compiler.lowering.fuse import fuse
from partita.compiler.lowering.gradients import differentiate
from partita.compiler.lowering.ids import guarded
from partita.compiler.lowering.microbatches import split_batch
from partita.compiler.lowering.placement import Pipeline, pipeline_of, place
from partita.compiler.lowering.recompute import recompute
from partita.compiler.lowering.rematerialize import rematerialize
from partita.compiler.lowering.rows import of_more_rows
from partita.compiler.mesh import ONE_RANK, Mesh, mesh_of
from partita.compiler.ops.position import Dropout, Random
from partita.compiler.partition.cut import Partitioned, cut, portable_values
from partita.compiler.partition.overlap import overlapped
from partita.compiler.partition.update import UpdateGraph, update_graph
from partita.compiler.program import Program
from partita.compiler.recomputing import fitted
from partita.compiler.schedules.conditions import Placement
from partita.compiler.schedules.registry import size_of
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.sharding.homes import homes_of
from partita.compiler.sharding.moves import Moves
from partita.compiler.sharding.shard import Sharded, gathered_bytes, shard
from partita.dsl import spec as language
from partita.dsl.brief import count, outline
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.fits import schedule_span

# What is wrong with a model whose batch is to be cut, or to have more rows.
OF_THE_BATCH = {"E0406", "E0407"}

# About as many as a transformer of ten thousand layers has; a larger file is a slip.
MOST_NODES = 100_000

NO_PIPELINE = Pipeline(None, 1, 1)
DEFAULT_SCHEDULE = language.Schedule("one_f_one_b", language.Call("one_f_one_b", {"microbatches": 1, "over": "batch"}))


@frozen(eq=False)
class Compilation:
    """The state of a compilation: what went in, and what each pass made. Later fields are None before their pass.

    `placement` is that of the training program's stages, for the program of evaluation, which goes over `rounds`
    batches as if they were one. With `compiled`, torch compiles what the program's functions compute. `again` are the
    calls and turns that `recompute auto` has chosen.
    """

    spec: language.Spec
    training: bool = True
    placement: Placement | None = None
    rounds: int = 1
    compiled: bool = False
    again: frozenset[str] = frozenset()
    model: language.Model | None = None
    train: language.Train | None = None
    schedule_call: language.Schedule = DEFAULT_SCHEDULE
    pipeline: Pipeline = NO_PIPELINE
    mesh: Mesh = ONE_RANK
    device: Device = field(factory=lambda: device_of(None))
    forward: Graph | None = None
    placed: Graph | None = None
    joint: Graph | None = None
    step: Graph | None = None
    sharded: Sharded | None = None
    partitioned: Partitioned | None = None
    update: UpdateGraph | None = None
    schedule: Schedule | None = None
    program: Program | None = None
    flops: float = 0.0  # of a step's products on the whole mesh, none of them twice
    warnings: tuple[Diagnostic, ...] = ()
    times: tuple[tuple[str, float], ...] = ()

    def __repr__(self) -> str:
        graph = self.sharded.graph if self.sharded else self.step or self.forward
        return outline(
            "Compilation of",
            self.spec.source.name,
            (
                count(self.mesh.ranks, "rank"),
                count(len(graph.nodes), "operation") if graph else None,
                self.schedule_call.call.name,
                None if self.training else "evaluation",
            ),
        )

    @property
    def batch(self) -> str:
        """The axis that microbatches cut."""
        return str(self.schedule_call.call.arguments.get("over", "batch"))

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a batch."""
        return size_of(self.schedule_call.call)[1]


Pass = Callable[[Compilation], Compilation]


def _settle(state: Compilation) -> Compilation:
    """Find what is to be compiled, and refuse what has no meaning yet."""
    given = state.spec
    model, train = trained(given)
    schedule = given.schedule or DEFAULT_SCHEDULE
    if model.nodes > MOST_NODES:
        raise refuse(
            "E0008",
            f"model `{model.name}` expands to {model.nodes:,} steps; at most {MOST_NODES:,} are compiled",
            model.span,
            help="lower the count of a `repeat`",
        )
    chunks, _ = size_of(schedule.call)
    pipeline = pipeline_of(given.layout, given.mesh, chunks)
    return evolve(
        state,
        model=model,
        train=train,
        schedule_call=schedule,
        pipeline=evolve(pipeline, chunks=chunks),
        mesh=mesh_of(given.mesh, pipeline.axis),
        device=device_of(given.mesh),
    )


def trained(given: language.Spec) -> tuple[language.Model, language.Train]:
    """What is trained, and how. Refused: E0410 where the file does not say both."""
    if given.model is None or given.train is None:
        missing = "train block" if given.train is None else "model"
        raise refuse("E0410", f"`{given.source.name}` has no {missing} to compile")
    return given.model, given.train


def _build(state: Compilation) -> Compilation:
    assert state.model is not None
    assert state.train is not None
    model = of_more_rows(state.model, state.batch, state.rounds) if state.rounds > 1 else state.model
    return evolve(state, forward=guarded(build(model, state.train.precision, state.training)))


def _place(state: Compilation) -> Compilation:
    assert state.forward is not None
    assert state.model is not None
    assert state.train is not None
    graph = state.forward
    # An evaluation must be cut into the stages of training, though it has more rows, and no dropout.
    one = build(state.model, state.train.precision, state.training) if state.rounds > 1 else graph
    of_one_batch = {node.outputs[0].name: node for node in one.nodes}

    def cost(node: Node) -> float:
        node = of_one_batch.get(node.outputs[0].name, node)
        return 0.0 if isinstance(node.op, (Dropout, Random)) else seconds(node, state.device)

    return evolve(state, placed=place(state.forward, state.pipeline, state.spec.layout, cost))


def _differentiate(state: Compilation) -> Compilation:
    assert state.placed is not None
    joint = fuse(differentiate(state.placed)) if state.training else state.placed
    return evolve(state, joint=joint, flops=product_flops(joint))


def _recompute(state: Compilation) -> Compilation:
    assert state.joint is not None
    layout = state.spec.layout
    rules = _recompute_rules(state.spec)
    if not state.training:
        return state
    gathered = any(
        target.is_class and target.name == "param"
        for rule in (layout.rules if layout else ())
        if isinstance(rule, language.ShardRule)
        for target in rule.targets
    )
    return evolve(state, joint=rematerialize(recompute(state.joint, rules, state.again), gathered))


def _recompute_rules(given: language.Spec) -> list[language.RecomputeRule]:
    rules = given.layout.rules if given.layout else ()
    return [rule for rule in rules if isinstance(rule, language.RecomputeRule)]


def _split(state: Compilation) -> Compilation:
    assert state.joint is not None
    return evolve(
        state, step=split_batch(state.joint, state.batch, state.microbatches * state.rounds, schedule_span(state.spec))
    )


def _shard(state: Compilation) -> Compilation:
    assert state.step is not None
    homes = homes_of(state.spec.layout, state.mesh)
    # Parameters that are stored split are gathered once a step where a quarter of the memory holds them all.
    gathered = max(gathered_bytes(state.step, homes), default=0) * state.pipeline.chunks
    hoist = gathered <= state.device.memory / 4
    sharded = shard(state.step, homes, Moves(state.mesh), portable_values(state.step), hoist)
    return evolve(state, sharded=sharded, warnings=(*state.warnings, *homes.warnings()))


def _cut(state: Compilation) -> Compilation:
    assert state.sharded is not None
    return evolve(state, partitioned=overlapped(cut(state.sharded.graph, state.pipeline.stages)))


def _update(state: Compilation) -> Compilation:
    assert state.partitioned is not None
    assert state.sharded is not None
    assert state.train is not None
    call = state.train.optimizer if state.training else None
    update = update_graph(state.partitioned, state.sharded.parameters, Moves(state.mesh), call, state.train.clip)
    return evolve(state, update=update)


def _schedule(state: Compilation) -> Compilation:
    return evolve(state, schedule=schedule_of(state, state.placement))


def _assemble(state: Compilation) -> Compilation:
    assert state.schedule is not None
    return evolve(state, program=program_of(state, state.schedule))


PASSES: tuple[tuple[str, Pass], ...] = (
    ("settle", _settle),
    ("build", _build),
    ("place", _place),
    ("differentiate", _differentiate),
    ("recompute", _recompute),
    ("microbatches", _split),
    ("shard", _shard),
    ("cut", _cut),
    ("update", _update),
    ("schedule", _schedule),
    ("assemble", _assemble),
)


def compile_run(given: language.Spec, gpu: bool = False) -> tuple[Compilation, Compilation | None]:
    """What a run needs: the training program, and that of evaluation where the file evaluates. `gpu` is where it runs,
    for what the file leaves open.
    """
    training = compile_spec(given, gpu=gpu)
    evaluates = given.train is not None and given.train.eval is not None
    assert training.schedule is not None
    placement = training.schedule.placement
    return training, compile_spec(given, training=False, placement=placement, gpu=gpu) if evaluates else None


def compile_spec(
    given: language.Spec, training: bool = True, placement: Placement | None = None, gpu: bool = False
) -> Compilation:
    """Run all passes. With `training` false, the forward-only program of evaluation, cut into the same stages; they run
    where `placement` says, or in a loop over the ranks.

    Raises Refused with what is wrong with the file.
    """
    wished = given.train.compile if given.train is not None else None
    state = Compilation(given, training, placement, compiled=gpu if wished is None else wished)
    if not training:
        return _evaluation(state)
    auto = any(("auto",) in rule.paths for rule in _recompute_rules(given))
    with _collector_paused():
        if not auto:
            return _passed(state, PASSES)
        names = [name for name, _ in PASSES]
        first = names.index("recompute")
        return fitted(_passed(state, PASSES[:first]), lambda state: _passed(state, PASSES[first:]))


def _evaluation(state: Compilation) -> Compilation:
    """The program of evaluation: over its whole set at once, or over a batch where a figure needs a whole batch, as a
    softmax over it does."""
    train = state.spec.train
    rounds = int(train.eval.arguments["batches"]) if train is not None and train.eval is not None else 1
    with _collector_paused():
        if rounds > 1:
            try:
                return _passed(evolve(state, rounds=rounds), PASSES)
            except Refused as refused:
                if not {each.code for each in refused.diagnostics} <= OF_THE_BATCH:
                    raise
        return _passed(state, PASSES)


def _passed(state: Compilation, passes: Sequence[tuple[str, Pass]]) -> Compilation:
    """What passes make of a state, with the seconds that each takes."""
    for name, run in passes:
        start = perf_counter()
        state = run(state)
        state = evolve(state, times=(*state.times, (name, perf_counter() - start)))
    return state


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Compiling makes millions of lasting records and hardly a cycle: looking for cycles would double its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
