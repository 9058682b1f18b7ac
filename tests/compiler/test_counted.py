"""What the throughput of a model counts: tokens where it has some, and rows where it has none."""

from __future__ import annotations

import pytest

from partita.compiler.pipeline import compile_spec
from tests.files import checked

AXES = "axis batch = 4, seq = 8, height = 6, width = 6, color = 3, embed = 2, classes = 5, vocab = 7\n"
TRAIN = "train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }\n"
MODELS = {
    "a language model": (
        """model m(ids: i64[batch, seq], targets: i64[batch, seq], weights: [batch, seq]) {
          param wte: [vocab, embed] ~ normal(0.1)
          let logits = dot(embedding(ids, wte, over = vocab), wte, over = embed)
          loss mean(cross_entropy(logits, targets, over = vocab) * weights)
        }""",
        (32, "tokens"),
    ),
    "classes of images": (
        """model m(image: [batch, height, width, color], label: i64[batch]) {
          param w: [color, classes] ~ normal(0.1)
          loss cross_entropy(mean(dot(image, w, over = color), over = [height, width]), label, over = classes)
        }""",
        (4, "rows"),
    ),
    "a class for each place of an image": (
        """model m(image: [batch, height, width, color], label: i64[batch, height, width]) {
          param w: [color, classes] ~ normal(0.1)
          loss cross_entropy(dot(image, w, over = color), label, over = classes)
        }""",
        (4, "rows"),
    ),
    "numbers": (
        """model m(x: [batch, embed], y: [batch]) {
          param w: [embed] ~ normal(0.1)
          loss mean((dot(x, w, over = embed) - y) * (dot(x, w, over = embed) - y))
        }""",
        (4, "rows"),
    ),
    "ids of two kinds": (
        """model m(user: i64[batch], item: i64[batch]) {
          param users: [classes, embed] ~ normal(0.1)
          param items: [vocab, embed] ~ normal(0.1)
          let u = embedding(user, users, over = classes)
          loss mean(dot(u, embedding(item, items, over = vocab), over = embed))
        }""",
        (4, "rows"),
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_counted_where_there_are_some(kind: str) -> None:
    model, counted = MODELS[kind]
    assert compile_spec(checked(f"{AXES}{model}\n{TRAIN}", "m.par")).plan.counted == counted
