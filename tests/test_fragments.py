"""Where fragments of Python stand in definitions, and what is made of these."""

from __future__ import annotations

import ast

import pytest

from tests.fragments import filled, parsed, places

FUNCTION = """
def total(values, /, scale=1):
    # All of them.
    for each in values:
        if each > LIMIT and not each.hidden:
            add(each, "all", factor=scale, last=each)
        else:
            skip(each)
    first = values[0]
    return first * (scale + 1)
"""


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("each > LIMIT", "each < LIMIT", "if each < LIMIT and (not each.hidden):"),
        ("x > LIMIT", "x > 0 * x", "if each > 0 * each and (not each.hidden):"),
        ("( x>LIMIT )", "LIMIT", "if LIMIT and (not each.hidden):"),
        ("... and not x.hidden", "x", "if each:"),
        ("if x > ...: ...", "if x < ...: ...", None),
        ("if ... and not x.hidden: ...", "if ... and x.hidden: ...", "if each > LIMIT and each.hidden:"),
        ("add(x, ...)", "add(..., x)", "add('all', each, factor=scale, last=each)"),
        ("add(..., **..., last=x)", "add(..., **...)", "add(each, 'all', factor=scale)"),
        ("add(x, y, ...)", "add(y, x, ...)", None),
        ("add(x, 'all', factor=y, last=x)", "add(y)", "add(scale)"),
        ("add(x, 'all', factor=x, last=x)", "add(x)", None),
        ("skip(...)", "pass", "pass"),
        ("for x in y: ...\nfirst = y[0]", "first = y[0]", "first = values[0]"),
        ("for x in y: ...\n...; return k * (z + 1)", "for x in y: ...\n...; return z", "return scale"),
        ("LIMIT", "0", "if each > 0 and (not each.hidden):"),
        ("limit > LIMIT", "0", "if 0 and (not each.hidden):"),
        ("LIMIT > 0", "0", None),
        ("values[1]", "0", None),
        ("scale + True", "scale", None),
    ],
)
def test_a_fragment_stands_in_a_definition_whatever_locals_are_called(old: str, new: str, line: str | None):
    holder = ast.parse(FUNCTION)
    before, after = parsed(old), parsed(new)
    if isinstance(before, list) != isinstance(after, list):
        before, after = ([ast.Expr(each)] if isinstance(each, ast.expr) else each for each in (before, after))
    found = places(holder, before)
    if line is None:
        assert found == []
    else:
        [place] = found
        made = place.unparsed(holder, filled(after, place.fit))
        assert line in map(str.strip, made.split("\n"))
        assert ast.unparse(holder) == ast.unparse(ast.parse(FUNCTION)), "what is tried is taken back"


def test_other_fragments_tell_which_local_is_meant():
    holder = ast.parse(FUNCTION)
    assert [place.fit.names for place in places(holder, parsed("x + 1"), [parsed("y[0]")])] == [
        {"x": "scale", "y": "values"}
    ]
    assert places(holder, parsed("x + 1"), [parsed("x[0]")]) == []


def test_what_dots_stand_for_is_neither_lost_nor_made_up():
    [place] = places(ast.parse(FUNCTION), parsed("add(..., **..., last=x)"))
    for wrong in ("[...]", "add(..., [...], **...)"):
        with pytest.raises(ValueError, match=r"`\.\.\.`"):
            filled(parsed(wrong), place.fit)
    assert ast.unparse(filled(parsed("add(x)"), place.fit)) == "add(each)"
