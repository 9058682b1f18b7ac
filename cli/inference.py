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

from partita.cli.source import load_or_report, report, say
from partita.cli.tolerant import tolerate_output_errors
from partita.cli.training.devices import device_of_rank, transport_of
from partita.cli.training.rank import status_of_rank
from partita.cli.training.room import refuse_crowd
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.dsl.spec import Spec
from partita.runtime.supervision.consistency import agree
from partita.runtime.supervision.identity import Identity, rank_from_environment, wait_for_start
from partita.runtime.supervision.launcher import launch
from partita.runtime.supervision.rendezvous import CONNECT_SECONDS, connect, join_rendezvous
from partita.runtime.supervision.statuses import FAILED, PEER_LOST
from partita.runtime.transports.registry import TRANSPORTS, InProcess

if TYPE_CHECKING:
    from partita.runtime.inference.ranks import Here
    from partita.runtime.inference.weights import Report

# Uses the model of a file, on one device or on the ranks that are here, and returns the exit status; it reports
# diagnostics by the function that it is given, and prints results where the first rank is.
Use = Callable[[argparse.Namespace, Spec, "Here | None", "Report"], int]


def add_transport_argument(parser: argparse.ArgumentParser) -> None:
    """Whether to compute in the file's layout."""
    parser.add_argument(
        "--transport",
        choices=tuple(TRANSPORTS),
        help="compute in the file's layout, on the ranks of its mesh, connected so (default: in this process, on one "
        "CPU, unless torchrun or Slurm has started it)",
    )


def use(arguments: argparse.Namespace, act: Use) -> int:
    """Use the model of a command's file. Returns what `act` returns; 1 with diagnostics; 2 for wrong usage; 3 if a rank
    failed.
    """
    try:
        identity = rank_from_environment()
    except ValueError as error:
        print(f"partita: {error}", file=sys.stderr)
        return 2
    if identity is not None:
        with tolerate_output_errors():
            return status_of_rank(identity, lambda stack: _as_rank(arguments, identity, act, stack))
    given = load_or_report(arguments)
    if given is None:
        return 1
    try:
        if arguments.transport is None:
            return act(arguments, given, None, say)
        refuse_crowd(given)
        ranks = given.mesh.ranks if given.mesh is not None else 1
        kind = transport_of(arguments, given)
        if isinstance(kind, InProcess):
            from partita.runtime.inference.ranks import Here

            return act(arguments, given, Here(range(ranks), kind.cluster(ranks, False, 0)), say)
    except Refused as refused:
        report(refused.diagnostics)
        return 1
    try:
        return launch([sys.executable, "-m", "partita", *arguments.given], ranks, environment=os.environ)
    except OSError as error:
        print(f"partita: cannot start the ranks: {error.strerror or error}", file=sys.stderr)
        return FAILED


def _as_rank(arguments: argparse.Namespace, identity: Identity, act: Use, stack: ExitStack) -> int:
    """Use it as one rank."""
    if identity.launcher == "partita":
        # Ctrl-C is for the supervisor. A rank that is interrupted alone ends at once, wherever it waits.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not wait_for_start():
            return PEER_LOST
    given, diagnostics = load(arguments.file, arguments.overrides, arguments.root)
    if given is None:
        raise Refused(diagnostics)
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
    agree(meeting.store, identity.rank, identity.ranks, given, (), no_kernels=why_none_on(device))
    check_ranks(given, identity.ranks)
    connect(identity, kind.backend, meeting)
    transport = kind.end(device, meeting.secret)
    stack.callback(transport.close)
    heard = say if identity.local_rank == 0 else ignore_diagnostic  # all ranks find the same
    status = act(arguments, given, one_here(transport, device), heard)
    transport.barrier()
    return status
