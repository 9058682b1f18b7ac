"""`offload state`: what the optimizer keeps lies in the host's memory, and is updated there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from attrs import evolve

from partita.compiler.analysis.memory import memory_report, stored
from partita.compiler.analysis.time import end_seconds, predict
from partita.compiler.codegen.plan import functions_of
from partita.compiler.costs.devices import DEVICES
from partita.compiler.graph import substitute
from partita.compiler.ops.host import CopyOut, ToDevice, WaitCopyOut
from partita.compiler.ops.optimizer import Store, Update, target_of
from partita.compiler.passes.outer import with_outer_updates
from partita.compiler.passes.update import OuterUpdate
from partita.compiler.pipeline import compile_spec, schedule_spec
from partita.compiler.report.summary import summarize
from partita.compiler.state import Compilation, Scheduled
from partita.compiler.verify.equivalence import validate
from partita.dsl.load import load_text
from partita.runtime.data.binding import open_data
from partita.runtime.rank import CompiledRun
from partita.runtime.training import VirtualRun
from tests.compiler.test_text import check_every_pass
from tests.files import checked
from tests.marks import soak
from tests.training.test_partition import plan_of

FILE = """\
axis batch = 8, seq = 4, embed = 8, ffn = 8, vocab = 12

model lm(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(0.2)
  let x = embedding(tokens, table, over = vocab)
  repeat 2 as layer {
    param up: [embed, ffn] ~ normal(0.3)
    param down: [ffn, embed] ~ normal(0.3)
    let x = x + dot(gelu(dot(x, up, over = embed)), down, over = ffn)
  }
  loss cross_entropy(dot(x, table, over = embed), targets, over = vocab)
}
mesh four(pipe = 2, data = 2)
layout split on four {
  stage layer -> pipe
  shard batch -> data
  RULES
}
schedule s = one_f_one_b(microbatches = 2)
optimizer chosen { update table -> adamw(lr = 0.01) update all -> OPTIMIZER }
train {
  optimizer = chosen
  data = random()
  clip = 0.5
  precision = f32
  steps = 2
  eval = every(1, batches = 1)
}
"""
ADAMW = "adamw(lr = 0.01)"


def text_of(
    rules: str = "", optimizer: str = ADAMW, precision: str = "f32", mean: bool = False, clip: str = "0.5"
) -> str:
    text = FILE.replace("RULES", rules).replace("OPTIMIZER", optimizer).replace("f32", precision)
    text = text.replace("clip = 0.5", f"clip = {clip}")
    return text.replace("batches = 1)", "batches = 1, weights = ema)\n  ema = 0.9") if mean else text


def trained(plan: CompiledRun, tmp_path: Path) -> list[torch.Tensor]:
    """Everything that its steps and an evaluation make."""
    run = VirtualRun(plan)
    data = open_data(plan.program, plan.train, tmp_path)
    found: list[torch.Tensor] = []
    for step in range(1, plan.train.steps + 1):
        found.append(torch.tensor(run.step(step, run.ranks[0].tensors(data.batch(step)), 0.01, 0.01)))
    found.append(torch.tensor(run.evaluate(run.ranks[0].tensors(data.holdout_batch(0)))[0]))
    for memory in (memory for rank in run.ranks for memory in rank.memories):
        found += [*memory.masters.values(), *memory.states.values()]
    return found


CASES = [
    ("shard state -> data", ADAMW, "f32", False, "none"),
    ("", "muon(lr = 0.01)", "bf16", True, "0.5"),
    *soak(
        *(
            (rules, optimizer, precision, mean, clip)
            for rules in ("", "shard state -> data", "shard param -> data")
            for optimizer in (ADAMW, "muon(lr = 0.01)", "adafactor(lr = 0.01)", "adamw_8bit(lr = 0.01)")
            for precision in ("f64", "bf16")
            for mean in (False, True)
            for clip in ("0.5", "none")
        )
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("rules", "optimizer", "precision", "mean", "clip"), CASES)
def test_the_numbers_are_the_same_to_the_last_bit(rules, optimizer, precision, mean, clip, tmp_path, own_memory):
    expected = trained(plan_of(text_of(rules, optimizer, precision, mean, clip)), tmp_path)
    plan = plan_of(text_of(f"{rules} offload state", optimizer, precision, mean, clip))
    assert validate(plan.training).passed
    assert validate(plan.evaluation).passed
    check_every_pass(plan.spec, training=True)
    assert all(map(torch.equal, expected, trained(plan, tmp_path)))


def apart(sync: str, *given: str) -> str:
    """The text of a file with this `sync`, and with steps enough for an update of a pair."""
    return text_of(*given).replace("steps = 2", f"steps = 4\n  sync = {sync}")


LOCAL = "local(groups = 2, every = 2)"
NESTEROV = "local(groups = 4, every = 1, outer = nesterov(lr = 0.7, momentum = 0.9))"  # two on each rank
APART = [
    (LOCAL, "offload state", "", ADAMW, "bf16"),
    (NESTEROV, "offload state", "shard state -> data", ADAMW, "f32"),
    ("paired()", "offload param", "shard state -> data", "muon(lr = 0.01)", "bf16"),
    *soak(
        *(
            (sync, host, rules, optimizer, precision)
            for sync in (LOCAL, NESTEROV, "paired()")
            for host in ("offload state", "offload param", "offload table")
            for rules in ("", "shard state -> data", "shard param -> data")
            for optimizer in (ADAMW, "adafactor(lr = 0.01)", "sgd(lr = 0.01)")
            for precision in ("f32", "bf16")
        )
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("sync", "host", "rules", "optimizer", "precision"), APART)
def test_groups_and_pairs_are_the_same_to_the_last_bit(sync, host, rules, optimizer, precision, tmp_path, own_memory):
    expected = trained(plan_of(apart(sync, rules, optimizer, precision)), tmp_path)
    plan = plan_of(apart(sync, f"{rules} {host}", optimizer, precision))
    assert validate(plan.training).problems == ()
    assert validate(plan.evaluation).problems == ()
    check_every_pass(plan.spec, training=True)
    found = trained(plan, tmp_path)
    assert len(found) == len(expected)
    assert all(map(torch.equal, expected, found))


WIDE = {
    "embed = 8, ffn = 8": "embed = 256, ffn = 256",
    "(pipe = 2, data = 2)": "(pipe = 1, data = 2) { device = h100 link = [data -> link(40GB/s, 1ns)] }",
}


def wide(rules: str, clip: str = "none", precision: str = "bf16") -> Scheduled:
    text = text_of(rules, precision=precision, clip=clip)
    for old, new in WIDE.items():
        text = text.replace(old, new)
    return schedule_spec(checked(text, "lm.par"))


@pytest.mark.parametrize("rules", ["shard state -> data", "shard param -> data", ""])
def test_gradients_are_on_their_way_while_the_backward_pass_runs(rules: str):
    """Those of a layer start where the next one's are reduced at the latest, or added up if nothing reduces them."""
    state = wide(f"{rules} offload state")
    (of,) = functions_of(state.partitioned, state.schedule)
    ((_, reduce),) = state.update.reduce
    nodes = of.closing("BW", of.reduced("BW", reduce, state.update.totals[0]))
    started = {node.output: i for i, node in enumerate(nodes) if node.op == CopyOut()}
    last = max(i for i, node in enumerate(nodes) if target_of(node.op) is not None)
    coming = dict(state.update.in_flight([0]))
    assert coming.keys() == {each.name for each in state.update.parameters}
    for layer in ("up", "down"):
        assert started[coming[f"lm.layer.1.{layer}"]] < last
    order = [each for each in started if started[each] < last]
    updates = state.update.parameter_updates(state.plan.ranks[0].parameters)
    landed = [node.inputs[0] for node in updates if node.op == WaitCopyOut()]
    assert landed[: len(order)] == order, "updates are made in the order in which gradients come"
    assert not wide(f"{rules} offload state", clip="1.0").update.in_flight([0])


