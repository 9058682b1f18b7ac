"""What `weights` say: which parameters are in which tensors of another program, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.dsl.load import load, load_text
from partita.runtime.checkpoint.identity import digest_of

TEXT = """
axis batch = 4, embed = 4, heads = 2, key = 3, experts = 2, states = 5
const first = 1

block attn(x: [batch, embed]) {
  param wq, wk: [embed, heads, key] ~ normal(0.1)
  param skip: [embed, states] ~ ones()
  let h = dot(x, wq, over = embed) * dot(x, wk, over = embed)
  return x * sum(skip, over = states) + sum(h, over = [heads, key])
}

model weights(x: [batch, embed]) {
  param up: [experts, embed] ~ ones()
  param scale: [] ~ ones()
  repeat 2 as outer {
    repeat 3 as layer {
      let x = attn(x)
    }
  }
  loss mean(x * sum(up, over = experts)) * scale * first
}

train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""


def tensors(lines: str, *overrides: str):
    spec, diagnostics = load_text(f"{TEXT}\nweights hf {{\n{lines}\n}}", overrides=overrides)
    assert spec is not None, "\n".join(each.render() for each in diagnostics)
    assert not diagnostics
    return list(spec.weights["hf"].tensors())


def test_iterations_are_counted_by_formulas():
    found = tensors('attn.wq = "h.{3 * outer + layer + first}.q" [embed, heads * key]', "first=4")
    assert [each.names for each in found] == [(f"h.{i}.q",) for i in range(4, 10)]
    assert [each.parts[0].name for each in found][::5] == [
        "weights.outer.0.layer.0.attn.wq",
        "weights.outer.1.layer.2.attn.wq",
    ]
    assert {each.shape for each in found} == {(4, 6)}


def test_an_axis_in_braces_has_a_tensor_for_each_index():
    found = tensors('up = "up.{experts}", "w.{experts + 1}.up" [1, embed]')
    assert [each.names for each in found] == [("up.0", "w.1.up"), ("up.1", "w.2.up")]
    assert [(each.parts[0].index, each.shape) for each in found] == [({"experts": 0}, (1, 4)), ({"experts": 1}, (1, 4))]


@pytest.mark.parametrize("axis", ["+ heads * key", "heads * key + heads * key"])
def test_parameters_are_joined_in_their_order(axis: str):
    found = tensors(f'attn.wk, attn.wq = "qk.{{outer}}.{{layer}}" [embed, {axis}]')
    assert len(found) == 6
    assert found[0].shape == (4, 12)
    assert [(part.name[-2:], part.start) for part in found[0].parts] == [("wk", 0), ("wq", 6)]


def test_parameters_that_are_joined_may_have_other_axes():
    line = 'attn.skip, attn.wq = "sq.{outer}.{layer}" [states + key * heads, embed]'
    (found, *_) = tensors(line)
    assert found.shape == (11, 4)
    assert [part.groups for part in found.parts] == [(("states",), ("embed",)), (("key", "heads"), ("embed",))]


@pytest.mark.parametrize(
    ("axis", "groups", "shown"),
    [
        ("heads * + key", [("heads", "key")] * 2, "heads * + key"),
        ("heads * key * + 1", [("heads", "key")] * 2, "heads * key * + 1"),
        ("1 * + heads * key", [("heads", "key")] * 2, "+ heads * key"),
        ("heads * (key + key)", [("heads", "key")] * 2, "heads * + key"),
        ("(heads + 1) * key", None, None),
    ],
)
def test_parameters_may_be_interleaved(axis: str, groups: list[tuple[str, ...]] | None, shown: str | None):
    line = f'attn.wk, attn.wq = "qk.{{outer}}.{{layer}}" [embed, {axis}]'
    if groups is None:
        with pytest.raises(AssertionError, match=r"`heads` of `weights\.outer\.layer\.attn\.wq` is missing"):
            tensors(line)
        return
    (found, *_) = tensors(line)
    assert found.shape == (4, 12)
    assert [part.groups[1] for part in found.parts] == groups
    assert found.axes == f"[embed, {shown}]"


def test_parameters_with_other_axes_may_be_interleaved():
    line = 'attn.skip, attn.wq = "sq.{outer}.{layer}" [embed * (states + heads * key)]'
    (found, *_) = tensors(line)
    assert found.shape == (4 * 11,)
    assert [part.start for part in found.parts] == [0, 5]
    assert found.axes == "[embed * (states + heads * key)]"


def test_words_that_are_keywords_here_are_names_elsewhere():
    """Of a model, a parameter; the lines here, too, begin with names that are keywords."""
    found = tensors('skip = "skip.{outer}.{layer}" [embed, states]\nweights.scale = "s"\nskip "x", "y.*"')
    assert [len(each.parts[0].groups) for each in found] == [2] * 6 + [0]


def test_names_have_escapes():
    (found,) = tensors(r'weights.scale = "a\{b\}\"c"')
    assert found.names == ('a{b}"c',)


def test_a_model_is_the_same_with_and_without_weights():
    plain, _ = load_text(TEXT)
    named, _ = load_text(TEXT + 'weights hf { up = "u" [experts, embed] }')
    assert plain is not None
    assert named is not None
    assert digest_of(plain.trained[0]) == digest_of(named.trained[0])


def test_weights_may_be_imported(tmp_path: Path):
    (tmp_path / "names.par").write_text('weights hf { up = "u" [experts, embed] }\nweights other { }\n')
    (tmp_path / "m.par").write_text('import "names.par"\n' + TEXT)
    spec, diagnostics = load(tmp_path / "m.par")
    assert spec is not None
    assert not diagnostics
    assert {name: len(each.lines) for name, each in spec.weights.items()} == {"hf": 1, "other": 0}


def test_of_several_models_the_first_path_says_which():
    other = TEXT.replace("model weights", "model second").split("model second")[1].split("train")[0]
    text = TEXT.replace("steps = 1", "steps = 1 model = weights")
    text += f"model second{other}"
    text += 'weights a { weights.up = "u" [experts, embed] }\nweights b { second.up = "u" [experts, embed] }'
    spec, diagnostics = load_text(text)
    assert spec is not None, diagnostics
    assert [each.model for each in spec.weights.values()] == ["weights", "second"]


def test_more_tensors_than_any_file_has_are_refused():
    text = TEXT.replace("experts = 2,", "experts = 1_000_000,") + 'weights hf { up = "u.{experts}" [embed] }'
    spec, diagnostics = load_text(text)
    assert spec is None
    assert [each.code for each in diagnostics] == ["E0008"]
