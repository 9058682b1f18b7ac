"""Arithmetic on numbers of a file: units, and formulas that follow the sizes of axes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partita.dsl.advice.report import Report
from partita.dsl.check.constants import apply, evaluate
from partita.dsl.check.formulas import FUNCTIONS, OF_TWO, Size, sizes_in, value_of
from partita.dsl.diagnostic import Refused
from partita.dsl.syntax import tree
from partita.dsl.syntax.parser import parse_expression
from partita.dsl.syntax.source import Source
from partita.dsl.syntax.units import BYTES, BYTES_PER_SECOND, PLAIN, RATIO, SECONDS, Quantity

SIZES = {"batch": 8, "seq": 3, "heads": 1}


def value(text: str, sizes: dict[str, int]) -> Quantity:
    """The value of an expression in which axes stand for their sizes, and functions may be called."""

    def lookup(named: tree.Path | tree.Call) -> Quantity:
        if isinstance(named, tree.Call):
            return apply(named.name.text, [evaluate(each.value, lookup) for each in named.arguments], named.span)
        (name,) = (part.text for part in named.parts)
        return Quantity(Fraction(sizes[name]), PLAIN, Size(name, sizes[name]))

    report = Report()
    expression = parse_expression(Source("constant", text), report)
    assert expression is not None, [each.render() for each in report.diagnostics]
    return evaluate(expression, lookup)


@pytest.mark.parametrize(
    ("text", "number", "dimension"),
    [
        ("8GB / 2GB", 4, PLAIN),
        ("8GB / 2", 4 * 10**9, BYTES),
        ("8GB / 50%", 16 * 10**9, BYTES),
        ("2 * 3KiB - 1KiB", 5 * 1024, BYTES),
        ("100GB/s * 90%", 90 * 10**9, BYTES_PER_SECOND),
        ("-(3ms + 500us) * 2", Fraction(-7, 1000), SECONDS),
        ("1 - 10%", Fraction(9, 10), RATIO),
        ("8% / 2%", 4, PLAIN),
        ("8% / 2", Fraction(4, 100), RATIO),
        ("2 / 8%", 25, PLAIN),
        ("50% * 50%", Fraction(1, 4), RATIO),
        ("3 * 50%", Fraction(3, 2), RATIO),
        ("7 / 2 - 1", Fraction(5, 2), PLAIN),
    ],
)
def test_units_follow_from_those_of_the_operands(text: str, number: Fraction | int, dimension: str):
    assert value(text, {}) == Quantity(Fraction(number), dimension)


@pytest.mark.parametrize("text", ["8GB + 1", "8GB - 1s", "8GB * 2GB", "1 / 2s", "8GB / 2s", "50% + 1B", "1GB/s * 1s"])
def test_units_that_do_not_fit_are_refused(text: str):
    with pytest.raises(Refused) as caught:
        value(text, {})
    assert [each.code for each in caught.value.diagnostics] == ["E0307"]


FORMULAS = st.recursive(
    st.sampled_from([*SIZES, "2", "0.5", "7"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda each: "({} {} {})".format(*each)),
        inner.map("(-{})".format),
        st.tuples(st.sampled_from(sorted({*FUNCTIONS} - {*OF_TWO})), inner).map(lambda each: "{}({})".format(*each)),
    ),
    max_leaves=6,
)


@given(text=FORMULAS, others=st.fixed_dictionaries(dict.fromkeys(SIZES, st.integers(1, 64))))
def test_a_formula_follows_the_sizes_of_axes(text: str, others: dict[str, int]):
    try:
        found, expected = value(text, SIZES), value(text, others)
    except Refused:  # a division by zero, the root of a negative number
        assume(False)
    assert value_of(found.term, {}) == found.value
    assert value_of(found.term, others) == expected.value
    assert set(sizes_in(found.term)) == {axis for axis in SIZES if axis in text}
