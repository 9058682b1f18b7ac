"""The search for the fastest candidates that fit into the memory of the device.

The file as it is, where it has so many devices, is the first of them: compiled before anything else, so that nothing
slower is ever proposed. At the others there are three looks, each dearer than the one before and taken by fewer
candidates, the most promising first:

    bounds       every candidate, from miniatures without data parallelism: about the least that its step takes, and the
                 least memory that its parameters and activations need
    outlooks     miniatures with the candidate's own mesh and layout, and its schedule's timeline (`estimate`), until no
                 bound is left that could be among the best; first of what has the file's mesh
    plans        the candidates themselves, compiled: what they are predicted to take, as `partita compile` says it

A stage of ZeRO above the first is asked for where the one before does not fit; sequence parallelism is assumed, and
tried without for the best. What does not compile is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, nsmallest
from time import process_time

from attrs import define, evolve, field, frozen

from partita.compiler.analysis.memory import peak_memory
from partita.compiler.analysis.time import Prediction, predict, silenced, stage_seconds
from partita.compiler.costs.devices import Device, device_of
from partita.compiler.costs.links import link_of
from partita.compiler.mesh import mesh_of
from partita.compiler.optimizers.registry import update_of
from partita.compiler.pipeline import schedule_spec
from partita.compiler.planning.estimate import Outlook, Parts, cut, delayed, even, least, live, memory, parts
from partita.compiler.planning.miniature import MICROBATCHES, Links, Stages, stages_of
from partita.compiler.planning.space import Candidate, Space
from partita.compiler.schedules.generator import SCHEDULES
from partita.compiler.schedules.schedule import Action
from partita.compiler.state import Scheduled
from partita.dsl import spec
from partita.dsl.brief import count, outline
from partita.dsl.builtins import DEFAULT_SCHEDULE
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.fits import report_misfits
from partita.dsl.report import Report
from partita.dsl.units import BYTES, written

# What of a device's memory a program may take: kernels have workspaces, and allocators gaps.
USABLE = 0.95
# Plans that are alike but for the schedule, say, leave room for others.
ALIKE = 3
# Doublings of a microbatch that make it no faster by this share end a series.
DOUBLINGS, GAIN = 1, 0.005
# What is this much worse than the last of the best, by its bound, is not looked at; a bound is not exact.
MARGIN = 1.03
# Sizes of a microbatch of which bounds are made.
SIZES = (1, 4)
# The memory that bounds say is not quite the least: what is this share of it may fit.
NEAR = 0.95
# The shares of the time in which bounds are had, outlooks on the file's own mesh, and all outlooks, at most.
BOUNDS, NEARBY, OUTLOOKS = 0.4, 0.5, 0.6
# What compiling a candidate takes: in miniatures for each turn, and for each microbatch of each stage.
TURN, ACTION = 0.15, 6e-4


@frozen(eq=False)
class Plan:
    """A candidate that has been compiled, as it is predicted. `given` says that it is the file as it is."""

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
        """The most that a rank needs."""
        return max(self.memory)


@frozen(eq=False)
class Found:
    """What a search has found: plans, the fastest first; the fastest candidate that does not fit, with what is expected
    of it; the file as it is, where it has so many devices, or why it does not compile; and how many candidates were
    looked at by each of the three looks.
    """

    space: Space
    device: Device
    plans: tuple[Plan, ...]
    larger: tuple[Candidate, Outlook] | None
    own: Plan | None
    wrong: Diagnostic | None
    looked: tuple[int, int, int]
    seconds: float

    @property
    def own_fits(self) -> bool:
        """Whether the device holds the file as it is."""
        return self.own is not None and self.own.peak <= self.device.memory


@define(eq=False)
class Search:
    """A search of at most about `within` seconds for the `top` best candidates; the file as it is, before that, and the
    best are compiled however long that takes.
    """

    space: Space
    top: int = 10
    within: float = 15.0
    device: Device = field(init=False)
    room: float = field(init=False)
    _start: float = field(factory=process_time, init=False)
    _references: dict[Candidate, Stages | None] = field(factory=dict, init=False)
    _exact: dict[tuple[Candidate, Links], Stages | None] = field(factory=dict, init=False)
    _outlooks: dict[Candidate, Outlook] = field(factory=dict, init=False)
    _nearest: dict[str, tuple[float, Candidate]] = field(factory=dict, init=False)
    _took: float = field(default=0.0, init=False)
    _made: int = field(default=0, init=False)
    _parameters: float = field(init=False)
    _states: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.device = device_of(self.space.mesh)
        self.room = USABLE * self.device.memory
        model, train = self.space.given.trained
        self._parameters = elements(model.body)
        self._states = len(update_of(train.optimizer, decays=True).states)

    def run(self) -> Found:
        """Search. Raises Refused (E0902) where nothing fits, or nothing compiles."""
        begin = process_time()
        own, wrong = self._as_it_is()
        kept = [own] if own is not None and own.peak <= self.device.memory else []
        self._start = process_time()
        bounds = sorted(self._bounds(own), key=lambda pair: pair[0])
        fitting = self._outlook(bounds, own)
        fitting = sorted({*fitting, *self._variants(fitting[: self.top])}, key=self._seconds)
        plans, compiled = self._plans(fitting, kept)
        larger = [c for c, each in self._outlooks.items() if each.peak > self.room]
        first = min(larger, key=self._seconds, default=None)
        if not plans:
            raise self._nothing()
        beyond = None
        if first is not None and self._seconds(first) < plans[0].prediction.step_time:
            beyond = first, self._outlooks[first]
        looked = len(bounds), len(self._outlooks), compiled
        return Found(self.space, self.device, plans, beyond, own, wrong, looked, process_time() - begin)

    def _as_it_is(self) -> tuple[Plan | None, Diagnostic | None]:
        """The file as it is, where it has so many devices; or what is wrong with it."""
        try:
            candidate = self.space.own()
            if candidate is None:
                return None, None
            file, report = self.space.as_it_stands(candidate), Report()
            report_misfits(file, report)
            if report.errors:
                raise Refused(report.diagnostics())
            return evolve(predicted(file, candidate), given=True), None
        except Refused as refused:
            return None, refused.diagnostics[0]

    def _late(self, share: float) -> bool:
        return process_time() - self._start > share * self.within

    def _seconds(self, candidate: Candidate) -> float:
        return self._outlooks[candidate].parts.step

    # ------------------------------------------------------------ bounds

    def _bounds(self, own: Plan | None) -> Iterator[tuple[float, Candidate]]:
        """Candidates that may fit, with about the least that their step takes."""
        space = self.space
        given = {own.candidate.data: own.candidate.size} if own is not None else {}
        factors = [each for each in space.factors() if self._stored(Candidate(*each, 1, zero=3)) <= self.room]
        for data, pipe, tensor in factors:
            sequence = bool(tensor > 1 and space.sequence_by(tensor))
            best, wasted = float("inf"), 0
            for size in sorted({*space.sizes_of(data), given.get(data, 1)}):
                base, fits = Candidate(data, pipe, tensor, size, sequence, min(1, data - 1)), False
                for recompute in ("", *space.blocks):
                    base = evolve(base, recompute=recompute)
                    stages = self._reference(base)
                    if stages is None:
                        continue
                    if not recompute:
                        each = stages.middle.quiet / size
                        wasted = wasted + 1 if each > best * (1 - GAIN) else 0
                        best = min(best, each)
                    found = [
                        self._bound(base, stages, *order) for order in space.schedules(pipe, space.microbatches(base))
                    ]
                    yield from (each for each in found if each is not None)
                    fits = fits or any(each is not None for each in found)
                    # Recomputing costs time: it is asked for where something does not fit without.
                    if all(each is not None and each[1].zero == base.zero for each in found):
                        break
                if wasted > DOUBLINGS or not fits:
                    break

    def _bound(self, base: Candidate, stages: Stages, schedule: str, chunks: int) -> tuple[float, Candidate] | None:
        """A candidate with a schedule, with its bound and the least stage of ZeRO with which it may fit."""
        candidate = evolve(base, schedule=schedule, chunks=chunks)
        microbatches = self.space.microbatches(candidate)
        own = even(stages, candidate, self.space.turns)
        activations = max(own.saved * live(candidate, microbatches), own.kept * delayed(candidate, microbatches))
        # When most are live, a backward follows.
        activations += own.in_backward if SCHEDULES[schedule].split else own.in_whole
        # What else a rank holds, from the miniature, where nothing was stored in parts.
        constant = stages.middle.beside - stages.turn.beside if candidate.stages > 1 else 0.0
        beside = constant + chunks * (own.beside - constant) - self._stored(evolve(candidate, data=1))
        for zero in (1, 2, 3) if candidate.data > 1 else (0,):
            candidate = evolve(candidate, zero=zero)
            needed = NEAR * (max(0.0, beside) + self._stored(candidate) + activations)
            if needed <= self.room:
                seconds = least(stages, own, candidate, microbatches, self.space.turns)
                sums = self._reduction(candidate)
                if zero > 1:
                    seconds = max(seconds, sums * microbatches)
                return seconds + own.end * chunks / candidate.data + sums, candidate
            self._too_large("bounded", needed, candidate)
        return None

    def _reference(self, candidate: Candidate) -> Stages | None:
        """The stages of a candidate without data parallelism, in a pipeline where it has turns to cut. As a microbatch
        grows, they move about on a line; and what recomputation adds grows with it.
        """
        shape = evolve(candidate, data=1, pipe=2 if self.space.runs == 1 else 1, zero=0)
        if not self.space.free:
            return self._known(shape)
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
            if self._late(BOUNDS) and self._references:
                return None
            self._references[shape] = self._miniature(shape)
        return self._references[shape]

    def _miniature(self, shape: Candidate, links: Links = ()) -> Stages | None:
        """The stages of a candidate, None where it does not compile. What that takes says what other things take."""
        start = process_time()
        try:
            return stages_of(self.space, shape, links)
        except Refused:
            return None
        finally:
            self._took += process_time() - start
            self._made += 1

    def _reduction(self, candidate: Candidate) -> float:
        """About the least that gradients take to be summed over data once."""
        data = candidate.data
        local = self._parameters / (candidate.pipe * candidate.tensor)
        return 4 * local * (data - 1) / data / link_of(self.space.mesh_of(candidate), self.space.data).bandwidth

    def _stored(self, candidate: Candidate) -> float:
        """The least that a rank stores of parameters, gradients and the optimizer's state: all as split as can be."""
        local = 4 * self._parameters / (candidate.pipe * candidate.tensor)
        for _, size in self.space.others:
            local /= size
        data = candidate.data
        parameter, gradient, state = (data if candidate.zero >= stage else 1 for stage in (3, 2, 1))
        return local * (1 / parameter + 1 / gradient + self._states / state)

    # ------------------------------------------------------------ outlooks

    def _outlook(self, bounds: list[tuple[float, Candidate]], own: Plan | None) -> list[Candidate]:
        """The candidates that are expected to fit, the fastest first: as many as are asked for, and as are known on the
        way. Those on the file's own mesh come first: whoever wrote it had reasons, which bounds do not know.
        """
        found: list[Candidate] = []
        if own is not None:
            most = own.prediction.step_time
            near = [pair for pair in bounds if pair[1].mesh == own.candidate.mesh and pair[0] < most]
            self._look_through(near, found, NEARBY)
        self._look_through(bounds, found, OUTLOOKS)
        return sorted(found, key=self._seconds)

    def _look_through(self, bounds: list[tuple[float, Candidate]], found: list[Candidate], share: float) -> None:
        """Add to what was found, until so much of the time is over. What does not fit is put back with more of ZeRO,
        and with more recomputed: that takes longer still.
        """
        best = nsmallest(self.top, map(self._seconds, found))
        queue = [(seconds, i, candidate) for i, (seconds, candidate) in enumerate(bounds)]
        heapify(queue)
        known = {candidate for _, candidate in bounds}
        while queue:
            seconds, _, candidate = heappop(queue)
            if best and (self._pressed(found, share) or (len(best) >= self.top and seconds > best[-1] * MARGIN)):
                break
            if candidate in self._outlooks:
                continue
            outlook = self._look(candidate)
            if outlook is None:
                continue
            if outlook.peak <= self.room:
                found.append(candidate)
                best = nsmallest(self.top, [*best, outlook.parts.step])
                continue
            self._too_large("estimated", outlook.peak, candidate)
            for smaller in self._smaller(candidate):
                if smaller not in known:
                    known.add(smaller)
                    heappush(queue, (max(seconds, outlook.parts.step), len(known), smaller))

    def _pressed(self, found: list[Candidate], share: float = OUTLOOKS) -> bool:
        """Whether so much of the time is over, or what is left is wanted for compiling the best."""
        best = min(found, key=self._seconds)
        return self._late(share) or self._too_late_for(best)

    def _too_late_for(self, candidate: Candidate) -> bool:
        """Whether a candidate that is compiled now would be so too late."""
        actions = candidate.stages * self.space.microbatches(candidate)
        wanted = self._took / self._made * (TURN * self.space.turns + ACTION * actions)
        return process_time() - self._start + wanted > self.within

    def _smaller(self, candidate: Candidate) -> Iterator[Candidate]:
        """Candidates that need less memory."""
        if 0 < candidate.zero < 3:
            yield evolve(candidate, zero=candidate.zero + 1)
        ways = ("", *self.space.blocks)
        place = ways.index(candidate.recompute) + 1
        if place < len(ways):
            yield evolve(candidate, recompute=ways[place])

    def _look(self, candidate: Candidate) -> Outlook | None:
        """What is expected of a candidate; None where it does not compile."""
        if candidate in self._outlooks:
            return self._outlooks[candidate]
        shape = evolve(candidate, schedule=DEFAULT_SCHEDULE, chunks=1, pipe=min(candidate.pipe, 2))
        links = mesh_of(self.space.mesh_of(candidate), self.space.pipe).links
        if (shape, links) not in self._exact:
            self._exact[shape, links] = self._miniature(shape, links)
        stages = self._exact[shape, links]
        if stages is None:
            return None
        microbatches = self.space.microbatches(candidate)
        own = cut(stages, candidate, self.space.turns)
        whole, part = self._inputs(candidate)
        found = Outlook(
            parts(stages, own, candidate, microbatches, self.device.step),
            tuple(each + whole for each in memory(stages, own, candidate, microbatches, part)),
        )
        self._outlooks[candidate] = found
        return found

    def _inputs(self, candidate: Candidate) -> tuple[float, float]:
        """Bytes of inputs that its miniature does not have: of the whole, which ranks of a processor hold beside their
        part, and of a rank's part.
        """
        space = self.space
        model, _ = space.given.trained
        microbatches = space.microbatches(candidate)
        left = 1 - min(MICROBATCHES, microbatches) / microbatches if space.free else 0.0
        missing = left * sum(type.bytes for type in model.body.types[: len(model.body.inputs)])
        return 0.0 if self.device.gpu else missing, missing / (candidate.data * space.beside)

    def _variants(self, best: list[Candidate]) -> Iterator[Candidate]:
        """The best once more without sequence parallelism, and without ZeRO."""
        for each in best:
            for variant in (evolve(each, sequence=False), evolve(each, zero=0)):
                outlook = self._look(variant) if variant != each and not self._pressed(best) else None
                if outlook is not None and outlook.peak <= self.room:
                    yield variant

    # ------------------------------------------------------------ plans

    def _plans(self, fitting: list[Candidate], kept: list[Plan]) -> tuple[tuple[Plan, ...], int]:
        """The best, compiled: the fastest first, of these and of what is `kept`; and how many were compiled."""
        plans: list[Plan] = []
        compiled = 0
        meshes: Counter[tuple[int, int, int]] = Counter()
        alike = self.top if self.space.sizes is not None else ALIKE
        known = {(*plan.candidate.mesh, plan.prediction.step_time, plan.peak) for plan in kept}
        for candidate in fitting:
            if len(plans) >= self.top or ((plans or kept) and self._too_late_for(candidate)):
                break
            plan = planned(self.space, candidate) if meshes[candidate.mesh] < alike else None
            if plan is None:
                continue
            compiled += 1
            if plan.peak > self.room:
                self._too_large("compiled", plan.peak, candidate)
                continue
            # With few microbatches some schedules are one.
            same = *candidate.mesh, plan.prediction.step_time, plan.peak
            if same not in known:
                known.add(same)
                plans.append(plan)
                meshes[candidate.mesh] += 1
        # Of what is as fast as the file, the file comes first.
        best = sorted([*kept, *plans], key=lambda plan: plan.prediction.step_time)
        return tuple(best[: self.top]), compiled

    def _too_large(self, look: str, needed: float, candidate: Candidate) -> None:
        """A candidate does not fit, by one of the looks."""
        if needed < self._nearest.get(look, (float("inf"), candidate))[0]:
            self._nearest[look] = needed, candidate

    def _nothing(self) -> Refused:
        """Why there is no plan: what the last look says that found something too large."""
        device = self.device
        look = next((each for each in ("compiled", "estimated", "bounded") if each in self._nearest), None)
        if look is not None:
            needed, candidate = self._nearest[look]
            least = f"{'about ' * (look == 'bounded')}{written(needed, BYTES)}"
            note = f"the smallest found needs {least} per rank: {described(self.space, candidate)}"
        elif not self._references:
            factors = [Candidate(*each, 1, zero=3) for each in self.space.factors()]
            needed = min(map(self._stored, factors))
            note = f"parameters, gradients and the optimizer's state alone need {written(needed, BYTES)} on a rank"
        else:
            return refuse("E0902", "no layout of this model compiles", help="`partita compile` says why")
        return refuse(
            "E0902",
            f"no plan fits into {USABLE:.0%} of the {written(device.memory, BYTES)} of {device.name}",
            notes=[note],
            help="more devices, devices with more memory, a smaller batch or a shorter sequence",
        )


