"""What answers are worth: the Python function that `rollouts` names, called as `trl` calls such functions.

What goes wrong in it, or is wrong with what it returns, is a diagnostic (E0622) that names the answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from attrs import frozen

from partita.dsl.diagnostic import shown
from partita.dsl.spec import PythonFunction
from partita.runtime.data.prompts import Prompt
from partita.runtime.python_files import OperationFailed, guarded, imported, problem, require_functions

OWNER = "the reward of `rollouts`"
CALLED = (
    "it gets lists by name (`prompts`, `completions`, `completion_ids` and other fields of their lines), and returns a "
    "number for each"
)
MAX_SHOWN = 120  # characters of a prompt or an answer


@frozen(eq=False)
class Reward:
    """A Python function that scores answers: as `trl` calls it, by `prompts`, `completions`, `completion_ids` and the
    other fields of their lines, all of them lists.
    """

    function: PythonFunction
    run: Callable[..., Any]

    def __call__(self, prompts: Sequence[Prompt], texts: Sequence[Any], ids: Sequence[list[int]]) -> list[float]:
        """The reward of each answer. Raises OperationFailed (E0622), with the answer at which it failed."""
        try:
            with self._guarded():
                returned = self._called(prompts, texts, ids)
        except OperationFailed:
            for prompt, text, own in zip(prompts, texts, ids, strict=True):  # which of them it is
                with self._guarded(_at(prompt, text)):
                    self._called([prompt], [text], [own])
            raise
        try:
            rewards = [None if each is None else float(each) for each in returned]
        except (TypeError, ValueError):
            raise self._wrong(f"`{self.function.name}` returned {_short(returned)}, not a list of numbers") from None
        if len(rewards) != len(prompts):
            raise self._wrong(f"`{self.function.name}` returned {len(rewards)} numbers for {len(prompts)} answers")
        found: list[float] = []
        for reward, prompt, text in zip(rewards, prompts, texts, strict=True):
            if reward is None or not isfinite(reward):
                raise self._wrong(f"`{self.function.name}` returned {reward}, which is no reward", _at(prompt, text))
            found.append(reward)
        return found

    def _called(self, prompts: Sequence[Prompt], texts: Sequence[Any], ids: Sequence[list[int]]) -> Any:
        names = dict.fromkeys(name for each in prompts for name in each.fields)
        arguments: dict[str, Any] = {name: [each.fields.get(name) for each in prompts] for name in names}
        arguments |= {
            "prompts": [each.shown for each in prompts],
            "completions": list(texts),
            "completion_ids": list(ids),
        }
        parameters = inspect.signature(self.run).parameters.values()
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            arguments = {name: value for name, value in arguments.items() if name in {each.name for each in parameters}}
        return self.run(**arguments)

    def _guarded(self, notes: Sequence[str] = ()) -> Any:
        return guarded(OWNER, self.function, CALLED, notes)

    def _wrong(self, message: str, notes: Sequence[str] = ()) -> OperationFailed:
        return OperationFailed([problem("E0622", OWNER, self.function, message, notes, CALLED)])


def _at(prompt: Prompt, text: Any) -> list[str]:
    """Which answer it was, for messages."""
    return [
        f"for {prompt.where}",
        *(f"{name}: {_short(each)}" for name, each in (("prompt", prompt.shown), ("answer", text))),
    ]


def _short(value: Any) -> str:
    text = shown(value if isinstance(value, str) else repr(value))
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def check_allowed(function: PythonFunction, allowed: bool) -> None:
    """Refuse (E0620) a reward unless Python code is `allowed`."""
    require_functions({OWNER: function}, allowed)


def reward_of(function: PythonFunction) -> Reward:
    """The reward by a function, whose file is imported. Raises Refused (E0621)."""
    return Reward(function, imported(OWNER, function))
