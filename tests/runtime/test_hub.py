"""Models of the hub by their ids: downloaded from a server on this machine, and found in the cache without it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from partita.cli.main import main
from partita.dsl.diagnostic import Refused
from partita.runtime.data.files import tokenizer_file
from partita.runtime.hub import MODEL, is_id, model_folder, weights_folder
from tests.hub_server import Hub, hub
from tests.runtime.data.test_documents import tokenizer

FILES = {
    "tokenizer.json": tokenizer().to_str().encode(),
    "config.json": json.dumps(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "vocab_size": 300,
        }
    ).encode(),
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"not read here",
    "pytorch_model.bin": b"never read",
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Hub]:
    with hub(tmp_path / "home") as found:
        found.put("models", "our/model", FILES)
        yield found


def test_a_tokenizer_is_downloaded_once_and_found_without_a_network(server: Hub, tmp_path: Path):
    file = tokenizer_file("our/model", tmp_path, None)
    assert file.read_bytes() == FILES["tokenizer.json"]
    assert (file.parent / "chat_template.jinja").read_bytes() == FILES["chat_template.jinja"]
    assert not (file.parent / "config.json").exists()
    server.requests.clear()
    server.repositories.clear()
    assert tokenizer_file(Path("our/model"), tmp_path, None) == file
    assert server.requests == []


def test_what_lies_here_comes_first(server: Hub, tmp_path: Path):
    (tmp_path / "our" / "model").mkdir(parents=True)
    (tmp_path / "our" / "model" / "tokenizer.json").write_text("{}")
    assert tokenizer_file("our/model", tmp_path, None) == tmp_path / "our" / "model" / "tokenizer.json"
    assert server.requests == []


def test_what_is_cached_is_used_where_the_rest_cannot_be_asked_for(server: Hub, tmp_path: Path):
    folder = model_folder("our/model", ("config.json",))
    server.repositories.clear()
    assert model_folder("our/model", MODEL) == folder


def test_weights_are_downloaded_without_what_is_not_read(server: Hub):
    folder = weights_folder("our/model")
    assert {each.name for each in folder.iterdir()} == FILES.keys() - {"pytorch_model.bin"}
    server.repositories.clear()
    assert weights_folder("our/model") == folder


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("our/other", "nothing here is called `our/other`, and nothing on the hub"),
        ("our/gated", "`our/gated` is not for everyone"),
        ("our/empty", "`our/empty` on the hub has no tokenizer.json"),
        ("our/broken", "`our/broken` is not here, and cannot be read from the hub: Server error '500"),
    ],
)
def test_what_the_hub_does_not_give_is_said(id: str, words: str, server: Hub, tmp_path: Path):
    server.put("models", "our/empty", {"config.json": b"{}"})
    server.refused = {"our/gated": (403, "GatedRepo"), "our/broken": (500, "")}
    with pytest.raises(Refused) as refused:
        tokenizer_file(id, tmp_path, None)
    assert [(each.code, each.message.startswith(words)) for each in refused.value.diagnostics] == [("E0627", True)]


def test_without_a_network_one_line_says_so_at_once(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr("partita.runtime.hub.TIMEOUT", 0.3)
    with socket.socket() as silent:  # accepts, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port, why in ((9, "Connection refused"), (silent.getsockname()[1], "timed out")):
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
            begun = time.monotonic()
            with pytest.raises(Refused, match=f"error.E0627.: `our/model` is not here.*{why}"):
                tokenizer_file("our/model", tmp_path, None)
            assert time.monotonic() - begun < 5
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Refused, match="HF_HUB_OFFLINE forbids"):
        tokenizer_file("our/model", tmp_path, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("a/b.json", False),
        ("a/b/c", False),
        ("../a", False),
        ("gpt2", False),
        ("a/*", False),
    ],
)
def test_ids(text: str, expected: bool):
    assert is_id(text) is expected


@pytest.mark.soak
def test_a_model_of_the_hub_is_written(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert main(["init", "https://huggingface.co/our/model", "-o", "ours.par"]) == 0
    text = (tmp_path / "ours.par").read_text()
    assert 'chat("chats.jsonl", tokenizer = "our/model", holdout = 5%)' in text
    assert "`partita checkpoint import runs/ours/checkpoints our/model ours.par --as hf`" in capsys.readouterr().out
