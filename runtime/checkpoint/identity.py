"""What a commit is bound to: the tensors and the model's steps, which must match; and settings, which may change.

Two models are the same if their tensors (names, axes, dtypes; hence also the optimizer's) and their steps are, whatever
the sizes of axes that no parameter has. Of parameters that were imported alone, only these and the steps are compared:
any optimizer may begin with them. bf16 and f32 are alike, since a parameter is in bf16 only while it is frozen.
Layout, mesh, schedule, number of steps, `eval` and `checkpoint` may change: they affect results only by rounding. The
rest of the train block and the input shapes are compared as text, and a run that resumes with different ones says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import unified_diff
from itertools import islice
from typing import Any

from partita.compiler.ops.op import accumulation
from partita.compiler.program import Program
from partita.dsl import spec
from partita.dsl.diagnostic import shown
from partita.dsl.syntax.source import Source, Span
from partita.dsl.types import Type
from partita.dsl.version import __version__
from partita.runtime.checkpoint.manifest import Manifest
from partita.runtime.checkpoint.parts import saved_tensors
from partita.runtime.data_files import DataFile, changed

MAX_SHOWN = 6


def manifest_of(file: spec.Spec, program: Program, data: Sequence[DataFile] = ()) -> Manifest:
    """The manifest of all commits of a compiled file trained on `data`, still without step and files."""
    model, train = file.trained
    return Manifest(
        0,
        train.seed,
        model.name,
        digest_of(model),
        train.optimizer.name,
        settings_of(train, program, model),
        {source.name: source.text for source in sources_of(file)},
        program.mesh,
        file.layout.name if file.layout else "",
        text_of(file.schedule.call) if file.schedule else "",
        saved_tensors(program),
        data=tuple(data),
        written_by=f"partita {__version__}",
    )


def settings_of(train: spec.Train, program: Program, model: spec.Model) -> dict[str, str]:
    """The settings that results depend on besides the model's steps, as text."""
    return {
        **{f"input {each.name}": str(each.type) for each in program.inputs},
        **{f"op {each.name}": _code(each) for each in model.operations.values()},
        "data": text_of(train.data),
        "optimizer": text_of(train.optimizer),
        "precision": train.precision,
        "clip": text_of(train.clip),
        "ema": text_of(train.ema),
        "seed": str(train.seed),
        **({"sync": text_of(train.sync)} if train.sync is not None else {}),
    }


def _code(operation: spec.Operation) -> str:
    """The Python functions of an operation, each with the hash of its file."""
    return ", ".join(map(_function, operation.functions))


def _function(function: spec.PythonFunction) -> str:
    return f"{function.name} ({_hash(function.source)})"


def _hash(source: Source) -> str:
    """The beginning of the hash of a file's text."""
    return hashlib.sha256(source.text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def text_of(value: object) -> str:
    """Formats a setting as it could be written: `adamw(lr = constant(value = 0.001), betas = [0.9, 0.95])`."""
    if isinstance(value, spec.Call):
        arguments = (f"{name} = {text_of(each)}" for name, each in value.arguments.items() if each is not None)
        return f"{value.name}({', '.join(arguments)})"
    if isinstance(value, spec.Share):
        return f"{text_of(value.call)} -> {value.share:.6g}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, spec.Optimizer):
        alike = [rule.call for rule in value.rules if rule.targets == (("all",),)]
        return text_of(alike[0]) if len(alike) == len(value.rules) == 1 else "; ".join(map(text_of, value.rules))
    if isinstance(value, spec.OptimizerRule):
        targets = ", ".join(".".join(target) for target in value.targets)
        stored = "" if value.stored is None else f" as {text_of(value.stored)}"
        return f"freeze {targets}{stored}" if value.call is None else f"update {targets} -> {text_of(value.call)}"
    if isinstance(value, spec.AdapterRule):
        return f"lora {', '.join('.'.join(target) for target in value.targets)} -> {text_of(value.call)}"
    if isinstance(value, Source):
        return f"{value.name} ({_hash(value)})"
    if isinstance(value, spec.PythonFunction):
        return _function(value)
    return "none" if value is None else str(value)


# ---------------------------------------------------------------- the model's steps


def digest_of(model: spec.Model) -> str:
    """The SHA-256 of what a model computes: each body's steps in order, with axis names but without axis sizes."""
    numbers: dict[int, int] = {}
    bodies = [model.body]
    written: list[Any] = [model.name, model.loss, list(map(list, model.metrics)), *map(str, model.losses)]
    written += map(text_of, model.adapters)
    numbers[id(model.body)] = 0
    for body in bodies:  # grows during the loop
        for step in body.steps:
            for inner in spec.inner_bodies(step):
                if id(inner) not in numbers:
                    numbers[id(inner)] = len(bodies)
                    bodies.append(inner)
        steps = [_step(step, numbers) for step in body.steps]
        updates = [[_update(each) for each in body.updates]] if body.updates else []
        written.append([list(body.inputs), steps, _plain(body.results), *updates])
    return hashlib.sha256(json.dumps(written).encode()).hexdigest()


def _update(each: spec.Update) -> list[Any]:
    return [each.buffer, each.value, *(["after"] if each.after else [])]


def _step(step: spec.Step, numbers: Mapping[int, int]) -> list[Any]:
    match step:
        case spec.Apply():
            return ["apply", step.function, _plain(step.operands), _plain(step.options), _kind(step.type)]
        case spec.Parameter():
            return ["buffer" if step.buffer else "param", step.name, _kind(step.type)]
        case spec.SharedParameter():
            return ["shared", step.parameter.name, _kind(step.parameter.type)]
        case spec.InstanceParameters():
            decay = [] if step.decay is None else [step.decay]
            return ["share", step.scope, numbers[id(step.body)], _plain(step.copies), *decay]
        case spec.CallBlock() if step.instance is not None:
            return ["call", step.scope, numbers[id(step.body)], _plain(step.arguments), _plain(step.instance)]
        case spec.Sample():
            return ["sample", step.name, _kind(step.type), _plain(step.distribution)]
        case spec.CallBlock():
            return ["call", step.scope, numbers[id(step.body)], _plain(step.arguments)]
        case spec.Repeat():
            own = [step.scope, step.count, *(numbers[id(each)] for each in step.bodies)]
            return ["repeat", *own, _plain(step.carried), _plain(step.captured), *step.kept]
        case spec.Scan():
            own = [step.axis.name, step.backward, numbers[id(step.body)]]
            return ["scan", *own, _plain(step.carried), _plain(step.captured)]


def _kind(type: Type) -> list[Any]:
    return [type.dtype, *type.names]


def _plain(value: object) -> object:
    if isinstance(value, spec.Literal):
        return ["literal", value.value]
    if isinstance(value, spec.Call):
        return [value.name, _plain(value.arguments)]
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in sorted(value.items())}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    assert value is None or isinstance(value, (bool, int, float, str)), value
    return value


