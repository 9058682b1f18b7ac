"""An operation of the language is added in three files: its typing rule, the operation, its kernel. What it means, with
which `verify` compares, is a method of the interpreter.

As modules from elsewhere they make it known to this process, whose commands then take a file that uses it; put into a
copy of the house, a folder each, to all processes of a run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from partita.compiler.ops import OPS
from partita.compiler.ops.op import Op, op
from partita.compiler.passes.functions import LANGUAGE_POINTWISE, LOWERINGS, lowering
from partita.dsl.functions.signatures import FUNCTIONS, function
from partita.runtime import kernels
from partita.runtime.interpreter.named import Named
from partita.runtime.interpreter.walk import At, Walk
from partita.runtime.kernels.registry import KERNELS, kernel
from tests.commands import computed, here
from tests.copies import Copy

RULE = """
from partita.dsl.functions.signatures import AXIS, Slot, Typed, Use, function


@function("running_sum", slots=["x", Slot("over", AXIS)])
def _running_sum(use: Use) -> Typed:
    use.floating("x")
    use.has("x", [use["over"]])
    return use["x"].type, {"over": use["over"].name}
"""

OP = '''
from partita.compiler.layout import SUM
from partita.compiler.ops.op import Op, ShardingRule, aligned_rules, op


@op("running_sum")
class RunningSum(Op):
    """For each element the sum of those up to it along `over`; with `back`, from it on, which is the gradient."""

    over: str
    back: bool = False

    def infer(self, *types):
        """The same."""
        return types

    def sharding_rules(self, operands, results):
        """Any other axis; linear."""
        return (*aligned_rules(operands, results, whole=[self.over]), ShardingRule((SUM,), (SUM,)))

    def gradient(self, build, node, d):
        """Each element is in the sums from it on."""
        return (build.apply(RunningSum(self.over, not self.back), d),)

    def emit(self, arguments, results):
        """A kernel of the runtime."""
        (x,) = arguments
        return f"kernels.running_sum({x.text}, {x.type.position(self.over)}, {self.back})"
'''

KERNEL = '''
from partita.runtime.kernels.registry import kernel


@kernel
def running_sum(x, dim, back):
    """Sums of the elements up to each along a dimension, or with `back` from each on."""
    return x.flip(dim).cumsum(dim).flip(dim) if back else x.cumsum(dim)
'''

# The same by what the language has: which elements a sum has is a matrix.
MATRIX = """rename(
    dot(h, cast(expand(iota(steps), last) <= rename(iota(steps), steps -> last), f32), over = steps), last -> steps)"""

FILE = """
axis batch = 8, steps = 6, last = 6, inner = 4, digits = 3

model sums(image: [batch, steps], label: i64[batch]) {
  param w1: [inner] ~ normal(1.0)
  param w2: [steps, inner, digits] ~ kaiming()
  let h = expand(image, inner) * w1
  let logits = dot(SUMS, w2, over = [steps, inner])
  loss cross_entropy(logits, label, over = digits)
}

mesh pairs(data = 2, tensor = 2)

layout split on pairs {
  shard batch -> data
  shard inner -> tensor
}

schedule plain = one_f_one_b(microbatches = 2)

train {
  model = sums
  layout = split
  schedule = plain
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 3
}
"""


def file_with(folder: Path, sums: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "sums.par"
    path.write_text(FILE.replace("SUMS", sums))
    return path


def meaning(walk: Walk, at: At, x: Named) -> Named:
    dim = x.axes.index(at.options["over"])
    sums = [x.data.narrow(dim, 0, i + 1).sum(dim) for i in range(x.data.shape[dim])]
    return Named(torch.stack(sums, dim), x.axes)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Walk, "_running_sum", meaning, raising=False)
    for name, text in (("rule", RULE), ("operation", OP), ("runtime", KERNEL)):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        found = spec_from_file_location(f"running_sum_{name}", path)
        found.loader.exec_module(module_from_spec(found))
    yield
    for registry in (FUNCTIONS, OPS, KERNELS):
        del registry["running_sum"]


@pytest.mark.soak
@pytest.mark.usefixtures("added")
def test_every_command_takes_what_three_modules_add(tmp_path: Path):
    path = file_with(tmp_path / "own", "running_sum(h, over = steps)")
    for command in (
        ("check", str(path)),
        ("compile", str(path)),
        ("plan", str(path), "--devices", "4", "--within", "2"),
        ("verify", str(path)),
        ("run", str(path), "--transport", "virtual", "--run-dir=run"),
    ):
        done = here(*command, cwd=path.parent)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert trained(path.parent) == pytest.approx(by_matrix(tmp_path), rel=1e-5)


@pytest.mark.soak
def test_every_process_of_a_run_has_what_three_files_add(tmp_path: Path):
    copy = Copy.made(tmp_path / "copy")
    tree = copy.tree
    rules = tree / "dsl" / "functions" / "rules.py"
    rules.write_text(rules.read_text() + RULE)
    (tree / "compiler" / "ops" / "running_sum.py").write_text(OP)
    (tree / "runtime" / "kernels" / "running_sum.py").write_text(KERNEL)
    path = file_with(tmp_path / "own", "running_sum(h, over = steps)")
    command = [sys.executable, "-m", "partita", "run", str(path), "pairs.data=1", "--run-dir=run"]
    done = subprocess.run(
        command, cwd=path.parent, env=copy.environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert trained(path.parent) == pytest.approx(by_matrix(tmp_path), rel=1e-5)


def trained(folder: Path) -> list[float]:
    losses = [record["loss"] for record in computed(folder / "run") if "loss" in record]
    assert len(losses) == 3
    return losses


def by_matrix(tmp_path: Path) -> list[float]:
    """The losses of the file that has a product in the operation's place."""
    path = file_with(tmp_path / "matrix", MATRIX)
    done = here("run", str(path), "--transport", "virtual", "--run-dir=run", cwd=path.parent)
    assert done.returncode == 0, done.stderr
    return trained(path.parent)


def test_every_function_of_the_language_is_lowered():
    """Here, or as the operation of its name, or as the functions that it stands for; but for what is differentiated."""
    assert set(FUNCTIONS) <= {*LOWERINGS, *LANGUAGE_POINTWISE, *OPS, "dropped", "softmax_by", "logaddexp", "grad"}


def test_a_name_is_taken_once():
    for register, given, name in (
        (function("dot", slots=["x"]), len, "dot"),
        (lowering("softmax"), len, "softmax"),
        (op("gather"), type("Gather", (Op,), {}), "gather"),
        (kernel, kernels.relu_gradient, "relu_gradient"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` already"):
            register(given)
