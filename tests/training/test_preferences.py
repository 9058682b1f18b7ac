"""A policy and its reference come from one folder of transformers, and begin as equals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from partita.cli.main import main
from tests.commands import records
from tests.files import SPECS

SIZES = ["seq=64", "embed=16", "groups=2", "heads=2", "key=4", "ffn=24", "vocab=256", "layers=2"]
# As transformers names the tensors of a Llama, and shapes them.
LAYER = {
    "input_layernorm": (16,),
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "post_attention_layernorm": (16,),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}
SHAPES = {"model.embed_tokens.weight": (256, 16), "lm_head.weight": (256, 16), "model.norm.weight": (16,)} | {
    f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER.items()
}
PIPELINE = """
mesh line(data = 2, pipe = 2)
layout cut on line { stage layer -> pipe  shard batch -> data  shard state -> data }
schedule s = one_f_one_b(microbatches = 2)
"""


def test_one_folder_fills_policy_and_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So that the first loss is log 2, and nothing is preferred; from then on only the policy moves."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    theirs = {name: 0.3 * torch.randn(shape) for name, shape in SHAPES.items()}
    Path("llama").mkdir()
    save_file(theirs, "llama/model.safetensors")
    for name in ("llama3.par", "pairs.jsonl"):
        Path(name).write_bytes((SPECS / "zoo" / name).read_bytes())
    Path("dpo.par").write_text((SPECS / "zoo" / "dpo.par").read_text() + PIPELINE)
    more = [*SIZES, "layout=cut", "schedule=s", "train.steps=2", "train.checkpoint=every(2)", "train.eval=none"]
    assert main(["checkpoint", "import", "runs/dpo/checkpoints", "llama", "dpo.par", *more, "--as", "llama"]) == 0
    assert main(["run", "dpo.par", "--transport", "virtual", *more]) == 0
    steps = {each["step"]: each for each in records(Path("runs/dpo")) if "loss" in each}
    assert steps[1]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert (steps[1]["margin"], steps[1]["chosen_reward"], steps[1]["rejected_reward"]) == (0, 0, 0)
    assert steps[2]["loss"] < math.log(2)
    assert main(["checkpoint", "export", "runs/dpo", "-o", "after.safetensors"]) == 0
    after = load_file("after.safetensors")
    name, expected = "mlp.gate", theirs["model.layers.1.mlp.gate_proj.weight"].T
    assert torch.equal(after[f"dpo.reference.layer.1.{name}"], expected)
    assert not torch.equal(after[f"dpo.policy.layer.1.{name}"], expected)
