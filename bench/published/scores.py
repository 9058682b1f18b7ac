"""Scores of predictions: rows compiled, predicted, and compared with what was measured.

A predicted utilization is the published one, times the published time of a step, over the predicted one: whatever
formula of FLOPs a source has, it cancels. Scores are in points of MFU; where a source counts recomputation, its
utilization is converted by the formulas of arXiv 2104.04473, §5.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import correlation, fmean
from typing import Any

from attrs import evolve, frozen

from partita.compiler.analysis.execution import OURS, Execution
from partita.compiler.analysis.time import predict
from partita.compiler.graph import Phase
from partita.compiler.pipeline import schedule_spec
from partita.compiler.state import Scheduled
from published.fsdp import FSDP, HALF, step_seconds
from published.rows import Row


def reach(state: Scheduled, factor: float) -> Scheduled:
    """A device whose large matrix products reach another share of its peak."""
    products = state.device.products
    return evolve(state, device=evolve(state.device, products=evolve(products, best=products.best * factor)))


# What is fitted again when a family is left out: `Products.best` of each of these devices.
FITTED = ("a100", "h100")
STEP = 1.05  # the factor by which it is changed to see what that does
RANGE = (0.8, 1.25)  # of factors that are tried


@frozen
class Compared:
    """A row and its prediction: utilizations in percent as published (`measured`, `predicted`) and what converts both
    to MFU. `slope`: by how much the time of a step grows if the inverse of the fitted constant of its device does, both
    relatively.
    """

    row: Row
    measured: float
    predicted: float
    to_mfu: float
    device: str
    slope: float

    @property
    def off(self) -> float:
        """Points."""
        return self.predicted - self.measured

    def points(self, factors: Mapping[str, float]) -> tuple[float, float]:
        """MFU, measured and predicted with the fitted constants of devices times these factors (missing: 1)."""
        longer = 1 + self.slope * (1 / factors.get(self.device, 1.0) - 1)
        return self.to_mfu * self.measured, self.to_mfu * self.predicted / longer


# How each way of running that a row may name differs from how our programs run (docs/costs.md says what they are).
DIFFERENCES: Mapping[str, Mapping[str, Any]] = {
    "waits": {"waits": frozenset(Phase), "exchanges": 1},
    "waits-in-turn": {"waits": frozenset(Phase), "exchanges": 2},
    "waits-at-ends": {"waits": frozenset({Phase.PROLOGUE, Phase.REDUCE, Phase.FINISH, Phase.UPDATE}), "exchanges": 1},
    "sums-fused": {"sum_bytes": 0.0},
    "sums-f16": {"sum_bytes": 6.0},
    "sums-cast": {"sum_bytes": 18.0},
    "whole": {"whole": True},
    "reduces-half": {"reductions": 0.5},
    "reduces-twice": {"reductions": 2.0},
    "fp8": {"narrow": True},
    "userbuffers": {"userbuffers": True},
    "hidden": {"apart": 20 / 132},
}
# The same of FSDP, which has an execution of its own: it reduces in f32 unless it is told otherwise.
SHARDED: Mapping[str, Mapping[str, Any]] = {
    "fsdp-1": {"version": 1},
    "fsdp-2": {"version": 2},
    "keeps-gathered": {"kept": True},
    "reduces-half": {"reduced": HALF},
    "whole": {"whole": True},
    "fp8": {"narrow": True},
}
# Those that are no difference of execution: of the program or its device.
ELSEWHERE = ("eager", "flash-1", "cudnn")


def execution(row: Row) -> Execution | FSDP:
    """How that system executed what it ran."""
    sharded = not row.ran.isdisjoint({"fsdp-1", "fsdp-2"})
    known, base = (SHARDED, FSDP()) if sharded else (DIFFERENCES, OURS)
    assert row.ran <= {*known, *ELSEWHERE}, row
    changes = [known[each] for each in sorted(row.ran) if each in known]
    return evolve(base, **{name: value for each in changes for name, value in each.items()})


def as_run(state: Scheduled, row: Row) -> Scheduled:
    """The program as that system would have run it."""
    if "cudnn" not in row.ran:
        state = evolve(state, device=state.device.generation(1 if "flash-1" in row.ran else 2))
    if "eager" in row.ran:
        state = evolve(state, compiled=False, train=evolve(state.train, compile=False))
    return state


def compared(row: Row, slope: bool = True) -> Compared:
    """Compile and predict a row. Without `slope`, the constant is not varied."""
    state, ran = as_run(schedule_spec(row.load()), row), execution(row)

    def seconds(state: Scheduled) -> float:
        return step_seconds(state, ran) if isinstance(ran, FSDP) else predict(state, ran, exposed=False).step_time

    predicted = seconds(state)
    model, hardware = formula(state)
    peak = state.device.flops["bf16"] * state.mesh.ranks
    measured = row.percent
    match row.step:
        case {"seconds": taken}:
            pass
        case {"tokens": tokens}:
            taken = state.plan.counted[0] / (tokens * state.mesh.ranks)
        case step:
            if "teraflops" in step:
                measured = 100 * step["teraflops"] * 1e12 * state.mesh.ranks / peak  # `percent` is rounded
            counted = hardware if row.hardware else state.flops + row.whole_attention * unseen(state)
            taken = counted / (measured / 100 * peak)
    to_mfu = model / hardware if row.hardware else 1.0
    varied = (seconds(reach(state, 1 / STEP)) / predicted - 1) / (STEP - 1) if slope else 0.0
    return Compared(row, row.percent, measured * taken / predicted, to_mfu, state.device.name, varied)


def formula(state: Scheduled) -> tuple[float, float]:
    """The FLOPs of a step of GPT by arXiv 2104.04473, §5.1: the model's, and with every layer made again."""
    batch, seq, depth, embed, vocab = (
        float(state.spec.axes[name].size) for name in ("batch", "seq", "depth", "embed", "vocab")
    )
    layer = 24 * batch * seq * depth * embed**2 * (1 + seq / (6 * embed))
    logits = 6 * batch * seq * embed * vocab
    return 3 * layer + logits, 4 * layer + logits


