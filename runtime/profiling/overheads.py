"""What a program takes besides its operations: messages and collectives, and the host's time for actions and steps.

All are measured on a minimal pipeline, on as many ranks as the record is for. `post` is the main thread's CPU time per
message, without waiting; `action` the same per action of a schedule, without its messages and operations; `step` the
wall time of a step, from reading the batch to the update, that exceeds its prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from time import perf_counter, thread_time
from typing import Any

import torch
from attrs import evolve

from partita.compiler.analysis.time import predict, stage_seconds
from partita.compiler.costs.devices import Device
from partita.compiler.costs.links import Link, Measured
from partita.compiler.instructions import Channel, Compute, PostReceive, PostSend, Traffic
from partita.compiler.mesh import Mesh
from partita.compiler.state import Compilation
from partita.dsl.load import load_text, spec_of
from partita.runtime.data.binding import open_data
from partita.runtime.evaluation import results
from partita.runtime.rank import CompiledRun, Rank, prepare
from partita.runtime.transports.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, TURN
from partita.runtime.transports.transport import Collective, ProcessEnd, run_alone

FEW, MANY = 8, 40  # microbatches
WARM_UP, STEPS = 5, 40
SMALL, LARGE = 256, 1 << 22  # bytes of a message
SIZES = (SMALL, 1 << 14, 1 << 16, 1 << 18, 1 << 20, LARGE, 1 << 24)  # bytes of which a rank's collective is
EXCHANGES, FEWER = 40, 10
MIN_SECONDS = 1e-9  # seconds
MIN_SPEED = 0.05
WORK, ROWS = (256, 256), 4  # of a product beside a collective; and of a tensor, whose parts are of each row
# By the method of `Link`: the collective, the arguments of a tensor, and whether the method is given the bytes of the
# result, of all ranks, rather than those of a rank's operand.
COLLECTIVES: dict[str, tuple[str, tuple[Any, ...], bool]] = {
    "gather": (ALL_GATHER, (1,), True),
    "scatter": (REDUCE_SCATTER, (1,), False),
    "add": (ALL_REDUCE, (False,), False),
    "exchange": (ALL_TO_ALL, (2, 1), False),
    "pass_on": (TURN, (), False),
}
TEXT = """
axis batch = 2 * {microbatches}, embed = 8, next = embed
model pipeline(x: [batch, embed]) {{
  repeat {ranks} as layer {{
    param w: [embed, next] ~ normal(0.1)
    let x = rename(dot(x, w, over = embed), next -> embed)
  }}
  loss mean(x)
}}
mesh machine(pipe = {ranks})
layout stages on machine {{ stage layer -> pipe }}
schedule one = one_f_one_b(microbatches = {microbatches})
train {{ data = random()  optimizer = sgd(lr = 0.0)  steps = 1_000 }}
"""


def pipeline(ranks: int, microbatches: int) -> CompiledRun:
    """The minimal pipeline."""
    return prepare(spec_of(load_text(TEXT.format(ranks=ranks, microbatches=microbatches))))


def link(transport: Callable[[], ProcessEnd], ranks: int, device: torch.device) -> Link:
    """The link between the first two ranks, by messages back and forth; every rank takes part in opening it."""
    forward, back = Channel(0, 1, "forward"), Channel(1, 0, "backward")
    own = transport()
    own.open(Mesh((("pipe", ranks),), "pipe"), dict.fromkeys((forward, back), Traffic(1, LARGE)))
    seconds: list[float] = []
    busy = 0.0
    for size in (SMALL, LARGE):
        tensor = torch.zeros(size // 4, device=device)
        if own.rank not in (0, 1):
            continue
        out, into = (forward, back) if own.rank == 0 else (back, forward)
        times = []
        for exchange in range(WARM_UP + EXCHANGES):
            busy_wait, own_time, start = own.busy_wait, thread_time(), perf_counter()
            if own.rank == 0:
                own.send(out, tensor).done()
                own.receive(into, tensor).done()
            else:
                own.receive(into, tensor).done()
                own.send(out, tensor).done()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if exchange >= WARM_UP:
                times.append((perf_counter() - start, thread_time() - own_time - (own.busy_wait - busy_wait)))
        if size == SMALL:
            busy = median(cpu for _, cpu in times) / 2
        seconds.append(median(wall for wall, _ in times) / 2)
    own.barrier()
    if not seconds:
        return Link("profiled", 1.0, 0.0)
    small, large = seconds
    return Link("profiled", (LARGE - SMALL) / max(large - small, 1e-9), max(0.0, small - busy), busy)


def collectives(between: Link, transport: Callable[[], ProcessEnd], ranks: int, device: torch.device) -> Link:
    """The link with the times of collectives over all ranks, besides posting, and from them a latency and a bandwidth
    for groups of other sizes; messages and bytes are counted as `Link` does. Each is timed among products, as they are
    in programs, and once more beside them: where the same cores compute and communicate, that hides little.
    """
    own = transport()
    own.open(Mesh((("data", ranks),), None), {})
    one = torch.ones(WORK, device=device)
    others = [torch.ones(WORK[1], 4 * WORK[1], device=device) for _ in range(2)]

    def work() -> None:
        for other in others:
            one @ other

    def after(begin: Callable[[], Collective]) -> None:
        work()
        begin().result()

    def beside(begin: Callable[[], Collective]) -> None:
        started = begin()
        work()
        started.result()

    def timed(run: Callable[..., None], *arguments: Callable[[], Collective]) -> float:
        start = perf_counter()
        run(*arguments)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter() - start

    durations: dict[tuple[str, int], float] = {}
    measured = []
    alone = hidden = 0.0
    for kind, (collective, arguments, whole) in COLLECTIVES.items():
        for size in SIZES:
            tensor = torch.zeros(ROWS, ranks, max(1, size // 4 // ranks // ROWS), device=device)
            begin = partial(own.collective, collective, "data", (tensor,), (arguments,))
            rounds = WARM_UP + (EXCHANGES if size < LARGE else FEWER)
            times = [(timed(work), timed(after, begin), timed(beside, begin)) for _ in range(rounds)]
            # Means, as for operations: a rank that waits may be woken late, and the next collective waits for it.
            working, then, together = (fmean(sorted(each)[:-1]) for each in zip(*times[WARM_UP:], strict=True))
            if then - working < working:
                alone += then - working
                hidden += then - together
            durations[kind, size] = seconds = max(MIN_SECONDS, then - working - 2 * between.post)
            measured.append(Measured(kind, ranks, float(tensor.nbytes * (ranks if whole else 1)), seconds))
    own.barrier()
    unit = Link("unit", 1.0, 1.0)
    latencies, bandwidths = [], []
    for kind in ("gather", "add"):
        # Small tensors measure latency, large ones bandwidth: predictions may assume another algorithm for either.
        factor, counted = (ranks if COLLECTIVES[kind][2] else 1), getattr(unit, kind)
        (messages, _), (_, moved) = (counted(ranks, factor * size) for size in (0, LARGE - SMALL))
        latencies.append(durations[kind, SMALL] / messages)
        bandwidths.append(moved / max(durations[kind, LARGE] - durations[kind, SMALL], 1e-9))
    latency, bandwidth = fmean(latencies), harmonic_mean(bandwidths)
    share = min(1.0, max(MIN_SPEED, hidden / alone)) if alone > 0 else 1.0
    return evolve(
        between,
        collective_latency=latency,
        collective_bandwidth=bandwidth,
        beside=share,
        measured=tuple(measured),
    )


def host(device: Device, between: Link, transport: Callable[[], ProcessEnd], on: torch.device, ranks: int) -> Device:
    """The device with its overheads of actions and steps."""
    costs = []
    plans = [pipeline(ranks, microbatches) for microbatches in (FEW, MANY)]
    for plan in plans:
        own = transport()
        rank = Rank(plan, own.rank, own, on)
        costs.append(_step(plan, rank))
        number = plan.program.mesh.pipe_rank(own.rank)
    counts = [_counts(plan, number) for plan in plans]
    actions, posts = (many - few for few, many in zip(*counts, strict=True))
    states = [_on(plan.training, device, between) for plan in plans]
    kernels = stage_seconds(states[0])
    worked = (kernels[number, "F"] + kernels[number, "BW"]) / 2
    action = (costs[1][1] - costs[0][1] - posts * between.post) / actions - worked
    device = evolve(device, action=max(0.0, action))
    step = costs[0][0] - predict(_on(plans[0].training, device, between)).step_time
    return evolve(device, step=max(0.0, step))


def _on(state: Compilation, device: Device, between: Link) -> Compilation:
    """A compilation, as if for this device and its links."""
    return evolve(state, device=device, mesh=state.mesh.joined_by(between))


def _counts(plan: CompiledRun, rank: int) -> tuple[int, int]:
    """The numbers of actions and of messages in a rank's step."""
    instructions = plan.program.ranks[rank].instructions
    actions = sum(isinstance(each, Compute) for each in instructions)
    return actions, sum(isinstance(each, (PostSend, PostReceive)) for each in instructions)


def _step(plan: CompiledRun, rank: Rank) -> tuple[float, float]:
    """Seconds of a step: wall time, and the main thread's CPU time."""
    dataset = open_data(plan.program, plan.train, Path())
    times = []
    for number in range(1, WARM_UP + STEPS + 1):
        busy_wait, own, start = rank.transport.busy_wait, thread_time(), perf_counter()
        batch = rank.tensors(dataset.batch(number)) if dataset else {}
        run_alone(rank.step(number, batch, (0.0,)))
        results(rank.training)
        times.append((perf_counter() - start, thread_time() - own - (rank.transport.busy_wait - busy_wait)))
    return median(wall for wall, _ in times[WARM_UP:]), median(cpu for _, cpu in times[WARM_UP:])
