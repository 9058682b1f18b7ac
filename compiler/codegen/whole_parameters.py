"""A program's parameters under their own names, where ranks hold parts of them.

For the runtime a part is a shard like any other: of the parameter, along its axis, at the rank's coordinate of the
pipeline's mesh axis. A rank has at most one part of a parameter, so that names remain unique on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from partita.compiler.graph import Parameter, Part
from partita.compiler.layout import Layout, of_parts
from partita.compiler.ops.optimizer import Update
from partita.compiler.program import ParameterRecord, Program


def with_whole_parameters(program: Program, parameters: Iterable[Parameter], updates: Mapping[str, Update]) -> Program:
    """The program with one record for all parts of a parameter, by whose name stages and ranks refer to their part."""
    parts = {each.name: each.part for each in parameters if each.part is not None}
    if not parts:
        return program
    names = {name: part.name for name, part in parts.items()}

    def whole(name: str) -> str:
        return names.get(name, name)

    records: dict[str, ParameterRecord] = {}
    for record in program.parameters:
        part = parts.get(record.name)
        joined = record if part is None else whole_record(record, part, updates.get(record.name))
        before = records.get(joined.name)
        stage_indices = sorted({*joined.stages, *(before.stages if before else ())})
        records[joined.name] = evolve(joined, stages=tuple(stage_indices))
    stages = tuple(
        evolve(
            stage,
            parameters=tuple(map(whole, stage.parameters)),
            accumulators=tuple(
                evolve(each, name=whole(each.name), parameter=each.parameter and whole(each.parameter))
                for each in stage.accumulators
            ),
        )
        for stage in program.stages
    )
    ranks = tuple(
        evolve(
            rank,
            parameters=tuple(map(whole, rank.parameters)),
            totals=tuple((stage, whole(name)) for stage, name in rank.totals),
            copied=tuple(map(whole, rank.copied)),
        )
        for rank in program.ranks
    )
    return evolve(program, parameters=tuple(records.values()), stages=stages, ranks=ranks)


def whole_record(record: ParameterRecord, part: Part, update: Update | None) -> ParameterRecord:
    """The record of the parameter that has this part; of its stages, those of the part."""
    types = dict(zip(update.states, update.state_types(part.master), strict=True)) if update is not None else {}
    states = tuple(evolve(each, type=types.get(each.name, part.master)) for each in record.states)
    companions = tuple(evolve(each, type=part.master) for each in record.companions)
    layouts = (_outermost(part, layout) for layout in (record.layout, record.state_layout))
    layout, state_layout = layouts
    record = evolve(record, name=part.name, type=part.master, states=states, companions=companions)
    return evolve(record, layout=layout, state_layout=state_layout)


def _outermost(part: Part, layout: Layout) -> Layout:
    """A part's layout as that of the whole: the parts are split further."""
    return of_parts(layout, part.over, part.axis, part.master.axis(part.axis).size)
