"""Models become bodies in single-assignment form, numbered and named as `partita.dsl.spec` describes."""

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.dsl import spec
from partita.dsl.functions.signatures import FUNCTIONS
from partita.dsl.load import load, load_text
from partita.dsl.types import Axis, Type
from tests.files import SPECS

AXES = (
    "axis batch = 4, seq = 8, keys = 8, embed = 6, heads = 2, key = 3, half = 2, big = 12\n"
    "axis height = 6, width = 5, rows = 3, kh = 3, kw = 3\n"
)


def model(body, inputs="x: [batch, embed], ids: i64[batch]", before=""):
    text = f"{AXES}{before}model m({inputs}) {{\n{body}\n}}\n"
    found, diagnostics = load_text(text)
    errors = [d.render() for d in diagnostics if d.severity == "error"]
    assert found is not None, "\n".join(errors)
    check_numbering(found.model.body)
    return found.model


def result_types(step):
    if isinstance(step, spec.CallBlock):
        return [step.body.types[r] for r in step.body.results]
    if isinstance(step, spec.Repeat):
        return list(step.body.types[: len(step.carried)])
    return [step.type]


def operands(step):
    match step:
        case spec.Apply():
            return step.operands
        case spec.CallBlock():
            return step.arguments
        case spec.Repeat():
            return (*step.carried, *step.captured)
    return ()


def check_numbering(body):
    """Types stand at the numbers of the values; operands are values that exist already; segments differ."""
    types = list(body.types[: len(body.inputs)])
    segments = []
    for step in body.steps:
        for operand in operands(step):
            assert isinstance(operand, spec.Literal) or 0 <= operand < len(types), step
        types += result_types(step)
        if isinstance(step, spec.CallBlock):
            assert len(step.arguments) == len(step.body.inputs)
            segments.append(step.scope)
        elif isinstance(step, spec.Repeat):
            assert len(step.carried) + len(step.captured) == len(step.body.inputs)
            assert len(step.body.results) == len(step.carried) == len(step.names)
            segments.append(step.scope)
        elif not isinstance(step, spec.Apply):
            segments.append(step.name)
        if isinstance(step, spec.CallBlock | spec.Repeat):
            check_numbering(step.body)
    assert tuple(types) == body.types
    assert len(set(segments)) == len(segments), segments
    assert all(isinstance(r, spec.Literal) or 0 <= r < len(types) for r in body.results)


def type_of(expression, inputs="x: [batch, embed], ids: i64[batch]", before=""):
    """The type and options of one expression, as the metric's operand `y`."""
    body = f"  let y = {expression}\n  param w: [embed] ~ ones()\n  loss mean(w) + 0 * sum(cast(y, f32))"
    found = model(body, inputs, before)
    return next(step for step in found.body.steps if getattr(step, "name", None) == "y")


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.par")), ids=lambda path: path.name)
def test_examples_are_numbered(path):
    found, diagnostics = load(path)
    assert found is not None
    assert all(d.severity == "warning" for d in diagnostics)
    check_numbering(found.model.body)
    assert found.model.body.types[found.model.loss] == Type("f32")


def test_tiny_is_what_it_says():
    found, diagnostics = load(SPECS / "tiny.par")
    assert diagnostics == ()
    body = found.model.body
    assert body.inputs == ("tokens", "targets")
    kinds = [type(step).__name__ for step in body.steps]
    assert kinds == ["Parameter", "Parameter", "Apply", "Apply", "Repeat", "Apply", "Apply", "Apply"]
    repeat = body.steps[4]
    assert (repeat.name, repeat.scope, repeat.count, repeat.names) == ("layer", "layer", 4, ("x",))
    assert [(step.block, step.scope) for step in repeat.body.steps] == [("attention", "attention"), ("mlp", "mlp")]
    # Per layer: 4 parameters and 7 steps of attention, 2 and 5 of mlp.
    assert found.model.nodes == 2 + 2 + 4 * (11 + 7) + 3
    attend = next(s for s in repeat.body.steps[0].body.steps if getattr(s, "function", "") == "attend")
    assert attend.options == {
        "over": "seq",
        "along": "key",
        "causal": True,
        "scale": 1 / sqrt(32),
        "mask": False,
        "bias": False,
    }
    assert attend.name == "a"


