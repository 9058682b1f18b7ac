"""Where the names of files stand, and what each refers to: for editors, which find definitions and rename.

Resolved from syntax trees alone, so that it works in files with errors: names of bodies by the order of statements and
the nesting of repeats and scans, others by kind, parts of paths by the members of bodies. A name that nothing in the
files declares has no occurrence. One that a path has for several things occurs there several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from attrs import define, field, frozen

from partita.dsl.advice.report import Full, Report
from partita.dsl.check.instances import block_of
from partita.dsl.check.layouts import CLASSES as STORED
from partita.dsl.check.optimizers import CLASSES as TARGETS
from partita.dsl.names.members import Member, Members
from partita.dsl.syntax import tree
from partita.dsl.syntax.parser import parse_expression
from partita.dsl.syntax.source import Span
from partita.dsl.syntax.walk import nodes, parts

# Kinds of which every name is declared once in a file, and those in which an expression looks a name up.
IN_EXPRESSIONS = ("const", "axis")
CALLED = ("op", "block")
CHOSEN = ("model", "layout", "schedule", "adapters", "optimizer")
# Kinds of names that a body binds.
BOUND = ("tensor", "parameter", "buffer")
KINDS_OF_TENSORS: Mapping[type, str] = {tree.Param: "parameter", tree.Buffer: "buffer"}

Scope: TypeAlias = dict[str, tuple[tree.Name, str]]  # name -> where it is bound first, and its kind


@frozen
class Occurrence:
    """A name where it stands, its `kind` (`axis`, `block`, `tensor`, …), and the name that declares it.

    In a path, `mlp_2` is an occurrence of `mlp`, without the number.
    """

    name: tree.Name
    kind: str
    declared: tree.Name


@frozen
class Names:
    """The occurrences in files, in the order of the files and their texts; and the `members` of all bodies."""

    occurrences: tuple[Occurrence, ...]
    members: Members


def names(files: Sequence[tree.File]) -> Names:
    """All names of a file and of those that it imports, which follow it: a file's own axes and constants come first."""
    finding = _Names(tuple(each for file in files for each in file.declarations))
    finding.run()
    order = {id(file.span.source): i for i, file in enumerate(files)}

    def place(each: Occurrence) -> tuple[int, int]:
        return order[id(each.name.span.source)], each.name.span.start

    return Names(tuple(sorted(finding.found, key=place)), finding.members)


def declared_in(declarations: Iterable[tree.Declaration]) -> Iterator[tuple[str, tree.Name]]:
    """The names that are declared, but for those in bodies, each with its kind."""
    for declaration in declarations:
        match declaration:
            case tree.Axes(entries=entries):
                yield from (("axis", entry.key) for entry in entries)
            case tree.Constants(entries=entries):
                yield from (("const", entry.key) for entry in entries)
            case tree.Mesh(name=name, axes=axes):
                yield "mesh", name
                yield from (("mesh axis", entry.key) for entry in axes)
            case tree.Operation(name=name):
                yield "op", name
            case tree.Import() | tree.Train() | tree.Expect():
                pass
            case _:
                yield type(declaration).__name__.lower(), declaration.name


