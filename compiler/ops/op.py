"""The base class of operations: types, sharding rules, costs, gradient, traits and emitted source.

The layout algebra knows an operation only by its `ShardingRule`s. Each gives, for one mesh axis (microbatches are a
mesh axis `time`), a valid state of each operand and the states of the results that follow. A state is the name of a
tensor axis (sharded along it), `SUM` or `MAX` (partial: the ranks' tensors add up to the value, or their maximum is the
value), or None (replicated). The rule in which everything is replicated always holds and is not listed. An operation is
*linear* in operands that may be partial sums if its results then are.

An operation says what every pass may ask of it: types, rules, what it reads and writes, costs, its gradient and source,
with defaults. What only some do besides are bases of `partita.compiler.ops.traits`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, cast, dataclass_transform

from attrs import Attribute, AttrsInstance, evolve, field, fields, frozen

from partita.compiler.layout import State
from partita.compiler.ops.intervals import ANY, Interval, union
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@frozen
class ShardingRule:
    """The states of the operands along one mesh axis, and those of the results that follow."""

    operands: tuple[State, ...]
    results: tuple[State, ...]


@frozen
class Argument:
    """An operand in emitted source: its text (a name or a literal) and type. A literal is broadcast over the type's
    axes.

    `views` maps the source that makes a view (`.t()`) to the name of that view, if it is made once for all its readers.
    """

    text: str
    type: Type
    literal: bool = False
    views: Mapping[str, str] = field(factory=dict, eq=False)

    def viewed(self, how: str) -> str:
        """The text of the view that `how` (such as `.t()`) makes, without a copy."""
        return self.views.get(how) or self.text + how


class Known(Protocol):
    """Numbered values: the type of each, and the operation (or a name) and operands that it is made of."""

    types: list[Type]
    made: list[tuple[object, tuple[int, ...]]]


class Op:
    """Base of all operations. Subclasses are frozen attrs classes whose fields are their attributes.

    `results` names the results; the first is named after what the node is bound to.
    """

    name: ClassVar[str]
    results: ClassVar[tuple[str, ...]] = ("",)

    # ------------------------------------------------------------ traits

    # Costs next to nothing and depends on no activation: duplicated on each stage that uses it, not sent.
    duplicable: ClassVar[bool] = False
    # Its result aliases its operand's memory.
    is_view: ClassVar[bool] = False
    # Its result has only elements of its operands, rearranged.
    rearranges: ClassVar[bool] = False
    # Writes to its operands.
    overwrites: ClassVar[bool] = False
    # Draws random numbers, or applies a random mask.
    random: ClassVar[bool] = False
    # torch.compile can fuse it with its neighbors.
    fusible: ClassVar[bool] = True
    # What it does over the axes that its fields name does not depend on the order of their positions.
    orderless: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The stem of the names of results that the user has not named."""
        return self.name

    @property
    def literal(self) -> float | None:
        """The number that it is, if it is known at compile time and emitted as a literal."""
        return None

    @property
    def allocates(self) -> bool:
        """Whether its results own their memory."""
        return not self.is_view

    @property
    def reduces(self) -> tuple[str, ...]:
        """The axes over which its single-pass kernel reduces."""
        return ()

    @property
    def structural_key(self) -> Op:
        """A key without names of values, random keys and numbers of stages: equal for operations that do the same."""
        return self

    @property
    def microbatch_dependent(self) -> bool:
        """Whether it depends on the index of the microbatch."""
        return False

    @property
    def reads_context(self) -> bool:
        """Whether its source reads the context `c`: the device, the rank's coordinates, the microbatch, the step."""
        return False

    def capture_blocker(self, operands: Sequence[Type], results: Sequence[Type]) -> str:
        """Why the operation cannot be captured in a CUDA graph: what differs from step to step beyond its operands, or
        is up to the host. Empty if it can.
        """
        return "draws random numbers" if self.random else ""

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The position of the operand that holds indices, and the axis that they index. An operation with such an
        operand also has a field `guarded`: whether indices may be out of range.
        """
        return None

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """Bounds of the integers in its result, given those of its operands."""
        return union(operands) if self.rearranges else ANY

    # ------------------------------------------------------------ types and layouts

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The types of the results. Operands were checked with the spec, so a mismatch is an internal error."""
        raise NotImplementedError

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """All sharding rules for one mesh axis, other than everything replicated."""
        raise NotImplementedError

    def split(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """The node's results from primitives that can be sharded along `axis`, where no rule of the operation can; None
        if there are none.

        The primitives read the node's operands as they are sharded; what they reduce over the shards is small.
        """
        return None

    def decompose(self, build: Builder, node: Node, axis: str, parts: int) -> tuple[Value, ...] | None:
        """As `split`, where the primitives depend on the number of `parts` that the axis has; those that make a result
        make nothing else.
        """
        return None

    def decode_step(
        self, build: Builder, operands: Sequence[Value], axis: str, state: Callable[[Type], Value]
    ) -> tuple[Value, ...] | None:
        """Its results at the positions of a part of an axis, from operands at these alone, where no rule of it can be
        split along the axis; None if that cannot be. `state` makes what it keeps of earlier positions
        (`partita.compiler.ops.decoding`).
        """
        return None

    def vmapped(self, axis: Axis) -> Op | None:
        """The operation at all positions of an axis at once, which operands have besides their own; None if it cannot
        be applied so.
        """
        return self

    def to_broadcast(self, operands: Sequence[Type], axis: str) -> tuple[int, ...]:
        """The operands that must be repeated along an axis that only others have: by default all that lack it."""
        return tuple(i for i, type in enumerate(operands) if not type.has(axis))

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Whether it computes each position of these axes from its operands at that position alone: then neither their
        order makes a difference, nor whether one axis stands for several.
        """
        return False

    def unflattened(self, flat: Collection[str], axes: tuple[Axis, ...]) -> Op | None:
        """The operation on tensors with these axes, where it works on their elements in order along `flat` axes; None
        if it does not compute each of them by itself.
        """
        return self if self.elementwise_over(flat) else None

    def in_zigzag(self, axis: str, ranks: int) -> Op | None:
        """The operation where the positions of an axis stand in zigzag order (`partita.compiler.ops.runs`); None if it
        needs them one after the other.
        """
        return self if self.orderless or not mentions(self, axis) else None

    @property
    def keeps_zeros(self) -> bool:
        """Whether its first result is zero where all of its operands that are floats are."""
        return self.rearranges or self.is_view

    @property
    def is_finite(self) -> bool:
        """Whether its results are finite where its operands are."""
        return True

    def neutral(self, axis: str) -> float:
        """What its operands are to be past the end of an axis to add nothing to what it reduces over that, and to make
        its results zero there; by default zero, which does that where it is linear.
        """
        return 0.0

    def resized(self, axis: str, size: int) -> Op:
        """The same operation after `axis` has been cut to `size`: resizes it in the fields that have it."""
        changes = {
            each.name: new
            for each in attributes(type(self))
            if (new := _resized(old := getattr(self, each.name), axis, size)) is not old
        }
        return evolve(self, **changes) if changes else self  # type: ignore[misc]

    def sharded(self, axis: str, size: int, mesh_axis: str, parts: int) -> Op:
        """The same operation on a shard, of `size`, of `axis`; this cut is the innermost so far."""
        return self.resized(axis, size)

    def unsharded(self, keep: Collection[str | None]) -> Op:
        """The operation without its position on the mesh, except along the mesh axes `keep`."""
        return self

    # ------------------------------------------------------------ costs

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Floating-point operations; by default one for each element of the results."""
        return sum(type.elements for type in results)

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """Its FLOPs in matrix products, without recomputation."""
        return 0.0

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """Rows, depth and columns of its matrix product, and the number of products if it is batched; empty if its
        products have other shapes; None if it does not use matrix units.
        """
        return None

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Bytes that it reads and writes."""
        return sum(type.bytes for type in (*operands, *results))

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """What determines its time; by default the bytes that it reads and writes."""
        moved = float(self.accessed(operands, results))
        return Kernel(self.label, (moved,), moved)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Bytes of temporary tensors while it runs, in addition to operands and results."""
        return 0

    # ------------------------------------------------------------ gradient and source

    def gradients(self, build: Builder, node: Node, d: Sequence[Value | None]) -> tuple[Value | None, ...]:
        """As `gradient`, from the cotangents of all results, None for those without; by default the first alone has
        one.
        """
        first, *others = d
        if any(others):
            raise no_gradient(node)
        return (None,) * len(node.inputs) if first is None else self.gradient(build, node, first)

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Cotangents of the inputs, one per input (None: no gradient flows), built from primitives.

        `d` is the cotangent of the first result. Further results serve only the operation's own gradient. Raises
        Refused (E0423) if there is none.
        """
        raise no_gradient(node)

    def formula(self, build: Builder, node: Node) -> tuple[Value, ...] | None:
        """What an operation that makes gradients computes, in operations that have gradients: its own follow. None for
        those that have a rule, or none.
        """
        return None

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A Python expression over torch that computes the result (a tuple for several)."""
        raise NotImplementedError


def _resized(value: object, axis: str, size: int) -> object:
    """A field of an operation after `axis` has been cut; unchanged if it does not mention the axis."""
    if isinstance(value, Axis) and value.name == axis:
        return Axis(axis, size)
    if isinstance(value, Type) and value.has(axis):
        return value.resized(axis, size)
    if isinstance(value, tuple) and any(isinstance(each, Axis) and each.name == axis for each in value):
        return tuple(_resized(each, axis, size) for each in value)
    return value


def no_gradient(node: Node) -> Refused:
    """That an operation which makes gradients has none itself: only what `grad` made is differentiated again."""
    name = node.op.label.removesuffix("_gradient")
    message = f"`{name}` has no second derivative, and the gradient through it is differentiated again"
    instead = "`dot` and `softmax` in place of it" if name == "attend" else "other operations in place of it"
    help = f"{instead}; or `stop_gradient` of this gradient"
    return refuse("E0423", message, node.span, help=help)


def mentions(op: Op, axis: str) -> bool:
    """Whether a field names an axis: an operation that names it nowhere does the same at each of its positions."""
    return any(_mentions(getattr(op, each.name), axis) for each in attributes(type(op)))


def _mentions(value: object, axis: str) -> bool:
    """Whether a field of an operation names an axis."""
    if isinstance(value, Type):
        return value.has(axis)
    if isinstance(value, tuple):
        return any(_mentions(each, axis) for each in value)
    return value == axis or (isinstance(value, Axis) and value.name == axis)


class Kernel(NamedTuple):
    """An operation as the cost model sees it: kernels of one name are compared by their features, and take time in
    proportion to their work, FLOPs or bytes. `alike` is one that takes about as long for its work.
    """

    name: str
    features: tuple[float, ...]
    work: float
    alike: Kernel | None = None

    @property
    def only_moves(self) -> bool:
        """Whether nothing but the bytes that it moves determines its time."""
        return self.features == (self.work,)


def attributes(cls: type[Op]) -> tuple[Attribute[Any], ...]:
    """The fields of an operation."""
    return fields(cast(type[AttrsInstance], cls))  # type: ignore[no-any-return]


OPS: dict[str, type[Op]] = {}
_Class = TypeVar("_Class", bound=type[Op])


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def op(name: str) -> Callable[[_Class], _Class]:
    """Register an operation under its name in the textual form. Raises ValueError if the name is taken."""

    def register(cls: _Class) -> _Class:
        cls = frozen(cls)
        if name in OPS:
            raise ValueError(f"there is an operation `{name}` already")
        cls.name = name
        OPS[name] = cls
        return cls

    return register


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def fields_of_several(cls: _Class) -> _Class:
    """Marks the base class of several operations, whose fields they all have, before their own."""
    return frozen(cls)


def make(name: str, *arguments: Any, **named: Any) -> Op:
    """An operation by name: for functions of the language, and to avoid import cycles between operations."""
    cls: type[Op] = sys.modules[__package__].OPS[name]
    return cls(*arguments, **named)


def agree(*types: Type) -> bool:
    """Whether axes of one name have one size. Kernels do not check it, and torch broadcasts axes of size 1."""
    sizes: dict[str, int] = {}
    return all(sizes.setdefault(axis.name, axis.size) == axis.size for type in types for axis in type.axes)


# ---------------------------------------------------------------- sharding rules that many operations share


def aligned_rules(
    operands: Sequence[Type], results: Sequence[Type], *, whole: Sequence[str] = ()
) -> tuple[ShardingRule, ...]:
    """Shard any axis that all results have and that is not in `whole`, in every operand that has it."""
    rules = []
    for name in results[0].names:
        if name in whole or not all(result.has(name) for result in results):
            continue
        rules.append(
            ShardingRule(
                tuple(name if operand.has(name) else None for operand in operands),
                tuple(name for _ in results),
            )
        )
    return tuple(rules)


# ---------------------------------------------------------------- source text that many operations share


def permuted(text: str, axes: Sequence[str], order: Sequence[str]) -> str:
    """The text of a tensor with `axes`, permuted to `order`."""
    if tuple(axes) == tuple(order):
        return text
    positions = [list(axes).index(name) for name in order]
    if len(positions) == 2:
        return f"{text}.t()"
    return f"{text}.permute({', '.join(map(str, positions))})"


def broadcast(argument: Argument, names: Sequence[str]) -> str:
    """The text of an operand, viewed so that torch broadcasts it against a tensor whose axes are `names`."""
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
    "i8": "torch.int8",
    "u8": "torch.uint8",
    "bool": "torch.bool",
}


