"""Builds a small proxy of a checked file, for `partita verify`.

The proxy keeps the model's steps, every layout rule, the kind of schedule with its chunks, and which sizes divide by
which. It shrinks axes (`partita.compiler.verify.proxy_sizes`), mesh axes to two or three ranks, the pipeline to at most
three, repeats to as many iterations as the stages need, and microbatches to about twice the pipeline ranks. Precision
is f64, and parameters start with values of order 1. A file for a thousand ranks runs in seconds in one process.

Links have no latency, which would dominate the cost of tiny tensors: some layouts are chosen by cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from math import lcm, prod

from attrs import evolve, frozen

from partita.compiler.costs.devices import device_of
from partita.compiler.costs.links import link_of
from partita.compiler.passes.fewer_iterations import kinds, renumbered, told_apart
from partita.compiler.passes.place import pipeline_of
from partita.compiler.passes.resized import Initial, Resized, of_order_one
from partita.compiler.schedules.generator import SCHEDULES, Sizes, one_microbatch, size_of
from partita.compiler.verify.proxy_sizes import Axes, Search, axes_of
from partita.dsl import spec
from partita.dsl.check.groups import groups_of
from partita.dsl.check.layouts import HEADS
from partita.dsl.check.uneven import Uneven, padded_axes, with_divided_mesh
from partita.dsl.diagnostic import refuse
from partita.dsl.types import Axis

# Ranks of a mesh axis that shards tensors. The largest axis gets three, so that confusing two axes changes a size, and
# the next rank is not also the previous one.
LONGEST, OTHERS = 3, 2
PIPELINE = 3
EVERY = 2  # steps between averages of replica groups
SLICES = 3
MAX_RANKS, MAX_STAGES = 40, 48
# Of a value, where sizes are not shrunk.
MAX_ELEMENTS = 1_000_000


@frozen(eq=False)
class _Pipe:
    """(ranks, chunks) of the pipeline in the file (`before`) and in the proxy (`after`)."""

    axis: str | None
    before: tuple[int, int]
    after: tuple[int, int]

    @property
    def old(self) -> int:
        """Number of stages in the file."""
        return prod(self.before)

    @property
    def new(self) -> int:
        """Number of stages in the proxy."""
        return prod(self.after)


def proxy_of(
    original: spec.Spec,
    initial: Initial = of_order_one,
    hoist: bool = True,
    fixed: frozenset[str] = frozenset(),
    longer: int = 1,
) -> spec.Spec:
    """Returns the proxy of a file that compiles. `initial` maps each parameter's declared initializer to the proxy's.

    Without `hoist` the device's memory is set so low that sharded parameters are gathered before each use, as in the
    full program. The axes `fixed` are not shrunk, and those of the inputs are up to `longer` times as
    long as need be.

    Raises Refused (W0702) if no consistent small sizes are found.
    """
    original = with_divided_mesh(original)
    model, train = original.trained
    call = original.schedule.call if original.schedule else None
    pipe = _pipe(original, call)
    microbatches = _microbatches(call, pipe)
    axes = axes_of(model)
    axes = evolve(axes, kept=axes.kept | fixed)
    for mesh in _meshes(original, pipe, hoist):
        groups = _groups(original, mesh)
        multiples, avoided = _demands(original, axes, mesh, microbatches, groups)
        for name in axes.inputs:
            multiples[name] *= max(1, min(longer, axes.declared[name] // multiples[name]))
        sizes = Search(axes, multiples, avoided).run() or _declared(model, axes, multiples)
        if sizes is not None:
            break
    else:
        raise refuse(
            "W0702",
            f"no small sizes were found for the axes of model `{model.name}`",
            model.span,
            notes=[f"{name}: a multiple of {multiple}" for name, multiple in multiples.items()],
            help="`partita run --transport virtual` runs the file itself",
        )
    kept = _kept(original, pipe)
    small = Resized(sizes, kept, initial).model(evolve(model, outputs=(), answering=model.body))
    longest = sorted(_repeats(model.body), key=lambda step: len(kept[id(step)]))
    original = renumbered(original, {name: kept[id(step)] for step in longest for name in (step.name, step.scope)})
    renumbered_model, train = original.trained
    small = evolve(small, adapters=renumbered_model.adapters)
    sync = _sync(train.sync, groups)
    weights = train.eval.arguments["weights"] if train.eval else "ema" if train.ema is not None else "trained"
    return evolve(
        original,
        axes={name: Axis(name, sizes.get(name, axis.size)) for name, axis in original.axes.items()},
        meshes={name: mesh if mesh is not None and name == mesh.name else m for name, m in original.meshes.items()},
        model=small,
        layout=_layout(original, pipe, kept),
        schedule=_schedule(original, pipe, microbatches),
        train=evolve(
            train,
            data=spec.Call("random", {}, train.data.span),
            optimizer=_of_single_elements(train.optimizer),
            precision="f64",
            steps=_steps(sync),
            sync=sync,
            eval=spec.Call("every", {"interval": 1, "batches": 2, "weights": weights, "sample": None}),
            checkpoint=None,
        ),
        expect=(),
    )


def _of_single_elements(optimizer: spec.Optimizer) -> spec.Optimizer:
    """The optimizer whose matrices in four bits have blocks that fit into any part of any axis."""
    rules = (
        rule if rule.stored is None else evolve(rule, stored=evolve(rule.stored, arguments={"block": 1}))
        for rule in optimizer.rules
    )
    return evolve(optimizer, rules=tuple(rules))


def single(original: spec.Spec) -> spec.Spec:
    """The reference semantics of a file: the same training on one device, without layout or microbatching."""
    return evolve(original, layout=None, schedule=one_microbatch(original.batch))


# ---------------------------------------------------------------- pipeline and mesh


def _rules(original: spec.Spec, kind: type) -> list[spec.Rule]:
    return [rule for rule in original.layout.rules if isinstance(rule, kind)] if original.layout else []


def _shards(original: spec.Spec) -> list[spec.ShardRule]:
    return [rule for rule in _rules(original, spec.ShardRule) if isinstance(rule, spec.ShardRule)]


def _pipe(original: spec.Spec, call: spec.Call | None) -> _Pipe:
    chunks, _ = size_of(call)
    pipeline = pipeline_of(original.layout, original.mesh, chunks)
    ranks = min(pipeline.ranks, PIPELINE)
    while ranks > 2 and ranks * chunks > MAX_STAGES:
        ranks -= 1
    proxy_chunks = min(chunks, max(1, MAX_STAGES // ranks)) if chunks > 2 else chunks
    return _Pipe(pipeline.axis, (pipeline.ranks, chunks), (ranks, proxy_chunks))


def _microbatches(call: spec.Call | None, pipe: _Pipe) -> int:
    """Enough to fill and drain the pipeline; not a multiple of its ranks if the file's number is not."""
    if call is None:
        return 1
    _, declared = size_of(call)
    needed = 2 * pipe.after[0] + (declared % pipe.before[0] != 0)
    proxy = _proxy(call, pipe)
    return min(declared, max(needed, SCHEDULES[proxy.name].fewest(proxy)))


