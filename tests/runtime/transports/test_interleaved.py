"""Streams and events of a program: whatever order they permit computes the same bits, and laws find what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import HealthCheck, assume, event, given, note, settings
from hypothesis import strategies as st

from partita.compiler.codegen import assemble
from partita.compiler.instructions import COMPUTE, Channel, PostCopy, PostReceive, PostSend, WaitSend
from partita.compiler.mesh import Mesh
from partita.compiler.program import StepPlan
from partita.compiler.schedules import communication
from partita.compiler.schedules.hardware_queues import queues
from partita.compiler.schedules.stream_invariants import check_launches
from partita.compiler.streams import SUMS, Launch, along, launches_of
from partita.compiler.text.streams import parse_streams, streams_text
from partita.dsl.diagnostic import Refused
from partita.runtime.data.binding import open_data
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.training import ClusterOf, VirtualRun
from partita.runtime.transports.lines import Deadlock
from partita.runtime.transports.virtual import VirtualCluster
from partita.runtime.verification.experiment import batches
from tests.compiler.schedules.test_waiting_hosts import NAMED, too_late
from tests.files import checked
from tests.marks import examples
from tests.programs import Program, programs, sharded_programs
from tests.runtime.transports.interleaved import StreamCluster

ALL = list(HealthCheck)
OFFLOADING = """\
axis batch = 8, embed = 4, ffn = 4
block mlp(x: [batch, embed]) {
  param up: [embed, ffn] ~ normal(0.5)
  param down: [ffn, embed] ~ normal(0.5)
  return x + dot(gelu(dot(rms_norm(x, over = embed), up, over = embed)), down, over = ffn)
}
model net(x: [batch, embed]) {
  param scale: [embed] ~ ones()
  let x = x * scale
  repeat 4 as layer { let x = mlp(x) }
  loss mean(x * x * scale)
}
mesh line(pipe = 2, data = 2)
layout split on line {
  stage layer -> pipe
  shard batch -> data
  shard param -> data
  offload layer
}
schedule s = interleaved_1f1b(microbatches = 4, chunks = 2)
train { layout = split schedule = s data = random() optimizer = sgd(lr = 0.05) steps = 2 precision = f64 }
"""


@frozen(eq=False)
class Trial:
    """A plan's ranks, which do the same again and again."""

    run: VirtualRun
    batches: Sequence[Mapping[str, torch.Tensor]]
    steps: int

    @classmethod
    def of(cls, plan: CompiledRun, cluster: ClusterOf, steps: int = 1) -> Trial:
        return cls(VirtualRun(plan, False, 0, cluster), batches(plan.program, plan.train.seed), steps)

    def outcome(self, seed: int = 0) -> list[torch.Tensor]:
        """All that steps find from the start, and an evaluation after them."""
        run = self.run
        run.cluster.begin(seed)
        for rank in run.ranks:
            rank.restart()
        found: list[torch.Tensor] = []
        for number, batch in enumerate(self.batches[: self.steps], 1):
            found += map(torch.tensor, (*run.step(number, batch), *run.metrics().values()))
            found += run.gradients().values()
        found += run.parameters().values()
        if run.plan.evaluation is not None:
            loss, metrics, _ = run.evaluate(*self.batches[2:])
            found += map(torch.tensor, (loss, *metrics.values()))
        for rank in run.ranks:
            assert not any(stage.in_flight for stage in rank.training.stages.values())
        return [each.clone() for each in found]


def same_in_any_order(plan: CompiledRun, seeds: Sequence[int], steps: int = 1) -> None:
    expected = Trial.of(plan, VirtualCluster, steps).outcome()
    trial = Trial.of(plan, streams_of(plan), steps)
    for seed in seeds:
        assert same(trial.outcome(seed), expected), seed


def may_share(plan: CompiledRun) -> bool:
    """Whether streams may share connections, and hosts wait in any action."""
    programs = [program.ranks for program in plan.programs if program is not None]
    return all(queues([each.instructions for each in own], [each.launches for each in own]) == 1 for own in programs)


def streams_of(plan: CompiledRun) -> ClusterOf:
    return StreamCluster if may_share(plan) else partial(StreamCluster, connections=(None,))


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def small(most: int) -> st.SearchStrategy[Program]:
    """Pipelines of up to 4 ranks, and other meshes of no more ranks than that."""
    return programs() | sharded_programs(most)


