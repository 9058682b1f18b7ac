"""Updates of many tensors by one call: of those that are alike, and read nothing that is made for them."""

from __future__ import annotations

from attrs import evolve

from partita.compiler.codegen.writer import Writer
from partita.compiler.graph import Builder, Value
from partita.compiler.ops.op import Argument, Op
from partita.compiler.ops.optimizer import Ema
from partita.compiler.ops.pointwise import Cast, Pointwise
from partita.compiler.optimizers.adamw import AdamW
from partita.dsl.types import Axis, Type

TYPE = Type("f32", (Axis("rows", 2), Axis("columns", 3)))
ADAMW = AdamW(0.9, 0.99, 1e-8, 0.0)


def tensors(stem: str, count: int = 4) -> list[Value]:
    """A parameter, its gradient and its states."""
    return [Value(f"{stem}{i}", TYPE) for i in range(count)]


def source(build: Builder, *given: list[Value]) -> list[str]:
    """What is written of the nodes; each tensor is called as its value."""
    writer = Writer(("c",), {v: Argument(v.name, v.type) for own in given for v in own})
    writer.block(build.nodes, set())
    return writer.body()


def call(*stems: str, rate: int = 0, factor: str = "") -> str:
    lists = ", ".join(f"[{', '.join(f'{stem}{i}' for stem in stems)}]" for i in range(4))
    by = factor and f", {factor}"
    return f"kernels.adamw_of_each({lists}, c.rates[{rate}], c.update, 0.9, 0.99, 1e-08, 0.0{by})"


def updated(build: Builder, op: Op, operands: list[Value]) -> Value:
    return build.apply_all(op, *operands)[0]


def test_updates_that_are_alike_are_one_call():
    a, b, c, d = map(tensors, "abcd")
    build = Builder()
    for own in (a, c, b, d):
        updated(build, evolve(ADAMW, rate=int(own is c or own is d)), own)
    assert source(build, a, b, c, d) == [call("a", "b"), call("c", "d", rate=1)]


def test_what_follows_reads_what_was_written():
    a, b, means = tensors("a"), tensors("b"), tensors("mean", 2)
    build = Builder()
    for own, mean in ((a, means[0]), (b, means[1])):
        build.apply(Ema(0.5), mean, updated(build, ADAMW, own))
    first, *others = source(build, a, b, means)
    assert first == call("a", "b")
    assert [each.partition(" = ")[2] for each in others if " = " in each] == [
        "kernels.ema(mean0, a0, c.update, 0.5)",
        "kernels.ema(mean1, b0, c.update, 0.5)",
    ]


def test_what_is_made_for_an_update_is_not_kept_for_others():
    """As clipped gradients, each of which ends with its update."""
    a, b = tensors("a"), tensors("b")
    build = Builder()
    for own in (a, b):
        updated(build, ADAMW, [own[0], build.apply(Pointwise("multiply"), own[1], own[1]), *own[2:]])
    assert "kernels.adamw_of_each" not in "\n".join(source(build, a, b))


def test_what_is_read_before_its_update_is_not_written_earlier():
    a, b, c = map(tensors, "abc")
    build = Builder()
    updated(build, ADAMW, a)
    build.apply(Pointwise("multiply"), b[0], b[1], name="kept")
    for own in (b, c):
        updated(build, ADAMW, own)
    lines = source(build, a, b, c)
    assert lines[0] == call("a", "c")
    assert lines[1] == "kept = b0 * b1"
    assert "kernels.adamw(b0, b1, b2, b3," in lines[-1]


def clipped(build: Builder, own: list[Value], factor: Value) -> Value:
    """A parameter's update with its gradient times a factor; returns the product."""
    cast = build.apply(Cast("f32"), factor)
    product = build.apply(Pointwise("multiply"), own[1], cast)
    updated(build, ADAMW, [own[0], product, *own[2:]])
    return product


def factors(*names: str) -> list[Value]:
    return [Value(name, Type("f64", ())) for name in names]


def test_gradients_are_clipped_by_the_same_call():
    a, b, (k,) = tensors("a"), tensors("b"), factors("k")
    build = Builder()
    for own in (a, b):
        clipped(build, own, k)
    assert source(build, a, b, [k]) == [call("a", "b", factor="k")]


def test_gradients_of_another_factor_are_clipped_by_another_call():
    a, b, c, d = map(tensors, "abcd")
    k, other = factors("k", "other")
    build = Builder()
    for own in (a, b):
        clipped(build, own, k)
    for own in (c, d):
        clipped(build, own, other)
    assert source(build, a, b, c, d, [k, other]) == [
        call("a", "b", factor="k"),
        call("c", "d", factor="other"),
    ]


def test_clipped_gradients_that_others_read_are_made():
    a, b, (k,) = tensors("a"), tensors("b"), factors("k")
    build = Builder()
    products = [clipped(build, own, k) for own in (a, b)]
    build.apply(Pointwise("add"), *products, name="both")
    lines = source(build, a, b, [k])
    assert "adamw_of_each" not in "\n".join(lines)
    assert lines[-1] == "both = multiply + multiply_2"
