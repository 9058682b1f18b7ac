"""The compiler: the passes in order, each a function from one state to the next (`partita.compiler.state`).

Every intermediate form can be printed as text (`partita compile --emit`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from math import ceil, prod
from time import perf_counter
from typing import TypeVar

from attrs import evolve

from partita.compiler.analysis.time import unsplit_seconds
from partita.compiler.codegen.assemble import assemble
from partita.compiler.codegen.stored_parameters import with_stored_parameters
from partita.compiler.codegen.whole_parameters import with_whole_parameters
from partita.compiler.codegen.writer import Probe
from partita.compiler.costs.devices import Device, device_of
from partita.compiler.costs.nodes import product_flops, seconds
from partita.compiler.fit.remat import fitted
from partita.compiler.fit.schedule import scheduled
from partita.compiler.graph import Graph
from partita.compiler.mesh import mesh_of
from partita.compiler.ops.attention import Attention
from partita.compiler.ops.optimizer import Update
from partita.compiler.passes.after import check_after
from partita.compiler.passes.assign import Blocks, assign, match_storage_dtype
from partita.compiler.passes.buckets import bucket_limits
from partita.compiler.passes.buffers import ends_of
from partita.compiler.passes.build import build
from partita.compiler.passes.captured import check_captured
from partita.compiler.passes.chunked_collectives import in_pieces
from partita.compiler.passes.cut import cut, portable_values
from partita.compiler.passes.decode import STATE as KEPT
from partita.compiler.passes.decode import NotInParts, decoded
from partita.compiler.passes.differentiate import differentiate
from partita.compiler.passes.float8 import expanded, in_float8
from partita.compiler.passes.four_bits import in_four_bits
from partita.compiler.passes.fuse import fuse
from partita.compiler.passes.group import grouped
from partita.compiler.passes.guard import guarded
from partita.compiler.passes.larger_batch import with_larger_batch, with_rows
from partita.compiler.passes.microbatch import split_batch
from partita.compiler.passes.mode import of_mode
from partita.compiler.passes.offload import offloaded, parameters_on_host, without_effect
from partita.compiler.passes.outer import with_outer_updates
from partita.compiler.passes.overlap import overlapped
from partita.compiler.passes.padded import padded
from partita.compiler.passes.place import balanced, idle_places, pipeline_of, place
from partita.compiler.passes.prefetch import prefetched
from partita.compiler.passes.remat_cheap import remat_cheap
from partita.compiler.passes.remat_scopes import remat_scopes
from partita.compiler.passes.rounded import rounded
from partita.compiler.passes.shard.defaults import default_layouts
from partita.compiler.passes.shard.resharding import Resharding
from partita.compiler.passes.shard.shard import gathered_bytes, shard
from partita.compiler.passes.shard.undeclared import undeclared_splits
from partita.compiler.passes.sparse import Tables, cast_by_rows, check_lazy, sparse_updates, tables
from partita.compiler.passes.update import update_graph
from partita.compiler.passes.vocab_parallel import of_parts, spread
from partita.compiler.passes.zigzag import Order, in_zigzag
from partita.compiler.schedules.conditions import Placement
from partita.compiler.schedules.generator import one_microbatch, size_of, stage_ranks_of
from partita.compiler.state import (
    Built,
    Compilation,
    Configured,
    Cut,
    Differentiated,
    Microbatched,
    Partitioned,
    Placed,
    Scheduled,
    Scoring,
    Sharded,
    State,
    extended,
)
from partita.compiler.verify.proxy_sizes import axes_of
from partita.dsl import spec as language
from partita.dsl.advice.report import listed
from partita.dsl.check.divisibility import schedule_span, shared_axes, unequal, zigzag_axes
from partita.dsl.check.exclusions import exclusions, orders
from partita.dsl.check.groups import groups_of, joined
from partita.dsl.check.language_model import ROLLOUTS, USUAL, LanguageModel, language_model, no_output
from partita.dsl.check.layouts import PARAM
from partita.dsl.check.stages import conflicts
from partita.dsl.check.uneven import padded_axes, with_divided_mesh
from partita.dsl.config.builtins import ALL
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.syntax.source import Span

# Errors of models whose batch cannot be split, or have more rows.
OF_THE_BATCH = {"E0406", "E0407"}

# About the size of a transformer with ten thousand layers; a larger model is a mistake.
MAX_NODES = 100_000

# Positions of a prompt that are computed at once.
AT_ONCE = 32

Before = TypeVar("Before", bound=Configured)
Training = TypeVar("Training", bound=Scheduled)


def compile_run(spec: language.Spec, gpu: bool = False) -> tuple[Compilation, Compilation | None]:
    """The programs of a run: training, which knows what writes answers if it trains on these, and evaluation if the
    file has one. `gpu`: whether it runs on GPUs, for options that the file leaves open.
    """
    training = _with_answers(spec, compile_spec(spec, gpu=gpu), gpu)
    if training.train.eval is None:
        return training, None
    with collector_paused():
        evaluation = _evaluation(_evaluated(spec, training, gpu))
    return _with_evaluation(training, evaluation), evaluation


def compile_spec(spec: language.Spec, training: bool = True, gpu: bool = False) -> Compilation:
    """Run all passes. With `training` false, compile the forward-only evaluation program, with the same stages, placed
    round-robin over the ranks.

    Raises Refused if something is wrong with the file.
    """
    with collector_paused():
        state = _configured(spec, training, None, gpu)
        if not training:
            return _evaluation(state)
        return _timed("assemble", assembled, _scheduled(state))


def check_gradients(spec: language.Spec) -> None:
    """Differentiate a file's model as written, on one device. Raises Refused if that is not possible."""
    model, train = spec.trained
    with collector_paused():
        differentiate(assign(build(model, train.precision), train.optimizer).graph)


