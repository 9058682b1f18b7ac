"""Wrong arguments of public functions: each is refused where it is given, by its name, and with what is expected."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import partita

FILE = """
axis batch = 8, features = 4, out = 3
model c(x: [batch, features], ids: i64[batch], y: [batch, out]) {
  param w: [features, out] ~ kaiming()
  param e: [out, features] ~ kaiming()
  let h = x + embedding(ids, e, over = out)
  output logits = dot(h, w, over = features)
  loss mse(dot(h, w, over = features), y)
}
train { data = random()  optimizer = sgd(lr = 0.1)  steps = 2  checkpoint = every(2) }
"""
PARAMETERS = {"c.w": torch.ones(4, 3), "c.e": torch.ones(3, 4)}
ROWS = {"x": torch.ones(5, 4), "ids": torch.zeros(5, dtype=torch.int64)}
INPUTS = {"x": torch.ones(8, 4), "ids": torch.zeros(8, dtype=torch.int64)}

NO_PATH = [None, 3, b"c.par", torch.ones(2), np.ones(2), ["c.par"], torch.nn.Linear(2, 2), Path]
NO_FLAG = [None, 1, "no", torch.ones(1)]
NO_NAMES = ["logits", 3, None, [1], [None], torch.ones(2)]
NO_TENSORS = [None, torch.ones(8, 4), np.ones((8, 4)), [torch.ones(8, 4)], "x"]
# What no argument of a name may be, whatever the function.
WRONG: Mapping[str, list[Any]] = {
    "path": NO_PATH,
    "state": ["c.par", None, Path("c.par")],
    "devices": [0, -1, "2", 1.5, True],
    "top": [0, "2", 1.5, None, False],
    "within": [0, -1.0, "2", None, float("nan"), True],
    "allow_python": NO_FLAG,
    "changed_data": NO_FLAG,
    "run_dir": [3, b"x", ["x"], torch.ones(1)],
    "run": [3, b"x", ["x"], torch.ones(1)],
    "on_step": [3, "print", [print]],
    "names": NO_NAMES,
    "weights": ["emma", None, 1, "EMA"],
    "parameters": [*NO_TENSORS, {"c.w": np.ones((4, 3)), "c.e": PARAMETERS["c.e"]}, {}, {"w": torch.ones(4, 3)}],
    "module": [None, "m:build", torch.ones(2), torch.nn.Linear],
    "example_inputs": [*NO_TENSORS, {"input": np.ones((8, 4))}, {1: torch.ones(2)}, {}],
    "loss": [3, ["mse(a, b)"], torch.nn.MSELoss()],
    "axes": [3, "x=batch", {"x": "batch"}, {"x": 3}, {}],
    "name": [3, ["m"]],
    "prove": NO_FLAG,
    "tables": [3, b"x", ["x"], torch.ones(1)],
    "inputs": [*NO_TENSORS, {**INPUTS, "x": np.ones((8, 4))}, {**INPUTS, "x": [1.0]}, {**INPUTS, "x": None}, {}],
}
RIGHT = {
    "path": "c.par",
    "parameters": PARAMETERS,
    "inputs": INPUTS,
    "module": torch.nn.Linear(4, 3),
    "example_inputs": {"input": torch.ones(2, 4)},
}
FUNCTIONS = [name for name in partita.__all__ if inspect.isfunction(getattr(partita, name))]


@pytest.fixture(autouse=True)
def _in_a_folder_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.par").write_text(FILE)


def refused(call: Callable[[], object], name: str) -> str:
    """The message of what an argument is refused by."""
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    message = str(raised.value)
    assert re.search(rf"\b{name.rstrip('s')}s*\b", message), message
    assert " is " in message or " are " in message or "need" in message or "has" in message
    assert "object" not in message
    assert "__" not in message
    return message


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_of_every_function(function: str) -> None:
    signature = inspect.signature(getattr(partita, function))
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        for wrong in WRONG[name]:
            others = {key: RIGHT[key] for key in signature.parameters if key in RIGHT and key != name}
            refused(lambda: getattr(partita, function)(**others, **{name: wrong}), name)  # noqa: B023
    assert not Path("runs").exists()


@pytest.mark.few(4)
@pytest.mark.parametrize("names", NO_NAMES)
@pytest.mark.parametrize("inputs", [*WRONG["inputs"], {**ROWS, "x": torch.ones(5, 4, dtype=torch.complex64)}])
def test_what_a_trained_model_is_called_with(names: object, inputs: object) -> None:
    trained = partita.train("c.par")
    model = partita.load_model("c.par")
    refused(lambda: model(inputs), "inputs")
    refused(lambda: trained.outputs(inputs), "inputs")
    refused(lambda: trained.outputs(ROWS, names), "names")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: partita.train("c.par", steps=2), '"train.steps=2"'),
        (lambda: partita.compile("c.par", batch=16), '"batch=16"'),
        (lambda: partita.compile("c.par", schedule="gpipe"), "write `gpipe(microbatches = 8)`; settings"),
        (lambda: partita.check("c.par", lr=0.5), '"train.optimizer.lr=0.5"'),
        (lambda: partita.train("c.par", callback=print), "did you mean `on_step`?"),
        (lambda: partita.train("c.par", rundir="x"), "did you mean `run_dir`?"),
        (lambda: partita.train("c.par", resume=True), "a run goes on by itself"),
        (lambda: partita.train(path="c.par", epochs=3), "training length is given in steps"),
        (lambda: partita.plan("c.par", gpus=8), "did you mean `devices`?"),
        (lambda: partita.load_model("c.par", step=10), "there are `run_dir`, `names`, `weights`"),
        (lambda: partita.load_model("c.par", checkpoint="runs/c"), "there are `run_dir`, `names`, `weights`"),
        (lambda: partita.outputs("c.par", parameters=PARAMETERS, input=INPUTS), "did you mean `inputs`?"),
        (lambda: partita.train(FILE), "`path` is the path of a .par file, not what is written in one"),
    ],
)
def test_an_argument_that_a_function_has_not(call: Callable[[], object], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(told)) as raised:
        call()
    for override in re.findall(r'"(\S+=[^"…]+)"', str(raised.value)):
        assert not [each for each in partita.check("c.par", override) if each.span.source.name == "command line"]


def test_a_run_where_its_file_belongs() -> None:
    partita.train("c.par")
    for call in (lambda: partita.load_model("runs/c"), lambda: partita.load_model("c.par", "runs/c")):
        with pytest.raises(partita.Refused, match=r'`run_dir="runs/c"`'):
            call()
    model = partita.load_model("c.par", run_dir="runs/c")
    with pytest.raises(TypeError, match=r'`\{"x": …\}`'):
        model(**ROWS)


def test_a_module_is_no_file() -> None:
    for function in (partita.check, partita.load, partita.compile, partita.train, partita.verify, partita.plan):
        message = refused(lambda: function(torch.nn.Linear(2, 2)), "path")  # noqa: B023
        assert message.startswith("`path` is the path of a .par file, not a Linear: ")
        assert "`partita init NAME` writes one" in message


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"x": torch.ones(5, 9)}, "the input `x` has shape (5, 9), not (rows, 4)"),
        ({"x": torch.ones(5)}, "the input `x` has shape (5,), not (rows, 4)"),
        ({"x": torch.tensor(1.0)}, "the input `x` has shape (), not (rows, 4)"),
        ({"ids": torch.zeros(5, 2, dtype=torch.int64)}, "the input `ids` has shape (5, 2), not (rows,)"),
        ({"ids": torch.zeros(3, dtype=torch.int64)}, "inputs have different numbers of rows: {'x': 5, 'ids': 3}"),
        ({"ids": torch.full((5,), 0.5)}, "the input `ids` has numbers that are no integers, which i64[batch=8] needs"),
        ({"ids": torch.full((5,), 7)}, "`ids` has ids that are not below 3, the size of `out=3`"),
        ({"x": torch.ones(0, 4), "ids": torch.zeros(0, dtype=torch.int64)}, "the inputs have no rows"),
    ],
)
def test_what_is_said_of_a_shape_is_of_what_was_given(inputs: dict[str, torch.Tensor], told: str) -> None:
    """Of so many rows as were given, and not of the batch that they are filled up to."""
    trained = partita.train("c.par")
    for call in (trained.outputs, partita.load_model("c.par")):
        with pytest.raises(ValueError, match=re.escape(told)):
            call(ROWS | inputs)


def test_a_missing_one_is_named_with_what_may_be_meant() -> None:
    with pytest.raises(ValueError, match="the outputs need the input `ids`, and not `idz`"):
        partita.outputs("c.par", parameters=PARAMETERS, inputs={"x": INPUTS["x"], "idz": INPUTS["ids"]})
    with pytest.raises(ValueError, match=r"the parameter `c\.w` has shape \(3, 4\), not \(4, 3\)"):
        partita.outputs("c.par", parameters={**PARAMETERS, "c.w": torch.ones(3, 4)}, inputs=INPUTS)


def test_what_is_right_in_other_dtypes_is_taken() -> None:
    inputs = {"x": torch.ones(8, 4, dtype=torch.int32), "ids": torch.zeros(8)}
    found = partita.outputs("c.par", parameters=PARAMETERS, inputs=inputs)
    assert torch.equal(found["logits"], partita.outputs("c.par", parameters=PARAMETERS, inputs=INPUTS)["logits"])


@pytest.mark.parametrize("raised", [StopIteration, StopAsyncIteration, KeyError, GeneratorExit])
def test_what_a_callback_raises_ends_the_run(raised: type[BaseException]) -> None:
    """Under its own name, but for StopIteration, which generators take for their end."""

    def on_step(record: dict[str, Any]) -> None:
        raise raised("mine")

    with pytest.raises(RuntimeError if raised is StopIteration else raised) as found:
        partita.train("c.par", on_step=on_step)
    if raised is StopIteration:
        assert str(found.value) == "`on_step` raised StopIteration: to end a run, raise another exception"
        assert isinstance(found.value.__cause__, StopIteration)
    assert len(partita.train("c.par")) == 2  # the directory is free again


def test_what_is_public_is_shown() -> None:
    assert dir(partita) == sorted([*partita.__all__, "__version__"])
    assert all(hasattr(partita, name) for name in dir(partita))
