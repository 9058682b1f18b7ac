"""`partita plan FILE`: the mesh, layout and schedule with which a model is predicted to train fastest."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from partita.cli.argument_types import count, up_to
from partita.cli.command import UsageError, command
from partita.cli.number_format import bytes_text, count_text, seconds_text
from partita.cli.output import add_output, deliver, json_text, text_of
from partita.cli.source import add_source_arguments, load_file
from partita.cli.table import Column, Table, print_table, print_text
from partita.compiler.planner.reasons import reason
from partita.compiler.planner.search import A_DAY, Search, described, details, more
from partita.compiler.planner.sensitivity import FURTHEST
from partita.compiler.planner.space import FABRICS, space_of
from partita.compiler.planner.writing import written_plan
from partita.dsl.limits import RANKS

if TYPE_CHECKING:
    from rich.console import Console

    from partita.compiler.planner.search import Plan, SearchResult
    from partita.compiler.planner.sensitivity import RunnerUp


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_source_arguments(parser)
    option = parser.add_argument
    option("--devices", type=up_to(RANKS), metavar="N", help="number of devices (default: the mesh's)")
    option("--device", metavar="NAME", help="a100, h100, h200 or b200 in standard machines (default: the mesh's)")
    option("--keep-mesh", action="store_true", help="keep the mesh sizes")
    option("--top", type=count, default=10, metavar="K", help="number of plans to show (default: 10)")
    what = "search budget in seconds (default: 15)"
    option("--within", type=up_to(A_DAY), default=15, metavar="SECONDS", help=what)
    add_output(parser, "the plans", "write the best plan as a complete file")


@command("plan", add_arguments, "search", "autotune", "tune")
def run(arguments: argparse.Namespace) -> None:
    """Search and print. Raises UsageError for an unknown device, or if OUT cannot be written."""
    spec = load_file(arguments, fitting=False)
    if arguments.device is not None and arguments.device not in FABRICS:
        raise UsageError(f"--device is one of {', '.join(FABRICS)}")
    space = space_of(spec, arguments.devices, arguments.keep_mesh, arguments.device)
    result = Search(space, arguments.top, arguments.within).run()
    best = result.plans[0]
    if arguments.output is not None:
        text = written_plan(best, arguments.file, arguments.overrides, arguments.root, arguments.output)
        deliver(text, arguments.output)
    deliver(json_text(as_json(result)) if arguments.json else text_of(lambda console: show(result, console)))
    if arguments.output is not None and not arguments.json:
        print(f"{'the best is the original file, which' if best.given else 'the best'} is in {arguments.output}")


def as_json(result: SearchResult) -> dict[str, Any]:
    """The object of `plan --json`, a stable format."""
    return {
        "devices": result.space.devices,
        "device": result.device.name,
        "memory": result.device.memory,
        "seconds": result.seconds,
        "looked": list(result.looked),
        "fitting": result.fitting,
        "within": result.within,
        "cut_short": list(result.cut_short),
        "own": None if result.own is None else _plan_json(result.own, result) | {"fits": result.own_fits},
        "plans": [_plan_json(plan, result) for plan in result.plans],
        "runner_up": None if result.runner_up is None else _runner_up_json(result.runner_up),
    }


def _runner_up_json(second: RunnerUp) -> dict[str, Any]:
    wins = [
        {
            "record": each.record.name,
            "factor": each.factor,
            "below": each.factor < 1,
            "now": each.record.figure,
            "at": None if each.record.figure is None else each.record.figure * each.factor,
        }
        for each in second.wins
    ]
    return {"margin": second.margin, "wins": wins}


def _plan_json(plan: Plan, result: SearchResult) -> dict[str, Any]:
    candidate, prediction = plan.candidate, plan.prediction
    return {
        "mesh": dict(next(iter(plan.file.meshes.values())).axes),
        "zero": candidate.zero,
        "sequence": candidate.sequence,
        "schedule": candidate.schedule,
        "chunks": candidate.chunks,
        "microbatches": plan.microbatches,
        "microbatch": candidate.size,
        "recompute": candidate.recompute or None,
        "context": (candidate.exchange or "contiguous") if candidate.context > 1 else None,
        "experts_apart": candidate.routed,
        "shared_vocabulary": candidate.shared,
        "offload_state": candidate.offload,
        "slices": candidate.slices,
        "pieces": candidate.pieces,
        "validate_after": candidate.late,
        "step_time": prediction.step_time,
        f"{prediction.unit}_per_second": prediction.rate,
        "mfu": prediction.mfu,
        "bubble": prediction.timeline.bubble,
        "peak_memory": plan.peak,
        "given": plan.given,
        "why": None if plan is result.plans[0] else reason(plan, result.plans[0]),
    }


def show(result: SearchResult, console: Console) -> None:
    """Print a row for each plan, fastest first; then a faster one that does not fit, and search statistics."""
    space, best = result.space, result.plans[0]
    devices = f"{space.devices:,} × {result.device.name} of {bytes_text(result.device.memory)}"
    print_text(console, f": {devices}; {space.rows:,} rows of `{space.batch}` a step", title=space.given.name)
    own = _as_it_is(result)
    if own:
        print_text(console, own)
    also = [
        name
        for i, name in enumerate((space.context, space.expert), 3)
        if any(p.candidate.mesh[i] > 1 for p in result.plans)
    ]

    def mesh(plan: Plan) -> str:
        sizes = dict(zip((space.context, space.expert), plan.candidate.mesh[3:], strict=True))
        return "×".join(map(str, (*plan.candidate.mesh[:3], *(sizes[name] for name in also))))

    cells: Sequence[tuple[Column, Callable[[Plan], str]]] = (
        (Column("mesh"), mesh),
        (Column("layout"), lambda plan: ", ".join(["seq"] * plan.candidate.sequence + details(plan.candidate)) or "–"),
        (Column("schedule"), lambda plan: plan.candidate.schedule if plan.candidate.pipe > 1 else "–"),
        (Column("chunks", right=True), lambda plan: f"{plan.candidate.chunks}" if plan.candidate.chunks > 1 else ""),
        (Column("batches", right=True), lambda plan: f"{plan.microbatches}×{plan.candidate.size}"),
        (Column("recompute", spare=1), lambda plan: plan.candidate.recompute or "–"),
        (Column("step", right=True), lambda plan: seconds_text(plan.prediction.step_time)),
        (Column(f"{best.prediction.unit}/s", right=True, spare=3), lambda plan: count_text(plan.prediction.rate)),
        (Column("MFU", right=True, spare=2), lambda plan: f"{plan.prediction.mfu:.1%}"),
        (Column("bubble", right=True, spare=4), lambda plan: f"{plan.prediction.timeline.bubble:.1%}"),
        (Column("memory", right=True), lambda plan: bytes_text(plan.peak)),
        (Column("why slower"), lambda plan: _why(plan, best)),
    )
    rows = [[cell(plan) for _, cell in cells] for plan in result.plans]
    print_table(console, Table([column for column, _ in cells], rows, console.width))
    sizes = " × ".join((space.data, space.pipe, space.tensor, *also))
    sliced = "; slices: parts of each microbatch" if any(plan.candidate.slices > 1 for plan in result.plans) else ""
    print_text(
        console, f"mesh: {sizes}; batches: microbatches × rows of each on a rank{sliced}; seq: sequence parallel"
    )
    if result.larger is not None:
        candidate, outlook = result.larger
        print_text(
            console,
            f"faster, but does not fit: {described(space, candidate)}: about {seconds_text(outlook.parts.step)}, "
            f"and {bytes_text(outlook.peak)} on a rank",
        )
    if result.runner_up is not None:
        print_text(console, _runner_up(result.runner_up))
    if space.unplaced:
        print_text(console, f"dropped, since they name stages: {', '.join(space.unplaced)}")
    bounds, outlooks, plans = result.looked
    print_text(
        console,
        f"{bounds:,} candidates bounded, {outlooks:,} estimated, {plans:,} compiled, in {result.seconds:.1f} s",
    )
    if result.cut_short:
        print_text(console, _cut_short(result))


def _cut_short(result: SearchResult) -> str:
    """What the budget has left untried."""
    *others, last = result.cut_short
    phases = f"{', '.join(others)} and {last}" if others else last
    compiled = result.looked[-1]
    return (
        f"the budget of {result.within:g} s ended the search before all candidates were {phases}: of "
        f"{result.fitting:,} estimated to fit, {compiled:,} {'was' if compiled == 1 else 'were'} compiled; "
        f"`--within {more(result.within)}` may find faster plans"
    )


def _as_it_is(result: SearchResult) -> str:
    """What the original file takes; empty if it is for another number of devices."""
    own, best = result.own, result.plans[0]
    if own is None:
        return f"the original file does not compile: {result.wrong.message}" if result.wrong else ""
    prefix = f"the original file: {seconds_text(own.prediction.step_time)}, {bytes_text(own.peak)}; "
    if not result.own_fits:
        return f"{prefix}it does not fit"
    if best.given:
        return f"{prefix}the file as it stands is the best found"
    return f"{prefix}{own.prediction.step_time / best.prediction.step_time - 1:+.1%}: {reason(own, best)}"


def _why(plan: Plan, best: Plan) -> str:
    """Marks the original file; how much slower than the best a plan is, and why."""
    words = ["the original file"] * plan.given
    if plan is not best:
        words.append(f"+{plan.prediction.step_time / best.prediction.step_time - 1:.1%}: {reason(plan, best)}")
    return "; ".join(words)


def _runner_up(second: RunnerUp) -> str:
    """What would have to be true for the second best plan to be the best."""
    words = []
    for each in second.wins:
        record, slower = each.record, each.factor < 1
        how = "slower" if slower else "faster"
        if record.figure is None:
            words.append(
                f"the {record.name} is {max(each.factor, 1 / each.factor):.3g} times as {'slow' if slower else 'fast'}"
            )
        else:
            at, now = (f"{figure / 1e9:.3g} GB/s" for figure in (record.figure * each.factor, record.figure))
            words.append(f"{record.name} is {how} than {at} (recorded: {now})")
    if not words:
        return (
            f"the runner-up takes {second.margin:+.1%}, and no link or figure of the device that is up to "
            f"{FURTHEST:.0f} times as fast or slow would make it the best"
        )
    return f"the runner-up takes {second.margin:+.1%}; it is estimated to win if {', or if '.join(words)}"
