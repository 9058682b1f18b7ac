"""Optimizers that are Python functions of the file's own: the numbers of the built-in ones, and what goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partita.cli.main import main
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.runtime.data.binding import open_data
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.training import VirtualRun

FILE = """axis batch = 8, embed = 6, wide = 10, classes = 4
model net(x: [batch, embed], y: i64[batch]) {
  param up: [embed, wide] ~ normal(0.5)
  param bias: [wide] ~ zeros()
  param down: [wide, classes] ~ normal(0.5)
  loss cross_entropy(dot(tanh(dot(x, up, over = embed) + bias), down, over = wide), y, over = classes)
}
mesh ranks(data = 2, tensor = 2)
layout cut on ranks { shard batch -> data  shard wide -> tensor  shard state -> data }
layout flat on ranks { shard batch -> data, tensor  shard param -> data, tensor }
layout host on ranks { shard batch -> data  shard wide -> tensor  offload state }
layout uneven on ranks { shard batch -> data  shard classes -> tensor padded }
optimizer own { update matrices -> MINE  update all -> sgd(lr = 0.1) }
optimizer known { update matrices -> KNOWN  update all -> sgd(lr = 0.1) }
train { layout = cut  data = random()  optimizer = own  steps = 3  clip = 0.5  precision = bf16 }
"""
PYTHON = """
import torch


def adam(parameter, gradient, mean, square, *, lr, step, weight_decay):
    parameter.mul_(1 - lr * weight_decay)
    mean.lerp_(gradient, 0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    parameter.addcdiv_(mean / (1 - 0.9**step), (square / (1 - 0.999**step)).sqrt_().add_(1e-8), value=-lr)


def lion(parameter, gradient, mean, *, lr, step, weight_decay):
    parameter.mul_(1 - lr * weight_decay)
    parameter.sub_((0.9 * mean + 0.1 * gradient).sign_(), alpha=lr)
    mean.mul_(0.99).add_(gradient, alpha=0.01)


def by_parts(parameter, gradient, *, lr, step, weight_decay):
    parameter.sub_(lr * gradient * gradient.mean())


def wrong(parameter, gradient, *, lr, step, weight_decay):
    parameter.sub_(torch.zeros(3))
"""
ADAM = ('python("own.py", "adam", lr = 0.01, states = 2, weight_decay = 0.1)', "adamw(lr = 0.01, weight_decay = 0.1)")
LION = ('python("own.py", "lion", lr = 0.01, weight_decay = 0.1)', "lion(lr = 0.01, weight_decay = 0.1)")


def written(folder: Path, own: str, known: str = "sgd(lr = 0.1)") -> Path:
    (folder / "own.py").write_text(PYTHON)
    file = folder / "net.par"
    file.write_text(FILE.replace("MINE", own).replace("KNOWN", known))
    return file


def planned(file: Path, *overrides: str) -> CompiledRun:
    spec, diagnostics = load(file, overrides)
    assert spec is not None, diagnostics
    return prepare(spec, allow_python=True)


def trained(plan: CompiledRun, folder: Path) -> VirtualRun:
    run = VirtualRun(plan)
    data = open_data(plan.program, plan.train, folder)
    for step in (1, 2, 3):
        run.step(step, run.ranks[0].tensors(data.batch(step)), 0.01, 0.1)
    return run


@pytest.mark.parametrize("layout", ["cut", "flat", "host"])
@pytest.mark.parametrize("pair", [ADAM, LION], ids=["adam", "lion"])
def test_a_function_updates_as_the_optimizer_that_it_is(pair: tuple[str, str], layout: str, tmp_path: Path):
    file = written(tmp_path, *pair)
    own, known = (
        trained(planned(file, f"layout={layout}", f"train.optimizer={name}"), tmp_path) for name in ("own", "known")
    )
    for name, expected in known.parameters().items():
        torch.testing.assert_close(own.parameters()[name], expected, rtol=1e-5, atol=1e-6)


def test_the_command_verifies_it_if_it_may(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = written(tmp_path, ADAM[0])
    assert main(["verify", str(file), "--allow-python"]) == 0
    capsys.readouterr()
    assert main(["verify", str(file)]) == 1
    assert "error[E0620]: the update by `adam` runs Python code from" in capsys.readouterr().err


def test_one_that_looks_at_other_elements_is_not_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = written(tmp_path, 'python("own.py", "by_parts", lr = 1.0, states = 0)')
    assert main(["verify", str(file), "--allow-python"]) == 1
    assert "error[E0702]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "code", "message"),
    [
        ('python("own.py", "nothing", lr = 0.1)', "E0621", "has no `nothing`"),
        ('python("own.py", "adam", lr = 0.1)', "E0622", "`adam` raised TypeError"),
        ('python("own.py", "wrong", lr = 0.1, states = 0)', "E0622", "`wrong` raised RuntimeError"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(own: str, code: str, message: str, tmp_path: Path):
    with pytest.raises(Refused) as refused:
        trained(planned(written(tmp_path, own)), tmp_path)
    (found,) = refused.value.diagnostics
    assert found.code == code
    assert found.message.startswith("optimizer `python`")
    assert message in found.message


def test_its_parameters_are_not_padded(tmp_path: Path):
    with pytest.raises(Refused, match="may change zeros"):
        planned(written(tmp_path, LION[0]), "layout=uneven", "classes=5")


def test_a_checkpoint_knows_the_text_of_the_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = written(tmp_path, LION[0])
    run = ["run", str(file), "--transport", "virtual", "--allow-python", "train.checkpoint=every(1)"]
    run += ["--run-dir", str(tmp_path / "run")]
    assert main(run) == 0
    (tmp_path / "own.py").write_text(PYTHON.replace("0.99", "0.98"))
    capsys.readouterr()
    main([*run, "train.steps=4"])
    assert "optimizer" in capsys.readouterr().err
