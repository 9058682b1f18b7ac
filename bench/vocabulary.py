"""A GPT with a large vocabulary on two ranks: the output layer on the last stage, or shared by both ranks.

    python bench/vocabulary.py [--rounds 9] [--steps 12] [KEY=VALUE ...]

`bench/models/vocabulary.par`: the output layer is as dear as four layers, and each rank has four layers in either
layout, so that without sharing the last rank has twice the work of the first. The schedule is the same. A step is all
of it: the batch, forward and backward, the update, and the loss on every rank.

Beside the time of a step stands a *simulated* one: the timeline of the same instructions, each action as long as the
CPU time that it took. That is what a step takes where nothing else runs; on a machine that others use as well, ranks
that wait lend their core to others, and a layout that keeps both busy shows no gain. What the cost model predicts comes
first.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from measure import agree, alternately, joined, measured, report, show

if TYPE_CHECKING:
    from peers.ours import Ours
    from peers.workload import Workload

SHARED, LAST = "shared", "last"
WARM_UP = 3


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--as", dest="layout", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.layout:
        run(arguments.layout, arguments.overrides, arguments.steps)
        return
    losses: dict[str, list[float]] = {}
    simulated: dict[str, list[float]] = {SHARED: [], LAST: []}

    def figure(layout: str) -> float:
        command = [__file__, "--as", layout, "--steps", str(arguments.steps), *arguments.overrides]
        found = measured(command, 2, 1)
        losses[layout] = found["losses"]
        simulated[layout].append(found["simulated"] * 1e3)
        return median(found["seconds"][WARM_UP:]) * 1e3

    show("predicted", "ms", {each: [1e3 * predicted(each, arguments.overrides)] for each in simulated}, LAST)
    figures = alternately({each: partial(figure, each) for each in simulated}, arguments.rounds)
    agree(losses, absolute=1e-4)
    show("simulated from the CPU time of actions", "ms", simulated, LAST)
    show("a step", "ms", figures, LAST)


def predicted(layout: str, overrides: Sequence[str]) -> float:
    """Seconds of a step by the cost model."""
    from peers.workload import MODELS

    from partita.compiler.analysis.time import predict
    from partita.compiler.pipeline import compile_spec
    from partita.dsl.load import load

    spec, diagnostics = load(MODELS / "vocabulary.par", (f"layout={layout}", *overrides))
    assert spec is not None, [each.render() for each in diagnostics]
    return predict(compile_spec(spec), exposed=False).step_time


def run(layout: str, overrides: Sequence[str], steps: int) -> None:
    """One rank with a layout."""
    import torch.distributed as dist
    from peers.ours import Clock, Ours
    from peers.workload import workload

    work = workload("vocabulary.par", (f"layout={layout}", *overrides))
    joined()
    system = Ours(work, Clock())
    batches = work.batches()
    seconds, losses = [], []
    own: dict[tuple[int, str], list[float]] = defaultdict(list)
    ends = []
    for number in range(steps):
        batch = next(batches)
        start = perf_counter()
        losses.append(system.step(*batch))
        seconds.append(perf_counter() - start)
        if number >= WARM_UP:
            ends.append(_times(system, own))
    every: list[tuple[dict[tuple[int, str], float], float]] = [({}, 0.0)] * dist.get_world_size()
    dist.all_gather_object(every, ({key: median(times) for key, times in own.items()}, median(ends)))
    report({"seconds": seconds, "losses": losses, "simulated": _simulated(work, every)})
    dist.destroy_process_group()


def _times(system: Ours, into: dict[tuple[int, str], list[float]]) -> float:
    """Collect the CPU seconds of the last step's actions by stage and kind; returns those of the end of the step."""
    from partita.compiler.instructions import Compute

    assert system.clock is not None
    marks = system.clock.times
    instructions = system.rank.training.record.instructions
    for i, instruction in enumerate(instructions, 1):  # the first mark begins the step, the second follows its prologue
        if isinstance(instruction, Compute):
            into[instruction.stage, instruction.action.kind].append(marks[i + 1] - marks[i])
    return marks[-1] - marks[1 + len(instructions)]


def _simulated(work: Workload, every: Sequence[tuple[dict[tuple[int, str], float], float]]) -> float:
    """Seconds of the timeline of a step, with the actions and ends that the ranks measured."""
    from partita.compiler.schedules.simulator import Costs, simulate

    actions = {key: seconds for own, _ in every for key, seconds in own.items()}
    programs = [rank.instructions for rank in work.plan.program.ranks]
    timeline = simulate(programs, Costs(lambda stage, kind: actions[stage, kind], lambda message: 0.0))
    return timeline.makespan + max(end for _, end in every)


if __name__ == "__main__":
    main()
