"""Collectives at the ends of a step: when they start, in which order, and how many go together."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given

from partita.compiler.codegen.plan import functions_of
from partita.compiler.graph import Phase as Phases
from partita.compiler.graph import Value
from partita.compiler.ops.communication import Receive
from partita.compiler.passes.buckets import BUCKET_BYTES, SMALL_BYTES, bucket_limits
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from tests.files import checked
from tests.marks import examples
from tests.programs import Program, sharded_programs

WEIGHTS = ("first", "second", "last")
# The weights are declared in another order than they are read in.
FILE = """
axis batch = 8, width = 256, hidden = 512, out = 256
model net(x: [batch, width], y: [batch, out]) {{
  param last: [width, out] ~ kaiming()
  param first: [width, hidden] ~ kaiming()
  param second: [hidden, width] ~ kaiming()
  loss mse(dot(dot(dot(x, first, over = width), second, over = hidden), last, over = width), y)
}}
mesh pair(data = 2) {{ link = [data -> link(bandwidth = {bandwidth}, latency = {latency})] }}
layout split on pair {{ shard batch -> data  shard state -> data }}
train {{ data = random()  optimizer = adamw(lr = 1e-2)  steps = 2 }}
"""


def compiled(bandwidth: str, latency: str) -> Compilation:
    return compile_spec(checked(FILE.format(bandwidth=bandwidth, latency=latency), "net.par"))


def messages(state: Compilation) -> tuple[list[list[str]], list[list[str]]]:
    """The tensors that are gathered, and that are reduced, message by message."""
    (of,) = functions_of(state.partitioned, state.schedule)
    reduced = of.reduced(state.schedule.last_kind(0), dict(state.update.reduce)[0], state.update.totals[0])
    return tuple(
        [[next(name for name in WEIGHTS if name in value.name) for value in node.inputs] for node in nodes]
        for nodes in (of.gathered.collectives, reduced.collectives)
    )


def test_messages_are_in_the_order_of_reads_and_of_last_contributions() -> None:
    gathered, reduced = messages(compiled("1GB/s", "10ns"))
    assert gathered == [["first"], ["second"], ["last"]]
    assert reduced == [["last"], ["second"], ["first"]]
    gathered, reduced = messages(compiled("1GB/s", "1ms"))
    assert gathered == [["first", "second", "last"]]
    assert reduced == [["last", "second", "first"]]


@pytest.mark.parametrize(
    ("latency", "bandwidth", "bytes"),
    [("1us", "1GB/s", 100_000), ("1ns", "1GB/s", SMALL_BYTES), ("1ms", "1GB/s", BUCKET_BYTES)],
)
def test_a_message_takes_a_hundred_times_its_latency(latency: str, bandwidth: str, bytes: int) -> None:
    assert bucket_limits(compiled(bandwidth, latency).mesh)("data") == pytest.approx(bytes)


@given(sharded_programs())
@examples(3, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))
def test_every_node_runs_where_what_it_reads_is_there(program: Program) -> None:
    """What starts, what follows and the rest are all that is needed, each after what it reads."""
    state = compile_spec(checked(program.text, "random.par"))
    reduce = dict(state.update.reduce)
    for of in functions_of(state.partitioned, state.schedule):
        given = {each.value for each in (*of.stage.parameters, *of.stage.inputs)}
        literals = {value for node in of.stage.nodes if node.op.literal is not None for value in node.outputs}
        opening = {value for node in of.prologue for value in node.outputs} | given | literals
        opening |= {value for node in of.gathered.collectives for value in node.outputs}
        for node in of.opening:
            assert isinstance(node.op, Receive) or opening.issuperset(node.inputs)
            opening.update(node.outputs)
        made = {v for node in of.stage.nodes if node.phase is Phases.PROLOGUE for v in node.outputs}
        assert opening >= of.read & made
        if of.stage.index in reduce:
            totals = state.update.totals[of.stage.index]
            kind = state.schedule.last_kind(of.stage.index)
            reduced = of.reduced(kind, reduce[of.stage.index], totals)
            there: set[Value] = {each.value for each in of.stage.accumulators}
            for node in (*reduced.start, *reduced.others, *reduced.follow):
                assert there.issuperset(node.inputs)
                there.update(node.outputs)
            assert there.issuperset(totals)
