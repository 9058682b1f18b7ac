"""What answers cost that a model writes while it trains (`rollouts`), beside what `partita sample` takes.

    python bench/rollouts.py [--rows N] [--tokens N] [FILE key=value …]

By default grpo.par of the zoo with eight layers of 256. Both write with kept keys and values, on one thread, rows of so
many tokens behind prompts of one id. Shown are the medians of five times, in seconds of the processor, taken in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time

import torch

from partita.compiler.pipeline import scoring_of
from partita.dsl.load import load
from partita.runtime.data.binding import bind
from partita.runtime.data.dataset import Batch
from partita.runtime.inference.choice import Choice
from partita.runtime.inference.ranks import all_ranks_local, ranks_of
from partita.runtime.inference.rollouts import Rollout
from partita.runtime.inference.sampling import Writer, writer_of
from partita.runtime.inference.scoring import Scorer
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun

ZOO = Path(__file__).parents[1] / "specs" / "zoo"
DEFAULTS = ("layers=8", "embed=256", "heads=4", "key=64")
TIMES = 5


def seconds(act: Callable[[], object]) -> float:
    """Seconds of the processor."""
    before = process_time()
    act()
    return process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path, default=ZOO / "grpo.par")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, tokens = arguments.rows, arguments.tokens
    own = arguments.overrides or (DEFAULTS if arguments.file.parent == ZOO else ())
    data = f'rollouts("prompts.jsonl", reward = "reward.py:score", samples = {rows}, tokens = {tokens})'
    given = (*own, f"batch={rows}", f"seq={tokens}", f"train.data={data}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "1"}) + "\n")
        (folder / "reward.py").write_text("def score(completions, **_):\n    return [0.0 for _ in completions]\n")
        (folder / "m.par").write_text(arguments.file.read_text())
        spec, diagnostics = load(folder / "m.par", given)
        assert spec is not None, diagnostics
        plan = prepare(spec, allow_python=True)
        dataset = bind(plan.program, plan.train, folder).dataset
        run = VirtualRun(plan.answering(dataset, folder, allow_python=True), strict=False)
    parameters = run.parameters()
    (rank,) = run.ranks
    assert dataset is not None
    assert rank.rollout is not None
    rollout, batch = rank.rollout, dataset.batch(1)

    writer = writer_of(spec)
    writer.ranks.set_parameters(parameters)
    scoring = scoring_of(spec, rows=True)
    whole = ranks_of(all_ranks_local(1), scoring.programs, spec)
    whole.set_parameters(parameters)
    several = Writer(scoring, whole, {each.rank: Scorer(scoring, each) for each in whole.ranks})

    def sampled(one: Writer) -> None:
        assert len(list(one.written([ord("1")], tokens, Choice()))) == tokens

    ways: dict[str, Callable[[], object]] = {
        f"rollouts of {rows} rows": lambda: run.cluster.run([_each(rollout, batch)]),
        f"sample, of a program of {rows} rows": lambda: sampled(several),
        "sample, of one row": lambda: sampled(writer),
    }
    found: dict[str, list[float]] = {each: [] for each in ways}
    for turn in range(TIMES + 1):
        for each, act in ways.items():
            taken = seconds(act)
            if turn:
                found[each].append(taken)
    medians = {each: statistics.median(taken) for each, taken in found.items()}
    first, second, _ = medians.values()
    for each, taken in medians.items():
        print(f"{each}: {1e3 * taken / tokens:.2f} ms a position")
    print(f"rollouts take {first / second:.2f} times as long as sample with as many rows")


def _each(rollout: Rollout, batch: Batch) -> Iterator[None]:
    yield from rollout.trained(batch, 1)


if __name__ == "__main__":
    main()
