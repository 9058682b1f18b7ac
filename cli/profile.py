"""`partita profile`: what this machine's device and links take, as a record that `profile("machine.json")` names."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from partita.cli.output import deliver

SUMMARY = "measure this machine's device and links; the cost model reads the record"
RANK_FILE = "--record"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("-o", "--output", default="machine.json", metavar="FILE", help="the record")
    parser.add_argument(
        "--ranks", type=_counts, metavar="N,…", help="numbers of ranks at work at once (default: 1, 2, 4 …)"
    )
    parser.add_argument("--transport", choices=("gloo", "nccl"), help="default: nccl where there is a GPU")
    parser.add_argument(
        "--precision",
        choices=("f32", "bf16", "f64"),
        action="append",
        help="of computation (default: f32, on a GPU bf16)",
    )
    parser.add_argument("--quick", action="store_true", help="few sizes: seconds, and rougher")
    parser.add_argument(RANK_FILE, type=Path, help=argparse.SUPPRESS)


def _counts(text: str) -> tuple[int, ...]:
    words = text.split(",")
    counts = tuple(sorted({int(each) for each in words if each.isdecimal()}))
    if not all(each.isdecimal() for each in words) or counts[0] < 1 or counts[-1] > 256:
        raise argparse.ArgumentTypeError("numbers of ranks, from 1 to 256: `1,2`")
    return counts


def run(arguments: argparse.Namespace) -> int:
    """Measure and write. 0; 3 where a rank failed."""
    if arguments.record is not None:
        return _measure(arguments)
    import torch

    from partita.compiler.costs.record import read
    from partita.runtime.supervision.cores import usable
    from partita.runtime.supervision.launcher import launch

    on_gpus = torch.cuda.is_available() and arguments.transport != "gloo"
    most = torch.cuda.device_count() if on_gpus else max(2, len(usable()))
    counts = arguments.ranks or tuple(count for count in (1, 2, 4, 8, 16, 32, 64) if count <= most)
    records = []
    with TemporaryDirectory() as folder:
        for count in counts:
            path = Path(folder) / f"{count}.json"
            command = [sys.executable, "-m", "partita", "profile", RANK_FILE, str(path)]
            for name in ("transport", "precision"):
                values = getattr(arguments, name) or ()
                for value in [values] if isinstance(values, str) else values:
                    command += [f"--{name}", value]
            command += ["--quick"] * arguments.quick
            print(f"{count} rank{'s' * (count > 1)} at work:", flush=True)
            status = launch(command, count)
            if status != 0:
                return status
            records += json.loads(path.read_text())["records"]
    text = json.dumps({"records": records}, indent=1) + "\n"
    read(text)
    status = deliver(text, arguments.output)
    if status:
        return status
    print(f'wrote {arguments.output}: `mesh m(…) {{ device = profile("{arguments.output}")  link = profile("…") }}`')
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    """As one of the ranks."""
    import signal

    import torch

    from partita.cli.run import device_of_rank
    from partita.runtime.heap import keep_pages
    from partita.runtime.profiling.machine import profile
    from partita.runtime.supervision.rendezvous import connect, rank_from_environment
    from partita.runtime.transports.process import ProcessTransport

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    identity = rank_from_environment()
    assert identity is not None
    keep_pages()
    device = device_of_rank(arguments.transport, identity)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    precisions = tuple(arguments.precision or (("bf16",) if device.type == "cuda" else ("f32",)))
    connect(identity, "nccl" if device.type == "cuda" else "gloo")

    def progress(text: str) -> None:
        if identity.rank == 0:
            print(f"  {text}", flush=True)

    found = profile(lambda: ProcessTransport(device), device, precisions, progress, arguments.quick)
    if identity.rank == 0:
        arguments.record.write_text(json.dumps({"records": [found.as_json()]}))
    last = ProcessTransport(device)
    last.meet()
    last.close()
    return 0
