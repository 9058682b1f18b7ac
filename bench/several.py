"""Several ranks, on as many GPUs or on one: what runs of them do, and what NCCL and CUDA do beside them.

    python bench/several.py [--device cuda|cpu] [--nccl FILE.so[.xz]] [--append] [PART ...]

NCCL from 2.30 on lets ranks share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1); `--nccl` preloads such a library under a torch
whose own is older. Times between ranks that share a GPU are no times of links. Parts, each with a time limit:

- `doctor`, `layouts` and `kill`: the self test of two ranks; `specs/tiny.par` on two ranks in five layouts, with the
  losses of one rank; and a rank that is killed, after which the run goes on from its checkpoint;
- `streams`: as many streams as a rank has, each of its own;
- `queues`: how many of 24 streams wait for one that is parked, with 8 and 32 connections of the host to the GPU;
- `first`: how long the host waits in the first collective of a communicator, and in the second;
- `messages`: the memory of messages under way, by send and receive, and by broadcasts on a stream of one's own;
- `communicators`: seconds and memory of one, two, four and eight;
- `ctas`: GB/s of a broadcast with two thread blocks and with as many as NCCL likes, and a product beside each;
- `priority`: how long a message takes beside products, on streams of usual and of high priority;
- `branches`: a CUDA graph with 24 branches.

Without a GPU, what only CUDA has is said to be left out, and the rest runs on Gloo. Exit status: 0 all passed on GPUs;
1 something failed; 4 what could be run passed, but something was left out.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from gpu import FAILED, NO_GPU, NOTES, PASSED, ROOT, shown
from measure import joined, measured, report

from partita.runtime.supervision.fork_server import NAME
from partita.runtime.supervision.identity import RANK, rank_from_environment
from partita.runtime.transports.nccl import SHARING

TINY = str(ROOT / "specs" / "tiny.par")
SHARED_SINCE = (2, 30)
SECONDS = 60  # of each part
STREAMS, MESSAGES = 24, 16
MIB = 1 << 20
# What tiny.par computes on one rank, and on two in other ways.
STEPS = 8
IN_TURN = "schedule=one_f_one_b"
ALONE = ("laptop.pipe=1", IN_TURN)
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "interleaved 1F1B": (),
    "ZB-V": ("schedule=zb_v",),
    "data": ("layout=rows", IN_TURN),
    "data, ZeRO-3": ("layout=sharded", IN_TURN),
    "tensor": ("layout=split", IN_TURN),
}
MORE = """
mesh two(data = 2)
layout rows on two { shard batch -> data }
layout sharded on two { shard batch -> data  shard param -> data }
layout split on two { shard heads -> data  shard ffn -> data }
"""
TOLERANCE = 1e-4  # of losses in f32, whose sums are in other orders


def main() -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, if torch can use one")
    parser.add_argument("--nccl", type=Path, metavar="FILE", help="a libnccl.so to preload, plain or as .xz")
    parser.add_argument("--append", action="store_true", help=f"append to {NOTES.relative_to(ROOT)}")
    parser.add_argument("--as", dest="part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.part:
        PARTS[arguments.part](device)
        return PASSED
    with TemporaryDirectory() as folder:
        if arguments.nccl is not None:
            os.environ.update(_preloaded(arguments.nccl, Path(folder)))
        return _all(arguments.parts or tuple(PARTS), device, arguments.append)


def _preloaded(file: Path, folder: Path) -> dict[str, str]:
    """The environment of processes that have a library in place of torch's, and share GPUs."""
    if file.suffix == ".xz":
        library = folder / "libnccl.so.2"
        library.write_bytes(lzma.decompress(file.read_bytes()))
        file = library
    return {"LD_PRELOAD": str(file.resolve()), SHARING: "1"}


