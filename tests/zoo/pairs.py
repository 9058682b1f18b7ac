"""Makes specs/zoo/pairs.jsonl, the data of `dpo.par` and its neighbours: `python -m tests.zoo.pairs`.

A question about a thing, a polite answer that is chosen, and a rude one that is rejected.
"""

from __future__ import annotations

import json
from itertools import product
from random import Random

from tests.files import SPECS

PATH = SPECS / "zoo" / "pairs.jsonl"
COUNT = 240
COLORS = ("red", "green", "blue", "white", "black", "yellow")
THINGS = ("key", "book", "cup", "lamp", "coat", "ball", "map", "pen")
QUESTIONS = ("Where is the {}?", "Is the {} here?", "May I have the {}?", "Whose is the {}?", "How old is the {}?")
POLITE = (
    "I think it is on the shelf.",
    "Let me find it for you.",
    "I will gladly have a look.",
    "Thank you for asking.",
)
RUDE = ("Look for yourself.", "What do I know?", "Leave me alone.", "Not that again!", "Who cares?")


def pairs() -> list[dict[str, str]]:
    """Questions, each with both answers."""
    draw = Random(2305)
    asked = list(product(QUESTIONS, COLORS, THINGS))
    return [
        {
            "prompt": question.format(f"{color} {thing}") + "\n",
            "chosen": draw.choice(POLITE),
            "rejected": draw.choice(RUDE),
        }
        for question, color, thing in draw.sample(asked, COUNT)
    ]


if __name__ == "__main__":
    PATH.write_text("".join(json.dumps(pair) + "\n" for pair in pairs()))
