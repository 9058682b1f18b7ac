"""`partita run FILE`: train, on this machine by itself or as one rank under torchrun or Slurm."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from partita.cli import measured
from partita.cli.source import add_source_arguments, report
from partita.dsl.load import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from partita.compiler.program import Program
    from partita.dsl.diagnostic import Diagnostic
    from partita.dsl.spec import Spec
    from partita.runtime.checkpoint.settings import Settings
    from partita.runtime.data import DataFile, Dataset
    from partita.runtime.supervision.lookout import Lookout
    from partita.runtime.supervision.rendezvous import Identity
    from partita.runtime.tracing.flight import Flight
    from partita.runtime.training import Plan

SUMMARY = "train: on this machine, or as one rank under torchrun or Slurm"
FAILED = 3
INTERRUPTED = 130
STALL_SECONDS = 600.0
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # without one there is no GPU, and no need to import torch and ask it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None is a prefix of one of torchrun's, which would swallow it."""
    add_source_arguments(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="where metrics.jsonl and checkpoints go (default: runs/NAME)")
    parser.add_argument(
        "--transport",
        choices=("gloo", "nccl", "virtual"),
        help="default: nccl where there is a GPU for each rank, else gloo; virtual: all ranks in one process",
    )
    parser.add_argument(
        "--restarts", type=_count, default=0, metavar="N", help="start all ranks again after a failure, up to N times"
    )
    parser.add_argument(
        "--stall-timeout",
        type=_seconds,
        default=STALL_SECONDS,
        metavar="SECONDS",
        help=f"end a run in which nothing has moved for so long (default: {STALL_SECONDS:g})",
    )
    parser.add_argument(
        "--changed-data",
        action="store_true",
        help="go on from a checkpoint though the files of the data are not what they were",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="DIR", help="measure the timeline of up to 20 steps, and draw it there"
    )


