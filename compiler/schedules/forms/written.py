"""What a text says of a schedule, in any form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from partita.compiler.schedules.schedule import COPIES, KINDS, Action, loop_placement, v_placement
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.syntax.source import Span

Placement = tuple[tuple[int, ...], ...]
# A rank's actions and their places.
Line = tuple[tuple[Action, ...], tuple[Span, ...]]

# The placements that have a name.
PLACEMENTS = {"loop": loop_placement, "v": v_placement}
# How a text says that gradients may be summed in another order than that of microbatches.
ANY = "any"
# What of a pipeline all ranks may share.
SHARED = ("inputs", "outputs")
_MAX_ERRORS = 20


@frozen
class Written:
    """A parsed text: the lines of all ranks, the positions of actions that overlap with the next one, the placement
    for a number of ranks and chunks (None: not said) and where it stands, whether backwards must ascend, what all ranks
    share, and the slices of each part of the batch.
    """

    lines: tuple[Line, ...]
    pairs: tuple[frozenset[int], ...] = ()
    placement: Callable[[int, int], Placement] | None = None
    placed: Span | None = None
    ascending: bool = True
    shared: frozenset[str] = frozenset()
    slices: int = 1


def placement_text(placement: Placement) -> str:
    """The textual form of a placement."""
    for name, function in PLACEMENTS.items():
        if placement == function(len(placement), len(placement[0])):
            return name
    return " ".join(",".join(map(str, stages)) for stages in placement)


def all_once(placed: Sequence[Sequence[int]], ranks: int, chunks: int) -> bool:
    """Whether each of the stages stands once in a placement, as many on each rank."""
    if len(placed) != ranks or any(len(stages) != chunks for stages in placed):
        return False
    return sorted(stage for stages in placed for stage in stages) == list(range(ranks * chunks))


def no_action(word: str, span: Span, example: str = "a chunk and a microbatch, as in `F0.12`") -> Diagnostic:
    """E0506 for a word that is not an action."""
    help = f"a kind ({', '.join((*KINDS, *COPIES))}), {example}"
    return Diagnostic("E0506", f"`{word[:40]}` is not an action", span, help=help)


def raise_any(problems: Sequence[Diagnostic]) -> None:
    """Raise Refused with the first of the problems, if there are any."""
    if problems:
        raise Refused(problems[:_MAX_ERRORS])
