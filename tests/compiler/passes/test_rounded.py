"""Positions, angles and indices that are computed in bf16 are warned of, and those in f64 are not."""

from __future__ import annotations

import pytest

from partita.compiler.pipeline import compile_spec
from tests.files import checked

FILE = """axis batch = 2, seq = 300, few = 200, vocab = 100, embed = 4
model m(x: [batch, seq, embed], ids: i64[batch, seq], time: i64[batch]) {
  param table: [vocab, embed] ~ normal(1.0)
  param w: [embed] ~ ones()
  sample u: DRAWN[batch, seq] ~ uniform(0.5)
  let h = x * w + embedding(ids, table, over = vocab)
  BODY
  loss mean(h)
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 precision = PRECISION }
"""


def warned(body: str, precision: str = "bf16", drawn: str = "f32") -> list[str]:
    text = FILE.replace("BODY", body).replace("PRECISION", precision).replace("DRAWN", drawn)
    found = compile_spec(checked(text, "m.par")).warnings
    assert all(each.span is not None and each.span.line == 7 and each.help for each in found)
    return [each.message for each in found if each.code == "W0305"]


POSITIONS = "let h = h + expand(expand(cast(iota(seq), f32), batch), embed)"
IDS = "let h = h + embedding(cast(floor((u + 0.5) * size(vocab)), i64), table, over = vocab)"
ROUNDED = [
    (POSITIONS, ["integers up to 299 are rounded to bf16, which has eight bits"]),
    ("let h = h + expand(cast(time, f32), [seq, embed])", ["integers are rounded to bf16, which has eight bits"]),
    (IDS, ["ids of `vocab`, of size 100, are computed in bf16, which has eight bits"]),
    (IDS.replace("cast(", "1 - cast("), ["ids of `vocab`, of size 100, are computed in bf16, which has eight bits"]),
    ("let h = h + sin(h)", ["angles are rounded to bf16, which has eight bits"]),
]


@pytest.mark.parametrize(("body", "messages"), ROUNDED)
def test_what_bf16_rounds_is_warned_of(body: str, messages: list[str]) -> None:
    assert warned(body) == warned(body, "fp8") == messages
    assert warned(body, "f32") == []


@pytest.mark.parametrize(
    ("body", "drawn"),
    [
        (POSITIONS.replace("cast(iota(seq), f32)", "cast(cos(cast(iota(seq), f64)), f32)"), "f32"),
        (IDS, "f64"),
        ("let h = h * mean(cast(iota(few), f32))", "f32"),
        ("let h = h + expand(cast(ids, f32) / size(vocab), embed)", "f32"),
        ("let h = h + embedding(arg_max(h, over = embed), table, over = vocab)", "f32"),
        ("let h = h + cast(x > 0, f32)", "f32"),
        ("let h = rope(h, over = seq, pairs = embed)", "f32"),
    ],
)
def test_what_is_exact_is_not(body: str, drawn: str) -> None:
    assert warned(body, drawn=drawn) == []
