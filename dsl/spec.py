"""A checked `.par` file, as the compiler reads it: all names are resolved.

A model is a `Body` in SSA form. Values are numbered within their body: first the inputs, then the results of each step
in order. Blocks and repeats are steps with a body of their own, checked once however often it is called or iterated;
the compiler expands them.

Dtype `f32` in a body means "the float dtype of the computation", which `train.precision` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from math import prod
from typing import Any, TypeAlias, TypeVar

from attrs import Factory, evolve, field, frozen

from partita.dsl.check.formulas import Formula, Size, resized, value_of
from partita.dsl.diagnostic import refuse
from partita.dsl.names.correspondence import Weights
from partita.dsl.reprs import Pictured, Shortened, count, outline
from partita.dsl.syntax.source import Source, Span
from partita.dsl.types import Axis, Type


@frozen(repr=False)
class Call(Shortened):
    """A settings call such as `adamw(lr = 1e-3)`, with defaults filled in and values converted.

    Numbers are in base units: bytes, seconds, FLOP/s, bytes/s, ratios (8% is 0.08). A name is a string, a nested call a
    `Call`, a list a tuple.
    """

    name: str
    arguments: Mapping[str, Any]
    span: Span | None = field(default=None, eq=False)


# The default of `over` in the call of a schedule.
BATCH = "batch"
# The axis that slices cut where `over` names only one.
SEQUENCE = "seq"
# The default of `train.on_bad_step`.
STOP = Call("stop", {"spike": None, "window": 100})
# The default of `train.validate`; and updates that do not wait, with the default of `calm`.
BEFORE = Call("before", {})
AFTER = Call("after", {"calm": 10})
# The default of `outer` in `train.sync`: groups take their mean.
MEAN = Call("sgd", {"lr": 1.0})


# ---------------------------------------------------------------- models


@frozen
class Literal:
    """A number or boolean in an expression; it takes the other operand's dtype.

    `formula` says how it was computed, if axis sizes took part in it.
    """

    value: float | int | bool
    formula: Size | Formula | None = field(default=None, eq=False)

    def at(self, sizes: Mapping[str, int]) -> float | int | bool:
        """The number under other axis sizes; the original one if the formula is undefined for these."""
        if self.formula is None:
            return self.value
        try:
            number = value_of(self.formula, sizes)
            return int(number) if number == int(number) else float(number)
        except (ArithmeticError, ValueError):
            return self.value

    def resized(self, sizes: Mapping[str, int]) -> Literal:
        """The literal in a file of other axis sizes."""
        return self if self.formula is None else Literal(self.at(sizes), resized(self.formula, sizes))


Operand: TypeAlias = int | Literal


@frozen(eq=False, repr=False)
class Apply(Shortened):
    """A built-in function applied to values. One result.

    `options` holds what is not a tensor, as the function's typing rule returns it, with axes by name. `name` is that of
    the `let` that binds exactly this result, if any.
    """

    function: str
    operands: tuple[Operand, ...]
    options: Mapping[str, Any]
    type: Type
    span: Span = field(eq=False)
    name: str | None = None


@frozen(eq=False, repr=False)
class Parameter(Shortened):
    """A trained tensor, or a `buffer`. Its full name is the path of its scope and `name`. One result."""

    name: str
    type: Type
    initial: Call
    span: Span = field(eq=False)
    buffer: bool = False


@frozen(eq=False, repr=False)
class Sample(Shortened):
    """A random tensor, drawn again in each step. One result."""

    name: str
    type: Type
    distribution: Call
    span: Span = field(eq=False)


@frozen(eq=False, repr=False)
class CallBlock(Shortened):
    """A call of a block. `scope` is its path segment (`attention`; the second in a scope, `attention_2`).

    The results are those of `body`, in order. The parameters of a call of an `instance` are those of the
    `InstanceParameters` of that name, so many bodies outside.
    """

    block: str
    scope: str
    body: Body
    arguments: tuple[Operand, ...]
    span: Span = field(eq=False)
    instance: tuple[int, str] | None = None


@frozen(eq=False, repr=False)
class InstanceParameters(CallBlock):
    """`share scope = block`: a call without inputs and results, whose body has the parameters alone. A frozen copy has
    the initial values of the instance that it `copies`. With a `decay` its parameters, as its calls read them, are
    decay × what they were in the step before + (1 - decay) × those that it copies.
    """

    copies: tuple[int, str] | None = None
    decay: float | None = None


@frozen(eq=False, repr=False)
class SharedParameter(Shortened):
    """In a call of an instance, a parameter of that instance. One result."""

    parameter: Parameter
    span: Span = field(eq=False)


@frozen(eq=False, repr=False)
class Repeat(Shortened):
    """`repeat count as name`. `scope` is its path segment (`layer`; the second of that name, `layer_2`).

    The inputs of `body` are the carried values, then the captured ones; its results are the carried values after one
    iteration, and those of the last iteration are the results of this step. `carried` (the initial ones) and `captured`
    are numbered in the enclosing body. `names` are the names of the carried values.

    The other results of `body` are what an iteration keeps under the names `kept`. After the last carried values, the
    results of this step are, of each of these names, the values of all iterations.

    `bodies` has one body; or, where that reads the number of its iteration, one for each: they differ in numbers, and
    in which kept values they read.
    """

    name: str
    scope: str
    count: int
    bodies: tuple[Body, ...]
    carried: tuple[Operand, ...]
    captured: tuple[int, ...]
    names: tuple[str, ...]
    span: Span = field(eq=False)
    kept: tuple[str, ...] = ()

    @property
    def body(self) -> Body:
        """The body of the first iteration, whose parameters, values and steps all others have."""
        return self.bodies[0]

    def iteration(self, number: int) -> Body:
        """The body of an iteration."""
        return self.bodies[number % len(self.bodies)]


@frozen(eq=False, repr=False)
class Scan(Shortened):
    """`scan axis`: the body at one position of the axis after the other, or with `backward` from the last one.

    The inputs of `body` are the carried values, then the captured ones, which it sees without the axis; its results are
    the carried values after one position, and those of all positions are the results of this step, with the axis first.
    `carried` (the initial ones) and `captured` are numbered in the enclosing body, to whose scope the body belongs.
    """

    axis: Axis
    backward: bool
    body: Body
    carried: tuple[Operand, ...]
    captured: tuple[int, ...]
    names: tuple[str, ...]
    span: Span = field(eq=False)


Step: TypeAlias = Apply | Parameter | SharedParameter | Sample | CallBlock | Repeat | Scan


def result_count(step: Step) -> int:
    """The number of values that a step adds to its body."""
    if isinstance(step, CallBlock):
        return len(step.body.results)
    if isinstance(step, Repeat):
        return len(step.carried) + step.count * len(step.kept)
    return len(step.carried) if isinstance(step, Scan) else 1


@frozen(eq=False, repr=False)
class Update(Shortened):
    """What a buffer, the result of a step of the same body, is after a training step; or with `after`, what becomes of
    a parameter once all are updated.
    """

    buffer: int
    value: int
    span: Span = field(eq=False)
    after: bool = False


@frozen(eq=False)
class Body:
    """Steps in order. `types` has the type of every value of the body, inputs first; `results` are operands."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[Operand, ...]
    types: tuple[Type, ...]
    updates: tuple[Update, ...] = ()

    def __repr__(self) -> str:
        return f"<Body: {count(len(self.steps), 'step')}>"