def _proxy(call: spec.Call, pipe: _Pipe) -> spec.Call:
    """The schedule's call for the proxy, before `microbatches` and `chunks` are replaced."""
    return SCHEDULES[call.name].proxy(call, Sizes(pipe.before[0], *pipe.after))


def _meshes(original: spec.Spec, pipe: _Pipe, hoist: bool) -> Iterator[spec.Mesh | None]:
    """Meshes of few ranks, best first; at last with the file's own sizes, since those that windows keep may divide by
    no others.
    """
    mesh = original.mesh
    if mesh is None:
        yield None
        return
    splitting = [name for name, size in mesh.axes if size > 1 and name != pipe.axis]
    piped = {} if pipe.axis is None else {pipe.axis: pipe.after[0]}
    short = {name: min(size, OTHERS) for name, size in mesh.axes} | piped
    first = max(splitting, key=mesh.size, default=None)
    groups = groups_of(original)
    if groups is not None and groups.along is not None and mesh.size(groups.along) > groups.spread:
        # Several ranks in each of several groups.
        short[groups.along] = min(groups.spread, OTHERS) * min(mesh.size(groups.along) // groups.spread, OTHERS)
        first = None
    long = short if first is None else {**short, first: min(mesh.size(first), LONGEST)}
    for sizes in (long, short, dict(mesh.axes) | piped):
        if sizes is short or prod(sizes.values()) <= MAX_RANKS:
            yield _mesh(mesh, sizes, hoist)


def _groups(original: spec.Spec, mesh: spec.Mesh | None) -> tuple[int, int]:
    """The replica groups on a mesh of few ranks: over how many of them, and how many on each."""
    groups = groups_of(original)
    if groups is None:
        return 1, 1
    members = min(groups.members, OTHERS)
    if groups.along is None or mesh is None or original.mesh is None:
        return 1, members
    before, ranks = original.mesh.size(groups.along), mesh.size(groups.along)
    within = before // groups.spread
    spread = groups.spread if ranks == before else OTHERS if within > 1 else ranks
    return spread, members


def _sync(call: spec.Call | None, groups: tuple[int, int]) -> spec.Call | None:
    """How the proxy's ranks are kept in step: with two steps between averages of few groups."""
    if call is None or call.name != "local":
        return call
    return evolve(call, arguments={**call.arguments, "groups": prod(groups), "every": EVERY})


def _steps(sync: spec.Call | None) -> int:
    """The steps of a proxy: two updates, and of replica groups two averages."""
    if sync is None:
        return 2
    if sync.name == "paired":
        return 5  # each of them an estimate, and complete
    return 2 * EVERY if sync.name == "local" else 2 + int(sync.arguments["steps"])


def _mesh(mesh: spec.Mesh, sizes: Mapping[str, int], hoist: bool) -> spec.Mesh:
    links = {
        name: spec.Call("link", {"bandwidth": link_of(mesh, name).bandwidth, "latency": 0.0}) for name, _ in mesh.axes
    }
    device = device_of(mesh)
    figures = {"flops": device.flops["f64"], "bandwidth": device.bandwidth, "memory": device.memory if hoist else 1}
    return evolve(
        mesh,
        axes=tuple((name, sizes[name]) for name, _ in mesh.axes),
        device=spec.Call("device", figures),
        links=links,
    )


def _declared(model: spec.Model, axes: Axes, multiples: Mapping[str, int]) -> dict[str, int] | None:
    """The declared sizes, if they are small and multiples of what they must be."""
    largest = max(type.elements for body in spec.bodies(model.body) for type in body.types)
    fit = all(size % multiples[name] == 0 for name, size in axes.declared.items())
    return dict(axes.declared) if fit and largest <= MAX_ELEMENTS else None


def _demands(
    original: spec.Spec, axes: Axes, mesh: spec.Mesh | None, microbatches: int, groups: tuple[int, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """By axis: what its size must be a multiple of, and what it should not be, as its declared size is not."""
    old, new = (dict(each.axes) if each else {} for each in (original.mesh, mesh))
    over: dict[str, dict[str, None]] = {}
    classes: list[str] = []
    for rule in _shards(original):
        for target in rule.targets:
            if target.is_class:
                classes.extend(rule.mesh_axes)
            else:
                over.setdefault(target.name, {}).update(dict.fromkeys(rule.mesh_axes))
    zigzag = {rule.targets[0].name for rule in _shards(original) if rule.zigzag}
    for name, rule in _exchanged(original, old):
        over.setdefault(name, {}).update(dict.fromkeys(rule.mesh_axes))
    overlaps = [rule for rule in _rules(original, spec.OverlapRule) if isinstance(rule, spec.OverlapRule)]
    pieces = {name for rule in overlaps for name in rule.mesh_axes if rule.pieces > 1}
    padded, call = padded_axes(original), original.schedule.call if original.schedule else None
    multiples: dict[str, int] = {}
    avoided: dict[str, int] = {}
    for name, size in axes.declared.items():
        # No tensor of a file that compiles is split over more than divides its size.
        together = [each for each in _subsets(over.get(name, ())) if size % prod(old[axis] for axis in each) == 0]
        multiple = lcm(*(prod(new[axis] for axis in each) for each in together))
        if name == original.batch:
            _, members = groups
            multiple *= microbatches * members
        if (
            original.schedule is not None
            and original.schedule.sequence is not None
            and name == original.schedule.sequence[0]
        ):
            multiple *= min(original.schedule.sequence[1], SLICES)
        multiple = lcm(multiple, axes.even.get(name, 1))
        if name in zigzag:
            multiple *= 2
        if pieces.intersection(over.get(name, ())) and size % (2 * multiple) == 0:
            multiple *= 2  # so that what is gathered along it can be cut
        if name in padded and size % _parts(padded[name], old, name == original.batch, size_of(call)[1]):
            # As the file's, it is padded.
            multiple = axes.even.get(name, 1)
            avoided[name] = _parts(padded[name], new, name == original.batch, microbatches)
        for mesh_axis in classes if name in axes.parameters else ():
            if size % old[mesh_axis] == 0:
                multiple = lcm(multiple, new[mesh_axis])
            elif multiple % new[mesh_axis]:
                avoided[name] = new[mesh_axis]
        multiples[name] = multiple
    return multiples, avoided


def _parts(rule: Uneven, sizes: Mapping[str, int], is_batch: bool, microbatches: int) -> int:
    """Into how many parts an axis is split over ranks and time."""
    return prod(sizes[name] for name, _ in rule.mesh_axes) * (microbatches if is_batch else 1)


def _exchanged(original: spec.Spec, mesh: Mapping[str, int]) -> Iterator[tuple[str, spec.ShardRule]]:
    """The axes that rules `by heads` exchange theirs for, of queries."""
    model, _ = original.trained
    for rule in _shards(original):
        if rule.exchange != HEADS:
            continue
        axis, parts = rule.targets[0].name, prod(mesh[name] for name in rule.mesh_axes)
        for body in spec.bodies(model.body):
            for step in body.steps:
                if isinstance(step, spec.Apply) and step.function == "attend" and step.options["over"] == axis:
                    q = step.operands[0]
                    assert isinstance(q, int)
                    others = (axis, step.options["along"], original.batch)
                    whole = [each for each in body.types[q].axes if each.name not in others]
                    yield from ((each.name, rule) for each in whole if each.size % parts == 0)


def _subsets(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    """All subsets, the empty one included."""
    return chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))


# ---------------------------------------------------------------- iterations and stages


def _repeats(body: spec.Body) -> list[spec.Repeat]:
    return [step for each in spec.bodies(body) for step in each.steps if isinstance(step, spec.Repeat)]


def _kept(original: spec.Spec, pipe: _Pipe) -> dict[int, list[int]]:
    """The iterations of each repeat that are left, by `id` of the step: one of each kind and at least two, or more
    where the stages need them. Repeats that rules tell apart have the same ones left, as far as they go.
    """
    model, _ = original.trained
    every, apart = _repeats(model.body), told_apart(original)
    (*_, rule) = (None, *_rules(original, spec.StageRule))
    names = rule.repeats if isinstance(rule, spec.StageRule) else ()
    ranged = any(r.first < r.last for r in _rules(original, spec.PlaceRule) if isinstance(r, spec.PlaceRule))
    least = pipe.new if ranged else 2
    kept: dict[int, list[int]] = {id(step): kinds(step, apart) for step in every}
    together = [step for step in every if any(name in own for own in apart for name in (step.name, step.scope))]

    def add(step: spec.Repeat, numbers: Iterable[int]) -> None:
        for each in together if step in together else [step]:
            kept[id(each)] = sorted({*kept[id(each)], *(number for number in numbers if number < each.count)})

    for step in every:
        add(step, kept[id(step)])
        add(step, [n for n in range(step.count) if n not in kept[id(step)]][: max(0, least - len(kept[id(step)]))])
    body, declared = model.body, {id(step): range(step.count) for step in every}
    needed = pipe.new + (_staged(body, names, declared) > pipe.old) if names else 0
    while _staged(body, names, kept) < needed:
        short = [step for step in every if len(kept[id(step)]) < step.count]
        if not short:
            break
        # Staged repeats first, then the repeats that contain them.
        step = min(short, key=lambda s: (s.name not in names, len(kept[id(s)]) / s.count))
        add(step, [next(n for n in range(step.count) if n not in kept[id(step)])])
    # The repeats within all iterations of one, as those within its first.
    for step in every:
        for inner in step.bodies[1:]:
            for one, other in spec.pairs(step.body, inner):
                if isinstance(one, spec.Repeat) and isinstance(other, spec.Repeat):
                    kept[id(other)] = kept[id(one)]
    return kept


def _staged(body: spec.Body, names: Sequence[str], kept: Mapping[int, Sequence[int]]) -> int:
    """The number of iterations of the repeats in `names`, counting the outermost of nested ones."""
    total = 0
    for step in body.steps:
        if isinstance(step, spec.InstanceParameters):
            continue
        if isinstance(step, spec.CallBlock):
            total += _staged(step.body, names, kept)
        elif isinstance(step, spec.Repeat):
            total += len(kept[id(step)]) * (1 if step.name in names else _staged(step.body, names, kept))
    return total


def _layout(original: spec.Spec, pipe: _Pipe, kept: Mapping[int, Sequence[int]]) -> spec.Layout | None:
    if original.layout is None:
        return None
    model, _ = original.trained
    rules: list[spec.Rule] = []
    places = [rule for rule in original.layout.rules if isinstance(rule, spec.PlaceRule)]
    stages = _fewer_stages(places, pipe)
    for rule in original.layout.rules:
        if isinstance(rule, spec.PlaceRule):
            rule = evolve(rule, first=stages[rule.first], last=stages[rule.last])
        elif isinstance(rule, spec.StageRule) and rule.counts is not None:
            total = _staged(model.body, rule.repeats, kept)
            rule = evolve(rule, counts=_portioned(rule.counts, pipe, total))
        rules.append(rule)
    return evolve(original.layout, rules=tuple(rules))


def _fewer_stages(rules: Sequence[spec.PlaceRule], pipe: _Pipe) -> list[int]:
    """By stage of the file, that of the proxy: neighbours become one, but a range has two stages left where it can."""
    starts: set[int] = set()  # of the proxy's stages, after the first
    for rule in sorted(rules, key=lambda rule: rule.last):
        if (
            len(starts) < pipe.new - 1
            and rule.first < rule.last
            and starts.isdisjoint(range(rule.first + 1, rule.last + 1))
        ):
            starts.add(rule.last)
    even = [-(-stage * pipe.old // pipe.new) for stage in range(1, pipe.new)]
    for start in (*even, *range(1, pipe.old)):
        if len(starts) < pipe.new - 1:
            starts.add(start)
    return [sum(start <= stage for start in starts) for stage in range(pipe.old)]


def _portioned(declared: Sequence[int], pipe: _Pipe, total: int) -> tuple[int, ...]:
    """Iterations per stage: one each, the rest in proportion to what the stages had."""
    if len(declared) != pipe.old:
        return tuple(declared)  # an invalid layout, refused elsewhere
    before = [declared[stage * pipe.old // pipe.new] for stage in range(pipe.new)]
    counts = [1] * pipe.new
    for _ in range(total - pipe.new):
        stage = max(range(pipe.new), key=lambda s: (before[s] / counts[s], -s))
        counts[stage] += 1
    return tuple(counts)


def _schedule(original: spec.Spec, pipe: _Pipe, microbatches: int) -> spec.Schedule | None:
    if original.schedule is None:
        return None
    call = original.schedule.call
    call = _proxy(call, pipe)
    arguments = {**call.arguments, "microbatches": microbatches}
    if call.arguments.get("chunks"):
        arguments["chunks"] = pipe.after[1]
    if call.arguments.get("slices"):
        arguments["slices"] = min(call.arguments["slices"], SLICES)
    return evolve(original.schedule, call=evolve(call, arguments=arguments))
