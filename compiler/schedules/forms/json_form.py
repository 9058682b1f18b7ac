"""Schedules as JSON: what `partita schedule --json` prints, of which it reads the orders again.

`actions` are one list per rank, as `F0.3`; `placement` are the stages of each rank by chunk; `pairs`, if actions
overlap with the next one, the positions of the first ones; `summation` is `any` if gradients may be summed in any
order; `slices`, if microbatches are slices, how many each part of the batch has; `shared` names what all ranks share,
whose passes are then chunks after those of the rank's own stages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from partita.compiler.schedules.forms.written import ANY, SHARED, Line, Written, all_once, no_action, raise_any
from partita.compiler.schedules.schedule import Action, Schedule
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Source, Span

_WORD = re.compile(r"(F|BW|B|W|O|L)([0-9]{1,6})\.([0-9]{1,6})")
_HELP = "`partita schedule … --json` writes one"


def as_json(schedule: Schedule) -> dict[str, Any]:
    """A schedule as an object for `parse`, which skips all other keys."""
    fields: dict[str, Any] = {
        "placement": [list(stages) for stages in schedule.own_placement],
        "actions": [[str(action) for action in actions] for actions in schedule.actions],
    }
    if schedule.pairs:
        fields["pairs"] = [sorted(paired) for paired in schedule.pairs]
    if not schedule.ascending:
        fields["summation"] = ANY
    if schedule.slices > 1:
        fields["slices"] = schedule.slices
    if schedule.spread is not None:
        fields["shared"] = [each for each in SHARED if getattr(schedule.spread, each)]
    return fields


def parse(source: Source) -> Written:
    """What a JSON text says. Raises Refused (E0506)."""
    whole = Span(source, 0, 0)
    try:
        data = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise refuse("E0506", f"`{source.name}` is not JSON: {error}", whole, help=_HELP) from error
    fields = data if isinstance(data, dict) else {}
    actions: Any = fields.get("actions")
    placed: Any = fields.get("placement")
    pairs: Any = fields.get("pairs", [])
    shared: Any = fields.get("shared", [])
    slices: Any = fields.get("slices", 1)
    well = (
        _lists(actions, str)
        and all(actions)
        and _lists(placed, int)
        and _lists(pairs, int)
        and isinstance(shared, list)
        and all(each in SHARED for each in shared)
        and fields.get("summation", ANY) == ANY
        and len(pairs) in (0, len(actions))
        and type(slices) is int
        and slices > 0
    )
    if not well:
        raise refuse("E0506", f"`{source.name}` is not the object of a schedule", whole, help=_HELP)
    placement = tuple(map(tuple, placed))
    if not all_once(placement, len(actions), len(placement[0]) if placement else 0):
        raise refuse("E0506", f"`placement` of `{source.name}` does not have each stage once", whole, help=_HELP)
    for paired, line in zip(pairs, actions, strict=bool(pairs)):
        if not all(0 <= i < len(line) - 1 and line[i][:1] == "F" and line[i + 1][:2] == "BW" for i in paired):
            message = f"`pairs` of `{source.name}` are not all forwards followed by a full backward"
            raise refuse("E0506", message, whole, help=_HELP)
    return Written(
        tuple(_lines(source, actions)),
        tuple(map(frozenset, pairs)),
        placement=lambda ranks, chunks: placement,
        ascending="summation" not in fields,
        shared=frozenset(shared),
        slices=slices,
    )


def _lists(data: Any, kind: type) -> bool:
    """Whether something is a list of lists of values of a kind."""
    return isinstance(data, list) and all(
        isinstance(each, list) and all(type(value) is kind for value in each) for each in data
    )


def _lines(source: Source, actions: list[list[str]]) -> Iterator[Line]:
    """The lines of all ranks, with the places of the words in the text."""
    start = max(source.text.find('"actions"'), 0)
    problems = []
    for line in actions:
        parsed, spans = [], []
        for word in line:
            quoted = json.dumps(word)
            at = source.text.find(quoted, start)
            span = Span(source, max(at, 0) + 1, max(at, 0) + len(quoted) - 1)
            start = max(start, span.end)
            match = _WORD.fullmatch(word)
            if match is None:
                problems.append(no_action(word, span))
                continue
            parsed.append(Action(match[1], int(match[2]), int(match[3])))
            spans.append(span)
        yield tuple(parsed), tuple(spans)
    raise_any(problems)
