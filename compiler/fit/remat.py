"""What `recompute auto` computes again: as little as lets every rank's memory bound fit its device; nothing where it
fits by itself.

Candidates are calls of blocks (and repeats) that stand in a turn of an outermost repeat, then whole turns. Those of a
rank are taken in order of what they cost in time for each byte that they save, by the cost model and as the program
without them holds it; how many, is found by bisection on the bound of the program compiled with them. Ranks do not
change each other's memory, so that all are bisected at once: a program is compiled a logarithmic number of times.

Where even all of them are not enough, all are taken. A schedule that is searched for fits by itself, at the cost of its
bubble; where no order does, the turns are computed again and it is searched for anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attrs import define, evolve

from partita.compiler.analysis.liveness import roots
from partita.compiler.analysis.memory import peak_memory
from partita.compiler.analysis.traffic import launch_seconds
from partita.compiler.costs.nodes import seconds
from partita.compiler.graph import Node, Phase
from partita.compiler.lowering.placement import turn_of
from partita.compiler.ops.collective import Collective
from partita.compiler.schedules.schedule import peak_live
from partita.compiler.sharding.moves import Moves
from partita.compiler.state import Differentiated, Scheduled
from partita.dsl.diagnostic import Refused

# The code of a schedule that finds no order within its memory.
NO_ORDER = "E0505"
_BACKWARD = (Phase.BACKWARD, Phase.WEIGHT)


@define
class _Candidate:
    """A call of a block, or a turn: what it costs to compute it again, and what that saves of each microbatch."""

    path: str
    whole: bool
    bytes: int = 0
    seconds: float = 0.0
    live: int = 1

    @property
    def order(self) -> tuple[bool, float]:
        """Blocks first, then what is cheapest for each byte."""
        return self.whole, self.seconds / (self.bytes * self.live)


def fitted(state: Differentiated, run: Callable[[Differentiated], Scheduled]) -> Scheduled:
    """What `run` makes of a state, with as little computed again as memory asks for.

    Raises Refused as `run` does.
    """
    try:
        first = run(state)
    except Refused as refused:
        if [each.code for each in refused.diagnostics] != [NO_ORDER]:
            raise
        return run(evolve(state, again=_turns(state)))
    limit = _limit(first)
    excess = _over(first, limit)
    if not any(excess):
        return first
    candidates = candidates_of(first)
    fewest = [0] * len(candidates)
    most = [len(own) if over else 0 for own, over in zip(candidates, excess, strict=True)]

    def taken(counts: Iterable[int]) -> Scheduled:
        paths = {path for own, count in zip(candidates, counts, strict=True) for path in own[:count]}
        # What stands in a turn that is taken as a whole goes with it.
        within = {path for path in paths if path.rpartition(".")[0] in paths}
        return run(evolve(state, again=frozenset(paths - within)))

    while fewest != most:
        middle = [(low + high) // 2 for low, high in zip(fewest, most, strict=True)]
        for rank, over in enumerate(_over(taken(middle), limit)):
            if over:
                fewest[rank] = min(middle[rank] + 1, most[rank])
            else:
                most[rank] = middle[rank]
    return taken(most)


def _turns(state: Differentiated) -> frozenset[str]:
    repeats = [scope for scope in state.joint.scopes if scope.repeat]
    return frozenset(f"{scope.path}.{turn}" for scope in repeats for turn in range(scope.turns or 0))


def _limit(state: Differentiated) -> float:
    own = state.schedule_call.call.arguments.get("memory")
    return float(own if own is not None else state.device.memory)


def _over(state: Scheduled, limit: float) -> list[bool]:
    """Of each rank of the pipeline, whether it needs more than there is."""
    return [peak_memory(state, rank) > limit for rank in state.plan.ranks]


def candidates_of(state: Scheduled) -> list[list[str]]:
    """The paths of each rank's candidates, in the order in which they are taken."""
    repeats = {scope.path: scope.name for scope in state.partitioned.graph.scopes if scope.repeat}
    found = []
    for rank in state.plan.ranks:
        own: list[_Candidate] = []
        for index in rank.stages:
            nodes = state.partitioned.stages[index].nodes
            chunk = state.plan.stages[index].chunk
            live = peak_live(each for each in state.schedule.actions[rank.rank] if each.chunk == chunk)
            for each in _of_stage(state, nodes, repeats):
                each.live = max(1, live)
                own.append(each)
        found.append([each.path for each in sorted(own, key=lambda each: each.order)])
    return found


def _of_stage(state: Scheduled, nodes: Iterable[Node], repeats: Mapping[str, str]) -> list[_Candidate]:
    """The candidates among a stage's nodes that save anything, in program order."""
    nodes = tuple(nodes)
    moves, behind = Moves(state.mesh), roots(nodes)
    later = {behind.get(value, value) for node in nodes if node.phase in _BACKWARD for value in node.inputs}
    forward = [node for node in nodes if node.phase is Phase.FORWARD]
    found: dict[str, _Candidate] = {}
    for whole in (False, True):
        home = {value: _instance(node.scope, repeats, whole) for node in forward for value in node.outputs}
        leaving = {
            behind.get(value, value)
            for node in forward
            for value in node.inputs
            if home.get(value) != _instance(node.scope, repeats, whole)
        }
        for node in forward:
            path = _instance(node.scope, repeats, whole)
            if path is None:
                continue
            own = found.setdefault(path, _Candidate(path, whole))
            if isinstance(node.op, Collective):
                own.seconds += sum(launch_seconds(moves, node, node.op))
            else:
                own.seconds += seconds(node, state.device)
            own.bytes += sum(v.type.bytes for v in node.outputs if v in later and v not in leaving)
    return [each for each in found.values() if each.bytes]


def _instance(scope: str, repeats: Mapping[str, str], whole: bool) -> str | None:
    """The turn that a scope stands in, or what stands in that turn and holds the scope."""
    turn = turn_of(f"{scope}.", repeats)
    if turn is None or whole:
        return turn
    inner = scope[len(turn) + 1 :].split(".")[0]
    return f"{turn}.{inner}" if inner else None
