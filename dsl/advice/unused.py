"""Warnings (W0201) about names that the main file declares but nothing uses, except names that begin with `_`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from partita.dsl.advice.report import Report
from partita.dsl.check.known import CheckContext
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.syntax import tree


def report_unused(
    known: CheckContext, used: Iterable[tuple[str, str]], overridden: Collection[str], report: Report
) -> None:
    """Warn about what is not used. `used` are the (kind, name) pairs that `train` and the layouts use, `overridden` the
    kinds that the command line chose.
    """
    declarations, chosen = known.declarations, set(used)

    def warn(kind: str, name: tree.Name) -> None:
        if declarations.own(name.span) and not name.text.startswith("_"):
            report.add(Diagnostic("W0201", f"{kind} `{name.text}` is not used", name.span))

    sized = set(known.axes.used)
    for name, entry in declarations.axes.items():
        if name not in sized:
            warn("axis", entry.key)
    for name, entry in declarations.constants.items():
        if name not in sized and entry.key.span.key not in known.read:
            warn("constant", entry.key)
    for name, block in declarations.blocks.items():
        if name not in known.called:
            warn("block", block.name)
    for name, operation in declarations.operations.items():
        if name not in known.called:
            warn("op", operation.name)
    for place, (kind, bound) in known.bindings.items():
        if place not in known.read:
            warn({"let": "value", "param": "parameter"}.get(kind, kind), bound)
    for name, mesh in declarations.meshes.items():
        if ("mesh", name) not in chosen:
            warn("mesh", mesh.name)
    # Where `train` names a declaration, others of the kind are alternatives for the command line to choose. Where it
    # names none, what is declared was probably meant: one warning covers all. Without a train block the file is a
    # library.
    tables = declarations.alternatives
    named = {kind for kind, name in chosen if name in tables.get(kind, ())}
    idle = [
        (kind, declared.name)
        for kind, table in tables.items()
        if declarations.train and kind not in overridden and kind not in named
        for name, declared in table.items()
        if (kind, name) not in chosen and declarations.own(declared.name.span) and not name.startswith("_")
    ]
    if idle:
        kind, first = min(idle, key=lambda pair: pair[1].span.start)
        groups = {kind: [f"`{name.text}`" for each, name in idle if each == kind] for kind, _ in idle}
        parts = [f"{kind}{'s' * (len(names) > 1)} {', '.join(names)}" for kind, names in groups.items()]
        verb = "is" if len(idle) == 1 else "are"
        key = "train.optimizer" if kind == "optimizer" else kind
        help = f"`{key}={first.text}` on the command line chooses {'it' if len(idle) == 1 else 'this one'}"
        report.add(Diagnostic("W0201", f"{'; '.join(parts)} {verb} not used", first.span, (), help))
