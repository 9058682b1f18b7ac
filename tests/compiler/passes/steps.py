"""The passes as cases name them: each from one form to the next, with options that can be written down."""

from __future__ import annotations

import re
from functools import partial
from typing import Protocol

from attrs import evolve, frozen

from partita.compiler.costs.devices import device_of
from partita.compiler.costs.nodes import seconds
from partita.compiler.graph import Graph
from partita.compiler.mesh import Mesh, mesh_of
from partita.compiler.passes import build as building
from partita.compiler.passes import chunked_collectives as cutting_up
from partita.compiler.passes import cut as cutting
from partita.compiler.passes import differentiate as differentiating
from partita.compiler.passes import float8 as of_float8
from partita.compiler.passes import fuse as fusing
from partita.compiler.passes import group as grouping
from partita.compiler.passes import guard as guards
from partita.compiler.passes import overlap as overlapping
from partita.compiler.passes import place as placing
from partita.compiler.passes import remat_cheap as rematerializing
from partita.compiler.passes import remat_scopes as recomputing
from partita.compiler.passes.assign import assign
from partita.compiler.passes.cut import PartitionedGraph
from partita.compiler.passes.microbatch import split_batch
from partita.compiler.passes.shard.defaults import default_layouts
from partita.compiler.passes.shard.resharding import Resharding
from partita.compiler.passes.shard.shard import ShardedGraph
from partita.compiler.passes.shard.shard import shard as sharding
from partita.compiler.passes.update import update_graph
from partita.compiler.text.graph import graph_text
from partita.compiler.text.partitioned import stages_text, update_text
from partita.compiler.text.sharded import parse_sharded, sharded_text
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.dsl.spec import RecomputeRule, Spec
from tests.files import checked


@frozen(eq=False)
class Form:
    """What is there: a text, a graph of it (which may have layouts), its stages."""

    text: str
    sharded: ShardedGraph | None = None
    partitioned: PartitionedGraph | None = None

    def layouts(self) -> ShardedGraph:
        """The graph with its layouts."""
        return self.sharded or parse_sharded(self.text)

    def graph(self) -> Graph:
        """The graph."""
        return self.layouts().graph

    def stages(self) -> PartitionedGraph:
        """The stages, which only `cut` makes."""
        if self.partitioned is None:
            raise ValueError("write `cut(…)` before it")
        return self.partitioned


class Step(Protocol):
    """One pass with its options."""

    def __call__(self, form: Form, **options: object) -> Form: ...


def whole(graph: Graph) -> Form:
    """The form of a graph without layouts."""
    return Form(graph_text(graph, places=False), ShardedGraph(graph, {}, {}))


def cut_up(form: Form, partitioned: PartitionedGraph) -> Form:
    """The form of stages."""
    return evolve(form, text=stages_text(partitioned, places=False), partitioned=partitioned)


# ---------------------------------------------------------------- files


FILE = """\
axis {axes}
{blocks}
model any(x: [{first}]) {{
  {parameters}
  let y = x
  {uses}
  loss {loss}
}}
mesh cluster({mesh}) {{ {links} }}
layout split on cluster {{ {rules} }}
train {{ model = any layout = split data = random() optimizer = {optimizer} steps = 1 }}
"""


def file_of(graph: Graph, mesh: str, rules: str = "", optimizer: str = "sgd(lr = 0.1)", links: str = "") -> Spec:
    """A file that declares the axes, blocks, repeats and parameters of a graph, a mesh, a layout and an optimizer."""
    inputs = (each.value.type for each in graph.inputs)
    nodes = (value.type for node in graph.nodes for value in node.outputs)
    types = (*inputs, *(each.master for each in graph.parameters), *nodes)
    axes = {axis.name: axis.size for type in types for axis in type.axes} or {"any": 1}
    declared = ", ".join(f"{name} = {size}" for name, size in axes.items())
    first = next(iter(axes))
    rules = rules or f"shard {first} -> {', '.join(re.findall(r'[a-z]+', mesh))}"  # which every mesh axis needs
    parameters = {each.name.rsplit(".", 1)[-1]: ", ".join(each.master.names) for each in graph.parameters}
    blocks = dict.fromkeys(each.name for each in graph.scopes if not each.repeat)
    repeats = {each.name: each.iterations for each in graph.scopes if each.repeat}
    text = FILE.format(
        axes=declared,
        first=first,
        blocks="\n".join(f"block {name}(x: [{first}]) {{ return x * 2.0 }}" for name in blocks),
        parameters="\n  ".join(f"param {name}: [{axes}] ~ ones()" for name, axes in parameters.items()),
        uses="\n  ".join(
            [f"let y = {name}(y)" for name in blocks]
            + [f"repeat {iterations} as {name} {{ let y = y * 2.0 }}" for name, iterations in repeats.items()]
        ),
        loss=" + ".join(["mean(y)", *(f"mean({name})" for name in parameters)]),
        mesh=mesh,
        links=f"link = [{links}]" if links else "",
        rules=rules,
        optimizer=optimizer,
    )
    spec, diagnostics = load_text(text, "case.par", fitting=False)
    if spec is None:
        raise Refused(diagnostics)
    return spec


