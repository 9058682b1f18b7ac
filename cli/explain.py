"""`partita explain FILE [NAME]`: what is communicated and which line causes it; or the layout of a tensor, and why."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from partita.cli.command import UsageError, command
from partita.cli.number_format import bytes_text, listed_numbers, seconds_text
from partita.cli.output import add_output, deliver_either
from partita.cli.source import add_source_arguments, load_file, printable, report
from partita.cli.table import Column, Table, print_table, print_text
from partita.cli.traffic import BUSIEST, MOVED, RINGS, mesh_text, moved_row, short_names, transfer_table
from partita.compiler.pipeline import compile_spec
from partita.compiler.report.causes import communication
from partita.compiler.report.explain import explain

if TYPE_CHECKING:
    from rich.console import Console

    from partita.compiler.report.causes import Communication, Iteration
    from partita.compiler.report.explain import Alternative, Explanation
    from partita.dsl.syntax.source import Span

# The most tensors of one name that are described, and numbers of iterations or stages that are listed.
MOST, MOST_NUMBERS = 8, 12
NOTHING = 1e-8  # seconds per step; less is no communication
INDENT = "  "
READ = {True: "the rows of a step are copied to the device", False: "copied to the device before each use"}
STORED = {"param": "parameter", "grad": "gradient", "state": "optimizer state"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. NAME may be anywhere among the overrides: it is the word without `=`."""
    add_source_arguments(parser)
    add_output(parser)
    parser.usage = "partita explain FILE [NAME] [KEY=VALUE ...] [--root DIR] [--json] [-o OUT]"
    parser.set_defaults(takes_name=True)


@command("explain", add_arguments)
def run(arguments: argparse.Namespace) -> None:
    """Compile and print. Raises UsageError if nothing has that name."""
    names = [word for word in arguments.overrides if "=" not in word]
    arguments.overrides = [word for word in arguments.overrides if "=" in word]
    if len(names) > 1:
        raise UsageError(f"one NAME at a time, not {', '.join(names)}")
    state = compile_spec(load_file(arguments))
    report(state.warnings)
    if not names:
        found = communication(state)
        return deliver_either(arguments, found.as_json(), lambda console: show(found, console))
    try:
        tensors = explain(state, names[0])
    except ValueError as error:
        raise UsageError(printable(str(error))) from error
    deliver_either(arguments, [each.as_json() for each in tensors], lambda console: show_tensors(tensors, console))


# ---------------------------------------------------------------- the whole program


def show(found: Communication, console: Console) -> None:
    """Print what is sent by line, by iteration and between stages, then the sums, at the width of the console."""
    microbatches = f"{found.microbatches} microbatch{'es' * (found.microbatches > 1)}"
    figures = f"; of {BUSIEST}:" if found.causes else ""
    print_text(console, f": {mesh_text(found.mesh)}, {microbatches}{figures}", title=found.name)
    names = short_names(each.tensor for cause in found.causes for each in cause.moved)
    rows = [[moved_row(each, names[each.tensor]) for each in cause.moved] for cause in found.causes]
    table = Table(MOVED, [row for each in rows for row in each], console.width - len(INDENT))
    if rows:
        console.print()
        _print(console, [table.heading], "bold")
    for cause, each in zip(found.causes, rows, strict=True):
        _place_line(console, cause.span)
        _print(console, table.lines(each))
    for iteration in found.iterations:
        console.print()
        print_text(console, f"{_iterations(iteration)} sends from each rank")
        _print(console, _shares(iteration, console.width).lines())
    if found.transfers:
        console.print()
        print_table(console, transfer_table(found.transfers, console.width))
    if not found.causes and not found.transfers:
        print_text(console, "no communication")
    if found.axes:
        console.print()
    for axis, cost in found.axes:
        sums = cost.busiest
        messages = f"{round(sums.messages):,} message{'s' * (round(sums.messages) != 1)}"
        print_text(console, f"along {axis}: {bytes_text(sums.bytes)} in {messages}, {seconds_text(sums.seconds)}")
    if found.axes:
        print_text(console, RINGS)
    if found.mesh.ranks > 1:
        figures = f"{found.statistics} scalars (loss, metrics, squared gradient norms)"
        print_text(console, f"over all ranks: {figures}, once per step")


def _iterations(iteration: Iteration) -> str:
    numbers = iteration.numbers
    if len(numbers) == 1:
        return f"iteration {numbers[0]} of {iteration.repeat}"
    return f"each iteration of {iteration.repeat} ({listed_numbers(numbers, MOST_NUMBERS)})"


def _shares(iteration: Iteration, width: int) -> Table:
    rows = []
    for when, shares in (("per microbatch", iteration.microbatch), ("once per step", iteration.step)):
        for i, each in enumerate(shares):
            of = "of parameters" if each.of == "parameters" else ""
            figures = each.phase, f"{each.count}", each.kind, f"over {each.axis}", of, bytes_text(each.bytes)
            rows.append(("" if i else when, *figures))
    columns = [Column(""), Column(""), Column("", right=True), Column(""), Column(""), Column("", spare=1)]
    columns.append(Column("", right=True))
    return Table(columns, rows, width - len(INDENT))


# ---------------------------------------------------------------- one tensor


