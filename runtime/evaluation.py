"""The evaluation of batches as if they were one, by one rank's executor; and what an executor's last step has found."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import partial
from math import isfinite, sqrt
from typing import TypeAlias

from attrs import frozen

from partita.compiler.graph import Guard
from partita.compiler.passes.update import SQUARE
from partita.compiler.program import Program
from partita.dsl.config.builtins import ALL
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.spec import Train
from partita.runtime.executor import Executor
from partita.runtime.inputs import Batch

# Number of ids out of range of the axis they index, by guard; and loss, metrics and `Outside` of an evaluation.
Outside: TypeAlias = Mapping[Guard, float]
EvaluationResult: TypeAlias = tuple[float, dict[str, float], Outside]


@frozen
class Evaluated:
    """Loss, metrics and ids out of range; and the first batch of the first round whose loss is not finite, or None."""

    result: EvaluationResult
    unsound_from: int | None


def order_of(train: Train, program: Program, one: Program, rows: int | None) -> list[int]:
    """The indices of the batches of an evaluation by a program, in order; of a whole set, if it has so many `rows`. The
    inputs of `one` program are those of a single batch.

    Before a set whose last batch is not full comes one of the row alone with which it is filled up: the batch after the
    last. Empty if the file does not evaluate.
    """
    if train.eval is None:
        return []
    count = train.eval.arguments["batches"]
    if rows is not None:
        size = max(e.type.axis(program.batch).size for e in one.inputs if e.type.has(program.batch))
        count = -(-rows // size)
    first = [count] if program.padding else []
    return [*first, *range(1 if count == ALL else count)]


def evaluation(executor: Executor, count: int, batches: Callable[[int], Batch]) -> Generator[None, None, Evaluated]:
    """Evaluate `count` batches: as if they were one or, if they need full batches, the mean of their results.

    Random numbers are those of steps before the first: the same every time, and no training step's.
    """
    rounds = executor.program.rounds
    loss, metrics, out_of_range = 0.0, dict[str, float](), dict[Guard, float]()
    share = rounds / count
    unsound_from: int | None = None
    for first in range(0, count, rounds):
        yield from executor.run(-first, partial(shifted, batches, first))
        one, named, _ = results(executor)
        if not isfinite(one) and unsound_from is None:
            unsound_from = first
        for guard, number in outside(executor).items():
            out_of_range[guard] = out_of_range.get(guard, 0.0) + number
        loss += one * share
        for name, value in named.items():
            metrics[name] = metrics.get(name, 0.0) + value * share
    return Evaluated((loss, metrics, out_of_range), unsound_from)


def shifted(batches: Callable[[int], Batch], first: int, index: int) -> Batch:
    """The batch at `index` after `first`: a later round's."""
    return batches(first + index)


def results(executor: Executor) -> tuple[float, dict[str, float], float]:
    """Loss, metrics and gradient norm of an executor's last step."""
    named = executor.named_step_metrics()
    squares = sum(value for name, value in named.items() if name.startswith(SQUARE))
    loss = named.pop("loss")
    guards = {guard.name for guard in executor.program.guards}
    metrics = {name: value for name, value in named.items() if not name.startswith(SQUARE) and name not in guards}
    return loss, metrics, sqrt(squares) if squares >= 0 else float("nan")


def outside(executor: Executor) -> Outside:
    """Number of ids out of range that an executor's last step computed, by guard."""
    named = executor.named_step_metrics()
    return {guard: named[guard.name] for guard in executor.program.guards}


def check_ids(outside: Outside, when: str) -> None:
    """Refuse (E0605) computed ids out of range of the axis they index."""
    wrong = [(guard, count) for guard, count in outside.items() if count]
    if wrong:
        raise Refused(
            Diagnostic(
                "E0605",
                f"{count:,.0f} of the ids computed here are out of range for `{guard.axis.name}`, {when}",
                guard.span,
                (f"`{guard.axis.name}` has size {guard.axis.size}: ids go from 0 to {guard.axis.size - 1}",),
                f"keep them there: `minimum(maximum(ids, 0), size({guard.axis.name}) - 1)`",
            )
            for guard, count in wrong
        )
