"""Makes what `sft.par` reads: `python -m tests.zoo.chats`. Conversations about animals, specs/zoo/chats.jsonl, and a
tokenizer whose tokens are bytes and the marks of ChatML, specs/zoo/letters.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.files import SPECS

PATH, LETTERS = SPECS / "zoo" / "chats.jsonl", SPECS / "zoo" / "letters"
MARKS = ("<|end|>", "<|from|>", "<|stop|>")
TEMPLATE = (
    "{% for each in messages %}<|from|>{{ each.role }}\n{{ each.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|from|>assistant\n{% endif %}"
)
LEGS = {"cat": "four", "duck": "two", "bee": "six", "spider": "eight", "snake": "no"}
SOUNDS = {"cat": "meow", "duck": "quack", "bee": "buzz", "spider": "nothing", "snake": "hiss"}
COUNT = 120


def chats() -> list[dict[str, Any]]:
    """Questions about an animal, some after an instruction, and answers."""
    draw = Random(1706)
    made = []
    for _ in range(COUNT):
        name = draw.choice(sorted(LEGS))
        turns = [("user", f"Legs of a {name}?"), ("assistant", f"It has {LEGS[name]} legs.")]
        if draw.random() < 0.5:
            turns += [("user", "And what does it say?"), ("assistant", f"It says {SOUNDS[name]}.")]
        if draw.random() < 0.3:
            turns = [("system", "Be brief."), *((role, text.removeprefix("It has ")) for role, text in turns)]
        made.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return made


def write_letters(folder: Path) -> None:
    """A tokenizer as `save_pretrained` writes it, without merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*MARKS, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=MARKS[0], eos_token=MARKS[2])
    fast.add_special_tokens({"additional_special_tokens": [MARKS[1]]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


if __name__ == "__main__":
    PATH.write_text("".join(json.dumps(chat) + "\n" for chat in chats()))
    write_letters(LETTERS)
