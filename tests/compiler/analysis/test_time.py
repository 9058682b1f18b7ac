"""What hides at the ends of a step, in the prediction."""

from __future__ import annotations

from math import inf

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from partita.compiler.analysis.execution import BLOCKING, OURS, Execution
from partita.compiler.analysis.time import StepEpilogue, StreamSimulation, occupied, predict, silenced, stage_seconds
from partita.compiler.analysis.traffic import launch_seconds
from partita.compiler.costs.devices import DEVICES
from partita.compiler.costs.links import LINKS, Link
from partita.compiler.costs.nodes import seconds
from partita.compiler.graph import Node, Phase
from partita.compiler.instructions import Compute, Instruction
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.pieces import Join, Piece
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.passes.shard.resharding import Resharding
from partita.compiler.pipeline import schedule_spec
from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.schedules.simulator import Costs, equal_costs, simulate
from partita.compiler.state import Scheduled
from partita.testing import costs, random_orders, shapes
from partita.testing.strategies import named_schedules
from tests.files import checked
from tests.marks import examples

FILE = """
axis batch = 32, width = 64, hidden = 256
model net(x: [batch, width], y: [batch, width]) {{
  let h = x
  repeat 6 as layer {{
    param up: [width, hidden] ~ kaiming()
    param down: [hidden, width] ~ kaiming()
    let h = h + dot(relu(dot(h, up, over = width)), down, over = hidden)
  }}
  loss mse(h, y)
}}
mesh cluster(data = 2, pipe = {ranks}) {{ device = device(flops = 1GFLOP/s, memory = 1GiB, bandwidth = 10GB/s) }}
layout split on cluster {{ shard batch -> data  shard state -> data  stage layer -> pipe }}
schedule s = {schedule}(microbatches = 4)
train {{ data = random()  optimizer = adamw(lr = 1e-2)  steps = 4 }}
"""


def compiled(bandwidth: float, latency: float = 1e-5, ranks: int = 1, schedule: str = "one_f_one_b") -> Scheduled:
    text = FILE.format(ranks=ranks, schedule=schedule)
    link = f"link = [data -> link(bandwidth = {bandwidth:.0f}B/s, latency = {latency * 1e9:.0f}ns)]"
    return schedule_spec(checked(text.replace("bandwidth = 10GB/s) }", f"bandwidth = 10GB/s) {link} }}"), "net.par"))


@given(
    st.sampled_from((1, 2, 3)),
    st.sampled_from(("one_f_one_b", "zb_h1", "zb_v", "gpipe")),
    st.floats(4, 11),
)
@examples(3, suppress_health_check=list(HealthCheck))
def test_what_hides_is_what_a_step_is_shorter_by(ranks: int, schedule: str, magnitude: float) -> None:
    state = compiled(10**magnitude, ranks=ranks, schedule=schedule)
    prediction, waiting = predict(state), predict(state, BLOCKING)
    silent = predict(silenced(state))
    assert silent.step_time * (1 - 1e-9) <= prediction.step_time <= waiting.step_time * (1 + 1e-9)
    assert prediction.exposed == pytest.approx(prediction.step_time - silent.step_time, abs=1e-12)
    assert silent.exposed == pytest.approx(0.0, abs=1e-12)


def test_a_slow_link_is_the_step_and_a_fast_one_shows_its_last_message() -> None:
    """Of one rank of the pipeline: first all is gathered, and the last F goes on; then all is reduced."""
    state = compiled(1e4)
    bytes = sum(each.type.bytes for each in state.plan.parameters)
    ends = StepEpilogue(state, state.plan.ranks[0])
    gathered = bytes / 2 / 1e4  # of two ranks, each sends its half
    assert ends.ready[0] == pytest.approx(gathered, rel=0.05)
    seconds = stage_seconds(state)
    assert predict(state).exposed == pytest.approx(2 * gathered - seconds[0, "F"] - seconds[0, "BW"], rel=0.05)
    assert predict(state).mfu == pytest.approx(state.flops / (2 * 1e9 * predict(state).step_time))  # of two devices
    # The first message that is gathered has three of the twelve tensors, the last that is reduced has two.
    fast = compiled(1e9, 1e-7)
    message = 64 * 256 * 4 / 2 / 1e9
    assert message < predict(fast).exposed < 5.5 * message
    waiting = predict(fast, BLOCKING).step_time - predict(silenced(fast)).step_time
    assert waiting == pytest.approx(24 * message, rel=0.1)