def as_tensor(argument: Argument) -> Argument:
    """A literal as a tensor of its type, filled in on the device; anything else unchanged."""
    if not argument.literal:
        return argument
    text = f"torch.full((), {argument.text}, dtype={TORCH_DTYPES[argument.type.dtype]}, device=c.device)"
    if argument.type.axes:
        text += f".expand{shape_text(argument.type.shape)}"
    return Argument(text, argument.type)


def copied_bytes(type: Type, groups: Sequence[Sequence[str]]) -> int:
    """Bytes of the copy that it takes to view a tensor with groups of its axes as dimensions: none if the axes of each
    follow one another in memory.
    """
    order = [axis.name for axis in type.axes if axis.size > 1]
    for group in groups:
        own = [name for name in group if name in order]
        at = order.index(own[0]) if own else 0
        if order[at : at + len(own)] != own:
            return type.bytes
    return 0


def wide_bytes(type: Type) -> int:
    """Bytes of a tensor in its accumulation dtype."""
    return type.with_dtype(accumulation(type.dtype)).bytes


def widening_bytes(type: Type) -> int:
    """Bytes of a copy in the accumulation dtype, if that is another."""
    return 0 if type.dtype == accumulation(type.dtype) else wide_bytes(type)


def accumulation(dtype: str) -> str:
    """The dtype in which reductions, norms, softmax and losses compute."""
    return "f32" if dtype == "bf16" else dtype