def unseen(state: Scheduled) -> float:
    """The FLOPs of a step with the keys that causality hides from Llama's attention: as many as with those it sees."""
    batch, seq, depth, groups, heads, key = (
        float(state.spec.axes[name].size) for name in ("batch", "seq", "depth", "groups", "heads", "key")
    )
    return 6 * batch * seq**2 * depth * groups * heads * key


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each; equal ones share the mean of theirs."""
    return [sum(other < each for other in values) + (values.count(each) + 1) / 2 for each in values]


def error(pairs: Iterable[tuple[float, float]]) -> float:
    """The mean absolute error of measured and predicted."""
    return fmean(abs(measured - predicted) for measured, predicted in pairs)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's."""
    measured, predicted = zip(*pairs, strict=True)
    return correlation(ranks(measured), ranks(predicted))


def fitted(found: Sequence[Compared]) -> dict[str, float]:
    """The factors of fitted constants for which the mean absolute error is least, every family weighing as much."""
    low, high = RANGE
    tried = [low * (high / low) ** (i / 100) for i in range(101)]
    factors: dict[str, float] = {}
    for device in FITTED:
        own = [one for one in found if one.device == device]
        of = {family: [one for one in own if one.row.family == family] for family in {one.row.family for one in own}}
        if of:
            factors[device] = min(
                tried, key=lambda each: fmean(error(one.points({device: each}) for one in some) for some in of.values())
            )
    return factors


def line(title: str, pairs: Sequence[tuple[float, float]], names: Sequence[str]) -> str:
    """Scores, as a sentence."""
    measured = [each for each, _ in pairs]
    off = [predicted - each for each, predicted in pairs]
    worst = max(range(len(off)), key=lambda i: abs(off[i]))
    constant = error((each, fmean(measured)) for each in measured)
    text = f"{title}: {len(pairs)} rows, mean absolute error {error(pairs):.2f} points, of a constant {constant:.2f}"
    text += f", worst {off[worst]:+.1f} ({names[worst]})"
    if len(set(measured)) > 1 and len({each for _, each in pairs}) > 1:
        text += f", rank correlation {rank_correlation(pairs):.2f}"
    return text
