"""Names of a file and what they refer to."""

from __future__ import annotations

import pytest

from partita.dsl.advice.report import Report
from partita.dsl.names.occurrences import names
from partita.dsl.syntax.parser import parse_file
from partita.dsl.syntax.source import Source

FILE = """axis batch = 4, embed = 8, ffn = 2 * embed
const scale = 0.5

block half(x: [batch, embed]) {
  let y = x * scale
  return y
}

model m(x: [batch, embed]) {
  param w: [embed] ~ normal(1.0)
  let y = half(x)
  repeat 2 as layer {
    let y = half(y) * w
  }
  loss mean(sum(y, over = embed))
}

mesh one(data = 2)
mesh two(data = 4)

layout split on two {
  shard batch -> data
}

train {
  model = m
  layout = split
  data = random()
  optimizer = sgd(lr = scale)
  steps = 2
}
"""


def lines_of(name: str, line: int) -> list[int]:
    """The lines of all places of the name that stands first on a line."""
    found = names([parse_file(Source("m.par", FILE), Report())]).occurrences
    (first, *_) = [each for each in found if each.name.text == name and each.name.span.line == line]
    return [each.name.span.line for each in found if each.declared is first.declared]


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("embed", 1, [1, 1, 4, 9, 10, 15]),
        ("scale", 2, [2, 5, 29]),
        ("half", 4, [4, 11, 13]),
        ("x", 4, [4, 5]),
        ("x", 9, [9, 11]),
        ("y", 5, [5, 6]),
        ("y", 13, [11, 13, 13, 15]),
        ("data", 19, [19, 22]),
        ("data", 18, [18]),
        ("two", 21, [19, 21]),
        ("split", 21, [21, 27]),
        ("m", 9, [9, 26]),
    ],
)
def test_a_name_and_all_its_places(name: str, line: int, expected: list[int]) -> None:
    assert lines_of(name, line) == expected
