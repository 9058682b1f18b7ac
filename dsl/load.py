"""A `.par` file → `Spec`: the entry point of the language.

Read, parse, gather imports, apply overrides, resolve axes, check models, layouts and settings. Each step reports what
it finds; the next one runs only if it would not repeat it. No content of a file makes this raise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from partita.dsl import spec
from partita.dsl.advice.doubts import report_doubts
from partita.dsl.advice.ignored import report_miscounted
from partita.dsl.advice.packing import report_leaks
from partita.dsl.advice.report import Full, Report
from partita.dsl.advice.second_calls import report_second_calls
from partita.dsl.advice.unused import report_unused
from partita.dsl.check.axes import Axes
from partita.dsl.check.divisibility import report_misfits
from partita.dsl.check.exclusions import evaluations, exclusions
from partita.dsl.check.known import CheckContext
from partita.dsl.check.models import Models
from partita.dsl.check.operations import Operations
from partita.dsl.check.plans import Plans
from partita.dsl.check.reach import report_unreached
from partita.dsl.config.overrides import apply_overrides
from partita.dsl.config.settings import Settings
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.names.declarations import gather
from partita.dsl.names.scope import Instance
from partita.dsl.syntax.attached import Attached
from partita.dsl.syntax.reader import Reader, source_of
from partita.dsl.syntax.source import Source
from partita.dsl.types import Type

Loaded = tuple[spec.Spec | None, tuple[Diagnostic, ...]]


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    root: str | Path | None = None,
    reader: Reader | None = None,
    fitting: bool = True,
) -> Loaded:
    """Check a file, with `key=value` overrides applied.

    Returns its Spec, or None if there is an error, and all diagnostics (warnings may come with a Spec). Imports may not
    leave `root`, by default the file's own directory. `reader` records what was read. Unless `fitting`, sizes need not
    fit the layout and schedule of the file, for callers that look for others.
    """
    name = os.fspath(path)
    folder = os.fspath(root) if root is not None else None
    files = reader or Reader()
    return _reported(
        lambda report: _check(files.source(name, name), name, overrides, folder, files, report, fitting, None)
    )


def load_text(
    text: str,
    name: str = "<text>",
    overrides: Sequence[str] = (),
    path: str | Path | None = None,
    fitting: bool = True,
    types: dict[int, Type] | None = None,
    reader: Reader | None = None,
) -> Loaded:
    """Like `load`, for a text as the content of the file `path`; without one it cannot name other files.

    `types` receives the type of each tensor that the text names, by where it is named, as far as it is checked; that of
    a block's first call, or of the block by itself.
    """
    place, files = os.fspath(path) if path is not None else None, reader or Reader()
    return _reported(
        lambda report: _check(source_of(text, name), place, overrides, None, files, report, fitting, types)
    )


def spec_of(loaded: Loaded) -> spec.Spec:
    """The Spec of a file that was loaded. Raises Refused with its diagnostics if there is an error."""
    known, diagnostics = loaded
    if known is None:
        raise Refused(diagnostics)
    return known


def _reported(check: Callable[[Report], spec.Spec | None]) -> Loaded:
    """What a check gives, and what it reports meanwhile."""
    report = Report()
    loaded = None
    with suppress(Full), report:
        loaded = check(report)
    return (loaded if not report.errors else None), report.diagnostics()


def _check(
    source: Source,
    path: str | None,
    overrides: Sequence[str],
    root: str | None,
    files: Reader,
    report: Report,
    fitting: bool,
    types: dict[int, Type] | None,
) -> spec.Spec | None:
    declarations = gather(source, path, root, files, report)
    if report.errors:
        return None
    chosen = apply_overrides(declarations, overrides, report)
    if report.errors:
        return None
    axes = Axes(declarations.axes, report, declarations.constants)
    settings = Settings(report, axes, Attached(path, source.name, root, files).read)
    known = CheckContext(declarations, settings)
    Operations(known).run()
    models = Models(known)
    for name in declarations.blocks:
        if not models.takes_numbers(name):
            models.block(Instance(name))
    checked = {name: models.model(model) for name, model in declarations.models.items()}
    if types is not None:
        types.update({start: type for (of, start), type in known.types.items() if of == id(source)})
    for model in checked.values():
        if model is not None:
            report_unreached(model, (*declarations.optimizers.values(), *declarations.adapters.values()), report)
            report_miscounted(model, report)
    if None in axes.numbers.values():
        return None  # reported, and settings may need it
    plans = Plans(declarations, settings, checked, chosen)
    loaded = plans.whole()
    if loaded is not None:
        if fitting:
            report_misfits(loaded, report)
        for diagnostic in (*(exclusions(loaded) if fitting else ()), *evaluations(loaded)):
            report.add(diagnostic)
        if not report.errors:
            report_doubts(loaded, report)
        report_leaks(loaded, report)
        if loaded.model is not None:
            report_second_calls(loaded.model, source, report)
    if not report.errors:
        report_unused(known, plans.used(), chosen.kinds, report)
    return loaded
