"""Commands that use a trained model: in this process on one device; or in the file's own layout, on ranks that are
started on this machine or by another launcher, one of which this process is.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from partita.cli.command import UsageError
from partita.cli.forwarding import INPUT, forwarded_input
from partita.cli.source import add_python_argument, add_source_arguments, load_file, load_quietly, report, say
from partita.cli.streams import tolerate_output_errors
from partita.cli.training.devices import device_of_rank, transport_of
from partita.cli.training.rank import status_of_rank
from partita.cli.training.room import refuse_crowd
from partita.dsl.spec import Spec
from partita.runtime.addresses import place_of
from partita.runtime.supervision.consistency import agree
from partita.runtime.supervision.identity import Identity, rank_from_environment, wait_for_start
from partita.runtime.supervision.launcher import launch
from partita.runtime.supervision.rendezvous import CONNECT_SECONDS, connect, join_rendezvous
from partita.runtime.supervision.statuses import FAILED, PEER_LOST
from partita.runtime.transports.registry import TRANSPORTS, InProcess

if TYPE_CHECKING:
    from partita.runtime.inference.ranks import LocalRanks
    from partita.runtime.inference.weights import Report

# Uses the model of a file, on one device or on the ranks that are here; it reports diagnostics by the function that it
# is given, and prints results where the first rank is.
Use = Callable[[argparse.Namespace, Spec, "LocalRanks | None", "Report"], None]


def add_trained_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE, overrides, where its weights are, and whether to compute in the file's layout."""
    parser.set_defaults(needs="run")
    add_source_arguments(parser)
    add_python_argument(parser)
    what = "a run directory, a directory of checkpoints or a single one, or its address (default: where `partita run "
    what += "FILE` saves)"
    parser.add_argument("--run-dir", "--from", dest="place", type=place_of, metavar="RUN", help=what)
    add_weights_argument(parser)
    what = (
        "compute in the file's layout, on the ranks of its mesh, connected so (default: in this process, on one CPU, "
    )
    what += "unless torchrun or Slurm has started it)"
    parser.add_argument("--transport", choices=tuple(TRANSPORTS), help=what)


def add_weights_argument(parser: argparse._ActionsContainer, what: str = "") -> None:
    """Which weights of a checkpoint."""
    what += "those that were trained (default), or the mean that `ema` keeps of them"
    parser.add_argument("--weights", choices=("trained", "ema"), default="trained", help=what)


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """Which data."""
    what = "a .npz with an array for each input, or a file of the kind that FILE trains on, or its address (default: "
    what += "what FILE evaluates)"
    parser.add_argument("--data", type=place_of, metavar="DATA", help=what)


def use(arguments: argparse.Namespace, act: Use, reads: bool = False) -> int:
    """Use the model of a command's file; the first rank `reads` standard input. Returns 0, or 3 if a rank failed.

    Raises UsageError and Refused.
    """
    try:
        identity = rank_from_environment()
    except ValueError as error:
        raise UsageError(str(error)) from error
    if identity is not None:
        with tolerate_output_errors():
            return status_of_rank(identity, lambda stack: _as_rank(arguments, identity, act, stack))
    spec = load_file(arguments)
    if arguments.transport is None:
        act(arguments, spec, None, say)
        return 0
    refuse_crowd(spec)
    ranks = spec.mesh.ranks if spec.mesh is not None else 1
    kind = transport_of(arguments, spec)
    if isinstance(kind, InProcess):
        from partita.runtime.inference.ranks import LocalRanks

        act(arguments, spec, LocalRanks(range(ranks), kind.cluster(ranks, False, 0)), say)
        return 0
    environment, inherited = dict(os.environ), []
    if reads:
        inherited = [forwarded_input()]
        environment[INPUT] = str(inherited[0])
    command = [sys.executable, "-m", "partita", *arguments.given]
    try:
        return launch(command, ranks, environment=environment, inherited=inherited)
    except OSError as error:
        raise UsageError(f"cannot start the ranks: {error.strerror or error}", FAILED) from error


def _as_rank(arguments: argparse.Namespace, identity: Identity, act: Use, stack: ExitStack) -> int:
    """Use it as one rank."""
    if identity.launcher == "partita":
        # Ctrl-C is for the supervisor. A rank that is interrupted alone ends at once, wherever it waits.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not wait_for_start():
            return PEER_LOST
    spec, diagnostics = load_quietly(arguments)
    import torch

    from partita.runtime.inference.ranks import one_here
    from partita.runtime.kernels.native.library import why_none_on
    from partita.runtime.rank import check_ranks
    from partita.runtime.training import ignore_diagnostic

    if identity.rank == 0:
        report(diagnostics)
    kind, device = device_of_rank(arguments.transport, identity)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = join_rendezvous(identity, CONNECT_SECONDS)
    agree(meeting.store, identity.rank, identity.ranks, spec, (), no_kernels=why_none_on(device))
    check_ranks(spec, identity.ranks)
    connect(identity, kind.backend, meeting)
    transport = kind.end(device, meeting.secret)
    stack.callback(transport.close)
    reporter = say if identity.local_rank == 0 else ignore_diagnostic  # all ranks find the same
    try:
        act(arguments, spec, one_here(transport, device), reporter)
    except UsageError:
        transport.barrier()
        raise
    transport.barrier()
    return 0