@frozen(eq=False, repr=False)
class PythonFunction(Shortened):
    """`python("kernels.py", "fused_norm")`: a function of a Python file, whose text was read and not run."""

    source: Source
    name: str
    span: Span = field(eq=False)


@frozen(eq=False, repr=False)
class Operation(Shortened):
    """`op name(operands) -> results { … }`: an operation that the file defines by Python functions.

    `split` are axes along which it may be computed in parts, in the order of the first result; `linear` are the
    positions of the operands in which it is linear. `flops` is what an element of the first result takes. Without
    `backward`, its gradient is that of torch's autograd. `ties` are its axes whose sizes the file computes from others.
    """

    name: str
    operands: tuple[tuple[str, Type], ...]
    results: tuple[Type, ...]
    forward: PythonFunction
    backward: PythonFunction | None
    split: tuple[str, ...]
    linear: tuple[int, ...]
    flops: Literal
    ties: Mapping[str, Size | Formula] = field(eq=False)
    span: Span = field(eq=False)
    split_spans: tuple[Span, ...] = field(eq=False)
    linear_spans: tuple[Span, ...] = field(eq=False)

    @property
    def functions(self) -> tuple[PythonFunction, ...]:
        """Its functions."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)


@frozen(repr=False)
class AdapterRule(Shortened):
    """`lora targets -> call`: which matrices have an adapter beside them, and its `lora(…)` or `dora(…)`."""

    targets: tuple[tuple[str, ...], ...]
    call: Call
    span: Span = field(eq=False)
    target_spans: tuple[Span, ...] = field(eq=False)


# The function of each `Apply` that a call of an `op` becomes, one for each result. Its options are `name`, the number
# of the `result`, and `renamed`: pairs of axes of the declaration and those that replace them.
OPERATION = "op"


@frozen(eq=False)
class Model:
    """A model: its body's inputs are bound by name to what `train.data` yields. `loss` is a scalar float.

    `nodes` is the number of steps when all blocks and repeats are expanded. `outputs` are values of `answering`: the
    body, and what is computed for them alone. `operations` are the file's own that it uses, `formulas` those of the
    axes that the file computes from others. `losses` are those with names, which are metrics and add up to the loss.
    Of the rules in `adapters`, the first that names a matrix is its own.
    """

    name: str
    body: Body
    loss: int
    loss_span: Span = field(eq=False)
    metrics: tuple[tuple[str, int], ...]
    span: Span = field(eq=False)
    nodes: int
    outputs: tuple[tuple[str, int], ...] = ()
    answering: Body = field(default=Factory(lambda self: self.body, takes_self=True))
    operations: Mapping[str, Operation] = field(factory=dict)
    formulas: Mapping[str, Size | Formula] = field(factory=dict)
    losses: tuple[str, ...] = ()
    adapters: tuple[AdapterRule, ...] = ()

    def __repr__(self) -> str:
        return outline("Model", self.name, (count(len(self.body.inputs), "input"), count(self.nodes, "step")))


def applications(body: Body) -> Iterator[Apply]:
    """The applications of functions in a body and all nested bodies, each once."""
    return (step for step in steps(body) if isinstance(step, Apply))


def parameters(body: Body) -> Iterator[Parameter]:
    """The parameters and buffers of a body and all nested bodies, each once."""
    return (step for step in steps(body) if isinstance(step, Parameter))


def operands_of(step: Step) -> tuple[Operand, ...]:
    """The values of the enclosing body that a step reads; those of a body in it are its inputs."""
    match step:
        case Apply(operands=operands) | CallBlock(arguments=operands):
            return operands
        case Repeat() | Scan():
            return (*step.carried, *step.captured)
        case _:
            return ()


def inner_bodies(step: Step) -> tuple[Body, ...]:
    """The bodies in a step."""
    match step:
        case Repeat():
            return step.bodies
        case CallBlock() | Scan():
            return (step.body,)
        case _:
            return ()


def with_bodies(step: Step, change: Callable[[Body], Body]) -> Step:
    """A step whose bodies are changed."""
    match step:
        case Repeat():
            return evolve(step, bodies=tuple(map(change, step.bodies)))
        case CallBlock() | Scan():
            return evolve(step, body=change(step.body))
        case _:
            return step


def bodies(body: Body) -> Iterator[Body]:
    """A body and all nested ones, each once."""
    seen: set[int] = set()
    stack = [body]
    while stack:
        top = stack.pop()
        if id(top) not in seen:
            seen.add(id(top))
            yield top
            stack += [each for step in top.steps for each in inner_bodies(step)]


def pairs(first: Body, second: Body) -> Iterator[tuple[Step | None, Step | None]]:
    """The steps of two bodies that were checked from the same text, and of those in them, each pair once."""
    seen = {(id(first), id(second))}
    stack = [(first, second)]
    while stack:
        left, right = stack.pop()
        for one, other in zip_longest(left.steps, right.steps):
            yield one, other
            inner = zip(inner_bodies(one), inner_bodies(other), strict=False) if one and other else ()
            for each in inner:
                if (id(each[0]), id(each[1])) not in seen:
                    seen.add((id(each[0]), id(each[1])))
                    stack.append(each)


def steps(body: Body) -> Iterator[Step]:
    """The steps of a body and all nested bodies, each once."""
    seen = {id(body)}
    stack = [body]
    while stack:
        for step in stack.pop().steps:
            yield step
            for each in inner_bodies(step):
                if id(each) not in seen:
                    seen.add(id(each))
                    stack.append(each)


# ---------------------------------------------------------------- mesh and layout


@frozen(repr=False)
class Mesh(Shortened):
    """A device mesh. Ranks are numbered with the last axis fastest.

    `device` is `Call(preset)` or `Call("device", …)`, or None for this machine's; `links` likewise, by mesh axis.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    device: Call | None
    links: Mapping[str, Call]
    span: Span | None = field(default=None, eq=False)

    def size(self, axis: str) -> int:
        """The size of a mesh axis; 1 if the mesh has no such axis."""
        return dict(self.axes).get(axis, 1)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return prod(size for _, size in self.axes)


