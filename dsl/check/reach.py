"""Which parameters the loss depends on: one that does not reach it could not be trained, and is a mistake.

Liveness propagates backward from the loss through every step, but not through what has no gradient: integers, booleans,
`accuracy` and `stop_gradient`; nor through what only evaluation computes, by `where(training(), a, b)`. A parameter of
a block or repeat reaches the loss if it does in any call or iteration.

A frozen parameter needs no gradient, only to be used: by the loss, a metric, an output, or the update of a buffer.
Which rule of an optimizer a parameter has is known once the model is compiled: what a `freeze` may name is left to the
compiler, which refuses what is trained without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

from partita.dsl import spec
from partita.dsl.advice.report import Report
from partita.dsl.check.optimizers import CLASSES
from partita.dsl.syntax import tree

# Functions from floats to floats that have no gradient.
NO_GRADIENT = ("stop_gradient", "accuracy")
MOST_SHOWN = 3


def report_unreached(model: spec.Model, freezing: Iterable[tree.Optimizer | tree.Adapters], report: Report) -> None:
    """Report every parameter that the loss does not depend on (E0408), at its declaration; with a gradient, unless one
    of the optimizers and adapters may freeze it.
    """
    reach = _Reach()
    reach.body(model.body, frozenset([model.loss]), model.name)
    lost = [(step, path) for step, path in reach.met.values() if id(step) not in reach.reached]
    if not lost:
        return
    through = _Reach(stops=False)
    through.body(model.body, frozenset([model.loss]), model.name)
    used = _used(model)
    rules = [rule for each in freezing for rule in each.rules if isinstance(rule, tree.FreezeRule)]
    targets = [target for rule in rules for target in rule.targets]
    for step, path in lost:
        if id(step) in used and any(_may_name(target, step.name, path) for target in targets):
            continue
        notes = [f"its full name is {path}.{step.name}"]
        message, help = f"parameter `{step.name}` does not reach the loss", "use it, or remove it"
        if id(step) in through.reached:
            message = f"parameter `{step.name}` reaches the loss only through operations without a gradient"
            stopping = sorted(through.stopping.values(), key=lambda each: each.span.start)
            notes += [f"`{each.span.text}`   ({each.span.place})" for each in stopping[:MOST_SHOWN]]
            help = f"to freeze it, let the gradient flow, and write `freeze {step.name}` in an `optimizer`"
        elif id(step) in used:
            help = f"use it for the loss; or write `freeze {step.name}` in an `optimizer`, if nothing is to train it"
        report.error("E0408", message, step.span, notes, help)


def _used(model: spec.Model) -> set[int]:
    """The parameters that anything reads, in training or evaluation."""
    used: set[int] = set()
    for training in (True, False):
        walk = _Reach(stops=False, training=training, floats=False, updates=True)
        roots = [model.loss, *(value for _, value in (*model.metrics, *model.outputs))]
        walk.body(model.answering, frozenset(roots), model.name)
        used |= walk.reached
    return used


def inputs_of_output(model: spec.Model, output: str) -> tuple[str, ...]:
    """The inputs of a model that an output depends on, outside of training."""
    body = model.answering
    needed = _Reach(stops=False, training=False, floats=False).body(
        body, frozenset([dict(model.outputs)[output]]), model.name
    )
    return tuple(name for number, name in enumerate(body.inputs) if number in needed)


def _may_name(target: tree.Path, name: str, path: str) -> bool:
    """Whether a target may be a parameter with a name, at a path of blocks and repeats, some of them numbered calls."""
    last = target.parts[-1].text
    around = (part for scope in path.split(".") for part in (scope, scope.rpartition("_")[0]))
    return str(target) in CLASSES or last == name or last in around


class _Reach:
    """Walks bodies backward, once for each set of values needed from them.

    `stopping` collects the operations without a gradient; unless `stops`, the walk passes through them. It follows what
    a value is computed from in training or not, by its `floats` or by all; and with `updates`, those of buffers too.
    """

    def __init__(self, stops: bool = True, training: bool = True, floats: bool = True, updates: bool = False) -> None:
        self.stops = stops
        self.training = training
        self.floats = floats
        self.updates = updates
        self.stopping: dict[int, spec.Apply] = {}
        self.met: dict[int, tuple[spec.Parameter, str]] = {}
        self.reached: set[int] = set()
        self.known: dict[tuple[int, frozenset[int]], frozenset[int]] = {}
        self.known_modes: dict[int, dict[spec.Operand, bool]] = {}

    def body(self, body: spec.Body, roots: frozenset[int], path: str) -> frozenset[int]:
        """The inputs of a body that the wanted values depend on."""
        key = (id(body), roots)
        if key not in self.known:
            live, first = set(roots), len(body.types)
            live |= {each.value for each in body.updates} if self.updates else set()
            for step in reversed(body.steps):
                count = spec.result_count(step)
                first -= count
                results = [i for i in range(count) if first + i in live]
                needed = self.step(step, results, path)
                if isinstance(step, spec.Apply) and step.function == "where" and step.operands[0] in self.modes(body):
                    chosen = step.operands[1 if self.modes(body)[step.operands[0]] else 2]
                    needed = [v for v in needed if v == chosen]
                live.update(v for v in needed if body.types[v].is_float or not self.floats)
            self.known[key] = frozenset(v for v in live if v < len(body.inputs))
        return self.known[key]

    def modes(self, body: spec.Body) -> dict[spec.Operand, bool]:
        """The values of a body that are `training()` or not that, as they are in this walk."""
        if id(body) not in self.known_modes:
            modes: dict[spec.Operand, bool] = {}
            number = len(body.inputs)
            for step in body.steps:
                if isinstance(step, spec.Apply) and step.function == "training":
                    modes[number] = self.training
                elif isinstance(step, spec.Apply) and step.function == "logical_not" and step.operands[0] in modes:
                    modes[number] = not modes[step.operands[0]]
                number += spec.result_count(step)
            self.known_modes[id(body)] = modes
        return self.known_modes[id(body)]

    def step(self, step: spec.Step, results: list[int], path: str) -> list[int]:
        """The values that the given results of a step depend on."""
        match step:
            case spec.Parameter(buffer=True):
                return []
            case spec.Parameter():
                self.met.setdefault(id(step), (step, path))
                if results:
                    self.reached.add(id(step))
                return []
            case spec.SharedParameter():
                if results:
                    self.reached.add(id(step.parameter))
                return []
            case spec.Apply():
                flows = bool(results)
                if flows and step.function in NO_GRADIENT:
                    flows = not self.stops
                    self.stopping[id(step)] = step
                return _values(step.operands if flows else ())
            case spec.CallBlock():
                roots = _chosen(step.body.results, results)
                inputs = self.body(step.body, roots, f"{path}.{step.scope}")
            case spec.Repeat():
                inputs = self.turns(step, set(results), f"{path}.{step.scope}")
            case spec.Scan():
                inputs = self.positions(step, frozenset(results), path)
            case _:
                return []
        return _values(operand for i, operand in enumerate(spec.operands_of(step)) if i in inputs)

    def positions(self, step: spec.Scan, results: frozenset[int], path: str) -> frozenset[int]:
        """The inputs of a scan that are needed: every position is wanted, and so is what leads to it."""
        while True:
            inputs = self.body(step.body, _chosen(step.body.results, results), path)
            more = results | {i for i in inputs if i < len(step.carried)}
            if more == results:
                return inputs
            results = more

    def turns(self, step: spec.Repeat, carried: set[int], path: str) -> frozenset[int]:
        """The inputs of a repeat that are needed.

        Each iteration takes its carried values from the one before it, the first one from the inputs. The sets of
        needed values become periodic, so the walk ends however large the count is.
        """
        width, results = len(step.carried), frozenset(i for i in carried if i < len(step.carried))
        if step.kept or len(step.bodies) > 1:
            needed: list[frozenset[int]] = []  # by iteration, last one first
            for number in reversed(range(step.count)):
                kept = {width + k for k in range(len(step.kept)) if width + k * step.count + number in carried}
                body = step.iteration(number)
                inputs = self.body(body, _chosen(body.results, [*results, *kept]), path)
                needed.append(inputs)
                results = frozenset(i for i in inputs if i < width)
            return frozenset(i for inputs in needed for i in inputs if i >= width) | results
        seen: dict[frozenset[int], int] = {}
        needed = []
        while results not in seen and len(needed) < step.count:
            seen[results] = len(needed)
            inputs = self.body(step.body, _chosen(step.body.results, results), path)
            needed.append(inputs)
            results = frozenset(i for i in inputs if i < len(step.carried))
        first = step.count - 1
        if first >= len(needed):
            start = seen[results]
            first = start + (first - start) % (len(needed) - start)
        captured = frozenset(i for inputs in needed for i in inputs if i >= len(step.carried))
        return captured | frozenset(i for i in needed[first] if i < len(step.carried))


def _values(operands: Iterable[spec.Operand]) -> list[int]:
    return [operand for operand in operands if isinstance(operand, int)]


def _chosen(results: tuple[spec.Operand, ...], positions: Iterable[int]) -> frozenset[int]:
    return frozenset(_values(results[i] for i in positions))
