"""The statements of an emitted function, in terms of nodes and values; `Names` turns them into text at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from attrs import evolve, field, frozen

from partita.compiler.codegen.multi_tensor import ForeachGroup
from partita.compiler.codegen.names import Names, View, place
from partita.compiler.graph import Node, Value
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.op import Argument
from partita.compiler.ops.optimizer import Accumulate, Update
from partita.compiler.ops.traits import Adding, Summing


class Statement:
    """Base class, with the values that a statement reads directly and the views of values that it takes."""

    @property
    def reads(self) -> Sequence[Value]:
        """Values read directly."""
        return ()

    @property
    def views(self) -> Sequence[View]:
        """Views taken."""
        return ()

    def text(self, names: Names) -> str:
        """The line of source."""
        raise NotImplementedError


@frozen(eq=False)
class Operation(Statement):
    """A computed node. `taken` has the view of each operand that it takes, None for an operand taken directly."""

    node: Node
    taken: tuple[View | None, ...]

    @property
    def reads(self) -> Sequence[Value]:
        """Operands."""
        if not self.taken:
            return self.node.inputs
        return [value for value, view in zip(self.node.inputs, self.taken, strict=True) if view is None]

    @property
    def views(self) -> Sequence[View]:
        """Views of operands."""
        return [view for view in self.taken if view is not None]


@frozen(eq=False)
class Compute(Operation):
    """A node with named results; `plus` is added to the first, and `ends` with that, if nothing else has its memory."""

    results: tuple[Value, ...]
    plus: Value | None = None
    ends: bool = False

    @property
    def reads(self) -> Sequence[Value]:
        """Operands and `plus`."""
        return (*super().reads, *([] if self.plus is None else [self.plus]))

    def text(self, names: Names) -> str:
        """`h = torch.mm(x, w)  # gpt.par:31`."""
        op, arguments = self.node.op, names.arguments(self.node, self.taken)
        types = [value.type for value in self.node.outputs]
        if self.plus is None:
            text = op.emit(arguments, types)
        else:
            assert isinstance(op, Summing), op
            other = names.texts[self.plus]
            into = op.emit_into(other, arguments, types) if self.ends else None
            text = into or op.emit_sum(other, arguments, types)
        if isinstance(op, Update) and op.condition:
            kept = ", ".join(names.texts[value].text for value in op.in_place(self.node.inputs))
            text = f"{text} if {op.condition} else {f'({kept})' if len(types) > 1 else kept}"
        return f"{names.bound(self.results)}{text}{place(self.node.span)}"


@frozen(eq=False)
class Each(Statement):
    """Updates of several parameters by one call."""

    call: ForeachGroup

    @property
    def reads(self) -> Sequence[Value]:
        """Operands."""
        return self.call.reads

    def text(self, names: Names) -> str:
        """`kernels.adamw_of_each([m[0], m[1]], [t[1], t[0]], …)`."""
        updates, factor = self.call.updates, self.call.factor
        first = updates[0].op
        assert isinstance(first, Update), first
        text = first.emit_each(
            [names.arguments(node) for node in updates], None if factor is None else names.texts[factor]
        )
        return f"if {first.condition}: {text}" if first.condition else text


@frozen(eq=False)
class Add(Operation):
    """An accumulation in `target`: of the operand of an `Accumulate` node, or of the result of a node fused with it."""

    accumulation: Accumulate
    target: Value

    def text(self, names: Names) -> str:
        """`a[0].addmm_(x, d)  # gpt.par:31`."""
        op, arguments = self.node.op, names.arguments(self.node, self.taken)
        target = Argument(names.text(self.target), self.accumulation.type)
        if op is self.accumulation:
            text = self.accumulation.statement(target.text, arguments[0])
        else:
            assert isinstance(op, Adding), op
            text = op.emit_added(target, arguments, self.node.output.type)
        return f"{text}{place(self.node.span)}"


@frozen(eq=False)
class Start(Statement):
    """Starts a collective under a handle."""

    node: Node
    op: Collective
    handle: str

    @property
    def reads(self) -> Sequence[Value]:
        """Operands."""
        return self.node.inputs

    def text(self, names: Names) -> str:
        """`h = c.all_reduce('tensor', (x,), False)`."""
        return f"{self.handle} = {self.op.start(names.arguments(self.node))}{place(self.node.span)}"


@frozen(eq=False)
class Wait(Statement):
    """Waits for a collective. The handle may be `given` by the caller; else a single result takes its name."""

    handle: str
    results: tuple[Value, ...]
    given: bool = False

    def text(self, names: Names) -> str:
        """`(h,) = yield h`."""
        results = names.list(self.results)
        if len(self.results) == 1:
            return f"({results},) = yield {self.handle}"
        return f"{results} = yield {self.handle}" + ("" if self.given else f"; del {self.handle}")


@frozen(eq=False)
class CreateView(Statement):
    """Makes a view that several statements take."""

    view: View

    def text(self, names: Names) -> str:
        """`w_matrix = w.t()`."""
        return f"{names.text(self.view)} = {names.making(self.view)}"


@frozen(eq=False)
class Delete(Statement):
    """Deletes tensors, and the views of them."""

    values: tuple[Value, ...]
    deleted_views: tuple[View, ...] = ()

    def text(self, names: Names) -> str:
        """`del h`."""
        return f"del {names.list((*self.values, *self.deleted_views))}"


@frozen(eq=False)
class Call(Statement):
    """A call of a function of the module; one of an `iteration` of a repeat also gets the context, `c`."""

    function: str
    arguments: tuple[Value | View, ...]
    results: tuple[Value, ...]
    iteration: str | None = None
    waits: bool = False

    @property
    def reads(self) -> Sequence[Value]:
        """Among the arguments."""
        return [each for each in self.arguments if isinstance(each, Value)]

    @property
    def views(self) -> Sequence[View]:
        """Among the arguments."""
        return [each for each in self.arguments if isinstance(each, View)]

    def text(self, names: Names) -> str:
        """`h = yield from layer_forward(c, x)  # an iteration of gpt.layer`."""
        arguments = ", ".join([*(["c"] if self.iteration else []), *map(names.text, self.arguments)])
        comment = f"  # an iteration of {self.iteration}" if self.iteration else ""
        call = f"{'yield from ' if self.waits else ''}{self.function}({arguments})"
        return f"{names.bound(self.results)}{call}{comment}"


@frozen(eq=False)
class Bind(Statement):
    """Binds a value to what makes it of an argument."""

    value: Value
    how: str

    def text(self, names: Names) -> str:
        """`w = m[0].to(torch.bfloat16)`."""
        return f"{names.text(self.value)} = {self.how}"


@frozen(eq=False)
class Load(Statement):
    """Loads a value from a slot of the frame; the `last` load clears the slot."""

    value: Value
    slot: int
    last: bool

    def text(self, names: Names) -> str:
        """`h = f[3]`."""
        return f"{names.text(self.value)} = f[{self.slot}]" + (f"; f[{self.slot}] = None" if self.last else "")


@frozen(eq=False)
class UpdateCache(Statement):
    """Stores a value in a slot of the frame; made contiguous if it is sent."""

    value: Value
    slot: int
    sent: bool

    @property
    def reads(self) -> Sequence[Value]:
        """The value."""
        return (self.value,)

    def text(self, names: Names) -> str:
        """`f[3] = h`."""
        suffix = ".contiguous()" if self.sent else ""
        return f"f[{self.slot}] = {names.text(self.value)}{suffix}"


@frozen(eq=False)
class Fill(Statement):
    """Fills places with values, and with views of them."""

    places: Mapping[Value | View, str]

    @property
    def reads(self) -> Sequence[Value]:
        """The values."""
        return [each.of if isinstance(each, View) else each for each in self.places]

    def text(self, names: Names) -> str:
        """`p[2], p[3] = w, w.t()`."""
        return f"{', '.join(self.places.values())} = {', '.join(map(names.tensor, self.places))}"


@frozen(eq=False)
class Clear(Statement):
    """Clears places that nothing reads any more."""

    places: tuple[str, ...]

    def text(self, names: Names) -> str:
        """`p[0] = p[1] = None`."""
        return f"{' = '.join(self.places)} = None"


@frozen(eq=False)
class ReturnHandles(Statement):
    """Returns the handles of collectives in flight, and values that a later function reads."""

    handles: tuple[str, ...]
    values: tuple[Value, ...] = ()

    @property
    def reads(self) -> Sequence[Value]:
        """The values."""
        return self.values

    def text(self, names: Names) -> str:
        """`return (w_bucket, d_w_coming)`."""
        texts = [*self.handles, *map(names.tensor, self.values)]
        return f"return ({', '.join(texts)}{',' if len(texts) == 1 else ''})"


@frozen(eq=False)
class Return(Statement):
    """Returns the function's results. Functions of a stage or rank `always` return a tuple of tensors; or a list, with
    None for those that are `later` filled in.
    """

    results: tuple[Value | View, ...] = ()
    always: bool = field(default=False, kw_only=True)
    later: Collection[Value] = field(default=(), kw_only=True)

    @property
    def reads(self) -> Sequence[Value]:
        """The results."""
        values = [each.of if isinstance(each, View) else each for each in self.results]
        return [value for value in values if value not in self.later]

    def text(self, names: Names) -> str:
        """`return h`."""
        if not self.always:
            return f"return {names.list(self.results)}".rstrip()
        texts = [
            "None" if (each.of if isinstance(each, View) else each) in self.later else names.tensor(each)
            for each in self.results
        ]
        if self.later:
            return f"return [{', '.join(texts)}]"
        return f"return ({', '.join(texts)}{',' if texts else ''})"


@frozen(eq=False)
class Note(Statement):
    """A line that a probe inserts."""

    note: str

    def text(self, names: Names) -> str:
        """The line."""
        return self.note


def create_shared_views(statements: Sequence[Statement], names: Names) -> list[Statement]:
    """Create each view of a local tensor that several statements use once, and delete it with its tensor."""
    counts = Counter(view for each in statements for view in each.views)
    views: dict[Value, list[View]] = {}
    order: dict[View, int] = {}
    rewritten: list[Statement] = []
    for each in statements:
        for view in each.views:
            local = view.of in names.local and view.of not in names.fixed
            if local and counts[view] > 1 and view not in names.views:
                names.views[view] = names.free(f"{names.text(view.of)}_matrix")
                views.setdefault(view.of, []).append(view)
                order[view] = len(order)
                rewritten.append(CreateView(view))
        if isinstance(each, Delete):
            ended = [view for value in each.values for view in views.get(value, ())]
            each = evolve(each, deleted_views=tuple(sorted(ended, key=order.__getitem__)))
        rewritten.append(each)
    return rewritten
