"""What a schedule is besides its orders, and all of them by name.

A schedule is one module: the function that makes its orders, and a `Generator`, which is registered when the module is
imported and says what is known of it without making it. What the function returns is held to the laws
(`partita.compiler.laws`), whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, Literal, Protocol, cast

from attrs import frozen

from partita.compiler.schedules.schedule import Schedule, loop_placement
from partita.dsl import builtins
from partita.dsl.builtins import Signature
from partita.dsl.registry import Registry
from partita.dsl.spec import Call

# Arguments that say what a step is; what is left is the schedule's own.
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
    """A pipeline that shrinks: its ranks before, and its ranks and chunks after that."""

    before: int
    ranks: int
    chunks: int


@frozen(kw_only=True, eq=False)
class Generator(Signature):
    """A schedule: how files call it, how it is made, and what is known of it.

    `order` takes `ranks`, `microbatches`, `chunks` if it can have any number of stages on a rank, `conditions` (costs
    and memory) if it looks at them, and arguments of its own by name; it returns a `Schedule` with its stated bound of
    live activations, and raises ValueError for arguments that it cannot serve.

    Closed forms, of P ranks, V chunks and M microbatches, None where only the orders tell:

    - `chunks`: the stages on each rank, None where a call says how many; `placement`: where stages stand.
    - `split`: whether B and W are actions of their own.
    - `live`: the live activations of each rank, in stages, of P, V and M; its bound, with the arguments' defaults.
    - `lag`: the most W, in stages, that a rank puts off, of P.
    - `bubble`: for how long each of P−1 ranks idles where stages are alike, transfers free and microbatches many.

    For `plan`, which predicts it without compiling:

    - `representative`: of how many of M microbatches a timeline tells that of all, of P and M; each further one takes
      the busiest rank's time.
    - `planned`: with how many chunks it is considered, of P, the turns to cut between and M; not at all unless given.

    For `auto`: in its `role`, it is compared as it is, or its warm-up and lag are varied. `bounded`: it is made within
    the memory of its conditions.

    Of calls: `written` is the schedule that one holds as it is, whose sizes nothing else says; `proxy` the call for the
    small copy that `verify` runs, and `fewest` the microbatches that it needs to be what it is. `legal` are values of
    its own arguments for P and V, for those who draw schedules.
    """

    order: Callable[..., Schedule]
    chunks: int | None = 1
    placement: Callable[[int, int], tuple[tuple[int, ...], ...]] = loop_placement
    split: bool = False
    live: Callable[[int, int, int], tuple[int, ...]] | None = None
    lag: Callable[[int], int] = lambda ranks: 0
    bubble: Callable[[Times], float] | None = None
    representative: Callable[[int, int], int] = lambda ranks, microbatches: min(microbatches, 3 * ranks)
    planned: Callable[[int, int, int], Iterable[int]] = lambda ranks, turns, microbatches: ()
    role: Literal["varied", "compared"] | None = None
    bounded: bool = False
    written: Callable[[Call], Schedule] | None = None
    proxy: Callable[[Call, Sizes], Call] = lambda call, sizes: call
    fewest: Callable[[Call], int] = lambda call: 0
    legal: Callable[[int, int], Mapping[str, Iterable[Any]]] = lambda ranks, chunks: {}

    @property
    def conditional(self) -> bool:
        """Whether its orders depend on costs."""
        return "conditions" in signature(self.order).parameters

    @property
    def own(self) -> tuple[str, ...]:
        """The arguments that are its own."""
        step = ("ranks", "conditions", *OF_THE_STEP)
        return tuple(each for each in signature(self.order).parameters if each not in step)


def whole_stage(stage: Times) -> float:
    """The bubble of schedules that idle for a stage's forward and whole backward."""
    return stage.forward + stage.whole


# What is registered there is a Generator.
SCHEDULES = cast("Registry[Generator]", builtins.SCHEDULES)
register = SCHEDULES.register


def size_of(call: Call | None) -> tuple[int, int]:
    """The chunks and the microbatches that a call of a schedule asks for; one and one without a schedule.

    Raises Refused (E0506) where it names a file that is no schedule.
    """
    if call is None:
        return 1, 1
    generator = SCHEDULES[call.name]
    if generator.written is not None:
        schedule = generator.written(call)
        return schedule.chunks, schedule.microbatches
    chunks = generator.chunks or call.arguments.get("chunks") or 1
    return int(chunks), int(call.arguments["microbatches"])


def own_arguments(call: Call) -> dict[str, Any]:
    """The arguments of a call that are the schedule's own, and given."""
    return {key: value for key, value in call.arguments.items() if key not in OF_THE_STEP and value is not None}
