"""Operations through which packed documents see each other: warnings (W0203).

With `pack = true`, rows are filled with several documents (`partita.runtime.data.packing`), which the inputs `segments`
and `positions` tell apart. The model is followed from its inputs to its loss and metrics. Of each value is known

- whether it is a *mark*: computed from `segments` and `positions` alone, element by element. What is looked up by them,
  as an embedding of positions is, is none, nor is an angle of them;
- whether it is *marked*: computed element by element from a mark and others, as `where(positions == 0, 0.0, a)` is;
- its *leaks*: the operations along the sequence that it came through, and that no mark told where documents begin.

A `where` by a mark, or arithmetic with one, ends the leaks of the other operands: whether it is the right mark is not
checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from attrs import frozen

from partita.dsl import spec
from partita.dsl.advice.documents import POSITIONS, SEGMENTS, Mixing, beginning
from partita.dsl.advice.report import Report, listed
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.functions.rules import ARITHMETIC, COMPARISONS
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type

MARKS = (SEGMENTS, POSITIONS)
# So many steps are followed at most, those of a repeat a few times: a thousand layers have fewer.
MAX_STEPS = 100_000

ELEMENTWISE = frozenset(
    [
        *(*ARITHMETIC.values(), *COMPARISONS.values(), "maximum", "minimum", "power", "where", "cast"),
        *("logical_and", "logical_or", "logical_not", "negate", "abs", "sign", "floor", "round", "exp", "log", "sqrt"),
        *("rsqrt", "sigmoid", "log_sigmoid", "softplus", "tanh", "relu", "gelu", "silu", "erf"),
    ]
)
# Of what is a mark, these are one too.
REARRANGING = frozenset(
    [
        *("expand", "rename", "split", "merge", "concat", "slice", "stop_gradient", "dropout"),
        *("cumsum", "shift", "patches"),
    ]
)


def _over(step: spec.Apply) -> Sequence[str]:
    over: str | Sequence[str] = step.options["over"]
    return [over] if isinstance(over, str) else over


def _windows(step: spec.Apply, types: Sequence[Type]) -> Sequence[str]:
    """The axes along which a window of more than one position slides."""
    sized = step.type if step.function == "patches" else types[1]
    sizes = (sized.axis(name).size for name in step.options["size"])
    return [axis for axis, size in zip(step.options["axes"], sizes, strict=True) if size > 1]


# The axes along which a function computes a position from others. What sums over all positions, as a mean does, is none
# of them: the loss itself is such a sum.
ALONG: Mapping[str, Callable[[spec.Apply, Sequence[Type]], Sequence[str]]] = {
    **dict.fromkeys(
        ("attend", "linear_scan", "delta_rule", "cumsum", "shift", "softmax", "log_softmax"),
        lambda step, types: _over(step),
    ),
    **dict.fromkeys(("conv", "patches"), _windows),
}


@frozen
class LeakState:
    """What is known of a value. A mark is marked, too. `leaks` are numbers of operations."""

    mark: bool = False
    marked: bool = False
    leaks: frozenset[int] = frozenset()

    def joined(self, other: LeakState) -> LeakState:
        """What is known of a value that may be either."""
        return LeakState(self.mark and other.mark, self.marked and other.marked, self.leaks | other.leaks)


@frozen(eq=False)
class Leak:
    """An operation that no mark reaches: in which documents see each other, and the input and words of the help."""

    what: str
    span: Span
    takes: str
    help: str


def report_leaks(file: spec.Spec, report: Report) -> None:
    """Warn of each operation through which documents of packed rows see each other, if the data of a run is packed."""
    model, train = file.model, file.train
    packed = next(_packed(train), None) if train is not None else None
    if packed is None or model is None or "tokens" not in model.body.inputs:
        return
    inputs = dict(zip(model.body.inputs, model.body.types, strict=False))
    tokens = inputs["tokens"]
    following = _LeakAnalysis(tokens, _aliases(model.body, {axis for axis in tokens.names if axis != file.batch}))
    values = following.body(model.body, tuple(LeakState(name in MARKS, name in MARKS) for name in model.body.inputs))
    leaks = {leak for each in (model.loss, *(value for _, value in model.metrics)) for leak in values[each].leaks}
    place = (f"`{packed.span.text}`   ({packed.span.place})",) if packed.span else ()
    for leak in (following.leaks[number] for number in sorted(leaks)):
        message = f"documents that are packed into one row see each other in {leak.what}"
        prefix = f"take the input `{leak.takes}: i64[{', '.join(tokens.names)}]`, pass it to blocks, and "
        help = leak.help if leak.takes in inputs else prefix + leak.help
        report.add(Diagnostic("W0203", message, leak.span, place, help))


def _packed(train: spec.Train) -> Iterator[spec.Call]:
    """The calls of the data of a run, and of its evaluation, that pack."""
    waiting: list[object] = [train.data, train.eval]
    while waiting:
        top = waiting.pop()
        if isinstance(top, spec.Call):
            if top.arguments.get("pack"):
                yield top
            waiting += top.arguments.values()
        elif isinstance(top, tuple):
            waiting += top
        elif isinstance(top, spec.Share):
            waiting.append(top.call)


def _aliases(body: spec.Body, sequence: Iterable[str]) -> frozenset[str]:
    """The axes whose positions are those of the sequence, or made of them."""
    aliases = set(sequence)
    steps = [
        step for step in spec.applications(body) if step.function in ("rename", "split", "merge", "concat", "slice")
    ]
    while True:
        before = len(aliases)
        for step in steps:
            o = step.options
            pairs = o.get("pairs") or [
                (old, new)
                for old in o.get("axes", [o.get("axis")])
                for new in ([o["into"]] if isinstance(o["into"], str) else o["into"])
            ]
            aliases |= {new for old, new in pairs if old in aliases}
        if len(aliases) == before:
            return frozenset(aliases)


class _LeakAnalysis:
    """Follows values through bodies, forward. `leaks` are the operations met so far, by number."""

    def __init__(self, tokens: Type, aliases: frozenset[str]) -> None:
        self.tokens = tokens
        self.aliases = aliases
        self.leaks: dict[int, Leak] = {}
        self.numbers: dict[int, int] = {}
        self.known: dict[tuple[int, tuple[LeakState, ...]], list[LeakState]] = {}
        self.steps = 0

    def body(self, body: spec.Body, inputs: tuple[LeakState, ...]) -> list[LeakState]:
        """The leak state of each value of a body, computed once for the same inputs."""
        key = (id(body), inputs)
        if key not in self.known:
            values = list(inputs)
            for step in body.steps:
                self.steps += 1
                unknown = [LeakState()] * spec.result_count(step)
                values += unknown if self.steps > MAX_STEPS else self.step(step, body, values)
            self.known[key] = values
        return self.known[key]

    def step(self, step: spec.Step, body: spec.Body, values: Sequence[LeakState]) -> list[LeakState]:
        def of(operands: Iterable[spec.Operand]) -> tuple[LeakState, ...]:
            return tuple(values[each] if isinstance(each, int) else LeakState() for each in operands)

        match step:
            case spec.Apply():
                types = [body.types[each] if isinstance(each, int) else Type("f32") for each in step.operands]
                return [self.applied(step, of(step.operands), types)]
            case spec.CallBlock():
                return self.results(step.body, of(step.arguments))
            case spec.Repeat():
                results = self.turns(step.body, of(step.carried), of(step.captured))
                kept = results[len(step.carried) :]
                return [*results[: len(step.carried)], *(each for each in kept for _ in range(step.count))]
            case spec.Scan():
                return self.scanned(step, of(step.carried), of(step.captured))
            case _:
                return [LeakState()]

    def results(self, body: spec.Body, inputs: tuple[LeakState, ...]) -> list[LeakState]:
        """What is known of the results of a body."""
        values = self.body(body, inputs)
        return [values[each] if isinstance(each, int) else LeakState() for each in body.results]

    def turns(
        self, body: spec.Body, carried: tuple[LeakState, ...], captured: tuple[LeakState, ...]
    ) -> list[LeakState]:
        """The results after any number of turns, carried values first: leaks add up, until no turn adds any."""
        while True:
            results = self.results(body, (*carried, *captured))
            joined = tuple(a.joined(b) for a, b in zip(carried, results, strict=False))
            if joined == carried:
                return results
            carried = joined

    def scanned(
        self, step: spec.Scan, carried: tuple[LeakState, ...], captured: tuple[LeakState, ...]
    ) -> list[LeakState]:
        """A scan along the sequence leaks by the names whose new value has something of the old one."""
        number = self.numbers.setdefault(step.span.start, len(self.numbers))
        if step.axis.name not in self.aliases:
            return self.turns(step.body, carried, captured)
        old = tuple(LeakState(leaks=each.leaks | {number}) for each in carried)
        results = self.turns(step.body, old, captured)
        names = [name for name, each in zip(step.names, results, strict=True) if number in each.leaks]
        if names:
            takes, begins = beginning(step.axis.name, step.backward)
            bound = "begins" if step.backward else begins
            resets = "  ".join(f"let {name} = where({bound}, 0.0, {name})" for name in names)
            before = f"bind `let {bound} = {begins}` before it, and " if step.backward else ""
            what = f"this scan, which carries {listed(names)}"
            self.leaks[number] = Leak(what, step.span, takes, f"{before}begin its body by `{resets}`")
        return results

    def applied(self, step: spec.Apply, operands: Sequence[LeakState], types: Sequence[Type]) -> LeakState:
        function, o = step.function, step.options
        tensors = [each for each, operand in zip(operands, step.operands, strict=True) if isinstance(operand, int)]
        mark, marked = bool(tensors) and all(each.mark for each in tensors), any(each.marked for each in tensors)
        leaks = frozenset[int]().union(*(each.leaks for each in operands))
        if function in ELEMENTWISE:
            # A condition may be that of a document and another.
            telling = operands[:1] if function == "where" else operands
            ends = any(
                each.mark or (each.marked and not type.is_float) for each, type in zip(telling, types, strict=False)
            )
            return LeakState(mark, marked, frozenset() if ends and len(operands) > 1 else leaks)
        along = [axis for axis in ALONG[function](step, types) if axis in self.aliases] if function in ALONG else []
        if function == "attend":
            # Segments of one's own are as good: where documents begin may be seen from the tokens.
            apart = o.get("segments") or any(each.marked for each in operands[3:])
            leaks = frozenset[int]().union(
                *(each.leaks for each, type in zip(operands, types, strict=True) if type.is_float)
            )
        elif function == "delta_rule":
            apart = any(each.marked for each in operands[4:])
        elif function in ("linear_scan", "softmax", "log_softmax"):
            apart = operands[0].marked
        else:
            apart = mark or (marked and not step.type.is_float)
        if along and not apart:
            number = self.numbers.setdefault(step.span.start, len(self.numbers))
            mixing = Mixing(step, types, along[0], self.tokens.names)
            self.leaks[number] = Leak(f"`{function}`", step.span, *mixing.advice)
            leaks |= {number}
        rearranging = function in REARRANGING
        return LeakState(mark and rearranging, marked and rearranging, leaks)
