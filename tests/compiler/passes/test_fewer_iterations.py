"""Files with fewer iterations: what rules say of those that are left, they said before."""

from __future__ import annotations

from attrs import evolve
from hypothesis import assume, given, note
from hypothesis import strategies as st

from partita.compiler.passes.assign import assign
from partita.compiler.passes.build import build
from partita.compiler.passes.fewer_iterations import kinds, renumbered, told_apart
from partita.compiler.passes.resized import Resized
from partita.compiler.verify.proxy import proxy_of
from partita.dsl import spec
from partita.dsl.diagnostic import Refused
from tests.files import checked
from tests.marks import examples

LAYERS = 9
FILE = """axis batch = 4, seq = 10, embed = 6, key = 2
block near(x: [batch, seq, embed], window: number) {{
  param wq: [embed, key] ~ kaiming()
  let q = dot(x, wq, over = embed)
  return attend(q, q, x, over = seq, along = key, causal = true, window = window)
}}
model m(x: [batch, seq, embed], y: [batch, seq, embed]) {{
  repeat 9 as layer {{
    let x = x + near(x, window = {window}) * (0.1 + layer)
    param w: [embed] ~ normal(0.1 * (1 + layer))
    let x = x + tanh(x * w)
  }}
  loss mse(x, y)
}}
optimizer rules {{ {rules} update layer -> adamw(lr = 0.1 / (1 + layer)) }}
train {{ data = random() optimizer = rules steps = 2 }}
"""


@st.composite
def rules(draw: st.DrawFn) -> str:
    """Rules for some iterations, or parts of them."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        first = draw(st.integers(0, LAYERS - 1))
        last = draw(st.integers(first, LAYERS - 1))
        path = f"layer[{first}..{last}]" + draw(st.sampled_from(["", ".w", ".near", ".near.wq"]))
        found.append(f"freeze {path}" if draw(st.booleans()) else f"update {path} -> sgd(lr = 0.5)")
    return "  ".join(found)


def rule_by_parameter(file: spec.Spec) -> dict[str, tuple[str, object]]:
    """What updates each parameter."""
    model, train = file.trained
    try:
        found = assign(build(model, train.precision), train.optimizer)
    except Refused as refused:
        assume({each.code for each in refused.diagnostics} != {"E0415"})  # everything is frozen
        raise
    calls = {name: rule.call for name, rule in found.rules.items()}
    return {name: ("", None) if call is None else (call.name, call.arguments["lr"]) for name, call in calls.items()}


def repeat_of(file: spec.Spec) -> spec.Repeat:
    model, _ = file.trained
    (repeat,) = (step for step in model.body.steps if isinstance(step, spec.Repeat))
    return repeat


@given(text=rules(), kept=st.sets(st.integers(0, LAYERS - 1), min_size=1).map(sorted))
@examples(40)
def test_iterations_that_are_left_have_their_bodies_and_their_rules(text: str, kept: list[int]):
    note(text)
    whole = checked(FILE.format(rules=text, window="1 + layer"), "m.par")
    model, _ = whole.trained
    step = repeat_of(whole)
    fewer = Resized({}, {id(step): kept}).model(model)
    few = renumbered(evolve(whole, model=fewer), {"layer": kept})
    before, after = rule_by_parameter(whole), rule_by_parameter(few)
    assert after == {
        name.replace(f".{number}.", f".{i}."): before[name]
        for i, number in enumerate(kept)
        for name in (f"m.layer.{number}.w", f"m.layer.{number}.near.wq")
    }
    windows = [
        each.options["window"]
        for body in repeat_of(few).bodies
        for each in spec.applications(body)
        if each.function == "attend"
    ]
    assert windows == [1 + number for number in kept]


@given(text=rules(), window=st.sampled_from(["2", "1 + layer"]))
@examples(20)
def test_a_proxy_has_an_iteration_of_each_kind(text: str, window: str):
    note(text)
    whole = checked(FILE.format(rules=text, window=window), "m.par")
    few = proxy_of(whole)
    chosen = kinds(repeat_of(whole), told_apart(whole))
    assert repeat_of(few).count == (LAYERS if window != "2" else max(2, len(chosen)))
    before, after = rule_by_parameter(whole), rule_by_parameter(few)
    for part in ("w", "near.wq"):
        ours, theirs = ({own[name][0] for name in own if name.endswith(part)} for own in (after, before))
        assert ours == theirs
