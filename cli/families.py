"""The families of models that `partita init CONFIG.json` knows: how the files of the zoo say their configs.

Defaults are those of the configs of `transformers`, for settings that a config leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import log
from pathlib import Path
from typing import Any

from attrs import frozen

from partita.cli.configs import STDLIB, Config, File, published, refuse_problems
from partita.dsl.diagnostic import refuse, shown
from partita.dsl.report import listed

MOST_BYTES = 1 << 24
BYTES = 256  # ids of a vocabulary that texts of bytes need
TOKENIZER = "tokenizer.json"  # as `save_pretrained` of transformers calls it
LONGEST = 1024  # positions of a sequence in training, unless the model has fewer


@frozen
class Family:
    """A `model_type`: its file, the classes of `transformers` that it is, and how it says a config."""

    file: str
    classes: tuple[str, ...]
    say: Callable[[Config, File], None]


def from_config(path: Path, ignored: tuple[str, ...] = ()) -> tuple[str, str]:
    """The `model_type` of a config, and the text of a `.par` file that says it.

    Raises Refused (E0001, E0329), which names what it cannot say.
    """
    values = _read(path)
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        message = f"{path} is of a `model_type` {shown(json.dumps(kind))} that is not known"
        raise refuse("E0329", message, help=f"there are {listed(FAMILIES)}")
    config = Config({key: value for key, value in values.items() if key not in ignored})
    file = File(published(family.file))
    classes = config.get("architectures", [])
    if classes and not {*classes} & {*family.classes}:
        config.problem("architectures", classes, f"and the file is {family.classes[0]}")
    config.only("quantization_config", None)
    family.say(config, file)
    config.settle()
    if config.problems:
        raise refuse_problems(str(path), family.file, config.problems)
    beside = path.with_name(TOKENIZER)
    near = beside.is_file() and not beside.is_absolute() and ".." not in beside.parts
    return str(kind), file.written(path.name, beside.as_posix() if near else TOKENIZER)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except OSError as error:
        raise refuse("E0001", f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise refuse("E0329", f"{path} is not a config: {shown(str(error))}") from error
    return found


# ---------------------------------------------------------------- what several families have


def _vocabulary(file: File, vocab: int) -> None:
    """The size of the vocabulary; texts of bytes need one that is large enough."""
    file.entry("vocab", vocab)
    if vocab < BYTES:
        file.replace(STDLIB, "  data = random()")


def _images(config: Config, file: File) -> None:
    """Images and labels of other sizes than those of the file's digits."""
    labels = config.get("id2label", {"0": "", "1": ""})
    file.entries(colors=config.count("num_channels", 3), classes=config.count("num_labels", len(labels)))
    file.replace('data = arrays("digits.npz", holdout = 10%)', "data = random()")
    file.replace("\n  eval = every(100)", "")


def _patches(config: Config, patch: int) -> tuple[int, int]:
    """The sizes of an image and of its patches, by default of this one."""
    image, patch = config.count("image_size", 224), config.count("patch_size", patch)
    if image % patch:
        config.problem("patch_size", patch, f"which does not divide `image_size`, {image}")
    return image, patch


def _decoder(config: Config, file: File, eps: float, kv: int | None = None, key: int | None = None) -> int:
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
    config.only("attention_bias", False)
    config.only("attention_dropout", 0.0, 0)
    _vocabulary(file, config.count("vocab_size", 32000))
    return config.count("num_hidden_layers", 32)


def _rope(config: Config, file: File, base: float) -> Mapping[str, Any]:
    """The base of rotary positions; returns the settings of their scaling, if there is one."""
    new, old = config.get("rope_parameters", {}), config.get("rope_scaling", {})
    settings = {**new, **old} if isinstance(new, dict) and isinstance(old, dict) else {}
    own = Config(settings, "rope_parameters.", config.problems)
    given = config.number("rope_theta", base)
    file.entry("base", own.number("rope_theta", float(given)) if "rope_theta" in settings else given)
    own.only("partial_rotary_factor", 1.0, 1)
    config.only("partial_rotary_factor", 1.0, 1)
    kind = settings.get("rope_type", settings.get("type", "default"))
    return {} if kind == "default" else {**settings, "rope_type": kind}


