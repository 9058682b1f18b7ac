"""The textual form of what each pass makes reads back as the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from partita.compiler import pipeline
from partita.compiler.graph import Graph
from partita.compiler.passes.cut import PartitionedGraph
from partita.compiler.passes.shard.shard import ShardedGraph
from partita.compiler.pipeline import compile_outputs, compile_spec
from partita.compiler.text.graph import graph_text, parse_graph
from partita.compiler.text.partitioned import parse_stages, parse_update, stages_text, update_text
from partita.compiler.text.sharded import parse_sharded, sharded_text
from partita.dsl.diagnostic import Refused
from partita.dsl.spec import Spec
from tests.compiler.same import difference
from tests.files import ROOT, checked
from tests.marks import examples, soak
from tests.programs import programs, sharded_programs
from tests.reference.programs import Maker

FILES = [*sorted((ROOT / "specs").glob("*.par")), *sorted((ROOT / "tests" / "planted" / "files").glob("*.par"))]


def check_every_pass(spec: Spec, training: bool = True) -> None:
    """Run the passes one by one, and read back the text of what each has made."""
    settled = pipeline._configured(spec, training, None, False)
    built = pipeline._build(settled)
    check_graph(built.forward)
    placed = pipeline._place(built)
    check_graph(placed.placed)
    joint = pipeline._differentiate(placed)
    check_graph(joint.joint)
    joint = pipeline._recompute(joint)
    check_graph(joint.joint)
    split = pipeline._split(joint)
    check_graph(split.step)
    sharded = pipeline._shard(split)
    check_sharded(sharded.sharded)
    cut = pipeline._cut(sharded)
    check_partitioned(cut.partitioned)
    ended = pipeline._update(cut)
    assert difference(parse_update(update_text(ended.update)), ended.update) is None


def check_graph(graph: Graph) -> None:
    again = parse_graph(graph_text(graph))
    assert difference(again, graph) is None
    assert graph_text(again) == graph_text(graph, places=False)


def check_sharded(sharded: ShardedGraph) -> None:
    check_graph(sharded.graph)
    again = parse_sharded(sharded_text(sharded))
    assert difference((again.graph, again.parameters), (sharded.graph, sharded.parameters)) is None
    assert sharded_text(again) == sharded_text(sharded, places=False)


def check_partitioned(partitioned: PartitionedGraph) -> None:
    """Together with the graph that was cut: they have values in common."""
    again = parse_stages(stages_text(partitioned), parse_graph(graph_text(partitioned.graph)))
    assert difference(again, partitioned) is None
    assert stages_text(again) == stages_text(partitioned, places=False)


def check_if_it_compiles(text: str) -> None:
    note(text)
    try:
        check_every_pass(checked(text, "random.par"))
    except Refused as refused:
        note(str(refused))


# Of programs that are cut, of those that are laid out, and of those that say all that can be said.
PROGRAMS = (
    programs().map(lambda program: program.text)
    | sharded_programs().map(lambda program: program.text)
    | st.builds(Maker, st.randoms(use_true_random=False), st.booleans()).map(lambda maker: maker.program().text)
)
SLOW = list(HealthCheck)


@pytest.mark.soak
@given(text=PROGRAMS)
@examples(5, suppress_health_check=SLOW)
def test_text_of_random_programs(text: str) -> None:
    check_if_it_compiles(text)


@pytest.mark.soak
@given(text=PROGRAMS)
@settings(max_examples=500, deadline=None, suppress_health_check=SLOW)
def test_text_of_many_random_programs(text: str) -> None:
    check_if_it_compiles(text)


@pytest.mark.soak
@pytest.mark.parametrize("training", [True, *soak(False)], ids=["training", "evaluation"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_text_of_files(file: Path, training: bool) -> None:
    check_every_pass(checked(file.read_text(encoding="utf-8"), file.name), training)


SMALL = """\
graph m
input %x: f32[batch=4, embed=8]
parameter %w: f32[embed=8]
%y = dot(%x, %w; over=('embed',))
%loss = reduce(%y; function='sum', over=('batch',), dtype='f32')
loss %loss
"""


def test_types_that_follow_may_be_left_out() -> None:
    text = graph_text(parse_graph(SMALL))
    assert "%y: f32[batch=4] = dot(%x, %w; over=('embed',)) F\n" in text
    assert difference(parse_graph(text), parse_graph(SMALL)) is None


def test_a_parameter_keeps_its_loss() -> None:
    graph = parse_graph(SMALL.replace("%w: f32[embed=8]", "%w: f32[embed=8] loss second"))
    assert graph.parameters[0].loss == "second"
    check_graph(graph)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dot(%x", "dot(%z"),  # no such value
        ("= dot", "= dod"),  # no such operation
        ("over=('embed',))", "over=('embed',)"),  # no end
        ("over=('embed',))", "under=('embed',))"),  # no such attribute
        ("over=('embed',))", "over=open('x'))"),  # code
        ("%y = dot", "%y: f32[batch] = dot"),  # no size
        ("%y = dot", "%x = dot"),  # two values of one name
        ("%y = dot", "%y {batch} = dot"),  # no mesh axis
    ],
)
def test_a_line_that_is_wrong_is_named(old: str, new: str) -> None:
    with pytest.raises(ValueError, match="line 4 cannot be read"):
        parse_graph(SMALL.replace(old, new, 1))


def test_a_graph_has_one_loss() -> None:
    with pytest.raises(ValueError, match="a graph has one loss"):
        parse_graph(SMALL.replace("loss %loss\n", ""))


@pytest.mark.soak
def test_forms_for_people_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    """What `partita compile --emit` prints is the same text, source places and all."""
    from partita.cli.main import main

    file = ROOT / "tests" / "planted" / "files" / "tied.par"
    state = compile_spec(checked(file.read_text(encoding="utf-8"), file.name))
    forms = {"graph": state.placed, "joint": state.joint, "microbatch": state.step}
    for form, graph in forms.items():
        assert main(["compile", str(file), "--emit", form]) == 0
        assert difference(parse_graph(capsys.readouterr().out), graph) is None
    assert main(["compile", str(file), "--emit", "sharded"]) == 0
    assert difference(parse_sharded(capsys.readouterr().out).parameters, state.sharded.parameters) is None


def test_text_of_a_program_by_parts() -> None:
    """It has states: buffers that keep what earlier parts leave."""
    spec = checked((ROOT / "specs" / "tiny.par").read_text(encoding="utf-8"), "tiny.par")
    state = compile_outputs(spec, part=("seq", 4))
    assert any(each.is_state for each in state.partitioned.graph.parameters)
    check_graph(state.partitioned.graph)
    check_partitioned(state.partitioned)
