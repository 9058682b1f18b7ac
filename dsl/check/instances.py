"""Blocks whose parameters several calls share: `share name = block`, and copies of these that are not trained.

The parameters of an instance are those of a call without inputs and results, where it is declared. In the bodies of its
calls each parameter is a `SharedParameter`: the instance's, in the same place.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from partita.dsl import spec
from partita.dsl.advice.report import suggestion
from partita.dsl.check import constants
from partita.dsl.check.known import CheckContext
from partita.dsl.diagnostic import refuse
from partita.dsl.names.scope import Instance, Scope, SharedBlock, composed
from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Span


class Instances:
    """What a body declares to be shared."""

    def __init__(self, known: CheckContext, scope: Scope, number: constants.Lookup) -> None:
        self.known, self.scope, self.number = known, scope, number

    def share(self, statement: tree.Share) -> None:
        """`share name = block`, or `block(axis -> axis)`. Raises Refused (E0206, E0217, E0228)."""
        block = block_of(statement.block)
        self._declare(statement.name)
        declared = self.known.declarations.blocks
        if block is None or block.text not in declared:
            text = statement.block.span.text if block is None else block.text
            help = suggestion(text, declared) or "`share tower = net`, of a `block net`"
            raise refuse("E0206", f"`{text}` is no block", statement.block.span, help=help)
        if any(each.is_number for each in declared[block.text].inputs):
            help = f"in a block without such inputs call `{block.text}`, and share that"
            raise refuse("E0228", f"`{block.text}` takes numbers", statement.block.span, help=help)
        substitution = composed(self.scope.substitution, arrows_of(statement.block))
        checked = self.known.checked.get(Instance(block.text, substitution))
        self.known.called.add(block.text)
        if checked is None:
            return
        following = next(filter(None, map(_changes_once, spec.bodies(checked.body))), None)
        if following is not None:
            message = f"`{block.text}` has {following}, which each of several calls would make"
            raise refuse("E0228", message, statement.block.span, help=f"call `{block.text}` itself, once")
        parameters = parameters_only(checked.body)
        if not parameters.steps:
            help = f"call `{block.text}` itself"
            raise refuse("E0228", f"`{block.text}` has no parameters to share", statement.block.span, help=help)
        self.scope.instances[statement.name.text] = SharedBlock(block.text, substitution, parameters)
        self._add(spec.InstanceParameters(block.text, statement.name.text, parameters, (), statement.span))

    def copy(self, statement: tree.Copy) -> None:
        """`frozen copy name = source`, or `ema copy name = source(decay = …)`. Raises Refused (E0201, E0217, E0228)."""
        declared = self.scope.shared(statement.source.text)
        self._declare(statement.name)
        if declared is None:
            name = statement.source.text
            kind, more = ("frozen", "") if statement.following is None else ("ema", "(decay = 0.99)")
            others = [each for each, block in self.scope.instances.items() if block is not None]
            help = suggestion(name, others) or f"declare it first: `share {name} = …`"
            if name in self.known.declarations.blocks:
                help = f"`share tower = {name}` before, and `{kind} copy {statement.name.text} = tower{more}`"
            raise refuse("E0201", f"nothing is shared as `{name}`", statement.source.span, help=help)
        levels, source = declared
        if source is None:
            return
        decay = None
        if statement.following is not None:
            decay = self._decay(statement, statement.following)
        parameters = _untrained(source.parameters)
        self.scope.instances[statement.name.text] = evolve(source, parameters=parameters, copied=True)
        of = (levels, statement.source.text)
        name, span = statement.name.text, statement.span
        self._add(spec.InstanceParameters(source.block, name, parameters, (), span, copies=of, decay=decay))

    def _decay(self, statement: tree.Copy, following: tuple[tree.Argument, ...]) -> float:
        """How much of its values a copy keeps from step to step."""
        (argument, *more) = (*following, None)
        name, source = statement.name.text, statement.source.text
        if argument is None or more[1:] or argument.name is None or argument.name.text != "decay":
            help = f"`ema copy {name} = {source}(decay = 0.99)`"
            raise refuse("E0228", "a copy that follows another takes a `decay`", statement.span, help=help)
        if self.scope.scans():
            message = "a copy that follows another one has a value in each step, and a scan has many positions"
            raise refuse("E0227", message, statement.span, help="declare it before the scan")
        decay = constants.evaluate(argument.value, self.number)
        if decay.dimension not in constants.UNITLESS or not 0 <= decay.value < 1:
            help = "near 1 it follows slowly: `decay = 0.99`"
            raise refuse("E0214", "the decay of a copy must be at least 0 and below 1", argument.value.span, help=help)
        return float(decay.value)

    def _declare(self, name: tree.Name) -> None:
        """Take the name; what is shared under it is not known yet."""
        if name.text in self.scope.segments:
            notes = [f"the first is at {self.scope.segments[name.text].place}"]
            raise refuse("E0217", f"`{name.text}` is declared twice here", name.span, notes=notes)
        if name.text in self.known.declarations.blocks:
            raise refuse("E0217", f"`{name.text}` is a block already", name.span, help="give it another name")
        self.scope.segments[name.text] = name.span
        self.scope.instances[name.text] = None

    def _add(self, step: spec.InstanceParameters) -> None:
        self.scope.add(step, [], max(1, sum(1 for _ in spec.steps(step.body))), 2)


def block_of(written: tree.Expression) -> tree.Name | None:
    """The block that is named, alone or with the axes that it is called over."""
    if isinstance(written, tree.Call) and all(isinstance(each.value, tree.Arrow) for each in written.arguments):
        return written.name
    return tree.single(written)


def arrows_of(written: tree.Expression) -> Iterator[tuple[str, str]]:
    """The axes that a call renames, as it is written."""
    for argument in written.arguments if isinstance(written, tree.Call) else ():
        if isinstance(argument.value, tree.Arrow):
            left, right = tree.single(argument.value.left), tree.single(argument.value.right)
            if left is not None and right is not None:
                yield left.text, right.text


# ---------------------------------------------------------------- bodies


def _changes_once(body: spec.Body) -> str | None:
    """What of a body changes something once a step, however often it is called."""
    if any(isinstance(step, spec.InstanceParameters) and step.decay is not None for step in body.steps):
        return "an `ema copy`"
    return "an `after update`" if any(each.after for each in body.updates) else None


def parameters_only(body: spec.Body) -> spec.Body:
    """The parameters of a body, and of those in it, as a body without inputs and results. The parameters are new: they
    are not those of other calls.
    """
    steps = tuple(_declarations(body))
    return spec.Body((), steps, (), tuple(step.type for step in steps if isinstance(step, spec.Parameter)))


def _declarations(body: spec.Body) -> Iterator[spec.Step]:
    for step in body.steps:
        match step:
            case spec.Parameter():
                yield evolve(step)
            case spec.CallBlock() if any(spec.parameters(step.body)):
                yield evolve(step, body=parameters_only(step.body), arguments=())
            case spec.Repeat() if any(spec.parameters(step.body)):
                bodies = tuple(map(parameters_only, step.bodies))
                yield evolve(step, bodies=bodies, carried=(), captured=(), names=(), kept=())
            case spec.Scan():  # which has no scope of its own
                yield from _declarations(step.body)


def _untrained(parameters: spec.Body) -> spec.Body:
    """The parameters of an instance, as those of a copy."""
    steps = tuple(
        evolve(step, buffer=True) if isinstance(step, spec.Parameter) else spec.with_bodies(step, _untrained)
        for step in parameters.steps
        if isinstance(step, spec.Parameter | spec.CallBlock | spec.Repeat)
    )
    return evolve(parameters, steps=steps)


def sharing(body: spec.Body, shared: SharedBlock, span: Span) -> spec.Body:
    """The body of a call, at this place, of an instance. Raises Refused (E0228) if one of its parameters has another
    type there, since the call is over other axes.
    """
    body = _sharing(body, iter(shared.parameters.steps), span, {})
    return _without_updates(body) if shared.copied else body


def _without_updates(body: spec.Body) -> spec.Body:
    steps = tuple(spec.with_bodies(step, _without_updates) for step in body.steps)
    return evolve(body, steps=steps, updates=())


def _sharing(
    body: spec.Body, declared: Iterator[spec.Step], span: Span, shared: dict[int, spec.Parameter]
) -> spec.Body:
    """`shared` has what each parameter stands for, by `id`: instances that the block has itself are called in it."""
    steps: list[spec.Step] = []
    for step in body.steps:
        match step:
            case spec.Parameter():
                own = next(declared)
                assert isinstance(own, spec.Parameter)
                if own.type != step.type:
                    message = f"`{own.name}` is {own.type} where it is shared, and {step.type} in this call"
                    raise refuse("E0228", message, span, help="a call may rename axes that no parameter has")
                shared[id(step)] = own
                step = spec.SharedParameter(own, step.span)
            case spec.SharedParameter():
                step = evolve(step, parameter=shared.get(id(step.parameter), step.parameter))
            case spec.Scan():  # which has no scope of its own
                step = evolve(step, body=_sharing(step.body, declared, span, shared))
            case spec.CallBlock() | spec.Repeat():
                inner = next(declared) if any(spec.parameters(step.body)) else None
                inside = iter(spec.inner_bodies(inner) if inner is not None else ())

                def shares(body: spec.Body, inside: Iterator[spec.Body] = inside) -> spec.Body:
                    parameters = next(inside, None)
                    return _sharing(body, iter(parameters.steps if parameters else ()), span, shared)

                step = spec.with_bodies(step, shares)
        steps.append(step)
    return evolve(body, steps=tuple(steps))