def compile_outputs(
    spec: language.Spec,
    names: Sequence[str] = (),
    part: tuple[str, int] | None = None,
    beside: Scheduled | None = None,
    gpu: bool = False,
) -> Compilation:
    """The program that computes outputs of the model, those of some `names` or all: forward only, as in evaluation, and
    a whole batch at once. Accumulators `output NAME` hold them. With a `part` of an axis, so many positions of it, from
    the context's position on; states, which are buffers, hold what it needs of those before. It may run along with the
    training program of the file, `beside` it.

    Raises Refused: also if there are no such outputs (E0302); NotInParts.
    """
    model, _ = spec.trained
    known = [name for name, _ in model.outputs]
    for name in names or () if known else ("any",):
        if name not in known:
            raise no_output(model, name)
    with collector_paused():
        placement = beside.schedule.placement if beside is not None else None
        state = _configured(spec, training=False, placement=placement, gpu=gpu)
        whole = one_microbatch(state.batch)
        state = evolve(state, schedule_call=whole, outputs=tuple(names or known), beside=beside, compiled=False)
        state = evolve(state, iterations=None if beside is None else beside.iterations)
        built = _timed("build", partial(_build, in_parts=part is not None), state)
        if part is not None:
            forward, parts = decoded(of_mode(built.forward, False, state.batch), *part, masters=beside is not None)
            built = evolve(built, forward=forward, parts=parts)
        return _timed("assemble", assembled, _rest(_differentiated(built)))


def scoring_of(
    spec: language.Spec,
    output: str = USUAL,
    beside: Scheduled | None = None,
    gpu: bool = False,
    cached: bool = True,
    span: Span | None = None,
    rows: bool = False,
) -> Scoring:
    """What computes the logits of one text, or of as many as a batch has `rows`, by a file in its own layout: along
    with the run of a training program, if it is `beside` one. Where each operation along the sequence allows it, and
    unless it is not to be `cached`, there are two programs, which keep what later positions need
    (`partita.compiler.passes.decode`); otherwise one, of the whole window.

    Raises Refused: E0302, and E1001 at what asks for it, or at the model.
    """
    spec = spec if rows else _of_fewest_rows(spec)
    model = language_model(spec.trained[0], spec.batch, output, span)

    def compiled(*parts: tuple[str, int] | None) -> tuple[Compilation, ...]:
        states = tuple(compile_outputs(spec, (output,), part, beside, gpu) for part in parts)
        for each in states:
            _check_ids(model, each)
            if beside is not None:
                _check_stored(each, beside, span)
        return states

    reason = NotInParts("that was asked for", None)
    if cached:
        try:
            return Scoring(model, compiled(*((model.sequence.name, min(size, model.window)) for size in (1, AT_ONCE))))
        except NotInParts as found:
            reason = found
    return Scoring(model, compiled(None), reason)


