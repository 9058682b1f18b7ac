"""How long a training step waits for its data, in the case of `bench/pipelines.py`, from each kind of source.

    python bench/data_waits.py [--steps 60] [SOURCE ...]

Two processes of one thread, each on its own core, train `bench/models/gpt.par` with the loop of `partita run`, on the
corpus of `bench/data.py`. Of each rank and step is measured how long the loop waits for its batch, and how long reading
it takes the thread that reads ahead. The first steps do not count.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from data import corpus
from measure import joined, measured, report

VOCAB = 512  # of gpt.par
TOKENIZED = 'tokenizer = "t.json"'
SOURCES = {
    "random()": "random()",
    "windows of text, as bytes": 'text("a.jsonl")',
    "windows of ids that are kept": f'jsonl("a.jsonl", {TOKENIZED})',
    "packed rows": f'jsonl("a.jsonl", {TOKENIZED}, pack = true)',
    "a mixture of two packed sources": f'mix([jsonl("a.jsonl", {TOKENIZED}, pack = true) -> 70%, '
    f'jsonl("b.jsonl", {TOKENIZED}, pack = true) -> 30%])',
}
WARM_UP = 5
FOLDER = "BENCH_DATA"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sources", nargs="*", default=list(SOURCES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--as", dest="source", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.source:
        run(SOURCES[arguments.source], arguments.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        corpus(root, VOCAB)
        (root / "b.jsonl").write_bytes((root / "a.jsonl").read_bytes())
        os.environ |= {FOLDER: folder, "PARTITA_CACHE": folder}
        model = Path(__file__).with_name("models") / "gpt.par"
        (root / "gpt.par").write_text(
            model.read_text().replace("targets, over = vocab", "targets, over = vocab, ignore = -1")
        )
        print("| data | opened in | a step | reading a batch | waited, median | 95% | longest |")
        print("|---|---|---|---|---|---|---|")
        for source in arguments.sources:
            found = measured([__file__, "--as", source, "--steps", str(arguments.steps)], 2, 1)
            waits = sorted(wait for rank in found for wait in rank["waits"])
            cells = (
                f"{1e3 * max(rank['opened'] for rank in found):,.0f} ms",
                f"{1e3 * median(each for rank in found for each in rank['steps']):.1f} ms",
                f"{1e3 * median(each for rank in found for each in rank['reads']):.2f} ms",
                *(f"{1e3 * waits[int(share * (len(waits) - 1))]:.2f} ms" for share in (0.5, 0.95, 1)),
            )
            print(f"| {source} | {' | '.join(cells)} |", flush=True)


def run(data: str, steps: int) -> None:
    """One rank: seconds of opening its data, and of each step, of reading its batch and of waiting for that."""
    import torch.distributed as dist
    from peers.ours import rank_of
    from peers.workload import workload

    from partita.runtime.data.prefetcher import Prefetcher
    from partita.runtime.training import train

    root = Path(os.environ[FOLDER])
    start = perf_counter()
    work = workload(str(root / "gpt.par"), [f"train.steps={steps}", f"train.data={data}"], root)
    opened = perf_counter() - start
    joined()
    rank = rank_of(work.plan)
    reading = _Timed(work.dataset)
    ahead = Prefetcher(reading, steps)
    waiting = _Timed(ahead)
    seen: list[float] = []
    for _ in train(rank, waiting, _Seen(seen)):
        pass
    ahead.close()
    own = {
        "opened": opened,
        "steps": seen[WARM_UP:],
        "reads": reading.seconds[WARM_UP:],
        "waits": waiting.seconds[WARM_UP:],
    }
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    report(found)
    rank.transport.close()


class _Timed:
    """A dataset that notes how long each batch takes."""

    def __init__(self, dataset) -> None:
        self._dataset = dataset
        self.seconds: list[float] = []

    def batch(self, step, rows=None):
        start = perf_counter()
        found = self._dataset.batch(step, rows)
        self.seconds.append(perf_counter() - start)
        return found


class _Seen:
    """An observer that notes how long each step takes."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def step(self, result) -> None:
        self.seconds.append(result.seconds)

    def slow(self, *_: object) -> None:
        """Does not matter here."""

    evaluation = resumed = slow


if __name__ == "__main__":
    main()
