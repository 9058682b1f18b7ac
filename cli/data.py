"""`partita data FILE`: what a model will see of its data, and what of it counts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from partita.cli.argument_types import count
from partita.cli.colors import colored, is_colored
from partita.cli.command import UsageError, command
from partita.cli.source import add_source_arguments, load_file, printable, report
from partita.cli.training.places import folder_of

if TYPE_CHECKING:
    import numpy as np

    from partita.runtime.inference.encoding import Encoding

FIRST = 6  # numbers of an array
SIDES = ("", "chosen_", "rejected_")  # of rows, and of pairs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.set_defaults(needs="run")
    add_source_arguments(parser)
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
    bound = bind(program, train, folder)
    report(bound.warnings)
    dataset = bound.dataset
    if dataset is None:
        raise UsageError(f"{printable(arguments.file)}: its model has no inputs")
    written = how_spelled(sources_of(train.data)[0]) is not None
    encoding = encoding_of(train.data, folder, None) if written else None
    inputs = {each.name: each for each in inputs_of(program.inputs, spec.batch) if each.batch_axis is not None}
    rows = range(min(arguments.show, next((each.batch for each in inputs.values()), 0)))
    batch, names = dataset.batch(arguments.step, rows), dataset.row_names(arguments.step)
    for row in rows:
        print(names[row] if names else f"row {row}")
        values = {name: batch[name].take(row, axis=each.type.names.index(spec.batch)) for name, each in inputs.items()}
        for side in SIDES:
            if encoding is None or (tokens := values.pop(f"{side}tokens", None)) is None:
                continue
            if side:
                print(f"  {side.removesuffix('_')}:")
            targets = values.pop(f"{side}targets", None)
            ignored = inputs[f"{side}targets"].ignored if targets is not None else ()
            for line in _text(encoding, tokens, targets, ignored):
                print(f"  {'  ' if side else ''}{line}")
        for line in _numbers(values):
            print(f"  {line}")
    return 0


def _text(
    encoding: Encoding, tokens: np.ndarray, targets: np.ndarray | None, ignored: tuple[int, ...]
) -> Iterator[str]:
    """The text of a row, with what is a target in colour."""
    from partita.runtime.inference.encoding import Tokenizer

    counts = [False, *(int(each) not in ignored for each in targets[:-1])] if targets is not None else []
    counts += [False] * (len(tokens) - len(counts))
    yield f"{len(tokens):,} ids, of which {sum(counts):,} are targets of others:"
    long = max((i + 1 for i in range(len(tokens)) if tokens[i] or counts[i]), default=0)
    filled, tokens = len(tokens) - long, tokens[:long]
    green = is_colored(sys.stdout)
    pieces = []
    for counted, part in groupby(zip(counts[:long], tokens.tolist(), strict=True), key=lambda each: each[0]):
        ids = [id for _, id in part]
        if isinstance(encoding, Tokenizer):
            text = encoding.loaded.decode(ids, skip_special_tokens=False)
        else:
            text = "".join(encoding.text(ids))
        pieces.append(text if not counted else colored("counts", text) if green else f"\u27e6{text}\u27e7")
    yield from "".join(pieces).split("\n")
    if filled:
        yield f"(filled up with {filled:,} times the id 0)"


def _numbers(values: Mapping[str, np.ndarray]) -> Iterator[str]:
    """The first numbers of each input of a row."""
    for name, array in values.items():
        flat = array.reshape(-1)
        first = ", ".join(f"{each:.4g}" if flat.dtype.kind == "f" else str(each) for each in flat[:FIRST].tolist())
        yield f"{name}: {array.dtype}{list(array.shape)} = {first}" + (", …" if len(flat) > FIRST else "")
