"""`partita compile FILE`: a summary of the program, or one of its intermediate forms."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from attrs import evolve

from partita.cli.command import UsageError, command
from partita.cli.formats import add_format, formatted
from partita.cli.number_format import bytes_text, count_text, listed_numbers, microbatches_text, seconds_text
from partita.cli.output import add_output, deliver, deliver_either
from partita.cli.source import add_source_arguments, load_file, report
from partita.cli.table import Column, Table, print_table, print_text
from partita.cli.traffic import BUSIEST, RINGS, collective_table, mesh_text, transfer_table
from partita.compiler.analysis.memory import ELSEWHERE, HOST, PARTS
from partita.compiler.graph import without_iterations
from partita.compiler.pipeline import compile_run
from partita.compiler.report.claims import failures, outcomes
from partita.compiler.report.summary import summarize
from partita.compiler.schedules.forms.text import write
from partita.compiler.text.graph import graph_text
from partita.compiler.text.partitioned import stage_text, stages_text, update_text
from partita.compiler.text.sharded import sharded_text
from partita.compiler.text.streams import streams_text
from partita.dsl.diagnostic import Refused

if TYPE_CHECKING:
    from rich.console import Console

    from partita.compiler.report.claims import Outcome
    from partita.compiler.report.summary import Summary
    from partita.compiler.state import Compilation

# At most this many rows of memory are shown; of more, only the least and the most.
MOST_ROWS = 8
FORMS = ("graph", "joint", "microbatch", "sharded", "partitioned", "schedule", "streams", "python")
OF_STAGES = tuple(form for form in FORMS if form not in ("schedule", "streams"))  # those are of ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_source_arguments(parser)
    parser.add_argument("--emit", choices=FORMS, help="print this intermediate form")
    what = "with --emit, except `schedule` and `streams`: only this stage"
    parser.add_argument("--stage", type=int, metavar="N", help=what)
    add_output(parser, "the summary")
    add_format(parser)


@command("compile", add_arguments, "build")
@formatted
def run(arguments: argparse.Namespace) -> None:
    """Compile, check the file's claims, and print. Raises UsageError and Refused."""
    if arguments.stage is not None and arguments.emit not in OF_STAGES:
        raise UsageError(f"--stage is for --emit {', '.join(OF_STAGES)}")
    if arguments.json and arguments.emit is not None:
        raise UsageError("--json prints the summary and cannot be combined with --emit")
    state, _ = compile_run(load_file(arguments))
    report(state.warnings)
    if arguments.stage is not None and not 0 <= arguments.stage < state.pipeline.stages:
        raise UsageError(f"there is no stage {arguments.stage}: stages are 0 to {state.pipeline.stages - 1}")

    if arguments.emit:
        deliver(_form(state, arguments.emit, arguments.stage), arguments.output)
        if not state.spec.expect:
            return
    summary = summarize(state)
    expected = outcomes(state, summary)
    if not arguments.emit:
        result = summary.as_json() | {"expectations": [each.as_json() for each in expected]}
        deliver_either(arguments, result, lambda console: show(state, summary, console, expected))
    failed = failures(expected)
    if failed:
        raise Refused(failed)


def _form(state: Compilation, form: str, stage: int | None) -> str:
    """The text of a form, of one stage if given."""
    whole = {"graph": state.placed, "joint": state.joint, "microbatch": state.step, "sharded": state.sharded.graph}
    if form == "sharded" and stage is None:
        return sharded_text(state.sharded)
    if form in whole:
        graph = whole[form]
        if stage is not None:
            graph = evolve(graph, nodes=tuple(node for node in graph.nodes if node.stage == stage))
        return graph_text(graph)
    if form == "partitioned":
        if stage is not None:
            return stage_text(state.partitioned.stages[stage], state.partitioned.graph.name)
        return stages_text(state.partitioned) + update_text(state.update)
    if form == "schedule":
        return write(state.schedule)
    if form == "streams":
        return streams_text(state.program)
    if stage is None:
        return str(state.program.source)
    return _stage_source(state.program.source, set(state.program.stages[stage].functions.values()))


