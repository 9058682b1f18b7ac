"""Rules that cannot be: each says which tensor, axis, sizes and line it is about."""

from __future__ import annotations

import pytest

from partita.dsl.diagnostic import Refused
from tests.compiler.report.layout_files import network

BATCH = "shard batch -> data"


def refusal(*arguments: str, microbatches: int = 2) -> str:
    with pytest.raises(Refused) as refused:
        network(*arguments, microbatches=microbatches)
    (found,) = refused.value.diagnostics
    return found.render() + "\n"


def warnings(*arguments: str) -> list[str]:
    return [each.render() + "\n" for each in network(*arguments).warnings]


def test_a_size_that_does_not_divide() -> None:
    assert (
        refusal("tensor = 5", "shard hidden -> tensor")
        == """\
error[E0411]: axis `hidden` of 12 does not divide over `tensor` of 5
   --> net.par:17:9
    |
17  |   shard hidden -> tensor
    |         ^^^^^^
    = net.up: f32[width=6, hidden=12]   (declared at net.par:4:9)
    help: choose sizes so that `hidden` divides into 5 parts; or let it be padded: `shard hidden -> tensor padded`
"""
    )


def test_a_batch_that_divides_by_its_microbatches_but_not_by_the_mesh_as_well() -> None:
    shown, _, help = refusal("pod = 2, data = 4", "shard batch -> pod, data").partition("    help: ")
    assert (
        shown
        == """\
error[E0411]: axis `batch` of 8, of which a microbatch has 4, does not divide over `pod` of 2 × `data` of 4
   --> net.par:17:9
    |
17  |   shard batch -> pod, data
    |         ^^^^^
    = x: f32[batch=4, width=6]   (declared at net.par:3:7)
"""
    )
    multiple = "choose sizes so that each of the 2 microbatches divides into 8 parts: a multiple of 16 for `batch`"
    assert help == f"{multiple}; or let it be padded: `shard batch -> pod, data padded`\n"


def test_a_batch_that_does_not_divide_by_its_microbatches() -> None:
    assert "error[E0406]: axis `batch` of 8 does not divide into 3 microbatches" in refusal(
        "data = 2", BATCH, microbatches=3
    )


def test_a_rule_for_one_tensor_that_does_not_divide() -> None:
    found = refusal("data = 4", BATCH, "shard net.up: width -> data")
    assert "error[E0411]: axis `width` of 6 does not divide over `data` of 4\n   --> net.par:18:9" in found
    assert "= net.up: f32[width=6, hidden=12]   (declared at net.par:4:9)" in found


@pytest.mark.parametrize("order", [1, -1])
def test_a_mesh_axis_for_stages_and_for_tensors(order: int) -> None:
    rules = ["stage layer -> pipe", "shard batch -> pipe"][::order]
    found = refusal("pipe = 2", *rules)
    assert "error[E0412]: mesh axis `pipe` is used for the pipeline, and cannot also split `batch`" in found
    assert "|   shard batch -> pipe" in found
    assert f"= `stage layer -> pipe`   (net.par:{17 + rules.index('stage layer -> pipe')}:3)" in found


def test_a_mesh_axis_that_no_rule_uses() -> None:
    found = refusal("data = 2, tensor = 4", BATCH)
    assert "error[E0402]: no rule of layout `split` uses mesh axis `tensor` of 4" in found
    assert "help: add a rule that uses it, or set its size to 1" in found


def test_a_rule_behind_those_that_take_its_mesh_axis() -> None:
    """Every tensor that has `hidden` has `width` too, or the batch."""
    assert warnings("data = 2", BATCH, "shard width -> data", "shard hidden -> data") == [
        """\
warning[W0301]: `shard hidden -> data` applies to no tensor
   --> net.par:19:9
    |
19  |   shard hidden -> data
    |         ^^^^^^
    = net.up: f32[width=6, hidden=12]: `data` of 2 is taken by `width`, `shard width -> data` (net.par:18:3)
    = net.down: f32[hidden=12, width=6]: `data` of 2 is taken by `width`, `shard width -> data` (net.par:18:3)
    = net.layer.0.dot: f32[batch=4, hidden=12]: `data` of 2 is taken by `batch`, `shard batch -> data` (net.par:17:3)
    help: move it before that rule, or give it another mesh axis
"""
    ]


