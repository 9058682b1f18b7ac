"""The compiler's bound of what a rank's tensors need, beside what torch's allocator has given out."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch.profiler import ProfilerActivity, profile

from partita.cli.main import main
from partita.compiler.analysis.in_flight import expanded, memory_behind, posted
from partita.compiler.analysis.liveness import host_bytes, line_by_line, live_bytes, working_set
from partita.compiler.analysis.memory import EVALUATION, TRAINING, memory_report, peak_memory
from partita.compiler.analysis.memory import _among as among
from partita.compiler.graph import Builder, Phase, Value
from partita.compiler.instructions import Compute, WaitSend
from partita.compiler.ops.collective import AllReduce, Collective
from partita.compiler.ops.groups import OuterSgd
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.pipeline import compile_run, compile_spec, schedule_run, schedule_spec
from partita.compiler.planner.budget import seconds_of
from partita.compiler.planner.search import predicted
from partita.compiler.planner.space import Candidate
from partita.compiler.schedules.communication import peak_in_flight
from partita.dsl.types import Axis, Type
from partita.runtime.data.binding import open_data
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.files import checked
from tests.marks import soak
from tests.training.test_shared_vocabulary import text_of

FILE = """
axis batch = 64, embed = 64, ffn = 256
block mlp(x: [batch, embed]) {{
  param scale, shift: [embed] ~ ones()
  param up: [embed, ffn] ~ normal(0.1)
  param down: [ffn, embed] ~ normal(0.1)
  let h = layer_norm(x, over = embed, scale = scale, shift = shift)
  return x + dot(gelu(dot(h, up, over = embed)), down, over = ffn)
}}
model net(x: [batch, embed]) {{
  repeat 4 as layer {{ let x = mlp(x) }}
  loss mean(x * x)
}}
mesh m(pipe = 1)
layout split on m {{ stage layer -> pipe {rules} }}
schedule s = {schedule}
train {{ model = net layout = split schedule = s data = random() optimizer = sgd(lr = 0.1) steps = 2 }}
"""


def peak_of(run: Callable[[], None]) -> int:
    """The most bytes that torch's CPU allocator has given out at once while `run` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.few(2)
@pytest.mark.parametrize("rules", ["", "recompute layer"])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1", "zb_v"])
def test_the_bound_holds_and_is_near(schedule: str, rules: str) -> None:
    """Of B and W apart, and of chunks that hand values to one another, too."""
    spec = checked(FILE.format(schedule=f"{schedule}(microbatches = 4)", rules=rules), "net.par")
    plan = prepare(spec)
    runs = []

    def run() -> None:
        runs.append(VirtualRun(plan))
        batch = {"x": torch.ones(64, 64)}
        for step in (1, 2):
            runs[0].step(step, batch, 0.1)

    peak = peak_of(run)
    # Masters lie in numpy's memory.
    bound = peak_memory(plan.training, plan.program.ranks[0])
    assert 0.9 * bound <= peak <= bound, (bound, peak)


@pytest.mark.parametrize("schedule", ["one_f_one_b", *soak("zb_h1", "gpipe", "interlaced")])
def test_the_bounds_hold_where_ranks_share_a_vocabulary(schedule: str, tmp_path: Path) -> None:
    """Of both ranks together, which need not be at their peaks at once."""
    large = {"vocab = 12": "vocab = 512", "seq = 4": "seq = 32", "embed = 6": "embed = 32", "ffn = 8": "ffn = 128"}
    text = text_of(order=f"{schedule}(microbatches = 4)", changes={**large, "  eval = every(1, batches = 1)\n": ""})
    plan = prepare(checked(text, "lm.par"))
    data = open_data(plan.program, plan.train, tmp_path)
    runs = []

    def run() -> None:
        runs.append(VirtualRun(plan, strict=False))
        for step in (1, 2):
            runs[0].step(step, runs[0].ranks[0].tensors(data.batch(step)), 0.1)

    peak = peak_of(run)
    bound = sum(peak_memory(plan.training, rank) for rank in plan.training.plan.ranks)
    assert 0.85 * bound <= peak <= bound, (bound, peak)


