"""Calls of everything that can be called, with arguments of every kind in every place: checked, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.dsl.config.builtins import (
    CHECKPOINT,
    DATA,
    DEVICES,
    EVALUATION,
    LEARNING_RATES,
    LINKS,
    MEASURES,
    OPTIMIZERS,
)
from partita.dsl.config.builtins import SCHEDULES as SIGNATURES
from partita.dsl.functions.signatures import FUNCTIONS
from tests.fuzz import targets

many = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))

MODEL = """
axis a = 4, c = 4, d = 3, ac = 16, z = 1
block two(x: [a, c]) {{ return x, sum(x) }}
model net(x: [a, c], y: [a, c], i: i64[a], b: bool[a, c], s: [], one: [z]) {{
  param w: [c] ~ normal(0.5)
  let q = {call}
  loss mean(x * w) + {used}
}}
"""
TENSORS = ["x", "y", "i", "b", "s", "one", "w", "two(x)", "iota(c)", "x < y", "sum(x)", "cast(x, f64)"]
NUMBERS = ["0", "1", "-1", "2.5", "1e300", "1e-300", "10%", "size(a)", "true", "1 / 3"]
AXES = ["a", "c", "d", "z", "nothing", "[a, c]", "[]", "[a, a]", "[x]"]
ARROWS = ["a -> c", "c -> d", "a -> [c, d]", "[a, c] -> ac", "[] -> a", "a -> []", "1 -> 2", "a -> a", "[a -> c]"]
ANYTHING = [*TENSORS, *NUMBERS, *AXES, *ARROWS, "f32", "bool", '"text"', "(x)", "-x", "[1, 2]"]
FITTING = {
    "tensor": TENSORS,
    "tensors": TENSORS,
    "operand": [*TENSORS, *NUMBERS],
    "axis": AXES,
    "axes": AXES,
    "number": NUMBERS,
    "numbers": [*NUMBERS, "[]", "[1, 2]", "[[1, 0], 2]", "[[1, 2, 3]]"],
    "flag": ["true", "false"],
    "dtype": ["f32", "bf16", "i64", "bool"],
}


@st.composite
def calls(draw: st.DrawFn) -> str:
    """A call of a function; of its arguments most are of the kind that it takes there."""
    function = FUNCTIONS[draw(st.sampled_from(sorted(FUNCTIONS)))]
    written = []
    for slot in function.slots:
        if draw(st.integers(0, 3)) == 0:
            continue
        value = draw(st.sampled_from(FITTING[slot.kind]) | st.sampled_from(ANYTHING))
        named = slot.kind != "tensors" and "->" not in value and draw(st.booleans())
        written.append(f"{slot.name} = {value}" if named else value)
    if function.arrows[1] != 0:
        written += draw(st.lists(st.sampled_from(ARROWS), max_size=2))
    return f"{function.name}({', '.join(written)})"


@pytest.mark.soak
@many
@given(calls(), st.sampled_from(["", " + x", " * 2", " < 1", " / 0", " == b"]), st.sampled_from(["0", "q", "mean(q)"]))
def test_any_call_of_a_function(call: str, operator: str, used: str):
    targets.checker(MODEL.format(call=call + operator, used=used).encode())


PLANS = """
axis batch = 8, width = 4
model net(x: [batch, width], y: [batch, width]) {{
  param w: [width] ~ normal(0.5)
  loss mse(x * w, y)
}}
mesh line(pipe = 2) {{ device = {device} link = {link} }}
layout cut on line {{ shard batch -> pipe }}
schedule s = {schedule}
train {{ layout = cut data = {data} optimizer = {optimizer} steps = 1 eval = {eval} checkpoint = {checkpoint} }}
expect {{ {measure} <= {limit} }}
"""
VALUES = [
    *NUMBERS,
    "100",
    "1099511627776",
    "80GiB",
    "1TFLOP/s",
    "1GB/s",
    "5us",
    "0%",
    "100%",
    '"a"',
    '""',
    '"../a"',
    "batch",
]
VALUES += [
    "loop",
    "v",
    "backward",
    "all",
    "bytes",
    "u16",
    "pipe",
    "[0.9, 0.99]",
    "[]",
    "constant(1)",
    "cosine(1, 2, 3, 4)",
]


def call_of(signatures: Mapping[str, object]) -> st.SearchStrategy[str]:
    """A call of one of these, with any arguments by name or by place."""
    names = sorted({setting.name for each in signatures.values() for setting in getattr(each, "settings", ())} | {"x"})
    values = st.sampled_from(VALUES)
    arguments = st.lists(values | st.builds("{} = {}".format, st.sampled_from(names), values), max_size=4)
    return st.builds("{}({})".format, st.sampled_from(sorted(signatures)), arguments.map(", ".join))


optimizers = call_of(OPTIMIZERS) | call_of(LEARNING_RATES).map("adamw(lr = {})".format)
plans = st.fixed_dictionaries(
    {
        "device": call_of(DEVICES),
        "link": call_of(LINKS),
        "schedule": call_of(SIGNATURES),
        "data": call_of(DATA),
        "optimizer": optimizers,
        "eval": call_of(EVALUATION),
        "checkpoint": call_of(CHECKPOINT),
        "measure": call_of(MEASURES) | st.sampled_from(sorted(MEASURES)),
        "limit": st.sampled_from(VALUES),
    }
)


@pytest.mark.soak
@many
@given(plans)
def test_any_call_of_a_setting(plan: dict[str, str]):
    targets.checker(PLANS.format(**plan).encode())
