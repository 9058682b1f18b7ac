"""The compiler's memory bound beside the peak of live tensors, measured; and torch's pipelining beside both.

    python bench/memory.py [--case gpt|llama|layouts|constructs] [SCHEDULE ...]

Each case runs for two steps (with a delay, three) on two ranks, with and without `recompute layer`; `layouts` are
eleven combinations of layout, schedule and recompute for `llama.par`, on up to eight ranks; `constructs` are everything
else that changes what a rank holds, for the models of `splits.par`. The peak is that of all tensors that are alive at
once, counted after each operation. The figures are those of the fullest rank, in MiB; the ratios are the least and
the greatest of all ranks. They are the same in every run.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from measure import joined, measured, report
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.runtime.transports.process import ProcessTransport
from partita.runtime.transports.shared import Incoming, Outgoing

if TYPE_CHECKING:
    from partita.runtime.rank import CompiledRun

SCHEDULES = {
    "gpipe": "schedule=gpipe(microbatches=8)",
    "one_f_one_b": "schedule=one_f_one_b(microbatches=8)",
    "interleaved_1f1b": "schedule=interleaved_1f1b(microbatches=8, chunks=2)",
    "zb_v": "schedule=zb_v(microbatches=8)",
}
TORCHS = {"gpipe": "gpipe", "one_f_one_b": "1f1b", "interleaved_1f1b": "interleaved", "zb_v": "zbv"}
STEPS = 2
TIMEOUT = 2.0  # seconds


@frozen
class Case:
    """A row of the table: what runs, and how."""

    name: str
    file: Path
    overrides: tuple[str, ...]
    schedule: str
    recompute: bool
    steps: int = STEPS

    def prepared(self) -> CompiledRun:
        """Compiled."""
        from partita.dsl.load import load_text
        from partita.runtime.rank import prepare

        chosen = (*self.overrides, SCHEDULES[self.schedule], f"train.steps={self.steps}")
        spec, diagnostics = load_text(self._text(), self.file.name, chosen, self.file)
        assert spec is not None, "\n\n".join(each.render() for each in diagnostics)
        return prepare(spec)

    def _text(self) -> str:
        """The file without its recompute rules, or with one for every layer."""
        lines = [line for line in self.file.read_text().splitlines() if not line.strip().startswith("recompute")]
        text = re.sub(r"(stage layer -> pipe) \[.*\]", r"\1", "\n".join(lines))  # stages of equal length
        return text.replace("stage layer -> pipe", "stage layer -> pipe\n  recompute layer") if self.recompute else text


GPT = Path(__file__).parent / "models" / "gpt.par"
LLAMA = Path(__file__).parents[1] / "specs" / "llama.par"
# Ranks by which no axis divides.
THREE = ("cluster.data=3", "cluster.pipe=1", "batch=48")
LAYOUTS = (
    Case("data 2, ZeRO-1", LLAMA, ("layout=zero1", "cluster.pipe=1", "cluster.tensor=1"), "gpipe", False),
    Case("data 2, ZeRO-3", LLAMA, ("layout=everything", "cluster.pipe=1", "cluster.tensor=1"), "one_f_one_b", True),
    Case("tensor 2", LLAMA, ("layout=zero1", "cluster.data=1", "cluster.pipe=1"), "one_f_one_b", False),
    Case("data 2 × tensor 2, ZeRO-1", LLAMA, ("layout=zero1", "cluster.pipe=1"), "gpipe", True),
    Case("data 2 × pipe 2, ZeRO-1", LLAMA, ("layout=zero1", "cluster.tensor=1"), "one_f_one_b", False),
    Case(
        "pipe 2 × tensor 2, sequence parallel",
        LLAMA,
        ("layout=everything", "cluster.data=1"),
        "interleaved_1f1b",
        True,
    ),
    Case("data 2 × pipe 2 × tensor 2, ZeRO-1", LLAMA, ("layout=zero1",), "zb_v", False),
    Case(
        "data 2 × pipe 2 × tensor 2, sequence parallel, ZeRO-3",
        LLAMA,
        ("layout=everything",),
        "interleaved_1f1b",
        False,
    ),
    Case("data 3, ZeRO-1, flat", LLAMA, (*THREE, "layout=zero1", "cluster.tensor=1"), "gpipe", False),
    Case("data 3, ZeRO-3, flat", LLAMA, (*THREE, "layout=everything", "cluster.tensor=1"), "one_f_one_b", False),
    Case("data 3 × tensor 2, ZeRO-1, flat", LLAMA, (*THREE, "layout=zero1"), "one_f_one_b", True),
)
SPLITS = GPT.parent / "splits.par"
MINE = "lr=1e-3,betas=[0.9,0.95],weight_decay=0.1"
SPARSE = "model=sparse"


def _of_two(name: str, *overrides: str, steps: int = STEPS) -> Case:
    return Case(name, SPLITS, overrides, "one_f_one_b", False, steps)


CONSTRUCTS = (
    *(
        _of_two(name, f"layout={layout}")
        for name, layout in {
            "ZeRO-1": "zero1",
            "ZeRO-2": "zero2",
            "ZeRO-3": "zero3",
            "tensor": "tensor",
            "tensor, sequence parallel": "sequence",
            "context, gathered": "context",
            "context, by heads": "exchanged",
            "context, in a ring": "ring",
        }.items()
    ),
    _of_two("experts, copied", SPARSE, "layout=experts_copied"),
    _of_two("experts, split", SPARSE, "layout=experts_split"),
    _of_two("groups", "layout=rows", "train.sync=local(groups=2,every=2)"),
    # Only from the second step on are reductions in flight in the next.
    _of_two("a delay of one step", "layout=rows", "train.sync=delayed(1)", steps=3),
    _of_two("paired steps", "layout=rows", "train.sync=paired()", steps=4),
    _of_two("a vocabulary of all stages", "layout=vocabulary"),
    _of_two("frozen but for norms, bf16", "train.optimizer=norms", "train.precision=bf16"),
    _of_two("states of eight bits", "layout=rows", f"train.optimizer=adamw_8bit({MINE})"),
    Case(
        "pipe 2, validate = after",
        LLAMA,
        ("cluster.data=1", "cluster.tensor=1", "cluster.pipe=2", "train.validate=after(calm=0)"),
        "zb_v",
        False,
    ),
)
ON_TWO_RANKS = {"gpt": (GPT, ()), "llama": (LLAMA, ("cluster.data=1", "cluster.tensor=1", "cluster.pipe=2"))}
MORE = {"layouts": LAYOUTS, "constructs": CONSTRUCTS}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("schedules", nargs="*", default=tuple(SCHEDULES))
    parser.add_argument("--case", choices=("gpt", "llama", *MORE), default="gpt")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="system", choices=("partita", "torch"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = MORE.get(arguments.case, ())
    if not cases:
        cases = tuple(
            Case(arguments.case, *ON_TWO_RANKS[arguments.case], schedule, recompute)
            for schedule in arguments.schedules
            for recompute in (False, True)
        )
    if arguments.system == "partita":
        ours(cases[arguments.row])
        return
    if arguments.system == "torch":
        torchs(cases[arguments.row])
        return
    table = Table("case", "schedule", "recompute", "bound", "measured", "bound ÷ measured", "torch's pipelining")
    for row, case in enumerate(cases):
        command = [__file__, *arguments.schedules, "--case", arguments.case, "--row", str(row), "--as"]
        found = measured([*command, "partita"], case.prepared().ranks, 1)
        other = "-"
        if case.file == GPT and not case.recompute:
            other = f"{measured([*command, 'torch'], 2, 1)['peak'] / 2**20:.1f}"
        bound, peak = found["bound"], found["peak"]
        ratios = [b / p for b, p in zip(bound, peak, strict=True)]
        fullest = peak.index(max(peak))
        print(f"{case.name}, {case.schedule}: {min(ratios):.3f} to {max(ratios):.3f}", file=sys.stderr, flush=True)
        table.add_row(
            case.name,
            case.schedule,
            "layer" if case.recompute else "no",
            f"{bound[fullest] / 2**20:.1f}",
            f"{peak[fullest] / 2**20:.1f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
            other,
        )
    Console(width=140).print(table)


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, after each operation that makes one; `peak` is the most.

    What a kernel allocates and frees by itself is not seen. (torch's own profile sees that, but not what other threads
    free, as Gloo's do.) Nor is what lies at addresses `aside`: messages in memory that two ranks share.

    A thread of Gloo's that has done its work holds the tensors until it gets a core once more: before more than the
    `bound` counts, such threads get `TIMEOUT`. What is in use stays alive for longer, and counts.
    """

    def __init__(self, bound: int | None = None) -> None:
        super().__init__()
        self.bound = bound
        self.peak = 0
        self.aside: list[range] = []
        self.alive: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        new = False
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if any(storage.data_ptr() in part for part in self.aside):
                    continue
                known = self.alive.get(storage._cdata)
                if known is None or known.expired():
                    self.alive[storage._cdata] = StorageWeakRef(storage)
                    new = True
        if new:
            given = time.monotonic() + TIMEOUT
            while self.bound is not None and self.now > max(self.peak, self.bound) and time.monotonic() < given:
                time.sleep(1e-3)
            self.peak = max(self.peak, self.now)
        return made

    @property
    def now(self) -> int:
        """The bytes that are alive."""
        self.alive = {key: each for key, each in self.alive.items() if not each.expired()}
        return sum(map(_bytes, self.alive.values()))


