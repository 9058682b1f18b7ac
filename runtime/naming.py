"""How messages name ranks."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED = 8  # ranks named in one message


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`, `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 24 more`."""
    shown = ", ".join(map(str, ranks[:MAX_NAMED]))
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"
