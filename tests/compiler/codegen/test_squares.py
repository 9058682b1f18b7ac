"""The squares of many tensors, added in f64, are one operation; where anything else is read, they are left."""

from __future__ import annotations

from partita.compiler.codegen.writer import Writer
from partita.compiler.graph import Builder, Value
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Argument
from partita.compiler.ops.pointwise import Cast, Pointwise
from partita.dsl.types import Axis, Type

ADD = Pointwise("add")
AXES = (Axis("rows", 2), Axis("columns", 3))


def tensors(count: int, dtype: str = "f32") -> list[Value]:
    return [Value(f"t{i}", Type(dtype, AXES)) for i in range(count)]


def square(
    build: Builder, value: Value, other: Value | None = None, over: tuple[str, ...] = ("rows", "columns")
) -> Value:
    return build.apply(Cast("f64"), build.apply(Dot(over), value, other or value))


def total(build: Builder, squares: list[Value]) -> Value:
    found = squares[0]
    for each in squares[1:]:
        found = build.apply(ADD, found, each)
    return found


def source(build: Builder, given: list[Value], *kept: Value) -> str:
    writer = Writer((), {value: Argument(value.name, value.type) for value in given})
    writer.block(build.nodes, set(kept))
    return "\n".join(writer.body())


def test_they_are_one_operation():
    build, given = Builder(), tensors(3)
    result = total(build, [square(build, each) for each in given])
    assert source(build, given, result) == "add = kernels.sum_of_squares([t0, t1, t2])"


def test_two_sums_are_two_operations():
    build, given = Builder(), tensors(4)
    one, other = (total(build, [square(build, each) for each in own]) for own in (given[:2], given[2:]))
    both = build.apply(ADD, one, other, name="both")
    assert source(build, given, both).split("\n") == [
        "add = kernels.sum_of_squares([t0, t1])",
        "add_2 = kernels.sum_of_squares([t2, t3])",
        "both = add + add_2",
    ]


def test_what_is_read_besides_is_made():
    for kept in range(3):
        build, given = Builder(), tensors(3)
        squares = [square(build, each) for each in given]
        inner = build.apply(ADD, *squares[:2])
        result = build.apply(ADD, inner, squares[2])
        text = source(build, given, result, (squares[0], inner, squares[2])[kept])
        assert text.count("torch.dot(") == (3, 1, 1)[kept]
        assert text.count("sum_of_squares([t0, t1])") == (0, 1, 1)[kept]


def test_products_of_two_tensors_parts_of_a_sum_and_other_dtypes_are_left():
    build, given = Builder(), tensors(2)
    total(build, [square(build, given[0], given[1]), square(build, given[1])])
    assert "sum_of_squares" not in source(build, given)
    build, given = Builder(), tensors(2)
    total(build, [square(build, each, over=("columns",)) for each in given])
    assert "sum_of_squares" not in source(build, given)
    build, given = Builder(), tensors(2, "f64")
    total(build, [build.apply(Dot(("rows", "columns")), each, each) for each in given])
    assert "sum_of_squares" not in source(build, given)
