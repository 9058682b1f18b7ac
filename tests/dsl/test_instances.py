"""`share` and `frozen copy`: what they may stand for, and what is said of those that may not."""

from __future__ import annotations

import pytest

from partita.dsl import spec
from partita.dsl.load import load_text
from partita.dsl.names.weights import parameters_of

FILE = """axis batch = 4, other = 4, embed = 6, wide = 8
block gain(x: [batch, embed]) { param g: [embed] ~ ones()  return x * g }
block plain(x: [batch, embed]) { return tanh(x) }
block counting(x: [batch, embed]) {
  param g: [embed] ~ ones()
  after update g = g * 0.5
  return x * g
}
block net(x: [batch, embed]) {
  param up: [embed, wide] ~ kaiming()
  let h = dot(x, up, over = embed)
  repeat 2 as layer { param w: [wide] ~ normal(0.5)  let h = h + tanh(h * w) }
  param down: [wide, embed] ~ kaiming()
  return gain(dot(h, down, over = wide))
}
model m(x: [batch, embed], y: [batch, embed], z: [other, embed]) {
BODY
}
"""
SHARED = """  share tower = net
  let u = tower(x)
  loss mse(u, tower(y))"""


def read(body: str) -> tuple[spec.Spec | None, list[tuple[str, str, str | None]]]:
    found, diagnostics = load_text(FILE.replace("BODY", body), "m.par")
    return found, [(each.code, each.message, each.help) for each in diagnostics if each.code != "W0201"]


def names(body: str) -> list[str]:
    found, diagnostics = read(body)
    assert found is not None, diagnostics
    assert not diagnostics
    assert found.model is not None
    return [".".join(each.path) for each in parameters_of(found.model)]


ALL = ["m.tower.up", "m.tower.layer.w", "m.tower.down", "m.tower.gain.g"]


def test_all_calls_have_one_set_of_parameters():
    assert names(SHARED) == ALL
    assert names(SHARED.replace("  let u = tower(x)", "  let u = x\n  repeat 3 as turn { let u = tower(u) }")) == ALL


def test_a_copy_has_buffers_in_the_same_places():
    body = SHARED.replace("  let u", "  frozen copy still = tower\n  let u").replace("tower(y)", "still(y)")
    assert names(body) == [*ALL, *(each.replace("tower", "still") for each in ALL)]
    found, _ = read(body)
    assert found is not None
    assert found.model is not None
    assert [each.buffer for each in spec.parameters(found.model.body)].count(True) == len(ALL)


def test_calls_may_rename_axes_that_no_parameter_has():
    assert names(SHARED.replace("tower(y)", "rename(tower(z, batch -> other), other -> batch)")) == ALL


def test_instances_of_instances():
    """A block that shares another one, and is shared."""
    text = FILE.replace(
        "model m(", "block pair(x: [batch, embed]) { share one = gain  return one(tanh(one(x))) }\nmodel m("
    )
    found, diagnostics = load_text(text.replace("BODY", SHARED.replace("net", "pair")), "m.par")
    assert found is not None, diagnostics
    assert found.model is not None
    assert [".".join(each.path) for each in parameters_of(found.model)] == ["m.tower.one.g"]


@pytest.mark.parametrize("word", ["share", "frozen", "copy", "tower"])
def test_the_words_stay_names(word: str):
    body = f"  share tower = net\n  let {word} = tower(x)\n  loss mse({word}, {word} * 0.5 + y)"
    assert names(body) == ALL


@pytest.mark.parametrize(
    ("before", "after", "code", "message", "help"),
    [
        ("= net", "= nett", "E0206", "`nett` is no block", "did you mean `net`?"),
        ("= net", "= net(3)", "E0206", "`net(3)` is no block", "there are `counting`, `gain`, `net` and `plain`"),
        ("= net", "= plain", "E0228", "`plain` has no parameters to share", "call `plain` itself"),
        (
            "= net",
            "= counting",
            "E0228",
            "`counting` has an `after update`, which each of several calls would make",
            "call `counting` itself, once",
        ),
        ("tower", "gain", "E0217", "`gain` is a block already", "give it another name"),
        (
            "share tower = net",
            "share tower = net\n  share tower = gain",
            "E0217",
            "`tower` is declared twice here",
            None,
        ),
        (
            "share tower = net",
            "share tower = net\n  frozen copy still = net",
            "E0201",
            "nothing is shared as `net`",
            "`share tower = net` before, and `frozen copy still = tower`",
        ),
    ],
)
def test_what_is_said_of_what_cannot_be(before: str, after: str, code: str, message: str, help: str | None):
    body = SHARED.replace(before, after) if before != "= net" else SHARED.replace(before, after, 1)
    found, diagnostics = read(body)
    assert found is None
    assert (code, message) in [each[:2] for each in diagnostics]
    if help is not None:
        assert (code, message, help) in diagnostics
    assert len([each for each in diagnostics if not each[0].startswith("W")]) == 1, diagnostics


def test_parameters_keep_their_axes_in_all_calls():
    body = "  share one = gain\n  let v = one(rename(x, embed -> wide), embed -> wide)\n  loss mse(one(x), y) + mean(v)"
    _, diagnostics = read(body.replace("rename(x, embed -> wide)", "expand(mean(x, over = embed), wide)"))
    (only,) = diagnostics
    assert only[:2] == ("E0228", "`g` is f32[embed=6] where it is shared, and f32[wide=8] in this call")


def test_what_nothing_calls_reaches_nothing():
    found, diagnostics = read("  share tower = net\n  share other = gain\n  loss mse(tower(x), y)")
    assert found is None
    assert [each[0] for each in diagnostics] == ["E0408"]