def test_statistics_follow_the_last_action_at_a_fixed_distance() -> None:
    state = compiled(1e6)
    ends = StepEpilogue(state, state.plan.ranks[0])
    assert ends.reduced({0: 0.75}) == pytest.approx(ends.reduced({0: 0.5}) + 0.25)


def test_nothing_is_waited_for_that_is_not_gathered() -> None:
    state = schedule_spec(checked(FILE.format(ranks=1, schedule="gpipe").replace("shard state -> data", ""), "net.par"))
    assert StepEpilogue(state, state.plan.ranks[0]).ready == {}
    free = evolve(state, mesh=state.mesh.joined_by(Link("nothing", inf, 0.0)))
    assert predict(free).exposed == pytest.approx(0.0, abs=1e-12)


def in_groups(sync: str, rows: int) -> Scheduled:
    """Of one rank of the data and two of tensors, whose link is slow."""
    text = FILE.format(ranks=1, schedule="gpipe").replace("batch = 32", f"batch = {rows}")
    text = text.replace("data = 2", "data = 1, tensor = 2").replace("shard state -> data", "shard hidden -> tensor")
    link = "link = [tensor -> link(bandwidth = 1MB/s, latency = 1us)]"
    text = text.replace("bandwidth = 10GB/s) }", f"bandwidth = 10GB/s) {link} }}")
    return schedule_spec(checked(text.replace("steps = 4", f"steps = 4 {sync}"), "net.par"))


def test_a_rank_trains_its_groups_one_after_the_other_and_averages_them_once_in_so_many_steps() -> None:
    alone = predict(in_groups("", 16))
    every, rarely = (in_groups(f"sync = local(groups = 2, every = {each})", 32) for each in (1, 5))
    often, seldom = predict(every), predict(rarely)
    assert often.average == pytest.approx(5 * seldom.average)
    assert seldom.average > 0
    for found, state in ((often, every), (seldom, rarely)):
        assert found.step_time - found.fixed == pytest.approx(2 * (alone.step_time - alone.fixed) + found.average)
        assert found.exposed == pytest.approx(found.step_time - predict(silenced(state)).step_time)
        assert found.exposed > 0.5 * found.step_time


def test_a_rank_posts_a_collective_and_waits_for_it() -> None:
    state = compiled(1e6)
    links = tuple((axis, evolve(link, post=0.25)) for axis, link in state.mesh.links)
    walk = StreamSimulation(evolve(state, mesh=evolve(state.mesh, links=links)), OURS)
    gather = next(node for node in state.partitioned.stages[0].nodes if isinstance(node.op, Collective))
    walk.run([gather])
    assert walk.now == 0.5
    assert walk.arrived > 0.5


GPUS = """
axis batch = 65_536, width = 1024, hidden = 4096
model net(x: [batch, width], y: [batch, width]) {{
  let h = x
  repeat 4 as layer {{
    param up: [width, hidden] ~ kaiming()
    param down: [hidden, width] ~ kaiming()
    let h = h + dot(relu(dot(h, up, over = width)), down, over = hidden)
  }}
  loss mse(h, y)
}}
mesh cluster(data = 4, pipe = 2) {{ device = a100  link = [data -> ib200, pipe -> ib200] }}
layout split on cluster {{ shard batch -> data  shard {what} -> data  stage layer -> pipe  {also} }}
schedule s = one_f_one_b(microbatches = 4)
train {{ data = random()  optimizer = adamw(lr = 1e-2)  precision = bf16  steps = 4 }}
"""


