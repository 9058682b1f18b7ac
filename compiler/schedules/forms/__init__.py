"""The written forms of a schedule, one file of this directory each: text, torch's CSV, JSON.

What is written is read back as the same schedule, with its placement, what overlaps, the order of summation, and what
all ranks share. The invariants are not checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import PurePath

from partita.compiler.schedules.forms import json_form, text, torch_csv
from partita.compiler.schedules.forms.written import PLACEMENTS, Placement, Written, placement_text
from partita.compiler.schedules.schedule import LIMIT, Schedule, SharedVocabulary, loop_placement, peak_live
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Source, Span

__all__ = ["PLACEMENTS", "PLAIN", "WRITERS", "placement_text", "read"]

PLAIN = ".sched"
# By the suffix of a file; a text with any other one is plain.
PARSERS: Mapping[str, Callable[[Source], Written]] = {
    PLAIN: text.parse,
    ".csv": torch_csv.parse,
    ".json": json_form.parse,
}
WRITERS: Mapping[str, Callable[[Schedule], str]] = {PLAIN: text.write, ".csv": torch_csv.write}


@lru_cache(maxsize=8)
def _parsed(source: Source) -> Written:
    return PARSERS.get(PurePath(source.name).suffix, text.parse)(source)


def read(source: Source, placement: Placement | None = None, ascending: bool = True) -> Schedule:
    """The schedule of a text: a rank per line, chunks and microbatches up to its largest numbers, and stages placed
    according to the text or `placement`, or else in a loop. Unless `ascending`, backwards may run in any order.

    Its bound is the peak of its order. Raises Refused (E0506) if the text is malformed, or if the two placements
    differ.
    """
    written, start = _parsed(source), Span(source, 0, 0)
    actions = tuple(line for line, _ in written.lines)
    if not actions:
        raise refuse("E0506", f"`{source.name}` holds no actions", start)
    ranks, microbatches = len(actions), 1 + max(action.microbatch for line in actions for action in line)
    chunks = _own_chunks(written)
    if chunks < 1:
        raise refuse("E0506", f"`{source.name}` has no actions of stages of its own beside what ranks share", start)
    if ranks * chunks * microbatches > LIMIT:
        raise refuse(
            "E0506",
            f"`{source.name}` schedules {ranks} ranks × {chunks} chunks × {microbatches} microbatches",
            start,
            help=f"at most {LIMIT} of these together can be scheduled",
        )
    if microbatches % written.slices:
        message = f"`{source.name}` has {microbatches} microbatches, which are no parts of {written.slices} slices"
        raise refuse("E0506", message, start, help="slice s of part b is microbatch b · slices + s")
    declared = written.placement(ranks, chunks) if written.placement else None
    if placement is None:
        placement = declared or loop_placement(ranks, chunks)
    elif declared not in (None, placement):
        message = f"`{source.name}` places its stages differently from `{placement_text(placement)}`"
        raise refuse("E0506", message, written.placed or start, help="omit `placement =` in `from_file(…)`")
    if len(placement) != ranks or len(placement[0]) < chunks:
        shape = f"{len(placement)} of {len(placement[0])}"
        raise refuse("E0506", f"`{source.name}` schedules {ranks} ranks of {chunks} stages, not {shape}", start)
    spread = None
    if written.shared:
        spread = SharedVocabulary(ranks, ranks * chunks, **dict.fromkeys(written.shared, True))
        placement = spread.placement(placement)
    return Schedule(
        source.name,
        microbatches,
        placement,
        actions,
        tuple(map(peak_live, actions)),
        pairs=written.pairs,
        spans=tuple(places for _, places in written.lines),
        spread=spread,
        ascending=written.ascending and ascending,
        slices=written.slices,
    )


def _own_chunks(written: Written) -> int:
    """The number of each rank's own stages: those of what ranks share come after them, that of the loss on one rank."""
    chunks = [1 + max(action.chunk for action in line) for line, _ in written.lines]
    if not written.shared:
        return max(chunks)
    return min(chunks) - len(written.shared) - ("outputs" in written.shared and len(chunks) == 1)