@frozen(repr=False)
class Target(Shortened):
    """What a shard rule applies to: an axis name or a class (`param`, `grad`, `state`), of one tensor or of all."""

    path: tuple[str, ...] | None
    name: str
    is_class: bool
    span: Span = field(eq=False)


@frozen(repr=False)
class ShardRule(Shortened):
    """`shard targets -> mesh axes uneven by order, exchange`.

    `zigzag`: the positions of the axis stand in that order (`partita.compiler.passes.zigzag`). `exchange` is how
    attention over the axis gets at keys and values of other ranks; None for the fastest. `uneven` is what happens to an
    axis that does not divide: it is PADDED, or REPEATED over ranks; None: it is refused.
    """

    targets: tuple[Target, ...]
    mesh_axes: tuple[str, ...]
    span: Span = field(eq=False)
    zigzag: bool = False
    exchange: str | None = None
    uneven: str | None = None


@frozen(repr=False)
class StageRule(Shortened):
    """`stage repeats -> mesh axis [layers per stage]`."""

    repeats: tuple[str, ...]
    mesh_axis: str
    counts: tuple[int, ...] | None
    span: Span = field(eq=False)


@frozen(repr=False)
class PlaceRule(Shortened):
    """`place paths -> mesh axis[first .. last]`, both inclusive. `path_spans` has one span per path."""

    paths: tuple[tuple[str, ...], ...]
    mesh_axis: str
    first: int
    last: int
    span: Span = field(eq=False)
    path_spans: tuple[Span, ...] = field(eq=False)