def sources_of(file: spec.Spec) -> list[Source]:
    """The sources that the model is written in, the main file first."""
    model, _ = file.trained
    sources = {id(file.source): file.source}
    bodies, seen = [model.body], set[int]()
    while bodies:
        body = bodies.pop()
        if id(body) in seen:
            continue
        seen.add(id(body))
        for step in body.steps:
            if isinstance(step.span, Span):
                sources.setdefault(id(step.span.source), step.span.source)
            bodies += spec.inner_bodies(step)
    return list(sources.values())


# ---------------------------------------------------------------- comparing


def differences(saved: Manifest, current: Manifest) -> list[str]:
    """Why a commit is of another model, as text; empty if it is of the same one."""
    before, now = types_of(saved), types_of(current)
    if saved.is_untrained:
        now = {name: type for name, type in now.items() if "/" not in name}
    if before == now and saved.steps_digest == current.steps_digest:
        return []
    if before == now:
        return [
            "the model's operations differ",
            *changed_text(saved.sources.values(), current.sources.values()),
        ]
    notes = []
    if _states(before) != _states(now):
        notes.append(
            f"the optimizer was {saved.optimizer} {_states(before)}, and is {current.optimizer} {_states(now)}"
        )
    # States have the types of their parameters: naming those is enough, unless only the states differ.
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    parameters = [name for name in differing if "/" not in name]
    differing = parameters or ([] if notes else differing)
    notes += [difference(name, before.get(name), now.get(name)) for name in differing[:MAX_SHOWN]]
    if len(differing) > MAX_SHOWN:
        notes.append(f"and {len(differing) - MAX_SHOWN} more tensors")
    return notes


def types_of(manifest: Manifest) -> dict[str, Type]:
    """The types of a commit's tensors by name, in the dtypes that they have where they are trained. One that was frozen
    is widened, and one that is, is rounded to what reads it, as they are read.
    """
    return {each.name: each.type.with_dtype(accumulation(each.type.dtype)) for each in manifest.tensors}


def difference(name: str, before: Type | None, now: Type | None) -> str:
    """How a tensor of a file differs from that of a checkpoint, as text."""
    if before is None or now is None:
        return f"{name}: {before or now} is only in the {'file' if before is None else 'checkpoint'}"
    return f"{name} was {before}, and is {now}"


def changes(saved: Manifest, current: Manifest, names: Iterable[str] = ()) -> list[str]:
    """The settings that differ, of these `names` or all, as text; none if nothing was trained with them."""
    if saved.is_untrained:
        return []
    names = names or [*current.settings, *(name for name in saved.settings if name not in current.settings)]
    return [
        shown(f"{name} was {saved.settings.get(name, 'none')}, and is {current.settings.get(name, 'none')}")
        for name in names
        if saved.settings.get(name) != current.settings.get(name)
    ]


def changed_data(saved: Manifest, current: Manifest) -> list[str]:
    """How the files of the training data changed, as text; nothing where there were none."""
    return changed(saved.data, current.data) if saved.data else []


def _states(names: Iterable[str]) -> str:
    """`(mean, square)`: what the optimizer keeps for each parameter."""
    return f"({', '.join(sorted({name.split('/')[0] for name in names if '/' in name}))})"


def changed_text(saved: Iterable[str], current: Iterable[str]) -> list[str]:
    """The first lines in which the source texts of models with other steps differ, or why none does."""
    lines = [*islice(_changed_lines(saved, current), 2 * MAX_SHOWN)]
    return lines or ["the text is the same: an override gives a constant another value"]


def _changed_lines(saved: Iterable[str], current: Iterable[str]) -> Iterator[str]:
    """Yields the lines of source texts that differ, as `- before` and `+ now`."""
    before, now = (
        [line.strip() for text in texts for line in text.splitlines() if line.strip()] for texts in (saved, current)
    )
    for line in unified_diff(before, now, n=0, lineterm=""):
        if line[:1] in "+-" and line[:3] not in ("---", "+++"):
            yield shown(f"{line[0]} {line[1:]}")
