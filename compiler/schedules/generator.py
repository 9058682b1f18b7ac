"""The registry of schedules, and what is known of each without building it.

A schedule is one module: the function that builds its orders, and a `Generator`, registered on import, that describes
it. What the function returns is checked against the invariants (`partita.compiler.schedules.invariants`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, Literal, Protocol, cast

from attrs import frozen

from partita.compiler.schedules.schedule import Schedule, SharedVocabulary, loop_placement, ranks_of
from partita.compiler.schedules.vocab_parallel import with_spread
from partita.dsl import spec
from partita.dsl.config import builtins
from partita.dsl.config.builtins import DEFAULT_SCHEDULE, ScheduleSignature
from partita.dsl.diagnostic import refuse
from partita.dsl.registry import Registry

# Arguments that every schedule may have; the others are a schedule's own.
OF_THE_STEP = ("microbatches", "chunks", "over")


class Times(Protocol):
    """The seconds of a stage's actions."""

    @property
    def forward(self) -> float:
        """F."""

    @property
    def backward(self) -> float:
        """B."""

    @property
    def weight(self) -> float:
        """W."""

    @property
    def whole(self) -> float:
        """BW."""


@frozen
class Sizes:
    """The sizes of a pipeline that is shrunk to a proxy: ranks before, and ranks and chunks afterwards."""

    before: int
    ranks: int
    chunks: int


@frozen(kw_only=True, eq=False)
class Generator(ScheduleSignature):
    """A schedule: its call syntax, the function that builds it, and what is known of it.

    `order` takes `ranks`, `microbatches`, `chunks` if any number of stages per rank is supported, `conditions` (costs
    and memory) if it depends on them, and its own arguments by name. It returns a `Schedule` with a declared bound on
    live activations, and raises ValueError for arguments that it does not support.

    Closed forms for P ranks, V chunks and M microbatches; None if only the orders tell:

    - `chunks`: the stages on each rank, None if the call gives the number; `placement`: the placement for P and V.
    - `split`: whether B and W are separate actions.
    - `live`: each rank's bound on live activations, in stages, for P, V and M, with default arguments.
    - `lag`: the most W, in stages, that a rank defers, for P.
    - `bubble`: how long each of P−1 ranks idles with equal stages, free transfers and many microbatches.

    For `plan`, which predicts it without compiling:

    - `representative`: how many of M microbatches to estimate, for P and M; others add the busiest rank's time each.
    - `planned`: the numbers of chunks to consider, for P, the layers to split and M; default: none.
    - `searched`: its order is searched for, which takes so long that it is tried only on the best plan.

    For `auto`: `role` is "compared" (taken as it is) or "varied" (with other warm-ups and lags). `bounded`: it is built
    to fit within the memory of its conditions.

    For pipelines whose ranks share the vocabulary (`schedules.vocab_parallel`): by how many microbatches
    backwards then come later (`slack`); and after how many of its actions each rank runs both passes over a microbatch,
    for P and M, if the schedule gives them a place (`passes`).

    For calls: `written` returns the schedule that a call refers to, if that determines its own sizes; `proxy` is the
    call for the proxy that `verify` runs, and `fewest` the least number of microbatches that it needs. `legal` gives
    values of its own arguments for P and V, for random tests.
    """

    order: Callable[..., Schedule]
    placement: Callable[[int, int], tuple[tuple[int, ...], ...]] = loop_placement
    split: bool = False
    live: Callable[[int, int, int], tuple[int, ...]] | None = None
    lag: Callable[[int], int] = lambda ranks: 0
    bubble: Callable[[Times], float] | None = None
    representative: Callable[[int, int], int] = lambda ranks, microbatches: min(microbatches, 3 * ranks)
    planned: Callable[[int, int, int], Iterable[int]] = lambda ranks, layers, microbatches: ()
    searched: bool = False
    role: Literal["varied", "compared"] | None = None
    bounded: bool = False
    slack: int = 2
    passes: Callable[[int, int], tuple[tuple[int, ...], ...]] | None = None
    written: Callable[[spec.Call], Schedule] | None = None
    proxy: Callable[[spec.Call, Sizes], spec.Call] = lambda call, sizes: call
    fewest: Callable[[spec.Call], int] = lambda call: 0
    legal: Callable[[int, int], Mapping[str, Iterable[Any]]] = lambda ranks, chunks: {}

    def shared(
        self, schedule: Schedule, spread: SharedVocabulary | None, seconds: Callable[[int, str], float]
    ) -> Schedule:
        """One of its schedules with the passes over parts that all ranks have, if there are any and it was not written
        with them.

        Raises Refused (E0505) if it was written with others, and for slices.
        """
        if spread is not None and schedule.slices > 1:
            message = f"schedule `{schedule.name}` cannot have slices yet where all ranks share an axis"
            raise refuse("E0505", message, help="cut the batch alone: `over = batch`, without `slices`")
        if schedule.spread not in (None, spread):
            shared = "other parts" if spread else "nothing"
            message = f"`{schedule.name}` has passes over what all ranks share, and this pipeline shares {shared}"
            help = "`shard vocab -> pipe` shares the vocabulary; without a program, --times S=…,T=… do"
            raise refuse("E0505", message, help=help)
        if spread is None or schedule.spread == spread:
            return schedule
        passes = self.passes(schedule.ranks, schedule.microbatches) if self.passes else None
        return with_spread(schedule, spread, seconds, self.slack, passes)

    @property
    def conditional(self) -> bool:
        """Whether its orders depend on costs."""
        return "conditions" in signature(self.order).parameters

    @property
    def own(self) -> tuple[str, ...]:
        """The names of its own arguments."""
        step = ("ranks", "conditions", *OF_THE_STEP)
        return tuple(each for each in signature(self.order).parameters if each not in step)