@define(eq=False)
class _Names:
    declarations: Sequence[tree.Declaration]
    found: list[Occurrence] = field(factory=list)
    members: Members = field(factory=Members)
    known: dict[str, dict[str, tree.Name]] = field(factory=dict)
    blocks: dict[str, tree.Block] = field(factory=dict)
    inputs: dict[str, dict[str, tree.Name]] = field(factory=dict)  # of blocks and operations
    shared: dict[str, tree.Block | None] = field(factory=dict)  # by the name of an instance, in the body at hand
    called: Sequence[str] = ()  # what calls refer to, here

    def run(self) -> None:
        """Find all: bodies first, since paths name what is in them."""
        for kind, name in declared_in(self.declarations):
            self.known.setdefault(kind, {}).setdefault(name.text, name)
        for each in self.declarations:
            if isinstance(each, tree.Block | tree.Operation):
                self.inputs.setdefault(each.name.text, {item.name.text: item.name for item in each.inputs})
            if isinstance(each, tree.Block):
                self.blocks.setdefault(each.name.text, each)
        for kind, name in declared_in(self.declarations):
            # Mesh axes of equal names in two meshes are told apart where a layout names its mesh.
            self.found.append(Occurrence(name, kind, name if kind == "mesh axis" else self._first(kind, name)))
        bodies = [each for each in self.declarations if isinstance(each, tree.Block | tree.Model)]
        for body in bodies:
            self._block(body)
        for declaration in self.declarations:
            self._declaration(declaration)

    def _first(self, kind: str, name: tree.Name) -> tree.Name:
        """The declaration that counts: of axes and constants, which share names, that of the first file."""
        kinds = IN_EXPRESSIONS if kind in IN_EXPRESSIONS else (kind,)
        candidates = [self.known[each][name.text] for each in kinds if name.text in self.known.get(each, {})]
        order = (
            {id(each): i for i, (_, each) in enumerate(declared_in(self.declarations))} if len(candidates) > 1 else {}
        )
        return min(candidates, key=lambda each: order.get(id(each), 0))

    def _block(self, declaration: tree.Block | tree.Model) -> None:
        self.called = CALLED
        self.members.begin(declaration)
        scope = self._inputs(declaration.inputs)
        self._nodes(declaration.body, scope)
        if isinstance(declaration, tree.Block):
            self._node(declaration.results, scope)
        self.members.end()
        self.called = ()

    def _declaration(self, declaration: tree.Declaration) -> None:
        match declaration:
            case tree.Axes() | tree.Constants() | tree.Schedule():
                self._nodes(parts(declaration), {})
            case tree.Operation(inputs=inputs, results=results, table=table):
                scope = self._inputs(inputs)
                self._nodes(results, scope)
                self._table(table, scope)
            case tree.Mesh(axes=axes, table=table):
                self._nodes(axes, {})
                self._table(table, {entry.key.text: (entry.key, "mesh axis") for entry in axes})
            case tree.Layout():
                self._layout(declaration)
            case tree.Optimizer(rules=rules):
                for rule in rules:
                    self._paths(each for each in rule.targets if str(each) not in TARGETS)
                self._nodes((rule.call for rule in rules if isinstance(rule, tree.UpdateRule)), {})
            case tree.Adapters(rules=own):
                for each in own:
                    self._paths(path for path in each.targets if str(path) not in TARGETS)
                self._nodes((each.call for each in own if isinstance(each, tree.Lora)), {})
            case tree.Train(table=table):
                self._table(table, {})
            case tree.Weights(lines=lines):
                for line in lines:
                    if isinstance(line, tree.Correspondence):
                        self._correspondence(line)
            case tree.Expect(claims=claims):
                axes_of_mesh = self._trained_mesh()
                for claim in claims:
                    if isinstance(claim.measure, tree.Call):
                        self._node(claim.measure, axes_of_mesh)
                    self._node(claim.limit, {})
            case _:
                pass

    def _inputs(self, inputs: Iterable[tree.Input]) -> Scope:
        """The scope that inputs begin."""
        scope: Scope = {}
        for each in inputs:
            self._bind(each.name, scope)
            self._nodes(parts(each), scope)
        return scope

    # ------------------------------------------------------------ layouts, weights

    def _layout(self, layout: tree.Layout) -> None:
        self._refer(layout.mesh, ("mesh",))
        axes = self._mesh(layout)
        for rule in layout.rules:
            match rule:
                case tree.Shard(targets=targets, mesh_axes=own):
                    for target in targets:
                        self._paths([target.path] if target.path is not None else [])
                        if target.name.text not in STORED:
                            self._refer(target.name, ("axis",))
                case tree.Stage(repeats=repeats, mesh_axis=axis):
                    own = (axis,)
                    for name in repeats:
                        self._part(name, [each for each in self.members if each.kind == "repeat"])
                case tree.Place(paths=paths, mesh_axis=axis):
                    own = (axis,)
                    self._paths(paths)
                    self._nodes((each for each in (rule.first, rule.last) if each is not None), {})
                case tree.Recompute(paths=paths):
                    own = ()
                    self._paths(each for each in paths if str(each) not in ("all", "auto"))
                case tree.Offload(paths=paths):
                    own = ()
                    self._paths(each for each in paths if str(each) not in ("all", "param", "state"))
                case tree.Overlap(mesh_axes=own):
                    self._node(rule.pieces, {})
            for name in own:
                self._refer(name, (), axes)

    def _mesh(self, layout: tree.Layout) -> Scope:
        """The axes of a layout's mesh."""
        meshes = [each for each in self.declarations if isinstance(each, tree.Mesh) and each.name == layout.mesh]
        return {entry.key.text: (entry.key, "mesh axis") for mesh in meshes[:1] for entry in mesh.axes}

    def _trained_mesh(self) -> Scope:
        """The mesh axes of the layout that `train` chooses, or of the only one."""
        layouts = {each.name.text: each for each in self.declarations if isinstance(each, tree.Layout)}
        trains = [each for each in self.declarations if isinstance(each, tree.Train)]
        chosen = [
            tree.single(each.value) for train in trains for each in train.table.entries if each.key.text == "layout"
        ]
        for name in chosen:
            if name is not None and name.text in layouts:
                return self._mesh(layouts[name.text])
        return self._mesh(next(iter(layouts.values()))) if layouts else {}

    def _correspondence(self, line: tree.Correspondence) -> None:
        self._paths(line.ours)
        self._nodes(line.axes, {})
        repeats = self.members.repeats_around(self.members.named([part.text for part in line.ours[0].parts]))
        for pattern in line.theirs:
            for each in nodes(*_formulas(pattern)):
                name = tree.single(each) if isinstance(each, tree.Path) else None
                if name is not None:
                    around = [member for member in repeats if member.is_called(name.text)]
                    if around:
                        self._part(name, around)
                    else:
                        self._refer(name, ("axis", "const"))

    def _paths(self, paths: Iterable[tree.Path]) -> None:
        for path in paths:
            for part, meant in zip(path.parts, self.members.named([part.text for part in path.parts]), strict=True):
                self._part(part, meant)
            for iterations in path.iterations:
                if iterations is not None:
                    self._nodes((iterations,), {})

    def _part(self, name: tree.Name, members: Sequence[Member]) -> None:
        """A part of a path, which may mean these members."""
        for member in {id(each.declared): each for each in members if each.is_called(name.text)}.values():
            text, span = member.declared.text, name.span
            short = tree.Name(text, span=Span(span.source, span.start, span.start + len(text)))
            self.found.append(Occurrence(short, member.kind, member.declared))

    # ------------------------------------------------------------ bodies

    def _node(self, node: tree.Node, scope: Scope) -> None:
        """All names in a node: a statement, a type or an expression."""
        match node:
            case tree.Let() | tree.Param() | tree.Buffer() | tree.Sample():
                self._nodes(parts(node), scope)
                for name in node.names:
                    self._bind(name, scope, KINDS_OF_TENSORS.get(type(node), "tensor"))
            case tree.Repeat():
                self._repeat(node, scope)
            case tree.Scan(axis=axis, body=body):
                self._refer(axis, ("axis",))
                self.members.reserve(body)
                self._nodes(body, dict(scope))
            case tree.Share(name=name, block=written):
                block = block_of(written)
                if block is not None:
                    self._refer(block, ("block",))
                    self.shared[name.text] = self.blocks.get(block.text)
                self._nodes(written.arguments if isinstance(written, tree.Call) else (), scope)
                self._bind_instance(name, scope)
            case tree.Copy(name=name, source=source, following=following):
                self._refer(source, (), scope)
                self._nodes([each.value for each in following or ()], scope)
                self.shared[name.text] = self.shared.get(source.text)
                self._bind_instance(name, scope)
            case tree.Update(name=name, value=value):
                self._refer(name, (), scope)
                self._node(value, scope)
            case tree.TensorType(axes=axes):
                for axis in axes:
                    self._refer(axis, ("axis",))
            case tree.Path(parts=(name,)):
                self._refer(name, IN_EXPRESSIONS, scope)
                self._nodes((each for each in node.iterations if each is not None), scope)
            case tree.Keep(value=value, name=name):
                self._node(value, scope)
                self._bind(name, scope)
            case tree.Call():
                self._call(node, scope)
            case tree.Path() | tree.Name():
                pass
            case _:
                self._nodes(parts(node), scope)

    def _nodes(self, nodes: Iterable[tree.Node], scope: Scope) -> None:
        for node in nodes:
            self._node(node, scope)

    def _call(self, call: tree.Call, scope: Scope) -> None:
        name = call.name
        instance = scope.get(name.text, (name, ""))[1] == "instance"
        self._refer(name, self.called, {name.text: scope[name.text]} if instance else {})
        named = self.inputs.get(name.text, {}) if self.called else {}
        for argument in call.arguments:
            if argument.name is not None and argument.name.text in named:
                self.found.append(Occurrence(argument.name, "tensor", named[argument.name.text]))
            self._node(argument.value, scope)
        if instance:
            self.members.enter(scope[name.text][0], "instance", self.shared.get(name.text))
        elif name.text in self.blocks and name.text not in self.known.get("op", {}):
            block = self.blocks[name.text]
            self.members.enter(block.name, "block", block)

    def _repeat(self, repeat: tree.Repeat, scope: Scope) -> None:
        """What the body of a repeat or scan binds again is carried, so the same; other names stay there.

        Repeats of one name in a body are the same to a layout, which cuts all of them.
        """
        self._node(repeat.count, scope)
        same = [each.declared for each in self.members.here() if each.kind == "repeat"]
        first = next((each for each in same if each.text == repeat.name.text), repeat.name)
        self.found.append(Occurrence(repeat.name, "repeat", first))
        self.members.begin(repeat)
        self._nodes(repeat.body, {repeat.name.text: (first, "repeat"), **scope})
        self.members.end()
        self.members.enter(first, "repeat", repeat)
        for kept in (each.name for each in repeat.body if isinstance(each, tree.Keep)):
            scope.setdefault(kept.text, (kept, "tensor"))

    def _bind(self, name: tree.Name, scope: Scope, kind: str = "tensor") -> None:
        """A name that a body binds. Bound again, in an iteration or after it, it is the same to a reader."""
        first, kind = scope.setdefault(name.text, (name, kind))
        self.found.append(Occurrence(name, kind, first))
        self.members.enter(first, kind)

    def _bind_instance(self, name: tree.Name, scope: Scope) -> None:
        """A name under which a block is shared."""
        scope[name.text] = name, "instance"
        self.found.append(Occurrence(name, "instance", name))
        self.members.enter(name, "instance", self.shared.get(name.text))

    def _table(self, table: tree.Table | None, scope: Scope) -> None:
        for entry in table.entries if table is not None else ():
            name = tree.single(entry.value)
            if name is not None and entry.key.text in CHOSEN and name.text in self.known.get(entry.key.text, {}):
                self._refer(name, (entry.key.text,))
            else:
                self._node(entry.value, scope)

    def _refer(self, name: tree.Name, kinds: Sequence[str], scope: Mapping[str, tuple[tree.Name, str]] = {}) -> None:
        """A reference: to a name of the body, or the first declaration of these kinds."""
        if name.text in scope:
            first, kind = scope[name.text]
            self.found.append(Occurrence(name, kind, first))
            return
        for kind in kinds:
            if name.text in self.known.get(kind, {}):
                self.found.append(Occurrence(name, kind, self._first(kind, name)))
                return


def _formulas(pattern: tree.String) -> Iterator[tree.Expression]:
    """The formulas in the braces of a name of theirs."""
    text, first = pattern.text, pattern.span.start
    start = text.find("{")
    while start >= 0 and (end := text.find("}", start)) >= 0:
        try:
            formula = parse_expression(pattern.span.source, Report(), first + start + 1, first + end)
        except Full:
            return
        if formula is not None:
            yield formula
        start = text.find("{", end)
