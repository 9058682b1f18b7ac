"""What the configs of several families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partita.cli.families.config import STDLIB, Config, File

BYTES = 256  # ids of a vocabulary that texts of bytes need
LONGEST = 1024  # positions of a sequence in training, unless the model has fewer


def vocabulary(file: File, vocab: int) -> None:
    """The size of the vocabulary; texts of bytes need one that is large enough."""
    file.entries(vocab=vocab)
    if vocab < BYTES:
        file.replace(STDLIB, "  data = random()")


def images(config: Config, file: File) -> None:
    """Images and labels of other sizes than those of the file's digits."""
    labels = config.get("id2label", {"0": "", "1": ""})
    file.entries(colors=config.count("num_channels", 3), classes=config.count("num_labels", len(labels)))
    file.replace('data = arrays("digits.npz", holdout = 10%)', "data = random()")
    file.replace("\n  eval = every(100)", "")


def patches(config: Config, patch: int) -> tuple[int, int]:
    """The sizes of an image and of its patches, by default of this one."""
    image, patch = config.count("image_size", 224), config.count("patch_size", patch)
    if image % patch:
        config.problem("patch_size", patch, f"which does not divide `image_size`, {image}")
    return image, patch


def decoder(config: Config, file: File, eps: float, kv: int | None = None, key: int | None = None) -> int:
    """Sizes of decoders with grouped queries; returns the number of layers."""
    embed, queries = config.count("hidden_size", 4096), config.count("num_attention_heads", 32)
    groups = config.count("num_key_value_heads", kv or queries)
    if queries % groups:
        config.problem("num_key_value_heads", groups, f"which does not divide `num_attention_heads`, {queries}")
    file.entries(
        embed=embed,
        groups=groups,
        heads=queries // groups,
        key=config.count("head_dim", key or embed // queries),
        seq=min(config.count("max_position_embeddings", 2048), LONGEST),
        eps=config.number("rms_norm_eps", eps),
    )
    config.fixed(attention_bias=False, attention_dropout=0.0)
    vocabulary(file, config.count("vocab_size", 32000))
    return config.count("num_hidden_layers", 32)


def rope(config: Config, file: File, base: float) -> Mapping[str, Any]:
    """Write the base of rotary positions; returns the settings of their scaling, or none."""
    new, old = config.get("rope_parameters", {}), config.get("rope_scaling", {})
    settings = {**new, **old} if isinstance(new, dict) and isinstance(old, dict) else {}
    own = Config(settings, "rope_parameters.", config.problems)
    theta = config.number("rope_theta", base)
    file.entries(base=own.number("rope_theta", float(theta)) if "rope_theta" in settings else theta)
    own.fixed(partial_rotary_factor=1.0)
    config.fixed(partial_rotary_factor=1.0)
    kind = settings.get("rope_type", settings.get("type", "default"))
    return {} if kind == "default" else {**settings, "rope_type": kind}


def yarn(config: Config, scaling: Mapping[str, Any]) -> str:
    """The call that says a scaling by YaRN (Peng et al., arXiv 2309.00071)."""
    own = Config(scaling, "rope_parameters.", config.problems)
    for key in ("mscale", "mscale_all_dim"):
        if own.get(key):
            own.problem(key, scaling[key], "which the file cannot say")
    original = own.get("original_max_position_embeddings", config.get("max_position_embeddings", 2048))
    arguments = f"factor = {own.number('factor')}, original = {original}"
    arguments += f", fast = {own.number('beta_fast', 32.0)}, slow = {own.number('beta_slow', 1.0)}"
    if own.get("attention_factor") is not None:
        arguments += f", attention = {own.number('attention_factor')}"
    return f"yarn({arguments}{'' if own.get('truncate', True) else ', truncate = false'})"


def no_scaling(config: Config, scaling: Mapping[str, Any]) -> None:
    """Of rotary positions, where a file has none."""
    if scaling:
        config.problem("rope_parameters", scaling, "and the file has no scaling of wavelengths")


def tied(config: Config, file: File, model: str, head: str = "head", default: bool = False) -> None:
    """Use the embedding as the head, if a config says so."""
    if not config.get("tie_word_embeddings", default):
        return
    file.replace(f"  param {head}: [embed, vocab] ~ normal(0.02)\n", "")
    file.replace(f"), {head}, over = embed)", "), table, over = embed)")
    file.replace(f'  {model}.{head} = "lm_head.weight" [vocab, embed]\n', "")
    file.replace('"model.embed_tokens.weight" [', '"model.embed_tokens.weight", "lm_head.weight" [')


def dropout(config: Config, file: File, *keys: str) -> None:
    """One rate for all places."""
    rates = {key: config.get(key, 0.1) for key in keys}
    if len({*rates.values()}) > 1:
        config.problem(keys[-1], rates[keys[-1]], f"and `{keys[0]}` {rates[keys[0]]}: the file has one rate for both")
    file.entries(drop=config.number(keys[0], 0.1))
