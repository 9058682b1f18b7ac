"""Gradients of earlier steps, whose updates are still to come (`sync = delayed(k)`, `sync = paired()`).

The gradients of a step are reduced while the next k steps run, and waited for at the end of the last of these, whose
update uses them. The first k steps have none to wait for: their norm is zero, and nothing is updated.

For pairs, k is 1, and an update uses the mean of the gradients of two steps. Until the second gradient has arrived, the
update is estimated from the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import define, field, frozen

from partita.compiler.program import ESTIMATE, FIRST, Program, RankProgram
from partita.runtime.instructions import Coroutine
from partita.runtime.stages import ParameterStore, Stage, copy_of
from partita.runtime.transports.transport import Tensors


@define(eq=False)
class _Gradients:
    """The gradients of one step: the pending reductions, by stage, and the results so far."""

    reducing: dict[int, Coroutine]
    totals: dict[int, Tensors]

    def reduced(self) -> Coroutine:
        """Wait for all reductions."""
        for stage in tuple(self.reducing):
            self.totals[stage] = yield from self.reducing.pop(stage)


@define(eq=False)
class DelayedGradients:
    """The gradients that a rank keeps; without a delay, none. `ready`: the last totals are those of a step."""

    program: Program
    record: RankProgram
    stages: Mapping[int, Stage]
    ready: bool = True
    _kept: deque[_Gradients] = field(factory=deque, init=False)  # the oldest first

    def totals(self, reducing: dict[int, Coroutine]) -> Coroutine:
        """The totals for the end of the step that is computed, stage by stage: its sums, and the gradients of the step
        from which the update is delayed. Without a delay, also the gradients that reductions copy to the host.
        """
        own = _Gradients(reducing, {index: stage.accumulators for index, stage in self.stages.items()})
        self._kept.append(own)
        self.ready = len(self._kept) > self.program.delay
        delayed = self._kept.popleft() if self.ready else own
        yield from delayed.reduced()
        totals: list[torch.Tensor] = []
        offloaded: list[torch.Tensor] = []
        for index in self.record.stages:
            records = self.stages[index].record.accumulators
            gradients, on_host = delayed.totals[index][: len(records)], delayed.totals[index][len(records) :]
            offloaded += on_host
            totals += (
                current if each.parameter is None else gradient if self.ready else torch.zeros_like(gradient)
                for each, gradient, current in zip(records, gradients, self.stages[index].accumulators, strict=True)
            )
        return tuple(totals), tuple(offloaded)

    def estimates(self, step: int) -> bool:
        """Whether the totals at the end of a step are those of the first of a pair."""
        return self.program.paired and step > self.program.delay and (step - self.program.delay) % 2 == 1

    def completed(self, totals: Tensors, step: int, first_gradients: Mapping[str, torch.Tensor]) -> Tensors:
        """The totals, once tied ones are exchanged, with the mean of the gradients of a pair if they are those of its
        second step. Those of the first step are `first_gradients`, by the parameter's name, where the mean is computed.
        The mean is of whole gradients, so that it is bitwise the same after saving and loading them: the first stage of
        a tied parameter has it, and the others have zeros.
        """
        if not self.ready:
            return totals
        gradients = self.gradients(totals)
        if self.estimates(step):
            for name, gradient in gradients.items():
                first_gradients[name].copy_(gradient)
            return totals
        means = {name: first_gradients[name].add_(gradient).mul_(0.5) for name, gradient in gradients.items()}
        result = list(totals)
        for i, (_, name) in sorted(enumerate(self.record.totals), key=lambda pair: pair[1]):
            if name in gradients:
                result[i] = means.pop(name) if name in means else totals[i].zero_()
        return tuple(result)

    def settled(self) -> Coroutine:
        """Wait for all reductions; returns the totals of each step, by its distance from the next step."""
        for each in self._kept:
            yield from each.reduced()
        return {
            len(self._kept) - i: tuple(total for index in self.record.stages for total in each.totals[index])
            for i, each in enumerate(self._kept)
        }

    def gradients(self, totals: Tensors) -> dict[str, torch.Tensor]:
        """The gradients of all parameters of the rank, from all totals: those of tied ones added in stage order."""
        trained = {each.name for each in self.program.parameters if each.companions}
        gradients: dict[str, torch.Tensor] = {}
        for (_, name), total in sorted(zip(self.record.totals, totals, strict=True), key=lambda pair: pair[0]):
            if name in trained:
                gradients[name] = gradients[name] + total if name in gradients else total
        return gradients

    def restore(self, step: int, saved: Callable[[int, str], torch.Tensor]) -> None:
        """Load the gradients of the steps up to this one, which are `saved` by their age and the parameter's name. The
        first stage of a tied parameter gets the whole sum.
        """
        self._kept.clear()
        for age in range(min(step, self.program.delay), 0, -1):
            totals = {
                index: tuple(
                    accumulator
                    if each.parameter is None
                    else self._part(index, each.parameter, saved(age, each.parameter))
                    for each, accumulator in zip(stage.record.accumulators, stage.accumulators, strict=True)
                )
                for index, stage in self.stages.items()
            }
            self._kept.append(_Gradients({}, totals))

    def _part(self, stage: int, parameter: str, gradient: torch.Tensor) -> torch.Tensor:
        first = min(self.program.parameter(parameter).stages)
        return gradient.clone() if stage == first else torch.zeros_like(gradient)


@frozen(eq=False)
class Estimate:
    """Parameters after an update with only the `first` gradients of a pair: a `memory` for that update. Trained tensors
    are first copied there from the rank's own, by `pairs`; all others are shared.
    """

    memory: ParameterStore
    first: Mapping[str, torch.Tensor]
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, program: Program, names: Sequence[str], own: ParameterStore) -> Estimate:
        """Of a rank with these parameters."""
        memory, first = ParameterStore(dict(own.masters), dict(own.states)), dict[str, torch.Tensor]()
        pairs = []
        for record in filter(lambda each: each.companions, map(program.parameter, names)):
            name = record.name
            first[name], memory.masters[name] = own.states[FIRST, name], own.states[ESTIMATE, name]
            pairs.append((memory.masters[name], own.masters[name]))
            for key in ((state.name, name) for state in record.states):
                memory.states[key] = copy_of(own.states[key])
                pairs.append((memory.states[key], own.states[key]))
        return cls(memory, first, pairs)

    def begun(self) -> ParameterStore:
        """The memory, as it is before its update."""
        if self.pairs:
            into, own = zip(*self.pairs, strict=True)
            torch._foreach_copy_(into, own)
        return self.memory
