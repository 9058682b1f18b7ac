"""`partita sample FILE --chat`: a conversation, a line of standard input for each turn of the user."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING

from attrs import evolve

from partita.cli.forwarding import INPUT
from partita.cli.source import printable
from partita.dsl.diagnostic import Diagnostic
from partita.runtime.inference.choice import Choice
from partita.runtime.inference.scoring import check_prompt

if TYPE_CHECKING:
    from partita.runtime.inference.conversation import Conversation
    from partita.runtime.inference.sampling import Writer
    from partita.runtime.inference.weights import Report


def converse(
    arguments: argparse.Namespace, writer: Writer, talk: Conversation, choice: Choice, first: bool, report: Report
) -> None:
    """Answer `--prompt`, or each line of standard input until its end, on all ranks; the first rank of all, if it is
    here, reads and prints. Raises Refused (E0616, E1002).
    """
    alone = len(writer.ranks.ranks) == writer.ranks.ranks[0].mesh.ranks
    lines = _lines() if arguments.prompt is None and first else iter([arguments.prompt])
    if arguments.system is not None:
        talk.say("system", arguments.system)
    for turn in count():
        # All ranks render the same, the date included.
        line = next(lines, None) if first else None
        said = writer.ranks.shared(None if line is None else f"{datetime.now().isoformat()} {line}")
        if said is None:
            return
        now, _, content = said.partition(" ")
        talk.say("user", content)
        ids = talk.prompt(datetime.fromisoformat(now))
        check_prompt(writer.model, ids, name="the conversation")
        room = writer.model.window - len(ids) + 1
        length = min(arguments.length or room, room)
        with _interruptible(alone) as interrupted:
            answer, cut = _answer(writer, talk, ids, length, evolve(choice, step=turn), interrupted, first)
        talk.say("assistant", answer)
        if cut and length == room:
            what = f"the answer ends where `{writer.model.sequence.name}` does: the conversation fills its "
            report(Diagnostic("W1004", f"{what}{writer.model.window:,} positions"))
        if arguments.prompt is not None:
            return


def _answer(
    writer: Writer,
    talk: Conversation,
    prompt: Sequence[int],
    length: int,
    choice: Choice,
    interrupted: Callable[[], bool],
    first: bool,
) -> tuple[str, bool]:
    """The text of an answer, printed as it is chosen; and whether it ends for its length alone."""
    chosen = 0

    def ids() -> Iterator[int]:
        nonlocal chosen
        for id in writer.written(prompt, length, choice, talk.encoding.ends):
            chosen += 1
            yield id
            if interrupted():
                return

    pieces = []
    for piece in talk.encoding.text(ids()):
        pieces.append(piece)
        if first:
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
    if first:
        print(flush=True)
    return "".join(pieces), chosen == length and not interrupted()


def _lines() -> Iterator[str]:
    """The lines of standard input that say something."""
    with open(int(os.environ.get(INPUT, 0)), encoding="utf-8", errors="replace", closefd=False) as file:
        while True:
            if sys.stdout.isatty():
                sys.stdout.write("> ")
                sys.stdout.flush()
            line = file.readline()
            if not line:
                return
            if line.strip():
                yield line.rstrip("\n")


@contextmanager
def _interruptible(alone: bool) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C end what is computed after the id that is being chosen, and the command if it comes again; where all
    ranks are in this process (`alone`), so that they end together.
    """
    received: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if alone:
        signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: bool(received)
    finally:
        if alone:
            signal.signal(signal.SIGINT, before)
