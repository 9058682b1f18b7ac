"""`offload param`: parameters lie in the host's memory, and copies of them start one layer ahead."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, note, settings

from partita.cli.explain import show_tensor
from partita.compiler.analysis.memory import memory_report
from partita.compiler.analysis.time import stage_seconds
from partita.compiler.graph import Node, Phase, substitute
from partita.compiler.ops.communication import Transfer
from partita.compiler.ops.host import HostCopy, Prefetch, WaitPrefetch
from partita.compiler.passes.place import iteration_of
from partita.compiler.pipeline import compile_spec, schedule_spec
from partita.compiler.report.explain import explain
from partita.compiler.state import Compilation
from partita.compiler.verify.checker import Checker
from partita.compiler.verify.copies import Copies
from partita.compiler.verify.equivalence import validate
from partita.compiler.verify.rules import Rules
from partita.compiler.verify.value_numbering import ValueNumbering
from partita.dsl.load import load_text
from partita.runtime.kernels.host import arrive, cast_on_host, prefetch
from tests.compiler.report.test_layout_shown import shown
from tests.compiler.test_text import check_every_pass
from tests.files import checked
from tests.marks import soak
from tests.programs import Program, programs, sharded_programs
from tests.training.test_offload import text_of, trained
from tests.training.test_offloaded_blocks import offloading
from tests.training.test_partition import plan_of

ADAMW = "adamw(lr = 0.01)"
CASES = [
    ("", ADAMW, "f32", False),
    ("shard param -> data", "muon(lr = 0.01)", "bf16", True),
    ("shard state -> data recompute layer", "sgd(lr = 0.01)", "bf16", False),
    *soak(
        *(
            (rules, optimizer, precision, mean)
            for rules in ("", "shard state -> data", "shard param -> data", "offload layer")
            for optimizer in (ADAMW, "adafactor(lr = 0.01)", "adamw_8bit(lr = 0.01)", "sgd(lr = 0.01)")
            for precision in ("f64", "bf16")
            for mean in (False, True)
        )
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("rules", "optimizer", "precision", "mean"), CASES)
def test_the_numbers_are_the_same_to_the_last_bit(rules, optimizer, precision, mean, tmp_path, own_memory):
    expected = trained(plan_of(text_of(rules, optimizer, precision, mean)), tmp_path)
    plan = plan_of(text_of(f"{rules} offload param", optimizer, precision, mean))
    for state in (plan.training, plan.evaluation):
        assert validate(state).problems == ()
    check_every_pass(plan.spec, training=True)
    found = trained(plan, tmp_path)
    assert len(found) == len(expected)
    assert all(map(torch.equal, expected, found))


# ---------------------------------------------------------------- when, and how long


@given(program=programs() | sharded_programs())
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_a_layer_reads_is_on_its_way_before_the_layer_before_it_begins(program: Program):
    text = offloading(program, "offload param")
    note(text)
    state = compile_spec(checked(text, "random.par"))
    repeats = {scope.path: scope.name for scope in state.step.scopes if scope.repeat}
    for stage in state.partitioned.stages:
        for phases in ((Phase.FORWARD,), (Phase.BACKWARD, Phase.WEIGHT)):
            nodes = [each for each in stage.nodes if each.phase in phases and not isinstance(each.op, Transfer)]
            _check_order(nodes, repeats)


def _check_order(nodes: list[Node], repeats: dict[str, str]) -> None:
    begun = {node.output: i for i, node in enumerate(nodes) if node.op == Prefetch()}
    arrived = {node.inputs[0]: i for i, node in enumerate(nodes) if node.op == WaitPrefetch()}
    assert begun.keys() == arrived.keys()
    iterations = [iteration_of(node.scope, repeats) for node in nodes]
    for value, place in arrived.items():
        between = [i for i in range(begun[value], place) if not isinstance(nodes[i].op, HostCopy)]
        before = [node for node in nodes[:place] if not isinstance(node.op, HostCopy)]
        layers = {iterations[i] for i in between} - {None}
        assert begun[value] < place
        assert len(layers) <= 1, "copied more than a layer ahead"
        assert between or not before, "copied when it is needed"


@pytest.mark.parametrize("rules", ["", *soak("recompute layer")])
def test_the_device_holds_the_parameters_of_two_layers(rules: str):
    """However many there are."""
    found = []
    for layers in (4, 8):
        text = text_of(f"{rules} offload param", "sgd(lr = 0.01)").replace("repeat 2", f"repeat {layers}")
        text = text.replace("update table -> adamw(lr = 0.01) ", "")
        text = text.replace("(pipe = 2, data = 2)", "(pipe = 1, data = 1)")
        text = text.replace("embed = 8, ffn = 8", "embed = 64, ffn = 64")
        state = compile_spec(checked(text, "lm.par"))
        report = memory_report(state, state.plan.ranks[0])
        (stage,) = state.plan.stages
        found.append(stage.peaks)
        assert (report.parameters, report.state) == (0, 0)
        narrow = schedule_spec(checked(text.replace("f32", "bf16"), "lm.par"))
        assert memory_report(narrow, narrow.plan.ranks[0]).parameters == 0
        whole = sum(each.master.bytes for each in state.step.parameters)
        assert report.host == whole
    few, many = found
    assert few == many
    layer = 2 * 64 * 64 * 4
    assert layer < few["F"] < 2.5 * layer


ENDS = """
axis batch = 4, embed = 8
model m(x: [batch, embed]) {
  param gain: [embed] ~ ones()
  let x = x * gain
  repeat 4 as layer {
    param w: [embed] ~ ones()
    let x = tanh(x * w)
  }
  loss mean(x * gain)
}
mesh one(data = 1)
layout l on one { offload param }
train { layout = l data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""


def test_what_the_first_layer_reads_and_the_last_is_copied_for_each():
    """The device does not keep it in between."""
    (stage,) = schedule_spec(checked(ENDS, "ends.par")).partitioned.stages
    copied = [node.inputs[0].name for node in stage.nodes if node.op == Prefetch() and node.phase is Phase.FORWARD]
    assert copied.count("m.gain") == 2
    assert len(copied) == 2 + 4


def test_copies_run_beside_what_is_computed():
    """A layer takes as long as the longer of the two, where they take turns as long as both."""
    mesh = "mesh four(pipe = 1, data = 4) { device = h100 link = nvlink4 }"

    def seconds(rules: str, batch: int) -> float:
        text = text_of(rules, precision="bf16").replace("mesh four(pipe = 2, data = 2)", mesh)
        text = text.replace("embed = 8, ffn = 8", "embed = 4096, ffn = 16384").replace("repeat 2", "repeat 8")
        text = text.replace("batch = 8, seq = 4", f"batch = {batch}, seq = 2048")
        return stage_seconds(schedule_spec(checked(text, "lm.par")))[0, "F"]

    size = 2 * 4096 * 16384 * 2  # bytes of a layer, of which each copy takes 0.8 of PCIe's 64 GB/s
    copies = 8 * size / (0.8 * 64e9)
    small, large = (seconds("", batch) for batch in (8, 256))
    assert small < copies < large
    assert copies < seconds("offload param", 8) < copies + small
    assert large < seconds("offload param", 256) < large + copies / 4


class Stream:
    """A stream of a GPU, as far as copies need one."""

    cuda_stream = 1

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> None:
        self.log.append("copies")

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        self.log.append("copies wait for work")

    def record_event(self) -> str:
        self.log.append("event")
        return "arrived"

    def wait_event(self, event: str) -> None:
        self.log.append(f"work waits: {event}")


def test_streams_of_a_gpu_wait_for_each_other(monkeypatch: pytest.MonkeyPatch):
    from partita.runtime.context import Context
    from partita.runtime.streams import DeviceStreams

    log: list[str] = []
    stream = Stream(log)
    context = Context(0, torch.device("cpu"))
    context.streams = DeviceStreams(torch.device("cuda"))

    class Gpu:
        type = "cuda"

    context.device = Gpu()  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: given)
    monkeypatch.setattr(torch, "empty_like", lambda x, device: x.new_empty(x.shape))
    x = torch.arange(6.0).reshape(2, 3).t()
    found = prefetch(x, context)
    assert log == ["copies wait for work", "copies", "event"]
    assert arrive(found, context) is found
    assert log[3:] == ["work waits: arrived"]
    arrive(found, context)
    assert len(log) == 4
    assert torch.equal(found, x)


