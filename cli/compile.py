"""`partita compile FILE`: the program in numbers, or any of its forms."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from partita.cli.source import add_source_arguments, compile_or_report, report

if TYPE_CHECKING:
    from partita.compiler.pipeline import Compilation

SUMMARY = "compile a file: stages, parameters, collectives, memory, bubble; or print a form of the program"
FORMS = ("graph", "joint", "partitioned", "schedule", "python")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_source_arguments(parser)
    parser.add_argument("--emit", choices=FORMS, help="print this form of the program")
    parser.add_argument("--stage", type=int, metavar="N", help="with --emit: only this stage")
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    parser.add_argument("-o", "--output", metavar="OUT", help="write to a file instead of the terminal")


def run(arguments: argparse.Namespace) -> int:
    """Compile and print. 0, or 1 with diagnostics."""
    state = compile_or_report(arguments)
    if state is None:
        return 1
    report(state.warnings)
    if arguments.stage is not None and not 0 <= arguments.stage < state.pipeline.stages:
        print(f"partita: there is no stage {arguments.stage}: stages are 0 to {state.pipeline.stages - 1}")
        return 2
    if arguments.emit:
        text = _form(state, arguments.emit, arguments.stage)
    elif arguments.json:
        from partita.compiler.summary import summarize

        text = json.dumps(summarize(state).as_json(), indent=2) + "\n"
    else:
        text = _summary(state, terminal=arguments.output is None)
    if arguments.output:
        try:
            with open(arguments.output, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            print(f"partita: cannot write {arguments.output}: {error.strerror}", file=sys.stderr)
            return 2
    else:
        sys.stdout.write(text)
    return 0


def _form(state: Compilation, form: str, stage: int | None) -> str:
    """The text of one form, of one stage where that is asked for."""
    from attrs import evolve

    from partita.compiler.text import graph_text, node_text

    if form in ("graph", "joint"):
        graph = state.placed if form == "graph" else state.joint
        if stage is not None:
            graph = evolve(graph, nodes=tuple(node for node in graph.nodes if node.stage == stage))
        return graph_text(graph)
    if form == "partitioned":
        lines = []
        for part in state.partitioned.stages:
            if stage in (None, part.index):
                lines.append(f"stage {part.index}")
                lines += [f"parameter %{p.name}: {p.value.type}" for p in part.parameters]
                lines += [node_text(node) for node in part.nodes]
        if stage is None:
            lines.append("update")
            for _, nodes in (*state.update.reduce, *state.update.finish):
                lines += [node_text(node) for node in nodes]
            lines += [node_text(node) for node in state.update.clip]
            for each in state.update.parameters:
                lines += [node_text(node) for node in (*each.finish, *each.update)]
        return "\n".join(lines) + "\n"
    if form == "schedule":
        return f"{state.schedule}\n"
    if stage is None:
        return str(state.program.source)
    return _stage_source(state.program.source, set(state.program.stages[stage].functions.values()))


def _stage_source(source: str, wanted: set[str]) -> str:
    """The functions of one stage and the shared ones that they call."""
    import re

    functions = re.split(r"(?m)^(?=def )", source)
    bodies = {match[1]: text for text in functions if (match := re.match(r"def (\w+)", text))}
    called = [name for name in bodies if any(f"{name}(" in bodies[w] for w in wanted) and name not in wanted]
    return functions[0] + "".join(text for name, text in bodies.items() if name in wanted or name in called)


def _summary(state: Compilation, terminal: bool) -> str:
    """The summary as tables."""
    import io

    from rich.console import Console
    from rich.table import Table

    from partita.cli.figures import bytes_text, count_text, seconds_text
    from partita.cli.traffic import collective_table, mesh_text, transfer_table
    from partita.compiler.summary import summarize

    summary = summarize(state)
    colour = terminal and sys.stdout.isatty()
    buffer = io.StringIO()
    width = None if colour else 110
    console = Console(file=buffer, force_terminal=colour, width=width, highlight=False)
    program = state.program
    microbatches = f"{program.microbatches} microbatch{'es' * (program.microbatches > 1)}"
    chunks = "" if state.schedule.chunks == 1 else f" × {state.schedule.chunks} chunks"
    console.print(
        f"[bold]{summary.name}[/]: {count_text(summary.parameters)} parameters; "
        f"{mesh_text(summary.mesh)}{chunks}, {len(summary.stages)} stage{'s' * (len(summary.stages) > 1)}; "
        f"schedule {state.schedule.name}, {microbatches}; {state.train.precision}",
        soft_wrap=True,
    )
    table = Table("stage", "rank", "chunk", "holds", "parameters", "tied", "F", "B", "W", "saved", box=None)
    for stage in summary.stages:
        table.add_row(
            str(stage.index),
            str(stage.rank),
            str(stage.chunk),
            _range(stage.turns),
            count_text(stage.parameters),
            ", ".join(stage.tied),
            *(seconds_text(stage.seconds[kind]) for kind in ("F", "B", "W")),
            bytes_text(stage.saved),
        )
    console.print(table)
    if summary.collectives:
        console.print(collective_table(summary.collectives))
    if summary.transfers:
        console.print(transfer_table((*summary.transfers, *summary.tied)))
    memory = ", ".join(bytes_text(value) for value in summary.peak_memory)
    columns = " of the pipeline" if summary.ranks > len(summary.peak_memory) > 1 else ""
    console.print(f"peak memory by rank{columns}: {memory} (tensors of the program; kernels' workspace aside)")
    ends = f", and {seconds_text(summary.ends)} of collectives at its ends" if summary.ends else ""
    console.print(
        f"predicted on {state.device.name}: step {seconds_text(summary.timeline.makespan)}, "
        f"bubble {summary.timeline.bubble:.1%}{ends}"
    )
    console.print(f"compiled in {seconds_text(sum(value for _, value in summary.times))}")
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _range(turns: tuple[str, ...]) -> str:
    """`layer.0 … layer.3`."""
    if len(turns) <= 2:
        return ", ".join(turns)
    return f"{turns[0]} … {turns[-1]}"
