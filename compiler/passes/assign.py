"""Graph → graph with every parameter under a rule of the optimizer: the first that matches it, and can update it.

A target is a path (a parameter, or all those within a block or repeat), or a class, by how the model reads parameters:

- `matrices`: read by a `dot`, and of two axes or more;
- `embeddings`: tables whose rows an `embedding` looks up;
- `vectors`: those that are neither;
- `all`.

A tied parameter that both a `dot` and an `embedding` read belongs to both classes; the order of the rules decides. A
rule for several parameters leaves those that its optimizer cannot update to the rules behind it: `muon` the kernels of
a depthwise convolution, which are no matrices. A rule that names such a parameter itself is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from attrs import evolve, frozen

from partita.compiler.graph import Graph, Parameter
from partita.compiler.naming import around, matches, named_scopes
from partita.compiler.ops.optimizer import Update
from partita.compiler.optimizers.registry import OPTIMIZERS, Trained, decay_of
from partita.compiler.passes.readers import Readers
from partita.dsl.advice.report import suggestion
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.names.paths import adapters_in, split_part
from partita.dsl.spec import Call, Optimizer, OptimizerRule

# How many elements have one scale, and in which order of axes they follow each other.
Blocks: TypeAlias = tuple[int, tuple[str, ...]]
MAX_SHOWN = 4
MOVE = "move it before that rule, or remove it"


@frozen
class Unfit:
    """A rule that matches a parameter and leaves it to a later one, and `why` its optimizer cannot update it."""

    rule: OptimizerRule
    call: Call
    why: str


@frozen(eq=False)
class Assigned:
    """The graph with frozen parameters marked, the rule of each parameter and, unless that freezes it, its update.
    `blocks`: of matrices that are stored in four bits. `unfit` are the rules before that, of the parameters that have
    some.
    """

    graph: Graph
    rules: Mapping[str, OptimizerRule]
    unfit: Mapping[str, tuple[Unfit, ...]]
    updates: Mapping[str, Update]
    blocks: Mapping[str, Blocks]
    warnings: tuple[Diagnostic, ...]


def assign(graph: Graph, optimizer: Optimizer) -> Assigned:
    """Find the rule of each parameter. Raises Refused: E0409, E0414 to E0416."""
    readers = Readers(graph.nodes, graph.inside)
    targets = [_Target(graph, rule, path) for rule in optimizer.rules for path in rule.targets]
    rules: dict[str, OptimizerRule] = {}
    left: dict[str, tuple[Unfit, ...]] = {}
    updates: dict[str, Update] = {}
    blocks: dict[str, Blocks] = {}
    without: list[Parameter] = []
    for parameter in graph.parameters:
        if parameter.buffer:
            continue
        as_trained = _trained(parameter, readers)
        unfit: list[tuple[_Target, Unfit]] = []
        target = None
        for each in targets:
            if each.matches(parameter, as_trained):
                wrong = each.unfit(as_trained)
                if wrong is None:
                    target = each
                    break
                unfit.append((each, wrong))
        for each, wrong in unfit:
            if target is None or each.is_own(parameter):
                raise _refused(parameter, each, wrong)
        if target is None:
            without.append(parameter)
            continue
        if unfit:
            left[parameter.name] = tuple(wrong for _, wrong in unfit)
        target.taken.append(parameter)
        rule = rules[parameter.name] = target.rule
        if rule.stored is not None and is_matrix(as_trained) and not as_trained.rows:
            blocks[parameter.name] = int(rule.stored.arguments["block"]), _order(as_trained)
        if rule.call is not None:
            updates[parameter.name] = _update(parameter, as_trained, rule, rule.call)
    if without:
        raise Refused(_no_rule(without, optimizer))
    if not optimizer.calls or (rules and not updates):
        raise refuse(
            "E0415",
            f"optimizer `{optimizer.name}` trains nothing: every parameter of `{graph.name}` is frozen",
            optimizer.span,
            help="a rule `update … -> …` before the one that freezes the rest",
        )
    parameters = tuple(
        evolve(
            each,
            frozen=not each.buffer and each.name not in updates,
            loss=rules[each.name].loss if each.name in updates else None,
        )
        for each in graph.parameters
    )
    # A rule for each iteration of a repeat may be of some alone.
    used = {target.span for target in targets if target.taken}
    warnings = tuple(_idle(target, targets, graph) for target in targets if target.span not in used)
    return Assigned(evolve(graph, parameters=parameters), rules, left, updates, blocks, warnings)


def match_storage_dtype(graph: Graph, trained: Collection[str], blocks: Mapping[str, Blocks]) -> Graph:
    """The graph whose parameters that are not `trained` are stored in the dtype in which they are read, or in `blocks`
    in four bits: only what is updated needs more digits than that.
    """
    untrained = {each for each in graph.parameters if not each.buffer and each.name not in trained}
    return evolve(
        graph,
        parameters=tuple(
            evolve(each, master=each.value.type, blocks=blocks.get(each.name)) if each in untrained else each
            for each in graph.parameters
        ),
    )


class _Target:
    """A target of a rule; `taken` are the parameters that it applies to."""

    def __init__(self, graph: Graph, rule: OptimizerRule, path: tuple[str, ...]) -> None:
        self.rule, self.path = rule, path
        self.span = rule.target_spans[rule.targets.index(path)]
        self.text = ".".join(path)
        self.taken: list[Parameter] = []
        self.is_class = self.text in CLASSES
        self.scopes = frozenset(() if self.is_class else named_scopes(graph.scopes, path))
        parameters = [each for each in graph.parameters if not each.buffer]
        self.left_out = adapters_in([each.name for each in parameters]) if rule.beside else set()
        if not self.is_class and not any(map(self.names, parameters)):
            if any(self.names(each) for each in graph.parameters):
                message = f"`{self.text}` is not trained: it has buffers, or is a copy"
                raise refuse("E0409", message, self.span, help="rules are for parameters: leave it out")
            names = list(dict.fromkeys(each.name.rpartition(".")[2] for each in parameters))
            help = suggestion(path[-1], names, "its parameters:")
            raise refuse(
                "E0409", f"`{self.text}` is not a parameter of the model, and contains none", self.span, help=help
            )

    def names(self, parameter: Parameter) -> bool:
        """Whether the path is that of the parameter, or of a block or repeat around it."""
        return self.is_own(parameter) or not self.scopes.isdisjoint(around(parameter.name))

    def is_own(self, parameter: Parameter) -> bool:
        """Whether the path is that of the parameter itself."""
        last = split_part(self.path[-1])[0]
        return not self.is_class and parameter.name.endswith(last) and matches(self.path, parameter.name)

    def matches(self, parameter: Parameter, as_trained: Trained) -> bool:
        """Whether the target is the parameter, contains it, or is a class that it belongs to."""
        if parameter.name in self.left_out:
            return False
        return CLASSES[self.text](as_trained) if self.is_class else self.names(parameter)

    def unfit(self, as_trained: Trained) -> Unfit | None:
        """Why the rule cannot update a parameter; None if it can, or if it freezes it."""
        call = self.rule.call
        why = OPTIMIZERS[call.name].unfit(as_trained) if call is not None else None
        return Unfit(self.rule, call, why) if call is not None and why is not None else None


def is_matrix(parameter: Trained) -> bool:
    """Whether a `dot` reads it, and it has two axes or more."""
    return parameter.matrix is not None and len(parameter.type.axes) > 1


CLASSES: Mapping[str, Callable[[Trained], bool]] = {
    "all": lambda parameter: True,
    "matrices": is_matrix,
    "embeddings": lambda parameter: bool(parameter.rows),
    "vectors": lambda parameter: not is_matrix(parameter) and not parameter.rows,
}


def _trained(parameter: Parameter, readers: Readers) -> Trained:
    value = parameter.value
    return Trained(type=parameter.master, decay=0.0, matrix=readers.matrix(value), rows=readers.rows(value))


def _order(matrix: Trained) -> tuple[str, ...]:
    """The axes of a matrix, those last that its first product sums: as in a linear layer of PyTorch."""
    assert matrix.matrix is not None
    of = matrix.matrix
    return (*of.stacked, *of.outer, *of.inner)


def _update(parameter: Parameter, as_trained: Trained, rule: OptimizerRule, call: Call) -> Update:
    decayed = evolve(as_trained, decay=decay_of(call, parameter.decays))
    lazy = bool(call.arguments.get("sparse"))
    made = OPTIMIZERS[call.name].update(call.arguments, decayed)
    turns = call.arguments.get("every", 1), call.arguments.get("from", 1)
    return evolve(made, rate=rule.index, lazy=lazy, every=int(turns[0]), first=int(turns[1]))


def _refused(parameter: Parameter, target: _Target, wrong: Unfit) -> Refused:
    """E0416: a rule names a parameter that its optimizer cannot update, or no later rule can."""
    call = wrong.call
    declared = f", declared at {parameter.span.place}" if parameter.span else ""
    if target.span == call.span:  # the optimizer is this call, without rules
        rules = f"update matrices -> {call.name}(…)  update all -> adamw(…)"
        help = f"an optimizer with rules, and its name here: `optimizer mixed {{ {rules} }}`"
    elif target.is_own(parameter):
        help = f"another optimizer for it: `update {target.text} -> adamw(…)`"
    else:
        behind = "for what it leaves: `update all -> adamw(…)`"
        help = f"a rule behind this one, {behind}"
        if target.text == "all":  # behind which there is nothing
            help = f"`update matrices -> {call.name}(…)`, and a rule behind it, {behind}"
    return refuse(
        "E0416",
        f"`{call.name}` cannot update `{parameter.name}`: {wrong.why}",
        target.span,
        notes=[f"{parameter.name}: {parameter.master}{declared}"],
        help=help,
    )


def _no_rule(parameters: Sequence[Parameter], optimizer: Optimizer) -> Iterator[Diagnostic]:
    """E0414, once for each declaration."""
    seen = set()
    for each in parameters:
        if each.span not in seen:
            seen.add(each.span)
            yield Diagnostic(
                "E0414",
                f"no rule of optimizer `{optimizer.name}` applies to parameter `{each.name}`",
                each.span,
                help="end with a rule for all others: `update all -> adamw(…)`, or `freeze all`",
            )


def _idle(target: _Target, targets: Sequence[_Target], graph: Graph) -> Diagnostic:
    """W0301: a target that applies to nothing, with the rules that precede it, or why its optimizer cannot."""
    notes: list[str] = []
    help = "the model has none: remove it"
    readers = Readers(graph.nodes, graph.inside)
    for parameter in graph.parameters:
        as_trained = _trained(parameter, readers)
        if not parameter.buffer and target.matches(parameter, as_trained):
            wrong, first = target.unfit(as_trained), next(each for each in targets if parameter in each.taken)
            if help != MOVE:
                help = "remove it" if wrong is not None else MOVE
            if len(notes) < MAX_SHOWN:
                place = f" ({first.span.place})" if first.span else ""
                came = f"is matched by `{first.rule}`{place} before"
                if wrong is not None:
                    came = f"is left to `{first.rule}`{place}: {wrong.why}"
                notes.append(f"{parameter.name} {came}")
    message = f"`{target.text}` in `{target.rule}` applies to no parameter"
    return Diagnostic("W0301", message, target.span, tuple(notes), help)
