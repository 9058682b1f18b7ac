"""`preferences`: pairs of answers and what of them counts, beside what transformers makes of the same conversations."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from partita.dsl.diagnostic import Refused
from partita.runtime.data.binding import bind
from partita.runtime.data.dataset import Dataset
from partita.runtime.rank import CompiledRun, prepare
from tests.files import checked
from tests.marks import examples
from tests.runtime.data.test_chat import CHATML, published, written

LENGTH = 96
SIDES = ("chosen", "rejected")
FILE = """axis batch = 2, seq = LENGTH, embed = 4, vocab = 400
block nll(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(1.0)
  let logits = dot(embedding(tokens, table, over = vocab), table, over = embed)
  return mean(token_nll(logits, targets, over = vocab, ignore = -1))
}
model m(chosen_tokens: i64[batch, seq], chosen_targets: i64[batch, seq],
        rejected_tokens: i64[batch, seq], rejected_targets: i64[batch, seq]) {
  share policy = nll
  loss policy(chosen_tokens, chosen_targets) - policy(rejected_tokens, rejected_targets)
}
train { data = preferences("pairs.jsonl"ARGUMENTS)  optimizer = sgd(lr = 0.1)  steps = 2 }
""".replace("LENGTH", str(LENGTH))


@cache
def compiled(arguments: str, overrides: tuple[str, ...]) -> CompiledRun:
    return prepare(checked(FILE.replace("ARGUMENTS", arguments and f", {arguments}"), "m.par", overrides))


def opened(folder: Path, lines: list[dict[str, Any]], arguments: str = "", *overrides: str) -> Dataset:
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plan = compiled(arguments, overrides)
    data = bind(plan.program, plan.train, folder).dataset
    assert data is not None
    return data


def pairs(
    folder: Path, lines: list[dict[str, Any]], arguments: str = "", *overrides: str
) -> list[list[tuple[list[int], list[int]]]]:
    """Of each line the ids and targets of both sides."""
    data = opened(folder, lines, arguments, f"batch={len(lines)}", *overrides)
    batch, names = data.batch(1), data.row_names(1)
    found = [[] for _ in lines]
    for i, name in enumerate(names):
        for side in SIDES:
            tokens, targets = (batch[f"{side}_{each}"][i].tolist() for each in ("tokens", "targets"))
            found[int(name.removeprefix("pair "))].append((tokens, targets))
    return found


def row(ids: list[int], learned: list[bool], length: int = LENGTH) -> tuple[list[int], list[int]]:
    """Filled up."""
    targets = [each if own else -1 for each, own in zip(ids[1:], learned[1:], strict=True)]
    filled = length - len(ids)
    return ids + filled * [0], targets + (1 + filled) * [-1]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9)


@example(prompt="a", chosen="b\n", rejected="\n", end="\n")
@given(prompt=TEXT.filter(bool), chosen=TEXT, rejected=TEXT, end=st.sampled_from(["\n", "<end>"]))
@examples(8)
def test_bytes_of_answers_and_their_end_count(
    prompt: str, chosen: str, rejected: str, end: str, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("pairs")
    line = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    ((*found,),) = pairs(folder, [line], f"end = {json.dumps(end)}")
    for answer, own in zip((chosen, rejected), found, strict=True):
        ends = answer if answer.endswith(end) else answer + end
        ids = list((prompt + ends).encode())
        assert own == row(ids, [i >= len(prompt.encode()) for i in range(len(ids))])


PROMPT = [
    {"role": "user", "content": "say hello"},
    {"role": "assistant", "content": "hello\nthere"},
    {"role": "user", "content": "and now?"},
]
ANSWERS = {"chosen": "good bye, <end>", "rejected": " it is four."}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "phi3", "mistral", "gemma3"])
def test_only_the_answers_of_conversations_count(name: str, marked: bool, tmp_path: Path):
    """Not what the assistant has said in the prompt."""
    texts = published(name)
    theirs = written(tmp_path, texts[marked], texts[1])
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    answers = {side: [{"role": "assistant", "content": text}] for side, text in ANSWERS.items()}
    (found,) = pairs(tmp_path, [{"prompt": PROMPT} | answers], 'tokenizer = "own"', "seq=320")
    before = sum(theirs.apply_chat_template(PROMPT, **options)["assistant_masks"])
    assert before or name == "qwen3"
    for own, answer in zip(found, answers.values(), strict=True):
        expected = theirs.apply_chat_template([*PROMPT, *answer], **options)
        ids, mask = expected["input_ids"], expected["assistant_masks"]
        learned = [bool(each) and sum(mask[:i]) >= before for i, each in enumerate(mask)]
        assert own == row(ids, learned, 320), theirs.decode(ids)


USER, OTHER = {"role": "user", "content": "a?"}, {"role": "system", "content": "s"}
YES, NO = {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c d"}
FORMS = {
    "lists": {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
    "implicit": {"chosen": [USER, YES], "rejected": [USER, NO]},
    "a text beside both": {"prompt": "a?", "chosen": [USER, YES], "rejected": [USER, NO]},
    "texts as answers": {"prompt": [USER], "chosen": "b", "rejected": "c d"},
    "a text as prompt": {"prompt": "a?", "chosen": [YES], "rejected": [NO]},
}
PLAIN = {
    "texts": {"prompt": "x y", "chosen": " bread", "rejected": " brick d"},
    "implicit": {"chosen": "x y bread", "rejected": "x y brick d"},
}


@pytest.mark.parametrize("forms", [FORMS, PLAIN], ids=["messages", "texts"])
def test_forms_of_pairs_that_mean_the_same_are_the_same(forms: dict[str, dict[str, Any]], tmp_path: Path):
    written(tmp_path, CHATML)
    found = pairs(tmp_path, list(forms.values()), 'tokenizer = "own"')
    assert all(each == found[0] for each in found)
    inside = {"prompt": "a?", "chosen": [OTHER, USER, YES], "rejected": [OTHER, USER, NO]}
    implicit = {"chosen": [OTHER, USER, YES], "rejected": [OTHER, USER, NO]}
    one, other = pairs(tmp_path, [inside, implicit], 'tokenizer = "own"')
    assert one == other


def test_texts_end_as_the_tokenizer_says(tmp_path: Path):
    """By its end of text, once; or by what `end` names. A token with the end of the prompt belongs to the answer."""
    theirs = written(tmp_path, CHATML)
    lines = [{"prompt": "x th", "chosen": "ere", "rejected": "ere</s>"}]
    assert len(theirs.encode(" there")) == 1
    for more, chosen, rejected in (
        ("", "x there</s>", "x there</s>"),
        (', end = "<|im_end|>"', "x there<|im_end|>", "x there</s><|im_end|>"),
    ):
        (found,) = pairs(tmp_path, lines, f'tokenizer = "own"{more}')
        for own, ids in zip(found, (theirs.encode(chosen), theirs.encode(rejected)), strict=True):
            assert own == row(ids, [i >= 1 for i in range(len(ids))])


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ({"text": "hello"}, "E0616", "line 2 of `pairs.jsonl` is no pair of answers"),
        ({"chosen": "hello"}, "E0616", "line 2 of `pairs.jsonl` is no pair of answers"),
        (
            {"prompt": None, "chosen": "a", "rejected": "b"},
            "E0616",
            "`prompt` in line 2 of `pairs.jsonl` is null, not a text or a list of messages",
        ),
        (
            {"prompt": "a", "chosen": [], "rejected": "b"},
            "E0616",
            "`chosen` in line 2 of `pairs.jsonl` is an empty list, not a list of messages",
        ),
        (
            {"prompt": "a", "chosen": "a", "rejected": [{"content": "a"}]},
            "E0616",
            "a message in line 2 of `pairs.jsonl` has no `role`",
        ),
        (
            {"prompt": "a", "chosen": [YES], "rejected": [{"role": "assistant", "content": 3}]},
            "E0616",
            "the template cannot write `rejected` in line 2 of `pairs.jsonl`",
        ),
        (
            {"prompt": "a", "chosen": [YES], "rejected": [USER]},
            "E0616",
            "of `rejected` in line 2 of `pairs.jsonl` nothing is learned",
        ),
        (
            {"prompt": "a", "chosen": "\ud800", "rejected": "b"},
            "E0616",
            "`chosen` in line 2 of `pairs.jsonl` is not Unicode: it has a lone surrogate, \\ud800",
        ),
        (
            {"prompt": "a " * 99, "chosen": "a", "rejected": "b"},
            "E0607",
            "`chosen`, with its prompt, of pair 1 of `pairs.jsonl` has 200 ids, and a row has 96",
        ),
    ],
)
def test_what_is_wrong_with_a_pair_is_said(line: dict[str, Any], code: str, words: str, tmp_path: Path):
    written(tmp_path, CHATML)
    with pytest.raises(Refused) as refused:
        pairs(tmp_path, [PLAIN["texts"], line], 'tokenizer = "own"')
    assert [each.code for each in refused.value.diagnostics] == [code]
    assert words in refused.value.diagnostics[0].message


@pytest.mark.parametrize(
    ("lines", "arguments", "code", "words"),
    [
        (
            [{"prompt": "a", "chosen": "", "rejected": "b"}],
            "",
            "E0616",
            "of `chosen` in line 1 of `pairs.jsonl` nothing is learned",
        ),
        (
            [FORMS["lists"]],
            "",
            "E0616",
            "`chosen` in line 1 of `pairs.jsonl` has messages, and no template writes them",
        ),
        ([FORMS["lists"]], 'tokenizer = "own"', "E0616", "`chosen` in line 1 of `pairs.jsonl` has messages, and no"),
        ([PLAIN["texts"]], "holdout = 60%", "E0604", "`pairs.jsonl` has no pairs to train on: 1 of 1 pair held out"),
    ],
)
def test_what_is_wrong_with_the_data_is_said(
    lines: list[dict[str, Any]], arguments: str, code: str, words: str, tmp_path: Path
):
    written(tmp_path, CHATML)
    (tmp_path / "own" / "chat_template.jinja").unlink()
    with pytest.raises(Refused) as refused:
        pairs(tmp_path, lines, arguments)
    assert [each.code for each in refused.value.diagnostics] == [code]
    assert words in refused.value.diagnostics[0].message


def test_inputs_that_it_does_not_yield_are_named(tmp_path: Path):
    wrong = FILE.replace("rejected_tokens", "tokens").replace("ARGUMENTS", "")
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PLAIN["texts"]))
    plan = prepare(checked(wrong, "m.par"))
    with pytest.raises(Refused, match=r"error\[E0606\]: the data has no input called `tokens`(.|\n)*chosen_tokens"):
        bind(plan.program, plan.train, tmp_path)


def test_long_answers_are_cut_where_that_is_said(tmp_path: Path):
    line = {"prompt": "what? ", "chosen": "a" * 99, "rejected": "b"}
    with pytest.raises(Refused, match=r"of pair 0 of `pairs.jsonl` has 105 ids(.|\n)*`cut = true`"):
        pairs(tmp_path, [line])
    ((chosen, rejected),) = pairs(tmp_path, [line], "cut = true")
    assert chosen == row(list(b"what? " + b"a" * 90), [i >= 6 for i in range(96)])
    assert rejected == row(list(b"what? b"), [False] * 6 + [True])
    with pytest.raises(Refused, match=r"the prompt of pair 0 of `pairs.jsonl` fills a row of 96"):
        pairs(tmp_path, [{**line, "prompt": "a" * 96}], "cut = true")


def test_pairs_at_the_end_are_held_out_and_each_epoch_has_all_others(tmp_path: Path):
    lines = [{"prompt": f"{i:02}", "chosen": "yes", "rejected": "no"} for i in range(20)]
    data = opened(tmp_path, lines, "holdout = 30%", "train.eval=every(1)")
    for rows, names, seen in (
        ([data.batch(step) for step in range(1, 8)], [data.row_names(step) for step in range(1, 8)], range(14)),
        ([data.holdout_batch(i) for i in range(3)], [data.holdout_row_names(i) for i in range(3)], range(14, 20)),
    ):
        for side in SIDES:
            tokens = np.concatenate([batch[f"{side}_tokens"][:, :2] for batch in rows])
            numbers = [int(bytes(row.tolist())) for row in tokens]
            assert sorted(numbers) == list(seen)
            assert [f"pair {number}" for number in numbers] == [name for each in names for name in each]
    assert data.held_out == 6
    assert np.array_equal(data.held_out_rows([4])["rejected_tokens"][0, :4], list(b"18no"))
