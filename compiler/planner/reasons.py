"""Why a plan is slower than the best: where its step loses time, as shares of the best plan's step."""

from __future__ import annotations

from partita.compiler.planner.search import Plan

# Smaller shares of a step are not reported.
MIN_SHARE = 0.005
MAX_REASONS = 2


def reason(plan: Plan, best: Plan) -> str:
    """The largest extra costs relative to the best plan: `+8.0% bubble, +2.1% collectives`."""
    step = best.prediction.step_time
    names = {"compute": _compute(plan, best), "collectives": "collectives", "bubble": "bubble", "end": "end of step"}
    shares = {name: (getattr(plan.parts, key) - getattr(best.parts, key)) / step for key, name in names.items()}
    worse = sorted((name for name, share in shares.items() if share >= MIN_SHARE), key=lambda name: -shares[name])
    return ", ".join(f"+{shares[name]:.1%} {name}" for name in worse[:MAX_REASONS]) or "about as fast"


def _compute(plan: Plan, best: Plan) -> str:
    """The likely cause of more arithmetic."""
    if plan.candidate.recompute and plan.candidate.recompute != best.candidate.recompute:
        return "recomputation"
    if plan.candidate.size < best.candidate.size:
        return "small microbatches"
    if plan.candidate.size > best.candidate.size and plan.candidate.pipe > 1:
        return "uneven stages"
    return "arithmetic"
