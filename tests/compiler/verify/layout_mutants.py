"""Mutants of layouts: one value, or one record, is said to lie otherwise along one mesh axis."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attrs import evolve

from partita.compiler.graph import Value
from partita.compiler.layout import MAX, SUM, Layout, layout_of
from partita.compiler.mesh import Mesh
from partita.compiler.state import Compilation
from partita.dsl.types import Type
from tests.compiler.verify.changes import Place, places
from tests.compiler.verify.mutants import Mutant


def layout_mutants(state: Compilation) -> Iterator[Mutant]:
    """Each value with another state along each mesh axis, once in each place where it is made or given."""
    for place in places(state):
        values = [value for node in place.nodes for value in node.outputs]
        if place.stage is not None:
            stage = state.partitioned.stages[place.stage]
            for each in (*stage.inputs, *stage.parameters, *stage.accumulators):
                values.append(each.value)
        yield from (mutant for value in values for mutant in _laid_otherwise(place, value))
    yield from kept_mutants(state)
    yield from _recorded_otherwise(state)


def kept_mutants(state: Compilation) -> Iterator[Mutant]:
    """What is there at the end of a step without a node that makes it, with another state."""
    end, update = Place(state, "the end of the step", ()), state.update
    values = [value for each in update.parameters for value in (each.master, *each.states)]
    values += [each.master for each in update.buffers]
    values += [value for average in update.outer for value in (*average.masters, *average.states)]
    for value in dict.fromkeys((*values, *update.norms)):
        yield from _laid_otherwise(end, value)


def _laid_otherwise(place: Place, value: Value) -> Iterator[Mutant]:
    for layout in _others(place.state.mesh, value.layout, value.type):
        build = partial(place.changed, {value: evolve(value, layout=layout)}, made=True)
        what = f"`{value.name}` as {layout} and not {value.layout} in {place.name}"
        yield Mutant("layout", "value", what, build)


def _others(mesh: Mesh, layout: Layout, type: Type) -> Iterator[Layout]:
    """A layout with another state along one mesh axis."""
    for over in mesh.sharding:
        for new in (None, SUM, MAX, *type.names):
            if new != layout.state(over):
                yield layout_of((name, new if name == over else layout.state(name)) for name in mesh.sharding)


def _recorded_otherwise(state: Compilation) -> Iterator[Mutant]:
    """Layouts that records have: of parameters as they are stored, for compiler and runtime, and of inputs."""
    program = state.program
    for record in program.parameters:
        own = state.sharded.parameters[record.name]
        for field in ("param", "grad", "state"):
            for layout in _others(state.mesh, getattr(own, field), record.type):
                other = evolve(own, **{field: layout})
                there = evolve(state.sharded, parameters={**state.sharded.parameters, record.name: other})
                updates = [evolve(u, layouts=other) if u.layouts is own else u for u in state.update.parameters]
                build = partial(evolve, state, sharded=there, update=evolve(state.update, parameters=tuple(updates)))
                yield Mutant("layout", "record", f"the {field} layout of `{record.name}` as {layout}", build, True)
        for field in ("layout", "state_layout"):
            for layout in _others(state.mesh, getattr(record, field), record.type):
                other = evolve(record, **{field: layout})
                records = tuple(other if each is record else each for each in program.parameters)
                build = partial(evolve, state, program=evolve(program, parameters=records))
                yield Mutant("layout", "record", f"the record's {field} of `{record.name}` as {layout}", build, True)
    for stage in program.stages:
        types = {each.name: each.value.type for each in state.partitioned.stages[stage.index].inputs}
        for field in ("inputs", "full_inputs"):
            own = getattr(stage, field)
            for i, part in enumerate(own):
                for layout in _others(state.mesh, part.layout, types[part.name]):
                    parts = (*own[:i], evolve(part, layout=layout), *own[i + 1 :])
                    stages = list(program.stages)
                    stages[stage.index] = evolve(stage, **{field: parts})
                    build = partial(evolve, state, program=evolve(program, stages=tuple(stages)))
                    yield Mutant("layout", "record", f"`{part.name}` on stage {stage.index} as {layout}", build, True)