SHARED = """\
axis batch = 4, embed = 4, vocab = 6
model net(ids: i64[batch], targets: i64[batch]) {
  param table: [vocab, embed] ~ normal(0.5)
  let x = embedding(ids, table, over = vocab)
  repeat 4 as layer { param w: [embed] ~ ones()  let x = rms_norm(x, over = embed, scale = w) + x }
  loss cross_entropy(dot(x, table, over = embed), targets, over = vocab)
}
mesh line(pipe = 2)
layout split on line { stage layer -> pipe }
schedule s = interleaved_1f1b(microbatches = 4, chunks = 2)
train { layout = split schedule = s data = random() optimizer = adamw(lr = 0.05) steps = 2 precision = f64 clip = 0.5 }
"""
SEEDS = st.integers(0, 1 << 30)


@given(program=small(4), seed=SEEDS)
@settings(max_examples=3, deadline=None, suppress_health_check=ALL)
def test_any_order_computes_the_same_bits(program: Program, seed: int):
    note(program.text)
    plan = prepare(checked(program.text, "random.par"))
    reads_back(plan.program)
    same_in_any_order(plan, range(seed, seed + 6))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "steps"),
    [(programs(), 1), (programs(), 2), (sharded_programs(8), 1), (sharded_programs(4), 2)],
    ids=["pipelines", "pipelines-twice", "meshes", "small-meshes-twice"],
)
def test_any_order_computes_the_same_bits_at_length(kind: st.SearchStrategy[Program], steps: int):
    """Ten thousand orders in all."""

    @given(program=kind, seed=SEEDS)
    @settings(max_examples=125, deadline=None, suppress_health_check=ALL)
    def check(program: Program, seed: int) -> None:
        note(program.text)
        same_in_any_order(prepare(checked(program.text, "random.par")), range(seed, seed + 20), steps)

    check()


@pytest.mark.few(1)
@pytest.mark.parametrize("text", [OFFLOADING, SHARED], ids=["offloading", "shared"])
def test_many_orders_of_one_program(text: str):
    """Of copies, gathers that go ahead, reductions, chunks; and of parameters that stages share."""
    same_in_any_order(prepare(checked(text, "small.par")), range(25))


@pytest.mark.few(1)
@pytest.mark.parametrize("clip", [0.01, 100.0])
def test_updates_that_do_not_wait_are_taken_back_in_any_order(clip: float, tmp_path: Path):
    """While the sums of one step are under way, the next computes."""
    plan = prepare(checked(OFFLOADING.replace("steps = 2", f"steps = 4 clip = {clip} validate = after"), "late.par"))
    dataset = open_data(plan.program, plan.train, tmp_path)
    expected: dict[str, torch.Tensor] | None = None
    for seed in range(5):
        run = VirtualRun(plan, False, seed, StreamCluster if seed else VirtualCluster)
        run.train(dataset)
        found = run.parameters()
        expected = expected or found
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def reads_back(program: StepPlan) -> None:
    """The text of what ranks enqueue reads back as the same, to the last field."""
    found, streams, captured = parse_streams(streams_text(program))
    assert (streams, captured) == (program.streams, program.captured)
    expected = [(list(rank.instructions), list(rank.launches)) for rank in program.ranks]
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    "line",
    [
        "0 compute F0.0 of stage 0",  # no stream
        "1 compute F0.0 of stage 0 on compute",  # not the first
        "0 compute F0.0 of stage zero on compute",
        "0 run F0.0 of stage 0 on compute",
        "0 post-send F0.0 of stage 0 on compute",
        "0 compute F0.0 of stage 0 on ",
        "rank 2",
    ],
)
def test_a_line_that_is_wrong_is_named(line: str):
    with pytest.raises(ValueError, match=line):
        parse_streams(f"rank 0\n{line}\n")


# ---------------------------------------------------------------- races

DROPPED, EARLY, LATE, MOVED = "dropped", "early", "late", "moved"


@frozen
class Wrong:
    """One instruction of a rank that is enqueued otherwise."""

    kind: str
    rank: int
    index: int
    launch: Launch


