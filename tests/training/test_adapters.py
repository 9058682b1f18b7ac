"""Adapters, declared beside a model, against those of PEFT around a module that computes the same."""

from __future__ import annotations

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

from partita.compiler.ops.four_bits import PARTS
from partita.dsl.diagnostic import Refused
from partita.runtime.checkpoint.four_bits import forms_of
from partita.runtime.kernels.four_bits import dequantized
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked

STEPS = 20
RATE = 1e-2
FILE = """axis batch = 8, seq = 6, embed = 8, heads = 2, key = 4, inner = 12, out = 5

block mix(x: [batch, seq, embed]) {
  param wq, wk, wv: [embed, heads, key] ~ normal(0.3)
  param wo: [heads, key, embed] ~ normal(0.3)
  let q = dot(x, wq, over = embed)
  let a = attend(q, dot(x, wk, over = embed), dot(x, wv, over = embed), over = seq, along = key, causal = true)
  return x + dot(a, wo, over = [heads, key])
}

model net(x: [batch, seq, embed], y: [batch, seq, out]) {
  param into: [inner, embed] ~ normal(0.3)
  param bias: [inner] ~ normal(0.3)
  param last: [inner, out] ~ normal(0.3)
  repeat 2 as layer {
    let x = mix(x)
  }
  loss mse(dot(tanh(dot(x, into, over = embed) + bias), last, over = inner), y)
}

adapters small {
  lora wq, mix.wv -> KIND(rank = 3, alpha = 6)
  lora layer[1].mix.wo, into -> KIND(rank = 2)
  freeze all
}

mesh line(pipe = 2, tensor = 2, data = 2)
layout whole on line { }
layout cut on line { stage layer -> pipe  shard heads, inner -> tensor  shard batch, state -> data }
layout zero on line { shard batch, param -> data  shard key -> tensor }
schedule s = one_f_one_b(microbatches = 2)

train {
  adapters = small
  layout = whole
  schedule = s
  data = random()
  optimizer = adamw(lr = 1e-2)
  steps = 20
  precision = f64
}
"""
ONE = ("line.pipe=1", "line.tensor=1", "line.data=1", "schedule=gpipe(microbatches=1)")
LAYOUTS = {"cut": ("layout=cut",), "zero": ("layout=zero", "line.pipe=1"), "whole": ONE}


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (2, 4)).transpose(1, 2) for each in (self.wq, self.wk, self.wv))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.wo(a.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(Mix() for _ in range(2))
        self.into, self.last = nn.Linear(8, 12), nn.Linear(12, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return self.last(torch.tanh(self.into(x)))


def linear(tensor: Tensor, inner: int) -> Tensor:
    """A matrix of ours, whose first `inner` axes are summed over, as a linear layer of torch has it."""
    return tensor.flatten(0, inner - 1).flatten(1).T


def numbers(run: VirtualRun) -> dict[str, Tensor]:
    """The parameters of a run, those that are in four bits as numbers."""
    found, forms = run.parameters(), forms_of(run.plan.program)
    return found | {
        name: dequantized({part: found[f"{name}.{part}"] for part in PARTS}, form) for name, form in forms.items()
    }


def adapted(run: VirtualRun, kind: str) -> nn.Module:
    """The module with the numbers of a run, and PEFT's adapters with those of ours."""
    ours = numbers(run)
    config = LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=r".*(wq|wv|into|1\.wo)",
        rank_pattern={"wo": 2, "into": 2},
        alpha_pattern={"wo": 2, "into": 2},
        use_dora=kind == "dora",
    )
    net = Net().double()
    with torch.no_grad():
        for i, layer in enumerate(net.layer):
            for name in ("wq", "wk", "wv", "wo"):
                weight = linear(ours[f"net.layer.{i}.mix.{name}"], 2 if name == "wo" else 1)
                getattr(layer, name).weight.copy_(weight)
        net.into.weight.copy_(ours["net.into"])
        net.into.bias.copy_(ours["net.bias"])
        net.last.weight.copy_(ours["net.last"].T)
        theirs = get_peft_model(net, config, autocast_adapter_dtype=False)
        for path, of in pairs(theirs):
            for name, inner in (("lora_a", 2 if path.endswith("wo") else 1), ("lora_b", 1)):
                tensor = getattr(of, name.replace("a", "A").replace("b", "B").replace("lorA", "lora"))["default"].weight
                tensor.copy_(linear(ours[f"{path}.{name}"], inner))
    return theirs


def pairs(theirs: nn.Module) -> list[tuple[str, nn.Module]]:
    """Their layers with an adapter, by the names of ours."""
    layers = {name: each for name, each in theirs.named_modules() if hasattr(each, "lora_A")}
    prefix = "base_model.model."
    paths = (name.removeprefix(prefix) for name in layers)
    return [(f"net.{path.replace('.w', '.mix.w')}", each) for path, each in zip(paths, layers.values(), strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["lora", "dora", "dora of four bits"])
def test_they_are_trained_as_peft_trains_them(kind: str, layout: str):
    kind, _, four = kind.partition(" ")
    text = FILE.replace("KIND", kind).replace("freeze all", "freeze all as nf4(block = 2)" if four else "freeze all")
    run = VirtualRun(prepare(checked(text, "m.par", LAYOUTS[layout])))
    before = {path: value.clone() for path, value in numbers(run).items()}
    assert bool(four) == ("net.into.codes" in before)
    theirs = adapted(run, kind)
    trained = [each for each in theirs.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
    for step, batch in enumerate(batches(run.plan.program, STEPS), 1):
        loss = F.mse_loss(theirs(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found, _ = run.step(step, batch, RATE)
        assert found == pytest.approx(loss.item(), rel=1e-9)
    after = numbers(run)
    adapters = 0
    for path, of in pairs(theirs):
        inner = 2 if path.endswith("wo") else 1
        for name, tensor, axes in (("lora_a", of.lora_A, inner), ("lora_b", of.lora_B, 1)):
            torch.testing.assert_close(linear(after[f"{path}.{name}"], axes), tensor["default"].weight.detach())
            adapters += 1
        if kind == "dora":
            length = before[path].norm(dim=1) if path == "net.into" else linear(before[path], inner).norm(dim=1)
            found = after[f"{path}.magnitude"].flatten() + length
            torch.testing.assert_close(found, of.lora_magnitude_vector["default"].weight.detach())
            adapters += 1
    assert adapters == (3 if kind == "dora" else 2) * 6
    for path, value in before.items():
        if path.rpartition(".")[0] not in before:
            assert torch.equal(after[path], value)


def test_they_begin_as_torch_begins_a_linear_layer():
    run = VirtualRun(prepare(checked(FILE.replace("KIND", "lora"), "m.par", (*ONE, "inner=500"))))
    drawn = run.parameters()["net.into.lora_a"]
    assert drawn.shape == (8, 2)
    assert drawn.abs().max() <= 8**-0.5
    assert not run.parameters()["net.into.lora_b"].any()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("lora bias -> lora(rank = 2)", "`bias` is not, and contains none of, the matrices"),
        ("lora into, last -> lora(rank = 2)", "`net.last` cannot have an adapter: products over other axes read it"),
        ("lora mix.wk -> dora(rank = 2)", "`net.layer.0.mix.wk` cannot have an adapter: `multiply` reads it, too"),
    ],
)
def test_what_has_no_adapter_is_refused(rules: str, message: str):
    text = FILE.replace("last, over = inner), y)", "last, over = inner), y) + mean(dot(last, y, over = out))")
    text = text.replace("return x +", "return x + 0 * mean(wk * wk) +").replace("KIND", "lora")
    text = text.replace("  lora wq, mix.wv -> lora(rank = 3, alpha = 6)\n", "").replace(
        "lora layer[1].mix.wo, into -> lora(rank = 2)", rules
    )
    with pytest.raises(Refused, match=re.escape(message)):
        prepare(checked(text, "m.par", ONE))
