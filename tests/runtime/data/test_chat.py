"""`chat`: ids and what of them is learned, beside what transformers makes of the same conversations.

`templates` are those that the models publish, as the packages trl 1.16.0 and (Mistral's) llama-cpp-python 0.3.36 have
them; SmolLM 3's is written after the one on its page.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import frozen

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.runtime.data.binding import Bound, bind
from partita.runtime.rank import prepare
from tests.files import checked

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"]
SPECIAL += ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>", "[INST]", "[/INST]", "<s>", "</s>"]
SPECIAL += [
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|call|>",
]
SPECIAL += ["[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]

CHATML = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' }}{{ message.content + '<|im_end|>' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@frozen
class Published:
    """Where a template writes a message, behind `before`; what of an assistant's is the prompt to answer, and how much
    follows the end of the turn; which turns it writes as alone; and whether it writes system turns, and calls of tools.
    """

    before: str
    head: str
    tail: str = "0"
    which: str = "true"
    system: bool = True
    tools: bool = True


MESSAGES = "{%- for message in messages %}"
LOOP = "{%- for message in loop_messages -%}"
HEADER = "'<|start_header_id|>assistant<|end_header_id|>\n\n'"
TURN = "'<|im_start|>assistant\n'"
THOUGHT = f"({TURN} + ('<think>\n\n</think>\n\n' if enable_thinking is false else ''))"
THINKS = "loop.index0 > ns.last_query_index and (loop.last or message.reasoning_content)"
ENDS = "0 if loop.last or message.tool_calls else '<|end|>'|length"
PUBLISHED = {
    "llama3": Published("{% endif %}", HEADER, tools=False),
    "llama3_1": Published(MESSAGES, HEADER),
    "qwen2_5": Published(MESSAGES, TURN, "1"),
    "qwen3": Published(MESSAGES, THOUGHT, "1", THINKS),
    "mistral": Published("{%- for message in loop_messages %}", "''", system=False),
    "gemma3": Published(LOOP, "'<start_of_turn>model\n'", "1", tools=False),
    "phi3": Published("{% for message in messages %}", "'<|assistant|>\n'", "1", tools=False),
    "gpt_oss": Published(LOOP, "'<|start|>assistant'", ENDS),
    "smollm3": None,  # it has marks
}

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "what is two and two?"}, {"role": "assistant", "content": "it is four."}],
    [
        {"role": "user", "content": "say hello"},
        {"role": "assistant", "content": "hello\nthere"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "good bye, <end>"},
    ],
    [{"role": "user", "content": "  spaces "}, {"role": "assistant", "content": "  kept or not  "}],
]
HURRIED = [{"role": "user", "content": "think?"}, {"role": "assistant", "content": "no"}]
SYSTEM = [{"role": "system", "content": "be brief"}, *CHATS[1]]
CALL = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLED = [
    CHATS[0][0],
    {"role": "assistant", "content": "", "reasoning_content": "a sum", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "4", "tool_call_id": "123456789"},
    CHATS[0][1],
]
INTEGER = {"type": "integer", "description": "a term"}
PARAMETERS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
FILE = """axis batch = 2, seq = 2_048, embed = 4, vocab = 400
model lm(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(1.0)
  loss cross_entropy(dot(embedding(tokens, table, over = vocab), table, over = embed), targets, over = vocab,
                     ignore = -1)
}
train { data = chat("chats.jsonl", tokenizer = "own")  optimizer = sgd(lr = 0.1)  steps = 2 }
"""


def written(folder: Path, template: str, marked: str | None = None, **special: str) -> Any:
    """A tokenizer with a template, saved; and one of transformers, with the same or another."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL)
    inner.train_from_iterator(["what is it and is it four", "hello there and now"] * 9, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>"} | special
    (folder / "own").mkdir()
    inner.save(str(folder / "own" / "tokenizer.json"))
    (folder / "own" / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "own" / "chat_template.jinja").write_text(template)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=marked or template, **special)


def published(name: str) -> tuple[str, str]:
    """A template as published, and the same with marks around what the assistant says, as a text within the text."""
    template, how = (TEMPLATES / f"{name}.jinja").read_text(), PUBLISHED[name]
    if how is None:
        return template, template
    *_, end = re.finditer("{%-? endfor", template)
    start = template.rindex(how.before, 0, end.start()) + len(how.before)
    first, last = f"{how.head}|length", f"body|length - ({how.tail})"
    marks = (
        f"{{%- set body %}}{template[start : end.start()]}{{%- endset %}}"
        f"{{%- if message.role == 'assistant' and {how.which} %}}{{{{- body[:{first}] }}}}{{% generation %}}"
        f"{{{{ body[{first}:{last}] }}}}{{% endgeneration %}}{{{{ body[{last}:] }}}}"
        "{%- else %}{{- body }}{%- endif %}"
    )
    return template, template[:start] + marks + template[end.start() :]


def opened(folder: Path, lines: list[dict[str, Any]], *overrides: str) -> Bound:
    """The data of some lines."""
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plan = prepare(checked(FILE, "m.par", overrides))
    return bind(plan.program, plan.train, folder)


