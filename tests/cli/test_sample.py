"""`partita sample` as a user calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

import partita
from partita.dsl.load import load
from tests.commands import here
from tests.files import SPECS

TEXT = """
axis batch = 4, seq = 12, embed = 8, vocab = 256
model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(1.0)
  let x = embedding(tokens, table, over = vocab)
  let logits = dot(x + cumsum(x, over = seq), table, over = embed)
  loss cross_entropy(logits, targets, over = vocab)
  output logits = logits
  output likely = softmax(mean(logits, over = seq), over = vocab)
}
train { data = text("all.txt") optimizer = sgd(lr = 0.1) steps = 2 checkpoint = every(1) }
"""
NUMBERS = """
axis batch = 4, features = 3, classes = 2
model numbers(x: [batch, features], y: i64[batch]) {
  param w: [features, classes] ~ zeros()
  let logits = dot(x, w, over = features)
  loss cross_entropy(logits, y, over = classes)
  output logits = logits
}
train { data = arrays("all.npz") optimizer = sgd(lr = 0.1) steps = 2 }
"""
ASKED = ("--prompt", "ab", "--length", "5")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file and the run that has trained it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "m.par").write_text(TEXT)
    (folder / "numbers.par").write_text(NUMBERS)
    (folder / "all.txt").write_text("abc" * 100)
    partita.train(folder / "m.par", run_dir=folder / "runs" / "m")
    return folder


def test_the_prompt_and_what_follows_is_printed(trained: Path) -> None:
    done = here("sample", "m.par", *ASKED, "--top-k", "3", cwd=trained)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ab")
    assert len(done.stdout.rstrip("\n")) >= 3
    assert done.stderr == ""
    again = here("sample", "m.par", *ASKED, "--top-k", "3", "--from", "runs/m/checkpoints/step-00000002", cwd=trained)
    assert again.stdout == done.stdout
    before = here("sample", "m.par", *ASKED, "--top-k", "3", "--from", "runs/m", "--seed", "1", cwd=trained)
    assert before.stdout != done.stdout


def test_the_text_in_the_layout_of_the_file_is_that_of_one_process(trained: Path) -> None:
    """Of a checkpoint that another layout has saved: each rank reads its own shards."""
    layout = "mesh pair(data = 2, tensor = 2)\nlayout cut on pair { shard vocab -> tensor shard param -> data }\n"
    (trained / "cut.par").write_text(f"{TEXT}\n{layout}")
    asked = ("--from", "runs/m", *ASKED, "--temperature", "0")
    one = here("sample", "cut.par", *asked, cwd=trained)
    several = here("sample", "cut.par", *asked, "--transport", "virtual", cwd=trained)
    assert several.returncode == 0, several.stderr
    assert several.stdout == one.stdout
    assert several.stdout.startswith("ab")


WRONG = {
    "E0807 there is no checkpoint in nowhere": ("m.par", "--from", "nowhere"),
    "E0804 is of another model": ("m.par", "embed=16"),
    "E0302 has no output `logit`": ("m.par", "--output", "logit"),
    "E1001 `likely` does not have logits at each position": ("m.par", "--output", "likely"),
    "E0816 has no mean of the weights": ("m.par", "--weights", "ema"),
    "E1002 the prompt is empty": ("m.par", "--prompt", ""),
    "E1002 the prompt has 13 tokens, and `seq` has 12": ("m.par", "--prompt", "a" * 13),
    "E0601 there is no file `none.json`": ("m.par", "--tokenizer", "none.json"),
    "E0619 `m.par` is not a tokenizer": ("m.par", "--tokenizer", "m.par"),
    "E1001 `numbers` is not a model that writes: `logits` needs `x`": ("numbers.par",),
    "E1003 does not say how text becomes ids": ("m.par", "train.data=random()"),
    "E1002 which is not in the text": ("m.par", 'train.data=text("all.txt", alphabet = chars)', "--prompt", "xyz"),
}


@pytest.mark.parametrize("expected", WRONG)
def test_wrong_input_is_said(expected: str, trained: Path) -> None:
    done = here("sample", *WRONG[expected], cwd=trained)
    code, _, message = expected.partition(" ")
    assert done.returncode == 1
    assert f"error[{code}]" in done.stderr
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "option", [("--length", "0"), ("--temperature", "-1"), ("--top-p", "0"), ("--top-k", "x"), ("--seed", "-1")]
)
def test_wrong_usage_is_status_2(option: tuple[str, str], trained: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        here("sample", "m.par", *option, cwd=trained)
    assert stopped.value.code == 2


def test_what_keeps_nothing_and_what_has_changed_is_a_warning(trained: Path) -> None:
    """Tensors are the same, and the model computes something else with them."""
    changed = TEXT.replace("cumsum(x, over = seq)", "0 * mean(x, over = seq)")
    (trained / "other.par").write_text(changed)
    done = here("sample", "other.par", *ASKED, "--from", "runs/m", cwd=trained)
    assert done.returncode == 0
    assert "warning[W1001]: each token computes all of `seq` anew: `mean(x, over = seq)` needs all" in done.stderr
    assert "warning[W1002]: the model has changed" in done.stderr
    assert "+ let logits = dot(x + 0 * mean(x, over = seq), table, over = embed)" in done.stderr


def test_a_tokenizer_makes_ids_of_text(trained: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"ab": 3, "cd": 300, "?": 0}, unk_token="?"))
    tokenizer.save(str(trained / "words.json"))
    done = here("sample", "m.par", *ASKED, "--tokenizer", "words.json", cwd=trained)
    assert done.returncode == 0, done.stderr
    done = here("sample", "m.par", "--prompt", "cd", "--tokenizer", "words.json", cwd=trained)
    assert "error[E1002]: the prompt has the id 300, and `vocab` has size 256" in done.stderr


def test_a_text_ends_where_the_tokenizer_says(trained: Path) -> None:
    """By the id that a file beside it has; each id is a character."""
    from tokenizers import Tokenizer, decoders, models

    (trained / "own").mkdir()
    tokenizer = Tokenizer(models.WordLevel({chr(0x4E00 + id): id for id in range(256)}, unk_token="\u4e00"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(trained / "own" / "tokenizer.json"))
    asked = ("sample", "m.par", "--prompt", "\u4e01", "--length", "20", "--temperature", "9", "--tokenizer", "own")
    whole = here(*asked, cwd=trained).stdout.removesuffix("\n")
    assert len(whole) == 21
    last = next(each for each in whole[2:] if each != whole[1])
    (trained / "own" / "generation_config.json").write_text(f'{{"eos_token_id": {ord(last) - 0x4E00}}}')
    assert here(*asked, cwd=trained).stdout.removesuffix("\n") == whole[: whole.index(last, 1)]


@pytest.mark.parametrize("name", ["start.par", "tiny.par", "gpt.par", "llama.par", "zoo/llama3.par"])
def test_files_that_are_shipped_have_logits(name: str) -> None:
    spec, _ = load(SPECS / name)
    assert spec is not None
    assert spec.model is not None
    assert dict(spec.model.outputs).keys() == {"logits"}


def test_a_text_whose_characters_have_other_ids_is_a_warning(tmp_path: Path) -> None:
    """The alphabet is that of the files: with one more, ids stand for other characters."""
    (tmp_path / "c.par").write_text(TEXT.replace('text("all.txt")', 'text("*.txt", alphabet = chars)'))
    (tmp_path / "b.txt").write_text("bcd" * 100)
    partita.train(tmp_path / "c.par", run_dir=tmp_path / "run")
    asked = ("sample", "c.par", "--prompt", "bc", "--length", "3", "--from", "run")
    assert "W1003" not in here(*asked, cwd=tmp_path).stderr
    (tmp_path / "a.txt").write_text("a")
    done = here(*asked, cwd=tmp_path)
    assert done.returncode == 0
    assert "warning[W1003]: the text, whose characters have the ids, is not what" in done.stderr
    assert "`a.txt` is new" in done.stderr
