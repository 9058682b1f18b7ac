"""Models of transformers, small, with the losses of their tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.importing.zoo.own import ids

SMALL: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 67},
    **{"max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 88}
ENCODER = {**SMALL, "intermediate_size": 88, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
# Of a language model: its configuration, its class, and what differs from the small sizes.
LANGUAGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 67, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "llama3": ("LlamaConfig", "LlamaForCausalLM", {**GROUPED, "rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 12}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 8}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GROUPED, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 8},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**GROUPED, "num_hidden_layers": 4, "head_dim": 12, "sliding_window": 8, "layer_types": ALTERNATING},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**GROUPED, "pad_token_id": 0}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", GROUPED),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {**GROUPED, "num_hidden_layers": 4}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**SMALL, "intermediate_size": 88}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **{**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 8},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "layer_types": ALTERNATING},
        },
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **{**SMALL, "num_key_value_heads": 4, "intermediate_size": 88, "moe_intermediate_size": 24},
            **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
            **{"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8},
            **{"qk_nope_head_dim": 8, "v_head_dim": 8},
        },
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**SMALL, "alibi": False}),
    "cohere": ("CohereConfig", "CohereForCausalLM", GROUPED),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", GROUPED),
    "granite": ("GraniteConfig", "GraniteForCausalLM", GROUPED),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 67, "state_size": 6, "time_step_rank": 4},
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            **{"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 67, "num_heads": 8, "head_dim": 8},
            **{"state_size": 12, "n_groups": 2, "chunk_size": 8},
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {**ENCODER, "pad_token_id": 0}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**ENCODER, "pad_token_id": 1}),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {
            **{"vocab_size": 67, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
            **{"max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0},
        },
    ),
}
DROPS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout")
DROPS += ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "dropout")


class Language(nn.Module):
    """Logits, and the loss of targets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=tokens).logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(pixel_values=image).logits
        return logits, F.cross_entropy(logits, label)


class Sequences(nn.Module):
    """Of two sequences; `source` is what the first is called."""

    def __init__(self, model: nn.Module, source: str) -> None:
        super().__init__()
        self.model, self.source = model, source

    def forward(self, source: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(**{self.source: source}, decoder_input_ids=tokens, use_cache=False).logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Pairs(nn.Module):
    """Images and texts that belong together, as CLIP learns them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=tokens, pixel_values=image).logits_per_text
        own = torch.arange(logits.shape[0])
        return logits, (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of transformers, and example inputs."""
    import transformers

    torch.manual_seed(0)
    if name in LANGUAGE:
        configuration, kind, sizes = LANGUAGE[name]
        config = getattr(transformers, configuration)(**sizes)
        for drop in DROPS:
            if hasattr(config, drop):
                setattr(config, drop, 0.0)
        config.use_cache = False
        if name in ("gemma2", "gpt_oss"):
            config._attn_implementation = "eager"
        return Language(getattr(transformers, kind)(config)), {"tokens": ids(3, 10), "targets": ids(3, 10)}
    return OTHERS[name](transformers)


def _classifier(
    configuration: str, kind: str, size: int, **sizes: Any
) -> Callable[[Any], tuple[nn.Module, dict[str, Tensor]]]:
    def make(transformers: Any) -> tuple[nn.Module, dict[str, Tensor]]:
        config = getattr(transformers, configuration)(num_labels=10, **sizes)
        inputs = {"image": torch.randn(3, 3, size, size), "label": torch.randint(0, 10, (3,))}
        return Classifier(getattr(transformers, kind)(config)), inputs

    return make


def _t5(transformers: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.T5Config(
        vocab_size=67, d_model=32, d_kv=8, d_ff=88, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    model = Sequences(transformers.T5ForConditionalGeneration(config), "input_ids")
    return model, {"source": ids(3, 13), "tokens": ids(3, 10), "targets": ids(3, 10)}


def _whisper(transformers: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.WhisperConfig(
        vocab_size=67,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.0,
    )
    model = Sequences(transformers.WhisperForConditionalGeneration(config), "input_features")
    return model, {"source": torch.randn(3, 8, 24), "tokens": ids(3, 10), "targets": ids(3, 10)}


def _clip(transformers: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 67, "max_position_embeddings": 16, "eos_token_id": 66, "bos_token_id": 0, "pad_token_id": 1}
    vision = {"image_size": 16, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=layers | text, vision_config=layers | vision, projection_dim=24)
    tokens = ids(3, 10)
    tokens[:, -1] = 66
    return Pairs(transformers.CLIPModel(config)), {"tokens": tokens, "image": torch.randn(3, 3, 16, 16)}


VISION = {"hidden_size": 32, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
OTHERS: dict[str, Callable[[Any], tuple[nn.Module, dict[str, Tensor]]]] = {
    "vit": _classifier(
        "ViTConfig", "ViTForImageClassification", 16, num_hidden_layers=3, intermediate_size=88, **VISION
    ),
    "dinov2": _classifier("Dinov2Config", "Dinov2ForImageClassification", 16, num_hidden_layers=2, **VISION),
    "hf_resnet": _classifier(
        "ResNetConfig",
        "ResNetForImageClassification",
        32,
        **{"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"},
    ),
    "hf_convnext": _classifier(
        "ConvNextConfig", "ConvNextForImageClassification", 32, hidden_sizes=[8, 16], depths=[2, 2], num_stages=2
    ),
    "t5": _t5,
    "whisper": _whisper,
    "clip": _clip,
}
NAMES = (*LANGUAGE, *OTHERS)
