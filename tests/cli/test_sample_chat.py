"""`partita sample --chat`: beside `generate` of transformers, with the same weights and the same conversation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.cli.inference import INPUT
from partita.cli.main import main
from partita.cli.source import printable
from tests.commands import here
from tests.files import SPECS
from tests.runtime.data.test_chat import published, written

transformers = pytest.importorskip("transformers")

SIZES = ("batch=4", "seq=150", "embed=24", "groups=2", "heads=3", "key=4", "ffn=40", "vocab=320", "layers=2")
CHAT = ("sample", "m.par", *SIZES, "--from", "run", "--chat", "--tokenizer", "own", "--temperature", "0")
CUT = """
mesh four(tensor = 2, pipe = 2)
layout cut on four { shard vocab, groups -> tensor  stage layer -> pipe }
"""
TURNS = ["hello there", "what is it?"]
LENGTH = 12


class Theirs:
    """A model of transformers and its tokenizer, and which ids end a turn of it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = written(folder, published("qwen3")[0], eos_token="<|endoftext|>")
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 40, "head_dim": 4, "vocab_size": 320}
        rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        config = transformers.LlamaConfig(
            **sizes,
            num_attention_heads=6,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters=rope,
            initializer_range=0.5,
        )
        self.model = transformers.LlamaForCausalLM(config).eval()
        self.model.save_pretrained(folder / "theirs")
        self.ends = [self.tokenizer.convert_tokens_to_ids(each) for each in ("<|endoftext|>", "<|im_end|>")]

    def ids(self, messages: list[dict[str, str]], length: int, **options: Any) -> list[int]:
        """The answer to some messages, with what ends it."""
        kind = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        prompt = self.tokenizer.apply_chat_template(messages, **kind, **options)
        with torch.no_grad():
            text = self.model.generate(
                **prompt, max_new_tokens=length, do_sample=False, eos_token_id=self.ends, pad_token_id=0
            )
        found: list[int] = text[0, prompt["input_ids"].shape[1] :].tolist()
        return found

    def answers(self, turns: list[str], length: int = LENGTH, system: str | None = None, **options: Any) -> list[str]:
        """The answers of a conversation."""
        messages = [{"role": "system", "content": system}] if system else []
        for said in turns:
            messages.append({"role": "user", "content": said})
            ids = self.ids(messages, length, **options)
            messages.append({"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)})
        return [each["content"] for each in messages if each["role"] == "assistant"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the run into which a model is imported, and the folder `own` of a tokenizer."""
    return tmp_path_factory.mktemp("chat")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    theirs = Theirs(folder)
    (folder / "m.par").write_text(f"{(SPECS / 'zoo' / 'llama3.par').read_text()}\n{CUT}")
    imported = ("checkpoint", "import", "run/checkpoints", "theirs", "m.par", *SIZES, "--as", "hf")
    done = here(*imported, cwd=folder)
    assert done.returncode == 0, done.stderr
    return theirs


def said(lines: list[str], *arguments: str, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, in this process, with lines as its standard input."""
    reading, writing = os.pipe()
    os.write(writing, "".join(f"{line}\n" for line in lines).encode())
    os.close(writing)
    monkeypatch.setenv(INPUT, str(reading))
    done = here(*CHAT, *arguments, cwd=cwd)
    os.close(reading)
    return done


@pytest.mark.parametrize("layout", [(), ("--transport", "virtual", "train.layout=cut")])
def test_greedy_answers_are_those_of_transformers(
    layout: tuple[str, ...], theirs: Theirs, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a conversation, which goes on, in one process and in a layout."""
    done = said([TURNS[0], "", TURNS[1]], "--length", str(LENGTH), *layout, cwd=folder, monkeypatch=monkeypatch)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    expected = theirs.answers(TURNS)
    assert done.stdout == "".join(f"{printable(each)}\n" for each in expected)
    assert len(set(expected)) == 2


@pytest.mark.parametrize("layout", [(), ("--transport", "virtual", "train.layout=cut")])
def test_an_answer_ends_where_the_files_of_the_model_say(layout: tuple[str, ...], theirs: Theirs, folder: Path):
    options: dict[str, Any] = {"enable_thinking": False}
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": TURNS[0]}]
    ids = theirs.ids(chat, LENGTH, **options)
    end = next(each for i, each in enumerate(ids) if i > 3 and each not in ids[:i])
    (folder / "own" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    arguments = ("--system", "be brief", "--chat-template-kwargs", json.dumps(options), "--prompt", TURNS[0], *layout)
    done = here(*CHAT, *arguments, cwd=folder)
    (folder / "own" / "generation_config.json").unlink()
    assert done.returncode == 0, done.stderr
    assert done.stdout == printable(theirs.tokenizer.decode(ids[: ids.index(end)])) + "\n"


def test_what_has_no_room_is_said(theirs: Theirs, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """An answer that reaches the end of the window, and what would be said after it."""
    done = said(TURNS, "seq=24", cwd=folder, monkeypatch=monkeypatch)
    assert done.returncode == 1
    assert "warning[W1004]: the answer ends where `seq` does: the conversation fills its 24 positions" in done.stderr
    assert "error[E1002]: the conversation has" in done.stderr
    (expected,) = theirs.answers(TURNS[:1], 100)
    first = done.stdout.removesuffix("\n")
    assert printable(expected).startswith(first)
    assert first


class Interrupting(StringIO):
    """Output after whose third piece Ctrl-C is pressed."""

    pieces = 0

    def write(self, text: str) -> int:
        self.pieces += 1
        if self.pieces == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_an_interrupted_answer_ends_and_the_conversation_goes_on(
    theirs: Theirs, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    before = signal.getsignal(signal.SIGINT)
    reading, writing = os.pipe()
    os.write(writing, b"hello there\nwhat is it?\n")
    os.close(writing)
    monkeypatch.setenv(INPUT, str(reading))
    with chdir(folder), redirect_stdout(Interrupting()) as out:
        assert main([*CHAT, "--length", str(LENGTH)]) == 0
    os.close(reading)
    assert signal.getsignal(signal.SIGINT) is before
    first, *others = out.getvalue().split("\n")
    expected, _ = theirs.answers(TURNS)
    assert printable(expected).startswith(first)
    assert first != printable(expected)
    assert "".join(others)


WRONG = {
    "error[E0619]: `own` has no template for chats": CHAT,
    "error[E1003]: no tokenizer says how conversations are written": (*CHAT[:6], "--chat"),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_a_conversation_is_refused(message: str, theirs: Theirs, folder: Path):
    template = folder / "own" / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    done = here(*WRONG[message], "--prompt", "a", cwd=folder)
    template.write_text(text)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("option", [("--system", "a"), ("--chat", "--chat-template-kwargs", "3")])
def test_wrong_usage_is_status_2(option: tuple[str, ...], folder: Path):
    arguments = ["sample", "m.par", *option]
    if "--chat" not in option:
        assert here(*arguments, cwd=folder).returncode == 2
        return
    with pytest.raises(SystemExit) as stopped:
        here(*arguments, cwd=folder)
    assert stopped.value.code == 2


@pytest.mark.soak
def test_processes_answer_what_is_said_to_the_command(theirs: Theirs, folder: Path):
    command = (sys.executable, "-m", "partita", *CHAT, "--length", str(LENGTH), "--transport", "gloo")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "train.layout=cut"],
        cwd=folder,
        env=environment,
        input="".join(f"{turn}\n" for turn in TURNS),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{printable(each)}\n" for each in theirs.answers(TURNS))
