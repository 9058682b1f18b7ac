"""Whether the ranks of a run have room on this machine: their number, its memory and its cores, and a GPU's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partita.cli.number_format import bytes_text
from partita.compiler.analysis.memory import memory_report
from partita.dsl import limits
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.runtime.supervision import capacity
from partita.runtime.supervision.fork_server import FORKS
from partita.runtime.transports.registry import InProcess, Processes

if TYPE_CHECKING:
    import torch

    from partita.compiler.state import Compilation
    from partita.dsl.spec import Spec

# What processes hold besides tensors, measured with torch 2.13 on Linux: one that has imported all that a rank imports,
# and what a rank that is forked from it does not share with it.
PROCESS, FORKED = 250 << 20, 36 << 20
VIRTUAL = "`--transport virtual` runs all ranks in one process"


def refuse_crowd(spec: Spec) -> None:
    """Refuse (E0613) more ranks than an untrusted file should be able to start on one machine."""
    mesh = spec.mesh
    if mesh is not None and mesh.ranks > limits.LOCAL_RANKS:
        raise refuse(
            "E0613",
            f"mesh `{mesh.name}` has {mesh.ranks:,} ranks; at most {limits.LOCAL_RANKS} can be started on one machine",
            mesh.span,
            help="start it with torchrun or Slurm on several machines, or make the mesh smaller",
        )


def refuse_large(spec: Spec, state: Compilation, kind: Processes | InProcess, attempts: int = 1) -> None:
    """Refuse (E0626) a run that needs more memory than this machine has: by the bounds of its tensors, and by what
    processes hold, those of `attempts` at a time.
    """
    ranks = state.program.mesh.ranks
    reports = [memory_report(state, each) for each in state.plan.ranks]
    tensors = sum(each.host + (0 if kind.gpu else each.total) for each in reports) * (ranks // len(reports))
    processes = PROCESS
    if isinstance(kind, Processes):
        processes = PROCESS + ranks * attempts * FORKED if FORKS else ranks * attempts * PROCESS
    memory = capacity.memory()
    if tensors + processes <= memory:
        return
    here = "this machine has" if capacity.limit() is None else "this container or job may use"
    smaller = "use a smaller mesh or batch, or start it with torchrun or Slurm on several machines"
    raise refuse(
        "E0626",
        f"the run may need {bytes_text(tensors + processes)} of memory, and {here} {bytes_text(memory)}",
        spec.mesh.span if spec.mesh is not None else None,
        notes=[
            f"tensors of {ranks} rank{'s' * (ranks > 1)}: at most {bytes_text(tensors)}",
            f"processes: about {bytes_text(processes)}",
        ],
        help=VIRTUAL if tensors + PROCESS <= memory else smaller,
    )


def crowded(spec: Spec, kind: Processes) -> Diagnostic | None:
    """A warning (W0606) where several ranks take turns on a core."""
    cores = capacity.cores()
    if spec.mesh is None or spec.mesh.ranks <= cores:
        return None
    share = f"{spec.mesh.ranks} ranks share {cores} core{'s' * (cores > 1)}"
    return Diagnostic("W0606", share, spec.mesh.span, help=f"{VIRTUAL}, to try a mesh out")


def little_memory(state: Compilation, rank: int, device: torch.device) -> Diagnostic | None:
    """A warning (W0608) where a rank's bound is more than its GPU has left beside CUDA, NCCL and other processes. It is
    asked once the communicators are connected: what they hold depends on NCCL's version and on the links.
    """
    import torch

    bound = memory_report(state, state.plan.ranks[state.program.mesh.pipe_rank(rank)]).total
    free, total = torch.cuda.mem_get_info(device)
    left = free + torch.cuda.memory_reserved(device)
    if bound <= left:
        return None
    needs = f"rank {rank} may need {bytes_text(bound)}, and {bytes_text(left)} of {bytes_text(total)} are left"
    others = f"CUDA, NCCL's communicators and other processes hold {bytes_text(total - left)}"
    help = "`shard param -> data`, `recompute auto` or a smaller batch need less"
    return Diagnostic("W0608", needs, notes=(others,), help=help)
