"""Cuts are balanced: the busiest rank has as little to do as can be."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from partita.compiler.graph import within, without_iterations
from partita.compiler.naming import named_scopes
from partita.compiler.passes.place import KNOWN, balance
from partita.compiler.pipeline import compile_run, compile_spec
from partita.compiler.schedules.schedule import loop_placement, ranks_of, v_placement
from partita.dsl.diagnostic import Refused
from tests.files import checked


@st.composite
def costs_and_parts(draw):
    costs = draw(st.lists(st.integers(0, 50).map(float), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


@given(costs_and_parts())
@example(([2.0, 3.0, 2.0, 5.0, 1.0, 6.0], 5))
def test_balance_is_optimal(case):
    costs, parts = case
    counts = balance(costs, range(parts))
    assert len(counts) == parts
    assert sum(counts) == len(costs)
    assert min(counts) >= 1

    def worth(bounds):
        edges = [0, *bounds, len(costs)]
        sums = [sum(costs[a:b]) for a, b in pairwise(edges)]
        return max(sums), sum(s * s for s in sums)

    best = min(worth(bounds) for bounds in combinations(range(1, len(costs)), parts - 1))
    edges = [sum(counts[: i + 1]) for i in range(parts - 1)]
    assert worth(edges) == best


LOOKUPS = """
axis batch = 8, vocab = 5, embed = 4, other = 4, ffn = 64
model m(x: i64[batch], y: [batch, embed]) {
  param head: [embed, ffn] ~ normal(0.1)
  let h = y
  repeat 4 as layer {
    param table: [vocab, embed] ~ normal(0.1)
    param w: [embed, other] ~ normal(0.1)
    let h = rename(dot(h, w, over = embed), other -> embed) + embedding(x + 1, table, over = vocab)
  }
  loss mean(dot(h, head, over = embed))
}
mesh line(pipe = 2)
layout split on line { stage layer -> pipe }
train {
  model = m  layout = split  schedule = gpipe(microbatches = 2)
  data = random()  optimizer = sgd(lr = 0.1)  steps = 1  eval = every(1, batches = 100_000)
}
"""


def test_evaluation_has_the_stages_of_training():
    """However many rows it has more, and though lookups are guarded."""
    training, evaluation = compile_run(checked(LOOKUPS, "lookups.par"))
    assert training.placed.guards
    stages = [
        [[each.name for each in stage.parameters] for stage in state.partitioned.stages]
        for state in (training, evaluation)
    ]
    assert stages[0] == stages[1]


@given(st.integers(1, 12), st.integers(1, 12))
def test_equal_costs_are_cut_evenly(parts, each):
    assert balance([1.0] * (parts * each), range(parts)) == (each,) * parts
    assert balance([1.0] * (parts * each), [0] * parts) == (each,) * parts


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 9),
    st.floats(0, 4),
    st.sampled_from([loop_placement, v_placement]),
)
@example(ranks=4, chunks=2, more=0, last=1.7, placement=v_placement)  # 2 layers and 1.7 on the rank of both ends
@example(
    ranks=3, chunks=2, more=8, last=0.5, placement=loop_placement
)  # 14 layers: 5 on two ranks, not 4 on all stages
def test_the_busiest_rank_of_alike_layers_has_the_least_there_can_be(ranks, chunks, more, last, placement):
    """No other number of layers for each rank leaves its busiest with less: that of the last stage has more to do."""
    rank_of = ranks_of(placement(ranks, chunks))
    stage_ranks = [rank_of[stage] for stage in range(ranks * chunks)]
    layers = len(stage_ranks) + more
    counts = balance([1.0] * (layers - 1) + [1.0 + last], stage_ranks)
    held = [
        sum(count for count, home in zip(counts, stage_ranks, strict=True) if home == rank) for rank in range(ranks)
    ]
    assert sum(held) == layers
    assert min(counts) >= 1
    busiest = max(count + last * (rank == stage_ranks[-1]) for rank, count in enumerate(held))
    if ranks == 1:
        assert busiest == layers + last
        return
    least = min(
        max(own + last, ceil((layers - own) / (ranks - 1))) for own in range(chunks, layers - chunks * (ranks - 1) + 1)
    )
    assert busiest == pytest.approx(least, rel=1.1 * KNOWN)


DEEP = """
axis batch = 48, seq = 256, embed = 1024, ffn = 4096, vocab = 40_960
model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(0.1)
  let x = embedding(tokens, table, over = vocab)
  repeat 14 as layer {
    param up: [embed, ffn] ~ normal(0.1)
    param down: [ffn, embed] ~ normal(0.1)
    let x = x + dot(gelu(dot(x, up, over = embed)), down, over = ffn)
  }
  loss cross_entropy(dot(x, table, over = embed), targets, over = vocab)
}
mesh line(pipe = 3) { device = h100 }
layout split on line { stage layer -> pipe RULES }
train {
  model = m  layout = split  schedule = interleaved_1f1b(microbatches = 6, chunks = 2)
  data = random()  optimizer = sgd(lr = 0.1)  steps = 1
}
"""


def layers_of_stages(text: str) -> list[int]:
    state = compile_spec(checked(text, "deep.par"))
    held: dict[int, set[str]] = {stage: set() for stage in range(state.pipeline.stages)}
    for each in state.partitioned.graph.parameters:
        for stage in state.partitioned.stages:
            if each in stage.parameters and ".layer." in each.name:
                held[stage.index].add(each.name.split(".")[2])
    return [len(each) for each in held.values()]


def test_stages_of_a_rank_are_cut_together():
    """The vocabulary takes as long as five layers. Cut by stages alone, its rank would have four layers besides."""
    counts = layers_of_stages(DEEP.replace("RULES", ""))
    assert [counts[rank] + counts[rank + 3] for rank in range(3)] == [6, 6, 2]


def test_what_is_computed_again_counts():
    """Layers take longer then, beside a vocabulary that takes as long as before."""
    deeper = DEEP.replace("repeat 14", "repeat 22")
    once, again = (layers_of_stages(deeper.replace("RULES", rule)) for rule in ("", "recompute layer"))
    assert (once[2] + once[5], again[2] + again[5]) == (4, 5)


FROZEN = """
axis batch = 8, embed = 64, ffn = 256
block b(x: [batch, embed]) {
  param up: [embed, ffn] ~ normal(0.1)
  param down: [ffn, embed] ~ normal(0.1)
  return x + dot(gelu(dot(x, up, over = embed)), down, over = ffn)
}
model m(x: [batch, embed]) {
  repeat 6 as lower { let x = b(x) }
  repeat 6 as upper { let x = b(x) }
  loss mean(x * x)
}
mesh line(pipe = 2)
layout split on line { stage lower, upper -> pipe }
optimizer half { freeze lower  update all -> sgd(lr = 0.1) }
train { layout = split  schedule = gpipe(microbatches = 2)  data = random()  optimizer = half  steps = 1 }
"""


def test_what_is_frozen_takes_less():
    """Layers before all that is trained have no backward pass: six of them and two others take as long as four."""
    first, _ = compile_spec(checked(FROZEN, "frozen.par")).partitioned.stages
    layers = {each.name.rsplit(".", 2)[0] for each in first.parameters}
    assert layers == {*(f"m.lower.{i}" for i in range(6)), "m.upper.0", "m.upper.1"}


CALLS = """
axis batch = 4, embed = 8
block part(x: [batch, embed]) { param w: [embed] ~ ones()  return x * w }
block tower(x: [batch, embed]) {
  repeat 2 as layer { let x = part(x) }
  return part(x)
}
block deep(x: [batch, embed]) { return part(tower(x)) }
model m(x: [batch, embed]) {
  let y = deep(tower(tower(x)))
  loss mean(y * y)
}
mesh line(pipe = RANKS)
layout l on line { RULES }
train { model = m  layout = l  data = random()  optimizer = sgd(lr = 0.1)  steps = 2 }
"""


def placed(ranks: int, *rules: str) -> tuple[dict[str, set[int]], list[str]]:
    """The stages of each call of `part`, without iteration numbers; and what warnings say of rules."""
    state = compile_spec(checked(CALLS.replace("RANKS", str(ranks)).replace("RULES", "  ".join(rules)), "calls.par"))
    found: dict[str, set[int]] = {}
    for node in state.placed.nodes:
        if node.scope.rpartition(".")[2].startswith("part"):
            found.setdefault(without_iterations(node.scope), set()).add(node.placed_on)
    return found, [each.message for each in state.warnings if each.code == "W0301"]


FIRST = {"m.tower.layer.part", "m.tower.part"}
SECOND = {"m.tower_2.layer.part", "m.tower_2.part"}
THIRD = {"m.deep.tower.layer.part", "m.deep.tower.part", "m.deep.part"}


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("m.tower", FIRST),
        ("m.tower_2", SECOND),
        ("tower_2", SECOND),
        ("tower", (FIRST | SECOND | THIRD) - {"m.deep.part"}),
        ("deep.tower", THIRD - {"m.deep.part"}),
        ("m.deep.tower", THIRD - {"m.deep.part"}),
        ("m.deep", THIRD),
        ("deep", THIRD),
        ("tower.part", {"m.tower.part", "m.tower_2.part", "m.deep.tower.part"}),
        ("m.tower.part", {"m.tower.part"}),
        ("m.tower.layer.part", {"m.tower.layer.part"}),
    ],
)
def test_a_full_name_is_one_call_and_the_name_of_a_block_all(path: str, wanted: set[str]):
    state = compile_spec(checked(CALLS.replace("RANKS", "1").replace("RULES", ""), "calls.par"))
    inside = {
        scope
        for scope in FIRST | SECOND | THIRD
        for named in named_scopes(state.forward.scopes, path.split("."))
        if within(f"{scope}.", named)
    }
    assert inside == wanted


@pytest.mark.parametrize("order", [1, -1])
def test_of_rules_for_a_place_the_more_exact_goes_first(order: int):
    """Whatever their order, and whether they name one stage or several."""
    rules = [
        "place tower -> pipe[2..3]",
        "place m.tower -> pipe[0..1]",
        "place tower_2 -> pipe[1]",
        "place deep -> pipe[3]",
    ]
    found, warnings = placed(4, *rules[::order])
    assert found["m.tower.layer.part"] == {0, 1}
    assert [found[each] for each in sorted(SECOND)] == [{1}, {1}]
    assert found["m.deep.tower.layer.part"] == {2, 3}
    assert found["m.deep.part"] == {3}
    assert not warnings


def test_of_rules_that_are_as_exact_the_first_applies():
    once = "place m.tower -> pipe[0..1]", "place tower_2, deep -> pipe[1]"
    found, warnings = placed(2, once[0], "place m.tower -> pipe[1]", once[1])
    assert found["m.tower.layer.part"] == {0, 1}
    assert warnings == ["`place m.tower -> pipe[1]` places nothing"]
    found, warnings = placed(2, "place m.tower -> pipe[0]", *once)
    assert found["m.tower.layer.part"] == found["m.tower.part"] == {0}
    assert warnings == ["`place m.tower -> pipe[0..1]` places nothing"]


def test_iterations_that_are_placed_by_themselves_are_not_balanced():
    found, warnings = placed(
        2, "place m.tower -> pipe[0..1]", "place tower.layer -> pipe[0]", "place deep.part -> pipe[1]"
    )
    assert found["m.tower.layer.part"] == found["m.deep.tower.layer.part"] == {0}
    assert warnings == ["`place m.tower -> pipe[0..1]` places nothing"]


def test_a_stage_is_empty_since_other_rules_go_first():
    with pytest.raises(Refused) as refused:
        placed(2, "place tower, deep, part -> pipe[0]", "place m.deep -> pipe[1]")
    (found,) = refused.value.diagnostics
    assert (found.code, found.message) == ("E0404", "stage 1 of 2 is empty")
    assert "`place m.deep -> pipe[1]` places nothing" in found.notes


def test_a_parameter_that_is_read_elsewhere_is_said_to_be_on_its_stage():
    with pytest.raises(Refused, match=r"`m.tower.part.w` is placed on 1, but stage 0 reads it"):
        placed(2, "place m.tower -> pipe[0]", "place tower_2, deep -> pipe[1]", "place m.tower.part.w -> pipe[1]")
