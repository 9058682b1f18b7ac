"""Where a run reads and writes, according to the command's arguments and the file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from attrs import evolve

from partita.cli.command import UsageError
from partita.dsl.spec import Spec
from partita.dsl.syntax.source import Source
from partita.runtime.checkpoint.settings import run_directory, settings_of
from partita.runtime.run_directory import Origin, RunDirectory

if TYPE_CHECKING:
    from partita.compiler.program import Program
    from partita.runtime.checkpoint.settings import Settings


def folder_of(arguments: argparse.Namespace) -> Path:
    """The directory that paths in the file are relative to."""
    return Path(arguments.file).resolve().parent


def directory_of(arguments: argparse.Namespace) -> Path:
    """The run's directory."""
    return run_directory(Source(arguments.file, "").stem, arguments.run_dir)


def origin_of(arguments: argparse.Namespace, gpu: bool, cores: int | None = None) -> Origin:
    """The command, as the run's record keeps it; `cores` of one machine that has all ranks."""
    root, trace = (os.path.realpath(path) if path is not None else None for path in (arguments.root, arguments.trace))
    return Origin(os.path.realpath(arguments.file), tuple(arguments.overrides), root, gpu, trace, cores)


def checkpoints_of(arguments: argparse.Namespace, spec: Spec) -> Settings | None:
    """Where checkpoints go and how often; None if the file asks for none."""
    settings = settings_of(spec, directory_of(arguments), folder_of(arguments))
    return None if settings is None else evolve(settings, changed_data=arguments.changed_data)


def opened(arguments: argparse.Namespace) -> RunDirectory:
    """The run's directory, created if it is missing. Raises UsageError."""
    path = directory_of(arguments)
    with writing_in(path):
        return RunDirectory.open(path)


def check_writable(directory: Path) -> None:
    """Create a directory that the user named. Raises UsageError if it cannot be written to."""
    with writing_in(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass


@contextmanager
def writing_in(directory: Path) -> Iterator[None]:
    """Turns errors of the system into a UsageError that says why it does not allow writing there."""
    try:
        yield
    except OSError as error:
        reason = "there is a file of that name" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"cannot write to {directory}: {reason}") from error


def check_recordable(spec: Spec, program: Program, trace: Path) -> None:
    """Raises UsageError if there are no steps to record, or no directory for their times."""
    _, train = spec.trained
    if train.steps < 2:
        raise UsageError("--trace skips the first step, and there is no other: raise train.steps")
    if program.replicas_per_rank > 1:
        raise UsageError(
            f"--trace records ranks that train one group each, and here each trains {program.replicas_per_rank}: "
            "use a mesh with more ranks, or fewer groups in `sync`"
        )
    check_writable(trace)
