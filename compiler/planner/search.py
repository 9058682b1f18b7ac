"""Searches for the fastest candidates that fit into device memory.

The file itself, if its mesh has the given number of devices, is compiled first, so that nothing slower is proposed.
Candidates then pass through three phases, each more expensive and applied to fewer of them, most promising first:

    bounds       for every candidate, from proxies without data parallelism: approximate lower bounds of its step time
                 and of the memory of its parameters and activations
    outlooks     from proxies with the candidate's own mesh and layout, the timeline of its schedule (`estimate`), until
                 no remaining bound could be among the best; candidates on the file's mesh first
    plans        the candidates themselves, compiled, with the predictions of `partita compile`

ZeRO stages above 1 are tried if the stage before does not fit. Sequence parallelism is assumed, and the best are tried
without it. Candidates that do not compile are dropped.

Bounds and outlooks begin with few settings of context and experts (`Space.settings`), and with longer contexts if
nothing fits. What else there is, is tried on the best: from outlook to outlook, what changes one thing of a layout
(`moves`), as long as that is faster; and of the best plan, other orders of its pipeline (`orders`), compiled.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from math import ceil, log2
from time import process_time

from attrs import define, evolve, field, frozen

from partita.compiler.analysis.memory import peak_memory
from partita.compiler.analysis.time import Prediction, predict, silenced, stage_seconds
from partita.compiler.costs.devices import Device, device_of
from partita.compiler.costs.links import link_of
from partita.compiler.mesh import mesh_of
from partita.compiler.passes.assign import assign, match_storage_dtype
from partita.compiler.passes.build import build
from partita.compiler.pipeline import collector_paused, schedule_run
from partita.compiler.planner.budget import (
    AGAIN,
    BOUND,
    COMPARED,
    ESTIMATE,
    ESTIMATED_TURN,
    FILE,
    OPERATION,
    REFUSED,
    Budget,
    seconds_of,
    seconds_to_compile,
    seconds_to_search,
)
from partita.compiler.planner.estimate import (
    CandidateEstimate,
    Parts,
    cut,
    delayed,
    even,
    live,
    memory,
    parts,
    step_time_lower_bound,
)
from partita.compiler.planner.moves import moves, orders
from partita.compiler.planner.sensitivity import RunnerUp, runner_up
from partita.compiler.planner.space import Candidate, Space
from partita.compiler.planner.stage_costs import MICROBATCHES, Links, Stages, stages_of
from partita.compiler.schedules.generator import SCHEDULES
from partita.compiler.schedules.schedule import Action
from partita.compiler.state import Scheduled
from partita.dsl import spec
from partita.dsl.advice.report import Report
from partita.dsl.check.divisibility import report_misfits
from partita.dsl.config.builtins import DEFAULT_SCHEDULE
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.reprs import count, outline
from partita.dsl.syntax.units import BYTES, written

# The largest budget of the command line, in seconds.
A_DAY = 24 * 60 * 60
# The share of device memory that a program may use, if the file itself uses no more; the rest is for fragmentation.
USABLE = 0.95
# The most plans compiled on one mesh, for variety.
ALIKE = 3
# Plans that are compiled, however few are shown: what is estimated of one may be wrong.
MIN_PLANS = 3
# A series of growing microbatches ends after more than this many doublings in a row gain less than this share.
DOUBLINGS, GAIN = 1, 0.005
# A candidate is skipped if its bound, which is not exact, exceeds the worst of the best by this factor.
MARGIN = 1.03
# Microbatch sizes of the proxies for bounds, which are interpolated.
SIZES = (1, 4)
# Bounds of memory are not exact lower bounds, so they are scaled by this factor.
NEAR = 0.95
# Shares of the budget by which bounds, outlooks on the file's mesh, all outlooks, and those of changes must be done.
BOUNDS, NEARBY, OUTLOOKS, CHANGES = 0.25, 0.32, 0.45, 0.75
# The share of the budget by which a comparison of the best two plans may exceed it.
BEYOND = 0.05
# The share of the budget by which the first plan may exceed it, if the file itself is one.
OVER = 0.2
# What phases do with candidates. Changes are estimated.
PHASES = BOUNDED, ESTIMATED, COMPILED = ("bounded", "estimated", "compiled")
# How often a change that does not fit is tried in a way that needs less memory.
SMALLER = 3
# The seconds to compile a layer of a candidate, in units of a proxy's.
LAYER = 0.25


@frozen(eq=False)
class Plan:
    """A compiled candidate with its prediction; `microbatches` are whole ones, which slices cut further. `given`: it is
    the file itself.
    """

    candidate: Candidate
    file: spec.Spec
    microbatches: int
    prediction: Prediction
    parts: Parts
    memory: tuple[int, ...]
    given: bool = False

    def __repr__(self) -> str:
        step = f"{self.prediction.step_time * 1e3:.3g} ms a step"
        ranks = count(self.file.mesh.ranks, "rank") if self.file.mesh else None
        return outline("Plan of", self.file.source.name, (ranks, f"microbatches {self.microbatches}", step))

    @property
    def peak(self) -> int:
        """The largest memory of a rank."""
        return max(self.memory)


@frozen(eq=False)
class SearchResult:
    """The result of a search. `plans` are ordered by step time; `larger` is the fastest candidate that does not fit, if
    faster than all plans; `own` is the file itself, if it has the given number of devices, and `wrong` why it does not
    compile; `looked` counts the candidates of each of the three phases, and `fitting` those that were estimated to fit.
    `cut_short` are the phases that ended with the budget of `within` seconds, before all that promised something was
    tried. `runner_up` says what would have to be true for the second of the plans to be the best, if there was time to
    find out.
    """

    space: Space
    device: Device
    plans: tuple[Plan, ...]
    larger: tuple[Candidate, CandidateEstimate] | None
    own: Plan | None
    wrong: Diagnostic | None
    looked: tuple[int, int, int]
    fitting: int
    within: float
    cut_short: tuple[str, ...]
    seconds: float
    runner_up: RunnerUp | None = None

    @property
    def own_fits(self) -> bool:
        """Whether the file itself fits into device memory."""
        return self.own is not None and self.own.peak <= self.device.memory


@define(eq=False)
class Search:
    """A search for the `top` best candidates, `within` so many seconds (`partita.compiler.planner.budget`). The file
    itself and one plan are compiled whatever that costs.
    """

    space: Space
    top: int = 10
    within: float = 15.0
    device: Device = field(init=False)
    room: float = field(init=False)
    budget: Budget = field(init=False)
    _references: dict[Candidate, Stages | None] = field(factory=dict, init=False)
    _exact: dict[tuple[Candidate, Links, bool], Stages | None] = field(factory=dict, init=False)
    _outlooks: dict[Candidate, CandidateEstimate] = field(factory=dict, init=False)
    _nearest: dict[str, tuple[float, Candidate]] = field(factory=dict, init=False)
    _proxies: float = field(default=0.0, init=False)  # seconds of the budget
    _made: int = field(default=0, init=False)
    _layers: float = field(default=0.0, init=False)  # of the budget, for all of the file's, if it compiles
    _own: Candidate | None = field(default=None, init=False)  # the file, if it compiles
    _shapes: dict[Candidate, float] = field(factory=dict, init=False)  # of the budget, for the proxies of each
    _trained: int = field(init=False)  # elements
    # Bytes of parameters that are trained, of all others, and of states.
    _masters: int = field(init=False)
    _frozen: int = field(init=False)
    _states: int = field(init=False)
    _until: float = field(default=BOUNDS, init=False)
    _cut: set[str] = field(factory=set, init=False)  # phases that ended with the budget

    def __attrs_post_init__(self) -> None:
        self.device = device_of(self.space.mesh)
        self.room = USABLE * self.device.memory
        self.budget = Budget(self.within)
        model, train = self.space.given.trained
        graph = build(model, train.dtype)
        assignment = assign(graph, train.optimizer)
        updates = assignment.updates
        parameters = match_storage_dtype(graph, updates, assignment.blocks).parameters
        trained = [(each.master, updates[each.name]) for each in parameters if each.name in updates]
        self._trained = sum(type.elements for type, _ in trained)
        self._masters = sum(type.bytes for type, _ in trained)
        self._frozen = sum(each.master.bytes for each in parameters) - self._masters
        self._states = sum(state.bytes for type, op in trained for state in op.state_types(type))
        if train.ema is not None:
            self._states += sum(type.bytes for type, _ in trained)

    @property
    def _wide(self) -> int:
        """How many plans are looked for: what is best does not depend on how many are shown, if these are few."""
        return max(self.top, MIN_PLANS)

    @property
    def cut(self) -> tuple[str, ...]:
        """The phases that have ended with the budget, in order."""
        return tuple(phase for phase in PHASES if phase in self._cut)

    def run(self) -> SearchResult:
        """Search. Raises Refused (E0902) if nothing fits or nothing compiles."""
        with collector_paused():
            return self._run()

    def _run(self) -> SearchResult:
        begin = process_time()
        own, wrong = self._as_it_is()
        self.budget.begin(reserved=self._least_to_compile(self._own) if self._own else 0.0)  # for one plan
        baseline = [own] if own is not None and own.peak <= self.device.memory else []
        self.room = max(self.room, *(each.peak for each in baseline), 0.0)  # as much as the file is trusted with
        bounds = sorted(self._all_bounds(own), key=lambda pair: pair[0])
        fitting = self._outlook(bounds, own)
        fitting = sorted({*fitting, *self._variants(fitting[: self._wide])}, key=self._seconds)
        self._change(fitting)
        plans, compiled = self._plans(baseline)
        larger = [c for c, each in self._outlooks.items() if each.peak > self.room]
        fastest = min(larger, key=self._seconds, default=None)
        if not plans:
            raise self._nothing()
        beyond = None
        if fastest is not None and self._seconds(fastest) < plans[0].prediction.step_time:
            beyond = fastest, self._outlooks[fastest]
        looked = len(bounds), len(self._outlooks), compiled
        fits = sum(each.peak <= self.room for each in self._outlooks.values())
        second = None
        if len(plans) > 1 and not self.budget.exceeded(self._comparing):
            first, other = ((plan.candidate, plan.prediction.step_time) for plan in plans[:2])
            second = runner_up(self.space, self.device, first, other, self.budget)
        seconds = process_time() - begin
        return SearchResult(
            self.space, self.device, plans, beyond, own, wrong, looked, fits, self.within, self.cut, seconds, second
        )

    def _as_it_is(self) -> tuple[Plan | None, Diagnostic | None]:
        """The plan of the file itself, if it has the given number of devices, or why it does not compile."""
        try:
            candidate = self.space.own()
            if candidate is None:
                return None, None
            file, report = self.space.as_it_stands(candidate), Report()
            report_misfits(file, report)
            if report.errors:
                raise Refused(report.diagnostics())
            plan = evolve(predicted(file, candidate, self.budget), given=True)
            self._layers = self.budget.spent - self._without_layers(candidate)
            self._own = evolve(candidate, slices=1, shared=False)
            return plan, None
        except Refused as refused:
            return None, refused.diagnostics[0]

    def _seconds(self, candidate: Candidate) -> float:
        return self._outlooks[candidate].parts.step

    # ------------------------------------------------------------ bounds

    def _all_bounds(self, own: Plan | None) -> list[tuple[float, Candidate]]:
        """Candidates that may fit, with approximate lower bounds of their step time: of all settings of context and
        experts to begin with, and of the shortest longer context if nothing fits.
        """
        bounds: list[tuple[float, Candidate]] = []
        settings = list(self.space.settings())
        for i, setting in enumerate(settings, 1):
            self._until = BOUNDS * i / len(settings)
            bounds += self._bounds(setting, own)
        context = 2
        while not bounds and self.space.positions and self.space.sizes is None and not self.budget.late(BOUNDS):
            for setting in settings:
                longer = evolve(setting, context=context, exchange="zigzag")
                if any(True for _ in self.space.factors(context, setting.expert)):
                    bounds += self._bounds(longer, own)
            if context * 2 > self.space.devices:
                break
            context *= 2
        return bounds

    def _bounds(self, setting: Candidate, own: Plan | None) -> Iterator[tuple[float, Candidate]]:
        """The same of one setting."""
        space = self.space
        own_sizes = {own.candidate.data: (own.candidate.size,)} if own is not None else {}
        offloads = {}
        for each in space.factors(setting.context, setting.expert):
            offload = self._offloads(evolve(setting, data=each[0], pipe=each[1], tensor=each[2], zero=3))
            if offload is not None:
                offloads[each] = offload
        factors = list(offloads)
        near = [space.mesh.size(name) for name in (space.data, space.pipe, space.tensor)]
        factors.sort(key=lambda each: _distance(each, near))
        for data, pipe, tensor in factors:
            sequence = bool(tensor > 1 and space.sequence_by(tensor))
            best, wasted = float("inf"), 0
            alike = data * setting.data_parallel_size
            mesh = evolve(setting, data=data, pipe=pipe, tensor=tensor, sequence=sequence, zero=min(1, alike - 1))
            mesh = evolve(mesh, offload=offloads[data, pipe, tensor])
            if not space.valid(mesh):
                continue
            sizes = [
                size
                for size in sorted({*space.sizes_of(mesh), *own_sizes.get(data, ())})
                if space.valid(evolve(mesh, size=size))
            ]
            # Recomputation costs time, so it is tried only for sizes of which something does not fit without it: of all
            # first, which needs the least memory.
            every = space.blocks[-1:]
            for recompute in ("", *every, *space.blocks[:-1]):
                left: list[int] = []
                for i, size in enumerate(sizes):
                    base = evolve(mesh, size=size, recompute=recompute)
                    stages = self._reference(base)
                    if stages is None:
                        left.append(size)
                        continue
                    orders = space.schedules(pipe, space.microbatches(base))
                    bounds = [self._bound(base, stages, *order) for order in orders]
                    yield from (each for each in bounds if each is not None)
                    if not any(bounds):
                        left += sizes[i:]
                        break
                    if recompute in every or not all(each is not None and each[1].zero == base.zero for each in bounds):
                        left.append(size)
                    if not recompute:
                        each = stages.middle.quiet / size
                        wasted = wasted + 1 if each > best * (1 - GAIN) else 0
                        best = min(best, each)
                        if wasted > DOUBLINGS:
                            break
                sizes = left

    def _offloads(self, smallest: Candidate) -> bool | None:
        """Whether the state of a candidate fits only in the host's memory; None if it does not fit there either."""
        for offload in (False, True) if self.device.gpu else (False,):
            if self._stored(evolve(smallest, offload=offload)) <= self.room:
                return offload
        return None

    def _bound(self, base: Candidate, stages: Stages, schedule: str, chunks: int) -> tuple[float, Candidate] | None:
        """The bound of a candidate with a schedule, at the lowest ZeRO stage with which it may fit."""
        self.budget.spend(BOUND)
        candidate = evolve(base, schedule=schedule, chunks=chunks)
        microbatches = self.space.microbatches(candidate)
        own = even(stages, candidate, self.space.layers)
        activations = max(own.saved * live(candidate, microbatches), own.kept * delayed(candidate, microbatches))
        # At the peak of live activations a backward runs next.
        activations += own.in_whole
        # Other memory of a rank, from the proxy, which stores nothing sharded over data.
        constant = stages.middle.resident_bytes - stages.layer.resident_bytes if candidate.stages > 1 else 0.0
        beside = constant + chunks * (own.resident_bytes - constant) - self._stored(evolve(candidate, data=1))
        for zero in (1, 2, 3) if candidate.data_parallel_size > 1 else (0,):
            candidate = evolve(candidate, zero=zero)
            needed = NEAR * (max(0.0, beside) + self._stored(candidate) + activations)
            if needed <= self.room:
                seconds = step_time_lower_bound(stages, own, candidate, microbatches, self.space.layers)
                seconds *= self.space.replicas_per_rank(candidate)
                sums = self._reduction(candidate)
                if zero > 1:
                    seconds = max(seconds, sums * microbatches)
                hidden = own.weight if SCHEDULES[schedule].split else own.whole  # behind the last microbatch
                return seconds + own.end * chunks / candidate.data_parallel_size + max(0.0, sums - hidden), candidate
            self._too_large(BOUNDED, needed, candidate)
        return None

    def _reference(self, candidate: Candidate) -> Stages | None:
        """The stages of a candidate without data parallelism, interpolated: costs are about linear in the size of a
        microbatch, and what recomputation adds is about proportional to it.
        """
        shape = evolve(candidate, data=1, pipe=2 if self.space.runs == 1 else 1, zero=0)
        if not self.space.free:
            if not self.space.whole:
                return self._known(shape)
            rows = candidate.data * candidate.size * self.space.replicas_per_rank(candidate)
            whole = self._known(evolve(shape, size=max(1, rows // self.space.replicas_per_rank(shape))))
            return whole and whole * (self.space.replicas_per_rank(shape) * candidate.size / rows)
        first, second = SIZES
        one = self._known(evolve(shape, size=first))
        if one is None or candidate.size == first:
            return one
        if candidate.recompute:
            without = self._reference(evolve(candidate, recompute="", size=first))
            large = self._reference(evolve(candidate, recompute=""))
            return large and without and large + (one - without) * (candidate.size / first)
        other = self._known(evolve(shape, size=second))
        return other and one + (other - one) * ((candidate.size - first) / (second - first))

    def _known(self, shape: Candidate) -> Stages | None:
        if shape not in self._references:
            if self.budget.late(self._until) and self._references:
                self._cut.add(BOUNDED)
                return None
            self._references[shape] = self._proxy(shape)
        return self._references[shape]

    def _proxy(self, shape: Candidate, links: Links = (), hoist: bool = True) -> Stages | None:
        """The stages of a candidate; None if it does not compile. What this takes predicts what compilations will."""
        before = self.budget.spent
        try:
            return stages_of(self.space, shape, links, hoist, self.budget)
        except Refused:
            self.budget.spend(REFUSED)
            return None
        finally:
            self._shapes[shape] = self.budget.spent - before
            self._proxies += self._shapes[shape]
            self._made += 1

    def _reduction(self, candidate: Candidate) -> float:
        """An approximate lower bound of the seconds to all-reduce the gradients over data once."""
        data = max(1, candidate.data // self.space.apart(candidate))
        local = self._trained * self.space.part(candidate) / (candidate.pipe * candidate.tensor)
        return 4 * local * (data - 1) / data / link_of(self.space.mesh_of(candidate), self.space.data).bandwidth

    def _stored(self, candidate: Candidate) -> float:
        """A lower bound of the bytes of parameters, gradients and optimizer state on a rank: fully sharded."""
        part = self.space.part(candidate)
        shards = max(1, candidate.data_parallel_size // self.space.apart(candidate))
        state, gradient, frozen = (1 / shards if candidate.zero >= stage else part for stage in (1, 2, 3))
        host = 0.0 if candidate.offload and self.device.gpu else 1.0
        # Masters are stored as states are; those that are cast to compute lie where states do.
        masters = self._masters * (host if self.space.given.trained[1].mixed else 1.0)
        states = (masters + self._states * host) * state * self.space.replicas_per_rank(candidate)
        return (states + 4 * self._trained * gradient + self._frozen * frozen) / self.space.sharing(candidate)

    # ------------------------------------------------------------ outlooks

    def _outlook(self, bounds: list[tuple[float, Candidate]], own: Plan | None) -> list[Candidate]:
        """The candidates that are estimated to fit, fastest first: `top`, and others estimated on the way. The file's
        layout, and others on its mesh, are estimated first, since its author may have had reasons that bounds miss.
        """
        fitting: list[Candidate] = []
        if own is not None:
            fits = own.peak <= self.device.memory
            near = self._settled(evolve(own.candidate, slices=1, shared=False))
            fitting += [near] if near is not None else []
            limit = own.prediction.step_time if fits else float("inf")
            alike = [pair for pair in bounds if pair[1].mesh == own.candidate.mesh and pair[0] < limit]
            self._look_through(alike, fitting, NEARBY)
        self._look_through(bounds, fitting, OUTLOOKS)
        return sorted(fitting, key=self._seconds)

    def _look_through(self, bounds: list[tuple[float, Candidate]], fitting: list[Candidate], share: float) -> None:
        """Add to `fitting` until `share` of the budget is spent. A candidate that does not fit is queued again with a
        higher ZeRO stage, and with more recomputation, which only makes it slower.
        """
        best = nsmallest(self._wide, map(self._seconds, fitting))
        queue = [(seconds, i, candidate) for i, (seconds, candidate) in enumerate(bounds)]
        heapify(queue)
        known = {candidate for _, candidate in bounds}
        while queue:
            seconds, _, candidate = heappop(queue)
            if len(best) >= self._wide and seconds > best[-1] * MARGIN:
                break
            if best and self._pressed(fitting, share):
                break
            if candidate in self._outlooks:
                continue
            outlook = self._look(candidate)
            if outlook is None:
                continue
            if outlook.peak <= self.room:
                fitting.append(candidate)
                best = nsmallest(self._wide, [*best, outlook.parts.step])
                continue
            self._too_large(ESTIMATED, outlook.peak, candidate)
            for smaller in self._smaller(candidate):
                if smaller not in known:
                    known.add(smaller)
                    heappush(queue, (max(seconds, outlook.parts.step), len(known), smaller))

    def _pressed(self, fitting: list[Candidate], share: float = OUTLOOKS) -> bool:
        """Whether estimates end: `share` of the budget is spent, or the rest is needed to compile the best, if that is
        not the file's own layout.
        """
        best = min(fitting, key=self._seconds)
        other = self._own is None or _plain(best) != _plain(self._own)
        pressed = self.budget.late(share) or (other and self._too_late_for(best))
        if pressed and share > NEARBY:  # what is left on the file's mesh is looked at among all others
            self._cut.add(ESTIMATED)
        return pressed

    @property
    def _comparing(self) -> float:
        """About the seconds to compare the best two plans, beyond what that may exceed the budget by."""
        operations = max(0.0, self._proxies / max(1, self._made) - FILE) / OPERATION
        return max(0.0, operations * AGAIN * COMPARED - BEYOND * self.budget.seconds)

    def _too_late_for(self, candidate: Candidate, reserved: float = 0.0) -> bool:
        """Whether compiling a candidate now would exceed the budget, of which so much is `reserved`."""
        return self.budget.exceeded(reserved + self._to_compile(candidate))

    def _to_compile(self, candidate: Candidate) -> float:
        """About the seconds to compile a candidate: as the file's layers take, in proportion to their proxies."""
        layers = self._layers or self._proxies / self._made * LAYER * self.space.layers
        if self._own is not None and (self._own.pipe > 1) == (candidate.pipe > 1):
            theirs, its = (self._shapes.get(_proxy_of(each), 0.0) for each in (self._own, candidate))
            layers *= its / theirs if theirs and its else 1.0
        return layers + self._without_layers(candidate)

    def _least_to_compile(self, own: Candidate) -> float:
        """The same of a layout in the default order and without recomputation, which is compiled sooner."""
        smallest = evolve(_plain(own), recompute="")
        for each in (_plain(own), smallest):
            self._look(each)
        return self._to_compile(smallest)

    def _without_layers(self, candidate: Candidate) -> float:
        """The seconds to compile a candidate, without what its operations take."""
        turns = candidate.stages * self.space.microbatches(candidate) * candidate.slices
        searching = seconds_to_search(turns) if SCHEDULES[candidate.schedule].searched else 0.0
        return seconds_to_compile(0, turns) + searching

    def _smaller(self, candidate: Candidate) -> Iterator[Candidate]:
        """Variants of a candidate that need less memory."""
        if (candidate.zero or candidate.data_parallel_size > 1) and candidate.zero < 3:
            yield evolve(candidate, zero=candidate.zero + 1)
        ways = ("", *self.space.blocks)
        place = ways.index(candidate.recompute) + 1
        if place < len(ways):
            yield evolve(candidate, recompute=ways[place])

    def _look(self, candidate: Candidate) -> CandidateEstimate | None:
        """The estimate of a candidate; None if it does not compile."""
        if candidate in self._outlooks:
            return self._outlooks[candidate]
        shape = _proxy_of(candidate)
        key = shape, mesh_of(self.space.mesh_of(candidate), self.space.pipe).links, self.space.gathers_once(candidate)
        if key not in self._exact:
            self._exact[key] = self._proxy(*key)
        stages = self._exact[key]
        if stages is None:
            return None
        microbatches = self.space.microbatches(candidate)
        self.budget.spend(ESTIMATE + candidate.stages * microbatches * ESTIMATED_TURN)
        own = cut(stages, candidate, self.space.layers)
        whole, part = self._inputs(candidate)
        outlook = CandidateEstimate(
            parts(stages, own, candidate, microbatches, self.device.step, self.space.replicas_per_rank(candidate)),
            tuple(each + whole for each in memory(stages, own, candidate, microbatches, part)),
        )
        self._outlooks[candidate] = outlook
        return outlook

    def _inputs(self, candidate: Candidate) -> tuple[float, float]:
        """Bytes of inputs that the proxy does not have: of the global batch, which ranks on a CPU hold in addition to
        their shard, and of a rank's shard.
        """
        space = self.space
        model, _ = space.given.trained
        microbatches = space.microbatches(candidate)
        left = 1 - min(MICROBATCHES, microbatches) / microbatches if space.free else 0.0
        missing = left * sum(type.bytes for type in model.body.types[: len(model.body.inputs)])
        return 0.0 if self.device.gpu else missing, missing / (candidate.data * candidate.expert * space.beside)

    def _variants(self, best: list[Candidate]) -> Iterator[Candidate]:
        """Variants of the best without sequence parallelism, and without ZeRO, that fit."""
        for each in best:
            for variant in (evolve(each, sequence=False), evolve(each, zero=0)):
                outlook = self._look(variant) if variant != each and not self._pressed(best) else None
                if outlook is not None and outlook.peak <= self.room:
                    yield variant

    def _change(self, fitting: list[Candidate]) -> None:
        """Look at what differs from the best in one thing, and from the first of these that is faster, and so on."""
        best = fitting[0] if fitting else None
        while best is not None:
            now, best = best, None
            for move in moves(self.space, now, self.device):
                if self._pressed(fitting, CHANGES):
                    return
                settled = self._settled(move)
                if settled is not None and self._seconds(settled) < self._seconds(now):
                    best = settled
                    break

    def _settled(self, move: Candidate) -> Candidate | None:
        """The fastest of a mesh and layout over all schedules that fits, in this way or one that needs less memory."""
        frontier = [move]
        for _ in range(SMALLER):
            variants = [
                evolve(each, schedule=schedule, chunks=chunks)
                for each in frontier
                for schedule, chunks in self.space.schedules(each.pipe, self.space.microbatches(each))
            ]
            looked = [(each, outlook) for each in variants if (outlook := self._look(each)) is not None]
            fits = [each for each, outlook in looked if outlook.peak <= self.room]
            if fits:
                return min(fits, key=self._seconds)
            frontier = list(dict.fromkeys(smaller for each in frontier for smaller in self._smaller(each)))
        return None

    # ------------------------------------------------------------ plans

    def _plans(self, baseline: list[Plan]) -> tuple[tuple[Plan, ...], int]:
        """The best candidates that are estimated to fit, compiled, and merged with `baseline`, fastest first; and how
        many were compiled.
        """
        plans: list[Plan] = []
        compiled = 0
        meshes: Counter[tuple[int, ...]] = Counter()
        alike = self._wide if self.space.sizes is not None else ALIKE
        scales: dict[str, float] = {}  # by schedule: how much more memory one took than was estimated
        known = {(*plan.candidate.mesh, plan.prediction.step_time, plan.peak) for plan in baseline}
        fitting = (candidate for candidate, outlook in self._outlooks.items() if outlook.peak <= self.room)
        queue = deque(sorted(fitting, key=self._seconds))
        while queue:
            candidate = queue.popleft()
            if len(plans) >= self._wide:
                break
            if meshes[candidate.mesh] >= alike:
                continue
            outlook = self._outlooks.get(candidate)
            if outlook is not None and outlook.peak * scales.get(candidate.schedule, 1.0) > self.room:
                continue
            comparing = self._comparing if len(plans) + len(baseline) > 1 else 0.0
            if (plans or baseline) and self._too_late_for(candidate, comparing):
                # While there is no plan, what promises to be faster than the file may exceed the budget a little.
                slower = outlook is None or any(outlook.parts.step >= each.prediction.step_time for each in baseline)
                if plans or slower or self._too_late_for(candidate, -OVER * self.budget.seconds):
                    self._cut.add(COMPILED)
                    continue
            plan = planned(self.space, candidate, self.budget)
            if plan is None:
                continue
            compiled += 1
            if plan.peak > self.room:
                self._too_large(COMPILED, plan.peak, candidate)
                if outlook is not None:
                    scales[candidate.schedule] = plan.peak / outlook.peak
                continue
            # With few microbatches some schedules coincide.
            same = *candidate.mesh, plan.prediction.step_time, plan.peak
            if same not in known:
                known.add(same)
                plans.append(plan)
                meshes[candidate.mesh] += 1
                if len(plans) == 1:
                    first = min([*baseline, plan], key=lambda each: each.prediction.step_time)
                    queue.extendleft(orders(self.space, first.candidate, first.prediction.timeline))
        # The sort is stable: on a tie the file itself comes first.
        best = sorted([*baseline, *plans], key=lambda plan: plan.prediction.step_time)
        return tuple(best[: self.top]), compiled

    def _too_large(self, look: str, needed: float, candidate: Candidate) -> None:
        """Record that a candidate does not fit, by one of the phases of the search."""
        if needed < self._nearest.get(look, (float("inf"), candidate))[0]:
            self._nearest[look] = needed, candidate

    def _nothing(self) -> Refused:
        """Why there is no plan: by the last phase that found a candidate too large."""
        device = self.device
        help = "more devices, devices with more memory, a smaller batch or a shorter sequence"
        if self._cut:
            help = f"{help}; or `--within {more(self.within)}`, since the budget has ended the search"
        look = next((each for each in reversed(PHASES) if each in self._nearest), None)
        if look is not None:
            needed, candidate = self._nearest[look]
            amount = f"{'about ' * (look == BOUNDED)}{written(needed, BYTES)}"
            note = f"the smallest found needs {amount} per rank: {described(self.space, candidate)}"
        elif not self._references and (factors := [*self.space.factors()]):  # without any, only contexts use all
            host = self.device.gpu
            fewest = min(self._stored(Candidate(*each, 1, zero=3, offload=host)) for each in factors)
            note = f"parameters, gradients and the optimizer's state alone need {written(fewest, BYTES)} on a rank"
            note += ", with what may lie in the host's memory there" if host else ""
        else:
            return refuse("E0902", "no layout of this model compiles", help="`partita compile` says why")
        return refuse(
            "E0902",
            f"no plan fits into {USABLE:.0%} of the {written(device.memory, BYTES)} of {device.name}",
            notes=[note],
            help=help,
        )


def more(seconds: float) -> int:
    """A larger budget than one that has ended a search."""
    return ceil(min(4 * seconds, A_DAY))


def _plain(candidate: Candidate) -> Candidate:
    """A candidate in the default order."""
    return evolve(candidate, schedule=DEFAULT_SCHEDULE, chunks=1)


def _proxy_of(candidate: Candidate) -> Candidate:
    """What the proxy of a candidate is one of: costs of stages depend neither on their order nor on their number."""
    return evolve(_plain(candidate), pipe=min(candidate.pipe, 2))


def planned(space: Space, candidate: Candidate, budget: Budget | None = None) -> Plan | None:
    """The plan of a candidate; None if it does not compile."""
    try:
        return predicted(space.file(candidate), candidate, budget)
    except Refused:
        if budget is not None:
            budget.spend(REFUSED)
        return None


def predicted(file: spec.Spec, candidate: Candidate, budget: Budget | None = None) -> Plan:
    """Compiles a candidate's file and predicts its step; what it takes is spent from a budget. Raises Refused if it
    does not compile.
    """
    state = schedule_run(file)
    if budget is not None:
        budget.spend(seconds_of(state))
    prediction = predict(state, exposed=False)
    peaks = tuple(peak_memory(state, rank) for rank in state.plan.ranks)
    return Plan(candidate, file, state.batch_parts, prediction, _parts(state, prediction), peaks)


def _parts(state: Scheduled, prediction: Prediction) -> Parts:
    """Where the seconds of a predicted step go."""
    timeline = prediction.timeline
    busiest = max(timeline.busy)
    rank = timeline.busy.index(busiest)
    quiet = stage_seconds(silenced(state))
    stages = state.plan.ranks[rank].stages
    actions = (each.work for each in timeline.actions[rank] if isinstance(each.work, Action))
    compute = min(busiest, sum(quiet[stages[action.chunk], action.kind] for action in actions))
    end = prediction.replicas_per_rank * max(prediction.ends) + prediction.average + prediction.fixed
    compute, busiest = prediction.replicas_per_rank * compute, prediction.replicas_per_rank * busiest
    return Parts(compute, busiest - compute, prediction.step_time - busiest - end, end)


def _distance(sizes: Sequence[int], others: Sequence[int]) -> float:
    """How different the sizes of two meshes are: the factors between them, as logarithms."""
    return sum(log2(size / other) ** 2 for size, other in zip(sizes, others, strict=True))


def described(space: Space, candidate: Candidate) -> str:
    """A candidate in words: `data 2 × pipe 4 × tensor 8, ZeRO-1, zb_v, 16 microbatches of 1, recompute all`."""
    names = space.data, space.pipe, space.tensor, space.context, space.expert
    sizes = zip(names, candidate.mesh, strict=True)
    words = [" × ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"]
    words += details(candidate)
    words += ["sequence parallel"] if candidate.sequence else []
    words += [candidate.schedule] if candidate.pipe > 1 else []
    words += [f"{candidate.chunks} chunks"] if candidate.chunks > 1 else []
    words.append(f"{space.microbatches(candidate)} × {candidate.size} rows")
    words += [f"recompute {candidate.recompute}"] if candidate.recompute else []
    return ", ".join(words)


def details(candidate: Candidate) -> list[str]:
    """What a candidate's layout has besides sharded batch, sequence and parameters, in words."""
    words = [f"ZeRO-{candidate.zero}"] if candidate.zero and candidate.data_parallel_size > 1 else []
    words += [candidate.exchange or "contiguous"] if candidate.context > 1 else []
    words += ["experts apart"] if candidate.routed else []
    words += ["shared vocabulary"] if candidate.shared else []
    words += ["state on host"] if candidate.offload else []
    words += [f"{candidate.slices} slices"] if candidate.slices > 1 else []
    words += [f"{candidate.pieces} pieces"] if candidate.pieces > 1 else []
    words += ["validated after"] if candidate.late else []
    return words