@frozen(repr=False)
class RecomputeRule(Shortened):
    """`recompute paths`; the paths `("all",)` and `("auto",)` are keywords."""

    paths: tuple[tuple[str, ...], ...]
    span: Span = field(eq=False)
    path_spans: tuple[Span, ...] = field(eq=False)


@frozen(repr=False)
class OffloadRule(Shortened):
    """`offload paths`; the paths `("all",)`, `("param",)` and `("state",)` are keywords. `mapped`: parameters are files
    that are mapped into memory (`by mmap`).
    """

    paths: tuple[tuple[str, ...], ...]
    span: Span = field(eq=False)
    path_spans: tuple[Span, ...] = field(eq=False)
    mapped: bool = False


@frozen(repr=False)
class OverlapRule(Shortened):
    """`overlap mesh axes in pieces`: into how many pieces collectives along them are cut, beside products."""

    mesh_axes: tuple[str, ...]
    pieces: int
    span: Span = field(eq=False)


Rule: TypeAlias = ShardRule | StageRule | PlaceRule | RecomputeRule | OffloadRule | OverlapRule


Kind = TypeVar("Kind", bound=Rule)


def rules_of(layout: Layout | None, kind: type[Kind]) -> list[Kind]:
    """The rules of a kind in a layout, if there is one."""
    return [rule for rule in (layout.rules if layout else ()) if isinstance(rule, kind)]


