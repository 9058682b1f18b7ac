"""Random syntax trees, and the text that says a tree, with arbitrary white space and comments between its words."""

from hypothesis import strategies as st

from partita.dsl.syntax import tree
from partita.dsl.syntax.lexer import RESERVED_WORDS, language
from partita.dsl.syntax.parser import RESERVED
from partita.dsl.syntax.source import Source, Span

NOWHERE = Span(Source("nowhere", ""), 0, 0)
KEYWORDS = RESERVED_WORDS | set(RESERVED)
# Names where they may not stand. `not` stands where names do.
SOFT = sorted({word for word in language().words if word.isalpha()} - RESERVED_WORDS - {"not"})


def node(kind, *parts):
    """A node at no place in particular."""
    return kind(*parts, span=NOWHERE)


names = (
    st.one_of(
        st.sampled_from(["x", "wq", "embed", "seq_2", "_", "f32", "i64", "all", *SOFT]),
        st.from_regex(r"[a-zA-Z_]\w{0,6}", fullmatch=True),
    )
    .filter(lambda text: text.isascii() and (text not in KEYWORDS or text == "all"))
    .map(lambda text: node(tree.Name, text))
)
numbers = st.one_of(
    st.integers(0, 10**6).map(str),
    st.sampled_from(["0.5", "1e-3", "80GiB", "900GB/s", "8%", "10_000", "5us", "989TFLOP/s", "3.0e+4"]),
).map(lambda text: node(tree.Number, text))
strings = st.from_regex(r'"([^"\\\n\x00-\x1f]|\\[^\n\x00-\x1f])*"', fullmatch=True).map(
    lambda text: node(tree.String, text)
)
booleans = st.booleans().map(lambda value: node(tree.Boolean, value))
paths = st.lists(names, min_size=1, max_size=3).map(lambda parts: node(tree.Path, tuple(parts)))

PRECEDENCE = {"or": 0, "and": 1, "<": 3, "==": 3, ">=": 3, "+": 4, "-": 4, "*": 5, "/": 5}
NOT, COMPARISON, SUM, PRODUCT, NEGATIVE = 2, 3, 4, 5, 6


def tight(expression, level):
    """The expression, in parentheses where an operator of this level would read it otherwise."""
    match expression:
        case tree.Binary(operator=operator):
            own = PRECEDENCE[operator]
        case tree.Not():
            own = NOT
        case _:
            own = NEGATIVE
    return expression if own >= level else node(tree.Group, expression)


def binary(left, operator, right):
    level = PRECEDENCE[operator]
    # Comparisons do not chain; the others group to the left.
    return node(tree.Binary, tight(left, level + (level == COMPARISON)), operator, tight(right, level + 1))


def call(name, arguments):
    return node(tree.Call, name, tuple(node(tree.Argument, *argument) for argument in arguments))


def extend(inner):
    arrows = st.builds(lambda a, b: node(tree.Arrow, a, b), inner, inner)
    items = st.one_of(inner, arrows)
    arguments = st.one_of(st.tuples(st.none(), items), st.tuples(names, inner))
    return st.one_of(
        st.builds(binary, inner, st.sampled_from(sorted(PRECEDENCE)), inner),
        inner.map(lambda e: node(tree.Negative, tight(e, NEGATIVE))),
        inner.map(lambda e: node(tree.Not, tight(e, NOT))),
        inner.map(lambda e: node(tree.Group, e)),
        st.lists(items, max_size=4).map(lambda found: node(tree.List, tuple(found))),
        st.builds(call, names, st.lists(arguments, max_size=4)),
    )


expressions = st.recursive(st.one_of(paths, numbers, strings, booleans), extend, max_leaves=8)
calls = st.builds(call, names, st.lists(st.tuples(names, expressions), max_size=3))


def several(strategy, least=1, most=3):
    return st.lists(strategy, min_size=least, max_size=most).map(tuple)


