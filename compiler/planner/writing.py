"""Writes a plan as a complete file: the user's declarations with the plan's mesh, layout, schedule and claims.

The model's declarations and their comments are kept verbatim; overridden sizes and settings are written as overridden.
Imports remain, so the file belongs in the directory of the original. If the plan is the file itself, mesh, layout and
schedule are the file's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from partita.compiler.planner.search import Plan
from partita.dsl import spec
from partita.dsl.advice.report import Report
from partita.dsl.config.overrides import apply_overrides
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.names.declarations import Declarations, gather
from partita.dsl.syntax import tree
from partita.dsl.syntax.format import format_text
from partita.dsl.syntax.parser import parse_file
from partita.dsl.syntax.reader import Reader
from partita.dsl.syntax.source import Source
from partita.dsl.syntax.units import BYTES, SECONDS, written
from partita.dsl.syntax.unparse import expression_text

# The declarations that are replaced.
PLANNED = (tree.Mesh, tree.Layout, tree.Schedule, tree.Train, tree.Expect)
PLANNED_ENTRIES = ("model", "layout", "schedule")
# The factor by which claims exceed predictions.
SLACK = 1.03


def written_plan(
    plan: Plan, path: str, overrides: Sequence[str] = (), root: str | None = None, output: str | None = None
) -> str:
    """The text of the plan's file, derived from the file at `path`, to be written to `output`.

    Raises Refused (E0903) if `output` is in another directory and the file names other files by relative path.
    """
    reader, report = Reader(), Report()
    source = reader.source(path, path)
    declarations = gather(source, path, root, reader, report)
    chosen = apply_overrides(declarations, overrides, report)
    file = parse_file(source, report)
    if report.errors:
        raise Refused(report.diagnostics())
    schedule = None
    if plan.given and plan.file.schedule is not None:
        schedule = (chosen.schedule or declarations.schedules[plan.file.schedule.name]).call
    _check_folder(file, declarations, schedule, path, output)
    parts = [*_kept(source, file, declarations), *_planned(plan, source, declarations, schedule)]
    return format_text("\n".join(parts), os.path.basename(output or path))


def _check_folder(
    file: tree.File, declarations: Declarations, schedule: tree.Call | None, path: str, output: str | None
) -> None:
    folders = [Path(each).resolve().parent for each in (path, output or path)]
    named = [d.path.value for d in file.declarations if isinstance(d, tree.Import)]
    for table in (*(mesh.table for mesh in declarations.meshes.values()), *(t.table for t in declarations.train)):
        named += [text for entry in (table.entries if table else ()) for text in _strings(entry.value)]
    named += _strings(schedule) if schedule is not None else ()
    if folders[0] != folders[1] and named:
        raise refuse(
            "E0903",
            f"`{output}` would not find `{named[0]}`, which is relative to the directory of `{path}`",
            help=f"write it there: -o {folders[0] / Path(output or path).name}",
        )


def _strings(expression: tree.Expression) -> Iterator[str]:
    """The strings in an expression."""
    match expression:
        case tree.String():
            yield expression.value
        case tree.Call(arguments=arguments):
            for argument in arguments:
                yield from _strings(argument.value)
        case tree.List(items=items):
            for item in items:
                yield from _strings(item)
        case tree.Arrow(left=left, right=right) | tree.Binary(left=left, right=right):
            yield from (*_strings(left), *_strings(right))
        case tree.Group(inner=inner) | tree.Negative(operand=inner) | tree.Not(operand=inner):
            yield from _strings(inner)


# ---------------------------------------------------------------- declarations that are kept


def _kept(source: Source, file: tree.File, declarations: Declarations) -> Iterator[str]:
    """The text of the declarations that are kept, each with the comments before and after it."""
    text = source.text
    own: set[str] = set()
    for i, declaration in enumerate(file.declarations):
        before = file.declarations[i - 1].span.end if i else 0
        after = file.declarations[i + 1].span.start if i + 1 < len(file.declarations) else len(text)
        if isinstance(declaration, PLANNED):
            if not i:
                # Comments that an empty line separates from the first declaration are about the file.
                head, gap, _ = text[: declaration.span.start].rpartition("\n\n")
                yield head + gap
            continue
        start = before + text[before : declaration.span.start].find("\n") + 1 if i else 0
        end = declaration.span.end
        line = text.find("\n", end)
        end = min(after, line if line >= 0 else len(text))
        body = text[start:end]
        if isinstance(declaration, tree.Axes | tree.Constants):
            now_declared = declarations.axes if isinstance(declaration, tree.Axes) else declarations.constants
            for entry in reversed(declaration.entries):
                own.add(entry.key.text)
                now = now_declared[entry.key.text].value
                if now is not entry.value:
                    place = entry.value.span
                    body = body[: place.start - start] + expression_text(now) + body[place.end - start :]
        yield body
    for keyword, entries in (("axis", declarations.axes), ("const", declarations.constants)):
        for name, entry in entries.items():
            if name not in own and entry.value.span.source.name == "command line":
                yield f"{keyword} {name} = {expression_text(entry.value)}"


# ---------------------------------------------------------------- declarations of the plan


def _planned(plan: Plan, source: Source, declarations: Declarations, schedule: tree.Call | None) -> Iterator[str]:
    """The plan's mesh, layout, schedule, train block and claims. `schedule` is the file's own, if the plan keeps it."""
    file = plan.file
    mesh = file.mesh
    assert mesh is not None
    assert file.layout is not None
    tables = (declarations.meshes, declarations.layouts, declarations.schedules)
    imported = [{n for n, d in table.items() if d.span.source is not source} for table in tables]
    preferred = (mesh.name, "planned", "planned")
    names = [_free(name, used) for name, used in zip(preferred, imported, strict=True)]
    yield _mesh(mesh, names[0])
    rules = "\n".join(map(_rule, file.layout.rules))
    yield f"layout {names[1]} on {names[0]} {{\n{rules}\n}}"
    chosen = {"layout": names[1]}
    if file.schedule is not None:
        yield f"schedule {names[2]} = {expression_text(schedule) if schedule else _call(file.schedule.call)}"
        chosen["schedule"] = names[2]
    entries = [each for train in declarations.train for each in train.table.entries]
    lines = [f"model = {file.trained[0].name}"]
    lines += [f"{key} = {name}" for key, name in chosen.items()]
    settings = {each.key.text: expression_text(each.value) for each in entries if each.key.text not in PLANNED_ENTRIES}
    if plan.candidate.late:
        settings["validate"] = spec.AFTER.name
    lines += [f"{key} = {value}" for key, value in settings.items()]
    yield "train {\n" + "\n".join(lines) + "\n}"
    yield "# The plan's predicted cost, with some slack.\nexpect {\n" + "\n".join(_claims(plan)) + "\n}"


def _claims(plan: Plan) -> Iterator[str]:
    yield f"peak_memory <= {written(plan.peak * SLACK, BYTES, 4)}"
    yield f"step_time <= {written(plan.prediction.step_time * SLACK, SECONDS, 4)}"
    bubble = 100 * plan.prediction.timeline.bubble * SLACK
    if plan.candidate.pipe > 1:
        yield f"bubble <= {bubble + 0.1:.1f}%"


def _free(name: str, used: set[str]) -> str:
    number, candidate = 2, name
    while candidate in used:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


def _mesh(mesh: spec.Mesh, name: str) -> str:
    sizes = ", ".join(f"{axis} = {size}" for axis, size in mesh.axes)
    lines = [] if mesh.device is None else [f"device = {_call(mesh.device)}"]
    links = ", ".join(f"{axis} -> {_call(link)}" for axis, link in mesh.links.items())
    lines += [f"link = [{links}]"] if links else []
    return f"mesh {name}({sizes})" + (" {\n" + "\n".join(lines) + "\n}" if lines else "")


def _call(call: spec.Call) -> str:
    """A call as written in the file, or spelled out if the search made it."""
    if call.span is not None:
        return call.span.source.text[call.span.start : call.span.end]
    arguments = {key: value for key, value in call.arguments.items() if value is not None}
    if arguments.get("over") == "batch":
        del arguments["over"]
    shown = {key: f"[{', '.join(each)}]" if isinstance(each, tuple) else each for key, each in arguments.items()}
    return f"{call.name}({', '.join(f'{key} = {value}' for key, value in shown.items())})" if arguments else call.name


def _rule(rule: spec.Rule) -> str:
    match rule:
        case spec.ShardRule(targets=targets, mesh_axes=mesh_axes, zigzag=zigzag, exchange=exchange, uneven=uneven):
            shown = (f"{'.'.join(t.path)}: {t.name}" if t.path else t.name for t in targets)
            words = [*["zigzag"] * zigzag, *([exchange] if exchange else [])]
            by = f" by {', '.join(words)}" if words else ""
            return f"shard {', '.join(shown)} -> {', '.join(mesh_axes)}{f' {uneven}' if uneven else ''}{by}"
        case spec.StageRule(repeats=repeats, mesh_axis=mesh_axis, counts=counts):
            listed = f" [{', '.join(map(str, counts))}]" if counts else ""
            return f"stage {', '.join(repeats)} -> {mesh_axis}{listed}"
        case spec.RecomputeRule(paths=paths):
            return f"recompute {', '.join('.'.join(path) for path in paths)}"
        case spec.OffloadRule(paths=paths, mapped=mapped):
            return f"offload {', '.join('.'.join(path) for path in paths)}{' by mmap' if mapped else ''}"
        case spec.OverlapRule(mesh_axes=mesh_axes, pieces=pieces):
            return f"overlap {', '.join(mesh_axes)} in {pieces}"
        case spec.PlaceRule(paths=paths, mesh_axis=mesh_axis, first=first, last=last):
            return f"place {', '.join('.'.join(path) for path in paths)} -> {mesh_axis}[{first}..{last}]"
