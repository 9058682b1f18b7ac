"""Partita: declarative training. The public Python face, thin, for scripts and notebooks.

    import partita

    state = partita.compile("specs/tiny.par", "laptop.pipe=4", "schedule=one_f_one_b")
    print(partita.summary(state).timeline.bubble)
    assert partita.verify("specs/tiny.par").passed
    losses = partita.train("specs/tiny.par", "train.steps=20")

Everything raises `partita.Refused`, with diagnostics, for a file that is wrong. Nothing here imports torch before a
program is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.dsl.diagnostic import Diagnostic, Refused

if TYPE_CHECKING:
    from partita.compiler.pipeline import Compilation
    from partita.compiler.planning.search import Plan
    from partita.compiler.report.summary import Summary
    from partita.dsl.spec import Spec
    from partita.runtime.verification.verify import Verification

__version__ = "0.1.0"
__all__ = ["Diagnostic", "Refused", "check", "compile", "load", "plan", "summary", "train", "verify"]


def check(path: str | Path, *overrides: str) -> tuple[Diagnostic, ...]:
    """All errors and warnings of a file, with `key=value` overrides applied."""
    from partita.dsl.load import load as load_file

    return load_file(path, overrides)[1]


def load(path: str | Path, *overrides: str) -> Spec:
    """The checked meaning of a file."""
    return _load(path, overrides)


def compile(path: str | Path, *overrides: str) -> Compilation:
    """A file compiled for training: every form on the way, and the program."""
    from partita.compiler.pipeline import compile_spec

    return compile_spec(load(path, *overrides))


def summary(state: Compilation) -> Summary:
    """A compiled program in numbers: stages, transfers, memory, predicted timeline."""
    from partita.compiler.report.summary import summarize

    return summarize(state)


def plan(
    path: str | Path, *overrides: str, devices: int | None = None, top: int = 10, within: float = 15.0
) -> tuple[Plan, ...]:
    """The meshes, layouts and schedules that are predicted to be fastest on so many devices (default: the mesh's), the
    best first, searched for some `within` seconds. Each has its `file`, a Spec, and its `prediction`; the one that is
    `given` is the file as it is.
    """
    from partita.compiler.planning.search import Search
    from partita.compiler.planning.space import space_of

    return Search(space_of(_load(path, overrides, fitting=False), devices), top, within).run().plans


def verify(path: str | Path, *overrides: str) -> Verification:
    """What `partita verify` finds: certificate, laws, memory, and a shrunken copy run against one device."""
    from partita.runtime.verification.verify import verify as verify_spec

    return verify_spec(load(path, *overrides))


def train(path: str | Path, *overrides: str) -> list[dict[str, Any]]:
    """Train with all ranks in this process, on the virtual transport; one record for each step.

    Meant for small models: to train on several processes or machines use `partita run`.
    """
    from partita.runtime.data.binding import open_data
    from partita.runtime.training import StepResult, VirtualRun, prepare

    records: list[dict[str, Any]] = []

    class _Records:
        def resumed(self, found: Any) -> None:
            """Nothing is: there are no checkpoints here."""

        def step(self, result: StepResult) -> None:
            records.append(
                {
                    "step": result.step,
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "learning_rate": result.learning_rate,
                    **result.metrics,
                }
            )

        def evaluation(self, step: int, loss: float, metrics: Any) -> None:
            records[-1] |= {"eval_loss": loss, **{f"eval_{name}": value for name, value in metrics.items()}}

    plan = prepare(load(path, *overrides))
    VirtualRun(plan, strict=False).train(open_data(plan.program, plan.train, Path(path).resolve().parent), [_Records()])
    return records


def _load(path: str | Path, overrides: Sequence[str], fitting: bool = True) -> Spec:
    from partita.dsl.load import load as load_file

    spec, diagnostics = load_file(path, overrides, fitting=fitting)
    if spec is None:
        raise Refused(diagnostics)
    return spec
