"""A `.par` file → `Spec`: the way into the language.

Read, parse, gather imports, apply overrides, settle axes, check models, layouts and settings. Each part reports what
it finds; the next one runs only where it would not repeat it. Nothing that a file holds raises here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from partita.dsl import spec
from partita.dsl.attached import Attached
from partita.dsl.axes import Axes
from partita.dsl.declarations import gather
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.fits import report_misfits
from partita.dsl.known import Known
from partita.dsl.models import Models
from partita.dsl.overrides import apply_overrides
from partita.dsl.plans import Plans
from partita.dsl.reach import report_unreached
from partita.dsl.reader import Reader, source_of
from partita.dsl.report import Full, Report
from partita.dsl.scope import Instance
from partita.dsl.source import Source
from partita.dsl.unused import report_unused

Loaded = tuple[spec.Spec | None, tuple[Diagnostic, ...]]


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    root: str | Path | None = None,
    reader: Reader | None = None,
    fitting: bool = True,
) -> Loaded:
    """Check a file, with `key=value` overrides applied.

    Returns its meaning, or None where there is an error, and all diagnostics (warnings may come with a Spec).
    Imports may not leave `root`, by default the file's own directory. A `reader` remembers what was read. Unless
    `fitting`, sizes need not fit the layout and the schedule that the file has: for those who look for others.
    """
    name = os.fspath(path)
    folder = os.fspath(root) if root is not None else None
    files = reader or Reader()
    return _loaded(lambda: files.source(name, name), name, overrides, folder, files, fitting)


def load_text(
    text: str,
    name: str = "<text>",
    overrides: Sequence[str] = (),
    path: str | Path | None = None,
    fitting: bool = True,
) -> Loaded:
    """Check a text as if it stood in the file of that path; without one it can name no others. Otherwise `load`."""
    place = os.fspath(path) if path is not None else None
    return _loaded(lambda: source_of(text, name), place, overrides, None, Reader(), fitting)


def _loaded(
    read: Callable[[], Source],
    path: str | None,
    overrides: Sequence[str],
    root: str | None,
    files: Reader,
    fitting: bool,
) -> Loaded:
    report = Report()
    found = None
    try:
        found = _check(read(), path, overrides, root, files, report, fitting)
    except Refused as refused:
        report.refused(refused)
    except Full:
        pass
    return (found if not report.errors else None), report.diagnostics()


def _check(
    source: Source,
    path: str | None,
    overrides: Sequence[str],
    root: str | None,
    files: Reader,
    report: Report,
    fitting: bool,
) -> spec.Spec | None:
    declarations = gather(source, path, root, files, report)
    if report.errors:
        return None
    chosen = apply_overrides(declarations, overrides, report)
    if report.errors:
        return None
    axes = Axes(declarations.axes, report)
    known = Known(declarations, axes, report)
    models = Models(known)
    for name in declarations.blocks:
        models.block(Instance(name))
    checked = {name: models.model(model) for name, model in declarations.models.items()}
    for model in checked.values():
        if model is not None:
            report_unreached(model, report)
    plans = Plans(declarations, axes, checked, chosen, report, Attached(path, root, files))
    found = plans.whole()
    if found is not None and fitting:
        report_misfits(found, report)
    if not report.errors:
        report_unused(known, plans.used(), chosen.kinds, report)
    return found
