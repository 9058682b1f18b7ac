"""`partita sample FILE`: writes text with a trained language model."""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from typing import TYPE_CHECKING

from partita.cli.argument_types import count, number
from partita.cli.command import command
from partita.cli.inference import add_trained_arguments, use
from partita.cli.source import printable
from partita.cli.training.places import folder_of
from partita.dsl.check.language_model import USUAL, language_model
from partita.dsl.limits import DIGITS
from partita.dsl.spec import Spec
from partita.runtime.addresses import place_of

if TYPE_CHECKING:
    from partita.runtime.inference.ranks import LocalRanks
    from partita.runtime.inference.weights import Report

LENGTH = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None may be a prefix of one of torchrun's, which would consume it."""
    add_trained_arguments(parser)
    option = parser.add_argument
    option("--prompt", default="\n", metavar="TEXT", help="the text to go on from (default: a line break)")
    option("--length", type=count, default=LENGTH, metavar="N", help=f"tokens to write (default: {LENGTH})")
    what = "0: always the most likely token (default: 1)"
    option("--temperature", type=number, default=1.0, metavar="T", help=what)
    option("--top-k", type=count, metavar="K", help="draw from the K most likely tokens only")
    what = "draw from the most likely tokens with probability P"
    option("--top-p", type=_share, default=1.0, metavar="P", help=what)
    option("--seed", type=_seed, default=0, metavar="N", help="another text for another seed (default: 0)")
    what = "a tokenizer.json, or its address (default: what the file's data says)"
    option("--tokenizer", type=place_of, metavar="FILE", help=what)
    option("--output", default=USUAL, metavar="NAME", help=f"the output with the logits (default: {USUAL})")


def _share(text: str) -> float:
    share = number(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError("above 0, up to 1")
    return share


def _seed(text: str) -> int:
    if not (text.isdecimal() and len(text) <= DIGITS):
        raise argparse.ArgumentTypeError(f"`{text[:DIGITS]}` is not a non-negative integer")
    return int(text)


@command("sample", add_arguments, "generate", "complete", "write")
def run(arguments: argparse.Namespace) -> int:
    """Write text to stdout, as it is chosen. Returns 0, or 3 if a rank failed. Raises UsageError and Refused."""
    return use(arguments, _write)


def _write(arguments: argparse.Namespace, spec: Spec, here: LocalRanks | None, say: Report) -> None:
    from partita.runtime.inference.choice import Choice
    from partita.runtime.inference.encoding import encoding_of
    from partita.runtime.inference.sampling import writer_of
    from partita.runtime.inference.scoring import check_prompt
    from partita.runtime.inference.weights import load_weights

    folder = folder_of(arguments)
    choice = Choice(arguments.seed, arguments.temperature, arguments.top_k, arguments.top_p)
    model, train = spec.trained
    language = language_model(model, spec.batch, arguments.output)
    encoding = encoding_of(train.data, folder, arguments.tokenizer)
    prompt = encoding.ids(arguments.prompt)
    check_prompt(language, prompt)
    writer = writer_of(spec, arguments.output, arguments.allow_python, here)
    first = here is None or here.first
    if writer.scoring.warning is not None and first:
        say(writer.scoring.warning)
    own = arguments.tokenizer is None
    load_weights(spec, folder, writer.ranks, say, arguments.place, arguments.weights, spelled=own)
    writer.check_causal()
    for piece in chain([arguments.prompt], encoding.text(writer.written(prompt, arguments.length, choice))):
        if first:
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
    if first:
        print()
