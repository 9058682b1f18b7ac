"""`partita sample FILE`: writes text with a trained language model."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.cli.argument_types import count, number
from partita.cli.command import UsageError, command
from partita.cli.inference import add_trained_arguments, use
from partita.cli.source import printable
from partita.cli.training.places import folder_of
from partita.dsl.check.language_model import USUAL, language_model, sources_of
from partita.dsl.diagnostic import refuse
from partita.dsl.limits import DIGITS
from partita.dsl.spec import Call, Spec
from partita.runtime.addresses import place_of

if TYPE_CHECKING:
    from partita.runtime.inference.conversation import Conversation
    from partita.runtime.inference.encoding import Encoding
    from partita.runtime.inference.ranks import LocalRanks
    from partita.runtime.inference.weights import Report

LENGTH = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None may be a prefix of one of torchrun's, which would consume it."""
    add_trained_arguments(parser)
    option = parser.add_argument
    what = "the text to go on from (default: a line break); with --chat, the one thing to answer"
    option("--prompt", metavar="TEXT", help=what)
    what = f"tokens to write at most (default: {LENGTH}; with --chat, as many as there is room for)"
    option("--length", type=count, metavar="N", help=what)
    option("--chat", action="store_true", help="answer what is said, line by line, by the tokenizer's template")
    option("--system", metavar="TEXT", help="with --chat, what the conversation begins with")
    what = "with --chat, what else the template reads, such as '{\"enable_thinking\": false}'"
    option("--chat-template-kwargs", type=_object, metavar="JSON", help=what)
    what = "0: always the most likely token (default: 1)"
    option("--temperature", type=number, default=1.0, metavar="T", help=what)
    option("--top-k", type=count, metavar="K", help="draw from the K most likely tokens only")
    what = "draw from the most likely tokens with probability P"
    option("--top-p", type=_share, default=1.0, metavar="P", help=what)
    option("--seed", type=_seed, default=0, metavar="N", help="another text for another seed (default: 0)")
    what = "a tokenizer.json, a folder with one, or an address (default: what the file's data says)"
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


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"`{printable(text)}` is not an object of JSON")
    return found


@command("sample", add_arguments, "generate", "complete", "write")
def run(arguments: argparse.Namespace) -> int:
    """Write text to stdout, as it is chosen. Returns 0, or 3 if a rank failed. Raises UsageError and Refused."""
    chat = {"--system": arguments.system, "--chat-template-kwargs": arguments.chat_template_kwargs}
    for name, value in chat.items():
        if value is not None and not arguments.chat:
            raise UsageError(f"{name} is for --chat")
    return use(arguments, _write, reads=arguments.chat and arguments.prompt is None)


def _write(arguments: argparse.Namespace, spec: Spec, here: LocalRanks | None, say: Report) -> None:
    from partita.cli.conversation import converse
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
    conversation = _conversation(arguments, train.data, folder, encoding) if arguments.chat else None
    start = "\n" if arguments.prompt is None else arguments.prompt
    prompt = encoding.ids(start) if conversation is None else []
    if conversation is None:
        check_prompt(language, prompt)
    writer = writer_of(spec, arguments.output, arguments.allow_python, here)
    first = here is None or here.first
    if writer.scoring.warning is not None and first:
        say(writer.scoring.warning)
    own = arguments.tokenizer is None
    load_weights(spec, folder, writer.ranks, say, arguments.place, arguments.weights, spelled=own)
    writer.check_causal()
    if conversation is not None:
        return converse(arguments, writer, conversation, choice, first, say)
    ids = writer.written(prompt, arguments.length or LENGTH, choice, encoding.ends)
    for piece in chain([start], encoding.text(ids)):
        if first:
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
    if first:
        print()


def _conversation(arguments: argparse.Namespace, data: Call, folder: Path, encoding: Encoding) -> Conversation:
    """A conversation by the template of `--tokenizer`, or of the data's. Raises Refused (E0619, E1003)."""
    from partita.runtime.inference.conversation import conversation_of
    from partita.runtime.inference.encoding import Tokenizer

    source = sources_of(data)[0]
    name = arguments.tokenizer or source.arguments.get("tokenizer")
    if name is None or not isinstance(encoding, Tokenizer):
        help = "name a folder with a tokenizer and its template: `--tokenizer qwen3`"
        raise refuse("E1003", "no tokenizer says how conversations are written", source.span, help=help)
    span = None if arguments.tokenizer else source.span
    return conversation_of(
        encoding, name if isinstance(name, Path) else str(name), folder, span, arguments.chat_template_kwargs or {}
    )
