"""What is found out about one stage holds for those that are the same but for names."""

from __future__ import annotations

import pytest
from attrs import asdict, evolve

from partita.compiler.analysis.time import stage_seconds
from partita.compiler.codegen.plan import _needs, functions_of
from partita.compiler.pipeline import schedule_spec
from partita.compiler.state import Scheduled
from partita.dsl.load import load, load_text
from tests.files import SPECS

# Six stages of one layer each, the last three of another repeat. The block of these does the same as the first's.
TWO = """
axis batch = 16, seq = 128, embed = 8, ffn = 16, wide = 32
block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ normal(0.1)
  param down: [ffn, embed] ~ normal(0.1)
  let y = attend(x, x, x, over = seq, along = embed, causal = true, window = 8)
  return y + dot(relu(dot(y, up, over = embed)), down, over = ffn)
}
block other(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ normal(0.1)
  param down: [ffn, embed] ~ normal(0.1)
  let y = attend(x, x, x, over = seq, along = embed, causal = true, window = 8)
  return y + dot(relu(dot(y, up, over = embed)), down, over = ffn)
}
model m(x: [batch, seq, embed]) {
  repeat 3 as first { let x = mlp(x) }
  repeat 3 as second { let x = other(x) }
  loss mean(x * x)
}
mesh k(pipe = 6) { device = h100 }
layout l on k {
  stage first, second -> pipe
}
schedule s = one_f_one_b(microbatches = 4)
optimizer o {
  update all -> sgd(lr = 0.1)
}
train {
  data = random()
  optimizer = o
  steps = 2
}
"""
HEAD, BODY = TWO.split("block other", 1)


@pytest.mark.soak
def test_stages_that_are_alike_take_as_long_and_need_as_much():
    """With dropout and reduced gradients, whose names differ."""
    given, diagnostics = load(SPECS / "gpt.par", ["batch=32"])
    assert given is not None, diagnostics
    state = schedule_spec(given)
    first, *middle, last = state.partitioned.forms
    assert len(set(middle)) == 1
    assert len({first, *middle, last}) == 3
    as_each_alone(state)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("change", "forms"),
    [
        ({}, [0, 1, 1, 1, 1, 2]),
        ({"ffn": "wide"}, [0, 1, 1, 2, 2, 3]),
        ({"window = 8": "window = 16"}, [0, 1, 1, 2, 2, 3]),
        ({"stage first": "recompute second\n  stage first"}, [0, 1, 1, 2, 2, 3]),
        ({"stage first": "offload second\n  stage first"}, [0, 1, 1, 2, 2, 3]),
        ({"stage first": "offload m.second.other.up\n  stage first"}, [0, 1, 1, 2, 2, 3]),
        ({"update all": "freeze m.second.other.up\n  update all"}, [0, 1, 1, 2, 2, 3]),
    ],
    ids=["equal", "sizes", "windows", "recomputed", "offloaded", "on the host", "frozen"],
)
def test_stages_that_differ_in_one_thing_are_not_alike(change: dict[str, str], forms: list[int]):
    """In sizes, in how far attention sees, in what is made again, where something lies, or what is trained."""
    changed = BODY
    for old, new in change.items():
        changed = changed.replace(old, new)
    given, diagnostics = load_text(HEAD + "block other" + changed)
    assert given is not None, "\n".join(each.render() for each in diagnostics)
    state = schedule_spec(given)
    assert state.partitioned.forms == forms
    as_each_alone(state)


def as_each_alone(state: Scheduled) -> None:
    """What is said of each stage is what is found of it alone."""
    partitioned, plan = state.partitioned, state.plan
    alone = (
        stage_seconds(evolve(state, partitioned=evolve(partitioned, stages=(stage,)))) for stage in partitioned.stages
    )
    assert stage_seconds(state) == {key: seconds for each in alone for key, seconds in each.items()}
    reduce = dict(state.update.reduce)
    for functions in functions_of(partitioned, state.schedule, state.compiled):
        index = functions.stage.index
        own = reduce.get(index, ()), state.update.totals[index]
        needs = _needs(functions, state.schedule.last_kind(index), *own, not state.device.gpu)
        found = asdict(needs, recurse=False)
        assert found == {name: getattr(plan.stages[index], name) for name in found}
