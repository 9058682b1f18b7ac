"""Schedules as text: one line per rank, `F0.0 F0.1 BW0.0 …`: kind, chunk, microbatch. `#` starts a comment.

Before the first rank, lines of their own may say the placement of stages (`placement = loop`, `placement = v`, or the
stages of each rank by chunk, `placement = 0,3 1,2`); that gradients may be summed in any order (`summation = any`);
into how many slices each part of the batch is cut (`slices = 2`); and what all ranks share (`shared = inputs outputs`),
whose passes are then chunks after those of the rank's own stages.
`F0.1+` overlaps with the full backward that follows it. What microbatches keep is in the host's memory from `O0.1` to
`L0.1`, for stages with something that the layout offloads.
"""

from __future__ import annotations

import re
from functools import partial

from attrs import evolve

from partita.compiler.schedules.forms.written import (
    ANY,
    PLACEMENTS,
    SHARED,
    Line,
    Placement,
    Written,
    all_once,
    no_action,
    placement_text,
    raise_any,
)
from partita.compiler.schedules.schedule import FORWARD, FULL_BACKWARD, Action, Schedule, loop_placement
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.syntax.source import Source, Span

_WORD = re.compile(r"(F|BW|B|W|O|L)([0-9]{1,6})\.([0-9]{1,6})(\+?)")
_SAID = re.compile(r"(placement|summation|slices|shared)\s*=\s*(.*)")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
_STAGES = re.compile(r"[0-9]{1,6}(,[0-9]{1,6})*")


def write(schedule: Schedule) -> str:
    """A schedule as text for `parse`. The placement is omitted if stage r is on rank r."""
    pairs = schedule.pairs or (frozenset[int](),) * schedule.ranks
    lines = []
    if schedule.own_placement != loop_placement(schedule.ranks, 1):
        lines.append(f"placement = {placement_text(schedule.own_placement)}")
    if not schedule.ascending:
        lines.append(f"summation = {ANY}")
    if schedule.slices > 1:
        lines.append(f"slices = {schedule.slices}")
    if schedule.spread is not None:
        lines.append(f"shared = {' '.join(each for each in SHARED if getattr(schedule.spread, each))}")
    for actions, paired in zip(schedule.actions, pairs, strict=True):
        lines.append(" ".join(f"{action}{'+' * (i in paired)}" for i, action in enumerate(actions)))
    return "\n".join(lines) + "\n"


def parse(source: Source) -> Written:
    """What a text says; empty lines and comments are skipped.

    Raises Refused (E0506) with every word that is not an action, at its span.
    """
    problems: list[Diagnostic] = []
    ranks: list[Line] = []
    pairs = []
    headers: dict[str, Span] = {}
    offset = 0
    for line in source.text.split("\n"):
        content = line.split("#", 1)[0]
        start = offset
        offset += len(line) + 1
        header = _SAID.fullmatch(content.strip())
        if header and header[1] not in headers and not ranks:
            first = start + content.index(header[0]) + header.start(2)
            headers[header[1]] = Span(source, first, first + len(header[2]))
            continue
        actions: list[Action] = []
        spans, paired = [], set()
        for word in re.finditer(r"[^\s]+", content):
            match = _WORD.fullmatch(word[0])
            span = Span(source, start + word.start(), start + word.end())
            if match is None:
                problems.append(no_action(word[0], span))
                continue
            if match[4]:
                paired.add(len(actions))
            actions.append(Action(match[1], int(match[2]), int(match[3])))
            spans.append(span)
        for i in sorted(paired):
            following = actions[i + 1].kind if i + 1 < len(actions) else None
            if actions[i].kind != FORWARD or following != FULL_BACKWARD:
                message = f"`{actions[i]}+` is not a forward followed by a full backward"
                help = "`+` marks a forward that overlaps with the next action"
                problems.append(Diagnostic("E0506", message, spans[i], help=help))
        if actions:
            ranks.append((tuple(actions), tuple(spans)))
            pairs.append(frozenset(paired))
    raise_any(problems)
    written = Written(tuple(ranks), tuple(pairs) if any(pairs) else ())
    if "placement" in headers:
        span = headers["placement"]
        written = evolve(written, placement=partial(_placed, span), placed=span)
    return evolve(
        written,
        ascending=_ascending(headers.get("summation")),
        slices=_slices(headers.get("slices")),
        shared=_shared(headers.get("shared")),
    )


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
    if not all_once(placed, ranks, chunks):
        message = f"not every one of {ranks * chunks} stages stands once in `{text[:40]}`, {chunks} on each rank"
        raise refuse("E0506", message, span, help=help)
    return placed


def _ascending(span: Span | None) -> bool:
    if span is not None and span.text not in ("ascending", ANY):
        raise refuse("E0506", f"`{span.text[:40]}` is not an order of summation", span, help=f"ascending, or {ANY}")
    return span is None or span.text != ANY


def _slices(span: Span | None) -> int:
    if span is not None and not _COUNT.fullmatch(span.text):
        raise refuse("E0506", f"`{span.text[:40]}` is not a number of slices", span, help="such as `slices = 2`")
    return 1 if span is None else int(span.text)


def _shared(span: Span | None) -> frozenset[str]:
    words = frozenset() if span is None else frozenset(span.text.split())
    if span is not None and (not words or not words <= set(SHARED)):
        message = f"`{span.text[:40]}` is nothing that ranks share"
        raise refuse("E0506", message, span, help=" or ".join((*SHARED, " ".join(SHARED))))
    return words