@frozen(repr=False)
class Layout(Shortened):
    """A layout's rules, in the order in which they are tried."""

    name: str
    mesh: str
    rules: tuple[Rule, ...]
    span: Span | None = field(default=None, eq=False)


# ---------------------------------------------------------------- schedule, train, expect


@frozen(repr=False)
class Schedule(Shortened):
    """A declared schedule, or a built-in that `train` or the command line calls in place."""

    name: str
    call: Call
    span: Span | None = field(default=None, eq=False)

    @property
    def batch(self) -> str:
        """The axis that is split into microbatches."""
        over = self.call.arguments.get("over", BATCH)
        return str(over[0] if isinstance(over, tuple) else over)

    @property
    def sequence(self) -> tuple[str, int] | None:
        """The axis along which each microbatch is cut into slices, and their number; None if it is not."""
        over, count = (self.call.arguments.get(each) for each in ("over", "slices"))
        axis = str(over[1]) if isinstance(over, tuple) else SEQUENCE
        return (axis, int(count)) if count is not None and count > 1 else None


@frozen(repr=False)
class OptimizerRule(Shortened):
    """`update targets -> call`, or `freeze targets` if there is no call. `index` numbers the rules that update. With a
    `loss`, by the gradient of that one alone. Matrices that are frozen may be `stored` in a format, `nf4(…)`.
    What adapters freeze is only what they are `beside`, not they themselves.

    A target is a path; the paths `("all",)`, `("matrices",)`, `("vectors",)` and `("embeddings",)` are keywords.
    """

    targets: tuple[tuple[str, ...], ...]
    call: Call | None
    index: int = 0
    span: Span | None = field(default=None, eq=False)
    target_spans: tuple[Span | None, ...] = field(default=(), eq=False)
    loss: str | None = None
    beside: bool = False
    stored: Call | None = None

    def __str__(self) -> str:
        """The rule without the optimizer's arguments."""
        targets = ", ".join(".".join(target) for target in self.targets)
        stored = "" if self.stored is None else f" as {self.stored.name}"
        return f"freeze {targets}{stored}" if self.call is None else f"update {targets} -> {self.call.name}"