def tensor_parallel() -> Scheduled:
    text = GPUS.format(what="state", also="").replace("data = 4", "data = 2, tensor = 4")
    text = text.replace("link = [data", "link = [tensor -> nvlink4, data")
    text = text.replace("batch = 65_536", "batch = 1024, seq = 64").replace("[batch,", "[batch, seq,")
    rules = "shard hidden, seq -> tensor  overlap tensor in 4  "
    return schedule_spec(checked(text.replace("shard state", f"{rules}shard state"), "net.par"))


def on_gpus(what: str = "state", also: str = "") -> Scheduled:
    return schedule_spec(checked(GPUS.format(what=what, also=also), "net.par"))


def test_what_runs_beside_a_collective_is_slower_but_no_slower_than_behind_it() -> None:
    state = on_gpus("param")
    links = tuple((name, evolve(link, blocks=0)) for name, link in state.mesh.links)
    free = evolve(state, mesh=evolve(state.mesh, links=links))
    alone, beside, behind = predict(free), predict(state), predict(state, BLOCKING)
    assert alone.step_time < beside.step_time <= behind.step_time
    assert predict(free, BLOCKING).step_time == pytest.approx(behind.step_time)


def test_a_product_beside_a_collective_has_the_speed_that_is_left() -> None:
    """10 ms of work beside 4 ms of 24 blocks: 4 ms at 1 / 1.4 of the speed, then the rest."""
    state = on_gpus()
    links = {"ib200": evolve(LINKS["ib200"], blocks=24)}
    walk = StreamSimulation(state, OURS, 1.0, {}, {"ib200": 1.004}, links)
    assert walk.after(0.01) == pytest.approx(1.004 + 0.01 - 0.004 / 1.4)
    assert walk.after(0.002) == pytest.approx(1.0 + 0.002 * 1.4)
    assert StreamSimulation(state, OURS, 2.0, {}, {"ib200": 1.004}, links).after(0.01) == pytest.approx(2.01)
    measured = {"ib200": Link("profiled", 1e9, 1e-6, beside=0.25)}
    assert StreamSimulation(state, OURS, 1.0, {}, {"ib200": 1.004}, measured).after(0.01) == pytest.approx(
        1.004 + 0.01 - 0.001
    )


def test_systems_run_otherwise_than_ours() -> None:
    """Each difference does what it says, to the steps in which it is."""
    state, sharded = on_gpus(also="recompute layer"), on_gpus("param")

    def step(execution: Execution, state: Scheduled = state) -> float:
        return predict(state, execution).step_time

    elements = sum(each.value.type.elements for stage in state.partitioned.stages for each in stage.accumulators)
    rate = state.device.bandwidth * state.device.streaming
    added = [step(Execution(sum_bytes=bytes)) for bytes in (0.0, 10.0, 18.0)]
    assert added[0] < added[1] < added[2]
    assert added[0] <= step(OURS) < added[1]  # products add what they make
    assert added[2] - added[1] == pytest.approx(5 * elements / 2 * 8 / rate, rel=0.2)  # four microbatches, two stages
    assert step(Execution(reductions=0.5)) < step(OURS) < step(Execution(reductions=2.0))
    assert step(Execution(whole=True)) > step(OURS)
    assert step(Execution(whole=True), sharded) == step(OURS, sharded)  # which makes nothing again
    once, twice = Execution(exchanges=1), Execution(exchanges=2)
    assert step(OURS) <= step(once) < step(twice)


def of_pieces(state: Scheduled) -> tuple[Node, Node]:
    """What gathers a piece, and a product of it."""
    nodes = [node for node in state.partitioned.stages[0].nodes if node.phase is Phase.FORWARD]
    pieces = {node.outputs[0]: node for node in nodes if isinstance(node.op, Collective) and not node.op.combines}
    product = next(node for node in nodes if isinstance(node.op, Dot) and not pieces.keys().isdisjoint(node.inputs))
    return next(pieces[value] for value in product.inputs if value in pieces), product


def run(state: Scheduled, execution: Execution, *nodes: Node) -> float:
    walk = StreamSimulation(state, execution)
    walk.run(nodes)
    return walk.arrived


