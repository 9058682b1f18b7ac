"""The self test of one rank: what its device reaches, whether transfers and collectives bring what they must and how
fast, and a tiny training run.

It goes through the transport and the executor of `partita run`, so what passes here is what a run uses. Data are small
integers, whose sums are exact in any order. Bandwidth is the bus bandwidth of nccl-tests: bytes that cross a rank's
link a second, comparable between collectives and numbers of ranks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from attrs import frozen

from partita.compiler.instructions import Channel, Traffic
from partita.compiler.mesh import Mesh
from partita.dsl.load import load_text, spec_of
from partita.runtime.data.binding import inputs_of
from partita.runtime.data.registry import open_dataset
from partita.runtime.evaluation import results
from partita.runtime.inputs import Batch
from partita.runtime.rank import CompiledRun, Rank, prepare
from partita.runtime.training import VirtualRun
from partita.runtime.transports.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from partita.runtime.transports.transport import ProcessEnd, run_alone

SEND = "send and receive"
FLOAT = 4  # bytes
PERIOD = 251  # of the data, which is prime: no part of a tensor looks like another
SIZES = {"cpu": (4 << 10, 256 << 10, 4 << 20), "cuda": (4 << 10, 1 << 20, 64 << 20)}  # bytes of a rank's tensor
WARM_UP, REPEATS = 2, 5
PRODUCT = {"cpu": (512, torch.float32), "cuda": (8192, torch.bfloat16)}
COPIED = {"cpu": 64 << 20, "cuda": 1 << 30}
STEPS, RATE = 4, 0.01
GPU_TOLERANCE = 1e-3  # relative: f32 with other kernels, after some steps
MODEL = """
axis batch = 4 * {data}, seq = 16
axis embed = 32, heads = 2, key = 16, ffn = 64, vocab = 64
model tiny(tokens: i64[batch, seq], targets: i64[batch, seq]) {{
  param wte: [vocab, embed] ~ normal(0.1)
  let x = embedding(tokens, wte, over = vocab)
  repeat {pipe} as layer {{
    param wq, wk, wv: [embed, heads, key] ~ kaiming()
    param wo: [heads, key, embed] ~ kaiming()
    param up: [embed, ffn] ~ kaiming()
    param down: [ffn, embed] ~ kaiming()
    let h = rms_norm(x, over = embed)
    let a = attend(dot(h, wq, over = embed), dot(h, wk, over = embed), dot(h, wv, over = embed),
                   over = seq, along = key, causal = true)
    let x = x + dot(a, wo, over = [heads, key])
    let x = x + dot(gelu(dot(rms_norm(x, over = embed), up, over = embed)), down, over = ffn)
  }}
  loss cross_entropy(dot(rms_norm(x, over = embed), wte, over = embed), targets, over = vocab)
}}
mesh machine(data = {data}, pipe = {pipe})
layout stages on machine {{ shard batch -> data  shard state -> data  stage layer -> pipe }}
schedule one = one_f_one_b(microbatches = 2)
train {{ data = random()  optimizer = adamw(lr = 0.01)  clip = 1.0  steps = 100  seed = 1 }}
"""


@frozen
class Measured:
    """What a test of a rank found. `bytes` is the size of its tensor; `rate` is in bytes per second, FLOP/s for the
    product, None where there is nothing to measure; `wrong` says what is wrong with the result, if anything.
    """

    test: str
    bytes: int = 0
    seconds: float = 0.0
    rate: float | None = None
    wrong: str | None = None


def self_test(make: Callable[[], ProcessEnd], device: torch.device, begin: Callable[[str], None]) -> Iterator[Measured]:
    """Everything in order, the same on every rank. `make` makes a transport over the process group; `begin` is told
    what comes next, so that whoever watches knows where a rank stands. Raises `ConnectionLost`.
    """
    begin("the speed of the device")
    yield from speed(device)
    meeting = make()
    ranks, rank = meeting.ranks, meeting.rank
    begin("the first sum over all ranks")
    meeting.barrier()
    if ranks > 1:
        yield from collectives(make, device, begin)
        yield from transfers(make, device, begin)
    begin("training of a tiny model")
    plan = tiny(ranks)
    own = Training.of_rank(plan, make(), device)
    begin("the same training on one CPU, in one process")
    yield own.compared(Training.in_process(plan, rank), device)


# ---------------------------------------------------------------- the device


def speed(device: torch.device) -> Iterator[Measured]:
    """A large product, a copy, and on a GPU the way from the host's pinned memory."""
    size, dtype = PRODUCT[device.type]
    left = torch.ones(size, size, device=device, dtype=dtype)
    seconds = _timed(lambda: left @ left, device)
    yield Measured("product", left.nbytes, seconds, 2.0 * size**3 / seconds)
    source = torch.ones(COPIED[device.type] // FLOAT, device=device)
    target = torch.empty_like(source)
    seconds = _timed(lambda: target.copy_(source), device)
    yield Measured("copy", source.nbytes, seconds, 2 * source.nbytes / seconds)
    if device.type == "cuda":
        pinned = torch.empty(source.shape, pin_memory=True)
        seconds = _timed(lambda: target.copy_(pinned, non_blocking=True), device)
        yield Measured("copy from the host", source.nbytes, seconds, source.nbytes / seconds)


# ---------------------------------------------------------------- communication


def collectives(
    make: Callable[[], ProcessEnd], device: torch.device, begin: Callable[[str], None]
) -> Iterator[Measured]:
    """Every collective along an axis of all ranks, at each size."""
    own = make()
    ranks, rank = own.ranks, own.rank
    begin("connecting all ranks along one axis")
    own.open(Mesh((("data", ranks),), None), {})
    arguments = {ALL_REDUCE: (False,), ALL_GATHER: (0,), REDUCE_SCATTER: (0,), ALL_TO_ALL: (0, 0)}
    for kind, options in arguments.items():
        for size in SIZES[device.type]:
            begin(f"{kind} of {size} bytes")
            count = -(-size // FLOAT // ranks) * ranks
            tensor = data(count, rank, device)
            results: list[torch.Tensor] = []

            def once(kind: str = kind, options: tuple[Any, ...] = options, tensor: torch.Tensor = tensor) -> None:
                results[:] = own.collective(kind, "data", (tensor,), (options,)).result()  # noqa: B023

            seconds = _timed(once, device)
            crossing = CROSSING[kind](ranks) * tensor.nbytes
            wrong = unequal(results[0], expected(kind, count, rank, ranks))
            yield Measured(kind, tensor.nbytes, seconds, crossing / seconds, wrong)


# Bytes that cross a rank's link, by bytes of its tensor (nccl-tests, doc/PERFORMANCE.md).
CROSSING: Mapping[str, Callable[[int], float]] = {
    ALL_REDUCE: lambda ranks: 2 * (ranks - 1) / ranks,
    ALL_GATHER: lambda ranks: ranks - 1,
    REDUCE_SCATTER: lambda ranks: (ranks - 1) / ranks,
    ALL_TO_ALL: lambda ranks: (ranks - 1) / ranks,
}


def transfers(make: Callable[[], ProcessEnd], device: torch.device, begin: Callable[[str], None]) -> Iterator[Measured]:
    """Around a ring of all ranks: each sends to the next one."""
    own = make()
    ranks, rank = own.ranks, own.rank
    onward, arriving = (Channel(each % ranks, (each + 1) % ranks, "forward") for each in (rank, rank - 1 + ranks))
    largest, streams = max(SIZES[device.type]), own.streams(device)
    begin("connecting each rank with the next")
    ring = {Channel(each, (each + 1) % ranks, "forward"): Traffic(1, largest) for each in range(ranks)}
    own.open(Mesh((("pipe", ranks),), "pipe"), ring)
    for size in SIZES[device.type]:
        begin(f"{SEND} of {size} bytes")
        sent, buffer = data(size // FLOAT, rank, device), torch.empty(size // FLOAT, device=device)

        def once(sent: torch.Tensor = sent, buffer: torch.Tensor = buffer) -> None:
            # On streams of their own: on one, each rank would receive when it has sent, and all would wait.
            waiting = (
                streams.launch(str(onward), partial(own.send, onward), sent),
                streams.launch(str(arriving), partial(own.receive, arriving), buffer),
            )
            for each in waiting:
                each.done()

        seconds = _timed(once, device, own.barrier)
        wrong = unequal(buffer, data(size // FLOAT, (rank - 1) % ranks, torch.device("cpu")))
        yield Measured(SEND, size, seconds, size / seconds, wrong)


def data(count: int, rank: int, device: torch.device) -> torch.Tensor:
    """A rank's numbers."""
    return torch.arange(count, device=device).remainder_(PERIOD).add_(rank).float()


def expected(kind: str, count: int, rank: int, ranks: int) -> torch.Tensor:
    """What a rank gets of a collective over everyone's `data`, in closed form."""
    plain = data(count, 0, torch.device("cpu"))
    total = plain * ranks + ranks * (ranks - 1) / 2
    part = plain.view(ranks, -1)[rank]
    return {
        ALL_REDUCE: lambda: total,
        REDUCE_SCATTER: lambda: total.view(ranks, -1)[rank],
        ALL_GATHER: lambda: torch.cat([plain + other for other in range(ranks)]),
        ALL_TO_ALL: lambda: torch.cat([part + other for other in range(ranks)]),
    }[kind]()


def unequal(result: torch.Tensor, right: torch.Tensor) -> str | None:
    """Where a result is wrong; None if it is right."""
    here = result.cpu().view(-1)
    if here.shape != right.shape:
        return f"{here.numel()} numbers instead of {right.numel()}"
    places = (here != right).nonzero().view(-1)
    if not len(places):
        return None
    first = int(places[0])
    return f"{len(places)} of {len(right)} numbers, the first at {first}: {here[first]:g} instead of {right[first]:g}"


def _timed(once: Callable[[], object], device: torch.device, between: Callable[[], object] = lambda: None) -> float:
    """The median of some repetitions, in seconds."""
    durations = []
    for _ in range(WARM_UP + REPEATS):
        between()
        start = perf_counter()
        once()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(perf_counter() - start)
    return max(median(durations[WARM_UP:]), 1e-9)


# ---------------------------------------------------------------- training


def tiny(ranks: int) -> CompiledRun:
    """A tiny transformer on all ranks: a pipeline of two stages where their number is even, and copies of it."""
    pipe = 2 if ranks % 2 == 0 else 1
    spec = spec_of(load_text(MODEL.format(data=ranks // pipe, pipe=pipe)))
    return prepare(spec)


@frozen
class Training:
    """Some steps of it: losses and gradient norms, and a digest of the parameters that a rank has at the end."""

    numbers: tuple[float, ...]
    digest: str

    @classmethod
    def of_rank(cls, plan: CompiledRun, transport: ProcessEnd, device: torch.device) -> Training:
        """On all ranks."""
        rank = Rank(plan, transport.rank, transport, device)

        def step(number: int, batch: Batch) -> tuple[float, float]:
            run_alone(rank.step(number, batch, (RATE,)))
            loss, _, norm = results(rank.training)
            return loss, norm

        return cls._after(plan, rank, step)

    @classmethod
    def in_process(cls, plan: CompiledRun, rank: int) -> Training:
        """On CPU, with all ranks in this process; the parameters are those of `rank`."""
        run = VirtualRun(plan)
        return cls._after(plan, run.ranks[rank], lambda number, batch: run.step(number, batch, RATE))

    @classmethod
    def _after(cls, plan: CompiledRun, rank: Rank, step: Callable[[int, Batch], tuple[float, float]]) -> Training:
        inputs = inputs_of(plan.program.inputs, plan.program.batch)
        dataset = open_dataset(plan.train.data, inputs, plan.train.seed, Path())
        batches = (rank.tensors(dataset.batch(number)) for number in range(1, STEPS + 1))
        numbers = [each for number, batch in enumerate(batches, 1) for each in step(number, batch)]
        digest = hashlib.sha256()
        for name, tensor in sorted(rank.memory.masters.items()):
            digest.update(name.encode() + tensor.cpu().numpy().tobytes())
        return cls(tuple(numbers), digest.hexdigest())

    def compared(self, reference: Training, device: torch.device) -> Measured:
        """Equal to the last bit on CPUs, to a tolerance on GPUs, whose kernels add in other orders."""
        names = [f"{what} of step {step}" for step in range(1, STEPS + 1) for what in ("the loss", "the gradient norm")]
        for name, own, other in zip(names, self.numbers, reference.numbers, strict=True):
            if device.type == "cpu" and struct.pack("d", own) != struct.pack("d", other):
                return Measured("training", wrong=f"{name} is {own!r} instead of {other!r}")
            if device.type != "cpu" and not abs(own - other) <= GPU_TOLERANCE * abs(other):
                return Measured("training", wrong=f"{name} is {own:g}, on a CPU {other:g}")
        if device.type == "cpu" and self.digest != reference.digest:
            return Measured("training", wrong=f"the parameters after step {STEPS} differ")
        return Measured("training")
