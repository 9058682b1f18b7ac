"""A model with another number of rows in its batch: more for an evaluation that processes several batches at once,
fewer for replica groups and for samples.

Axes that are made of the batch have other sizes, too: those that the file computes from it, what `rename`, `merge` and
`concat` make of it, and what `split` makes of that. Rows that stand next to each other must do so in what is made of
them: with fewer rows, a batch that is split into two views would pair other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from partita.compiler.passes.resized import Resized
from partita.compiler.verify.proxy_sizes import PRODUCT, SUM, Relation, evaluated, relations_of
from partita.dsl import spec
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.spec import Model, bodies
from partita.dsl.syntax.source import Span


def with_larger_batch(model: Model, batch: str, times: int | Fraction, because: str | None = None) -> Model:
    """The model with `times` as many rows in its batch: a whole number of them.

    Raises Refused (E0407), `because` of that, if something depends on their number.
    """
    declared = _declared(model).get(batch)
    return model if declared is None else with_rows(model, batch, int(times * declared), because)


def with_rows(model: Model, batch: str, rows: int, because: str | None = None) -> Model:
    """The model with so many rows in its batch. Raises Refused (E0407), `because` of that."""
    declared = _declared(model)
    if declared.get(batch, rows) == rows:
        return model
    sizes = _Sizes(model, declared, batch, rows, because).found()
    return Resized(sizes).model(model)


def _declared(model: Model) -> dict[str, int]:
    """The sizes of the axes of a model's values."""
    types = (type for body in bodies(model.answering) for type in body.types)
    return {axis.name: axis.size for type in types for axis in type.axes}


class _Sizes:
    """The sizes of the axes that depend on the number of rows."""

    def __init__(self, model: Model, declared: Mapping[str, int], batch: str, rows: int, because: str | None) -> None:
        self.model = model
        self.declared = declared
        self.batch = batch
        self.because = because
        self.sizes = {batch: rows}
        steps = [step for body in bodies(model.answering) for step in body.steps]
        applied = [step for step in steps if isinstance(step, spec.Apply)]
        self.relations = [(step, each) for step in applied for each in relations_of(step, declared)]
        self.parameters = [step for step in steps if isinstance(step, spec.Parameter)]
        # A proxy need not have the sizes that the file computes.
        self.formulas = {
            name: formula
            for name, formula in model.formulas.items()
            if name in declared and evaluated(formula, declared) == declared[name]
        }

    def found(self) -> dict[str, int]:
        """The sizes that change. Raises Refused (E0407)."""
        before = 0
        while before != len(self.sizes):
            before = len(self.sizes)
            for name, formula in self.formulas.items():
                size = evaluated(formula, self.known)
                if name not in self.sizes and size != self.declared[name]:
                    self.sizes[name] = size
            for _, relation in self.relations:
                self._follow(relation)
        self._check()
        return self.sizes

    @property
    def known(self) -> dict[str, int]:
        """All sizes as they are now known."""
        return {**self.declared, **self.sizes}

    def _follow(self, relation: Relation) -> None:
        """The size that a relation implies of those that are known to change."""
        whole = relation.whole
        implied = relation.implied(whole, self.known)
        if implied not in (None, self.known[whole]) and whole not in self.sizes:
            self.sizes[whole] = implied

    def _check(self) -> None:
        """Refuse what depends on the number of rows."""
        for name, size in self.sizes.items():
            if size < 1:
                raise self._refused(f"the size of axis `{name}`", self.model.span)
        for parameter in self.parameters:
            if not self.sizes.keys().isdisjoint(parameter.type.names):
                raise self._refused(f"parameter `{parameter.name}`", parameter.span)
        for name, type in zip(self.model.body.inputs, self.model.body.types, strict=False):
            if not (self.sizes.keys() - {self.batch}).isdisjoint(type.names):
                raise self._refused(f"input `{name}`", self.model.span)
        for step, relation in self.relations:
            named = {relation.whole, *relation.parts}
            if not self.sizes.keys().isdisjoint(named) and not self._keeps_rows(step, relation):
                raise self._refused(f"`{step.span.text}`", step.span)

    def _keeps_rows(self, step: spec.Apply, relation: Relation) -> bool:
        """Whether a relation holds of the new sizes, and rows that were neighbors still are: what is put together of
        rows may be taken apart as it was.
        """
        whole, parts, known = relation.whole, relation.parts, self.known
        joined = [each for of, each in self.relations if each.whole == whole and of.function in ("merge", "concat")]
        if step.function == "slice":
            start, end = step.options["start"], self.declared[whole] - self.declared[parts[0]]
            sums = [each.parts for each in joined if each.kind == SUM]
            return any((start, parts[0]) in ((0, each[0]), (end, each[-1])) for each in sums)
        if relation.kind not in (PRODUCT, SUM) or relation.implied(whole, known) != known[whole]:
            return False
        if step.function != "split" or self.sizes.keys().isdisjoint(parts[1:]):
            return True
        copies = (parts[1],) * known[parts[0]] if len(parts) == 2 else ()
        return any(each.parts == (parts if each.kind == PRODUCT else copies) for each in joined)

    def _refused(self, what: str, span: Span) -> Refused:
        notes = [self.because] if self.because is not None else []
        return refuse("E0407", f"{what} depends on the number of rows of `{self.batch}`", span, notes=notes)
