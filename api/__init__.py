"""Partita: declarative training. The public Python face, thin, for scripts and notebooks.

    import partita

    state = partita.compile("specs/tiny.par", "laptop.pipe=4", "schedule=one_f_one_b")
    print(partita.summary(state).timeline.bubble)
    assert partita.verify("specs/tiny.par").passed
    trained = partita.train("specs/tiny.par", {"train.steps": 20})
    print(trained[-1]["loss"], sorted(trained.parameters))

Overrides are written as on the command line, or come as mappings of their keys to values. Everything raises
`partita.Refused`, with diagnostics, for a file that is wrong. Nothing here imports torch before a program is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.load import load as load_file
from partita.overrides import Override, written

if TYPE_CHECKING:
    from partita.compiler.planning.search import Plan
    from partita.compiler.report.summary import Summary
    from partita.compiler.state import Compilation
    from partita.dsl.spec import Spec
    from partita.runtime.trained import Trained
    from partita.runtime.verification.verify import Verification

__version__ = "0.1.0"
__all__ = ["Diagnostic", "Refused", "check", "compile", "load", "plan", "summary", "train", "verify"]


def check(path: str | Path, *overrides: Override) -> tuple[Diagnostic, ...]:
    """All errors and warnings of a file, with `key=value` overrides applied."""
    return load_file(path, written(overrides))[1]


def load(path: str | Path, *overrides: Override) -> Spec:
    """The checked meaning of a file."""
    return _load(path, overrides)


def compile(path: str | Path, *overrides: Override) -> Compilation:
    """A file compiled for training: every form on the way, and the program."""
    from partita.compiler.pipeline import compile_spec

    return compile_spec(load(path, *overrides))


def summary(state: Compilation) -> Summary:
    """A compiled program in numbers: stages, transfers, memory, predicted timeline."""
    from partita.compiler.report.summary import summarize

    return summarize(state)


def plan(
    path: str | Path, *overrides: Override, devices: int | None = None, top: int = 10, within: float = 15.0
) -> tuple[Plan, ...]:
    """The meshes, layouts and schedules that are predicted to be fastest on so many devices (default: the mesh's), the
    best first, searched for some `within` seconds. Each has its `file`, a Spec, and its `prediction`; the one that is
    `given` is the file as it is.
    """
    from partita.compiler.planning.search import Search
    from partita.compiler.planning.space import space_of

    return Search(space_of(_load(path, overrides, fitting=False), devices), top, within).run().plans


def verify(path: str | Path, *overrides: Override) -> Verification:
    """What `partita verify` finds: certificate, laws, memory, and a shrunken copy run against one device."""
    from partita.runtime.verification.verify import verify as verify_spec

    return verify_spec(load(path, *overrides))


def train(path: str | Path, *overrides: Override, run_dir: str | Path | None = None) -> Trained:
    """Train with all ranks in this process, on the virtual transport; a record for each step, and the model.

    Where the file has `checkpoint`, it is followed as by `partita run`: the run goes on from the newest checkpoint in
    its directory, `run_dir` or `runs/NAME`, and saves there. Without `checkpoint` nothing is written, unless there is a
    `run_dir`: then it gets `metrics.jsonl`. What a person should know of checkpoints is given as Python's warnings.

    Meant for small models: to train on several processes or machines use `partita run`.
    """
    from partita.runtime.trained import train as train_spec

    return train_spec(load(path, *overrides), Path(path).resolve().parent, run_dir)


def _load(path: str | Path, overrides: Sequence[Override], fitting: bool = True) -> Spec:
    spec, diagnostics = load_file(path, written(overrides), fitting=fitting)
    if spec is None:
        raise Refused(diagnostics)
    return spec
