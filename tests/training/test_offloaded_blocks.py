"""`offload NAME`: what blocks and repeats keep for the backward pass lies in the host's memory, between copies there
and back beside what the ranks compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from partita.compiler.analysis.memory import MemoryReport, memory_report
from partita.compiler.analysis.time import predict
from partita.compiler.fit.schedule import planned_with
from partita.compiler.graph import Phase
from partita.compiler.instructions import COMPUTE
from partita.compiler.pipeline import assembled, compile_spec, schedule_spec
from partita.compiler.report.explain import explain
from partita.compiler.report.summary import summarize
from partita.compiler.schedules.forms import read
from partita.compiler.state import Compilation
from partita.compiler.streams import START, Launch, launches_of
from partita.compiler.verify.equivalence import validate
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load, load_text
from partita.dsl.syntax.source import Source
from partita.runtime import host_copies
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.streams import HostStreams, Posting, copied
from partita.runtime.training import VirtualRun
from partita.runtime.verification.verify import verify
from tests.commands import computed, partita
from tests.compiler.analysis.test_memory import peak_of
from tests.compiler.test_text import check_every_pass
from tests.files import checked
from tests.marks import examples, soak
from tests.programs import Program, programs, sharded_programs
from tests.runtime.transports.interleaved import StreamCluster
from tests.training.test_partition import plan_of, trained

FILE = """\
axis batch = 16, seq = 4, embed = 8, ffn = 16, inner = ffn, vocab = 12

