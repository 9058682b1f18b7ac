"""The start of a run: it takes its directory and checks that it can resume from what is there."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from partita.compiler.program import Program
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Spec
from partita.dsl.syntax.reader import Reader
from partita.runtime.checkpoint.identity import manifest_of
from partita.runtime.checkpoint.settings import Settings, check_newest, recorded_at, refuse_unused, refuse_within
from partita.runtime.data_files import DataFile
from partita.runtime.run_directory import Origin, Record, RunDirectory


def begin(
    directory: RunDirectory,
    spec: Spec,
    program: Program,
    settings: Settings | None,
    data: Sequence[DataFile],
    reader: Reader | None,
    origin: Origin | None = None,
) -> Diagnostic | None:
    """Lock a run's directory and record its start: the files `reader` has read, where checkpoints go, its command.

    Returns a warning (W0806) if the file system has no locks. Raises Refused (E0803, E0804, E0814, E0815) and OSError.
    """
    refuse_within(directory.path, spec.train.span if spec.train is not None else None)
    warning = directory.lock()
    if settings is not None:
        check_newest(settings, manifest_of(spec, program, data))
    record(directory, secrets.token_hex(8), spec, settings, reader.texts if reader is not None else {}, origin)
    return warning


def record(
    directory: RunDirectory,
    run: str,
    spec: Spec,
    settings: Settings | None,
    files: Mapping[str, str],
    origin: Origin | None,
) -> None:
    """Record what a run begins with in its locked directory: its name, the files it read, where its checkpoints go, and
    its command.

    Raises Refused (E0814) if the run would not resume from the checkpoints of the previous one, and OSError.
    """
    before = directory.record()
    span = spec.train.span if spec.train is not None else None
    refuse_unused(directory.path, before.checkpoints if before is not None else None, settings, span)
    where = recorded_at(settings.path, directory.path) if settings is not None else None
    directory.keep(Record(run, files, where, origin))