def test_on_a_cpu_nothing_is_copied():
    from partita.runtime.context import Context

    context = Context(0, torch.device("cpu"))
    x = torch.ones(3)
    assert arrive(prefetch(x, context), context) is x
    assert cast_on_host(x, torch.bfloat16, context).dtype == torch.bfloat16


# ---------------------------------------------------------------- what is wrong


def changed(state: Compilation, index: int, **changes) -> Compilation:
    stages = list(state.partitioned.stages)
    stages[index] = evolve(stages[index], **changes)
    return evolve(state, partitioned=evolve(state.partitioned, stages=tuple(stages)))


def test_what_reads_too_early_or_in_the_wrong_memory_is_found():
    state = compile_spec(checked(text_of("offload param"), "lm.par"))
    stage = state.partitioned.stages[0]
    begun = {node.output: node.inputs[0] for node in stage.nodes if node.op == Prefetch()}
    arrived = {node.output: node.inputs[0] for node in stage.nodes if node.op == WaitPrefetch()}
    late = [node for node in stage.nodes if node.phase is Phase.BACKWARD and node.op == WaitPrefetch()]
    early = [node for node in stage.nodes if node.phase is Phase.FORWARD and node.op == WaitPrefetch()]
    again = {b.output: f.output for b in late for f in early if begun[arrived[b.output]] is begun[arrived[f.output]]}
    assert begun
    assert again
    wrong = {
        "is read before it has arrived": {"nodes": tuple(substitute(node, arrived) for node in stage.nodes)},
        "is made of tensors in two memories": {
            "nodes": tuple(
                substitute(node, {copy: begun[source] for copy, source in arrived.items()}) for node in stage.nodes
            )
        },
        "is kept from one phase to another": {"nodes": tuple(substitute(node, again) for node in stage.nodes)},
        "read before it is made": {"nodes": tuple(node for node in stage.nodes if node.op != Prefetch())},
    }
    for message, changes in wrong.items():
        problems = validate(changed(state, 0, **changes), program=False).problems
        assert any(message in each.message for each in problems), (message, problems)