types = st.builds(lambda d, a: node(tree.TensorType, d, a), st.none() | names, several(names, 0))
inputs = several(st.builds(lambda n, t: node(tree.Input, n, t), names, st.none() | types), 0)
entries = st.builds(lambda n, e: node(tree.Entry, n, e), names, expressions)
settings = st.builds(
    lambda n, e: node(tree.Entry, n, e),
    names | st.sampled_from(["model", "layout", "schedule"]).map(lambda text: node(tree.Name, text)),
    expressions,
)

simple_statements = st.one_of(
    st.builds(lambda n, t, e: node(tree.Param, n, t, e), several(names), types, expressions),
    st.builds(lambda n, t, e: node(tree.Buffer, n, t, e), several(names), types, expressions),
    st.builds(lambda n, t, e: node(tree.Sample, n, t, e), several(names), types, expressions),
    st.builds(lambda n, e: node(tree.Share, n, e), names, expressions),
    st.builds(lambda n, m: node(tree.Copy, n, m), names, names),
    st.builds(lambda n, c: node(tree.Copy, n, c.name, c.arguments), names, calls),
    st.builds(lambda n, e: node(tree.Let, n, e), several(names), several(expressions)),
    st.builds(lambda n, e: node(tree.Loss, n, e), st.none() | names, expressions),
    st.builds(lambda n, e: node(tree.Update, n, e), names, expressions),
    st.builds(lambda n, e: node(tree.Metric, n, e), names, expressions),
    st.builds(lambda n, e: node(tree.Output, n, e), names, expressions),
)
statements = st.recursive(
    simple_statements,
    lambda inner: st.one_of(
        st.builds(lambda e, n, body: node(tree.Repeat, e, n, body), expressions, names, several(inner, 0)),
        st.builds(lambda n, b, body: node(tree.Scan, n, b, body), names, st.booleans(), several(inner, 0)),
    ),
    max_leaves=4,
)
tables = several(settings, 0, 4).map(lambda found: node(tree.Table, found))
sums = expressions.map(lambda e: tight(e, SUM))
iterations = st.builds(lambda f, s: node(tree.Iterations, f, s), sums, st.none() | sums)
some = st.lists(st.tuples(names, st.none() | iterations), min_size=1, max_size=3).map(
    lambda parts: node(
        tree.Path,
        tuple(name for name, _ in parts),
        tuple(own for _, own in parts) if any(own for _, own in parts) else (),
    )
)
targets = st.builds(
    lambda p, n: node(tree.Target, p, n),
    st.none() | some,
    names | st.just(node(tree.Name, "param")),
)
products = expressions.map(lambda e: tight(e, PRODUCT))
counts = st.none() | several(expressions, 0).map(lambda items: node(tree.List, items))
rules = st.one_of(
    st.builds(lambda t, n, b: node(tree.Shard, t, n, b), several(targets), several(names), several(names, 0)),
    st.builds(lambda n, a, c: node(tree.Stage, n, a, c), several(names), names, counts),
    st.builds(lambda p, a, f, s: node(tree.Place, p, a, f, s), several(some), names, sums, st.none() | sums),
    several(some).map(lambda p: node(tree.Recompute, p)),
    st.builds(lambda p, b: node(tree.Offload, p, b), several(some), st.none() | names),
    st.builds(lambda n, e: node(tree.Overlap, n, e), several(names), sums),
)
claims = st.builds(
    lambda m, c, e: node(tree.Claim, m, c, e),
    st.one_of(paths, calls),
    st.sampled_from(["<=", ">=", "<", ">", "==", "!="]),
    sums,
)
weight_axes = several(
    st.one_of(
        st.builds(lambda joined, value: node(tree.WeightAxis, None, joined, value), st.booleans(), sums),
        st.builds(lambda outer, value: node(tree.WeightAxis, outer, True, value), products, sums),
    ),
    0,
)
weight_lines = st.one_of(
    st.builds(lambda o, t, a: node(tree.Correspondence, o, t, a), several(paths), several(strings), weight_axes),
    several(strings).map(lambda found: node(tree.Skip, found)),
)
declarations = st.one_of(
    strings.map(lambda s: node(tree.Import, s)),
    several(entries).map(lambda e: node(tree.Axes, e)),
    several(entries).map(lambda e: node(tree.Constants, e)),
    st.builds(
        lambda n, i, b, r: node(tree.Block, n, i, b, node(tree.Return, r)),
        names,
        inputs,
        several(statements, 0),
        several(expressions),
    ),
    st.builds(lambda n, i, r, t: node(tree.Operation, n, i, r, t), names, inputs, several(types), tables),
    st.builds(lambda n, i, b: node(tree.Model, n, i, b), names, inputs, several(statements, 0)),
    st.builds(lambda n, a, t: node(tree.Mesh, n, a, t), names, several(entries), st.none() | tables),
    st.builds(lambda n, m, r: node(tree.Layout, n, m, r), names, names, several(rules, 0, 4)),
    st.builds(lambda n, c: node(tree.Schedule, n, c), names, calls),
    st.builds(lambda n, found: node(tree.Weights, n, found), names, several(weight_lines, 0, 4)),
    tables.map(lambda t: node(tree.Train, t)),
    several(claims, 0).map(lambda c: node(tree.Expect, c)),
)
files = several(declarations, 0, 4).map(lambda found: node(tree.File, found))


