"""Whether the operations that a file defines are what it declares of them, shown by running them.

Each runs on small random tensors in float64: an axis of `split` in parts of one, two and three, and their results
against the whole; an operand of `linear` as a sum of others; gradients against finite differences, in random
directions. Its results must have the declared types, and be the same each time, and its operands stay as they are.
Where a function does not take small sizes or float64, it is examined at the sizes and in the precision of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor

from partita.compiler.ops.op import accumulation
from partita.compiler.verify.proxy_sizes import Axes, Search, ties
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Model, Operation, PythonFunction
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.python_files import OperationFailed
from partita.runtime.python_functions import CustomFunction

# An axis that is split has a multiple of this many positions, and is cut into each of these numbers of parts, and into
# parts of one position.
POSITIONS, PARTS = 6, (2, 3)
ROOM = 64
# What parts may be off of the whole, relative to its scale, by dtype; the step and the tolerance of differences.
TOLERANCE = {"f64": 1e-9, "f32": 1e-3, "bf16": 5e-2}
STEP = {"f64": 1e-6, "f32": 1e-2, "bf16": 0.25}
SLOPE = {"f64": 1e-5, "f32": 2e-2, "bf16": 0.25}
# Of these many points, a gradient may be off in less than half: there may be a bend between two values.
POINTS = 3
SMALL_INTEGERS = 3
Sizes = Mapping[str, int]


@frozen(eq=False)
class Examined:
    """What was found of an operation: the number of declarations that were tried, and those that are false. `exact`:
    it runs in float64. `doubt` says why not, or what could not be tried.
    """

    name: str
    tried: int
    problems: tuple[Diagnostic, ...]
    exact: bool
    doubt: Diagnostic | None = None


def examine(model: Model, functions: Mapping[str, CustomFunction], precision: str) -> list[Examined]:
    """Hold the operations of a model to what is declared of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: threads would wait for each other
    try:
        return [_examined(each, functions[each.name], precision) for each in model.operations.values()]
    finally:
        torch.set_num_threads(threads)


def _examined(operation: Operation, function: CustomFunction, precision: str) -> Examined:
    failures: list[OperationFailed] = []
    for dtype in dict.fromkeys(("f64", precision)):
        for sizes in _sizes(operation):
            trial = Trial(operation, function, sizes, dtype)
            try:
                trial.begin()
            except OperationFailed as failed:
                failures.append(failed)
                continue
            trial.run()
            doubt = trial.doubt
            if dtype != "f64":
                what = f"op `{operation.name}` does not run in f64, in which programs are compared"
                doubt = Diagnostic("W0702", what, operation.forward.span, failures[0].diagnostics[0].notes)
            return Examined(operation.name, trial.tried, tuple(trial.problems), dtype == "f64", doubt)
    return Examined(operation.name, 0, failures[-1].diagnostics, False)


def _sizes(operation: Operation) -> Iterator[Sizes]:
    """Small sizes of an operation's axes, then the declared ones."""
    types = [*(type for _, type in operation.operands), *operation.results]
    declared = {axis.name: axis.size for type in types for axis in type.axes}
    nothing: frozenset[str] = frozenset()
    # The search takes no more than is declared; small sizes that are all different may be more.
    limits = {name: ROOM * size for name, size in declared.items()}
    axes = Axes(limits, tuple(ties(operation)), nothing, {}, nothing)
    small = Search(axes, {name: POSITIONS if name in operation.split else 1 for name in declared}).run()
    if small is not None and small != declared:
        yield small
    yield declared


