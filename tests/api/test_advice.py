"""Advice from Python functions names their arguments, and can be followed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import partita
from partita.dsl.config.python_calls import in_python
from partita.dsl.diagnostic import Diagnostic
from tests.files import ROOT
from tests.runtime.own import BACKWARD, FORWARD, written

TEXT = """
axis batch = 4, embed = 3
model m(x: [batch, embed]) {
  param w: [embed] ~ ones()
  loss mean(x * w * x * w)
  output total = sum(w * w)
  output y = x * w
}
train { data = arrays("d.npz") optimizer = sgd(lr = 0.1) steps = 2 checkpoint = every(2) }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("m.par").write_text(TEXT)
    arrays("d.npz", 0)
    return tmp_path


def arrays(name: str, seed: int) -> None:
    np.savez(name, x=np.random.default_rng(seed).normal(size=(12, 3)).astype(np.float32))


def advised(call: Callable[[], object], code: str, pattern: str) -> dict[str, Any]:
    """The arguments that are advised where a call is refused."""
    with pytest.raises(partita.Refused) as refused:
        call()
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == code
    assert str(refused.value) == diagnostic.render()
    found = re.search(pattern, diagnostic.advice or "")
    assert found is not None, diagnostic.advice
    name, _, value = found[1].partition("=")
    return {name: ast.literal_eval(value)}


@pytest.mark.parametrize("entry", ["d.npz", "round_2.npz"])
def test_changed_data_in_the_same_file_or_in_another(folder: Path, entry: str):
    partita.train("m.par")
    arrays(entry, 1)
    more = ("train.steps=4", f'train.data=arrays("{entry}")')
    arguments = advised(lambda: partita.train("m.par", *more), "E0815", r": (changed_data=True)$")
    with pytest.warns(UserWarning, match="W0804"):
        assert partita.train("m.par", *more, **arguments).resumed == 2


def test_a_finished_run(folder: Path):
    partita.train("m.par")
    with pytest.warns(UserWarning, match="W0810") as told:
        assert not partita.train("m.par")
    found = re.search(r'to go on: `"(.*)"`; to begin anew: `run_dir="(.*)"`', str(told[0].message))
    assert found is not None, told[0].message
    assert len(partita.train("m.par", found[1])) == 2
    assert partita.train("m.par", run_dir=found[2]).resumed is None


@pytest.mark.soak
def test_python_code_that_is_not_allowed(tmp_path: Path):
    path = written(tmp_path, FORWARD + BACKWARD)
    arguments = advised(lambda: partita.train(path), "E0620", r"add (allow_python=True)$")
    assert partita.train(path, **arguments)


def test_a_plan_for_no_devices(folder: Path):
    arguments = advised(lambda: partita.plan("m.par", "batch=8", within=1.0), "E0901", r"`(devices=\d+)`")
    assert partita.plan("m.par", "batch=8", within=1.0, **arguments)


def test_models_of_runs(folder: Path):
    with pytest.raises(partita.Refused, match=r"train it first: `partita\.train`; or name .* with `run_dir`"):
        partita.load_model("m.par", names=["y"])
    trained = partita.train("m.par")
    for call in (lambda: partita.load_model("m.par"), lambda: trained.outputs({})):
        with pytest.raises(partita.Refused, match=r"name others: `names`"):
            call()
    assert partita.load_model("m.par", names=["y"])


# What functions cannot raise: commands and launchers do.
ELSEWHERE = {
    *("compiler/schedules/generator.py", "runtime/transports/nccl.py", "runtime/inference/rows.py"),
    *("runtime/inference/encoding.py", "runtime/checkpoint/importing.py", "runtime/checkpoint/foreign.py"),
    *("runtime/checkpoint/located.py", "compiler/planner/writing.py", "compiler/planner/space.py"),
    *("runtime/data/formats.py", "runtime/checkpoint/proposals.py", "compiler/planner/search.py"),
    "runtime/checkpoint/adapters.py",
}
OPTION = re.compile(r"(?<![-\w])--[a-z]")
COMMAND = re.compile(r"`(?:\S+=\S+ )?(?:partita|torchrun|python) [^`]*`")


def advice() -> Iterator[tuple[str, str]]:
    """Each text with an option in it that functions may give as advice, with where it is."""
    for part in ("dsl", "compiler", "runtime"):
        for path in sorted((ROOT / part).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name in {*ELSEWHERE, "dsl/codes.py", "dsl/config/python_calls.py"} or "/doctor/" in name:
                continue
            tree = ast.parse(path.read_text())
            said = [each for each in ast.walk(tree) if isinstance(each, (ast.Constant, ast.JoinedStr))]
            docstrings = {
                node.body[0].value
                for node in ast.walk(tree)
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and isinstance(node.body[0], ast.Expr)
            }
            for each in said:
                text = each.value if isinstance(each, ast.Constant) else ast.unparse(each)
                if each not in docstrings and isinstance(text, str) and OPTION.search(text):
                    yield f"{name}:{each.lineno}", text


@pytest.mark.soak
def test_all_advice_that_functions_can_give_is_without_options():
    found = list(advice())
    assert len(found) > 5
    for place, text in found:
        told = in_python(Diagnostic("E0001", "", help=text)).advice or ""
        assert not OPTION.search(COMMAND.sub("", told)), (place, told)
