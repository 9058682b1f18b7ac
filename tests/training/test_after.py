"""What becomes of parameters after their update, against torch: norms of columns, a mean that is taken out, a limit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partita.cli.main import main
from partita.compiler.verify.equivalence import validate
from partita.dsl.diagnostic import Refused
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked, load_text

FILE = """axis batch = 8, embed = 6, wide = 10, classes = 4
block layer(x: [batch, embed]) {
  param up: [embed, wide] ~ normal(0.5)
  param down: [wide, embed] ~ normal(0.5)
  buffer peak: [] ~ ones()
  let h = tanh(dot(x, up, over = embed))
  buffer before: [wide] ~ zeros()
  let square = sum(up * up, over = embed)
  update before = square
  update peak = max(stop_gradient(h * h), over = [batch, wide])
  after update up = up * rsqrt(square + 1e-6) * sqrt(minimum(1.0, 0.9 / peak))
  return x + dot(h, down, over = wide)
}
model net(x: [batch, embed], y: i64[batch]) {
  param head: [embed, classes] ~ normal(0.5)
  repeat 2 as layer { let x = layer(x) }
  after update head = head - mean(head, over = classes)
  loss cross_entropy(dot(x, head, over = embed), y, over = classes)
}
mesh ranks(data = 2, tensor = 2, pipe = 2)
layout cut on ranks { shard batch -> data  shard wide -> tensor  stage layer -> pipe  shard state -> data }
layout zero on ranks { shard batch -> data  shard param -> data, tensor, pipe  shard classes -> tensor }
layout uneven on ranks { shard batch -> data padded  shard wide, classes -> tensor, pipe padded }
layout whole on ranks { }
schedule s = one_f_one_b(microbatches = 2)
train { layout = whole  schedule = s  data = random()  optimizer = adamw(lr = 0.05)  steps = 4  precision = f64 }
"""
ALONE = ("ranks.data=1", "ranks.tensor=1", "ranks.pipe=1", "s.microbatches=1")
LAYOUTS = {
    "whole": ALONE,
    "cut": ("layout=cut",),
    "zero": ("layout=zero", "train.clip=1e6"),
    "uneven": ("layout=uneven", "ranks.tensor=3", "s.microbatches=3"),
}


def loss_of(p: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    x, peaks = batch["x"], []
    for i in range(2):
        h = torch.tanh(x @ p[f"net.layer.{i}.layer.up"])
        peaks.append(h.detach().square().max())
        x = x + h @ p[f"net.layer.{i}.layer.down"]
    return F.cross_entropy(x @ p["net.head"], batch["y"]), peaks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_are_changed_after_all_are_updated(layout: str):
    """By what a buffer is then, and before the next step reads them."""
    plan = prepare(checked(FILE, "m.par", LAYOUTS[layout]))
    validation = validate(plan.training)
    assert validation.passed, "\n\n".join(each.render() for each in validation.problems)
    run = VirtualRun(plan)
    p = {name: value.clone() for name, value in run.parameters().items()}
    trained = {name: value.requires_grad_() for name, value in p.items() if "peak" not in name and "before" not in name}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.05, weight_decay=0)
    drawn = batches(plan.program, plan.train.seed)
    for number in (1, 2, 3):
        batch = drawn[number % len(drawn)]
        loss, peaks = loss_of(trained, batch)
        optimizer.zero_grad()
        loss.backward()
        squares = [trained[f"net.layer.{i}.layer.up"].detach().square().sum(0) for i in range(2)]
        optimizer.step()
        found, _ = run.step(number, batch, 0.05)
        assert found == pytest.approx(loss.item(), rel=1e-9)
        with torch.no_grad():
            for i, peak in enumerate(peaks):
                up = trained[f"net.layer.{i}.layer.up"]
                up.mul_((up.square().sum(0) + 1e-6).rsqrt() * min(1.0, 0.9 / float(peak)) ** 0.5)
            trained["net.head"].sub_(trained["net.head"].mean(1, keepdim=True))
        for i, square in enumerate(squares):
            torch.testing.assert_close(run.parameters()[f"net.layer.{i}.layer.before"], square)
        for name, value in trained.items():
            torch.testing.assert_close(run.parameters()[name], value.detach(), rtol=1e-8, atol=1e-10)


def test_the_command_verifies_it(tmp_path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "after.par"
    file.write_text(FILE)
    assert main(["verify", str(file), "layout=cut"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "message", "help"),
    [
        ("after update head = head", "after update heads = head", "unknown", "did you mean `head`?"),
        ("after update up = up *", "after update peak = peak *", "`peak` is a buffer", "`update peak = …`"),
        ("update peak = max", "update down = max", "`down` is a parameter", "`after update down = …`"),
        ("head - mean(head, over = classes)", "mean(head, over = classes)", "does not have its axes", "expand"),
    ],
)
def test_what_cannot_be_changed_is_refused(before: str, after: str, message: str, help: str):
    _, diagnostics = load_text(FILE.replace(before, after))
    assert any(message in each.message and help in (each.help or "") for each in diagnostics), diagnostics


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("minimum(1.0, 0.9 / peak)", "max(h * h, over = [batch, wide])", "depends on the batch"),
        ("optimizer = adamw(lr = 0.05)", "optimizer = adamw(lr = 0.05) ema = 0.9", "does not go with `ema`"),
        ("optimizer = adamw(lr = 0.05)", "optimizer = some", "changes what no rule of the optimizer updates"),
    ],
)
def test_what_would_not_hold_is_refused(before: str, after: str, message: str):
    text = FILE.replace(before, after) + "optimizer some { freeze net.head  update all -> sgd(lr = 0.1) }\n"
    with pytest.raises(Refused) as refused:
        prepare(checked(text, "m.par", ALONE))
    assert [each.code for each in refused.value.diagnostics] == ["E0225"]
    assert message in refused.value.diagnostics[0].message
