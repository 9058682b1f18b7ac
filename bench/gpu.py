"""Everything to run when a GPU is at hand, within ten minutes: `make gpu`.

    python bench/gpu.py [--device cuda|cpu] [--size NAME] [--steps 10] [--rounds 1] [--append] [SYSTEM ...]

Five parts: `partita doctor`; the tests marked `gpu`; several ranks, by `bench/several.py`; what one GPU takes for some
programs, beside what its record predicts and the bound of its memory; and the MFU of one GPU training GPT, ours beside
plain torch. There all systems train `bench/models/gpt.par` in bf16 with weights kept in f32, from the same initial
values on the same batches; the peer is written by hand with one product for queries, keys and values, SDPA, autocast
and fused AdamW. `:compile` is Inductor for either, and `:graphs` ours compiled and captured as a CUDA graph. MFU is the
FLOPs of the model's products, without recomputation, by the peak of the data sheet.

With `--append` the tables are written to the end of bench/notes/gpu.md. Without a GPU, or with `--device cpu`, all that
can be runs on the CPU at a tiny size, and nothing is appended. Exit status: 0 all passed on a GPU; 1 something
failed; 4 what could be run passed, but there was no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite, nan
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen
from measure import agree, alternately, joined, measured, report, show

from partita.compiler.costs.devices import DEVICES, Device

if TYPE_CHECKING:
    import torch
    from peers.ours import Ours
    from peers.plain import Plain
    from peers.workload import Workload

ROOT = Path(__file__).parents[1]
NOTES = ROOT / "bench" / "notes" / "gpu.md"
MODELS = ROOT / "bench" / "models"
PARTS = ("doctor", "tests", "several", "predictions", "bench")
PASSED, FAILED, NO_GPU = 0, 1, 4
# Seconds of each part, some ten minutes together.
DOCTOR_SECONDS, TEST_SECONDS, SEVERAL_SECONDS = 90, 180, 300
WARM_UP = 3
SYSTEMS = ("partita", "partita:compile", "partita:graphs", "torch", "torch:compile")
STEP = ("schedule=one_f_one_b", "schedule.microbatches=2", "train.precision=bf16")
# One rank, all layers in one stage. GPT-3 XL (arXiv 2005.14165, Table 2.1), with the vocabulary of GPT-2 padded.
ONE = (
    "pair.pipe=1",
    *STEP,
    # A tenth of GPT-3 XL's, as there is no warm-up.
    "train.optimizer=adamw(lr = 2e-5, betas = [0.9, 0.95], weight_decay = 0.1)",
)
SIZES: Mapping[str, tuple[str, ...]] = {
    "1.3b": (
        *ONE,
        "layers=24",
        "embed=2048",
        "heads=16",
        "seq=2048",
        "vocab=50_304",
        "batch=8",
    ),
    "tiny": (*ONE, "layers=2", "embed=64", "heads=2", "seq=32", "vocab=128", "batch=4"),
}
# Programs of one rank beside their predictions: file, what is not of a size, and sizes on a GPU.
SPLIT = ("two.split=1", "train.precision=bf16")
SMALL = ("batch=4", "seq=32", "embed=64", "heads=2", "vocab=128")
GPT_125M = ("layers=12", "embed=768", "heads=12", "seq=1024", "vocab=50_304", "batch=16")
GPT_WIDE = ("layers=4", "embed=4096", "heads=32", "seq=2048", "vocab=32_000", "batch=4")
LLAMA = ("layout=zero1", "cluster.data=1", "cluster.pipe=1", "cluster.tensor=1", *STEP)
LLAMA_SIZE = ("embed=2048", "groups=4", "heads=8", "key=64", "ffn=5632", "vocab=32_000", "seq=4096", "batch=2")
EXPERTS = ("model=sparse", "schedule.microbatches=4", *SPLIT)
CASES: Mapping[str, tuple[Path, tuple[str, ...], tuple[str, ...]]] = {
    "gpt 125m": (MODELS / "gpt.par", ONE, GPT_125M),
    "gpt 125m, not compiled": (MODELS / "gpt.par", (*ONE, "train.compile=false"), GPT_125M),
    "gpt 125m, graphs": (MODELS / "gpt.par", (*ONE, "train.graphs=true"), GPT_125M),
    "gpt, heads of 100": (MODELS / "gpt.par", ONE, (*GPT_125M, "embed=1200", "seq=1000")),
    "gpt wide": (MODELS / "gpt.par", ONE, GPT_WIDE),
    "gpt wide, fp8": (MODELS / "gpt.par", (*ONE, "train.precision=fp8"), GPT_WIDE),
    "llama": (ROOT / "specs" / "llama.par", LLAMA, LLAMA_SIZE),
    "experts": (MODELS / "splits.par", EXPERTS, ("embed=1024", "heads=16", "seq=1024", "vocab=32_000", "batch=16")),
    "state in the host's memory": (MODELS / "splits.par", ("layout=hosted", *SPLIT), GPT_125M),
    "activations in the host's memory": (MODELS / "splits.par", ("layout=lent", *SPLIT), GPT_125M),
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
    parser.add_argument("--append", action="store_true", help=f"append the table to {NOTES.relative_to(ROOT)}")
    parser.add_argument("--nccl", metavar="FILE", help="of `several`: a libnccl.so to preload, plain or as .xz")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=tuple(CASES), help="of `predictions`; default: all"
    )
    parser.add_argument("--as", dest="system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
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
    if arguments.case:
        run_case(arguments.case, device, arguments.steps)
        return PASSED
    if device == "cuda" and here is None:
        parser.error("torch cannot use a GPU here; `partita doctor` says why")
    steps, rounds, append = arguments.steps, arguments.rounds, arguments.append
    parts: Mapping[str, Callable[[], str | None]] = {
        "doctor": doctor,
        "tests": partial(tests, device),
        "several": partial(several, device, append, arguments.nccl),
        "predictions": partial(predictions, arguments.cases, device, steps, append, here),
        "bench": partial(bench, arguments.systems, device, size, steps, rounds, append, here),
    }
    outcomes = {name: parts[name]() for name in PARTS if name in arguments.parts}
    print()
    for name, problem in outcomes.items():
        print(f"{name:11} {problem or 'passed'}")
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


def several(device: str, append: bool, nccl: str | None) -> str | None:
    """Several ranks, on one GPU if there is one."""
    more = (*(["--append"] if append else []), *(["--nccl", nccl] if nccl is not None else []))
    return _ran(["bench/several.py", "--device", device, *more], SEVERAL_SECONDS, left_out=NO_GPU)


def _ran(command: Sequence[str], seconds: float, left_out: int = PASSED) -> str | None:
    """Run a command of Python's in the repository; what is wrong, if anything. It may end with `left_out`."""
    print(f"$ python {' '.join(command)}", flush=True)
    try:
        status = subprocess.run([sys.executable, *command], cwd=ROOT, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"failed: not done after {seconds:.0f} s"
    return None if status in (PASSED, left_out) else f"failed: exit status {status}"


def bench(
    systems: Sequence[str], device: str, size: str, steps: int, rounds: int, append: bool, name: str | None
) -> str | None:
    """Measure all systems in turn, compare their losses, print the table, and append it where it is of a GPU."""
    found: dict[str, dict[str, Any]] = {}
    wrong: dict[str, str] = {}

    def figure(system: str) -> float:
        options = ["--device", device, "--size", size, "--steps", str(steps)]
        try:
            found[system] = measured([__file__, "--as", system, *options], 1, os.cpu_count() or 1)
        except SystemExit as error:
            wrong[system] = str(error)
            return nan
        return median(found[system]["seconds"][WARM_UP:])

    figures = alternately({each: partial(figure, each) for each in systems}, rounds)
    ran = [each for each in systems if each not in wrong]
    if not ran:
        return f"failed: {'; '.join(wrong.values())}"
    try:
        agree({system: found[system]["losses"] for system in ran}, relative=TOLERANCE)
    except AssertionError as error:
        wrong["losses"] = str(error)
    record = _record(name if device == "cuda" else None)
    peak = record.flops["bf16"] if record.gpu else None
    rows = [Row.of(system, figures[system], found[system], peak) for system in ran]
    show(f"a step of GPT {size} on {name or 'the CPU'}", "s", {each: figures[each] for each in ran}, ran[0])
    lines = table(rows, size, name or "the CPU", steps, rounds, found[ran[0]]["torch"])
    shown(lines, append and device == "cuda")
    return f"failed: {'; '.join(wrong.values())}" if wrong else None


def shown(lines: Sequence[str], append: bool) -> None:
    """Print a section of notes/gpu.md, and append it if asked to."""
    print("\n".join(lines))
    if append:
        with NOTES.open("a", encoding="utf-8") as file:
            file.write("\n" + "\n".join(lines) + "\n")
        print(f"appended to {NOTES.relative_to(ROOT)}")


def predictions(cases: Sequence[str], device: str, steps: int, append: bool, name: str | None) -> str | None:
    """Measure some programs, and print what was predicted beside it. It is wrong if a case fails, or takes more memory
    than its bound.
    """
    known = _record(name if device == "cuda" else None)
    lines = [
        f"## Predicted and measured on {name or 'the CPU'}",
        "",
        f"`python bench/gpu.py --parts predictions --steps {steps}`; predictions by the record `{known.name}`.",
        "",
        "| program | ms a step | predicted | predicted ÷ measured | peak memory | bound | measured ÷ bound |",
        "|---|---|---|---|---|---|---|",
    ]
    wrong = []
    for case in cases:
        options = ["--device", device, "--case", case, "--steps", str(steps)]
        try:
            found = measured([__file__, *options], 1, os.cpu_count() or 1)
        except SystemExit as error:
            wrong.append(f"{case}: {error}")
            continue
        usual, said = median(found["seconds"][WARM_UP:]), found["predicted"]
        times = f"{1e3 * usual:.4g} | {1e3 * said:.4g} | {said / usual:.2f}"
        memory, bound = found["memory"], found["bound"]
        sizes = f"{memory / 2**20:,.0f} MiB | {bound / 2**20:,.0f} MiB | {memory / bound:.3f}"
        lines.append(f"| {case} | {times} | {sizes} |")
        print(lines[-1], flush=True)
        if memory > bound:
            wrong.append(f"{case}: {memory - bound:,} bytes beyond the bound")
    shown(lines, append and device == "cuda")
    return f"failed: {'; '.join(wrong)}" if wrong else None


def _record(name: str | None) -> Device:
    """The record of a GPU by its name; the CPU's where it has none."""
    known = [device for key, device in DEVICES.items() if device.gpu and name and key.upper() in name.upper()]
    return known[0] if known else DEVICES["cpu"]


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
    """The lines of a section of notes/gpu.md."""
    lines = [
        f"## A training step of GPT on {name}",
        "",
        f"`python bench/gpu.py --parts bench --size {size} --steps {steps} --rounds {rounds}`, torch {torch}; "
        "bf16, with weights and AdamW in f32.",
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
    from peers.plain import Plain
    from peers.workload import workload

    gpu = device == "cuda"
    family, _, how = system.partition(":")
    options = (
        f"train.{word}={'true' if on else 'false'}" for word, on in (("compile", how), ("graphs", how == "graphs"))
    )
    work = workload("gpt.par", [*SIZES[size], *options], gpu=gpu)
    if family == "partita":
        trained: Ours | Plain = _ours(work, device)
    else:
        trained = Plain(work, bool(how), work.microbatches, _device(device), autocast=True)
    seconds, losses = _timed(trained, work, steps)
    result = {
        "seconds": seconds,
        "losses": losses,
        "flops": work.plan.training.flops,
        "tokens": work.tokens,
        "memory": torch.cuda.max_memory_allocated() if gpu else 0,
        "torch": torch.__version__,
    }
    report(json.loads(json.dumps(result)))


def run_case(case: str, device: str, steps: int) -> None:
    """Train some steps of one of `CASES`; report their seconds, the peak of memory, and what was predicted."""
    import torch
    from peers.workload import workload

    from partita.compiler.analysis.memory import peak_memory
    from partita.compiler.analysis.time import predict

    gpu = device == "cuda"
    path, fixed, sizes = CASES[case]
    work = workload(str(path), [*fixed, *(sizes if gpu else SMALL)], gpu=gpu)
    state = work.plan.training
    if gpu:
        state = evolve(state, device=_record(_name_of_gpu()))
    seconds, _ = _timed(_ours(work, device), work, steps)
    report(
        {
            "seconds": seconds,
            "predicted": predict(state, exposed=False).step_time,
            # What was asked for: the allocator may round it up.
            "memory": torch.cuda.memory_stats()["requested_bytes.all.peak"] if gpu else 0,
            "bound": peak_memory(state, state.plan.ranks[0]),
        }
    )


def _device(device: str) -> torch.device:
    """The device, which becomes the current one."""
    import torch

    if device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def _ours(work: Workload, device: str) -> Ours:
    """Our rank, connected."""
    from peers.ours import Ours

    there = _device(device)
    joined("nccl" if device == "cuda" else "gloo")
    return Ours(work, device=there)


def _timed(trained: Ours | Plain, work: Workload, steps: int) -> tuple[list[float], list[float]]:
    """Seconds and losses of steps, those of warming up included."""
    import torch

    seconds, losses = [], []
    for _, batch in zip(range(WARM_UP + steps), work.batches(), strict=False):
        start = perf_counter()
        losses.append(trained.step(*batch))  # which is read on the host: the step is over
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    assert all(map(isfinite, losses)), losses
    return seconds, losses


if __name__ == "__main__":
    sys.exit(main())
