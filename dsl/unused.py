"""Warnings (W0201) about names that the main file declares and nothing uses. Names that begin with `_` are exempt."""

from __future__ import annotations

from collections.abc import Iterable

from partita.dsl import tree
from partita.dsl.axes import Axes
from partita.dsl.declarations import Declarations
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.models import Models
from partita.dsl.report import Report


def report_unused(
    declarations: Declarations, axes: Axes, models: Models, used: Iterable[tuple[str, str]], report: Report
) -> None:
    """Warn of what is not used; `used` are the (kind, name) of what `train` chose and layouts stand on."""
    chosen = set(used)

    def warn(kind: str, name: tree.Name, help: str | None = None) -> None:
        if declarations.own(name.span) and not name.text.startswith("_"):
            report.add(Diagnostic("W0201", f"{kind} `{name.text}` is not used", name.span, (), help))

    sized = set(axes.used)
    for name, entry in declarations.axes.items():
        if name not in sized:
            warn("axis", entry.key)
    for name, block in declarations.blocks.items():
        if name not in models.called:
            warn("block", block.name)
    for place, (kind, bound) in models.bindings.items():
        if place not in models.read:
            warn({"let": "value", "param": "parameter"}.get(kind, kind), bound)
    for kind, table in (
        ("model", declarations.models),
        ("mesh", declarations.meshes),
        ("layout", declarations.layouts),
        ("schedule", declarations.schedules),
    ):
        for name, declared in table.items():
            # Without a train block nothing chooses: the file is a library of them.
            if (kind, name) not in chosen and (kind == "mesh" or declarations.train):
                help = None if kind == "mesh" else f"`{kind}={name}` on the command line chooses it"
                warn(kind, declared.name, help)
