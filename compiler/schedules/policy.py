"""`policy`: list scheduling (`partita.compiler.schedules.listing`) as a user declares it.

It never lets a rank idle that has something to run and is allowed to. So it is easy to say and not always the best: it
may run an action now that delays another one which arrives a moment later.
"""

from __future__ import annotations

from attrs import evolve

from partita.compiler.schedules.conditions import Conditions, Memory, prices
from partita.compiler.schedules.generator import Generator, Sizes, register
from partita.compiler.schedules.listing import list_orders
from partita.compiler.schedules.schedule import (
    BACKWARD,
    FORWARD,
    Schedule,
    loop_placement,
    peak_live,
    v_placement,
)
from partita.dsl.builtins import CHUNKS, COUNT, MICROBATCHES, OVER, PLACEMENT, Flag, Setting, Word
from partita.dsl.spec import Call


def policy(
    ranks: int,
    chunks: int,
    microbatches: int,
    conditions: Conditions,
    prefer: str = "backward",
    in_flight: int | None = None,
    split_backward: bool = False,
    placement: str = "loop",
) -> Schedule:
    """Backwards before forwards, or (`prefer`) forwards first; with `split_backward`, W where neither can run.

    `in_flight` bounds the live activations of a rank (M·V unless given). `placement`: `loop`, or `v`, chunk by chunk
    down the ranks and up again.

    Raises ValueError for a bound that does not hold one microbatch.
    """
    if in_flight is not None and in_flight < chunks:
        raise ValueError(f"in_flight = {in_flight} is too small for one microbatch on {chunks} chunks")
    table = loop_placement(ranks, chunks) if placement == "loop" else v_placement(ranks, chunks)
    each = (1.0,) * (ranks * chunks)
    memory = Memory((float(in_flight or microbatches * chunks),) * ranks, each, each)
    first = FORWARD if prefer == "forward" else BACKWARD
    orders = list_orders(table, microbatches, prices(conditions, table), memory, first, split_backward)
    return Schedule("policy", microbatches, table, orders, tuple(map(peak_live, orders)))


def _proxy(call: Call, sizes: Sizes) -> Call:
    """With room for a microbatch."""
    bound = call.arguments.get("in_flight")
    return call if bound is None else evolve(call, arguments={**call.arguments, "in_flight": max(bound, sizes.chunks)})


POLICY = register(
    Generator(
        "policy",
        (
            MICROBATCHES,
            evolve(CHUNKS, default=1),
            Setting("prefer", Word(("backward", "forward")), "backward"),
            Setting("in_flight", COUNT, None),
            Setting("split_backward", Flag(), False),
            PLACEMENT,
            OVER,
        ),
        order=policy,
        chunks=None,
        proxy=_proxy,
        legal=lambda ranks, chunks: {
            "prefer": ("forward", "backward"),
            "split_backward": (False, True),
            "placement": ("loop", "v"),
            "in_flight": (None, *range(chunks, 2 * ranks * chunks + 1)),
        },
    )
)
