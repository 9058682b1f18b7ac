"""What a run does before anything else: take its directory, and see that it will go on from what is there."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from partita.compiler.program import Program
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.reader import Reader
from partita.dsl.spec import Spec
from partita.runtime.checkpoint.identity import manifest_of
from partita.runtime.checkpoint.settings import Settings, check_newest, refuse_unused
from partita.runtime.data import DataFile
from partita.runtime.run_directory import Record, RunDirectory


def begin(
    directory: RunDirectory,
    given: Spec,
    program: Program,
    settings: Settings | None,
    data: Sequence[DataFile],
    reader: Reader | None,
) -> Diagnostic | None:
    """Take a run's directory, and keep what the run begins with: what `reader` has read, and where checkpoints go.

    Returns a warning (W0806) where no lock can be held. Raises Refused (E0803, E0804, E0814, E0815) and OSError.
    """
    warning = directory.lock()
    before = directory.record()
    span = given.train.span if given.train is not None else None
    refuse_unused(directory.path, before.checkpoints if before is not None else None, settings, span)
    if settings is not None:
        check_newest(settings, manifest_of(given, program, data))
    where = str(settings.path.resolve()) if settings is not None else None
    directory.keep(Record(secrets.token_hex(8), reader.texts if reader is not None else {}, where))
    return warning
