"""What a commit is bound to: whatever a model computes with tells it from others, and whatever else a run does is said.

Every field of every step is changed, and every setting: one that may be another must be listed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve, fields

from partita.dsl.spec import (
    Apply,
    Body,
    Call,
    CallBlock,
    Literal,
    Model,
    Optimizer,
    OptimizerRule,
    Parameter,
    Repeat,
    Sample,
    Scan,
    Step,
    Train,
    Update,
    inner_bodies,
    with_bodies,
)
from partita.dsl.types import Axis, Type
from partita.runtime.checkpoint.identity import changes, digest_of, manifest_of, settings_of
from tests.files import checked
from tests.runtime.checkpoint.runs import plan_of

FILE = """
axis batch = 4, seq = 4, embed = 4, other = embed
block twice(x: [batch, seq, embed], by: [embed]) {
  param w: [embed, other] ~ normal(0.5)
  return x + by * rename(tanh(dot(x, w, over = embed)), other -> embed)
}
model m(x: [batch, seq, embed], y: [batch, embed]) {
  param gain: [embed] ~ ones()
  buffer seen: [embed] ~ zeros()
  sample eps: [batch, seq, embed] ~ normal(0.1)
  let h = 2 * x + eps
  repeat 2 as layer { let h = twice(h, gain) }
  let s = max(h, over = seq)
  scan seq { let s = tanh(s + h * gain) }
  update seen = 0.5 * seen + mean(h, over = [batch, seq])
  loss mse(s, y)
  metric size = mean(h * h)
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""

# What numbers do not depend on; `initial` is how a parameter begins, which is not in what is saved.
NO_MATTER: Mapping[type, set[str]] = {
    Apply: {"name", "span"},
    Parameter: {"initial", "span"},
    Sample: {"span"},
    CallBlock: {"block", "span"},
    Repeat: {"name", "names", "span"},
    Scan: {"names", "span"},
    Update: {"span"},
    Body: {"types"},
    Model: {"loss_span", "span", "nodes", "outputs", "answering", "operations", "formulas"},
}
# Settings that a run may change without a word: what it does besides computing updates, and how.
MAY_CHANGE = {"steps", "compile", "graphs", "eval", "checkpoint", "on_bad_step", "validate"}
MARKS = {"mixed", "float8", "dense", "spans", "span"}  # no entries of a train block


def other(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case None:
            return 0.5
        case Type():
            return value.with_dtype("f64" if value.dtype != "f64" else "f32")
        case Axis():
            return evolve(value, name=f"{value.name}x")
        case Literal():
            return Literal(other(value.value))
        case Call():
            return evolve(value, name=other(value.name))
        case Optimizer():
            return evolve(value, rules=other(value.rules))
        case OptimizerRule():
            return evolve(value, call=other(value.call))
        case Body():
            return evolve(value, results=other(value.results))
        case Update():
            return evolve(value, value=other(value.value))
        case Mapping():
            return {**value, "x": 1}
        case tuple():
            return (*value[:-1], other(value[-1])) if value else (0,)
    raise AssertionError(value)


def bodies(body: Body, around: Any = lambda body: body) -> Iterator[tuple[Body, Any]]:
    """Each body, and how the whole is made of another one in its place."""
    yield body, around
    for i, step in enumerate(body.steps):
        for inner in inner_bodies(step):
            yield from bodies(
                inner,
                lambda new, i=i, step=step, inner=inner: around(
                    with_step(body, i, with_bodies(step, lambda each: new if each is inner else each))
                ),
            )


def with_step(body: Body, i: int, step: Step) -> Body:
    return evolve(body, steps=(*body.steps[:i], step, *body.steps[i + 1 :]))


def others(model: Model) -> Iterator[tuple[str, Model]]:
    """The model with another value of each field that matters, one at a time."""

    def changed(thing: Any) -> Iterator[tuple[str, Any]]:
        for field in fields(type(thing)):
            if field.name not in NO_MATTER[type(thing)] and (type(thing), field.name) != (Body, "steps"):
                value = getattr(thing, field.name)
                what = f"{type(thing).__name__}.{field.name}"
                yield what, evolve(thing, **{field.name: other(value)})
                if isinstance(value, tuple) and len(set(value)) > 1:
                    yield what, evolve(thing, **{field.name: value[::-1]})

    yield from changed(model)
    for body, around in bodies(model.body):
        for what, new in changed(body):
            if body.updates or what != "Body.updates":
                yield what, evolve(model, body=around(new))
        for i, step in enumerate(body.steps):
            for what, new in changed(step):
                yield what, evolve(model, body=around(with_step(body, i, new)))
            operands = getattr(step, "operands", ())
            if operands and isinstance(operands[0], int):
                number = evolve(step, operands=(Literal(operands[0]), *operands[1:]))
                yield "a number in place of a value", evolve(model, body=around(with_step(body, i, number)))


def test_whatever_a_model_computes_with_makes_it_another_one():
    model, _ = checked(FILE, "m.par").trained
    own = digest_of(model)
    found = list(others(model))
    assert [what for what, each in found if digest_of(each) == own] == []
    matter = {
        f"{kind.__name__}.{field.name}"
        for kind, rest in NO_MATTER.items()
        for field in fields(kind)
        if field.name not in rest
    }
    assert {what for what, _ in found} | {"Body.steps", "Update.buffer", "Update.value", "Update.after"} >= matter


def test_whatever_a_run_does_otherwise_is_said():
    plan = plan_of("train.steps=1", "train.ema=0.9", text=FILE)
    model, train = plan.spec.trained
    manifest = manifest_of(plan.spec, plan.program)
    for field in fields(Train):
        if field.name in MARKS:
            continue
        value = getattr(train, field.name)
        new = Call("delayed", {"steps": 1}) if field.name == "sync" else other(value)
        settings = settings_of(evolve(train, **{field.name: new}), plan.program, model)
        wanted = evolve(manifest, settings=settings)
        said = [] if field.name in MAY_CHANGE else [field.name]
        for before, now in ((manifest, wanted), (wanted, manifest)):
            assert [line.split()[0] for line in changes(before, now)] == said, field.name
