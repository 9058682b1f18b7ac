"""Training: the loop of one rank over steps and evaluations, for any transport.

A rank's loop is a generator, like its steps: it yields while it waits. Real transports never yield, so a process just
runs its loop to the end; the driver of the virtual transport interleaves the loops of all ranks in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from time import perf_counter
from typing import Any, TypeAlias

import torch
from attrs import evolve, field, frozen

from partita.compiler.graph import SparseGradientPart
from partita.compiler.layout import global_type, is_split, local_type
from partita.compiler.ops.groups import ANCHOR
from partita.compiler.ops.optimizer import EMA
from partita.compiler.ops.runs import zigzag_runs
from partita.compiler.passes.microbatch import STATISTIC
from partita.compiler.program import AccumulatorRecord
from partita.dsl.check.divisibility import ranks_in_zigzag
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Train
from partita.runtime.bad_steps import NORM, BadStep, History, NotFinite
from partita.runtime.checkpoint.checkpoints import Checkpoints, Resumed
from partita.runtime.data.dataset import Dataset
from partita.runtime.data.prompts import Answers
from partita.runtime.evaluation import EvaluationResult, Outside, check_ids, outside, results, shifted
from partita.runtime.executor import Rates, never
from partita.runtime.faults import MAX_ROWS, SUMS, Replay, origin, wrong_inputs
from partita.runtime.global_tensors import assemble, piece_view
from partita.runtime.inference.rollouts import metrics_of
from partita.runtime.inference.sampling import Samples
from partita.runtime.inputs import Batch
from partita.runtime.kernels.positions import put_runs
from partita.runtime.learning_rates import learning_rates
from partita.runtime.pace import Straggler, StragglerDetector
from partita.runtime.rank import CompiledRun, Rank
from partita.runtime.regions import pieces_of
from partita.runtime.tracing.flight import BETWEEN, ENDED
from partita.runtime.transports.transport import Cluster
from partita.runtime.transports.virtual import VirtualCluster
from partita.runtime.validation import Unvalidated

# Called with diagnostics for the user.
Report: TypeAlias = "Callable[[Diagnostic], None]"


@frozen
class StepResult:
    """The report of a step, the same on every rank.

    `learning_rates` are those of the optimizer's rules that update. `skipped` is the number of steps so far whose
    updates were skipped (None unless the file allows that). For a bad step, `bad` says why, `rows` names its rows of
    the data, and `rewound_to` is the checkpoint's step.

    `rate` is of tokens per second, or else of rows of the batch (`unit`).

    `seconds` are those of the step, from asking for its batch to its update. `peaks` is the peak memory of each rank so
    far, in bytes: empty if all ranks are in one process. `mfu` is the model's matrix-product FLOP/s as a share of the
    devices' peak (PaLM, arXiv 2204.02311); None if the peak is not known.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rates: Rates
    rate: float
    unit: str
    metrics: Mapping[str, float] = field(factory=dict)
    skipped: int | None = None
    bad: str = ""
    rows: Sequence[str] = ()
    rewound_to: int | None = None
    seconds: float = 0.0
    peaks: Sequence[int] = ()
    mfu: float | None = None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first rule."""
        return self.learning_rates[0]

    @property
    def more(self) -> dict[str, Any]:
        """The extra facts of a step in a run that continues past bad ones, and of a bad one."""
        facts: dict[str, Any] = {} if self.skipped is None else {"skipped": self.skipped}
        if len(self.learning_rates) > 1:
            facts["learning_rates"] = list(self.learning_rates)
        if self.bad:
            facts |= {"bad": self.bad, "rows": list(self.rows)}
        if self.rewound_to is not None:
            facts["rewound_to"] = self.rewound_to
        return facts


class Observer:
    """Receives a run's progress; a subclass has the methods that it is interested in."""

    def resumed(self, checkpoint: Resumed) -> None:
        """The run resumes after a checkpoint's step; called before anything else."""

    def step(self, result: StepResult) -> None:
        """A training step is done."""

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """An evaluation after `step` is done."""

    def sample(self, step: int, text: str) -> None:
        """The model has written a text after `step`, which begins with the prompt."""

    def slow(self, step: int, ranks: Sequence[Straggler]) -> None:
        """These ranks held up the others in the steps up to this one."""


NOBODY = Observer()


def ignore_diagnostic(diagnostic: Diagnostic) -> None:
    """A `Report` that drops the diagnostic."""


