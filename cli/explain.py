"""`partita explain FILE [NAME]`: what is communicated and which line causes it; or the layout of a tensor, and why."""

from __future__ import annotations

import argparse
from collections import Counter
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
        traffic = communication(state)
        return deliver_either(arguments, traffic.as_json(), lambda console: show(traffic, console))
    try:
        tensors = explain(state, names[0])
    except ValueError as error:
        raise UsageError(printable(str(error))) from error
    deliver_either(arguments, [each.as_json() for each in tensors], lambda console: show_tensors(tensors, console))


# ---------------------------------------------------------------- the whole program


def show(traffic: Communication, console: Console) -> None:
    """Print what is sent by line, by iteration and between stages, then the sums, at the width of the console."""
    microbatches = f"{traffic.microbatches} microbatch{'es' * (traffic.microbatches > 1)}"
    figures = f"; of {BUSIEST}:" if traffic.causes else ""
    print_text(console, f": {mesh_text(traffic.mesh)}, {microbatches}{figures}", title=traffic.name)
    names = short_names(each.tensor for cause in traffic.causes for each in cause.moved)
    rows = [[moved_row(each, names[each.tensor]) for each in cause.moved] for cause in traffic.causes]
    table = Table(MOVED, [row for each in rows for row in each], console.width - len(INDENT))
    if rows:
        console.print()
        _print(console, [table.heading], "bold")
    for cause, each in zip(traffic.causes, rows, strict=True):
        _place_line(console, cause.span)
        _print(console, table.lines(each))
    for iteration in traffic.iterations:
        console.print()
        print_text(console, f"{_iterations(iteration)} sends from each rank")
        _print(console, _shares(iteration, console.width).lines())
    if traffic.transfers:
        console.print()
        print_table(console, transfer_table(traffic.transfers, console.width))
    if not traffic.causes and not traffic.transfers:
        print_text(console, "no communication")
    if traffic.axes:
        console.print()
    for axis, cost in traffic.axes:
        sums = cost.busiest
        messages = f"{round(sums.messages):,} message{'s' * (round(sums.messages) != 1)}"
        print_text(console, f"along {axis}: {bytes_text(sums.bytes)} in {messages}, {seconds_text(sums.seconds)}")
    if traffic.axes:
        print_text(console, RINGS)
    if traffic.mesh.ranks > 1:
        figures = f"{traffic.statistics} scalars (loss, metrics, squared gradient norms)"
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


def show_tensors(tensors: Sequence[Explanation], console: Console) -> None:
    """Print the tensors of one name."""
    counts = Counter(each.name for each in tensors)
    for i, each in enumerate(tensors[:MOST]):
        if i:
            console.print()
        show_tensor(each, console, counts[each.name] > 1)
    if len(tensors) > MOST:
        rest = ", ".join(each.name for each in tensors[MOST:])
        console.print()
        print_text(console, f"and {len(tensors) - MOST} more of that name: {rest}")


def show_tensor(tensor: Explanation, console: Console, apart: bool = False) -> None:
    """Print layout and reasons, storage, how the tensor is made, copies, and what is sent; where rules tell iterations
    `apart`, of which ones.
    """

    def table(headings: str, rows: Sequence[tuple[str, ...]]) -> None:
        print_table(console, Table([Column(each) for each in headings.split(", ")], rows, console.width))

    iterations = f" in {len(tensor.names)} iterations" if len(tensor.names) > 1 else ""
    numbers = [[int(part) for part in name.split(".") if part.isdigit()] for name in tensor.names]
    if apart and all(len(each) == 1 for each in numbers):
        s = "s" * (len(numbers) > 1)
        iterations = f" in iteration{s} {listed_numbers([each for (each,) in numbers], MOST_NUMBERS)}"
    print_text(console, f": {tensor.type}, {tensor.role}{iterations}", title=tensor.name)
    _place_line(console, tensor.span)
    reasons = [
        (f"{each.mesh_axis} ({each.parts})", each.axis or "replicated", _rule(each.rule) if each.rule else each.because)
        for each in tensor.splits
    ]
    late = [("", f"not {each.axis}", f"{_rule(each.rule)}: {each.because}") for each in tensor.late]
    table("over, split, because", [*reasons, *late])
    stages = f"stage{'s' * (len(tensor.stages) > 1)} {listed_numbers(tensor.stages, MOST_NUMBERS)}"
    print_text(console, f"a rank computes with {tensor.local}, {bytes_text(tensor.local.bytes)}; on {stages}")
    if tensor.on_host:
        location = "in a file that is mapped into the host's memory" if tensor.mapped else "in the host's memory"
        print_text(console, f"{location}: {READ[tensor.rows is not None]}")
    if tensor.offloaded:
        own = f"stage{'s' * (len(tensor.offloaded) > 1)} {listed_numbers(tensor.offloaded, MOST_NUMBERS)}"
        print_text(console, f"in the host's memory between F and the backward pass of a microbatch, on {own}")
    stored = []
    for storage in tensor.stored:
        rules = ", ".join(_rule(rule) for rule in storage.rules)
        whole = (
            f"no axis divides evenly over {', '.join(storage.whole)}, and updates need it whole"
            if storage.whole
            else ""
        )
        whole = f"flat: no axis divides evenly over {', '.join(storage.flat)}" if storage.flat else whole
        because = "; ".join(each for each in (rules, whole) if each)
        stored.append((STORED[storage.what], str(storage.layout), str(storage.type), because))
    columns = [Column("stored"), Column("layout"), Column("per rank", spare=1), Column("because")]
    print_table(console, Table(columns, stored, console.width))
    if tensor.rule is not None:
        print_text(console, f"optimizer: {_rule(tensor.rule)}")
    for unfit in tensor.unfit:
        print_text(console, f"not `{unfit.rule}`: {unfit.why}")
    if tensor.rows is not None:
        print_text(console, f"sparse: a step reads and writes the rows along {tensor.rows} that it looks up")
    if tensor.dense is not None:
        print_text(console, f"a step reads and writes all rows: {tensor.dense}")
    for share in tensor.shares:
        print_text(console, str(share))
    if tensor.instead:
        print_text(console, f"`{tensor.operation}` cannot be split so; it is replaced by {', '.join(tensor.instead)}")
    if tensor.alternatives:
        print_text(
            console,
            f"made by `{tensor.operation}`, as {tensor.made}; its sharding rules, and the resharding time of each:",
        )
    options = [
        (rule.mesh_axis, "chosen" if rule.taken else "", _time(rule), rule.states) for rule in tensor.alternatives
    ]
    table("over, , time, operands → result", options)
    copies = [(str(copy.layout), ", ".join(copy.steps), copy.phase, _lines(copy.readers)) for copy in tensor.copies]
    columns = [Column("copy"), Column("by", spare=1), Column("in"), Column("for")]
    print_table(console, Table(columns, copies, console.width))
    if tensor.moved:
        names = short_names(each.tensor for each in tensor.moved)
        rows = [moved_row(each, names[each.tensor]) for each in tensor.moved]
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
    by_file: dict[str, dict[int, None]] = {}
    for span in spans:
        by_file.setdefault(PurePath(span.source.name).name, {})[span.line] = None
    return printable("; ".join(f"{name}:{', '.join(map(str, sorted(lines)))}" for name, lines in by_file.items()))


def _print(console: Console, lines: Iterable[str], style: str = "") -> None:
    for line in lines:
        console.print(INDENT + line, style=style, soft_wrap=True, markup=False)