def _count(text: str) -> int:
    count = int(text)
    if not 0 <= count <= 1_000:
        raise argparse.ArgumentTypeError("from 0 to 1,000")
    return count


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= 1e6:
        raise argparse.ArgumentTypeError("from 1 to 1,000,000 seconds")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Train. 0; 1 with diagnostics; 3 where a rank failed; 130 after Ctrl-C."""
    from partita.dsl.diagnostic import Refused
    from partita.runtime.supervision.rendezvous import rank_from_environment

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
    if identity is None and arguments.transport == "virtual" and arguments.trace is not None:
        print(
            "partita: --trace measures ranks that run at once; --transport virtual runs them by turns", file=sys.stderr
        )
        return 2
    if identity is not None and identity.launcher == "partita":
        # Ctrl-C is the supervisor's. A rank that is interrupted alone ends at once, wherever it waits.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Warnings are said once: by the supervisor, which its ranks need not repeat, or by the first rank. Errors are said
    # by the first rank of each machine, which may have another file, other data or other devices.
    quiet = identity is not None and (identity.launcher == "partita" or identity.rank > 0)
    first_here = identity is None or identity.local_rank == 0
    spec, diagnostics = load(arguments.file, arguments.overrides, arguments.root)
    if not quiet or (spec is None and first_here):
        report(diagnostics)
    if spec is None:
        return 1
    try:
        if identity is None:
            _refuse_crowd(spec)
        if identity is None and arguments.transport != "virtual":
            return _supervise(arguments, spec)
        return _train(arguments, spec, identity, quiet)
    except Refused as refused:
        if first_here:
            report(refused.diagnostics)
        return 1


def _refuse_crowd(spec: Spec) -> None:
    """Refuse (E0613) more ranks than a file that somebody else may have written should start on one machine."""
    from partita.dsl import limits
    from partita.dsl.diagnostic import refuse

    mesh = spec.mesh
    if mesh is not None and mesh.ranks > limits.LOCAL_RANKS:
        raise refuse(
            "E0613",
            f"mesh `{mesh.name}` has {mesh.ranks:,} ranks, and at most {limits.LOCAL_RANKS} are started on one machine",
            mesh.span,
            help="start it with torchrun or Slurm on several machines, or make the mesh smaller",
        )


def _supervise(arguments: argparse.Namespace, spec: Spec) -> int:
    """Start the ranks on this machine. What is wrong with the file is said once, before."""
    from partita.compiler.pipeline import compile_run
    from partita.compiler.report.claims import doubts
    from partita.runtime.checkpoint.identity import manifest_of
    from partita.runtime.checkpoint.settings import check_newest
    from partita.runtime.data.binding import data_doubts, identify_data, open_data
    from partita.runtime.supervision.launcher import launch

    transport = _transport(arguments, spec)
    state, evaluation = compile_run(spec, gpu=transport == "nccl")
    report((*state.warnings, *doubts(state)))
    program = state.program
    assert program is not None
    if not _writable(_directory(arguments, spec)):
        return 2
    assert spec.train is not None
    open_data(program, spec.train, _folder(arguments))
    report(data_doubts(program, spec.train, _folder(arguments)))
    checkpoints = _checkpoints(arguments, spec)
    if checkpoints is not None:
        if not _writable(checkpoints.path):
            return 2
        data = identify_data(program, spec.train, _folder(arguments))
        check_newest(checkpoints, manifest_of(spec, program, data))
    trace = arguments.trace
    if trace is not None and not _recordable(spec, trace):
        return 2
    command = [sys.executable, "-m", "partita", "run", arguments.file, *arguments.overrides]
    command += ["--transport", transport]
    for name in ("root", "run_dir", "stall_timeout", "trace"):
        value = getattr(arguments, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    if arguments.changed_data:
        command.append("--changed-data")
    if trace is not None:
        measured.forget(trace, program)
    lookout = _lookout(arguments, spec, program, evaluation.program if evaluation else None)
    try:
        status = launch(command, program.mesh.ranks, restarts=arguments.restarts, lookout=lookout)
    except OSError as error:
        print(f"partita: cannot start the ranks: {error.strerror or error}", file=sys.stderr)
        return FAILED
    if trace is not None and status in (0, INTERRUPTED):
        measured.draw(trace, program)
    return status


def _transport(arguments: argparse.Namespace, spec: Spec) -> str:
    """The transport of all ranks, which are on this machine. Refused: E0611."""
    ranks = spec.mesh.ranks if spec.mesh is not None else 1
    unasked = arguments.transport == "gloo" or not any(Path(each).exists() for each in DRIVERS)
    return _settled(arguments.transport, 0 if unasked else gpus_here(), ranks)


def _settled(transport: str | None, gpus: int, ranks: int) -> str:
    """NCCL where there is a GPU for each of a machine's ranks: half a group on NCCL would wait for the other half for
    ever. Refused: E0611 where NCCL is asked for and there is not.
    """
    if transport == "nccl" and gpus < ranks:
        from partita.dsl.diagnostic import refuse

        raise refuse(
            "E0611",
            f"ranks on this machine: {ranks}; GPUs, of which NCCL takes one each: {gpus}",
            help="start as many ranks on a machine as it has GPUs, or use --transport gloo",
        )
    return transport or ("nccl" if gpus >= ranks else "gloo")


def _lookout(arguments: argparse.Namespace, spec: Spec, training: Program, evaluation: Program | None) -> Lookout:
    """Who notices that the run stands still, and what it does."""
    from partita.runtime.supervision.diagnosis import Diagnosis
    from partita.runtime.supervision.lookout import REPORT, Lookout

    report = _directory(arguments, spec) / REPORT
    return Lookout(Diagnosis(training, evaluation), training.mesh.ranks, arguments.stall_timeout, report)


def _flight(arguments: argparse.Namespace, plan: Plan, identity: Identity) -> Flight:
    """This rank's recorder: where the supervisor watches it, or in the run's directory, where the ranks do."""
    import os

    from partita.runtime.supervision.launcher import PEER_LOST
    from partita.runtime.supervision.lookout import prepare
    from partita.runtime.supervision.rendezvous import FLIGHT
    from partita.runtime.tracing.flight import Flight, path_of

    if identity.launcher == "partita":
        return Flight(path_of(Path(os.environ[FLIGHT]), identity.rank))
    directory = _directory(arguments, plan.spec) / "flight"
    flight = Flight(prepare(directory, identity.rank))
    evaluation = plan.evaluation.program if plan.evaluation else None
    _lookout(arguments, plan.spec, plan.program, evaluation).keep(directory, PEER_LOST)
    return flight


def _folder(arguments: argparse.Namespace) -> Path:
    """What the paths in the file are relative to."""
    return Path(arguments.file).resolve().parent


def _directory(arguments: argparse.Namespace, spec: Spec) -> Path:
    """Where metrics go."""
    return Path(arguments.run_dir or f"runs/{spec.name}")


def _checkpoints(arguments: argparse.Namespace, spec: Spec) -> Settings | None:
    """Where checkpoints go and how often; None where the file asks for none."""
    from attrs import evolve

    from partita.runtime.checkpoint.settings import settings_of

    settings = settings_of(spec, _directory(arguments, spec), _folder(arguments))
    return None if settings is None else evolve(settings, changed_data=arguments.changed_data)


def _recordable(spec: Spec, trace: Path) -> bool:
    """Whether there are steps to record, and a place for their times; says why not."""
    assert spec.train is not None
    if spec.train.steps < 2:
        print("partita: --trace leaves out the first step, and there is no other: raise train.steps", file=sys.stderr)
        return False
    return _writable(trace)


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
    import torch

    from partita.runtime.data.binding import data_doubts, identify_data, open_data
    from partita.runtime.training import prepare

    device = torch.device("cpu") if identity is None else device_of_rank(arguments.transport, identity)
    plan = prepare(spec, gpu=device.type == "cuda")
    if plan.training.compiled and device.type == "cpu":
        _check_compiler(plan)
    if not quiet:
        from partita.compiler.report.claims import doubts

        report((*plan.training.warnings, *doubts(plan.training)))
    directory = _directory(arguments, spec)
    # The supervisor has looked for the ranks that it has started.
    if (identity is None or identity.launcher != "partita") and not _writable(directory):
        return 2
    dataset = open_data(plan.program, plan.train, _folder(arguments))
    if not quiet:
        report(data_doubts(plan.program, plan.train, _folder(arguments)))
    data = identify_data(plan.program, plan.train, _folder(arguments))
    if identity is None:
        return _train_virtual(plan, dataset, data, directory, _checkpoints(arguments, spec))
    # The supervisor prepares and draws for the ranks that it has started.
    trace = arguments.trace if identity.launcher != "partita" else None
    if trace is not None and not _recordable(spec, trace):
        return 2
    if trace is not None and identity.rank == 0:
        measured.forget(trace, plan.program)
    status = _train_rank(plan, dataset, data, directory, identity, device, arguments)
    if trace is not None and identity.rank == 0 and status == 0:
        measured.draw(trace, plan.program)
    return status


def _check_compiler(plan: Plan) -> None:
    """Refuse (E0614) to begin what torch could not compile."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    from partita.dsl.diagnostic import refuse

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        span = plan.train.spans.get("compile")
        raise refuse("E0614", "torch finds no C++ compiler", span, help="install g++, or leave `compile` out") from None


