"""Schedules as text: one line per rank, `F0.0 F0.1 BW0.0 …`: kind, chunk, microbatch. `#` starts a comment.

The placement of stages may come first: `placement = loop`, `placement = v`, or the stages of each rank by chunk,
`placement = 0,3 1,2`. `F0.1+` overlaps with the full backward that follows it.

`write` writes this form, and `read` parses it into a schedule whose bound is the peak of its order. The invariants are
not checked here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from attrs import frozen

from partita.compiler.schedules.schedule import (
    FORWARD,
    FULL_BACKWARD,
    KINDS,
    LIMIT,
    Action,
    Schedule,
    loop_placement,
    peak_live,
    v_placement,
)
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.source import Source, Span

_WORD = re.compile(r"(F|BW|B|W)([0-9]{1,6})\.([0-9]{1,6})(\+?)")
_PLACED = re.compile(r"placement\s*=\s*(.*)")
_STAGES = re.compile(r"[0-9]{1,6}(,[0-9]{1,6})*")
# The placements that have a name.
PLACEMENTS = {"loop": loop_placement, "v": v_placement}
Placement = tuple[tuple[int, ...], ...]
_MOST_ERRORS = 20


@frozen
class _Text:
    """A parsed text: the actions of every rank with their spans, the positions of those that overlap with the next, and
    the span of the placement.
    """

    lines: tuple[tuple[tuple[Action, ...], tuple[Span, ...]], ...]
    pairs: tuple[frozenset[int], ...]
    placed: Span | None


def write(schedule: Schedule) -> str:
    """A schedule as text for `read`. The placement is omitted if stage r is on rank r."""
    pairs = schedule.pairs or (frozenset[int](),) * schedule.ranks
    lines = [
        " ".join(f"{action}{'+' * (i in paired)}" for i, action in enumerate(actions))
        for actions, paired in zip(schedule.actions, pairs, strict=True)
    ]
    if schedule.placement != loop_placement(schedule.ranks, 1):
        lines.insert(0, f"placement = {placement_text(schedule.placement)}")
    return "\n".join(lines) + "\n"


def placement_text(placement: Placement) -> str:
    """The textual form of a placement."""
    for name, function in PLACEMENTS.items():
        if placement == function(len(placement), len(placement[0])):
            return name
    return " ".join(",".join(map(str, stages)) for stages in placement)


@lru_cache(maxsize=8)
def _parse(source: Source) -> _Text:
    problems: list[Diagnostic] = []
    ranks: list[tuple[tuple[Action, ...], tuple[Span, ...]]] = []
    pairs = []
    placed = None
    offset = 0
    for line in source.text.split("\n"):
        content = line.split("#", 1)[0]
        start = offset
        offset += len(line) + 1
        said = _PLACED.fullmatch(content.strip())
        if said and placed is None and not ranks:
            first = start + content.index(said[0]) + said.start(1)
            placed = Span(source, first, first + len(said[1]))
            continue
        actions: list[Action] = []
        spans, paired = [], set()
        for word in re.finditer(r"[^\s]+", content):
            match = _WORD.fullmatch(word[0])
            span = Span(source, start + word.start(), start + word.end())
            if match is not None:
                if match[4]:
                    paired.add(len(actions))
                actions.append(Action(match[1], int(match[2]), int(match[3])))
                spans.append(span)
                continue
            help = f"a kind ({', '.join(KINDS)}), a chunk and a microbatch, as in `F0.12`"
            problems.append(Diagnostic("E0506", f"`{word[0][:40]}` is not an action", span, help=help))
            if len(problems) == _MOST_ERRORS:
                raise Refused(problems)
        for i in sorted(paired):
            following = actions[i + 1].kind if i + 1 < len(actions) else None
            if actions[i].kind != FORWARD or following != FULL_BACKWARD:
                message = f"`{actions[i]}+` is not a forward followed by a full backward"
                problems.append(
                    Diagnostic(
                        "E0506", message, spans[i], help="`+` marks a forward that overlaps with the next action"
                    )
                )
        if actions:
            ranks.append((tuple(actions), tuple(spans)))
            pairs.append(frozenset(paired))
    if problems:
        raise Refused(problems[:_MOST_ERRORS])
    return _Text(tuple(ranks), tuple(pairs) if any(pairs) else (), placed)


def parse_actions(source: Source) -> tuple[tuple[tuple[Action, ...], tuple[Span, ...]], ...]:
    """The actions of every rank with their spans, one line per rank; empty lines and comments are skipped.

    Raises Refused (E0506) with every word that is not an action, at its span.
    """
    return _parse(source).lines


def read(source: Source, placement: Placement | None = None) -> Schedule:
    """The schedule of a text: a rank per line, chunks and microbatches up to its largest numbers, and stages placed
    according to the text or `placement`, or else in a loop.

    Raises Refused (E0506) if the text is malformed, or if the two placements differ.
    """
    parsed = _parse(source)
    actions = tuple(line for line, _ in parsed.lines)
    if not actions:
        raise refuse("E0506", f"`{source.name}` holds no actions", Span(source, 0, 0))
    chunks = 1 + max(action.chunk for line in actions for action in line)
    microbatches = 1 + max(action.microbatch for line in actions for action in line)
    if len(actions) * chunks * microbatches > LIMIT:
        raise refuse(
            "E0506",
            f"`{source.name}` schedules {len(actions)} ranks × {chunks} chunks × {microbatches} microbatches",
            Span(source, 0, 0),
            help=f"at most {LIMIT} of these together can be scheduled",
        )
    said = _placed(parsed.placed, len(actions), chunks) if parsed.placed else None
    if placement is None:
        placement = said or loop_placement(len(actions), chunks)
    elif len(placement) != len(actions) or len(placement[0]) < chunks:
        raise refuse(
            "E0506",
            f"`{source.name}` schedules {len(actions)} ranks of {chunks} stages, not {len(placement)} of "
            f"{len(placement[0])}",
            Span(source, 0, 0),
        )
    elif said not in (None, placement):
        message = f"`{source.name}` places its stages differently from `{placement_text(placement)}`"
        raise refuse("E0506", message, parsed.placed, help="omit `placement =` in `from_file(…)`")
    spans = tuple(places for _, places in parsed.lines)
    bound = tuple(map(peak_live, actions))
    return Schedule(source.name, microbatches, placement, actions, bound, pairs=parsed.pairs, spans=spans)


def _placed(span: Span, ranks: int, chunks: int) -> Placement:
    """The placement written at a span, for this number of stages. Raises Refused (E0506)."""
    text = span.text
    if text in PLACEMENTS:
        return PLACEMENTS[text](ranks, chunks)
    words = text.split()
    help = f"loop, v, or the {chunks} stage{'s' * (chunks > 1)} of each of the {ranks} ranks: `0,3 1,2`"
    if not words or not all(_STAGES.fullmatch(word) for word in words):
        raise refuse("E0506", f"`{text[:40]}` is not a placement", span, help=help)
    placed = tuple(tuple(map(int, word.split(","))) for word in words)
    if not _all_once(placed, ranks, chunks):
        message = f"not every one of {ranks * chunks} stages stands once in `{text[:40]}`, {chunks} on each rank"
        raise refuse("E0506", message, span, help=help)
    return placed


def _all_once(placed: Sequence[Sequence[int]], ranks: int, chunks: int) -> bool:
    if len(placed) != ranks or any(len(stages) != chunks for stages in placed):
        return False
    return sorted(stage for stages in placed for stage in stages) == list(range(ranks * chunks))
