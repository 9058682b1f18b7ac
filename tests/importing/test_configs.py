"""Configs with other settings than those that people publish: files are proven, and weights come in and go out."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.cli.main import main
from tests.marks import soak
from tests.zoo.test_against import model

LLAMA3 = {"rope_type": "llama3", "rope_theta": 300.0, "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 200.0, "factor": 4.0, "original_max_position_embeddings": 64}
# Changes of the configs with which the files of the zoo are compared: each number is another than the zoo's.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama3", {"rms_norm_eps": 0.02, "tie_word_embeddings": True, "head_dim": 6, "num_key_value_heads": 6}),
    ("llama3", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 20}}),
    ("llama3", {"rope_parameters": YARN}),
    ("llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    ("mixtral", {"rms_norm_eps": 0.02, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    ("mixtral", {"tie_word_embeddings": True, "num_experts_per_tok": 3}),
    ("qwen3_moe", {"rms_norm_eps": 0.02, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    ("gemma2", {"rms_norm_eps": 0.02, "query_pre_attn_scalar": 9, "sliding_window": 3, "attn_logit_softcapping": 5.0}),
    ("gemma2", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "final_logit_softcapping": 7.0}),
    ("deepseek_v3", {"rms_norm_eps": 0.02, "routed_scaling_factor": 1.5, "rope_interleave": True}),
    ("deepseek_v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "n_shared_experts": 1}),
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_interleave": True}),
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}}),
    ("gpt2", {"layer_norm_epsilon": 0.02, "n_inner": 20}),
    ("mamba2", {"layer_norm_epsilon": 0.02, "tie_word_embeddings": True, "n_groups": 1}),
    ("bert", {"layer_norm_eps": 0.02, "intermediate_size": 20}),
    ("t5", {"layer_norm_epsilon": 0.02, "d_kv": 5, "relative_attention_max_distance": 9}),
    ("clip", {"projection_dim": 9}),
    ("vit", {"layer_norm_eps": 0.02, "patch_size": 4}),
    ("resnet", {"embedding_size": 12, "depths": [3, 2, 4, 2]}),
]


def shown(value: object) -> str:
    return value if isinstance(value, str) else "-".join(value) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("name", "changes"), soak(*VARIANTS), ids=shown)
def test_weights_come_in_and_go_out(
    name: str,
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The file that is written is proven; and what comes in by it goes out, to the same tensors."""
    monkeypatch.chdir(tmp_path)
    before = model(name).theirs()
    config = import_module(f"tests.zoo.models.{name}").CONFIG
    before = type(before)(type(config).from_dict({**config.to_dict(), **changes}))
    before.save_pretrained("theirs")
    assert main(["init", "theirs", "-o", "model"]) == 0
    (command,) = re.findall(r"its weights: `partita (.*)`", capsys.readouterr().out)
    assert main(["check", "model.par"]) == 0
    assert main(["fmt", "--check", "model.par"]) == 0
    assert main(command.split()) == 0
    assert main(["checkpoint", "export", "runs/model/checkpoints", "model.par", "--as", "hf", "-o", "out"]) == 0
    after, told = type(before).from_pretrained("out", output_loading_info=True)
    assert not {each for each in told["missing_keys"] if not each.endswith("num_batches_tracked")}
    assert not told["unexpected_keys"]
    theirs = dict(before.named_parameters())
    assert all(torch.equal(each, theirs[key]) for key, each in after.named_parameters())
    assert json.loads(Path("out/config.json").read_text()) == json.loads(Path("theirs/config.json").read_text())