def _train_virtual(
    plan: Plan, dataset: Dataset | None, data: Sequence[DataFile], directory: Path, settings: Settings | None
) -> int:
    import os

    import torch

    from partita.cli.watch import Watch
    from partita.runtime.bad_steps import BadStep
    from partita.runtime.checkpoint.checkpoints import Checkpoints
    from partita.runtime.supervision.cores import usable
    from partita.runtime.supervision.launcher import rank_environment
    from partita.runtime.training import VirtualRun

    # As many threads as each rank would have if it were a process.
    threads = rank_environment(os.environ, plan.ranks)["OMP_NUM_THREADS"].split(",")[0].strip()
    torch.set_num_threads(max(1, min(int(threads), len(usable()))) if threads.isdecimal() else 1)
    with Watch(plan, directory) as watch:
        run = VirtualRun(plan)
        checkpoints = [Checkpoints(rank, settings, _say, data) for rank in run.ranks] if settings is not None else []
        try:
            run.train(dataset, [watch], checkpoints, _say)
        except BadStep as wrong:
            print(f"partita: {wrong}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            for each in checkpoints:
                each.close()
    return FAILED if any(each.unsaved for each in checkpoints) or run.ranks[0].unsound else 0


def _say(diagnostic: Diagnostic) -> None:
    report([diagnostic])


def _train_rank(
    plan: Plan,
    dataset: Dataset | None,
    data: Sequence[DataFile],
    directory: Path,
    identity: Identity,
    device: torch.device,
    arguments: argparse.Namespace,
) -> int:
    import torch

    from partita.cli.watch import Watch
    from partita.runtime.bad_steps import BadStep
    from partita.runtime.checkpoint.checkpoints import Checkpoints
    from partita.runtime.heap import keep_pages
    from partita.runtime.supervision.agreement import agree, group_store
    from partita.runtime.supervision.launcher import NOT_FINITE, PEER_LOST
    from partita.runtime.supervision.rendezvous import await_word, connect
    from partita.runtime.tracing.stopwatch import path_of
    from partita.runtime.training import Rank, check_ranks, train
    from partita.runtime.transports.process import ConnectionLost, ProcessTransport

    if not await_word():
        return PEER_LOST
    keep_pages()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    times = None if arguments.trace is None else path_of(arguments.trace, identity.rank)
    communication = None
    settings = _checkpoints(arguments, plan.spec)
    checkpoints = None
    watch = Watch(plan, directory) if identity.rank == 0 else None
    if identity.rank != 0 and identity.local_rank == 0:
        watch = Watch(plan, None)  # the first rank of another machine shows the run there
    try:
        connect(identity, "nccl" if device.type == "cuda" else "gloo")
        communication = ProcessTransport(device)
        agree(group_store(), identity.rank, identity.ranks, plan, data)
        check_ranks(plan, identity.ranks)
        flight = _flight(arguments, plan, identity)
        rank = Rank(plan, identity.rank, communication, device, times=times, flight=flight, paced=plan.ranks > 1)
        if settings is not None:
            checkpoints = Checkpoints(rank, settings, _say, data)
        if watch is not None:
            watch.__enter__()
        for _ in train(rank, dataset, watch, checkpoints, _say):
            raise AssertionError("a real transport waits inside its handles")
        if times is not None:
            communication.meet()  # all have written their times
        if rank.failed:
            return NOT_FINITE
    except BadStep as wrong:
        print(f"partita: {wrong}", file=sys.stderr)
        return NOT_FINITE
    except ConnectionLost as lost:
        # The supervisor puts the rank before each line.
        who = "" if identity.launcher == "partita" else f"rank {identity.rank}: "
        print(f"partita: {who}{lost}", file=sys.stderr)
        return PEER_LOST
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if watch is not None:
            watch.close()
        if checkpoints is not None:
            checkpoints.close()
        if communication is not None:
            communication.close()
    if checkpoints is not None and checkpoints.unsaved:
        return FAILED
    # The first rank is the last to end, where there are checkpoints; the others would have it ended before.
    return NOT_FINITE if rank.unsound and identity.rank == 0 else 0


def gpus_here() -> int:
    """The GPUs that this process sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of_rank(transport: str | None, identity: Identity) -> torch.device:
    """Where this rank computes: on a GPU, and through NCCL, or on a CPU, and through Gloo. Refused: E0611."""
    import torch

    gpus = gpus_here()
    number, ranks = (0, 1) if identity.own_gpu else (identity.local_rank, identity.local_ranks)
    if _settled(transport, gpus, ranks) == "nccl":
        return torch.device("cuda", number)
    if transport is None and gpus and identity.local_rank == 0:
        print(f"partita: {gpus} GPUs for {ranks} ranks: computing on processors", file=sys.stderr)
    return torch.device("cpu")
