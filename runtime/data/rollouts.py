"""`rollouts(glob, reward, samples, tokens, …)`: answers to prompts, which the model itself writes while it trains.

A line is `{"prompt": "…", …}`, or has messages as its prompt; its other fields are for the reward, a Python function.
What the dataset yields are prompts, a pure function of (seed, step); the run has them answered
(`partita.runtime.inference.rollouts`).
"""

from __future__ import annotations

from pathlib import Path

from partita.dsl.config.builtins import COUNT, HOLDOUT, PythonName, Number, Setting, Text
from partita.dsl.spec import Call
from partita.runtime.data.chat import template_files
from partita.runtime.data.files import END, TOKENIZER, matched, with_tokenizer
from partita.runtime.data.registry import Source, opened_by, register

GROUP = Number(integer=True, minimum=2, maximum=1 << 20)


def _files(call: Call, root: Path) -> list[tuple[str, Path]]:
    own, tokenizer = with_tokenizer(matched("glob"))(call, root), call.arguments["tokenizer"]
    return own if tokenizer is None else [*own, *template_files(tokenizer, root, call)]


register(
    Source(
        "rollouts",
        (
            Setting("glob", Text()),
            Setting("reward", PythonName()),
            Setting("samples", GROUP, 8),
            Setting("tokens", COUNT, 256),
            Setting("reuse", COUNT, 1),
            Setting("temperature", Number(exclusive_minimum=0), 1.0),
            TOKENIZER,
            END,
            HOLDOUT,
        ),
        example='rollouts("prompts.jsonl", reward = "reward.py:score")',
        open=opened_by("prompts", "open_prompts"),
        textual=True,
        endings=(".jsonl", ".json"),
        files=_files,
    )
)
