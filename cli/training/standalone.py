"""`partita run` started by hand: supervises the ranks that it starts, or runs all ranks in this process."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from partita.cli import measured
from partita.cli.command import UsageError
from partita.cli.source import load_file, report, say
from partita.cli.training.devices import transport_of
from partita.cli.training.elastic import check_elastic, fitted
from partita.cli.training.places import (
    check_recordable,
    check_writable,
    checkpoints_of,
    folder_of,
    opened,
    origin_of,
    writing_in,
)
from partita.cli.training.room import crowded, refuse_crowd, refuse_large
from partita.compiler.pipeline import compile_evaluation, compile_run
from partita.compiler.report.claims import claim_warnings
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.reader import Reader
from partita.runtime.addresses import Address, is_address
from partita.runtime.bad_steps import BadStep
from partita.runtime.python_files import require_python
from partita.runtime.start import begin
from partita.runtime.supervision.cores import usable
from partita.runtime.supervision.diagnosis import Diagnosis
from partita.runtime.supervision.fleet import ElasticGroup, WorkerGroup
from partita.runtime.supervision.fork_server import serving
from partita.runtime.supervision.identity import DIRECTORY
from partita.runtime.supervision.isolation import PRIVATE
from partita.runtime.supervision.launcher import launch, rank_environment
from partita.runtime.supervision.memory import MEMORY, created
from partita.runtime.supervision.statuses import FAILED, INTERRUPTED, SAVING, ending
from partita.runtime.supervision.termination import Termination
from partita.runtime.supervision.watchdog import Watchdog
from partita.runtime.tracking.launch import tracked
from partita.runtime.transports.registry import InProcess, Processes

if TYPE_CHECKING:
    from partita.compiler.mesh import Mesh
    from partita.compiler.program import Program
    from partita.dsl.spec import Spec
    from partita.runtime.checkpoint.settings import Settings
    from partita.runtime.data.binding import Bound
    from partita.runtime.rank import CompiledRun
    from partita.runtime.run_directory import Origin, RunDirectory
    from partita.runtime.training import ClusterOf


def run_alone(arguments: argparse.Namespace) -> int:
    """Train on this machine; returns the exit status. Raises UsageError and Refused."""
    reader = Reader()
    spec = load_file(arguments, reader)
    refuse_crowd(spec)
    kind = transport_of(arguments, spec)
    if isinstance(kind, InProcess):
        return _in_process(arguments, spec, reader, kind)
    return _supervise(arguments, spec, reader, kind)


def _supervise(arguments: argparse.Namespace, spec: Spec, reader: Reader, kind: Processes) -> int:
    """Start the ranks on this machine. What is wrong with the file is reported once, before that."""
    from partita.runtime.data.binding import bind

    require_python(spec, arguments.allow_python)
    state, evaluation = compile_run(spec, gpu=kind.gpu)
    report((*state.warnings, *claim_warnings(state)))
    program = state.program
    data = bind(program, state.train, folder_of(arguments), arguments.allow_python)
    report(data.warnings)
    if data.rows is not None:
        evaluation = compile_evaluation(spec, state, data.rows, kind.gpu)
    if state.train.eval is not None and state.train.eval.arguments["sample"] is not None:
        from partita.runtime.inference.sampling import samples_of  # which takes seconds: it imports torch

        samples = samples_of(spec, state, folder_of(arguments), kind.gpu)
        report(samples.warnings if samples is not None else ())
    if state.writes is not None:
        from partita.runtime.inference.rewards import check_allowed

        check_allowed(state.train.data.arguments["reward"], arguments.allow_python)
        report(filter(None, [state.writes.warning]))
    refuse_large(spec, state, kind, attempts=2 if arguments.restarts or arguments.elastic else 1)
    report(filter(None, [crowded(spec, kind)]))
    settings = checkpoints_of(arguments, spec)
    mesh = check_elastic(spec, arguments.elastic) if arguments.elastic is not None else None
    with opened(arguments) as directory:
        _take(directory, spec, program, settings, data, reader, origin_of(arguments, kind.gpu, len(usable())))
        trace = arguments.trace
        if trace is not None:
            check_recordable(spec, program, trace)
            measured.forget(trace, program)

        def crew(ranks: int) -> WorkerGroup | None:
            fit = fitted(arguments, spec, mesh, reader, ranks, kind.gpu) if mesh is not None else None
            if fit is None:
                return None
            evaluation = fit.evaluation
            if data.rows is not None:
                evaluation = compile_evaluation(fit.spec, fit.state, data.rows, kind.gpu)
            diagnosis = Diagnosis(fit.state.program, evaluation.program if evaluation else None)
            fewer = fit.state.program.mesh
            watchdog = Watchdog(diagnosis, fewer.ranks, arguments.stall_timeout, directory)
            return WorkerGroup(_command(arguments, kind.name, fit.overrides), fewer.ranks, watchdog, _described(fewer))

        fleet = None
        if arguments.elastic is not None:
            fleet = ElasticGroup(arguments.elastic, program.mesh.ranks, arguments.restarts, crew, directory)
        diagnosis = Diagnosis(program, evaluation.program if evaluation else None)
        try:
            copied = settings is not None and settings.copies is not None
            ranks = program.mesh.ranks
            with (
                tracked(directory.path, arguments.track),
                created(ranks if copied else 0) as memory,
                serving(rank_environment(os.environ, ranks)) as server,
            ):
                status = launch(
                    _command(arguments, kind.name, arguments.overrides),
                    ranks,
                    restarts=arguments.restarts,
                    watchdog=Watchdog(diagnosis, program.mesh.ranks, arguments.stall_timeout, directory),
                    environment=_environment(directory, settings, data, memory),
                    inherited=(*directory.descriptors, *memory),
                    saves=settings is not None,
                    grace=arguments.grace,
                    fleet=fleet,
                    server=server,
                )
        except OSError as error:
            raise UsageError(f"cannot start the ranks: {error.strerror or error}", FAILED) from error
    if trace is not None and status in (0, INTERRUPTED):
        measured.draw(trace, program)
    return status


def _environment(
    directory: RunDirectory, settings: Settings | None, data: Bound, memory: Sequence[int]
) -> dict[str, str]:
    """The environment of ranks. They stay in the machine's network if they read or write at addresses themselves."""
    outside = settings is not None and isinstance(settings.path, Address)
    outside = outside or any(is_address(file.name) for file in data.all_files)
    more = {PRIVATE: "0"} if outside else {}
    return {**os.environ, DIRECTORY: directory.text, MEMORY: ",".join(map(str, memory)), **more}


