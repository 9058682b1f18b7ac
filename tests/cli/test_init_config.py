"""A config says the file, or what the file cannot say of it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from partita.cli.families.registry import FAMILIES
from partita.cli.main import main
from partita.dsl.load import load


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(capsys: pytest.CaptureFixture[str], config: object, *more: str) -> tuple[int, str, str]:
    Path("config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    status = main(["init", "config.json", *more])
    output = capsys.readouterr()
    return status, output.out, output.err


# Of published models, as far as their configs say more than defaults.
PUBLISHED: list[dict[str, Any]] = [
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_ctx": 1024, "task_specific_params": {"a": {}}},
    {"model_type": "qwen3_moe", "norm_topk_prob": True, "num_experts": 128, "rope_theta": 1000000.0},
    {"model_type": "bert", "architectures": ["BertForMaskedLM"], "position_embedding_type": "absolute"},
    *({"model_type": name} for name in FAMILIES if name not in ("qwen3_moe", "llama", "gpt2", "bert")),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config["model_type"])
def test_published_configs_are_said(config: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]):
    status, out, err = init(capsys, config, "-o", "m.par")
    assert (status, err) == (0, "")
    assert out.startswith("wrote m.par; ")
    assert main(["check", "m.par"]) == 0
    assert main(["fmt", "--check", "m.par"]) == 0
    assert capsys.readouterr().err == ""


def test_sizes_and_constants_are_those_of_the_config(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert init(capsys, PUBLISHED[0])[0] == 0
    text = Path("llama.par").read_text()
    assert "# Sizes and constants are those of config.json." in text
    assert "seq = 1024\n" in text
    assert "embed = 2048, groups = 8, heads = 4, key = 64, ffn = 8192, vocab = 128256" in text
    assert "layers = 16, eps = 1e-05, base = 500000.0, original = 8192" in text
    assert "llama3(factor = 32.0, original = original, low = 1.0, high = 4.0)" in text
    assert "head:" not in text
    assert '"model.embed_tokens.weight", "lm_head.weight" [vocab, embed]' in text


@pytest.mark.parametrize(
    ("kind", "settings", "said", "unsaid"),
    [
        ("llama", {}, "positions,\n# grouped-query", "stretched"),
        ("llama", {"rope_scaling": PUBLISHED[0]["rope_scaling"]}, "are stretched for longer", "positions,\n"),
        ("mixtral", {"num_local_experts": 16, "num_experts_per_tok": 4}, "a few", "eight"),
    ],
)
def test_comments_say_what_the_file_has(
    kind: str, settings: dict[str, Any], said: str, unsaid: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert init(capsys, {"model_type": kind, **settings})[0] == 0
    comment = Path(f"{kind}.par").read_text().partition("\n\n")[0]
    assert said in comment
    assert unsaid not in comment
    assert "# Sizes and constants are those of config.json." in comment


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        ("llama", {"attention_bias": True}, "`attention_bias` is true, and the file has false"),
        ("llama", {"hidden_act": "gelu"}, '`hidden_act` is "gelu", and the file has "silu"'),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "and the file can say `llama3` and `yarn`"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "and the file is LlamaForCausalLM"),
        ("llama", {"quantization_config": {"bits": 4}}, '`quantization_config` is {"bits": 4}, and the file has null'),
        ("llama", {"vocab_size": "big"}, '`vocab_size` is "big", which is not a positive integer'),
        ("llama", {"num_key_value_heads": 5}, "`num_key_value_heads` is 5, which does not divide"),
        ("llama", {"new_setting": 0.5}, "`new_setting` is 0.5, which is not known to be without effect"),
        ("mixtral", {"sliding_window": 4096}, "`sliding_window` is 4096, and the file has null"),
        ("qwen3_moe", {}, "`norm_topk_prob` is false, and the file has true"),
        ("gemma2", {"num_hidden_layers": 7}, "`num_hidden_layers` is 7, and the file has pairs of layers"),
        ("gemma2", {"final_logit_softcapping": None}, "`final_logit_softcapping` is null, and the file has a cap"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "is true, and the file has false"),
        ("gpt2", {"attn_pdrop": 0.2}, "`attn_pdrop` is 0.2, and `resid_pdrop` 0.1: the file has one rate for both"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "dynamic"}},
            "and the file has no scaling of wavelengths",
        ),
        ("mamba2", {"conv_kernel": 3}, "`conv_kernel` is 3, and the file has 4"),
        ("bert", {"is_decoder": True}, "`is_decoder` is true, and the file has false"),
        ("t5", {"feed_forward_proj": "gated-gelu"}, '`feed_forward_proj` is "gated-gelu", and the file has "relu"'),
        ("t5", {"num_decoder_layers": 3}, "`num_decoder_layers` is 3, and the file has 6"),
        ("clip", {"text_config": {"hidden_act": "gelu"}}, '`text_config.hidden_act` is "gelu"'),
        ("vit", {"qkv_bias": False}, "`qkv_bias` is false, and the file has true"),
        ("resnet", {"layer_type": "basic"}, '`layer_type` is "basic", and the file has "bottleneck"'),
    ],
)
def test_what_the_file_cannot_say_is_named(
    kind: str, settings: dict[str, Any], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    status, _, err = init(capsys, {"model_type": kind, **settings}, "-o", "m.par")
    assert status == 1
    assert f"error[E0329]: config.json has a setting that specs/zoo/{FAMILIES[kind].file} cannot say" in err
    assert told in err
    assert not Path("m.par").exists()


def test_every_setting_is_named_at_once_unless_it_is_ignored(folder: Path, capsys: pytest.CaptureFixture[str]):
    config = {"model_type": "llama", "mlp_bias": True, "odd": 1, "hidden_act": "gelu"}
    status, _, err = init(capsys, config, "--ignore", "odd")
    assert status == 1
    assert "config.json has 2 settings" in err
    assert "`mlp_bias`" in err
    assert "`hidden_act`" in err
    assert init(capsys, config, "--ignore", "odd,mlp_bias,hidden_act")[0] == 0


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "error[E0329]: config.json is not a config: "),
        ("[]", "error[E0329]: config.json is not a config: it is not a JSON object"),
        ('{"model_type": "opt"}', 'error[E0329]: config.json is of a `model_type` "opt" that is not known'),
        ("{}", "error[E0329]: config.json is of a `model_type` null that is not known\n  help: there are `llama`"),
    ],
)
def test_what_is_no_config_is_refused(config: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    status, _, err = init(capsys, config)
    assert status == 1
    assert told in err


def test_files_and_usage(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["init", "missing.json"]) == 1
    assert "error[E0001]: cannot read missing.json" in capsys.readouterr().err
    assert main(["init", "name", "-o", "x"]) == 2
    Path("theirs").mkdir()
    Path("theirs/config.json").write_text('{"model_type": "gpt2"}')
    assert main(["init", "theirs", "-o", "m.par"]) == 0
    assert main(["init", "theirs", "-o", "m.par"]) == 2
    assert "m.par already exists" in capsys.readouterr().err


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 400}


def test_a_folder_with_its_tensors_and_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that reads them is complete, the file saves what it trains, and says how to read text by it."""
    (folder / "theirs").mkdir()
    (folder / "theirs" / "config.json").write_text(json.dumps(GPT2))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / "theirs" / name).write_text("{}")
    assert main(["init", "theirs", "-o", "mine.par"]) == 0
    command = "`partita checkpoint import runs/mine/checkpoints theirs mine.par --as hf`"
    assert command in capsys.readouterr().out
    text = Path("mine.par").read_text()
    assert '  #   jsonl("*.jsonl", tokenizer = "theirs/tokenizer.json", holdout = 5%)\n' in text
    spec, diagnostics = load("mine.par")
    assert spec is not None, diagnostics
    assert spec.train is not None
    assert spec.train.checkpoint is not None