def _bytes(reference: StorageWeakRef) -> int:
    """Of memory that may have been given back since, all or some of it."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def _gathered(number: int) -> list[int]:
    """The number of each rank, on all."""
    import torch.distributed as dist

    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.tensor([number]))
    return [int(part) for part in parts]


def ours(case: Case) -> None:
    """One rank of ours."""
    plan = case.prepared()
    joined()
    transport = ProcessTransport(torch.device("cpu"))
    bound, peak = held(plan, case.file.parent, transport)
    report({"peak": _gathered(peak), "bound": _gathered(bound)})
    transport.close()


def held(plan: CompiledRun, folder: Path, transport: ProcessTransport) -> tuple[int, int]:
    """The bound of this rank, and the peak of its live tensors, in what is one memory on a CPU: with what lies in the
    host's, and without copies there of what microbatches keep. `folder` is where its data is.
    """
    from partita.compiler.analysis.memory import memory_report
    from partita.runtime.data.binding import open_data
    from partita.runtime.rank import Rank
    from partita.runtime.training import train

    dataset = open_data(plan.program, plan.train, folder)
    program = plan.training.plan
    in_place = evolve(program, stages=[evolve(each, offloaded=0) for each in program.stages])
    bounds = memory_report(evolve(plan.training, plan=in_place), program.ranks[program.mesh.pipe_rank(transport.rank)])
    bound = bounds.total + bounds.host
    with Live(bound) as live:
        rank = Rank(plan, transport.rank, transport, transport.device)
        live.aside = list(shared(transport))
        for _ in train(rank, dataset):
            pass
    return bound, live.peak


def shared(transport: ProcessTransport) -> Iterator[range]:
    """The addresses of the memory that a transport shares with other ranks."""
    for end in transport._channels.values():
        if isinstance(end, (Outgoing, Incoming)):
            start = torch.frombuffer(end.memory, dtype=torch.uint8).data_ptr()
            yield range(start, start + len(end.memory))


def torchs(case: Case) -> None:
    """One rank of torch's pipelining, which trains the gpt."""
    import torch.distributed as dist
    from peers.pipelining import Pipeline
    from peers.workload import workload

    joined()
    work = workload("gpt.par", (SCHEDULES[case.schedule],))
    batches = work.batches()
    with Live() as live:
        pipeline = Pipeline(work, TORCHS[case.schedule], False)
        for _ in range(STEPS):
            pipeline.step(*next(batches))
    report({"peak": max(_gathered(live.peak))})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
