"""A timeline as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each title is a process in the trace. It has a row for the steps, if they have names, one per rank with its actions, two
with its copies to the host's memory and back, if there are any, one per channel with its transfers, and a counter of
each rank's live activations. Arrows lead from the action that sends a
message to the one that needs it.

Times are in microseconds, rounded to eighths: viewers keep whole nanoseconds, so what touches still does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from partita.cli.pictures.picture import NAMES, Picture, computed
from partita.compiler.instructions import Transfer
from partita.compiler.schedules.communication import DIRECTION
from partita.compiler.schedules.schedule import COPIES, KINDS, Action
from partita.compiler.schedules.timeline import Interval

Event = dict[str, Any]
# Rows are numbered across processes: some viewers take equal numbers in two processes for one row.
_ROWS = 1_000_000


def draw(pictures: Sequence[Picture]) -> bytes:
    """The JSON object of a trace."""
    trace = {"traceEvents": list(events(pictures)), "displayTimeUnit": "ms"}
    return json.dumps(trace, separators=(",", ":")).encode()


def events(pictures: Sequence[Picture]) -> Iterator[Event]:
    """All events: for each title its name and contents."""
    flows = count(1)
    titles = list(dict.fromkeys(picture.title for picture in pictures))
    for process, title in enumerate(titles, 1):
        own = [picture for picture in pictures if picture.title == title]
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}}
        yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
        rows = _rows(own, process)
        for position, (key, row) in enumerate(rows.items()):
            yield {"ph": "M", "pid": process, "tid": row, "name": "thread_name", "args": {"name": key}}
            yield {"ph": "M", "pid": process, "tid": row, "name": "thread_sort_index", "args": {"sort_index": position}}
        for picture in own:
            yield from _picture(picture, process, rows, flows)


def _rows(pictures: Sequence[Picture], process: int) -> dict[str, int]:
    """The row numbers of a process, by row name."""
    names = ["steps"] if any(picture.name for picture in pictures) else []
    timelines = [picture.timeline for picture in pictures]
    names += [f"rank {rank}" for rank in range(max(len(timeline.actions) for timeline in timelines))]
    names += [row for timeline in timelines for rank in range(len(timeline.copies)) for row in _copies(rank).values()]
    names += [str(channel) for timeline in timelines for channel in timeline.transfers]
    return {name: process * _ROWS + i for i, name in enumerate(dict.fromkeys(names))}


def _picture(picture: Picture, process: int, rows: dict[str, int], flows: Iterator[int]) -> Iterator[Event]:
    timeline, start = picture.timeline, picture.start

    def slice_of(row: str, interval: Interval, name: str, category: str, arguments: Event) -> Event:
        begun = _microseconds(start + interval.start)
        duration = _microseconds(start + interval.end) - begun
        place = {"pid": process, "tid": rows[row], "ts": begun, "dur": duration}
        return {"ph": "X", **place, "name": name, "cat": category, "args": arguments}

    if picture.name:
        # As the first rank sees it: steps of different ranks may overlap.
        line = timeline.actions[0]
        whole = Interval(0, Action("", 0, 0), line[0].start, line[-1].end)
        yield slice_of("steps", whole, picture.name, "step", {})
    for rank, line in enumerate(timeline.actions):
        for action, interval in computed(line):
            name, arguments = NAMES[action.kind], {}
            if action.kind in KINDS:
                name, arguments = str(action), {"chunk": action.chunk, "microbatch": action.microbatch}
            yield slice_of(f"rank {rank}", interval, name, NAMES[action.kind], arguments)
        for time, number in timeline.live(rank):
            place = {"pid": process, "ts": _microseconds(start + time)}
            yield {"ph": "C", **place, "name": f"live activations of rank {rank}", "args": {"live": number}}
    for rank, line in enumerate(timeline.copies):
        for action, interval in computed(line):
            arguments = {"chunk": action.chunk, "microbatch": action.microbatch}
            yield slice_of(_copies(rank)[action.kind], interval, str(action), NAMES[action.kind], arguments)
    for channel, line in timeline.transfers.items():
        for interval in line:
            transfer = interval.work
            assert isinstance(transfer, Transfer)
            message = transfer.message
            arguments = {"microbatch": transfer.microbatch, "bytes": message.bytes}
            yield slice_of(str(channel), interval, message.value, "transfer", arguments)
    yield from _arrows(picture, process, rows, flows)


def _copies(rank: int) -> dict[str, str]:
    """The rows of a rank's copies, by their kind."""
    return {kind: f"rank {rank} {NAMES[kind]}" for kind in COPIES}


def _arrows(picture: Picture, process: int, rows: dict[str, int], flows: Iterator[int]) -> Iterator[Event]:
    """Yields two events per message, within the action that makes it and at the start of the one that needs it.

    Viewers attach an event to the action that encloses it.
    """
    chunk_of = {stage: chunk for stages in picture.schedule.placement for chunk, stage in enumerate(stages)}
    actions = {
        (rank, DIRECTION[action.kind], action.chunk, action.microbatch): interval
        for rank, line in enumerate(picture.timeline.actions)
        for action, interval in computed(line)
        if action.kind in DIRECTION
    }
    for channel, line in picture.timeline.transfers.items():
        for interval in line if channel.direction in ("forward", "backward") else ():
            transfer = interval.work
            assert isinstance(transfer, Transfer)
            message = transfer.message
            common = {"pid": process, "id": next(flows), "name": message.value, "cat": "message"}
            ends = ("s", channel.source, message.source), ("f", channel.destination, message.destination)
            for phase, rank, stage in ends:
                own = actions[rank, channel.direction, chunk_of[stage], transfer.microbatch]
                inside = own.start + own.duration / 2 if phase == "s" else own.start
                place = {"tid": rows[f"rank {rank}"], "ts": _microseconds(picture.start + inside)}
                yield {"ph": phase, **common, **place, **({"bp": "e"} if phase == "f" else {})}


def _microseconds(seconds: float) -> float:
    return round(seconds * 8e6) / 8
