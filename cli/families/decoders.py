"""Decoders with attention to all that is before."""

from __future__ import annotations

from partita.cli.families.config import Config, File
from partita.cli.families.parts import decoder, dropout, no_scaling, rope, tied, vocabulary, yarn

# What the comment of the file says of its scaling.
STRETCHED = """, whose long wavelengths are stretched for longer sequences than it was first
# trained on, grouped-query"""


def llama(config: Config, file: File) -> None:
    """Llama, from its first to 3.3."""
    file.replace("# Llama 3.1: a", "# Llama: a")
    file.entry("layers", decoder(config, file, 1e-6))
    file.entry("ffn", config.count("intermediate_size", 11008))
    config.only("hidden_act", "silu")
    config.only("mlp_bias", False)
    scaling = rope(config, file, 10_000.0)
    old = "scaling = llama3(factor = 8, original = original)"
    if scaling.get("rope_type") == "llama3":
        own = Config(scaling, "rope_parameters.", config.problems)
        file.entry("original", own.count("original_max_position_embeddings"))
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
    file.entry("layers", decoder(config, file, 1e-5, 8))
    file.entries(
        ffn=config.count("intermediate_size", 14336),
        experts=config.count("num_local_experts", 8),
        chosen=config.count("num_experts_per_tok", 2),
        balance=config.number("router_aux_loss_coef", 0.001),
    )
    config.only("hidden_act", "silu")
    config.only("sliding_window", None)
    config.only("router_jitter_noise", 0.0, 0)
    no_scaling(config, rope(config, file, 1e6))
    tied(config, file, "mixtral")


def qwen3_moe(config: Config, file: File) -> None:
    """Qwen 3 with experts."""
    file.entry("layers", decoder(config, file, 1e-6, 4))
    file.entries(
        ffn=config.count("moe_intermediate_size", 768),
        experts=config.count("num_experts" if "num_experts" in config.values else "num_local_experts", 128),
        chosen=config.count("num_experts_per_tok", 8),
        balance=config.number("router_aux_loss_coef", 0.001),
    )
    config.only("hidden_act", "silu")
    config.only("norm_topk_prob", True, default=False)
    config.only("decoder_sparse_step", 1)
    config.only("mlp_only_layers", [])
    config.get("intermediate_size")  # of layers without experts, of which there are none
    config.get("max_window_layers")
    if config.get("use_sliding_window", False):
        config.only("sliding_window", None)
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
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.get("hidden_act")  # which `hidden_activation` replaces
    config.only("tie_word_embeddings", True)
    config.only("use_bidirectional_attention", None, False)
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
    config.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    config.only("tie_word_embeddings", True)
