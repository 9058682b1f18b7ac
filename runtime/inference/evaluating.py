"""Loss and metrics of a trained model on a whole data set: one number each, as if all of it were one batch."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from attrs import frozen

from partita.compiler.pipeline import compile_evaluation, compile_spec
from partita.compiler.verify.proxy import single
from partita.dsl.spec import Spec
from partita.runtime.addresses import PathOrUrl
from partita.runtime.data.binding import bind
from partita.runtime.evaluation import EvaluationResult, check_ids, evaluation, order_of
from partita.runtime.inference.ranks import ForwardRank, LocalRanks, all_ranks_local, ranks_of
from partita.runtime.inference.rows import Data
from partita.runtime.inference.weights import Report, load_weights
from partita.runtime.inputs import Batch, tensors_of
from partita.runtime.python_functions import functions_of


@frozen
class Evaluation:
    """Loss and metrics of so many `rows` (None for a model without inputs), with the weights of a checkpoint."""

    loss: float
    metrics: dict[str, float]
    rows: int | None
    checkpoint: PathOrUrl


def evaluated(
    spec: Spec,
    folder: Path,
    data: Data,
    report: Report,
    place: PathOrUrl | None = None,
    allow_python: bool = False,
    weights: str = "trained",
    here: LocalRanks | None = None,
) -> Evaluation:
    """Evaluate a file, which is in a folder, with the weights of its run or those at a `place`: on one device or, with
    the ranks that are `here`, in the file's layout.

    Raises Refused (E06xx, E0804 to E0808).
    """
    eval_spec = data.evaluated_by(single(spec) if here is None else spec)
    model, train = eval_spec.trained
    gpu = here is not None and here.device.type == "cuda"
    functions = functions_of(model, allow_python)
    compiled = compile_spec(eval_spec, training=False, gpu=gpu)
    bound = bind(compiled.program, train, data.root, allow_python)
    for doubt in bound.warnings:
        report(doubt)
    one = compiled.program
    if bound.rows is not None:
        compiled = compile_evaluation(eval_spec, compiled, bound.rows, gpu)
    ranks = ranks_of(all_ranks_local(1) if here is None else here, [compiled.program], eval_spec, functions)
    read = load_weights(spec, folder, ranks, report, place, weights)
    dataset, order = bound.dataset, order_of(train, compiled.program, one, bound.rows)

    def batches(index: int) -> Batch:
        return tensors_of(compiled.program, dataset.holdout_batch(order[index])) if dataset is not None else {}

    def part(rank: ForwardRank) -> Generator[None, None, EvaluationResult]:
        (executor,) = rank.executors
        return (yield from evaluation(executor, len(order), batches)).result

    loss, metrics, outside = ranks.run(part)
    check_ids(outside, "in the evaluation")
    return Evaluation(loss, metrics, bound.rows, read.path)
