"""Schedules, run: whatever the order, ranks compute what one device computes, to the last bit of what they sum; and an
order with a mistake is refused, or computes the same.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import event, given
from hypothesis import strategies as st

from partita.compiler.analysis.memory import peak_memory
from partita.compiler.analysis.time import predict
from partita.compiler.fit.schedule import planned_with
from partita.compiler.pipeline import assembled, compile_spec
from partita.compiler.schedules.schedule import Schedule, peak_live
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import validate
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load, load_text
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.training import VirtualRun
from partita.testing import copied_schedules, mutants, schedules, shapes
from tests.files import checked
from tests.marks import examples
from tests.training.test_offloaded_blocks import memory_of_its_own

NETWORK = """
axis batch = 12, width = 3, hidden = 5
model net(image: [batch, width], wanted: [batch, width]) {{
  let x = image
  repeat {layers} as layer {{
    param up: [width, hidden] ~ normal(0.7)
    param down: [hidden, width] ~ normal(0.7)
    let x = x + dot(tanh(dot(x, up, over = width)), down, over = hidden)
  }}
  loss mse(x, wanted)
}}
mesh line(pipe = {ranks})
layout cut on line {{ stage layer -> pipe }}
layout whole on line {{ }}
schedule s = {schedule}
train {{ model = net layout = cut schedule = s data = random() optimizer = sgd(lr = 0.1) steps = 2 precision = f64
  eval = every(1, batches = 1) }}
"""
INVARIANTS = "E0501", "E0502", "E0503", "E0504"

BATCH = {
    "image": torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    "wanted": torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
}


@cache
def compiled(ranks: int, chunks: int, microbatches: int) -> Compilation:
    schedule = f"looped_bfs(microbatches = {microbatches}, chunks = {chunks})"
    spec = checked(NETWORK.format(layers=ranks * chunks, ranks=ranks, schedule=schedule), "network.par")
    return compile_spec(spec)


def ran(schedule: Schedule) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step with a schedule. Refused where it breaks a law."""
    state = compiled(schedule.ranks, schedule.chunks, schedule.microbatches)
    plan = CompiledRun(state.spec, assembled(planned_with(state, schedule)), None)
    run = VirtualRun(plan)
    loss, _ = run.step(1, BATCH)
    for rank in run.ranks:
        for stage in rank.training.stages.values():
            assert not stage.in_flight, "a microbatch is left over"
    return loss, run.gradients()


@cache
def offloading(ranks: int, chunks: int, microbatches: int) -> Compilation:
    state = compiled(ranks, chunks, microbatches)
    text = state.spec.source.text.replace("stage layer -> pipe", "stage layer -> pipe offload layer")
    return compile_spec(checked(text, "network.par"))


def copying(schedule: Schedule) -> tuple[float, dict[str, torch.Tensor]]:
    """The same, where what layers keep is copied to the host's memory."""
    state = offloading(schedule.ranks, schedule.chunks, schedule.microbatches)
    with memory_of_its_own():
        run = VirtualRun(CompiledRun(state.spec, assembled(planned_with(state, schedule)), None))
        loss, _ = run.step(1, BATCH)
    for rank in run.ranks:
        assert not any(stage.in_flight for stage in rank.training.stages.values()), "a microbatch is left over"
    return loss, run.gradients()


sizes = shapes(3, 2, 4).filter(lambda shape: 12 % shape.microbatches == 0)


@examples(10)
@given(schedules(sizes))
def test_every_order_sums_the_same(schedule):
    """Losses and gradients of all schedules with as many microbatches, wherever stages are, are equal bit by bit."""
    state = compiled(schedule.ranks, schedule.chunks, schedule.microbatches)
    loss, gradients = ran(state.schedule)
    other, found = ran(schedule)
    assert other == loss
    for name, gradient in gradients.items():
        assert torch.equal(found[name], gradient), name


@examples(50)
@given(mutants(schedules(sizes)))
def test_a_mutant_is_refused_or_computes_the_same(mutant):
    """Mistakes, each in one rank's order; the virtual cluster would raise where ranks wait for ever."""
    original, changed, mistake = mutant
    try:
        loss, gradients = ran(changed)
    except Refused as refused:
        codes = {each.code for each in refused.diagnostics}
        assert codes <= set(INVARIANTS), mistake
        event(", ".join(sorted(codes)))
        return
    event("lawful")
    expected, wanted = ran(original)
    assert loss == expected, mistake
    for name, gradient in wanted.items():
        assert torch.equal(gradients[name], gradient), (mistake, name)


@pytest.mark.soak
@examples(20)
@given(st.data())
def test_a_mutant_of_an_order_with_copies_is_refused_or_computes_the_same(data):
    plain, schedule, _ = data.draw(copied_schedules(schedules(sizes)).filter(lambda each: each[1].copies))
    original, changed, mistake = data.draw(mutants(st.just(schedule)))
    loss, gradients = ran(plain)
    for each in (original, changed):
        try:
            other, found = copying(each)
        except Refused as refused:
            assert each is changed, mistake
            codes = {each.code for each in refused.diagnostics}
            assert codes <= set(INVARIANTS), mistake
            continue
        assert other == loss, mistake
        assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items()), mistake


@pytest.mark.soak
@given(mutants(schedules(sizes)).filter(lambda mutant: mutant[0].ranks > 1))
def test_a_lower_bound_than_a_schedule_needs_is_refused(mutant):
    schedule, _, _ = mutant
    peaks = tuple(map(peak_live, schedule.actions))
    rank = max(range(schedule.ranks), key=peaks.__getitem__)
    bound = tuple(peak - (r == rank) for r, peak in enumerate(peaks))
    with pytest.raises(Refused) as refused:
        ran(evolve(schedule, bound=bound))
    assert {each.code for each in refused.value.diagnostics} == {"E0504"}
    assert f"rank {rank} of schedule" in str(refused.value)


