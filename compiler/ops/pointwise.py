"""Pointwise operations: one class over a table of scalar functions. Operands broadcast by axis names.

The widest operand has the axes of all operands; the result has its axes, in its order. A `constant` is a scalar known
at compile time, emitted as a literal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from math import pi, sqrt
from typing import TYPE_CHECKING

from attrs import frozen

from partita.compiler.layout import SUM, State
from partita.compiler.ops import intervals
from partita.compiler.ops.intervals import ANY, Interval
from partita.compiler.ops.op import (
    TORCH_DTYPES,
    Argument,
    Known,
    Op,
    ShardingRule,
    agree,
    aligned_rules,
    as_tensor,
    broadcast,
    make,
    op,
)
from partita.compiler.ops.traits import Redundant, SameTensor, TakesLiterals
from partita.dsl.types import FLOATS, INDICES, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value

Derivative = Callable[["Builder", "Node", "Value"], "tuple[Value | None, ...]"]


@frozen
class Function:
    """A scalar function. `text` is its torch expression over {0}, {1}, …; `linear` lists the sets of operands in which
    it is linear: they may be partial sums jointly if all others are replicated. `temporaries` counts temporary tensors
    of the result's size. `interval` bounds integer results. A function without a `derivative` has the derivative zero,
    unless it is in `FORMULAS`.
    """

    text: str
    derivative: Derivative | None = None
    linear: tuple[tuple[int, ...], ...] = ()
    boolean: bool = False
    flops: int = 1
    temporaries: int = 0
    interval: intervals.Rule | None = None

    @property
    def called_with(self) -> tuple[int, ...]:
        """The operands that are arguments of a call; the others may be emitted as scalar literals."""
        return tuple(int(i) for i in _ARGUMENT.findall(self.text) if _inside(self.text, f"{{{i}}}"))


_ARGUMENT = re.compile(r"\{(\d)\}")


def _inside(text: str, part: str) -> bool:
    """Whether a part of a text is in parentheses."""
    before = text[: text.index(part)]
    return before.count("(") > before.count(")")


FUNCTIONS: dict[str, Function] = {}
# Functions that are zero where all operands are, and functions of finite numbers that need not be finite.
OF_ZEROS = {
    *("add", "subtract", "negate", "multiply", "multiply_add", "maximum", "minimum", "where", "sqrt", "tanh", "relu"),
    *("abs", "gelu", "silu", "gelu_exact", "sin", "erf", "sign", "floor", "round"),
}
POLES = {"divide", "log", "rsqrt", "power", "power_exponent_gradient", "sqrt_gradient", "rsqrt_gradient"}


@op("constant")
class Constant(Op):
    """A scalar known at compile time."""

    value: float | int | bool
    dtype: str
    duplicable = True
    allocates = False

    @property
    def literal(self) -> float | None:
        """Its value."""
        return self.value

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """A scalar of `dtype`."""
        return (Type(self.dtype),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Replicated only."""
        return ()

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """Its value alone."""
        return float(self.value), float(self.value)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A literal."""
        if isinstance(self.value, float) and self.value in (float("inf"), float("-inf")):
            return f"float('{self.value}')"
        return repr(self.value)


@op("cast")
class Cast(SameTensor):
    """Change of dtype. To integers it truncates toward zero; to bool, true is what is not zero."""

    dtype: str

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operand's axes."""
        return (types[0].with_dtype(self.dtype),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; partial sums if values are preserved up to rounding: not floats to integers, nor integers of eight
        bits, which wrap around, nor bool.
        """
        source = operands[0].dtype
        keeps = source in (*FLOATS, *INDICES) if self.dtype in FLOATS else source in INDICES and self.dtype in INDICES
        linear = (ShardingRule((SUM,), (SUM,)),) if keeps else ()
        return (*aligned_rules(operands, results), *linear)

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Yes."""
        return True

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """The operand's, if that is an integer."""
        return ANY if types[0].is_float else operands[0]

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Casts back between floats; none flows through integers."""
        source = node.inputs[0].type
        if not source.is_float or self.dtype not in FLOATS:
            return (None,)
        return (build.apply(Cast(source.dtype), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`x.to(dtype)`."""
        return f"{arguments[0].text}.to({TORCH_DTYPES[self.dtype]})"


@op("detach")
class Detach(Redundant):
    """The operand, without a gradient."""

    rearranges = True
    is_view = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operand's type."""
        return types

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; linear."""
        return (*aligned_rules(operands, results), ShardingRule((SUM,), (SUM,)))

    def simplified(self, known: Known, operands: Sequence[int]) -> tuple[Op | None, tuple[int, ...]] | None:
        """The operand."""
        return None, tuple(operands)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """The tensor itself."""
        return arguments[0].text


@op("pointwise")
class Pointwise(TakesLiterals):
    """A function of the table, applied elementwise."""

    function: str

    @property
    def label(self) -> str:
        """The function's name."""
        return self.function

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axes of the widest operand."""
        # Of equally wide operands, the first determines the order; `where` has its condition first.
        widest = max(types, key=lambda type: len(type.axes))
        names = set(widest.names)
        assert all(set(type.names) <= names for type in types), (self.function, types)
        assert agree(*types), (self.function, types)
        dtype = "bool" if FUNCTIONS[self.function].boolean else types[-1].dtype
        return (Type(dtype, widest.axes),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; partial sums in operands in which the function is linear."""
        linear = []
        for positions in FUNCTIONS[self.function].linear:
            states: list[State] = [SUM if i in positions else None for i in range(len(operands))]
            linear.append(ShardingRule(tuple(states), (SUM,)))
        return (*aligned_rules(operands, results), *linear)

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Yes."""
        return True

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """From the table."""
        rule = FUNCTIONS[self.function].interval
        return rule(operands) if rule else ANY

    @property
    def keeps_zeros(self) -> bool:
        """By the list of those that do."""
        return self.function in OF_ZEROS

    @property
    def is_finite(self) -> bool:
        """Unless it has a pole."""
        return self.function not in POLES

    @property
    def divisors(self) -> tuple[int, ...]:
        """The operands by which it divides integers: the second."""
        return (1,) if self.function in ("floor_divide", "remainder") else ()

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The function's FLOPs for each element."""
        return FUNCTIONS[self.function].flops * results[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The function's temporaries."""
        return FUNCTIONS[self.function].temporaries * results[0].bytes

    def to_broadcast(self, operands: Sequence[Type], axis: str) -> tuple[int, ...]:
        """The widest operand, if it lacks the axis."""
        own = [len(type.axes) - type.has(axis) for type in operands]
        widest = own.index(max(own))
        return () if operands[widest].has(axis) else (widest,)

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """From the table, summed over the axes along which an operand was broadcast."""
        derivative = FUNCTIONS[self.function].derivative
        if derivative is None:
            return (None,) * len(node.inputs)
        results = derivative(build, node, d)
        return tuple(
            None if result is None or not operand.type.is_float else summed_to(build, result, operand.type)
            for result, operand in zip(results, node.inputs, strict=True)
        )

    def formula(self, build: Builder, node: Node) -> tuple[Value, ...] | None:
        """From the table."""
        formula = FORMULAS.get(self.function)
        return None if formula is None else (formula(build, node.inputs),)

    def legalized_operands(self, arguments: Sequence[Argument], results: Sequence[Type]) -> list[Argument]:
        """Scalars where possible: infix operators take them, and `clamp` takes bounds, but torch functions do not, and
        `where` would give them torch's default dtype. Some operand must be a tensor with all axes.
        """
        if not any(not each.literal and len(each.type.axes) == len(results[0].axes) for each in arguments):
            return [as_tensor(each) for each in arguments]
        called = () if self.function in ("maximum", "minimum") else FUNCTIONS[self.function].called_with
        return [as_tensor(each) if i in called else each for i, each in enumerate(arguments)]

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """The table's expression over broadcast views."""
        names = results[0].names
        if self.function in ("maximum", "minimum") and any(each.literal for each in arguments):
            tensor, number = sorted(arguments, key=lambda each: each.literal)
            bound = "min" if self.function == "maximum" else "max"
            return f"{broadcast(tensor, names)}.clamp({bound}={number.text})"
        texts = [broadcast(argument, names) for argument in arguments]
        if arguments[0].literal and self.function in ("equal", "not_equal"):
            texts.reverse()
        return FUNCTIONS[self.function].text.format(*texts)


def summed_to(build: Builder, value: Value, type: Type) -> Value:
    """Sum `value` over the axes that `type` lacks, and cast it: the cotangent of a broadcast operand."""
    extra = tuple(name for name in value.type.names if not type.has(name))
    if extra:
        value = build.apply(make("reduce", "sum", extra, type.dtype), value)
    if value.type.dtype != type.dtype:
        value = build.apply(Cast(type.dtype), value)
    return value


def cast(build: Builder, value: Value, dtype: str, name: str | None = None) -> Value:
    """The value as `dtype`; the value itself if it has that dtype."""
    if value.type.dtype == dtype:
        return value
    return build.apply(Cast(dtype), value, name=name)


def constant(build: Builder, value: float, like: Value | Type) -> Value:
    """A literal of the same dtype as `like`."""
    dtype = like.dtype if isinstance(like, Type) else like.type.dtype
    return build.apply(Constant(value, dtype))


FOLDED: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}


def pointwise(build: Builder, function: str, *inputs: Value, name: str | None = None) -> Value:
    """Apply a function of the table. Arithmetic on float literals is folded."""
    if function in FOLDED:
        numbers = [number for value in inputs if isinstance(number := build.literals.get(value), float)]
        if len(numbers) == 2:
            return build.apply(Constant(FOLDED[function](*numbers), inputs[0].type.dtype), name=name)
    return build.apply(Pointwise(function), *inputs, name=name)


def added(build: Builder, values: Sequence[Value]) -> Value:
    """The sum of values, in order."""
    result = values[0]
    for value in values[1:]:
        result = pointwise(build, "add", result, value)
    return result


# ---------------------------------------------------------------- the table


def _scaled(factor: float) -> Derivative:
    def derivative(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        return (pointwise(build, "multiply", d, constant(build, factor, d)),)

    return derivative


def _multiply(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
    a, b = node.inputs
    if a is b:
        half = _product(build, d, a)
        return (pointwise(build, "add", half, half), None)
    return (_product(build, d, b), _product(build, d, a))


def _multiply_add(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
    a, b, _ = node.inputs
    return (_product(build, d, b), _product(build, d, a), d)


def _product(build: Builder, d: Value, other: Value) -> Value:
    return pointwise(build, "multiply", d, other)


def _divide(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
    b = node.inputs[1]
    da = pointwise(build, "divide", d, b)
    return da, pointwise(build, "negate", pointwise(build, "multiply", da, node.output))


def _of_result(name: str) -> Derivative:
    """The derivative is the table's function `name` of the cotangent and the result."""

    def derivative(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        return (pointwise(build, name, d, node.output),)

    return derivative


def _of_input(name: str) -> Derivative:
    """The derivative is the table's function `name` of the cotangent and the input."""

    def derivative(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        return (pointwise(build, name, d, node.inputs[0]),)

    return derivative


def _extreme(comparison: str) -> Derivative:
    """Where the operands are equal, each gets half of the cotangent, as in torch."""

    def derivative(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        a, b = node.inputs
        zero = constant(build, 0.0, d)
        half = pointwise(build, "multiply", d, constant(build, 0.5, d))
        shared = pointwise(build, "where", pointwise(build, "equal", a, b), half, zero)
        return tuple(
            pointwise(build, "where", pointwise(build, comparison, x, y), d, shared) for x, y in ((a, b), (b, a))
        )

    return derivative


def _where(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
    condition = node.inputs[0]
    zero = constant(build, 0.0, d)
    return (
        None,
        pointwise(build, "where", condition, d, zero),
        pointwise(build, "where", condition, zero, d),
    )


def _sin(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
    return (_product(build, d, pointwise(build, "cos", node.inputs[0])),)


def _cos(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
    return (pointwise(build, "negate", _product(build, d, pointwise(build, "sin", node.inputs[0]))),)


def _softplus(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
    return (_product(build, d, pointwise(build, "sigmoid", node.inputs[0])),)


def _log_sigmoid(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
    return (_product(build, d, pointwise(build, "sigmoid", pointwise(build, "negate", node.inputs[0]))),)


def _power(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
    x, p = node.inputs
    if build.literals.get(p) == 0.0:
        return None, None
    less = pointwise(build, "power", x, pointwise(build, "subtract", p, constant(build, 1.0, p)))
    dx = _product(build, d, _product(build, p, less))
    return dx, pointwise(build, "power_exponent_gradient", d, x, node.output) if build.literals.get(p) is None else None


def _atan2(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
    y, x = node.inputs
    square = pointwise(build, "add", pointwise(build, "multiply", y, y), pointwise(build, "multiply", x, x))
    turned = pointwise(build, "divide", d, square)
    return _product(build, turned, x), pointwise(build, "negate", _product(build, turned, y))


def _subtract(build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
    return d, pointwise(build, "negate", d)


FUNCTIONS |= {
    "add": Function("{0} + {1}", lambda build, node, d: (d, d), linear=((0, 1),), interval=intervals.total),
    "subtract": Function("{0} - {1}", _subtract, linear=((0, 1),), interval=intervals.difference),
    "multiply": Function("{0} * {1}", _multiply, linear=((0,), (1,)), interval=intervals.product),
    "divide": Function("{0} / {1}", _divide, linear=((0,),)),
    # A product and a sum in one pass. Not part of the language.
    "multiply_add": Function("torch.addcmul({2}, {0}, {1})", _multiply_add, linear=((0, 2), (1, 2)), flops=2),
    "negate": Function("-{0}", _scaled(-1.0), linear=((0,),), interval=intervals.negative),
    "maximum": Function("torch.maximum({0}, {1})", _extreme("greater"), interval=intervals.maximum),
    "minimum": Function("torch.minimum({0}, {1})", _extreme("less"), interval=intervals.minimum),
    "where": Function("torch.where({0}, {1}, {2})", _where, linear=((1, 2),), interval=intervals.chosen),
    "less": Function("{0} < {1}", boolean=True),
    "less_equal": Function("{0} <= {1}", boolean=True),
    "greater": Function("{0} > {1}", boolean=True),
    "greater_equal": Function("{0} >= {1}", boolean=True),
    "equal": Function("{0} == {1}", boolean=True),
    "not_equal": Function("{0} != {1}", boolean=True),
    "logical_and": Function("{0} & {1}", boolean=True),
    "logical_or": Function("{0} | {1}", boolean=True),
    "logical_not": Function("~{0}", boolean=True),
    "exp": Function("torch.exp({0})", _of_result("multiply"), flops=8),
    "log": Function("torch.log({0})", _of_input("divide"), flops=8),
    "sqrt": Function("torch.sqrt({0})", _of_result("sqrt_gradient"), flops=4),
    "rsqrt": Function("torch.rsqrt({0})", _of_result("rsqrt_gradient"), flops=4),
    "tanh": Function("torch.tanh({0})", _of_result("tanh_gradient"), flops=10),
    "sigmoid": Function("torch.sigmoid({0})", _of_result("sigmoid_gradient"), flops=10),
    "relu": Function("torch.relu({0})", _of_result("relu_gradient")),
    "abs": Function("torch.abs({0})", _of_input("abs_gradient"), interval=intervals.absolute),
    "gelu": Function("kernels.gelu({0})", _of_input("gelu_gradient"), flops=15),
    "silu": Function("torch.nn.functional.silu({0})", _of_input("silu_gradient"), flops=12),
    "gelu_exact": Function("torch.nn.functional.gelu({0})", _of_input("gelu_exact_gradient"), flops=15),
    "sin": Function("torch.sin({0})", _sin, flops=8),
    "cos": Function("torch.cos({0})", _cos, flops=8),
    "erf": Function("torch.erf({0})", _of_input("erf_gradient"), flops=10),
    "atan2": Function("torch.atan2({0}, {1})", _atan2, flops=20),
    # Of integers, rounded down, as in Python.
    "floor_divide": Function("torch.div({0}, {1}, rounding_mode='floor')", flops=4),
    "remainder": Function("torch.remainder({0}, {1})", flops=4, interval=intervals.remainder),
    "power": Function("({0}) ** {1}", _power, flops=20),
    # Not torch's softplus, which is the identity above 20.
    "softplus": Function("-torch.nn.functional.logsigmoid(-{0})", _softplus, flops=16, temporaries=2),
    "log_sigmoid": Function("torch.nn.functional.logsigmoid({0})", _log_sigmoid, flops=16, temporaries=1),
    "sign": Function("torch.sign({0})", interval=intervals.sign),
    "floor": Function("torch.floor({0})"),
    "round": Function("torch.round({0})"),
    # Derivatives of the above, times the cotangent {0}, in which they are linear.
    "sqrt_gradient": Function("{0} * 0.5 / {1}", linear=((0,),), flops=4, temporaries=1),
    "rsqrt_gradient": Function("{0} * -0.5 * {1} ** 3", linear=((0,),), flops=4, temporaries=2),
    "tanh_gradient": Function("kernels.tanh_gradient({0}, {1})", linear=((0,),), flops=3),
    "sigmoid_gradient": Function("kernels.sigmoid_gradient({0}, {1})", linear=((0,),), flops=3),
    "relu_gradient": Function("kernels.relu_gradient({0}, {1})", linear=((0,),)),
    "abs_gradient": Function("{0} * torch.sign({1})", linear=((0,),), flops=2, temporaries=1),
    "gelu_gradient": Function("kernels.gelu_gradient({0}, {1})", linear=((0,),), flops=25, temporaries=2),
    "silu_gradient": Function("kernels.silu_gradient({0}, {1})", linear=((0,),), flops=15),
    "gelu_exact_gradient": Function("kernels.gelu_exact_gradient({0}, {1})", linear=((0,),), flops=25),
    "erf_gradient": Function("kernels.erf_gradient({0}, {1})", linear=((0,),), flops=12, temporaries=1),
    "power_exponent_gradient": Function(
        "kernels.power_exponent_gradient({0}, {1}, {2})", linear=((0,), (2,)), flops=12, temporaries=2
    ),
}


# ---------------------------------------------------------------- what derivatives are made of

Formula = Callable[["Builder", "Sequence[Value]"], "Value"]


class _Terms:
    """The functions of the table, on values and numbers."""

    def __init__(self, build: Builder) -> None:
        self.build = build

    def __call__(self, function: str, *operands: Value | float) -> Value:
        like = next(each for each in operands if not isinstance(each, float))
        values = [constant(self.build, each, like) if isinstance(each, float) else each for each in operands]
        return pointwise(self.build, function, *values)

    def product(self, *factors: Value | float) -> Value:
        """Of all factors."""
        first, second, *others = factors
        result = self("multiply", first, second)
        for factor in others:
            result = self("multiply", result, factor)
        return result

    def normal(self, x: Value, scale: float) -> Value:
        """`scale * exp(-x²)`."""
        return self("multiply", self("exp", self("negate", self.product(x, x))), scale)


def _times(slope: Callable[[_Terms, Value], Value]) -> Formula:
    """The formula of a derivative: the cotangent times the slope at the other operand."""

    def formula(build: Builder, operands: Sequence[Value]) -> Value:
        f = _Terms(build)
        return f("multiply", operands[0], slope(f, operands[1]))

    return formula


def _gelu_slope(f: _Terms, x: Value) -> Value:
    """With t = tanh(u) and u = c·(x + 0.044715·x³): (1 + t)/2 + x·(1 − t²)·u'/2."""
    c, cube = sqrt(2 / pi), 0.044715
    square = f.product(x, x)
    t = f("tanh", f("multiply", f.product(x, f("add", f("multiply", square, cube), 1.0)), c))
    inner = f("multiply", f("add", f("multiply", square, 3 * cube), 1.0), c)
    bend = f.product(x, f("subtract", 1.0, f.product(t, t)), inner)
    return f("multiply", f("add", f("add", t, 1.0), bend), 0.5)


def _gelu_exact_slope(f: _Terms, x: Value) -> Value:
    """The normal distribution's function, and x times its density."""
    scaled = f("multiply", x, sqrt(0.5))
    below = f("multiply", f("add", f("erf", scaled), 1.0), 0.5)
    return f("add", below, f("multiply", x, f.normal(scaled, sqrt(0.5 / pi))))


def _silu_slope(f: _Terms, x: Value) -> Value:
    """s + x·s·(1 − s), of s = sigmoid(x)."""
    s = f("sigmoid", x)
    return f("add", s, f.product(x, s, f("subtract", 1.0, s)))


def _power_exponent(build: Builder, operands: Sequence[Value]) -> Value:
    """d·y·log(x), and zero where x is."""
    f, (d, x, y) = _Terms(build), operands
    zero = f("equal", x, 0.0)
    return f("where", zero, f("multiply", d, 0.0), f.product(d, y, f("log", f("where", zero, 1.0, x))))


FORMULAS: dict[str, Formula] = {
    "sqrt_gradient": _times(lambda f, y: f("divide", 0.5, y)),
    "rsqrt_gradient": _times(lambda f, y: f.product(y, y, y, -0.5)),
    "tanh_gradient": _times(lambda f, y: f("subtract", 1.0, f.product(y, y))),
    "sigmoid_gradient": _times(lambda f, y: f.product(y, f("subtract", 1.0, y))),
    "relu_gradient": _times(lambda f, y: f("sign", y)),
    "abs_gradient": _times(lambda f, x: f("sign", x)),
    "gelu_gradient": _times(_gelu_slope),
    "silu_gradient": _times(_silu_slope),
    "gelu_exact_gradient": _times(_gelu_exact_slope),
    "erf_gradient": _times(lambda f, x: f.normal(x, 2 / sqrt(pi))),
    "power_exponent_gradient": _power_exponent,
}