# Every function: expression, result dtype and axes, options.
CASES = [
    ("x + x", "f32 batch embed", {}),
    ("x * 2", "f32 batch embed", {}),
    ("3 - ids", "i64 batch", {}),
    ("x < 1", "bool batch embed", {}),
    ("ids == 3", "bool batch", {}),
    ("-x", "f32 batch embed", {}),
    ("gelu(x)", "f32 batch embed", {}),
    ("maximum(x, 0)", "f32 batch embed", {}),
    ("where(x > 0, x, 0.5)", "f32 batch embed", {}),
    ("where(x > 0, 1, 0)", "f32 batch embed", {}),
    ("cast(ids, f32)", "f32 batch", {"dtype": "f32"}),
    ("stop_gradient(x)", "f32 batch embed", {}),
    ("dropout(x, rate = 0.1)", "f32 batch embed", {"rate": 0.1}),
    ("dropout(x, 10%)", "f32 batch embed", {"rate": 0.1}),
    ("dot(x, q, over = embed)", "f32 batch heads key", {"over": ("embed",)}),
    ("dot(q, q, over = [heads, key])", "f32 embed", {"over": ("heads", "key")}),
    ("embedding(ids, q, over = heads)", "f32 batch embed key", {"over": "heads"}),
    ("gather(x, ids, along = embed)", "f32 batch", {"along": "embed"}),
    ("gather(q, ids, along = heads)", "f32 batch embed key", {"along": "heads"}),
    ("sum_by(t, cast(t, i64), [seq, key] -> embed)", "f32 heads embed", {"along": ("seq", "key"), "into": "embed"}),
    ("mean_by(x, ids, batch -> seq)", "f32 seq embed", {"along": ("batch",), "into": "seq"}),
    ("max_by(x, ids, batch -> seq)", "f32 seq embed", {"along": ("batch",), "into": "seq"}),
    ("softmax_by(x, ids, batch -> seq)", "f32 batch embed", {}),
    ("inverse(k, over = [kh, kw])", "f32 kh kw heads key", {"rows": "kh", "columns": "kw"}),
    (
        "delta_rule(q, q, sum(q, over = key), 1, sigmoid(q), over = embed, along = key)",
        "f32 embed heads",
        {"over": "embed", "along": "key"},
    ),
    (
        "rope(i, over = batch, pairs = height, positions = expand(ids, half), sections = [1, 2])",
        "f32 batch key height width",
        {"over": "batch", "pairs": "height", "base": 10_000.0, "sections": (1, 2)},
    ),
    ("flip(x, over = embed)", "f32 batch embed", {"over": "embed"}),
    ("roll(ids, over = batch, by = -2)", "i64 batch", {"over": "batch", "by": -2}),
    ("remainder(ids, 3)", "i64 batch", {}),
    ("floor_divide(ids, size(key))", "i64 batch", {}),
    ("atan2(x, 0.5)", "f32 batch embed", {}),
    ("logaddexp(x, x)", "f32 batch embed", {}),
    ("gather(q > 0, ids, key)", "bool batch embed heads", {"along": "key"}),
    ("gather(q, 1, along = heads)", "f32 embed key", {"over": ("1",)}),
    ("gather(ids, size(batch) - 1, along = batch)", "i64", {"over": ("1",)}),
    ("gather(q > 0, 0, along = key)", "bool embed heads", {}),
    ("one_hot(ids, seq)", "f32 batch seq", {"axis": "seq"}),
    ("arg_max(x, over = embed)", "i64 batch", {"over": "embed"}),
    ("arg_max(x, batch)", "i64 embed", {"over": "batch"}),
    ("cumsum(q, over = heads)", "f32 embed heads key", {"over": "heads"}),
    ("cumsum(ids, batch)", "i64 batch", {"over": "batch"}),
    ("rope(s, over = seq, pairs = embed)", "f32 seq embed", {"over": "seq", "pairs": "embed", "base": 10000.0}),
    (
        "rope(s, over = seq, pairs = embed, scaling = llama3(factor = 8, low = 1, high = 4, original = 8192))",
        "f32 seq embed",
        {"over": "seq", "pairs": "embed", "base": 10000.0, "scaling": ("llama3", 8.0, 8192, 1.0, 4.0)},
    ),
    (
        "rope(s, over = seq, pairs = embed, scaling = yarn(32, original = size(embed) * 100))",
        "f32 seq embed",
        {
            "over": "seq",
            "pairs": "embed",
            "base": 10000.0,
            "scaling": ("yarn", 32.0, 600, 32.0, 1.0, None, True),
        },
    ),
    (
        "attend(t, t, t, over = seq, along = key, window = 3, softcap = 30, sink = mean(t, over = [seq, key]), "
        "segments = iota(seq), dropout = 10%)",
        "f32 heads seq key",
        {
            "over": "seq",
            "along": "key",
            "causal": False,
            "scale": 1 / sqrt(3),
            "mask": False,
            "bias": False,
            "window": 3,
            "softcap": 30.0,
            "dropout": 0.1,
            "segments": True,
            "sink": True,
        },
    ),
    (
        "attend(t, t, s, over = seq, along = key)",
        "f32 heads seq embed",
        {
            "over": "seq",
            "along": "key",
            "causal": False,
            "scale": 1 / sqrt(3),
            "mask": False,
            "bias": False,
            "values": "embed",
        },
    ),
    ("iota(seq)", "i64 seq", {"axis": "seq"}),
    ("sum(x)", "f32", {"over": ("batch", "embed")}),
    ("sum(ids)", "i64", {"over": ("batch",)}),
    ("mean(x, over = embed)", "f32 batch", {"over": ("embed",)}),
    ("softmax(x, embed)", "f32 batch embed", {"over": ("embed",)}),
    ("log_softmax(x, over = [embed])", "f32 batch embed", {"over": ("embed",)}),
    (
        "layer_norm(x, over = embed)",
        "f32 batch embed",
        {"over": ("embed",), "eps": 1e-5, "scale": False, "shift": False},
    ),
    (
        "rms_norm(x, over = embed, shift = x, eps = 1e-6)",
        "f32 batch embed",
        {"over": ("embed",), "eps": 1e-6, "scale": False, "shift": True},
    ),
    ("cross_entropy(x, ids, over = embed)", "f32", {"over": "embed", "weights": False}),
    (
        "cross_entropy(x, ids, over = embed, ignore = -1)",
        "f32",
        {"over": "embed", "weights": False, "ignore": -1},
    ),
    ("token_nll(x, ids, over = embed)", "f32 batch", {"over": "embed"}),
    ("token_nll(x, ids, over = embed, ignore = 0)", "f32 batch", {"over": "embed", "ignore": 0}),
    ("accuracy(x, ids, over = embed)", "f32", {"over": "embed", "weights": False}),
    (
        "accuracy(x, ids, over = embed, weights = sum(x, over = embed), ignore = -1)",
        "f32",
        {"over": "embed", "weights": True, "ignore": -1},
    ),
    ("mse(x, x)", "f32", {}),
    ("grad(x * x, x)", "f32 batch embed", {}),
    ("binary_cross_entropy(x, x)", "f32", {}),
    ("linear_scan(0.5, s, over = seq)", "f32 seq embed", {"over": "seq", "backward": False}),
    ("linear_scan(s, 1, over = seq, backward = true)", "f32 seq embed", {"over": "seq", "backward": True}),
    ("zeros([seq, batch])", "f32 seq batch", {}),
    ("zeros_like(x)", "f32 batch embed", {}),
    ("shift(ids, over = batch)", "i64 batch", {"over": "batch", "by": 1}),
    ("shift(x, over = embed, by = -2)", "f32 batch embed", {"over": "embed", "by": -2}),
    ("gelu(x)", "f32 batch embed", {}),
    ("gelu(x, exact = true)", "f32 batch embed", {"exact": True}),
    ("power(x, 2)", "f32 batch embed", {}),
    ("power(2, x)", "f32 batch embed", {}),
    ("power(s, x * 1.5 + expand(s, batch))", "f32 seq embed batch", {}),
    ("sign(ids)", "i64 batch", {}),
    ("logsumexp(x, over = embed)", "f32 batch", {"over": ("embed",)}),
    ("expand(x, seq)", "f32 batch embed seq", {"axes": ("seq",)}),
    ("expand(x, [seq, key])", "f32 batch embed seq key", {"axes": ("seq", "key")}),
    ("rename(s, seq -> keys)", "f32 keys embed", {"pairs": (("seq", "keys"),)}),
    ("split(x, embed -> [heads, key])", "f32 batch heads key", {"axis": "embed", "into": ("heads", "key")}),
    ("merge(t, [heads, key] -> embed)", "f32 embed seq", {"axes": ("heads", "key"), "into": "embed"}),
    ("concat(x, x, [embed, embed] -> big)", "f32 batch big", {"axes": ("embed", "embed"), "into": "big"}),
    (
        "patches(i, height -> rows, size = kh, stride = 2, padding = 1)",
        "f32 batch key rows width kh",
        {
            "axes": ("height",),
            "into": ("rows",),
            "size": ("kh",),
            "stride": (2,),
            "padding": ((1, 1),),
            "dilation": (1,),
            "fill": 0.0,
        },
    ),
    (
        "conv(i, k, [height, width] -> [rows, width], over = key, stride = [2, 1], padding = [[1, 1], [0, 2]])",
        "f32 batch heads rows width",
        {
            "axes": ("height", "width"),
            "into": ("rows", "width"),
            "size": ("kh", "kw"),
            "stride": (2, 1),
            "padding": ((1, 1), (0, 2)),
            "dilation": (1, 1),
            "over": ("key",),
        },
    ),
    (
        "conv(i, k, width -> width, size = kw, groups = key, dilation = 2, padding = 2)",
        "f32 batch key height width kh heads",
        {
            "axes": ("width",),
            "into": ("width",),
            "size": ("kw",),
            "stride": (1,),
            "padding": ((2, 2),),
            "dilation": (2,),
            "over": (),
        },
    ),
    ("slice(x, embed -> half, start = 4)", "f32 batch half", {"axis": "embed", "into": "half", "start": 4}),
]
INPUTS = (
    "x: [batch, embed], ids: i64[batch], q: [embed, heads, key], s: [seq, embed], t: [heads, seq, key],"
    "i: [batch, key, height, width], k: [kh, kw, heads, key]"
)


