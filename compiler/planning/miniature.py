"""The figures of a candidate's stages, from a copy of the file with a few turns of its repeats and all its sizes.

Stages are alike but for the first and the last, and what a stage takes grows by the same with each turn that it holds.
So a pipeline of four stages with 1, 1, 2 and 1 turns has all there is to know of one with any number of stages; of
none, the model in one piece with 1 turn and with 2. Both compile in a tenth of a second, however large the model is.
"""

from __future__ import annotations

from attrs import evolve, fields, frozen

from partita.compiler.analysis.memory import at_end, beside
from partita.compiler.analysis.time import costs_of, end_seconds, silenced, stage_seconds
from partita.compiler.costs.links import Link
from partita.compiler.instructions import BACK, ONWARD
from partita.compiler.pipeline import schedule_spec
from partita.compiler.planning.space import Candidate, Space

# Microbatches of a copy, if there are so many.
MICROBATCHES = 4
COUNTS = (1, 1, 2, 1)


@frozen
class Figures:
    """What a stage takes: seconds of its actions and what of them is not communication along the mesh (`quiet`, of F
    and BW); the end of a step; seconds of its messages to the next stage and to the one before; bytes that a
    microbatch keeps from F and from B, those of reduced gradients at the end, what each kind of
    action works with (`in_…`), and all others (`beside`).
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    whole: float = 0.0
    quiet: float = 0.0
    end: float = 0.0
    onward: float = 0.0
    back: float = 0.0
    saved: float = 0.0
    kept: float = 0.0
    beside: float = 0.0
    reduced: float = 0.0
    in_forward: float = 0.0
    in_backward: float = 0.0
    in_weight: float = 0.0
    in_whole: float = 0.0

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def __sub__(self, other: Figures) -> Figures:
        return self + other * -1

    def __mul__(self, times: float) -> Figures:
        return Figures(*(getattr(self, name) * times for name in _NAMES))


_NAMES = tuple(each.name for each in fields(Figures))


@frozen
class Stages:
    """Stages of one turn: the `first`, one in the `middle` and the `last`; and what each further `turn` adds. Without a
    pipeline all three are the one stage.
    """

    first: Figures
    middle: Figures
    last: Figures
    turn: Figures

    def stage(self, index: int, stages: int, turns: int) -> Figures:
        """A stage of so many turns."""
        base = self.first if index == 0 else self.last if index == stages - 1 else self.middle
        return base + self.turn * (turns - 1)

    def __add__(self, other: Stages) -> Stages:
        return Stages(
            self.first + other.first, self.middle + other.middle, self.last + other.last, self.turn + other.turn
        )

    def __sub__(self, other: Stages) -> Stages:
        return self + other * -1

    def __mul__(self, times: float) -> Stages:
        return Stages(self.first * times, self.middle * times, self.last * times, self.turn * times)


Links = tuple[tuple[str, Link], ...]


def stages_of(space: Space, candidate: Candidate, links: Links = ()) -> Stages:
    """The figures of a candidate's stages. Its schedule does not matter, nor its number of stages beyond one, but for
    the `links` of its mesh.

    Raises Refused where the candidate does not compile.
    """
    microbatches = min(MICROBATCHES, space.microbatches(candidate))
    if candidate.pipe == 1:
        (one,) = _measured(space, candidate, links, microbatches, 1, ())
        if space.turns < 2:
            return Stages(one, one, one, Figures())
        (two,) = _measured(space, candidate, links, microbatches, 2, ())
        turn = (two - one) * (1 / space.runs)
        one -= turn * (space.runs - 1)
        return Stages(one, one, one, turn)
    if space.runs == 1:
        small = evolve(candidate, pipe=len(COUNTS))
        first, middle, two, last = _measured(space, small, links, microbatches, sum(COUNTS), COUNTS)
        return Stages(first, middle, last, two - middle)
    # Several repeats, or one that runs several times: a turn is the mean of theirs, and what stands outside of them
    # counts for the last stage.
    alone = stages_of(space, evolve(candidate, pipe=1), links)
    return Stages(alone.turn, alone.turn, alone.last, alone.turn)


def _measured(
    space: Space, candidate: Candidate, links: Links, microbatches: int, turns: int, counts: tuple[int, ...]
) -> list[Figures]:
    state = schedule_spec(space.resized(candidate, microbatches, turns, counts))
    # What a link of machines with common ports gives depends on the whole mesh.
    known = dict(links)
    there = tuple((name, known.get(name, link)) for name, link in state.mesh.links)
    state = evolve(state, mesh=evolve(state.mesh, links=there))
    costs = costs_of(state)
    quiet = stage_seconds(silenced(state))
    found = []
    for rank, stage in zip(state.plan.ranks, state.plan.stages, strict=True):
        i = stage.index
        sent = {ONWARD: 0.0, BACK: 0.0}
        posts = {ONWARD: 0, BACK: 0}
        for message in state.partitioned.messages:
            if message.source == i and message.direction in sent:
                sent[message.direction] += costs.transfer(message)
            if i in (message.source, message.destination) and message.direction in posts:
                posts[message.direction] += 1
        onward, back = (posts[each] * costs.post for each in (ONWARD, BACK))
        found.append(
            Figures(
                costs.action(i, "F") + onward,
                costs.action(i, "B") + back,
                costs.action(i, "W"),
                costs.action(i, "BW") + back,
                quiet[i, "F"] + quiet[i, "BW"] + onward + back,
                end_seconds(state, rank),
                sent[ONWARD],
                sent[BACK],
                stage.saved,
                stage.kept,
                beside(state, rank),
                at_end(state, rank),
                *(stage.peaks.get(kind, 0) for kind in ("F", "B", "W", "BW")),
            )
        )
    return found
