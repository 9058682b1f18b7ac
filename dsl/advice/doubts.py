"""What is allowed and most likely not meant: warnings of the front end about a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from partita.dsl import spec
from partita.dsl.advice.report import Report
from partita.dsl.check.divisibility import batch_axis_parameters
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.functions.signatures import LIKELIHOODS
from partita.dsl.syntax.source import Span

Producers: TypeAlias = Mapping[spec.Operand, spec.Step]

# Functions that compare the elements of scores along an axis.
COMPARING = frozenset(("softmax", "log_softmax", "logsumexp", *LIKELIHOODS))
# Functions through which scores remain scores.
PASSING = frozenset(
    ("add", "subtract", "multiply", "divide", "negate", "where", "maximum", "minimum", "cast", "tanh", "exp", "power")
)
# Functions through which a parameter remains one.
SHAPING = frozenset(("rename", "split", "merge", "slice", "cast", "expand", "negate"))


def report_doubts(file: spec.Spec, report: Report) -> None:
    """Report warnings about the chosen model: W0315, W0316, W0317."""
    if file.model is None:
        return
    rows = batch_axis_parameters(file, "W0315", "each row of a batch has a parameter of its own")
    for diagnostic in (*rows, *_own_scores(file.model), *_normalized_twice(file.model)):
        report.add(diagnostic)


def _own_scores(model: spec.Model) -> Iterator[Diagnostic]:
    """W0316: a softmax over an axis of scores that two values have in common, so that each position was multiplied with
    itself only.
    """
    seen: set[Span] = set()
    loops = (step for step in spec.steps(model.answering) if isinstance(step, spec.Repeat | spec.Scan))
    carried = {id(inner): len(loop.carried) for loop in loops for inner in spec.inner_bodies(loop)}
    for body in spec.bodies(model.answering):
        producers, inputs = _made(body), len(body.inputs)
        captured = range(carried.get(id(body), inputs), inputs)
        for step in body.steps:
            if not isinstance(step, spec.Apply) or step.function not in COMPARING:
                continue
            over = step.options["over"]
            axes = (over,) if isinstance(over, str) else over
            for product in _products(step.operands[0], producers):
                both = [
                    axis
                    for axis in axes
                    if axis not in product.options["over"]
                    and all(
                        isinstance(each, int)
                        and body.types[each].has(axis)
                        and not _is_parameter(each, producers, captured)
                        for each in product.operands
                    )
                ]
                if both and product.span not in seen:
                    seen.add(product.span)
                    message = f"both operands have the axis `{both[0]}`: each position is multiplied with itself only"
                    note = f"`{step.span.text}` compares them along `{both[0]}`   ({step.span.place})"
                    help = f"rename it in one of them, `rename(k, {both[0]} -> keys)`, and compare over `keys`"
                    yield Diagnostic("W0316", message, product.span, (note,), help)


def _normalized_twice(model: spec.Model) -> Iterator[Diagnostic]:
    """W0317: a loss of what a softmax gives, which takes the softmax of it again."""
    seen: set[Span] = set()
    for body in spec.bodies(model.answering):
        producers = _made(body)
        for step in body.steps:
            if not isinstance(step, spec.Apply) or step.function not in LIKELIHOODS:
                continue
            producer = producers.get(_unshaped(step.operands[0], producers))
            if isinstance(producer, spec.Apply) and producer.function == "softmax" and step.span not in seen:
                seen.add(step.span)
                note = f"`{producer.span.text}` gives probabilities   ({producer.span.place})"
                help = "give it what the softmax takes; the softmax may be an `output`"
                message = f"`{step.function}` takes logits, and computes their softmax itself"
                yield Diagnostic("W0317", message, step.span, (note,), help)


def _made(body: spec.Body) -> Producers:
    """The step of each value that the steps of a body make."""
    steps = (step for step in body.steps for _ in range(spec.result_count(step)))
    return dict(enumerate(steps, len(body.inputs)))


def _products(value: spec.Operand, producers: Producers) -> Iterator[spec.Apply]:
    """The products of which scores consist, in the same body."""
    stack, seen = [value], set[spec.Operand]()
    while stack:
        each = stack.pop()
        step = producers.get(each)
        if not isinstance(step, spec.Apply) or each in seen:
            continue
        seen.add(each)
        if step.function == "dot":
            yield step
        elif step.function in PASSING:
            stack += step.operands[1:] if step.function == "where" else step.operands


def _unshaped(value: spec.Operand, producers: Producers) -> spec.Operand:
    """What a value is before it is given another shape or dtype."""
    while isinstance(step := producers.get(value), spec.Apply) and step.function in SHAPING:
        value = step.operands[0]
    return value


def _is_parameter(value: int, producers: Producers, captured: range) -> bool:
    """Whether a value is a parameter or buffer, perhaps in another shape, or captured, and so may be one."""
    whole = _unshaped(value, producers)
    return isinstance(producers.get(whole), spec.Parameter) or whole in captured
