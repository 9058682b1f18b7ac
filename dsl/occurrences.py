"""Where the names of one file stand, and what each refers to: for editors, which find definitions and rename.

Resolved from the syntax tree alone, so that it works in files with errors: names of bodies by the order of statements
and the nesting of repeats and scans, others by kind. A name that nothing in the file declares has no occurrence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from attrs import define, field, frozen

from partita.dsl import tree

# Kinds of which every name is declared once in a file, and those in which an expression looks a name up.
IN_EXPRESSIONS = ("const", "axis")
CALLED = ("block", "op")
CHOSEN = {"model": "model", "layout": "layout", "schedule": "schedule", "optimizer": "optimizer"}

Scope: TypeAlias = dict[str, tree.Name]


@frozen
class Occurrence:
    """A name where it stands, its `kind` (`axis`, `block`, `tensor`, …), and the name that declares it."""

    name: tree.Name
    kind: str
    declared: tree.Name


def occurrences(file: tree.File) -> list[Occurrence]:
    """All of a file, in the order of the text."""
    found = _Names(file)
    found.run()
    return sorted(found.found, key=lambda each: each.name.span.start)


def declared(file: tree.File) -> dict[str, dict[str, tree.Name]]:
    """The declarations of a file that are no tensors: names by kind."""
    found: dict[str, dict[str, tree.Name]] = {}
    for each in file.declarations:
        for kind, name in _declared(each):
            found.setdefault(kind, {})[name.text] = name
    return found


def paths(file: tree.File) -> Iterator[tree.Path]:
    """The paths of rules and of `weights`: names of calls, repeats and parameters, from the model inwards."""
    for declaration in file.declarations:
        for line in declaration.lines if isinstance(declaration, tree.Weights) else ():
            yield from line.ours if isinstance(line, tree.Correspondence) else ()
        for rule in declaration.rules if isinstance(declaration, tree.Layout | tree.Optimizer) else ():
            match rule:
                case tree.Shard(targets=targets):
                    yield from (each.path for each in targets if each.path is not None)
                case tree.Place(paths=own) | tree.Recompute(paths=own):
                    yield from own
                case tree.FreezeRule(targets=own) | tree.UpdateRule(targets=own):
                    yield from own


def _declared(declaration: tree.Declaration) -> Iterator[tuple[str, tree.Name]]:
    match declaration:
        case tree.Axes(entries=entries):
            yield from (("axis", entry.key) for entry in entries)
        case tree.Constants(entries=entries):
            yield from (("const", entry.key) for entry in entries)
        case tree.Mesh(name=name, axes=axes):
            yield "mesh", name
            yield from (("mesh axis", entry.key) for entry in axes)
        case (
            tree.Block(name=name)
            | tree.Operation(name=name)
            | tree.Model(name=name)
            | tree.Layout(name=name)
            | tree.Schedule(name=name)
            | tree.Optimizer(name=name)
            | tree.Weights(name=name)
        ):
            kind = "op" if isinstance(declaration, tree.Operation) else type(declaration).__name__.lower()
            yield kind, name


@define(eq=False)
class _Names:
    file: tree.File
    found: list[Occurrence] = field(factory=list)
    known: Mapping[str, Mapping[str, tree.Name]] = field(init=False)
    inputs: dict[str, dict[str, tree.Name]] = field(factory=dict)  # of blocks and operations
    called: Sequence[str] = ()  # what calls refer to, here

    def __attrs_post_init__(self) -> None:
        self.known = declared(self.file)
        for each in self.file.declarations:
            if isinstance(each, tree.Block | tree.Operation):
                self.inputs[each.name.text] = {item.name.text: item.name for item in each.inputs}

    def run(self) -> None:
        """Find all."""
        for declaration in self.file.declarations:
            for kind, name in _declared(declaration):
                # Mesh axes of equal names in two meshes are told apart where a layout names its mesh.
                self.found.append(Occurrence(name, kind, name))
            self.called = CALLED if isinstance(declaration, tree.Block | tree.Model) else ()
            self._declaration(declaration)

    def _declaration(self, declaration: tree.Declaration) -> None:
        match declaration:
            case tree.Axes(entries=entries) | tree.Constants(entries=entries):
                self._expressions((entry.value for entry in entries), {})
            case tree.Block() | tree.Model():
                scope = self._inputs(declaration.inputs)
                self._body(declaration.body, scope)
                if isinstance(declaration, tree.Block):
                    self._expressions(declaration.results.values, scope)
            case tree.Operation(inputs=inputs, results=results, table=table):
                scope = self._inputs(inputs)
                for result in results:
                    self._type(result)
                self._table(table, scope)
            case tree.Mesh(axes=axes, table=table):
                self._expressions((entry.value for entry in axes), {})
                self._table(table, {entry.key.text: entry.key for entry in axes}, "mesh axis")
            case tree.Layout():
                self._layout(declaration)
            case tree.Schedule(call=call):
                self._expression(call, {})
            case tree.Optimizer(rules=rules):
                self._expressions((rule.call for rule in rules if isinstance(rule, tree.UpdateRule)), {})
            case tree.Train(table=table):
                self._table(table, {})
            case tree.Weights(lines=lines):
                for line in lines:
                    own = line.axes if isinstance(line, tree.Correspondence) else ()
                    self._expressions((axis.value for axis in own), {})
            case tree.Expect(claims=claims):
                for claim in claims:
                    if isinstance(claim.measure, tree.Call):
                        self._expression(claim.measure, {}, kinds=("mesh axis", *IN_EXPRESSIONS))
                    self._expression(claim.limit, {})

    def _inputs(self, inputs: Iterable[tree.Input]) -> Scope:
        """The scope that inputs begin."""
        scope: Scope = {}
        for each in inputs:
            self._bind(each.name, scope)
            self._type(each.type)
        return scope

    def _layout(self, layout: tree.Layout) -> None:
        self._refer(layout.mesh, ("mesh",))
        mesh = next(
            (each for each in self.file.declarations if isinstance(each, tree.Mesh) and each.name == layout.mesh), None
        )
        axes = {entry.key.text: entry.key for entry in mesh.axes} if mesh is not None else {}

        def mesh_axis(name: tree.Name) -> None:
            if name.text in axes:
                self.found.append(Occurrence(name, "mesh axis", axes[name.text]))

        for rule in layout.rules:
            match rule:
                case tree.Shard(targets=targets, mesh_axes=names):
                    for target in targets:
                        self._refer(target.name, ("axis",))
                    for name in names:
                        mesh_axis(name)
                case tree.Stage(mesh_axis=name) | tree.Place(mesh_axis=name):
                    mesh_axis(name)
                case _:
                    pass

    def _body(self, statements: Sequence[tree.Statement], scope: Scope) -> None:
        for statement in statements:
            match statement:
                case tree.Let(names=names, value=value):
                    self._expression(value, scope)
                    for name in names:
                        self._bind(name, scope)
                case (
                    tree.Param(names=names, type=type, initial=value)
                    | tree.Buffer(names=names, type=type, initial=value)
                ):
                    self._type(type)
                    self._expression(value, scope)
                    for name in names:
                        self._bind(name, scope)
                case tree.Sample(name=name, type=type, distribution=value):
                    self._type(type)
                    self._expression(value, scope)
                    self._bind(name, scope)
                case tree.Repeat(count=count, body=body):
                    self._expression(count, scope)
                    self._nested(body, scope)
                case tree.Scan(axis=axis, body=body):
                    self._refer(axis, ("axis",))
                    self._nested(body, scope)
                case tree.Update(name=name, value=value):
                    self._refer(name, (), scope)
                    self._expression(value, scope)
                case tree.Loss(value=value) | tree.Metric(value=value) | tree.Output(value=value):
                    self._expression(value, scope)

    def _nested(self, body: Sequence[tree.Statement], scope: Scope) -> None:
        """The body of a repeat or scan: what it binds again is carried, so the same; other names stay there."""
        self._body(body, dict(scope))

    def _bind(self, name: tree.Name, scope: Scope) -> None:
        """A name that a body binds. Bound again, in an iteration or after it, it is the same to a reader."""
        first = scope.setdefault(name.text, name)
        self.found.append(Occurrence(name, "tensor", first))

    def _type(self, type: tree.TensorType) -> None:
        for axis in type.axes:
            self._refer(axis, ("axis",))

    def _table(self, table: tree.Table | None, scope: Scope, kind: str = "tensor") -> None:
        for entry in table.entries if table is not None else ():
            name = tree.single(entry.value)
            if name is not None and entry.key.text in CHOSEN and name.text in self.known.get(entry.key.text, {}):
                self._refer(name, (CHOSEN[entry.key.text],))
            else:
                self._expression(entry.value, scope, kind)

    def _expressions(self, expressions: Iterable[tree.Expression], scope: Scope) -> None:
        for expression in expressions:
            self._expression(expression, scope)

    def _expression(
        self,
        expression: tree.Expression,
        scope: Scope,
        local: str = "tensor",
        kinds: Sequence[str] = IN_EXPRESSIONS,
    ) -> None:
        match expression:
            case tree.Path(parts=(name,)):
                self._refer(name, kinds, scope, local)
            case tree.Binary(left=left, right=right) | tree.Arrow(left=left, right=right):
                self._expression(left, scope, local, kinds)
                self._expression(right, scope, local, kinds)
            case tree.Negative(operand=inner) | tree.Not(operand=inner) | tree.Group(inner=inner):
                self._expression(inner, scope, local, kinds)
            case tree.List(items=items):
                for item in items:
                    self._expression(item, scope, local, kinds)
            case tree.Call(name=name, arguments=arguments):
                self._refer(name, self.called)
                named = self.inputs.get(name.text, {})
                for argument in arguments:
                    if argument.name is not None and argument.name.text in named:
                        self.found.append(Occurrence(argument.name, "tensor", named[argument.name.text]))
                    self._expression(argument.value, scope, local, kinds)
            case _:
                pass

    def _refer(self, name: tree.Name, kinds: Sequence[str], scope: Scope | None = None, local: str = "tensor") -> None:
        """A reference: to a name of the body, or the first declaration of these kinds."""
        if scope is not None and name.text in scope:
            self.found.append(Occurrence(name, local, scope[name.text]))
            return
        for kind in kinds:
            own = self.known.get(kind, {}).get(name.text)
            if own is not None:
                self.found.append(Occurrence(name, kind, own))
                return
