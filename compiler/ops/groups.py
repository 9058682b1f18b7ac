"""Operations that average replica groups (`sync = local`): the sum over groups, and an outer optimizer.

The outer gradient is what groups began with, the anchor, minus the mean of what they have come to; the outer optimizer
updates the anchor in place, from which all groups go on. With plain SGD and a rate of 1 that is local SGD (Stich, arXiv
1805.09767), with Nesterov's momentum it is DiLoCo (Douillard et al., arXiv 2311.08105).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from partita.compiler.ops.op import Argument, Op, ShardingRule, op
from partita.dsl.spec import Call
from partita.dsl.types import Axis, Type

# What is kept of a parameter besides its groups' copies: the anchor, and the momentum of its changes.
ANCHOR, VELOCITY = "anchor", "velocity"


@op("sum_of_groups")
class SumOfGroups(Op):
    """The sum of a tensor of each of a rank's `groups`. Along the mesh axis of groups, that is a partial sum."""

    groups: int = 1
    fusible = False

    @property
    def is_view(self) -> bool:  # type: ignore[override]
        """Whether there is nothing to add."""
        return self.groups == 1

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """That of each."""
        assert len(set(types)) == 1, types
        assert len(types) == self.groups, types
        return (types[0],)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return tuple(ShardingRule((name,) * len(operands), (name,)) for name in results[0].names)

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Yes."""
        return True

    def unflattened(self, flat: Collection[str], axes: tuple[Axis, ...]) -> Op | None:
        """The same."""
        return self

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """An addition for each element of all but one."""
        return (len(operands) - 1) * results[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Added in the order of groups."""
        return " + ".join(argument.text for argument in arguments)


class Outer(Op):
    """Base of outer optimizers. Operands: the anchor, the sum over all `groups`, and a tensor for each name in
    `states`. The anchor and these are updated in place.
    """

    groups: int
    rate: float
    states: ClassVar[tuple[str, ...]] = ()
    fusible = False
    allocates = False  # it works in place
    overwrites = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The anchor and the states."""
        assert len(set(types)) == 1, types
        assert len(types) == 2 + len(self.states), types
        return (types[0], *types[2:])

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return tuple(ShardingRule((name,) * len(operands), (name,) * len(results)) for name in results[0].names)

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Yes."""
        return True

    def unflattened(self, flat: Collection[str], axes: tuple[Axis, ...]) -> Op | None:
        """The same."""
        return self

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The mean, or the outer gradient."""
        return operands[0].bytes


@op("outer_sgd")
class OuterSgd(Outer):
    """The anchor moves by `rate` towards the mean; by 1, it is the mean."""

    groups: int
    rate: float

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """4 for each element."""
        return 4 * operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        anchor, total = (argument.text for argument in arguments)
        return f"kernels.outer_sgd({anchor}, {total}, {self.groups}, {self.rate})"


@op("outer_nesterov")
class OuterNesterov(Outer):
    """Nesterov's momentum of the outer gradients, as `torch.optim.SGD` has it."""

    groups: int
    rate: float
    momentum: float
    states = (VELOCITY,)
    results = ("", VELOCITY)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """8 for each element."""
        return 8 * operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        anchor, total, velocity = (argument.text for argument in arguments)
        return f"kernels.outer_nesterov({anchor}, {total}, {velocity}, {self.groups}, {self.rate}, {self.momentum})"


def outer_optimizer(local: Call) -> Outer:
    """The outer optimizer of `sync = local(…)`."""
    outer, groups = local.arguments["outer"], int(local.arguments["groups"])
    if outer.name == "nesterov":
        return OuterNesterov(groups, float(outer.arguments["lr"]), float(outer.arguments["momentum"]))
    return OuterSgd(groups, float(outer.arguments["lr"]))
