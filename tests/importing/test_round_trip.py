"""Weights of transformers come in, are trained on two ranks, and go out: logits are those of the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import partita
from partita.cli.main import main
from partita.dsl.load import load
from tests.commands import partita as command

WIDTHS: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 61, "max_position_embeddings": 64},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "use_cache": False},
}
HEADS = {**WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 61, "n_positions": 64},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", HEADS),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", HEADS),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**HEADS, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**HEADS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**WIDTHS, "num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 2, "chunk_size": 8},
    ),
}
LAYOUT = """
mesh two(data = 1, pipe = 2)

layout stages on two {
  stage layer -> pipe
}

schedule turns = one_f_one_b(microbatches = 2)
"""


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_transformers_go_round(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    configuration, kind, sizes = FAMILIES[family]
    before = getattr(transformers, kind)(getattr(transformers, configuration)(**sizes))
    before.save_pretrained("theirs")

    assert main(["import", "theirs", "-o", "model"]) == 0
    file, run = Path("model.par"), "runs/model/checkpoints"
    text = file.read_text().replace("\ntrain {", f"{LAYOUT}\ntrain {{\n  layout = stages\n  schedule = turns", 1)
    file.write_text(text.replace("= 100\n  checkpoint = every(100)", "= 5\n  checkpoint = every(5)"))
    assert main(["checkpoint", "import", run, "theirs", "model.par", "--as", "hf"]) == 0
    overrides = ("seq=16", "batch=4")
    assert command("run", "model.par", *overrides).returncode == 0
    assert main(["checkpoint", "export", run, "model.par", *overrides, "--as", "hf", "-o", "out"]) == 0

    after = getattr(transformers, kind).from_pretrained("out").eval()
    assert not torch.equal(*(next(each.parameters()).float() for each in (before, after)))
    tokens = torch.randint(0, 61, (4, 16))
    ours = partita.load_model("model.par", *overrides)({"tokens": tokens})["logits"]
    spec, _ = load(file, overrides)
    assert spec is not None
    model, _ = spec.trained
    axes = model.answering.types[dict(model.outputs)["logits"]].names
    assert axes == ("batch", "seq", "vocab")
    with torch.no_grad():
        theirs = after(input_ids=tokens).logits
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