def _of_fewest_rows(spec: language.Spec) -> language.Spec:
    """The file with one row in its batch, or one for each rank over which its layout splits rows; the file itself if
    other sizes depend on the rows.
    """
    model, _ = spec.trained
    mesh, batch = spec.mesh, spec.batch
    rules = spec.layout.rules if spec.layout is not None else ()
    over = {
        axis
        for rule in rules
        if isinstance(rule, language.ShardRule)
        and any(target.name == batch and not target.is_class for target in rule.targets)
        for axis in rule.mesh_axes
    }
    try:
        return evolve(spec, model=with_rows(model, batch, prod(mesh.size(axis) for axis in over) if mesh else 1))
    except Refused:
        return spec


def _check_ids(model: LanguageModel, state: Scheduled) -> None:
    """Refuse (E1001) a model that writes ids which it cannot read, by a program of it."""
    limit = next((each.limit for each in state.plan.inputs if each.name == model.tokens), None)
    if limit is not None and limit.size < model.vocab.size:
        message = f"is not a model that writes: it has logits for {model.vocab}, and reads ids of {limit}"
        raise refuse("E1001", f"`{state.model.name}` {message}", state.model.span, help="the same axis for both")


def _check_stored(state: Scheduled, training: Scheduled, span: Span | None) -> None:
    """Refuse (E1001) logits that need a parameter where training does not store it."""
    for rank, other in zip(state.plan.ranks, training.plan.ranks, strict=True):
        for name in rank.parameters:
            if not name.startswith(KEPT) and name not in other.parameters:
                raise refuse(
                    "E1001",
                    f"`{USUAL}` needs `{name}` on pipeline rank {rank.rank}, where training does not read it",
                    span,
                    help="compute the output from what the loss is computed from; or sample after training",
                )


def schedule_spec(spec: language.Spec, hoist: bool | None = None) -> Scheduled:
    """The training program without its source text: all that searches and predictions need. `hoist` is whether
    parameters that are stored in parts are gathered once a step; without it, they are if they fit. Raises Refused.
    """
    with collector_paused():
        state = _configured(spec, training=True, placement=None, gpu=False)
        return _scheduled(evolve(state, hoist=hoist))


def schedule_run(spec: language.Spec) -> Scheduled:
    """The same, with all that its run does besides: for what a run needs of memory. Raises Refused."""
    training = _with_answers(spec, schedule_spec(spec), gpu=False)
    if training.train.eval is None:
        return training
    with collector_paused():
        return _with_evaluation(training, _scheduled_evaluation(_evaluated(spec, training, gpu=False)))


def _with_answers(spec: language.Spec, training: Training, gpu: bool) -> Training:
    """A training program that knows what writes the answers of its run, if its data are prompts."""
    data = training.train.data
    if data.name != ROLLOUTS:
        return training
    start = perf_counter()
    writes = scoring_of(spec, beside=training, gpu=gpu, span=data.span, rows=True)
    return evolve(training, writes=writes, times=(*training.times, ("rollouts", perf_counter() - start)))


def _with_evaluation(training: Training, evaluation: Scheduled) -> Training:
    """A training program that knows the evaluation of its run."""
    seconds = sum(value for _, value in evaluation.times)
    return evolve(training, evaluation=evaluation, times=(*training.times, ("evaluation", seconds)))


def assembled(state: Scheduled, probe: Probe | None = None) -> Compilation:
    """The program of a plan. With a `probe` that observes it, torch compiles none of it."""
    program = assemble(state.plan, state.partitioned, state.update, state.compiled and probe is None, probe)
    whole = with_whole_parameters(program, state.partitioned.graph.parameters, state.updates)
    return extended(Compilation, state, program=with_stored_parameters(whole, state.joint.own_sizes))


