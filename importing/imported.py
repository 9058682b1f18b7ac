"""A module → the text of a `.par` file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from attrs import evolve, frozen
from safetensors.torch import save_file
from torch import Tensor, nn

from partita.importing import rules
from partita.importing.assumed import USUAL, Assumed
from partita.importing.axes import Axes
from partita.importing.capture import capture
from partita.importing.factors import RULES, Solver
from partita.importing.graph import FLOATS, Captured, NotUnderstood, Value, number, order, rewritten
from partita.importing.levels import level
from partita.importing.normal import complex, layers, pointwise, products, recurrence, reductions, views
from partita.importing.normal.arguments import normal
from partita.importing.normal.views import expanded
from partita.importing.patterns import patterns
from partita.importing.patterns.projections import split_projections
from partita.importing.patterns.scalings import Scaling, scalings
from partita.importing.patterns.sums import sums_of_products
from partita.importing.shared import hoist
from partita.importing.sizes import Sized, of_sizes, sized
from partita.importing.writing.file import TABLES
from partita.importing.writing.known import Known
from partita.importing.writing.names import snake
from partita.importing.writing.program import CallsDiffer, Program
from partita.importing.writing.tree import VIEWS

# What registers operations.
REGISTERED = (rules, complex, layers, pointwise, products, recurrence, reductions, views)
WHOLE = ("equal", "not_equal", "floor", "round")  # functions that tell a number from one that is almost the same


@frozen(eq=False)
class Imported:
    """The text of a file, and the graph that it was written of."""

    text: str
    graph: Captured
    program: Program
    left_out: str = ""  # why outputs beside the loss are

    @property
    def tables(self) -> dict[str, Tensor]:
        """What the file reads from a file beside it, by names there: constants that no formula says."""
        tables = self.program.file.tables
        return {name: each.args["data"] for name, each in tables.items() if f'"{name}")' in self.text}

    def with_tables(self, name: str) -> str:
        """The text, where the file with tables is called so."""
        return self.text.replace(f'file("{TABLES}"', f'file("{name}"')

    def write(self, path: Path) -> list[Path]:
        """Write the file, and beside it the tables that it reads; which files these are. Raises OSError."""
        beside = path.with_suffix(".safetensors")
        path.write_text(self.with_tables(beside.name), encoding="utf-8")
        if not self.tables:
            return [path]
        save_file(self.tables, beside)
        return [path, beside]


def imported(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    name: str | None = None,
    axes: Mapping[str, list[str]] | None = None,
    assumed: Assumed = USUAL,
) -> Imported:
    """The file of a module, called with these keyword arguments: tensors of example sizes, a batch of at least 2.

    `axes`: names of the dimensions of inputs. `assumed`: what is taken for granted. Outputs are left out if
    the loss alone can be said. Raises NotUnderstood.
    """
    refused = NotUnderstood("")
    for loss_alone in (False, True):
        for rolled in (True, False):
            graph = capture(module, inputs, loss_alone, rolled)
            if loss_alone and evolve(graph, loss_alone=False).shown == [graph.loss]:
                raise refused
            try:
                return _imported(module, inputs, graph, name, axes, assumed, str(refused) if loss_alone else "")
            except NotUnderstood as error:
                refused = refused if loss_alone else error
            if not graph.rolled:  # there are no loops
                break
    raise refused


def _imported(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    graph: Captured,
    name: str | None,
    axes: Mapping[str, list[str]] | None,
    assumed: Assumed,
    left_out: str,
) -> Imported:
    scaled = scalings(module)

    def solved() -> list[list[tuple[str, int]]]:
        return Solver(
            understood(capture(module, inputs, graph.loss_alone, graph.rolled).written, scaled, assumed)
        ).free_dimensions()

    twin = sized(module, inputs, graph, solved)
    graph.rewrite(understood(graph.written, scaled, assumed))
    hoist(graph.written)
    if twin is not None:
        _with_twins(graph.written, understood(twin.written, scaled, assumed))
    level(graph.written)
    solver = Solver(graph.written)
    state = {key: value for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    named, known = Axes(solver, dict(axes or {}), assumed), Known()
    while True:
        program = Program(graph, named, name or snake(type(module).__name__), state, known)
        try:
            text = f"# Outputs beside the loss are left out: {left_out}\n\n" * bool(left_out) + program.text()
        except CallsDiffer as error:
            known.inlined.add(error.path)
            continue
        if not program.learned():
            return Imported(text, graph, program, left_out)


def understood(
    outputs: list[Value], scaled: Sequence[tuple[float, Scaling]] = (), assumed: Assumed = USUAL
) -> list[Value]:
    """What a graph of ATen computes, in the operations of this package; positions may be scaled so."""
    outputs = rewritten(outputs, [_normal])
    outputs = rewritten(outputs, [Once()])
    outputs = rewritten(outputs, patterns(scaled, assumed.attended))
    outputs = split_projections(outputs)
    for value in order(outputs):
        whole = value.op == "cast" and value.dtype not in (*FLOATS, torch.bool)
        if (whole or value.args.get("function") in WHOLE) and any(map(pointwise.kept_share, value.inputs)):
            raise value.refuse(
                "zeros and ones that are drawn are rounded here: `torch.rand_like(x) < p` draws them exactly"
            )
    return rewritten(outputs, [_folded, sums_of_products(outputs)])


def _with_twins(outputs: list[Value], others: list[Value]) -> None:
    """Say of each value the shape that it has where inputs are larger, if both are made of the same operations, and
    where slices begin, how progressions begin and go on, and operands that are numbers, if these follow sizes.
    """
    ours, theirs = order(outputs), order(others)
    if [(value.op, value.rank) for value in ours] == [(value.op, value.rank) for value in theirs]:
        for value, twin in zip(ours, theirs, strict=True):
            value.twin = twin.shape
        grown = {
            (value.args["name"], dim): sizes
            for value, twin in zip(ours, theirs, strict=True)
            for dim, sizes in enumerate(zip(value.shape, twin.shape, strict=True))
            if value.op == "input" and sizes[0] != sizes[1]
        }
        before, after = ({dim: sizes[i] for dim, sizes in grown.items()} for i in range(2))
        for value, twin in zip(ours, theirs, strict=True):
            if value.op == "pointwise":
                pairs = zip(value.args["xs"], twin.args["xs"], strict=True)
                value.args["xs"] = [
                    x if isinstance(x, Value | Sized) or x == y else of_sizes(x, y, before, after) or x
                    for x, y in pairs
                ]
            for name, one, two in zip(("follows", "steps"), _progresses(value), _progresses(twin), strict=False):
                if one != two:
                    value.args[name] = of_sizes(one, two, before, after)


def _progresses(value: Value) -> tuple[int, ...]:
    """Where a slice begins, if it is not counted from the end; with what whole numbers begin, and by what they go on,
    if they are a progression.
    """
    if value.op == "slice" and not value.args["back"]:
        return (int(value.args["start"]),)
    if value.op != "constant" or value.constant is None or value.constant.dtype != torch.int64:
        return ()
    elements = value.constant.flatten()
    steps = elements.diff()
    return (int(elements[0]), int(steps[0])) if len(steps) and bool((steps == steps[0]).all()) else ()


class Once:
    """What a module computes twice in one call, of views, parts and cells, it computes once."""

    def __init__(self) -> None:
        self.known: dict[object, Value] = {}

    def __call__(self, value: Value) -> Value | None:
        """The first value that is made likewise."""
        if value.op not in (*VIEWS, "slice", "select", "cells"):
            return None
        args = tuple((name, id(each) if isinstance(each, Value) else str(each)) for name, each in value.args.items())
        return self.known.setdefault((value.op, args, value.shape, value.dtype, value.place.calls), value)


def _normal(value: Value) -> Value | None:
    if value.constant is None:
        return complex.of_complex(value) or normal(value)
    try:
        return normal(value)
    except NotUnderstood:
        return None


def _folded(value: Value) -> Value | None:
    """A constant that is a number, a progression, or of operations that the language lacks: only its elements count."""
    if value.constant is None or value.op == "constant":
        return None
    if number(value) is None and value.op in RULES and value.inputs:
        if value.dtype in (torch.float32, torch.float64, torch.bool) or value.op in VIEWS:
            return None
        return _along_one(value)
    return value.make_constant(value.constant)


def _along_one(value: Value) -> Value | None:
    """Integers that are a progression along one dimension, repeated along the others."""
    elements = value.constant
    if elements is None:
        return None
    for dim in range(value.rank):
        first = elements
        for other in range(value.rank):
            first = first if other == dim else first.narrow(other, 0, 1)
        steps = first.flatten().diff()
        if bool((elements == first).all()) and bool((steps == steps[:1]).all()):
            return expanded(value, value.make_constant(first), value.shape)
    return None