def show_tensors(found: Sequence[Explanation], console: Console) -> None:
    """Print the tensors of one name."""
    for i, each in enumerate(found[:MOST]):
        if i:
            console.print()
        show_tensor(each, console)
    if len(found) > MOST:
        rest = ", ".join(each.name for each in found[MOST:])
        console.print()
        print_text(console, f"and {len(found) - MOST} more of that name: {rest}")


def show_tensor(found: Explanation, console: Console) -> None:
    """Print layout and reasons, storage, how the tensor is made, copies, and what is sent."""

    def table(headings: str, rows: Sequence[tuple[str, ...]]) -> None:
        print_table(console, Table([Column(each) for each in headings.split(", ")], rows, console.width))

    iterations = f" in {len(found.names)} iterations" if len(found.names) > 1 else ""
    print_text(console, f": {found.type}, {found.role}{iterations}", title=found.name)
    _place_line(console, found.span)
    reasons = [
        (f"{each.mesh_axis} ({each.parts})", each.axis or "replicated", _rule(each.rule) if each.rule else each.because)
        for each in found.splits
    ]
    late = [("", f"not {each.axis}", f"{_rule(each.rule)}: {each.because}") for each in found.late]
    table("over, split, because", [*reasons, *late])
    stages = f"stage{'s' * (len(found.stages) > 1)} {listed_numbers(found.stages, MOST_NUMBERS)}"
    print_text(console, f"a rank computes with {found.local}, {bytes_text(found.local.bytes)}; on {stages}")
    if found.on_host:
        there = "in a file that is mapped into the host's memory" if found.mapped else "in the host's memory"
        print_text(console, f"{there}: {READ[found.rows is not None]}")
    if found.offloaded:
        own = f"stage{'s' * (len(found.offloaded) > 1)} {listed_numbers(found.offloaded, MOST_NUMBERS)}"
        print_text(console, f"in the host's memory between F and the backward pass of a microbatch, on {own}")
    stored = []
    for kept in found.stored:
        rules = ", ".join(_rule(rule) for rule in kept.rules)
        whole = f"no axis divides evenly over {', '.join(kept.whole)}, and updates need it whole" if kept.whole else ""
        whole = f"flat: no axis divides evenly over {', '.join(kept.flat)}" if kept.flat else whole
        because = "; ".join(each for each in (rules, whole) if each)
        stored.append((STORED[kept.what], str(kept.layout), str(kept.type), because))
    columns = [Column("stored"), Column("layout"), Column("per rank", spare=1), Column("because")]
    print_table(console, Table(columns, stored, console.width))
    if found.rule is not None:
        print_text(console, f"optimizer: {_rule(found.rule)}")
    for unfit in found.unfit:
        print_text(console, f"not `{unfit.rule}`: {unfit.why}")
    if found.rows is not None:
        print_text(console, f"sparse: a step reads and writes the rows along {found.rows} that it looks up")
    if found.dense is not None:
        print_text(console, f"a step reads and writes all rows: {found.dense}")
    for share in found.shares:
        print_text(console, str(share))
    if found.instead:
        print_text(console, f"`{found.operation}` cannot be split so; it is replaced by {', '.join(found.instead)}")
    if found.alternatives:
        print_text(
            console,
            f"made by `{found.operation}`, as {found.made}; its sharding rules, and the resharding time of each:",
        )
    options = [
        (rule.mesh_axis, "chosen" if rule.taken else "", _time(rule), rule.states) for rule in found.alternatives
    ]
    table("over, , time, operands → result", options)
    copies = [(str(copy.layout), ", ".join(copy.steps), copy.phase, _lines(copy.readers)) for copy in found.copies]
    columns = [Column("copy"), Column("by", spare=1), Column("in"), Column("for")]
    print_table(console, Table(columns, copies, console.width))
    if found.moved:
        names = short_names(each.tensor for each in found.moved)
        rows = [moved_row(each, names[each.tensor]) for each in found.moved]
        print_text(console, f"sent by {BUSIEST}:")
        sent = Table(MOVED, rows, console.width - len(INDENT))
        _print(console, [sent.heading], "bold")
        _print(console, sent.lines())


# ---------------------------------------------------------------- text


def _time(rule: Alternative) -> str:
    """`1.2 ms`; `none` without communication; `weights` for a last resort."""
    if rule.reshards_weights:
        return "weights"
    return seconds_text(rule.seconds) if rule.seconds > NOTHING else "none"


def _place_line(console: Console, span: Span | None) -> None:
    """`gpt.par:12  let q = dot(h, wq, over = embed)`, truncated to fit."""
    if span is None:
        text = "no source line"
    else:
        text = printable(f"{span.source.name}:{span.line}  {span.source.line(span.line).strip()}")
    console.print(text, style="cyan", overflow="ellipsis", no_wrap=True, markup=False)


def _rule(span: Span) -> str:
    """`shard batch -> data (gpt.par:45)`."""
    return printable(f"{' '.join(span.text.split())} ({PurePath(span.source.name).name}:{span.line})")


def _lines(spans: Iterable[Span]) -> str:
    """`gpt.par:12, 13, 14`."""
    found: dict[str, dict[int, None]] = {}
    for span in spans:
        found.setdefault(PurePath(span.source.name).name, {})[span.line] = None
    return printable("; ".join(f"{name}:{', '.join(map(str, sorted(lines)))}" for name, lines in found.items()))


def _print(console: Console, lines: Iterable[str], style: str = "") -> None:
    for line in lines:
        console.print(INDENT + line, style=style, soft_wrap=True, markup=False)