def test_what_a_kernel_needs_is_held_while_it_runs_where_it_runs() -> None:
    build, type = Builder(), Type("f32", (Axis("a", 100),))
    anchor, total = (Value(name, type) for name in ("anchor", "total"))
    build.apply(OuterSgd(2, 1.0), anchor, total)
    (node,) = build.nodes  # in place, with the mean besides
    assert working_set(line_by_line([node]), (), (anchor, total)) == 3 * 400
    there = [tuple(evolve(each, host=True) for each in values) for values in (node.inputs, node.outputs)]
    on_host = evolve(node, inputs=there[0], outputs=there[1])
    assert working_set(line_by_line([on_host]), (), there[0]) == 0
    assert working_set(line_by_line([on_host]), (), there[0], size=host_bytes) == 3 * 400


def test_a_function_holds_what_its_collectives_do_until_it_waits() -> None:
    """Two ranks add; what is sent alone is sent as it is, and what arrives in a bucket stays as a whole."""
    build, type = Builder(), Type("f32", (Axis("a", 100),))
    x = Value("x", type)
    y = build.apply(Pointwise("negate"), x)
    total = build.apply(AllReduce("m", 2), y)
    z = build.apply(Pointwise("exp"), x)
    last = build.apply(Pointwise("add"), total, z)
    flights = {node: posted(node, True) for node in build.nodes if isinstance(node.op, Collective)}
    behind = memory_behind(build.nodes, flights)
    runs = expanded(line_by_line(build.nodes), flights)
    assert working_set(runs, {last}, {x}, behind) == 4 * 400 + 200  # x, y, what arrives, z, and half of the sum
    u, v = build.apply_all(AllReduce("m", 2, 2), z, last)
    flights[build.nodes[-1]] = posted(build.nodes[-1], True)
    behind = memory_behind(build.nodes, flights)
    assert live_bytes({u}, build.nodes, behind) == live_bytes({u, v}, build.nodes, behind) == 2 * 400


FROZEN = """
axis batch = 2, vocab = 1024, embed = 64
model m(ids: i64[batch]) {
  param table: [vocab, embed] ~ normal(0.1)
  param w: [embed] ~ ones()
  loss mean(embedding(ids, table, over = vocab) * w)
}
optimizer rules { freeze table update all -> sgd(lr = 0.1) }
train { data = random() optimizer = rules steps = 1 }
"""


def test_a_large_parameter_is_made_in_the_host_s_memory_before_the_first_step() -> None:
    """Beside where it goes. Without a gradient, nothing else is as large."""
    state = schedule_spec(checked(FROZEN, "frozen.par"))
    (report,) = (memory_report(state, rank) for rank in state.plan.ranks)
    assert report.moment == "before the first step"
    assert report.total == (2 * 1024 + 1) * 64 * 4


def test_what_is_sent_is_held_until_all_has_arrived() -> None:
    """Copies of gradients are freed then, before the ranks add. Each makes its half of the sum."""
    text = FILE.format(schedule="one_f_one_b(microbatches = 2)", rules="shard batch -> data")
    state = schedule_spec(
        checked(text.replace("pipe = 1", "pipe = 1, data = 2").replace("batch = 64", "batch = 8"), "n")
    )
    (rank,), (stage,) = state.plan.ranks, state.plan.stages
    gradients = sum(each.type.bytes for each in stage.accumulators if each.parameter)
    assert (stage.in_flight, stage.reducing, stage.reduced) == (2 * gradients, 2 * gradients, gradients)
    report = memory_report(state, rank)
    assert report.moment == "among the microbatches"  # in the last, they are in flight
    assert report.gradients == 2 * gradients + sum(each.type.bytes for each in stage.accumulators)
    inputs = 1.5 * 8 * 64 * 4  # the batch in whole, and the own half
    assert 0 < report.buffers - inputs < inputs


