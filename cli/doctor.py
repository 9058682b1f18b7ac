"""`partita doctor`: what this machine has, what is wrong with it, and a self test with one rank per device."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from attrs import field, frozen

from partita.cli.argument_types import up_to
from partita.cli.command import UsageError, command
from partita.cli.extras import EXTRAS, missing
from partita.cli.number_format import bytes_text, seconds_text
from partita.cli.output import add_output, deliver_either
from partita.cli.source import counts_text, printable, report
from partita.cli.table import Column, Table, print_table
from partita.cli.training.devices import DRIVERS, chosen, device_of_rank
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.limits import LOCAL_RANKS
from partita.dsl.version import __version__
from partita.runtime.doctor import findings, gpus, machine
from partita.runtime.doctor.machine import Facts
from partita.runtime.doctor.parts import run_part
from partita.runtime.doctor.ranks import FACTS, finished, run_rank, unfinished
from partita.runtime.supervision.cores import usable
from partita.runtime.supervision.identity import Identity, rank_from_environment
from partita.runtime.supervision.launcher import launch
from partita.runtime.transports.registry import TRANSPORTS, InProcess, Processes

if TYPE_CHECKING:
    from rich.console import Console

PART, FOLDER = "--part", "--folder"
TORCH, RANKS, RANK = "torch", "ranks", "rank"
TORCH_SECONDS = 120.0  # the first import after an installation reads gigabytes
TEST_SECONDS = 60
MOST_RANKS = 8  # on CPUs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None may be a prefix of one of torchrun's, which would consume it."""
    what = "ranks of the self test (default: one per GPU, or cores)"
    parser.add_argument("--ranks", type=up_to(LOCAL_RANKS), metavar="N", help=what)
    parser.add_argument("--transport", choices=tuple(TRANSPORTS), help="default: nccl where there is a GPU")
    parser.add_argument("--quick", action="store_true", help="only look: no self test")
    what = f"end the self test after this long (default: {TEST_SECONDS})"
    parser.add_argument("--timeout", type=up_to(3600), default=TEST_SECONDS, metavar="SECONDS", help=what)
    add_output(parser, "the results")
    parser.add_argument(PART, choices=(TORCH, RANKS, RANK), help=argparse.SUPPRESS)
    parser.add_argument(FOLDER, type=Path, help=argparse.SUPPRESS)


@command("doctor", add_arguments, "diagnose", "selftest", "env")
def run(arguments: argparse.Namespace) -> int:
    """Examine and print. Returns 0 if nothing is wrong, but for warnings; 1 if something is; 2 for wrong usage."""
    if arguments.part is not None:
        return _part(arguments)
    if arguments.transport is not None and isinstance(TRANSPORTS[arguments.transport], InProcess):
        raise UsageError(f"--transport {arguments.transport} runs all ranks in one process, and tests none")
    start = time.monotonic()
    results = _examined(arguments)
    report(results.diagnostics)
    passed = not any(each.severity == "error" for each in results.diagnostics)
    if results.shown:
        seconds = time.monotonic() - start
        deliver_either(arguments, results.as_json(passed, seconds), lambda console: show(results, seconds, console))
    return int(not passed)


@frozen
class DoctorReport:
    """Everything: a machine's facts each, what each rank measured, if they were tested, over which transport, and what
    is wrong. Only one rank of a launcher has everything, which is `shown`.
    """

    machines: Sequence[Facts] = ()
    ranks: Sequence[Facts] = ()
    transport: str | None = None
    diagnostics: Sequence[Diagnostic] = field(default=())
    shown: bool = True

    def as_json(self, passed: bool, seconds: float) -> dict[str, object]:
        """A JSON object."""
        return {
            "passed": passed,
            "machines": list(self.machines),
            "transport": self.transport,
            "ranks": [{"host": each["host"], "tests": each["tests"]} for each in self.ranks],
            "findings": [each.as_json() for each in self.diagnostics],
            "seconds": seconds,
        }


