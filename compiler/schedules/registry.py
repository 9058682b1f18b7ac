"""Schedules by name. A schedule is one function in a file of its own and one line in `SCHEDULES`.

A function takes `ranks`, `microbatches`, `chunks` if it can have any number of stages on a rank, `conditions` (costs
and memory) if it looks at them, and arguments of its own by name; it returns a `Schedule` with its stated bound of live
activations, and raises ValueError for arguments that it cannot serve. What it returns is held to the laws
(`partita.compiler.laws`), whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from partita.compiler.communication import default_messages
from partita.compiler.schedules.auto import auto
from partita.compiler.schedules.conditions import Conditions
from partita.compiler.schedules.dualpipe_v import dualpipe_v
from partita.compiler.schedules.forward_only import forward_only
from partita.compiler.schedules.from_file import from_file
from partita.compiler.schedules.gpipe import gpipe
from partita.compiler.schedules.interleaved import interleaved_1f1b
from partita.compiler.schedules.looped_bfs import looped_bfs
from partita.compiler.schedules.one_f_one_b import one_f_one_b
from partita.compiler.schedules.policy import policy
from partita.compiler.schedules.schedule import LIMIT, Schedule
from partita.compiler.schedules.text import read
from partita.compiler.schedules.zb_h1 import zb_h1
from partita.compiler.schedules.zb_h2 import zb_h2
from partita.compiler.schedules.zb_v import zb_v
from partita.compiler.simulator import equal_costs
from partita.dsl.builtins import SCHEDULES as BUILTIN
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.source import Span
from partita.dsl.spec import Call

# What users can name.
SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
    "auto": auto,
    "policy": policy,
    "from_file": from_file,
}

# What the compiler itself asks for.
INTERNAL: Mapping[str, Callable[..., Schedule]] = {"forward_only": forward_only}

# Schedules of so many chunks and no others; those that are not here and take no `chunks` have one.
FIXED_CHUNKS: Mapping[str, int] = {"zb_v": 2, "dualpipe_v": 2}


def size_of(call: Call | None) -> tuple[int, int]:
    """The chunks and the microbatches that a call of a schedule asks for; one and one without a schedule.

    Raises Refused (E0506) where it names a file that is no schedule.
    """
    if call is None:
        return 1, 1
    if call.name == "from_file":
        schedule = read(call.arguments["path"])
        return schedule.chunks, schedule.microbatches
    chunks = FIXED_CHUNKS.get(call.name) or call.arguments.get("chunks") or 1
    return int(chunks), int(call.arguments["microbatches"])


def looks_at_costs(name: str) -> bool:
    """Whether a schedule depends on its conditions."""
    return "conditions" in signature({**SCHEDULES, **INTERNAL}[name]).parameters


def make(
    name: str,
    ranks: int,
    chunks: int,
    microbatches: int,
    *,
    conditions: Conditions | None = None,
    span: Span | None = None,
    **arguments: Any,
) -> Schedule:
    """The schedule of that name for `ranks` ranks of `chunks` stages each; `arguments` are the schedule's own.

    `conditions` are equal costs, free transfers and no limit of memory unless given. Raises Refused (E0505, at `span`)
    for an unknown name and for sizes and arguments that the schedule cannot serve.
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
    own = [each for each in taken if each not in ("ranks", "chunks", "microbatches", "conditions")]
    for key in arguments:
        if key not in own:
            raise refuse(
                "E0505",
                f"schedule `{name}` takes no argument `{key}`",
                span,
                help=f"it takes {', '.join(own)}" if own else None,
            )
    if "chunks" in taken:
        arguments["chunks"] = chunks
    elif chunks != FIXED_CHUNKS.get(name, 1):
        count = FIXED_CHUNKS.get(name, 1)
        stages = "one stage" if count == 1 else f"{count} stages"
        raise refuse(
            "E0505",
            f"schedule `{name}` has {stages} on each rank, not {chunks}",
            span,
            help=f"{', '.join(each for each in BUILTIN if 'chunks' in BUILTIN[each].names)} take `chunks`",
        )
    if "conditions" in taken:
        arguments["conditions"] = conditions or Conditions(equal_costs(), default_messages(ranks * chunks))
    try:
        return function(ranks=ranks, microbatches=microbatches, **arguments)
    except Refused:
        raise
    except ValueError as error:
        raise refuse("E0505", f"schedule `{name}`: {error}", span) from error
