"""`adapters` → the rules of a model's adapters, and those by which what they are beside is frozen."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from partita.dsl import spec
from partita.dsl.check.optimizers import CLASSES, checked_targets, freezing
from partita.dsl.config.builtins import ADAPTERS
from partita.dsl.config.settings import Settings
from partita.dsl.names.paths import ModelNames
from partita.dsl.syntax import tree


@frozen
class Adapters:
    """A checked declaration."""

    rules: tuple[spec.AdapterRule, ...]
    freezes: tuple[spec.OptimizerRule, ...]


def checked_adapters(settings: Settings, written: tree.Adapters, known: ModelNames | None) -> Adapters | None:
    """The rules of a declaration; None after reporting errors. Paths are checked if the model's names are `known`."""
    report, errors = settings.report, settings.report.errors
    rules, freezes = list[spec.AdapterRule](), list[spec.OptimizerRule]()
    for rule in written.rules:
        classes: Sequence[str] = () if isinstance(rule, tree.Lora) else CLASSES
        targets = checked_targets(settings, rule.targets, classes, known)
        spans = tuple(path.span for path in rule.targets)
        if isinstance(rule, tree.FreezeRule):
            freezes.append(evolve(freezing(settings, rule, targets, len(freezes)), beside=True))
            continue
        call = settings.call(rule.call, ADAPTERS, "adapter")
        if call is not None:
            rules.append(spec.AdapterRule(targets, call, rule.span, spans))
    if not any(isinstance(rule, tree.Lora) for rule in written.rules):
        message = f"adapters `{written.name.text}` have no `lora` rule"
        report.error("E0305", message, written.span, help="`lora attention.wq -> lora(rank = 8)`")
    return Adapters(tuple(rules), tuple(freezes)) if report.errors == errors else None
