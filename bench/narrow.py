"""Two ranks at the ends of a narrow link: training in which a collective takes as long as the link would carry it.

Each rank is a process that trains over Gloo. The link is narrow in this way: a collective is done only once what the
rank has sent so far would have passed a link of that bandwidth, in order, with the latency of each message; the process
is free until it waits. What Gloo really does meanwhile, through memory, costs it CPU time as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, process_time, sleep
from typing import Any

from measure import joined, report

BANDWIDTH, LATENCY = 125e6, 1e-4


def run(file: str, settings: Sequence[str], bandwidth: float = BANDWIDTH) -> None:
    """One rank, which reports its losses; and of each step the seconds, the CPU's, and those of waiting for it."""
    import torch
    import torch.distributed as dist
    from peers.workload import workload

    from partita.runtime.heap import keep_pages
    from partita.runtime.rank import Rank
    from partita.runtime.training import train
    from partita.runtime.transports.process import ProcessTransport

    class Delayed:
        """A collective that is done when the link has carried it."""

        def __init__(self, handle: Any, due: float, link: Narrow) -> None:
            self.handle, self.due, self.link = handle, due, link

        def done(self) -> bool:
            """Wait for it, and add up for how long the link still carries it."""
            left = max(0.0, self.due - perf_counter())
            self.link.waited += left
            sleep(left)
            return self.handle.done()

        def result(self) -> tuple[torch.Tensor, ...]:
            """What it results in."""
            return self.handle.result()

    class Narrow(ProcessTransport):
        """Two ranks at the ends of a narrow link."""

        free = waited = 0.0

        def collective(self, kind: str, axis: str, tensors: Any, arguments: Any) -> Any:
            """Post a collective, which passes the link after those before it."""
            held = sum(each.nbytes for each in tensors)
            sent = {"all-gather": held, "reduce-scatter": held / 2, "all-to-all": held / 2, "all-reduce": held}[kind]
            self.free = max(perf_counter(), self.free) + LATENCY + sent / bandwidth
            return Delayed(super().collective(kind, axis, tensors, arguments), self.free, self)

    class Seen:
        """An observer that notes the losses, and how long each step has taken, computed and waited."""

        def __init__(self) -> None:
            self.losses, self.seconds, self.computed, self.waited = [], [], [], []
            self.begun, self.began, self.before = perf_counter(), process_time(), 0.0

        def step(self, result: Any) -> None:
            """A step is done."""
            now, then, waited = perf_counter(), process_time(), transport.waited
            self.losses.append(result.loss)
            self.seconds.append(now - self.begun)
            self.computed.append(then - self.began)
            self.waited.append(waited - self.before)
            self.begun, self.began, self.before = now, then, waited

    work = workload(file, settings)
    joined()
    keep_pages()
    device = torch.device("cpu")
    transport = Narrow(device)
    rank = Rank(work.plan, dist.get_rank(), transport, device)
    seen = Seen()
    for _ in train(rank, work.dataset, seen):
        pass
    transport.close()
    report({"losses": seen.losses, "seconds": seen.seconds, "computed": seen.computed, "waited": seen.waited})