def _examined(arguments: argparse.Namespace) -> DoctorReport:
    """Look at the machine, then let its ranks, or this one of a launcher, do the self test."""
    wrong: list[Diagnostic] = []
    identity, testable = None, not arguments.quick
    try:
        identity = rank_from_environment()
    except ValueError as error:
        testable = False
        help = "start it by itself, or with torchrun or srun as its variables say"
        wrong.append(Diagnostic("E1103", f"the launcher's variables are wrong: {error}", help=help))
    looks = identity is None or identity.local_rank == 0
    facts, failed = _facts() if looks else ({}, {})
    gpu_count = len((facts.get("torch") or {}).get("gpus", ()))
    count = arguments.ranks or gpu_count or max(2, min(MOST_RANKS, len(usable())))
    ranks, local = (identity.ranks, identity.local_ranks) if identity is not None else (count, count)
    devices = 1 if identity is not None and identity.own_gpu else local
    several = identity is not None and not identity.local
    if looks:
        wrong += findings.of_machine(facts, failed, ranks, local, several)
    if not testable or "torch_problem" in facts:
        return DoctorReport((facts,) if looks else (), (), None, wrong, shown=looks)
    try:
        kind = chosen(arguments.transport, gpu_count, devices) if looks else None
    except Refused as refused:
        return DoctorReport((facts,), (), None, (*wrong, *refused.diagnostics), shown=looks)
    with TemporaryDirectory(prefix="partita-doctor-") as name:
        folder = Path(name)
        if facts:
            (folder / FACTS).write_text(json.dumps(facts))
        return _tested(arguments, identity, kind, count, folder, wrong)


def _facts() -> tuple[Facts, dict[str, str]]:
    """Everything about this machine; and what could not be examined, and why."""
    facts, failed = machine.examine(os.environ)
    facts["partita"] = __version__
    facts["device_files"] = any(Path(each).exists() for each in DRIVERS)
    try:
        facts["gpus"], facts["links"], problem = gpus.from_driver()
        if problem is not None:
            facts["driver_problem"] = problem
    except (OSError, ValueError) as error:
        failed["nvidia-smi"] = str(error)
    if missing("run", "it") is not None:
        facts["torch_problem"] = f"cannot be started: {', '.join(EXTRAS['run'])} are needed"
        return facts, failed
    ended = run_part(_command(TORCH), TORCH_SECONDS)
    if ended.problem is None:
        facts["torch"] = json.loads(ended.output.splitlines()[-1])  # imports may print, too
    else:
        facts["torch_problem"] = ended.problem
    return facts, failed


def _tested(
    arguments: argparse.Namespace,
    identity: Identity | None,
    kind: Processes | InProcess | None,
    count: int,
    folder: Path,
    wrong: list[Diagnostic],
) -> DoctorReport:
    """The self test, of `count` ranks that are started here, or as one rank of a launcher."""
    options = [FOLDER, str(folder), "--timeout", str(arguments.timeout)]
    if kind is not None or arguments.transport is not None:
        options += ["--transport", kind.name if kind is not None else arguments.transport]
    if identity is None:
        command, own = [*_command(RANKS), "--ranks", str(count), *options], range(count)
    else:
        command, own = [*_command(RANK), *options], range(identity.rank, identity.rank + 1)
    ended = run_part(command, arguments.timeout)
    facts = json.loads((folder / FACTS).read_text()) if (folder / FACTS).exists() else None
    machines = [facts] if facts is not None else []
    name = kind.name if kind is not None else "the transport"
    first = identity is None or identity.rank == 0
    ranks = finished(folder)
    if ended.problem is not None or (first and ranks is None):
        wrong += unfinished(ended, folder, own, name)
        return DoctorReport(machines, (), name, wrong, shown=first)
    if ranks is not None:
        hosts = [each["host"] for each in ranks]
        wrong += findings.of_ranks([each["tests"] for each in ranks], hosts, kind is not None and kind.gpu)
        if identity is not None:
            machines = [each["facts"] for each in ranks if each["facts"] is not None]
            wrong += findings.of_machines(machines)
    return DoctorReport(machines, ranks or (), name, wrong, shown=first)


def _command(part: str) -> list[str]:
    return [sys.executable, "-m", "partita", "doctor", PART, part]


def _part(arguments: argparse.Namespace) -> int:
    """Do a part in this process."""
    if arguments.part == TORCH:
        print(json.dumps(gpus.from_torch()))
        return 0
    if arguments.part == RANKS:
        passed = [FOLDER, str(arguments.folder), "--timeout", str(arguments.timeout)]
        return launch([*_command(RANK), *passed, "--transport", arguments.transport], arguments.ranks)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    identity = rank_from_environment()
    if identity is None:
        raise UsageError(f"{PART} is for the processes that `partita doctor` starts")
    kind, device = device_of_rank(arguments.transport, identity)
    return run_rank(identity, kind, device, arguments.folder, float(arguments.timeout))


# ---------------------------------------------------------------- for people