def wrong(plan: CompiledRun) -> list[Wrong]:
    """Everything that a compiler might get wrong in one launch: an event that is not waited for, or another one is; an
    event that is recorded too early, or not yet; another stream.
    """
    found = []
    for rank in plan.program.ranks:
        streams = dict.fromkeys((COMPUTE, *(each.stream for each in rank.launches)))
        for i, launch in enumerate(rank.launches):
            for at, event_ in enumerate(launch.after):
                others = launch.after[:at] + launch.after[at + 1 :]
                found.append(Wrong(DROPPED, rank.rank, i, evolve(launch, after=others)))
                same = [j for j in range(event_) if rank.launches[j].stream == rank.launches[event_].stream]
                if same:
                    found.append(Wrong(EARLY, rank.rank, i, evolve(launch, after=(*others, same[-1]))))
                if i + 1 < len(rank.launches):
                    found.append(Wrong(LATE, rank.rank, i, evolve(launch, after=(*others, i + 1))))
            found += [Wrong(MOVED, rank.rank, i, evolve(launch, stream=each)) for each in streams]
    return [each for each in found if each.launch != plan.program.ranks[each.rank].launches[each.index]]


def with_launch(plan: CompiledRun, change: Wrong) -> CompiledRun:
    ranks = list(plan.program.ranks)
    launches = list(ranks[change.rank].launches)
    launches[change.index] = change.launch
    ranks[change.rank] = evolve(ranks[change.rank], launches=tuple(launches))
    program = evolve(plan.program, ranks=tuple(ranks))
    return evolve(plan, training=evolve(plan.training, program=program))


def lawful(plan: CompiledRun) -> bool:
    program = plan.program
    lists = [(rank.instructions, rank.launches) for rank in program.ranks]
    try:
        check_launches(*zip(*lists, strict=True), program.streams)
    except Refused:
        return False
    return True


def races(plan: CompiledRun, seeds: Sequence[int], expected: Sequence[torch.Tensor]) -> bool:
    """Whether any of these orders computes something else, or breaks."""
    try:
        trial = Trial.of(plan, streams_of(plan))
        return not all(same(trial.outcome(seed), expected) for seed in seeds)
    except Exception:  # a wrong program may raise anything
        return True


def test_launches_of_a_program_are_lawful_and_others_are_not():
    """But for copies, which may be on any stream beside what computes."""
    one = OFFLOADING.replace("interleaved_1f1b(microbatches = 4, chunks = 2)", "one_f_one_b(microbatches = 4)")
    plan = prepare(checked(one, "offloading.par"))
    assert lawful(plan)
    accepted = [each for each in wrong(plan) if lawful(with_launch(plan, each))]
    assert all(each.kind == MOVED for each in accepted)
    moved = [plan.program.ranks[each.rank].instructions[each.index] for each in accepted]
    assert {type(each) for each in moved} == {PostCopy}


def test_lists_that_are_captured_read_back_as_such():
    plain, captured = (prepare(checked(SHARED, "shared.par", more)).program for more in ((), ("train.graphs=true",)))
    assert not plain.captured
    assert captured.captured
    reads_back(plain)
    reads_back(captured)


def test_a_list_ends_behind_all_that_is_posted():
    """Without the wait for its last send, a rank's list cannot be captured."""
    program = prepare(checked(OFFLOADING, "offloading.par")).program
    lists = [rank.instructions for rank in program.ranks]
    check_launches(lists, [launches_of(own) for own in lists], program.streams)
    last = max(i for i, each in enumerate(lists[0]) if isinstance(each, WaitSend))
    lists[0] = (*lists[0][:last], *lists[0][last + 1 :])
    with pytest.raises(Refused, match="rank 0 ends its list before stream"):
        check_launches(lists, [launches_of(own) for own in lists], program.streams)


@cache
def offloading() -> tuple[CompiledRun, list[torch.Tensor]]:
    plan = prepare(checked(OFFLOADING, "offloading.par"))
    return plan, Trial.of(plan, VirtualCluster).outcome()


@given(data=st.data(), seed=SEEDS)
@examples(8, suppress_health_check=ALL)
def test_what_the_laws_accept_does_not_race(data: st.DataObject, seed: int):
    held_against_races(*offloading(), data, range(seed, seed + 4))


@pytest.mark.soak
@given(program=small(8), data=st.data(), seed=SEEDS)
@settings(max_examples=500, deadline=None, suppress_health_check=ALL)
def test_what_the_laws_accept_does_not_race_at_length(program: Program, data: st.DataObject, seed: int):
    plan = prepare(checked(program.text, "random.par"))
    expected = Trial.of(plan, VirtualCluster).outcome()
    held_against_races(plan, expected, data, range(seed, seed + 20))


