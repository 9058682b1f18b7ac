"""`rollouts(glob, reward, samples, tokens, …)`: answers to prompts, which the model itself writes while it trains.

A line is `{"prompt": "…", …}`, or has messages as its prompt; its other fields are for the reward, a Python function.
What the dataset yields are prompts, a pure function of (seed, step); the run has them answered
(`partita.runtime.inference.rollouts`).
"""

from __future__ import annotations

from partita.dsl.config.builtins import COUNT, HOLDOUT, Number, PythonName, Setting, Text
from partita.runtime.data.chat import with_template
from partita.runtime.data.files import END, TOKENIZER
from partita.runtime.data.registry import Source, opened_by, register

GROUP = Number(integer=True, minimum=2, maximum=1 << 20)


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
        files=with_template,
    )
)
