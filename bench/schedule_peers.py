"""`auto` beside the searches of the zero-bubble authors, in their own memory.

    git clone https://github.com/sail-sg/zero-bubble-pipeline-parallelism /elsewhere
    pip install pulp        # which their search of one chunk imports
    python bench/schedule_peers.py /elsewhere [--settings 60] [--seed 0] [--chunks 1 2]

Random settings: 4 to 16 ranks, P to 4P microbatches, times of F, B and W, of a transfer, and the part of the memory
that is held until W. Their schedules of the setting are converted into ours, so that the same functions measure time
and memory of both. With two chunks these are V-Half, V-Min, the V search (`zbv.py`), and the search over building
blocks (`v_auto_schedule.py`, slow, at most 8 ranks); with one chunk their heuristic of ZB-1p and ZB-2p. `auto` then
searches with the peak of each of them as the limit on every rank, and in the memory halfway between two of them it is
held against the best of those that fit.

Theirs are timed with transfers that wait for nothing but what they send, and ours are simulated, which is no sooner.
Seconds are of this process.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from time import process_time
from types import ModuleType, SimpleNamespace
from typing import Any

from attrs import frozen

from partita.compiler.schedules.communication import default_messages
from partita.compiler.schedules.conditions import Conditions, Memory, prices
from partita.compiler.schedules.estimate import Estimate, codes
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Action, Schedule, loop_placement, peak_live, v_placement
from partita.compiler.schedules.simulator import Costs, equal_costs

SCHEDULER = "megatron.core.pipeline_parallel.zerobubble.scheduler"
# Building blocks of more ranks take them minutes.
BLOCKS = 8


@frozen
class Setting:
    """A pipeline with times of one stage, and what a microbatch keeps there after F and after B."""

    ranks: int
    chunks: int
    microbatches: int
    times: tuple[float, float, float, float]
    kept: tuple[float, float]

    @property
    def costs(self) -> Costs:
        """Costs of actions and transfers."""
        return equal_costs(*self.times)

    def memory(self, limit: float) -> Memory:
        """The memory of ranks with a limit."""
        stages = self.ranks * self.chunks
        return Memory((limit,) * self.ranks, (self.kept[0],) * stages, (self.kept[1],) * stages)

    def conditions(self, memory: Memory | None = None) -> Conditions:
        """For a search within a limit."""
        return Conditions(
            self.costs, default_messages(self.ranks * self.chunks), (lambda _: memory) if memory else None
        )

    def bubble(self, cost: float) -> float:
        """The fraction of time lost."""
        return 1 - self.microbatches * self.chunks * sum(self.times[:3]) / cost

    def peak(self, schedule: Schedule) -> float:
        """The most that any rank holds."""
        memory = self.memory(0.0)
        return max(map(memory.peak, schedule.actions, schedule.placement))

    def cost(self, schedule: Schedule) -> float:
        """The longest time that any rank is occupied if transfers wait for nothing."""
        estimate = Estimate(schedule.placement, prices(self.conditions(), schedule.placement))
        return estimate([codes(line) for line in schedule.actions])[0]


def settings(count: int, chunks: int, seed: int) -> Iterator[Setting]:
    """Random settings."""
    random = Random(seed)
    for _ in range(count):
        ranks = random.randint(4, 16)
        forward = 10.0
        times = (forward, forward * random.uniform(0.7, 1.6), forward * random.uniform(0.3, 1.3))
        transfer = forward * random.choice((0.0, random.uniform(0.0, 0.1), random.uniform(0.0, 0.5)))
        microbatches = random.randint(ranks, 4 * ranks)
        yield Setting(ranks, chunks, microbatches, (*times, transfer), (1.0, random.uniform(0.3, 1.0)))


class Peer:
    """The schedules of the authors' repository in a folder."""

    def __init__(self, folder: Path) -> None:
        # Their packages import all of Megatron-LM, which none of these modules needs.
        name = ""
        for part in SCHEDULER.split("."):
            name, folder = f"{name}.{part}".lstrip("."), folder / part
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = [str(folder)]

    def schedules(self, setting: Setting) -> Iterator[Schedule]:
        """Theirs for a setting."""
        sizes, times, (forward, weight) = (setting.ranks, setting.microbatches), setting.times, setting.kept
        held = forward, weight - forward, -weight
        if setting.chunks == 1:
            zb = _module("zb")
            for name, factor in (("ZB-1p", 1), ("ZB-2p", 2)):
                each = [[time] * setting.ranks for time in (*times[:3], *held, factor * setting.ranks * forward)]
                costs = dict(
                    zip(("cost_f", "cost_b", "cost_w", "mem_f", "mem_b", "mem_w", "max_mem"), each, strict=True)
                )
                sized = {"n_stages": setting.ranks, "n_micro": setting.microbatches}
                found = zb.create_schedule(SimpleNamespace(**costs, **sized, cost_comm=times[3]))
                yield self._ours(name, setting, ([(n.type.value, 0, n.microbatch) for n in line] for line in found))
            return
        config = SimpleNamespace(max_chunks=2, n_stages=setting.ranks)
        graphs = {
            "V-Min": _module("zbv_greedy").PipelineGraph(*sizes, "min", *times),
            "V-Half": _module("zbv_greedy").PipelineGraph(*sizes, "half", *times),
            "V search": _module("zbv").PipelineGraph(*sizes, *times, *held),
            "V search 0.75": _module("zbv").PipelineGraph(*sizes, *times, *held, 1.5 * setting.ranks * forward),
        }
        for name, graph in graphs.items():
            try:
                with redirect_stdout(StringIO()):
                    found = graph.create_schedule(config)
            except AssertionError:
                continue  # it found none
            yield self._ours(name, setting, ([(n.type.value, n.chunk, n.microbatch) for n in line] for line in found))
        if setting.ranks <= BLOCKS:
            for part in (0.45, 0.65, 1.0):
                try:
                    with redirect_stdout(StringIO()):
                        found = _module("v_auto_schedule").schedule(*sizes, times, int(part * 2 * setting.ranks))
                except TypeError:
                    continue  # it found none
                nodes = (
                    [(n.type, n.chunk if n.type == "F" else 1 - n.chunk, n.minibatch) for n in line] for line in found
                )
                yield self._ours(f"blocks {part}", setting, nodes)

    def _ours(self, name: str, setting: Setting, nodes: Iterable[Sequence[tuple[str, int, int]]]) -> Schedule:
        actions = tuple(tuple(Action(*node) for node in line) for line in nodes)
        placed = v_placement(setting.ranks) if setting.chunks == 2 else loop_placement(setting.ranks, 1)
        return Schedule(name, setting.microbatches, placed, actions, tuple(map(peak_live, actions)))


