"""Blocks that are called twice where one network may be meant: warnings (W0204).

Each call of a block has parameters of its own: two views of a sample, what is real and what is generated, or the two
sides of a preference go through two networks. Most second calls are meant so: layers that follow each other, products
of one value, branches that join again. So there is a warning only if the calls of a block in a body take different
values of the same types, each computed from an input or a sample that the other is not computed from; and none of its
calls there reads what another gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from partita.dsl import spec
from partita.dsl.advice.report import Report
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.syntax.source import Source, Span


def report_second_calls(model: spec.Model, source: Source, report: Report) -> None:
    """Warn of the second call of each block in a body of the file `source`."""
    seen: set[Span] = set()
    for body in spec.bodies(model.answering):
        for first, second in _alike(body):
            if second.span.source is source and second.span not in seen:
                seen.add(second.span)
                note = f"`{first.span.text}`   ({first.span.place}) has parameters of its own"
                message = f"`{second.block}` is called twice: these are two networks, with two sets of parameters"
                help = (
                    f"for one network, `share both = {second.block}` before, and call `both` twice; "
                    "nothing, if two are meant"
                )
                report.add(Diagnostic("W0204", message, second.span, (note,), help))


def _alike(body: spec.Body) -> Iterator[tuple[spec.CallBlock, spec.CallBlock]]:
    """The first two calls of each block that may be meant as one network."""
    roots: list[frozenset[int]] = [frozenset([number]) for number in range(len(body.inputs))]
    calls: dict[int, list[tuple[spec.CallBlock, frozenset[int]]]] = {}
    for step in body.steps:
        origins = frozenset().union(*(roots[each] for each in spec.operands_of(step) if isinstance(each, int)))
        if isinstance(step, spec.CallBlock):
            calls.setdefault(id(step.body), []).append((step, origins))
        own = frozenset([len(roots)]) if isinstance(step, spec.Sample) else frozenset()
        roots += [origins | own] * spec.result_count(step)
    for alike in calls.values():
        if len(alike) == 1 or all(each.buffer for each in spec.parameters(alike[0][0].body)):
            continue  # or nothing is trained
        if all(one - other and other - one for (_, one), (_, other) in combinations(alike, 2)):
            (first, _), (second, _) = alike[:2]
            yield first, second
