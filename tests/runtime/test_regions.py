"""Which part of a tensor a rank holds, and what it reads of a batch."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.compiler.layout import SUM, Layout, flat_form, layout_of, local_type
from partita.compiler.mesh import Mesh
from partita.compiler.program import InputPart, InputRecord
from partita.dsl.spec import Call
from partita.dsl.types import Axis, Type
from partita.runtime.global_tensors import assemble, piece_view
from partita.runtime.initial import initial
from partita.runtime.inputs import Inputs
from partita.runtime.regions import pieces_of, region_of, shape_of

CPU = torch.device("cpu")


@frozen
class Laid:
    """A tensor's type, its layout, and the mesh that it lies on."""

    type: Type
    layout: Layout
    mesh: Mesh

    def region(self, rank: int) -> tuple[slice, ...]:
        return region_of(self.type, self.layout, self.mesh.sizes, self.mesh.coordinates(rank))


@st.composite
def laid(draw: st.DrawFn) -> Laid:
    mesh = Mesh(tuple((f"m{i}", draw(st.integers(1, 3))) for i in range(draw(st.integers(1, 3)))))
    names = [f"a{i}" for i in range(draw(st.integers(0, 3)))]
    layout = layout_of((name, draw(st.sampled_from([None, SUM, *names]))) for name, _ in mesh.axes)
    sizes = dict.fromkeys(names, 1)
    for name, state in layout.states:
        if state in sizes:
            sizes[state] *= mesh.sizes[name]
    type = Type("f32", tuple(Axis(name, size * draw(st.integers(1, 3))) for name, size in sizes.items()))
    return Laid(type, layout, mesh)


@st.composite
def laid_flat(draw: st.DrawFn) -> Laid:
    """As `laid`, and then flat: over the mesh axes that are free, or some of them."""
    case = draw(laid().filter(lambda case: case.type.axes != ()))
    states = dict(case.layout.states)
    free = [name for name, _ in case.mesh.axes if name not in states]
    over = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
    parts = prod(case.mesh.sizes[name] for name in over) * draw(st.integers(1, 3))
    made = Layout(case.layout.states, flat_form(case.layout, case.type, parts))
    states |= dict.fromkeys(over, made.flat.axis)
    return evolve(case, layout=layout_of(((name, states.get(name)) for name, _ in case.mesh.axes), made.flat))


@given(case=laid())
def test_parts_have_the_local_type_and_make_the_whole(case: Laid) -> None:
    whole = torch.arange(case.type.elements, dtype=torch.float32).reshape(case.type.shape)
    parts = {rank: whole[case.region(rank)] for rank in range(case.mesh.ranks)}
    assert {shape_of(case.region(rank)) for rank in parts} == {
        local_type(case.type, case.layout, case.mesh.sizes).shape
    }
    assert torch.equal(assemble("w", case.type, case.layout, case.mesh, parts), whole)