@pytest.mark.parametrize(("expression", "expected", "options"), CASES, ids=[case[0] for case in CASES])
def test_types_and_options(expression, expected, options):
    step = type_of(expression, INPUTS)
    dtype, *axes = expected.split()
    assert (step.type.dtype, list(step.type.names)) == (dtype, axes)
    assert dict(step.options) == options


def test_every_function_has_a_case_or_an_operator():
    tested = {expression.split("(")[0] for expression, *_ in CASES}
    others = "add subtract multiply divide negate attend relu silu sigmoid tanh exp log sqrt rsqrt abs minimum max min"
    others += " logical_and logical_or logical_not sin cos erf softplus log_sigmoid floor round training"
    others += " top_k routed_dot dispatch combine dropped load"  # in test_routing.py
    others += " less less_equal greater greater_equal equal not_equal"
    assert set(FUNCTIONS) <= tested | set(others.split())


def test_numbers_are_folded_exactly():
    step = type_of("x * (1 / sqrt(size(heads) * 8) + size(embed) / 3 - 2)")
    assert step.operands == (0, spec.Literal(0.25))


def test_lets_of_numbers_are_numbers():
    found = model("  let n = size(heads) + 1\n  repeat n as l {\n    let x = relu(x)\n  }\n  loss mean(x)")
    assert found.body.steps[0].count == 3


