"""Blocks and models → typed bodies in SSA form (`partita.dsl.spec.Body`).

A block's body is checked once for each set of axes that it is called over, callees before callers, so that even deep
chains and exponential nesting of calls are cheap. Every declared block is also checked over its own axes. Errors do not
cascade: what depends on something wrong is silently unknown.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from partita.dsl import limits, spec
from partita.dsl.check.bodies import BodyChecker
from partita.dsl.check.constants import shown
from partita.dsl.check.instances import arrows_of, block_of
from partita.dsl.check.known import CheckContext
from partita.dsl.diagnostic import refuse
from partita.dsl.names.declarations import Declarations
from partita.dsl.names.scope import Checked, Instance, Scope, composed
from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Span
from partita.dsl.syntax.walk import nodes

NESTED = 24  # calls that are checked where they stand, each within the one before


@frozen
class CallSite:
    """A call of a block as written: callee, arrows and place."""

    block: str
    arrows: tuple[tuple[str, str], ...]
    span: Span


class Models:
    """Checks the blocks and models of a file."""

    def __init__(self, known: CheckContext) -> None:
        self.known = known
        self.declarations, self.axes, self.report = known.declarations, known.axes, known.report
        self._sites: dict[str, tuple[CallSite, ...]] = {}
        self._called: list[str] = []  # the blocks with numbers that are being checked, each called by the one before
        known.check = self.called

    # ------------------------------------------------------------ order of checking

    def block(self, instance: Instance) -> None:
        """Check a block over certain axes, after its callees."""
        stack: list[tuple[Instance, Iterator[tuple[CallSite, Instance]]]] = []
        entered: dict[str, None] = {}

        def enter(instance: Instance) -> None:
            entered[instance.block] = None
            stack.append((instance, iter(self.calls(instance))))

        if instance not in self.known.checked:
            enter(instance)
        while stack:
            current, pending = stack[-1]
            for site, callee in pending:
                if callee.block in entered:
                    names = list(entered)
                    cycle = " calls ".join([*names[names.index(callee.block) :], callee.block])
                    self.report.error("E0218", f"block `{callee.block}` calls itself", site.span, [cycle])
                    self.known.checked[callee] = None
                elif callee not in self.known.checked:
                    enter(callee)
                    break
            else:
                stack.pop()
                del entered[current.block]
                self._note_axes(current.block)
                if current not in self.known.checked:
                    self.known.checked[current] = self._block(current)

    def called(self, instance: Instance, call: tree.Call) -> None:
        """Check a block with the numbers of a call, where it is called: only there they are known.

        Raises Refused (E0005, E0218).
        """
        name = instance.block
        if name in self._called:
            cycle = " calls ".join([*self._called[self._called.index(name) :], name])
            raise refuse("E0218", f"block `{name}` calls itself", call.span, notes=[cycle])
        if len(self._called) == NESTED:
            raise refuse("E0005", f"more than {NESTED} nested calls of blocks that take numbers", call.span)
        self._called.append(name)
        numbers = (each.name.text for each in self.declarations.blocks[name].inputs if each.is_number)
        values = (f"`{number}` is {shown(value)}" for number, value in zip(numbers, instance.numbers, strict=True))
        with self.report.noting(f"where {', '.join(values)}, in the call at {call.span.place}"):
            self.block(instance)
        self._called.pop()

    def takes_numbers(self, block: str) -> bool:
        """Whether a block has inputs that are numbers."""
        return any(each.is_number for each in self.declarations.blocks[block].inputs)

    def _note_axes(self, block: str) -> None:
        """Collect the axes that a block and its callees mention."""
        if block not in self.known.mentioned:
            self.known.mentioned[block] = frozenset()
            for site in self.sites(block):
                self._note_axes(site.block)
            own = set(_mentions(self.declarations.blocks[block], self.declarations))
            for site in self.sites(block):
                own |= self.known.mentioned.get(site.block, frozenset())
            self.known.mentioned[block] = frozenset(own)

    def calls(self, instance: Instance) -> list[tuple[CallSite, Instance]]:
        """The block calls in an instance, each with the instance that it calls, but for those with numbers."""
        outer, known = dict(instance.substitution), []
        for site in self.sites(instance.block):
            if self.takes_numbers(site.block):
                self._note_axes(site.block)
            else:
                known.append((site, Instance(site.block, composed(outer, site.arrows))))
        return known

    def sites(self, block: str) -> tuple[CallSite, ...]:
        """The calls of blocks in a block, as written."""
        if block not in self._sites:
            self._sites[block] = tuple(self._calls_in(self.declarations.blocks[block]))
        return self._sites[block]

    def _calls_in(self, declaration: tree.Block | tree.Model) -> Iterator[CallSite]:
        blocks, shared = self.declarations.blocks, dict[str, CallSite]()
        for node in nodes(declaration):
            match node:
                case tree.Share(name=name, block=written) if (block := block_of(written)) and block.text in blocks:
                    shared[name.text] = CallSite(block.text, tuple(arrows_of(written)), block.span)
                    yield shared[name.text]
                case tree.Copy(name=name, source=source) if source.text in shared:
                    shared[name.text] = shared[source.text]
                case tree.Call(name=name) if name.text in shared:
                    site = shared[name.text]
                    yield CallSite(site.block, (*site.arrows, *arrows_of(node)), name.span)
                case tree.Call(name=name) if name.text in blocks:
                    yield CallSite(name.text, tuple(arrows_of(node)), name.span)

    # ------------------------------------------------------------ blocks and models

    def _block(self, instance: Instance) -> Checked | None:
        block = self.declarations.blocks[instance.block]
        errors = self.report.errors
        scope = Scope(self.known.constants, dict(instance.substitution))
        checker = BodyChecker(self.known, scope, block.body)
        names = checker.inputs(block.inputs, instance.numbers)
        checker.statements(block.body)
        results: list[spec.Operand] = []
        known = True
        for value in block.results.values:
            result = checker.expressions.tensor(value)
            known = known and result is not None
            if result is not None:
                results.append(result.value)
        if not known or self.report.errors > errors or checker.failed:
            return None
        return self._within_limits(scope.finish(names, results), block.name)

    def model(self, model: tree.Model) -> spec.Model | None:
        """Check a model, after its callees; None after reporting errors."""
        for site in self._calls_in(model):
            if self.takes_numbers(site.block):
                self._note_axes(site.block)
            else:
                self.block(Instance(site.block, composed({}, site.arrows)))
        errors = self.report.errors
        scope = Scope(self.known.constants, {})
        checker = BodyChecker(self.known, scope, model.body, top=True)
        names = checker.inputs(model.inputs)
        checker.statements(model.body)
        if not checker.has_loss:
            help = "end it with `loss cross_entropy(…)` or another scalar"
            self.report.error("E0221", f"model `{model.name.text}` has no `loss`", model.name.span, help=help)
        if self.report.errors > errors or checker.loss is None or checker.failed:
            return None
        # A model captures nothing, so its values keep their numbers.
        metrics = tuple((name, value.number) for name, value in checker.metrics)
        loss = checker.loss[0].number
        checked = self._within_limits(scope.finish(names, [loss, *(number for _, number in metrics)]), model.name)
        outputs = tuple((name, value.number) for name, value in checker.checked_outputs())
        if self.report.errors > errors or checker.failed or checked is None:
            return None
        answering = self._within_limits(scope.finish(names, [number for _, number in outputs]), model.name)
        if answering is None:
            return None
        for step in answering.body.steps[len(checked.body.steps) :]:
            if isinstance(step, spec.CallBlock) and any(spec.parameters(step.body)):
                message = f"`{step.block}` has parameters of its own here, which nothing trains"
                help = "bind its result by `let`, and use it for the loss too, or freeze its parameters"
                self.report.error("E0226", message, step.span, help=help)
        if self.report.errors > errors:
            return None
        return spec.Model(
            model.name.text,
            checked.body,
            loss,
            checker.loss[1],
            metrics,
            model.name.span,
            checked.nodes,
            outputs,
            answering.body,
            operations=self._operations(answering.body),
            formulas=dict(self.known.axes.formulas),
            losses=tuple(checker.losses),
        )

    def _operations(self, body: spec.Body) -> dict[str, spec.Operation]:
        """The file's own operations that a body uses, by name."""
        used = {step.options["name"] for step in spec.applications(body) if step.function == spec.OPERATION}
        return {
            name: operation
            for name, operation in self.known.operations.items()
            if operation is not None and name in used
        }

    def _within_limits(self, checked: Checked, name: tree.Name) -> Checked | None:
        if checked.depth > limits.SCOPES:
            message = f"`{name.text}` has more than {limits.SCOPES} nested blocks and repeats"
            self.report.error("E0005", message, name.span)
            return None
        if checked.nodes > limits.STEPS:
            message = f"`{name.text}` has {checked.nodes:,} steps when its repeats are expanded"
            self.report.error("E0008", message, name.span, help=f"at most {limits.STEPS:,}")
            return None
        return checked


def _mentions(block: tree.Block, declarations: Declarations) -> Iterator[str]:
    """The axes that a block mentions, and those of the operations that it calls."""
    for node in nodes(block):
        match node:
            case tree.TensorType(axes=axes):
                yield from (axis.text for axis in axes)
            case tree.Scan(axis=axis):
                yield axis.text
            case tree.Path(parts=(name, *_)) if name.text in declarations.axes:
                yield name.text
            case tree.Call(name=name) if name.text in declarations.operations:
                types = declarations.operations[name.text].types
                yield from (axis.text for type in types for axis in type.axes)