@settings(max_examples=100)  # a few of them have flat parts that several mesh axes, or larger ones, divide
@given(case=laid_flat())
def test_flat_parts_are_elements_in_order(case: Laid) -> None:
    """Those of a shard, of equal length; the last ones end with zeros, or have nothing else."""
    whole = 1 + torch.arange(case.type.elements, dtype=torch.float32).reshape(case.type.shape)
    own = evolve(case, layout=layout_of((over, s) for over, s in case.layout.states if s != case.layout.flat.axis))
    over = case.layout.over(case.layout.flat.axis)
    parts = {}
    for rank in range(case.mesh.ranks):
        elements = whole[own.region(rank)].reshape(-1)
        length = -(-len(elements) // case.layout.flat.parts) * case.layout.flat.parts
        padded = torch.cat([elements, torch.zeros(length - len(elements))])
        for name in over:
            padded = padded.chunk(case.mesh.sizes[name])[case.mesh.coordinates(rank)[name]]
        parts[rank] = padded.view(local_type(case.type, case.layout, case.mesh.sizes).shape)
        held = torch.zeros_like(parts[rank])
        for piece in pieces_of(case.type, case.layout, case.mesh.sizes, case.mesh.coordinates(rank)):
            piece_view(held, case.layout, piece).copy_(whole[piece.region])
        assert torch.equal(held, parts[rank])
    assert torch.equal(assemble("w", case.type, case.layout, case.mesh, parts), whole)


def test_the_first_mesh_axis_is_the_outermost() -> None:
    mesh = Mesh((("data", 2), ("pipe", 3), ("tensor", 2)), "pipe")
    type = Type("f32", (Axis("embed", 8), Axis("ffn", 3)))
    layout = Layout((("data", "embed"), ("tensor", "embed")))
    found = [region_of(type, layout, mesh.sizes, mesh.coordinates(rank))[0].start for rank in range(mesh.ranks)]
    assert found == [0, 2, 0, 2, 0, 2, 4, 6, 4, 6, 4, 6]


@given(case=laid(), name=st.sampled_from(["normal", "uniform"]))
def test_initial_values_do_not_depend_on_the_layout(case: Laid, name: str) -> None:
    call = Call(name, {"width": 0.5})
    parts = {
        rank: torch.from_numpy(initial(call, case.type, 3, "gpt.w", (2, 2), case.region(rank)))
        for rank in range(case.mesh.ranks)
    }
    whole = initial(call, case.type, 3, "gpt.w", (2, 2))
    np.testing.assert_array_equal(assemble("gpt.w", case.type, case.layout, case.mesh, parts).numpy(), whole)


def test_copies_that_differ_in_a_bit_are_named() -> None:
    mesh = Mesh((("data", 2), ("tensor", 2)))
    type, layout = Type("f32", (Axis("embed", 4),)), Layout((("tensor", "embed"),))
    parts = {0: torch.zeros(2), 1: torch.ones(2), 2: torch.tensor([0.0, -0.0]), 3: torch.ones(2)}
    with pytest.raises(AssertionError, match=r"copies of gpt\.w on ranks 0 and 2 differ"):
        assemble("gpt.w", type, layout, mesh, parts)
    parts[2] = parts[0]
    assert assemble("gpt.w", type, layout, mesh, parts).tolist() == [0, 0, 1, 1]
    with pytest.raises(AssertionError, match="do not hold all"):
        assemble("gpt.w", type, layout, mesh, {0: parts[0]})


class Reading:
    """As much of a program and its stages as `Inputs` reads."""

    def __init__(self, mesh: Mesh, microbatches: int, types: dict[str, Type], parts: list[InputPart]) -> None:
        self.mesh = mesh
        self.microbatches = self.batch_parts = microbatches
        self.batches, self.rounds, self.groups = Fraction(1), 1, 1
        self.batch, self.rows = "batch", 12
        self.inputs = tuple(InputRecord(name, type, type, None) for name, type in types.items())
        self.full_inputs = tuple(part for part in parts if part.batch is None)
        self.stage_inputs = tuple(part for part in parts if part.batch is not None)


class Stage:
    def __init__(self, reading: Reading) -> None:
        self.inputs, self.full_inputs = reading.stage_inputs, reading.full_inputs


def test_a_rank_reads_its_part_of_each_microbatch() -> None:
    mesh = Mesh((("data", 2), ("tensor", 2)))
    batch, seq = Axis("batch", 12), Axis("seq", 4)
    types = {"tokens": Type("i64", (seq, batch)), "table": Type("f32", (Axis("rows", 6), seq))}
    split = Layout((("data", "batch"), ("tensor", "seq")))
    parts = [
        InputPart("tokens", "batch", split),
        InputPart("tokens", "batch", Layout()),
        InputPart("table", None, Layout((("data", "rows"),))),
    ]
    reading = Reading(mesh, 3, types, parts)
    tokens = torch.arange(48).reshape(4, 12)
    table = torch.arange(24.0).reshape(6, 4)
    for rank in range(4):
        coordinates = mesh.coordinates(rank)
        data, tensor = coordinates["data"], coordinates["tensor"]
        inputs = Inputs(reading, [Stage(reading)], coordinates, CPU)
        batch = {"tokens": tokens, "table": table}
        found = inputs.load(batch) | inputs.whole(lambda _, batch=batch: batch)
        by_layout = {(part.name, part.layout): value for part, value in found.items()}
        assert torch.equal(by_layout["table", parts[2].layout], table[3 * data : 3 * data + 3])
        for microbatch in range(3):
            cut = tokens[:, 4 * microbatch : 4 * microbatch + 4]
            assert torch.equal(by_layout["tokens", Layout()][microbatch], cut)
            mine = by_layout["tokens", split][microbatch]
            assert torch.equal(mine, cut[2 * tensor : 2 * tensor + 2, 2 * data : 2 * data + 2])
            assert mine.is_contiguous()