block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ normal(0.3)
  param down: [inner, embed] ~ normal(0.3)
  let h = gelu(dot(rms_norm(x, over = embed), up, over = embed))
  return x + dot(rename(h, ffn -> inner), down, over = inner)
}
model lm(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(0.2)
  let x = embedding(tokens, table, over = vocab)
  repeat 4 as layer {
    let x = mlp(x)
  }
  loss cross_entropy(dot(x, table, over = embed), targets, over = vocab)
}
mesh line(pipe = 4, data = 1)
layout split on line {
  shard batch -> data
  stage layer -> pipe
  RULES
}
schedule s = SCHEDULE
train {
  layout = split
  optimizer = adamw(lr = 0.01)
  data = random()
  precision = f32
  steps = 2
  eval = every(1, batches = 1)
}
"""
ORDER = "one_f_one_b(microbatches = 8)"


def text_of(rules: str = "offload layer", order: str = ORDER, **changes: str) -> str:
    text = FILE.replace("RULES", rules).replace("SCHEDULE", order)
    for old, new in changes.items():
        assert f"{old} = " in text
        text = text.replace(text[text.index(f"{old} = ") :].split(",")[0].split("\n")[0], f"{old} = {new}", 1)
    return text


@contextmanager
def memory_of_its_own() -> Iterator[None]:
    """Copies are copies, as on a device with its own memory: the host's is numpy's, and is overwritten at the end."""

    def to_host(memory: torch.UntypedStorage) -> torch.UntypedStorage:
        there = torch.from_numpy(np.empty(max(1, memory.nbytes()), np.uint8)).untyped_storage()
        if memory.nbytes():
            _bytes(there)[: memory.nbytes()].copy_(_bytes(memory))
        return there

    def to_device(memory: torch.UntypedStorage) -> torch.UntypedStorage:
        here = _bytes(memory).clone().untyped_storage()
        _bytes(memory).fill_(255)
        return here

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "to_host", to_host)
        patch.setattr(host_copies, "to_device", to_device)
        yield


def _bytes(memory: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(memory)


# ---------------------------------------------------------------- numbers


def offloading(program: Program, rule: str) -> str:
    """The text of a random program with such a rule, and no other."""
    lines = [line for line in program.text.splitlines() if not line.strip().startswith("offload")]
    text = "\n".join(line.partition(" offload")[0] if "recompute" in line else line for line in lines)
    start = text.index("layout cut on ")
    end = text.index("{", start) + 1
    return f"{text[:end]}\n  {rule}{text[end:]}"


def same_with_and_without(program: Program, rule: str, tmp_path: Path) -> None:
    text = offloading(program, rule)
    note(text)
    with memory_of_its_own():
        found = trained(plan_of(text), 0, tmp_path)
    plan = plan_of(text)
    event(f"copies: {plan.training.schedule.copies}")
    assert validate(plan.training).passed
    expected = trained(plan_of(offloading(program, "")), 0, tmp_path)
    assert found[0] == expected[0]
    assert found[3] == expected[3]
    for one, other in zip(found[1:3], expected[1:3], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


RULES = st.sampled_from(["offload all", "offload layer", "offload all, state"])


@pytest.mark.soak
@given(program=programs() | sharded_programs(), rule=RULES)
@examples(2, suppress_health_check=list(HealthCheck))
def test_the_numbers_are_the_same_to_the_last_bit(program: Program, rule: str, tmp_path_factory):
    same_with_and_without(program, rule, tmp_path_factory.getbasetemp())


@pytest.mark.soak
@given(program=programs() | sharded_programs(), rule=RULES)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_numbers_are_the_same_to_the_last_bit_at_length(program: Program, rule: str, tmp_path_factory):
    same_with_and_without(program, rule, tmp_path_factory.getbasetemp())


def losses(text: str, tmp_path: Path) -> list[object]:
    """Losses and metrics of two steps, and the evaluation; all frames are empty afterwards."""
    found, gradients, parameters, evaluation = trained(plan_of(text), 0, tmp_path)
    return [found, evaluation, *(value.tolist() for value in (*gradients.values(), *parameters.values()))]


CASES = [
    ("zb_v(microbatches = 8)", "offload all"),
    ("one_f_one_b(microbatches = 4, over = [batch, seq], slices = 2)", "offload all"),
    ("one_f_one_b(microbatches = 8)", "shard vocab -> pipe offload all"),
    ("interleaved_1f1b(microbatches = 8, chunks = 2)", "offload mlp recompute layer"),
    *soak(
        *(
            (f"{name}(microbatches = 8)", f"{more} offload all")
            for name in ("gpipe", "zb_h1", "zb_h2", "v_half", "v_min", "dualpipe_v", "auto", "policy")
            for more in ("", "recompute layer")
        ),
        ("interleaved_1f1b(microbatches = 8, chunks = 2)", "shard vocab -> pipe offload all"),
        ("interlaced(microbatches = 8)", "shard vocab -> pipe offload all"),
    ),
]


@pytest.mark.parametrize(("order", "rules"), CASES)
def test_every_schedule_copies_and_computes_the_same(order: str, rules: str, tmp_path: Path):
    text = text_of(rules, order).replace("repeat 4", "repeat 8")
    state = compile_spec(checked(text, "lm.par"))
    assert state.schedule.copies
    assert validate(state).passed
    with memory_of_its_own():
        found = losses(text, tmp_path)
    assert found == losses(text.replace("offload all", "").replace("offload mlp", ""), tmp_path)


def test_a_view_comes_back_with_the_strides_that_it_had(tmp_path: Path):
    """Values that share memory share it again, and are read as they were: also transposed, broadcast, and in part."""
    base = torch.arange(24.0).reshape(4, 6)
    frame = [base, base.t(), base[1:3, 2:], base[:, :1].expand(4, 5), torch.ones(0), torch.tensor(3.0), None]
    slots = range(6)
    expected = [(each.clone(), each.stride()) for each in frame[:6]]
    with memory_of_its_own():
        copies = host_copies.HostCopies(torch.device("cpu"), HostStreams())
        kept = copies.offload(frame, slots)
        copies.offloaded(frame, slots, kept)
        assert frame == [None] * 7
        copies.load(frame, slots, kept)
        copies.loaded(kept)
    for each, (value, strides) in zip(frame[:6], expected, strict=True):
        assert torch.equal(each, value)
        assert each.stride() == strides
    assert len({each.untyped_storage().data_ptr() for each in frame[:4]}) == 1
    assert frame[0].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()


@pytest.mark.soak
def test_two_real_processes_train_alike(tmp_path: Path):
    """With one and the same losses, to the last bit."""
    for name, rules in (("copied", "offload layer"), ("plain", "")):
        text = text_of(rules).replace("pipe = 4", "pipe = 2")
        (tmp_path / "lm.par").write_text(text)
        done = partita("run", "lm.par", "--transport", "gloo", f"--run-dir={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    found, expected = computed(tmp_path / "copied"), computed(tmp_path / "plain")
    assert len(found) == 4
    assert found == expected


@given(st.lists(st.integers(0, 5), min_size=12, max_size=30), st.integers(0, 1 << 30))
def test_streams_of_a_gpu_copy_in_time(steps: list[int], seed: int):
    """Whatever is under way, and though copies happen as late as they may, or at once: microbatches leave, come back,
    and are read as they were, in as much of the host's memory as are there at once.
    """
    cluster = StreamCluster(1, seed=seed)
    streams = cluster.transport(0).streams(torch.device("cpu"))
    copies = host_copies.HostCopies(torch.device("cpu"), streams)
    parts: list[object] = []
    launches: list[Launch] = []
    last = START
    frames: dict[int, list[torch.Tensor | None]] = {}
    kept: dict[int, host_copies.Offloaded] = {}
    read, pinned = [], set()

    def compute(part: Callable[[], object], *after: int) -> None:
        nonlocal last
        last = len(parts)
        parts.append(lambda: part() and None)
        launches.append(Launch(COMPUTE, after))

    def post(stream: str, prepare: Callable[[], list[torch.Tensor]]) -> int:
        parts.append(Posting(prepare, copied, lambda _: None))
        launches.append(Launch(stream, (last,)))
        return len(parts) - 1

    def made(number: int) -> None:
        tensor = torch.full((3, 2), number)
        frames[number] = [tensor, tensor.t()]

    def leaves(number: int) -> list[torch.Tensor]:
        own = kept[number] = copies.offload(frames[number], (0, 1))
        pinned.update(each.data_ptr() for each in own.host)
        return copies.between(own.device, own.host)

    def comes(number: int) -> list[torch.Tensor]:
        copies.load(frames[number], (0, 1), kept[number])
        return copies.between(kept[number].host, kept[number].device)

    def back(number: int) -> None:
        copies.loaded(kept.pop(number))
        read.append((number, frames.pop(number)[1].clone()))

    leaving, away, coming, most = [], [], [], 0
    for number, step in enumerate(steps):
        there = [0, *([1] if leaving else []), *([2, 2] if away or coming else [])]
        step = there[step % len(there)]
        if step == 0:
            compute(partial(made, number))
            leaving.append((number, post("copies out", partial(leaves, number))))
        elif step == 1:
            number, ended = leaving.pop(0)
            compute(lambda own=number: copies.offloaded(frames[own], (0, 1), kept[own]), ended)
            away.append(number)
        elif not coming:
            number = away.pop()
            coming.append((number, post("copies in", partial(comes, number))))
        else:
            number, ended = coming.pop()
            compute(partial(back, number), ended)
        most = max(most, len(leaving) + len(away) + len(coming))

    def host() -> Iterator[None]:
        for each in streams.bound(launches, parts):
            each()
        yield from streams.drained()

    cluster.run([host()])
    assert len(read) == sum(launch.stream == "copies in" for launch in launches) - len(coming)
    for number, tensor in read:
        assert torch.equal(tensor, torch.full((2, 3), number))
    assert len(pinned) <= most


# ---------------------------------------------------------------- memory and time

LARGE = """
axis batch = 256, embed = 64, ffn = 256
block mlp(x: [batch, embed]) {{
  param up: [embed, ffn] ~ normal(0.1)
  param down: [ffn, embed] ~ normal(0.1)
  return x + dot(gelu(dot(layer_norm(x, over = embed), up, over = embed)), down, over = ffn)
}}
model net(x: [batch, embed]) {{
  repeat 4 as layer {{ let x = mlp(x) }}
  loss mean(x * x)
}}
mesh m(pipe = {ranks})
layout split on m {{ stage layer -> pipe {rules} }}
schedule s = {schedule}
train {{ model = net layout = split schedule = s data = random() optimizer = sgd(lr = 0.1) steps = 2 }}
"""


@pytest.mark.parametrize(
    "schedule", ["gpipe(microbatches = 8)", "zb_v(microbatches = 8)", *soak("looped_bfs(microbatches = 8, chunks = 2)")]
)
@pytest.mark.parametrize("rules", ["offload layer", *soak("offload all recompute layer")])
def test_the_bound_of_the_device_holds_and_is_near(schedule: str, rules: str):
    """Of tensors in its memory: those of the host lie elsewhere."""
    text = LARGE.format(schedule=schedule, rules=rules, ranks=1)
    plan = prepare(checked(text, "net.par"))
    assert plan.training.schedule.copies
    bound = near(plan)
    plain = compile_spec(checked(LARGE.format(schedule=schedule, rules="", ranks=1), "net.par"))
    assert bound.total < memory_report(plain, plain.plan.ranks[0]).total


LATER = (
    "F0.0 F0.1 O0.0 F0.2 O0.1 F0.3 O0.2 O0.3 L0.0 BW0.0 L0.1 BW0.1 L0.2 BW0.2 L0.3 BW0.3",
    "F0.0 O0.0 F0.1 O0.1 F0.2 O0.2 F0.3 L0.0 L0.1 L0.2 BW0.0 BW0.1 BW0.2 BW0.3",
)


@pytest.mark.parametrize("order", LATER)
def test_memory_is_free_from_the_end_of_one_copy_to_the_start_of_the_other(order: str):
    """Where these are not at once, as on a link that takes its time."""
    text = LARGE.format(schedule="gpipe(microbatches = 4)", rules="offload layer", ranks=1)
    state = compile_spec(checked(text, "net.par"))
    schedule = read(Source("order.sched", order))
    near(CompiledRun(state.spec, assembled(planned_with(state, schedule)), None))


def near(plan: CompiledRun) -> MemoryReport:
    """The bound of the device of the only rank, which tensors in its memory reach nearly."""
    runs = []

    def run() -> None:
        runs.append(VirtualRun(plan))
        for step in (1, 2):
            runs[0].step(step, {"x": torch.ones(256, 64)}, 0.1)

    with memory_of_its_own():
        peak = peak_of(run)
    (rank,) = plan.program.ranks
    bound = memory_report(plan.training, rank)
    assert 0.9 * bound.total <= peak <= bound.total, (bound, peak)
    return bound


def test_the_host_keeps_what_the_device_does_not():
    """Of 1F1B, each rank keeps one microbatch, and the host as many as it had more."""
    ours, theirs = (schedule_spec(checked(text_of(rules), "lm.par")) for rules in ("offload layer", ""))
    for rank, stage, plain in zip(ours.plan.ranks, ours.plan.stages, theirs.plan.stages, strict=True):
        found, whole = memory_report(ours, rank), memory_report(theirs, theirs.plan.ranks[rank.rank])
        in_flight = 4 - rank.rank
        assert plain.saved == stage.saved >= stage.offloaded
        assert stage.saved == stage.offloaded or in_flight == 1
        assert found.host == (in_flight * stage.saved if in_flight > 1 else 0)
        assert whole.host == 0
        assert found.activations == whole.activations - (in_flight - 1) * stage.saved
        assert ours.plan.offloads(stage.index) == (8 if in_flight > 1 else 0)


def test_what_is_not_named_stays_on_the_device():
    state = schedule_spec(checked(text_of("offload mlp recompute layer").replace("repeat 4", "repeat 8"), "lm.par"))
    for stage, graph in zip(state.plan.stages, state.partitioned.stages, strict=True):
        # Of two recomputed layers, the input of the first comes from another stage, or from the lookup.
        assert {value.name.rpartition(".")[2] for value in graph.offloaded} <= {"add", "x"}
        assert 0 < stage.offloaded <= stage.saved
    none = schedule_spec(checked(text_of(""), "lm.par"))
    assert not any(stage.offloaded for stage in none.plan.stages)
    assert not none.schedule.copies


def test_copies_hide_where_the_link_is_fast_enough_and_microbatches_stay_where_it_is_not():
    """On a GPU; the last stage copies nothing in either case."""
    mesh = "mesh line(pipe = 4, data = 1) { device = h100 link = nvlink4 }"
    counts = []
    for embed in ("8192", "1024"):  # what a layer computes for each byte that it keeps grows with it
        sizes = {"embed": embed, "ffn": "16384", "seq": "1024", "precision": "bf16"}
        texts = [
            text_of(rules, **sizes).replace("mesh line(pipe = 4, data = 1)", mesh) for rules in ("offload layer", "")
        ]
        ours, theirs = (schedule_spec(checked(text, "lm.par")) for text in texts)
        found, other = (predict(state, exposed=False) for state in (ours, theirs))
        assert found.step_time == pytest.approx(other.step_time, rel=1e-3)
        # There and back.
        moved = max(2 * ours.plan.offloads(stage.index) * stage.offloaded for stage in ours.plan.stages)
        assert found.copying == pytest.approx(moved / ours.device.host_link, rel=0.01)
        counts.append([ours.plan.offloads(stage) for stage in range(4)])
    fast, slow = counts
    assert fast[0] > fast[1] > fast[3] == 0
    assert sum(slow) < sum(fast)


def test_a_rank_copies_for_each_of_its_groups():
    """Of twice the batch, which two groups share."""
    mesh = "mesh line(pipe = 4, data = 1) { device = h100 link = nvlink4 }"
    sizes = {"embed": "16384", "ffn": "16384", "seq": "1024", "precision": "bf16"}
    found = []
    for batch, train in (("16", "train {"), ("32", "train { sync = local(groups = 2, every = 4)")):
        text = text_of(batch=batch, **sizes).replace("mesh line(pipe = 4, data = 1)", mesh).replace("train {", train)
        state = schedule_spec(checked(text, "lm.par"))
        slow = evolve(state, device=evolve(state.device, host_link=state.device.host_link / 100))
        found.append((predict(state, exposed=False).copying, predict(slow).exposed_copies))
    (alone, shown), (both, twice) = found
    assert both == pytest.approx(2 * alone)
    assert twice == pytest.approx(2 * shown)
    assert shown > 0


# ---------------------------------------------------------------- what is said, and what is wrong


def test_every_pass_has_a_text_that_reads_back():
    check_every_pass(checked(text_of("offload layer, state"), "lm.par"))


def test_reports_say_what_is_copied():
    state = compile_spec(checked(text_of(), "lm.par"))
    stages = summarize(state).as_json()["stages"]
    assert [(each["offloads"], each["offloaded"] == each["saved"]) for each in stages[:3]] == [(8, True)] * 3
    assert stages[3]["offloads"] == 0
    (found,) = explain(state, "mlp.rms_norm")
    assert found.offloaded == (0, 1, 2)
    (found,) = explain(state, "mlp.up")
    assert found.offloaded == ()


@pytest.mark.parametrize(
    ("rules", "code", "text"),
    [
        ("offload grad", "E0418", "`grad` cannot be kept"),
        ("offload layer.grad", "E0317", "no part called `grad`"),
        ("offload attention", "E0317", "no part called `attention`"),
    ],
)
def test_wrong_rules(rules: str, code: str, text: str):
    given_, diagnostics = load_text(text_of(rules), "lm.par")
    if given_ is not None:
        with pytest.raises(Refused) as refused:
            compile_spec(given_)
        diagnostics = refused.value.diagnostics
    found = next(each for each in diagnostics if each.severity == "error")
    assert found.code == code
    assert text in found.message
    assert found.span.line == 21


def test_rules_without_effect():
    """Nothing is kept, or no microbatch waits long enough. An evaluation keeps nothing anyway."""
    cases = {
        text_of("recompute mlp offload mlp").replace("return x + dot", "return dot"): (),
        text_of("offload layer", "one_f_one_b(microbatches = 1)"): ("nothing is offloaded",),
        text_of("offload layer").replace("pipe = 4", "pipe = 1"): ("nothing is offloaded",),
        text_of("offload all recompute all").replace("pipe = 4", "pipe = 1"): ("nothing is offloaded",),
    }
    for text, messages in cases.items():
        warnings = [each for each in compile_spec(checked(text, "lm.par")).warnings if each.code == "W0301"]
        assert len(warnings) == len(messages), (text, warnings)
        for each, message in zip(warnings, messages, strict=True):
            assert message in each.message
            assert each.span.line == 21
    state = compile_spec(checked(text_of(), "lm.par"), training=False)
    assert not any(graph.offloaded for graph in state.partitioned.stages)
    assert not state.warnings


def test_copies_of_what_is_not_offloaded_are_refused(tmp_path: Path):
    (tmp_path / "o.sched").write_text("F0.0 F0.1 O0.0 L0.0 BW0.0 BW0.1\nF0.0 BW0.0 F0.1 BW0.1\n")
    for rules, code in (("", "E0505"), ("offload layer", None)):
        text = text_of(rules, 'from_file("o.sched")').replace("pipe = 4", "pipe = 2")
        (tmp_path / "lm.par").write_text(text)
        given_, diagnostics = load(tmp_path / "lm.par")
        assert given_ is not None, diagnostics
        if code is None:
            assert str(compile_spec(given_).schedule).startswith("F0.0 F0.1 O0.0 L0.0 BW0.0 BW0.1")
            continue
        with pytest.raises(Refused, match=code):
            compile_spec(given_)


def changed(state: Compilation, **changes) -> Compilation:
    """A compilation whose first stage's graph is another."""
    first, *rest = state.partitioned.stages
    stages = (evolve(first, **changes), *rest)
    return evolve(state, partitioned=evolve(state.partitioned, stages=stages))


