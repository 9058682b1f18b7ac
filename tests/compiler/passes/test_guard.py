"""Ids that cannot leave the axis that they index are known by their bounds, to the last one; others are guarded."""

from __future__ import annotations

import pytest

from partita.compiler.pipeline import compile_spec
from tests.files import checked

TEXT = """
axis batch = 4, vocab = 5, embed = 3, few = 4
model m(x: i64[batch], y: i64[batch]) {{
  param table: [vocab, embed] ~ ones()
  param short: [few, embed] ~ ones()
  loss mean(embedding({ids}, table, over = vocab)) + mean(embedding(y, short, over = few))
}}
train {{ data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }}
"""


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("ids", "guarded"),
    [
        ("minimum(maximum(x, 0), size(vocab) - 1)", False),
        ("minimum(maximum(x, 0), size(vocab))", True),
        ("minimum(maximum(x, 0 - 1), size(vocab) - 1)", True),
        ("maximum(minimum(x, size(vocab) - 1), 0)", False),
        ("y + 1", False),
        ("y + 2", True),
        ("y - 1", True),
        ("4 - y", False),
        ("3 - y", False),
        ("2 - y", True),
        ("abs(y - 4)", False),
        ("abs(y - 3) + 2", True),
        ("-(y - 3)", False),
        ("iota(batch) + 1", False),
        ("iota(batch) + 2", True),
        ("iota(batch) * 2", True),
        ("cast(y > 1, i64) * 4", False),
        ("cast(y > 1, i64) * 5", True),
        ("where(y > 1, y, 4)", False),
        ("where(y > 1, y, 5)", True),
        ("max(expand(y, few), over = few) + 1", False),
        ("minimum(sum(expand(y, few), over = few), 4)", False),
        ("sum(expand(cast(y > 1, i64), few), over = few)", False),
        ("sum(expand(cast(y > 1, i64), vocab), over = vocab)", True),
        # A product of two numbers that a dtype holds wraps around where that does not hold theirs.
        ("minimum(cast(y, i32) * 600000000, 4)", False),
        ("minimum(cast(y, i32) * 800000000, 4)", True),
    ],
)
def test_bounds_are_exact(ids: str, guarded: bool):
    graph = compile_spec(checked(TEXT.format(ids=ids), "ids.par")).placed
    assert bool(graph.guards) is guarded


@pytest.mark.parametrize(
    ("loss", "guarded"),
    [
        ("mean(embedding(cast(z, i64), table, over = embed))", True),
        ("cross_entropy(table, cast(z, i64), over = embed, ignore = -1)", True),
        ("cross_entropy(table, y, over = embed, ignore = -1)", False),
        (
            "cross_entropy(table, y, over = embed, ignore = -1) + cross_entropy(table, y, over = embed, ignore = -2)",
            True,
        ),
    ],
)
def test_only_what_the_data_is_checked_for_goes_unguarded(loss: str, guarded: bool):
    """Floats are not, and what one lookup ignores may be what another takes for an id."""
    text = f"""
    axis batch = 4, vocab = 4, embed = 3
    model m(z: [vocab], y: i64[vocab]) {{
      param table: [vocab, embed] ~ ones()
      loss {loss}
    }}
    train {{ data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }}
    """
    graph = compile_spec(checked(text, "floats.par")).placed
    assert bool(graph.guards) is guarded
    assert all(each.limit is None and not each.ignored for each in graph.inputs if each.name == "z")


def test_ids_that_are_joined_to_others_index_as_these_do():
    text = """
    axis batch = 4, one = 1, two = 2, vocab = 4, embed = 3
    model m(y: i64[batch]) {
      param table: [vocab, embed] ~ ones()
      let ids = concat(expand(y, one), zeros_like(expand(y, one)), [one, one] -> two)
      let logits = dot(embedding(maximum(ids, 0), table, over = vocab), table, over = embed)
      loss cross_entropy(logits, ids, over = vocab, ignore = -1)
    }
    train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }
    """
    (y,) = compile_spec(checked(text, "joined.par")).placed.inputs
    assert (str(y.limit), y.ignored) == ("vocab=4", (-1,))


def test_what_counts_ids_has_names_of_its_own():
    text = TEXT.replace("param short", "param less, greater_equal: [few, embed] ~ ones()\n  param short")
    text = text.format(ids="y + 2").replace("loss ", "loss mean(less + greater_equal) + ")
    graph = compile_spec(checked(text, "names.par")).placed
    assert len(graph.names) == len(set(graph.names))