def _described(mesh: Mesh) -> str:
    """The mesh in words."""
    sizes = ", ".join(f"{name} = {size}" for name, size in mesh.axes)
    return f"{mesh.ranks} rank{'s' if mesh.ranks > 1 else ''} ({sizes})"


def _command(arguments: argparse.Namespace, transport: str, overrides: Sequence[str]) -> list[str]:
    """The command of a rank."""
    command = [sys.executable, "-m", "partita", "run", arguments.file, *overrides]
    command += ["--transport", transport]
    for name in ("root", "run_dir", "stall_timeout", "grace", "trace"):
        value = getattr(arguments, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    flags = ("changed_data", "allow_python")
    return [*command, *(f"--{flag.replace('_', '-')}" for flag in flags if getattr(arguments, flag))]


def _take(
    directory: RunDirectory,
    spec: Spec,
    program: Program,
    settings: Settings | None,
    data: Bound,
    reader: Reader,
    origin: Origin,
) -> None:
    """Take the run's directory. Raises UsageError if it or that of the checkpoints cannot be written to, and Refused
    (E0801 to E0804, E0814, E0815).
    """
    with writing_in(directory.path):
        warning = begin(directory, spec, program, settings, data.files, reader, origin)
    if warning is not None:
        say(warning)
    if settings is not None and not isinstance(settings.path, Address):
        check_writable(settings.path)


def _in_process(arguments: argparse.Namespace, spec: Spec, reader: Reader, kind: InProcess) -> int:
    """Train with all ranks in this process."""
    from partita.runtime.data.binding import bind
    from partita.runtime.rank import prepare

    plan = prepare(spec, allow_python=arguments.allow_python)
    if plan.training.compiled:
        check_compiler(plan)
    report((*plan.training.warnings, *claim_warnings(plan.training)))
    folder = folder_of(arguments)
    data = bind(plan.program, plan.train, folder, arguments.allow_python)
    plan = plan.evaluating(data.rows).writing(folder)
    plan = plan.answering(data.dataset, folder, allow_python=arguments.allow_python)
    report((*data.warnings, *plan.warnings))
    refuse_large(spec, plan.training, kind)
    settings = checkpoints_of(arguments, spec)
    with opened(arguments) as directory:
        origin = origin_of(arguments, gpu=False, cores=len(usable()))
        _take(directory, spec, plan.program, settings, data, reader, origin)
        with tracked(directory.path, arguments.track):
            return _train_in_process(plan, kind.cluster, settings, data, directory, arguments.grace)


def _train_in_process(
    plan: CompiledRun,
    cluster: ClusterOf,
    settings: Settings | None,
    data: Bound,
    directory: RunDirectory,
    grace: float | None,
) -> int:
    from partita.cli.training.observer import Recording
    from partita.runtime.in_process import run_in_process

    saves = settings is not None

    def heard(number: int) -> None:
        if number == signal.SIGINT:
            with suppress(OSError):  # not by print, which the handler may have interrupted
                os.write(2, f"partita: {SAVING}\n".encode())

    with Recording(plan, directory) as watch, Termination(saves, grace=grace, on_signal=heard) as termination:
        try:
            run, saved = run_in_process(
                plan,
                data.dataset,
                settings,
                watch,
                say,
                data.files,
                stop_requested=termination.stop_requested,
                cluster=cluster,
            )
        except BadStep as wrong:
            print(f"partita: {wrong}", file=sys.stderr)
            directory.fail(str(wrong))
            return FAILED
        except KeyboardInterrupt:
            print(f"partita: {ending(signal.SIGINT, saves, None)}", file=sys.stderr)
            return INTERRUPTED
    if termination.number is not None:
        print(f"partita: {ending(termination.number, saves, run.ranks[0].saved)}", file=sys.stderr)
        return 128 + termination.number
    return 0 if saved and not run.ranks[0].eval_nonfinite else FAILED


def check_compiler(plan: CompiledRun) -> None:
    """Refuse (E0614) a program that torch cannot compile here."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        span = plan.train.spans.get("compile")
        raise refuse(
            "E0614", "torch cannot find a C++ compiler", span, help="install g++, or remove `compile`"
        ) from None