def _no_scaling(config: Config, scaling: Mapping[str, Any]) -> None:
    if scaling:
        config.problem("rope_parameters", scaling, "and the file has no scaling of wavelengths")


def _tied(config: Config, file: File, model: str, head: str = "head", default: bool = False) -> None:
    """Use the embedding as the head, if a config says so."""
    if not config.get("tie_word_embeddings", default):
        return
    file.replace(f"  param {head}: [embed, vocab] ~ normal(0.02)\n", "")
    file.replace(f"), {head}, over = embed)", "), table, over = embed)")
    file.replace(f'  {model}.{head} = "lm_head.weight" [vocab, embed]\n', "")
    file.replace('"model.embed_tokens.weight" [', '"model.embed_tokens.weight", "lm_head.weight" [')


def _dropout(config: Config, file: File, *keys: str) -> None:
    """One rate for all places."""
    rates = {key: config.get(key, 0.1) for key in keys}
    if len({*rates.values()}) > 1:
        config.problem(keys[-1], rates[keys[-1]], f"and `{keys[0]}` {rates[keys[0]]}: the file has one rate for both")
    file.entry("drop", config.number(keys[0], 0.1))


# ---------------------------------------------------------------- decoders


def _llama(config: Config, file: File) -> None:
    file.entry("layers", _decoder(config, file, 1e-6))
    file.entry("ffn", config.count("intermediate_size", 11008))
    config.only("hidden_act", "silu")
    config.only("mlp_bias", False)
    scaling = _rope(config, file, 10_000.0)
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
            file.replace(old, f"scaling = {_yarn(config, scaling)}")
        else:
            file.replace(",\n               " + old, "")
            if scaling:
                config.problem("rope_parameters", scaling, "and the file can say `llama3` and `yarn`")
    _tied(config, file, "llama")


def _yarn(config: Config, scaling: Mapping[str, Any]) -> str:
    own = Config(scaling, "rope_parameters.", config.problems)
    for key in ("mscale", "mscale_all_dim"):
        if own.get(key):
            own.problem(key, scaling[key], "which the file cannot say")
    original = own.get("original_max_position_embeddings", config.get("max_position_embeddings", 2048))
    given = f"factor = {own.number('factor')}, original = {original}"
    given += f", fast = {own.number('beta_fast', 32.0)}, slow = {own.number('beta_slow', 1.0)}"
    if own.get("attention_factor") is not None:
        given += f", attention = {own.number('attention_factor')}"
    return f"yarn({given}{'' if own.get('truncate', True) else ', truncate = false'})"


def _mixtral(config: Config, file: File) -> None:
    file.entry("layers", _decoder(config, file, 1e-5, 8))
    file.entries(
        ffn=config.count("intermediate_size", 14336),
        experts=config.count("num_local_experts", 8),
        chosen=config.count("num_experts_per_tok", 2),
        balance=config.number("router_aux_loss_coef", 0.001),
    )
    config.only("hidden_act", "silu")
    config.only("sliding_window", None)
    config.only("router_jitter_noise", 0.0, 0)
    _no_scaling(config, _rope(config, file, 1e6))
    _tied(config, file, "mixtral")


def _qwen3_moe(config: Config, file: File) -> None:
    file.entry("layers", _decoder(config, file, 1e-6, 4))
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
    _no_scaling(config, _rope(config, file, 10_000.0))
    _tied(config, file, "qwen")


def _gemma2(config: Config, file: File) -> None:
    layers = _decoder(config, file, 1e-6, 4, 256)
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
    _no_scaling(config, _rope(config, file, 10_000.0))


def _gpt2(config: Config, file: File) -> None:
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
    _vocabulary(file, config.count("vocab_size", 50257))
    _dropout(config, file, "resid_pdrop", "embd_pdrop", "attn_pdrop")
    config.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    config.only("tie_word_embeddings", True)


