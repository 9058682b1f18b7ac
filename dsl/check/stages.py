"""Checks of a pipeline that need no compilation: whether stages can be cut as the layout and the schedule say.

The compiler, which knows what each stage computes, refuses the same with the same diagnostics, and more.
"""

from __future__ import annotations

from collections.abc import Iterator

from partita.dsl import spec
from partita.dsl.config.builtins import SCHEDULES
from partita.dsl.diagnostic import Diagnostic


def chunks_of(schedule: spec.Schedule | None) -> int | None:
    """The number of stages on each rank; None if only the file of the schedule says it."""
    if schedule is None:
        return 1
    chunks = SCHEDULES[schedule.call.name].chunks
    if chunks is None and "chunks" not in schedule.call.arguments:
        return None
    return int(chunks or schedule.call.arguments["chunks"] or 1)


def stage_misfits(file: spec.Spec) -> Iterator[Diagnostic]:
    """E0403 and E0404: stages that the layout, the schedule and the repeats of the model do not have."""
    chunks, rules = chunks_of(file.schedule), stage_rules(file.layout)
    conflict = next(conflicts(file, chunks), None)
    if conflict is not None:
        yield conflict
        return
    if file.mesh is None or file.model is None or chunks is None or not rules:
        return
    ranks = file.mesh.size(rules[0].mesh_axis)
    if ranks * chunks == 1:
        return
    for rule in rules:
        if isinstance(rule, spec.PlaceRule):
            if rule.last >= ranks * chunks:
                yield no_such_stage(rule, ranks, chunks)
            continue
        layers = _iterations(file.model.body, rule.repeats, {})
        if rule.counts is not None and (len(rule.counts) != ranks * chunks or sum(rule.counts) != layers):
            yield other_counts(rule, layers, ranks, chunks)
        elif rule.counts is None and 0 < layers < ranks * chunks:
            yield too_few_layers(rule, layers, ranks, chunks)


def stage_rules(layout: spec.Layout | None) -> list[spec.StageRule | spec.PlaceRule]:
    """The rules of a layout that say where stages are."""
    return [rule for rule in (layout.rules if layout else ()) if isinstance(rule, spec.StageRule | spec.PlaceRule)]


def conflicts(file: spec.Spec, chunks: int | None) -> Iterator[Diagnostic]:
    """E0404: rules that contradict each other or themselves; or a schedule of several stages on a rank, and no rule."""
    rules = stage_rules(file.layout)
    for rule in rules[1:]:
        if rule.mesh_axis != rules[0].mesh_axis:
            message = f"stages are cut over two mesh axes, `{rules[0].mesh_axis}` and `{rule.mesh_axis}`"
            yield Diagnostic("E0404", message, rule.span, help="use one mesh axis for the pipeline")
    several = spec.rules_of(file.layout, spec.StageRule)
    if len(several) > 1:
        help = "name all repeats in one rule"
        yield Diagnostic("E0404", "a layout has at most one `stage` rule", several[1].span, help=help)
    if several and file.model is not None:
        yield from _nested(several[0], file.model.body)
    if not rules and chunks is not None and chunks > 1 and file.schedule is not None:
        yield _missing_stage_rule(file, file.schedule.call, chunks)


def _nested(rule: spec.StageRule, body: spec.Body) -> Iterator[Diagnostic]:
    """E0404: a rule names a repeat that is only inside another one of its names."""
    cut: set[str] = set()
    inside: dict[str, str] = {}
    seen: set[tuple[int, str | None]] = set()
    waiting: list[tuple[spec.Body, str | None]] = [(body, None)]
    while waiting:
        top, whole = waiting.pop()
        if (id(top), whole) in seen:
            continue
        seen.add((id(top), whole))
        for step in top.steps:
            around = whole
            if isinstance(step, spec.Repeat) and step.name in rule.repeats:
                if whole is None:
                    cut.add(step.name)
                elif step.name != whole:
                    inside.setdefault(step.name, whole)
                around = whole or step.name
            if isinstance(step, spec.CallBlock | spec.Repeat | spec.Scan):
                waiting.append((step.body, around))
    for name, around in inside.items():
        if name not in cut:
            yield Diagnostic(
                "E0404",
                f"`{name}` is inside `{around}`, and stages have whole iterations of `{around}`",
                rule.span,
                help=f"`stage {name} -> {rule.mesh_axis}` cuts between the iterations of both, "
                f"`stage {around} -> {rule.mesh_axis}` between those of `{around}` alone",
            )


def _missing_stage_rule(file: spec.Spec, call: spec.Call, chunks: int) -> Diagnostic:
    """E0404: the schedule needs several stages for each rank, and no `stage` rule defines them."""
    steps = file.model.body.steps if file.model is not None else ()
    repeat = next((step.name for step in steps if isinstance(step, spec.Repeat)), None)
    layout = file.layout
    used = {each for rule in (layout.rules if layout else ()) for each in getattr(rule, "mesh_axes", ())}
    over = next((name for name, _ in (file.mesh.axes if file.mesh else ()) if name not in used), "…")
    return Diagnostic(
        "E0404",
        f"schedule `{call.name}` is for {chunks} stages on each rank, and "
        + (f"layout `{layout.name}` has no `stage` rule" if layout else "there is no layout with a `stage` rule"),
        call.span,
        (f"`{layout.span.text.splitlines()[0]}`   ({layout.span.place})",) if layout and layout.span else (),
        f"`stage {repeat or '…'} -> {over}` in the layout, or another schedule, such as `one_f_one_b`",
    )


def no_such_stage(rule: spec.PlaceRule, ranks: int, chunks: int) -> Diagnostic:
    """E0404: a `place` rule names a stage beyond the last one."""
    return Diagnostic(
        "E0404",
        f"there is no stage {max(rule.first, rule.last)}: stages are 0 to {ranks * chunks - 1}",
        rule.span,
        help=f"{ranks} ranks × {chunks} chunks make {ranks * chunks} stages",
    )


def other_counts(rule: spec.StageRule, layers: int, ranks: int, chunks: int) -> Diagnostic:
    """E0404: the numbers of layers of a `stage` rule are not one for each stage, or not all layers together."""
    counts = rule.counts or ()
    return Diagnostic(
        "E0404",
        f"`stage` gives {len(counts)} counts, {sum(counts)} layers in all, "
        f"for {ranks * chunks} stages and {layers} layers",
        rule.span,
        (_product(ranks, chunks),),
        "give one count for each stage, adding up to the number of layers",
    )


def too_few_layers(rule: spec.StageRule, layers: int, ranks: int, chunks: int) -> Diagnostic:
    """E0403: there are more stages than iterations of the repeats that a rule names."""
    return Diagnostic(
        "E0403",
        f"{ranks * chunks} stages for {layers} iterations of `{', '.join(rule.repeats)}`",
        rule.span,
        (_product(ranks, chunks),),
        "use fewer ranks or chunks, or repeat more often",
    )


def _product(ranks: int, chunks: int) -> str:
    return f"{ranks} ranks × {chunks} chunks = {ranks * chunks} stages"


def _iterations(body: spec.Body, names: tuple[str, ...], known: dict[int, int]) -> int:
    """How many iterations a body has of the repeats of some names; of nested ones, only the outermost count."""
    if id(body) not in known:
        known[id(body)] = sum(
            step.count * (1 if step.name in names else _iterations(step.body, names, known))
            if isinstance(step, spec.Repeat)
            else _iterations(step.body, names, known)
            for step in body.steps
            if isinstance(step, spec.CallBlock | spec.Repeat) and not isinstance(step, spec.InstanceParameters)
        )
    return known[id(body)]
