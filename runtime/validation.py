"""Updates that are made before their step is validated, and how they are rolled back.

A step is validated by its loss and its gradient norm, which are sums over all ranks. Where the file says `validate =
after`, an update does not wait for them: it assumes that the step is good and its gradients are not clipped, and the
sums are computed while the next step runs ("post-update validation", Qi et al., arXiv 2401.10241, section 4). Before
the next step makes its own update, all ranks check the sums. If the assumption was wrong, they restore from copies all
tensors that the update has written, and run both steps again; the first of the two waits for its sums, as without
`validate`. Batches and random numbers are functions of the step, so the run is bitwise identical to one whose updates
wait.

A clipped step is often followed by others, so an update is made early only after `calm` steps in a row that would have
allowed it. All ranks have the same sums and make the same decisions. An update also waits if something else reads the
parameters after it: an evaluation, a checkpoint, the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import define, field, frozen

from partita.compiler.program import RankProgram
from partita.dsl.spec import Call
from partita.runtime.bad_steps import BadStepPolicy
from partita.runtime.declared import waits
from partita.runtime.executor import Executor, Rates
from partita.runtime.stages import ParameterStore
from partita.runtime.transports.transport import Collective


@frozen(eq=False)
class Unvalidated:
    """A step whose update was made before its sums were complete; the step took so many `seconds`."""

    number: int
    rates: Rates
    sums: Collective
    seconds: float


class UpdateBackup:
    """Copies of all tensors that a rank's update writes. They are allocated once, when first made."""

    def __init__(self, record: RankProgram, memory: ParameterStore) -> None:
        self._written = [memory.masters[name] for name in record.copied]
        self._written += [tensor for (_, name), tensor in memory.states.items() if name in record.copied]
        self._copies: list[torch.Tensor] = []

    def make(self) -> None:
        """Copy the current values."""
        if not self._copies:
            self._copies = [torch.empty_like(tensor) for tensor in self._written]
        for tensor, copy in zip(self._written, self._copies, strict=True):
            copy.copy_(tensor)

    def restore(self) -> None:
        """Restore the values that were copied last."""
        for tensor, copy in zip(self._written, self._copies, strict=True):
            tensor.copy_(copy)


@define(eq=False)
class Validation:
    """When a rank validates its steps: before their update, or after it.

    `calm` counts the last steps in a row that were good and not clipped, `rolled_back` the updates that were.
    """

    call: Call
    executor: Executor
    bad_step_policy: BadStepPolicy
    copies: UpdateBackup
    calm: int = 0
    rolled_back: int = 0
    _waits_until: int = field(default=0, init=False)  # a step that is to wait for its sums

    def can_speculate(self, number: int) -> bool:
        """Whether the update of a step may be made before its sums are complete."""
        return self.call.name == "after" and self.calm >= self.call.arguments["calm"] and number > self._waits_until

    def update(self) -> Iterator[None]:
        """Update with the gradients as they are, after making copies."""
        self.copies.make()
        yield from self.executor.update(self.executor.one)

    def holds(self, number: int) -> bool:
        """Whether the assumption about a step holds, given its sums."""
        return not self.bad_step_policy.fault(number, self.executor.named_step_metrics()) and self._unclipped()

    def passed(self) -> None:
        """Count the step that was judged last."""
        if self.call.name == "after":
            self.calm = self.calm + 1 if not self.bad_step_policy.bad and self._unclipped() else 0

    @waits("an update that was made is taken back if it should have been clipped")
    def _unclipped(self) -> bool:
        return bool(self.executor.clip_coefficient == self.executor.one)

    def rollback(self, number: int) -> None:
        """Undo the update of a step, and end the next one as if it had not begun."""
        self.executor.discard()
        self.copies.restore()
        self.calm, self._waits_until = 0, number
        self.rolled_back += 1
