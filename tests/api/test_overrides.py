"""Overrides from Python: as on the command line, or as mappings; anything else is a TypeError that says so."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import partita
from partita.overrides import written

FILE = """\
axis batch = 8, embed = 6
model m(x: [batch, embed]) {
  param w: [embed] ~ normal(1.0)
  loss mean(x * w)
}
train {
  data = random()
  optimizer = sgd(lr = 0.1, nesterov = true, momentum = 0.9)
  steps = 2
  clip = 1.0
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.par"
    path.write_text(FILE)
    return path


def test_a_mapping_says_the_same_as_strings(file: Path) -> None:
    changes = {"batch": 16, "train.clip": None, "train.optimizer.lr": 1e-5, "train.optimizer.nesterov": False}
    changes |= {"train.data": "random()", "schedule": "gpipe(microbatches = 2)", "train.precision": "bf16"}
    found = partita.load(file, changes)
    assert found.axes["batch"].size == 16
    assert found.train.clip is None
    assert found.train.optimizer.calls[0].arguments["lr"].arguments == {"value": 1e-5}
    assert found.train.optimizer.calls[0].arguments["nesterov"] is False
    assert found.train.precision == "bf16"
    assert found.schedule.call.arguments["microbatches"] == 2


def test_strings_and_mappings_apply_in_their_order(file: Path) -> None:
    assert partita.load(file, "batch=2", {"batch": 4}, "batch=16").axes["batch"].size == 16
    assert partita.load(file, "batch=2", {"batch": 4}).axes["batch"].size == 4
    assert partita.load(file, {}).axes["batch"].size == 8


def test_numbers_of_numpy_are_numbers(file: Path) -> None:
    found = partita.load(file, {"batch": np.int64(4), "train.clip": np.float64(0.5), "train.seed": np.uint8(3)})
    assert (found.axes["batch"].size, found.train.clip, found.train.seed) == (4, 0.5, 3)
    assert written([{"train.optimizer.nesterov": True}]) == ("train.optimizer.nesterov=true",)


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.fractions())
def test_a_number_is_written_as_it_is(number: float | Fraction) -> None:
    (text,) = written([{"key": number}])
    read = text.removeprefix("key=")
    assert (int(read) if isinstance(number, int) else float(read)) == (
        number if isinstance(number, int) else float(number)
    )


CALLS: list[Callable[..., object]] = [
    partita.check,
    partita.load,
    partita.compile,
    partita.verify,
    partita.plan,
    partita.train,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (3, "an override is a string such as .*, not int"),
        (None, "an override is a string such as .*, not NoneType"),
        (["batch=3"], "an override is .* or a mapping .*, not list"),
        ({"batch": [3]}, "the override of `batch` is a string as in the file, a number, a boolean or None, not list"),
        ({"train.data": Path("x")}, "the override of `train.data` is .*, not PosixPath"),
        ({"batch": 1 + 2j}, "the override of `batch` is .*, not complex"),
        ({3: 4}, "the key of an override is a string .*, not int"),
    ],
)
def test_anything_else_is_refused(call: Callable[..., object], override: object, message: str, file: Path) -> None:
    with pytest.raises(TypeError, match=message):
        call(file, override)


@pytest.mark.parametrize("call", CALLS[1:], ids=lambda call: call.__name__)
def test_a_wrong_value_is_a_diagnostic(call: Callable[..., object], file: Path) -> None:
    with pytest.raises(partita.Refused, match="there is no `lr` to override") as refused:
        call(file, {"lr": 3})
    assert refused.value.diagnostics[0].help == "did you mean `train.optimizer.lr`?"
