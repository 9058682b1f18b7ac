"""Random programs over all of the language, with random meshes, layouts and schedules.

A `Maker` writes a file from the choices of a `random.Random` (Hypothesis has one whose choices shrink). Expressions are
typed as they are written. `cutting` programs keep to what docs/reference promises microbatches: the batch is reduced
in the loss and in metrics only, but for what is made of inputs and samples alone. Whatever is written must be accepted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from random import Random

from attrs import define, evolve, field, frozen

MOST_AXES = 4
MOST_ELEMENTS = 1500
MOST_RANKS = 12

NUMBERS = ("0.5", "2", "1.5", "0.25", "3", "0.1", "1")
# Of integers of eight bits: what wraps around, and what keeps a part of their bits.
WRAPPING = ("({} * 77)", "({} - 100)", "(-{})", "abs({})", "floor_divide({}, 4)", "remainder({}, 16)", "maximum({}, 5)")
SMALL = ("0.5", "0.1", "0.25", "0.3")
UNARY = {
    "relu": "relu({})",
    "gelu": "gelu({})",
    "silu": "silu({})",
    "sigmoid": "sigmoid({})",
    "tanh": "tanh({})",
    "abs": "abs({})",
    "stop_gradient": "stop_gradient({})",
    "negate": "(-{})",
    "exp": "exp(tanh({}))",
    "log": "log(abs({}) + 0.5)",
    "sqrt": "sqrt(abs({}) + 0.25)",
    "rsqrt": "rsqrt(relu({}) + 0.5)",
    "gelu_exact": "gelu({}, exact = true)",
    "sin": "sin({})",
    "cos": "cos({})",
    "erf": "erf({})",
    "softplus": "softplus({})",
    "log_sigmoid": "log_sigmoid({})",
    "power": "power(abs({}) + 0.5, 1.5)",
    "base": "power(2, tanh({}))",
}
INITIAL = ("normal(0.5)", "uniform(1.0)", "ones()", "zeros()", "constant(0.3)", "xavier()", "kaiming()", "normal(1.0)")
SCALINGS = ("llama3(factor = 4, original = 20)", "yarn(factor = 8, original = 30, fast = 3)")
RATES = (
    "0.01",
    "linear(peak = 0.02, warmup = 2, total = 5)",
    "cosine(peak = 0.02, warmup = 0, total = 4, floor = 0.001)",
    "wsd(peak = 0.02, warmup = 1, total = 4, decay = 2)",
    "inverse_sqrt(peak = 0.02, warmup = 2)",
    "stepwise(peak = 0.02, warmup = 1, every = 1, factor = 0.3)",
)
EVALUATIONS = ("", "eval = every(2, batches = 1)", "eval = every(1, batches = 3)", "eval = every(3, batches = 2)")
BAD_STEPS = (
    "on_bad_step = skip",
    "on_bad_step = skip(at_most = 1, spike = 4, window = 1)",
    "on_bad_step = skip(spike = 1.5, window = 2)",
    "on_bad_step = skip(spike = 1.01, window = 1)",
)
VALIDATIONS = ("", "", "validate = after(calm = 0)", "validate = after(calm = 1)")
SCHEDULES = {
    "gpipe": "",
    "one_f_one_b": "",
    "interleaved_1f1b": "chunks",
    "looped_bfs": "chunks",
    "zb_h1": "",
    "zb_h2": "",
    "zb_v": "two",
    "v_half": "two",
    "v_min": "two",
    "dualpipe_v": "two",
    "interlaced": "",
    "auto": "chunks",
    "policy": "chunks",
}
SLOT = re.compile("\1(\\w+)\2")


# Functions of operations of one's own, along the last axis of their first operand.
OWN = """\
import torch


def weighted(x, w):
    return torch.softmax(x, -1) * w


def weighted_backward(d, x, w):
    p, g = torch.softmax(x, -1), d * w
    return p * (g - (p * g).sum(-1, keepdim=True)), (d * p).reshape(-1, w.shape[0]).sum(0)


def product(x, w):
    return torch.matmul(x, w) * 0.5


def product_backward(d, x, w):
    rows = x.reshape(-1, x.shape[-1])
    return torch.matmul(d, w.t()) * 0.5, torch.matmul(rows.t(), d.reshape(-1, d.shape[-1])) * 0.5


def running(x):
    return x.cumsum(-1) * 0.5


def running_backward(d, x):
    return d.flip(-1).cumsum(-1).flip(-1) * 0.5


def counted(x, ids):
    return torch.tanh(x * (ids + 1).to(x.dtype))


def counted_backward(d, x, ids):
    n = (ids + 1).to(x.dtype)
    return d * n * (1 - torch.tanh(x * n).square())


def moments(x):
    return x.mean(-1), torch.tanh(x * x).mean(-1)


def moments_backward(d, e, x):
    t = torch.tanh(x * x)
    return (d[..., None] + e[..., None] * (1 - t * t) * 2 * x) / x.shape[-1]
