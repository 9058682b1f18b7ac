"""`partita verify FILE`: verifies the program of a file, for any mesh, without GPUs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from partita.cli.command import command
from partita.cli.formats import add_format, formatted
from partita.cli.number_format import bytes_text, microbatches_text, queues_text
from partita.cli.output import add_output, deliver_either
from partita.cli.source import add_python_argument, add_source_arguments, load_file, printable, report
from partita.cli.table import Column, Table, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from partita.runtime.fake_gpu.rank import FakeGpuResult
    from partita.runtime.verification.execution import Execution
    from partita.runtime.verification.meaning import Meaning
    from partita.runtime.verification.verify import Verification

# By the value of `Outcome`.
STATUS = {"verified": 0, "wrong": 1, "not decided": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.set_defaults(needs="run")
    add_source_arguments(parser)
    add_python_argument(parser)
    what = "also run a rank of each stage on a GPU that is not there: on shapes alone"
    parser.add_argument("--gpu", action="store_true", help=what)
    add_output(parser, "the results")
    add_format(parser)


@command("verify", add_arguments, "prove")
@formatted
def run(arguments: argparse.Namespace) -> int:
    """Verify and print. Returns 0 if verified; 1 if wrong, with diagnostics; 4 if not decided."""
    spec = load_file(arguments)
    from partita.runtime.verification.verify import verify

    result = verify(spec, arguments.allow_python, arguments.gpu)
    report((*result.warnings, *result.diagnostics, *([result.reason] if result.reason else [])))
    deliver_either(arguments, result.as_json(), lambda console: show(arguments.file, result, console))
    return STATUS[result.outcome]


def show(file: str, result: Verification, console: Console) -> None:
    """Print a row for each check, then the verdict."""
    validated = all(each.passed for each in result.validations)
    nodes, reshardings = (sum(getattr(each, what) for each in result.validations) for what in ("nodes", "reshardings"))
    peak, execution = max(result.peak_memory), result.execution
    rows = [
        ("invariants", "hold", f"{result.actions:,} actions, {result.messages:,} messages; no deadlock"),
        ("memory", "bounded" if result.memory is None or peak <= result.memory else "exceeded", _memory(result, peak)),
        (
            "translation",
            "valid" if validated else "invalid",
            f"{nodes:,} operations and {reshardings:,} reshardings checked against their rules",
        ),
    ]
    if result.operations:
        wrong = [each.name for each in result.operations if each.problems]
        trials = sum(each.tried for each in result.operations)
        note = f"{trials} declarations of {', '.join(each.name for each in result.operations)} tried on random tensors"
        rows.append(("operations", "fail" if wrong else "hold", ", ".join(wrong) if wrong else note))
    if execution is None:
        why = "not while operations fail" if result.operations and wrong else "no proxy could be compared"
        rows.append(("execution", "not decided", why))
    else:
        rows.append(("execution", "equal" if execution.passed else "fails", _copy(execution)))
        rows.append(("", "", _compared(execution)))
        rows.append(("meaning", *_meaning(execution.meaning)))
    if result.gpu is not None:
        rows.append(("gpu", "runs" if not any(each.faults for each in result.gpu) else "fails", _kernels(result.gpu)))
        rows.append(("", "", _waits(result.gpu)))
        rows.append(("", "", queues_text(result.queues)))
    if result.claims:
        failed = [each.text for each in result.claims if not each.holds]
        shown = ", ".join(failed) if failed else f"{len(result.claims)} of `expect`"
        rows.append(("claims", "fail" if failed else "hold", shown))
    print_table(console, Table([Column("")] * 3, rows, console.width))
    color = {"verified": "green", "wrong": "red"}.get(result.outcome, "yellow")
    console.print(f"{printable(file)}: [{color}]{result.outcome}[/] in {result.seconds:.1f} s", soft_wrap=True)


def _memory(result: Verification, peak: int) -> str:
    """What a rank needs, next to what it has."""
    ranks = "1 rank" if result.ranks == 1 else f"each of {result.ranks:,} ranks"
    if result.memory is None:
        return f"at most {bytes_text(peak)} on {ranks}"
    if peak <= result.memory:
        return f"at most {bytes_text(peak)} of {bytes_text(result.memory)} on {ranks}"
    return f"up to {bytes_text(peak)} on a rank, which has {bytes_text(result.memory)}"


def _kernels(ranks: Sequence[FakeGpuResult]) -> str:
    """How many ranks ran, and what the busiest launches in a step."""
    busiest = max(ranks, key=lambda each: len(each.launches))
    shown = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on GPUs that are not there"
    return f"{shown}; up to {len(busiest.launches):,} kernels a step, which move {bytes_text(busiest.moved)}"


def _waits(ranks: Sequence[FakeGpuResult]) -> str:
    """How much of its bound a rank takes, and how often the host waits."""
    peaks = [each.peak / each.bound for each in ranks]
    waits = max(len(each.waits) for each in ranks)
    times = "once" if waits == 1 else f"{waits} times"
    return f"at most {100 * max(peaks):.0f}% of the memory bound; the host waits for the device {times} a step"


def _copy(execution: Execution) -> str:
    """The mesh, stages and sizes of the proxy that was run."""
    mesh = " × ".join(f"{name} {size}" for name, size in execution.mesh) or "one rank"
    sizes = ", ".join(f"{name} {size}" for name, size in execution.sizes.items())
    stages = f"{execution.stages} stage{'s' * (execution.stages > 1)}"
    return f"on {mesh}; {stages}, {microbatches_text(execution.microbatches, execution.slices)}; {sizes}"


def _compared(execution: Execution) -> str:
    """The result of the comparison."""
    if execution.worst is None:
        return f"none of {execution.compared} tensors could be compared"
    blurred = f"; {len(execution.blurred)} more are decided by rounding" if execution.blurred else ""
    return f"{execution.compared} tensors compared, largest error {execution.largest:.1e} ({execution.worst}){blurred}"


def _meaning(meaning: Meaning) -> tuple[str, str]:
    """The verdict on the single device, and on what it is based."""
    if meaning.reason is not None:
        return "not compared", meaning.reason
    tensors = f"{meaning.compared} tensors of one device compared with the file's meaning"
    return "wrong" if meaning.diagnostics else "equal", f"{tensors}, largest error {meaning.error:.1e}"
