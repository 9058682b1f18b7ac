"""Everything to run when a GPU is at hand, within ten minutes: `make gpu`.

    python bench/gpu.py [--device cuda|cpu] [--size NAME] [--steps 10] [--rounds 1] [--append] [SYSTEM ...]

Three parts: `partita doctor`; the tests marked `gpu`; and the MFU of one GPU training GPT, ours beside plain torch. All
systems train `bench/models/gpt.par` in bf16 with weights kept in f32, from the same initial values on the same batches;
the peer is written by hand with one product for queries, keys and values, SDPA, autocast and fused AdamW. `:compile` is
Inductor for either, and `:graphs` ours compiled and captured as a CUDA graph. MFU is the FLOPs of the model's products,
without recomputation, by the peak of the data sheet.

With `--append` a table is written to the end of bench/RESULTS.md. On a machine without a GPU, or with `--device cpu`,
everything that can be runs on the CPU at a tiny size, and nothing is appended. Exit status: 0 all passed on a GPU; 1
something failed; 4 what could be run passed, but there was no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from attrs import frozen
from measure import agree, alternately, joined, measured, report, show

from partita.compiler.costs.devices import DEVICES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "RESULTS.md"
PASSED, FAILED, NO_GPU = 0, 1, 4
# Seconds of each part, some ten minutes together.
DOCTOR_SECONDS, TEST_SECONDS = 90, 180
WARM_UP = 3
SYSTEMS = ("partita", "partita:compile", "partita:graphs", "torch", "torch:compile")
# One rank, all layers in one stage. GPT-3 XL (arXiv 2005.14165, Table 2.1), with the vocabulary of GPT-2 padded.
ONE = ("pair.pipe=1", "schedule=gpipe", "train.precision=bf16")
SIZES: Mapping[str, tuple[str, ...]] = {
    "1.3b": (
        *ONE,
        "layers=24",
        "embed=2048",
        "heads=16",
        "seq=2048",
        "vocab=50_304",
        "batch=8",
        "schedule.microbatches=2",
    ),
    "tiny": (*ONE, "layers=2", "embed=64", "heads=2", "seq=32", "vocab=128", "batch=4", "schedule.microbatches=2"),
}
# Of bf16 losses in the first steps, with sums in other orders.
TOLERANCE = 0.02


def main() -> int:
    """Run all parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("systems", nargs="*", default=SYSTEMS, metavar="SYSTEM", help=", ".join(SYSTEMS))
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, if torch can use one")
    parser.add_argument("--size", choices=SIZES, help="default: 1.3b on a GPU, else tiny")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--append", action="store_true", help=f"append the table to {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--bench", action="store_true", help="the third part alone")
    parser.add_argument("--as", dest="system", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(arguments.systems) - set(SYSTEMS)
    if unknown:
        parser.error(f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    here = _name_of_gpu()
    device = arguments.device or ("cuda" if here is not None else "cpu")
    size = arguments.size or ("1.3b" if device == "cuda" else "tiny")
    if arguments.system:
        run(arguments.system, device, size, arguments.steps)
        return PASSED
    if device == "cuda" and here is None:
        parser.error("torch cannot use a GPU here; `partita doctor` says why")
    parts = {} if arguments.bench else {"doctor": doctor, "tests": partial(tests, device)}
    outcomes = {name: part() for name, part in parts.items()}
    outcomes["bench"] = bench(
        arguments.systems, device, size, arguments.steps, arguments.rounds, arguments.append, here
    )
    print()
    for name, problem in outcomes.items():
        print(f"{name:8} {problem or 'passed'}")
    if any(outcomes.values()):
        return FAILED
    if device != "cuda":
        print(
            "no GPU was used: not tried were NCCL, streams, pinned memory, CUDA's kernels, and the model of 1.3 B; "
            "tests and bench ran their code on the CPU, at a tiny size"
        )
        return NO_GPU
    print(f"all passed on {here}")
    return PASSED


def _name_of_gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


# ---------------------------------------------------------------- the parts, each of which returns what is wrong


def doctor() -> str | None:
    """`partita doctor`."""
    return _ran(["-m", "partita", "doctor"], DOCTOR_SECONDS)


def tests(device: str) -> str | None:
    """The tests marked `gpu`; on a CPU those that do the same there."""
    chosen = ["-m", "gpu"] if device == "cuda" else ["-m", "not gpu and not soak", "tests/gpu"]
    return _ran(["-m", "pytest", "-q", "-rfE", "--timeout", str(TEST_SECONDS), *chosen], TEST_SECONDS)


def _ran(command: Sequence[str], seconds: float) -> str | None:
    """Run a command of Python's in the repository; what is wrong, if anything."""
    print(f"$ python {' '.join(command)}", flush=True)
    try:
        status = subprocess.run([sys.executable, *command], cwd=ROOT, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"failed: not done after {seconds:.0f} s"
    return None if status == 0 else f"failed: exit status {status}"


def bench(
    systems: Sequence[str], device: str, size: str, steps: int, rounds: int, append: bool, name: str | None
) -> str | None:
    """Measure all systems in turn, compare their losses, print the table, and append it where it is of a GPU."""
    found: dict[str, dict[str, Any]] = {}

    def figure(system: str) -> float:
        options = ["--device", device, "--size", size, "--steps", str(steps)]
        found[system] = measured([__file__, "--as", system, *options], 1, os.cpu_count() or 1)
        return median(found[system]["seconds"][WARM_UP:])

    try:
        figures = alternately({each: partial(figure, each) for each in systems}, rounds)
        agree({system: each["losses"] for system, each in found.items()}, relative=TOLERANCE)
    except (SystemExit, AssertionError) as error:
        return f"failed: {error}"
    rows = [
        Row.of(system, figures[system], found[system], _peak(name if device == "cuda" else None)) for system in systems
    ]
    show(f"a step of GPT {size} on {name or 'the CPU'}", "s", figures, systems[0])
    lines = table(rows, size, name or "the CPU", steps, rounds, found[systems[0]]["torch"])
    print("\n".join(lines))
    if append and device == "cuda":
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write("\n" + "\n".join(lines) + "\n")
        print(f"appended to {RESULTS.relative_to(ROOT)}")
    return None


def _peak(name: str | None) -> float | None:
    """The peak FLOP/s of a GPU in bf16; None where the data sheet is not known."""
    known = [device for key, device in DEVICES.items() if device.gpu and name and key.upper() in name.upper()]
    return known[0].flops["bf16"] if known else None


@frozen
class Row:
    """A system's figures: milliseconds of a step, with their range over rounds, tokens a second, MFU, bytes at most."""

    system: str
    milliseconds: float
    least: float
    most: float
    tokens: float
    mfu: float | None
    memory: int

    @classmethod
    def of(cls, system: str, seconds: Sequence[float], found: Mapping[str, Any], peak: float | None) -> Row:
        """From what was measured in each round."""
        usual = median(seconds)
        mfu = found["flops"] / usual / peak if peak else None
        tokens = found["tokens"] / usual
        return cls(system, 1e3 * usual, 1e3 * min(seconds), 1e3 * max(seconds), tokens, mfu, found["memory"])


def table(rows: Sequence[Row], size: str, name: str, steps: int, rounds: int, torch: str) -> list[str]:
    """The lines of a section of RESULTS.md."""
    lines = [
        f"## A training step of GPT on {name}",
        "",
        f"`python bench/gpu.py --bench --size {size} --steps {steps} --rounds {rounds}`, torch {torch}; bf16, with "
        "weights and AdamW in f32.",
        "",
        "| system | ms a step | range | tokens/s | MFU | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        mfu = f"{row.mfu:.1%}" if row.mfu is not None else "-"
        memory = f"{row.memory / 2**30:.1f} GiB" if row.memory else "-"
        span = f"{row.least:.4g} to {row.most:.4g}"
        lines.append(f"| {row.system} | {row.milliseconds:.4g} | {span} | {row.tokens:,.0f} | {mfu} | {memory} |")
    return lines


# ---------------------------------------------------------------- one system, in a process of its own


def run(system: str, device: str, size: str, steps: int) -> None:
    """Train some steps, and report their seconds and losses."""
    import torch
    from peers.ours import Ours
    from peers.plain import Plain
    from peers.workload import workload

    there = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    family, _, how = system.partition(":")
    gpu = device == "cuda"
    options = (
        f"train.{word}={'true' if on else 'false'}" for word, on in (("compile", how), ("graphs", how == "graphs"))
    )
    work = workload("gpt.par", [*SIZES[size], *options], gpu=gpu)
    if gpu:
        torch.cuda.set_device(there)
    if family == "partita":
        joined("nccl" if gpu else "gloo")
        trained: Ours | Plain = Ours(work, device=there)
    else:
        trained = Plain(work, bool(how), work.microbatches, there, autocast=True)
    seconds, losses = [], []
    for _, batch in zip(range(WARM_UP + steps), work.batches(), strict=False):
        start = perf_counter()
        losses.append(trained.step(*batch))  # which is read on the host: the step is over
        if gpu:
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    assert all(map(isfinite, losses)), losses
    result = {
        "seconds": seconds,
        "losses": losses,
        "flops": work.plan.training.flops,
        "tokens": work.tokens,
        "memory": torch.cuda.max_memory_allocated() if gpu else 0,
        "torch": torch.__version__,
    }
    report(json.loads(json.dumps(result)))


if __name__ == "__main__":
    sys.exit(main())
