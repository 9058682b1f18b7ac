"""Decoders whose state has one size."""

from __future__ import annotations

from partita.cli.families.config import Config, File
from partita.cli.families.parts import vocabulary


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
    config.only("conv_kernel", 4)
    config.only("use_bias", False)
    config.only("use_conv_bias", True)
    config.only("hidden_act", "silu")
    limit = config.get("time_step_limit", [0.0, float("inf")])
    if not (isinstance(limit, list) and len(limit) == 2 and limit[0] == 0 and _infinite(limit[1])):
        config.problem("time_step_limit", limit, "and the file has no limits")
    for key in (
        "time_step_rank",
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "residual_in_fp32",
        "norm_before_gate",
    ):
        config.get(key)  # of how it is initialized, or of precision
    config.only("rms_norm", True)
    if config.get("tie_word_embeddings", False):
        file.replace("param table, head_table:", "param table:")
        file.replace("dot(h, head_table, over", "dot(h, table, over")
        file.replace('  mamba.head_table = "lm_head.weight" [vocab, embed]\n', "")
        file.replace('"backbone.embeddings.weight" [', '"backbone.embeddings.weight", "lm_head.weight" [')


def _infinite(value: object) -> bool:
    return value in (float("inf"), "inf", "Infinity", {"__float__": "Infinity"})
