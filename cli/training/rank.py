"""`partita run` as one rank of many: one of the supervisor's on this machine, or under torchrun or Slurm."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

from attrs import define, frozen

from partita.cli import measured
from partita.cli.command import UsageError
from partita.cli.source import load_quietly, report, say
from partita.cli.training.devices import check_graphs, device_of_rank, shared_queues
from partita.cli.training.elastic import check_elastic, fitted
from partita.cli.training.places import check_recordable, checkpoints_of, directory_of, folder_of, opened, origin_of
from partita.cli.training.room import little_memory
from partita.cli.training.standalone import check_compiler
from partita.compiler.report.claims import claim_warnings
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.syntax.reader import Reader
from partita.runtime import start
from partita.runtime.bad_steps import BadStep
from partita.runtime.data_files import ReadFailed
from partita.runtime.heap import keep_pages
from partita.runtime.python_files import OperationFailed
from partita.runtime.run_directory import RunDirectory
from partita.runtime.supervision import statuses
from partita.runtime.supervision.consistency import agree, run_on_rank0
from partita.runtime.supervision.diagnosis import Diagnosis
from partita.runtime.supervision.identity import DIRECTORY, FLIGHT, Identity, wait_for_start
from partita.runtime.supervision.memory import memory_of
from partita.runtime.supervision.rendezvous import CONNECT_SECONDS, connect, join_rendezvous
from partita.runtime.supervision.termination import Termination
from partita.runtime.supervision.views import ProgressExchange
from partita.runtime.supervision.watchdog import FOLDER, STARTING_SECONDS, Watchdog, Watcher, prepare
from partita.runtime.tracing import flight
from partita.runtime.tracing.flight import Flight, path_of
from partita.runtime.tracking.launch import tracked
from partita.runtime.transports.failures import ConnectionLost, UntrustedPeer, end_with
from partita.runtime.transports.nccl import pending_operations
from partita.runtime.transports.registry import Processes

if TYPE_CHECKING:
    import torch

    from partita.runtime.data.binding import Bound
    from partita.runtime.rank import CompiledRun
    from partita.runtime.supervision.rendezvous import Rendezvous
    from partita.runtime.supervision.store import Store

# What a rank waits before it reports what the first one may be reporting too.
PATIENCE_SECONDS = 3.0


def run_rank(arguments: argparse.Namespace, identity: Identity) -> int:
    """Train as a rank; returns the exit status."""
    kind = _Supervised if identity.launcher == "partita" else _Launched
    return status_of_rank(identity, lambda stack: kind(arguments, identity, stack).run())


def status_of_rank(identity: Identity, act: Callable[[ExitStack], int]) -> int:
    """Do what a rank does; returns the exit status, which tells the supervisor why this rank ended. The process ends
    here if its connections cannot be closed.
    """
    status = _status(identity, act)
    end_with(status)
    return status


def _status(identity: Identity, act: Callable[[ExitStack], int]) -> int:
    ours = identity.launcher == "partita"
    try:
        with ExitStack() as stack:
            try:
                return act(stack)
            except (OperationFailed, ReadFailed) as failed:
                # Before the connections are closed: the others would seem to be the cause. What fails in Python code,
                # or in reading, may fail on one rank alone; if it does on all, the first ends the others before they
                # say so too.
                sleep(PATIENCE_SECONDS if identity.rank else 0.0)
                report(failed.diagnostics)
                return statuses.REFUSED if ours else statuses.WRONG_INPUT
    except Refused as refused:
        # The first rank of each machine reports errors: the machine may have another file, other data or devices.
        if identity.local_rank == 0:
            report(refused.diagnostics)
        return statuses.REFUSED if ours else statuses.WRONG_INPUT
    except UsageError as error:
        print(f"partita: {error}", file=sys.stderr)
        return error.status
    except (UntrustedPeer, ConnectionLost) as lost:
        # The supervisor prefixes each line with the rank.
        print(f"partita: {'' if ours else f'rank {identity.rank}: '}{lost}", file=sys.stderr)
        return statuses.UNTRUSTED_PEER if isinstance(lost, UntrustedPeer) else statuses.PEER_LOST
    except KeyboardInterrupt:
        return statuses.INTERRUPTED


@define(eq=False)
class _Rank:
    """What all ranks do, in order."""

    arguments: argparse.Namespace
    identity: Identity
    stack: ExitStack

    def run(self) -> int:
        raise NotImplementedError

    def planned(self, reader: Reader, speaks: bool) -> _Planned:
        """Everything to be done, from the file to the data; prints diagnostics if it `speaks`. Raises Refused."""
        import torch

        from partita.runtime.data.binding import bind
        from partita.runtime.rank import prepare

        arguments = self.arguments
        spec, diagnostics = load_quietly(arguments, reader)
        kind, device = device_of_rank(arguments.transport, self.identity)
        check_graphs(spec, kind.gpu)
        plan = prepare(spec, gpu=device.type == "cuda", allow_python=arguments.allow_python)
        if plan.training.compiled and device.type == "cpu":
            check_compiler(plan)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        folder, gpu = folder_of(arguments), device.type == "cuda"
        data = bind(plan.program, plan.train, folder, arguments.allow_python)
        plan = plan.evaluating(data.rows, gpu).writing(folder, gpu)
        plan = plan.answering(data.dataset, folder, arguments.allow_python)
        if speaks:
            own = (
                *plan.training.warnings,
                *claim_warnings(plan.training),
                *(shared_queues(plan) if kind.gpu else ()),
            )
            report((*diagnostics, *own, *data.warnings, *plan.warnings))
        return _Planned(plan, kind, device, data)

    def train(self, planned: _Planned, directory: RunDirectory, recorder: Flight, meeting: Rendezvous) -> int:
        """Connect and train; returns the exit status. Raises Refused, `ConnectionLost` and `UntrustedPeer`."""
        from partita.cli.training.observer import Recording
        from partita.runtime.checkpoint.checkpoints import Checkpoints
        from partita.runtime.checkpoint.snapshots import SnapshotResources
        from partita.runtime.data.prefetcher import Prefetcher
        from partita.runtime.rank import Rank
        from partita.runtime.rehearsal import leaves_nothing, rehearse
        from partita.runtime.tracing import stopwatch
        from partita.runtime.training import NOBODY, train
        from partita.runtime.transports.transport import run_alone

        arguments, identity, stack = self.arguments, self.identity, self.stack
        plan, device = planned.plan, planned.device
        keep_pages()
        times = None if arguments.trace is None else stopwatch.path_of(arguments.trace, identity.rank)
        recorder.begin(flight.CONNECTING)
        if device.type == "cuda" and not plan.program.captured:  # nothing else is recorded into a graph
            recorder.follow(partial(_event_on, device), pending_operations)
        connect(identity, planned.transport.backend, meeting)
        transport = planned.transport.end(device, meeting.secret)
        stack.callback(transport.close)
        paced = plan.ranks > 1
        number = identity.rank
        files = directory.path / "mapped"
        rank = Rank(
            plan, number, transport, device, times=times, flight=recorder, paced=paced, alone=True, folder=files
        )
        if device.type == "cuda" and paced and leaves_nothing(rank):
            run_alone(rehearse(rank, transport))
        doubt = little_memory(plan.training, number, device) if device.type == "cuda" else None
        if doubt is not None:
            say(doubt)
        settings = checkpoints_of(arguments, plan.spec)
        checkpoints = None
        if settings is not None:
            snapshots = None
            memory = memory_of(identity, os.environ) if settings.copies is not None else None
            if memory is not None:
                snapshots = SnapshotResources(memory, meeting.store, transport.links)
            checkpoints = Checkpoints(rank, settings, say, planned.data.files, snapshots)
            stack.callback(checkpoints.close)
        watch = None
        if identity.local_rank == 0:
            # The first rank of each other machine shows the run there.
            watch = stack.enter_context(Recording(plan, directory if identity.rank == 0 else None))
        stopping = Termination(checkpoints is not None, recorder, arguments.grace, identity.launcher)
        termination = stack.enter_context(stopping)
        dataset = None
        if planned.data.dataset is not None:
            dataset = Prefetcher(rank.reads(planned.data.dataset), plan.train.steps)
            stack.callback(dataset.close)
        try:
            run_alone(train(rank, dataset, watch or NOBODY, checkpoints, say, termination.stop_requested))
        except BadStep as wrong:
            print(f"partita: {wrong}", file=sys.stderr)
            directory.fail(str(wrong))
            return statuses.NOT_FINITE
        if rank.failed:
            return statuses.NOT_FINITE
        if checkpoints is not None and checkpoints.unsaved:
            return statuses.UNSAVED
        if rank.ended:
            if rank.saved is not None and identity.launcher != "partita":
                print(f"partita: {statuses.going_on(rank.saved, 'command')}", file=sys.stderr)
            if termination.stop_requested():
                if watch is not None:
                    watch.close()  # gives the terminal back
                stack.callback(termination.end)  # ends the process before the rest is closed
            return statuses.ASKED
        if times is not None:
            transport.barrier()  # until all have written their times
        # With checkpoints, the first rank ends last; a failure status of another one would end it earlier.
        return statuses.NOT_FINITE if rank.eval_nonfinite and identity.rank == 0 else 0


def _event_on(device: torch.device) -> Callable[[], bool]:
    """Whether a GPU has done what was enqueued until now on its current stream."""
    import torch

    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event.query


@frozen(eq=False)
class _Planned:
    """What a rank is to do."""

    plan: CompiledRun
    transport: Processes
    device: torch.device
    data: Bound

    def agree(self, store: Store, identity: Identity) -> None:
        """Let all ranks compare what they are to do (`consistency.agree`)."""
        from partita.runtime.kernels.native.library import why_none_on

        plan, files, no_kernels = self.plan, self.data.all_files, why_none_on(self.device)
        agree(store, identity.rank, identity.ranks, plan.spec, plan.programs, files, no_kernels)


class _Supervised(_Rank):
    """A rank of this machine's supervisor, which watches it from the start and holds the run's directory."""

    def run(self) -> int:
        # Ctrl-C is for the supervisor. A rank that is interrupted alone ends at once, wherever it waits.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        recorder = Flight(path_of(Path(os.environ[FLIGHT]), self.identity.rank))
        directory = RunDirectory.inherited(directory_of(self.arguments), os.environ[DIRECTORY])
        # The file as it was when the run began, even if it has changed since.
        record = directory.record()
        planned = self.planned(Reader(record.files if record is not None else None), speaks=False)
        # Slow imports are done, too, before this rank reports that it is ready.

        recorder.begin(flight.READY)
        if not wait_for_start():
            return statuses.PEER_LOST
        recorder.begin(flight.CONNECTING)
        meeting = join_rendezvous(self.identity, CONNECT_SECONDS)
        planned.agree(meeting.store, self.identity)
        return self.train(planned, directory, recorder, meeting)


class _Launched(_Rank):
    """A rank started by another launcher. Ranks watch each other, and the first one holds the run's directory."""

    def run(self) -> int:
        from partita.runtime.rank import check_ranks

        arguments, identity = self.arguments, self.identity
        meeting = join_rendezvous(identity, max(arguments.stall_timeout, STARTING_SECONDS))
        directory = self.stack.enter_context(opened(arguments))
        # Nothing in the directory is touched before it is locked.
        run_on_rank0(meeting.store, identity, "lock", lambda: _lock(directory))

        def kept() -> str:
            record = directory.record()
            return json.dumps(record.files if record is not None and record.run == meeting.run else None)

        # Started again, all ranks use the file as it was, which the directory of rank 0's machine keeps.
        files = json.loads(run_on_rank0(meeting.store, identity, "kept", kept))
        reader = Reader(files)
        if arguments.elastic is not None:
            self._resize(reader)
        planned = self.planned(reader, speaks=identity.rank == 0)
        plan = planned.plan
        planned.agree(meeting.store, identity)
        check_ranks(plan.spec, identity.ranks)
        if files is None:

            def begin() -> None:
                with _refused_as_unwritable(directory):
                    settings, origin = checkpoints_of(arguments, plan.spec), origin_of(arguments, planned.transport.gpu)
                    start.record(directory, meeting.run, plan.spec, settings, reader.texts, origin)

            run_on_rank0(meeting.store, identity, "begin", begin)
        trace = arguments.trace
        if trace is not None:
            check_recordable(plan.spec, plan.program, trace)
        if trace is not None and identity.rank == 0:
            measured.forget(trace, plan.program)
        with tracked(directory.path, arguments.track if identity.rank == 0 else ()):
            status = self.train(planned, directory, self._watched(directory, meeting, plan), meeting)
        if trace is not None and identity.rank == 0 and status == 0:
            measured.draw(trace, plan.program)
        # Kubernetes' operators restart after a status from 128 on, and give up on one below.
        return statuses.TERMINATED if status == statuses.ASKED else status

    def _resize(self, reader: Reader) -> None:
        """Override the mesh by one of as many ranks as were started. Raises Refused (E0610, E0624)."""
        arguments, ranks = self.arguments, self.identity.ranks
        spec, _ = load_quietly(arguments, reader)
        mesh = check_elastic(spec, arguments.elastic)
        kind, _ = device_of_rank(arguments.transport, self.identity)
        fit = fitted(arguments, spec, mesh, reader, ranks, kind.gpu, exact=True)
        if fit is None:
            raise refuse(
                "E0610",
                f"mesh `{mesh.name}` of {mesh.ranks} ranks cannot be one of {ranks}, which were started",
                mesh.span,
                help=f"start from {arguments.elastic} to {mesh.ranks}; the batch must be divisible by it",
            )
        arguments.overrides = list(fit.overrides)

    def _watched(self, directory: RunDirectory, meeting: Rendezvous, plan: CompiledRun) -> Flight:
        """This rank's flight recorder, visible to the machine's other ranks; also starts watching those."""
        with _refused_as_unwritable(directory):
            recorder = prepare(directory, self.identity.rank)
        diagnosis = Diagnosis(plan.program, plan.evaluation.program if plan.evaluation else None)
        watchdog = Watchdog(diagnosis, plan.ranks, self.arguments.stall_timeout, directory)
        views = ProgressExchange(self.identity.rank, meeting.machines, meeting.again)
        Watcher(watchdog, directory.path / FOLDER, views, statuses.PEER_LOST).start()
        return recorder


def _lock(directory: RunDirectory) -> None:
    """Lock the run's directory. Raises Refused (E0802, E0803)."""
    with _refused_as_unwritable(directory):
        warning = directory.lock()
    if warning is not None:
        say(warning)


@contextmanager
def _refused_as_unwritable(directory: RunDirectory) -> Iterator[None]:
    """Turns errors of the system into E0802."""
    try:
        yield
    except OSError as error:
        raise refuse("E0802", f"cannot write to {directory.path}: {error.strerror}") from error
