"""Mixtures of experts: what their functions take and give, and which steps a call stands for."""

import pytest

from partita.dsl import spec
from partita.dsl.load import load_text
from partita.dsl.types import Axis

AXES = "axis batch = 4, seq = 8, embed = 6, ffn = 5, heads = 2, experts = 4, chosen = 2, slots = 3\n"
INPUTS = (
    "x: [batch, seq, embed], p: [batch, seq, experts], id: i64[batch, seq, chosen], one: i64[batch, seq],"
    " w: [experts, embed, ffn], many: [experts, heads, embed, ffn], h: [batch, heads, seq, embed],"
    " y: [batch, experts, slots, embed], s: [seq, chosen]"
)


def steps_of(expression: str, names: str = "r") -> list[spec.Step]:
    """The steps of one statement."""
    text = (
        f"{AXES}model m({INPUTS}) {{\n  let {names} = {expression}\n  param v: [embed] ~ ones()\n  loss mean(x * v)\n}}"
    )
    found, diagnostics = load_text(text)
    errors = [d.render() for d in diagnostics if d.severity == "error"]
    assert found is not None, "\n".join(errors)
    (*steps, _, _, _) = found.model.body.steps
    return steps


ROUTED = {"over": ("embed",), "along": "experts"}
SLOTTED = {"order": ("chosen", "seq"), "experts": "experts", "slots": "slots"}
ONE = {**SLOTTED, "order": ("seq",)}
DISPATCHED = "f32 batch experts slots embed"


@pytest.mark.parametrize(
    ("expression", "expected", "options"),
    [
        ("routed_dot(x, w, id, over = embed, along = experts)", "f32 batch seq chosen ffn", ROUTED),
        ("routed_dot(x, w, one, embed, experts)", "f32 batch seq ffn", ROUTED),
        ("routed_dot(h, many, one, over = embed, along = experts)", "f32 batch heads seq ffn", ROUTED),
        (
            "routed_dot(h, many, id, over = [heads, embed], along = experts)",
            "f32 batch seq chosen ffn",
            {"over": ("heads", "embed"), "along": "experts"},
        ),
        ("dispatch(x, id, over = seq, into = [experts, slots])", DISPATCHED, SLOTTED),
        ("dispatch(x, one, over = seq, into = [experts, slots])", DISPATCHED, ONE),
        ("dispatch(h, id, seq, [experts, slots])", "f32 batch heads experts slots embed", SLOTTED),
        ("combine(y, id, s, over = seq, from = [experts, slots])", "f32 batch seq embed", SLOTTED),
        ("combine(y, one, x * 0 + 1, over = seq, from = [experts, slots])", None, None),
        ("load(id, over = [seq, chosen], into = experts)", "f32 batch experts", {"over": ("seq", "chosen")}),
        ("load(id, over = seq, into = experts)", "f32 batch chosen experts", {"over": ("seq",)}),
    ],
)
def test_types_and_options(expression: str, expected: str | None, options: dict | None):
    if expected is None:
        with pytest.raises(AssertionError, match="E0204"):
            steps_of(expression)
        return
    step = steps_of(expression)[-1]
    assert isinstance(step, spec.Apply)
    dtype, *axes = expected.split()
    assert (step.type.dtype, list(step.type.names)) == (dtype, axes)
    assert dict(step.options) == options
    assert step.name == "r"


@pytest.mark.parametrize("by", [None, "p * 2"])
def test_top_k_chooses_and_then_looks_up(by: str | None):
    """So that gradients flow to the weights only, whatever it chooses by."""
    steps = steps_of(f"top_k(p, experts -> chosen{f', by = {by}' if by else ''})", "weight, id")
    choice, weights = steps[-2:]
    assert (choice.function, weights.function) == ("top_k", "embedding")
    assert choice.type.dtype == "i64"
    assert choice.type.names == weights.type.names == ("batch", "seq", "chosen")
    assert choice.type.axis("chosen") == Axis("chosen", 2)
    p = 1
    assert choice.operands == ((len(INPUTS.split(": ")) - 1,) if by else (p,))
    assert weights.operands == (len(INPUTS.split(": ")) - 1 + len(steps) - 2, p)


@pytest.mark.parametrize(
    ("ids", "order"), [("id", ("chosen", "seq")), ("one", ("seq",)), ("id, choices = chosen", ("chosen", "seq"))]
)
def test_dropped_is_a_mean_over_all_choices(ids: str, order: tuple[str, ...]):
    ids, _, choices = ids.partition(",")
    steps = steps_of(f"dropped({ids}, over = seq, into = [experts, slots]{',' + choices if choices else ''})")
    assert [step.function for step in steps] == ["slot_index", "greater_equal", "cast", "mean"]
    assert steps[0].options == {"order": order}
    (_, size) = steps[1].operands
    assert size.at({}) == 3
    assert size.at({"slots": 7}) == 7  # verify has other sizes
    assert steps[3].name == "r"
    assert not steps[3].type.axes
