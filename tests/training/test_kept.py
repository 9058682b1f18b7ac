"""What the iterations of a repeat keep, read in another: a U-Net of convolutions against torch, in layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partita.cli.main import main
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked, load_text

DEPTH = 4
FILE = """axis batch = 4, channels = 4, height = 5, width = 5, kh = 3, kw = 3, middle = channels, both = 2 * channels
axis groups = 2, part = channels / groups
const depth = 4
block activated(x: [batch, channels, height, width]) {
  param scale: [channels] ~ normal(1)
  let x = layer_norm(split(x, channels -> [groups, part]), over = [part, height, width])
  return silu(merge(x, [groups, part] -> channels) * scale)
}
block residual(x: [batch, channels, height, width]) {
  param w: [kh, kw, channels, middle] ~ kaiming()
  return x + rename(conv(activated(x), w, [height, width] -> [height, width], over = channels, padding = 1),
                    middle -> channels)
}
model unet(x: [batch, channels, height, width], y: [batch, channels, height, width]) {
  repeat depth as down {
    let x = residual(x)
    keep x as skips
    keep mean(x * x) as sizes
  }
  repeat depth as up {
    param fuse: [both, middle] ~ kaiming()
    let joined = concat(x, skips[depth - 1 - up], [channels, channels] -> both)
    let x = residual(rename(dot(joined, fuse, over = both), middle -> channels)) * (1 + 0.1 * up)
  }
  loss mse(x, y) + 0.1 * sizes[0] + 0.2 * sizes[depth - 1]
  metric first = mean(skips[0])
}
mesh line(pipe = 2, data = 2)
layout whole on line { }
layout cut on line { stage down, up -> pipe  shard batch -> data  recompute up[1..2] }
layout zero on line { stage down -> pipe  shard batch -> data  shard param -> data  freeze_ }
schedule s = one_f_one_b(microbatches = 2)
schedule v = zb_v(microbatches = 4)
train { layout = whole  schedule = s  data = random()  optimizer = sgd(lr = 0.1)  steps = 2  precision = f64 }
""".replace("  freeze_", "")
ALONE = ("line.pipe=1", "line.data=1", "schedule=gpipe(microbatches=1)")
LAYOUTS = {
    "whole": ALONE,
    "cut": ("layout=cut",),
    "v": ("layout=cut", "schedule=v", "line.data=1"),
    "zero": ("layout=zero",),
}


def unet(p: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    def residual(x: Tensor, own: str) -> Tensor:
        h = F.group_norm(x, 2) * p[f"{own}.activated.scale"][:, None, None]
        return x + F.conv2d(F.silu(h), p[f"{own}.w"].permute(3, 2, 0, 1), padding=1)

    skips: list[Tensor] = []
    for i in range(DEPTH):
        x = residual(x, f"unet.down.{i}.residual")
        skips.append(x)
    for i in range(DEPTH):
        joined = torch.cat([x, skips[DEPTH - 1 - i]], 1)
        x = torch.einsum("bchw,cd->bdhw", joined, p[f"unet.up.{i}.fuse"])
        x = residual(x, f"unet.up.{i}.residual") * (1 + 0.1 * i)
    loss = F.mse_loss(x, y) + 0.1 * skips[0].square().mean() + 0.2 * skips[-1].square().mean()
    return loss, skips[0].mean()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_values_are_those_of_their_iteration(layout: str):
    run = VirtualRun(prepare(checked(FILE, "m.par", LAYOUTS[layout])))
    p = {path: value.clone().requires_grad_() for path, value in run.parameters().items()}
    (batch,) = batches(run.plan.program, 1)[:1]
    loss, first = unet(p, batch["x"], batch["y"])
    loss.backward()
    found, _ = run.step(1, batch, 0.1)
    assert found == pytest.approx(loss.item(), rel=1e-9)
    assert run.metrics()["first"] == pytest.approx(first.item(), rel=1e-9)
    for path, d in run.gradients().items():
        torch.testing.assert_close(d, p[path].grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("before", "after", "code", "words"),
    [
        ("skips[depth - 1 - up]", "skips[depth - up]", "E0230", "`skips[depth - up]` is of no iteration"),
        ("skips[depth - 1 - up]", "skips", "E0230", "has a value for each iteration"),
        ("skips[depth - 1 - up]", "x[0]", "E0230", "not kept by the iterations"),
        ("keep x as skips\n", "keep x as x\n", "E0217", "bound already"),
        ("keep x as skips\n", "keep x as skips\n keep x as skips\n", "E0217", "bound already"),
        ("  loss mse", "  keep x as more\n  loss mse", "E0230", "statement of a `repeat`"),
        ("let joined = concat(x,", "let skips = concat(x,", "E0220", "cannot be bound anew"),
        ("keep x as skips\n", "keep x as skips\n keep x as unread\n", "W0201", "`unread` is not used"),
        ("let x = residual(x)\n", "let x = residual(x) + skips[0]\n", "E0230", "is kept in a repeat"),
    ],
)
def test_what_is_wrong_with_kept_values_is_said(before: str, after: str, code: str, words: str):
    assert before in FILE
    _, diagnostics = load_text(FILE.replace(before, after, 1).replace("layout = whole", "layout = cut"))
    assert any(each.code == code and words in each.message for each in diagnostics), diagnostics


def test_a_plan_measures_some_of_the_iterations(tmp_path: Path):
    """What those that are left out keep is what the nearest one keeps."""
    path = tmp_path / "unet.par"
    path.write_text(FILE.replace("const depth = 4", "const depth = 12").replace("layout = whole", "layout = cut"))
    assert main(["plan", str(path), "--devices", "2"]) == 0


def test_a_shared_block_may_keep_values(tmp_path: Path):
    path = tmp_path / "shared.par"
    path.write_text("""axis batch = 4, embed = 6, wide = 6
block net(x: [batch, embed]) {
  repeat 2 as layer {
    param w: [embed, wide] ~ normal(0.5)
    let x = rename(tanh(dot(x, w, over = embed)), wide -> embed)
    keep x as seen
  }
  return x + seen[0]
}
model m(x: [batch, embed], y: [batch, embed]) {
  share tower = net
  loss mse(tower(x), tower(y))
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 2 }
""")
    assert main(["verify", str(path)]) == 0
