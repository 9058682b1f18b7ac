"""Encoders of text, and what is generated from them."""

from __future__ import annotations

from partita.cli.families.config import Config, File
from partita.cli.families.parts import dropout, vocabulary


def bert(config: Config, file: File) -> None:
    """BERT, with its head for masked words."""
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
    vocabulary(file, vocab)
    dropout(config, file, "hidden_dropout_prob", "attention_probs_dropout_prob")
    config.fixed(hidden_act="gelu", position_embedding_type="absolute", is_decoder=False)
    config.fixed(add_cross_attention=False, tie_word_embeddings=True)
    config.get("gradient_checkpointing")


def t5(config: Config, file: File) -> None:
    """T5, without gates."""
    layers = config.count("num_layers", 6)
    config.fixed(num_decoder_layers=layers)
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
    vocabulary(file, config.count("vocab_size", 32128))
    config.fixed(feed_forward_proj="relu", dense_act_fn="relu", is_gated_act=False, is_encoder_decoder=True)
    config.fixed(is_decoder=False, tie_word_embeddings=True, scale_decoder_outputs=True)
    config.get("n_positions")  # which it does not have