def test_products_of_layers_have_operands_of_eight_bits_which_are_cast_once() -> None:
    """Of what a pass makes; parameters are there. What is in no layer is as it was."""
    state = evolve(on_gpus(), device=DEVICES["h100"])
    nodes = state.partitioned.stages[0].nodes
    first, second = [node for node in nodes if isinstance(node.op, Dot) and node.phase is Phase.FORWARD][:2]
    wide, narrow = (run(state, Execution(narrow=each), first) for each in (False, True))
    x = next(value for value in first.inputs if value.type.has("batch"))
    rate = state.device.bandwidth * state.device.streaming
    assert wide == seconds(first, state.device)
    cast = 4 * x.type.elements / rate
    assert narrow == pytest.approx(seconds(first, state.device.narrowed()) + cast)
    assert run(state, Execution(narrow=True), first, first) == pytest.approx(2 * narrow - cast)
    outside = evolve(second, scope="net")
    assert run(state, Execution(narrow=True), outside) == run(state, OURS, outside)


def test_what_products_read_in_eight_bits_is_gathered_in_eight_bits() -> None:
    state = evolve(tensor_parallel(), device=DEVICES["h100"])
    gather, product = of_pieces(state)
    added = next(
        node for node in state.partitioned.stages[0].nodes if isinstance(node.op, Collective) and node.op.combines
    )
    latency, moving = launch_seconds(Resharding(state.mesh), gather, gather.op)
    ways = (OURS, Execution(narrow=True))
    wide, narrow = (run(state, each, gather, product) - run(state, each, product) for each in ways)
    assert (wide, narrow) == pytest.approx((latency + moving, latency + moving / 2))
    wide, narrow = (run(state, each, product, added) - run(state, each, product) for each in ways)
    assert wide == pytest.approx(narrow)


def test_pieces_of_other_systems_are_sent_by_engines_and_multiplied_beside_one_another() -> None:
    """Copies to and from pieces take no time, products those that fill the device, and messages slow nothing down."""
    state, buffers = evolve(tensor_parallel(), device=DEVICES["h100"]), Execution(userbuffers=True)
    nodes = state.partitioned.stages[0].nodes
    gather, product = of_pieces(state)
    filled = evolve(state.device, products=evolve(state.device.products, filled=True))
    assert run(state, buffers, product) == seconds(product, filled) < run(state, OURS, product)
    assert all(run(state, buffers, node) == 0 for node in nodes if isinstance(node.op, (Piece, Join)))
    assert any(run(state, OURS, node) > 0 for node in nodes if isinstance(node.op, (Piece, Join)))
    product = evolve(product, inputs=tuple(evolve(each) for each in product.inputs))  # it waits for nothing
    beside = []
    for execution in (buffers, OURS):
        walk = StreamSimulation(state, execution)
        walk.run([gather, product])
        beside.append(walk.now - run(state, execution, product))
    assert beside[0] == pytest.approx(0, abs=1e-12)
    assert beside[1] > 1e-6
    whole = evolve(on_gpus(), device=DEVICES["h100"])
    assert predict(whole, buffers).step_time == predict(whole, OURS).step_time  # which has no pieces


def test_what_microbatches_send_is_hidden_by_multiprocessors_that_multiply_nothing() -> None:
    """What is sent at the end of a step is not."""
    state, apart = tensor_parallel(), Execution(apart=0.25)
    gather, product = of_pieces(state)
    assert run(state, apart, gather) == 0 < run(state, OURS, gather)
    assert run(state, apart, gather, product) == pytest.approx(run(state, OURS, product) / 0.75)
    pointwise = next(node for node in state.partitioned.stages[0].nodes if isinstance(node.op, Pointwise))
    assert run(state, apart, pointwise) == run(state, OURS, pointwise) > 0
    (_, reduction), *_ = state.update.reduce
    assert run(state, apart, *reduction) == run(state, OURS, *reduction) > 0


