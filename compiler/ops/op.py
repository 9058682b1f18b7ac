"""What is true of an operation, in one class each: types, ways of splitting, cost, gradient, traits, emitted source.

`Way`s are the whole of what the layout algebra knows about an operation: each says, for one mesh axis (microbatches
in time are one), how the operands may lie and how the results then lie. A state is an axis name (split along it),
`SUM` or `MAX` (each rank holds a part of the sum or of the maximum), or None (whole on every rank). The way in which
everything is whole always exists and is not listed.

*Traits* say what a pass wants to know of any operation: whether it is a view, is drawn at random, reduces, moves data
between ranks. They have defaults here, and an operation with another answer states it in its own class; so a pass
need not know which operations there are, and a new one is in no list.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast, dataclass_transform

from attrs import Attribute, AttrsInstance, evolve, field, fields, frozen

from partita.compiler.layout import State
from partita.compiler.ops.intervals import ANY, Interval, union
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@frozen
class Way:
    """How operands may lie along one mesh axis, and how the results then lie."""

    operands: tuple[State, ...]
    results: tuple[State, ...]


@frozen
class Argument:
    """An operand in emitted source: its text (a name or a literal) and type. A literal that has axes is the same number
    everywhere.

    `views` has the names of views of it that are made once for all that take them, by what makes them.
    """

    text: str
    type: Type
    literal: bool = False
    views: Mapping[str, str] = field(factory=dict, eq=False)

    def viewed(self, how: str) -> str:
        """The text of a view of it; `how` is what makes it, `.t()`, and copies nothing."""
        return self.views.get(how) or self.text + how


class Op:
    """Base of all operations. Subclasses are frozen attrs classes; their fields are their attributes.

    `results` names the results; a node's value takes the name of the first from what it is bound to.
    """

    name: ClassVar[str]
    results: ClassVar[tuple[str, ...]] = ("",)

    # ------------------------------------------------------------ traits

    # Costs next to nothing and depends on no activation: copied to each stage that uses it rather than sent.
    free: ClassVar[bool] = False
    # Its result shows its operand's memory.
    is_view: ClassVar[bool] = False
    # Its result is its operand in another form: who reads the one reads the other.
    transparent: ClassVar[bool] = False
    # It makes nothing but elements of its operands, in other places.
    rearranges: ClassVar[bool] = False
    # Gradients flow through it.
    differentiable: ClassVar[bool] = True
    # Draws random numbers, or applies what was drawn.
    random: ClassVar[bool] = False
    # A parameter that it reads is a matrix of weights: weight decay applies.
    reads_weights: ClassVar[bool] = False
    # Torch can compile it into one kernel with what stands around it.
    fusible: ClassVar[bool] = True
    # The one or the other end of a message between stages.
    sends: ClassVar[bool] = False
    receives: ClassVar[bool] = False
    # Changes the layout of tensors, which stay what they are; and does so by communication between ranks.
    reshards: ClassVar[bool] = False
    communicates: ClassVar[bool] = False
    # Its result is its operand over again: of a number the same number.
    repeats: ClassVar[bool] = False
    # Can add a tensor of its first result's type to that (`emit_sum`), to the same bits and better than by `+`.
    sums: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The stem of names for results that the user has not named."""
        return self.name

    @property
    def literal(self) -> float | None:
        """The number that it is, if it is known at compile time and written as such."""
        return None

    @property
    def allocates(self) -> bool:
        """Whether its results are memory of their own."""
        return not self.is_view

    @property
    def cheap(self) -> bool:
        """Whether to make its result again costs one pass over memory, and is better than to keep it."""
        return False

    @property
    def reduces(self) -> tuple[str, ...]:
        """The axes over which it reduces by a kernel of one pass."""
        return ()

    @property
    def accumulator(self) -> str | None:
        """The accumulator to which it adds its operand."""
        return None

    @property
    def of_microbatch(self) -> bool:
        """Whether it asks which microbatch is under way."""
        return False

    @property
    def reads_context(self) -> bool:
        """Whether its source reads the context `c`: the device, the rank's place, the microbatch, the step."""
        return False

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The operand that holds indices, by number, and the axis that they index. An operation that has one has a
        field `guarded` too, with which there may be indices of nothing.
        """
        return None

    def fans(self, type: Type) -> tuple[int, int] | None:
        """Fan-in and fan-out of a parameter of this type as its operand, if it tells."""
        return None

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """Where the integers of its result lie, if those of its operands lie in these intervals."""
        return union(operands) if self.rearranges else ANY

    def kernel_table(self, operands: Sequence[Type]) -> tuple[Hashable, int] | None:
        """What its kernel makes once and keeps: a key, by which others share it, and its bytes."""
        return None

    # ------------------------------------------------------------ types and layouts

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """Types of the results. Operands were checked with the spec; what does not fit is an internal error."""
        raise NotImplementedError

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """All ways of splitting along one mesh axis, other than everything whole."""
        raise NotImplementedError

    def split(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """The node's results by primitives that can be split along `axis`, where no way of the operation does.

        None where there are none. What they share with the node are its operands; what they add along the split axis
        is small.
        """
        return None

    def resized(self, axis: str, size: int) -> Op:
        """The same operation after `axis` has been cut to parts of `size`: axes among the fields change."""
        changes = {
            each.name: new
            for each in attributes(type(self))
            if (new := _resized(old := getattr(self, each.name), axis, size)) is not old
        }
        return evolve(self, **changes) if changes else self  # type: ignore[misc]

    def sharded(self, axis: str, size: int, mesh_axis: str, parts: int) -> Op:
        """The same operation on a shard of `axis`, the innermost cut so far, which leaves parts of `size`."""
        return self.resized(axis, size)

    def unsharded(self, keep: str) -> Op:
        """The operation without what it was told of its place on the mesh, but for that along mesh axis `keep`."""
        return self

    # ------------------------------------------------------------ costs

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Floating-point operations; one for each element of the results unless an op says otherwise."""
        return sum(type.elements for type in results)

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """Of its FLOPs those of matrix products, once each: what is made again is not counted."""
        return 0.0

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """The rows, depth and columns of the matrix product that it is, and how many such products if several; nothing
        of these if it makes products of other shapes; None where no matrix unit does its work.
        """
        return None

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Bytes that it reads and writes."""
        return sum(type.bytes for type in (*operands, *results))

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """What takes the time; the bytes that are read and written unless an op says otherwise."""
        moved = float(sum(type.bytes for type in (*operands, *results)))
        return Kernel(self.label, (moved,), moved)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Bytes of temporary tensors while it runs, beside operands and results."""
        return 0

    def buffer(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Bytes that are held while it communicates."""
        return 0

    # ------------------------------------------------------------ gradient and source

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Cotangents of the inputs, one per input (None: no gradient flows), built from primitives.

        `d` is the cotangent of the first result: what else an operation returns is for its own gradient alone.
        """
        return (None,) * len(node.inputs)

    def taken(self, arguments: Sequence[Argument], results: Sequence[Type]) -> list[Argument]:
        """The operands as its source takes them: literals as tensors of their dtype, where they cannot be numbers."""
        return [as_tensor(argument) for argument in arguments]

    def views(self, operands: Sequence[Type]) -> Sequence[str]:
        """What makes the view that its source takes of each operand, `.t()`, where that is all that it takes of it and
        nothing is copied; "" for other operands. Nothing where it takes no views.
        """
        return ()

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A Python expression over torch that computes the result (a tuple for several)."""
        raise NotImplementedError

    def adds_to(self, target: Type, operands: Sequence[Type], result: Type) -> bool:
        """Whether it can add its result to a tensor of type `target` in place (`emit_added`), better than by `+=`."""
        return False

    def emit_added(self, target: Argument, arguments: Sequence[Argument], result: Type) -> str:
        """A statement that adds the result to `target`, where that can be."""
        raise NotImplementedError

    def emit_sum(self, other: Argument, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """An expression for the results, with `other` added to the first, whose type it has; of what `sums`."""
        raise NotImplementedError


def _resized(value: object, axis: str, size: int) -> object:
    """A field of an operation after `axis` has been cut; itself where it does not speak of that."""
    if isinstance(value, Axis) and value.name == axis:
        return Axis(axis, size)
    if isinstance(value, Type) and value.has(axis):
        return value.resized(axis, size)
    if isinstance(value, tuple) and any(isinstance(each, Axis) and each.name == axis for each in value):
        return tuple(_resized(each, axis, size) for each in value)
    return value


class Kernel(NamedTuple):
    """What the cost model knows an operation by: like kernels are compared by their features, and take time in
    proportion to their work, FLOPs or bytes.
    """

    name: str
    features: tuple[float, ...]
    work: float


def attributes(cls: type[Op]) -> tuple[Attribute[Any], ...]:
    """The fields of an operation."""
    return fields(cast(type[AttrsInstance], cls))  # type: ignore[no-any-return]


OPS: dict[str, type[Op]] = {}
_Class = TypeVar("_Class", bound=type[Op])


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def op(name: str) -> Callable[[_Class], _Class]:
    """Register an operation under the name it has in the textual form. ValueError where another one has that."""

    def register(cls: _Class) -> _Class:
        cls = frozen(cls)
        if name in OPS:
            raise ValueError(f"there is an operation `{name}` already")
        cls.name = name
        OPS[name] = cls
        return cls

    return register


def make(name: str, *arguments: Any, **named: Any) -> Op:
    """An operation by its name: for functions of the language, and for operations that are each other's gradients."""
    found: type[Op] = sys.modules[__package__].OPS[name]
    return found(*arguments, **named)


def agree(*types: Type) -> bool:
    """Whether axes of one name have one size: kernels do not check it, and torch repeats an axis of 1."""
    sizes: dict[str, int] = {}
    return all(sizes.setdefault(axis.name, axis.size) == axis.size for type in types for axis in type.axes)


# ---------------------------------------------------------------- ways that many operations share


def aligned_ways(operands: Sequence[Type], results: Sequence[Type], *, whole: Sequence[str] = ()) -> tuple[Way, ...]:
    """Split any axis that all results have, and that is not in `whole`, in every operand that has it."""
    ways = []
    for name in results[0].names:
        if name in whole or not all(result.has(name) for result in results):
            continue
        ways.append(
            Way(
                tuple(name if operand.has(name) else None for operand in operands),
                tuple(name for _ in results),
            )
        )
    return tuple(ways)


# ---------------------------------------------------------------- source text that many operations share


def permuted(text: str, axes: Sequence[str], order: Sequence[str]) -> str:
    """Text of a tensor with `axes` viewed with its axes in `order`."""
    if tuple(axes) == tuple(order):
        return text
    positions = [list(axes).index(name) for name in order]
    if len(positions) == 2:
        return f"{text}.t()"
    return f"{text}.permute({', '.join(map(str, positions))})"


def broadcast(argument: Argument, names: Sequence[str]) -> str:
    """Text of an operand, viewed so that torch broadcasts it against a tensor whose axes are `names`."""
    axes = argument.type.names
    if not axes or argument.literal:
        return argument.text
    order = [name for name in names if name in axes]
    assert len(order) == len(axes), (axes, names)
    text = permuted(argument.text, axes, order)
    tail = list(names[list(names).index(order[0]) :])
    if tail == order:
        return text
    index = ", ".join(":" if name in axes else "None" for name in tail)
    return f"{text}[{index}]"


def shape_text(sizes: Sequence[int]) -> str:
    """`(2, 3)`, `(2,)`, `()`."""
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


TORCH_DTYPES = {
    "f32": "torch.float32",
    "bf16": "torch.bfloat16",
    "f64": "torch.float64",
    "i64": "torch.int64",
    "i32": "torch.int32",
    "bool": "torch.bool",
}


def as_tensor(argument: Argument) -> Argument:
    """A literal as a tensor of its type; anything else as it is."""
    if not argument.literal:
        return argument
    text = f"torch.tensor({argument.text}, dtype={TORCH_DTYPES[argument.type.dtype]}, device=c.device)"
    if argument.type.axes:
        text += f".expand{shape_text(argument.type.shape)}"
    return Argument(text, argument.type)


def wide_bytes(type: Type) -> int:
    """The size of a tensor in the dtype of accumulation."""
    return type.with_dtype(accumulation(type.dtype)).bytes


def accumulation(dtype: str) -> str:
    """The dtype in which reductions, norms, softmax and losses compute."""
    return "f32" if dtype == "bf16" else dtype