ALONE = """
axis batch = 6, embed = 64, ffn = 256
model net(x: [batch, embed]) {{
  param up: [ffn, embed] ~ normal(0.1)
  loss mean(dot(x, up, over = embed))
}}
mesh m(data = {parts})
layout split on m {{ shard batch -> data shard state -> data }}
train {{ model = net layout = split data = random() optimizer = sgd(lr = 0.1) steps = 2 }}
"""


def test_a_gradient_alone_is_sent_as_it_is() -> None:
    """It is a sum that is always there; the ranks add beside it, and each makes its half."""
    state = schedule_spec(checked(ALONE.format(parts=2), "alone.par"))
    (rank,), (stage,) = state.plan.ranks, state.plan.stages
    size = 64 * 256 * 4
    assert (stage.in_flight, stage.reducing, stage.reduced) == (size, 1.5 * size, 0.5 * size)
    report = memory_report(state, rank)
    assert report.moment == "as gradients are reduced"
    masters = 1.5 * size  # its half, and all, which is gathered
    inputs = 1.5 * 6 * 64 * 4
    assert 0 <= report.total - masters - size - stage.reducing - inputs < inputs


def test_a_flat_gradient_is_held_until_it_is_summed() -> None:
    """Made for what is sent as it is, of which Gloo may still hold it; each makes its third."""
    state = schedule_spec(checked(ALONE.format(parts=3), "alone.par"))
    (stage,) = state.plan.stages
    flat = (64 * 256 + 2) * 4
    assert (stage.in_flight, stage.reducing, stage.reduced) == (2 * flat, 2 * flat + flat / 3, flat / 3)


@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("graphs", ["true", "false"])
def test_what_libraries_keep_is_always_there(graphs: str, compiled: str) -> None:
    """On a GPU, and once more for a graph; as much as its cache where torch compiles kernels."""
    text = FILE.format(schedule="one_f_one_b(microbatches = 2)", rules="")
    overrides = ["m.device=h200", f"train.graphs={graphs}", f"train.compile={compiled}"]
    state = compile_spec(checked(text, "net.par", overrides), gpu=True)
    (rank,), h200 = state.plan.ranks, state.device
    assert h200.workspace == 33 << 20  # measured
    found, without = (
        memory_report(evolve(state, device=device), rank) for device in (h200, evolve(h200, workspace=0, cache=0))
    )
    kept = (2 if graphs == "true" else 1) * h200.workspace + (h200.cache if compiled == "true" else 0)
    assert found == evolve(without, buffers=without.buffers + kept)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
def test_messages_are_held_from_where_they_are_posted_to_where_they_are_waited_for(schedule: str) -> None:
    """Those that a rank sends and those that it receives: behind its last action, what it still waits for."""
    text = FILE.format(schedule=f"{schedule}(microbatches = 4)", rules="").replace("pipe = 1", "pipe = 4")
    state = schedule_spec(checked(text, "net.par"))
    for rank in state.plan.ranks:
        messages_held = [messages for *_, messages in among(state, rank)]
        assert peak_in_flight(rank.instructions) <= max(messages_held)
        assert min(messages_held) >= 0
        left = takewhile(lambda each: not isinstance(each, Compute), reversed(rank.instructions))
        assert messages_held[-1] == sum(each.transfer.message.bytes for each in left if isinstance(each, WaitSend))


@pytest.mark.parametrize("rows", [64, 8192])
def test_what_is_gathered_is_held_until_the_first_microbatch_waits_for_it(rows: int) -> None:
    """At the beginning of its F there is what arrives, as it is copied; at its end what F saves, and no longer."""
    text = FILE.format(schedule="one_f_one_b(microbatches = 2)", rules="shard batch -> data shard param -> data")
    text = text.replace("pipe = 1", "pipe = 1, data = 2").replace("batch = 64", f"batch = {rows}")
    state = compile_spec(checked(text, "net.par"))
    (stage,) = state.plan.stages
    nodes = state.partitioned.stages[0].nodes
    gathers = [node for node in nodes if isinstance(node.op, Collective) and node.phase is Phase.PROLOGUE]
    sent = sum(value.type.bytes for node in gathers for value in node.inputs)
    received = max(sum(value.type.bytes for value in node.outputs) for node in gathers)
    assert stage.gathering == sent > 0
    alone = stage.saved + stage.peaks["F"]
    if rows == 64:  # what was sent is freed before the results are copied from what has arrived
        assert sent < received <= stage.opening < received + alone
    else:
        assert sent + received < alone
        assert stage.opening == alone