def chained(schedule: Schedule, steps: int, prices: Costs) -> list[float]:
    """The makespans of 1, 2, … steps that follow each other on each rank, which meets nobody between them."""
    programs = communicate(schedule, default_messages(schedule.stages))
    counts: dict[object, int] = {}
    for each in programs:
        for instruction in each:
            if not isinstance(instruction, Compute):
                channel = instruction.transfer.channel
                counts[channel] = max(counts.get(channel, 0), instruction.transfer.index + 1)

    def moved(instruction: Instruction, step: int) -> Instruction:
        if isinstance(instruction, Compute):
            return instruction
        transfer = instruction.transfer
        index = transfer.index + step * counts[transfer.channel]
        microbatch = transfer.microbatch + step * schedule.microbatches
        return evolve(instruction, transfer=evolve(transfer, microbatch=microbatch, index=index))

    found = []
    for count in range(1, steps + 1):
        lines = [[moved(each, step) for step in range(count) for each in line] for line in programs]
        found.append(simulate(lines, prices).makespan)
    return found


@given(st.one_of(random_orders(), named_schedules(shapes(5, 2, 10))), st.data())
@examples(15, suppress_health_check=list(HealthCheck))
def test_steps_follow_each_other_at_the_longest_occupancy(schedule: Schedule, data: st.DataObject) -> None:
    prices = data.draw(costs(schedule.stages))
    once = simulate(communicate(schedule, default_messages(schedule.stages)), prices)
    period = max(occupied(once, rank) for rank in range(schedule.ranks))
    *_, before, last = chained(schedule, 5, prices)
    assert last - before <= period * (1 + 1e-9)
    assert once.cost <= period


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "saved"), [("zb_h2", 7.0), ("zb_v", 3.5), ("one_f_one_b", 0.0)])
def test_what_is_saved_is_the_slant_of_the_schedule(name: str, saved: float) -> None:
    """In forwards of a rank, on 8 ranks."""
    schedule = make(name, 8, 2 if name == "zb_v" else 1, 24)
    times = chained(schedule, 4, equal_costs())
    assert times[0] - (times[-1] - times[-2]) == saved * (2 if name == "zb_v" else 1)


SMALL = """axis batch = 8, embed = 64
model m(x: [batch, embed]) {
  let h = x
  repeat 4 as layer {
    param w: [embed, more] ~ normal(0.1)
    let h = rename(gelu(dot(h, w, over = embed)), more -> embed)
  }
  loss mean(h)
}
axis more = embed
mesh one(data = 1) { device = h100 }
layout whole on one { shard batch -> data }
schedule s = one_f_one_b(microbatches = 2)
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 compile = false precision = bf16 }
"""


def test_an_action_takes_as_long_as_the_host_launches_it():
    """With kernels as short as these; unless the step is a graph."""
    plain, whole = (schedule_spec(checked(SMALL, "m.par", more)) for more in ((), ("train.graphs=true",)))
    (stage,) = plain.partitioned.stages
    walk = StreamSimulation(plain, OURS)
    walk.run([node for node in stage.nodes if node.phase is Phase.FORWARD])
    assert walk.launches == 4 * 2 + 3  # a product and a gelu each; the mean, a product and a sum, is added to the loss
    slow, quick = (stage_seconds(state)[0, "F"] for state in (plain, whole))
    assert slow == pytest.approx(walk.launches * plain.device.launching + plain.device.action)
    assert quick == pytest.approx(walk.arrived + plain.device.action)
    assert quick < slow
    assert predict(whole).step_time < predict(plain).step_time
    large = ("batch=8192", "embed=8192")
    one, other = (schedule_spec(checked(SMALL, "m.par", (*large, *more))) for more in ((), ("train.graphs=true",)))
    assert predict(one).step_time == predict(other).step_time


def test_collectives_are_launched_too():
    state = compiled(1e9)
    (stage,) = state.partitioned.stages
    nodes = [node for node in stage.nodes if node.phase is Phase.PROLOGUE]
    walk = StreamSimulation(state, OURS)
    walk.run(nodes)
    sent = sum(isinstance(node.op, Collective) for node in nodes)
    assert walk.launches >= sent > 0
