"""What a search may spend: seconds, but counted, not measured.

The time that a compilation takes is about proportional to the operations that it makes and to the actions of its
schedule, so these are counted. A search with the same budget then finds the same plans on every machine, however busy.
The rates are those of a core of Intel's Sapphire Rapids that is shared with other work; one of AMD's Milan, shared
likewise, takes up to twice as long.
"""

from __future__ import annotations

from attrs import define

from partita.compiler.schedules.auto import STEPS, VISITS
from partita.compiler.state import Scheduled

# Seconds for a program, for an operation in it: passes, costs and memory; for one of a stage that is like another; and
# for a microbatch of a stage.
FILE, OPERATION, ALIKE, TURN = 0.03, 2.85e-4, 1.95e-4, 7e-5
# For an order that is searched for, for each action that the search visits.
VISIT = 4e-7
# For a file that does not compile.
REFUSED = 0.05
# For a program whose costs are taken again, for an operation in it; and how often that is, to compare two plans.
AGAIN, COMPARED = 4.5e-5, 50
# For a bound; and for an estimate, and each microbatch of a stage in it.
BOUND, ESTIMATE, ESTIMATED_TURN = 6e-5, 2.85e-4, 1.2e-6


@define
class Budget:
    """So many `seconds`, of which some are `spent`. Phases of a search have shares of them: of what is left where it
    has `begun`, without what is `reserved` for after the phases.
    """

    seconds: float
    spent: float = 0.0
    begun: float = 0.0
    reserved: float = 0.0

    def begin(self, reserved: float) -> None:
        """The phases begin."""
        self.begun, self.reserved = self.spent, reserved

    def late(self, share: float) -> bool:
        """Whether the share of the phases is spent."""
        return self.spent > self.begun + share * max(0.0, self.seconds - self.reserved - self.begun)

    def exceeded(self, needed: float) -> bool:
        """Whether all would be spent with the seconds that are `needed`."""
        return self.spent + needed > self.seconds

    def spend(self, seconds: float) -> None:
        """Count seconds."""
        self.spent += seconds


def seconds_to_compile(operations: float, turns: int, alike: float = 0.0) -> float:
    """The seconds to compile a program of so many operations, some of stages that are `alike`, with so many turns:
    microbatches of its stages.
    """
    return FILE + (operations - alike) * OPERATION + alike * ALIKE + turns * TURN


def seconds_to_search(turns: int) -> float:
    """The seconds to search for the order of so many turns, of three actions each (`auto`)."""
    return min(STEPS, VISITS * 3 * turns) * VISIT


def seconds_of(state: Scheduled) -> float:
    """The seconds that a compilation has taken, with that of the run's evaluation."""
    stages = state.partitioned.stages
    turns = len(stages) * state.microbatches
    searched = seconds_to_search(turns) if state.schedule.search is not None else 0.0
    known = state.partitioned.forms
    alike = sum(len(stage.nodes) for i, stage in enumerate(stages) if known[i] in known[:i])
    evaluation = seconds_of(state.evaluation) if state.evaluation is not None else 0.0
    return seconds_to_compile(sum(len(stage.nodes) for stage in stages), turns, alike) + searched + evaluation
