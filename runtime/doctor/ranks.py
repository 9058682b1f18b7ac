"""The self test on all ranks: what a rank does and leaves behind, and what that says if not all came to the end.

Each rank keeps a file that says where it stands, so that one that hangs or dies can be named. At the end they send what
they measured to rank 0 through the store of the rendezvous, which works where collectives do not.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field

from partita.dsl.diagnostic import Diagnostic
from partita.runtime.doctor.machine import Facts
from partita.runtime.doctor.parts import Ended
from partita.runtime.supervision.identity import Identity
from partita.runtime.supervision.rendezvous import connect, join_rendezvous
from partita.runtime.transports.failures import ConnectionLost, UntrustedPeer, cause

if TYPE_CHECKING:
    import torch

    from partita.runtime.transports.registry import Processes

FACTS, ALL = "facts.json", "all.json"
CONNECTING = "connecting to the other ranks"
SHOWN = 8  # of ranks, and of lines that a part wrote
FAILED = 3


@define
class Standing:
    """Where a rank stands, in a file."""

    path: Path
    state: dict[str, Any] = field(
        factory=lambda: {"host": socket.gethostname(), "at": "", "problem": None, "tests": []}
    )

    def begin(self, what: str) -> None:
        """Note what comes next."""
        self.state["at"] = what
        self.write()

    def write(self) -> None:
        """Replace the file."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.state))
        os.replace(new, self.path)


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank}.json"


def run_rank(identity: Identity, kind: Processes, device: torch.device, folder: Path, seconds: float) -> int:
    """Test as a rank; returns 0, or 3 if it could not be done. On rank 0 the folder then has everyone's results."""
    import torch

    from partita.runtime.doctor.selftest import self_test

    standing = Standing(path_of(folder, identity.rank))
    standing.begin(CONNECTING)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        meeting = connect(identity, kind.backend, join_rendezvous(identity, seconds), seconds)
        last = kind.end(device, meeting.secret)
        for measured in self_test(lambda: kind.end(device, meeting.secret), device, standing.begin):
            standing.state["tests"].append(asdict(measured))
        standing.begin("sending the results to rank 0")
        facts = folder / FACTS
        own = {**standing.state, "facts": json.loads(facts.read_text()) if facts.exists() else None}
        meeting.store.set(_key(identity.rank), json.dumps(own))
        if identity.rank == 0:
            results = [json.loads(meeting.store.get(_key(rank))) for rank in range(identity.ranks)]
            (folder / ALL).write_text(json.dumps(results))
        last.barrier()
        last.close()
    except (ConnectionLost, UntrustedPeer) as error:
        standing.state["problem"] = str(error)
    except Exception as error:  # whatever fails on a machine that is examined is a finding
        standing.state["problem"] = f"{type(error).__name__}: {cause(RuntimeError(str(error)))}"
    standing.write()
    return 0 if standing.state["problem"] is None else FAILED


def _key(rank: int) -> str:
    return f"doctor/{rank}"


def unfinished(ended: Ended, folder: Path, ranks: Sequence[int], transport: str) -> Iterator[Diagnostic]:
    """What is wrong where the ranks whose files are in a folder did not all come to the end."""
    states = {rank: json.loads(path_of(folder, rank).read_text()) for rank in ranks if path_of(folder, rank).exists()}
    notes = [
        f"rank {rank} on {state['host']}, {state['at']}" + (f": {state['problem']}" if state["problem"] else "")
        for rank, state in sorted(states.items(), key=lambda each: (each[1]["problem"] is None, each[0]))
    ]
    errors = [line.strip() for line in ended.errors.splitlines() if line.strip()]
    shown = (*notes[:SHOWN], *(f"and {len(notes) - SHOWN} more",) * (len(notes) > SHOWN), *errors[-SHOWN:])
    how = ended.problem or "ended without its results"
    if not states or any(state["at"] == CONNECTING for state in states.values()):
        yield Diagnostic(
            "E1103",
            f"the ranks do not connect over {transport}: the self test {how}",
            notes=shown,
            help="ranks must reach each other on all ports: check firewalls, MASTER_ADDR, and that "
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name the interface between the machines",
        )
    else:
        help = (
            "NCCL_DEBUG=INFO shows more; `dmesg` whether memory was short or a GPU fell off; --timeout gives more time"
        )
        yield Diagnostic("E1105", f"the self test {how}", notes=shown, help=help)


def finished(folder: Path) -> list[Facts] | None:
    """All ranks' results, in order; None if rank 0 did not get them."""
    path = folder / ALL
    results: list[Facts] | None = json.loads(path.read_text()) if path.exists() else None
    return results
