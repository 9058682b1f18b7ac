"""parse∘print is the identity on trees; formatting keeps trees and comments, and is idempotent."""

import pytest
from hypothesis import HealthCheck, given, settings

from partita.dsl.advice.report import Report
from partita.dsl.diagnostic import Refused
from partita.dsl.syntax import tree
from partita.dsl.syntax.format import DEEPEST, WIDTH, format_text
from partita.dsl.syntax.lexer import tokenize
from partita.dsl.syntax.parser import parse_file
from partita.dsl.syntax.source import Source
from tests.dsl.strategies import files, texts, words
from tests.files import SPECS
from tests.marks import examples


def parsed(text):
    report = Report()
    file = parse_file(Source("text", text), report)
    assert not report.errors, "\n".join(d.render() for d in report.diagnostics())
    return file


def comments(text):
    found = []
    tokenize(Source("text", text), Report(), found)
    return [comment.text for comment in found]


@pytest.mark.soak
@given(texts())
def test_a_printed_tree_parses_to_itself(pair):
    item, text = pair
    assert parsed(text.replace("\r\n", "\n")) == item, text


@examples(60)
@given(texts())
def test_formatting_keeps_the_tree_and_the_comments_and_is_idempotent(pair):
    item, text = pair
    once = format_text(text)
    assert parsed(once) == item, once
    assert comments(once) == comments(text.replace("\r\n", "\n")), once
    assert format_text(once) == once, once


@pytest.mark.soak
@given(files)
@settings(suppress_health_check=[HealthCheck.filter_too_much])
def test_formatted_lines_are_clean_and_short(item):
    once = format_text(" ".join(words(item)))
    assert once == "" or (once.endswith("\n") and not once.startswith("\n") and "\n\n\n" not in once)
    for line in once.splitlines():
        assert line == line.rstrip(), repr(line)
        # A line is longer than the width only where it has no place to break.
        assert len(line) <= WIDTH or "," not in line[:WIDTH].rstrip(), repr(line)


@pytest.mark.parametrize("name", sorted(path.name for path in SPECS.glob("*.par")))
def test_shipped_files_are_canonical(name):
    text = (SPECS / name).read_text()
    assert format_text(text, name) == text


CANONICAL = """\
# About the file.

axis batch = 2  # rows
axis seq = 3, embed = -2 * (3 - 5) / 1

# About the model.
model m(x: [batch], ids: i64[batch, seq]) {
  # first
  param w, v: [embed] ~ normal(0.02)

  repeat 2 as layer {
    let x = f(x,  # one
              # two
              embed -> seq)
    # last
  }  # end of the repeat
  loss -x == a - -b
}

mesh k(a = 1, b = 2) {
  link = [a -> b]
}

layout l on k {
  shard m.w: embed, param, state -> a, b
  stage layer -> a [1, 1]
  place x.y, z -> a[0..1]
}
# The end.
"""


def test_the_canonical_form():
    squeezed = CANONICAL.replace("  stage", " stage").replace("\n  shard", "shard")
    squeezed = (
        squeezed.replace(" = ", "=").replace(": ", " :").replace(" [1, 1]", "[1,1]").replace("[0..1]", " [ 0 .. 1 ]")
    )
    assert format_text(squeezed) == CANONICAL
    assert format_text(CANONICAL) == CANONICAL


def test_what_does_not_parse_is_refused_with_its_place():
    with pytest.raises(Refused) as caught:
        format_text("axis a = \naxis b = 2\nmesh m(", "x.par")
    assert [d.span.place for d in caught.value.diagnostics] == ["x.par:2:1", "x.par:3:7"]


def test_a_tree_that_changed_would_be_refused(monkeypatch):
    monkeypatch.setattr("partita.dsl.syntax.format._Formatter.space", lambda *_: "")
    with pytest.raises(Refused, match="E01"):
        format_text("axis a = 1\nmodel m(x: [a]) {\n  let y = x\n  loss y\n}\n")


def test_spans_of_every_node_hold_what_it_says():
    text = (SPECS / "gpt.par").read_text()
    file = parsed(text)
    names = []

    def visit(item):
        if hasattr(item, "span"):
            said = item.span.source.text[item.span.start : item.span.end]
            assert said, item
            if isinstance(item, tree.Name):
                names.append((said, item.text))
        for field in getattr(type(item), "__attrs_attrs__", ()):
            if field.name != "span":
                value = getattr(item, field.name)
                for inner in value if isinstance(value, tuple) else (value,):
                    if hasattr(inner, "span"):
                        assert item.span.start <= inner.span.start <= inner.span.end <= item.span.end
                        visit(inner)

    visit(file)
    assert len(names) > 100
    assert all(said == name for said, name in names)


def test_a_break_that_another_one_makes_needless_does_not_come_and_go():
    """Found by fuzzing: the outer comma was broken first, and joined again once the inner break was kept."""
    text = "axis A=0,A" + "0" * 77 + "=(0/0<[0,0<0/0]),A=0"
    once = format_text(text)
    assert format_text(once) == once


@pytest.mark.parametrize("name", ["h", "h" * (DEEPEST - 13), "h" * (DEEPEST - 12)])
def test_a_line_goes_on_below_its_bracket_unless_that_is_far_to_the_right(name):
    text = f"model m(x: [batch]) {{\n  let {name} = max(x,\nover = batch)\n  loss {name}\n}}\n"
    first, second = format_text(text).splitlines()[1:3]
    below = first.index("(") + 1
    assert second == " " * (below if below <= DEEPEST else 6) + "over = batch)"


def test_joined_axes_of_theirs():
    text = 'weights hf {\n  a,b="x" [heads*+key,embed]\n  c, d = "y"[ heads *( key+states ),+embed ]\n}\n'
    assert format_text(text) == (
        'weights hf {\n  a, b = "x" [heads * + key, embed]\n  c, d = "y" [heads * (key + states), + embed]\n}\n'
    )
