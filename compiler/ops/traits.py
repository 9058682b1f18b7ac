"""What some operations can do besides: bases that passes ask for, each with its defaults."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from partita.compiler.ops.op import Argument, Known, Op, as_tensor
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


class SameTensor(Op):
    """Its result is its operand in another form: a reader of the result counts as a reader of the operand."""

    def sources(self, operand: Type) -> Mapping[str, tuple[str, ...]]:
        """The axes of its operand that make up each axis of its result."""
        return {name: (name,) for name in operand.names}

    @property
    def keeps_zeros(self) -> bool:
        """Yes."""
        return True


class ReadsWeights(Op):
    """A parameter that it reads is a weight matrix, or a table of rows: weight decay applies."""

    def fans(self, type: Type) -> tuple[int, int] | None:
        """Fan-in and fan-out of a parameter of this type as its operand; None if it defines none."""
        return None

    def matrix(self, operands: Sequence[Type], position: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """If it multiplies by the operand at a position as by a matrix: the axes of that operand that are summed, and
        those along which it is a stack of matrices, because other operands have them too. None if it does not.
        """
        return None

    def looked_up(self, operands: Sequence[Type], position: int) -> tuple[str, ...]:
        """If it looks up rows of the operand at a position, the axes that tell these apart: the one that the indices
        index, and those along which the operand is a stack of tables. Empty if it does not.
        """
        return ()


class LooksUp(ReadsWeights):
    """Looks up rows along `over` of its second operand by ids, its first."""

    over: str

    def looked_up(self, operands: Sequence[Type], position: int) -> tuple[str, ...]:
        """The table's, along `over` and the axes that the ids have too."""
        ids, table = operands
        return tuple(name for name in table.names if name == self.over or ids.has(name)) if position == 1 else ()


class Adding(Op):
    """Can add its result to a tensor in place, better than by `+=`."""

    def adds_to(self, target: Type, operands: Sequence[Type], result: Type) -> bool:
        """Whether it can, to a tensor of type `target`."""
        raise NotImplementedError

    def moved_to_add(self, results: Sequence[Type]) -> int:
        """Bytes that a GPU moves to add its result where `adds_to` holds, if that is another kernel."""
        return 0

    def workspace_to_add(self, target: Type, operands: Sequence[Type], result: Type) -> int:
        """As `workspace`, where it adds its result to `target`."""
        return self.workspace(operands, (result,))

    def emit_added(self, target: Argument, arguments: Sequence[Argument], result: Type) -> str:
        """A statement that adds the result to `target`, where `adds_to` holds."""
        raise NotImplementedError


class Summing(Op):
    """Can add a tensor of its first result's type to it: bitwise equal to `+`, and faster."""

    def emit_sum(self, other: Argument, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """An expression for the results, with `other` added to the first."""
        raise NotImplementedError

    def emit_into(self, other: Argument, arguments: Sequence[Argument], results: Sequence[Type]) -> str | None:
        """As `emit_sum`, of a tensor that ends with that: it may become the sum. None if that is nothing else."""
        return None


class DenseOperands(Op):
    """Copies operands whose elements do not follow each other in memory."""

    def workspace_strided(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """As `workspace`, for such operands."""
        raise NotImplementedError


class PartialReduction(Op):
    """Is computed from what each part of an axis contributes."""

    def partial_reduce(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """The contribution of one part of `axis` to the results; None if parts must be exchanged repeatedly.
        `node` is the operation on the part; `combine_parts` makes the results from the contributions. Validation of a
        division takes it as given that these are the results of the whole.
        """
        raise NotImplementedError

    def combine_parts(self, build: Builder, node: Node, parts: Sequence[tuple[Value, ...]]) -> tuple[Value, ...]:
        """The results of the whole `node` from what its parts contribute, in order."""
        raise NotImplementedError


class Stencil(Op):
    """Depends, at each position, on a few positions around it."""

    def reach(self, axis: str) -> tuple[int, int] | None:
        """How many positions before and after its own each position of the result depends on, of the first operand,
        with zeros beyond its ends; None if it is not the same function of these at each.
        """
        raise NotImplementedError

    def inside(self, axis: str, longer: Axis, into: Axis) -> Op:
        """The operation on a part of such an axis to which as many positions before and after it are added as it
        reaches: from the axis `longer` to `into`.
        """
        raise NotImplementedError


class WritesState(Op):
    """Writes to tensors that outlive the step in place: it takes them where they are stored, not a copy in another
    layout.
    """

    @property
    def writes(self) -> int:
        """How many of its operands, the first ones, are such tensors."""
        return 1


class Redundant(Op):
    """Its result is always that of another operation."""

    def simplified(self, known: Known, operands: Sequence[int]) -> tuple[Op | None, tuple[int, ...]] | None:
        """That operation, with its operands; without an operation, the operand that is; None if there is none.
        `operands` are numbers of `known` values.
        """
        raise NotImplementedError


class TakesLiterals(Op):
    """Takes some of its operands as literals, where others take tensors alone."""

    def legalized_operands(self, arguments: Sequence[Argument], results: Sequence[Type]) -> list[Argument]:
        """The operands as its source takes them: the other literals become tensors of their dtype."""
        raise NotImplementedError


class CachesTable(Op):
    """Its kernel computes something once."""

    def kernel_table(self, operands: Sequence[Type]) -> tuple[Hashable, int] | None:
        """What that is: a key, equal for kernels that share it, and its size in bytes."""
        raise NotImplementedError


def legalized(op: Op, arguments: Sequence[Argument], results: Sequence[Type]) -> list[Argument]:
    """The operands of any operation as its source takes them."""
    if isinstance(op, TakesLiterals):
        return op.legalized_operands(arguments, results)
    return [as_tensor(each) for each in arguments]