def _stage_source(source: str, roots: set[str]) -> str:
    """The functions of one stage and the shared functions that they call."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    needed, more = set[str](), roots
    while more:
        needed |= more
        used = {each.id for name in more for each in ast.walk(functions[name]) if isinstance(each, ast.Name)}
        more = (used & functions.keys()) - needed
    lines = source.splitlines(keepends=True)
    starts = [min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1 for node in functions.values()]
    parts = zip(functions, starts, [*starts[1:], len(lines)], strict=True)
    texts = ["".join(lines[start:end]) for name, start, end in parts if name in needed]
    return "".join(lines[: starts[0]]) + "".join(texts)


def show(state: Compilation, summary: Summary, console: Console, expected: Sequence[Outcome] = ()) -> None:
    """Print stages, collectives, transfers, memory, times and claims, at the width of the console."""
    program = state.program
    microbatches = microbatches_text(program.microbatches, program.slices)
    chunks = "" if state.schedule.own_chunks == 1 else f" × {state.schedule.own_chunks} chunks"
    print_text(
        console,
        f": {count_text(summary.parameters)} parameters; {mesh_text(summary.mesh)}{chunks}, "
        f"{len(summary.stages)} stage{'s' * (len(summary.stages) > 1)}; "
        f"schedule {state.schedule.name}, {microbatches}; {state.train.precision}",
        title=summary.name,
    )
    print_table(console, _stages(summary, console.width))
    if summary.collectives:
        console.print()
        print_table(console, collective_table(summary.collectives, console.width))
        print_text(console, f"of {BUSIEST}; {RINGS}")
    if summary.transfers:
        console.print()
        print_table(console, transfer_table((*summary.transfers, *summary.tied), console.width))
    console.print()
    if summary.padded:
        axes = ", ".join(f"{axis} from {own:,} to {size:,}" for axis, own, size in summary.padded)
        print_text(console, f"padded: {axes}; products take {summary.waste:.1%} more FLOPs")
    for axes, names in summary.flat:
        print_text(console, f"stored flat over {axes}: {', '.join(names)}; no axis divides evenly")
    for axis, names in summary.undivided:
        because = "no axis divides evenly, and updates need them whole"
        print_text(console, f"replicated, not stored split over {axis}: {', '.join(names)}; {because}")
    if summary.recomputed:
        print_text(console, f"recompute auto: {_recomputed(summary.recomputed)}")
    if len(summary.rules) > 1:
        print_table(console, _optimizer(summary, console.width))
    for rule in summary.rules:
        for why, names in rule.left:
            print_text(console, f"`{rule.rule}` leaves {', '.join(names)} to a later rule: {why}")
    for share in summary.shares:
        print_text(console, str(share))
    for name, over in summary.tables:
        print_text(console, f"sparse: of {name} a step reads and writes the rows along {over} that it looks up")
    if len(summary.rules) > 1 or summary.shares or summary.tables:
        console.print()
    print_table(console, _memory(summary, console.width))
    for during, where in ELSEWHERE.items():
        ranks = [f"{rank}" for rank, each in enumerate(summary.memory) if each.during == during]
        if ranks:
            of = "" if len(ranks) == len(summary.memory) else f" of rank {', '.join(ranks)}"
            print_text(console, f"the peak{of} is {where}")
    peak, capacity = max(summary.peak_memory), state.device.memory
    if peak > capacity:
        print_text(console, f"that exceeds the {bytes_text(capacity)} of {state.device.name}")
    console.print()
    step, timeline = summary.prediction, summary.timeline
    end = step.waiting_time - timeline.makespan
    apart = "" if step.period is None else f"; {seconds_text(step.waiting_time)} if ranks met at its end"
    print_text(
        console,
        f"predicted on {state.device.name}: step {seconds_text(step.step_time)} ({seconds_text(timeline.makespan)} in "
        f"microbatches, {seconds_text(end)} before and after{apart}), {count_text(step.rate)} {step.unit}/s, "
        f"MFU {step.mfu:.1%}, bubble {timeline.bubble:.1%}, exposed communication {step.exposed_communication:.1%}",
    )
    if step.copying:
        print_text(
            console,
            f"copies to the host's memory and back take {seconds_text(step.copying)} of a step, of which "
            f"{seconds_text(step.exposed_copies)} are exposed",
        )
    if expected:
        rows = [(each.text, "holds" if each.holds else "fails", each.shown) for each in expected]
        columns = [Column("claim"), Column(""), Column("value", right=True)]
        print_table(console, Table(columns, rows, console.width))
    passes = ", ".join(f"{name} {seconds_text(value)}" for name, value in summary.times)
    print_text(console, f"compiled in {seconds_text(sum(value for _, value in summary.times))}: {passes}")


def _stages(summary: Summary, width: int) -> Table:
    """A row for each stage; three or more equal ones in sequence share a row."""
    rows = []
    copied = any(each.offloads for each in summary.stages)
    for (parameters, tied, *figures), run in groupby(
        summary.stages,
        lambda each: (
            count_text(each.parameters),
            ", ".join(each.tied),
            *(seconds_text(each.seconds[kind]) for kind in ("F", "B", "W")),
            bytes_text(each.saved),
            *([f"{bytes_text(each.offloaded)} × {each.offloads}" if each.offloads else ""] if copied else ()),
        ),
    ):
        alike = list(run)
        for stages in [alike] if len(alike) > 2 else [[each] for each in alike]:
            iterations = [iteration for each in stages for iteration in each.iterations]
            numbers = [[each.index for each in stages], [each.rank for each in stages], [each.chunk for each in stages]]
            rows.append((*map(_span, numbers), _iterations(iterations), parameters, tied, *figures))
    columns = (
        Column("stage"),
        Column("rank", spare=1),
        Column("chunk", spare=3),
        Column("holds"),
        Column("parameters"),
        Column("tied", spare=2),
        *(Column(heading, right=True) for heading in ("F", "B", "W", "saved")),
        *([Column("offloaded", right=True)] if copied else ()),
    )
    return Table(columns, rows, width)


def _optimizer(summary: Summary, width: int) -> Table:
    """A row for each rule of the optimizer."""
    rows = [
        (each.rule, count_text(each.elements), bytes_text(each.state), ", ".join(each.parameters))
        for each in summary.rules
    ]
    numbers = (Column("elements", right=True), Column("state", right=True))
    return Table((Column("optimizer"), *numbers, Column("of", spare=1)), rows, width)


def _span(numbers: list[int]) -> str:
    """`3`, `0 to 3`."""
    low, high = min(numbers), max(numbers)
    return f"{low} to {high}" if low < high else f"{low}"


def _iterations(iterations: list[str]) -> str:
    """`layer.0 … layer.3`."""
    return ", ".join(iterations) if len(iterations) <= 2 else f"{iterations[0]} … {iterations[-1]}"


def _recomputed(paths: Sequence[str]) -> str:
    """`gpt.layer.mlp of iterations 0 to 3; gpt.layer of iteration 11`."""
    by_path: dict[str, list[int]] = {}
    for path in paths:
        iteration = next(int(part) for part in path.split(".") if part.isdigit())
        by_path.setdefault(without_iterations(path), []).append(iteration)
    return "; ".join(
        f"{path} of iteration{'s' * (len(iterations) > 1)} {listed_numbers(iterations)}"
        for path, iterations in by_path.items()
    )


def _memory(summary: Summary, width: int) -> Table:
    """A row for each rank of the pipeline; equal ones in sequence share a row. Of many rows, the least and the most."""
    rows = []
    parts = (*PARTS, *((HOST,) if any(each.host for each in summary.memory) else ()))
    texts = [tuple(map(bytes_text, (each.total, *(getattr(each, part) for part in parts)))) for each in summary.memory]
    for figures, run in groupby(range(len(texts)), lambda rank: texts[rank]):
        rows.append((_span(list(run)), *figures))
    if len(rows) > MOST_ROWS:
        peaks = summary.peak_memory
        ends = sorted(peaks.index(each) for each in (min(peaks), max(peaks)))
        rows = [(f"{rank}", *texts[rank]) for rank in ends]
    if len(summary.memory) == 1:
        rows = [("each", *texts[0])]
    headings = [Column("rank"), Column("peak memory", right=True)]
    return Table([*headings, *(Column(part, right=True, spare=1) for part in parts)], rows, width)
