"""What a file's training means: data, initial values, steps of an optimizer, evaluations.

As the language reference says it; on one device, over the whole batch, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import cos, isfinite, pi, prod
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from partita.dsl import spec
from tests.reference import drawn
from tests.reference.cautious import Cautious
from tests.reference.reading import Reader, Reading, forwards, scopes
from tests.reference.updates import UPDATES, State, rule_of

Batch = dict[str, Tensor]


@frozen
class Done:
    """A step. `skipped`: so many updates up to this one are left out."""

    loss: float
    norm: float
    rate: float
    metrics: Mapping[str, float]
    skipped: int = 0


@frozen
class Evaluated:
    """An evaluation, after a step."""

    step: int
    loss: float
    metrics: Mapping[str, float]


CLOSE, NOISE = 1e-9, 1e-12  # of a judgement that rounding may turn round: to the bound, and of what is but rounding


class Boundless(Exception):
    """Nothing says what a random integer must be below."""


class Ended(Exception):
    """The run has ended at a bad step."""


class Training:
    """A file's training. `steps`, `evaluations`, `gradients` (of the last step) and `parameters` are what came of it.

    `root` is the folder of the file. `nudge`: parameters and floats of the data differ by about so much of themselves.
    `apart`: the model needs a whole batch at once, and is evaluated batch by batch.
    """

    def __init__(self, given: spec.Spec, root: Path, nudge: float = 0.0, apart: bool = False) -> None:
        assert given.model is not None
        assert given.train is not None
        self.model, self.train, self.root, self.nudge = given.model, given.train, root, nudge
        self.apart = apart
        schedule = given.schedule.call.arguments if given.schedule else {}
        self.batch_axis = schedule.get("over", "batch")
        self.steps: list[Done] = []
        self.evaluations: list[Evaluated] = []
        self.gradients: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}  # of the first batch, by the parameters at the end
        self.states: dict[str, State] = {}
        self.sums: dict[str, Tensor] = {}  # of a parameter after each update, weighted by age
        self.good: list[tuple[float, float]] = []
        self.skipped = 0
        self.largest = 0.0  # of all values of training steps
        self.doubtful: int | None = None  # the first step that rounding may make a bad or a good one
        types = dict(zip(self.model.body.inputs, self.model.body.types, strict=False))
        zeros = {name: self._typed(np.zeros(type.shape), type) for name, type in types.items()}
        self.functions = forwards(self.model)
        walk = Reader(self.model, zeros, {}, functions=self.functions)
        walk.run()
        self.inputs = {name: walk.readings.pop(name) for name in types}
        self.readings = walk.readings
        self.parameters = {path: self._initial(path, nudge) for path in self.readings}
        self.rules = {
            path: rule_of(self.train.optimizer, path, reading, scopes(self.model.body, self.model.name))
            for path, reading in self.readings.items()
            if not reading.buffer
        }

    def _initial(self, path: str, nudge: float) -> Tensor:
        reading = self.readings[path]
        assert reading.initial is not None
        arguments = [float(value) for value in reading.initial.arguments.values()]
        source = reading.copied or path
        fans = self.readings[source].fans or _fans(reading.type.shape)
        value = drawn.initial(reading.initial.name, arguments, self.train.seed, source, reading.type.shape, fans)
        if reading.buffer:
            return _nudged(value, nudge) if reading.type.is_float else value.long()
        return _nudged(value, nudge).requires_grad_()

    def run(self) -> Training:
        """All steps and evaluations."""
        for number in range(1, self.train.steps + 1):
            self.step(number)
            every = self.train.eval
            if every is not None and (number % every.arguments["interval"] == 0 or number == self.train.steps):
                self.evaluate(number)
        walk = self.walk(self.batch(1), 0, training=False)
        compared = self.model.outputs and not self.model.operations
        self.outputs = walk.outputs() if compared else {}
        return self

    def walk(self, batch: Batch, step: int, parameters: Mapping[str, Tensor] | None = None, **options) -> Cautious:
        """The model of a batch, with the random numbers of a step."""
        given = self.parameters if parameters is None else parameters
        return Cautious(self.model, batch, given, self.train.seed, step, functions=self.functions, **options)

    # ------------------------------------------------------------ steps

    def step(self, number: int) -> None:
        walk = self.walk(self.batch(number), number)
        loss, metrics = walk.run()
        self.largest = max(self.largest, walk.largest)
        self.gradients = {}
        for path, rule in self.rules.items():
            if rule.call is not None:
                value, by = self.parameters[path], loss if rule.loss is None else walk.losses[rule.loss]
                found = torch.autograd.grad(by, value, retain_graph=True, allow_unused=True) if by.requires_grad else ()
                self.gradients[path] = next((each for each in found if each is not None), torch.zeros_like(value))
        norm = sum(float((gradient**2).sum()) for gradient in self.gradients.values()) ** 0.5
        numbers = {name: float(metric) for name, metric in metrics.items()}
        scale = 1.0 if self.train.clip is None else min(1.0, self.train.clip / (norm + 1e-6))
        rates = [rate_at(call.arguments["lr"], number) for call in self.train.optimizer.calls]
        if self.is_bad(float(loss.detach()), norm):
            self.skipped += 1
        else:
            self.good.append((float(loss.detach()), norm))
            with torch.no_grad():
                for path, value in walk.updates.items():
                    self.parameters[path].copy_(value)
                for path, gradient in self.gradients.items():
                    self.update(path, self.parameters[path], gradient * scale, rates, len(self.good))
                    if self.train.ema is not None:
                        older = self.sums.get(path, torch.zeros_like(gradient))
                        self.sums[path] = self.train.ema * older + self.parameters[path]
                if walk.after:
                    again = self.walk(self.batch(number), number)
                    again.run()
                    for path, value in again.after.items():
                        self.parameters[path].copy_(value)
        self.steps.append(Done(float(loss.detach()), norm, rates[0], numbers, self.skipped))

    def is_bad(self, loss: float, norm: float) -> bool:
        """Whether a step's update is left out."""
        policy = self.train.on_bad_step
        bad = not (isfinite(loss) and isfinite(norm))
        spike, window = policy.arguments["spike"], policy.arguments["window"]
        if spike is not None and len(self.good) >= min(10, window):
            for value, before in zip((loss, norm), zip(*self.good[-window:], strict=True), strict=True):
                ordered = sorted(before)
                middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
                bad = bad or (middle != 0 and value - middle > (spike - 1) * abs(middle))
                size = max(abs(value), abs(middle))
                close = abs(value - middle - (spike - 1) * abs(middle)) <= CLOSE * size
                if self.doubtful is None and (close or 0 < size < NOISE):
                    self.doubtful = len(self.steps) + 1
        if bad and (policy.name != "skip" or self.skipped == policy.arguments["at_most"]):
            raise Ended
        return bad

    def update(self, path: str, value: Tensor, gradient: Tensor, rates: Sequence[float], number: int) -> None:
        """One parameter's update, of so many."""
        rule, reading = self.rules[path], self.readings[path]
        assert rule.call is not None
        o = rule.call.arguments
        number, left = divmod(number - o["from"], o["every"])
        if left or number < 0:
            return
        decay = o["weight_decay"] if reading.decays or o["decay"] == "all" else 0.0
        state = self.states.setdefault(path, State(reading, decay))
        UPDATES[rule.call.name](
            state, o, value, gradient, rates[self.train.optimizer.calls.index(rule.call)], number + 1
        )

    @property
    def means(self) -> dict[str, Tensor]:
        """What `ema` keeps: by the weights of all values, or the initial ones if there are no others."""
        if self.train.ema is None:
            return {}
        whole = sum(self.train.ema**age for age in range(len(self.good)))
        trained = [path for path, rule in self.rules.items() if rule.call is not None]
        return {path: self.sums[path] / whole if whole else self.parameters[path].detach() for path in trained}

    def evaluate(self, number: int) -> None:
        """The figures of the whole set: as of one batch that has all rows, or the means of those of the batches."""
        assert self.train.eval is not None
        count = self.train.eval.arguments["batches"]
        parts = [self.held_out(index) for index in range(count)]
        if self.apart:
            figures = [self._evaluated(part, -index, {}) for index, part in enumerate(parts)]
            loss = sum(loss for loss, _ in figures) / count
            means = {name: sum(numbers[name] for _, numbers in figures) / count for name in figures[0][1]}
            self.evaluations.append(Evaluated(number, loss, means))
            return
        whole, sizes = {}, {}
        for name, reading in self.inputs.items():
            whole[name] = parts[0][name]
            if reading.type.has(self.batch_axis):
                position = reading.type.position(self.batch_axis)
                whole[name] = torch.cat([part[name] for part in parts], position)
        for reading in self.inputs.values():
            if reading.type.has(self.batch_axis):
                sizes[self.batch_axis] = count * reading.type.axis(self.batch_axis).size
        self.evaluations.append(Evaluated(number, *self._evaluated(whole, 0, sizes)))

    def _evaluated(self, batch: Batch, step: int, sizes: Mapping[str, int]) -> tuple[float, dict[str, float]]:
        """Loss and metrics of a batch, with the random numbers of a step, where some axes have other sizes."""
        assert self.train.eval is not None
        parameters = {**self.parameters, **(self.means if self.train.eval.arguments["weights"] == "ema" else {})}
        walk = self.walk(batch, step, parameters, training=False, sizes=sizes)
        loss, metrics = walk.run()
        return float(loss.detach()), {name: float(metric) for name, metric in metrics.items()}

    # ------------------------------------------------------------ data

    def batch(self, step: int) -> Batch:
        """The batch of a training step."""
        return self._read(step, None)

    def held_out(self, index: int) -> Batch:
        """A batch of the evaluation."""
        return self._read(None, index)

    def _read(self, step: int | None, index: int | None) -> Batch:
        data = self.train.data
        source = {
            "random": self._random,
            "arrays": self._arrays,
            "text": self._windows,
            "tokens": self._windows,
        }[data.name]
        batch = {}
        for name, reading in self.inputs.items():
            value = self._typed(source(name, reading, step, index), reading.type)
            batch[name] = _nudged(value, self.nudge) if reading.type.is_float else value
        return batch

    @staticmethod
    def _typed(array: np.ndarray, type: spec.Type) -> Tensor:
        dtype = torch.float64 if type.is_float else torch.bool if type.dtype == "bool" else torch.int64
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)

    def _random(self, name: str, reading: Reading, step: int | None, index: int | None) -> np.ndarray:
        purpose, number = ("batch", step) if step is not None else ("holdout", index)
        assert number is not None
        word = drawn.words(self.train.seed, purpose, number, name, prod(reading.type.shape))
        if reading.type.is_float:
            return drawn.normal(word).reshape(reading.type.shape)
        if reading.type.dtype != "bool" and not reading.limits:
            raise Boundless(name)
        limit = 2 if reading.type.dtype == "bool" else min(reading.limits)
        return drawn.integers(word, limit).reshape(reading.type.shape)

    def _arrays(self, name: str, reading: Reading, step: int | None, index: int | None) -> np.ndarray:
        array = np.load(self.root / self.train.data.arguments["path"])[name]
        if not reading.type.has(self.batch_axis):
            return array
        rows = reading.type.axis(self.batch_axis).size
        held = round(len(array) * self.train.data.arguments["holdout"])
        training = len(array) - held
        chosen = []
        for row in range(rows):
            if step is not None:
                epoch, place = divmod((step - 1) * rows + row, training)
                order = np.argsort(drawn.words(self.train.seed, "epoch", epoch, "", training), kind="stable")
                chosen.append(order[place])
            else:
                assert index is not None
                chosen.append(training + (index * rows + row) % held)
        return np.moveaxis(array[chosen], 0, reading.type.position(self.batch_axis))

    def _windows(self, name: str, reading: Reading, step: int | None, index: int | None) -> np.ndarray:
        arguments = self.train.data.arguments
        if self.train.data.name == "text":
            paths = sorted(self.root.glob(arguments["glob"]))
            ids = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8).astype(np.int64)
        else:
            dtype = {"u8": "u1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "i64": "<i8"}[arguments["dtype"]]
            ids = np.fromfile(self.root / arguments["path"], dtype).astype(np.int64)
        held = round(len(ids) * arguments["holdout"])
        ids = ids[: len(ids) - held] if step is not None else ids[len(ids) - held :]
        rows = reading.type.axis(self.batch_axis).size
        length = reading.type.elements // rows
        choices = len(ids) - length
        if step is not None:
            words = [int(word) for word in drawn.words(self.train.seed, "windows", step, "", rows)]
        else:
            assert index is not None
            words = [(index * rows + row) * 0x9E3779B97F4A7C15 % 2**64 for row in range(rows)]
        ahead = {"tokens": 0, "targets": 1}[name]
        starts = [(word * choices >> 64) + ahead for word in words]
        windows = np.stack([ids[start : start + length] for start in starts])
        return windows if reading.type.position(self.batch_axis) == 0 else windows.T


def _nudged(value: Tensor, nudge: float) -> Tensor:
    """Every element up or down, by different amounts."""
    return value + nudge * (torch.arange(value.numel()).view(value.shape) % 6 - 2.5) * value.abs().clamp(min=0.1)


def _fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Those of a parameter that no `dot` reads."""
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def rate_at(call: spec.Call, step: int) -> float:
    """The learning rate of a step, from 1."""
    o = call.arguments
    if call.name == "constant":
        return o["value"]
    peak, warmup, floor = o["peak"], o["warmup"], o["floor"]
    if step < warmup:
        return peak * step / warmup
    if call.name == "inverse_sqrt":
        return max(floor, peak * warmup**0.5 / step**0.5)
    if call.name == "stepwise":
        for _ in range(warmup + o["every"], step, o["every"]):
            peak *= o["factor"]
        return max(floor, peak)
    last = o["total"]
    first = max(warmup, last - o["decay"]) if call.name == "wsd" else warmup
    share = 1.0 if step >= last else max(0.0, (step - first) / (last - first))
    fall = (1 + cos(pi * share)) / 2 if call.name == "cosine" else 1 - share
    return floor + (peak - floor) * fall


def figures(training: Training) -> Iterator[tuple[str, Tensor, float]]:
    """All that is compared: what it is, its value, and the unit of its tolerance."""
    for number, done in enumerate(training.steps, 1):
        yield f"loss of step {number}", torch.tensor(done.loss, dtype=torch.float64), 1.0
        yield f"norm of step {number}", torch.tensor(done.norm, dtype=torch.float64), 1.0
        yield f"rate of step {number}", torch.tensor(done.rate, dtype=torch.float64), 1.0
        yield f"left out up to step {number}", torch.tensor(float(done.skipped), dtype=torch.float64), 1.0
        for name, value in done.metrics.items():
            yield f"metric {name} of step {number}", torch.tensor(value, dtype=torch.float64), 1.0
    for each in training.evaluations:
        yield f"loss of the evaluation after {each.step}", torch.tensor(each.loss, dtype=torch.float64), 1.0
        for name, value in each.metrics.items():
            yield f"metric {name} of the evaluation after {each.step}", torch.tensor(value, dtype=torch.float64), 1.0
    unit = training.steps[-1].norm
    # Where a product of zero and what is no number is left out, the zero stays.
    for path, gradient in training.gradients.items() if isfinite(unit) else ():
        yield f"gradient of {path} in the last step", gradient, unit
    for path, value in training.parameters.items():
        yield f"parameter {path} at the end", value.detach(), 1.0
    for path, value in training.means.items():
        yield f"mean of {path} at the end", value, 1.0
    for name, value in training.outputs.items():
        yield f"output {name}", value, 1.0
