"""What a token costs that a trained model writes: with keys and values kept, and with the whole window computed anew.

    python bench/sampling.py [--positions N] [--tokens N] [FILE key=value …]

By default Llama of the zoo with eight layers of 512, whose window of 512 positions is full but for the tokens that are
written. Weights are random. Both ways write the same tokens; shown are the medians of the processor's seconds for one,
on one thread.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import process_time

import torch

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.runtime.inference.choice import Choice
from partita.runtime.inference.sampling import written
from partita.runtime.inference.scoring import Keeping, Recomputing, Scorer, of_one_row

LLAMA = Path(__file__).parents[1] / "specs" / "zoo" / "llama3.par"
SIZES = ("embed=512", "groups=4", "heads=2", "key=64", "ffn=1376", "vocab=4096", "layers=8")


def median_seconds(scorer: Scorer, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
    """Seconds of the processor for a token, and the tokens."""
    text = written(scorer, prompt, tokens + 1, Choice(temperature=0))
    ids, seconds = [next(text)], []  # the first one takes the prompt
    for _ in range(tokens):
        before = process_time()
        ids.append(next(text))
        seconds.append(process_time() - before)
    return statistics.median(seconds), ids


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16)
    arguments = parser.parse_args()
    sizes = arguments.overrides if arguments.file else SIZES
    spec, diagnostics = load(arguments.file or LLAMA, [*sizes, f"seq={arguments.positions}"])
    if spec is None:
        raise Refused(diagnostics)
    torch.set_num_threads(1)
    spec = of_one_row(spec)
    anew = Recomputing(spec)
    keeping = Keeping(spec, anew.model)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(type.shape, generator=generator) / type.shape[0] ** 0.5
        for name, type in anew.outputs.parameters.items()
    }
    length = arguments.positions - arguments.tokens - 1
    prompt = torch.randint(0, anew.model.vocab.size, (length,), generator=generator).tolist()
    found = []
    for name, scorer in (("kept", keeping), ("computed anew", anew)):
        scorer.set_parameters(weights)
        seconds, ids = median_seconds(scorer, prompt, arguments.tokens)
        print(f"{name}: {1e3 * seconds:.2f} ms a token")
        found.append((seconds, ids))
    (kept, one), (whole, other) = found
    print(f"{whole / kept:.1f} times as much; the tokens are {'the same' if one == other else 'NOT the same'}")


if __name__ == "__main__":
    main()
