"""Exit statuses: those of the command, and those by which a rank tells its supervisor why it ended.

The latter are used by no interpreter or library. Python exits with 1 on any uncaught exception, which may be a
transient machine fault; wrong input is only reported by `REFUSED`.
"""

from __future__ import annotations

import signal

# Of the command.
WRONG_INPUT, WRONG_USE, FAILED, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143
# Of a rank.
PEER_LOST = 76  # another rank is gone: this one is not the cause
NOT_FINITE = 77  # NaN or infinity
REFUSED = 78  # wrong input; the rank has printed the diagnostics
UNTRUSTED_PEER = 79  # the peer of a connection is no rank of this run
ASKED = 80  # another rank was asked to end, and all have saved
UNSAVED = 81  # the last checkpoint could not be written

ASKING = (signal.SIGTERM, signal.SIGUSR1)  # signals that ask a run to save and end
SAVING = "saving this step; Ctrl-C again ends at once"  # what is said at the first Ctrl-C of a run that saves
SECONDARY = frozenset((PEER_LOST, ASKED))  # of ranks that are not the cause
# A restart would end the same way.
FINAL = frozenset((WRONG_USE, NOT_FINITE, REFUSED))


def ending(number: int, saves: bool | None, saved: int | None) -> str:
    """What is said when a signal ends a run that `saves` (None: where there is nothing to save), with the step that it
    has `saved`: `interrupted`.
    """
    what = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    if saved:
        return f"{what}: {going_on(saved, 'command')}"
    return f"{what}: nothing is saved" if saves is False else what


def going_on(saved: int, call: str) -> str:
    """What is said of the step that a run has saved before it ended early; the same `call` begins it again."""
    return f"saved step {saved}; the same {call} goes on"
