"""`partita profile`: measures this machine's device and links, and writes a record for `profile("machine.json")`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from partita.cli.argument_types import up_to
from partita.cli.command import UsageError, command
from partita.cli.output import deliver
from partita.cli.training.devices import chosen, device_of_rank, gpus_here
from partita.compiler.costs.record import read
from partita.dsl.limits import LOCAL_RANKS
from partita.runtime.heap import keep_pages
from partita.runtime.supervision.cores import usable
from partita.runtime.supervision.identity import rank_from_environment
from partita.runtime.supervision.launcher import launch
from partita.runtime.supervision.rendezvous import connect
from partita.runtime.transports.registry import TRANSPORTS, InProcess

RANK_FILE = "--record"
MOST_COUNTS = 8  # each has a record in every precision; this many stay well within the size limit of a file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.set_defaults(needs="run")
    parser.add_argument("-o", "--output", default="machine.json", metavar="FILE", help="the profile")
    parser.add_argument("--ranks", type=_counts, metavar="N,…", help="numbers of concurrent ranks (default: 1, 2, 4 …)")
    parser.add_argument("--transport", choices=tuple(TRANSPORTS), help="default: nccl where there is a GPU")
    what = "compute dtype (default: f32, on a GPU bf16)"
    parser.add_argument("--precision", choices=("f32", "bf16", "f64"), action="append", help=what)
    parser.add_argument("--quick", action="store_true", help="fewer sizes: takes seconds, but is less accurate")
    parser.add_argument(RANK_FILE, type=Path, help=argparse.SUPPRESS)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted(set(map(up_to(LOCAL_RANKS), text.split(",")))))
    except argparse.ArgumentTypeError:
        counts = ()
    if not 1 <= len(counts) <= MOST_COUNTS:
        raise argparse.ArgumentTypeError(f"at most {MOST_COUNTS} numbers of ranks, from 1 to {LOCAL_RANKS}: `1,2`")
    return counts


@command("profile", add_arguments, "benchmark")
def run(arguments: argparse.Namespace) -> int:
    """Measure and write. Returns 0, or the status of a rank that failed. Raises UsageError if there are fewer GPUs than
    ranks, or the record cannot be written.
    """
    if arguments.record is not None:
        return _measure(arguments)

    gpus = gpus_here()
    kind = TRANSPORTS[arguments.transport] if arguments.transport else chosen(None, gpus, 1)
    if isinstance(kind, InProcess):
        raise UsageError(f"--transport {kind.name} runs all ranks in one process, and measures nothing")
    limit = gpus if kind.gpu else max(2, len(usable()))
    counts = arguments.ranks or tuple(count for count in (1, 2, 4, 8, 16, 32, 64) if count <= max(1, limit))
    problem = kind.problem(gpus, counts[-1])
    if problem is not None:
        raise UsageError(f"{problem.message}; use fewer --ranks, or another --transport")
    records = []
    with TemporaryDirectory() as folder:
        for count in counts:
            path = Path(folder) / f"{count}.json"
            command = [sys.executable, "-m", "partita", "profile", RANK_FILE, str(path), "--transport", kind.name]
            command += [word for each in arguments.precision or () for word in ("--precision", each)]
            command += ["--quick"] * arguments.quick
            print(f"{count} rank{'s' * (count > 1)} running:", flush=True)
            status = launch(command, count)
            if status != 0:
                return status
            records += json.loads(path.read_text())["records"]
    text = json.dumps({"records": records}, separators=(",", ":")) + "\n"
    read(text)
    deliver(text, arguments.output)
    print(f'wrote {arguments.output}: `mesh m(…) {{ device = profile("{arguments.output}")  link = profile("…") }}`')
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    """Measure as one of the ranks."""
    import torch

    from partita.runtime.profiling.machine import profile

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    identity = rank_from_environment()
    if identity is None:
        raise UsageError(f"{RANK_FILE} is for the ranks that `partita profile` starts")
    keep_pages()
    kind, device = device_of_rank(arguments.transport, identity)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    precisions = tuple(arguments.precision or (("bf16",) if device.type == "cuda" else ("f32",)))
    connect(identity, kind.backend)

    def progress(text: str) -> None:
        if identity.rank == 0:
            print(f"  {text}", flush=True)

    record = profile(lambda: kind.end(device, b""), device, precisions, progress, arguments.quick)
    if identity.rank == 0:
        arguments.record.write_text(json.dumps({"records": [record.as_json()]}))
    last = kind.end(device, b"")
    last.barrier()
    last.close()
    return 0
