"""The text that a model writes: greedy as `transformers` writes it, random as a pure function of the seed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from attrs import evolve
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from partita.dsl.diagnostic import Refused
from partita.dsl.spec import Call
from partita.runtime.inference.choice import Choice
from partita.runtime.inference.encoding import Ends, encoding_of
from partita.runtime.inference.encoding import Tokenizer as Words
from partita.runtime.inference.sampling import writer_of
from partita.runtime.inference.scoring import seen
from tests.files import checked
from tests.runtime.inference.models import both, drawn, model

GREEDY = Choice(temperature=0)
PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.soak
def test_greedy_text_is_that_of_transformers() -> None:
    """64 tokens of Llama, with the same weights, with what is kept and anew."""
    from tests.zoo.models import llama3

    theirs = llama3.MODEL._both("seq=69")
    given = theirs.run.plan.spec
    module, weights = theirs.module.eval(), theirs.parameters()
    with torch.no_grad():
        expected = module.generate(
            torch.tensor([PROMPT]), max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None
        )[0, len(PROMPT) :].tolist()
    assert len(expected) == 64
    assert len(set(expected)) > 4
    for kept in (False, True):
        writer = writer_of(given, cached=kept)
        writer.ranks.set_parameters(weights)
        assert list(writer.written(PROMPT, 64, GREEDY)) == expected


def test_random_text_is_a_function_of_the_seed() -> None:
    anew, keeping = both(model("let h = x + cumsum(x, over = seq) / 10", seq=12))
    text = list(anew.written(PROMPT, 30, Choice(seed=7)))  # longer than the window
    assert text == list(keeping.written(PROMPT, 30, Choice(seed=7)))
    assert text[:10] == list(keeping.written(PROMPT, 10, Choice(seed=7)))
    assert text != list(keeping.written(PROMPT, 30, Choice(seed=8)))


def test_a_text_ends_with_the_first_of_its_ends() -> None:
    """Which is several ids, maybe, all of them written."""
    anew, _ = both(model("let h = x + cumsum(x, over = seq) / 10", seq=12))
    text = list(anew.written(PROMPT, 30, Choice(seed=7)))
    assert list(anew.written(PROMPT, 30, Choice(seed=7), ((text[4],), (99,)))) == text[: text.index(text[4])]
    two = next(i for i, pair in enumerate(pairwise(text)) if i > 4 and pair not in pairwise(text[: i + 1]))
    assert list(anew.written(PROMPT, 30, Choice(seed=7), ((text[two], text[two + 1]),))) == text[: two + 1]
    assert list(anew.written(PROMPT, 30, Choice(seed=7), ((PROMPT[-1], text[0]),))) == text


def test_what_ends_a_text_is_what_the_data_and_the_files_of_a_tokenizer_say(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<e>": 1, "<f>": 2}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    def ends(**arguments: str) -> Ends:
        return encoding_of(Call("jsonl", {"glob": "x", **arguments}), tmp_path, None).ends

    assert (ends(), ends(end="\n\n")) == ((), ((10, 10),))
    assert (ends(tokenizer="tokenizer.json"), ends(tokenizer=".", end="<e>")) == ((), ((1,),))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<f>"}}')
    assert (ends(tokenizer="tokenizer.json"), ends(tokenizer=".", end="<e>")) == (((2,),), ((1,), (2,)))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert ends(tokenizer=".") == ((2,), (7,))
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(Refused, match=r"E0619\]: cannot read `generation_config.json` beside the tokenizer"):
        ends(tokenizer=".")


def test_only_whole_characters_are_written() -> None:
    """Whose bytes are several ids."""
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = "na\u00efve \U0001f600!"
    ids = tokenizer.encode(text).ids
    assert len(ids) > len(text)
    pieces = list(Words(tokenizer).text(ids))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) == 1


def test_each_step_of_training_draws_anew() -> None:
    choices = (Choice(seed=7), Choice(seed=7, step=1), Choice(seed=7, step=2))
    texts = [tuple(each.of(torch.zeros(50), index) for index in range(20)) for each in choices]
    assert len(set(texts)) == 3


LOGITS = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()


def shares(choice: Choice) -> list[float]:
    """How often each id is drawn."""
    drawn = [evolve(choice, seed=seed).of(LOGITS, index) for seed in range(20) for index in range(100)]
    return [drawn.count(id) / len(drawn) for id in range(4)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(), [0.5, 0.1, 0.25, 0.15]),
        (Choice(temperature=0.5), [0.7246, 0.029, 0.1812, 0.0652]),
        (Choice(top_k=2), [2 / 3, 0, 1 / 3, 0]),
        (Choice(top_p=0.6), [2 / 3, 0, 1 / 3, 0]),
        (Choice(top_p=0.5), [1, 0, 0, 0]),
        (Choice(temperature=0), [1, 0, 0, 0]),
    ],
)
def test_ids_are_drawn_in_proportion(choice: Choice, expected: list[float]) -> None:
    assert shares(choice) == pytest.approx(expected, abs=0.03)


def test_the_first_of_the_most_likely_is_taken() -> None:
    assert GREEDY.of(torch.tensor([0.0, 2.0, 2.0]), 0) == 1


AFTER = "shift(x, over = seq, by = -1)"


@pytest.mark.parametrize("what", ["mean(x, over = seq)", AFTER, f"{AFTER} * cast(iota(seq) >= 1, f32)"])
def test_a_model_that_sees_what_follows_is_refused(what: str) -> None:
    """Whether its first position does or only later ones."""
    anew = writer_of(model(f"let h = x + {what}"))
    anew.ranks.set_parameters(drawn(anew))
    with pytest.raises(Refused, match="the model sees what follows"):
        anew.check_causal()


def test_a_model_that_ignores_what_follows_writes() -> None:
    anew = writer_of(model("let h = x + 0 * mean(x, over = seq)"))
    anew.ranks.set_parameters(drawn(anew))
    anew.check_causal()


def test_a_model_that_writes_ids_that_it_cannot_read_is_refused() -> None:
    text = """
    axis batch = 2, seq = 4, embed = 3, vocab = 5, more = 6
    model m(tokens: i64[batch, seq]) {
      param table: [vocab, embed] ~ normal(1.0)
      param head: [more, embed] ~ normal(1.0)
      let logits = dot(embedding(tokens, table, over = vocab), head, over = embed)
      loss mean(logits)
      output logits = logits
    }
    train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
    """
    with pytest.raises(Refused, match="it has logits for more=6, and reads ids of vocab=5"):
        writer_of(checked(text, "m.par"))


@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_a_text_that_grows_beyond_the_window_is_seen_from_half_a_window_later_on(window: int):
    """And goes on from there until it is as long as the window again: so what is kept of it is of use."""
    before = list(seen(range(1), window))
    assert before == [0]
    for length in range(2, 5 * window):
        found = list(seen(range(length), window))
        full = len(before) == window
        assert found == (list(range(length - max(1, window // 2), length)) if full else [*before, length - 1])
        before = found