def _scheduled(state: Configured) -> Scheduled:
    """All training passes except the last."""
    joint = _joint(state)
    auto = any(("auto",) in rule.paths for rule in _recompute_rules(state.spec))
    return fitted(joint, _rest) if auto else _rest(joint)


def compile_evaluation(spec: language.Spec, training: Compilation, rows: int, gpu: bool = False) -> Compilation:
    """The evaluation program of a whole set with that many rows. Raises Refused: also if the last batch is not full,
    and the model cannot do with less (E0623).
    """
    with collector_paused():
        return _evaluation(_evaluated(spec, training, gpu), rows)


def _evaluated(spec: language.Spec, training: Scheduled, gpu: bool) -> Configured:
    """The inputs of an evaluation program, whose ranks have the stages of training, and read what that stores."""
    state = _configured(spec, False, training.schedule.own_placement, gpu)
    return evolve(state, sparse=training.tables.over, iterations=training.iterations)


def _evaluation(state: Configured, rows: int | None = None) -> Compilation:
    """The evaluation program."""
    return _timed("assemble", assembled, _scheduled_evaluation(state, rows))


def _scheduled_evaluation(state: Configured, rows: int | None = None) -> Scheduled:
    """The evaluation program without its source text: over all its batches at once, or batch by batch if some metric
    needs a full batch. `rows`: those of the set, if all of it is evaluated; without them, the program is that of a
    single batch.
    """
    evaluation = state.train.eval
    requested = evaluation.arguments["batches"] if evaluation is not None else 1
    size = axes_of(state.model).declared.get(state.batch, 1)
    batches = Fraction(1 if requested == ALL else requested) if rows is None else Fraction(rows, size)
    if batches != 1:
        try:
            return _rest(_joint(evolve(state, batches=batches)))
        except Refused as refused:
            if not {each.code for each in refused.diagnostics} <= OF_THE_BATCH:
                raise
            if rows is not None and batches.denominator > 1:
                divisor = next(each for each in range(size, 0, -1) if rows % each == 0)
                full = f"in a run, `batches = {rows // size}`, which leaves out the rest; or " if rows > size else ""
                raise refuse(
                    "E0623",
                    f"the evaluation set has {rows:,} rows, and this model needs full batches of {size}",
                    state.train.spans.get("eval"),
                    notes=[
                        each.message + (f"   ({each.span.place})" if each.span else "") for each in refused.diagnostics
                    ],
                    help=f"{full}`{state.batch} = {divisor}`, which divides the set",
                ) from refused
    return _rest(_joint(state))


def _joint(state: Configured) -> Differentiated:
    """The passes on the full-batch graph."""
    return _differentiated(_timed("build", _build, state))


def _differentiated(built: Built) -> Differentiated:
    """The passes on the full-batch graph, once it is built."""
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
    """Run a pass, and record the seconds it takes."""
    start = perf_counter()
    result = run(state)
    return evolve(result, times=(*result.times, (name, perf_counter() - start)))


# ---------------------------------------------------------------- passes


def _configured(spec: language.Spec, training: bool, placement: Placement | None, gpu: bool) -> Configured:
    """Resolve the inputs of the compilation. Raises Refused."""
    start = perf_counter()
    spec = with_divided_mesh(spec)
    model, train = spec.trained
    schedule = spec.schedule or one_microbatch(spec.batch)
    if model.nodes > MAX_NODES:
        raise refuse(
            "E0008",
            f"model `{model.name}` expands to {model.nodes:,} steps; at most {MAX_NODES:,} are compiled",
            model.span,
            help="lower the count of a `repeat`",
        )
    chunks, _ = size_of(schedule.call)
    wrong = [*conflicts(spec, chunks), *(exclusions(spec) if training else orders(spec))]
    if wrong:
        raise Refused(wrong)
    pipeline = pipeline_of(spec.layout, spec.mesh, chunks)
    groups = groups_of(spec)
    mesh = mesh_of(spec.mesh, pipeline.axis, groups)
    if not training and groups is not None and groups.along is not None and mesh.replica_axis is not None:
        # What reads the means of all groups is computed by all ranks together.
        spec, mesh = joined(spec, groups.along, mesh.replica_axis), evolve(mesh, replica_axis=None)
    return Configured(
        spec=spec,
        model=model,
        train=train,
        schedule_call=schedule,
        pipeline=evolve(pipeline, chunks=chunks, stage_ranks=stage_ranks_of(schedule.call, pipeline.ranks, chunks)),
        mesh=mesh,
        device=device_of(spec.mesh),
        groups=groups,
        training=training,
        placement=placement,
        compiled=gpu if train.compile is None else train.compile,
        times=(("settle", perf_counter() - start),),
    )


