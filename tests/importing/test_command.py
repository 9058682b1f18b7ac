"""`partita import` on the command line, with real files; and weights on their way into a file's run and back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from partita.cli.main import main
from tests.importing import modules

HERE = "tests.importing.modules"
LOSS = ["--loss", "cross_entropy(logits, label)"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_module_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (folder / "mine.py").write_text(f"from {HERE} import plain as build, tokens as inputs\n")
    assert main(["import", "mine:build", "--example", "mine:inputs", "-o", "gpt", "--axes", "tokens=batch,time"]) == 0
    output = capsys.readouterr()
    first, second = output.out.splitlines()
    assert first == "gpt.par: 1 block, 2 layers, 28.7 K parameters; weights `hf` for 28 tensors"
    assert second.startswith("equal to the module: loss, logits and 36 gradients within ")
    assert second.endswith(" in f64, at (2, 10), (2, 14), (3, 11), (4, 23)")
    assert output.err.splitlines()[:2] == ["exporting the module", "comparing at batch = 2, time = 10"]
    assert "tokens: i64[batch, time]" in (folder / "gpt.par").read_text()
    assert main(["check", "gpt.par"]) == 0
    assert main(["fmt", "--check", "gpt.par"]) == 0


def test_a_file_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "net.par").write_text("mine")
    assert main(["import", f"{HERE}:MLP", "--example", f"{HERE}:rows", *LOSS, "-o", "net"]) == 2
    assert capsys.readouterr().err == "partita: net.par already exists, and is left unchanged\n"
    assert (folder / "net.par").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere:build", "--example", f"{HERE}:rows"], 1, "error[E1201]: there is no Python module `nowhere`"),
        ([f"{HERE}:Nothing", "--example", f"{HERE}:rows"], 1, f"error[E1201]: `{HERE}` has no `Nothing`"),
        ([f"{HERE}:LENGTH", "--example", f"{HERE}:rows"], 1, "is not a function, but `int`"),
        ([f"{HERE}:fails_to_build", "--example", f"{HERE}:rows"], 1, "= ValueError: no weights here"),
        ([f"{HERE}:Fails", "--example", f"{HERE}:rows", *LOSS], 1, "in forward: return self.down(x)"),
        ([f"{HERE}:Branch", "--example", f"{HERE}:rows", *LOSS], 1, "error[E1202]: the module (modules.py:"),
        ([f"{HERE}:MLP", "--example", f"{HERE}:row", *LOSS], 1, "a batch of one"),
        ([f"{HERE}:MLP", "--example", f"{HERE}:rows"], 1, "help: of a module that returns outputs alone, say the loss"),
        (
            [f"{HERE}:rows", "--example", f"{HERE}:rows"],
            1,
            "a module is expected, an `nn.Module`, and this is of `dict`",
        ),
        ([f"{HERE}:MLP", "--example", f"{HERE}:MLP"], 1, "example inputs are a dictionary of keyword arguments"),
        ([f"{HERE}:MLP", "--example", f"{HERE}:numbers"], 1, "the example input `x` is no tensor, but of `int`"),
        ([f"{HERE}:MLP"], 2, "a module needs example inputs"),
        ([f"{HERE}:MLP", "--example", "rows"], 2, "is not of the form MODULE:FUNCTION"),
        (["nothing"], 1, "error[E1205]: there is no folder nothing"),
        (["config.json"], 1, "error[E1205]: there is no file config.json"),
        (["."], 1, "error[E1205]: . has no config.json"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    arguments: list[str], status: int, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["import", *arguments]) == status
    assert message in capsys.readouterr().err
    assert list(folder.iterdir()) == []


# ------------------------------------------------------------ models of transformers


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 6,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def test_a_model_of_transformers_without_memory(folder: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert main(["import", ".", "-o", "llama"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "llama.par: 2 blocks, 6 layers, 2.4 B parameters; weights `hf` for 57 tensors"
    assert second.startswith("equal to the module at small sizes, 3 layers, ")
    assert third == "its weights: `partita checkpoint import runs/llama/checkpoints TENSORS llama.par --as hf`"
    text = (folder / "llama.par").read_text()
    assert "layers = 6" in text
    assert "vocab = 128" in text
    assert "~ normal(0.02)" in text


def test_transformers_is_missing(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert main(["import", "."]) == 1
    assert "help: `pip install transformers`" in capsys.readouterr().err


def test_a_config_that_cannot_be_made(folder: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    (folder / "config.json").write_text('{"model_type": "abacus"}')
    assert main(["import", "config.json"]) == 1
    assert "config.json is no config that transformers knows" in capsys.readouterr().err
    (folder / "config.json").write_text('{"model_type": "wav2vec2"}')
    assert main(["import", "config.json"]) == 1
    assert "config.json is a `wav2vec2`, and there are …ForCausalLM" in capsys.readouterr().err


# ------------------------------------------------------------ weights


def test_weights_come_in_and_go_out_bit_by_bit(folder: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(3)
    module = modules.plain()
    state = module.state_dict()
    own = {name: each.contiguous() for name, each in state.items() if name != "lm_head.weight"}
    save_file(own, "model.safetensors")
    assert main(["import", f"{HERE}:plain", "--example", f"{HERE}:tokens", "-o", "gpt"]) == 0
    run = "runs/gpt/checkpoints"
    assert main(["checkpoint", "import", run, "model.safetensors", "gpt.par", "--as", "hf"]) == 0
    assert main(["checkpoint", "export", run, "gpt.par", "--as", "hf", "-o", "out"]) == 0
    exported = load_file("out/model.safetensors")
    assert exported.keys() == own.keys()
    assert all(torch.equal(exported[name], each) for name, each in own.items())
    told = module.load_state_dict(exported, strict=False)
    assert told.missing_keys == ["lm_head.weight"]  # which is tied
    assert not told.unexpected_keys
    capsys.readouterr()
