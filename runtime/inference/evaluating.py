"""Loss and metrics of a trained model on a whole data set: one number each, as if all of it were one batch."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from partita.compiler.verify.proxy import single
from partita.dsl.spec import Spec
from partita.runtime.addresses import Place
from partita.runtime.data.binding import bind
from partita.runtime.inference.rows import Data
from partita.runtime.inference.weights import Report, read_weights
from partita.runtime.inputs import Batch
from partita.runtime.rank import check_ids, prepare
from partita.runtime.training import VirtualRun


@frozen
class Evaluation:
    """Loss and metrics of so many `rows` (None for a model without inputs), with the weights of a checkpoint."""

    loss: float
    metrics: dict[str, float]
    rows: int | None
    checkpoint: Place


def evaluated(
    given: Spec,
    folder: Path,
    data: Data,
    report: Report,
    place: Place | None = None,
    allow_python: bool = False,
    weights: str = "trained",
) -> Evaluation:
    """Evaluate a file, which is in a folder, with the weights of its run or those at a `place`.

    Raises Refused (E06xx, E0804 to E0808).
    """
    plan = prepare(single(data.evaluated_by(given)), allow_python=allow_python)
    bound = bind(plan.program, plan.train, data.root)
    for doubt in bound.doubts:
        report(doubt)
    plan = plan.evaluating(bound.rows)
    needed = {each.name: each.type for each in plan.program.parameters}
    read = read_weights(given, folder, needed, report, place, weights)
    run = VirtualRun(plan, strict=False)
    run.set_parameters(read.parameters)
    (rank,) = run.ranks
    dataset, order = bound.dataset, plan.evaluated

    def batches(index: int) -> Batch:
        return rank.tensors(dataset.holdout_batch(order[index])) if dataset is not None else {}

    loss, metrics, outside = run.evaluate_each(len(order), batches)
    check_ids(outside, "in the evaluation")
    return Evaluation(loss, metrics, bound.rows, read.path)
