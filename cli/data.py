"""`partita data FILE`: what a model will see of its data, and what of it counts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from partita.cli.argument_types import count
from partita.cli.colors import colored, is_colored
from partita.cli.command import UsageError, command
from partita.cli.source import add_python_argument, add_source_arguments, load_file, printable, report
from partita.cli.thumbnail import thumbnail
from partita.cli.training.places import folder_of

if TYPE_CHECKING:
    import numpy as np

    from partita.runtime.data.dataset import Input
    from partita.runtime.inference.encoding import Encoding

FIRST = 6  # numbers of an array
SIDES = ("", "chosen_", "rejected_")  # of rows, and of pairs
MOST_IDS = 64  # without a text, between two that count or not


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.set_defaults(needs="run")
    add_source_arguments(parser)
    add_python_argument(parser)
    parser.add_argument("--show", type=count, default=1, metavar="N", help="rows to print (default: 1)")
    parser.add_argument("--step", type=count, default=1, metavar="STEP", help="of the batch of a step (default: 1)")


@command("data", add_arguments)
def run(arguments: argparse.Namespace) -> int:
    """Print rows of a batch. Returns 0. Raises Refused, and UsageError for a model without inputs."""
    spec = load_file(arguments)
    from partita.compiler.verify.proxy import single
    from partita.dsl.check.language_model import how_spelled, sources_of
    from partita.runtime.data.binding import bind, inputs_of
    from partita.runtime.inference.encoding import encoding_of
    from partita.runtime.rank import prepare

    _, train = spec.trained
    folder = folder_of(arguments)
    program = prepare(single(spec)).program
    bound = bind(program, train, folder, arguments.allow_python)
    report(bound.warnings)
    dataset = bound.dataset
    if dataset is None:
        raise UsageError(f"{printable(arguments.file)}: its model has no inputs")
    written = how_spelled(sources_of(train.data)[0]) is not None
    encoding = encoding_of(train.data, folder, None) if written else None
    inputs = {each.name: each for each in inputs_of(program.inputs, spec.batch) if each.batch_axis is not None}
    count = next((each.batch for each in inputs.values()), 0)
    samples = train.data.arguments.get("samples", 1)  # rows of one prompt, of which one is shown
    shown = range(0, min(arguments.show * samples, count), samples)
    rows = range(shown[-1] + 1 if shown else 0)
    batch, names = dataset.batch(arguments.step, rows), dataset.row_names(arguments.step)
    for row in shown:
        print(names[row] if names else f"row {row}")
        read = {name: each for name, each in inputs.items() if samples == 1 or name in ("tokens", "targets")}
        values = {name: batch[name].take(row, axis=each.type.names.index(spec.batch)) for name, each in read.items()}
        for side in SIDES:
            if (tokens := values.get(f"{side}tokens")) is None:
                continue
            counts = _counts(tokens, values.get(f"{side}targets"), inputs.get(f"{side}targets"))
            if encoding is None and counts is None:
                continue
            del values[f"{side}tokens"]
            if counts is not None:
                del values[f"{side}targets"]
            if side:
                print(f"  {side.removesuffix('_')}:")
            for line in _text(encoding, tokens, counts):
                print(f"  {'  ' if side else ''}{line}")
        for name, array in values.items():
            drawn = name == "image" and array.ndim == 3
            for line in thumbnail(array, is_colored(sys.stdout)) if drawn else _numbers(name, array):
                print(f"  {line}")
    if samples > 1:
        print(
            f"{samples} answers to each, of at most {train.data.arguments['tokens']:,} ids, are written while it trains"
        )
    return 0


def _counts(tokens: np.ndarray, targets: np.ndarray | None, described: Input | None) -> list[bool] | None:
    """Which of the tokens of a row are targets of others; None if targets are anything else than the next tokens."""
    import numpy as np

    if targets is None or described is None or targets.shape != tokens.shape:
        return None
    counts = ~np.isin(targets, described.ignored)
    if (targets[:-1] != tokens[1:])[counts[:-1]].any():
        return None
    return [False, *counts[:-1].tolist()]


def _text(encoding: Encoding | None, tokens: np.ndarray, counts: Sequence[bool] | None) -> Iterator[str]:
    """The text of a row, or without an encoding its ids, with what is a target in colour."""
    counts = counts or [False] * len(tokens)
    yield f"{len(tokens):,} ids, of which {sum(counts):,} are targets of others:"
    long = max((i + 1 for i in range(len(tokens)) if tokens[i] or counts[i]), default=0)
    green = is_colored(sys.stdout)
    pieces, end = [], 0
    for counted, part in groupby(counts[:long]):
        start, end = end, end + len([*part])
        text = _decoded(encoding, tokens[:long].tolist(), start, end)
        pieces.append(text if not counted else colored("counts", text) if green else f"\u27e6{text}\u27e7")
    yield from ("" if encoding is not None else " ").join(pieces).split("\n")
    if len(tokens) > long:
        yield f"(filled up with {len(tokens) - long:,} times the id 0)"


def _decoded(encoding: Encoding | None, ids: Sequence[int], start: int, end: int) -> str:
    """The text of some of the ids: what they add to the text of those before them, as far as that can be told."""
    from partita.runtime.inference.encoding import Tokenizer

    if encoding is None:
        more = f" … ({end - start - MOST_IDS:,} more)" if end - start > MOST_IDS else ""
        return " ".join(map(str, ids[start:end][:MOST_IDS])) + more
    if not isinstance(encoding, Tokenizer):
        return "".join(encoding.text(ids[start:end]))
    before, after, alone = (
        encoding.loaded.decode(some, skip_special_tokens=False) for some in (ids[:start], ids[:end], ids[start:end])
    )
    return str(after[len(before) :] if after.startswith(before) else alone)


def _numbers(name: str, array: np.ndarray) -> Iterator[str]:
    """The first numbers of an input of a row."""
    flat = array.reshape(-1)
    first = ", ".join(f"{each:.4g}" if flat.dtype.kind == "f" else str(each) for each in flat[:FIRST].tolist())
    yield f"{name}: {array.dtype}{list(array.shape)} = {first}" + (", …" if len(flat) > FIRST else "")
