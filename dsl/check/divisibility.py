"""Checks of sizes that need no compilation: that they divide evenly, and that every mesh axis is used.

They cover inputs and parameters, whose sharding depends on the layout rules alone. The compiler checks all other
tensors, with the same diagnostics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from attrs import frozen

from partita.dsl import spec
from partita.dsl.advice.report import Report
from partita.dsl.check.groups import groups_of
from partita.dsl.check.stages import stage_misfits, stage_rules
from partita.dsl.check.uneven import padded_axes, with_divided_mesh
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.functions.signatures import LIKELIHOODS
from partita.dsl.names.paths import is_end, without_ranges
from partita.dsl.syntax.source import Span
from partita.dsl.types import Axis, Type


def report_misfits(file: spec.Spec, report: Report) -> None:
    """Report what does not fit in the model, layout and schedule that `train` chooses: E0402, E0406, E0411, E0412,
    E0403, E0404, E0407, E0421.
    """
    if file.model is None or file.train is None:
        return
    errors, whole = report.errors, file
    with report:
        file = with_divided_mesh(file)
    if report.errors > errors:
        return
    diagnostics = [*_unused(whole), *_groups(file), *_microbatches(file), *mesh_axis_conflicts(file), *_rows(file)]
    diagnostics += stage_misfits(file)
    diagnostics = diagnostics or _splits(file)
    for diagnostic in diagnostics:
        report.add(diagnostic)


@frozen
class Cut:
    """An axis that is split over time: the number of its parts (1 if only a schedule file says it), what one of them
    is, and the size of all (0 if no input has it).
    """

    count: int
    part: str
    whole: int


def undivided(
    axis: Axis, over: Iterable[tuple[str, int]], rule: Span, tensor: str, declared: Span | None, cut: Cut | None = None
) -> Diagnostic:
    """E0411: an axis of `tensor` does not divide evenly over the mesh axes that a rule shards it over. Of an axis that
    is cut, the size may be that of a part.
    """
    over = list(over)
    parts = prod(size for _, size in over)
    size, help = str(axis.size), f"choose sizes so that `{axis.name}` divides into {parts} parts"
    if cut is not None and cut.count > 1 and axis.size * cut.count == cut.whole:
        size = f"{cut.whole}, of which a {cut.part} has {axis.size},"
        help = f"choose sizes so that each of the {cut.count} {plural(cut.part)} divides into {parts} parts: "
        help += f"a multiple of {cut.count * parts} for `{axis.name}`"
    elif cut is not None:
        help += f" in every {cut.part}"
    own, _, blocks = axis.name.partition("~")
    if blocks:  # a part has whole ones
        help = f"choose sizes so that each of {parts} parts of `{own}` has whole blocks, or smaller blocks"
        return _undivided(axis.name, size, over, rule, tensor, declared, help)
    help += f"; or let it be padded: `shard {axis.name} -> {', '.join(name for name, _ in over)} padded`"
    return _undivided(axis.name, size, over, rule, tensor, declared, help)


def _undivided(
    axis: str,
    size: str,
    over: Sequence[tuple[str, int]],
    rule: Span,
    tensor: str,
    declared: Span | None,
    help: str,
) -> Diagnostic:
    return Diagnostic(
        "E0411",
        f"axis `{axis}` of {size} does not divide over {' × '.join(f'`{m}` of {n}' for m, n in over)}",
        rule,
        (_declared(tensor, declared),),
        help,
    )


def plural(part: str) -> str:
    """What several parts of an axis are called."""
    return {"microbatch": "microbatches", "slice": "slices", "group": "groups"}[part]


def unequal(
    axis: Axis, count: int, schedule: Span | None, tensor: str, declared: Span | None, part: str = "microbatch"
) -> Diagnostic:
    """E0406: an axis of `tensor` does not divide evenly into the microbatches of a schedule, or into slices."""
    parts = plural(part)
    return Diagnostic(
        "E0406",
        f"axis `{axis.name}` of {axis.size} does not divide into {count} {parts}",
        schedule or declared,
        (_declared(tensor, declared),),
        f"choose a number of {parts} that divides {axis.size}",
    )


# Functions that range over a vocabulary.
OF_VOCABULARIES = ("embedding", *LIKELIHOODS)


def mesh_axis_conflicts(file: spec.Spec) -> Iterator[Diagnostic]:
    """E0412 for each rule that shards tensors over the mesh axis of the pipeline stages, except axes of a vocabulary:
    all its ranks can share these.
    """
    stages = next(iter(stage_rules(file.layout)), None)
    for rule in spec.rules_of(file.layout, spec.ShardRule):
        if stages is None or stages.mesh_axis not in rule.mesh_axes:
            continue
        known = _vocabularies(file)
        wrong = [each for each in rule.targets if each.is_class or each.path is not None or each.name not in known]
        if not wrong:
            continue
        names = " or ".join(f"`{target.name}`" for target in wrong)
        yield Diagnostic(
            "E0412",
            f"mesh axis `{stages.mesh_axis}` is used for the pipeline, and cannot also split {names}",
            rule.span,
            (f"`{stages.span.text}`   ({stages.span.place})",),
            "use another mesh axis for one of the two",
        )


def shared_axes(file: spec.Spec) -> dict[str, Span]:
    """The axes that all ranks of the pipeline share, each with the place that says so."""
    stages = stage_rules(file.layout)[:1]
    rules = spec.rules_of(file.layout, spec.ShardRule)
    shared = (rule for stage in stages for rule in rules if stage.mesh_axis in rule.mesh_axes)
    return {target.name: target.span for rule in shared for target in rule.targets}


def zigzag_axes(file: spec.Spec) -> dict[str, tuple[tuple[tuple[str, int], ...], Span]]:
    """The axes that a layout puts into zigzag order: the mesh axes that split each, with sizes, and the place."""
    if file.mesh is None:
        return {}
    mesh = file.mesh
    return {
        rule.targets[0].name: (over, rule.span)
        for rule in spec.rules_of(file.layout, spec.ShardRule)
        if rule.zigzag
        if (over := tuple((name, size) for name, size in mesh.axes if size > 1 and name in rule.mesh_axes))
    }


def ranks_in_zigzag(file: spec.Spec) -> dict[str, int]:
    """For how many ranks each axis is in zigzag order, of those that are."""
    return {axis: prod(size for _, size in over) for axis, (over, _) in zigzag_axes(file).items()}


def _vocabularies(file: spec.Spec) -> set[str]:
    """The axes that embeddings look up in, and losses choose from."""
    if file.model is None:
        return set()
    used = (each for each in spec.applications(file.model.answering) if each.function in OF_VOCABULARIES)
    return {str(each.options["over"]) for each in used if "over" in each.options}


def _declared(tensor: str, place: Span | None) -> str:
    return tensor + (f"   (declared at {place.place})" if place else "")


def schedule_span(file: spec.Spec) -> Span | None:
    """Where a file's schedule is called."""
    return (file.schedule.call.span or file.schedule.span) if file.schedule else None