def _deepseek_v3(config: Config, file: File) -> None:
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
    _vocabulary(file, config.count("vocab_size", 129280))
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
    scaling = _rope(config, file, 10_000.0)
    if scaling.get("rope_type") == "yarn":
        _latent_yarn(config, file, scaling)
    else:
        _no_scaling(config, scaling)
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
    file.replace("base = base", f"base = base, scaling = {_yarn(config, plain)}")


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


def _mamba2(config: Config, file: File) -> None:
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
    _vocabulary(file, config.count("vocab_size", 32768))
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


# ---------------------------------------------------------------- encoders and others


def _bert(config: Config, file: File) -> None:
    embed, heads = config.count("hidden_size", 768), config.count("num_attention_heads", 12)
    vocab = config.count("vocab_size", 30522)
    file.entries(
        heads=heads,
        key=embed // heads,
        ffn=config.count("intermediate_size", 3072),
        seq=config.count("max_position_embeddings", 512),
        sentences=config.count("type_vocab_size", 2),
        layers=config.count("num_hidden_layers", 12),
        eps=config.number("layer_norm_eps", 1e-12),
        mask_id=103 if vocab > 103 else vocab - 1,
    )
    if embed % heads:
        config.problem("num_attention_heads", heads, f"which does not divide `hidden_size`, {embed}")
    if config.get("type_vocab_size", 2) < 2:
        config.problem("type_vocab_size", config.get("type_vocab_size"), "and the file has two sentences")
    _vocabulary(file, vocab)
    _dropout(config, file, "hidden_dropout_prob", "attention_probs_dropout_prob")
    config.only("hidden_act", "gelu")
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    config.only("add_cross_attention", False)
    config.only("tie_word_embeddings", True)
    config.get("gradient_checkpointing")


def _t5(config: Config, file: File) -> None:
    layers = config.count("num_layers", 6)
    config.only("num_decoder_layers", layers)
    file.entries(
        embed=config.count("d_model", 512),
        heads=config.count("num_heads", 8),
        key=config.count("d_kv", 64),
        ffn=config.count("d_ff", 2048),
        buckets=config.count("relative_attention_num_buckets", 32),
        farthest=config.count("relative_attention_max_distance", 128),
        layers=layers,
        eps=config.number("layer_norm_epsilon", 1e-6),
        drop=config.number("dropout_rate", 0.1),
    )
    _vocabulary(file, config.count("vocab_size", 32128))
    config.only("feed_forward_proj", "relu")
    config.only("dense_act_fn", "relu")
    config.only("is_gated_act", False)
    config.only("is_encoder_decoder", True)
    config.only("is_decoder", False)
    config.only("tie_word_embeddings", True)
    config.only("scale_decoder_outputs", True)
    config.get("n_positions")  # which it does not have


def _vit(config: Config, file: File) -> None:
    image, patch = _patches(config, 16)
    file.entries(
        height=image,
        width=image,
        ph=patch,
        pw=patch,
        embed=config.count("hidden_size", 768),
        heads=config.count("num_attention_heads", 12),
        ffn=config.count("intermediate_size", 3072),
        layers=config.count("num_hidden_layers", 12),
        eps=config.number("layer_norm_eps", 1e-12),
    )
    _images(config, file)
    config.only("hidden_act", "gelu")
    config.only("qkv_bias", True)
    config.only("hidden_dropout_prob", 0.0, 0)
    config.only("attention_probs_dropout_prob", 0.0, 0)


