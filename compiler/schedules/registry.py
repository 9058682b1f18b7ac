"""Builds schedules by name (`partita.compiler.schedules.generator`)."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from partita.compiler.schedules.communication import default_messages
from partita.compiler.schedules.conditions import Conditions
from partita.compiler.schedules.generator import SCHEDULES, Generator
from partita.compiler.schedules.schedule import LIMIT, Schedule
from partita.compiler.schedules.simulator import equal_costs
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.syntax.source import Span


def make(
    named: str | Generator,
    ranks: int,
    chunks: int,
    microbatches: int,
    *,
    conditions: Conditions | None = None,
    span: Span | None = None,
    **arguments: Any,
) -> Schedule:
    """A schedule for `ranks` ranks of `chunks` stages each; `arguments` are the schedule's own.

    `conditions` defaults to equal costs, free transfers and unlimited memory. Raises Refused (E0505, at `span`) for an
    unknown name, or for sizes or arguments that the schedule does not support.
    """
    generator = SCHEDULES.get(named) if isinstance(named, str) else named
    if generator is None:
        near = get_close_matches(str(named), SCHEDULES, 1)
        help = f"did you mean `{near[0]}`?" if near else f"schedules: {', '.join(SCHEDULES)}"
        raise refuse("E0505", f"there is no schedule `{named}`", span, help=help)
    name = generator.name
    slices = arguments.get("slices") or 1
    for what, size in (("ranks", ranks), ("chunks", chunks), ("microbatches", microbatches), ("slices", slices)):
        if size < 1:
            raise refuse("E0505", f"schedule `{name}` needs at least 1 of `{what}`, not {size}", span)
    if ranks * chunks * microbatches * slices > LIMIT:
        many = f"{microbatches} microbatches" + (f" of {slices} slices" if slices > 1 else "")
        raise refuse(
            "E0505",
            f"schedule `{name}` would have {ranks} ranks × {chunks} chunks × {many}",
            span,
            help=f"at most {LIMIT} of these together can be scheduled",
        )
    for key in arguments:
        if key not in generator.own:
            raise refuse(
                "E0505",
                f"schedule `{name}` takes no argument `{key}`",
                span,
                help=f"it takes {', '.join(generator.own)}" if generator.own else None,
            )
    if generator.chunks is None:
        arguments["chunks"] = chunks
    elif chunks != generator.chunks:
        stages = "one stage" if generator.chunks == 1 else f"{generator.chunks} stages"
        raise refuse(
            "E0505",
            f"schedule `{name}` has {stages} on each rank, not {chunks}",
            span,
            help=f"{', '.join(each.name for each in SCHEDULES.values() if 'chunks' in each.names)} take `chunks`",
        )
    if generator.conditional:
        arguments["conditions"] = conditions or Conditions(equal_costs(), default_messages(ranks * chunks))
    try:
        schedule = generator.order(ranks=ranks, microbatches=microbatches, **arguments)
    except Refused:
        raise
    except ValueError as error:
        less = "`recompute`, smaller microbatches or more ranks need less memory" if generator.bounded else None
        raise refuse("E0505", f"schedule `{name}`: {error}", span, help=less) from error
    shape, requested = (schedule.ranks, schedule.microbatches // schedule.slices), (ranks, microbatches)
    if shape != requested:
        message = "schedule `{}` is for {} ranks and {} microbatches, not for {} and {}"
        raise refuse("E0505", message.format(name, *shape, *requested), span)
    return schedule