def _unused(file: spec.Spec) -> Iterator[Diagnostic]:
    """E0402: mesh axes larger than 1 that no rule uses, so that their ranks would do redundant work."""
    mesh, layout = file.mesh, file.layout
    if mesh is None or layout is None:
        return
    used = {axis for rule in spec.rules_of(layout, spec.ShardRule) for axis in rule.mesh_axes}
    used |= {rule.mesh_axis for rule in stage_rules(layout)}
    unused = [f"`{name}` of {size}" for name, size in mesh.axes if size > 1 and name not in used]
    if unused:
        yield Diagnostic(
            "E0402",
            f"no rule of layout `{layout.name}` uses mesh axis {', '.join(unused)}",
            mesh.span,
            help="add a rule that uses it, or set its size to 1",
        )


def cuts_of(file: spec.Spec) -> dict[str, Cut]:
    """The axes that are split over time."""
    arguments = file.schedule.call.arguments if file.schedule else {}
    counts = {file.batch: (int(arguments.get("microbatches", 1)), "microbatch")}
    if file.schedule and file.schedule.sequence is not None:
        axis, count = file.schedule.sequence
        counts[axis] = count, "slice"
    inputs = _inputs(file.model) if file.model is not None else ()
    sizes = {axis.name: axis.size for _, type, _ in inputs for axis in type.axes}
    return {axis: Cut(count, part, sizes.get(axis, 0)) for axis, (count, part) in counts.items()}


def _groups(file: spec.Spec) -> Iterator[Diagnostic]:
    """E0406 and E0421: replica groups that cannot share out the batch or the ranks evenly."""
    model, _ = file.trained
    try:
        groups = groups_of(file)
    except Refused as refused:
        yield from refused.diagnostics
        return
    for name, type, place in _inputs(model) if groups is not None else ():
        if groups is not None and type.has(file.batch) and type.axis(file.batch).size % groups.count:
            yield unequal(type.axis(file.batch), groups.count, groups.span, f"{name}: {type}", place, "group")
            return


