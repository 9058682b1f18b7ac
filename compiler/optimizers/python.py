"""An optimizer of the file's own: a Python function that updates a parameter and its states in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partita.compiler.ops.op import Argument, op
from partita.compiler.ops.optimizer import Update
from partita.compiler.optimizers.registry import Optimizer, Trained, register
from partita.dsl.config.builtins import DECAY, INDEX, LR, WEIGHT_DECAY, Setting, Text, TextFile
from partita.dsl.spec import PythonFunction, Train
from partita.dsl.syntax.source import Source, Span
from partita.dsl.types import Type


@op("python_update")
class PythonUpdate(Update):
    """`function` of a Python file, which updates each element by itself, with so many states for each."""

    function: str
    count: int
    decay: float
    elementwise = True
    leaves_zeros = False

    @property
    def states(self) -> tuple[str, ...]:  # type: ignore[override]
        """Numbered, from 1 on."""
        return tuple(f"state{number}" for number in range(1, self.count + 1))

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """The updated parameter and states."""
        return ("", *self.states)

    def capture_blocker(self, operands: Sequence[Type], results: Sequence[Type]) -> str:
        """Nobody knows."""
        return "is an optimizer of the file's own"

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """As many as Adam's."""
        return 12 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """An estimate: copies of all operands, and as much again."""
        return 2 * sum(type.bytes for type in operands)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A call through the context, in place."""
        parameter, gradient, *states = (argument.text for argument in arguments)
        listed = f"({', '.join(states)}{',' if len(states) == 1 else ''})"
        text = f"c.python_update({self.function!r}, {parameter}, {gradient}, {listed}, "
        return f"{text}{self.learning_rate}, {self.number}, {self.decay})"


def function_key(arguments: Mapping[str, Any]) -> str:
    """By what programs call the function that a rule names."""
    source: Source = arguments["file"]
    return f"{source.name}:{arguments['function']}"


register(
    Optimizer(
        "python",
        (
            Setting("file", TextFile()),
            Setting("function", Text()),
            LR,
            Setting("states", INDEX, 1),
            WEIGHT_DECAY,
            DECAY,
        ),
        example='python("lion.py", "update", lr = 1e-4)',
        update=lambda arguments, parameter: _update(arguments, parameter),
        scaled=True,
    )
)


def _update(arguments: Mapping[str, Any], parameter: Trained) -> PythonUpdate:
    return PythonUpdate(function_key(arguments), int(arguments["states"]), parameter.decay)


def update_functions(train: Train | None) -> dict[str, PythonFunction]:
    """The Python functions by which rules of an optimizer update parameters, by what programs call them."""
    calls = [rule.call for rule in train.optimizer.rules if rule.call is not None] if train is not None else []
    return {
        function_key(call.arguments): PythonFunction(
            call.arguments["file"], call.arguments["function"], call.span or Span(call.arguments["file"], 0, 0)
        )
        for call in calls
        if call.name == "python"
    }
