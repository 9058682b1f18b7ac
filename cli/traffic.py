"""Collectives and transfers as tables: what `compile` and `explain` show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from partita.cli.figures import bytes_text, seconds_text

if TYPE_CHECKING:
    from rich.table import Table

    from partita.compiler.causes import Moved
    from partita.compiler.mesh import Mesh
    from partita.compiler.traffic import Traffic


def mesh_text(mesh: Mesh) -> str:
    """`16 ranks (data 2 × pipe 4 × tensor 2)`."""
    ranks = f"{mesh.ranks:,} rank{'s' * (mesh.ranks > 1)}"
    axes = [f"{name} {size}" for name, size in mesh.axes if size > 1]
    return f"{ranks} ({' × '.join(axes)})" if len(axes) > 1 else ranks


def collective_table(records: Iterable[Traffic]) -> Table:
    """A row for each mesh axis, phase and kind: all that one pipeline sends, and the most of one rank."""
    from rich.table import Table

    from partita.compiler.graph import Phase
    from partita.compiler.traffic import grouped, total

    phases = list(Phase)
    table = Table("collective", "along", "phase", box=None)
    for heading in ("tensors a step", "messages", "sent", "by a rank", "time"):
        table.add_column(heading, justify="right")
    rows = grouped(records, lambda each: (each.axis, phases.index(each.phase), each.kind))
    for (axis, phase, kind), found in sorted(rows.items(), key=lambda pair: pair[0]):
        sums = total(found)
        table.add_row(
            kind,
            axis,
            phases[phase].name.lower(),
            f"{sums.count:,}",
            f"{round(sums.launches):,}",
            bytes_text(sums.bytes),
            bytes_text(sums.busiest),
            seconds_text(sums.seconds),
        )
    return table


def transfer_table(transfers: Sequence[dict[str, Any]]) -> Table:
    """A row for each value; that of alike turns, from stage to stage, is one."""
    from rich.table import Table

    from partita.compiler.causes import tensor_text

    table = Table("transfer", "stages", "direction", box=None)
    table.add_column("size", justify="right")
    table.add_column("a step", justify="right")
    rows: dict[tuple[str, str, int, int], list[str]] = {}
    for each in transfers:
        key = (tensor_text(each["value"]), each["direction"], each["bytes"], each["count"])
        rows.setdefault(key, []).append(f"{each['from']} → {each['to']}")
    for (value, direction, size, count), pairs in rows.items():
        stages = ", ".join(pairs) if len(pairs) < 3 else f"{pairs[0]}, {pairs[1]} … {pairs[-1]}"
        times = f"{len(pairs)} × {count}" if len(pairs) > 1 else f"{count}"
        table.add_row(value, stages, direction, bytes_text(size), times)
    return table


def moved_row(each: Moved) -> tuple[str, ...]:
    """`forward`, `all_gather over tensor`, `gpt.x`, `seq → whole`, `12 × 16 × 1.5 MiB`, `288.0 MiB`, `1.2 ms`: turns
    (and stages) by times a step by bytes, those of a step, and its time."""
    once = each.total.count // each.places
    times = f"{each.places} × {once}" if once > 1 else f"{each.places}"
    return (
        each.phase.name.lower(),
        f"{each.kind} over {each.axis}",
        each.tensor,
        f"{state_text(each.source.state(each.axis))} → {state_text(each.target.state(each.axis))}",
        f"{times} × {bytes_text(each.each)}",
        bytes_text(each.total.bytes),
        seconds_text(each.total.seconds),
    )


def state_text(state: str | None) -> str:
    """An axis by name, `sum`, `max`, or `whole`."""
    from partita.compiler.ops.op import MAX, SUM

    return {None: "whole", SUM: "sum", MAX: "max"}.get(state) or str(state)


def aligned(rows: Sequence[tuple[str, ...]], widths: Sequence[int], right: int = 3) -> list[str]:
    """Rows as lines, the last `right` columns to the right."""
    lines = []
    for row in rows:
        left = len(row) - right
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells))
    return lines


def widths(rows: Iterable[tuple[str, ...]]) -> list[int]:
    """The width of each column."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]