def test_parameters_in_the_wrong_memory_are_found():
    there, here = (compile_spec(checked(text_of(rules, "sgd(lr = 0.01)"), "lm.par")) for rules in ("offload param", ""))
    for state, other in ((there, here), (here, there)):
        check = Checker(Rules(state.mesh), ValueNumbering())
        Copies(state.partitioned, state.update, None, check, other.prefetched).run()
        assert all("is read from the wrong memory" in each.message for each in check.problems)
        assert check.problems


def test_wrong_rules():
    for rule, column in (("offload grad", 11), ("offload param by nvme", 20), ("offload state by mmap", 11)):
        given, diagnostics = load_text(text_of(rule), "lm.par")
        assert given is None
        assert [(each.code, each.span.line, each.span.column) for each in diagnostics] == [("E0418", 17, column)]
    plain = text_of("offload param", "sgd(lr = 0.1)").replace("update table -> adamw(lr = 0.01) ", "")
    assert compile_spec(checked(plain, "lm.par")).warnings == ()


def test_explain_says_where_a_parameter_lies():
    state = compile_spec(checked(text_of("offload down"), "lm.par"))
    (down,), (up,) = (explain(state, name) for name in ("down", "up"))
    texts = [" ".join(shown(partial(show_tensor, each), 110)) for each in (down, up)]
    said = ["in the host's memory: copied to the device before each use" in text for text in texts]
    assert said == [True, False], texts


def test_parameters_by_name():
    """With what the optimizer keeps of them, and no others."""
    state = compile_spec(checked(text_of("offload down"), "lm.par"))
    assert {each.name for each in state.program.parameters if each.host} == {"lm.layer.0.down", "lm.layer.1.down"}
    there = {each.name for each in state.program.parameters for kept in each.states if kept.host}
    assert there == state.prefetched
    assert validate(state).passed