def train(
    rank: Rank,
    dataset: Dataset | None,
    observer: Observer = NOBODY,
    checkpoints: Checkpoints | None = None,
    report: Report = ignore_diagnostic,
    stop_requested: Callable[[], bool] = never,
) -> Iterator[None]:
    """Run all steps on one rank, or those after a checkpoint; all ranks' observers are told the same.

    If the run ends at a bad step, all ranks end; BadStep is raised on the rank where it originated. If any rank is
    asked to end (`stop_requested`), all save at the end of the same step and end, with `rank.ended` set, and
    `rank.saved` on rank 0.
    """
    plan = rank.plan
    settings = plan.train
    stopwatch, pace = rank.training.stopwatch, rank.training.pace
    rank.training.stop_requested = stop_requested
    resumed = (yield from checkpoints.resume()) if checkpoints is not None else None
    if resumed is not None:
        rank.training.restore(resumed.step)
        observer.resumed(resumed)
    if plan.samples is not None:
        yield from rank.scorer(plan.samples).check_causal()
    if rank.rollout is not None:
        yield from rank.rollout.scorer().check_causal()
    validation, unvalidated = rank.validation, None
    number = resumed.step + 1 if resumed is not None else 1
    due = copied = False  # a checkpoint or a copy, which waits for the last step on the same answers
    while number <= settings.steps:
        start = perf_counter()
        if stopwatch is not None:
            stopwatch.begin(number)
        if pace is not None:
            pace.begin()
        rates = learning_rates(settings.optimizer, number)
        batch = yield from _batch(rank, dataset, number)
        if pace is not None:
            pace.mark()
        yield from rank.training.compute(number, (batch,).__getitem__, rates, rank.bad_step_policy.updates(number))
        if unvalidated is not None:
            yield from rank.training.finish_metrics(unvalidated.sums)
            if not validation.holds(unvalidated.number):
                validation.rollback(unvalidated.number)
                number, unvalidated = unvalidated.number, None
                continue
            _validated(rank, unvalidated, observer)
            unvalidated = None
        whole = rank.rollout is None or rank.rollout.ends_with(number)
        due = due or (checkpoints is not None and checkpoints.due(number))
        copied = copied or (checkpoints is not None and checkpoints.copies(number))
        saving, copying = due and whole, copied and whole
        due, copied = due and not whole, copied and not whole
        read = saving or copying or _due(settings, number) or number == settings.steps or rank.training.ends
        if not read and validation.can_speculate(number):
            sums = rank.training.start_metrics()
            rank.training.marked()
            yield from validation.update()
            if rank.rollout is None:
                rank.training.gather_ahead()
            unvalidated = Unvalidated(number, rates, sums, perf_counter() - start)
            if pace is not None:
                pace.mark()
                pace.end()
            number += 1
            continue
        try:
            yield from rank.training.end(number, rank.bad_step_policy)
        except BadStep as wrong:
            rank.failed = True
            if checkpoints is not None:
                yield from checkpoints.finish()
            details = yield from _details(rank, wrong, dataset)
            if details is None:
                return
            raise wrong.with_details(details) from None
        # Beside an evaluation or rollouts, what is gathered would be held for nothing.
        if (
            not rank.bad_step_policy.bad
            and number < settings.steps
            and not rank.extra_replicas
            and not _due(settings, number)
            and rank.rollout is None
        ):
            rank.training.gather_ahead()
        validation.passed()
        result = _result(rank, number, rates, perf_counter() - start)
        if rank.bad_step_policy.bad:
            result = yield from _handle_bad_step(rank, result, dataset, checkpoints, report)
        else:
            check_ids(outside(rank.training), f"in step {number}")
        _tell(rank, result, observer)
        if pace is not None:
            pace.mark()
            pace.end()
        if pace is not None and (saving or number == settings.steps or _due(settings, number)):
            yield from _compare_paces(rank, pace, number, observer, report)
        if _due(settings, number):
            yield from evaluate(rank, dataset, number, observer, report)
            yield from sample(rank, plan.samples, number, observer)
        rank.ended = rank.training.ends and number < settings.steps and whole
        # Last, so that everything written about a saved step is written before the save.
        if rank.ended or saving or copying:
            yield from rank.training.flush()
        if checkpoints is not None and (rank.ended or saving):
            yield from checkpoints.save(number)
        if checkpoints is not None and copying and not rank.ended:
            yield from checkpoints.copy(number)
        if rank.ended:
            break
        number += 1
    yield from rank.training.flush()
    if checkpoints is not None:
        yield from checkpoints.finish()
        if rank.ended and checkpoints.committed == number:
            rank.saved = number
    if stopwatch is not None:
        stopwatch.finish()
    rank.flight.begin(ENDED, rank.saved or 0)


