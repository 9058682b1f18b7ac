"""The compiler: passes in their order, each a function from one state to the next (`state`).

Every form on the way prints as text (`partita compile --emit`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from attrs import evolve

from partita.compiler.costs.devices import device_of
from partita.compiler.costs.nodes import product_flops, seconds
from partita.compiler.emission.assemble import assemble
from partita.compiler.emission.writer import Probe
from partita.compiler.fit.remat import fitted
from partita.compiler.fit.schedule import scheduled
from partita.compiler.graph import Node
from partita.compiler.lowering.build import build
from partita.compiler.lowering.fuse import fuse
from partita.compiler.lowering.gradients import differentiate
from partita.compiler.lowering.ids import guarded
from partita.compiler.lowering.microbatches import split_batch
from partita.compiler.lowering.placement import pipeline_of, place
from partita.compiler.lowering.recompute import recompute
from partita.compiler.lowering.rematerialize import rematerialize
from partita.compiler.lowering.rows import of_more_rows
from partita.compiler.mesh import mesh_of
from partita.compiler.partition.cut import cut, portable_values
from partita.compiler.partition.overlap import overlapped
from partita.compiler.partition.update import update_graph
from partita.compiler.schedules.conditions import Placement
from partita.compiler.schedules.generator import size_of
from partita.compiler.sharding.homes import homes_of
from partita.compiler.sharding.moves import Moves
from partita.compiler.sharding.shard import gathered_bytes, shard
from partita.compiler.state import (
    Built,
    Compilation,
    Cut,
    Differentiated,
    Microbatched,
    Partitioned,
    Placed,
    Scheduled,
    Settled,
    Sharded,
    State,
    extended,
)
from partita.dsl import spec as language
from partita.dsl.builtins import DEFAULT_SCHEDULE
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.fits import schedule_span

# What is wrong with a model whose batch is to be cut, or to have more rows.
OF_THE_BATCH = {"E0406", "E0407"}

# About as many as a transformer of ten thousand layers has; a larger file is a slip.
MOST_NODES = 100_000

IN_ONE_PIECE = language.Call(DEFAULT_SCHEDULE, {"microbatches": 1, "over": "batch"})

Before = TypeVar("Before", bound=Settled)


def compile_run(given: language.Spec, gpu: bool = False) -> tuple[Compilation, Compilation | None]:
    """What a run needs: the training program, and that of evaluation where the file evaluates. `gpu` is where it runs,
    for what the file leaves open.
    """
    training = compile_spec(given, gpu=gpu)
    if training.train.eval is None:
        return training, None
    return training, compile_spec(given, training=False, placement=training.schedule.placement, gpu=gpu)


def compile_spec(
    given: language.Spec, training: bool = True, placement: Placement | None = None, gpu: bool = False
) -> Compilation:
    """Run all passes. With `training` false, the forward-only program of evaluation, cut into the same stages; they run
    where `placement` says, or in a loop over the ranks.

    Raises Refused with what is wrong with the file.
    """
    with _collector_paused():
        state = _settled(given, training, placement, gpu)
        if not training:
            return _evaluation(state)
        return _timed("assemble", assembled, _scheduled(state))


def schedule_spec(given: language.Spec) -> Scheduled:
    """The training program of a file but for its text: all that searches and predictions ask for. Raises Refused."""
    with _collector_paused():
        return _scheduled(_settled(given, training=True, placement=None, gpu=False))


def assembled(state: Scheduled, probe: Probe | None = None) -> Compilation:
    """The program of a plan. With a `probe` that watches it, torch compiles none of it."""
    program = assemble(state.plan, state.partitioned, state.update, state.compiled and probe is None, probe)
    return extended(Compilation, state, program=program)


def _scheduled(state: Settled) -> Scheduled:
    """All passes but the last, of training."""
    joint = _joint(state)
    auto = any(("auto",) in rule.paths for rule in _recompute_rules(state.spec))
    return fitted(joint, _rest) if auto else _rest(joint)


def _evaluation(state: Settled) -> Compilation:
    """The program of evaluation: over its whole set at once, or over a batch where a figure needs a whole batch, as a
    softmax over it does."""
    evaluation = state.train.eval
    rounds = int(evaluation.arguments["batches"]) if evaluation is not None else 1
    if rounds > 1:
        try:
            return _timed("assemble", assembled, _rest(_joint(evolve(state, rounds=rounds))))
        except Refused as refused:
            if not {each.code for each in refused.diagnostics} <= OF_THE_BATCH:
                raise
    return _timed("assemble", assembled, _rest(_joint(state)))


def _joint(state: Settled) -> Differentiated:
    """The passes whose graph is that of a whole batch."""
    built = _timed("build", _build, state)
    placed = _timed("place", _place, built)
    return _timed("differentiate", _differentiate, placed)


def _rest(state: Differentiated) -> Scheduled:
    """The passes from there to the schedule."""
    state = _timed("recompute", _recompute, state)
    microbatched = _timed("microbatches", _split, state)
    sharded = _timed("shard", _shard, microbatched)
    cut = _timed("cut", _cut, sharded)
    partitioned = _timed("update", _update, cut)
    return _timed("schedule", scheduled, partitioned)


def _timed(name: str, run: Callable[[Before], State], state: Before) -> State:
    """What a pass makes of a state, with the seconds that it takes."""
    start = perf_counter()
    found = run(state)
    return evolve(found, times=(*found.times, (name, perf_counter() - start)))


# ---------------------------------------------------------------- passes


def _settled(given: language.Spec, training: bool, placement: Placement | None, gpu: bool) -> Settled:
    """Find what is to be compiled, and refuse what has no meaning yet."""
    start = perf_counter()
    model, train = given.trained
    schedule = given.schedule or language.Schedule(DEFAULT_SCHEDULE, IN_ONE_PIECE)
    if model.nodes > MOST_NODES:
        raise refuse(
            "E0008",
            f"model `{model.name}` expands to {model.nodes:,} steps; at most {MOST_NODES:,} are compiled",
            model.span,
            help="lower the count of a `repeat`",
        )
    chunks, _ = size_of(schedule.call)
    pipeline = pipeline_of(given.layout, given.mesh, chunks)
    return Settled(
        spec=given,
        model=model,
        train=train,
        schedule_call=schedule,
        pipeline=evolve(pipeline, chunks=chunks),
        mesh=mesh_of(given.mesh, pipeline.axis),
        device=device_of(given.mesh),
        training=training,
        placement=placement,
        compiled=gpu if train.compile is None else train.compile,
        times=(("settle", perf_counter() - start),),
    )


def _build(state: Settled) -> Built:
    model = of_more_rows(state.model, state.batch, state.rounds) if state.rounds > 1 else state.model
    return extended(Built, state, forward=guarded(build(model, state.train.precision, state.training)))


def _place(state: Built) -> Placed:
    # An evaluation must be cut into the stages of training, though it has more rows, and no dropout.
    one = build(state.model, state.train.precision, state.training) if state.rounds > 1 else state.forward
    of_one_batch = {node.outputs[0].name: node for node in one.nodes}

    def cost(node: Node) -> float:
        node = of_one_batch.get(node.outputs[0].name, node)
        return 0.0 if node.op.random else seconds(node, state.device)

    return extended(Placed, state, placed=place(state.forward, state.pipeline, state.spec.layout, cost))


def _differentiate(state: Placed) -> Differentiated:
    joint = fuse(differentiate(state.placed)) if state.training else state.placed
    return extended(Differentiated, state, joint=joint, flops=product_flops(joint))


def _recompute(state: Differentiated) -> Differentiated:
    layout = state.spec.layout
    if not state.training:
        return state
    gathered = any(
        target.is_class and target.name == "param"
        for rule in (layout.rules if layout else ())
        if isinstance(rule, language.ShardRule)
        for target in rule.targets
    )
    again = recompute(state.joint, _recompute_rules(state.spec), state.again)
    return evolve(state, joint=rematerialize(again, gathered))


def _recompute_rules(given: language.Spec) -> list[language.RecomputeRule]:
    rules = given.layout.rules if given.layout else ()
    return [rule for rule in rules if isinstance(rule, language.RecomputeRule)]


def _split(state: Differentiated) -> Microbatched:
    count = state.microbatches * state.rounds
    return extended(Microbatched, state, step=split_batch(state.joint, state.batch, count, schedule_span(state.spec)))


def _shard(state: Microbatched) -> Sharded:
    homes = homes_of(state.spec.layout, state.mesh)
    # Parameters that are stored split are gathered once a step where a quarter of the memory holds them all.
    gathered = max(gathered_bytes(state.step, homes), default=0) * state.pipeline.chunks
    hoist = gathered <= state.device.memory / 4
    sharded = shard(state.step, homes, Moves(state.mesh), portable_values(state.step), hoist)
    return extended(Sharded, state, sharded=sharded, warnings=(*state.warnings, *homes.warnings()))


def _cut(state: Sharded) -> Cut:
    return extended(Cut, state, partitioned=overlapped(cut(state.sharded.graph, state.pipeline.stages)))


def _update(state: Cut) -> Partitioned:
    call = state.train.optimizer if state.training else None
    update = update_graph(state.partitioned, state.sharded.parameters, Moves(state.mesh), call, state.train.clip)
    return extended(Partitioned, state, update=update)


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