def test_carried_and_captured_values():
    found = model(
        "  param w, v: [embed] ~ ones()\n  let y = relu(x)\n"
        "  repeat 2 as outer {\n    let t = x * w\n    repeat 3 as inner {\n      let y = y + t * v\n    }\n"
        "    let x = x + y\n  }\n  loss mean(x + y)"
    )
    outer = found.body.steps[3]
    # Carried in the order in which they are rebound first; captured in the order of their first use.
    assert outer.names == ("y", "x")
    assert outer.body.inputs == ("y", "x", "w", "v")
    assert outer.carried == (4, 0)
    assert outer.captured == (2, 3)
    inner = outer.body.steps[1]
    assert inner.body.inputs == ("y", "t", "v")
    assert inner.carried == (0,)
    assert inner.captured == (4, 3)


def test_a_number_carried_by_a_repeat_is_a_scalar():
    found = model("  let total = 0\n  repeat 2 as l {\n    let total = total + mean(x)\n  }\n  loss total")
    repeat = found.body.steps[0]
    assert repeat.carried == (spec.Literal(0),)
    assert repeat.body.types[0] == Type("f32")


def test_segments_are_unique_and_parameters_keep_their_names():
    found = model(
        "  let x = f(f(x))\n  repeat 1 as f {\n    let x = relu(x)\n  }\n"
        "  param f_2: [embed] ~ ones()\n  loss mean(x * f_2)",
        before="block f(x: [batch, embed]) {\n  return relu(x)\n}\n",
    )
    segments = [getattr(s, "scope", None) or s.name for s in found.body.steps if not isinstance(s, spec.Apply)]
    assert segments == ["f", "f_3", "f_4", "f_2"]