def _clip(config: Config, file: File) -> None:
    text, vision = config.part("text_config"), config.part("vision_config")
    image, patch = _patches(vision, 32)
    wide, eyes = vision.count("hidden_size", 768), vision.count("num_attention_heads", 12)
    embed, heads = text.count("hidden_size", 512), text.count("num_attention_heads", 8)
    if wide % eyes or embed % heads or wide // eyes != embed // heads:
        text.problem("num_attention_heads", heads, "and the file has keys of one size in both towers")
    file.entries(
        joint=config.count("projection_dim", 512),
        colors=vision.count("num_channels", 3),
        height=image,
        width=image,
        high=patch,
        wide=patch,
        key=wide // eyes,
        eyes=eyes,
        vision_ffn=vision.count("intermediate_size", 3072),
        looks=vision.count("num_hidden_layers", 12),
        seq=text.count("max_position_embeddings", 77),
        heads=heads,
        ffn=text.count("intermediate_size", 2048),
        vocab=text.count("vocab_size", 49408),
        layers=text.count("num_hidden_layers", 12),
        eps=text.number("layer_norm_eps", 1e-5),
    )
    vision.only("layer_norm_eps", text.get("layer_norm_eps", 1e-5), default=1e-5)
    for part in (text, vision):
        part.only("hidden_act", "quick_gelu")
        part.only("attention_dropout", 0.0, 0)
        part.only("dropout", 0.0, 0)
        part.get("projection_dim")  # of models of one tower
        part.settle()
    end = text.get("eos_token_id", 2)
    if end not in (2, text.get("vocab_size", 49408) - 1):
        text.problem("eos_token_id", end, "and the file takes the largest id for the end")
    config.get("logit_scale_init_value")
    for key in ("text_config_dict", "vision_config_dict"):
        config.get(key)  # copies of the others, which older versions wrote


def _resnet(config: Config, file: File) -> None:
    sizes, depths = config.get("hidden_sizes", [256, 512, 1024, 2048]), config.get("depths", [3, 4, 6, 3])
    whole = all(isinstance(each, list) and len(each) == 4 for each in (sizes, depths))
    if not whole or not all(isinstance(each, int) for each in (*sizes, *depths)):
        config.problem("hidden_sizes", [sizes, depths], "and the file has four stages")
        return
    for size in sizes:
        if size % 4:
            config.problem("hidden_sizes", sizes, "and the middle of the file's bottlenecks is a quarter")
    for depth in depths:
        if depth < 2:
            config.problem("depths", depths, "and the file has two layers or more in each stage")
    file.entries(
        pixel_rows=224,
        pixel_columns=224,
        grow=1,
        grow_=1,
        channels=config.count("embedding_size", 64),
        **{f"out{i}": size for i, size in enumerate(sizes, 1)},
        **{f"more{i}": max(depth - 1, 1) for i, depth in enumerate(depths, 1)},
    )
    _images(config, file)
    config.only("layer_type", "bottleneck")
    config.only("hidden_act", "relu")
    config.only("downsample_in_first_stage", False)
    config.only("downsample_in_bottleneck", False)
    for key in ("out_features", "out_indices", "stage_names"):
        config.get(key)  # of models that give features
    # The block that it imports, in the file itself.
    norms = published("blocks/batch_norm.par")
    own = norms[norms.index("block batch_norm_image") : norms.index("block ghost")]
    file.replace('import "blocks/batch_norm.par"\n', own.rstrip() + "\n")
    file.replace(", group_rows = 1  # of batch_norm.par: any batch divides by it", "")


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama3.par", ("LlamaForCausalLM",), _llama),
    "mixtral": Family("mixtral.par", ("MixtralForCausalLM",), _mixtral),
    "qwen3_moe": Family("qwen3_moe.par", ("Qwen3MoeForCausalLM",), _qwen3_moe),
    "gemma2": Family("gemma2.par", ("Gemma2ForCausalLM",), _gemma2),
    "gpt2": Family("gpt2.par", ("GPT2LMHeadModel",), _gpt2),
    "deepseek_v3": Family("deepseek_v3.par", ("DeepseekV3ForCausalLM",), _deepseek_v3),
    "mamba2": Family("mamba2.par", ("Mamba2ForCausalLM",), _mamba2),
    "bert": Family("bert.par", ("BertForMaskedLM", "BertForPreTraining"), _bert),
    "t5": Family("t5.par", ("T5ForConditionalGeneration", "T5WithLMHeadModel"), _t5),
    "clip": Family("clip.par", ("CLIPModel",), _clip),
    "vit": Family("vit.par", ("ViTForImageClassification",), _vit),
    "resnet": Family("resnet.par", ("ResNetForImageClassification",), _resnet),
}
