"""The executor with functions that communicate: a program of two stages written by hand, on a mesh of data × pipe."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from partita.compiler.instructions import (
    Channel,
    Compute,
    Message,
    PostReceive,
    PostSend,
    Transfer,
    WaitReceive,
    WaitSend,
)
from partita.compiler.layout import Layout
from partita.compiler.mesh import Mesh
from partita.compiler.program import (
    AccumulatorRecord,
    InputPart,
    InputRecord,
    ParameterRecord,
    Program,
    RankProgram,
    StageProgram,
    StateRecord,
)
from partita.compiler.schedules.schedule import Action
from partita.compiler.streams import communicators, launches_of
from partita.dsl.spec import Call
from partita.dsl.types import Axis, Type
from partita.runtime.context import Context, begun
from partita.runtime.executor import Executor
from partita.runtime.stages import ParameterStore, load_source
from partita.runtime.transports.virtual import VirtualCluster

CPU = torch.device("cpu")
MESH = Mesh((("data", 2), ("pipe", 2)), "pipe")
ROWS, WIDTH, MICROBATCHES = 8, 4, 2
X = Type("f64", (Axis("batch", ROWS), Axis("width", WIDTH)))
LOCAL = ROWS // MICROBATCHES // 2

# y = x w0 on stage 0; loss = sum(y w1) on stage 1; both parameters are stored split over data. The gradient of w1
# is y's sum, scattered; stage 0 accumulates how many rows it has seen. All that can be a generator is one here, but
# stage 1's forward.
SOURCE = """
import torch

log = []

def g0(m, c):
    log.append("gathering")
    return (c.all_gather("data", (m[0],), (0,)),)

def p0(m, x, c):
    return [None]

def o0(p, h, f, a, c):
    assert p == [None]
    (w,) = yield h[0]
    p[0] = w
    yield from f0(p, f, a, c)

def f0(p, f, a, c):
    log.append("F")
    y = (f[0] * p[0]).contiguous()
    f[1] = y
    (rows,) = yield c.all_reduce("data", (torch.tensor(float(len(f[0])), dtype=torch.float64),))
    a[0].add_(rows)

def c0(p, f, a, c):
    yield from f0(p, f, a, c)
    log.append("begun")
    return (c.all_reduce("data", (a[0],)),)

def r0(a, h, c):
    (rows,) = yield h[0]
    log.append("ended")
    return (rows / 2,)

def p1(m, x, c):
    return (m[0],)

def f1(p, f, a, c):
    a[0].add_(f[0].sum(0))

def c1(p, f, a, c):
    f1(p, f, a, c)
    return (c.reduce_scatter("data", (a[0],), (0,)),)

def r1(a, h, c):
    (total,) = yield h[0]
    return (total,)

def finish0(t, c):
    return (t[0] / 2,)

def finish1(t, c):
    (squares,) = yield c.all_reduce("data", ((t[0] ** 2).sum(),))
    return (squares / 2,)

def update1(m, t, v, s, c):
    (whole,) = yield c.all_gather("data", (t[0],), (0,))
    m[0].sub_(c.rates[0] * t[0])
    v[0].copy_(t[0])
    assert c.coordinates["pipe"] == 1 and whole.shape[0] == 2 * t[0].shape[0]
