"""What `recompute auto` recomputes: no more than makes every rank's memory bound fit its device.

Candidates are calls of blocks (and repeats) in an iteration of an outermost repeat, then whole iterations. A rank's
candidates are taken in order of their cost in time for each byte saved, by the cost model, in the program without
recomputation. How many are taken is found by bisection on the bound of the program compiled with them. Ranks do not
change each other's memory, so all are bisected at once, and a logarithmic number of programs is compiled.

If even all of them are not enough, all are taken. A searched schedule fits by itself, at the cost of its bubble; if no
order does, all iterations are recomputed and the search is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attrs import define, evolve

from partita.compiler.analysis.liveness import roots
from partita.compiler.analysis.memory import peak_memory
from partita.compiler.analysis.traffic import launch_seconds
from partita.compiler.costs.nodes import seconds
from partita.compiler.graph import Node, Phase
from partita.compiler.ops.collective import Collective
from partita.compiler.passes.place import iteration_of
from partita.compiler.passes.shard.resharding import Resharding
from partita.compiler.schedules.schedule import peak_live
from partita.compiler.state import Differentiated, Scheduled
from partita.dsl.diagnostic import Refused

# The error of a schedule search that finds no order within its memory.
NO_ORDER = "E0505"
_BACKWARD = (Phase.BACKWARD, Phase.WEIGHT)


@define
class _Candidate:
    """A call of a block, or a `whole` iteration: the seconds to recompute it, and what it saves per microbatch."""

    path: str
    whole: bool
    bytes: int = 0
    seconds: float = 0.0
    live: int = 1

    @property
    def order(self) -> tuple[bool, float]:
        """Blocks first, then by seconds for each byte."""
        return self.whole, self.seconds / (self.bytes * self.live)


def fitted(state: Differentiated, run: Callable[[Differentiated], Scheduled]) -> Scheduled:
    """The result of `run` for a state, with as little recomputed as memory requires.

    Raises Refused as `run` does.
    """
    try:
        first = run(state)
    except Refused as refused:
        if [each.code for each in refused.diagnostics] != [NO_ORDER]:
            raise
        return run(evolve(state, again=_iterations(state)))
    limit = _limit(first)
    excess = _over(first, limit)
    if not any(excess):
        return first
    candidates = candidates_of(first)
    fewest = [0] * len(candidates)
    most = [len(own) if over else 0 for own, over in zip(candidates, excess, strict=True)]

    def taken(counts: Iterable[int]) -> Scheduled:
        paths = {path for own, count in zip(candidates, counts, strict=True) for path in own[:count]}
        # A whole iteration includes the candidates in it.
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


def _iterations(state: Differentiated) -> frozenset[str]:
    repeats = [scope for scope in state.joint.scopes if scope.repeat]
    return frozenset(f"{scope.path}.{iteration}" for scope in repeats for iteration in range(scope.iterations or 0))


def _limit(state: Differentiated) -> float:
    own = state.schedule_call.call.arguments.get("memory")
    return float(own if own is not None else state.device.memory)


def _over(state: Scheduled, limit: float) -> list[bool]:
    """For each rank of the pipeline, whether it exceeds the limit."""
    return [peak_memory(state, rank) > limit for rank in state.plan.ranks]


def candidates_of(state: Scheduled) -> list[list[str]]:
    """The paths of each rank's candidates, in the order in which they are taken."""
    repeats = state.partitioned.graph.repeats
    by_rank = []
    for rank in state.plan.ranks:
        own: list[_Candidate] = []
        for index in rank.stages:
            nodes = state.partitioned.stages[index].nodes
            chunk = state.plan.stages[index].chunk
            live = peak_live(each for each in state.schedule.actions[rank.rank] if each.chunk == chunk)
            for each in _of_stage(state, nodes, repeats):
                each.live = max(1, live)
                own.append(each)
        by_rank.append([each.path for each in sorted(own, key=lambda each: each.order)])
    return by_rank


def _of_stage(state: Scheduled, nodes: Iterable[Node], repeats: Mapping[str, str]) -> list[_Candidate]:
    """The candidates among a stage's nodes that save anything, in program order."""
    nodes = tuple(nodes)
    resharding, alias_root = Resharding(state.mesh), roots(nodes)
    later = {alias_root.get(value, value) for node in nodes if node.phase in _BACKWARD for value in node.inputs}
    forward = [node for node in nodes if node.phase is Phase.FORWARD]
    candidates: dict[str, _Candidate] = {}
    for whole in (False, True):
        instance = {value: _instance(node.scope, repeats, whole) for node in forward for value in node.outputs}
        leaving = {
            alias_root.get(value, value)
            for node in forward
            for value in node.inputs
            if instance.get(value) != _instance(node.scope, repeats, whole)
        }
        for node in forward:
            path = _instance(node.scope, repeats, whole)
            if path is None:
                continue
            own = candidates.setdefault(path, _Candidate(path, whole))
            if isinstance(node.op, Collective):
                own.seconds += sum(launch_seconds(resharding, node, node.op))
            else:
                own.seconds += seconds(node, state.device)
            own.bytes += sum(v.type.bytes for v in node.outputs if v in later and v not in leaving)
    return [each for each in candidates.values() if each.bytes]


def _instance(scope: str, repeats: Mapping[str, str], whole: bool) -> str | None:
    """The iteration that contains a scope, or the call in that iteration that contains it."""
    iteration = iteration_of(f"{scope}.", repeats)
    if iteration is None or whole:
        return iteration
    inner = scope[len(iteration) + 1 :].split(".")[0]
    return f"{iteration}.{inner}" if inner else None
