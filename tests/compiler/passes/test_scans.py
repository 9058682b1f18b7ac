"""What a scan carries has one dtype at all positions, whatever its body makes."""

from __future__ import annotations

import pytest

from partita.compiler.pipeline import compile_run
from partita.dsl.load import load_text

SCAN = """axis batch = 4, seq = 8, key = 8
model m(x: [batch, seq, key]) {
  param w: [key] ~ ones()
  let s = INITIAL
  scan seq { let s = NEXT }
  loss mean(s * w)
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 precision = bf16 }
"""
OWN, SUMMED = "mean(x, over = seq) * w", "expand(mean(x * w), [batch, key])"


@pytest.mark.parametrize("initial", [OWN, SUMMED])
@pytest.mark.parametrize("following", ["s * 0.5 + x", "s * 0.5 + expand(mean(x), [batch, key])"])
def test_sums_in_the_dtype_of_accumulation_are_carried(initial: str, following: str):
    spec, diagnostics = load_text(SCAN.replace("INITIAL", initial).replace("NEXT", following))
    assert spec is not None, diagnostics
    assert compile_run(spec)[0] is not None
