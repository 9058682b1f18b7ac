"""How parameters, gradients and optimizer states are stored: as docs/layouts.md says, along the largest axis."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.layout import Flat, Layout
from partita.compiler.mesh import Mesh
from partita.compiler.passes.shard.defaults import DefaultLayouts, default_layouts
from partita.dsl.types import Axis, Type
from tests.files import checked

KINDS = ("param", "grad", "state")
TEXT = """
axis batch = 6, a = 6, b = 6
model m(x: [batch, a]) {{
  param w: [a, b] ~ ones()
  loss mean(dot(x, w, over = a))
}}
mesh ranks(data = {data}, tensor = {tensor})
layout cut on ranks {{ shard batch -> data  shard {kind} -> {over} }}
train {{ data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }}
"""


def defaults(kind: str, over: str, data: int, tensor: int) -> DefaultLayouts:
    spec = checked(TEXT.format(kind=kind, over=over, data=data, tensor=tensor), "homes.par", ())
    return default_layouts(spec, Mesh((("data", data), ("tensor", tensor))))


def expected(type: Type, compute: Layout, over: list[str], sizes: dict[str, int]) -> Layout:
    """Along each mesh axis in turn, the first of the largest axes that nothing splits and that divide; where there is
    none, flat over all of them.
    """
    states = dict(compute.states)
    for mesh_axis in over:
        if mesh_axis in states:
            continue
        best = None
        for axis in type.axes:
            fits = axis.name not in states.values() and axis.size % sizes[mesh_axis] == 0
            if fits and (best is None or axis.size > best.size):
                best = axis
        if best is None:
            flat = [name for name in over if name not in dict(compute.states)]
            form = Flat(type.axes, prod(sizes[name] for name in flat), tuple(dict(compute.states).values()))
            states = {**dict(compute.states), **dict.fromkeys(flat, "flat")}
            return Layout(tuple((name, states[name]) for name in ("data", "tensor") if name in states), form)
        states[mesh_axis] = best.name
    return Layout(tuple((name, states[name]) for name in ("data", "tensor") if name in states))


@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 6, 12]), min_size=1, max_size=4),
    ranks=st.tuples(st.sampled_from([2, 3]), st.sampled_from([2, 3])),
    over=st.permutations(["data", "tensor"]),
    computed=st.sampled_from([(), (("tensor", "a0"),), (("data", "a0"),)]),
)
def test_a_class_is_split_along_the_largest_axis_the_first_declared_if_several(
    sizes: list[int], ranks: tuple[int, int], over: list[str], computed: tuple[tuple[str, str], ...]
):
    type = Type("f32", tuple(Axis(f"a{i}", size) for i, size in enumerate(sizes)))
    mesh = dict(zip(("data", "tensor"), ranks, strict=True))
    compute = Layout(computed)
    if sizes[0] % prod(mesh[name] for name, _ in computed):
        compute = Layout(())
    found = defaults("param", ", ".join(over), *ranks).stored("param", "m.w", type, compute)
    assert found == expected(type, compute, over, mesh)


@pytest.mark.parametrize(("rule", "split"), [("param", KINDS), ("grad", KINDS[1:]), ("state", KINDS[2:])])
def test_a_class_implies_those_after_it(rule: str, split: tuple[str, ...]):
    type = Type("f32", (Axis("a", 6), Axis("b", 12)))
    found = defaults(rule, "tensor", 2, 3)
    for kind in KINDS:
        wanted = Layout((("tensor", "b"),)) if kind in split else Layout(())
        assert found.stored(kind, "m.w", type, Layout(())) == wanted, kind
