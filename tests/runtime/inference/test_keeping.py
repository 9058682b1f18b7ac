"""Logits with what is kept of earlier positions are those of the whole window."""

from __future__ import annotations

import pytest

from partita.compiler.passes.decode import NotInParts
from tests.marks import soak
from tests.runtime.inference.models import ZOO, both, difference, loaded, model

TOLERANCE = 1e-5

# Decoders of the zoo, with as few layers as show all that they have.
DECODERS = {
    "llama3.par": ("layers=1",),
    "gemma2.par": (),
    "mixtral.par": (),
    "mamba2.par": ("layers=1",),
    "gla.par": ("layers=1",),
    "lstm.par": (),
}
MORE = {"gpt2.par": (), "deepseek_v3.par": (), "qwen3_moe.par": (), "llama3.par": (), "mamba2.par": ()}


@pytest.mark.parametrize(("file", "overrides"), [*DECODERS.items(), *soak(*MORE.items())])
def test_a_decoder_of_the_zoo(file: str, overrides: tuple[str, ...]) -> None:
    """Of a prompt in parts, of one id after the other, and of another text after that."""
    assert difference(loaded(ZOO / file, "seq=40", *overrides), [35, 36, 37, 3, 40]) < TOLERANCE


KEPT = {
    "shift": "let h = x + 0.5 * shift(x, over = seq, by = 3)",
    "conv": "param k: [embed, taps] ~ normal(1.0) "
    "let h = x + conv(x, k, seq -> seq, groups = embed, padding = [[2, 0]])",
    "dilated conv": "param k: [embed, out, taps] ~ normal(1.0) "
    "let y = conv(x, k, seq -> time, over = embed, padding = [[4, 0]], dilation = 2, size = [taps]) "
    "let h = rename(cumsum(y, over = time), time -> seq, out -> embed)",
    "conv of one": "param k: [embed, embed_out, one] ~ normal(1.0) "
    "let h = x + rename(conv(x, k, seq -> seq, over = embed, size = [one]), embed_out -> embed)",
    "patches with a fill": "let y = patches(x, seq -> seq, size = taps, padding = [[2, 0]], fill = 9) "
    "let h = x + max(y, over = taps)",
    "patches": "let h = x + sum(patches(x, seq -> seq, size = taps, padding = [[2, 0]]), over = taps)",
    "cumsum": "let h = x + 0.1 * cumsum(x, over = seq)",
    "linear_scan": "let h = linear_scan(sigmoid(x), x, over = seq)",
    "delta_rule": "let q = split(x, embed -> [two, four]) let k = softmax(q, over = four) let d = sigmoid(q) "
    "let h = merge(expand(delta_rule(q, k, sum(q * q, over = four), mean(d, over = four), d, over = seq, "
    "along = four), four), [two, four] -> embed)",
    "scan": "scan seq { let z = tanh(z + x) } let h = z",
    "scan of two": "let s = eps let n = 2 * eps scan seq { let s = tanh(s + n + x) let n = n + s } let h = x + n",
    "learned positions": "param places: [seq, embed] ~ normal(1.0) let h = x * gelu(places)",
    "counted positions": "let h = x + 0.1 * cast(iota(seq), f32)",
    "another name": "let y = rename(x, seq -> time) let h = rename(y + cumsum(y, over = time), time -> seq)",
    "window": "let h = x + attend(x, x, x, over = seq, along = embed, causal = true, window = 3)",
    "segments": "let ids = cast(tokens < 9, i64) "
    "let h = x + attend(x, x, x, over = seq, along = embed, causal = true, segments = ids)",
}


@pytest.mark.parametrize("name", KEPT)
def test_an_operation_along_the_sequence(name: str) -> None:
    assert difference(model(KEPT[name], seq=36), [2, 33, 34, 36]) < TOLERANCE


NOT_KEPT = {
    "let h = x + mean(x, over = seq)": "`mean(x, over = seq)`",
    "let h = x + shift(x, over = seq, by = -1)": "`shift(x, over = seq, by = -1)`",
    "let h = attend(x, x, x, over = seq, along = embed)": "`attend(x, x, x, over = seq, along = embed)`",
    "param k: [embed, taps] ~ normal(1.0) let h = conv(x, k, seq -> seq, groups = embed, padding = 1)": "`conv(x, k, "
    "seq -> seq, groups = embed, padding = 1)`",
    "let h = linear_scan(0.9, x, over = seq, backward = true)": "`linear_scan(0.9, x, over = seq, backward = true)`",
    "let h = x scan seq backward { let z = z + x } let h = z": "`scan seq`",
}


@pytest.mark.parametrize("statements", NOT_KEPT)
def test_what_looks_ahead_is_named(statements: str) -> None:
    with pytest.raises(NotInParts) as refused:
        both(model(statements))
    assert refused.value.what.startswith(NOT_KEPT[statements])
    assert refused.value.what.endswith("needs all of `seq`")
    assert refused.value.span is not None
