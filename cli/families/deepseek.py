"""Decoders with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

from partita.cli.families.config import Config, File
from partita.cli.families.parts import LONGEST, no_scaling, rope, vocabulary, yarn


def deepseek_v3(config: Config, file: File) -> None:
    """DeepSeek-V3, and R1."""
    dense, layers = config.get("first_k_dense_replace", 3), config.count("num_hidden_layers", 61)
    if not isinstance(dense, int) or not 0 < dense < layers:
        config.problem("first_k_dense_replace", dense, "and the file has layers of both kinds")
        dense = 1
    experts, nodes = config.count("n_routed_experts", 256), config.count("n_group", 8)
    if experts % nodes:
        config.problem("n_group", nodes, f"which does not divide `n_routed_experts`, {experts}")
    inner = config.count("moe_intermediate_size", 2048)
    heads = config.count("num_attention_heads", 128)
    config.only("num_key_value_heads", heads)
    file.entries(
        embed=config.count("hidden_size", 7168),
        heads=heads,
        plain=config.count("qk_nope_head_dim", 128),
        rotated=config.count("qk_rope_head_dim", 64),
        value=config.count("v_head_dim", 128),
        queries=config.count("q_lora_rank", 1536),
        latent=config.count("kv_lora_rank", 512),
        ffn=config.count("intermediate_size", 18432),
        inner=inner,
        shared=inner * config.count("n_shared_experts", 1),
        nodes=nodes,
        members=experts // nodes,
        kept=config.count("topk_group", 4),
        chosen=config.count("num_experts_per_tok", 8),
        dense=dense,
        layers=layers - dense,
        scaling=config.number("routed_scaling_factor", 2.5),
        eps=config.number("rms_norm_eps", 1e-6),
        seq=min(config.count("max_position_embeddings", 4096), LONGEST),
    )
    if "q_lora_rank" in config.values and config.values["q_lora_rank"] is None:
        config.problem("q_lora_rank", None, "and the file makes queries of a latent")
    vocabulary(file, config.count("vocab_size", 129280))
    config.only("hidden_act", "silu")
    config.only("attention_bias", False)
    config.only("attention_dropout", 0.0, 0)
    config.only("norm_topk_prob", True)
    config.only("tie_word_embeddings", False)
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    config.only("moe_layer_freq", 1)
    config.only("ep_size", 1)
    for key in ("head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux"):
        config.get(key)  # which follow from others, or are of a loss that it is trained without
    if config.get("num_nextn_predict_layers"):
        file.replace('skip "*', f'skip "model.layers.{layers}.*", "*')  # which predict a second token
    scaling = rope(config, file, 10_000.0)
    if scaling.get("rope_type") == "yarn":
        _latent_yarn(config, file, scaling)
    else:
        no_scaling(config, scaling)
    if config.get("rope_interleave", True):
        _interleaved(file)


def _latent_yarn(config: Config, file: File, scaling: Mapping[str, Any]) -> None:
    """YaRN, with which the scores are scaled, too, and the rotated part of keys by the rest."""
    own = Config(scaling, "rope_parameters.", config.problems)
    factor, one, two = (float(own.number(key, 0.0)) for key in ("factor", "mscale", "mscale_all_dim"))
    if two:
        file.replace(
            "along = both, causal = true",
            f"along = both, causal = true, scale = {_scale(factor, two) ** 2} / sqrt(size(both))",
        )
    plain = {key: value for key, value in scaling.items() if not key.startswith("mscale")}
    if one and two:
        plain.setdefault("attention_factor", _scale(factor, one) / _scale(factor, two))
    file.replace("base = base", f"base = base, scaling = {yarn(config, plain)}")


def _scale(factor: float, weight: float) -> float:
    """What YaRN multiplies queries and keys by (arXiv:2309.00071, equation 22), with DeepSeek's weight."""
    return 0.1 * weight * log(factor) + 1 if factor > 1 else 1.0


def _interleaved(file: File) -> None:
    """Rotated pairs lie beside each other, and not half the axis apart."""
    file.replace("axis ffn = ", "axis turned = rotated / 2, two = 2\naxis ffn = ")
    for name in ("q, both", "c, compressed"):
        tensor, axis = name.split(", ")
        start = "plain" if tensor == "q" else "latent"
        part = f"slice({tensor}, {axis} -> rotated, start = size({start}))"
        apart = f"merge(split({part}, rotated -> [turned, two]), [two, turned] -> rotated)"
        file.replace(part, apart)