def held_against_races(
    plan: CompiledRun, expected: Sequence[torch.Tensor], data: st.DataObject, seeds: Sequence[int]
) -> None:
    kind = data.draw(st.sampled_from([DROPPED, EARLY, LATE, MOVED]))
    all_ = [each for each in wrong(plan) if each.kind == kind]
    assume(all_)
    change = data.draw(st.sampled_from(all_))
    other = with_launch(plan, change)
    raced = races(other, seeds, expected)
    event(f"{change.kind}: {'lawful' if lawful(other) else 'refused'}, {'raced' if raced else 'ran'}")
    assert not (raced and lawful(other)), change


def sharing(plan: CompiledRun, streams: Mapping[str, str]) -> CompiledRun:
    """A plan whose channels are on these streams, by the direction of the channel and whether a rank sends."""
    ranks = []
    for rank in plan.program.ranks:
        launches = list(rank.launches)
        for i, instruction in enumerate(rank.instructions):
            if isinstance(instruction, (PostSend, PostReceive)):
                end = f"{type(instruction).__name__} {instruction.transfer.channel.direction}"
                launches[i] = evolve(launches[i], stream=streams[end])
        ranks.append(evolve(rank, launches=tuple(launches)))
    program = evolve(plan.program, ranks=tuple(ranks))
    return evolve(plan, training=evolve(plan.training, program=program))


ENDS = [f"{post} {direction}" for post in ("PostSend", "PostReceive") for direction in ("forward", "backward")]


@given(program=programs(), streams=st.tuples(*[st.sampled_from("abcd")] * 4))
@settings(max_examples=4, deadline=None, suppress_health_check=ALL)
def test_channels_that_share_a_stream_are_lawful_unless_ranks_then_wait_in_a_circle(
    program: Program, streams: tuple[str, ...]
):
    note(program.text)
    plan = sharing(prepare(checked(program.text, "random.par")), dict(zip(ENDS, streams, strict=True)))
    assert stuck(plan, None) != lawful(plan)


def stuck(plan: CompiledRun, connections: int | None) -> bool:
    """Whether ranks deadlock whose hosts wait in all actions: one order tells of all."""
    try:
        Trial.of(plan, partial(StreamCluster, waits=(1.0,), connections=(connections,))).outcome()
    except Deadlock:
        return True
    return False


# ---------------------------------------------------------------- hosts that wait, and streams that share connections

SMALL = """\
axis batch = 8, embed = 4, ffn = 4
model net(x: [batch, embed]) {
  param scale: [embed] ~ ones()
  repeat 4 as layer {
    param up: [embed, ffn] ~ normal(0.5)
    param down: [ffn, embed] ~ normal(0.5)
    let x = x + dot(gelu(dot(x * scale, up, over = embed)), down, over = ffn)
  }
  loss mean(x * x)
}
"""
TRAIN = "train { layout = split schedule = s data = random() optimizer = sgd(lr = 0.05) steps = 1 precision = f64 }"
LAYOUTS = {
    "stages": "",
    "data": "shard batch -> data",
    "zero": "shard batch -> data  shard param -> data",
    "tensor": "shard ffn -> data",
    "offload": "offload layer",
}
WHERE = {name: list(LAYOUTS)[i % len(LAYOUTS)] for i, name in enumerate(NAMED)}


def small_plan(name: str, layout: str) -> CompiledRun:
    """A program that no law has checked."""
    data = ", data = 2" if "data" in LAYOUTS[layout] else ""
    chunks = ", chunks = 2" if name in ("interleaved_1f1b", "looped_bfs") else ""
    placed = f"mesh line(pipe = 2{data})\nlayout split on line {{ stage layer -> pipe  {LAYOUTS[layout]} }}\n"
    text = f"{SMALL}{placed}schedule s = {name}(microbatches = 4{chunks})\n{TRAIN}\n"
    with patch.object(assemble, "check_launches", lambda *_: None):
        return prepare(checked(text, "small.par"))


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "layout"), WHERE.items())
def test_schedules_run_in_any_order_whenever_hosts_wait(name: str, layout: str):
    plan = small_plan(name, layout)
    assert may_share(plan)
    same_in_any_order(plan, range(16))


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMED)
def test_schedules_run_in_any_order_whenever_hosts_wait_at_length(name: str, layout: str):
    """Ten thousand orders in all."""
    same_in_any_order(small_plan(name, layout), range(200))


