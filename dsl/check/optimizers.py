"""Optimizers by rules → `spec.Optimizer`: checks the paths and the calls of their rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial

from partita.dsl import spec
from partita.dsl.advice.report import suggestion
from partita.dsl.check.constants import Lookup
from partita.dsl.config.builtins import FORMATS, OPTIMIZERS
from partita.dsl.config.settings import Settings
from partita.dsl.diagnostic import refuse
from partita.dsl.names.paths import ModelNames, checked_path, joined_part, split_part
from partita.dsl.syntax import tree
from partita.dsl.syntax.units import Quantity
from partita.dsl.syntax.walk import nodes

# Targets that are no paths.
CLASSES = ("all", "matrices", "vectors", "embeddings")


class Optimizers:
    """Checks the optimizers of a file."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.report = settings, settings.report

    def optimizer(self, optimizer: tree.Optimizer, known: ModelNames | None) -> spec.Optimizer | None:
        """The checked optimizer; None after reporting errors. Paths are checked if the model's names are `known`."""
        errors = self.report.errors
        rules: list[spec.OptimizerRule] = []
        for rule in optimizer.rules:
            everything = next((each for each in rules if ("all",) in each.targets), None)
            if everything is not None:
                message = f"no parameter reaches this rule: `{everything}` before it applies to all"
                self.report.error("E0319", message, rule.span, help="move it before that rule")
            targets = checked_targets(self.settings, rule.targets, CLASSES, known)
            spans = tuple(path.span for path in rule.targets)
            if isinstance(rule, tree.FreezeRule):
                rules.append(freezing(self.settings, rule, targets, len(rules)))
                continue
            with self.report:
                self.check_loss(rule, known)
            frozen = [path for each in rules if each.call is None for path in each.targets]
            for chosen, number in self.cases(rule.call, targets, known, frozen):
                call = self.settings.call(rule.call, OPTIMIZERS, "optimizer", number)
                index = sum(each.call is not None for each in rules)
                own = tuple(span for span, path in zip(spans, chosen, strict=False) if path is not None)
                paths = tuple(path for path in chosen if path is not None)
                loss = None if rule.loss is None else rule.loss.text
                rules.append(spec.OptimizerRule(paths, call, index, rule.span, own, loss))
        if not rules:
            message = f"optimizer `{optimizer.name.text}` has no rules"
            self.report.error("E0305", message, optimizer.span, help="`update all -> adamw(lr = 1e-3)`")
        if self.report.errors > errors:
            return None
        return spec.Optimizer(optimizer.name.text, tuple(rules), optimizer.span)

    def check_loss(self, rule: tree.UpdateRule, known: ModelNames | None) -> None:
        """Refuse (E0317) what is no loss of the model."""
        if rule.loss is not None and known is not None and rule.loss.text not in known.losses:
            message = f"model `{known.model}` has no loss called `{rule.loss.text}`"
            known_help = suggestion(rule.loss.text, known.losses, "its losses:")
            help = known_help if known.losses else f"name it: `loss {rule.loss.text} = …`"
            raise refuse("E0317", message, rule.loss.span, help=help)

    def cases(
        self,
        call: tree.Call,
        targets: Sequence[tuple[str, ...]],
        known: ModelNames | None,
        frozen: Sequence[tuple[str, ...]],
    ) -> Iterator[tuple[Sequence[tuple[str, ...] | None], Lookup]]:
        """The rules that an `update` stands for, by their targets and what names mean in the call: one; or, where the
        call reads the number of an iteration of a repeat that the targets name, one for each that is not `frozen`.
        """
        axes, repeats = self.settings.axes, known.repeats if known is not None else {}
        named = {split_part(part)[0] for path in targets for part in path}
        read = [each for each in map(tree.single, paths_in(call)) if each is not None and each.text not in axes]
        over = next((name.text for name in read if name.text in named), None)

        def number(written: tree.Path | tree.Call, iteration: int | None = None) -> Quantity:
            name = tree.single(written)
            if iteration is not None and name is not None and name.text == over:
                return Quantity(Fraction(iteration))
            if name is not None and name.text in repeats and name.text not in axes:
                message = f"`{name.text}` is the number of an iteration, in rules for the parameters of its repeat"
                raise refuse("E0306", message, name.span, help=f"`update {name.text} -> …`, or a part of it")
            return axes.number(written)

        if over is None:
            yield targets, number
            return
        found = False
        for iteration in range(repeats.get(over, 1)):
            own = [narrowed(path, over, iteration) for path in targets]
            chosen = [path if path and not any(covers(each, path) for each in frozen) else None for path in own]
            if any(path is not None for path in chosen):
                found = True
                yield chosen, partial(number, iteration=iteration)
        if not found:  # a rule that applies to nothing, which is said of the parameters
            yield targets, partial(number, iteration=0)


def freezing(
    settings: Settings, rule: tree.FreezeRule, targets: tuple[tuple[str, ...], ...], number: int
) -> spec.OptimizerRule:
    """A rule that freezes its targets; one without its format after reporting errors."""
    stored = None if rule.stored is None else settings.call(rule.stored, FORMATS, "format")
    spans = tuple(path.span for path in rule.targets)
    return spec.OptimizerRule(targets, None, number, rule.span, spans, stored=stored)


def checked_targets(
    settings: Settings, targets: Sequence[tree.Path], classes: Sequence[str], known: ModelNames | None
) -> tuple[tuple[str, ...], ...]:
    """The paths of a rule's targets, or some of the `classes`; what is wrong with others is reported."""
    checked = []
    for target in targets:
        with settings.report:
            if known is not None and str(target) not in classes:
                known.check(target, classes if len(target.parts) == 1 else ())
            checked.append(checked_path(target, settings.axes.number, known))
    return tuple(checked)


def paths_in(call: tree.Call) -> Iterator[tree.Path]:
    """The names in the arguments of a call."""
    return (each for each in nodes(*call.arguments) if isinstance(each, tree.Path))


def narrowed(path: tuple[str, ...], repeat: str, iteration: int) -> tuple[str, ...] | None:
    """A path in one iteration of a repeat alone; None if it is of others."""
    parts = []
    for part in path:
        name, iterations = split_part(part)
        if name == repeat:
            if iterations is not None and iteration not in iterations:
                return None
            iterations = range(iteration, iteration + 1)
        parts.append(joined_part(name, iterations))
    return tuple(parts)


def covers(earlier: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether all that a path names is in what an earlier target names."""
    if len(earlier) > len(path):
        return False
    for one, other in zip(map(split_part, earlier), map(split_part, path), strict=False):
        if one[0] != other[0] or (one[1] is not None and (other[1] is None or not set(other[1]) <= set(one[1]))):
            return False
    return True
