"""What a file asks for and cannot have together, as far as its text alone says so.

The compiler refuses the same; and, with these diagnostics, what only it knows.
"""

from __future__ import annotations

from collections.abc import Iterator

from partita.dsl import spec
from partita.dsl.check.divisibility import shared_axes, zigzag_axes
from partita.dsl.check.language_model import sources_of
from partita.dsl.check.stages import stage_rules
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.syntax.source import Span
from partita.dsl.types import FLOATS

OWN_DATA = "evaluate data of its own: `eval = every(…, data = …)`"


def exclusions(file: spec.Spec) -> Iterator[Diagnostic]:
    """E0401, E0419, E0422, E0505: of the layout, the schedule, the train block and the model."""
    yield from orders(file)
    if file.train is not None and file.model is not None:
        yield from _trained_apart(file, file.train, file.model)
        yield from _captured(file, file.train, file.model)


def orders(file: spec.Spec) -> Iterator[Diagnostic]:
    """E0419 and E0505: axes in zigzag order, or shared by the pipeline, that are also cut over time."""
    zigzag, sequence = zigzag_axes(file), file.schedule.sequence if file.schedule else None
    if file.batch in zigzag:
        help = f"`shard {file.batch} -> …` without `by zigzag`: a row costs the same wherever it is"
        message = f"`{file.batch}` is split into microbatches, whose rows follow each other"
        yield Diagnostic("E0419", message, zigzag[file.batch][1], help=help)
    if sequence is None or file.schedule is None:
        return
    if sequence[0] in zigzag:
        over, place = zigzag[sequence[0]]
        help = f"`shard {sequence[0]} -> {', '.join(name for name, _ in over)}`, or no slices"
        message = f"`{sequence[0]}` cannot be in zigzag order and be cut into slices as well"
        yield Diagnostic("E0419", message, place, help=help)
    rules = stage_rules(file.layout)
    if shared_axes(file) and file.mesh is not None and file.mesh.size(rules[0].mesh_axis) > 1:
        message = f"schedule `{file.schedule.call.name}` cannot have slices yet where all ranks share an axis"
        help = "cut the batch alone: `over = batch`, without `slices`"
        yield Diagnostic("E0505", message, file.schedule.call.span, help=help)


def _trained_apart(file: spec.Spec, train: spec.Train, model: spec.Model) -> Iterator[Diagnostic]:
    """E0401: what replica groups, or paired steps, cannot have yet."""
    if train.local is None and not train.paired:
        return
    for rule in spec.rules_of(file.layout, spec.OffloadRule):
        if rule.mapped:
            what = "paired steps" if train.paired else "replica groups"
            message = f"parameters of {what} cannot be files yet"
            yield Diagnostic("E0401", message, rule.span, help="leave out `by mmap`, or `sync`")
            break
    for each in spec.parameters(model.body) if train.local is not None else ():
        if each.buffer and each.type.dtype not in FLOATS:
            place = train.sync.span if train.sync is not None else None
            message = f"buffer `{each.name}` has integers, of which replica groups have no mean"
            yield Diagnostic("E0401", message, place, help="a buffer of floats, or leave out `sync`")


def _captured(file: spec.Spec, train: spec.Train, model: spec.Model) -> Iterator[Diagnostic]:
    """E0422: what differs from step to step, or makes the host wait."""
    if not train.graphs:
        return
    for step in spec.steps(model.body):
        if isinstance(step, spec.Sample) or (
            isinstance(step, spec.Apply) and (step.options.get("rate") or step.options.get("dropout"))
        ):
            yield uncaptured("this draws random numbers", step.span)
    for rule in spec.rules_of(file.layout, spec.OffloadRule):
        yield uncaptured("the host waits for what is copied to its memory", rule.span, " or the rule")


def evaluations(file: spec.Spec) -> Iterator[Diagnostic]:
    """E0608: an `eval` of data that hold nothing out, or of data of its own that do."""
    evaluation = file.train.eval if file.train is not None else None
    if file.train is None or file.model is None or evaluation is None or not file.model.body.inputs:
        return
    own = evaluation.arguments.get("data")
    for call in sources_of(own or file.train.data):
        holdout = call.arguments.get("holdout")
        if holdout is not None and bool(holdout) == (own is not None):
            yield held_in_vain(call) if holdout else nothing_held_out(call)


# What gives an end to sources that have none otherwise, of which a part can then be held out.
_ENDS = {"hub": "stream = false, ", "python": "rows = 10_000, "}


def _endless(call: spec.Call) -> bool:
    return bool(call.arguments.get("stream")) or call.arguments.get("rows", 0) is None


def nothing_held_out(call: spec.Call) -> Diagnostic:
    """E0608: a source of data is trained on as a whole, and evaluated."""
    text = call.span.text if call.span is not None else ""
    share = f"{_ENDS.get(call.name, '') if _endless(call) else ''}holdout = 10%"
    if text.endswith(")") and "holdout" not in text and "\n" not in text:
        share = f"{text[:-1]}{'' if text.endswith('()') else ', '}{share})"
    message = "`eval` needs data that training does not see, and there is no `holdout`"
    return Diagnostic("E0608", message, call.span, help=f"write `{share}`, or {OWN_DATA}")


def held_in_vain(call: spec.Call) -> Diagnostic:
    """E0608: data that are there to be evaluated hold some of it out."""
    message = "the data of `eval` is evaluated as a whole, and has no `holdout`"
    return Diagnostic("E0608", message, call.span, help="remove `holdout`")


def uncaptured(why: str, place: Span | None, or_else: str = "") -> Diagnostic:
    """E0422: a step cannot be captured, for a reason at a place."""
    help = f"leave out `graphs`{',' + or_else if or_else else ''}"
    return Diagnostic("E0422", f"a step cannot be captured: {why}", place, help=help)
