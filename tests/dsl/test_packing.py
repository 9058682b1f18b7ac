"""Where packed documents see each other (W0203). tests/runtime/data/test_packed_documents.py runs such models."""

from __future__ import annotations

import pytest

from partita.dsl.load import load_text

FILE = """\
axis batch = 2, seq = 8, keys = seq, position = seq, embed = 6, key = 4, vocab = 20, chunks = 2, inside = seq / chunks
axis one = 1, half = seq / 2, later = half, windows = 4, pair = 2
model lm(tokens: i64[batch, seq], targets: i64[batch, seq], segments: i64[batch, seq], positions: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(1.0)
  param places: [position, embed] ~ normal(1.0)
  param w: [embed, key] ~ normal(1.0)
  param kernel: [one, embed] ~ normal(1.0)
  let x = embedding(tokens, table, over = vocab) + embedding(positions, places, over = position)
  let q = dot(x, w, over = embed) + sum(kernel)
STATEMENTS
  loss cross_entropy(dot(x, table, over = embed), targets, over = vocab, ignore = -1) + 0 * mean(q)
}
train { data = DATA  optimizer = sgd(lr = 0.1)  steps = 1 }
"""
PACKED = 'jsonl("f.jsonl", pack = true)'
APART = {
    "segments": "let x = attend(q, q, x, over = seq, along = key, segments = segments)",
    "segments of one's own": """
      let own = cumsum(cast(tokens == 3, i64), over = seq)
      let x = attend(q, q, x, over = seq, along = key, segments = own)""",
    "a mask": """
      let k = rename(x, seq -> keys)
      let mask = expand(segments, keys) == rename(segments, seq -> keys) and expand(iota(seq), [batch, keys]) > 2
      let x = attend(q, dot(k, w, over = embed), k, over = keys, along = key, mask = mask)""",
    "a bias": """
      let k = rename(x, seq -> keys)
      let far = where(expand(segments, keys) == rename(segments, seq -> keys), 0.0, -1e9)
      let x = attend(q, dot(k, w, over = embed), k, over = keys, along = key, bias = far)""",
    "scores by hand": """
      let k = rename(x, seq -> keys)
      let s = dot(q, dot(k, w, over = embed), over = key)
      let far = where(expand(segments, keys) == rename(segments, seq -> keys), 0.0, -1e9)
      let x = dot(softmax(s + far, over = keys), k, over = keys)""",
    "a memory that forgets": "let x = delta_rule(q, q, x, 0.5, cast(positions != 0, f32), over = seq, along = key)",
    "a factor of zero": "let x = linear_scan(where(positions == 0, 0.0, 0.9), x, over = seq)",
    "a factor times zeros": "let x = linear_scan(sigmoid(x) * cast(positions != 0, f32), x, over = seq)",
    "a factor in a repeat": """
      let keep = cast(segments == shift(segments, over = seq), f32)
      repeat 3 as layer { let x = x + linear_scan(keep * 0.9, x, over = seq) }""",
    "states that begin anew": """
      let h = zeros([batch, embed])
      let c = h
      scan seq {
        let fresh = positions == 0
        let h = where(fresh, 0.0, h)
        let c = c * cast(not fresh, f32) + h
        let h = tanh(h + c + x)
      }
      let x = h + c""",
    "a scan over features": "let h = zeros([batch, seq]) scan embed { let h = tanh(h + x) } let x = x + h",
    "a shift that is hidden": "let x = x + where(positions == 0, 0.0, shift(x, over = seq))",
    "a count of documents": """
      let n = cumsum(cast(positions == 0, i64), over = seq)
      let x = attend(q, q, x, over = seq, along = key, mask = expand(n, one) == expand(n, one))
    """.replace("mask = expand(n, one) == expand(n, one)", "segments = n"),
    "decays within chunks": """
      let a = split(log_sigmoid(sum(x, over = embed)), seq -> [chunks, inside])
      let m = split(segments, seq -> [chunks, inside])
      let c = cumsum(a, over = inside)
      let d = exp(expand(c, later) - rename(c, inside -> later))
      let same = expand(m, later) == rename(m, inside -> later)
      let y = dot(where(same, d, 0.0), rename(split(x, seq -> [chunks, inside]), inside -> later), over = later)
      let x = merge(y, [chunks, inside] -> seq)""",
    "windows of one position": "let x = conv(x, kernel, seq -> seq, size = [one], groups = embed)",
    "sums over all": "let x = x * mean(x)",
    "what the loss does not read": """
      let y = cumsum(x, over = seq)
      output sums = y""",
}
TOGETHER = {
    "an embedding of positions is no mark": ("let x = linear_scan(sigmoid(x), x, over = seq)", ["linear_scan"]),
    "nor are their angles": (
        """let a = x + expand(cast(sin(cast(positions, f64)), f32), embed)
           let x = linear_scan(sigmoid(a), a, over = seq)""",
        ["linear_scan"],
    ),
    "a memory": ("let x = delta_rule(q, q, x, 0.5, over = seq, along = key)", ["delta_rule"]),
    "a memory that fades": (
        "let x = delta_rule(q, q, x, 0.5, sigmoid(q), over = seq, along = key)",
        ["delta_rule"],
    ),
    "a mask that is only causal": (
        """let mask = expand(iota(seq) + 0, keys) >= expand(iota(keys), seq)
           let k = rename(x, seq -> keys)
           let x = attend(q, dot(k, w, over = embed), k, over = keys, along = key, mask = mask)""",
        ["attend"],
    ),
    "what begins anew is a mark, not what it adds": (
        "let x = linear_scan(0.9, where(positions == 0, 0.0, x), over = seq)",
        ["linear_scan"],
    ),
    "one of two states": (
        """let h = zeros([batch, embed])
           let c = h
           scan seq { let h = where(positions == 0, 0.0, h)  let c = c + h  let h = tanh(c + x) }
           let x = h""",
        ["this scan, which carries `h` and `c`"],
    ),
    "the tokens before": (
        "let x = x + embedding(shift(tokens, over = seq), table, over = vocab)",
        ["shift"],
    ),
    "of a metric": ("metric sums = mean(abs(cumsum(x, over = seq)))", ["cumsum"]),
    "in a later turn": (
        """let y = x
           repeat 3 as layer { let z = y  let y = cumsum(x, over = seq)  let x = x + z }""",
        ["cumsum"],
    ),
    "two": ("let x = shift(x, over = seq) + cumsum(x, over = seq)", ["shift", "cumsum"]),
    "windows": (
        "let x = expand(mean(patches(x, seq -> windows, size = pair, stride = 2), over = [pair, windows]), seq)",
        ["patches"],
    ),
}


