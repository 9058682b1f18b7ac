"""`and`, `or` and `not`: precedence, form, types, and the same words as names."""

from __future__ import annotations

import pytest

from partita.dsl.advice.report import Report
from partita.dsl.load import load_text
from partita.dsl.spec import Apply, Literal, Spec
from partita.dsl.syntax import tree
from partita.dsl.syntax.format import format_text
from partita.dsl.syntax.parser import parse_expression
from partita.dsl.syntax.source import Source
from partita.dsl.syntax.unparse import expression_text

FILE = """\
axis rows = 4, width = 3
model m(x: [rows, width], a: bool[rows], b: bool[rows, width], i: i64[rows]) {{
  param w: [rows, width] ~ ones()
  let c = {}
  loss mean(where(c, x * w, 0.0))
}}
"""


def parsed(text: str) -> tree.Expression | None:
    report = Report()
    found = parse_expression(Source("text", text), report)
    assert not report.errors, [each.render() for each in report.diagnostics()]
    return found


def loaded(text: str) -> Spec:
    found, diagnostics = load_text(text)
    assert found is not None, [each.render() for each in diagnostics]
    return found


@pytest.mark.parametrize(
    ("text", "grouped"),
    [
        ("a or b and c", "a or (b and c)"),
        ("a and b or c", "(a and b) or c"),
        ("not a and b", "(not a) and b"),
        ("not a == b", "not (a == b)"),
        ("not x + 1 > y", "not ((x + 1) > y)"),
        ("a and not b or not not c", "(a and (not b)) or (not (not c))"),
        ("x > 1 and y <= 2 or z", "((x > 1) and (y <= 2)) or z"),
        ("a or b or c", "(a or b) or c"),
        ("not -x > 3", "not ((-x) > 3)"),
    ],
)
def test_precedence_is_pythons(text: str, grouped: str) -> None:
    def bare(found: object) -> object:
        match found:
            case tree.Group(inner=inner):
                return bare(inner)
            case tree.Binary(left=left, operator=operator, right=right):
                return bare(left), operator, bare(right)
            case tree.Not(operand=operand) | tree.Negative(operand=operand):
                return type(found).__name__, bare(operand)
        return str(found)

    plain, explicit = parsed(text), parsed(grouped)
    assert plain is not None
    assert bare(plain) == bare(explicit)
    assert expression_text(plain) == text


@pytest.mark.parametrize(
    ("expression", "axes"),
    [
        ("a and b", "rows width"),
        ("not a or x > 0.5 and b", "rows width"),
        ("true and a", "rows"),
        ("a or i == 2", "rows"),
        ("not (a and b)", "rows width"),
        ("logical_and(b, a)", "rows width"),
    ],
)
def test_booleans_have_types(expression: str, axes: str) -> None:
    model = loaded(FILE.format(expression)).model
    assert model is not None
    made = [step for step in model.body.steps if isinstance(step, Apply) and step.function.startswith("logical")][-1]
    assert made.type.dtype == "bool"
    assert " ".join(made.type.names) == axes


@pytest.mark.parametrize(
    ("expression", "value"),
    [("true and false", False), ("true or false", True), ("not true", False), ("not false and true", True)],
)
def test_known_ones_are_folded(expression: str, value: bool) -> None:
    model = loaded(FILE.format(f"a == ({expression})")).model
    assert model is not None
    steps = [step for step in model.body.steps if isinstance(step, Apply)]
    assert steps[0].function == "equal"
    assert Literal(value) in steps[0].operands


def test_their_form() -> None:
    text = FILE.format("(a   and(not(b)))or  (  i==2 ) and not  a")
    assert "let c = (a and (not (b))) or (i == 2) and not a\n" in format_text(text)
    long = " and ".join(["(x > 0.125 or not b)"] * 8)
    lines = format_text(FILE.format(long)).split("\n")
    assert max(map(len, lines)) <= 110
    assert any(line.strip().startswith("and") for line in lines)


NAMES = """\
axis and = 4, or = 3
block not(and: [and], or: [or]) {{
  return and * 2, mean(or) - and
}}
model m(not: [and], or: [or]) {{
  param and: [and] ~ ones()
  let x, y = not(and, or)
  let not = not * 2 + x - not - y
  let or = not - and * and
  loss mean(not) + mean(or(or)) {}
}}
block or(or: [and]) {{
  return or
}}
mesh or(not = 1)
"""


@pytest.mark.parametrize("more", ["", "+ mean(not - x)", "* mean(and - not)"])
def test_the_words_are_names_in_a_file_that_uses_them_so(more: str) -> None:
    text = NAMES.format(more)
    loaded(text)
    assert format_text(text).split() == text.split()
