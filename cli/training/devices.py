"""Which devices ranks compute on, which transport connects them, and what CUDA is told before it starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from partita.compiler.schedules.hardware_queues import queues
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.runtime.transports.registry import TRANSPORTS, InProcess, Processes

if TYPE_CHECKING:
    import torch

    from partita.dsl.spec import Spec
    from partita.runtime.rank import CompiledRun
    from partita.runtime.supervision.identity import Identity

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
GROWING = "expandable_segments:True"
# Pinned memory of the host is not rounded up to powers of two, but for pieces below a MiB.
UNROUNDED, UNROUNDED_SINCE = "pinned_max_round_threshold_mb:1", (2, 13)
# What CUDA, its allocator and torch's NCCL read as they start, unless the user has set it.
ENVIRONMENT = {
    # Streams beyond these queues of the hardware share one with others, and wait for these without reason. 32 are the
    # most that there are, 8 the default.
    CONNECTIONS: "32",
    # Segments that grow: where memory is cut into pieces that do not fit, the allocator frees it, and the host waits.
    "PYTORCH_ALLOC_CONF": GROWING,
    # Ranks that wait are the watchdog's to judge (`runtime.supervision.watchdog`). torch would end the process.
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "86400",
    # The last operations of its groups, of which a stall is told those that a GPU has not done.
    "TORCH_FR_BUFFER_SIZE": "2000",
}
# Names that torch reads as well.
FORMER = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF", "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE"}
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # if none exists there is no GPU, and torch need not be imported to ask it


def transport_of(arguments: argparse.Namespace, spec: Spec) -> Processes | InProcess:
    """The transport for all ranks on this machine. Raises Refused (E0611)."""
    ranks = spec.mesh.ranks if spec.mesh is not None else 1
    needless = arguments.transport is not None and not TRANSPORTS[arguments.transport].gpu
    none = needless or not any(Path(each).exists() for each in DRIVERS)
    kind = chosen(arguments.transport, 0 if none else gpus_here(), ranks)
    check_graphs(spec, kind.gpu)
    return kind


def chosen(transport: str | None, gpus: int, ranks: int) -> Processes | InProcess:
    """The requested transport, or else the first that is the default for this many GPUs and ranks on this machine.
    Raises Refused (E0611) if it does not support them, or nobody has asked to leave GPUs unused.
    """
    each = TRANSPORTS.values()
    kind = TRANSPORTS[transport] if transport else next(kind for kind in each if kind.default(gpus, ranks))
    problem = kind.problem(gpus, ranks)
    if transport is None and gpus and not kind.gpu:
        message = f"ranks on this machine: {ranks}; GPUs that each sees: {gpus}, which would not be used"
        help = "start at most as many ranks as there are GPUs, let each rank see all of them or, under Slurm, "
        help += "one of its own by `--gpus-per-task=1`; or compute on CPUs: `--transport gloo`"
        raise refuse("E0611", message, help=help)
    if problem is not None:
        raise Refused([problem])
    return kind


def gpus_here() -> int:
    """The number of GPUs that this process sees. Tells CUDA its `ENVIRONMENT`."""
    known = tuple(map(int, version("torch").split(".")[:2])) >= UNROUNDED_SINCE  # others end at options of later ones
    for name, value in ENVIRONMENT.items():
        value = f"{value},{UNROUNDED}" if value is GROWING and known else value
        if FORMER.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)

    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of_rank(transport: str | None, identity: Identity) -> tuple[Processes, torch.device]:
    """The transport and the device of this rank. Raises Refused (E0611)."""
    import torch

    gpus = gpus_here()
    number, ranks = (0, 1) if identity.own_gpu else (identity.local_rank, identity.local_ranks)
    kind = chosen(transport, gpus, ranks)
    if not isinstance(kind, Processes):
        message = f"--transport {kind.name} runs all ranks in one process, and this is one of several"
        raise refuse("E0611", message, help="start it without a launcher")
    if kind.gpu:
        return kind, torch.device("cuda", number % gpus)
    return kind, torch.device("cpu")


def check_graphs(spec: Spec, gpu: bool) -> None:
    """Refuse graphs of several ranks on GPUs (E0422): communicators in graphs can wait for each other by NCCL's own
    documentation, and nobody has seen them run.
    """
    ranks = spec.mesh.ranks if spec.mesh is not None else 1
    if gpu and ranks > 1 and spec.train is not None and spec.train.graphs:
        message = f"`graphs` is for one rank on a GPU, and there are {ranks}"
        raise refuse("E0422", message, help="leave it out, or set `train.graphs=false`")


def shared_queues(plan: CompiledRun) -> Iterator[Diagnostic]:
    """A warning (W0607) where streams of a GPU share hardware queues, and the schedule needs one for each, in training
    or in an evaluation: the forward passes of `dualpipe_v` alone do, if two values pass each cut.
    """
    limit = os.environ.get(CONNECTIONS, "")
    for program in filter(None, plan.programs):
        launches = [each.launches for each in program.ranks]
        streams = max(len({each.stream for each in own}) for own in launches)
        # First what costs nothing: large pipelines take seconds to follow.
        if not limit.isdecimal() or int(limit) >= streams:
            continue
        if queues([each.instructions for each in program.ranks], launches) > 1:
            message = (
                f"`{CONNECTIONS}` is {limit}, and the schedule needs a hardware queue for each of {streams} streams"
            )
            schedule = plan.spec.schedule
            yield Diagnostic("W0607", message, None if schedule is None else schedule.span, help=f"unset {CONNECTIONS}")
            return
