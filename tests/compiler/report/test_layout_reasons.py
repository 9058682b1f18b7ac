"""`explain` says how a tensor lies and which rule made it so; what it says is what the compiler did."""

from __future__ import annotations

import pytest

from partita.compiler.report.explain import Explanation, explain
from partita.compiler.state import Compilation
from tests.compiler.report.layout_files import network, transformer

RULES = ("shard batch -> data", "shard heads, ffn, vocab -> tensor", "shard seq -> tensor", "shard state -> data")


@pytest.fixture(scope="module")
def state() -> Compilation:
    return transformer("data = 2, tensor = 2", *RULES)


def only(state: Compilation, name: str) -> Explanation:
    (found,) = explain(state, name)
    return found


def reasons(found: Explanation) -> list[tuple[str, str | None, str]]:
    return [(each.mesh_axis, each.axis, each.rule.text if each.rule else each.because) for each in found.splits]


def test_a_parameter_and_how_it_is_stored(state: Compilation) -> None:
    found = only(state, "wq")
    assert found.names == ("gpt.layer.0.attention.wq", "gpt.layer.1.attention.wq")
    assert found.name == "gpt.layer.attention.wq"
    assert reasons(found) == [
        ("data", None, "it has no `batch`"),
        ("tensor", "heads", "shard heads, ffn, vocab -> tensor"),
    ]
    assert str(found.local) == "bf16[embed=768, heads=6, key=64]"
    kept = [(each.what, str(each.layout), [rule.text for rule in each.rules]) for each in found.stored]
    assert kept == [
        ("param", "embed/data heads/tensor", ["shard state -> data"]),  # in bf16 a part of the state
        ("grad", "sum/data heads/tensor", []),
        ("state", "embed/data heads/tensor", ["shard state -> data"]),
    ]
    assert [(each.phase.name, each.kind, each.axis, each.places) for each in found.moved] == [
        ("PROLOGUE", "all_gather", "data", 2),
        ("REDUCE", "reduce_scatter", "data", 2),
    ]


def test_a_rule_that_came_late(state: Compilation) -> None:
    found = only(state, "layer.attention.q")
    assert str(found.default) == "batch/data heads/tensor"
    (late,) = found.late
    assert (late.axis, late.rule.text, late.because) == (
        "seq",
        "shard seq -> tensor",
        "`tensor` of 2 is taken by `heads`",
    )


def test_a_value_with_its_copies_and_the_lines_that_want_them(state: Compilation) -> None:
    found = only(state, "attention.h")
    assert reasons(found) == [("data", "batch", RULES[0]), ("tensor", "seq", RULES[2])]
    copies = [(str(each.layout), each.steps, each.phase, [r.line for r in each.readers]) for each in found.copies]
    gathered = ("batch/data", ("all_gather over tensor",))
    assert [(layout, steps, phase, sorted(lines)) for layout, steps, phase, lines in copies] == [
        (*gathered, "forward", [12, 13, 14]),
    ]
    # The backward pass makes it again, and gathers that.
    again = only(state, "attention.h.again")
    copies = [(str(each.layout), each.steps, each.phase, sorted(r.line for r in each.readers)) for each in again.copies]
    assert copies == [(*gathered, "weight", [12, 13, 14])]


def test_the_ways_that_there_were(state: Compilation) -> None:
    found = only(state, "layer.mlp.gelu")
    assert found.operation == "gelu"
    taken = {each.mesh_axis: each.states for each in found.alternatives if each.taken}
    assert taken == {"data": "dot: batch → gelu: batch", "tensor": "dot: ffn → gelu: ffn"}
    for each in found.alternatives:
        best = min(way.seconds for way in found.alternatives if way.mesh_axis == each.mesh_axis)
        assert each.seconds >= best
        assert not each.taken or each.seconds == best


def test_weights_are_a_last_resort(state: Compilation) -> None:
    """Two ways along `tensor` leave the gradient of `wq` where `wq` is: by heads, and computed whole by all."""
    found = only(state, "d(wq)")
    left = [each.states for each in found.alternatives if each.mesh_axis == "tensor" and not each.reshards_weights]
    assert left == ["h.again: replicated, d(q): heads → d(wq): heads", "all replicated"]
    assert all(each.seconds > 1e-3 for each in found.alternatives if each.reshards_weights)


def test_what_stands_in_the_place_of_an_operation_that_cannot_be_split(state: Compilation) -> None:
    found = only(state, "nll")
    assert found.operation == "nll"
    assert {"max", "exp_sum", "pick"} <= set(found.instead)
    assert str(only(state, "gpt.max").made) == "batch/data max/tensor"


def test_cotangents_have_names_too(state: Compilation) -> None:
    found = only(state, "d(attention.h)")
    assert found.names == ("d(gpt.layer.1.attention.h)", "d(gpt.layer.0.attention.h)")
    assert str(found.made) == "batch/data sum/tensor"
    assert [str(copy.layout) for copy in found.copies] == ["batch/data seq/tensor"]


def test_an_input_is_read_as_it_is_wanted(state: Compilation) -> None:
    found = only(state, "tokens")
    assert found.role == "an input"
    assert [(str(copy.layout), [r.line for r in copy.readers]) for copy in found.copies] == [("batch/data", [31])]


def test_one_turn_by_its_full_name(state: Compilation) -> None:
    assert only(state, "gpt.layer.1.mlp.up").names == ("gpt.layer.1.mlp.up",)
    assert [each.name for each in explain(state, "scale")] == ["gpt.layer.attention.scale", "gpt.layer.mlp.scale"]


def test_rules_for_one_tensor_stand_instead_of_the_others() -> None:
    found = only(network("data = 2", "shard batch -> data", "shard net.up: hidden -> data"), "up")
    assert reasons(found) == [("data", "hidden", "shard net.up: hidden -> data")]


def test_a_parameter_that_a_rule_for_its_class_cannot_split() -> None:
    state = network("data = 2, tensor = 5", "shard batch -> data", "shard state -> tensor, data")
    *_, kept = only(state, "up").stored
    assert str(kept.layout) == "flat/data flat/tensor"
    assert [rule.text for rule in kept.rules] == ["shard state -> tensor, data"]
    assert (kept.whole, kept.flat) == ((), ("data", "tensor"))


def test_a_name_that_is_none(state: Compilation) -> None:
    with pytest.raises(ValueError, match=r"`wqq` is not a tensor of this program; did you mean `wq`\?"):
        explain(state, "wqq")
