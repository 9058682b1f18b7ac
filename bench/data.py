"""How fast data is read: tokenizing, packing, and making batches; and how much of reading a step hides.

`python bench/data.py` writes a corpus of the standard library's sources, each function a document, and prints a table.
"""

from __future__ import annotations

import json
import os
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time, sleep

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from partita.dsl.spec import Call, Share
from partita.dsl.types import Axis, Type
from partita.runtime.data.dataset import Dataset, Input
from partita.runtime.data.packed_rows import packed
from partita.runtime.data.prefetcher import Prefetcher
from partita.runtime.data.registry import open_dataset

BATCH, SEQ, STEPS, VOCAB = 16, 1024, 200, 16_384
NAMES = ("tokens", "targets", "segments", "positions")


def inputs(packs: bool) -> tuple[Input, ...]:
    """Of a language model."""
    type = Type("i64", (Axis("batch", BATCH), Axis("seq", SEQ)))
    return tuple(Input(name, type, "batch", None, None, (-1,)) for name in (NAMES if packs else NAMES[:2]))


def corpus(root: Path, vocab: int = VOCAB) -> list[str]:
    """Write the documents, as lines of JSON, and a tokenizer; returns them."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [part for path in sources for part in path.read_text(errors="replace").split("\n\n\n") if part]
    texts *= 5
    (root / "a.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts[::10], trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet))
    made.save(str(root / "t.json"))
    return texts


def seconds(act: Callable[[], object]) -> float:
    """Of processors: speeds are those of one core, whatever else the machine does."""
    start = process_time()
    act()
    return process_time() - start


def say(what: str, speed: float, unit: str) -> None:
    print(f"| {what} | {speed:,.1f} {unit} |", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["PARTITA_CACHE"] = folder
        texts = corpus(root)
        size = (root / "a.jsonl").stat().st_size / 1e6
        print(f"{len(texts):,} documents, {size:.0f} MB; {os.cpu_count()} cores\n\n| | |\n|---|---|")

        def opened(pack: bool, tokenizer: str | None) -> Dataset:
            given = {"glob": "a.jsonl", "field": "text", "tokenizer": tokenizer, "pack": pack}
            return open_dataset(Call("jsonl", given), inputs(pack), 0, root)

        say("jsonl to bytes, first time", size / seconds(lambda: opened(False, None)), "MB/s")
        say("jsonl by a tokenizer, first time", size / seconds(lambda: opened(False, "t.json")), "MB/s")
        say("the same, ids that are kept", 1e3 * seconds(lambda: opened(False, "t.json")), "ms")
        lengths = np.random.default_rng(0).lognormal(5, 1, 300_000).astype(np.int64) + 1
        ends = np.cumsum(lengths)
        rows = [packed(ends - lengths, ends, SEQ)]
        taken = seconds(lambda: rows.append(packed(ends - lengths, ends, SEQ)))
        say(f"packing documents into rows of {SEQ:,}", len(lengths) / taken / 1e6, "million/s")
        say("rows that packing fills", 100 * ends[-1] / (len(rows[0]) * SEQ), "%")
        for name, dataset in (
            ("windows", opened(False, "t.json")),
            ("packed rows", opened(True, "t.json")),
            ("a mixture of two sources", _mixture(root)),
        ):
            taken = seconds(lambda: [dataset.batch(step) for step in range(1, STEPS + 1)])  # noqa: B023
            say(f"batches of {name}", STEPS * BATCH * SEQ / taken / 1e6, "million tokens/s")
            start = perf_counter()
            dataset.batch(1)
            own = perf_counter() - start
            ahead = Prefetcher(dataset, STEPS)

            def step(number: int) -> float:
                start = perf_counter()
                ahead.batch(number)  # noqa: B023
                waited = perf_counter() - start
                sleep(4 * own)  # noqa: B023
                return waited

            waits = [step(number) for number in range(1, STEPS // 4)][1:]
            say(f"reading {name} that a step of four times as long waits for", 100 * np.mean(waits) / own, "%")
            ahead.close()


def _mixture(root: Path) -> Dataset:
    one = Call("jsonl", {"glob": "a.jsonl", "field": "text", "tokenizer": "t.json", "pack": True})
    two = Call("text", {"glob": "a.jsonl", "alphabet": "bytes"})
    return open_dataset(Call("mix", {"sources": (Share(one, 0.7), Share(two, 0.3))}), inputs(True), 0, root)


if __name__ == "__main__":
    main()
