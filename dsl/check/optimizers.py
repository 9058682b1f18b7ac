"""Optimizers by rules → `spec.Optimizer`: checks the paths and the calls of their rules."""

from __future__ import annotations

from partita.dsl import spec
from partita.dsl.advice.report import Report
from partita.dsl.config.builtins import OPTIMIZERS
from partita.dsl.config.settings import Settings
from partita.dsl.names.paths import ModelNames
from partita.dsl.syntax import tree

# Targets that are no paths.
CLASSES = ("all", "matrices", "vectors", "embeddings")


class Optimizers:
    """Checks the optimizers of a file."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self.settings, self.report = settings, report

    def optimizer(self, optimizer: tree.Optimizer, known: ModelNames | None) -> spec.Optimizer | None:
        """The checked optimizer; None after reporting errors. Paths are checked if the model's names are `known`."""
        errors = self.report.errors
        rules: list[spec.OptimizerRule] = []
        for rule in optimizer.rules:
            everything = next((each for each in rules if ("all",) in each.targets), None)
            if everything is not None:
                message = f"no parameter reaches this rule: `{everything}` before it applies to all"
                self.report.error("E0319", message, rule.span, help="move it before that rule")
            call = self.settings.call(rule.call, OPTIMIZERS, "optimizer") if isinstance(rule, tree.UpdateRule) else None
            for target in rule.targets:
                if known is not None and str(target) not in CLASSES:
                    with self.report:
                        known.check(target, CLASSES if len(target.parts) == 1 else ())
            index = sum(each.call is not None for each in rules)
            targets = tuple(tuple(part.text for part in path.parts) for path in rule.targets)
            rules.append(spec.OptimizerRule(targets, call, index, rule.span, tuple(path.span for path in rule.targets)))
        if not rules:
            message = f"optimizer `{optimizer.name.text}` has no rules"
            self.report.error("E0305", message, optimizer.span, help="`update all -> adamw(lr = 1e-3)`")
        if self.report.errors > errors:
            return None
        return spec.Optimizer(optimizer.name.text, tuple(rules), optimizer.span)