def show(results: DoctorReport, seconds: float, console: Console) -> None:
    """Print what each machine has, what was measured, and the verdict."""
    for facts in results.machines:
        print_table(console, Table([Column("")] * 2, list(_rows(facts)), console.width))
        console.print()
    if results.ranks:
        heading = f"{len(results.ranks)} rank{'s' * (len(results.ranks) > 1)} over {results.transport}"
        console.print(heading, soft_wrap=True, markup=False)
        rows = [_measured([each["tests"][i] for each in results.ranks]) for i in range(len(results.ranks[0]["tests"]))]
        columns = [Column("test"), Column("bytes", right=True), Column("time", right=True), Column("rate", right=True)]
        print_table(console, Table([*columns, Column("result")], rows, console.width))
    counts = counts_text(results.diagnostics)
    tested = "" if results.ranks else "; not tested"
    color = "red" if any(each.severity == "error" for each in results.diagnostics) else "yellow" if counts else "green"
    console.print(f"[{color}]{counts or 'nothing wrong'}[/]{tested} in {seconds:.1f} s", soft_wrap=True)


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    """What a machine has, a row a subject."""
    system, memory, torch = facts.get("system", {}), facts.get("memory", {}), facts.get("torch") or {}
    quota = f", {system['quota']:g} by quota" if system.get("quota") else ""
    cores = f"{system.get('cores')} of {system.get('all_cores')} cores{quota}"
    yield "machine", printable(f"{system.get('host')}: {system.get('system')}, {cores}, {system.get('processor')}")
    sizes = [_size(memory, "available", " free of ") + _size(memory, "total")]
    if memory.get("shared") is not None:
        sizes.append(f"/dev/shm {_size(memory, 'shared_free', ' free of ')}{_size(memory, 'shared')}")
    yield "memory", "; ".join(sizes)
    versions = [f"{name} {version}" for name, version in findings.versions(facts).items()]
    yield "versions", printable(", ".join(versions))
    yield "GPUs", printable(_gpus(facts, torch))
    network = facts.get("network", {})
    interfaces = [_interface(name, each) for name, each in network.get("interfaces", {}).items()]
    fabric = [f"{each['port']} {each['rate']}" for each in network.get("fabric", ())]
    named = f"{system.get('host')} is {', '.join(network.get('addresses') or ()) or 'unknown'}"
    yield "network", printable("; ".join([*interfaces, *fabric, named]))
    limits = facts.get("limits", {})
    yield "limits", ", ".join(f"{name} {_limit(name, value)}" for name, value in limits.items())
    disks = [f"{bytes_text(free)} free in {path}" for path, free in facts.get("disk", {}).items()]
    yield "disk", printable(", ".join(disks))
    variables = [f"{name}={value}" for name, value in facts.get("variables", {}).items()]
    yield "variables", printable(" ".join(variables) or "-")


def _size(sizes: Mapping[str, float | None], name: str, after: str = "") -> str:
    value = sizes.get(name)
    return f"{bytes_text(value)}{after}" if value is not None else ""


def _gpus(facts: Facts, torch: Facts) -> str:
    """`8 × NVIDIA H100, 79.6 GiB, driver 550.54, 1,980 of 1,980 MHz, NV18`."""
    visible, driver = torch.get("gpus", []), facts.get("gpus") or []
    if not visible:
        return f"none that torch can use; the driver has {len(driver)}" if driver else "none"
    kinds = sorted({f"{each['name']}, {bytes_text(each['memory'])}" for each in visible})
    parts = [f"{len(visible)} × {' or '.join(kinds)}"]
    clocked = [each for each in driver if all(isinstance(each.get(name), float) for name in ("clock", "highest_clock"))]
    clocks = sorted({f"{each['clock']:,.0f} of {each['highest_clock']:,.0f} MHz" for each in clocked})
    links = sorted({kind for i, row in enumerate(facts.get("links") or []) for j, kind in enumerate(row) if i != j})
    return ", ".join([*parts, *clocks[:2], *links])


def _interface(name: str, interface: Facts) -> str:
    speed = f" {bytes_text(interface['speed'])}/s" if interface["speed"] else ""
    return f"{name} {interface['address'] or 'without address'}{speed}{'' if interface['up'] else ' down'}"


def _limit(name: str, value: int | None) -> str:
    if value is None:
        return "unlimited"
    return bytes_text(value) if name == "locked" else f"{value:,}"


def _measured(tests: Sequence[Facts]) -> tuple[str, str, str, str, str]:
    """A row of a test: the slowest rank's figures."""
    slowest = max(tests, key=lambda each: each["seconds"])
    rate = ""
    if slowest["rate"] is not None:
        product = slowest["test"] == "product"
        rate = f"{slowest['rate'] / 1e12:.2f} TFLOP/s" if product else f"{slowest['rate'] / 1e9:.2f} GB/s"
    wrong = sum(each["wrong"] is not None for each in tests)
    size = bytes_text(slowest["bytes"]) if slowest["bytes"] else ""
    seconds = seconds_text(slowest["seconds"]) if slowest["seconds"] else ""
    return slowest["test"], size, seconds, rate, f"wrong on {wrong} ranks" if wrong else "right"