def mesh_and_pipe(spec: Spec, chunks: int = 1) -> tuple[Mesh, placing.Pipeline]:
    """The mesh of a file, and its pipeline."""
    pipeline = placing.pipeline_of(spec.layout, spec.mesh, chunks)
    return mesh_of(spec.mesh, pipeline.axis), pipeline


# ---------------------------------------------------------------- passes


def build(form: Form, *, precision: str = "f32", training: bool = True) -> Form:
    """A `.par` file → its model as a graph."""
    model, _ = checked(form.text, "case.par").trained
    return whole(building.build(model, precision, training))


def guard(form: Form) -> Form:
    """Count ids that may be outside the axis that they index."""
    return whole(guards.guarded(form.graph()))


def place(form: Form, *, mesh: str, rules: str, chunks: int = 1) -> Form:
    """Nodes on stages."""
    spec = file_of(form.graph(), mesh, rules)
    _, pipeline = mesh_and_pipe(spec, chunks)

    def weigh(graph: Graph) -> dict[int, float]:
        found: dict[int, float] = {}
        for node in graph.nodes:
            found[node.placed_on] = found.get(node.placed_on, 0.0) + seconds(node, device_of(spec.mesh))
        return found

    iterations = placing.balanced(form.graph(), pipeline, spec.layout, weigh)
    return whole(placing.place(form.graph(), pipeline, spec.layout, iterations))


def differentiate(form: Form) -> Form:
    """Append the backward pass."""
    return whole(differentiating.differentiate(form.graph()))


def in_float8(form: Form) -> Form:
    """Products of eight bits are marked."""
    return whole(of_float8.in_float8(form.graph()))


def expanded(form: Form) -> Form:
    """Marked products are made of quantized operands."""
    return whole(of_float8.expanded(form.graph()))


def fuse(form: Form) -> Form:
    """One operation for the three gradients of a layer norm."""
    return whole(fusing.fuse(form.graph()))


def remat_scopes(form: Form, *, rules: str, mesh: str = "data = 1") -> Form:
    """Inner values of scopes are computed again."""
    layout = file_of(form.graph(), mesh, rules).layout
    found = [rule for rule in (layout.rules if layout else ()) if isinstance(rule, RecomputeRule)]
    return whole(recomputing.remat_scopes(form.graph(), found))


def remat_cheap(form: Form, *, gathered: bool = False) -> Form:
    """What is cheap is made again."""
    return whole(rematerializing.remat_cheap(form.graph(), gathered))


def microbatch(form: Form, *, microbatches: int, over: str = "batch") -> Form:
    """The graph of one microbatch, and of the end of a step."""
    return whole(split_batch(form.graph(), over, microbatches))


def shard(form: Form, *, mesh: str, rules: str, links: str = "", hoist: bool = True) -> Form:
    """Every value laid out over a mesh."""
    graph = form.graph()
    spec = file_of(graph, mesh, rules, links=links)
    on, _ = mesh_and_pipe(spec)
    found = sharding(graph, default_layouts(spec, on), Resharding(on), cutting.portable_values(graph), hoist)
    return Form(sharded_text(found, places=False), found)


def cut(form: Form, *, stages: int) -> Form:
    """A graph for each stage."""
    form = evolve(form, sharded=form.layouts())
    return cut_up(form, cutting.cut(form.graph(), stages))


def group(form: Form) -> Form:
    """Rows in the order of their experts from one product to the next."""
    return cut_up(form, grouping.grouped(form.stages()))


def overlap(form: Form) -> Form:
    """The nodes of stages in an order that overlaps; small collectives travel together."""
    return cut_up(form, overlapping.overlapped(form.stages()))


def pieces(form: Form, *, most: dict[str, int]) -> Form:
    """Collectives beside products in pieces."""
    return cut_up(form, cutting_up.in_pieces(form.stages(), most)[0])


def update(
    form: Form, *, mesh: str, optimizer: str = "sgd(lr = 0.1)", clip: float | None = None, ema: float | None = None
) -> Form:
    """The end of a step; its mesh is the one that layouts speak of."""
    partitioned = form.stages()
    spec = file_of(partitioned.graph, mesh, optimizer=optimizer)
    on = mesh_of(spec.mesh, None)
    updates = assign(partitioned.graph, spec.trained[1].optimizer).updates
    timed = partial(seconds, device=device_of(spec.mesh))
    found = update_graph(partitioned, form.layouts().parameters, Resharding(on), updates, clip, timed, ema)
    return Form(update_text(found, places=False))


STEPS: dict[str, Step] = {
    each.__name__: each
    for each in (
        build,
        guard,
        place,
        in_float8,
        differentiate,
        fuse,
        expanded,
        remat_scopes,
        remat_cheap,
        microbatch,
        shard,
        cut,
        group,
        overlap,
        pieces,
        update,
    )
}
