"""Names that a layout's paths may use: a model's blocks, repeats, parameters and values; and what a path names."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from partita.dsl import spec


def is_end(path: Sequence[str], name: str) -> bool:
    """Whether a path is the end of a name, whole parts of it."""
    return name.split(".")[-len(path) :] == list(path)


@frozen
class ModelNames:
    """The names of one model."""

    model: str
    names: frozenset[str]
    repeats: frozenset[str]


def known_paths(model: spec.Model) -> ModelNames:
    """Collect the names of a model, visiting each body once."""
    names, repeats, seen = {model.name, *model.body.inputs}, set[str](), set[int]()
    bodies = [model.body]
    while bodies:
        body = bodies.pop()
        if id(body) in seen:
            continue
        seen.add(id(body))
        for step in body.steps:
            match step:
                case spec.CallBlock():
                    names |= {step.scope, step.block, *step.body.inputs}
                    bodies.append(step.body)
                case spec.Repeat():
                    names |= {step.scope, step.name, *step.names}
                    repeats |= {step.scope, step.name}
                    bodies.append(step.body)
                case spec.Scan():
                    names |= {*step.names}
                    bodies.append(step.body)
                case spec.Parameter() | spec.Sample():
                    names.add(step.name)
                case spec.Apply() if step.name is not None:
                    names.add(step.name)
    return ModelNames(model.name, frozenset(names), frozenset(repeats))
