"""Statements, of which source is made: what they read and take views of, what ends when; and what they rest on."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from partita.compiler.codegen.names import local_stem, place
from partita.compiler.codegen.statements import Add, Compute, CreateView, Delete, create_shared_views
from partita.compiler.codegen.writer import Writer
from partita.compiler.graph import Builder, Node, Value
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Argument
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.ops.traits import legalized
from partita.compiler.pipeline import assembled, compile_run
from partita.compiler.state import Compilation
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.dsl.syntax.source import Source, Span
from partita.dsl.types import Axis, Type
from partita.runtime.tracing.recording import Recorded
from tests.files import SPECS
from tests.reference.compare import accepted
from tests.reference.programs import Maker

BATCH, ROWS, DEPTH, COLUMNS = Axis("batch", 2), Axis("rows", 3), Axis("depth", 4), Axis("columns", 5)
X, W = Value("x", Type("f32", (BATCH, ROWS, DEPTH))), Value("w", Type("f32", (DEPTH, COLUMNS)))
DOT, MULTIPLY = Dot(("depth",)), Pointwise("multiply")


@cache
def compilations() -> list[Compilation]:
    """What the specs and some random programs compile to, training and evaluation."""
    specs = [load(SPECS / f"{name}.par", ())[0] for name in ("tiny", "gpt", "llama")]
    found = [compile_run(spec) for spec in specs if spec is not None]
    with TemporaryDirectory() as folder:
        for seed in range(1, 9):
            with suppress(Refused):
                program = Maker(Random(seed), cutting=seed % 5 != 0).program()
                found.append(compile_run(accepted(program, Path(folder))[1]))
    return [each for pair in found for each in pair if each is not None]


def written(build: Builder, wanted: set[Value], accumulators: dict[str, Value] | None = None) -> Writer:
    known = {value: Argument(value.name, value.type) for value in (X, W, *(accumulators or {}).values())}
    writer = Writer(("x", "c"), known)
    writer.block(build.nodes, wanted, accumulators)
    return writer


# ---------------------------------------------------------------- records


def test_a_view_is_not_a_read_and_is_made_before_the_first_who_takes_it():
    build = Builder()
    h = build.apply(MULTIPLY, X, X, name="h")
    once, twice = (build.apply(DOT, h, W, name=name) for name in ("once", "twice"))
    last = build.apply(MULTIPLY, once, twice, name="last")
    writer = written(build, {last})
    kinds = [type(each) for each in writer.statements]
    assert kinds == [Compute, Compute, Compute, Delete, Compute]
    first, *products = [each for each in writer.statements if isinstance(each, Compute)][:3]
    assert first.reads == (X, X)
    assert [list(each.reads) for each in products] == [[W], [W]]
    assert {view.of for each in products for view in each.views} == {h}
    found = create_shared_views(writer.statements, writer.names)
    assert [type(each) for each in found] == [Compute, CreateView, Compute, Compute, Delete, Compute]
    (end,) = (each for each in found if isinstance(each, Delete))
    assert end.values == (h,)
    assert end.deleted_views == (products[0].views[0],)


def test_what_adds_itself_is_one_statement():
    build = Builder()
    total = Value("total", Type("f32", (BATCH, ROWS, COLUMNS)))
    product = build.apply(DOT, X, W, name="product")
    build.nodes.append(Node(Accumulate("sum", total.type), (product,), (), ""))
    (statement,) = written(build, set(), {"sum": total}).statements
    assert isinstance(statement, Add)
    assert statement.node.output is product
    assert statement.target is total


# ---------------------------------------------------------------- what statements rest on


@pytest.mark.soak
def test_an_operation_knows_whether_its_source_reads_the_context():
    told = set()
    for state in compilations():
        for stage in state.partitioned.stages:
            for node in stage.nodes:
                types = [value.type for value in node.outputs]
                given = [Argument(f"x{i}", value.type) for i, value in enumerate(node.inputs)]
                try:
                    text = node.op.emit(legalized(node.op, given, types), types)
                except (AssertionError, NotImplementedError):
                    continue  # no expression
                reads = bool(re.search(r"\bc\b", text))
                # Whether a scan does depends on its states and literals; it always says so.
                assert reads == node.op.reads_context or (node.op.name == "scan" and not reads), (node, text)
                told.add(node.op.reads_context)
    assert told == {True, False}


@pytest.mark.soak
def test_an_operation_takes_the_views_that_it_says():
    """No view of an operand stands in its source beside them."""
    taken = 0
    for state in compilations():
        for stage in state.partitioned.stages:
            for node in stage.nodes:
                views = node.op.views([value.type for value in node.inputs]) if isinstance(node.op, Dot) else ()
                given = [
                    Argument(f"x{i}", value.type, views={how: f"view{i}"} if how else {})
                    for i, (value, how) in enumerate(zip(node.inputs, views or [""] * len(node.inputs), strict=True))
                ]
                if views:
                    types = [value.type for value in node.outputs]
                    text = node.op.emit(legalized(node.op, given, types), types)
                    for i, how in enumerate(views):
                        assert (f"view{i}" in text, f"x{i}" in text) == (bool(how), not how), (node, text)
                        taken += bool(how)
    assert taken > 20


@pytest.mark.soak
def test_values_say_what_they_are_made_of():
    """Their names say the same."""
    cotangents = copies = 0
    for state in compilations():
        for stage in state.partitioned.stages:
            for value in {value for node in stage.nodes for value in (*node.inputs, *node.outputs)}:
                assert value.cotangent == value.name.startswith("d("), value
                if value.of is not None:
                    assert value.of in re.sub(r"~\d+|d\(|\)", "", value.name), value
                    copies += not value.cotangent
                if not re.search(r"~|\.(again|gathered|reduced|moved|part|rows|flat|whole)", value.name):
                    assert value.tensor == re.sub(r"d\((.*)\)", r"\1", value.name), value
                cotangents += value.cotangent
    assert cotangents > 100
    assert copies > 20


@pytest.mark.soak
@pytest.mark.parametrize("probe", [None, Recorded()], ids=["plain", "recorded"])
def test_functions_of_turns_have_no_parameter_that_they_do_not_read(probe: Recorded | None):
    """Also where the name of one stands in a comment or in what a probe writes."""
    count = 0
    for state in compilations():
        source = assembled(state, probe).program.source if probe else state.program.source
        for function in ast.parse(source).body:
            if isinstance(function, ast.FunctionDef) and function.args.args[0].arg == "c":
                read = {each.id for each in ast.walk(function) if isinstance(each, ast.Name)}
                unread = {each.arg for each in function.args.args} - read - {"c"}
                assert not unread, f"{function.name}: {unread}"
                count += 1
    assert count > 10


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt.layer.3.mlp.h", "h"),
        ("d(gpt.layer.3.mlp.h)", "d_h"),
        ("d(gpt.layer.3.mlp.h).gathered", "d_h_gathered"),
        ("total(d(gpt.w))@3", "total_d_w"),
        ("gpt.h.again~12", "h_again"),
        ("m.sum~2", "sum"),
        ("sum gpt.h on 2", "h_on_2"),
        ("square 1", "square_1"),
        ("lambda", "lambda_"),
        ("m.layer_forward", "layer_forward_"),
        ("m.layer_weight_2", "layer_weight_2_"),
        ("m.forward", "forward"),
        ("m._forward_2", "_forward_2_"),
        ("3.4", "value"),
        ("(x)", "_x_"),
        ("größe.ñ", "ñ"),
    ],
)
def test_a_local_name(name: str, expected: str):
    assert local_stem(name) == expected


def test_a_files_name_cannot_end_a_comment():
    text = "a\nb"
    assert place(Span(Source("x/\nimport os; y.par", text), 2, 3)) == "  # x/_import os_ y.par:2"
    assert place(None) == ""
