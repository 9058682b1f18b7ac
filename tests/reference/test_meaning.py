"""A file means what `docs/reference` says: programs equal an interpreter of it that shares no code with the compiler.

Losses, norms, metrics, learning rates and evaluations of three steps, gradients, and parameters at the end; on one
device, and laid out over a mesh.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from partita.compiler.passes.assign import assign
from partita.compiler.passes.build import build
from partita.dsl.diagnostic import Refused
from partita.dsl.spec import Spec
from partita.runtime.bad_steps import BadStep
from tests.marks import examples
from tests.reference.compare import accepted, checked, computed, meant, wrong
from tests.reference.programs import Maker, Program
from tests.reference.training import Boundless, Ended

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def fits(given: Spec) -> bool:
    """Whether the rules of the optimizer fit the parameters: a block that they name may have none, for instance."""
    model, train = given.trained
    try:
        assign(build(model, train.precision), train.optimizer)
    except Refused as refused:
        if not {each.code for each in refused.diagnostics} <= {"E0409", "E0415", "E0416"}:
            raise
        return False
    return True


def holds(program: Program, folder: Path) -> str:
    """Compare a program with what it means. Returns what came of it: `equal`, or why there was nothing to compare."""
    try:
        program, spec = accepted(program, folder)
    except Refused as refused:
        if {each.code for each in refused.diagnostics if each.severity == "error"} != {"E0408"}:
            raise
        # Of a block or repeat whose result is not used no parameter has a way to the loss.
        return "parameters that reach nothing"
    try:
        single, diagnostics = checked(program, folder, program.single)
        assert single is not None, diagnostics
        if not fits(spec):
            return "rules that do not fit"
        try:
            expected = meant(spec, folder)
        except Boundless:
            with pytest.raises(Refused, match=r"E0609|E0408"):
                computed(single, folder)
            return "integers without a limit"
        except Ended:
            for file in (single, spec):
                with pytest.raises(BadStep):
                    computed(file, folder)
            return "ended at a bad step"
        if not expected:
            return "chaos"
        for what, file in (("on one device", single), ("laid out", spec)):
            differences = wrong(computed(file, folder), expected)
            assert not differences, f"{what}:\n" + "\n".join(differences)
    except Refused as refused:
        # Only the compiler knows which rule a parameter has, where one may freeze it.
        if {each.code for each in refused.diagnostics} == {"E0408"}:
            return "parameters that reach nothing"
        refused.add_note(program.text)
        raise
    except Exception as error:
        error.add_note(program.text)
        raise
    return "equal"


@given(random=st.randoms(use_true_random=False), cutting=st.sampled_from([True, True, True, False]))
@examples(4, suppress_health_check=SLOW)
@pytest.mark.timeout(1200)
def test_a_program_computes_what_it_means(random: Random, cutting: bool):
    with TemporaryDirectory() as folder:
        assume(holds(Maker(random, cutting).program(), Path(folder)) in ("equal", "ended at a bad step"))


def test_a_program_that_was_wrong_once(tmp_path: Path):
    """Of constants a collective is gathered from, each is deleted once, and no literal."""
    arrays = (
        ("x", "f32", (26, 6), 2),
        ("y", "f32", (26,), 2),
        ("labels", "i64", (26,), 6),
        ("flag", "bool", (26, 4), 2),
    )
    single = ("ranks.context=1", "ranks.data=1", "layout=whole", "schedule=gpipe(microbatches=1)")
    program = Program(Path(__file__).with_name("once.par").read_text(), single, arrays, 1, 8, (0, 30.0))
    assert holds(program, tmp_path) == "equal"


@pytest.mark.soak
def test_programs_compute_what_they_mean_at_length(tmp_path: Path):
    counts: Counter[str] = Counter()
    seed = 0
    while counts["equal"] < 5000:
        seed += 1
        outcome = holds(Maker(Random(seed), cutting=seed % 5 != 0).program(), tmp_path)
        counts.update([outcome])
    print(dict(counts))
    assert counts["chaos"] < 0.05 * counts["equal"]
