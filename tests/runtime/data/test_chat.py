"""`chat`: ids and what of them is learned, beside what transformers makes of the same conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.runtime.data.binding import bind
from partita.runtime.rank import prepare
from tests.files import checked

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"]
SPECIAL += ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>", "[INST]", "[/INST]", "<s>", "</s>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "<bos>"]

# As published, but for tools; and what the assistant says as it would be marked.
CHATML = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' }}OPEN{{ message.content + '<|im_end|>' }}CLOSE{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "OPEN{{ message['content'] | trim + '<|eot_id|>' }}CLOSE{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PHI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "OPEN{{ message['content'] + '<|end|>' }}CLOSE{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "OPEN{{ ' ' + message['content'] + eos_token }}CLOSE{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' }}OPEN{{ message['content'] | trim + '<end_of_turn>' }}CLOSE{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "phi": PHI, "mistral": MISTRAL, "gemma": GEMMA}

CHATS = [
    [("user", "what is two and two?"), ("assistant", "it is four.")],
    [("user", "say hello"), ("assistant", "hello\nthere"), ("user", "and now?"), ("assistant", "good bye, <end>")],
    [("user", "  spaces "), ("assistant", "  kept or not  ")],
]
FILE = """axis batch = 2, seq = 96, embed = 4, vocab = 400
model lm(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(1.0)
  loss cross_entropy(dot(embedding(tokens, table, over = vocab), table, over = embed), targets, over = vocab,
                     ignore = -1)
}
train { data = chat("chats.jsonl", tokenizer = "own")  optimizer = sgd(lr = 0.1)  steps = 2 }
"""


def written(folder: Path, template: str, **special: str) -> Any:
    """A tokenizer with a template, saved; and one of transformers, whose template marks what the assistant says."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL)
    inner.train_from_iterator(["what is it and is it four", "hello there and now"] * 9, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>"} | special
    (folder / "own").mkdir()
    inner.save(str(folder / "own" / "tokenizer.json"))
    (folder / "own" / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "own" / "chat_template.jinja").write_text(template.replace("OPEN", "").replace("CLOSE", ""))
    marked = template.replace("OPEN", "{% if message['role'] == 'assistant' %}{% generation %}")
    body = marked.partition("{% generation %}")[2].partition("CLOSE")[0]
    marked = marked.replace("CLOSE", "{% endgeneration %}{% else %}" + body + "{% endif %}")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=marked, **special)


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def rows(folder: Path, lines: list[dict[str, Any]], *overrides: str) -> dict[tuple[int, ...], list[int]]:
    """Of each conversation its ids, and of these the targets, by all rows."""
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plan = prepare(checked(FILE, "m.par", overrides))
    data = bind(plan.program, plan.train, folder).dataset
    found: dict[tuple[int, ...], list[int]] = {}
    rows = data.training
    for row in range(len(rows)):
        batch, start = data._filled(rows, np.array([row])), 0
        for piece in range(rows.first[row], rows.first[row + 1]):
            end = start + int(rows.lengths[piece])
            found[tuple(batch["tokens"][0, start:end].tolist())] = batch["targets"][0, start:end].tolist()
            start = end
    return found


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_what_is_learned_are_those_of_transformers(name: str, marked: bool, tmp_path: Path):
    theirs = written(tmp_path, TEMPLATES[name])
    if marked:
        (tmp_path / "own" / "chat_template.jinja").write_text(theirs.chat_template)
    found = rows(tmp_path, [{"messages": messages(chat)} for chat in CHATS])
    assert len(found) == len(CHATS)
    for chat in CHATS:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        expected = theirs.apply_chat_template(messages(chat), **options)
        ids, mask = expected["input_ids"], expected["assistant_masks"]
        assert any(mask)
        targets = [each if learned else -1 for each, learned in zip(ids[1:], mask[1:], strict=True)]
        assert found[tuple(ids)] == [*targets, -1], theirs.decode(ids)


FORMS = {
    "messages": {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
    "alpaca": {"instruction": "a?", "input": "", "output": "b"},
}


def test_forms_that_mean_the_same_are_the_same(tmp_path: Path):
    written(tmp_path, CHATML)
    assert len({str(rows(tmp_path, [form])) for form in FORMS.values()}) == 1


@pytest.mark.parametrize("behind", [False, True])
def test_a_turn_that_is_written_otherwise_later_is_not_learned(behind: bool, tmp_path: Path):
    """As templates leave out the thoughts of all turns but the last."""
    thought = "{% if loop.last and message.role == 'assistant' %}{{ ' aha ' }}{% endif %}"
    content = "{{ message.content }}"
    both = f"{content}{thought}" if behind else f"{thought}{content}"
    theirs = written(tmp_path, CHATML.replace("{{ message.content + '<|im_end|>' }}", both + "{{ '<|im_end|>' }}"))
    ids = theirs.apply_chat_template(messages(CHATS[1]), tokenize=True, return_dict=True)["input_ids"]
    targets = rows(tmp_path, [{"messages": messages(CHATS[1])}])[tuple(ids)]
    learned = theirs.decode([each for each in targets if each >= 0])
    assert learned == ("good bye, <end> aha <|im_end|>" if behind else " aha good bye, <end><|im_end|>")


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ({"text": "hello"}, "E0616", "line 1 of `chats.jsonl` is no conversation"),
        ({"messages": "hello"}, "E0616", "`messages` in line 1 of `chats.jsonl` is a string, not a list of messages"),
        ({"messages": [{"content": "a"}]}, "E0616", "a message in line 1 of `chats.jsonl` has no `role`"),
        (
            {"conversations": [{"from": "human"}]},
            "E0616",
            "a turn in line 1 of `chats.jsonl` has no `from` and `value`",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "E0616",
            "line 1 of `chats.jsonl` has nothing that is learned",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "E0616", "the template cannot write line 1 of `chats.jsonl`"),
        ({"instruction": "a " * 99, "output": "b"}, "E0607", "ids, and a row has 96"),
    ],
)
def test_what_is_wrong_with_a_conversation_is_said(line: dict[str, Any], code: str, words: str, tmp_path: Path):
    written(tmp_path, CHATML)
    with pytest.raises(Refused) as refused:
        rows(tmp_path, [line])
    assert [each.code for each in refused.value.diagnostics] == [code]
    assert words in refused.value.diagnostics[0].message


def test_long_conversations_are_cut_where_that_is_said(tmp_path: Path):
    written(tmp_path, CHATML)
    lines = [{"instruction": "a", "output": "b " * 99}]
    with pytest.raises(Refused, match=r"conversation 0 of `chats.jsonl` has \d+ ids(.|\n)*`cut = true`"):
        rows(tmp_path, lines)
    assert sum(each >= 0 for targets in rows(tmp_path, lines, "train.data.cut=true").values() for each in targets) > 96


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path):
    written(tmp_path, CHATML)
    (tmp_path / "own" / "chat_template.jinja").unlink()
    with pytest.raises(Refused, match=r"error\[E0619\]: `own` has no template for chats"):
        rows(tmp_path, [FORMS["messages"]])


def test_conversations_that_see_each_other_are_told_of():
    """As of other packed rows (W0203)."""
    attending = FILE.replace(
        "  loss cross_entropy(dot(embedding(tokens, table, over = vocab), table",
        "  let x = embedding(tokens, table, over = vocab)\n"
        "  let y = attend(x, x, x, over = seq, along = embed, causal = true)\n  loss cross_entropy(dot(x + y, table",
    )
    _, diagnostics = load_text(attending)
    assert [each.code for each in diagnostics] == ["W0203"]