def _module(name: str) -> Any:
    return importlib.import_module(f"{SCHEDULER}.{name}")


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="of their repository")
    parser.add_argument("--settings", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunks", type=int, nargs="*", default=[1, 2], choices=[1, 2])
    arguments = parser.parse_args()
    peer = Peer(arguments.folder)
    for chunks in arguments.chunks:
        compare(peer, settings(arguments.settings, chunks, arguments.seed))


def compare(peer: Peer, drawn: Iterable[Setting]) -> None:
    """A line for each setting and memory, and a summary by schedule."""
    print(" P   M     B/F  W/F comm held   limit  theirs             bubble    auto   bound  seconds  found")
    outcomes: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for setting in drawn:
        theirs = [
            (setting.peak(each), setting.bubble(setting.cost(each)), each.name) for each in peer.schedules(setting)
        ]
        peaks = sorted({peak for peak, _, _ in theirs})
        between = [(low + high) / 2 for low, high in pairwise(peaks)]
        for limit in (*peaks, *between):
            bubble, name = min((bubble, name) for peak, bubble, name in theirs if peak <= limit)
            start = process_time()
            memory = setting.memory(limit)
            size = setting.ranks, setting.chunks, setting.microbatches
            ours = make("auto", *size, conditions=setting.conditions(memory))
            seconds = process_time() - start
            assert memory.fits(ours)
            assert ours.search is not None
            reached, least = setting.bubble(ours.search.cost), setting.bubble(ours.search.least)
            at = [each for peak, _, each in theirs if peak == limit] or ["between"]
            for each in at:
                outcomes[each].append((bubble, reached, seconds))
            times = " ".join(f"{each / setting.times[0]:4.2f}" for each in setting.times[1:])
            sizes = f"{setting.ranks:2} {setting.microbatches:3}    {times} {setting.kept[1]:4.2f} {limit:7.2f}"
            lost = " <" if reached > bubble + 5e-5 else ""
            print(
                f"{sizes}  {at[0]:9}{name:9} {bubble:7.4f} {reached:7.4f} {least:7.4f} {seconds:6.1f}  "
                f"{ours.search.family}{lost}",
                flush=True,
            )
    print("\nin the memory of    at or below the best of theirs    mean bubble of it    ours    most seconds")
    for name, rows in outcomes.items():
        met = sum(ours <= bubble + 5e-5 for bubble, ours, _ in rows)
        means = f"{fmean(row[0] for row in rows):7.4f} {fmean(row[1] for row in rows):7.4f}"
        print(f"{name:18} {met:4} of {len(rows):3} {means} {max(row[2] for row in rows):5.1f}")
    print()


if __name__ == "__main__":
    main()