@frozen(repr=False)
class Optimizer(Shortened):
    """How parameters are updated: rules in order, the first that matches a parameter is its own.

    A call in the train block is an optimizer with one rule, for all parameters.
    """

    name: str
    rules: tuple[OptimizerRule, ...]
    span: Span | None = field(default=None, eq=False)

    @staticmethod
    def of(call: Call) -> Optimizer:
        """The optimizer that updates all parameters alike."""
        return Optimizer(call.name, (OptimizerRule((("all",),), call, 0, call.span, (call.span,)),), call.span)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of the rules that update, in order."""
        return tuple(rule.call for rule in self.rules if rule.call is not None)


@frozen
class Share:
    """A call of a list such as `[text("a") -> 70%, …]`, and its share of all of them, above 0 and at most 1."""

    call: Call
    share: float


@frozen(repr=False)
class Train(Shortened):
    """The train block, with defaults filled in. `spans` has the place of each entry that was written. `mixed`: what
    computes has a narrower dtype than masters; `float8`: some products are in eight bits; a proxy keeps both in mind.
    `dense`: gradients of tables have all rows, where that makes no difference to updates, as a reference has them.
    """

    data: Call
    optimizer: Optimizer
    steps: int
    precision: str = "f32"
    clip: float | None = None
    ema: float | None = None  # the decay of a mean of the weights
    seed: int = 0
    compile: bool | None = None  # with Inductor; None: only on a GPU
    graphs: bool = False  # on GPUs, capture a step as a CUDA graph
    eval: Call | None = None  # every(interval, batches = 10, weights = trained, data = …, sample = …)
    checkpoint: Call | None = None  # every(interval, dir = …, keep = …, copies = …)
    on_bad_step: Call = STOP  # stop, skip or rewind
    validate: Call = BEFORE  # before the update, or after(calm = 10)
    sync: Call | None = None  # every step; or local(groups, every, outer = …), delayed(steps) or paired()
    mixed: bool = field(default=Factory(lambda self: self.precision in ("bf16", "fp8"), takes_self=True), eq=False)
    float8: bool = field(default=Factory(lambda self: self.precision == "fp8", takes_self=True), eq=False)
    dense: bool = field(default=False, eq=False)
    spans: Mapping[str, Span] = field(factory=dict, eq=False)
    span: Span | None = field(default=None, eq=False)

    @property
    def dtype(self) -> str:
        """The dtype of tensors that are computed; with products in eight bits, of all others."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def late(self) -> bool:
        """Whether updates may be made before their step is validated."""
        return self.validate.name == "after"

    @property
    def local(self) -> Call | None:
        """How groups train apart and are averaged, if they do."""
        return self.sync if self.sync is not None and self.sync.name == "local" else None

    @property
    def groups(self) -> int:
        """The number of replica groups."""
        return 1 if self.local is None else int(self.local.arguments["groups"])

    @property
    def delay(self) -> int:
        """How many steps old the gradients of an update are."""
        if self.sync is not None and self.sync.name == "delayed":
            return int(self.sync.arguments["steps"])
        return int(self.paired)

    @property
    def paired(self) -> bool:
        """Whether an update has the gradients of two steps, and is estimated from the first of them until then."""
        return self.sync is not None and self.sync.name == "paired"

    def averages(self, step: int) -> bool:
        """Whether replica groups are averaged after a step: at each interval, and after the last step."""
        return self.local is not None and (step % int(self.local.arguments["every"]) == 0 or step == self.steps)


@frozen(repr=False)
class Claim(Shortened):
    """`measure(argument) comparison limit` of an expect block; the limit is in base units."""

    measure: str
    argument: tuple[str, ...]
    comparison: str
    limit: float
    span: Span = field(eq=False)


@frozen(eq=False)
class Spec(Pictured):
    """A checked file, with its overrides applied.

    `model`, `layout`, `schedule` are those that `train` names, or the only ones declared; None if the file leaves them
    open. `axes` are all declared axes by name. `weights` say what other programs call the parameters.
    """

    source: Source
    axes: Mapping[str, Axis]
    meshes: Mapping[str, Mesh]
    model: Model | None
    layout: Layout | None
    schedule: Schedule | None
    train: Train | None
    expect: tuple[Claim, ...]
    weights: Mapping[str, Weights] = field(factory=dict)

    def __repr__(self) -> str:
        return outline(
            "Spec",
            self.source.name,
            (
                f"model {self.model.name}" if self.model else None,
                f"layout {self.layout.name}" if self.layout else None,
                f"schedule {self.schedule.name}" if self.schedule else None,
                count(self.mesh.ranks, "rank") if self.mesh else None,
            ),
        )

    @property
    def trained(self) -> tuple[Model, Train]:
        """The model and how to train it. Raises Refused (E0410) if the file lacks either."""
        if self.model is None or self.train is None:
            missing = "train block" if self.train is None else "model"
            raise refuse("E0410", f"`{self.source.name}` has no {missing} to compile")
        return self.model, self.train

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the layout."""
        return self.meshes[self.layout.mesh] if self.layout else None

    @property
    def batch(self) -> str:
        """The axis that is split into microbatches, or would be."""
        return self.schedule.batch if self.schedule else BATCH

    @property
    def name(self) -> str:
        """The file's name without directory and suffix; runs are named after it."""
        return self.source.stem
