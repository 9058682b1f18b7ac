"""`policy`: list scheduling (`partita.compiler.schedules.listing`) as declared by the user.

A rank never idles while it has an action to run and memory for it. This is simple but not always optimal: an action may
delay a more urgent one that becomes ready a moment later.
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
from partita.dsl.config.builtins import CHUNKS, COUNT, MICROBATCHES, OVER, PLACEMENT, Flag, Keyword, Setting
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
    """Runs backwards first, or the kind that `prefer` names; with `split_backward`, W when neither can run.

    `in_flight` bounds the live activations of a rank (default: M·V). `placement` is `loop` or `v`.

    Raises ValueError for a bound too small for one microbatch.
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
    """With room for one microbatch at least."""
    bound = call.arguments.get("in_flight")
    return call if bound is None else evolve(call, arguments={**call.arguments, "in_flight": max(bound, sizes.chunks)})


POLICY = register(
    Generator(
        "policy",
        (
            MICROBATCHES,
            evolve(CHUNKS, default=1),
            Setting("prefer", Keyword(("backward", "forward")), "backward"),
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