def test_a_second_rule_for_an_axis() -> None:
    """The ranks of `tensor` would all do the same, although a rule names it."""
    (found,) = warnings("data = 2, tensor = 2", BATCH, "shard batch -> tensor")
    assert "warning[W0301]: `shard batch -> tensor` applies to no tensor" in found
    assert (
        "= x: f32[batch=4, width=6]: `batch` is already split over `data` of 2, `shard batch -> data` (net.par:17:3)"
        in found
    )
    assert "help: name all mesh axes in one rule: `shard batch -> data, tensor`" in found


def test_a_rule_that_says_no_more_than_one_before_it() -> None:
    first, second = warnings("data = 2, tensor = 2", "shard batch -> data, tensor", "shard batch, batch -> data")
    for found in (first, second):
        assert "warning[W0301]: `shard batch -> data` applies to no tensor" in found
        assert "help: remove it: that rule says it already" in found


def test_a_further_mesh_axis_beside_one_that_was_named() -> None:
    (found,) = warnings("data = 2, tensor = 2", BATCH, "shard batch -> data, tensor")
    assert "help: name all mesh axes in one rule: `shard batch -> data, tensor`" in found


def test_a_rule_for_an_axis_that_its_tensor_lacks() -> None:
    (found,) = warnings("data = 2", BATCH, "shard net.up: batch -> data")
    assert "warning[W0301]: `shard net.up: batch -> data` applies to no tensor" in found
    assert "= net.up: f32[width=6, hidden=12]\n" in found
    assert "help: name one of its axes: width, hidden" in found


def test_a_rule_for_a_name_that_no_tensor_has() -> None:
    """Although every part of it is a name of the model, and tensors have the axis."""
    (found,) = warnings("data = 2", BATCH, "shard layer.up: width -> data")
    assert "warning[W0301]: `shard layer.up: width -> data` applies to no tensor" in found
    assert "help: no parameter or value is called `layer.up`" in found


def test_two_rules_for_one_tensor_that_want_one_mesh_axis() -> None:
    (found,) = warnings("data = 2", BATCH, "shard net.up: hidden -> data", "shard net.up: width -> data")
    assert "warning[W0301]: `shard net.up: width -> data` applies to no tensor\n   --> net.par:19:9" in found
    taken = "`data` of 2 is taken by `hidden`, `shard net.up: hidden -> data` (net.par:18:3)"
    assert f"= net.up: f32[width=6, hidden=12]: {taken}" in found


def test_a_rule_for_a_class_where_nothing_divides() -> None:
    """And an optimizer needs tensors whole: others are flat."""
    made = network("data = 2, tensor = 5", BATCH, "shard state -> tensor", optimizer="adafactor(lr = 0.1)")
    (found,) = [each.render() + "\n" for each in made.warnings]
    assert "warning[W0301]: `shard state -> tensor` applies to no tensor" in found
    assert "= net.up: f32[width=6, hidden=12]: no unsplit axis divides evenly by `tensor` of 5" in found
    assert "help: choose sizes that divide, or an elementwise optimizer" in found
    (found,) = warnings("data = 2, tensor = 5", BATCH, "shard state -> tensor")
    assert "warning[W0302]" in found


def test_a_rule_for_a_class_that_another_implies() -> None:
    (found,) = warnings("data = 2", BATCH, "shard param -> data", "shard state -> data")
    assert "warning[W0301]: `shard state -> data` applies to no tensor\n   --> net.par:19:9" in found
    assert "help: its tensors are already split over that: remove the rule" in found


def test_a_mesh_axis_that_only_stores() -> None:
    """ZeRO without data parallelism: nothing is replicated silently."""
    assert warnings("data = 2", "shard state -> data") == [
        """\
warning[W0302]: no value is split over `data` of 2: its ranks all compute the same
   --> net.par:17:3
    |
17  |   shard state -> data
    |   ^^^^^^^^^^^^^^^^^^^
    help: split the batch over it as well: `shard batch -> data`
"""
    ]


def test_rules_that_all_apply_are_not_warned_of() -> None:
    assert warnings("data = 2, tensor = 2", BATCH, "shard hidden -> tensor", "shard param -> data") == []
