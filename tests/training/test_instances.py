"""Instances of blocks against torch: a siamese net, a preference loss with a frozen reference, a layer that repeats.

Losses and gradients in f64, on one device and in pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked

BLOCKS = """axis batch = 8, seq = 6, embed = 6, wide = 10, vocab = 11
block net(x: [batch, embed]) {
  param up: [embed, wide] ~ kaiming()
  let h = tanh(dot(x, up, over = embed))
  repeat 2 as layer { param w: [wide] ~ normal(0.5)  let h = h + tanh(h * w) }
  param down: [wide, embed] ~ kaiming()
  return dot(h, down, over = wide)
}
block lm(tokens: i64[batch, seq]) {
  param wte: [vocab, embed] ~ normal(0.5)
  let x = embedding(tokens, wte, over = vocab)
  repeat 2 as layer { param w: [embed] ~ normal(0.5)  let x = x + cumsum(tanh(x * w), over = seq) }
  return dot(x, wte, over = embed)
}
"""
TRAIN = """
mesh line(pipe = 2)
layout cut on line { stage layer -> pipe }
layout whole on line { }
schedule s = one_f_one_b(microbatches = 4)
train { layout = cut schedule = s data = random() optimizer = sgd(lr = 0.1) steps = 2 precision = f64 }
"""
SINGLE = ("line.pipe=1", "layout=whole", "schedule=gpipe(microbatches=1)")
Named = Mapping[str, Tensor]


def net(p: Named, prefix: str, x: Tensor) -> Tensor:
    h = torch.tanh(x @ p[f"{prefix}.up"])
    for i in range(2):
        h = h + torch.tanh(h * p[f"{prefix}.layer.{i}.w"])
    return h @ p[f"{prefix}.down"]


def log_likelihood(p: Named, prefix: str, tokens: Tensor, targets: Tensor) -> Tensor:
    x = p[f"{prefix}.wte"][tokens]
    for i in range(2):
        x = x + torch.tanh(x * p[f"{prefix}.layer.{i}.w"]).cumsum(1)
    logits = x @ p[f"{prefix}.wte"].T
    return -F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)


def siamese(p: Named, b: Named) -> Tensor:
    u, v = net(p, "m.tower", b["x"]), net(p, "m.tower", b["y"])
    return F.mse_loss(u, 0.5 * v)


def albert(p: Named, b: Named) -> Tensor:
    x = b["x"]
    for _ in range(4):
        x = x + net(p, "m.one", x)
    return F.mse_loss(x, b["y"])


def preference(p: Named, b: Named) -> Tensor:
    """The loss of DPO (Rafailov et al., arXiv 2305.18290, equation 7) with beta = 0.5."""
    pairs = [(b["chosen"], b["chosen_next"]), (b["rejected"], b["rejected_next"])]
    (won, lost), (won_before, lost_before) = (
        [log_likelihood(p, name, *each) for each in pairs] for name in ("m.policy", "m.reference")
    )
    return -F.logsigmoid(0.5 * ((won - won_before) - (lost - lost_before))).mean()


MODELS: Mapping[str, tuple[str, Callable[[Named, Named], Tensor]]] = {
    "siamese": (
        """model m(x: [batch, embed], y: [batch, embed]) {
  share tower = net
  let u = tower(x)
  loss mse(u, 0.5 * tower(y))
}""",
        siamese,
    ),
    "albert": (
        """model m(x: [batch, embed], y: [batch, embed]) {
  share one = net
  repeat 4 as turn { let x = x + one(x) }
  loss mse(x, y)
}""",
        albert,
    ),
    "dpo": (
        """model m(chosen: i64[batch, seq], chosen_next: i64[batch, seq],
        rejected: i64[batch, seq], rejected_next: i64[batch, seq]) {
  share policy = lm
  frozen copy reference = policy
  let won = sum(token_nll(policy(chosen), chosen_next, over = vocab), over = seq)
  let lost = sum(token_nll(policy(rejected), rejected_next, over = vocab), over = seq)
  let won_before = sum(token_nll(reference(chosen), chosen_next, over = vocab), over = seq)
  let lost_before = sum(token_nll(reference(rejected), rejected_next, over = vocab), over = seq)
  loss -mean(log_sigmoid(0.5 * ((won_before - won) - (lost_before - lost))))
}""",
        preference,
    ),
}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_those_of_torch(name: str, cut: bool):
    text, expected = MODELS[name]
    plan = prepare(checked(BLOCKS + text + TRAIN, f"{name}.par", () if cut else SINGLE))
    run = VirtualRun(plan)
    for number, batch in enumerate(batches(plan.program, plan.train.seed)[:2], 1):
        p = {each: value.clone().requires_grad_(value.is_floating_point()) for each, value in run.parameters().items()}
        if name == "dpo" and number == 1:
            assert torch.equal(p["m.policy.wte"], p["m.reference.wte"])
            assert torch.equal(p["m.policy.layer.1.w"], p["m.reference.layer.1.w"])
        loss = expected(p, batch)
        loss.backward()
        found, _ = run.step(number, batch)
        assert found == pytest.approx(float(loss.detach()), abs=1e-12)
        gradients = run.gradients()
        assert {each for each in p if "reference" not in each} == set(gradients)
        for each, value in gradients.items():
            torch.testing.assert_close(value, p[each].grad, rtol=1e-9, atol=1e-12)
        still = {each: value for each, value in run.parameters().items() if "reference" in each}
        assert all(torch.equal(value, p[each]) for each, value in still.items())


FOLLOWING = """model m(x: [batch, embed], y: [batch, embed]) {
  share online = net
  ema copy target = online(decay = 0.75)
  param head: [embed] ~ normal(1.0)
  loss mse(online(x) * head, target(y))
  metric last = mean(target(x))
}"""


@pytest.mark.parametrize("layout", [SINGLE, (), ("line.data=2", "layout=zero")])
def test_a_copy_follows_after_each_update(layout: tuple[str, ...]):
    """BYOL (Grill et al., arXiv 2006.07733, equation 1): the target moves after the optimizer has updated the online
    network, and evaluations read what the next step would.
    """
    zero = "layout zero on line { stage layer -> pipe  shard batch -> data  shard param -> data }\n"
    text = (
        BLOCKS
        + FOLLOWING
        + TRAIN.replace("layout whole", zero + "layout whole").replace("pipe = 2", "pipe = 2, data = 1")
    )
    plan = prepare(checked(text.replace("steps = 2", "steps = 3 eval = every(1, batches = 1)"), "m.par", layout))
    run = VirtualRun(plan)
    p = {name: value.clone() for name, value in run.parameters().items()}
    drawn = batches(plan.program, plan.train.seed)
    for number in (1, 2, 3):
        batch = drawn[number % len(drawn)]
        own = {name: value.requires_grad_() for name, value in p.items() if "target" not in name}
        mean = {name: value.detach() for name, value in p.items() if "target" in name}
        loss = F.mse_loss(net(own, "m.online", batch["x"]) * own["m.head"], net(mean, "m.target", batch["y"]))
        loss.backward()
        found, _ = run.step(number, batch, 0.1)
        assert found == pytest.approx(loss.item(), abs=1e-12)
        p = {name: (value - 0.1 * value.grad).detach() for name, value in own.items()}
        p |= {name: 0.75 * value + 0.25 * p[name.replace("target", "online")] for name, value in mean.items()}
        evaluated, metrics, _ = run.evaluate(drawn[0])
        expected = F.mse_loss(net(p, "m.online", drawn[0]["x"]) * p["m.head"], net(p, "m.target", drawn[0]["y"]))
        assert evaluated == pytest.approx(expected.item(), abs=1e-12)
        assert metrics["last"] == pytest.approx(net(p, "m.target", drawn[0]["x"]).mean().item(), abs=1e-12)
