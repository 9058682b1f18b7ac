"""`partita explain FILE [NAME]`: what is communicated and which line causes it; how a tensor lies, and why."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from partita.cli.source import add_source_arguments, compile_or_report, printable, report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from partita.compiler.causes import Communication, Turn
    from partita.compiler.explain import Explanation
    from partita.dsl.source import Span

SUMMARY = "list every collective with bytes, time and source line; or the layout of one tensor, and why"
# How many tensors of one name are described.
MOST = 8
NOTHING = 1e-8  # seconds of a step that does not communicate
STORED = {"param": "parameter", "grad": "gradient", "state": "optimizer state"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. NAME stands anywhere among the overrides: it is the word without `=`."""
    add_source_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.usage = "partita explain FILE [NAME] [KEY=VALUE ...] [--root DIR] [--json]"
    parser.set_defaults(takes_name=True)


def run(arguments: argparse.Namespace) -> int:
    """Compile and print. 0, 1 with diagnostics, or 2 where nothing has that name."""
    names = [word for word in arguments.overrides if "=" not in word]
    arguments.overrides = [word for word in arguments.overrides if "=" in word]
    if len(names) > 1:
        print(f"partita: one NAME at a time, not {', '.join(names)}", file=sys.stderr)
        return 2
    state = compile_or_report(arguments)
    if state is None:
        return 1
    report(state.warnings)
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    if not names:
        from partita.compiler.causes import communication

        found = communication(state)
        if arguments.json:
            print(json.dumps(found.as_json(), indent=2))
        else:
            _show(found, console)
        return 0
    from partita.compiler.explain import explain

    try:
        tensors = explain(state, names[0])
    except ValueError as error:
        print(f"partita: {printable(str(error))}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([_plain(each) for each in tensors], indent=2))
        return 0
    for i, each in enumerate(tensors[:MOST]):
        if i:
            console.print()
        _tensor(each, console)
    if len(tensors) > MOST:
        rest = ", ".join(each.name for each in tensors[MOST:])
        _line(console, f"\nand {len(tensors) - MOST} more of that name: {rest}")
    return 0


# ---------------------------------------------------------------- the whole program


def _show(found: Communication, console: Console) -> None:
    """By line, by turn, between stages, then the sums."""
    from partita.cli.figures import bytes_text, seconds_text
    from partita.cli.traffic import aligned, mesh_text, moved_row, transfer_table, widths

    microbatches = f"{found.microbatches} microbatch{'es' * (found.microbatches > 1)}"
    _line(console, f"[bold]{found.name}[/]: {mesh_text(found.mesh)}, {microbatches}")
    rows = [[moved_row(each) for each in cause.moved] for cause in found.causes]
    columns = widths(row for each in rows for row in each) if rows else []
    for cause, each in zip(found.causes, rows, strict=True):
        _line(console, f"\n[bold]{_place(cause.span)}[/]  {_text(cause.span)}")
        for line in aligned(each, columns):
            _line(console, f"  {_escaped(line)}")
    for turn in found.turns:
        _line(console, f"\n{_turns(turn)} sends from each rank")
        console.print(_shares(turn))
    if found.transfers:
        console.print()
        console.print(transfer_table(found.transfers))
    if not found.causes and not found.transfers:
        _line(console, "nothing is communicated")
    console.print()
    for axis, sums in found.axes:
        _line(
            console,
            f"along {axis}: {sums.count:,} tensors in {round(sums.launches):,} messages a step; a rank sends at most "
            f"{bytes_text(sums.busiest)}, in all {seconds_text(sums.seconds)} on the pipeline's ranks together",
        )
    if found.mesh.ranks > 1:
        _line(console, f"over all ranks: {found.statistics} figures (loss, metrics, squares of gradients) once a step")


def _turns(turn: Turn) -> str:
    numbers = turn.numbers
    if len(numbers) == 1:
        return f"turn {numbers[0]} of {turn.repeat}"
    return f"a turn of {turn.repeat} ({_listed(numbers)})"


def _listed(numbers: Sequence[int]) -> str:
    """`0 to 11`, `0, 3, 7`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    shown = ", ".join(str(each) for each in numbers[:12])
    return shown if len(numbers) <= 12 else f"{shown} …"


def _shares(turn: Turn) -> Table:
    from rich.table import Table

    from partita.cli.figures import bytes_text

    table = Table(box=None, show_header=False, pad_edge=False)
    for justify in ("left", "left", "right", "left", "right"):
        table.add_column(justify=justify)  # type: ignore[arg-type]
    for when, shares in (("each microbatch", turn.microbatch), ("once a step", turn.step)):
        for i, each in enumerate(shares):
            what = f"{each.kind} over {each.axis}" + (" of parameters" if each.of == "parameters" else "")
            table.add_row("" if i else f"  {when}", each.phase, f"{each.count}", what, bytes_text(each.bytes))
    return table


# ---------------------------------------------------------------- one tensor


def _tensor(found: Explanation, console: Console) -> None:
    """Home and reasons, storage, how it is made, copies."""
    from rich.table import Table

    from partita.cli.figures import bytes_text, seconds_text
    from partita.cli.traffic import aligned, moved_row, widths

    turns = f" in {len(found.names)} turns" if len(found.names) > 1 else ""
    _line(console, f"[bold]{found.name}[/]: {_escaped(str(found.type))}, {found.role}{turns}")
    _line(console, f"  {_place(found.span)}  {_text(found.span)}")
    table = Table("over", "split", "because", box=None, pad_edge=False)
    for each in found.splits:
        because = _rule(each.rule) if each.rule else each.because
        table.add_row(f"{each.mesh_axis} ({each.parts})", each.axis or "whole", because)
    for late in found.late:
        table.add_row("", f"not {late.axis}", f"{_rule(late.rule)}: {late.because}")
    if found.splits:
        console.print(table)
    stages = f"stage{'s' * (len(found.stages) > 1)} {_listed(found.stages)}"
    local = f"{_escaped(str(found.local))}, {bytes_text(found.local.bytes)}"
    _line(console, f"a rank computes with {local}; on {stages}")
    if found.stored:
        table = Table("kept", "layout", "on a rank", "because", box=None, pad_edge=False)
        for kept in found.stored:
            rules = ", ".join(_rule(rule) for rule in kept.rules)
            if kept.whole:
                rules += f"; no axis divides over {', '.join(kept.whole)}"
            table.add_row(STORED[kept.what], str(kept.layout), f"{_escaped(str(kept.type))}", rules)
        console.print(table)
    if found.instead:
        _line(console, f"`{found.operation}` cannot be split so; in its place stand {', '.join(found.instead)}")
    if found.alternatives:
        _line(console, f"made by `{found.operation}`, as {found.made}; the ways of that, and what each would move:")
        table = Table("over", "operands → result", "time", "", box=None, pad_edge=False)
        for way in found.alternatives:
            seconds = seconds_text(way.seconds) if way.seconds > NOTHING else "none"
            table.add_row(way.mesh_axis, way.states, seconds, "taken" if way.taken else "")
        console.print(table)
    if found.copies:
        table = Table("copy", "by", "in", "for", box=None, pad_edge=False)
        for copy in found.copies:
            readers = ", ".join(dict.fromkeys(_place(reader) for reader in copy.readers))
            table.add_row(str(copy.layout), ", ".join(copy.steps), copy.phase, readers)
        console.print(table)
    if found.moved:
        rows = [moved_row(each) for each in found.moved]
        _line(console, "sent")
        for line in aligned(rows, widths(rows)):
            _line(console, f"  {_escaped(line)}")


# ---------------------------------------------------------------- words


def _place(span: Span | None) -> str:
    return _escaped(f"{span.source.name}:{span.line}") if span else "no line of the file"


def _text(span: Span | None) -> str:
    return _escaped(span.source.line(span.line).strip()) if span else ""


def _rule(span: Span) -> str:
    return f"{_escaped(span.text)} ({_place(span)})"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text))


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)


def _plain(value: Any) -> Any:
    """Records as JSON: types and layouts as they print, places as file, line and text."""
    from attrs import fields, has

    from partita.compiler.layout import Layout
    from partita.dsl.source import Span
    from partita.dsl.types import Type

    if isinstance(value, Span):
        return {"file": value.source.name, "line": value.line, "text": value.text}
    if isinstance(value, (Layout, Type)):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if has(type(value)):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(type(value))}
    return value
