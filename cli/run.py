"""`partita run FILE`: train, on this machine by itself or as one rank under torchrun or Slurm."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from partita.cli.source import add_source_arguments, load_or_report, report

if TYPE_CHECKING:
    import torch

    from partita.dsl.spec import Spec
    from partita.runtime.data import Dataset
    from partita.runtime.rendezvous import Identity
    from partita.runtime.training import Plan, StepResult

SUMMARY = "train: on this machine, or as one rank under torchrun or Slurm"
FAILED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None is a prefix of one of torchrun's, which would swallow it."""
    add_source_arguments(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="where metrics.jsonl goes (default: runs/NAME)")
    parser.add_argument(
        "--transport",
        choices=("gloo", "nccl", "virtual"),
        help="default: nccl where there is a GPU for each rank, else gloo; virtual: all ranks in one process",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train. 0; 1 with diagnostics; 3 where a rank failed; 130 after Ctrl-C."""
    from partita.dsl.diagnostic import Refused
    from partita.runtime.rendezvous import rank_from_environment

    try:
        identity = rank_from_environment()
    except ValueError as error:
        print(f"partita: {error}", file=sys.stderr)
        return 2
    if identity is not None and arguments.transport == "virtual":
        print(
            "partita: --transport virtual runs all ranks in one process; start it without a launcher", file=sys.stderr
        )
        return 2
    # Warnings are said once: by the supervisor, which its ranks need not repeat, or by the first rank.
    quiet = identity is not None and (identity.launcher == "partita" or identity.rank > 0)
    spec = load_or_report(arguments, quiet)
    if spec is None:
        return 1
    try:
        if identity is None and arguments.transport != "virtual":
            return _supervise(arguments, spec)
        return _train(arguments, spec, identity, quiet)
    except Refused as refused:
        # A wrong file is wrong on every rank alike: the first one says so.
        if identity is None or identity.rank == 0:
            report(refused.diagnostics)
        return 1


def _supervise(arguments: argparse.Namespace, spec: Spec) -> int:
    """Start the ranks on this machine. What is wrong with the file is said once, before."""
    from partita.compiler.pipeline import compile_run
    from partita.runtime.data.binding import open_data
    from partita.runtime.launcher import launch

    state, _ = compile_run(spec)
    report(state.warnings)
    program = state.program
    assert program is not None
    if not _writable(_directory(arguments, spec)):
        return 2
    assert spec.train is not None
    open_data(program, spec.train, _folder(arguments))
    command = [sys.executable, "-m", "partita", "run", arguments.file, *arguments.overrides]
    for name in ("root", "run_dir", "transport"):
        value = getattr(arguments, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return launch(command, program.mesh.ranks)


def _folder(arguments: argparse.Namespace) -> Path:
    """What the paths in the file are relative to."""
    return Path(arguments.file).resolve().parent


def _directory(arguments: argparse.Namespace, spec: Spec) -> Path:
    """Where metrics go."""
    return Path(arguments.run_dir or f"runs/{spec.name}")


def _writable(directory: Path) -> bool:
    """Make the run's directory; says why where that cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            return True
    except OSError as error:
        print(f"partita: cannot write to {directory}: {error.strerror}", file=sys.stderr)
        return False


def _train(arguments: argparse.Namespace, spec: Spec, identity: Identity | None, quiet: bool) -> int:
    from partita.runtime.data.binding import open_data
    from partita.runtime.training import check_ranks, prepare

    plan = prepare(spec)
    if identity is not None:
        check_ranks(plan, identity.ranks)
    if not quiet:
        report(plan.training.warnings)
    directory = _directory(arguments, spec)
    if identity is None and not _writable(directory):
        return 2
    dataset = open_data(plan.program, plan.train, _folder(arguments))
    if identity is None:
        return _train_virtual(plan, dataset, directory)
    return _train_rank(plan, dataset, directory, identity, arguments.transport)


def _train_virtual(plan: Plan, dataset: Dataset | None, directory: Path) -> int:
    import os

    import torch

    from partita.runtime.launcher import rank_environment
    from partita.runtime.training import VirtualRun

    # As many threads as each rank would have if it were a process.
    torch.set_num_threads(int(rank_environment(os.environ, plan.ranks)["OMP_NUM_THREADS"]))
    with _Watch(plan, directory) as watch:
        try:
            VirtualRun(plan).train(dataset, [watch])
        except KeyboardInterrupt:
            return 130
    return 0


def _train_rank(plan: Plan, dataset: Dataset | None, directory: Path, identity: Identity, transport: str | None) -> int:
    from partita.runtime.launcher import PEER_LOST
    from partita.runtime.rendezvous import connect
    from partita.runtime.training import Rank, train
    from partita.runtime.transports.process import ConnectionLost, ProcessTransport

    backend, device = _backend(transport, identity)
    communication = None
    watch = _Watch(plan, directory) if identity.rank == 0 else None
    if identity.rank != 0 and identity.local_rank == 0:
        watch = _Watch(plan, None)  # the first rank of another machine shows the run there
    try:
        connect(identity, backend)
        communication = ProcessTransport(device)
        rank = Rank(plan, identity.rank, communication, device)
        if watch is not None:
            watch.__enter__()
        for _ in train(rank, dataset, watch):
            raise AssertionError("a real transport waits inside its handles")
    except ConnectionLost as lost:
        print(f"partita: rank {identity.rank}: {lost}", file=sys.stderr)
        return PEER_LOST
    except KeyboardInterrupt:
        return 130
    finally:
        if watch is not None:
            watch.close()
        if communication is not None:
            communication.close()
    return 0


def _backend(transport: str | None, identity: Identity) -> tuple[str, torch.device]:
    """The backend and this rank's device."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if transport is None:
        transport = "nccl" if gpus > identity.local_rank else "gloo"
    if transport == "nccl":
        if gpus <= identity.local_rank:
            from partita.dsl.diagnostic import refuse

            raise refuse(
                "E0611",
                f"rank {identity.rank} finds {gpus} GPUs on its machine, and would use number {identity.local_rank}",
                help="start as many ranks on a machine as it has GPUs, or use --transport gloo",
            )
        device = torch.device("cuda", identity.local_rank)
        torch.cuda.set_device(device)
        return "nccl", device
    return "gloo", torch.device("cpu")


class _Watch:
    """Writes metrics (where there is a directory) and shows progress; an `Observer`."""

    def __init__(self, plan: Plan, directory: Path | None) -> None:
        from partita.runtime.progress import Display
        from partita.runtime.telemetry import Telemetry

        self.telemetry = Telemetry(directory) if directory is not None else None
        self.display = Display(plan.spec.name, plan.train.steps)
        self.open = False

    def __enter__(self) -> _Watch:
        self.display.__enter__()
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.open:
            self.display.close()
            self.open = False
        if self.telemetry is not None:
            self.telemetry.close()
            self.telemetry = None

    def step(self, result: StepResult) -> None:
        """Record and show a step."""
        record: Mapping[str, object] = {
            "step": result.step,
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "tokens_per_second": result.tokens_per_second,
        }
        if self.telemetry is not None:
            record = self.telemetry.step(
                result.step,
                result.loss,
                result.learning_rate,
                result.grad_norm,
                result.tokens_per_second,
                result.metrics,
            )
        self.display.step(record)

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Record and show an evaluation."""
        named = {f"eval_{name}": value for name, value in metrics.items()}
        record: Mapping[str, object] = {"step": step, "eval_loss": loss, **named}
        if self.telemetry is not None:
            record = self.telemetry.evaluation(step, loss, metrics)
        self.display.evaluation(record)
