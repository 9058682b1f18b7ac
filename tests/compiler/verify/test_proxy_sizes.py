"""The sizes of a proxy fit together."""

from __future__ import annotations

import pytest

from partita.compiler.verify.proxy_sizes import Search, axes_of
from partita.dsl import spec
from partita.dsl.load import load, load_text
from tests.files import ROOT


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_windows_have_as_many_positions_as_their_axis_says(times: int, multiple: int):
    """However large the image is in the file; windows are as they are, and the image is smaller."""
    larger = (f"height={8 * times}", f"width={6 * times}", f"rows={4 * times}", f"columns={3 * times}")
    more = (f"tall={8 * times}", f"left={6 * times - 3}")
    found, diagnostics = load(ROOT / "tests/planted/files/images.par", [*larger, *more])
    assert found is not None, diagnostics
    axes = axes_of(found.model)
    sizes = Search(axes, {"batch": multiple, "filters": multiple}).run()
    assert sizes is not None
    steps = [step for body in spec.bodies(found.model.body) for step in body.steps if isinstance(step, spec.Apply)]
    sliding = [step.options for step in steps if step.function in ("patches", "conv")]
    assert len(sliding) == 9
    for o in sliding:
        for i, (axis, into, size) in enumerate(zip(o["axes"], o["into"], o["size"], strict=True)):
            extent = o["dilation"][i] * (sizes[size] - 1) + 1
            assert sizes[size] == axes.declared[size]
            assert (sizes[axis] + sum(o["padding"][i]) - extent) // o["stride"][i] + 1 == sizes[into]
    assert times < 4 or sizes["height"] < axes.declared["height"]


def test_sections_stay_as_they_are():
    """Each is a number of pairs, of one of the places of a position."""
    text = """axis batch = 8, seq = 24, key = 16, places = 3
model m(x: [batch, seq, key], ids: i64[seq, places]) {
  param w: [key] ~ ones()
  loss mean(rope(x * w, over = seq, pairs = key, positions = ids, sections = [2, 3, 3]))
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 2 }
"""
    found, diagnostics = load_text(text)
    assert found is not None, diagnostics
    sizes = Search(axes_of(found.model), {}).run()
    assert sizes is not None
    assert (sizes["key"], sizes["places"]) == (16, 3)
    assert sizes["seq"] < 24
