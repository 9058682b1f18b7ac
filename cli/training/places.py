"""Where a run reads and writes, according to the command's arguments and the file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from attrs import evolve

from partita.dsl.spec import Spec
from partita.dsl.syntax.source import Source
from partita.runtime.checkpoint.settings import run_directory, settings_of
from partita.runtime.run_directory import Origin, RunDirectory

if TYPE_CHECKING:
    from partita.compiler.program import Program
    from partita.runtime.checkpoint.settings import Settings
    from partita.runtime.run_directory import RunDirectory


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


def opened(arguments: argparse.Namespace) -> RunDirectory | None:
    """The run's directory, created if it is missing; reports why it cannot be."""
    path = directory_of(arguments)
    try:
        return RunDirectory.open(path)
    except OSError as error:
        unwritable(path, error)
        return None


def writable(directory: Path) -> bool:
    """Create a directory that the user named; reports and returns False if it cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            return True
    except OSError as error:
        unwritable(directory, error)
        return False


def unwritable(directory: Path, error: OSError) -> None:
    """Report that the system does not allow writing there."""
    reason = "there is a file of that name" if isinstance(error, FileExistsError) else error.strerror
    print(f"partita: cannot write to {directory}: {reason}", file=sys.stderr)


def recordable(spec: Spec, program: Program, trace: Path) -> bool:
    """Whether there are steps to record and a directory for their times; reports why not."""
    _, train = spec.trained
    if train.steps < 2:
        print("partita: --trace skips the first step, and there is no other: raise train.steps", file=sys.stderr)
        return False
    if program.replicas_per_rank > 1:
        print(
            "partita: --trace records ranks that train one group each, and here each trains "
            f"{program.replicas_per_rank}: use a mesh with more ranks, or fewer groups in `sync`",
            file=sys.stderr,
        )
        return False
    return writable(trace)