def _all(parts: Sequence[str], device: str, append: bool) -> int:
    lines, failed, left = list[str](), False, list[str]()
    why_not = _why_no_ranks_share(device)
    for name in parts:
        if device == "cpu" and name in NEED_GPU:
            left.append(f"{name} (no GPU)")
            continue
        if why_not is not None and name not in ONE_RANK:
            left.append(f"{name} ({why_not})")
            continue
        found = _part(name, device)
        failed |= found.startswith("failed")
        lines.append(f"| {name} | {found} |")
        print(lines[-1], flush=True)
    if left:
        print(f"left out: {', '.join(left)}")
    if append and device == "cuda" and lines:
        title = f"## Several ranks on {torch.cuda.get_device_name(0)}"
        how = f"`python bench/several.py`, {torch.cuda.device_count()} GPU, torch {torch.__version__}"
        shown([title, "", f"{how}.", "", "| part | found |", "|---|---|", *lines], append)
    return FAILED if failed else PASSED if device == "cuda" and not left else NO_GPU


def _part(name: str, device: str) -> str:
    """What a part finds, in a process of its own."""
    command = [sys.executable, __file__, "--as", name, "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS * 3, check=False)
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else ""
        return f"failed: not done after {SECONDS * 3} s; {said[-200:]}"
    text = " ".join(done.stdout.split())
    return text if done.returncode == 0 else f"failed: {text} {' '.join(done.stderr.split())[-400:]}"


def _why_no_ranks_share(device: str) -> str | None:
    if device == "cpu" or torch.cuda.device_count() > 1:
        return None
    if os.environ.get(SHARING) == "1":
        return None
    return f"one GPU, which NCCL lets ranks share from {'.'.join(map(str, SHARED_SINCE))} on: --nccl"


# ---------------------------------------------------------------- whole runs


def doctor(device: str) -> None:
    """The self test."""
    print(
        _partita("doctor", "--ranks", "2", "--transport", _transport(device), "--timeout", str(SECONDS)).splitlines()[
            -1
        ]
    )


def layouts(device: str) -> None:
    """The losses of two ranks in each layout beside those of one."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "m.par")
        file.write_text(Path(TINY).read_text() + MORE)
        reference = _losses(file, device, *ALONE)
        worst = {}
        for name, overrides in LAYOUTS.items():
            found = _losses(file, device, *overrides)
            worst[name] = max(abs(a - b) / abs(a) for a, b in zip(reference, found, strict=True))
    assert max(worst.values()) <= TOLERANCE, worst
    print(
        f"{STEPS} losses are those of one rank: {', '.join(f'{name} within {far:.1g}' for name, far in worst.items())}"
    )


def _losses(file: Path, device: str, *overrides: str) -> list[float]:
    ranks = () if "laptop.pipe=1" in overrides else ("--transport", _transport(device))
    with TemporaryDirectory() as folder:
        options = (f"train.steps={STEPS}", "batch=16", "seq=32", "train.eval=none", *ranks, "--run-dir", folder)
        _partita("run", str(file), *overrides, *options)
        return [json.loads(line)["loss"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def kill(device: str) -> None:
    """A rank is killed in the middle of a run, which restarts from its checkpoint."""
    with TemporaryDirectory() as folder:
        options = ["train.steps=60", "train.checkpoint=every(5)", "batch=16", "seq=32", "train.eval=none"]
        command = ["run", TINY, *options, "--run-dir", folder, "--restarts", "1", "--transport", _transport(device)]
        run = subprocess.Popen(
            [sys.executable, "-m", "partita", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        metrics = Path(folder, "metrics.jsonl")
        while not (metrics.exists() and metrics.read_text().count("\n") >= 8):
            assert run.poll() is None, run.communicate()[1][-400:]
            time.sleep(0.05)
        os.kill(_rank_of(run.pid, 1), signal.SIGKILL)
        began = time.monotonic()
        before = metrics.read_text().count("\n")
        while metrics.read_text().count("\n") <= before + 5:
            assert run.poll() in (None, 0), run.communicate()[1][-400:]
            time.sleep(0.05)
        seconds = time.monotonic() - began
        said = run.communicate()[1].decode(errors="replace")
        assert run.returncode == 0, said[-400:]
    assert "SIGKILL" in said, said
    print(f"a killed rank: the run goes on after {seconds:.1f} s, and ends")


def _rank_of(supervisor: int, rank: int) -> int:
    """The process of a rank that trains: those that stand ready to take its place were started later."""
    return min(each for each in _descendants(supervisor) if _is_rank(each, rank))


def _is_rank(process: int, rank: int) -> bool:
    """Whether a process is a rank: one that was forked has its name, another its environment."""
    there = Path("/proc", str(process))
    with suppress(OSError):
        variables = (there / "environ").read_bytes().decode().split("\0")
        return (there / "comm").read_text().strip() == f"{NAME}{rank}" or f"{RANK}={rank}" in variables
    return False


def _descendants(parent: int) -> list[int]:
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(each.read_text().rpartition(")")[2].split()[1]) == parent:
                found += [int(each.parent.name), *_descendants(int(each.parent.name))]
    return found


def _partita(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "partita", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-600:] or done.stdout[-600:]
    return done.stdout


def _transport(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


# ---------------------------------------------------------------- one rank


def streams(_: str) -> None:
    """Handles of streams."""
    handles = {torch.cuda.Stream().cuda_stream for _ in range(STREAMS)}
    assert len(handles) == STREAMS, f"{len(handles)} of {STREAMS} streams are distinct"
    print(f"{STREAMS} streams are distinct")


def queues(_: str) -> None:
    """Streams that wait with a parked one, in processes with 8 and 32 connections."""
    found = {}
    for connections in (8, 32):
        code = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); import several; several.parked()"
        variables = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
        found[connections] = int(done.stdout)
    print(", ".join(f"{waits} of {STREAMS} streams wait with {number} connections" for number, waits in found.items()))


def parked() -> None:
    """How many streams are not done while another waits for a long kernel."""
    long, waiting = torch.cuda.Stream(), torch.cuda.Stream()
    others = [torch.cuda.Stream() for _ in range(STREAMS)]
    x = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(long):
        torch.cuda._sleep(2_000_000_000)
        ended = long.record_event()
    waiting.wait_event(ended)
    with torch.cuda.stream(waiting):
        x.add(1)
    events = []
    for each in others:
        with torch.cuda.stream(each):
            x.add(1)
            events.append(each.record_event())
    time.sleep(0.2)
    print(sum(not each.query() for each in events))
    torch.cuda.synchronize()


def branches(_: str) -> None:
    """A graph whose branches run beside each other."""
    others = [torch.cuda.Stream() for _ in range(STREAMS)]
    x = torch.ones(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        for each in others:
            each.wait_stream(current)
            with torch.cuda.stream(each):
                torch.cuda._sleep(20_000_000)
                x.add(1)
        for each in others:
            current.wait_stream(each)
    one = _seconds("cuda", lambda: torch.cuda._sleep(20_000_000))
    together = _seconds("cuda", graph.replay)
    print(f"{STREAMS} branches take {together / one:.1f} times as long as one")


# ---------------------------------------------------------------- two ranks


def _of_two(part: str) -> Callable[[str], None]:
    """A part that two ranks measure, by the function of its name in `TWO`."""

    def run(device: str) -> None:
        identity = rank_from_environment()
        if identity is None:
            print(measured([__file__, "--as", part, "--device", device], 2, 1)["found"])
            return
        if device == "cuda":
            torch.cuda.set_device(identity.rank % torch.cuda.device_count())
        joined(_transport(device))
        report({"found": TWO[part](device, identity.rank)})
        dist.barrier()
        dist.destroy_process_group()  # else its threads may still speak to a rank that has left

    return run


def first(device: str, rank: int) -> str:
    """Seconds of the host in collectives of a new communicator."""
    x = torch.ones(16 * MIB, device=device)
    group = dist.new_group([0, 1])
    found = []
    for _ in range(3):
        if rank == 1 and device == "cuda":
            torch.cuda._sleep(500_000_000)  # a resident peer
        began = time.perf_counter()
        dist.all_reduce(x, group=group)
        found.append(time.perf_counter() - began)
        _settle(device)
    return f"the host is in the first collective for {found[0] * 1e3:.1f} ms, in the next for {found[1] * 1e3:.2f} ms"


def messages(device: str, rank: int) -> str:
    """Memory that is held for messages of 4 MiB after all but the last were let go of."""
    found = {}
    for how in ("send and receive", "broadcast"):
        group, stream = dist.new_group([0, 1]), torch.cuda.Stream()
        _passed(how, rank, group, stream)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(MESSAGES):
            _passed(how, rank, group, stream)
        found[how] = (torch.cuda.max_memory_allocated() - before) / MIB
        torch.cuda.synchronize()
    return f"{MESSAGES} messages of 4 MiB: " + ", ".join(f"{how} {peak:.0f} MiB at most" for how, peak in found.items())


def _passed(how: str, rank: int, group: Any, stream: torch.cuda.Stream) -> None:
    """One message, of memory that is let go of once what computes is behind it."""
    tensor = torch.ones(MIB, device="cuda")
    current = torch.cuda.current_stream()
    if how == "broadcast":
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            dist.broadcast(tensor, 0, group=group)
        current.wait_stream(stream)
    else:
        work = dist.isend(tensor, 1, group) if rank == 0 else dist.irecv(tensor, 0, group)
        work.wait()


def communicators(device: str, rank: int) -> str:
    """Seconds and memory of some."""
    x = torch.ones(1, device=device)
    found = []
    for number in (1, 2, 4, 8):
        before, began = _free(device), time.perf_counter()
        for _ in range(number):
            dist.all_reduce(x, group=dist.new_group([0, 1]))
        _settle(device)
        found.append(f"{number}: {time.perf_counter() - began:.2f} s, {(before - _free(device)) / MIB:.0f} MiB")
    return "; ".join(found)


def ctas(device: str, rank: int) -> str:
    """Broadcasts of 64 MiB, and products of 4,096 beside them."""
    x = torch.ones(16 * MIB, device=device)
    a = torch.ones(4096 if device == "cuda" else 256, device=device).diag()
    found = []
    alone = _seconds(device, lambda: a @ a)
    for most in (2, 0):
        group = dist.new_group([0, 1], pg_options=_with_ctas(most) if device == "cuda" else None)
        dist.broadcast(x, 0, group=group)
        seconds = _seconds(device, lambda group=group: dist.broadcast(x, 0, group=group))  # type: ignore[misc]
        stream = torch.cuda.Stream() if device == "cuda" else None

        def beside(group: Any = group, stream: Any = stream) -> None:
            with torch.cuda.stream(stream):
                dist.broadcast(x, 0, group=group)
            for _ in range(10):
                a @ a

        together = _seconds(device, beside) / 10
        rate = x.nbytes / seconds / 1e9
        found.append(
            f"{most or 'any number of'} CTAs {rate:.1f} GB/s, a product takes {together / alone:.2f} times as long"
        )
    return "; ".join(found)


def _with_ctas(most: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    if most:
        options.config.min_ctas, options.config.max_ctas = 1, most
    return options


def priority(device: str, rank: int) -> str:
    """A message of 1 MiB behind nothing, beside products that fill the GPU."""
    x, a = torch.ones(MIB // 4, device=device), torch.ones(4096, device=device).diag()
    group, found = dist.new_group([0, 1]), {}
    for name, level in (("usual", 0), ("high", -1)):
        stream = torch.cuda.Stream(priority=level)
        seconds = []
        for _ in range(5):
            for _ in range(20):
                a @ a
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                start.record()
                dist.broadcast(x, 0, group=group)
                end.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        found[name] = median(seconds)
    return ", ".join(f"{name} priority {seconds * 1e6:.0f} µs" for name, seconds in found.items())


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _free(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def _seconds(device: str, work: Callable[[], object]) -> float:
    """The median of five."""
    return median(_times(device, work))


def _times(device: str, work: Callable[[], object]) -> Iterator[float]:
    for _ in range(5):
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        yield time.perf_counter() - began


TWO: Mapping[str, Callable[[str, int], str]] = {
    each.__name__: each for each in (first, messages, communicators, ctas, priority)
}
PARTS: Mapping[str, Callable[[str], None]] = {
    **{each.__name__: each for each in (doctor, layouts, kill, streams, queues)},
    **{name: _of_two(name) for name in TWO},
    "branches": branches,
}
ONE_RANK = ("streams", "queues", "branches")
NEED_GPU = (*ONE_RANK, "messages", "priority")

if __name__ == "__main__":
    sys.exit(main())
