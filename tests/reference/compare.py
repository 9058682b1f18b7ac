"""Programs held against their meaning: alone, and as they are laid out.

A figure equals its reference where they differ by no more than rounding does: 1e-7 of its scale, or as much as it
changes when the parameters begin with values whose last digits differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.dsl.spec import Spec
from partita.runtime.data.binding import open_data
from partita.runtime.outputs import outputs
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.reference.programs import OWN, Program
from tests.reference.training import Training, figures

TOLERANCE = 1e-7
# The least scale: what is zero in exact arithmetic is rounding noise.
LEAST = 1e-3
# What a change of the last digits of all parameters may do to a figure that is compared, and how much more than that
# rounding may do. Where it does more, or is very large, the figure is chaos.
NUDGE, CHAOS, LEEWAY, LARGE, HUGE = 1e-14, 1e-5, 100.0, 1e4, 1e8


@frozen
class Figure:
    """What is compared: its least scale, and how much of its scale it may be off."""

    value: Tensor
    unit: float
    tolerance: float = TOLERANCE


@define
class Observed:
    """What a run tells of itself."""

    steps: list = field(factory=list)
    evaluations: list = field(factory=list)

    def resumed(self, found) -> None:
        raise AssertionError("there is nothing to resume")

    def step(self, result) -> None:
        self.steps.append(result)

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        self.evaluations.append((step, loss, dict(metrics)))


def accepted(program: Program, folder: Path, overrides: Sequence[str] = ()) -> tuple[Program, Spec]:
    """A program all of whose parameters reach the loss, checked; some with a block whose calls share parameters, if it
    can be shared. Raises Refused.
    """
    if program.sharing is not None:
        try:
            return _accepted(program.sharing, folder, overrides)
        except Refused as refused:
            if {each.code for each in refused.diagnostics if each.severity == "error"} != {"E0228"}:
                raise
    return _accepted(program, folder, overrides)


def _accepted(program: Program, folder: Path, overrides: Sequence[str]) -> tuple[Program, Spec]:
    for _ in range(6):
        spec, diagnostics = checked(program, folder, overrides)
        if spec is not None:
            return program, spec
        lost = {name for each in diagnostics if each.code == "E0408" for name in re.findall(r"`(\w+)`", each.message)}
        if not lost or lost <= program.reaching:
            raise Refused(diagnostics)
        program = evolve(program, reaching=program.reaching | lost)
    raise Refused(diagnostics)


def checked(program: Program, folder: Path, overrides: Sequence[str] = ()):
    """The meaning of a program's file, and what is said of it."""
    path = folder / "program.par"
    path.write_text(program.text)
    (folder / "own.py").write_text(OWN)
    arrays = {}
    generator = np.random.default_rng(7)
    for name, dtype, shape, limit in program.arrays:
        if dtype == "f32":
            arrays[name] = generator.standard_normal(shape)
        else:
            arrays[name] = generator.integers(0, limit, shape).astype(bool if dtype == "bool" else np.int64)
    if "bad" in arrays:
        item, value = program.planted
        arrays["bad"] = np.zeros_like(arrays["bad"])
        arrays["bad"][item] = value * program.batch
    np.savez(folder / "data.npz", **arrays)
    (folder / "ids.bin").write_bytes(generator.integers(0, program.ids, 400).astype(np.uint8).tobytes())
    return load(path, list(overrides))


def meant(spec: Spec, folder: Path, apart: bool = False) -> dict[str, Figure]:
    """All figures of a file's training by the reference, in order, up to one that is chaos. `apart`: it evaluates batch
    by batch."""
    plain, *others = (Training(spec, folder, nudge, apart).run() for nudge in (0.0, NUDGE, -NUDGE))
    if plain.largest > HUGE:
        return {}  # what cancels out here may leave a rounding error there, which that multiplies
    expected = {what: Figure(value, unit) for what, value, unit in figures(plain)}
    # To both sides: what is zero may be at a bend, with one slope on the one side and another on the other.
    nudged = [{what: value for what, value, _ in figures(other)} for other in others]
    found = {}
    for what, figure in expected.items():
        if what == f"left out up to step {plain.doubtful}":
            break
        if not bool(figure.value.isfinite().all()) and ("metric" in what or "step" in what):
            continue  # of a bad step: which those are is compared
        change = max(difference(other[what], figure) for other in nudged)
        if not change <= CHAOS or bool((figure.value.abs() > LARGE).any()):
            break  # what follows from it is chaos as well
        found[what] = evolve(figure, tolerance=max(TOLERANCE, LEEWAY * change))
    return found


def computed(spec: Spec, folder: Path) -> dict[str, Tensor]:
    """The same figures of the compiled program, run on all its ranks."""
    plan = prepare(spec, allow_python=True)
    run = VirtualRun(plan)
    observed = Observed()
    data = open_data(plan.program, plan.train, folder)
    run.train(data, [observed])
    found = dict(_figures(run, observed))
    if spec.model.outputs and not spec.model.operations:  # `outputs` runs no Python of the file
        batch = run.ranks[0].tensors(data.batch(1))
        answers = outputs(spec, run.parameters(), batch)
        found.update((f"output {name}", value) for name, value in answers.items())
    return found


def _figures(run: VirtualRun, observed: Observed) -> Iterator[tuple[str, Tensor]]:
    for number, done in enumerate(observed.steps, 1):
        yield f"loss of step {number}", torch.tensor(done.loss, dtype=torch.float64)
        yield f"norm of step {number}", torch.tensor(done.grad_norm, dtype=torch.float64)
        yield f"rate of step {number}", torch.tensor(done.learning_rate, dtype=torch.float64)
        yield f"left out up to step {number}", torch.tensor(float(done.skipped or 0), dtype=torch.float64)
        for name, value in done.metrics.items():
            yield f"metric {name} of step {number}", torch.tensor(value, dtype=torch.float64)
    for step, loss, metrics in observed.evaluations:
        yield f"loss of the evaluation after {step}", torch.tensor(loss, dtype=torch.float64)
        for name, value in metrics.items():
            yield f"metric {name} of the evaluation after {step}", torch.tensor(value, dtype=torch.float64)
    for path, gradient in run.gradients().items():
        yield f"gradient of {path} in the last step", gradient
    for path, value in run.parameters().items():
        yield f"parameter {path} at the end", value
    for path, value in run.means().items():
        yield f"mean of {path} at the end", value


def difference(found: Tensor, expected: Figure) -> float:
    """The largest difference of any element, relative to the scale of the whole."""
    a, b = found.double(), expected.value.double()
    if a.shape != b.shape:
        return float("inf")
    if not b.numel():
        return 0.0
    error = float((a - b).abs().max())
    return error / max(float(b.abs().max()), expected.unit, LEAST) if error == error else float("inf")


def wrong(found: Mapping[str, Tensor], expected: Mapping[str, Figure]) -> list[str]:
    """What differs, with by how much."""
    said = []
    for what, figure in expected.items():
        error = difference(found[what], figure) if what in found else float("inf")
        if not error <= figure.tolerance:
            said.append(f"{what} differs by {error:.1e}")
    return said
