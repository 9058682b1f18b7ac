"""What a token costs that a trained model writes: with what is kept of earlier positions, and with the whole window
computed anew.

    python bench/sampling.py [--positions N] [--tokens N] [FILE key=value …]

By default GPT-2, Llama, Mamba-2 and LSTM of the zoo, of eight layers of 512, whose window of 512 positions is full but
for the tokens that are written. Weights are random. Both ways write the same tokens; shown are the medians of the
processor's seconds for one, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import process_time

import torch

from partita.compiler.passes.decode import STATE
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.runtime.inference.choice import Choice
from partita.runtime.inference.sampling import Writer, writer_of

ZOO = Path(__file__).parents[1] / "specs" / "zoo"
DEFAULTS = {
    "gpt2.par": ("heads=8", "key=64", "vocab=4096", "layers=8"),
    "llama3.par": ("embed=512", "groups=4", "heads=2", "key=64", "ffn=1376", "vocab=4096", "layers=8"),
    "mamba2.par": ("embed=512", "groups=1", "heads=16", "head=64", "states=64", "vocab=4096", "layers=8"),
    "lstm.par": ("inner=512", "vocab=4096", "layers=8", "drop=0"),
}


def median_seconds(writer: Writer, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
    """Seconds of the processor for a token, and the tokens."""
    text = writer.written(prompt, tokens + 1, Choice(temperature=0))
    ids, seconds = [next(text)], []  # the first one takes the prompt
    for _ in range(tokens):
        before = process_time()
        ids.append(next(text))
        seconds.append(process_time() - before)
    return statistics.median(seconds), ids


def compare(path: Path, overrides: list[str], tokens: int) -> None:
    """Print what a token of a file costs in both ways."""
    spec, diagnostics = load(path, overrides)
    if spec is None:
        raise Refused(diagnostics)
    found = []
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    prompt: list[int] = []
    for kept in (True, False):
        writer = writer_of(spec, cached=kept)
        if not weights:
            length = writer.model.window - tokens - 1
            prompt = torch.randint(0, writer.model.vocab.size, (length,), generator=generator).tolist()
            for each in writer.scoring.programs[0].parameters:
                if not each.name.startswith(STATE):
                    weights[each.name] = torch.randn(each.type.shape, generator=generator) / each.type.shape[0] ** 0.5
        writer.ranks.set_parameters(weights)
        found.append(median_seconds(writer, prompt, tokens))
    (one, ids), (whole, others) = found
    same = "the same tokens" if ids == others else "NOT the same tokens"
    print(f"{path.stem}: kept {1e3 * one:.2f} ms a token, anew {1e3 * whole:.1f} ms, {whole / one:.1f} times; {same}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = (
        {arguments.file: arguments.overrides} if arguments.file else {ZOO / name: DEFAULTS[name] for name in DEFAULTS}
    )
    for path, overrides in files.items():
        compare(path, [*overrides, f"seq={arguments.positions}"], arguments.tokens)


if __name__ == "__main__":
    main()