"""
# For each: what its second operand is, in which operands it is linear, and whether it can be split along the last axis.
OWN_FUNCTIONS = {
    "weighted": ("row", ("w",), False),
    "product": ("matrix", ("x", "w"), False),
    "running": ("", ("x",), False),
    "counted": ("ids", (), True),
    "moments": ("two", (), False),
}


@frozen
class Expression:
    """A text of the language, with its type. `alone`: made of inputs, samples and numbers only."""

    text: str
    dtype: str
    axes: frozenset[str]
    alone: bool = False

    def __str__(self) -> str:
        return self.text


@frozen
class Block:
    """A block: the axes of its first input and how many results it has. With `ids`, it takes integers with these axes,
    too, which index an axis `limit`. `mentions` are all axes that it is written over.
    """

    name: str
    axes: frozenset[str]
    results: int
    ids: frozenset[str] | None
    limit: str
    mentions: frozenset[str]


@frozen
class Program:
    """A file with a mesh, a layout and a schedule. `single` are the overrides that make it a single-device program.

    A parameter can be made to reach the loss after all: `template` has a slot for each.
    """

    template: str
    single: tuple[str, ...]
    arrays: tuple[tuple[str, str, tuple[int, ...], int], ...]  # of data.npz: name, dtype, shape, limit
    ids: int  # those of ids.bin are below this
    batch: int = 1
    planted: tuple[int, float] = (0, 0.0)  # an item of `bad`, and its share of the batch's mean; all others are 0
    reaching: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        return SLOT.sub(lambda slot: f" + 0.1 * mean({slot[1]})" if slot[1] in self.reaching else "", self.template)

    @property
    def sharing(self) -> Program | None:
        """Half of the programs whose model calls a block, with one set of parameters for all its calls there."""
        first, model, rest = self.template.partition("\nmodel m(")
        header, brace, body = rest.partition("{\n")
        called = next((name for name in re.findall(r"block (\w+)\(", first) if f"{name}(" in body), None)
        if len(self.template) % 2 or called is None or re.search(rf"\w\.{called}\b", body):
            return None
        name, copied = f"both_{called}", ""
        body = re.sub(rf"\b{called}\b", name, body)
        if len(self.template) % 3 and body.count(f"{name}(") > 1:
            copied = f"  frozen copy fixed = {name}\n"
            if len(self.template) % 5 < 3:
                copied = f"  ema copy fixed = {name}(decay = 0.9)\n"
            first_call, *others = body.split(f"{name}(")
            body = f"{first_call}fixed({f'{name}('.join(others)}"
        return evolve(self, template=f"{first}{model}{header}{brace}  share {name} = {called}\n{copied}{body}")

    def __str__(self) -> str:
        return self.text


@define(eq=False)
class Body:
    """What is bound in a block, a repeat or the model that is being written."""

    scope: dict[str, Expression] = field(factory=dict)
    rebindable: set[str] = field(factory=set)
    parameters: list[str] = field(factory=list)  # those that are declared here
    buffers: list[Expression] = field(factory=list)  # as well
    number: str = ""  # that of an iteration
    turns: int = 0  # of the repeat
    kept: dict[str, tuple[frozenset[str], int]] = field(factory=dict)  # by name the axes, and of how many iterations


@define(eq=False)
class Maker:
    """Writes one program."""

    random: Random
    cutting: bool = True
    most_elements: int = MOST_ELEMENTS
    sizes: dict[str, int] = field(factory=dict)
    lines: list[str] = field(factory=list)
    blocks: list[Block] = field(factory=list)
    operations: dict[str, str] = field(factory=dict)  # those of one's own, by name
    limits: dict[str, str] = field(factory=dict)
    declared: dict[str, frozenset[str]] = field(factory=dict)  # all parameters, with their axes
    repeats: dict[str, int] = field(factory=dict)  # of the model itself, with their iterations
    body: Body = field(factory=Body)
    count: int = 0
    indent: int = 1
    inside: int = 0  # how deep in blocks and repeats
    planted: bool = False  # whether a step is made bad
    several_losses: bool = False
    constants: dict[str, str] = field(factory=dict)
    scanning: int = 0  # how deep in scans, which update no buffers
    updating: set[str] = field(factory=set)  # blocks that do

    # ------------------------------------------------------------ choices

    def one(self, choices: Sequence):
        return choices[self.random.randrange(len(choices))]

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def some(self, choices, least: int = 0, most: int | None = None) -> list[str]:
        pool = sorted(choices)
        most = len(pool) if most is None else min(most, len(pool))
        count = self.random.randint(min(least, most), most)
        return [pool.pop(self.random.randrange(len(pool))) for _ in range(count)]

    def shuffled(self, choices) -> list[str]:
        return self.some(choices, len(choices))

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def line(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    def listed(self, names) -> str:
        """One name, or several in brackets, in random order."""
        names = self.shuffled(names)
        return names[0] if len(names) == 1 else f"[{', '.join(names)}]"

    def type(self, axes, dtype: str = "f32") -> str:
        return f"{'' if dtype == 'f32' else dtype}[{', '.join(self.shuffled(axes))}]"

    def fits(self, axes) -> bool:
        # In a scan, its axis is none.
        return len(axes) <= MOST_AXES and set(axes) <= set(self.sizes) and self.elements(axes) <= self.most_elements

    def elements(self, axes) -> int:
        return prod(self.sizes[name] for name in axes)

    def named(self, dtype: str = "f32", where: Callable[[Expression], bool] = lambda e: True) -> Expression | None:
        found = [e for e in self.body.scope.values() if e.dtype == dtype and where(e)]
        return self.one(found) if found else None

    def others(self, *without) -> list[str]:
        """All axes but these and the batch."""
        excluded = {"batch"}.union(*without)
        return [name for name in self.sizes if name not in excluded]

    def reducible(self, *operands: Expression) -> frozenset[str]:
        """The axes of the first operand that may be reduced: the batch only of what is alone, or anywhere."""
        whole = not self.cutting or all(each.alone for each in operands)
        return operands[0].axes if whole else operands[0].axes - {"batch"}

    # ------------------------------------------------------------ expressions

    def expression(self, depth: int = 2) -> Expression:
        """A float tensor."""
        for _ in range(4):
            if depth <= 0:
                break
            lines, scope, parameters = len(self.lines), dict(self.body.scope), list(self.body.parameters)
            made = getattr(self, f"_{self.one(KINDS)}")(depth - 1)
            if made is not None and self.fits(made.axes):
                return made
            # What was declared for it goes with it.
            del self.lines[lines:]
            self.body.scope, self.body.parameters = scope, parameters
        found = self.named()
        return found if found is not None else self.parameter(frozenset(self.some(self.others(), 0, 2)))

    def _made(self, text: str, axes, *parts: Expression, dtype: str = "f32") -> Expression:
        return Expression(text, dtype, frozenset(axes), all(part.alone for part in parts))

    def number(self) -> str:
        if self.chance(15):
            return f"size({self.one(sorted(self.sizes))}) / {self.one(('4', '8', '3'))}"
        if self.chance(5):
            return f"1 / sqrt(size({self.one(sorted(self.sizes))}))"
        if self.chance(10):
            return self.constant()
        return self.one(NUMBERS)

    def constant(self) -> str:
        """The name of a number: a new one, which may be computed from another, or one that is there already."""
        known = self.one(sorted(self.constants)) if self.constants else None
        if known and self.chance(50):
            return known
        name = self.fresh("number_")
        value = self.one((*NUMBERS, "25%", f"size({self.one(sorted(self.sizes))}) / 4"))
        self.constants[name] = f"{known} / 2" if known and self.chance(30) else value
        return name

    def _name(self, depth: int) -> Expression | None:
        if not self.body.kept or self.chance(30):
            return self.named()
        name = self.one(sorted(self.body.kept))
        axes, count = self.body.kept[name]
        index = str(self.random.randrange(count))
        if self.body.number and self.body.turns <= count and self.chance(80):
            index = self.one((self.body.number, f"{self.body.turns - 1} - {self.body.number}"))
        return Expression(f"{name}[{index}]", "f32", axes)

    def _unary(self, depth: int) -> Expression | None:
        x = self.expression(depth)
        return evolve(x, text=self.one(list(UNARY.values())).format(x))

    def _arithmetic(self, depth: int) -> Expression | None:
        a = self.expression(depth)
        sign = self.one("+-*+*/")
        if self.chance(25):
            if self.chance(30) and sign != "/":
                return evolve(a, text=f"({self.number()} {sign} {a})")
            return evolve(a, text=f"({a} {sign} {self.number()})" if sign != "/" else f"({a} / {self.one(NUMBERS)})")
        b = a if self.chance(8) else self.within(self.expression(depth), a.axes)
        if b.axes < a.axes and self.chance(15):
            b = self.widened(b, a.axes)
        if self.chance(30):
            a, b = b, a
        text = f"({a} / ({b} * {b} + 0.5))" if sign == "/" else f"({a} {sign} {b})"
        return self._made(text, a.axes | b.axes, a, b)

    def _mode(self, depth: int) -> Expression | None:
        a = self.expression(depth)
        b = self.within(self.expression(depth), a.axes)
        both = self.shuffled([str(a), str(b) if self.chance(80) else "0.5"])
        return self._made(f"where(training(), {', '.join(both)})", a.axes, a, b)

    def _extreme(self, depth: int) -> Expression | None:
        a = self.expression(depth)
        function = self.one(("maximum", "minimum"))
        if self.chance(40):
            pair = self.shuffled([str(a), self.one(("0.0", "0.5", "-0.25"))])
            return evolve(a, text=f"{function}({', '.join(pair)})")
        b = self.within(self.expression(depth), a.axes)
        return self._made(f"{function}({', '.join(self.shuffled([str(a), str(b)]))})", a.axes, a, b)

    def _where(self, depth: int) -> Expression | None:
        c = self.boolean(depth)
        a = self.expression(depth)
        if not (c.axes <= a.axes or a.axes <= c.axes):
            a = self.within(a, c.axes)
        axes = a.axes | c.axes
        parts = [c, a]
        if self.chance(60):
            parts.append(self.within(self.expression(depth), axes))
            both = [str(a), str(parts[-1])]
        else:
            both = [str(a), self.one(("0.0", "1.0", "0.3"))]
        return self._made(f"where({c}, {', '.join(self.shuffled(both))})", axes, *parts)

    def boolean(self, depth: int) -> Expression:
        """A boolean tensor. Floats are compared with what they are not likely to equal."""
        found = self.named("bool")
        if found is not None and self.chance(30):
            return found
        if found is not None and self.chance(10):
            other = self.boolean(depth - 1) if depth > 0 else found
            if other.axes <= found.axes:
                return self._made(f"({found} {self.one(('==', '!='))} {other})", found.axes, found, other, dtype="bool")
        if depth > 0 and self.chance(20):
            x = self.boolean(depth - 1)
            y = self.boolean(depth - 1)
            if not (x.axes <= y.axes or y.axes <= x.axes):
                return self._made(f"(not {x})", x.axes, x, dtype="bool")
            pair = f" {self.one(('and', 'or'))} {self.one(('', 'not '))}".join(self.shuffled([str(x), str(y)]))
            return self._made(f"({pair})", x.axes | y.axes, x, y, dtype="bool")
        if self.chance(35):
            x = self.integer(depth)
            sign = self.one(("<", "<=", ">", ">=", "==", "!="))
            return self._made(f"({x} {sign} {self.one('012')})", x.axes, x, dtype="bool")
        x = self.expression(depth)
        sign = self.one("<>")
        if self.chance(50):
            pair = [str(x), self.one(("0.0137", "0.3712", "-0.2139"))]
            left, right = pair if self.chance(70) else pair[::-1]
            return self._made(f"({left} {sign} {right})", x.axes, x, dtype="bool")
        y = self.within(self.expression(depth), x.axes)
        return self._made(f"({x} {sign} {y} + 0.0131)", x.axes, x, y, dtype="bool")

    def integer(self, depth: int) -> Expression:
        """An integer tensor."""
        found = self.named("i64")
        if found is not None and self.chance(45):
            return found
        if depth <= 0 or self.chance(15):
            axis = self.one(sorted(self.sizes))
            return Expression(f"iota({axis})", "i64", frozenset((axis,)), True)
        if self.chance(30):
            x = self.boolean(depth - 1)
            return self._made(f"cast({x}, i64)", x.axes, x, dtype="i64")
        if self.chance(12):
            made = self.expression(depth - 1)
            axes = self.some(self.reducible(made), 1, 1)
            if axes:
                # Apart from each other even where they would be equal but for rounding.
                apart = f"{made} + cast(iota({axes[0]}), f32) * 0.0173"
                text = f"arg_max({apart}, over = {axes[0]})"
                return self._made(text, made.axes - set(axes), made, dtype="i64")
        x = self.integer(depth - 1)
        over = self.some(self.reducible(x), 0, 1)
        if over and self.chance(40):
            return self.reduction(self.one(("sum", "max", "min")), x, frozenset(over))
        how = self.one(("({} + 1)", "({} * 2)", "(2 - {})", "maximum({}, 1)", "minimum({}, 2)", "abs({} - 2)", "(-{})"))
        return evolve(x, text=how.format(x))

    def _integers(self, depth: int) -> Expression | None:
        x = self.integer(depth)
        if self.chance(75):
            return self._made(f"(cast({x}, f32) * 0.3)", x.axes, x)
        small = f"cast({x}, {self.one(('u8', 'i8'))})"
        for _ in range(self.one((0, 1, 2))):
            small = self.one(WRAPPING).format(small)
        return self._made(f"(cast({small}, f32) * 0.01)", x.axes, x)

    def _truncated(self, depth: int) -> Expression | None:
        x = self.expression(depth)
        return self._made(f"(cast(cast({x} * 3 + 0.0173, i64), f32) * 0.2)", x.axes, x)

    def _booleans(self, depth: int) -> Expression | None:
        x = self.boolean(depth)
        return self._made(f"cast({x}, f32)", x.axes, x)

    def _dot(self, depth: int) -> Expression | None:
        a = self.expression(depth)
        if self.chance(65):
            over = frozenset(self.some(a.axes - {"batch"}, 1, 2))
            if not over:
                return None
            b = self.parameter(over | frozenset(self.some(self.others(a.axes), 0, 2)))
        else:
            b = self.expression(depth)
            over = frozenset(self.some(self.reducible(a, b), 1, 2))
            if not over:
                return None
            b = self.widened(b, b.axes | over)
            if not b.alone and "batch" in over and self.cutting:
                return None
        if not self.fits(a.axes | b.axes):
            return None
        pair = self.shuffled([str(a), str(b)])
        return self._made(f"(dot({', '.join(pair)}, over = {self.listed(over)}) * 0.5)", (a.axes | b.axes) - over, a, b)

    def windows(self, x: Expression, most: int) -> tuple[dict[str, str], frozenset[str], str] | None:
        """How windows slide along some axes of a tensor: positions by axes, the axes of a window, and the arguments."""
        found: dict[str, str] = {}
        size = self.shuffled({"window", "pane"} - x.axes)
        steps, ends, spreads = [], [], []
        for axis in self.some(x.axes - {"batch"}, 1, min(most, len(size))):
            taken = {*x.axes, *found.values(), *size} - {axis}
            ways = [
                (into, step, (before, after), spread)
                for step in (1, 2, 3)
                for spread in (1, 2)
                for before in (0, 1, 2)
                for after in (before, *(each for each in (0, 1) if self.chance(30)))
                if (room := self.sizes[axis] + before + after - spread * (self.sizes[size[len(found)]] - 1) - 1) >= 0
                for into in sorted(self.sizes)
                if into not in taken and into != "batch" and self.sizes[into] == room // step + 1
            ]
            if not ways:
                return None
            found[axis], step, end, spread = self.one(ways)
            steps.append(step), ends.append(end), spreads.append(spread)
        if not found:
            return None

        def listed(name: str, values: list[int], usual: int) -> str:
            if len(set(values)) == 1 and self.chance(70):
                return "" if values[0] == usual and self.chance(70) else f", {name} = {values[0]}"
            return f", {name} = [{', '.join(map(str, values))}]"

        if all(before == after for before, after in ends):
            padding = listed("padding", [before for before, _ in ends], 0)
        else:
            padding = f", padding = [{', '.join(f'[{before}, {after}]' for before, after in ends)}]"
        brackets = len(found) > 1 or self.chance(30)
        sides = [f"[{', '.join(side)}]" if brackets else next(iter(side)) for side in (found, found.values())]
        own = size[: len(found)]
        arguments = f"{' -> '.join(sides)}, size = [{', '.join(own)}]"
        return found, frozenset(own), arguments + listed("stride", steps, 1) + padding + listed("dilation", spreads, 1)

    def _patches(self, depth: int) -> Expression | None:
        x = self.expression(depth)
        way = self.windows(x, 2)
        if way is None:
            return None
        found, own, arguments = way
        axes = x.axes - found.keys() | {*found.values()} | own
        if not self.fits(axes):
            return None
        fill = self.one(("", "", ", fill = -10", ", fill = 0.5"))
        made = evolve(x, text=f"patches({x}, {arguments}{fill})", axes=axes)
        if self.chance(30):
            return made
        return self.reduction(self.one(("max", "mean", "sum", "min")), made, own)

    def _conv(self, depth: int) -> Expression | None:
        x = self.expression(depth)
        way = self.windows(x, 2)
        if way is None:
            return None
        found, own, arguments = way
        left = x.axes - found.keys() - own
        over = frozenset(self.some(left - {"batch"}, 0, 2))
        groups = frozenset(self.some(left - over, 0, 1)) if self.chance(40) else frozenset()
        filters = frozenset(self.some(self.others(x.axes, found.values(), own), 0, 2))
        if not self.fits(x.axes | own) or not self.fits(own | over | groups | filters):
            return None
        if "batch" in groups:
            kernel = self.widened(self.within(self.expression(depth), groups), own | over | groups)
            filters = frozenset()
        else:
            kernel = self.parameter(own | over | groups | filters)
        for name, axes in (("over", over), ("groups", groups)):
            arguments += f", {name} = {self.listed(axes)}" if axes else ""
        axes = left - over | {*found.values()} | filters
        return self._made(f"(conv({x}, {kernel}, {arguments}) * 0.5)", axes, x, kernel)

    def reduction(self, function: str, x: Expression, over: frozenset[str]) -> Expression:
        written = (
            f"{function}({x})" if over == x.axes and self.chance(50) else f"{function}({x}, over = {self.listed(over)})"
        )
        return evolve(x, text=written, axes=x.axes - over)

    def _reduce(self, depth: int) -> Expression | None:
        x = self.expression(depth)
        over = frozenset(self.some(self.reducible(x), 1, 2))
        return self.reduction(self.one(("sum", "mean", "max", "min", "mean")), x, over) if over else None

    def _norm(self, depth: int) -> Expression | None:
        x = self.expression(depth)
        over = frozenset(self.some(self.reducible(x), 1, 2))
        if not over:
            return None
        function = self.one(("softmax", "log_softmax", "layer_norm", "rms_norm", "layer_norm", "rms_norm"))
        parts = [x]
        arguments = [str(x), f"over = {self.listed(over)}"]
        if function.endswith("norm"):
            for slot in ("scale", "shift"):
                if self.chance(45):
                    axes = over if self.chance(70) else frozenset(self.some(x.axes - {"batch"}))
                    given = self.parameter(axes) if self.chance(70) else self.within(self.expression(depth), x.axes)
                    parts.append(given)
                    arguments.append(f"{slot} = {given}")
            if self.chance(60):
                arguments.append(f"eps = {self.one(('0.1', '1e-2', '1e-3'))}")
        return self._made(f"{function}({', '.join(arguments)})", x.axes, *parts)

    def _grad(self, depth: int) -> Expression | None:
        """The gradient by a name of what is made of it here: nothing before it has to have a second derivative."""
        x = self.named(where=lambda e: bool(e.axes) and ("batch" in e.axes or not self.cutting))
        if x is None:
            return None
        y = x
        for _ in range(self.random.randint(1, 4)):
            kind = self.random.randrange(6)
            over = frozenset(self.some(y.axes - {"batch"} if self.cutting else y.axes, 1, 2))
            if kind == 0 and over:
                y = evolve(
                    y, text=f"{self.one(('softmax', 'layer_norm', 'rms_norm'))}({y}, over = {self.listed(over)})"
                )
            elif kind == 1 and over:
                y = self.reduction(self.one(("sum", "mean", "max")), y, over)
            elif kind == 2:
                w = self.parameter(frozenset(self.some(y.axes - {"batch"})))
                y = self._made(f"({y} * {w})", y.axes, y, w)
            elif kind == 3 and over and "batch" not in over:
                new = self.some(self.others(y.axes), 0, 1)
                w = self.parameter(frozenset([*over, *new]))
                y = self._made(f"dot({y}, {w}, over = {self.listed(over)})", (y.axes - over).union(new), y, w)
            else:
                y = evolve(
                    y, text=self.one([text for name, text in UNARY.items() if name != "stop_gradient"]).format(y)
                )
        return evolve(y, text=f"grad({y}, {x})", axes=x.axes) if self.fits(y.axes) else None

    def _dropout(self, depth: int) -> Expression | None:
        x = self.expression(depth)
        return evolve(x, text=f"dropout({x}, {self.one(('0.25', 'rate = 0.5', '0', '10%'))})")

    def _embedding(self, depth: int) -> Expression | None:
        ids = self.named("i64", lambda e: e.text in self.limits)
        if ids is None:
            return None
        over = self.limits[ids.text]
        if over in ids.axes or over not in self.sizes:
            return None
        table = self.parameter(frozenset((over, *self.some(self.others({over}), 0, 2))))
        if self.chance(25):
            made = self.expression(depth)
            table = made if over in made.axes else table
        return self._made(f"embedding({ids}, {table}, over = {over})", ids.axes | (table.axes - {over}), ids, table)

    def _computed_ids(self, depth: int) -> Expression | None:
        """An embedding of ids that are computed, and in range."""
        x = self.integer(depth)
        over = self.one(self.others(x.axes))
        ids = f"minimum(maximum({x}, 0), size({over}) - 1)"
        table = self.parameter(frozenset((over, *self.some(self.others({over}), 0, 1))))
        return self._made(f"embedding({ids}, {table}, over = {over})", x.axes | (table.axes - {over}), x, table)

    def chosen(self, depth: int, axes: frozenset[str]) -> tuple[Expression, Expression] | None:
        """Weights and ids of some experts, for some or all of these axes."""
        if axes & {"experts", "chosen"}:
            return None
        known = self.named("i64", lambda e: self.limits.get(e.text) == "experts" and e.axes - {"chosen"} <= axes)
        if known is not None and self.chance(30):
            weights = self.named("f32", lambda e: e.axes <= known.axes) or self.parameter(frozenset())
            return self.widened(weights, known.axes), known
        scores = self.within(self.expression(depth), axes | {"experts"})
        scores = self.widened(scores, scores.axes | {"experts"})
        if not self.fits(scores.axes | {"chosen"}):
            return None
        # What is equal by chance, such as zeros, would be in an order that rounding decides.
        apart = f"tanh({scores}) + 0.3719 * cast(iota(experts), f32)"
        x = self.widened(self.expression(depth - 1), scores.axes) if self.chance(25) else None
        by = f", by = {apart}" if x is not None and x.axes == scores.axes else ""
        weight, ids = self.fresh("v"), self.fresh("v")
        self.line(f"let {weight}, {ids} = top_k({x if by else apart}, experts -> chosen{by})")
        made = scores.axes - {"experts"} | {"chosen"}
        alone = scores.alone and (not by or x.alone)
        self.body.scope[weight] = Expression(weight, "f32", made, alone)
        self.body.scope[ids] = Expression(ids, "i64", made, scores.alone)
        self.limits[ids] = "experts"
        return self.body.scope[weight], self.body.scope[ids]

    def _routed(self, depth: int) -> Expression | None:
        """A product with the matrix that an id names."""
        x = self.expression(depth)
        found = self.chosen(depth - 1, x.axes)
        if found is None:
            return None
        weight, ids = found
        if self.chance(40) and "chosen" not in x.axes and self.fits(x.axes | ids.axes):
            x = self.widened(x, x.axes | {"chosen"} & ids.axes)
        over = frozenset(self.some(x.axes - ids.axes - {"batch"}, 1, 2))
        if not over:
            return None
        taken = x.axes | ids.axes | {"experts"}
        w = self.parameter(over | {"experts"} | frozenset(self.some(self.others(taken), 0, 2)))
        if self.chance(15) and self.fits(w.axes | (x.axes & {"heads"})):
            w = self.widened(w, w.axes | (x.axes & {"heads"}))
        result = (x.axes - over) | ids.axes | (w.axes - over - {"experts"})
        if not self.fits(result):
            return None
        text = f"(routed_dot({x}, {w}, {ids}, over = {self.listed(over)}, along = experts) * 0.5)"
        made = self._made(text, result, x, w, ids)
        if weight.axes <= result and "chosen" in result and self.chance(60):
            made = self._made(f"sum({made} * {weight}, over = chosen)", result - {"chosen"}, made, weight)
        return made

    def _slotted(self, depth: int) -> Expression | None:
        """Tokens in slots, something done to them there, and back."""
        x = self.expression(depth)
        over = [name for name in ("seq", "spot", "left") if name in x.axes]
        if not over or x.axes & {"experts", "chosen", "slots"}:
            return None
        found = self.chosen(depth - 1, x.axes)
        inside = x.axes - {over[0]} | {"experts", "slots"}
        if found is None or over[0] not in found[1].axes or not self.fits(inside):
            return None
        weight, ids = found
        arguments = f"{ids}, over = {over[0]}, into = [experts, slots]"
        made = self._made(f"dispatch({x}, {arguments})", inside, x, ids)
        if self.chance(60):
            scale = self.parameter(frozenset(("experts", *self.some(inside - {"batch", "experts"}, 0, 1))))
            made = self._made(f"({self.one(('tanh', 'silu', 'relu'))}({made}) * {scale})", inside, made, scale)
        if self.chance(20):
            return made
        weight = weight if weight.axes <= ids.axes else self.parameter(frozenset())
        text = f"combine({made}, {ids}, {weight}, over = {over[0]}, from = [experts, slots])"
        return self._made(text, x.axes, made, weight)

    def _load(self, depth: int) -> Expression | None:
        ids = self.named("i64", lambda e: self.limits.get(e.text) == "experts" and "experts" not in e.axes)
        over = ids and self.some(self.reducible(ids), 1, 2)
        if not over:
            return None
        counted = self._made("", (ids.axes - set(over)) | {"experts"}, ids)
        return evolve(counted, text=f"(load({ids}, over = {self.listed(over)}, into = experts) * 0.3)")

    def ids(self, over: str, depth: int) -> Expression | None:
        """Ids within an axis that they do not have."""
        found = self.named("i64", lambda e: self.limits.get(e.text) == over and over not in e.axes)
        if found is not None and self.chance(40):
            return found
        x = self.integer(depth)
        return None if over in x.axes else evolve(x, text=f"minimum(maximum({x}, 0), size({over}) - 1)")

    def _by(self, depth: int) -> Expression | None:
        """What elements with one id have together."""
        x = self.expression(depth)
        into = self.some(self.others(x.axes), 1, 1)
        ids = self.ids(into[0], depth) if into else None
        along = self.some(ids.axes - {"batch"}, 1, 2) if ids is not None else []
        if ids is None or not along or not ids.axes <= x.axes:
            return None
        function = self.one(("sum_by", "sum_by", "mean_by", "max_by", "softmax_by"))
        axes = x.axes if function == "softmax_by" else (x.axes - set(along)) | {into[0]}
        return self._made(f"{function}({x}, {ids}, {self.listed(along)} -> {into[0]})", axes, x, ids)

    def _gather(self, depth: int) -> Expression | None:
        x = self.expression(depth)
        along = self.some(self.reducible(x), 1, 1)
        if along and along[0] != "batch" and self.chance(20):  # an evaluation of a part of the batch has no whole set
            position = self.one(["0", f"size({along[0]}) - 1"])
            return self._made(f"gather({x}, {position}, along = {along[0]})", x.axes - {along[0]}, x)
        ids = self.ids(along[0], depth) if along else None
        if ids is None or along[0] not in self.reducible(x, ids):
            return None
        axes = (x.axes - {along[0]}) | ids.axes
        if self.chance(20):
            return self._made(f"cast(gather({x} > 0.0137, {ids}, along = {along[0]}), f32)", axes, x, ids)
        return self._made(f"gather({x}, {ids}, along = {along[0]})", axes, x, ids)

    def _one_hot(self, depth: int) -> Expression | None:
        axis = self.one(self.others())
        ids = self.ids(axis, depth)
        return None if ids is None else self._made(f"one_hot({ids}, {axis})", ids.axes | {axis}, ids)

    def _cumsum(self, depth: int) -> Expression | None:
        x = self.expression(depth)
        over = self.some(self.reducible(x), 1, 1)
        return evolve(x, text=f"(cumsum({x}, over = {over[0]}) * 0.5)") if over else None

    def _rope(self, depth: int) -> Expression | None:
        x = self.expression(depth)
        pairs = [name for name in self.shuffled(x.axes - {"batch"}) if self.sizes[name] % 2 == 0][:1]
        over = self.some(self.reducible(x) - set(pairs), 1, 1)
        if not pairs or not over:
            return None
        scaling = self.one(("", "", *(f", scaling = {each}" for each in SCALINGS)))
        # By the place, not by chance: all other programs stay as they are.
        if len(self.lines) % 3 == 0:
            scaling += ", interleaved = true"
        if len(self.lines) % 4 < 2 and self.sizes[pairs[0]] % 4 == 0:
            scaling += ", part = 50%"
        parts = [x]
        if len(self.lines) % 5 < 2:
            ids = (e for e in self.body.scope.values() if e.dtype == "i64" and e.axes <= x.axes - {pairs[0]})
            parts += [found for found in (next(ids, None),) if found is not None]
            scaling += f", positions = {parts[1]}" if parts[1:] else ""
            # Each half of the pairs by positions of its own: an axis of two that nothing else has.
            half = self.sizes[pairs[0]] // (4 if "part" in scaling else 2)
            free = [n for n in ("pane", "window", "slots") if self.sizes[n] == 2 and n not in x.axes | parts[-1].axes]
            if parts[1:] and half > 1 and free:
                scaling = scaling.replace(f"positions = {parts[1]}", f"positions = {self._two(parts[1], free[0])}")
                scaling += f", sections = [1, {half - 1}]"
        text = f"rope({x}, over = {over[0]}, pairs = {pairs[0]}, base = 50{scaling})"
        return self._made(text, x.axes, *parts)

    def _two(self, ids: Expression, axis: str) -> str:
        """Ids and others, along an axis of two."""
        wide = f"expand({ids}, {axis})"
        return f"{wide} * (1 + iota({axis}))"

    def _linear_scan(self, depth: int) -> Expression | None:
        """A factor in (−1, 1) may lack axes, or be a number; or what is summed lacks some that the factor has."""
        x = self.expression(depth)
        over = self.some(self.reducible(x), 1, 1)
        if not over:
            return None
        extra = f", over = {over[0]}{self.one(('', ', backward = true', ', backward = false'))}"
        along = sorted(x.axes - {*over, "batch"})
        # By the place, not by chance: all other programs stay as they are.
        if len(self.lines) % 4 == 1 and along and over[0] != "batch":
            gate = self.within(self.expression(depth), x.axes - {along[0]})
            keys = f"tanh({x}) / sqrt(size({along[0]}))"
            gates = f"sigmoid({gate}){f', tanh({gate})' if len(self.lines) % 8 == 1 else ''}"
            text = f"delta_rule({x}, {keys}, sum({x}, over = {along[0]}), {gates}{extra.partition(', backward')[0]}"
            return self._made(f"{text}, along = {along[0]})", x.axes - {along[0]}, x, gate)
        if self.chance(15):
            return evolve(x, text=f"linear_scan({self.one(('0.5', '-0.9', '1', '0'))}, {x}{extra})")
        a = self.within(self.expression(depth), x.axes)
        if not self.cutting or a.alone or over[0] != "batch":
            pair = [f"tanh({a})", str(x)] if a.axes < x.axes or self.chance(80) else [f"tanh({x})", str(a)]
            return self._made(f"linear_scan({', '.join(pair)}{extra})", x.axes, x, a)
        return None

    def _shaped(self, depth: int) -> Expression | None:
        x = self.expression(depth)
        axes = x.axes
        ways: list[tuple[str, frozenset[str]]] = []

        def way(text: str, without: set[str], added: set[str]) -> None:
            ways.append((text.format(x), axes - without | added))

        if "embed" in axes and not axes & {"heads", "key"}:
            way("split({}, embed -> [heads, key])", {"embed"}, {"heads", "key"})
        if {"heads", "key"} <= axes and "embed" not in axes:
            way("merge({}, [heads, key] -> embed)", {"heads", "key"}, {"embed"})
        if "seq" in axes and "spot" not in axes:
            way("rename({}, seq -> spot)", {"seq"}, {"spot"})
        if "spot" in axes and "seq" not in axes:
            way("rename({}, spot -> seq)", {"spot"}, {"seq"})
        if "seq" in axes and "left" not in axes:
            way(f"slice({{}}, seq -> left, start = {self.one(('0', 'size(right)', '1'))})", {"seq"}, {"left"})
        if over := self.some(self.reducible(x) & {"seq", "spot", "batch"}, 0, 1):
            by = self.one(("", ", by = -1", ", by = 3"))
            # By the place, not by chance: all other programs stay as they are.
            function = ("shift", "roll", "shift", "flip")[len(self.lines) % 4]
            way(f"{function}({{}}, over = {over[0]}{'' if function == 'flip' else by})", set(), set())
        if not ways:
            wider = self.some(set(self.sizes) - axes, 1, 2)
            return self.widened(x, axes | set(wider)) if wider else None
        text, result = self.one(ways)
        return evolve(x, text=text, axes=result)

    def _concat(self, depth: int) -> Expression | None:
        x, y = self.expression(depth), self.expression(depth)
        rest = x.axes - {"left", "right", "seq"}
        if not self.fits(rest | {"seq"}):
            return None
        x, y = (self.widened(self.within(e, rest | {side}), rest | {side}) for e, side in ((x, "left"), (y, "right")))
        parts, sides = ([x, y], "[left, right]") if self.chance(70) else ([y, x], "[right, left]")
        text = f"concat({', '.join(map(str, parts))}, {sides} -> seq)"
        return self._made(text, rest | {"seq"}, x, y)

    def _attend(self, depth: int) -> Expression | None:
        q = self.expression(depth)
        along = self.some(q.axes - {"batch"}, 1, 1)
        if not along:
            return None
        axes = [name for name in ("seq", "spot", "left") if name not in along and name in self.sizes]
        if not axes:
            return None
        over = self.one(axes)
        if self.elements(q.axes) * self.sizes[over] > self.most_elements:
            return None
        shared = frozenset(name for name in sorted(q.axes) if self.chance(70)) | {over, *along}
        keys = self.within(self.expression(depth), shared)
        keys = self.widened(keys, keys.axes | {over, *along})
        last = along
        if self.chance(15):
            values = keys
        else:
            last = self.some(self.others(q.axes, {over}), 1, 1) or along if self.chance(35) else along
            values = self.within(self.expression(depth), shared - {*along} | {*last})
            values = self.widened(values, values.axes | {over, *last})
        parts = [q, keys, values]
        arguments = [*map(str, parts), f"over = {over}", f"along = {along[0]}"]
        if over in q.axes and self.chance(50):
            arguments.append("causal = true")
        scores = q.axes - {*along} | {over}
        mask = self.boolean(depth) if self.chance(30) else None
        if mask is not None and mask.axes <= scores:
            arguments.append(f"mask = {mask}")
            parts.append(mask)
        if self.chance(30):
            bias = self.within(self.expression(depth), scores)
            arguments.append(f"bias = {bias}")
            parts.append(bias)
        if self.chance(20):
            arguments.append("scale = 0.3")
        if over in q.axes and self.chance(25):
            more = f" + {self.body.number}" if self.body.number else ""
            arguments.append(f"window = {self.one('123')}{more}")
        if self.chance(15):
            arguments.append("softcap = 0.8")
        if over in q.axes and self.chance(25):
            segments = self.integer(depth)
            if segments.axes | {over} <= scores:
                if over not in segments.axes:
                    segments = self._made(f"(expand({segments}, {over}) + iota({over}))", segments.axes | {over})
                arguments.append(f"segments = minimum({segments}, 2)")
                parts.append(segments)
        if self.chance(25):
            sink = self.within(self.expression(depth), scores - {over})
            arguments.append(f"sink = {sink}")
            parts.append(sink)
        # In a scan it may not drop weights of what is carried; and any block may be called there.
        if not self.inside and self.chance(30):
            arguments.append("dropout = 0.25")
        return self._made(f"attend({', '.join(arguments)})", q.axes - {*along} | {*last}, *parts)

    def _own(self, depth: int) -> Expression | None:
        """An operation of one's own, declared for it. A scan that calls it is split over the batch."""
        x = self.expression(depth)
        if self.scanning:
            x = evolve(x, alone=False)
        function = self.one(sorted(OWN_FUNCTIONS))
        second, linear, last = OWN_FUNCTIONS[function]
        over = self.some(x.axes - {"batch"} if second in ("row", "matrix", "ids") else self.reducible(x), 1, 1)
        if not over:
            return None
        axes = [*self.shuffled(x.axes - {*over}), *over]
        result, parts, inputs = axes, [x], [f"x: [{', '.join(axes)}]"]
        if second == "row":
            parts.append(self.parameter(frozenset(over)))
            inputs.append(f"w: [{over[0]}]")
        elif second == "matrix":
            into = self.some(self.others(x.axes), 1, 1)
            if not into:
                return None
            result = [*axes[:-1], *into]
            parts.append(self.parameter(frozenset((*over, *into))))
            inputs.append(f"w: [{over[0]}, {into[0]}]")
        elif second == "ids":
            ids = self.integer(depth)
            if not ids.axes <= x.axes:
                return None
            parts.append(self.widened(evolve(ids, text=f"minimum(abs({ids}), 2)"), x.axes))
            inputs.append(f"ids: i64[{', '.join(axes)}]")
        elif second == "two":
            result = axes[:-1]
        splits = [name for name in result if name in axes or second == "matrix"]
        splits = [name for name in splits if last or name != over[0]]
        chosen = [name for name in splits if name == "batch" or self.chance(60)]
        name = self.fresh("own")
        lines = [f'  forward = python("own.py", "{function}")']
        lines += [f'  backward = python("own.py", "{function}_backward")'] if self.chance(60) else []
        lines += [f"  split = [{', '.join(self.shuffled(chosen))}]"] if chosen else []
        lines += [f"  linear = [{', '.join(linear)}]"] if linear and self.chance(70) else []
        lines += ["  flops = 2 * size(batch)"] if self.chance(30) else []
        results = [f"[{', '.join(result)}]"] * (1 + (second == "two"))
        header = f"op {name}({', '.join(inputs)}) -> {', '.join(results)} {{"
        self.operations[name] = "\n".join([header, *self.shuffled(lines), "}"])
        if second == "two":
            names = [self.fresh("v") for _ in results]
            self.line(f"let {', '.join(names)} = {name}({x})")
            self.body.scope |= {each: self._made(each, result, x) for each in names}
            return self._made(self.one(("({0} - {1})", "{0}", "{1}")).format(*names), result, x)
        return self._made(f"{name}({', '.join(map(str, parts))})", result, *parts)

    def _call(self, depth: int) -> Expression | None:
        fitting = [block for block in self.blocks if block.results == 1 and self.callable(block)]
        return self.call(self.one(fitting), depth) if fitting and self.inside <= 2 else None

    def callable(self, block: Block) -> bool:
        """Whether there are ids for a block that takes some."""
        if self.scanning and block.name in self.updating:
            return False
        return block.mentions <= set(self.sizes) and (block.ids is None or self._ids_of(block) is not None)

    def _ids_of(self, block: Block) -> Expression | None:
        return self.named("i64", lambda e: e.axes == block.ids and self.limits.get(e.text) == block.limit)

    def call(self, block: Block, depth: int) -> Expression:
        """A call of a block, now and then over another axis."""
        axes, arguments, arrow = block.axes, [], ""
        if (
            "seq" in axes
            and not {"spot"} & block.mentions
            and "spot" in self.sizes
            and block.ids is None
            and self.chance(30)
        ):
            axes, arrow = axes - {"seq"} | {"spot"}, ", seq -> spot"
        arguments.append(str(self.widened(self.within(self.expression(depth), axes), axes)))
        if block.ids is not None:
            arguments.append(str(self._ids_of(block)))
        return Expression(f"{block.name}({', '.join(arguments)}{arrow})", "f32", axes)

    def _mean_error(self, depth: int) -> Expression | None:
        """A scalar in the middle of the model."""
        x = self.expression(depth)
        y = self.within(self.expression(depth), x.axes)
        if "batch" in x.axes and "batch" not in self.reducible(x, y):
            return None
        return self._made(f"mse({x}, {y})", (), x, y)

    def within(self, x: Expression, axes) -> Expression:
        """The expression without the axes that are not among these, or another."""
        extra = x.axes - axes
        if extra <= self.reducible(x):
            return self.reduction(self.one(("mean", "mean", "sum", "max")), x, extra) if extra else x
        found = self.named("f32", lambda e: e.axes <= axes)
        return found if found is not None else self.parameter(frozenset(self.some(axes - {"batch"}, 0, 2)))

    def widened(self, x: Expression, axes) -> Expression:
        """The expression with these axes as well."""
        missing = axes - x.axes
        return evolve(x, text=f"expand({x}, {self.listed(missing)})", axes=x.axes | missing) if missing else x

    # ------------------------------------------------------------ statements

    def parameter(self, axes: frozenset[str]) -> Expression:
        """A parameter with these axes: a new one, or one that is there already."""
        axes -= {"batch"} if self.cutting else set()
        known = self.named("f32", lambda e: e.axes == axes and e.text.startswith("p"))
        if known is not None and self.chance(35):
            return known
        names = [self.fresh("p") for _ in range(1 if self.chance(85) else 2)]
        self.line(f"param {', '.join(names)}: {self.type(axes)} ~ {self.one(INITIAL)}")
        for name in names:
            self.body.scope[name] = Expression(name, "f32", axes)
            self.body.parameters.append(name)
            self.declared[name] = axes
        return self.body.scope[names[0]]

    def buffer(self) -> None:
        """A buffer; what it is after a step is written at the end of its body."""
        axes = frozenset(self.some(self.others(), 0, 2))
        name, dtype = self.fresh("u"), self.one(("f32", "f32", "f32", "i64"))
        initial = self.one(INITIAL) if dtype == "f32" else self.one(("zeros()", "ones()", "constant(3)"))
        self.line(f"buffer {name}: {self.type(axes, dtype)} ~ {initial}")
        self.body.scope[name] = Expression(name, dtype, axes)
        self.body.buffers.append(self.body.scope[name])

    def updates(self) -> None:
        """What the buffers of this body are after a step: anything of sums over the batch, parameters and buffers."""
        for each in self.shuffled([buffer.text for buffer in self.body.buffers]):
            if self.chance(15):
                continue
            buffer, axes = self.body.scope[each], self.body.scope[each].axes
            x = self.integer(2) if buffer.dtype == "i64" else self.expression(2)
            functions = ("sum", "max", "min") if buffer.dtype == "i64" else ("mean", "mean", "sum", "max")
            x = self.reduction(self.one(functions), x, x.axes - axes) if x.axes - axes else x
            x = self.widened(x, axes)
            if buffer.dtype == "i64":
                counts = (f"{each} + {x}", f"maximum({each}, {x})", str(x), f"{each} + 1")
                self.line(f"update {each} = {self.one(counts)}")
                continue
            kept = [e for e in self.body.scope.values() if e.dtype == "f32" and e.axes <= axes and e.text[0] in "pu"]
            other = self.one(kept)
            ways = (
                f"0.9 * {each} + 0.1 * {x}",
                f"{each} + 0.1 * sign({x} - 0.0127)",
                f"0.5 * {each} + 0.5 * tanh({x} * {x} + {other})",
                f"{each} * 0.7 + rsqrt({x} * {x} + {other} * {other} + 0.5)",
                str(x),
            )
            self.line(f"update {each} = {self.one(ways)}")

    def slots(self) -> str:
        """Where this body's parameters can be made to reach its results."""
        return "".join(f"\1{name}\2" for name in self.body.parameters)

    def sample(self) -> None:
        axes = frozenset((*self.some(self.others(), 0, 2), *self.some(["batch"], 0, 1)))
        name = self.fresh("s")
        how = self.one(("normal(0.7)", "uniform(0.5)"))
        # By the place, not by chance: all other programs stay as they are.
        if len(self.lines) % 5 == 1:
            self.line(f"sample {name}_id: i64{self.type(axes)} ~ integers({self.sizes.get('vocab', 3)})")
            self.line(f"let {name} = cast({name}_id, f32) * 0.2")
        else:
            self.line(f"sample {name}: {self.type(axes)} ~ {'gumbel()' if len(self.lines) % 5 == 3 else how}")
        self.body.scope[name] = Expression(name, "f32", axes, True)

    def let(self) -> None:
        """A new name, or an old one anew."""
        kind = self.random.randrange(10)
        made = self.boolean(1) if kind == 0 else self.integer(2) if kind == 1 else self.expression(self.one((1, 2, 3)))
        known = self.body.scope
        alike = [n for n in sorted(self.body.rebindable) if (known[n].dtype, known[n].axes) == (made.dtype, made.axes)]
        name = self.one(alike) if alike and self.chance(35) else self.fresh("v")
        self.bind(name, made)

    def bind(self, name: str, made: Expression) -> None:
        self.line(f"let {name} = {made}")
        self.body.scope[name] = evolve(made, text=name)
        self.body.rebindable.add(name)
        self.limits.pop(name, None)

    def several(self) -> None:
        """What a block with two results gives."""
        fitting = [block for block in self.blocks if block.results > 1 and self.callable(block)]
        if not fitting:
            return
        block = self.one(fitting)
        called = self.call(block, 1)
        names = [self.fresh("v") for _ in range(block.results)]
        self.line(f"let {', '.join(names)} = {called}")
        for name in names:
            self.body.scope[name] = Expression(name, "f32", called.axes)
            self.body.rebindable.add(name)

    def repeat(self, name: str, count: int, carrying: Sequence[str] = ()) -> None:
        """A repeat that carries one or two names."""
        outer = self.body
        candidates = [n for n in outer.rebindable if outer.scope[n].dtype == "f32"]
        carried = list(carrying) or self.some(candidates, 1, 2)
        if not carried:
            return
        self.line(f"repeat {count} as {name} {{")
        if not self.inside:
            self.repeats[name] = count
        # What is carried may depend on parameters from the second turn on.
        scope = outer.scope | {n: evolve(outer.scope[n], alone=False) for n in carried}
        # By the place, not by chance: all other programs stay as they are.
        number = name if len(self.lines) % 2 else ""
        self.body = Body(scope, set(carried), number=number, turns=count, kept=dict(outer.kept))
        factor = f"(0.6 - 0.1 * {name})" if self.body.number else "0.7"
        limits = dict(self.limits)
        self.indent += 1
        self.inside += 1
        for _ in range(self.random.randint(0, 2)):
            self.statement()
        self.updates()
        for n in carried:
            axes = outer.scope[n].axes
            x = self.widened(self.within(self.expression(2), axes), axes)
            text = f"{n} * {factor} + {x} * 0.5" if self.chance(60) else str(x)
            if self.body.scope[n].axes != axes:
                text = f"{x} * 0.5"  # after a scan it has one more
            elif text == n:
                text = f"{n} * 0.7"  # a repeat of nothing leaves stages empty, which is refused
            self.line(f"let {n} = {text}{self.slots()}")
            self.body.scope[n] = Expression(n, "f32", axes)
        kept = {}
        if self.chance(40):
            made, keeps = self.expression(1), self.fresh("kept")
            self.line(f"keep {made} as {keeps}")
            kept[keeps] = made.axes, count
        self.indent -= 1
        self.inside -= 1
        self.line("}")
        self.limits = {name: axis for name, axis in limits.items() if name not in carried}
        self.body = outer
        outer.kept |= kept
        outer.scope |= {n: evolve(outer.scope[n], alone=False) for n in carried}

    def scan(self) -> None:
        """A scan that carries one or two names, in a world without its axis."""
        outer, sizes = self.body, dict(self.sizes)
        axis = self.one(("seq", "seq", "spot", "ffn", "vocab", "heads"))
        candidates = [
            n
            for n in outer.rebindable
            if outer.scope[n].dtype == "f32"
            and axis not in outer.scope[n].axes
            and self.fits(outer.scope[n].axes | {axis})
        ]
        carried = self.some(candidates, 1, 2)
        if not carried or axis not in sizes:
            return
        self.line(f"scan {axis}{self.one(('', '', ' backward'))} {{")
        scope = {n: evolve(e, axes=e.axes - {axis}) for n, e in outer.scope.items()}
        scope |= {n: evolve(outer.scope[n], alone=False) for n in carried}
        self.body = Body(scope, set(carried))
        limits = dict(self.limits)
        del self.sizes[axis]
        self.scanning += 1
        self.indent += 1
        self.inside += 1
        for _ in range(self.random.randint(0, 2)):
            self.statement()
        for n in carried:
            axes = outer.scope[n].axes
            x = self.widened(self.within(self.expression(2), axes), axes)
            alike = self.body.scope[n].axes == axes
            text = f"tanh({n} * 0.7 + {x} * 0.5)" if alike and self.chance(70) else f"tanh({x})"
            self.line(f"let {n} = {text}{self.slots()}")
            self.body.scope[n] = Expression(n, "f32", axes)
        self.indent -= 1
        self.inside -= 1
        self.line("}")
        self.sizes = sizes
        self.scanning -= 1
        self.limits = {name: over for name, over in limits.items() if name not in carried}
        self.body = outer
        outer.scope |= {n: evolve(outer.scope[n], alone=False, axes=outer.scope[n].axes | {axis}) for n in carried}

    def statement(self) -> None:
        kind = self.random.randrange(20)
        if kind == 0:
            self.sample()
        elif kind in (1, 2) and self.inside < 2:
            self.repeat(self.fresh("inner"), self.random.randint(1, 3))
        elif kind in (3, 4):
            self.several()
        elif kind == 5:
            self.parameter(frozenset(self.some(self.others(), 0, 2)))
        elif kind == 6 and not self.scanning:
            self.buffer()
        elif kind == 7 and self.inside < 3:
            self.scan()
        else:
            self.let()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Write something else, with a scope of its own."""
        before = self.lines, self.body, self.limits, self.inside
        self.lines, self.body, self.limits, self.inside = [], Body(), {}, 1
        yield
        self.lines, self.body, self.limits, self.inside = before

    def block(self) -> str:
        """A block over some axes, with one result or two."""
        with self.apart():
            axes = frozenset(("batch", *self.some(self.others(), 1, 2)))
            if self.chance(20):
                axes = frozenset(self.some(self.others(), 1, 2))
            name = self.fresh("block")
            inputs = [f"x: {self.type(axes)}"]
            ids, limit = (frozenset({"batch", "seq"}), self.one(("vocab", "ffn"))) if self.chance(30) else (None, "")
            if ids is not None:
                inputs.append(f"z: {self.type(ids, 'i64')}")
                self.body.scope["z"] = Expression("z", "i64", ids)
                self.limits["z"] = limit
            header = f"block {name}({', '.join(inputs)}) {{"
            self.body.scope["x"] = Expression("x", "f32", axes)
            self.body.rebindable.add("x")
            for _ in range(self.random.randint(1, 3)):
                self.statement()
            self.updates()
            made = [self.expression(2) for _ in range(self.one((1, 1, 2)))]
            results = [str(self.widened(self.within(each, axes), axes)) for each in made]
            self.line(f"return {', '.join(result + self.slots() for result in results)}")
            text = "\n".join([header, *self.lines, "}"])
        called = [block.mentions for block in self.blocks if f"{block.name}(" in text]
        declared = "\n".join(own for name, own in self.operations.items() if f"{name}(" in text)
        called.append(frozenset(name for name in self.sizes if re.search(rf"\b{name}\b", declared)))
        mentions = frozenset(name for name in self.sizes if re.search(rf"\b{name}\b", text)).union(*called)
        if "update " in text or any(f"{block}(" in text for block in self.updating):
            self.updating.add(name)
        self.blocks.append(Block(name, axes, len(results), ids, limit, mentions))
        return text

    # ------------------------------------------------------------ models

    def declared_axes(self) -> str:
        self.sizes = self.drawn_sizes()
        return "axis " + ", ".join(f"{name} = {size}" for name, size in self.sizes.items())

    def drawn_sizes(self) -> dict[str, int]:
        """Sizes that fit together; any of them may be 1."""
        heads, key = self.one((1, 2, 2, 4)), self.one((1, 2, 2, 4))
        left, right = self.random.randint(1, 4), self.random.randint(1, 4)
        return {
            "batch": self.one((1, 2, 4, 4, 6, 8, 12)),
            "heads": heads,
            "key": key,
            "embed": heads * key,
            "left": left,
            "right": right,
            "seq": left + right,
            "spot": left + right,
            "ffn": self.one((1, 2, 3, 4, 6, 8)),
            "vocab": self.one((1, 2, 3, 4, 5, 8)),
            "experts": (experts := self.one((1, 2, 3, 4))),
            "chosen": self.random.randint(1, min(experts, 3)),
            "slots": self.one((1, 2, 2, 3, 4)),
            "window": self.one((1, 2, 2, 3)),
            "pane": self.one((1, 2, 3, 3)),
        }

    def inputs(self) -> tuple[list[str], list[tuple[str, str, list[str], str | None]]]:
        """Declarations, and for each its name, dtype, axes in order, and what it indexes."""
        declared, described = [], []

        def given(name: str, axes, dtype: str = "f32") -> None:
            order = self.shuffled(axes)
            declared.append(f"{name}: {'' if dtype == 'f32' else dtype}[{', '.join(order)}]")
            self.body.scope[name] = Expression(name, dtype, frozenset(axes), True)
            if dtype == "i64":
                self.limits[name] = self.one(("vocab", "ffn"))
            described.append((name, dtype, order, self.limits.get(name)))

        if self.chance(8):
            given("tokens", ("batch", "seq"), "i64")
            given("targets", ("batch", "seq"), "i64")
            self.limits["targets"] = self.limits["tokens"]
            return declared, [(*each[:3], self.limits["tokens"]) for each in described]
        given("x", ("batch", *self.some(("seq", "embed", "heads", "ffn"), 1, 2)))
        if self.chance(50):
            given("y", ("batch", *self.some(("seq", "embed", "key"), 0, 2)))
        if self.chance(60):
            given("tokens", ("batch", "seq"), "i64")
        if self.chance(40):
            given("labels", ("batch",), "i64")
        if self.chance(40):
            given("flag", ("batch", *self.some(("seq",), 0, 1)), "bool")
        if self.chance(30):
            given("fixed", self.some(("seq", "embed", "vocab"), 1, 2))
        return declared, described

    def term(self) -> str:
        """A term of the loss, linear in what is summed over the batch."""
        x = self.expression(2)
        kind = self.random.randrange(6)
        if kind == 0 and (entropy := self.entropy()) is not None:
            return entropy
        if kind == 1:
            return f"{self.one(SMALL)} * mse({x}, {self.within(self.expression(1), x.axes)})"
        if kind == 2:
            weights = self.named("f32", lambda e: e.alone and e.axes <= x.axes and "batch" in e.axes)
            if weights is not None:
                w = f"({weights} * {weights} + 0.1)"
                rest = x.axes - weights.axes
                inner = f"mean({x}, over = {self.listed(rest)})" if rest else str(x)
                return f"sum({inner} * {w}) / sum({w})"
        if kind == 3 and "batch" in x.axes:
            return f"sum({x}) / size(batch) / {self.elements(x.axes - {'batch'})}"
        function = self.one(("mean", "mean", "sum"))
        scale = "" if function == "mean" else f" / {self.elements(x.axes)}"
        return f"{function}({x} * {x}){scale}" if self.chance(30) else f"{function}({x}){scale}"

    def entropy(self) -> str | None:
        ids = self.named("i64", lambda e: e.text in self.limits and self.limits[e.text] not in e.axes)
        if ids is None:
            return None
        loss = self.labelled("cross_entropy", self.limits[ids.text], self.expression(2), ids)
        # Without a draw of its own, so that other programs stay what they were.
        if len(loss) % 3 == 1:
            return f"{loss[:-1]}, smoothing = 20%)"
        if "weights" in loss or len(loss) % 3:
            return loss
        nll = loss.replace("cross_entropy", "token_nll", 1)
        return f"mean(tanh({nll}))" if len(loss) % 2 else f"mean({nll})"

    def labelled(self, function: str, over: str, x: Expression, ids: Expression) -> str:
        """A function of logits and targets."""
        axes = ids.axes | {over}
        logits = self.widened(self.within(x, axes), axes)
        weights = self.named("f32", lambda e: e.alone and e.axes <= ids.axes) if self.chance(35) else None
        extra = f", weights = ({weights} * {weights} + 0.1)" if weights is not None else ""
        # How many count is a sum over the batch, which divides: it must be known before the first microbatch.
        if self.chance(30) and (ids.alone or not self.cutting):
            ignored = self.one(("-1", "0", "1"))
            # Ids of data are not negative: some of them may be made so.
            if ignored == "-1":
                ids = evolve(ids, text=f"where({ids} == {self.one('01')}, -1, {ids})")
            extra += f", ignore = {ignored}"
        return f"{function}({logits}, {ids}, over = {over}{extra})"

    def metric(self) -> str:
        """Any scalar."""
        x = self.expression(2)
        kind = self.random.randrange(10)
        ids = self.named("i64", lambda e: e.text in self.limits and self.limits[e.text] not in e.axes)
        if kind == 0 and ids is not None:
            return self.labelled("accuracy", self.limits[ids.text], x, ids)
        if kind == 1 and (entropy := self.entropy()) is not None:
            return f"exp({entropy} * 0.3)"
        if kind == 2:
            return f"sum({self.integer(1)})"
        if kind == 3:
            return f"max({x}) + mean({self.expression(1)})"
        if kind == 4:
            ids = self.named("i64", lambda e: self.limits.get(e.text) == "experts" and {"seq", "chosen"} <= e.axes)
            if ids is not None and not ids.axes & {"experts", "slots"}:
                return f"dropped({ids}, over = seq, into = [experts, slots], choices = chosen)"
        return self.one(
            (
                "sqrt(mean({0} * {0}) + 0.01)",
                "max({0})",
                "min(abs({0}))",
                "sum({0}) / (sum({0} * {0}) + 1)",
                "exp(mean({0}) * 0.1) + max({0})",
                "mean({0})",
                "sum({0})",
            )
        ).format(x)

    def model(self, staged: int) -> tuple[str, list[tuple[str, str, list[str], str | None]]]:
        """A model, with a repeat `layer` of at least `staged` iterations."""
        declared, described = self.inputs()
        # What makes one step bad: by how much of itself the loss is larger. Windows of text have no place for it.
        self.planted = self.chance(25) and described[-1][0] != "targets"
        if self.planted:
            declared.append("bad: [batch]")
            described.append(("bad", "f32", ["batch"], None))
        header = f"model m({', '.join(declared)}) {{"
        axes = frozenset(("batch", *self.some(("seq", "embed", "heads", "key"), 1, 2)))
        self.bind("h", self.widened(self.within(self.expression(2), axes), axes))
        for _ in range(self.random.randint(0, 3)):
            self.statement()
        if staged or self.chance(70):
            self.repeat("layer", max(staged, self.random.randint(1, 3)), ["h"] if self.chance(80) else ())
        for _ in range(self.random.randint(0, 2)):
            self.statement()
        self.updates()
        terms = [self.term() for _ in range(self.random.randint(0, 2))]
        terms.append(self.one(("mean(h * h)", "mean(h)", "0.5 * mean(h) / 2", "sum(h * 0.01)")))
        self.inside = 3  # no calls: nothing trains the parameters of a block that only an output calls
        for _ in range(self.one((0, 0, 1, 2))):
            made = self.expression(2) if self.chance(80) else self.integer(2)
            if "own" not in str(made):
                self.line(f"output {self.fresh('out')} = {made}")
        self.inside = 0
        loss = f"loss {' + '.join(self.shuffled(terms))}"
        metrics = [f"metric number{i} = {self.metric()}" for i in range(self.random.randint(0, 3))]
        loss += self.slots()
        self.several_losses = not self.planted and self.chance(30)
        if self.several_losses:
            self.line(loss.replace("loss ", "loss first = ", 1))
            loss = "loss second = mean(h * h) * 0.2 + mean(h)"
        self.line(f"loss ({loss.removeprefix('loss ')}) * (1.0 + mean(bad))" if self.planted else loss)
        for text in metrics:
            self.line(text)
        return "\n".join([header, *self.lines, "}"]), described

    # ------------------------------------------------------------ meshes, layouts, schedules, training

    def mesh(self) -> dict[str, int]:
        mesh = {name: self.one((2, 2, 3)) for name in self.some(("data", "tensor", "context"), 0, 2)}
        if self.chance(60):
            mesh["pipe"] = self.one((1, 2, 2, 3))
        while prod(mesh.values()) > MOST_RANKS:
            del mesh[self.one(sorted(mesh))]
        return {name: mesh[name] for name in self.shuffled(mesh)}

    def rules(self, mesh: dict[str, int], parts: int, model: str) -> list[str]:
        """Shard rules by which everything divides; `parts` are the microbatches."""
        left = dict(self.sizes) | {"batch": self.sizes["batch"] // parts}
        rules = []
        for name in [each for each in mesh if each != "pipe"]:
            divisible = [axis for axis in left if left[axis] % mesh[name] == 0]
            chosen = self.some(divisible, 1, 3)
            for axis in chosen:
                left[axis] //= mesh[name]
            if chosen and self.chance(80):
                rules.append(f"shard {', '.join(chosen)} -> {name}")
            else:
                rules.append(f"shard {self.one(('state', 'grad', 'param'))} -> {name}")
            if self.chance(25):
                rules.append(f"shard {self.one(('state', 'grad', 'param'))} -> {name}")
        own = [name for name in self.declared if re.search(rf"param .*\b{name}\b.*:", model)]
        for name in self.some(own, 0, 1) if self.chance(30) else ():
            over = self.some([each for each in mesh if each != "pipe"], 0, 1)
            axes = [axis for axis in self.declared[name] if over and self.sizes[axis] % mesh[over[0]] == 0]
            if axes:
                rules.append(f"shard {name}: {self.one(sorted(axes))} -> {over[0]}")
        return self.shuffled(list(dict.fromkeys(rules)))

    def stages(self, count: int) -> str:
        """A rule that cuts the model into so many stages."""
        kind = self.random.randrange(6)
        if kind == 0 and count > 1:
            return f"place layer -> pipe[0..{count - 1}]"
        if kind == 1:
            iterations = [1] * count
            for _ in range(self.repeats["layer"] - count):
                iterations[self.random.randrange(count)] += 1
            return f"stage layer -> pipe [{', '.join(map(str, iterations))}]"
        others = self.some([name for name in self.repeats if name != "layer"], 0, 1)
        return f"stage {', '.join(['layer', *others])} -> pipe"

    def schedule(self, ranks: int) -> tuple[str, int, int]:
        """A schedule, its chunks, and its microbatches."""
        name = self.one(sorted(SCHEDULES))
        chunks = {"": 1, "chunks": self.one((1, 2)), "two": 2}[SCHEDULES[name]]
        divisors = [n for n in range(1, 7) if self.sizes["batch"] % n == 0] if self.cutting else [1]
        microbatches = self.one(divisors)
        own = f", chunks = {chunks}" if SCHEDULES[name] == "chunks" else ""
        if name == "policy":
            own += f", split_backward = {self.one(('true', 'false'))}, prefer = {self.one(('backward', 'forward'))}"
        return f"{name}(microbatches = {microbatches}{own})", chunks, microbatches

    def optimizer(self, name: str | None = None) -> str:
        """A call of an optimizer."""
        decay = self.one(("", ", weight_decay = 0.3", ", weight_decay = 0.2, decay = all"))
        rate = self.one(RATES)
        name = name or self.one(OPTIMIZERS)
        more = {
            "adamw": self.one(("", ", betas = [0.8, 0.95]")) + ", eps = 0.01",
            "sgd": self.one(("", ", momentum = 0.9", ", momentum = 0.8, nesterov = true")),
            "adagrad": ", eps = 0.01",
            "rowwise_adagrad": ", eps = 0.01",
            "adafactor": ", eps = 0.01" + self.one(("", ", decay_rate = 0.5, clip_threshold = 0.3")),
            "muon": ", eps = 0.01" + self.one(("", ", nesterov = false", ", steps = 2, adjust = match_rms_adamw")),
            "adamw_8bit": f", eps = 0.01, block_size = {self.one((1, 2, 3, 256))}, min_size = {self.one((0, 4))}",
        }[name]
        turns = self.one(("", "", "", "", ", every = 2", ", every = 2, from = 2"))
        return f"{name}(lr = {rate}{more}{decay}{turns})"

    def optimizer_rules(self, blocks: Sequence[str], model: str) -> list[str]:
        """Rules for parameters, blocks, repeats and classes, and one for the rest."""
        names = [name for found in re.findall(r"param ([\w, ]+):", model) for name in found.split(", ")]
        own = [re.match(r"block (\w+)\(", text) for text in blocks if "param " in text]
        names += [found[1] for found in own if found and f"{found[1]}(" in model]
        names += [
            name for name, body in re.findall(r"repeat .* as (\w+) \{\n((?:    .*\n)*)", model) if "param " in body
        ]
        rules = []

        def by() -> str:
            return self.one((" by first", " by second", "")) if self.several_losses else ""

        for _ in range(self.random.randint(0, 3)):
            target = self.one((*("matrices", "vectors", "embeddings"), *names, *names))
            if self.chance(35):
                rules.append(f"freeze {self.some_iterations(target, len(model))}")
            else:
                call = self.optimizer("muon" if target == "matrices" and self.chance(60) else None)
                if target in self.repeats and len(model) % 3:
                    call = re.sub(r"lr = (?=0)", f"lr = power(0.9, {target}) * ", call)
                rules.append(f"update {self.some_iterations(target, len(model))} -> {call}{by()}")
        return [*rules, "freeze all" if rules and self.chance(15) else f"update all -> {self.optimizer()}{by()}"]

    def some_iterations(self, target: str, seed: int) -> str:
        """A repeat of the model, or some of its iterations; not by chance: all other programs stay as they are."""
        count = self.repeats.get(target, 1)
        first, last = seed % count, count - 1
        return target if count == 1 or seed % 2 else f"{target}[{first}]" if seed % 4 else f"{target}[{first}..{last}]"

    def train(self, bounded: bool, windows: bool, ruled: bool) -> str:
        """The train block. `bounded`: `random()` knows how large integers may be; `windows`: the model takes some;
        `ruled`: the optimizer is declared.
        """
        optimizer = "rules" if ruled else self.optimizer()
        clip = self.one(("", "", "clip = 0.1", "clip = 100"))
        evaluation = self.one(EVALUATIONS if self.cutting else EVALUATIONS[:2])
        if self.chance(20):
            clip += f" ema = {self.one((0, 0.5, 0.999))}"
            evaluation = evaluation.replace(")", self.one((")", ", weights = ema)")))
        data = "random()" if self.chance(65) and bounded and not self.planted else 'arrays("data.npz", holdout = 40%)'
        if windows:
            data = self.one(('tokens("ids.bin", dtype = u8, holdout = 30%)', 'text("ids.*", holdout = 30%)'))
        policy = self.one(BAD_STEPS) if self.planted or self.chance(10) else ""
        policy += f" {self.one(VALIDATIONS)}"
        return (
            f"train {{ model = m layout = cut schedule = s data = {data}\n"
            f"  optimizer = {optimizer} {clip} {evaluation} {policy}\n"
            f"  steps = 3 seed = {self.one((0, 1, 12345678901))} precision = f64 }}"
        )

    def program(self) -> Program:
        """A whole file."""
        axes = self.declared_axes()
        mesh = self.mesh()
        schedule, chunks, microbatches = self.schedule(mesh.get("pipe", 1))
        stages = mesh["pipe"] * chunks if "pipe" in mesh else 0
        blocks = [self.block() for _ in range(self.random.randint(0, 2))]
        model, described = self.model(stages)
        bounded = all(
            dtype != "i64" or re.search(rf"embedding\({name},|, {name}, over =", model)
            for name, dtype, _, _ in described
        )
        rules = self.rules(mesh, microbatches, model)
        if stages:
            rules.append(self.stages(stages))
        recomputable = ["auto", *(["all"] if "repeat" in model else []), *(["layer"] if " as layer {" in model else [])]
        recomputable += [block.name for block in self.blocks if f"{block.name}(" in model]
        if self.chance(25):
            rules.append(f"recompute {self.one(recomputable)}")
        if self.chance(25):
            rules.append(f"offload {self.one(('all', 'state', *recomputable[1:]))}")
        if mesh and self.chance(25):
            rules.append(f"overlap {self.one(list(mesh))} in {self.one((2, 3, 4))}")
        mesh = mesh or {"data": 1}
        ruled = self.optimizer_rules(blocks, model) if self.chance(40) else []
        if not stages and chunks > 1:
            schedule = f"gpipe(microbatches = {microbatches})"
        text = "\n".join(
            [
                axes,
                *(f"const {name} = {self.constants[name]}" for name in self.shuffled(self.constants)),
                *(own for name, own in self.operations.items() if f"{name}(" in "\n".join([*blocks, model])),
                *blocks,
                model,
                f"mesh ranks({', '.join(f'{name} = {size}' for name, size in mesh.items())})",
                "layout cut on ranks {",
                *(f"  {rule}" for rule in rules),
                "}",
                "layout whole on ranks { }",
                f"schedule s = {schedule}",
                *(("optimizer rules {", *(f"  {rule}" for rule in ruled), "}") if ruled else ()),
                self.train(bounded, described[-1][0] == "targets", bool(ruled)),
            ]
        )
        items = 3 * self.sizes["batch"] + 2
        arrays = []
        for name, dtype, order, limit in described:
            shape = [self.sizes[axis] for axis in order if axis != "batch"]
            shape = [items, *shape] if "batch" in order else shape
            arrays.append((name, dtype, tuple(shape), self.sizes[limit] if limit else 2))
        ones = tuple(f"ranks.{name}=1" for name in mesh)
        single = (*ones, "layout=whole", "schedule=gpipe(microbatches=1)")
        limit = self.sizes[described[0][3]] if described[0][3] else 1
        planted = self.random.randrange(items - round(items * 0.4)), self.one((math.nan, math.inf, 30.0, 30.0))
        return Program(text, single, tuple(arrays), limit, self.sizes["batch"], planted)


# Muon is for matrices alone; the sign that Lion takes of a gradient that is zero but for rounding is chaos.
OPTIMIZERS = (*("adamw", "sgd") * 3, "adagrad", "rowwise_adagrad", "adafactor", "adamw_8bit")

KINDS = (
    *("unary", "unary", "arithmetic", "arithmetic", "arithmetic", "extreme", "where", "integers", "booleans", "mode"),
    *("truncated", "dot", "dot", "dot", "reduce", "norm", "norm", "dropout", "embedding", "computed_ids", "rope"),
    *("gather", "one_hot", "cumsum"),
    *("shaped", "shaped", "concat", "attend", "call", "call", "name", "name", "mean_error", "linear_scan"),
    *("patches", "patches", "conv", "conv", "own", "routed", "slotted", "load", "grad", "grad", "by", "by"),
)