@define(eq=False)
class Trial:
    """An operation at some sizes, in one precision."""

    operation: Operation
    function: CustomFunction
    sizes: Sizes
    dtype: str
    tried: int = 0
    problems: list[Diagnostic] = field(factory=list)
    doubt: Diagnostic | None = None
    positive: bool = False  # whether operands are, since there is no finite result otherwise

    # ------------------------------------------------------------ running it

    def type(self, type: Type) -> torch.dtype:
        """What f32 stands for: the precision, and for scalars that of accumulation."""
        if type.dtype != "f32":
            return DTYPES[type.dtype]
        return DTYPES[self.dtype if type.axes else accumulation(self.dtype)]

    def shape(self, type: Type) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self.sizes[name] for name in type.names)

    def drawn(self, seed: int) -> list[Tensor]:
        """Random operands."""
        generator = torch.Generator().manual_seed(seed)
        operands = []
        for _, type in self.operation.operands:
            shape = self.shape(type)
            if type.is_float:
                x = torch.randn(shape, generator=generator, dtype=torch.float64)
                x = x.abs() + 0.5 if self.positive else x
            else:
                limit = 2 if type.dtype == "bool" else min(SMALL_INTEGERS, *self.sizes.values())
                x = torch.randint(0, limit, shape, generator=generator)
            operands.append(x.to(self.type(type)))
        return operands

    @property
    def floats(self) -> list[Type]:
        """The types of the results that have a cotangent."""
        return [type for type in self.operation.results if type.is_float]

    def cotangents(self, seed: int) -> list[Tensor]:
        """Random cotangents of the float results."""
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn(self.shape(type), generator=generator, dtype=torch.float64).to(self.type(type))
            for type in self.floats
        ]

    def forward(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The results, whose shapes follow from the operands where these have been cut."""
        sizes = dict(self.sizes)
        for (_, type), x in zip(self.operation.operands, operands, strict=True):
            sizes.update(zip(type.names, x.shape, strict=True))
        results = self.operation.results
        expected = [(tuple(sizes[name] for name in type.names), self.type(type)) for type in results]
        return [x.clone() for x in self.function([x.clone() for x in operands], expected)]

    def gradients(self, ds: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the float operands."""
        gradients = self.function.gradients([d.clone() for d in ds], [x.clone() for x in operands])
        return [x.clone() for x in gradients]

    @property
    def differentiable(self) -> bool:
        """Whether it has a gradient."""
        return bool(self.floats) and any(type.is_float for _, type in self.operation.operands)

    def begin(self) -> None:
        """Run it once, and its gradient. Raises OperationFailed."""
        for self.positive in (False, True):
            if all(bool(x.isfinite().all()) for x in self.forward(self.drawn(0))):
                break
        if self.differentiable:
            self.gradients(self.cotangents(0), self.drawn(0))

    def run(self) -> None:
        """Try everything that is declared."""
        operation = self.operation
        operands = self.drawn(1)
        first = self.forward(operands)
        self.purity()
        if self.problems:
            return  # nothing can be said of what is another each time
        if not all(bool(x.isfinite().all()) for x in first):
            message = f"op `{operation.name}` has no finite result on random data, so nothing can be verified"
            self.doubt = Diagnostic("W0702", message, self.place)
            return
        for axis, span in zip(operation.split, operation.split_spans, strict=True):
            self.attempt(lambda axis=axis, span=span: self.split(axis, span), span, f"split along `{axis}`")  # type: ignore[misc]
        for position, span in zip(operation.linear, operation.linear_spans, strict=True):
            self.linearity(position, span)
        if self.differentiable:
            self.slopes()
        if not all(map(_same, first, self.forward(operands))):
            self.problem(f"`{operation.forward.name}` keeps state: it no longer returns what it did", self.place)

    # ------------------------------------------------------------ what is tried

    @property
    def place(self) -> Span:
        """Where the forward is declared."""
        return self.operation.forward.span

    def problem(self, message: str, span: Span, notes: Sequence[str] = (), help: str | None = None) -> None:
        """Note that a declaration is false."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        where = f"on random {self.dtype} tensors, {sizes}"
        diagnostic = Diagnostic("E0710", f"op `{self.operation.name}`: {message}", span, (*notes, where), help)
        self.problems.append(diagnostic)

    def attempt(self, check: Callable[[], None], span: Span, what: str) -> None:
        """Try a declaration; a function that fails in doing so does not hold to it."""
        self.tried += 1
        try:
            check()
        except OperationFailed as failed:
            (cause,) = failed.diagnostics
            self.problem(f"it cannot be {what}", span, (cause.message, *cause.notes))

    def purity(self) -> None:
        """The same operands give the same result to the bit, and stay as they are."""
        self.tried += 1
        operands = self.drawn(1)
        backward = self.operation.backward
        runs: list[tuple[PythonFunction, Callable[[list[Tensor]], list[Tensor]]]]
        runs = [(self.operation.forward, lambda arguments: list(self.function(arguments, self.wanted)))]
        if self.differentiable and backward is not None:
            runs.append((backward, lambda arguments: list(self.function.gradients(self.cotangents(1), arguments))))
        for function, call in runs:
            results = []
            for _ in range(POINTS):
                arguments = [x.clone() for x in operands]
                results.append([x.clone() for x in call(arguments)])
                changed = [i for i, x in enumerate(arguments) if not _same(x, operands[i])]
                if changed:
                    name = self.operation.operands[changed[0]][0]
                    help = "work on a copy: `x = x.clone()`"
                    self.problem(f"`{function.name}` changes its operand `{name}` in place", function.span, (), help)
                    return
            if not all(_same(x, y) for other in results[1:] for x, y in zip(other, results[0], strict=True)):
                message = f"`{function.name}` is not deterministic"
                help = "a function of its operands alone; noise is a `sample`, which every layout draws alike"
                self.problem(message, function.span, (), help)
                return

    @property
    def wanted(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and dtypes of the whole results."""
        return [(self.shape(type), self.type(type)) for type in self.operation.results]

    def split(self, axis: str, span: Span) -> None:
        """Parts along an axis make up the whole, of the result and of the gradients."""
        help = f"remove `{axis}` from `split`"
        size = self.sizes[axis]
        for parts in (count for count in (*PARTS, size) if size % count == 0):
            operands, ds = self.drawn(2), self.cotangents(2)
            types = [type for _, type in self.operation.operands]
            columns = self.cut_all(operands, types, axis, parts)
            pieces = [self.forward(column) for column in columns]
            for i, whole in enumerate(self.forward(operands)):
                position = self.operation.results[i].position(axis)
                error = self.error(torch.cat([piece[i] for piece in pieces], position), whole)
                if error:
                    reason = f"its results in {parts} parts do not make up the whole"
                    message = f"it cannot be split along `{axis}`: {reason}"
                    return self.problem(message, span, (error,), help)
            if not self.differentiable:
                continue
            cotangents = self.cut_all(ds, self.floats, axis, parts)
            pieces = [self.gradients(*pair) for pair in zip(cotangents, columns, strict=True)]
            floats = [(name, type) for name, type in self.operation.operands if type.is_float]
            for i, (whole, (name, type)) in enumerate(zip(self.gradients(ds, operands), floats, strict=True)):
                own = [piece[i] for piece in pieces]
                joined = torch.cat(own, type.position(axis)) if type.has(axis) else torch.stack(own).sum(0)
                error = self.error(joined, whole)
                if error:
                    message = f"its gradient for `{name}` cannot be split along `{axis}`, in {parts} parts"
                    return self.problem(message, span, (error,), help)

    def cut_all(
        self, tensors: Sequence[Tensor], types: Sequence[Type], axis: str, parts: int
    ) -> list[tuple[Tensor, ...]]:
        """For each part of an axis the parts of all tensors, and those whole that lack the axis."""
        cut = [
            x.chunk(parts, type.position(axis)) if type.has(axis) else [x] * parts
            for x, type in zip(tensors, types, strict=True)
        ]
        return list(zip(*cut, strict=True))

    def linearity(self, position: int, span: Span) -> None:
        """The result for a sum is the sum of the results."""
        self.tried += 1
        name = self.operation.operands[position][0]
        for count in (2, 3):
            operands = self.drawn(3)
            terms = [self.drawn(4 + k)[position] for k in range(count - 1)]
            terms.append(operands[position] - sum(terms))
            operand_lists = [[*operands[:position], term, *operands[position + 1 :]] for term in terms]
            results = [self.forward(each) for each in operand_lists]
            whole = self.forward(operands)
            errors = [self.error(torch.stack(terms).sum(0), x) for *terms, x in zip(*results, whole, strict=True)]
            error = next(filter(None, errors), None)
            if error:
                message = f"it is not linear in `{name}`: its results for {count} terms do not add up"
                return self.problem(message, span, (error,), f"remove `{name}` from `linear`")

    def slopes(self) -> None:
        """Gradients against finite differences; and they are linear in the cotangent."""
        function = self.operation.backward or self.operation.forward
        floats = [i for i, (_, type) in enumerate(self.operation.operands) if type.is_float]
        self.tried += len(floats)
        for k, i in enumerate(floats):
            points = [self.slope(i, k, seed) for seed in range(10, 10 + POINTS)]
            wrong = [notes for notes in points if notes is not None]
            if 2 * len(wrong) > POINTS:
                name = self.operation.operands[i][0]
                source = "its gradient by autograd" if self.operation.backward is None else f"`{function.name}`"
                message = f"{source} is not its gradient for `{name}`, by finite differences"
                return self.problem(message, function.span, wrong[0])
        operands = self.drawn(5)
        one, other = self.cotangents(5), self.cotangents(6)
        both = self.gradients([a + b for a, b in zip(one, other, strict=True)], operands)
        for i, whole in enumerate(both):
            total = self.gradients(one, operands)[i] + self.gradients(other, operands)[i]
            error = self.error(total, whole)
            if error:
                message = f"`{function.name}` is not linear in the cotangent, as gradients are"
                return self.problem(message, function.span, (error,))

    def slope(self, i: int, k: int, seed: int) -> tuple[str, ...] | None:
        """How the gradient for an operand differs from the slope in a random direction, if it does."""
        operands, ds = self.drawn(seed), self.cotangents(seed)
        direction = torch.randn(operands[i].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        step = STEP[self.dtype]
        moved = []
        for sign in (1, -1):
            x = (operands[i].double() + sign * step * direction).to(operands[i].dtype)
            results = self.forward([*operands[:i], x, *operands[i + 1 :]])
            moved.append([each.double() for each in results if each.is_floating_point()])
        changes = [d.double() * (up - down) / (2 * step) for d, up, down in zip(ds, *moved, strict=True)]
        change = torch.cat([each.reshape(-1) for each in changes])
        along = self.gradients(ds, operands)[k].double() * direction
        expected, actual = float(change.sum()), float(along.sum())
        scale = float(change.abs().sum() + along.abs().sum())
        if not abs(actual - expected) > SLOPE[self.dtype] * max(scale, 1e-3):
            return None
        return (f"in a random direction the slope is {expected:.6g}, and the gradient says {actual:.6g}",)

    def error(self, actual: Tensor, expected: Tensor) -> str | None:
        """How two tensors differ, if by more than rounding."""
        a, b = actual.double(), expected.double()
        alike = (a == b) | (a.isnan() & b.isnan())
        if not actual.is_floating_point():
            return None if bool(alike.all()) else f"{int((~alike).sum())} of {alike.numel()} elements differ"
        scale = float(b[b.isfinite()].abs().max()) if bool(b.isfinite().any()) else 1.0
        difference = torch.where(alike, 0.0, (a - b).abs())
        largest = float(difference.nan_to_num(nan=float("inf")).max()) if difference.numel() else 0.0
        if largest <= TOLERANCE[self.dtype] * max(scale, 1e-3):
            return None
        return f"they differ by up to {largest:.2g}, where the largest element is {scale:.2g}"


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same to the bit, NaN included."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
