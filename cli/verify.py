"""`partita verify FILE`: verifies the program of a file, for any mesh, without GPUs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from partita.cli.command import command
from partita.cli.number_format import bytes_text, microbatches_text, queues_text
from partita.cli.output import add_output, deliver_either
from partita.cli.source import add_python_argument, add_source_arguments, load_file, printable, report
from partita.cli.table import Column, Table, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from partita.runtime.fake_gpu.rank import FakeGpuResult
    from partita.runtime.verification.derivatives import Derivatives
    from partita.runtime.verification.execution import Execution
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


@command("verify", add_arguments, "prove")
def run(arguments: argparse.Namespace) -> int:
    """Verify and print. Returns 0 if verified; 1 if wrong, with diagnostics; 4 if not decided."""
    spec = load_file(arguments)
    from partita.runtime.verification.verify import verify

    found = verify(spec, arguments.allow_python, arguments.gpu)
    report((*found.warnings, *found.diagnostics, *([found.reason] if found.reason else [])))
    deliver_either(arguments, found.as_json(), lambda console: show(arguments.file, found, console))
    return STATUS[found.outcome]


def show(file: str, found: Verification, console: Console) -> None:
    """Print a row for each check, then the verdict."""
    validated = all(each.passed for each in found.validations)
    nodes, reshardings = (sum(getattr(each, what) for each in found.validations) for what in ("nodes", "reshardings"))
    most, execution = max(found.peak_memory), found.execution
    rows = [
        ("invariants", "hold", f"{found.actions:,} actions, {found.messages:,} messages; no deadlock"),
        ("memory", "bounded" if found.memory is None or most <= found.memory else "exceeded", _memory(found, most)),
        (
            "translation",
            "valid" if validated else "invalid",
            f"{nodes:,} operations and {reshardings:,} reshardings checked against their rules",
        ),
    ]
    if found.operations:
        wrong = [each.name for each in found.operations if each.problems]
        tried = sum(each.tried for each in found.operations)
        said = f"{tried} declarations of {', '.join(each.name for each in found.operations)} tried on random tensors"
        rows.append(("operations", "fail" if wrong else "hold", ", ".join(wrong) if wrong else said))
    if execution is None:
        why = "not while operations fail" if found.operations and wrong else "no proxy could be compared"
        rows.append(("execution", "not decided", why))
    else:
        rows.append(("execution", "equal" if execution.passed else "fails", _copy(execution)))
        rows.append(("", "", _compared(execution)))
        rows.append(("derivatives", *_derivatives(execution.derivatives)))
    if found.gpu is not None:
        rows.append(("gpu", "runs" if not any(each.faults for each in found.gpu) else "fails", _kernels(found.gpu)))
        rows.append(("", "", _waits(found.gpu)))
        rows.append(("", "", queues_text(found.queues)))
    if found.claims:
        failed = [each.text for each in found.claims if not each.holds]
        shown = ", ".join(failed) if failed else f"{len(found.claims)} of `expect`"
        rows.append(("claims", "fail" if failed else "hold", shown))
    print_table(console, Table([Column("")] * 3, rows, console.width))
    color = {"verified": "green", "wrong": "red"}.get(found.outcome, "yellow")
    console.print(f"{printable(file)}: [{color}]{found.outcome}[/] in {found.seconds:.1f} s", soft_wrap=True)


def _memory(found: Verification, most: int) -> str:
    """What a rank needs, next to what it has."""
    ranks = "1 rank" if found.ranks == 1 else f"each of {found.ranks:,} ranks"
    if found.memory is None:
        return f"at most {bytes_text(most)} on {ranks}"
    if most <= found.memory:
        return f"at most {bytes_text(most)} of {bytes_text(found.memory)} on {ranks}"
    return f"up to {bytes_text(most)} on a rank, which has {bytes_text(found.memory)}"


def _kernels(ranks: Sequence[FakeGpuResult]) -> str:
    """How many ranks ran, and what the busiest launches in a step."""
    most = max(ranks, key=lambda each: len(each.launches))
    shown = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on GPUs that are not there"
    return f"{shown}; up to {len(most.launches):,} kernels a step, which move {bytes_text(most.moved)}"


def _waits(ranks: Sequence[FakeGpuResult]) -> str:
    """How much of its bound a rank takes, and how often the host waits."""
    peaks = [each.peak / each.bound for each in ranks]
    waits = max(len(each.waits) for each in ranks)
    times = "once" if waits == 1 else f"{waits} times"
    return f"at most {100 * max(peaks):.0f}% of the memory bound; the host waits for the device {times} a step"


def _copy(found: Execution) -> str:
    """The mesh, stages and sizes of the proxy that was run."""
    mesh = " × ".join(f"{name} {size}" for name, size in found.mesh) or "one rank"
    sizes = ", ".join(f"{name} {size}" for name, size in found.sizes.items())
    stages = f"{found.stages} stage{'s' * (found.stages > 1)}"
    return f"on {mesh}; {stages}, {microbatches_text(found.microbatches, found.slices)}; {sizes}"


def _compared(found: Execution) -> str:
    """The result of the comparison."""
    if found.worst is None:
        return f"none of {found.compared} tensors could be compared"
    blurred = f"; {len(found.blurred)} more are decided by rounding" if found.blurred else ""
    return f"{found.compared} tensors compared, largest error {found.largest:.1e} ({found.worst}){blurred}"


def _derivatives(found: Derivatives) -> tuple[str, str]:
    """The verdict on the gradients, and on what it is based."""
    if found.reason is not None:
        return "not compared", found.reason
    gradients = "gradient of 1 parameter" if found.parameters == 1 else f"gradients of {found.parameters} parameters"
    return (
        "wrong" if found.diagnostics else "agree",
        f"{gradients}, with differences of the loss, error {found.error:.1e}",
    )