def test_blocks_are_checked_once_and_shared():
    found = model("  let x = f(f(x))\n  loss mean(x)", before="block f(x: [batch, embed]) {\n  return relu(x)\n}\n")
    first, second, _ = found.body.steps
    assert first.body is second.body


def test_a_block_called_over_other_axes():
    before = (
        "block inner(x: [batch, seq]) {\n  return softmax(x, over = seq)\n}\n"
        "block outer(x: [batch, seq]) {\n  return inner(x), inner(x, batch -> seq, seq -> batch)\n}\n"
    )
    found = model("  let a, b = outer(x, seq -> embed)\n  loss mean(a + b)", before=before)
    call = found.body.steps[0]
    assert call.body.types[0].names == ("batch", "embed")
    plain, swapped = call.body.steps
    assert plain.body.steps[0].options["over"] == ("embed",)
    # Written over (seq, batch) where embed stands for seq: `seq -> batch` is batch, `batch -> seq` is embed.
    assert swapped.body.steps[0].options["over"] == ("batch",)
    assert swapped.body.types[0].names == ("embed", "batch")


def test_a_block_may_shadow_a_function():
    found = model("  loss mean(relu(x))", before="block relu(x: [batch, embed]) {\n  return x * x\n}\n")
    assert found.body.steps[0].block == "relu"


def test_metrics_and_loss_are_values():
    found = model("  metric size = sum(x)\n  loss mean(x)\n  metric third = min(x)")
    assert [name for name, _ in found.metrics] == ["size", "third"]
    assert [found.body.steps[v - 2].function for _, v in found.metrics] == ["sum", "min"]
    assert found.body.steps[found.loss - 2].function == "mean"