"""


def program() -> Program:
    vector = Type("f64", (Axis("width", WIDTH),))
    local = Type("f64", (Axis("batch", LOCAL), Axis("width", WIDTH)))
    message = Message("y", 0, 1, "forward")
    channel = Channel(0, 1, "forward")
    transfers = [Transfer(channel, message, m, m) for m in range(MICROBATCHES)]
    split = Layout((("data", "width"),))
    rows = InputPart("x", "batch", Layout((("data", "batch"),)))

    def parameter(name: str, stage: int, states: tuple[str, ...]) -> ParameterRecord:
        return ParameterRecord(
            name,
            vector,
            split,
            split,
            Call("ones", {}),
            (1, 1),
            (stage,),
            tuple(StateRecord(each, vector) for each in states),
        )

    def stage(index: int, **fields) -> StageProgram:
        common = {
            "full_inputs": (),
            "local_transfers": (),
            "released": frozenset(),
            "saved": 0,
            "gathering": 0,
            "opening": 0,
            "in_flight": 0,
            "reducing": 0,
            "reduced": 0,
            "kept": 0,
            "offloaded": 0,
            "copied": (),
            "shared": {},
            "peaks": {},
        }
        names = {kind: f"{kind.lower()}{index}" for kind in ("PFCR" if index else "GPOFCR")}
        return StageProgram(index=index, rank=index, chunk=0, functions=names, frame=2, **common, **fields)

    stages = (
        stage(
            0,
            parameters=("w0",),
            inputs=(rows,),
            input_slots=(0,),
            sends={message: 1},
            receives={},
            accumulators=(AccumulatorRecord("rows", Type("f64", ()), None, False),),
        ),
        stage(
            1,
            parameters=("w1",),
            inputs=(),
            input_slots=(),
            sends={},
            receives={message: (0, local)},
            accumulators=(AccumulatorRecord("d(w1)", vector, "w1", False),),
        ),
    )
    sending: list = []
    receiving: list = []
    for m, transfer in enumerate(transfers):
        sending += [Compute(Action("F", 0, m), 0), PostSend(transfer)]
        receiving += [PostReceive(transfer), WaitReceive(transfer), Compute(Action("F", 0, m), 1)]
    sending += [WaitSend(transfer) for transfer in transfers]
    ranks = tuple(
        RankProgram(
            rank=index,
            stages=(index,),
            instructions=tuple(instructions),
            launches=launches_of(instructions),
            reductions={done: (index,)},
            parameters=(f"w{index}",),
            sends=(),
            receives=(),
            totals=((index, stages[index].accumulators[0].name),),
            step_metrics=(index,),
            finish=f"finish{index}",
            update="update1" if index else None,
        )
        for index, (instructions, done) in enumerate([(sending, 2), (receiving, 5)])
    )
    return Program(
        name="by hand",
        inputs=(InputRecord("x", X, X, None),),
        batch="batch",
        microbatches=MICROBATCHES,
        slices=1,
        batches=Fraction(1),
        mesh=MESH,
        parameters=(parameter("w0", 0, ()), parameter("w1", 1, ("momentum",))),
        stages=stages,
        ranks=ranks,
        channels=(channel,),
        step_metrics=("rows", "squares"),
        guards=(),
        schedule=None,  # type: ignore[arg-type]
        streams=communicators(MESH, ()),
        source=SOURCE,
    )


@pytest.mark.parametrize("strict", [True, False])
def test_functions_that_communicate(strict: bool) -> None:
    made = program()
    cluster = VirtualCluster(MESH.ranks, strict)
    memories = [ParameterStore() for _ in range(MESH.ranks)]
    w0 = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    executors = []
    for rank, memory in enumerate(memories):
        half = slice(2, 4) if MESH.coordinates(rank)["data"] else slice(0, 2)
        index = MESH.pipe_rank(rank)
        memory.masters[f"w{index}"] = (w0 if index == 0 else torch.ones(4, dtype=torch.float64))[half].clone()
        memory.states["momentum", "w1"] = torch.zeros(2, dtype=torch.float64)
        cluster.transport(rank).open(MESH, made.channels)
        executors.append(Executor(made, rank, cluster.transport(rank), memory, 0, CPU, keep_totals=True))
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradient = (x * w0).sum(0)
    for number in (1, 2):
        cluster.run([executor.step(number, {"x": x}, (0.5,)) for executor in executors])
        for rank, executor in enumerate(executors):
            # Both ranks of a stage contribute half. Each of the rows was counted on both ranks, and halved.
            torch.testing.assert_close(executor.step_metrics.tolist(), [float(ROWS), float((gradient**2).sum())])
            if MESH.pipe_rank(rank):
                half = slice(2, 4) if MESH.coordinates(rank)["data"] else slice(0, 2)
                torch.testing.assert_close(memories[rank].masters["w1"], 1 - 0.5 * number * gradient[half])
                torch.testing.assert_close(memories[rank].states["momentum", "w1"], gradient[half])
                torch.testing.assert_close(executor.totals[1, "d(w1)"], gradient[half])
                # What a step makes is nothing to an autograd engine; parameters, which others may change, are.
                assert executor.step_metrics.is_inference()
                assert not memories[rank].masters["w1"].is_inference()
            assert not any(stage.in_flight for stage in executor.stages.values() if MESH.pipe_rank(rank))


def test_a_reduction_begins_as_its_stage_is_done() -> None:
    """It posts its collectives where the program says, and is run to its end after the last instruction."""
    made = program()
    cluster = VirtualCluster(MESH.ranks, strict=False)
    logs, steps = [], []
    for rank in (0, 2):
        transport = cluster.transport(rank)
        transport.open(MESH, made.channels)
        memory = ParameterStore({"w0": torch.ones(2, dtype=torch.float64)})
        load_source.cache_clear()  # each rank its own log
        executor = Executor(made, rank, transport, memory, 0, CPU)
        logs.append(executor.stages[0].functions["R"].__globals__["log"])
        steps.append(executor.step(1, {"x": torch.ones(ROWS, WIDTH, dtype=torch.float64)}))
    for _ in range(20):
        for step in steps:
            next(step)
    # Stage 1 has not come to receive, so what was sent is still waited for.
    assert logs == [["gathering", "F", "F", "begun"]] * 2


def test_what_a_step_computes_with_can_be_gathered_ahead_once() -> None:
    made = program()
    cluster = VirtualCluster(MESH.ranks)
    load_source.cache_clear()
    executors = []
    for rank in range(MESH.ranks):
        transport = cluster.transport(rank)
        transport.open(MESH, made.channels)
        memory = ParameterStore(
            {f"w{MESH.pipe_rank(rank)}": torch.ones(2, dtype=torch.float64)},
            {("momentum", "w1"): torch.zeros(2, dtype=torch.float64)},
        )
        executors.append(Executor(made, rank, transport, memory, 0, CPU))
    log = executors[0].stages[0].functions["R"].__globals__["log"]
    batch = {"x": torch.ones(ROWS, WIDTH, dtype=torch.float64)}
    for executor in executors:
        executor.gather_ahead()
        executor.gather_ahead()
    assert log == ["gathering"] * 2  # on both ranks that have the stage
    for number in (1, 2):
        cluster.run([executor.step(number, batch, (0.5,)) for executor in executors])
        assert log.count("gathering") == 2 * number
        assert log.index("F") > 1


class Answered:
    """A handle that is done with what it was given."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.tensors = tensors

    def done(self) -> bool:
        return True

    def result(self) -> tuple[torch.Tensor, ...]:
        tensors, self.tensors = self.tensors, ()
        return tensors


def test_what_a_function_was_sent_ends_with_its_last_use() -> None:
    alive: list[bool] = []

    def function() -> Iterator:
        a, b = yield Answered((torch.ones(3), torch.ones(3)))
        watched = weakref.ref(a)
        del a
        alive.append(watched() is not None)
        yield Answered((b,))
        return "end"

    running = begun(function(), Context(seed=0, device=CPU))
    with pytest.raises(StopIteration) as end:
        next(running)
    assert end.value.value == "end"
    assert alive == [False]


def test_what_does_not_communicate_is_called_at_once() -> None:
    running = begun((1, 2), Context(seed=0, device=CPU))
    with pytest.raises(StopIteration) as end:
        next(running)
    assert end.value.value == (1, 2)
    assert Context(seed=0, device=CPU).coordinates == {}
