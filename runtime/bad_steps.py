"""Bad steps: how they are detected, and whether a run continues past them.

A step is judged by its loss and gradient norm, after their sum over all ranks and before any update. All ranks have the
same bits of both and the same history, so they reach the same verdict without further communication. A step is bad if
either value is not finite or, with `spike`, exceeds the median of the good steps before it by more than `spike - 1`
times the median's magnitude: for positive values, if it is above `spike` times the median.

A bad step counts as a step, for the data and for the learning rate; only its update is dropped. `skip` leaves
parameters and optimizer state as they were. `rewind` restores them from the last checkpoint, which drops the updates of
all steps since then too. Adam's bias correction counts updates, not steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, sqrt
from statistics import median

from attrs import define, evolve, field, frozen

from partita.compiler.passes.update import SQUARE
from partita.dsl.spec import STOP, Call

# What a step is judged by.
LOSS, NORM = "loss", "gradient norm"
# Good steps needed before the median is used, unless the window is smaller.
MIN_WINDOW = 10


@frozen
class History:
    """The record of past steps; part of every checkpoint.

    `skipped` counts the steps whose updates were dropped, `rewinds` the returns to a checkpoint. `losses` and `norms`
    are those of the last good steps, recorded only with `spike`.
    """

    skipped: int = 0
    rewinds: int = 0
    losses: tuple[float, ...] = field(default=(), repr=False)
    norms: tuple[float, ...] = field(default=(), repr=False)


class BadStep(Exception):
    """A bad step that ends the run. It changed nothing. `figure` is what is wrong, `LOSS` or `NORM`; `help` suggests
    what to do.
    """

    def __init__(self, step: int, cause: str, help: str, details: str = "", figure: str = LOSS) -> None:
        self.step, self.cause, self.help, self.details, self.figure = step, cause, help, details, figure
        super().__init__(f"{cause}{f'; {details}' if details else ''}\n  help: {help}")

    def with_details(self, details: str) -> BadStep:
        """A copy with details of the cause."""
        return type(self)(self.step, self.cause, self.help, details, self.figure)


class NotFinite(BadStep):
    """A training step whose loss or gradient norm is not finite."""


@define(eq=False)
class BadStepPolicy:
    """Judges the steps of a run in order, by `train.on_bad_step`. By default a bad step ends the run.

    `bad` says what is wrong with the last step judged; empty if it was good. `others`: the file may ask for another
    policy than to stop.
    """

    policy: Call = STOP
    history: History = field(factory=History)
    others: bool = True
    bad: str = field(default="", init=False)

    def updates(self, step: int) -> int:
        """The number of a step's update, from 1."""
        return step - self.history.skipped

    @property
    def rewinds(self) -> bool:
        """Whether a bad step sends the run back to a checkpoint."""
        return self.policy.name == "rewind"

    @property
    def stops(self) -> bool:
        """Whether any bad step ends the run."""
        return self.policy.name == "stop"

    def fault(self, step: int, statistics: Mapping[str, float]) -> str:
        """What is wrong with a step, if anything. Nothing is recorded."""
        return self._found(step, *_figures(statistics))[1]

    def _found(self, step: int, loss: float, norm: float) -> tuple[str, str]:
        """Which figure is wrong, and what is wrong with it; empty if nothing is."""
        finite = isfinite(loss) and isfinite(norm)
        return self._spike(step, loss, norm) if finite else _not_finite(step, loss, norm)

    def accepts(self, step: int, statistics: Mapping[str, float]) -> bool:
        """Whether a step may update the parameters. Raises BadStep if the run must end."""
        loss, norm = _figures(statistics)
        figure, self.bad = self._found(step, loss, norm)
        if not self.bad:
            self._remember(loss, norm)
            return True
        left, tally = self._allowed()
        if not left:
            kind = BadStep if isfinite(loss) and isfinite(norm) else NotFinite
            raise kind(step, f"{self.bad}{tally}", self._help(), figure=figure)
        self.history = evolve(self.history, skipped=self.history.skipped + 1)
        return False

    def rewound(self, step: int, to: int, saved: History) -> None:
        """Record that after bad step `step` the state was restored to that after step `to`, with history `saved`."""
        skipped, rewinds = saved.skipped + step - to, self.history.rewinds + 1
        self.history = evolve(saved, skipped=skipped, rewinds=rewinds)

    def _allowed(self) -> tuple[bool, str]:
        """Whether the run may pass another bad step, and in words how many it has passed."""
        if self.stops:
            return False, ""
        limit = int(self.policy.arguments["at_most"])
        passed = self.history.rewinds if self.rewinds else self.history.skipped
        what = "rewinding {}" if self.rewinds else "skipping {}"
        times = (f"{passed} times" if passed > 1 else "once") if self.rewinds else f"{passed} step{'s' * (passed > 1)}"
        return passed < limit, f", after {what.format(times)} (`at_most = {limit}`)"

    def _help(self) -> str:
        if self.stops and self.others:
            return "`on_bad_step = skip` in the train block skips such steps, up to 10 of them"
        more = "" if self.stops else ", or raise `at_most`,"
        return f"look for the cause in the data and the learning rate{more} and restart"

    def _spike(self, step: int, loss: float, norm: float) -> tuple[str, str]:
        """Which figure is too far above its median; empty if none is."""
        spike, window = self.policy.arguments["spike"], int(self.policy.arguments["window"])
        if spike is None or len(self.history.losses) < min(MIN_WINDOW, window):
            return "", ""
        for what, value, past in ((LOSS, loss, self.history.losses), (NORM, norm, self.history.norms)):
            middle = median(past[-window:])
            if middle and value - middle > (spike - 1) * abs(middle):
                usual = f"{middle:.4g}, the median of the {len(past[-window:])} good steps before it"
                return what, f"the {what} of step {step} is {value:.4g}, a spike above {usual} (`spike = {spike:g}`)"
        return "", ""

    def _remember(self, loss: float, norm: float) -> None:
        if self.policy.arguments["spike"] is None:
            return
        first = -int(self.policy.arguments["window"])
        losses, norms = (*self.history.losses, loss)[first:], (*self.history.norms, norm)[first:]
        self.history = evolve(self.history, losses=losses, norms=norms)


def _figures(statistics: Mapping[str, float]) -> tuple[float, float]:
    """The loss and the gradient norm of a step."""
    squares = [value for name, value in statistics.items() if name.startswith(SQUARE)]
    norm = sqrt(sum(squares)) if all(map(isfinite, squares)) else sum(squares)
    return statistics.get("loss", 0.0), norm


def _not_finite(step: int, loss: float, norm: float) -> tuple[str, str]:
    wrong = {name: value for name, value in ((LOSS, loss), (NORM, norm)) if not isfinite(value)}
    kind = "nan" if any(value != value for value in wrong.values()) else "infinite"
    what = next(iter(wrong))
    return what, f"the {what} of step {step} is {kind}"
