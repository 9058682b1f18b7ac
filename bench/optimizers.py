"""What optimizers reach: AdamW with states of eight bits beside AdamW, and Muon beside AdamW; and how long Muon takes.

    python bench/optimizers.py [eight_bits] [muon] [update] [--steps N]

`eight_bits` trains specs/tiny.par, `muon` the model of `bench/models/nanogpt.par` with its batch and its cosine, on
bytes of the standard library's sources. All runs of a case see the same initial values and the same batches, each on
one rank; what is printed are losses on held-out text, and bytes of state. Muon has matrices that no embedding looks
up, AdamW the rest.

`update` runs that model, `embed` wide, on two processes of one thread, without and with ZeRO-1, a step of each in turn:
what is printed is the CPU time of the first rank's update, which contains the exchange of matrices, and its peak memory
by the static bound. Without ZeRO-1 every rank orthogonalizes all matrices.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from measure import joined, measured, report

from partita.compiler.analysis.memory import peak_memory
from partita.compiler.pipeline import compile_spec
from partita.dsl.load import load_text
from partita.dsl.spec import Spec
from partita.runtime.rank import prepare
from partita.runtime.trained import train

HERE = Path(__file__).parent
TINY, NANOGPT = HERE.parent / "specs" / "tiny.par", HERE / "models" / "nanogpt.par"
CASES = {"eight_bits", "muon", "update"}
WIDTHS = (128, 256)  # of the model, for updates
EVERY = 10  # steps from one evaluation to the next

RATE = "cosine(peak = {}, warmup = {}, total = {}, floor = {})"
ADAMW = "adamw(lr = {}, betas = [0.9, 0.99], weight_decay = 0.1)"
MUON = """optimizer mixed {{
  update embeddings -> {0}
  update matrices -> muon(lr = {1}, weight_decay = 0.1)
  update all -> {0}
}}
"""
RULES = MUON.count("update")


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="eight_bits, muon, update (all)")
    parser.add_argument("--steps", type=int, help="of every run (eight_bits: 200, muon: 150, update: 10)")
    parser.add_argument("--as", dest="embed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.embed:
        updates(arguments.embed, arguments.steps)
        return
    if unknown := set(arguments.cases) - CASES:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(sorted(CASES))}")
    if "eight_bits" in arguments.cases or not arguments.cases:
        eight_bits(arguments.steps or 200)
    if "muon" in arguments.cases or not arguments.cases:
        muon(arguments.steps or 150)
    if "update" in arguments.cases or not arguments.cases:
        for embed in WIDTHS:
            command = [__file__, "--as", str(embed), "--steps", str(arguments.steps or 10)]
            for name, (seconds, peak) in measured(command, 2, 1).items():
                print(
                    f"update, embed {embed}, {name}: {1e3 * median(seconds):.1f} ms, at most {peak:,} bytes", flush=True
                )


def eight_bits(steps: int) -> None:
    """Losses and bytes of state of both, on specs/tiny.par with a quarter of its batch."""
    alone = ("batch=8", "laptop.pipe=1", "schedule=one_f_one_b(microbatches=1)", f"train.steps={steps}")
    own = f"(lr = {RATE.format(3e-3, steps // 10, steps, 3e-4)}, betas = [0.9, 0.95], weight_decay = 0.1)"
    for name, rules in (
        ("adamw", f"update all -> adamw{own}"),
        ("adamw_8bit", f"update all -> adamw_8bit{own}"),
        ("adamw_8bit, embeddings by adamw", f"update embeddings -> adamw{own}  update all -> adamw_8bit{own}"),
    ):
        text = f"optimizer rules {{ {rules} }}\n{TINY.read_text()}"
        given = loaded(text, TINY, (*alone, "train.optimizer=rules"))
        losses, seconds = evaluated(given)
        state = sum(kept.type.bytes for each in compile_spec(given).program.parameters for kept in each.states)
        print(f"{name}: eval loss {losses[steps]:.4f}, {state:,} bytes of state ({seconds:.0f} s)", flush=True)


def muon(steps: int) -> None:
    """Losses of both at several rates, and the steps in which Muon reaches AdamW's best."""
    alone = ("vocab=256", f"train.steps={steps}", f"train.eval=every({EVERY}, batches = 10)".replace(" ", ""))
    alone += ("train.data=stdlib(holdout=5%)", "machine.data=1", "machine.pipe=1")

    def rate(peak: float) -> str:
        return RATE.format(peak, steps // 20, steps, peak / 10)

    text, best = NANOGPT.read_text(), float("inf")
    for peak in (5e-4, 1e-3, 2e-3):
        call = f"train.optimizer={ADAMW.format(rate(peak))}".replace(" ", "")
        losses, seconds = evaluated(loaded(text, NANOGPT, (*alone, call)))
        best = min(best, losses[steps])
        print(f"adamw, peak {peak:g}: eval loss {losses[steps]:.4f} ({seconds:.0f} s)", flush=True)
    for peak in (0.01, 0.03):
        rules = MUON.format(ADAMW.format(rate(1e-3)), rate(peak))
        losses, seconds = evaluated(loaded(rules + text, NANOGPT, (*alone, "train.optimizer=mixed")))
        reached = next((step for step, loss in losses.items() if loss <= best), None)
        words = f"AdamW's best, {best:.4f}, at step {reached}" if reached else f"not AdamW's best, {best:.4f}"
        print(f"muon, peak {peak:g}: eval loss {losses[steps]:.4f}; {words} ({seconds:.0f} s)", flush=True)


def updates(embed: int, steps: int) -> None:
    """One of two processes: the CPU time of each update, with state stored whole and in parts, and the memory bound."""
    from peers.ours import Clock, rank_of

    joined()
    text = MUON.format("adamw(lr = 1e-3)", 0.01) + NANOGPT.read_text()
    batch = "shard batch -> data"
    clocks, ranks, peaks = [], [], []
    for rules in (batch, f"{batch}  shard state -> data"):
        overrides = ("machine.data=2", "train.optimizer=mixed", f"embed={embed}", "batch=2", "train.data=random()")
        plan = prepare(loaded(text.replace(batch, rules), NANOGPT, overrides))
        clocks.append(Clock())
        ranks.append(rank_of(plan, clocks[-1]))
        peaks.append(peak_memory(plan.training, plan.program.ranks[0]))
    inputs = {each.name: torch.zeros(each.type.shape, dtype=torch.int64) for each in plan.program.inputs}
    seconds: list[list[float]] = [[], []]
    for number in range(1, steps + 3):
        for rank, clock, times in zip(ranks, clocks, seconds, strict=True):
            for _ in rank.step(number, inputs, (0.01,) * RULES):
                pass
            times.append(clock.updated)
    names = ("whole on every rank", "ZeRO-1, shared")
    report({name: (times[2:], peak) for name, times, peak in zip(names, seconds, peaks, strict=True)})


def loaded(text: str, path: Path, overrides: Sequence[str]) -> Spec:
    """A file's meaning, with overrides."""
    given, diagnostics = load_text(text, path.name, overrides, path)
    assert given is not None, "\n\n".join(each.render() for each in diagnostics)
    return given


def evaluated(given: Spec) -> tuple[Mapping[int, float], float]:
    """Losses on held-out text by step, and the seconds of the run."""
    start = perf_counter()
    records: list[dict[str, Any]] = train(given, HERE)
    return {each["step"]: each["eval_loss"] for each in records if "eval_loss" in each}, perf_counter() - start


if __name__ == "__main__":
    main()