@pytest.mark.parametrize("clip", ["none", "1.0"])
def test_copies_of_an_update_start_before_the_update_before(clip: str):
    state = wide("offload state", clip, "f32")
    nodes = state.update.parameter_updates(state.plan.ranks[0].parameters)
    begun = {node.output: i for i, node in enumerate(nodes) if node.op == CopyOut()}
    updates = [i for i, node in enumerate(nodes) if isinstance(node.op, Update)]
    for node in nodes:
        if node.op == WaitCopyOut() and node.inputs[0] in begun:
            own = next(i for i in updates if node.output in nodes[i].inputs)
            assert sum(begun[node.inputs[0]] < i < own for i in updates) >= (own != updates[0])


@pytest.mark.parametrize("clip", ["none", "1.0"])
def test_most_of_the_copies_hide(clip: str):
    """Beside the backward pass, and beside the host's own work."""
    found = predict(wide("offload state", clip, "f32"))
    assert 0 < found.exposed_copies < found.copying / 4


def test_the_host_has_room_for_all_gradients_that_are_coming():
    found = {clip: memory_report(state := wide("offload state", clip), state.plan.ranks[0]) for clip in ("none", "1.0")}
    sums = sum(each.type.bytes for each in state.plan.stages[0].accumulators if each.parameter)
    most = max(each.type.bytes for each in state.plan.stages[0].accumulators)
    kept = sum(sum(part.values()) for part in stored(state, state.plan.ranks[0], host=True))
    assert found["none"].host >= kept + sums
    assert kept + most <= found["1.0"].host < kept + sums