def planned(space: Space, candidate: Candidate) -> Plan | None:
    """A candidate compiled and predicted; None where it does not compile."""
    try:
        return predicted(space.file(candidate), candidate)
    except Refused:
        return None


def predicted(file: spec.Spec, candidate: Candidate) -> Plan:
    """A file that is a candidate's, compiled and predicted. Raises Refused."""
    state = schedule_spec(file)
    prediction = predict(state, exposed=False)
    peaks = tuple(peak_memory(state, rank) for rank in state.plan.ranks)
    return Plan(candidate, file, state.microbatches, prediction, _parts(state, prediction), peaks)


def _parts(state: Scheduled, prediction: Prediction) -> Parts:
    """Where the seconds of a predicted step go."""
    timeline = prediction.timeline
    most = max(timeline.busy)
    rank = timeline.busy.index(most)
    quiet = stage_seconds(silenced(state))
    stages = state.plan.ranks[rank].stages
    actions = (each.work for each in timeline.actions[rank] if isinstance(each.work, Action))
    compute = min(most, sum(quiet[stages[action.chunk], action.kind] for action in actions))
    return Parts(compute, most - compute, timeline.makespan - most, max(prediction.ends) + prediction.fixed)


def elements(body: spec.Body) -> float:
    """The elements of all parameters of a body, of all calls and turns."""
    found = 0.0
    for step in body.steps:
        if isinstance(step, spec.Parameter):
            found += step.type.elements
        elif isinstance(step, spec.CallBlock):
            found += elements(step.body)
        elif isinstance(step, spec.Repeat):
            found += step.count * elements(step.body)
    return found


def described(space: Space, candidate: Candidate) -> str:
    """A candidate in words: `data 2 × pipe 4 × tensor 8, ZeRO-1, zb_v, 16 microbatches of 1, recompute all`."""
    sizes = ((space.data, candidate.data), (space.pipe, candidate.pipe), (space.tensor, candidate.tensor))
    words = [" × ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"]
    words += [f"ZeRO-{candidate.zero}"] if candidate.zero and candidate.data > 1 else []
    words += ["sequence parallel"] if candidate.sequence else []
    words += [candidate.schedule] if candidate.pipe > 1 else []
    words += [f"{candidate.chunks} chunks"] if candidate.chunks > 1 else []
    words.append(f"{space.microbatches(candidate)} × {candidate.size} rows")
    words += [f"recompute {candidate.recompute}"] if candidate.recompute else []
    return ", ".join(words)
