"""The search space of `plan`: the meshes, layouts and schedules that a file's model could have.

The file's own layout guides the search. Mesh axes keep their names and links, and their role follows from the layout:
data for the one that shards the batch, pipe for the pipeline's, tensor for one that shards parameters. Mesh axes with
another role keep their sizes and rules, and rules for single tensors are kept. Without a layout:

    data      shards the batch
    pipe      cuts the outermost repeats
    tensor    shards axes of parameters that neither the inputs nor the values carried from layer to layer have, one per
              parameter: heads, ffn, vocab; and, for sequence parallelism, the axes of the inputs other than the batch
    context   shards the positions that attention goes through, everywhere
    expert    shards the batch as well as the experts of a mixture of experts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import ceil, gcd, isqrt, prod
from typing import Any

from attrs import evolve, frozen

from partita.compiler.costs.devices import device_of
from partita.compiler.costs.links import link_of
from partita.compiler.passes.fewer_iterations import renumbered
from partita.compiler.passes.resized import Resized
from partita.compiler.pipeline import room_to_gather, schedule_spec
from partita.compiler.schedules.generator import SCHEDULES, size_of
from partita.compiler.verify.proxy_sizes import axes_of
from partita.dsl import spec
from partita.dsl.check.divisibility import declared_parameters
from partita.dsl.check.layouts import STATE
from partita.dsl.check.uneven import PADDED, REPEATED, padded_axes
from partita.dsl.config.builtins import DEFAULT_SCHEDULE
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.functions.signatures import LIKELIHOODS
from partita.dsl.names.paths import path_of
from partita.dsl.syntax.source import Span
from partita.dsl.types import BYTES, Axis

# Tensor parallelism stays within a machine, of this many devices unless its device says more.
NODE = 8
# The links of usual machines: within a machine, and between machines.
FABRICS = {
    "a100": ("nvlink3", "ib200"),
    "h100": ("nvlink4", "ib400"),
    "h200": ("nvlink4", "ib400"),
    "b200": ("nvlink5", "ib800"),
}
# The layout's class for each ZeRO stage.
CLASSES = ("", "state", "grad", "param")
# The functions that go through positions, and those of experts.
OF_POSITIONS = ("attend", "linear_scan", "delta_rule")
# By how much of its size an axis may grow to be padded.
MAX_WASTE = 0.02
# How a sequence is split: contiguously, or in zigzag order, keys and values exchanged in the faster way or in this.
EXCHANGES = ("", "zigzag", "gather", "heads", "ring")


@frozen
class Candidate:
    """A mesh, a layout and a schedule. `size` is the microbatch size per rank, `sequence` whether sequence parallelism
    is used, `zero` the ZeRO stage, `recompute` the paths of a `recompute` rule or "".

    The sequence is split over `context` ranks, with this `exchange` (`EXCHANGES`). `expert` ranks have parts of the
    batch and of the experts; `routed`: those of `tensor` have parts of the experts, rather than of each. `shared`: all
    stages share the vocabulary. `offload`: the optimizer's state is in the host's memory. `slices` are those of each
    microbatch along the sequence. What is exchanged along `tensor` beside products is in `pieces`. `late`: updates do
    not wait until their step is validated.
    """

    data: int
    pipe: int
    tensor: int
    size: int
    sequence: bool = False
    zero: int = 0
    recompute: str = ""
    schedule: str = DEFAULT_SCHEDULE
    chunks: int = 1
    context: int = 1
    exchange: str = ""
    expert: int = 1
    routed: bool = False
    shared: bool = False
    offload: bool = False
    slices: int = 1
    pieces: int = 1
    late: bool = False

    @property
    def mesh(self) -> tuple[int, ...]:
        """The mesh sizes (data, pipe, tensor, context, expert)."""
        return self.data, self.pipe, self.tensor, self.context, self.expert

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that hold the same parameters, of experts in part, and reduce their gradients."""
        return self.data * self.context * self.expert

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.pipe * self.chunks