def whole_stage(stage: Times) -> float:
    """The bubble of schedules that idle for a stage's forward and full backward."""
    return stage.forward + stage.whole


# Every entry is a Generator.
SCHEDULES = cast("Registry[Generator]", builtins.SCHEDULES)
register = SCHEDULES.register


def size_of(call: spec.Call | None) -> tuple[int, int]:
    """The numbers of chunks and microbatches of a schedule call; 1 and 1 without one.

    Raises Refused (E0506) for a file that is not a schedule.
    """
    if call is None:
        return 1, 1
    generator = SCHEDULES[call.name]
    if generator.written is not None:
        schedule = generator.written(call)
        return schedule.own_chunks, schedule.microbatches // schedule.slices
    chunks = generator.chunks or call.arguments.get("chunks") or 1
    return int(chunks), int(call.arguments["microbatches"])


def stage_ranks_of(call: spec.Call | None, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage of a schedule call's pipeline, if it has so many ranks. What is searched for may place
    them in several ways: for that, each stage is as if on a rank of its own.

    Raises Refused (E0506) for a file that is not a schedule.
    """
    generator = SCHEDULES[DEFAULT_SCHEDULE if call is None else call.name]
    written = generator.written(call).own_placement if call and generator.written else None
    placement = written or generator.placement(ranks, chunks)
    rank_of = ranks_of(placement)
    if generator.searched or len(rank_of) != ranks * chunks:
        return tuple(range(ranks * chunks))
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def one_microbatch(batch: str) -> spec.Schedule:
    """The schedule of a whole batch at once."""
    call = spec.Call(DEFAULT_SCHEDULE, {"microbatches": 1, "over": batch})
    return spec.Schedule(call.name, call)


def own_arguments(call: spec.Call) -> dict[str, Any]:
    """The given arguments of a call that are the schedule's own."""
    return {key: value for key, value in call.arguments.items() if key not in OF_THE_STEP and value is not None}