def test_copies_of_wrong_values_are_found():
    state = compile_spec(checked(text_of(), "lm.par"))
    first = state.partitioned.stages[0]
    backward = next(v for node in first.nodes if node.phase is Phase.BACKWARD for v in node.outputs)
    unread = next(
        v
        for node in first.nodes
        if node.phase is Phase.FORWARD
        for v in node.outputs
        if not any(v in other.inputs for other in first.nodes if other.phase is not Phase.FORWARD)
    )
    parameter = first.parameters[1].value
    for values in (
        (*first.offloaded, backward),
        (*first.offloaded, unread),
        (*first.offloaded, parameter),
        (*first.offloaded, first.offloaded[0]),
        first.offloaded[1:],
    ):
        assert not validate(changed(state, offloaded=values)).passed, values
    (stage, *others), ranks = state.program.stages, state.program.ranks
    for slots in (stage.copied[1:], (*stage.copied[1:], stage.frame), (*stage.copied[1:], stage.input_slots[0])):
        program = evolve(state.program, stages=(evolve(stage, copied=slots), *others))
        assert not validate(evolve(state, program=program)).passed, slots
    instructions = tuple(each for each in ranks[0].instructions if "O0.0" not in str(each) and "L0.0" not in str(each))
    other = evolve(ranks[0], instructions=instructions, launches=launches_of(instructions))
    program = evolve(state.program, ranks=(other, *ranks[1:]))
    (problem,) = validate(evolve(state, program=program)).problems
    assert "copies other microbatches than its schedule says" in problem.message


@pytest.mark.soak
def test_verify_finds_a_copy_of_the_wrong_memory(monkeypatch: pytest.MonkeyPatch):
    spec = checked(text_of(), "lm.par")
    assert not verify(spec).diagnostics
    monkeypatch.setattr(
        host_copies, "to_device", lambda memory: torch.zeros(memory.nbytes(), dtype=torch.uint8).untyped_storage()
    )
    assert {each.code for each in verify(spec).diagnostics} == {"E0702"}