AS_IT_IS, AT_ONCE, LATE_POSTS = "as it is", "at once", "late"
# What becomes unsafe where all receives are in the way of the next action, and where they are not posted in time.
UNSAFE = {
    AS_IT_IS: set[str](),
    AT_ONCE: set(NAMED) - {"zb_h2", "zb_v"},
    LATE_POSTS: set(NAMED) - {"gpipe", "one_f_one_b", "zb_h1"},
}


@pytest.mark.few(10)
@pytest.mark.parametrize("how", UNSAFE)
@pytest.mark.parametrize("name", NAMED)
def test_ranks_deadlock_where_a_schedule_is_said_to_be_unsafe_and_nowhere_else(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
):
    """Of hosts that wait, and of streams that share a connection."""
    if how == LATE_POSTS:
        monkeypatch.setattr(communication, "_receive_in_time", too_late)
    plan = small_plan(name, "stages")
    if how == AT_ONCE:
        plan = with_receives_at_once(plan, lambda: True)
    safe = name not in UNSAFE[how]
    assert lawful(plan) == may_share(plan) == safe
    assert [stuck(plan, None), stuck(plan, 1)] == [not safe] * 2


def with_receives_at_once(plan: CompiledRun, chosen: Callable[[], bool]) -> CompiledRun:
    """With all receives of some channels in the way of the next action."""
    ranks = []
    for rank in plan.program.ranks:
        channels = {stream for stream in dict.fromkeys(each.stream for each in rank.launches) if chosen()}
        launches = [evolve(each, behind=None) if each.stream in channels else each for each in rank.launches]
        ranks.append(evolve(rank, launches=tuple(launches)))
    return evolve(plan, training=evolve(plan.training, program=evolve(plan.program, ranks=tuple(ranks))))


@pytest.mark.parametrize("connections", [None, 1])
def test_a_transfer_behind_another_of_its_channel_holds_up_its_connection(connections: int | None):
    """Two ranks post two receives, and then two sends."""
    cluster = StreamCluster(2, connections=(connections,))
    channels = Channel(0, 1, "forward"), Channel(1, 0, "forward")

    def steps(rank: int) -> Iterator[None]:
        transport = cluster.transport(rank)
        transport.open(Mesh((("pipe", 2),), "pipe"), channels)
        posts = [(channels[1 - rank], transport.receive)] * 2 + [(channels[rank], transport.send)] * 2
        streams = transport.streams(torch.device("cpu"))
        handles = [streams.launch(str(of), partial(post, of), torch.zeros(1)) for of, post in posts]
        for each in handles:
            while not each.done():
                yield

    with pytest.raises(Deadlock) if connections else nullcontext():
        cluster.run([steps(0), steps(1)])


@given(program=programs(), data=st.data())
@settings(max_examples=4, deadline=None, suppress_health_check=ALL)
def test_the_verdicts_are_those_of_the_model(program: Program, data: st.DataObject):
    verdicts_are_those_of_the_model(program, data)


@pytest.mark.soak
@given(program=programs() | sharded_programs(8), data=st.data())
@settings(max_examples=500, deadline=None, suppress_health_check=ALL)
def test_the_verdicts_are_those_of_the_model_at_length(program: Program, data: st.DataObject):
    verdicts_are_those_of_the_model(program, data)


def verdicts_are_those_of_the_model(program: Program, data: st.DataObject) -> None:
    note(program.text)
    plan = with_receives_at_once(prepare(checked(program.text, "random.par")), lambda: data.draw(st.booleans()))
    verdicts = lawful(plan), may_share(plan)
    event(f"hosts may wait: {verdicts[0]}, streams may share: {verdicts[1]}")
    found = stuck(plan, None), stuck(plan, 1)
    assert found == tuple(not each for each in verdicts)


@pytest.mark.parametrize(("name", "stream"), [(along("data"), COMPUTE), (SUMS, along("data")), (SUMS, "0->1 forward")])
def test_other_communicators_have_streams_of_their_own(name: str, stream: str):
    plan = prepare(checked(OFFLOADING, "offloading.par"))
    program = evolve(plan.program, streams={**plan.program.streams, name: stream})
    assert not lawful(evolve(plan, training=evolve(plan.training, program=program)))