def _result(rank: Rank, number: int, rates: Rates, seconds: float) -> StepResult:
    """The report of the step with the rank's last metrics, which took this long."""
    loss, metrics, norm = results(rank.training)
    plan, peaks = rank.plan, rank.training.peaks
    if rank.rollout is not None:
        metrics = {**rank.rollout.metrics_of(number), **metrics}
    counted, unit = plan.program.counted
    mfu = plan.training.flops / (seconds * rank.peak_flops) if rank.peak_flops else None
    return StepResult(
        number, loss, norm, rates, counted / seconds, unit, metrics, seconds=seconds, peaks=peaks, mfu=mfu
    )


def _validated(rank: Rank, step: Unvalidated, observer: Observer) -> None:
    """Report a step for which the assumption of its update holds."""
    rank.bad_step_policy.accepts(step.number, rank.training.named_step_metrics())
    rank.validation.passed()
    result = _result(rank, step.number, step.rates, step.seconds)
    check_ids(outside(rank.training), f"in step {step.number}")
    _tell(rank, result, observer)


def _tell(rank: Rank, result: StepResult, observer: Observer) -> None:
    """Tell the observer of a step."""
    policy = rank.bad_step_policy
    observer.step(result if policy.stops else evolve(result, skipped=policy.history.skipped))


def _compare_paces(
    rank: Rank, pace: StragglerDetector, step: int, observer: Observer, report: Report
) -> Generator[None, None, None]:
    """Find the ranks that were slow since the last comparison and, after the last step, since the start of the run."""
    sums = yield from pace.told(rank.transport)
    rank.sums = sums if rank.sums is None else rank.sums + sums
    if rank.rank != 0:
        return
    slow = sums.slow(rank.plan.predicted)
    if slow:
        observer.slow(step, slow)
    if step == rank.plan.train.steps:
        first, *others = rank.sums.slow(rank.plan.predicted) or (None,)
        if first is not None:
            are = "rank is" if len(others) == 1 else "ranks are"
            more = f"; {len(others)} more {are} slow" if others else ""
            report(Diagnostic("W0604", f"{first}{more}"))


def _batch(rank: Rank, dataset: Dataset | None, step: int) -> Generator[None, None, Batch]:
    """The batch of a step, with the rank's rows at least."""
    if dataset is None:
        return {}
    if rank.rollout is None:
        return rank.tensors(dataset.batch(step))
    answered = yield from rank.rollout.trained(dataset.batch(step, range(rank.plan.program.rows)), step)
    rank.flight.begin(BETWEEN, step - 1)
    return rank.tensors(answered)


def _whole_batch(rank: Rank, dataset: Dataset | None, step: int) -> Batch:
    """The batch of a step with the rows of all ranks; answers are those that were written for it."""
    if rank.rollout is not None:
        return rank.tensors(rank.rollout.batch_of(step))
    return rank.tensors(dataset.batch(step, range(rank.plan.program.rows))) if dataset else {}


def _details(rank: Rank, wrong: BadStep, dataset: Dataset | None) -> Generator[None, None, str | None]:
    """Details of a bad step that ends the run, on the rank that is to report them; None on all others.

    The gradients of a norm may be those of an earlier step (`sync = delayed(k)`): then the details are those of that
    step, which is repeated with the current parameters.
    """
    delay = rank.plan.program.delay if wrong.figure == NORM else 0
    step, before = wrong.step - delay, f"its gradients are of step {wrong.step - delay}; " if delay else ""
    rows = dataset.row_names(step) if dataset else []
    if isinstance(wrong, NotFinite):
        batch = _whole_batch(rank, dataset, step)
        trial = Replay(rank.plan.training, step, lambda _: batch, lambda _: rows)
        begun = yield from origin(rank, trial)
        if begun == SUMS and delay:
            begun = "none as it runs again, with the parameters of now"
        return None if begun is None else f"{before}the first value that is not finite: {begun}"
    return f"{before}{_batch_of(rows)}" if rank.rank == 0 else None