def test_axis_arithmetic_is_exact():
    found, _ = load_text("axis embed = 4_096, ffn = 8 * embed / 3 * 3 / 2, one = size(embed) / embed\n")
    assert found.axes["ffn"] == Axis("ffn", 16384)
    assert found.axes["one"].size == 1


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_steps_are_counted_without_expanding(depth, turns, calls):
    blocks = "block b0(x: [batch]) {\n  return relu(x)\n}\n"
    for i in range(1, depth + 1):
        inner = f"b{i - 1}(" * calls + "x" + ")" * calls
        blocks += f"block b{i}(x: [batch]) {{\n  return {inner}\n}}\n"
    repeat = f"repeat {turns} as l {{\n    let x = b{depth}(x)\n  }}"
    text = f"{AXES}{blocks}model m(x: [batch]) {{\n  {repeat}\n  loss sum(x)\n}}\n"
    found, diagnostics = load_text(text)
    expected = turns * calls**depth + 1
    if expected - 1 > 2_000_000:
        assert [d.code for d in diagnostics if d.severity == "error"] == ["E0008"]
    else:
        assert found.model.nodes == expected


@pytest.mark.parametrize(
    ("body", "unreached"),
    [
        ("  param w: [embed] ~ ones()\n  loss mean(x * w)", []),
        ("  param w, v: [embed] ~ ones()\n  let y = x * v\n  loss mean(x * w)", ["v"]),
        ("  param w: [embed] ~ ones()\n  loss mean(x) + mean(cast(x * w > 0, f32))", ["w"]),
        ("  param w: [embed] ~ ones()\n  loss mean(x) + mean(stop_gradient(w))", ["w"]),
        # w reaches y in one turn, and x in the next.
        (
            "  param w: [embed] ~ ones()\n  let y = x\n"
            "  repeat 3 as l {\n    let x = x + y\n    let y = x * w\n  }\n  loss mean(x)",
            [],
        ),
        ("  param w: [embed] ~ ones()\n  repeat 2 as l {\n    let z = x * w\n  }\n  loss mean(x)", ["w"]),
        ("  let a, b = two(x)\n  loss mean(a)", ["v"]),
    ],
)
def test_parameters_that_do_not_reach_the_loss(body, unreached):
    block = "block two(x: [batch, embed]) {\n  param w, v: [embed] ~ ones()\n  return x * w, x * v\n}\n"
    _, diagnostics = load_text(f"{AXES}{block}model m(x: [batch, embed]) {{\n{body}\n}}\n")
    errors = [d for d in diagnostics if d.severity == "error"]
    assert [d.code for d in errors] == ["E0408"] * len(unreached)
    assert [d.span.source.text[d.span.start : d.span.end] for d in errors] == unreached


def test_a_statement_declares_several_samples():
    found = model("  sample a, b: [batch, embed] ~ normal(1.0)\n  loss mean((a - b) * x)", "x: [batch, embed]")
    samples = [step for step in found.body.steps if isinstance(step, spec.Sample)]
    assert [(step.name, step.span.column) for step in samples] == [("a", 10), ("b", 13)]


def test_what_is_advised_of_ignored_targets_works():
    text = """\
axis batch = 4, vocab = 5
model m(x: [batch, vocab], t: i64[batch]) {
  param w: [vocab] ~ ones()
  loss cross_entropy(x * w, t, over = vocab, ignore = -1)
  metric right = accuracy(
    x * w, t, over = vocab
  )
}
"""
    _, (found,) = load_text(text)
    assert found.code == "W0202"
    assert found.help is not None
    assert found.span is not None
    _, left = load_text(text[: found.span.start] + found.help.strip("`") + text[found.span.end :])
    assert left == ()


def test_values_are_all_computed_before_a_name_is_bound():
    steps = model("let u, v = x, -x\n let u, v = v, u\n loss mean(u - 2 * v)").body.steps
    (negated,) = (i for i, step in enumerate(steps) if step.function == "negate")
    (doubled,) = (step for step in steps if step.function == "multiply")
    (apart,) = (step for step in steps if step.function == "subtract")
    assert 0 in doubled.operands  # the input, which has been swapped into `v`
    assert apart.operands[0] == 2 + negated
