"""Schedules by name. A schedule is one function in a file of its own and one line in `SCHEDULES`.

A function takes `ranks`, `microbatches`, `chunks` if it can have several stages on a rank, and arguments of
its own by name; it returns a `Schedule` with its stated bound of live activations, and raises ValueError for
arguments that it cannot serve. What it returns is held to the laws (`partita.compiler.laws`), whoever wrote
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from partita.compiler.schedules.forward_only import forward_only
from partita.compiler.schedules.gpipe import gpipe
from partita.compiler.schedules.interleaved import interleaved_1f1b
from partita.compiler.schedules.looped_bfs import looped_bfs
from partita.compiler.schedules.one_f_one_b import one_f_one_b
from partita.compiler.schedules.schedule import LIMIT, Schedule
from partita.dsl.diagnostic import refuse
from partita.dsl.source import Span

# What users can name.
SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
}

# What the compiler itself asks for.
INTERNAL: Mapping[str, Callable[..., Schedule]] = {"forward_only": forward_only}


def make(
    name: str, ranks: int, chunks: int, microbatches: int, *, span: Span | None = None, **arguments: Any
) -> Schedule:
    """The schedule of that name for `ranks` ranks of `chunks` stages each; `arguments` are the schedule's
    own.

    Raises Refused (E0505, at `span`) for an unknown name and for sizes and arguments that the schedule cannot
    serve.
    """
    function = {**SCHEDULES, **INTERNAL}.get(name)
    if function is None:
        near = get_close_matches(name, SCHEDULES, 1)
        help = f"did you mean `{near[0]}`?" if near else f"schedules: {', '.join(SCHEDULES)}"
        raise refuse("E0505", f"there is no schedule `{name}`", span, help=help)
    for what, size in (("ranks", ranks), ("chunks", chunks), ("microbatches", microbatches)):
        if size < 1:
            raise refuse("E0505", f"schedule `{name}` needs at least 1 of `{what}`, not {size}", span)
    if ranks * chunks * microbatches > LIMIT:
        raise refuse(
            "E0505",
            f"schedule `{name}` would have {ranks} ranks × {chunks} chunks × {microbatches} microbatches",
            span,
            help=f"at most {LIMIT} of these together can be scheduled",
        )
    taken = signature(function).parameters
    if "chunks" in taken:
        arguments["chunks"] = chunks
    elif chunks > 1:
        raise refuse(
            "E0505",
            f"schedule `{name}` has one stage on each rank, not {chunks}",
            span,
            help="interleaved_1f1b and looped_bfs take `chunks`",
        )
    for key in arguments:
        if key not in taken:
            own = [each for each in taken if each not in ("ranks", "chunks", "microbatches")]
            raise refuse(
                "E0505",
                f"schedule `{name}` takes no argument `{key}`",
                span,
                help=f"it takes {', '.join(own)}" if own else None,
            )
    try:
        return function(ranks=ranks, microbatches=microbatches, **arguments)
    except ValueError as error:
        raise refuse("E0505", f"schedule `{name}`: {error}", span) from error
