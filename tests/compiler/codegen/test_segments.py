"""What torch compiles together: with what it adds to accumulators, unless that must come later."""

from __future__ import annotations

from partita.compiler.codegen.segments import Segment, compiled_units, segmented
from partita.compiler.graph import Builder, Node, Value
from partita.compiler.ops.collective import AllReduce
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.loss import NegativeLogLikelihood, NegativeLogLikelihoodGradient
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Pointwise
from partita.dsl.types import Axis, Type

ROWS, DEPTH, COLUMNS = Axis("rows", 3), Axis("depth", 4), Axis("columns", 5)
LEFT, RIGHT = Value("left", Type("f32", (ROWS, DEPTH))), Value("right", Type("f32", (DEPTH, COLUMNS)))
X = Value("x", Type("f32", (ROWS, COLUMNS)))


def squares(build: Builder, value: Value = X) -> Value:
    """Of squares: a run that is long enough."""
    for _ in range(4):
        value = build.apply(Pointwise("multiply"), value, value)
    return value


def accumulate(build: Builder, value: Value, target: str = "total") -> Node:
    build.apply_all(Accumulate(target, value.type), value)
    return build.nodes[-1]


def units(build: Builder) -> list[Node | Segment]:
    """In order; the memory bound takes the same nodes together."""
    found = segmented(build.nodes, (), ())
    together = [list(each.nodes) if isinstance(each, Segment) else [each] for each in found]
    assert compiled_units(build.nodes, (), ()) == together
    return found


def test_a_segment_adds_what_it_makes():
    build = Builder()
    accumulate(build, squares(build))
    (segment,) = units(build)
    assert isinstance(segment, Segment)
    assert [op.target for op in segment.sums] == ["total"]
    assert segment.outputs == ()


def test_what_makes_several_passes_is_compiled_alone():
    """As the gradient of a loss goes through all logits, which are large, again and again."""
    targets = Value("targets", Type("i64", (ROWS,)))
    build = Builder()
    nll, denominator = build.apply_all(NegativeLogLikelihood("columns"), X, targets)
    build.apply(NegativeLogLikelihoodGradient("columns"), nll, X, targets, denominator)
    (segment,) = units(build)
    assert isinstance(segment, Segment)
    assert len(segment.nodes) == 2


def test_a_product_adds_itself_behind_its_segment():
    build = Builder()
    squares(build)
    product = build.apply(Dot(("depth",)), LEFT, RIGHT)
    own = accumulate(build, product)
    other = accumulate(build, squares(build), "other")
    segment, *behind = units(build)
    assert isinstance(segment, Segment)
    assert [op.target for op in segment.sums] == ["other"]
    assert other in segment.nodes
    assert [each.outputs for each in behind] == [(product,), ()]
    assert behind[-1] is own


def test_sums_stay_in_order():
    """What adds to a total after a product has done so."""
    build = Builder()
    first = accumulate(build, build.apply(Dot(("depth",)), LEFT, RIGHT))
    second = accumulate(build, squares(build))
    segment, _, *behind = units(build)
    assert isinstance(segment, Segment)
    assert not segment.sums
    assert behind == [first, second]


def test_what_is_under_way_is_added_later():
    """Nothing waits for a collective earlier than it must."""
    build = Builder()
    reduced = build.apply(AllReduce("data", 2), squares(build))
    late = accumulate(build, reduced)
    squares(build)
    first, _, second, last = units(build)
    assert isinstance(first, Segment)
    assert isinstance(second, Segment)
    assert last is late