def _build(state: Configured, in_parts: bool = False) -> Built:
    model = _of_a_group(state, state.model) if state.training else state.model
    if state.batches != 1:
        model = with_larger_batch(state.model, state.batch, state.batches)
    shards = None if in_parts else _shards(state)
    forward = build(model, state.train.dtype, state.training, state.outputs, shards)
    if state.train.float8:
        forward = in_float8(forward)
    if state.training:
        assignment = assign(forward, state.train.optimizer)
        warnings = (*state.warnings, *assignment.warnings, *_not_offloaded(state, assignment.updates), *_meeting(state))
        warnings += rounded(forward)
        check_after(assignment.graph, assignment.updates, state.train, state.offload_rule)
        forward = _stored(assignment.graph, assignment.updates, assignment.updates, assignment.blocks)
        return extended(
            Built,
            state,
            forward=forward,
            rules=assignment.rules,
            unfit=assignment.unfit,
            updates=assignment.updates,
            warnings=warnings,
        )
    if state.beside is not None:
        updates, known = state.beside.updates, state.beside.forward.parameters
        trained, blocks = {p.name for p in known if p.trained}, {p.name: p.blocks for p in known if p.blocks}
        return extended(Built, state, forward=_stored(forward, trained, updates, blocks), updates=updates)
    # Outputs may read parameters in other ways than the loss does.
    whole = build(model, state.train.dtype, False) if state.outputs else forward
    assignment = assign(whole, state.train.optimizer)
    updates = assignment.updates
    forward = _stored(forward, updates, updates, assignment.blocks)
    return extended(Built, state, forward=forward, updates=updates)


def _shards(state: Configured) -> dict[str, int]:
    """The number of shards of each axis that the layout splits."""
    found: dict[str, int] = {}
    for rule in state.spec.layout.rules if state.spec.layout else ():
        if isinstance(rule, language.ShardRule):
            parts = prod(state.mesh.sizes[axis] for axis in rule.mesh_axes)
            found |= {target.name: parts for target in rule.targets if not target.is_class}
    return found


def _stored(
    graph: Graph, trained: Collection[str], updates: Mapping[str, Update], blocks: Mapping[str, Blocks]
) -> Graph:
    """The graph with parameters, some of them `trained`, in the dtypes in which they are stored and read."""
    return cast_by_rows(match_storage_dtype(graph, trained, blocks), updates)


def _of_a_group(state: Configured, model: language.Model) -> language.Model:
    """The model with the rows of one of the replica groups; those of the batch, if none do."""
    if state.groups is None or state.groups.count == 1:
        return model
    because = f"each of the {state.groups.count} groups of `sync` has a part of them"
    return with_larger_batch(model, state.batch, Fraction(1, state.groups.count), because)


def _ordered(state: Built, graph: Graph) -> Graph:
    """A graph with axes in the order that the layout says; what goes through a sequence part by part has them all."""
    orders = {axis: Order(*arguments) for axis, arguments in zigzag_axes(state.spec).items() if axis not in state.parts}
    return in_zigzag(graph, orders)


def _not_offloaded(state: Configured, updates: Mapping[str, Update]) -> Iterator[Diagnostic]:
    """A warning (W0301) of a rule that would keep in the host's memory what there is not."""
    rule = state.offload_rule
    if (
        rule is not None
        and (PARAM,) not in rule.paths
        and not state.train.mixed
        and state.train.ema is None
        and state.train.local is None
        and not any(u.states for u in updates.values())
    ):
        message = "`offload state` applies to nothing: the optimizer keeps none"
        yield Diagnostic("W0301", message, rule.span, help="remove it")