@pytest.mark.parametrize(("precision", "masters"), [("f32", False), ("bf16", True)])
def test_the_device_holds_what_computes_and_the_host_the_rest(precision: str, masters: bool):
    ours, theirs = (
        compile_spec(checked(text_of(rules, precision=precision), "lm.par")) for rules in ("offload state", "")
    )
    for rank in ours.plan.ranks:
        found, whole = memory_report(ours, rank), memory_report(theirs, theirs.plan.ranks[rank.rank])
        kept = whole.state // 2 if masters else 0  # in mixed precision, the masters; of AdamW's states, one is as large
        assert (found.state, found.host, whole.host) == (0, whole.state + kept, 0)
        assert found.parameters == whole.parameters - kept
        assert found.gradients == whole.gradients
    assert {each.host for record in ours.program.parameters for each in record.states} == {True}
    assert {record.host for record in ours.program.parameters} == {masters}


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_small_states_in_the_host_s_memory_save_no_time(precision: str):
    """Each copy, and each update there, takes as long to start as a kernel at least."""
    ends = []
    for rules in ("", "offload state"):
        state = compile_spec(checked(text_of(rules, precision=precision), "lm.par"))
        state = evolve(state, device=DEVICES["h100"])
        ends.append(end_seconds(state, state.plan.ranks[0], 0.0))
    assert ends[1] > ends[0] + DEVICES["h100"].launch * len(state.plan.ranks[0].parameters)


@pytest.mark.parametrize(("rules", "precision"), [("shard state -> data", "f32"), ("shard param -> data", "bf16")])
def test_states_in_eight_bits_are_flat_nowhere(rules: str, precision: str):
    """What no axis divides stays replicated, in the host's memory like the rest, and is named. Masters of that are
    gathered on the device, wherever they lie.
    """
    mesh = {"(pipe = 2, data = 2)": "(pipe = 1, data = 3)", "batch = 8": "batch = 6"}
    text = text_of(f"{rules} offload state", "adamw_8bit(lr = 0.01, min_size = 16)", precision)
    for old, new in mesh.items():
        text = text.replace(old, new)
    state = compile_spec(checked(text, "lm.par"))
    assert summarize(state).undivided == (("data", ("lm.layer.up", "lm.layer.down")),)
    assert validate(state).passed
    assert all(each.host for record in state.program.parameters for each in record.states)
    wrong, diagnostics = load_text(text.replace("offload state", "offload state by mmap"), "lm.par")
    assert wrong is None
    assert diagnostics[0].code == "E0418"


def test_what_computes_is_copied_once_a_step():
    """What several functions read, and views of it, are of one copy."""
    source = compile_spec(checked(text_of("offload state", precision="bf16"), "lm.par")).program.source
    assert source.count(".to(torch.bfloat16), c)") == source.count("kernels.to_device(m[") == 2 * 3


def test_time_of_copies():
    """On a GPU they and the update take longer; where both memories are one, no longer than before."""
    for device, slower in (("cpu", False), ("h100", True)):
        mesh = f"mesh four(pipe = 2, data = 2) {{ device = {device} link = pcie5 }}"
        texts = [text_of(rules).replace("mesh four(pipe = 2, data = 2)", mesh) for rules in ("offload state", "")]
        texts = [text.replace("embed = 8", "embed = 1024").replace("ffn = 8", "ffn = 1024") for text in texts]
        ours, theirs = (predict(schedule_spec(checked(text, "lm.par")), exposed=False).step_time for text in texts)
        assert (ours > theirs) == slower


def test_an_average_is_copied_once_in_so_many_steps():
    """What of that nothing hides makes steps longer."""
    found = []
    for every in (1, 2, 4):
        text = apart(f"local(groups = 2, every = {every})", "offload state")
        for old, new in WIDE.items():
            text = text.replace(old, new)
        found.append(predict(schedule_spec(checked(text, "lm.par"))))
    once, half, fourth = (each.copying for each in found)
    assert once - half == pytest.approx(2 * (half - fourth))
    assert half > fourth
    assert found[0].exposed_copies > found[1].exposed_copies > found[2].exposed_copies


def broken(state: Compilation, name: str, **changes) -> Compilation:
    """A program whose update of a parameter is another."""
    parameters = tuple(evolve(each, **changes) if each.name == name else each for each in state.update.parameters)
    return evolve(state, update=evolve(state.update, parameters=parameters))


