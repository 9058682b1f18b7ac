"""The files that planted mistakes are tried on mean what they say, in each of their layouts.

Random programs come upon any of it in time; these have, each time, the rare cases: a parameter that is read three
times, several metrics of every kind, all optimizers, an evaluation batch by batch.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from partita.compiler.verify.proxy import single
from partita.dsl.spec import Spec
from tests.files import ROOT
from tests.reference.compare import Figure, checked, computed, meant, wrong
from tests.reference.programs import Program

FILES = ROOT / "tests" / "planted" / "files"

# What each file is run with beside what it says, and its arrays: name, dtype, shape, and what integers are below.
CASES = {
    "attention": ((), ("layout=groups_", "schedule=one_f_one_b", "schedule.microbatches=1")),
    "axes": ((), ("layout=heads_",), ("layout=both",), ("layout=keys",), ("layout=one",)),
    "batch": ((),),
    "copies": ((),),
    "buffers": ((), ("layout=plain_", "s.microbatches=1")),
    "experts": ((), ("layout=exchanged",), ("layout=inner", "s.microbatches=3"), ("layout=places",)),
    "gpu": ((),),
    "v": ((),),
    "tied_and_stopped": ((),),
    "balanced_by_sign": ((),),
    "groups": (("train.sync=none",),),
    "parameters": ((),),
    "figures": ((), ("layout=across", "s.microbatches=2")),
    "images": ((), ("layout=spread_", "s.microbatches=2")),
    "offload": ((),),
    "picking": ((), ("layout=positions",), ("layout=classes", "schedule=one_f_one_b")),
    "pieces": ((), ("layout=rows_", "schedule=apart_"), ("layout=sums_",)),
    "recurrences": ((), ("layout=both", "schedule=one_f_one_b"), ("layout=features",)),
    "rules": ((), ("layout=whole_", "train.optimizer=coded_", "s.microbatches=1")),
    "scores": ((), ("layout=values",)),
    "skips": ((), ("layout=turns", "schedule=pairs")),
    "tied": ((), ("train.optimizer=sgd(lr = 0.05, momentum = 0.9, weight_decay = 0.2)", "train.clip=100")),
    "slices": ((),),
    "tables": ((), ("train.optimizer=sgd(lr = 0.05)", "s.microbatches=1")),
    "step_ends": ((),),
    "flat": ((),),
    "uneven": ((), ("s.microbatches=1",)),
    "validation": ((),),
    "vocabulary": ((),),
    "windows": ((), ('train.data=text("ids.*", holdout = 30%)',)),
}
# Whose parts other files have, too.
LONG = ("gpu", "groups", "slices", "validation", "v", "copies")
# What changes nothing on one device.
LAID_OUT = ("layout=", "schedule=", "schedule.microbatches=", "s.microbatches=")
ARRAYS = (
    ("x", "f32", (23, 3), 0),
    ("y", "f32", (23,), 0),
    ("label", "i64", (23,), 4),
    ("flag", "bool", (23,), 2),
    ("fixed", "f32", (3, 2), 0),
    ("weight", "f32", (23,), 0),
)


def read(name: str, overrides: tuple[str, ...], folder: Path) -> Spec:
    """A file with its arrays, checked."""
    text = (FILES / f"{name}.par").read_text()
    program = Program(text, (), ARRAYS if name == "figures" else (), 5)
    spec, diagnostics = checked(program, folder, ("train.precision=f64", *overrides))
    assert spec is not None, diagnostics
    return spec


@cache
def meaning(name: str, overrides: tuple[str, ...]) -> dict[str, Figure]:
    """What a file means: the same in all its layouts."""
    with TemporaryDirectory() as folder:
        return meant(read(name, overrides, Path(folder)), Path(folder), apart=name == "batch")


def test_every_file_has_a_case():
    assert set(CASES) == {path.stem for path in FILES.glob("*.par")}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param(
            name,
            overrides,
            id=f"{name}-{number}" if number else name,
            marks=[pytest.mark.soak] * ((number > 0 and name != "rules") or name in LONG),
        )
        for name, each in CASES.items()
        for number, overrides in enumerate(each)
    ],
)
def test_a_file_computes_what_it_means(name: str, overrides: tuple[str, ...], tmp_path: Path):
    """On one device too, where that is not the first case's program once more."""
    spec = read(name, overrides, tmp_path)
    expected = meaning(name, tuple(each for each in overrides if not each.startswith(LAID_OUT)))
    assert any("at the end" in what for what in expected), "what is compared ends in chaos"
    known = overrides != CASES[name][0] and all(each.startswith(LAID_OUT) for each in overrides)
    for what, file in (*([] if known else [("on one device", single(spec))]), ("laid out", spec)):
        differences = wrong(computed(file, tmp_path), expected)
        assert not differences, f"{what}:\n" + "\n".join(differences)
