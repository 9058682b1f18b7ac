"""However tensors are laid out over a mesh, a program computes what the single-device program computes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, note, settings

from partita.dsl.load import load_text
from partita.runtime.experiment import settled
from partita.runtime.verification import executed
from tests.programs import Program, sharded_programs


def check(text: str) -> None:
    """Run a file as it stands and in one piece, and compare."""
    spec, diagnostics = load_text(text, "random.par")
    assert spec is not None, "\n\n".join(d.render() for d in diagnostics)
    experiment = settled(spec)
    assume(experiment is not None)
    execution = executed(experiment)
    assert execution.passed, "\n\n".join(d.render() for d in execution.diagnostics)


@given(program=sharded_programs())
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
def test_laid_out_equals_whole(program: Program):
    note(program.text)
    check(program.text)


@pytest.mark.soak
@given(program=sharded_programs())
@settings(max_examples=3000, suppress_health_check=list(HealthCheck))
def test_laid_out_equals_whole_at_length(program: Program):
    note(program.text)
    check(program.text)
