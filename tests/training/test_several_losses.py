"""Several losses, and rules that take turns, against torch's optimizers: parameters after some steps, in layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partita.dsl.diagnostic import Refused
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked, load_text

FILE = """axis batch = 8, noise = 4, embed = 6, wide = 8, inner = wide
block generator(z: [batch, noise]) {
  param up: [noise, wide] ~ normal(0.5)
  let h = dot(z, up, over = noise)
  repeat 2 as layer {
    param w: [wide, inner] ~ normal(0.3)
    let h = h + rename(tanh(dot(h, w, over = wide)), inner -> wide)
  }
  param down: [wide, embed] ~ normal(0.5)
  return dot(h, down, over = wide)
}
block judge(x: [batch, embed]) {
  param a: [embed, wide] ~ normal(0.5)
  param b: [wide] ~ normal(0.5)
  return dot(silu(dot(x, a, over = embed)), b, over = wide)
}
model gan(real: [batch, embed], z: [batch, noise]) {
  share critic = judge
  param scale: [embed] ~ ones()
  let fake = generator(z) * scale
  loss fooled = mean(softplus(-critic(fake)))
  loss told = mean(softplus(critic(fake))) + mean(softplus(-critic(real)))
}
optimizer turns {
  update generator -> adamw(lr = 0.02, every = 3, from = 2, weight_decay = 0.1) by fooled
  update critic -> RULE by told
  update all -> sgd(lr = 0.05, momentum = 0.5)
}
mesh line(pipe = 2, data = 2)
layout whole on line { }
layout cut on line { stage layer -> pipe  shard batch -> data  shard state -> data }
layout zero on line { shard batch -> pipe, data  shard param -> data }
schedule s = one_f_one_b(microbatches = 2)
train { model = gan  layout = whole  schedule = s  data = random()  optimizer = turns  steps = 6  precision = f64 }
"""
ALONE = ("line.pipe=1", "line.data=1", "schedule=gpipe(microbatches=1)")
LAYOUTS = {"whole": ALONE, "cut": ("layout=cut",), "zero": ("layout=zero",)}
RULES = {
    "adamw": "adamw(lr = 0.01, every = 2)",
    "sgd": "sgd(lr = 0.1, momentum = 0.9, every = 2)",
    "adagrad": "adagrad(lr = 0.1, every = 2)",
}


def losses(p: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    def judge(x: Tensor) -> Tensor:
        return F.silu(x @ p["gan.critic.a"]) @ p["gan.critic.b"]

    h = batch["z"] @ p["gan.generator.up"]
    for i in range(2):
        h = h + torch.tanh(h @ p[f"gan.generator.layer.{i}.w"])
    fake = h @ p["gan.generator.down"] * p["gan.scale"]
    fooled = F.softplus(-judge(fake)).mean()
    return fooled, F.softplus(judge(fake)).mean() + F.softplus(-judge(batch["real"])).mean()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_rules_with_losses_of_their_own_take_turns(rule: str, layout: str):
    run = VirtualRun(prepare(checked(FILE.replace("RULE", RULES[rule]), "m.par", LAYOUTS[layout])))
    p = {path: value.clone().requires_grad_() for path, value in run.parameters().items()}
    generator = [value for path, value in p.items() if "generator" in path]
    critic = [value for path, value in p.items() if "critic" in path]
    first = torch.optim.AdamW(generator, lr=0.02, weight_decay=0.1)
    second = {
        "adamw": lambda: torch.optim.AdamW(critic, lr=0.01, weight_decay=0),
        "sgd": lambda: torch.optim.SGD(critic, lr=0.1, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad(critic, lr=0.1),
    }[rule]()
    third = torch.optim.SGD([p["gan.scale"]], lr=0.05, momentum=0.5)
    given = batches(run.plan.program, 1)
    for number in range(1, 7):
        batch = given[number % len(given)]
        fooled, told = losses(p, batch)
        found, _ = run.step(number, batch, 0.02, float(second.defaults["lr"]), 0.05)
        assert found == pytest.approx((fooled + told).item(), rel=1e-9)
        assert run.metrics() == pytest.approx({"fooled": fooled.item(), "told": told.item()}, rel=1e-9)
        for values, by in ((generator, fooled), (critic, told), ([p["gan.scale"]], fooled + told)):
            for value, d in zip(values, torch.autograd.grad(by, values, retain_graph=True), strict=True):
                value.grad = d
        for optimizer, every, start in ((first, 3, 2), (second, 2, 1), (third, 1, 1)):
            if number >= start and (number - start) % every == 0:
                optimizer.step()
        for path, value in run.parameters().items():
            torch.testing.assert_close(value, p[path].detach(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "code", "help"),
    [
        (("by told", "by tolt"), "E0317", "did you mean `told`?"),
        (("loss told = ", "loss "), "E0221", "name each"),
        (("loss told", "loss fooled"), "E0222", "another name"),
        (("every = 2", "every = 0"), "E0308", None),
    ],
)
def test_wrong_losses_are_refused(change: tuple[str, str], code: str, help: str | None):
    _, diagnostics = load_text(FILE.replace("RULE", RULES["adamw"]).replace(*change))
    found = [each for each in diagnostics if each.code == code]
    assert found, diagnostics
    assert help is None or help in (found[0].help or "")


def test_a_parameter_that_its_loss_does_not_reach_is_refused():
    text = FILE.replace("RULE", RULES["adamw"]).replace("critic(fake))) +", "critic(stop_gradient(fake)))) +")
    with pytest.raises(Refused, match=r"parameter `gan\.generator\.up` does not reach the loss `told` with a gradient"):
        prepare(checked(text.replace("by fooled", "by told"), "m.par", ALONE))