# ---------------------------------------------------------------- evaluations

GROUPS = """
axis batch = 256, embed = 32, ffn = 8
block mlp(x: [batch, embed]) {
  param up: [embed, ffn] ~ normal(0.1)
  param down: [ffn, embed] ~ normal(0.1)
  return x + dot(gelu(dot(x, up, over = embed)), down, over = ffn)
}
model net(x: [batch, embed]) {
  repeat 4 as layer { let x = mlp(x) }
  loss mean(x * x)
}
mesh m(data = 2, pipe = 2) { device = device(flops = 1TFLOP/s, memory = 100KiB, bandwidth = 1GB/s) }
layout split on m { shard batch -> data  stage layer -> pipe }
schedule s = one_f_one_b(microbatches = 2)
train {
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 4
  sync = local(groups = 8, every = 2)
  eval = every(2, batches = 3)
}
expect { peak_memory <= 1KiB }
"""


def test_an_evaluation_is_part_of_a_run() -> None:
    """Here training computes with the rows of one group at a time, and an evaluation with those of all."""
    training, evaluation = compile_run(checked(GROUPS, "net.par"))
    assert training.evaluation is evaluation is not None
    known = schedule_run(checked(GROUPS, "net.par"))
    for rank in training.plan.ranks:
        alone = memory_report(evolve(training, evaluation=None), rank)
        found = memory_report(training, rank)
        assert found.total > 1.1 * alone.total
        assert (found.during, alone.during) == (EVALUATION, TRAINING)
        assert found.moment == "as a batch is read, in an evaluation"
        assert memory_report(known, known.plan.ranks[rank.rank]) == found
        # It keeps what training keeps, of which it computes with one group's masters.
        assert (found.parameters, found.state) == (alone.parameters, alone.state)
    most = max(peak_memory(training, rank) for rank in training.plan.ranks)
    assert predicted(training.spec, Candidate(2, 2, 1, 64)).peak == most
    assert seconds_of(known) > seconds_of(evolve(known, evaluation=None))


def test_a_part_is_of_one_batch_of_an_evaluation() -> None:
    """However many it has."""
    one, several = (
        compile_run(checked(GROUPS, "net.par", (f"train.eval=every(2, batches={count})",)))[0] for count in (1, 5)
    )
    for rank in one.plan.ranks:
        assert memory_report(one, rank) == memory_report(several, rank)


def test_an_evaluation_that_needs_less_changes_only_what_is_kept_for_it() -> None:
    """Its totals: here a number."""
    given = checked(GROUPS.replace("  sync = local(groups = 8, every = 2)\n", ""), "net.par", ("batch=16",))
    training, _ = compile_run(given)
    for rank in training.plan.ranks:
        found, alone = (memory_report(each, rank) for each in (training, evolve(training, evaluation=None)))
        assert found.during == TRAINING
        assert found.total - alone.total in (0, 4)


@pytest.mark.soak
def test_commands_say_that_it_is_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.par").write_text(GROUPS)
    monkeypatch.chdir(tmp_path)
    assert main(["compile", "net.par"]) == 1
    output = capsys.readouterr()
    assert "the peak is in an evaluation\n" in output.out
    assert "each rank" not in output.err
    assert ", as a batch is read, in an evaluation: buffers" in output.err
    assert main(["compile", "net.par", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["peak_in"] == ["evaluation"] * 4
    assert main(["compile", "net.par", "train.eval=none"]) == 1
    assert "evaluation" not in capsys.readouterr().out
    assert main(["verify", "net.par"]) == 1
    assert " in an evaluation, but `device` has 100KiB" in capsys.readouterr().err