def warned(statements: str, data: str = PACKED) -> list[str]:
    found, diagnostics = load_text(FILE.replace("STATEMENTS", statements).replace("DATA", data))
    assert found is not None, [each.render() for each in diagnostics]
    leaks = [each for each in diagnostics if each.code == "W0203"]
    assert all(each.notes for each in leaks)
    return [each.message.removeprefix("documents that are packed into one row see each other in ") for each in leaks]


@pytest.mark.parametrize("statements", APART.values(), ids=APART)
def test_what_keeps_documents_apart_is_seen(statements: str):
    assert warned(statements) == []


@pytest.mark.parametrize(("statements", "expected"), TOGETHER.values(), ids=TOGETHER)
def test_what_does_not_is_named(statements: str, expected: list[str]):
    assert warned(statements) == [each if " " in each else f"`{each}`" for each in expected]


@pytest.mark.parametrize(
    ("data", "packed"),
    [
        ('jsonl("f.jsonl")', False),
        ('text("f.txt")', False),
        ('mix([text("f.txt") -> 50%, jsonl("f.jsonl", pack = true) -> 50%])', True),
        ('text("f.txt")  eval = every(1, data = parquet("f.parquet", pack = true))', True),
    ],
)
def test_only_packed_data_is_warned_of(data: str, packed: bool):
    assert bool(warned("let x = cumsum(x, over = seq)", data)) == packed
