"""Schedules as text: one line a rank, `F0.0 F0.1 BW0.0 …`: kind, chunk, microbatch. `#` starts a comment.

`str(schedule)` writes this form; `read` makes a schedule of it, whose bound is the peak that its order
reaches. The laws are not checked here.
"""

from __future__ import annotations

import re
from functools import lru_cache

from partita.compiler.schedules.schedule import (
    KINDS,
    LIMIT,
    Action,
    Schedule,
    loop_placement,
    peak_live,
)
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.source import Source, Span

_WORD = re.compile(r"(F|BW|B|W)([0-9]{1,6})\.([0-9]{1,6})")
_MOST_ERRORS = 20


@lru_cache(maxsize=8)
def parse_actions(source: Source) -> tuple[tuple[tuple[Action, ...], tuple[Span, ...]], ...]:
    """The actions of every rank with their places, one line a rank; empty lines and comments do not count.

    Raises Refused (E0506) with every word that is not an action, at its place.
    """
    problems: list[Diagnostic] = []
    ranks = []
    offset = 0
    for line in source.text.split("\n"):
        actions, spans = [], []
        for word in re.finditer(r"[^\s]+", line.split("#", 1)[0]):
            match = _WORD.fullmatch(word[0])
            span = Span(source, offset + word.start(), offset + word.end())
            if match is not None:
                actions.append(Action(match[1], int(match[2]), int(match[3])))
                spans.append(span)
                continue
            help = f"a kind ({', '.join(KINDS)}), a chunk and a microbatch, as in `F0.12`"
            problems.append(Diagnostic("E0506", f"`{word[0][:40]}` is not an action", span, help=help))
            if len(problems) == _MOST_ERRORS:
                raise Refused(problems)
        offset += len(line) + 1
        if actions:
            ranks.append((tuple(actions), tuple(spans)))
    if problems:
        raise Refused(problems)
    return tuple(ranks)


def read(source: Source, placement: tuple[tuple[int, ...], ...] | None = None) -> Schedule:
    """The schedule that a text writes, over as many ranks as it has lines and as many chunks and microbatches
    as its greatest numbers say; `placement` is loop_placement unless given.

    Raises Refused (E0506) where the text is not of that form.
    """
    parsed = parse_actions(source)
    actions = tuple(line for line, _ in parsed)
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
    if placement is None:
        placement = loop_placement(len(actions), chunks)
    elif len(placement) != len(actions) or len(placement[0]) < chunks:
        raise refuse(
            "E0506",
            f"`{source.name}` schedules {len(actions)} ranks of {chunks} stages, not {len(placement)} of "
            f"{len(placement[0])}",
            Span(source, 0, 0),
        )
    spans = tuple(places for _, places in parsed)
    return Schedule(source.name, microbatches, placement, actions, tuple(map(peak_live, actions)), spans=spans)
