"""Global value numbering: one number per value of the program, however often and wherever it is computed.

Values are hash-consed: two have the same number if the same operation is applied to operands with the same numbers.
Duplicated work on inputs, recomputed values, and a value's shards in any layout thus share a number.

An operation with a decomposition along some axis (`Op.split`) is numbered by it: the results of both share numbers. One
whose decomposition depends on the number of parts (`Op.blockwise`) is numbered by itself, and the results of all its
decompositions share its numbers. One that is another by a law (`Redundant`) has the numbers of that.
"""

from __future__ import annotations

from attrs import define, field

from partita.compiler.graph import Builder, Node, Value
from partita.compiler.ops.op import Op
from partita.compiler.ops.traits import Redundant
from partita.dsl.types import Type

Key = tuple[object, tuple[int, ...]]
# The number of a value that a broken program fails to define. It equals no valid number.
UNKNOWN = -1


@define(eq=False)
class ValueNumbering:
    """By number: the global type (`types`) and the key (`made`): an operation and its operands' numbers, or a name.

    `parts` are the numbers of parts that an axis may have on the mesh.
    """

    parts: tuple[int, ...] = ()
    types: list[Type] = field(factory=list)
    made: list[Key] = field(factory=list)
    _numbers: dict[Key, tuple[int, ...]] = field(factory=dict)

    def given(self, what: str, *name: object, type: Type) -> int:
        """The number of a value that no operation makes: an input, a parameter, an accumulator's total, a state."""
        return self._numbered(((what, *name), ()), (type,))[0]

    def known(self, op: Op, operands: tuple[int, ...]) -> tuple[int, ...] | None:
        """The numbers of an operation's results, if it has been numbered."""
        return self._numbers.get((op, operands))

    def of(self, op: Op, operands: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of an operation's results."""
        numbers = self._numbers.get((op, operands))
        if numbers is None:
            types = op.infer(*(self.types[number] for number in operands))
            numbers = self._simplified(op, operands) or self._replaced(op, operands, types)
            if numbers is None:
                numbers = self._numbered((op, operands), types)
                self._divided(op, operands, numbers)
            self._numbers[op, operands] = numbers
        return numbers

    def learn(self, op: Op, operands: tuple[int, ...], results: tuple[int, ...]) -> tuple[int, ...]:
        """Give an operation's results the numbers of values that they are known to be."""
        self._numbers[op, operands] = results
        return results

    def _numbered(self, key: Key, types: tuple[Type, ...]) -> tuple[int, ...]:
        numbers = self._numbers.get(key)
        if numbers is None:
            first = len(self.types)
            numbers = self._numbers[key] = tuple(range(first, first + len(types)))
            self.types.extend(types)
            self.made.extend(key for _ in types)
        return numbers

    def _simplified(self, op: Op, operands: tuple[int, ...]) -> tuple[int, ...] | None:
        """The numbers of the results of what always makes the same."""
        simplified = op.simplified(self, operands) if isinstance(op, Redundant) else None
        if simplified is None:
            return None
        other, own = simplified
        return own if other is None else self.of(other, own)

    def _replaced(self, op: Op, operands: tuple[int, ...], types: tuple[Type, ...]) -> tuple[int, ...] | None:
        """The numbers of an operation's decomposed results. They must not depend on which axis is split."""
        if type(op).split is Op.split:
            return None
        node = self._node(op, operands, types)
        inputs = node.inputs
        for axis in dict.fromkeys(name for value in inputs for name in value.type.names):
            build = Builder()
            results = op.split(build, node, axis)
            if results is None:
                continue
            numbers = dict(zip(inputs, operands, strict=True))
            for new in build.nodes:
                outputs = self.of(new.op, tuple(numbers[value] for value in new.inputs))
                numbers.update(zip(new.outputs, outputs, strict=True))
            assert tuple(value.type for value in results) == types, op
            return tuple(numbers[value] for value in results)
        return None

    def _divided(self, op: Op, operands: tuple[int, ...], results: tuple[int, ...]) -> None:
        """Number the decompositions of an operation into parts; primitives that make its results have its numbers."""
        if type(op).decompose is Op.decompose:
            return
        node = self._node(op, operands, tuple(self.types[number] for number in results))
        for axis in dict.fromkeys(each for value in node.inputs for each in value.type.axes):
            for parts in self.parts:
                build = Builder()
                decomposed = None if axis.size % parts else op.decompose(build, node, axis.name, parts)
                if decomposed is None:
                    continue
                numbers = dict(zip(node.inputs, operands, strict=True))
                same = dict(zip(decomposed, results, strict=True))
                for new in build.nodes:
                    own = tuple(numbers[value] for value in new.inputs)
                    if same.keys() >= set(new.outputs):
                        outputs = tuple(same[value] for value in new.outputs)
                        self.learn(new.op, own, outputs)
                    else:
                        outputs = self.of(new.op, own)
                    numbers.update(zip(new.outputs, outputs, strict=True))

    def _node(self, op: Op, operands: tuple[int, ...], types: tuple[Type, ...]) -> Node:
        inputs = tuple(Value(f"operand {i}", self.types[number]) for i, number in enumerate(operands))
        return Node(op, inputs, tuple(Value(f"result {i}", each) for i, each in enumerate(types)), "")
