"""Adapters: beside the product with a matrix, that with two of low rank, which are trained in its place.

LoRA (Hu et al., arXiv:2106.09685) is `x W + alpha/rank (x A) B`: A is drawn as a linear layer of PyTorch is, B begins
with zeros. DoRA (Liu et al., arXiv:2402.09353) gives the sum of both matrices columns of a length of their own:
`(x W + alpha/rank (x A) B) m / |W + alpha/rank A B|`, where no gradient flows into the length that it divides by. That
`m` begins as `|W|`: what is trained is the difference, which begins with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

from attrs import define, field, frozen

from partita.compiler.graph import Builder, Node, Scope, Value
from partita.compiler.naming import around, matches, named_scopes
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import accumulation
from partita.compiler.ops.pointwise import Detach, cast, pointwise
from partita.compiler.ops.reduce import scaled, total
from partita.compiler.passes.functions import Site, lower, unified
from partita.dsl import spec
from partita.dsl.advice.report import suggestion
from partita.dsl.diagnostic import refuse
from partita.dsl.names.paths import DOWN, MAGNITUDE, UP
from partita.dsl.types import Axis, Type


@frozen(eq=False)
class Adapter:
    """The matrices of an adapter, the axes over which products sum, and what `dora` trains of lengths."""

    call: spec.Call
    over: tuple[str, ...]
    down: Value
    up: Value
    length: Value | None


@define(eq=False)
class Adapting:
    """Gives products the adapters of their matrices. `declare` makes a parameter in a scope; `scopes` are those of the
    model so far.
    """

    rules: Sequence[spec.AdapterRule]
    scopes: Sequence[Scope]
    declare: Callable[[str, spec.Parameter], Value]
    matrices: set[Value] = field(factory=set)  # that may have one
    made: dict[Value, Adapter] = field(factory=dict)
    taken: set[tuple[int, int]] = field(factory=set)  # the targets that name a matrix, by rule and position
    own: set[int] = field(factory=set)  # the nodes here that read matrices, by id

    def product(self, site: Site) -> Value:
        """A `dot`, and beside it that with the adapter of the matrix, if it has one. Raises Refused (E0409)."""
        build, (x, matrix), over = site.build, site.operands, tuple(site.options["over"])
        if x in self.matrices:
            x, matrix = matrix, x
        adapter = self._adapter(matrix, x.type, over) if matrix in self.matrices else None
        if adapter is None:
            return lower("dot", site)
        before = len(build.nodes)
        base = lower("dot", _named(site, site.operands, "base"))
        rank = adapter.down.type.axes[-1]
        rate, factor = adapter.call.arguments["dropout"], factor_of(adapter.call)
        if rate and site.training:
            kept = Site(build, (x,), {"rate": rate}, x.type, f"{site.name}.kept", site.training, site.shards)
            x = lower("dropout", kept)
        low = build.apply(Dot(over), *unified(build, (x, adapter.down)), name=f"{site.name}.down")
        beside = build.apply(Dot((rank.name,)), scaled(build, low, factor), adapter.up, name=f"{site.name}.up")
        result = pointwise(build, "add", base, beside, name=site.name if adapter.length is None else None)
        if adapter.length is not None:
            ratio = self._length(build, matrix, adapter, adapter.length, factor)
            result = pointwise(build, "multiply", result, ratio, name=site.name)
        self.own.update(id(node) for node in build.nodes[before:])
        return result

    def _length(self, build: Builder, matrix: Value, adapter: Adapter, own: Value, factor: float) -> Value:
        """The length of the columns of the sum of matrices as it is trained, over that which it has. `own` is what is
        added to that of the matrix.
        """
        wide = accumulation(matrix.type.dtype)
        plain, down, up = (cast(build, each, wide) for each in (matrix, adapter.down, adapter.up))
        low = build.apply(Dot((down.type.axes[-1].name,)), scaled(build, down, factor), up)
        both = pointwise(build, "add", plain, low)

        def length(tensor: Value) -> Value:
            return pointwise(
                build, "sqrt", total(build, pointwise(build, "multiply", tensor, tensor), adapter.over, wide)
            )

        trained = pointwise(build, "add", length(plain), cast(build, own, wide))
        ratio = pointwise(build, "divide", trained, build.apply(Detach(), length(both)))
        return cast(build, ratio, matrix.type.dtype)

    def _adapter(self, matrix: Value, x: Type, over: tuple[str, ...]) -> Adapter | None:
        """The adapter of a matrix, made where its first product is."""
        if matrix not in self.made:
            rule = self._rule(matrix)
            if rule is None:
                return None
            arguments = rule.call.arguments
            rank = Axis(f"rank_{arguments['rank']}", int(arguments["rank"]))
            axes = matrix.type.axes
            inner = [axis for axis in axes if axis.name in over]
            stacked = [axis for axis in axes if x.has(axis.name) and axis not in inner]
            outer = [axis for axis in axes if axis not in inner and axis not in stacked]
            bound = spec.Call("uniform", {"bound": prod(axis.size for axis in inner) ** -0.5})

            def declared(name: str, axes: Iterable[Axis], initial: spec.Call) -> Value:
                return self.declare(matrix.name, spec.Parameter(name, Type("f32", tuple(axes)), initial, rule.span))

            zeros = spec.Call("zeros", {})
            down = declared(DOWN, (*stacked, *inner, rank), bound)
            up = declared(UP, (*stacked, rank, *outer), zeros)
            length = declared(MAGNITUDE, (*stacked, *outer), zeros) if rule.call.name == "dora" else None
            self.made[matrix] = Adapter(rule.call, over, down, up, length)
        adapter = self.made[matrix]
        if {*adapter.over} != {*over}:
            raise self._refused(matrix, "products over other axes read it")
        return adapter

    def _rule(self, matrix: Value) -> spec.AdapterRule | None:
        """The first rule that names a matrix, or a block or repeat around it."""
        for number, rule in enumerate(self.rules):
            for position, path in enumerate(rule.targets):
                scopes = named_scopes(self.scopes, path)
                if matches(path, matrix.name) or not set(scopes).isdisjoint(around(matrix.name)):
                    self.taken.add((number, position))
                    return rule
        return None

    def check(self, nodes: Iterable[Node]) -> None:
        """Refuse (E0409) rules that name no matrix, and matrices that are read otherwise than by their products."""
        nodes = list(nodes)
        for number, rule in enumerate(self.rules):
            for position, path in enumerate(rule.targets):
                if (number, position) not in self.taken:
                    message = f"`{'.'.join(path)}` is not, and contains none of, the matrices that `dot` multiplies by"
                    read = (value for node in nodes if isinstance(node.op, Dot) for value in node.inputs)
                    names = dict.fromkeys(each.name.rpartition(".")[2] for each in read if each in self.matrices)
                    help = suggestion(path[-1], names, "these are")
                    raise refuse("E0409", message, rule.target_spans[position], help=help)
        for node in nodes:
            for value in node.inputs:
                if value in self.made and id(node) not in self.own:
                    raise self._refused(value, f"`{node.op.label}` reads it, too")

    def _refused(self, matrix: Value, why: str) -> Exception:
        span = next(rule.span for rule in self.rules if rule is self._rule(matrix))
        message = f"`{matrix.name}` cannot have an adapter: {why}"
        return refuse("E0409", message, span, help="an adapter is for what `dot` alone reads, over the same axes")


def factor_of(call: spec.Call) -> float:
    """What the product with both matrices of an adapter is multiplied by."""
    return float((call.arguments["alpha"] or call.arguments["rank"]) / call.arguments["rank"])


def _named(site: Site, operands: Sequence[Value], ending: str) -> Site:
    name = f"{site.name}.{ending}"
    return Site(site.build, operands, site.options, site.type, name, site.training, site.shards)
