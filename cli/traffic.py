"""Tables of collectives and transfers, shown by `compile` and `explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from partita.cli.number_format import bytes_text, seconds_text
from partita.cli.table import Column, Table
from partita.compiler.analysis.traffic import cost
from partita.compiler.graph import Phase
from partita.compiler.layout import state_text
from partita.compiler.report.causes import tensor_text
from partita.dsl.grouping import grouped

if TYPE_CHECKING:
    from partita.compiler.analysis.traffic import Traffic
    from partita.compiler.mesh import Mesh
    from partita.compiler.report.causes import TensorTraffic

# What the numbers of collectives count, in all tables.
BUSIEST = "the rank that sends the most, per step"
RINGS = (
    "bytes with ring algorithms: an all-reduce of K bytes over N ranks sends 2K(N−1)/N per rank, an all-gather, "
    "reduce-scatter or all-to-all K(N−1)/N"
)
MOVED = (
    Column("phase"),
    Column("collective"),
    Column("over"),
    Column("tensor"),
    Column("change", spare=3),
    Column("times", right=True, spare=1),
    Column("each", right=True, spare=2),
    Column("bytes", right=True),
    Column("time", right=True),
)


def mesh_text(mesh: Mesh) -> str:
    """`16 ranks (data 2 × pipe 4 × tensor 2)`."""
    ranks = f"{mesh.ranks:,} rank{'s' * (mesh.ranks > 1)}"
    axes = [f"{name} {size}" for name, size in mesh.axes if size > 1]
    return f"{ranks} ({' × '.join(axes)})" if len(axes) > 1 else ranks


def collective_table(records: Iterable[Traffic], width: int) -> Table:
    """A row for each mesh axis, phase and kind: what the rank that sends the most of it sends per step."""
    phases = list(Phase)
    rows = []
    groups = grouped(records, lambda each: (each.axis, phases.index(each.phase), each.kind))
    for (axis, phase, kind), own in sorted(groups.items(), key=lambda pair: pair[0]):
        sums = cost(own).busiest
        figures = f"{sums.count:,}", f"{round(sums.messages):,}", bytes_text(sums.bytes), seconds_text(sums.seconds)
        rows.append((kind, axis, phases[phase].name.lower(), *figures))
    numbers = [Column(heading, right=True) for heading in ("tensors", "messages", "bytes", "time")]
    return Table([Column("collective"), Column("over"), Column("phase"), *numbers], rows, width)


def transfer_table(transfers: Sequence[dict[str, Any]], width: int) -> Table:
    """A row for each value; equal iterations, from stage to stage, share one."""
    routes: dict[tuple[str, str, int, int], list[str]] = {}
    for each in transfers:
        key = (tensor_text(each["value"]), each["direction"], each["bytes"], each["count"])
        routes.setdefault(key, []).append(f"{each['from']} → {each['to']}")
    rows = []
    for (value, direction, size, count), pairs in routes.items():
        stages = ", ".join(pairs) if len(pairs) <= 3 else f"{pairs[0]}, {pairs[1]} … {pairs[-1]}"
        times = f"{len(pairs)} × {count}" if len(pairs) > 1 else f"{count}"
        rows.append((value, stages, direction, bytes_text(size), times))
    columns = [Column("transfer"), Column("stages", spare=1), Column("direction"), Column("each", right=True)]
    return Table([*columns, Column("times", right=True)], rows, width)


def moved_row(each: TensorTraffic, name: str) -> tuple[str, ...]:
    """What the rank that sends the most of a tensor sends per step: how many `times`, and how many bytes `each`."""
    busiest = each.cost.busiest
    return (
        each.phase.name.lower(),
        each.kind,
        each.axis,
        name,
        f"{state_text(each.source.state(each.axis))} → {state_text(each.target.state(each.axis))}",
        f"{busiest.count:,}",
        bytes_text(each.each),
        bytes_text(busiest.bytes),
        seconds_text(busiest.seconds),
    )


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The shortest unique suffix of each name, which `explain` accepts: `attention.h`, `d(wq)`."""

    def end(name: str, parts: int) -> str:
        of, bracket, inner = name.rpartition("(")
        return of + bracket + ".".join(inner.split(".")[-parts:])

    ends = {name: [end(name, parts) for parts in range(1, name.count(".") + 2)] for name in names}
    counts = Counter(each for own in ends.values() for each in own)
    return {name: next((each for each in own if counts[each] == 1), name) for name, own in ends.items()}