def rows(folder: Path, lines: list[dict[str, Any]], *overrides: str) -> dict[tuple[int, ...], list[int]]:
    """Of each conversation its ids, and of these the targets, by all rows."""
    data = opened(folder, lines, *overrides).dataset
    found: dict[tuple[int, ...], list[int]] = {}
    rows = data.training
    for row in range(len(rows)):
        batch, start = data.filled(rows, np.array([row])), 0
        for piece in range(rows.first[row], rows.first[row + 1]):
            end = start + int(rows.lengths[piece])
            found[tuple(batch["tokens"][0, start:end].tolist())] = batch["targets"][0, start:end].tolist()
            start = end
    return found


class Day(datetime):
    """The day that conversations are of."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(2025, 1, 1)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_and_what_is_learned_are_those_of_transformers(
    name: str, marked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    how, texts = PUBLISHED[name], published(name)
    theirs = written(tmp_path, texts[marked], texts[1])
    lines: list[dict[str, Any]] = [{"messages": chat} for chat in CHATS]
    lines += [{"messages": SYSTEM}] if how is None or how.system else []
    called = [{**each} for each in CALLED]
    if name == "gpt_oss":  # it leaves thoughts out of what an answer is to
        del called[1]["reasoning_content"]
    lines += [{"messages": called, "tools": [TOOL]}] if how is None or how.tools else []
    lines += [{"messages": HURRIED, "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}}]
    found = rows(tmp_path, lines)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Day)  # of theirs alone
    for line in lines:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        options |= {"tools": line.get("tools"), **line.get("chat_template_kwargs", {})}
        expected = theirs.apply_chat_template(line["messages"], **options)
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
    ids = theirs.apply_chat_template(CHATS[1], tokenize=True, return_dict=True)["input_ids"]
    targets = rows(tmp_path, [{"messages": CHATS[1]}])[tuple(ids)]
    learned = theirs.decode([each for each in targets if each >= 0])
    assert learned == ("good bye, <end> aha <|im_end|>" if behind else " aha good bye, <end><|im_end|>")


def test_turns_that_are_not_learned_are_shown(tmp_path: Path):
    """Qwen 3 writes an empty thought in the last turn alone, and so all others otherwise than as the last."""
    written(tmp_path, published("qwen3")[0])
    assert list(opened(tmp_path, [{"messages": CHATS[0]}]).warnings) == []
    (warning,) = opened(tmp_path, [{"messages": chat} for chat in CHATS]).warnings
    assert warning.code == "W0609"
    assert warning.message.startswith("1 of 3 conversations in `chats.jsonl` have turns of the assistant that are not")
    assert warning.notes == (
        r"conversation 1: <|im_start|>user\nsay hello<|im_end|>\n<|im_start|>assistant\nhello\nthere<|im_end|>\n"
        r"<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
        r"⟦<think>\n\n</think>\n\ngood bye, <end><|im_end|>⟧\n",
    )


SAYS = "{% for each in messages %}{{ each.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "part", "shown"),
    [
        (f"{{% generation %}}{SAYS}{{% endgeneration %}}", "everything", "what⟦ is two and two?it is four.⟧"),
        (f"{SAYS}{{% generation %}}{{% endgeneration %}}", "nothing", "what is two and two?it is four."),
        (f"{{{{ messages | length }}}}{SAYS}", "nothing", "2what is two and two?it is four."),
    ],
)
def test_conversations_of_which_everything_or_nothing_is_learned_are_shown(
    template: str, part: str, shown: str, tmp_path: Path
):
    written(tmp_path, template)
    with pytest.raises(Refused) as refused:
        rows(tmp_path, [{"messages": CHATS[0]}])
    (found,) = refused.value.diagnostics
    assert (found.code, found.message) == ("E0616", f"of line 1 of `chats.jsonl` {part} is learned")
    assert found.notes == (shown,)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ({"messages": CHATS[0], "chat_template_kwargs": [1]}, "E0616", "in line 1 of `chats.jsonl` is a list, not an"),
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
            "of line 1 of `chats.jsonl` nothing is learned",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "E0616", "line 1 of `chats.jsonl` is not Unicode"),
        ({"messages": [{"role": "user", "content": 3}]}, "E0616", "the template cannot write line 1 of `chats.jsonl`"),
        ({"instruction": "a " * 2100, "output": "b"}, "E0607", "ids, and a row has 2,048"),
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
    lines = [{"instruction": "a", "output": "b " * 2100}]
    with pytest.raises(Refused, match=r"conversation 0 of `chats.jsonl` has [\d,]+ ids(.|\n)*`cut = true`"):
        rows(tmp_path, lines)
    assert (
        sum(each >= 0 for targets in rows(tmp_path, lines, "train.data.cut=true").values() for each in targets) > 2048
    )


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
    _, diagnostics = load_text(attending, overrides=("train.data.pack=true",))
    assert [each.code for each in diagnostics] == ["W0203"]
    assert load_text(attending)[1] == ()  # one in a row


def test_rows_have_one_conversation_or_are_packed(tmp_path: Path):
    written(tmp_path, CHATML)
    lines = [FORMS["messages"]] * 3
    alone, packed = (opened(tmp_path, lines, *more).dataset.training for more in ((), ("train.data.pack=true",)))
    assert alone.first.tolist() == [0, 1, 2, 3]
    assert packed.first.tolist() == [0, 3]
