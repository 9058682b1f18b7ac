"""Exit statuses: those of the command, and those by which a rank tells its supervisor why it has ended.

The latter are none that an interpreter or a library uses. Python ends with 1 for whatever nobody has caught, which may
be a fault of the machine and go away; that input is wrong is said by `REFUSED` alone.
"""

from __future__ import annotations

# Of the command.
WRONG_INPUT, WRONG_USE, FAILED, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143
# Of a rank.
PEER_LOST = 76  # another one is gone: such a rank is not the cause
NOT_FINITE = 77  # numbers that are none
REFUSED = 78  # wrong input, which it has said
STRANGER = 79  # who it was connected to is no rank of this run
ASKED = 80  # another rank was asked to end, and all have saved
UNSAVED = 81  # the last checkpoint could not be written

FOLLOWING = frozenset((PEER_LOST, ASKED))  # of ranks that are not the cause
# After these, starting again would end the same way.
FINAL = frozenset((WRONG_USE, NOT_FINITE, REFUSED))
