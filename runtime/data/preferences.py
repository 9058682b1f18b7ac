"""`preferences(glob, tokenizer =, …)`: pairs of answers to a prompt, one a line, of which one is preferred.

A line is `{"prompt": …, "chosen": …, "rejected": …}`, each a text or a list of messages; or without `prompt`, where the
prompt is what both answers begin with.
"""

from __future__ import annotations

from partita.dsl.config.builtins import HOLDOUT, Flag, Setting, Text
from partita.runtime.data.chat import with_template
from partita.runtime.data.files import END, TOKENIZER
from partita.runtime.data.registry import Source, opened_by, register

register(
    Source(
        "preferences",
        (Setting("glob", Text()), TOKENIZER, END, Setting("cut", Flag(), False), HOLDOUT),
        example='preferences("pairs.jsonl", tokenizer = "qwen3")',
        open=opened_by("pairs", "open_pairs"),
        textual=True,
        endings=(".jsonl",),
        files=with_template,
    )
)