def _microbatches(file: spec.Spec) -> Iterator[Diagnostic]:
    model, _ = file.trained
    uneven = padded_axes(file)
    for axis, cut in cuts_of(file).items():
        for name, type, place in _inputs(model):
            if type.has(axis) and type.axis(axis).size % cut.count and axis not in uneven:
                yield unequal(type.axis(axis), cut.count, schedule_span(file), f"{name}: {type}", place, cut.part)
                break


def _rows(file: spec.Spec) -> Iterator[Diagnostic]:
    """E0407: parameters with the axis of the batch, which is cut into microbatches."""
    count = cuts_of(file)[file.batch].count
    if count > 1:
        yield from batch_axis_parameters(file, "E0407", f"a parameter cannot be split into {count} microbatches")


def batch_axis_parameters(file: spec.Spec, code: str, why: str) -> Iterator[Diagnostic]:
    """A diagnostic at each parameter of the model that has the axis of the batch, and so an element for each row."""
    for name, step in declared_parameters(file.model) if file.model is not None else ():
        if step.type.has(file.batch) and not step.buffer:
            rest = ", ".join(step.type.without([file.batch]).names)
            help = f"without that axis it is the same for all rows: `[{rest}]`"
            message = f"`{step.name}` has the axis `{file.batch}`: {why}"
            yield Diagnostic(code, message, step.span, (f"{name}: {step.type}",), help)


def _splits(file: spec.Spec) -> list[Diagnostic]:
    """E0411 for axes of inputs and parameters that do not divide evenly over their mesh axes."""
    mesh, layout = file.mesh, file.layout
    if mesh is None or layout is None or file.model is None:
        return []
    cuts, uneven = cuts_of(file), padded_axes(file)
    targets = [
        (target, rule.mesh_axes)
        for rule in spec.rules_of(layout, spec.ShardRule)
        for target in rule.targets
        if not target.is_class
    ]
    general = [each for each in targets if each[0].path is None]
    diagnostics: dict[tuple[str, str], Diagnostic] = {}
    tensors = [(name, _of_a_microbatch(type, cuts), span) for name, type, span in _inputs(file.model)]
    parameters = ((name, step.type, step.span) for name, step in declared_parameters(file.model))
    for name, type, span in (*tensors, *parameters):
        own = [each for each in targets if _names(each[0], name)]  # these replace the general ones
        for axis, mesh_axes, rule in _assigned(own or general, type.names):
            over = [(each, mesh.size(each)) for each, _ in mesh.axes if each in mesh_axes and mesh.size(each) > 1]
            if type.axis(axis).size % prod(size for _, size in over) and axis not in uneven:
                wrong = undivided(type.axis(axis), over, rule, f"{name}: {type}", span, cuts.get(axis))
                diagnostics.setdefault((rule.place, axis), wrong)
    return list(diagnostics.values())


def _names(target: spec.Target, tensor: str) -> bool:
    """Whether a target names this tensor by path."""
    return target.path is not None and is_end(without_ranges(target.path), tensor)


def _assigned(
    targets: Iterable[tuple[spec.Target, Sequence[str]]], names: Sequence[str]
) -> Iterator[tuple[str, list[str], Span]]:
    """The sharded axes of a tensor, with mesh axes: each mesh axis once, each axis by the first rule that can."""
    used: set[str] = set()
    split: set[str] = set()
    for target, mesh_axes in targets:
        free = [axis for axis in mesh_axes if axis not in used]
        if target.name in names and target.name not in split and free:
            split.add(target.name)
            used.update(free)
            yield target.name, free, target.span


def _of_a_microbatch(type: Type, cuts: Mapping[str, Cut]) -> Type:
    for axis, cut in cuts.items():
        type = type.resized(axis, type.axis(axis).size // cut.count) if type.has(axis) else type
    return type


def _inputs(model: spec.Model) -> Iterator[tuple[str, Type, Span | None]]:
    for name, type in zip(model.body.inputs, model.body.types, strict=False):
        yield name, type, model.span


def declared_parameters(model: spec.Model) -> Iterator[tuple[str, spec.Parameter]]:
    """The parameters and buffers of a model by full name; those of a block that is called several times, once."""
    seen: set[int] = set()
    scopes = [(model.name, model.body)]
    while scopes:
        path, body = scopes.pop()
        if id(body) in seen:
            continue
        seen.add(id(body))
        for step in body.steps:
            if isinstance(step, spec.Parameter):
                yield f"{path}.{step.name}", step
            elif isinstance(step, spec.CallBlock | spec.Repeat):
                scopes.append((f"{path}.{step.scope}", step.body))
            elif isinstance(step, spec.Scan):
                scopes.append((path, step.body))