def _handle_bad_step(
    rank: Rank,
    result: StepResult,
    dataset: Dataset | None,
    checkpoints: Checkpoints | None,
    report: Report,
) -> Generator[None, None, StepResult]:
    """Continue past a bad step: rewind if the policy says so, and report the skipped updates. Returns the step's
    report.
    """
    rows = dataset.row_names(result.step) if dataset else []
    to = None
    what = f"step {result.step} is skipped"
    if rank.bad_step_policy.rewinds:
        to, saved = (yield from checkpoints.rewind()) if checkpoints is not None else (0, None)
        if saved is None:
            rank.restart()
        rank.bad_step_policy.rewound(result.step, to, saved or History())
        back = f"the checkpoint of step {to}" if to else "the beginning"
        first = to + 1
        left = f"steps {first} to {result.step} are" if first < result.step else f"step {result.step} is"
        what = f"back to {back}: {left} left out"
    if rank.rank == 0:
        batch = _whole_batch(rank, dataset, result.step)
        notes = (*wrong_inputs(rank.plan.program, batch, rows), *([_batch_of(rows)] if rows else []))
        report(Diagnostic("W0602", f"{what}: {rank.bad_step_policy.bad}", notes=notes))
    return evolve(result, bad=rank.bad_step_policy.bad, rows=rows, rewound_to=to)


def _batch_of(rows: Sequence[str]) -> str:
    """The rows of a batch in words."""
    more = f" and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    return f"its batch: {', '.join(rows[:MAX_ROWS])}{more}" if rows else ""


def _due(settings: Train, step: int) -> bool:
    """Whether an evaluation follows a step: at each interval, and after the last step."""
    if settings.eval is None:
        return False
    return step % int(settings.eval.arguments["interval"]) == 0 or step == settings.steps


def evaluate(
    rank: Rank, dataset: Dataset | None, step: int, observer: Observer, report: Report = ignore_diagnostic
) -> Iterator[None]:
    """Loss and metrics of the evaluation batches, which are the same every time.

    A loss that is not finite does not mean that the parameters are bad: training continues, and the origin is reported.
    """
    settings = rank.plan.train
    assert settings.eval is not None
    order = rank.plan.evaluated
    answered: list[Answers] = []
    if rank.rollout is not None and dataset is not None:
        for index in order:
            prompts = dataset.holdout_batch(index, range(rank.plan.program.rows))
            answered.append((yield from rank.rollout.evaluated(prompts, index)))

    def batches(index: int, rows: range | None = None) -> Batch:
        if rank.rollout is not None:
            return rank.tensors(rank.rollout.rollouts.evaluated.answered(answered[index]))
        return rank.tensors(dataset.holdout_batch(order[index], rows)) if dataset else {}

    loss, metrics, wrong_ids = yield from rank.evaluate(len(order), batches)
    if answered:
        metrics = {**metrics_of(answered), **metrics}
    check_ids(wrong_ids, "in an evaluation")
    first = rank.unsound_from
    if first is not None:
        rank.eval_nonfinite = True
        assert rank.plan.evaluation is not None
        whole = partial(batches, rows=range(rank.plan.evaluation.program.rows))
        trial = Replay(
            rank.plan.evaluation,
            -first,
            partial(shifted, whole, first),
            lambda index: dataset.holdout_row_names(order[first + index]) if dataset else [],
        )
        begun = yield from origin(rank, trial)
        if begun is not None:
            loss_text = "nan" if loss != loss else "infinite"
            note = f"the first value that is not finite: {begun}"
            report(Diagnostic("W0601", f"the loss of the evaluation after step {step} is {loss_text}", notes=(note,)))
    rank.flight.begin(BETWEEN, step)
    observer.evaluation(step, loss, metrics)


def sample(rank: Rank, samples: Samples | None, step: int, observer: Observer) -> Iterator[None]:
    """Write, if the file asks for it, with the parameters after a step."""
    if samples is None:
        return
    text = yield from samples.of(rank.scorer(samples), step)
    rank.flight.begin(BETWEEN, step)
    observer.sample(step, text)


# ---------------------------------------------------------------- all ranks in one process


CPU = torch.device("cpu")
# Makes the transports of a number of ranks in one process, strict or not, with a seed.
ClusterOf: TypeAlias = Callable[[int, bool, int], Cluster]


