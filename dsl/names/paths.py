"""Names that a layout's paths may use: a model's blocks, repeats, parameters and values; and what a path names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from attrs import frozen

from partita.dsl import spec
from partita.dsl.advice.report import suggestion
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax import tree

MOST_SHOWN = 12  # parts of a model


def is_end(path: Sequence[str], name: str) -> bool:
    """Whether a path is the end of a name, whole parts of it."""
    return name.split(".")[-len(path) :] == list(path)


@frozen
class ModelNames:
    """The names of one model."""

    model: str
    names: frozenset[str]
    parts: frozenset[str]
    repeats: frozenset[str]

    def check(self, path: tree.Path, others: Iterable[str] = ()) -> None:
        """Refuse (E0317) a path of which a part is no name of the model; it may be meant as one of `others`."""
        for part in path.parts:
            if part.text not in self.names:
                message = f"model `{self.model}` has no part called `{part.text}`"
                help = suggestion(part.text, [*self.names, *others]) or self.some(self.parts)
                raise refuse("E0317", message, part.span, help=help)

    @staticmethod
    def some(names: Collection[str]) -> str:
        """Help that names the first of them."""
        more = ", …" if len(names) > MOST_SHOWN else ""
        return (
            f"it has: {', '.join(f'`{name}`' for name in sorted(names)[:MOST_SHOWN])}{more}" if names else "it has none"
        )


def known_paths(model: spec.Model) -> ModelNames:
    """Collect the names of a model."""
    names, parts, repeats = {model.name, *model.body.inputs}, set[str](), set[str]()
    for step in spec.steps(model.body):
        match step:
            case spec.CallBlock():
                names |= {*step.body.inputs}
                parts |= {step.scope, step.block}
            case spec.Repeat():
                names |= {*step.names}
                repeats |= {step.scope, step.name}
            case spec.Scan():
                names |= {*step.names}
            case spec.Parameter():
                parts.add(step.name)
            case spec.Sample():
                names.add(step.name)
            case spec.Apply() if step.name is not None:
                names.add(step.name)
    parts |= repeats
    return ModelNames(model.name, frozenset(names | parts), frozenset(parts), frozenset(repeats))