CALLS = [
    "zb_h1(microbatches = 4)",
    "zb_h2(microbatches = 6)",
    "zb_v(microbatches = 3)",
    "zb_v(microbatches = 12)",
    "dualpipe_v(microbatches = 6)",
    "dualpipe_v(microbatches = 2)",
    "auto(microbatches = 6)",
    "auto(microbatches = 4, chunks = 2)",
    "auto(microbatches = 4, chunks = 3)",
    "policy(microbatches = 4, chunks = 2, in_flight = 3)",
    "policy(microbatches = 4, chunks = 3, prefer = forward, split_backward = true, placement = v)",
]


@pytest.mark.few(1)
@pytest.mark.parametrize("call", CALLS)
def test_training_and_evaluation_are_those_of_one_device(call):
    """Evaluation too: it runs where the training schedule has placed its stages."""
    text = NETWORK.format(layers=9, ranks=3, schedule=call)
    same_as_whole(text, ("layout=whole", "line.pipe=1", "schedule=gpipe(microbatches=1)"))


def same_as_whole(text: str, single: tuple[str, ...], folder: Path | None = None) -> None:
    runs = []
    for overrides in ((), single):
        spec, diagnostics = load_text(text, overrides=overrides, path=folder and folder / "net.par")
        assert spec is not None, diagnostics
        runs.append(VirtualRun(prepare(spec)))
    cut, whole = runs
    assert (len(cut.ranks), len(whole.ranks)) == (3, 1)
    for step in (1, 2):
        assert cut.step(step, BATCH, 0.1) == pytest.approx(whole.step(step, BATCH, 0.1), rel=1e-12)
    assert cut.evaluate(BATCH)[0] == pytest.approx(whole.evaluate(BATCH)[0], rel=1e-12)
    for name, value in whole.parameters().items():
        assert torch.allclose(cut.parameters()[name], value, rtol=1e-12, atol=1e-14), name


def test_a_schedule_in_a_file_runs(tmp_path):
    """The orders of ZB-V as text, read back with their placement."""
    state = compiled(3, 2, 4)
    spec, _ = load_text(NETWORK.format(layers=6, ranks=3, schedule="zb_v(microbatches = 4)"))
    orders = str(compile_spec(spec).schedule)
    (tmp_path / "mine.sched").write_text(f"# three ranks\n{orders}\n")
    call = 'from_file("mine.sched", placement = v)'
    (tmp_path / "net.par").write_text(NETWORK.format(layers=6, ranks=3, schedule=call))
    spec, diagnostics = load(tmp_path / "net.par")
    assert spec is not None, diagnostics
    run = VirtualRun(prepare(spec))
    assert run.plan.training.microbatches == 4
    assert str(run.plan.training.schedule) == orders
    assert run.step(1, BATCH)[0] == ran(state.schedule)[0]


@pytest.mark.soak
def test_backwards_in_descending_order_run_where_the_file_accepts_them(tmp_path):
    """Torch's looped BFS: gradients are those of one device, but for the order of their sums."""
    rows = []
    for rank in range(3):
        forwards = [f"{stage}F{m}" for stage in (rank, rank + 3) for m in range(4)]
        rows.append([*forwards, *(f"{stage}B{m}" for stage in (rank + 3, rank) for m in reversed(range(4)))])
    (tmp_path / "looped.csv").write_text("\n".join(map(",".join, rows)))
    text = NETWORK.format(layers=6, ranks=3, schedule='from_file("looped.csv", summation = any)')
    spec, diagnostics = load_text(text, path=tmp_path / "net.par")
    assert spec is not None, diagnostics
    assert validate(compile_spec(spec)).passed
    run, state = VirtualRun(prepare(spec)), compiled(3, 2, 4)
    loss = run.step(1, BATCH)[0]
    assert loss == ran(state.schedule)[0]
    same_as_whole(text, ("layout=whole", "line.pipe=1", "schedule=gpipe(microbatches=1)"), tmp_path)


def test_b_and_w_are_functions_of_their_own_where_a_schedule_runs_them():
    for call, kinds in (
        ("zb_h1(microbatches = 4)", {"P", "F", "B", "W"}),
        ("one_f_one_b(microbatches = 4)", {"P", "F", "BW"}),
        ("dualpipe_v(microbatches = 6)", {"P", "F", "B", "W", "BW"}),
    ):
        spec, _ = load_text(NETWORK.format(layers=6, ranks=3, schedule=call))
        for stage in compile_spec(spec).program.stages:
            assert set(stage.functions) == kinds, call


@pytest.mark.soak
def test_auto_keeps_within_the_memory_that_it_is_given():
    """The less there is, the more it costs, within what a search may miss; and too little is said to be so."""
    text = NETWORK.format(layers=3, ranks=3, schedule="auto(microbatches = 12, memory = 1GiB)")
    text = text.replace("batch = 12,", "batch = 1200,")
    costs = []
    for limit in (1 << 30, 125 << 10, 120 << 10, 115 << 10):
        spec, diagnostics = load_text(text, overrides=(f"s.memory={limit}B",))
        assert spec is not None, diagnostics
        state = compile_spec(spec)
        assert max(peak_memory(state, rank) for rank in state.program.ranks) <= limit
        costs.append(predict(state, exposed=False).timeline.cost)
    assert all(more <= 1.03 * less for more, less in pairwise(costs))
    assert costs[0] < costs[-1]
    spec, _ = load_text(text, overrides=("s.memory=20KiB",))
    with pytest.raises(Refused, match=r"rank 2 has room for [0-9,]+ bytes of activations, but one microbatch needs"):
        compile_spec(spec)