def test_what_lies_in_the_wrong_memory_is_found():
    state = compile_spec(checked(text_of("offload state"), "lm.par"))
    (each,) = (each for each in state.update.parameters if each.name == "lm.table")
    (copy,) = (node for node in each.update if node.op == WaitCopyOut() and each.master not in node.inputs)
    _, gradient = copy.inputs
    update = tuple(
        evolve(node, inputs=tuple(gradient if value is copy.output else value for value in node.inputs))
        for node in each.update
        if node is not copy
    )
    for changes in (
        {"update": update},
        {"states": tuple(evolve(state, host=False) for state in each.states)},
        {"update": each.update[:-1]},
    ):
        assert not validate(broken(state, "lm.table", **changes), program=False).passed
    records = tuple(evolve(record, host=True) for record in state.program.parameters)
    (problem, *_) = validate(evolve(state, program=evolve(state.program, parameters=records))).problems
    assert "kept in the wrong memory" in problem.message


def test_averages_in_the_wrong_memory_are_found():
    state = compile_spec(checked(apart(LOCAL, "offload state", ADAMW, "bf16"), "lm.par"))
    update, groups, local = state.update, state.groups, state.train.local
    assert groups is not None
    assert local is not None

    def found(outer: Sequence[OuterUpdate]) -> str:
        problems = validate(evolve(state, update=evolve(update, outer=tuple(outer))), program=False).problems
        return " ".join(problem.message for problem in problems)

    assert "`anchor(lm.table)` lies in" in found(with_outer_updates(update, state.mesh, groups, local).outer)
    on_device = [evolve(each, master=evolve(each.master, host=False)) for each in update.parameters]
    others = evolve(update, parameters=tuple(on_device))
    averages = with_outer_updates(others, state.mesh, groups, local, state.states_on_host).outer
    assert "`master(lm.table)@0` lies in" in found(averages)
    for op, message in ((WaitCopyOut(), "tensors in two memories"), (ToDevice(), "is sent from the host's memory")):
        each, *more = update.outer
        copy = next(node for node in each.nodes if node.op == op)
        before = {copy.output: copy.inputs[-1]}
        nodes = [substitute(node, before) for node in each.nodes if node is not copy]
        assert message in found([evolve(each, nodes=tuple(nodes)), *more])


def test_what_is_read_or_written_before_it_has_landed_is_found():
    state = compile_spec(checked(text_of("offload state", clip="none"), "lm.par"))
    each = next(each for each in state.update.parameters if each.in_flight is not None)
    lands = [node for node in each.update if node.op == WaitCopyOut()]
    (gradient,) = (node for node in lands if node.inputs[0] is each.in_flight)
    (part,) = (node for node in lands if node is not gradient)
    update = next(node for node in each.update if isinstance(node.op, Update))
    (store,) = (node for node in each.update if node.op == Store())
    too_early = tuple(
        substitute(node, {gradient.output: each.in_flight}) for node in each.update if node is not gradient
    )
    early_store = evolve(store, inputs=(each.master, each.master))
    at = each.update.index(part)
    wrong = {
        "is read before it has landed": {"update": too_early},
        "what is on its way to the host is overwritten": {
            "update": (*each.update[:at], early_store, *each.update[at:]),
        },
        "is not of": {"update": tuple(substitute(node, {each.gradient: each.master}) for node in each.update)},
        "is not waited for": {"update": tuple(node for node in each.update if node not in (part, update, store))},
    }
    for message, changes in wrong.items():
        problems = validate(broken(state, each.name, **changes)).problems
        assert any(message in problem.message for problem in problems), (message, problems)
    other = next(one for one in state.update.parameters if one.in_flight is not None and one is not each)
    problems = validate(broken(state, each.name, in_flight=other.in_flight), program=False).problems
    assert any("is not the gradient of a stage's own parameter" in problem.message for problem in problems)


def test_wrong_rules():
    given, diagnostics = load_text(text_of("offload grad"), "lm.par")
    assert given is None
    assert [(each.code, each.span.line, each.span.column) for each in diagnostics] == [("E0418", 17, 11)]
    plain = text_of("offload state", "sgd(lr = 0.1)").replace("update table -> adamw(lr = 0.01) ", "")
    warnings = compile_spec(checked(plain, "lm.par")).warnings
    assert [(each.code, each.span.line) for each in warnings] == [("W0301", 17)]


STACKED = """
axis batch = 12, embed = 6, ffn = 12
model m(x: [batch, embed], y: [batch, embed]) {
  repeat 2 as layer {
    param up: [embed, ffn] ~ normal(0.3)
    param down: [ffn, embed] ~ normal(0.3)
    let x = dot(dot(x, up, over = embed), down, over = ffn)
  }
  loss mse(x, y)
}
mesh ranks(tensor = 2)
layout l on ranks { shard ffn -> tensor offload up }
train { data = random() optimizer = muon(lr = 0.02) steps = 3 clip = 0.5 }
"""


def test_an_update_may_read_what_is_on_its_way_to_the_host():
    """Matrices of one stack, of which one is copied there, and another is read on the device meanwhile."""
    problems = validate(compile_spec(checked(STACKED, "stacked.par"))).problems
    assert not problems, problems
