"""A program's parameters as they are stored: without the padding that programs give to their axes."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from partita.compiler.layout import padded_type, stored_form
from partita.compiler.program import ParameterRecord, Program


def with_stored_parameters(program: Program, own_sizes: Mapping[str, int]) -> Program:
    """The program with records of what is stored, from the own sizes of axes that are padded."""
    if not own_sizes:
        return program
    return evolve(program, parameters=tuple(as_stored(each, own_sizes) for each in program.parameters))


def as_stored(record: ParameterRecord, own_sizes: Mapping[str, int]) -> ParameterRecord:
    """The record of a parameter without its padding."""
    type, layout = stored_form(record.type, record.layout, own_sizes)
    states, companions = (
        tuple(evolve(each, type=stored_form(each.type, layout, own_sizes)[0]) for each in kept)
        for kept in (record.states, record.companions)
    )
    _, state_layout = stored_form(record.type, record.state_layout, own_sizes)
    record = evolve(record, type=type, layout=layout, state_layout=state_layout)
    return evolve(record, states=states, companions=companions)


def as_computed(record: ParameterRecord) -> ParameterRecord:
    """The record of a parameter as programs have it, from that of what is stored."""
    states, companions = (
        tuple(evolve(each, type=padded_type(each.type, record.stored(each))) for each in kept)
        for kept in (record.states, record.companions)
    )
    layout, state_layout = (evolve(each, padded=()) for each in (record.layout, record.state_layout))
    type = padded_type(record.type, record.layout)
    record = evolve(record, type=type, states=states, companions=companions)
    return evolve(record, layout=layout, state_layout=state_layout)