def _meeting(state: Configured) -> Iterator[Diagnostic]:
    """A warning (W0304) where ranks would not begin their next step any sooner."""
    if state.train.late and state.pipeline.ranks == 1:
        message = "`validate = after` saves next to nothing: no ranks form a pipeline, so all end their steps together"
        yield Diagnostic(
            "W0304", message, state.train.spans.get("validate"), help="leave it out, which saves the copies"
        )


def _place(state: Built) -> Placed:
    graph, iterations = _ordered(state, state.forward), state.iterations
    if iterations is None:
        iterations = balanced(graph, state.pipeline, state.spec.layout, partial(_weighed, state))
    placed = _of_mode(state, place(graph, state.pipeline, state.spec.layout, iterations))
    if not state.training:
        return extended(Placed, state, placed=placed, iterations=iterations)
    warnings = (*state.warnings, *idle_places(graph, state.pipeline, state.spec.layout, iterations))
    return extended(Placed, state, placed=placed, iterations=iterations, warnings=warnings)


def _of_mode(state: Built, placed: Graph) -> Graph:
    return guarded(of_mode(placed, state.training, state.batch))


def _weighed(state: Built, graph: Graph) -> dict[int, float]:
    """The seconds that a step spends on the nodes of each stage of a graph: those of its gradients, and of what is
    computed again for these, are on the same stage.
    """
    joint = _of_mode(state, graph)
    if state.training:
        joint = remat_scopes(_with_gradients(joint), _recompute_rules(state.spec), state.again)
    return unsplit_seconds(joint, state.spec, state.device)


def _with_gradients(placed: Graph) -> Graph:
    return expanded(fuse(differentiate(placed)))


def _differentiate(state: Placed) -> Differentiated:
    joint = _with_gradients(state.placed) if state.training else expanded(state.placed)
    flops = product_flops(joint)
    joint = in_four_bits(_padded(state, joint))
    if state.training and state.groups is not None:
        flops *= state.groups.count
    shared, pipeline = shared_axes(state.spec), state.pipeline
    if not shared or pipeline.axis is None or pipeline.ranks == 1:
        return extended(Differentiated, state, joint=joint, flops=flops)
    whole = joint
    joint, stages = spread(joint, shared, pipeline.axis, pipeline.ranks, pipeline.stages, portable_values(joint))
    rules, updates = of_parts(joint, state.rules), of_parts(joint, state.updates)
    _check_parts(joint, updates, state.batch)
    parts = {"spread": stages, "undivided": whole if stages else None, "rules": rules, "updates": updates}
    return extended(Differentiated, state, joint=joint, flops=flops, **parts)