# ---------------------------------------------------------------- words


def words(item):
    """The words and signs of a tree, in order."""
    match item:
        case tree.File():
            return [w for d in item.declarations for w in words(d)]
        case tree.Name() | tree.Number() | tree.String():
            return [item.text]
        case tree.Boolean():
            return ["true" if item.value else "false"]
        case tree.Path():
            own = item.iterations or (None,) * len(item.parts)
            pairs = zip(item.parts, own, strict=True)
            return [w for name, each in pairs for w in (".", *words(name), *(words(each) if each else []))][1:]
        case tree.Iterations():
            return ["[", *words(item.first), *(["..", *words(item.last)] if item.last else []), "]"]
        case tree.Negative():
            return ["-", *words(item.operand)]
        case tree.Not():
            return ["not", *words(item.operand)]
        case tree.Binary():
            return [*words(item.left), item.operator, *words(item.right)]
        case tree.Group():
            return ["(", *words(item.inner), ")"]
        case tree.Arrow():
            return [*words(item.left), "->", *words(item.right)]
        case tree.Argument():
            return [*([*words(item.name), "="] if item.name else []), *words(item.value)]
        case tree.Call():
            return [*words(item.name), "(", *separated(item.arguments), ")"]
        case tree.List():
            return ["[", *separated(item.items), "]"]
        case tree.TensorType():
            return [*(words(item.dtype) if item.dtype else []), "[", *separated(item.axes), "]"]
        case tree.Input():
            return [*words(item.name), ":", *(words(item.type) if item.type else ["number"])]
        case tree.Param():
            return ["param", *separated(item.names), ":", *words(item.type), "~", *words(item.initial)]
        case tree.Buffer():
            return ["buffer", *separated(item.names), ":", *words(item.type), "~", *words(item.initial)]
        case tree.Sample():
            return ["sample", *separated(item.names), ":", *words(item.type), "~", *words(item.initial)]
        case tree.Share():
            return ["share", *words(item.name), "=", *words(item.block)]
        case tree.Copy():
            names = ["copy", *words(item.name), "=", *words(item.source)]
            if item.following is None:
                return ["frozen", *names]
            return ["ema", *names, "(", *separated(item.following), ")"]
        case tree.Let():
            return ["let", *separated(item.names), "=", *separated(item.values)]
        case tree.Repeat():
            return ["repeat", *words(item.count), "as", *words(item.name), *braces(item.body)]
        case tree.Scan():
            return ["scan", *words(item.axis), *(["backward"] if item.backward else []), *braces(item.body)]
        case tree.Loss():
            named = [] if item.name is None else [*words(item.name), "="]
            return ["loss", *named, *words(item.value)]
        case tree.Update():
            return ["update", *words(item.name), "=", *words(item.value)]
        case tree.Metric():
            return ["metric", *words(item.name), "=", *words(item.value)]
        case tree.Output():
            return ["output", *words(item.name), "=", *words(item.value)]
        case tree.Return():
            return ["return", *separated(item.values)]
        case tree.Import():
            return ["import", *words(item.path)]
        case tree.Entry():
            return [*words(item.key), "=", *words(item.value)]
        case tree.Axes():
            return ["axis", *separated(item.entries)]
        case tree.Constants():
            return ["const", *separated(item.entries)]
        case tree.Block():
            body = braces((*item.body, item.results))
            return ["block", *words(item.name), "(", *separated(item.inputs), ")", *body]
        case tree.Operation():
            inputs = ["(", *separated(item.inputs), ")"]
            return ["op", *words(item.name), *inputs, "->", *separated(item.results), *words(item.table)]
        case tree.Model():
            return ["model", *words(item.name), "(", *separated(item.inputs), ")", *braces(item.body)]
        case tree.Table():
            return braces(item.entries)
        case tree.Mesh():
            table = words(item.table) if item.table else []
            return ["mesh", *words(item.name), "(", *separated(item.axes), ")", *table]
        case tree.Target():
            return [*([*words(item.path), ":"] if item.path else []), *words(item.name)]
        case tree.Shard():
            by = ["by", *separated(item.by)] if item.by else []
            return ["shard", *separated(item.targets), "->", *separated(item.mesh_axes), *by]
        case tree.Stage():
            counts = words(item.counts) if item.counts else []
            return ["stage", *separated(item.repeats), "->", *words(item.mesh_axis), *counts]
        case tree.Place():
            last = ["..", *words(item.last)] if item.last else []
            stages = ["[", *words(item.first), *last, "]"]
            return ["place", *separated(item.paths), "->", *words(item.mesh_axis), *stages]
        case tree.Recompute():
            return ["recompute", *separated(item.paths)]
        case tree.Offload():
            return ["offload", *separated(item.paths), *(["by", *words(item.by)] if item.by else [])]
        case tree.Overlap():
            return ["overlap", *separated(item.mesh_axes), "in", *words(item.pieces)]
        case tree.Layout():
            return ["layout", *words(item.name), "on", *words(item.mesh), *braces(item.rules)]
        case tree.Schedule():
            return ["schedule", *words(item.name), "=", *words(item.call)]
        case tree.Weights():
            return ["weights", *words(item.name), *braces(item.lines)]
        case tree.Correspondence():
            axes = ["[", *separated(item.axes), "]"] if item.axes else []
            return [*separated(item.ours), "=", *separated(item.theirs), *axes]
        case tree.WeightAxis():
            outer = [*words(item.outer), "*"] if item.outer else []
            return [*outer, *(["+"] if item.joined else []), *words(item.value)]
        case tree.Skip():
            return ["skip", *separated(item.patterns)]
        case tree.Train():
            return ["train", *words(item.table)]
        case tree.Claim():
            return [*words(item.measure), item.comparison, *words(item.limit)]
        case tree.Expect():
            return ["expect", *braces(item.claims)]


def separated(items, sign=","):
    found = []
    for item in items:
        found += [sign, *words(item)] if found else words(item)
    return found


def braces(items):
    return ["{", *(w for item in items for w in words(item)), "}"]


GAPS = (" ", "  ", "\n", "\n\n\n", "\t", " # a comment\n", "\n# a line of its own\n  ", "\r\n")


@st.composite
def texts(draw, trees=files):
    """A random tree and a text that says it."""
    item = draw(trees)
    found = words(item)
    gaps = draw(st.lists(st.sampled_from(GAPS), min_size=len(found), max_size=len(found)))
    return item, "".join(word + gap for word, gap in zip(found, gaps, strict=True))
