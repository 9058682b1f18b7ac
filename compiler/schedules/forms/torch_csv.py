"""Orders of torch's pipelining: a row per rank, cells of stage, kind and microbatch (`2F0`), empty ones for waiting.

Kinds are F, I (our B), W and B (our BW), and `(0F1;3B0)OVERLAP_F_B` is a forward that overlaps with the full backward
after it: what `torch.distributed.pipelining.schedules._Action` prints, and `_PipelineScheduleRuntime._load_csv` reads
as `compute_only`. Of an order with communication (`compute_comms`), sends, receives, gathers and reductions are
skipped: they follow from the order of the others.

Chunks are numbered in the order of the rank's stages, so that a schedule that numbers them differently comes back with
other numbers, and otherwise the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from partita.compiler.schedules.forms.written import Placement, Written, no_action, raise_any
from partita.compiler.schedules.offload import without_copies
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, FULL_BACKWARD, WEIGHT, Action, Schedule
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.syntax.source import Source, Span

THEIRS = {FORWARD: "F", BACKWARD: "I", WEIGHT: "W", FULL_BACKWARD: "B"}
_OURS = {theirs: ours for ours, theirs in THEIRS.items()}
_CELL = re.compile(r"([0-9]{1,6})(F|I|B|W)([0-9]{1,6})")
_PAIR = re.compile(r"\(([^;)]*);([^;)]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_EXAMPLE = "in torch's form: a stage, F, I, W or B, and a microbatch, as in `2F0`"


def write(schedule: Schedule) -> str:
    """A schedule as a CSV text, without copies to the host's memory, which `offload` inserts into what is read. Raises
    Refused (E0505) for slices, and for passes over what all ranks share: torch has neither.
    """
    schedule, _ = without_copies(schedule)
    if schedule.slices > 1:
        raise refuse("E0505", "torch's pipelining has no slices of a sequence", help="write the schedule as `.sched`")
    if schedule.spread is not None:
        message = "torch's pipelining has no passes over a vocabulary that all ranks share"
        raise refuse("E0505", message, help="write the schedule as `.sched`, or omit `shard vocab -> pipe`")
    pairs = schedule.pairs or (frozenset[int](),) * schedule.ranks
    rows = []
    for actions, stages, paired in zip(schedule.actions, schedule.placement, pairs, strict=True):
        cells = [f"{stages[each.chunk]}{THEIRS[each.kind]}{each.microbatch}" for each in actions]
        for i in sorted(paired, reverse=True):
            cells[i : i + 2] = [f"({cells[i]};{cells[i + 1]})OVERLAP_F_B"]
        rows.append(",".join(cells))
    return "\n".join(rows) + "\n"


def parse(source: Source) -> Written:
    """What a CSV text says. Raises Refused (E0506) with every cell that is not an action, at its span."""
    problems: list[Diagnostic] = []
    rows: list[list[tuple[str, int, int, Span]]] = []
    pairs: list[frozenset[int]] = []
    offset = 0
    for line in source.text.split("\n"):
        row: list[tuple[str, int, int, Span]] = []
        paired = set()
        for cell in re.finditer(r"[^,]+", line):
            word = cell[0].strip()
            start = offset + cell.start() + cell[0].index(word)
            pair = _PAIR.fullmatch(word)
            parts = [(start, word)] if pair is None else [(start + pair.start(i), pair[i]) for i in (1, 2)]
            if pair is not None:
                paired.add(len(row))
            for first, part in parts:
                match, span = _CELL.fullmatch(part), Span(source, first, first + len(part))
                if match is not None:
                    row.append((_OURS[match[2]], int(match[1]), int(match[3]), span))
                elif part and not _COMMUNICATION.fullmatch(part):
                    problems.append(no_action(part, span, _EXAMPLE))
        offset += len(line) + 1
        if row:
            rows.append(row)
            pairs.append(frozenset(paired))
    raise_any(problems)
    placement = tuple(tuple(sorted({stage for _, stage, _, _ in row})) for row in rows)
    raise_any(list(_misplaced(rows, placement)))
    lines = []
    for row, stages, firsts in zip(rows, placement, pairs, strict=True):
        chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
        for i in firsts:
            kinds = [kind for kind, _, _, _ in row[i : i + 2]]
            if kinds != [FORWARD, FULL_BACKWARD]:
                message = "only a forward and a full backward after it overlap"
                problems.append(Diagnostic("E0506", message, row[min(i, len(row) - 1)][3]))
        actions = tuple(Action(kind, chunk_of[stage], m) for kind, stage, m, _ in row)
        lines.append((actions, tuple(span for _, _, _, span in row)))
    raise_any(problems)
    return Written(tuple(lines), tuple(pairs) if any(pairs) else (), placement=lambda ranks, chunks: placement)


def _misplaced(rows: list[list[tuple[str, int, int, Span]]], placement: Placement) -> Iterator[Diagnostic]:
    """Stages on several ranks or on none, and ranks with more of them than others."""
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for _, stage, _, span in row:
            if rank_of.setdefault(stage, rank) != rank:
                yield Diagnostic("E0506", f"stage {stage} is on rank {rank_of[stage]} and on rank {rank}", span)
                return
    for rank, (stages, row) in enumerate(zip(placement, rows, strict=True)):
        if len(stages) != len(placement[0]):
            message = f"rank {rank} has {len(stages)} stages, and rank 0 has {len(placement[0])}"
            yield Diagnostic("E0506", message, row[0][3], help="all ranks have as many stages")
            return
    missing = next((stage for stage in range(len(rank_of)) if stage not in rank_of), None)
    if missing is not None:
        yield Diagnostic("E0506", f"stage {missing} is on no rank", rows[0][0][3])
