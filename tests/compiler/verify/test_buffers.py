"""The certificate: updates of buffers at the end of a step."""

from __future__ import annotations

from functools import cache

from attrs import evolve

from partita.compiler.graph import Value
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.passes.update import BufferUpdate
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import validate
from tests.compiler.verify.broken import problem
from tests.files import ROOT, checked

FILE = ROOT / "tests" / "planted" / "files" / "buffers.par"


@cache
def program() -> Compilation:
    return compile_spec(checked(FILE.read_text(encoding="utf-8"), FILE.name))


def the(name: str) -> BufferUpdate:
    return next(each for each in program().update.buffers if each.name == name)


def changed(*buffers: BufferUpdate, **changes: object) -> Compilation:
    """The program with other updates of some buffers."""
    others = {each.name: each for each in buffers}
    update = program().update
    changes = {"buffers": tuple(others.get(each.name, each) for each in update.buffers), **changes}
    return evolve(program(), update=evolve(update, **changes))


def test_the_program_is_right():
    assert validate(program()).passed


def test_every_buffer_is_updated_once():
    buffers = program().update.buffers
    message = "not every buffer is updated once"
    assert message in problem(changed(buffers=buffers[1:])).message
    assert message in problem(changed(buffers=(*buffers, buffers[0]))).message


def test_a_buffer_gets_its_own_value():
    last, average = the("fit.last"), the("fit.average")
    found = problem(changed(evolve(last, new=average.new)))
    assert "is not the new value of `fit.last`" in found.message
    assert found.span is not None


def test_a_new_value_is_computed_as_in_the_single_device_program():
    update = program().update
    node = next(each for each in update.buffer_nodes if each.op == Pointwise("sign"))
    nodes = tuple(evolve(node, op=Pointwise("negate")) if each is node else each for each in update.buffer_nodes)
    assert "the single-device program has no `negate`" in problem(changed(buffer_nodes=nodes)).message
    # A sum over one rank's part of the batch, as if it were whole.
    reduced = next(each for each in update.buffer_nodes if isinstance(each.op, Collective))
    left = tuple(each for each in update.buffer_nodes if each is not reduced)
    assert not validate(changed(buffer_nodes=left)).passed


def test_a_buffer_is_updated_where_it_is_kept():
    teacher = the("fit.teacher")
    assert teacher.stages == (0, 1)
    assert "is not updated on the stages that have it" in problem(changed(evolve(teacher, stages=(0,)))).message
    average = the("fit.average")
    assert average.totals
    assert "the totals are not those that it reads" in problem(changed(evolve(average, totals=()))).message


def test_a_buffer_is_stored_over_its_master():
    teacher, master = the("fit.teacher"), the("fit.teacher").master
    elsewhere = Value(master.name, master.type.resized("features", 4), evolve(master.layout, states=()))
    found = problem(changed(evolve(teacher, master=elsewhere)))
    assert "is not stored as" in found.message
