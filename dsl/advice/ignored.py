"""Targets that every `cross_entropy` ignores and an `accuracy` counts as wrong: warnings (W0202).

The readers of each value are found bottom-up: what the body of a call, repeat or scan reads by its inputs, its caller
reads by the arguments. Values that are computed in the same way are the same targets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeAlias

from partita.dsl import spec
from partita.dsl.advice.report import Report
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.functions.signatures import LIKELIHOODS

LABELLED = (*LIKELIHOODS, "accuracy")

Readers: TypeAlias = Mapping[spec.Operand, Iterable[spec.Apply]]


def report_miscounted(model: spec.Model, report: Report) -> None:
    """Warn of each `accuracy` that counts targets which all cross-entropies of the same targets ignore."""
    known: dict[int, Readers] = {}
    _readers(model.body, known)
    for readers in (each for by_target in known.values() for each in by_target.values()):
        losses = [each for each in readers if each.function in LIKELIHOODS]
        ignored = [each.options.get("ignore") for each in losses]
        if not losses or None in ignored:
            continue
        for each in readers:
            o = each.options
            if each.function == "accuracy" and not o["weights"] and o.get("ignore") not in ignored:
                message = f"`accuracy` counts targets as wrong that `{losses[0].function}` ignores"
                note = f"`{losses[0].span.text}`   ({losses[0].span.place})"
                help = _with_ignore(each.span.text, f"ignore = {ignored[0]}")
                report.add(Diagnostic("W0202", message, each.span, (note,), help))


def _with_ignore(call: str, argument: str) -> str:
    """The help: the call with the argument, or the argument alone where the call is long."""
    if call.endswith("…") or "ignore" in call:
        return f"`{argument}` in this call"
    return f"`{call[:-1].rstrip()}, {argument})`"


def _readers(body: spec.Body, known: dict[int, Readers]) -> Readers:
    """By value of a body, what reads it as its targets, in the body and in those that it calls."""
    if id(body) in known:
        return known[id(body)]
    by_target: dict[spec.Operand, list[spec.Apply]] = defaultdict(list)
    same: dict[spec.Operand, spec.Operand] = {}  # the first value that is computed like another
    computed: dict[Hashable, spec.Operand] = {}
    number = len(body.inputs)
    for step in body.steps:
        match step:
            case spec.Apply():
                operands = tuple(same.get(each, each) for each in step.operands)
                same[number] = computed.setdefault((step.function, operands, repr(step.options)), number)
                if step.function in LABELLED:
                    by_target[operands[1]].append(step)
            case spec.CallBlock() | spec.Repeat() | spec.Scan():
                sources = [same.get(each, each) for each in spec.operands_of(step)]
                _add(by_target, _readers(step.body, known), sources)
        number += spec.result_count(step)
    known[id(body)] = by_target
    return by_target


def _add(by_target: Mapping[spec.Operand, list[spec.Apply]], inside: Readers, sources: list[spec.Operand]) -> None:
    for value, readers in inside.items():
        if isinstance(value, int) and value < len(sources):
            by_target[sources[value]] += (each for each in readers if each not in by_target[sources[value]])