class VirtualRun:
    """All ranks of a plan on the virtual cluster, strict by default: used by tests and `verify`. All share a device."""

    def __init__(
        self,
        plan: CompiledRun,
        strict: bool = True,
        seed: int = 0,
        cluster: ClusterOf = VirtualCluster,
        device: torch.device = CPU,
    ) -> None:
        self.plan = plan
        self.cluster = cluster(plan.ranks, strict, seed)
        self.ranks = [Rank(plan, r, self.cluster.transport(r), device, keep_totals=True) for r in range(plan.ranks)]

    def step(self, number: int, batch: Mapping[str, torch.Tensor], *rates: float) -> tuple[float, float]:
        """Run one step on every rank, with these learning rates of the rules, or 0; returns loss and gradient norm."""
        rates = rates or (0.0,) * len(self.plan.train.optimizer.calls)
        self.cluster.run([rank.step(number, batch, rates) for rank in self.ranks])
        loss, _, norm = results(self.ranks[0].training)
        return loss, norm

    def evaluate(self, *batches: Batch) -> EvaluationResult:
        """Loss, metrics and out-of-range ids of an evaluation, by the forward-only program."""
        outcomes: list[EvaluationResult] = []

        def evaluation(rank: Rank) -> Iterator[None]:
            outcomes.append((yield from rank.evaluate(len(batches), batches.__getitem__)))

        self.cluster.run([evaluation(rank) for rank in self.ranks])
        return outcomes[0]

    def metrics(self) -> dict[str, float]:
        """Metrics of the last training step."""
        return results(self.ranks[0].training)[1]

    def outside(self) -> Outside:
        """Number of out-of-range ids in the last training step, by guard."""
        return outside(self.ranks[0].training)

    def parameters(self, group: int = 0) -> dict[str, torch.Tensor]:
        """Every parameter by name, as a full tensor; with replica groups, those of one. Raises AssertionError if copies
        of a shard differ in any bit.
        """
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for rank, member in self._training(group):
            for name, tensor in rank.memories[member].masters.items():
                parts.setdefault(name, {})[rank.rank] = tensor
        return {name: self._whole(name, by_rank) for name, by_rank in parts.items()}

    def trained(self) -> dict[str, torch.Tensor]:
        """The parameters of the trained model: with replica groups, the outer parameters (`anchor`)."""
        return {**self.parameters(), **self.companions(ANCHOR)}

    def _training(self, group: int) -> Iterator[tuple[Rank, int]]:
        """The ranks that train a group, each with the number of the group among its own."""
        program = self.plan.program
        coordinate, member = divmod(group, program.replicas_per_rank)
        for rank in self.ranks:
            if (
                program.mesh.replica_axis is None
                or program.mesh.coordinates(rank.rank)[program.mesh.replica_axis] == coordinate
            ):
                yield rank, member

    def companions(self, which: str) -> dict[str, torch.Tensor]:
        """What is kept of each parameter under this name besides the optimizer's states: `anchor`, `velocity`."""
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for rank in self.ranks:
            for (state, name), tensor in rank.memory.states.items():
                if state == which:
                    parts.setdefault(name, {})[rank.rank] = tensor
        return {name: self._whole(name, by_rank, state=True) for name, by_rank in parts.items()}

    def means(self) -> dict[str, torch.Tensor]:
        """The mean that `ema` keeps of each trained parameter, by its name; as `parameters`. Empty without `ema`."""
        return self.companions(EMA)

    def set_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set parameters, of all groups: each rank takes its shards of the full tensors."""
        mesh = self.plan.program.mesh
        for rank in self.ranks:
            coordinates = mesh.coordinates(rank.rank)
            for name in values.keys() & rank.memory.masters.keys():
                record = self.plan.program.parameter(name)
                shards = [(memory.masters[name], record.layout) for memory in rank.memories]
                shards += [
                    (rank.memory.states[each.name, name], record.stored(each))
                    for each in record.companions
                    if each.copy
                ]
                for tensor, layout in shards:
                    for piece in pieces_of(record.type, layout, mesh.sizes, coordinates):
                        piece_view(tensor, layout, piece).copy_(values[name][piece.region])

    def gradients(self, group: int = 0) -> dict[str, torch.Tensor]:
        """The last step's gradients as full tensors: each parameter's totals added in stage order; with replica groups,
        those of one.

        Raises AssertionError if copies of a shard of a total differ in any bit.
        """
        parts: dict[str, dict[tuple[int, int], dict[int, torch.Tensor]]] = {}
        for rank, member in self._training(group):
            for i, stage in rank.training.stages.items():
                for record in stage.record.accumulators:
                    if record.parameter and (record.term is None or not record.term.ids):
                        by_stage = parts.setdefault(record.parameter, {})
                        # Ranks that share a parameter have their totals on stages of their own.
                        own = sum(rank.rank in each for each in by_stage.values())
                        lookup = 0 if record.term is None else record.term.number
                        key = (own if self._shared(record.parameter) else i), lookup
                        by_stage.setdefault(key, {})[rank.rank] = self._total(rank, member, i, record)
        return {
            name: torch.stack([self._whole(name, by_stage[i], state=True) for i in sorted(by_stage)]).sum(0)
            for name, by_stage in parts.items()
        }

    def step_metrics(self, group: int = 0) -> dict[str, torch.Tensor]:
        """The values that updates of buffers read from the last step's batch: each summed over the batch, by its name,
        as a full tensor, with positions in their own order; with replica groups, those of one.
        """
        mesh = self.plan.program.mesh
        records: dict[str, AccumulatorRecord] = {}
        parts: dict[str, dict[tuple[int, ...], dict[int, torch.Tensor]]] = {}
        for rank, member in self._training(group):
            coordinates = mesh.coordinates(rank.rank)
            for i, stage in rank.training.stages.items():
                for record in stage.record.accumulators:
                    if record.name.startswith(STATISTIC):
                        terms = parts.setdefault(record.name, {})
                        term = tuple(coordinates[over] for over, state in record.layout.states if not is_split(state))
                        terms.setdefault(term, {})[rank.rank] = rank.training.kept[member][i, record.name]
                        records[record.name] = record
        totals: dict[str, torch.Tensor] = {}
        for name, terms in parts.items():
            record = records[name]
            type = global_type(record.type, record.layout, mesh.sizes)
            whole = torch.stack([assemble(name, type, record.layout, mesh, each) for each in terms.values()])
            total = whole.amax(0) if record.maximum else whole.sum(0)
            for axis, ranks in ranks_in_zigzag(self.plan.spec).items():
                if type.has(axis):
                    size = type.axis(axis).size
                    total = put_runs(total, type.position(axis), zigzag_runs(0, size, size, ranks), size)
            totals[name.removeprefix(STATISTIC)] = total
        return totals

    def _total(self, rank: Rank, member: int, stage: int, rows: AccumulatorRecord) -> torch.Tensor:
        """A rank's shard of a total; of one that has rows of a table alone, with zeros in all others."""
        totals = rank.training.kept[member]
        total = totals[stage, rows.name]
        if rows.term is None:
            return total
        records = rank.training.stages[stage].record.accumulators
        looked_up = rows.parameter, SparseGradientPart(rows.term.number, True)
        ids = next(each for each in records if (each.parameter, each.term) == looked_up)
        table = self.plan.program.parameter(str(rows.parameter))
        shard = local_type(table.type, table.state_layout, self.plan.program.mesh.sizes)
        (over,) = (name for name in shard.names if not rows.type.has(name))
        shared = [name for name in shard.names if ids.type.has(name)]
        order = [*shared, over, *(name for name in rows.type.names if shard.has(name) and name not in shared)]
        row_ids = totals[stage, ids.name]
        place = (row_ids >= 0).nonzero(as_tuple=True)
        row = row_ids[place] + place[len(shared)] * (shard.axis(over).size // row_ids.shape[len(shared)])
        dense = total.new_zeros([shard.axis(name).size for name in order])
        dense[(*place[: len(shared)], row)] = total[place]
        return dense.permute([order.index(name) for name in shard.names])

    def _shared(self, name: str) -> bool:
        """Whether the ranks of the pipeline hold parts of a parameter."""
        program = self.plan.program
        return any(over == program.mesh.pipe for over, _ in program.parameter(name).layout.states)

    def _whole(self, name: str, parts: Mapping[int, torch.Tensor], state: bool = False) -> torch.Tensor:
        """A parameter assembled from the ranks' shards; or (`state`) its gradient's total, or its mean."""
        record = self.plan.program.parameter(name)
        layout = record.state_layout if state else record.layout
        what = f"the gradient or mean of {name}" if state else name
        return assemble(what, record.type, layout, self.plan.program.mesh, parts)

    def train(
        self,
        dataset: Dataset | None,
        observers: Sequence[Observer | None] = (),
        checkpoints: Sequence[Checkpoints | None] = (),
        report: Report = ignore_diagnostic,
        stop_requested: Callable[[], bool] = never,
    ) -> None:
        """Do the whole run, all ranks interleaved. Observers and checkpoints are listed by rank, from 0."""
        runs = []
        for rank, observer, each in zip_longest(self.ranks, observers, checkpoints):
            own = rank.reads(dataset) if dataset is not None else None
            runs.append(train(rank, own, NOBODY if observer is None else observer, each, report, stop_requested))
        self.cluster.run(runs)
