"""A program that is right, to be broken: what the tests of the certificate share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from attrs import evolve

from partita.compiler.graph import Node, Value
from partita.compiler.ops.communication import Send
from partita.compiler.passes.cut import StageGraph, message_of
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import validate
from partita.dsl.diagnostic import Diagnostic
from tests.compiler.verify.changes import Place, places
from tests.files import checked

Edit = Callable[[Node], Sequence[Node]]

FILE = """axis batch = 8, seq = 4, embed = 8, ffn = 12, vocab = 10
block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ normal(0.5)
  param down: [ffn, embed] ~ normal(0.5)
  let h = tanh(dot(rms_norm(x, over = embed), up, over = embed))
  return x + dot(h, down, over = ffn)
}
model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param wte: [vocab, embed] ~ normal(0.5)
  let x = dropout(embedding(tokens, wte, over = vocab), rate = 0.1)
  repeat 4 as layer { let x = mlp(x) }
  let logits = dot(x, wte, over = embed)
  loss cross_entropy(logits, targets, over = vocab)
  metric accuracy = accuracy(logits, targets, over = vocab)
}
mesh cluster(pipe = 2, data = 2, tensor = 2)
layout parts on cluster {
  shard batch -> data
  shard ffn, vocab -> tensor
  shard seq -> tensor
  shard state -> data
  stage layer -> pipe
}
schedule s = one_f_one_b(microbatches = 4)
train { data = random() optimizer = adamw(lr = 1e-3) steps = 1 clip = 1.0 }
"""


def compiled(text: str = FILE) -> Compilation:
    spec = checked(text, "part.par")
    return compile_spec(spec)


@cache
def program() -> Compilation:
    """The program that tests break; it is frozen, so that one will do."""
    return compiled()


@cache
def gathering() -> Compilation:
    """A program that gathers a parameter once it is updated, since its state is split further than itself."""
    return compiled(FILE.replace("ffn, vocab -> tensor", "ffn -> tensor shard param -> tensor"))


def the(state: Compilation, name: str) -> tuple[Place, Node]:
    """The node that makes a value, by the value's name, and where it stands."""
    return next(
        (place, node) for place in places(state) for node in place.nodes for v in node.outputs if v.name == name
    )


def output(node: Node) -> Value:
    return node.outputs[0]


def problem(state: Compilation) -> Diagnostic:
    """The first problem of a program that is not certified."""
    found = validate(state)
    assert not found.passed
    first = found.problems[0]
    assert first.code == "E0701"
    assert first.help is not None
    return first


def staged(stage: StageGraph):
    """The partitioned program with another stage of that number."""
    partitioned = program().partitioned
    stages = tuple(stage if each.index == stage.index else each for each in partitioned.stages)
    sends = [node for each in stages for node in each.nodes if isinstance(node.op, Send)]
    return evolve(partitioned, stages=stages, messages=tuple(message_of(node) for node in sends))