def _padded(state: Placed, graph: Graph) -> Graph:
    """The graph with the axes that the layout pads. Raises Refused: E0406 if the last batch of an evaluation lacks
    rows, E0419 if an update would see the padding.
    """
    over = padded_axes(state.spec)
    if not over:
        return graph
    own = {axis.name: axis for value in graph.values for axis in value.type.axes if axis.name in over}
    stored = (axis for each in graph.parameters if not each.is_state for axis in each.value.type.axes)
    own |= {axis.name: axis for axis in stored if axis.name in state.parts and axis.name in over}
    sizes = {}
    for name, axis in own.items():
        parts = prod(size for _, size in over[name].mesh_axes)
        parts *= ceil(state.batch_parts * state.batches) if name == state.batch else 1
        parts *= state.slices if state.sequence is not None and name == state.sequence[0] else 1
        if axis.size % parts:
            sizes[name] = -(-axis.size // parts) * parts
    _check_padded_updates(state, graph, sizes)
    if state.parts:
        return padded(graph, sizes, stored={name: sizes.pop(name) for name in state.parts & sizes.keys()})
    if state.batch not in sizes or state.batches == 1:
        return padded(graph, sizes)
    if state.batches.denominator > 1:
        raise Refused([unequal(own[state.batch], ceil(state.batches), None, state.batch, over[state.batch].span)])
    rows = own[state.batch].size // int(state.batches)
    parts = prod(size for _, size in over[state.batch].mesh_axes) * state.batch_parts
    sizes[state.batch] = -(-rows // parts) * parts * int(state.batches)
    return padded(graph, sizes, (state.batch, rows))


def _check_parts(graph: Graph, updates: Mapping[str, Update], batch: str) -> None:
    """Refuse (E0417) a parameter in parts that its optimizer cannot update as such, or that the update of a buffer
    reads once a step: no rank has all parts.
    """
    for parameter in graph.parameters:
        part, update = parameter.part, updates.get(parameter.name)
        if part is not None and update is not None and part.rank == 0:
            parts = part.master.axis(part.axis).size // parameter.master.axis(part.axis).size
            # A state without the axis is of all parts together, as of a row whose mean of squares they share.
            together = update.whole or not all(state.has(part.axis) for state in update.state_types(part.master))
            if together or not update.splits(part.master, part.axis, parts):
                raise refuse(
                    "E0417",
                    f"`{part.name}` cannot be split over the pipeline: its optimizer updates it as a whole",
                    parameter.span,
                    help="use an elementwise optimizer for it, such as `adamw`",
                )
    split = {parameter.value: parameter.part.name for parameter in graph.parameters if parameter.part is not None}
    ends = ends_of(graph, batch)
    for each in graph.updates:
        _, read = ends.read(graph, each.value)
        for name in (name for value, name in split.items() if value in read):
            message = f"`{name}` cannot be split over the pipeline: the update of `{each.buffer}` reads it"
            raise refuse("E0417", message, each.span, help="split it over another mesh axis")


def _recompute(state: Differentiated) -> Differentiated:
    layout = state.spec.layout
    if not state.training:
        return state
    gathered = any(
        target.is_class and target.name == "param"
        for rule in (layout.rules if layout else ())
        if isinstance(rule, language.ShardRule)
        for target in rule.targets
    ) or bool(parameters_on_host(state.joint, state.offload_rules))
    again = remat_scopes(state.joint, _recompute_rules(state.spec), state.again)
    return evolve(state, joint=remat_cheap(again, gathered))


def _recompute_rules(spec: language.Spec) -> list[language.RecomputeRule]:
    rules = spec.layout.rules if spec.layout else ()
    return [rule for rule in rules if isinstance(rule, language.RecomputeRule)]


def _split(state: Differentiated) -> Microbatched:
    count, sequence = state.batch_parts * state.batches, state.sequence
    sparse = Tables(state.sparse, {})
    if state.training:
        sparse = tables(state.joint, state.updates, state.batch, state.slices, state.train)
    check_lazy(sparse, state.joint, state.updated, {name: rule.span for name, rule in state.rules.items()})
    step = split_batch(state.joint, state.batch, count, schedule_span(state.spec), sequence, sparse.over)
    _check_padded_batches(state, step)
    return extended(Microbatched, state, step=step, tables=sparse, updates=sparse_updates(state.updates, sparse.over))


def _check_padded_updates(state: Placed, graph: Graph, sizes: Mapping[str, int]) -> None:
    """Refuse (E0419) updates that would see the padding: those whose states are of runs of elements, and lazy ones, of
    rows that a padded batch looks up.
    """
    for parameter in graph.parameters:
        update = state.updates.get(parameter.name)
        if update is None:
            continue
        axes = {axis for each in update.state_types(parameter.master) for axis in each.axes}
        runs = not axes <= set(parameter.master.axes)
        longer = [name for name in parameter.master.names if name in sizes and (runs or not update.leaves_zeros)]
        if longer or (update.lazy and state.batch in sizes):
            what = longer[0] if longer else state.batch
            message = f"`{what}` cannot be padded: `{update.name}` updates `{parameter.name}`"
            rows = ", if only the rows that a batch looks up"
            message += (" by runs of its elements" if runs else ", and may change zeros") if longer else rows
            help = f"a size of `{what}` that divides; or another optimizer for it, such as `adamw`"
            raise refuse("E0419", message, parameter.span, help=help)


def _check_padded_batches(state: Differentiated, step: Graph) -> None:
    """Refuse (E0419) an evaluation of several padded batches that needs the rows of all of them at once."""
    for each in step.inputs:
        if (
            state.batches != 1
            and state.batch in step.own_sizes
            and each.batch is None
            and each.value.type.has(state.batch)
        ):
            message = (
                f"an evaluation needs `{each.name}` of all its batches at once, and `{state.batch}` is padded in each"
            )
            raise refuse("E0419", message, each.span, help=f"a size of `{state.batch}` that divides; or `batches = 1`")


def _shard(state: Microbatched) -> Sharded:
    defaults = default_layouts(state.spec, state.mesh)
    stored = "state" if state.reads_means else "param"
    gathered = max(gathered_bytes(state.step, defaults, stored, state.updates), default=0) * state.pipeline.chunks
    max_bytes = room_to_gather(state.device)
    hoist = gathered <= max_bytes if state.hoist is None else state.hoist
    resharding, portable = Resharding(state.mesh), portable_values(state.step)
    sharded = shard(
        state.step,
        defaults,
        resharding,
        portable,
        hoist,
        state.updates,
        means=state.reads_means,
        parts=state.parts,
        max_bytes=max_bytes,
        prefetched=state.prefetched,
    )
    undeclared = undeclared_splits(sharded.graph, defaults, state.batch)
    warnings = (*state.warnings, *defaults.warnings(), *undeclared, *(_unfused(state) if state.training else ()))
    return extended(Sharded, state, sharded=sharded, warnings=warnings)


def room_to_gather(device: Device) -> float:
    """Parameters that are stored in parts are gathered once a step if all of a rank's fit into so many bytes."""
    return device.memory / 4


def _unfused(state: Microbatched) -> Iterator[Diagnostic]:
    """Warnings (W0303) of operations that take more memory than their fused kernels would, one for each place."""
    places = {
        (node.span, words): None
        for node in state.forward.nodes
        if isinstance(node.op, Attention) and (words := node.op.unfused)
    }
    for span, words in places:
        yield Diagnostic(
            "W0303", f"no fused kernel supports {listed(words)}: the scores of this attention are materialized", span
        )


def _cut(state: Sharded) -> Cut:
    partitioned = cut(state.sharded.graph, state.stages, state.spread)
    ordered = overlapped(grouped(partitioned), bucket_limits(state.mesh))
    max_pieces = {name: rule.pieces for rule in state.overlap_rules for name in rule.mesh_axes}
    cut_up, piece_axes = in_pieces(prefetched(ordered, state.prefetched), max_pieces)
    if not state.training:
        return extended(Cut, state, partitioned=cut_up)
    copied = offloaded(cut_up, state.offload_rules)
    warnings = (*_not_overlapped(state, piece_axes), *without_effect(copied, state.offload_rules))
    return extended(Cut, state, partitioned=copied, warnings=(*state.warnings, *warnings))


def _not_overlapped(state: Sharded, piece_axes: Collection[str]) -> Iterator[Diagnostic]:
    """Warnings (W0301) of rules for mesh axes along which nothing is sent in pieces: others than are `piece_axes`."""
    for rule in state.overlap_rules:
        for name in rule.mesh_axes:
            if rule.pieces > 1 and name not in piece_axes and state.mesh.sizes.get(name, 1) > 1:
                message = f"`overlap {name}` applies to nothing"
                note = "no product reads what is gathered along it, or makes what is summed along it, in pieces"
                help = "remove it, or choose a number of pieces into which axes divide"
                yield Diagnostic("W0301", message, rule.span, (note,), help)


def _update(state: Cut) -> Partitioned:
    if state.training and state.train.graphs:
        check_captured(state)
    layouts, updates, train = state.sharded.parameters, state.updated, state.train
    resharding, spans = Resharding(state.mesh), {name: rule.span for name, rule in state.rules.items()}
    timed = partial(seconds, device=state.device)
    options = resharding, updates, train.clip, timed, train.ema, spans, state.states_on_host, state.on_host
    update = update_graph(state.partitioned, layouts, *options, delayed=bool(train.delay))
    if not state.training:
        return extended(Partitioned, state, update=update)
    if state.groups is not None and train.local is not None:
        update = with_outer_updates(update, state.mesh, state.groups, train.local, state.states_on_host)
    return extended(Partitioned, state, update=update)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection: it would find hardly any cycles, and double the time of compilation."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