@frozen(eq=False)
class Space:
    """All candidates of a file for a number of devices.

    `data`, `pipe`, `tensor`, `context` and `expert` name mesh axes; `over` are further mesh axes that shard the batch,
    of `rows` rows. `split` and `sequence` are the tensor axes that `tensor` can shard, `positions` is that of `context`
    and `experts` that of `expert`, "" if there is none; `vocabularies` can be shared by all stages. `staged` are the
    names of the repeats that the pipeline cuts, `steps` the repeats, `runs` how often they run in total and `layers`
    their iterations in total. `blocks` can be recomputed, `kept` are the file's rules that are kept, and `sizes` fixes
    the mesh if given. `whole`: the batch cannot be split into microbatches, as that of a contrastive loss, or of a norm
    over the batch.
    """

    given: spec.Spec
    devices: int
    mesh: spec.Mesh
    data: str
    pipe: str
    tensor: str
    batch: str
    rows: int
    over: tuple[str, ...]
    split: tuple[str, ...]
    sequence: tuple[str, ...]
    staged: tuple[str, ...]
    steps: tuple[spec.Repeat, ...]
    runs: int
    layers: int
    blocks: tuple[str, ...]
    kept: tuple[spec.Rule, ...]
    context: str
    positions: str
    expert: str
    experts: str
    vocabularies: tuple[str, ...]
    sizes: Mapping[str, int] | None = None
    whole: bool = False

    # ------------------------------------------------------------ choices

    def factors(self, context: int = 1, expert: int = 1) -> Iterator[tuple[int, int, int]]:
        """The sizes (data, pipe, tensor) that multiply to the devices, with those of the other axes, and divide what
        they shard.
        """
        count, rest = divmod(self.devices, context * expert * prod(size for _, size in self.others))
        fixed = ((self.context, context), (self.expert, expert))
        if rest or (self.sizes is not None and any(self.sizes.get(name, 1) != size for name, size in fixed)):
            return
        for tensor in _divisors(count):
            # Machines and model sizes are mostly powers of two. What the file says may be anything.
            usual = tensor <= self.node and (tensor.bit_count() == 1 or count <= self.node)
            if tensor > 1 and not ((usual or self.sizes is not None) and self.split_by(tensor)):
                continue
            for pipe in _divisors(count // tensor):
                data = count // tensor // pipe
                if pipe > max(1, self.layers) or self.rows % (data * expert * self.beside):
                    continue
                if self.sizes is None or all(
                    self.sizes.get(name, 1) == size
                    for name, size in ((self.data, data), (self.pipe, pipe), (self.tensor, tensor))
                ):
                    yield data, pipe, tensor

    @cached_property
    def others(self) -> tuple[tuple[str, int], ...]:
        """Mesh axes that are not searched, but used: by rules that are kept, or to shard the batch."""
        searched = (self.data, self.pipe, self.tensor, self.context, self.expert)
        used = {*self.named, *self.over, *(self.sizes or ())}
        return tuple((name, size) for name, size in self.mesh.axes if name not in searched and name in used)

    @cached_property
    def named(self) -> set[str]:
        """Mesh axes that rules that are kept split something by."""
        return {name for rule in self.kept if isinstance(rule, spec.ShardRule) for name in rule.mesh_axes}

    @property
    def beside(self) -> int:
        """The number of shards of the batch along `over`."""
        return prod(self.mesh.size(name) for name in self.over)

    @property
    def unplaced(self) -> tuple[str, ...]:
        """The file's `place` rules, which candidates drop."""
        rules = self.given.layout.rules if self.given.layout else ()
        return tuple(rule.span.text for rule in rules if isinstance(rule, spec.PlaceRule))

    def split_by(self, tensor: int) -> tuple[str, ...]:
        """The parameter axes that `tensor` ranks can shard."""
        return tuple(name for name in self.split if self.given.axes[name].size % tensor == 0)

    def uneven_by(self, tensor: int) -> dict[str, str]:
        """The parameter axes that `tensor` ranks can shard although they do not divide, and how: those that hardly grow
        are padded, and those that the file pads; those of which several ranks can have the same part are repeated.
        """
        found, padded = {}, padded_axes(self.given)
        for name in self.split:
            size = self.given.axes[name].size
            if 1 < size < tensor and tensor % size == 0:
                found[name] = REPEATED
            elif size % tensor and (name in padded or -size % tensor <= MAX_WASTE * size):
                found[name] = PADDED
        return found

    def within(self, name: str, ranks: int) -> tuple[str, ...]:
        """The axis that ranks which repeat another one can split, as the heads of a group: of those that no parameter
        has without it, one that fewest have.
        """
        types = [set(step.type.names) for _, step in declared_parameters(self.given.trained[0])]
        counts = Counter(axis for own in types if name in own for axis in own)
        apart = {axis for own in types if name not in own for axis in own} | {name, *self.split, *self.sequence}
        found = [axis for axis in counts if axis not in apart and self.given.axes[axis].size % ranks == 0]
        return (min(found, key=lambda axis: counts[axis]),) if found else ()

    def sequence_by(self, tensor: int) -> tuple[str, ...]:
        """The input axes that `tensor` ranks can shard."""
        return tuple(name for name in self.sequence if self.given.axes[name].size % tensor == 0)

    def microbatches(self, candidate: Candidate) -> int:
        """The number of microbatches of a step."""
        return self.rows // self._rows_at_once(candidate)

    def _rows_at_once(self, candidate: Candidate) -> int:
        """The rows of a microbatch of every group, on all ranks."""
        return candidate.data * candidate.expert * self.beside * candidate.size * self.replicas_per_rank(candidate)

    def apart(self, candidate: Candidate) -> int:
        """The number of groups of ranks that train apart: those of the first mesh axis that splits the batch."""
        return min(self.given.trained[1].groups, self._along(candidate))

    def replicas_per_rank(self, candidate: Candidate) -> int:
        """How many replica groups each rank trains, one after the other."""
        return self.given.trained[1].groups // self.apart(candidate)

    def _along(self, candidate: Candidate) -> int:
        over = (self.mesh.size(name) for name in self.over)
        return next((size for size in (candidate.data, candidate.expert, *over) if size > 1), 1)

    @cached_property
    def _parameters(self) -> tuple[float, float]:
        """The number of elements of all parameters, and the share of those of experts."""
        body = self.given.trained[0].body
        every = elements(body)
        return every, elements(body, self.experts) / max(1.0, every)

    def part(self, candidate: Candidate) -> float:
        """The part of all parameters that the ranks of an expert axis have each."""
        return 1 - self._parameters[1] * (1 - 1 / candidate.expert)

    def sharing(self, candidate: Candidate) -> int:
        """The number of ranks that parameters are shared out over, whatever the ZeRO stage."""
        return prod((candidate.pipe, candidate.tensor, *(size for _, size in self.others)))

    def gathers_once(self, candidate: Candidate) -> bool:
        """Whether parameters that are stored in parts are gathered once a step, rather than before each use: those of
        the largest stage, times the stages of a rank, must fit.
        """
        width = BYTES[self.given.trained[1].dtype]
        gathered = width * self._parameters[0] * self.part(candidate) / self.sharing(candidate)
        if self.layers:
            gathered *= ceil(self.layers / candidate.stages) * candidate.stages / self.layers
        return candidate.zero < 3 or gathered <= room_to_gather(device_of(self.mesh))

    def valid(self, candidate: Candidate) -> bool:
        """Whether the sizes of a candidate's mesh divide what they shard, and its microbatches the batch."""
        parts = candidate.context * (candidate.tensor if candidate.sequence else 1)
        parts *= 2 if candidate.exchange else 1
        groups, along = self.given.trained[1].groups, self._along(candidate)
        return (
            (candidate.context == 1 or (bool(self.positions) and self._size(self.positions) % parts == 0))
            and (candidate.expert == 1 or (bool(self.experts) and self._size(self.experts) % candidate.expert == 0))
            and (groups % along == 0 or along % groups == 0)
            and self.rows % self._rows_at_once(candidate) == 0
            and candidate.mesh[:3] in set(self.factors(candidate.context, candidate.expert))
        )

    def _size(self, axis: str) -> int:
        return self.given.axes[axis].size if axis in self.given.axes else 1

    def settings(self) -> Iterator[Candidate]:
        """Sizes of the axes of context and experts to begin with, and what belongs to them: the file's; none; experts
        over the ranks of a machine.
        """
        plain, own = Candidate(1, 1, 1, 1), self._laid_out()
        if own is None and self.sizes is not None:
            own = evolve(plain, context=self.mesh.size(self.context), expert=self.mesh.size(self.expert))
        candidates = [plain]
        if own is not None:
            context, exchange, expert = own.context, own.exchange, own.expert
            candidates.insert(0, evolve(plain, context=context, exchange=exchange, expert=expert, routed=own.routed))
        if self.experts:
            candidates.append(evolve(plain, expert=gcd(self._size(self.experts), self.node, self.devices, self.rows)))
        yield from dict.fromkeys(candidates)

    def sizes_of(self, candidate: Candidate) -> Iterator[int]:
        """Microbatch sizes per rank of a mesh: powers of two, and the full batch; that alone if it cannot be split."""
        rows, size = self.rows // self._rows_at_once(evolve(candidate, size=1)), 1
        while size < rows and not self.whole:
            if rows % size == 0:
                yield size
            size *= 2
        yield rows

    def schedules(self, pipe: int, microbatches: int) -> Iterator[tuple[str, int]]:
        """Schedules by name, with their chunks: the default one, and those with `Generator.planned`."""
        yield DEFAULT_SCHEDULE, 1
        if pipe > 1:
            for generator in SCHEDULES.values():
                for chunks in generator.planned(pipe, self.layers, microbatches):
                    if (generator.name, chunks) != (DEFAULT_SCHEDULE, 1):
                        yield generator.name, chunks

    # ------------------------------------------------------------ files

    def file(self, candidate: Candidate, counts: tuple[int, ...] | None = None) -> spec.Spec:
        """The file with a candidate's mesh, layout and schedule; `counts` are the layers of each stage."""
        mesh = self.mesh_of(candidate)
        values: dict[str, Any] = {
            "microbatches": self.microbatches(candidate),
            "over": self.batch,
            "chunks": candidate.chunks,
            "minimize": "step_time",
        }
        if candidate.slices > 1:
            values |= {"over": (self.batch, self.positions), "slices": candidate.slices}
        settings = SCHEDULES[candidate.schedule].settings
        arguments = {each.name: values.get(each.name, each.default) for each in settings}
        _, train = self.given.trained
        return evolve(
            self.given,
            train=evolve(train, validate=spec.AFTER) if candidate.late else train,
            meshes={mesh.name: mesh},
            layout=spec.Layout("planned", mesh.name, self.rules(candidate, counts)),
            schedule=spec.Schedule("planned", spec.Call(candidate.schedule, arguments)),
            expect=(),
        )

    def mesh_of(self, candidate: Candidate) -> spec.Mesh:
        """A candidate's mesh. Axes without a link in the file get that of usual machines."""
        roles = (self.data, self.pipe, self.tensor, self.context, self.expert)
        sizes = dict(zip(roles, candidate.mesh, strict=True))
        own = {**dict(self.others), **sizes}
        axes = [(name, own[name]) for name, _ in self.mesh.axes if name in own]
        sizes = {name: size for name, size in sizes.items() if name not in dict(self.mesh.axes)}
        # The last axis varies fastest: the ranks of a tensor group are adjacent, then those that exchange most.
        axes = [*((name, sizes[name]) for name in (self.data, self.pipe) if name in sizes), *axes]
        axes = [*axes, *((name, sizes[name]) for name in (self.expert, self.context, self.tensor) if name in sizes)]
        shown = tuple((name, size) for name, size in axes if size > 1 or self.mesh.size(name) > 1 or name in self.named)
        shown = shown or tuple(axes[:1])
        links = {}
        reach = 1
        for name, size in reversed(shown):
            reach *= size
            link = self.mesh.links.get(name) or self._link(reach)
            if link is not None:
                links[name] = link
        return evolve(self.mesh, axes=shown, links={name: links[name] for name, _ in shown if name in links})

    def _link(self, reach: int) -> spec.Call | None:
        """The link of groups within `reach` consecutive ranks; None for this machine's memory."""
        device = self.mesh.device.name if self.mesh.device else ""
        if device in FABRICS:
            inside, outside = FABRICS[device]
            return spec.Call(inside if reach <= self.node else outside, {})
        speeds = {name: link_of(self.mesh, name).bandwidth for name in self.mesh.links}
        return self.mesh.links[min(speeds, key=lambda name: speeds[name])] if speeds else None

    @property
    def node(self) -> int:
        """The number of devices of a machine."""
        return max(NODE, device_of(self.mesh).node)

    def rules(self, candidate: Candidate, counts: tuple[int, ...] | None = None) -> tuple[spec.Rule, ...]:
        """The rules of a candidate's layout; `counts` are the layers of each stage."""
        place = self.given.layout.span if self.given.layout else None
        place = place or Span(self.given.source, 0, 0)

        def shard(
            names: tuple[str, ...],
            *mesh_axes: str,
            zigzag: bool = False,
            by: str | None = None,
            uneven: str | None = None,
        ) -> None:
            targets = (spec.Target(None, name, name in CLASSES, place) for name in names)
            rules.append(spec.ShardRule(tuple(targets), mesh_axes, place, zigzag, by, uneven))

        rules = list(self.kept)
        data, expert, context = (
            (name,) if size > 1 else ()
            for name, size in (
                (self.data, candidate.data),
                (self.expert, candidate.expert),
                (self.context, candidate.context),
            )
        )
        if data or expert or self.over:
            shard((self.batch,), *data, *expert, *self.over)
        if expert:
            shard((self.experts,), *expert)
        split = self.split_by(candidate.tensor) if candidate.tensor > 1 else ()
        if candidate.shared:
            for name in self.vocabularies:
                shard((name,), self.pipe, *((self.tensor,) if name in split else ()))
            split = tuple(name for name in split if name not in self.vocabularies)
        if candidate.tensor > 1 and candidate.routed:
            shard((self.experts,), self.tensor)
        uneven = self.uneven_by(candidate.tensor) if candidate.tensor > 1 else {}
        for name, word in sorted(uneven.items(), key=lambda each: each[1] == PADDED):
            if not (candidate.shared and name in self.vocabularies):
                shard((name,), self.tensor, uneven=word)
            if word == REPEATED:
                split += self.within(name, candidate.tensor // self.given.axes[name].size)
        if split:
            shard(split, self.tensor)
        sequence = self.sequence_by(candidate.tensor) if candidate.tensor > 1 and candidate.sequence else ()
        if context:
            by = candidate.exchange if candidate.exchange != "zigzag" else ""
            also = (self.tensor,) if self.positions in sequence else ()
            shard((self.positions,), *context, *also, zigzag=bool(candidate.exchange), by=by or None)
            sequence = tuple(name for name in sequence if name != self.positions)
        if sequence:
            shard(sequence, self.tensor)
        if candidate.zero and candidate.data_parallel_size > 1:
            shard((CLASSES[candidate.zero],), *data, *expert, *context)
        if candidate.pipe > 1:
            rules.append(spec.StageRule(self.staged, self.pipe, counts, place))
        if candidate.offload:
            rules.append(spec.OffloadRule(((STATE,),), place, (place,)))
        if candidate.pieces > 1:
            rules.append(spec.OverlapRule((self.tensor,), candidate.pieces, place))
        if candidate.recompute:
            paths = tuple(path_of(text) for text in candidate.recompute.split(", "))
            rules.append(spec.RecomputeRule(paths, place, (place,) * len(paths)))
        return tuple(rules)

    def own(self) -> Candidate | None:
        """The file itself as a candidate, if its mesh has the number of devices. Raises Refused (E0506)."""
        laid = self._laid_out()
        if laid is None:
            return None
        schedule = self.given.schedule
        chunks, microbatches = size_of(schedule.call if schedule else None)
        return evolve(
            laid,
            size=max(1, self.rows // (self._rows_at_once(evolve(laid, size=1)) * microbatches)),
            schedule=schedule.call.name if schedule else DEFAULT_SCHEDULE,
            chunks=chunks,
            slices=schedule.sequence[1] if schedule and schedule.sequence else 1,
        )

    def _laid_out(self) -> Candidate | None:
        """The file itself without its schedule."""
        mesh, layout = self.given.mesh, self.given.layout
        if mesh is None or layout is None or mesh.ranks != self.devices:
            return None
        data, pipe, tensor, context, expert = (
            mesh.size(name) for name in (self.data, self.pipe, self.tensor, self.context, self.expert)
        )
        rules = [rule for rule in layout.rules if isinstance(rule, spec.ShardRule)]
        over = {(t.name, axis) for rule in rules for t in rule.targets if t.path is None for axis in rule.mesh_axes}
        targets = {name for name, _ in over}
        along = next((rule for rule in rules if self.context in rule.mesh_axes and _axis(rule.targets[0])), None)
        return Candidate(
            data,
            pipe,
            tensor,
            1,
            tensor > 1 and any((name, self.tensor) in over for name in self.sequence),
            max(i for i, name in enumerate(CLASSES) if name in targets or not i),
            _recomputed(layout),
            context=context,
            exchange=(along.exchange or "zigzag" * along.zigzag) if along is not None and context > 1 else "",
            expert=expert,
            routed=tensor > 1 and (self.experts, self.tensor) in over,
            shared=pipe > 1 and any((name, self.pipe) in over for name in self.vocabularies),
            offload=any(isinstance(rule, spec.OffloadRule) and (STATE,) in rule.paths for rule in layout.rules),
            pieces=next(
                (r.pieces for r in layout.rules if isinstance(r, spec.OverlapRule) and self.tensor in r.mesh_axes), 1
            ),
        )

    def as_it_stands(self, own: Candidate) -> spec.Spec:
        """The file itself, with the device and links that candidates have."""
        links = self.mesh_of(own).links
        mesh = evolve(self.mesh, links={name: links[name] for name, _ in self.mesh.axes if name in links})
        return evolve(self.given, meshes={**self.given.meshes, mesh.name: mesh}, expect=())

    def resized(self, candidate: Candidate, microbatches: int, layers: int, counts: tuple[int, ...]) -> spec.Spec:
        """A candidate's file with `layers` layers of the staged repeats, `counts` of them in each stage, and with as
        much of the batch as these microbatches need (if it can be resized). Its schedule is the default one.
        """
        model, _ = self.given.trained
        sizes = {name: axis.size for name, axis in self.given.axes.items()}
        if self.free:
            sizes[self.batch] = self._rows_at_once(candidate) * microbatches
        # Those in the middle: a first and a last one may be apart.
        kept = {id(step): range(first := max(0, (step.count - layers) // 2), first + layers) for step in self.steps}
        named = {name: kept[id(step)] for step in self.steps for name in (step.name, step.scope)}
        small = evolve(
            self,
            given=evolve(
                self.given,
                axes={name: Axis(name, sizes[name]) for name in self.given.axes},
                model=Resized(sizes, kept).model(model),
            ),
            rows=sizes.get(self.batch, self.rows),
        )
        plain = evolve(candidate, schedule=DEFAULT_SCHEDULE, chunks=1, slices=1, shared=False, late=False)
        return renumbered(small.file(plain, counts if len(counts) > 1 else None), named)

    @property
    def free(self) -> bool:
        """Whether the batch can be resized: no other axis depends on its size."""
        model, _ = self.given.trained
        relations = axes_of(model).relations
        return all(self.batch not in (each.whole, *each.parts) for each in relations)


def elements(body: spec.Body, axis: str | None = None) -> float:
    """The number of elements of all parameters of a body, or those with an axis, over all calls and iterations."""
    total = 0.0
    for step in body.steps:
        if isinstance(step, spec.Parameter):
            total += step.type.elements if axis is None or step.type.has(axis) else 0
        elif isinstance(step, spec.CallBlock | spec.Scan):
            total += elements(step.body, axis)
        elif isinstance(step, spec.Repeat):
            total += step.count * elements(step.body, axis)
    return total


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


# ---------------------------------------------------------------- the space of a file


def space_of(file: spec.Spec, devices: int | None = None, keep: bool = False, device: str | None = None) -> Space:
    """The search space of a file, for its mesh's number of devices by default; with `keep`, its mesh's sizes are fixed.
    `device`, in usual machines, replaces the mesh's devices and links.

    Raises Refused: E0410 without a model or a train block, E0901 if the devices cannot all be used.
    """
    model, _ = file.trained
    layout = file.layout
    mesh = file.mesh or next(iter(file.meshes.values()), None)
    device_count = devices or (mesh.ranks if mesh else None)
    if device_count is None:
        help = "`--devices 8`, or a `mesh` in the file"
        raise refuse("E0901", f"`{file.source.name}` declares no mesh that gives the number of devices", help=help)
    mesh = mesh or spec.Mesh("cluster", (), None, {})
    if device is not None:
        mesh = evolve(mesh, device=spec.Call(device, {}), links={})
    batch = file.batch
    rules = [rule for rule in layout.rules if isinstance(rule, spec.ShardRule)] if layout else []
    known = dict(mesh.axes)
    rules = [rule for rule in rules if all(name in known for name in rule.mesh_axes)]
    stage = next((rule for rule in layout.rules if isinstance(rule, spec.StageRule)), None) if layout else None
    along = next((rule.mesh_axes for rule in rules for t in rule.targets if _axis(t) == batch), ())
    used = {name for rule in rules for name in rule.mesh_axes}
    experts = _experts(model)
    inputs = {axis for input in _inputs(model) for axis in input}
    parameters = axes_of(model).parameters
    pipe = stage.mesh_axis if stage is not None else _name("pipe", used)
    data = along[0] if along else _name("data", {*used, pipe})
    found_split, found_sequence = _tensor_axes(model, stage.repeats if stage else None, batch, experts)
    positions = next((name for name in _positions(model) if name in found_sequence), "")
    roles = {data, pipe}
    # The axis of the context splits the sequence alone; that of experts, these, and the batch or nothing.
    expert = next(
        (
            name
            for rule in rules
            for t in rule.targets
            if experts and _axis(t) == experts
            for name in rule.mesh_axes
            if name not in roles and name in along
        ),
        "",
    )
    shards = [(_axis(t), name) for rule in rules for t in rule.targets if _axis(t) for name in rule.mesh_axes]
    lone = {name for _, name in shards if positions and {axis for axis, n in shards if n == name} == {positions}}
    ordered = {name for rule in rules if rule.zigzag for name in rule.mesh_axes}
    context = min(lone - roles, key=lambda name: (name not in ordered, known.get(name, 1)), default="")
    # If several mesh axes shard parameters, tensor is the one that shards most of what tensor parallelism would.
    splitting = Counter(
        name
        for rule in rules
        for target in rule.targets
        for name in rule.mesh_axes
        if _axis(target) in parameters - inputs and name not in (data, pipe, *along, context)
    )
    for rule in rules:
        for target in rule.targets:
            splitting.update(name for name in rule.mesh_axes if name in splitting and _axis(target) in found_split)
    tensor = max(splitting, key=lambda name: splitting[name], default="")
    tensor = tensor or _name("tensor", {*used, pipe, data})
    context = context or _name("context", {*used, pipe, data, tensor})
    expert = expert or _name("expert", {*used, pipe, data, tensor, context})
    own = [_axis(t) for rule in rules if tensor in rule.mesh_axes for t in rule.targets if _axis(t)]
    split = tuple(dict.fromkeys(name for name in own if name not in inputs and name not in (batch, experts)))
    split = split or found_split
    sequence = tuple(dict.fromkeys(name for name in own if name in inputs and name != batch)) or found_sequence
    staged = stage.repeats if stage is not None else tuple(dict.fromkeys(s.name for s in outermost(model.body)))
    steps = tuple(outermost(model.body, staged))
    searched = {data, pipe, tensor, context, expert}
    recomputed = _recomputed(layout)
    # What `auto` recomputes depends on the memory of the full program, which is not known for a candidate.
    recomputed = "" if recomputed == "auto" else recomputed
    kept: tuple[spec.Rule, ...] = tuple(rule for rule in rules if _kept(rule, searched, batch))
    # A rule that puts an axis in another order is the only one that splits it.
    reordered = {_axis(t) for rule in kept if isinstance(rule, spec.ShardRule) and rule.zigzag for t in rule.targets}
    sequence = tuple(name for name in sequence if name not in reordered)
    kept += tuple(_offloaded(layout))
    sizes = dict(mesh.axes) if keep else None
    space = Space(
        file,
        device_count,
        mesh,
        data,
        pipe,
        tensor,
        batch,
        _rows(file, batch),
        tuple(name for name in along if name not in (data, expert)),
        split,
        sequence,
        staged,
        steps,
        iterations_of(model.body, staged, 1),
        iterations_of(model.body, staged),
        _blocks(model.body, steps, recomputed),
        kept,
        context,
        positions,
        expert,
        experts,
        tuple(_vocabularies(model)),
        sizes,
    )
    if not any(True for each in space.settings() for _ in space.factors(each.context, each.expert)):
        raise _unusable(space)
    return evolve(space, whole=_needs_the_whole_batch(space))


def _needs_the_whole_batch(space: Space) -> bool:
    """Whether a model's batch cannot be split, by a copy of it with two microbatches and few layers. With a single one,
    sums over the batch might be of inputs alone.
    """
    parts = 2 if space.free else next((each for each in _divisors(space.rows) if each > 1), 1)
    one = Candidate(1, 1, 1, 1)
    if not space.free:
        one = evolve(one, size=max(1, space.rows // parts // space.given.trained[1].groups))
    try:
        schedule_spec(evolve(space, over=()).resized(one, parts, 2, ()))
    except Refused as refused:
        return {each.code for each in refused.diagnostics} == {"E0407"}
    return False


def _unusable(space: Space) -> Exception:
    """Why no mesh uses all devices, or the file's cannot be kept."""
    if space.sizes is not None:
        return _not_kept(space)
    notes = [f"`{name}` of {size} is kept unchanged" for name, size in space.others if size > 1]
    notes.append(f"axis `{space.batch}` has {space.rows:,} rows to split")
    if space.layers:
        notes.append(f"`{', '.join(space.staged)}` has {space.layers} layers to cut a pipeline between")
    for name in space.split:
        notes.append(f"axis `{name}` of {space.given.axes[name].size:,} can be split, over at most {space.node} ranks")
    count = f"{space.devices:,} device{'s' * (space.devices > 1)}"
    help = "another number of devices, or a batch that has more of its factors"
    return refuse("E0901", f"{count} cannot all be used", notes=notes, help=help)


def _not_kept(space: Space) -> Exception:
    """Why no plan has the sizes of the file's mesh."""
    mesh, searched = space.mesh, "leave out `--keep-mesh`, and other sizes are searched"
    if not mesh.axes:
        return refuse("E0901", f"`{space.given.source.name}` declares no mesh to keep", help=searched)
    if mesh.ranks != space.devices:
        message = f"mesh `{mesh.name}` of {mesh.ranks:,} ranks cannot be kept on {space.devices:,} devices"
        return refuse("E0901", message, mesh.span, help=f"`--devices {mesh.ranks}`; or {searched}")
    pipe, tensor = mesh.size(space.pipe), mesh.size(space.tensor)
    notes = []
    sharing = [name for name, size in mesh.axes if size > 1 and name in (space.data, space.expert, *space.over)]
    if space.rows % prod(mesh.size(name) for name in sharing):
        sizes = " × ".join(f"`{name}` of {mesh.size(name)}" for name in sharing)
        notes.append(f"the {space.rows:,} rows of `{space.batch}` do not divide over {sizes}")
    if pipe > max(1, space.layers):
        layers = (
            f"{space.layers} layers of `{', '.join(space.staged)}`" if space.layers else "model, which has no `repeat`"
        )
        notes.append(f"`{space.pipe}` of {pipe} is too large for the {layers}")
    if tensor > 1 and not space.split_by(tensor):
        axes = ", ".join(f"`{name}` of {space.given.axes[name].size:,}" for name in space.split)
        notes.append(
            f"`{space.tensor}` of {tensor} divides none of {axes}" if axes else f"nothing splits `{space.tensor}`"
        )
    message = f"no plan has the sizes of mesh `{mesh.name}`"
    return refuse("E0901", message, mesh.span, notes=notes, help=f"change them; or {searched}")


def _axis(target: spec.Target) -> str:
    """The axis that a target names for all tensors; "" for a class or a single tensor."""
    return "" if target.is_class or target.path is not None else target.name


def _name(preferred: str, used: set[str]) -> str:
    """A name for a mesh axis that no rule of the file names: an axis with a role of its own keeps it."""
    name = preferred
    while name in used:
        name += "_"
    return name


def _kept(rule: spec.ShardRule, searched: set[str], batch: str) -> bool:
    """Whether a rule is kept, as it concerns nothing that is searched."""
    if any(target.path is not None for target in rule.targets):
        return not searched & set(rule.mesh_axes)
    return not searched & set(rule.mesh_axes) and all(_axis(target) != batch for target in rule.targets)


def _positions(model: spec.Model) -> Iterator[str]:
    """The axes of positions that a model goes through."""
    for each in spec.applications(model.body):
        if each.function in OF_POSITIONS:
            over = each.options["over"]
            yield over if isinstance(over, str) else over[0]


def _experts(model: spec.Model) -> str:
    """The axis of a model's experts; "" if it has none."""
    matrices = {name for each in spec.parameters(model.body) if len(each.type.axes) > 2 for name in each.type.names}
    for each in spec.applications(model.body):
        if each.function == "routed_dot":
            return str(each.options["along"])
        if each.function == "dispatch":
            axis = next((name for name in each.type.names if name in matrices), "")
            if axis:
                return axis
    return ""


def _vocabularies(model: spec.Model) -> Iterator[str]:
    """The axes that the loss chooses from."""
    losses = (each for each in spec.applications(model.body) if each.function in LIKELIHOODS)
    yield from dict.fromkeys(str(each.options["over"]) for each in losses)


def _offloaded(layout: spec.Layout | None) -> Iterator[spec.Rule]:
    """Rules for what lies in the host's memory, without the optimizer's state."""
    for rule in layout.rules if layout else ():
        if isinstance(rule, spec.OffloadRule):
            paths = [(path, span) for path, span in zip(rule.paths, rule.path_spans, strict=True) if path != (STATE,)]
            if paths:
                yield evolve(rule, paths=tuple(p for p, _ in paths), path_spans=tuple(span for _, span in paths))


def _inputs(model: spec.Model) -> Iterator[tuple[str, ...]]:
    """The axes of a model's inputs."""
    for type in model.body.types[: len(model.body.inputs)]:
        yield type.names


def _rows(file: spec.Spec, batch: str) -> int:
    """The size of the batch; 1 if the model has none."""
    return file.axes[batch].size if batch in file.axes else 1


def outermost(body: spec.Body, names: tuple[str, ...] | None = None) -> Iterator[spec.Repeat]:
    """The repeats with these names (or any) that are in no other such repeat, in program order, each once."""
    seen: set[int] = set()
    stack = [iter(body.steps)]
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
        elif isinstance(step, spec.CallBlock) and not isinstance(step, spec.InstanceParameters):
            stack.append(iter(step.body.steps))
        elif isinstance(step, spec.Repeat):
            if names is not None and step.name not in names:
                stack.append(iter(step.body.steps))
            elif id(step) not in seen:
                seen.add(id(step))
                yield step


def iterations_of(body: spec.Body, names: tuple[str, ...], each: int | None = None) -> int:
    """The iterations of the repeats with these names (of nested ones the outermost), over all calls and enclosing
    iterations; with `each`, as if every such repeat had that many.
    """
    total = 0
    for step in body.steps:
        if isinstance(step, spec.InstanceParameters):
            continue
        if isinstance(step, spec.CallBlock):
            total += iterations_of(step.body, names, each)
        elif isinstance(step, spec.Repeat):
            own = step.name in names
            total += (each or step.count) if own else step.count * iterations_of(step.body, names, each)
    return total


def _recomputed(layout: spec.Layout | None) -> str:
    """The paths that a layout recomputes: `attention, mlp.up`."""
    rules = [rule for rule in layout.rules if isinstance(rule, spec.RecomputeRule)] if layout else []
    return ", ".join(".".join(path) for rule in rules for path in rule.paths)


def _blocks(body: spec.Body, steps: tuple[spec.Repeat, ...], own: str) -> tuple[str, ...]:
    """What can be recomputed, in increasing order: blocks that the blocks of layers call, those of layers, what the
    file recomputes, and everything in the layers.
    """
    calls = [call for each in ([step.body for step in steps] or [body]) for call in _calls(each)]
    inner = [step.block for call in calls for step in _calls(call.body)]
    outer = [call.block for call in calls]
    # What the file recomputes may be just that.
    every = ("all",) if steps and set(own.split(", ")) != {step.name for step in steps} else ()
    names = (*inner, *(outer if not steps or len(set(outer)) > 1 else ()))
    return tuple(dict.fromkeys((*names, *filter(None, (own,)), *every)))


def _calls(body: spec.Body) -> list[spec.CallBlock]:
    return [
        step
        for step in body.steps
        if isinstance(step, spec.CallBlock) and not isinstance(step, spec.InstanceParameters)
    ]


def _tensor_axes(
    model: spec.Model, staged: tuple[str, ...] | None, batch: str, experts: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes that tensor parallelism can shard, and those for sequence parallelism."""
    carried = {experts, *(name for input in _inputs(model) for name in input)}
    for step in outermost(model.body, staged):
        for name in (name for type in step.body.types[: len(step.carried)] for name in type.names):
            carried.add(name)
    axes: dict[str, None] = {}
    for body in spec.bodies(model.body):
        for each in body.steps:
            if isinstance(each, spec.Parameter) and len(each.type.axes) > 1:
                free = [name for name in each.type.names if name not in carried]
                if free and not any(name in axes for name in free):
                    axes[free[0]] = None
    sequence = [name for input in _inputs(model) for name in input if name != batch]
    return tuple(axes), tuple(dict.fromkeys(sequence))
