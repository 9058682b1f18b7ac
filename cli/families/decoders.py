"""Decoders."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log
from typing import Any

from partita.cli.families.config import Config, File
from partita.cli.families.parts import LONGEST, decoder, dropout, no_scaling, rope, tied, vocabulary, yarn

# What the comment of the file says of its scaling.
STRETCHED = """, whose long wavelengths are stretched for longer sequences than it was first
# trained on, grouped-query"""


def llama(config: Config, file: File) -> None:
    """Llama, from its first to 3.3."""
    file.replace("# Llama 3.1: a", "# Llama: a")
    file.entries(layers=decoder(config, file, 1e-6), ffn=config.count("intermediate_size", 11008))
    config.fixed(hidden_act="silu", mlp_bias=False)
    scaling = rope(config, file, 10_000.0)
    old = "scaling = llama3(factor = 8, original = original)"
    if scaling.get("rope_type") == "llama3":
        own = Config(scaling, "rope_parameters.", config.problems)
        file.entries(original=own.count("original_max_position_embeddings"))
        low, high = own.number("low_freq_factor", 1.0), own.number("high_freq_factor", 4.0)
        factor = own.number("factor")
        file.replace(old, f"scaling = llama3(factor = {factor}, original = original, low = {low}, high = {high})")
    else:
        file.drop("original")
        if scaling.get("rope_type") == "yarn":
            file.replace(old, f"scaling = {yarn(config, scaling)}")
        else:
            file.replace(",\n               " + old, "")
            file.replace(STRETCHED, ",\n# grouped-query")
            if scaling:
                config.problem("rope_parameters", scaling, "and the file can say `llama3` and `yarn`")
    tied(config, file, "llama")


def mixtral(config: Config, file: File) -> None:
    """Mixtral."""
    file.entries(
        layers=decoder(config, file, 1e-5, 8),
        ffn=config.count("intermediate_size", 14336),
        experts=config.count("num_local_experts", 8),
        chosen=config.count("num_experts_per_tok", 2),
        balance=config.number("router_aux_loss_coef", 0.001),
    )
    config.fixed(hidden_act="silu", sliding_window=None, router_jitter_noise=0.0)
    no_scaling(config, rope(config, file, 1e6))
    tied(config, file, "mixtral")


def qwen3_moe(config: Config, file: File) -> None:
    """Qwen 3 with experts."""
    file.entries(
        layers=decoder(config, file, 1e-6, 4),
        ffn=config.count("moe_intermediate_size", 768),
        experts=config.count("num_experts" if "num_experts" in config.values else "num_local_experts", 128),
        chosen=config.count("num_experts_per_tok", 8),
        balance=config.number("router_aux_loss_coef", 0.001),
    )
    config.fixed(hidden_act="silu")
    config.only("norm_topk_prob", True, default=False)
    config.fixed(decoder_sparse_step=1, mlp_only_layers=[])
    config.get("intermediate_size")  # of layers without experts, of which there are none
    config.get("max_window_layers")
    if config.get("use_sliding_window", False):
        config.fixed(sliding_window=None)
    config.get("sliding_window")
    no_scaling(config, rope(config, file, 10_000.0))
    tied(config, file, "qwen")


def gemma2(config: Config, file: File) -> None:
    """Gemma 2."""
    layers = decoder(config, file, 1e-6, 4, 256)
    if layers % 2:
        config.problem("num_hidden_layers", layers, "and the file has pairs of layers")
    file.entries(
        pairs=layers // 2,
        ffn=config.count("intermediate_size", 9216),
        window=config.count("sliding_window", 4096),
        attention_cap=config.number("attn_logit_softcapping", 50.0),
        logit_cap=config.number("final_logit_softcapping", 30.0),
        score_scale=f"1 / sqrt({config.number('query_pre_attn_scalar', 256)})",
    )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config.values and config.values[key] is None:
            config.problem(key, None, "and the file has a cap")
    kinds = config.get("layer_types")
    if kinds is not None and kinds != ["sliding_attention", "full_attention"] * (layers // 2):
        config.problem("layer_types", kinds, "and the file has a window in every other layer, from the first on")
    config.fixed(hidden_activation="gelu_pytorch_tanh")
    config.get("hidden_act")  # which `hidden_activation` replaces
    config.fixed(tie_word_embeddings=True, use_bidirectional_attention=(None, False))
    config.get("cache_implementation")
    no_scaling(config, rope(config, file, 10_000.0))


def gpt2(config: Config, file: File) -> None:
    """GPT-2."""
    embed, heads = config.count("n_embd", 768), config.count("n_head", 12)
    file.entries(
        heads=heads,
        key=embed // heads,
        ffn=config.count("n_inner", 4 * embed),
        seq=config.count("n_positions", 1024),
        layers=config.count("n_layer", 12),
        eps=config.number("layer_norm_epsilon", 1e-5),
    )
    if embed % heads:
        config.problem("n_head", heads, f"which does not divide `n_embd`, {embed}")
    vocabulary(file, config.count("vocab_size", 50257))
    dropout(config, file, "resid_pdrop", "embd_pdrop", "attn_pdrop")
    config.fixed(activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=True)
    config.fixed(scale_attn_by_inverse_layer_idx=False, add_cross_attention=False, tie_word_embeddings=True)


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
    config.fixed(num_key_value_heads=heads)
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
    config.fixed(hidden_act="silu", attention_bias=False, attention_dropout=0.0, norm_topk_prob=True)
    config.fixed(tie_word_embeddings=False, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    config.fixed(ep_size=1)
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


def mamba2(config: Config, file: File) -> None:
    """Mamba-2."""
    heads, groups = config.count("num_heads", 128), config.count("n_groups", 8)
    embed, head = config.count("hidden_size", 4096), config.count("head_dim", 64)
    if heads % groups:
        config.problem("n_groups", groups, f"which does not divide `num_heads`, {heads}")
    if config.count("expand", 2) * embed != heads * head:
        config.problem("expand", config.get("expand"), "which is not `num_heads` times `head_dim` over `hidden_size`")
    file.entries(
        embed=embed,
        groups=groups,
        heads=heads // groups,
        head=head,
        states=config.count("state_size", 128),
        layers=config.count("num_hidden_layers", 64),
        eps=config.number("layer_norm_epsilon", 1e-5),
    )
    vocabulary(file, config.count("vocab_size", 32768))
    config.fixed(conv_kernel=4, use_bias=False, use_conv_bias=True, hidden_act="silu")
    limit = config.get("time_step_limit", [0.0, inf])
    if limit not in ([0, each] for each in (inf, "inf", "Infinity", {"__float__": "Infinity"})):
        config.problem("time_step_limit", limit, "and the file has no limits")
    for key in ("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"):
        config.get(key)  # of how it is initialized
    for key in ("residual_in_fp32", "norm_before_gate"):
        config.get(key)  # of precision
    config.fixed(rms_norm=True)
    if config.get("tie_word_embeddings", False):
        file.replace("param table, head_table:", "param table:")
        file.replace("dot(h, head_table, over", "dot(h, table, over")
        file.replace('  mamba.head_table = "lm_head.weight" [vocab, embed]\n', "")
        file.replace('"backbone.embeddings.weight" [', '"backbone.embeddings.weight", "lm_head.weight" [')
