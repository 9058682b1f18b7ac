"""A complete record: this machine with N ranks, which all measure the same at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp, log
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve

from partita.compiler.costs.devices import Device
from partita.compiler.costs.links import LINKS, Link
from partita.compiler.costs.record import DEVICE, LINK, Record, Timing, Timings
from partita.runtime.profiling.kernels import measure, timings
from partita.runtime.profiling.models import in_context, programs
from partita.runtime.profiling.overheads import FEW, collectives, host, link, pipeline
from partita.runtime.supervision import capacity
from partita.runtime.transports.transport import ProcessEnd

COPIED = 64 << 20  # bytes of a copy that fits in no cache


def profile(
    transport: Callable[[], ProcessEnd],
    device: torch.device,
    precisions: tuple[str, ...],
    progress: Callable[[str], None],
    quick: bool = False,
) -> Record:
    """The record, the same on every rank. `transport` makes a new one over the process group. `quick`: fewer sizes."""
    ranks = dist.get_world_size()
    progress("links")
    between = LINKS["memory"]
    between = evolve(between, collective_bandwidth=between.bandwidth, collective_latency=between.latency)
    if ranks > 1:
        between = collectives(link(transport, ranks, device), transport, ranks, device)
    gpu = device.type == "cuda"
    whole = [*programs(gpu, precisions, quick), pipeline(1, FEW).training]
    states = [*whole, *in_context(gpu, precisions, quick)]
    meeting = transport()
    measured = []
    for i, state in enumerate(states):
        if i % 10 == 0:
            progress(f"program {i + 1} of {len(states)}")
        meeting.barrier()  # all ranks work at the same time
        measured.append(measure(state, device))
    kernel_timings = timings(measured[: len(whole)])
    known = {each.kernel for each in kernel_timings}
    # Of programs of two ranks what they alone do: they have few operations of other kinds.
    kernel_timings += [each for each in timings(measured[len(whole) :]) if each.kernel not in known]
    logs = _everywhere([log(each.seconds) for each in kernel_timings], device).mean(0).tolist()
    kernel_timings = [evolve(each, seconds=exp(value)) for each, value in zip(kernel_timings, logs, strict=True)]
    own = Device(
        "profiled",
        _peaks(kernel_timings),
        _memory(device) // ranks if device.type == "cpu" else _memory(device),
        float(_everywhere([_bandwidth(device)], device).mean()),
        gpu=gpu,
        workspace=_workspace() if gpu else 0,
        cache=torch.cuda.get_device_properties(device).L2_cache_size if gpu else 0,
        launch=min(each.seconds for each in kernel_timings),
        timings=Timings(tuple(kernel_timings)),
    )
    progress("actions and steps")
    # The link of the first two ranks, as the first measured it.
    figures = _everywhere([getattr(between, name) for name in LINK], device)[0].tolist()
    between = evolve(between, **dict(zip(LINK, figures, strict=True)))
    costs = host(own, between, transport, device, ranks)
    action, step = _everywhere([costs.action, costs.step], device).mean(0).tolist()
    own = evolve(own, action=action, step=step)
    # Each of the ranks has measured all collectives.
    times = _everywhere([each.seconds for each in between.measured], device).mean(0).tolist()
    kinds = [(each.kind, each.bytes, seconds) for each, seconds in zip(between.measured, times, strict=True)]
    return Record(ranks, _measured(own, DEVICE), _measured(between, LINK), own.timings, tuple(kinds))


def _measured(record: Device | Link, names: Iterable[str]) -> dict[str, Any]:
    """The measured fields of a record."""
    return {name: getattr(record, name) for name in names}


def _everywhere(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """All-gathers the values of each rank: [ranks, values]."""
    own = torch.tensor(values, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return torch.stack(gathered).cpu()


def _peaks(timings: Sequence[Timing]) -> dict[str, float]:
    """The highest FLOP/s that a matrix product reached, by dtype; the highest of all for a dtype not measured."""
    peaks = {"f32": 0.0, "bf16": 0.0, "f64": 0.0}
    for each in timings:
        if each.kernel.startswith("dot"):
            peaks[each.dtype] = max(peaks[each.dtype], each.work / each.seconds)
    return {dtype: value or max(peaks.values()) for dtype, value in peaks.items()}


def _memory(device: torch.device) -> int:
    """The memory of the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return capacity.total()


def _workspace() -> int:
    """Bytes that the libraries of products have come to keep, whichever products have run."""
    allocated = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return allocated - torch.cuda.memory_allocated()


def _bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.ones(COPIED // 4, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        start = perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, perf_counter() - start)
    return 2 * COPIED / best
