"""However tensors are laid out over a mesh: a program is certified, and computes what the single-device one does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import prod

import pytest
from hypothesis import HealthCheck, assume, given, note, reject, settings

from partita.compiler.verify.equivalence import validate
from partita.runtime.verification.execution import executed
from partita.runtime.verification.experiment import Inconclusive, settled
from tests.files import checked
from tests.marks import examples
from tests.programs import SCHEDULES, Program, sharded_programs

# Compiling and running a program takes its time, and nothing else of what Hypothesis looks at is amiss.
SLOW = [HealthCheck.too_slow]


def check(text: str) -> None:
    """Certify a file, run it as it stands and in one piece, and compare."""
    spec = checked(text, "random.par")
    experiment = settled(spec)
    assume(experiment is not None)
    for state in (experiment.plan.training, experiment.plan.evaluation):
        validation = validate(state)
        assert validation.passed, "\n\n".join(d.render() for d in validation.problems)
    try:
        execution = executed(experiment)
    except Inconclusive:
        reject()  # rounding errors grow in some models, which the single-device program alone has shown
    assert execution.passed, "\n\n".join(d.render() for d in execution.diagnostics)


@given(program=sharded_programs())
@examples(3, suppress_health_check=SLOW)
@pytest.mark.timeout(1200)
def test_laid_out_equals_whole(program: Program):
    note(program.text)
    check(program.text)


@pytest.mark.soak
@given(program=sharded_programs())
@settings(max_examples=3000, suppress_health_check=SLOW)
def test_laid_out_equals_whole_at_length(program: Program):
    note(program.text)
    check(program.text)


def features(text: str) -> Iterator[str]:
    """What a program has of what is to be covered."""
    mesh = dict(re.findall(r"(\w+) = (\d+)", re.search(r"mesh .*", text)[0]))
    sizes = [int(size) for size in mesh.values()]
    yield f"{sum(size > 1 for size in sizes)} mesh axes"
    yield from (f"at least {ranks} ranks" for ranks in (16, 32) if prod(sizes) >= ranks)
    staged = mesh["pipe"] != "1"
    yield from ["pipeline"] * staged
    schedule = re.search(r"schedule s = (\w+)", text)[1]
    yield schedule
    yield from [f"{schedule} over ranks"] * staged
    for kind in re.findall(r"shard (param|grad|state) ->", text):
        yield kind
        yield from [f"{kind} with a pipeline"] * staged
    yield from re.findall(r"recompute \w+", text)
    yield from re.findall(r"chunks = [23]|clip = |adamw|sgd", text)
    yield from ["one parameter's own rule"] * bool(re.search(r"shard [\w.]+: ", text))
    yield from ["several axes in a rule"] * bool(re.search(r"-> \w+, \w+\n", text))


@pytest.mark.soak
def test_the_family_is_wide():
    """What is to be covered occurs often enough among a thousand programs."""
    found: Counter[str] = Counter()

    @given(program=sharded_programs())
    @settings(max_examples=1000, derandomize=True, database=None)
    def draw(program: Program) -> None:
        found.update(set(features(program.text)))

    draw()
    print(dict(sorted(found.items())))
    for common in ("2 mesh axes", "3 mesh axes", "4 mesh axes", "at least 16 ranks", "at least 32 ranks", "pipeline"):
        assert found[common] >= 20, common
    for kind in ("param", "grad", "state"):
        assert found[kind] >= 15, kind
        assert found[f"{kind} with a pipeline"] >= 5, kind
    for name in SCHEDULES:
        assert found[name] >= 10, name
        assert found[f"{name} over ranks"] >= 3, name
    for rule in ("recompute mlp", "recompute layer", "recompute all", "clip = ", "adamw", "sgd", "chunks = 2"):
        assert found[rule] >= 5, rule
    for rule in ("one parameter's own rule", "several axes in a rule"):
        assert found[rule] >= 10, rule
