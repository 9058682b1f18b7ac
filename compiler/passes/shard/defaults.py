"""The rules of a layout block → layouts: each tensor's default layout, from its axis names, and how it is stored.

A rule applies to each tensor that has the axis, unless an earlier rule has already used that mesh axis or that axis for
it; rules for one tensor (`shard gpt.wte: embed -> tensor`) replace those for axes. Class rules (`shard param -> data`)
say how parameters, gradients and optimizer state are stored between uses: split along the largest axis that is not
split yet and divides evenly, the first declared if several; flat, over all mesh axes of the class, if there is none for
some of them. There is no search and no propagation: a reader can predict all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod

from attrs import define, field, frozen

from partita.compiler.layout import Layout, State, flat_form, layout_of
from partita.compiler.mesh import Mesh
from partita.compiler.naming import chunks, matches
from partita.compiler.passes.shard.choice import Exchange
from partita.dsl import spec
from partita.dsl.check.divisibility import Cut, cuts_of, mesh_axis_conflicts, undivided
from partita.dsl.check.uneven import padded_axes
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type

# The classes that each class includes: `param` implies `grad`, `grad` implies `state`.
IMPLIED = {"param": ("param", "grad", "state"), "grad": ("grad", "state"), "state": ("state",)}
# The most tensors that a warning names.
EXAMPLES = 3


@frozen(eq=False)
class LayoutRule:
    """One target of a shard rule, with the mesh axes it may use; `span` is that of the full rule."""

    target: spec.Target
    mesh_axes: tuple[str, ...]
    span: Span
    exchange: str | None = None

    def names(self, tensor: str) -> bool:
        """Whether the target's path, if any, names this tensor."""
        return self.target.path is None or matches(self.target.path, tensor)

    def stores(self, kind: str, parameter: str) -> bool:
        """Whether a rule for a class applies to the `kind` (`param`, `grad` or `state`) of this parameter."""
        return kind in IMPLIED[self.target.name] and self.names(parameter)

    def __str__(self) -> str:
        """The rule with this target alone: `shard gpt.wte: embed -> tensor`."""
        path = f"{'.'.join(self.target.path)}: " if self.target.path else ""
        return f"shard {path}{self.target.name} -> {', '.join(self.mesh_axes)}"


# A split of a tensor: the mesh axis, the rule, and the tensor's axis.
Split = tuple[str, LayoutRule, str]


@define(eq=False)
class DefaultLayouts:
    """The default layouts on one mesh; records which rules have applied, and where they could not.

    `seen` has a tensor for each set of axes, `undivided` the parameters that a rule for a class could not split. Axes
    that are `padded` are whole where they do not divide: what has them so is computed without padding.
    """

    mesh: Mesh
    batch: str = ""
    axis_rules: tuple[LayoutRule, ...] = ()
    tensor_rules: tuple[LayoutRule, ...] = ()
    class_rules: tuple[LayoutRule, ...] = ()
    cuts: Mapping[str, Cut] = field(factory=dict)
    padded: frozenset[str] = frozenset()
    applied: set[LayoutRule] = field(factory=set)
    seen: dict[tuple[tuple[str, ...], str | None], tuple[str, Type]] = field(factory=dict)
    undivided: dict[LayoutRule, dict[str, Type]] = field(factory=dict)
    _taken: dict[tuple[str, ...], tuple[Split, ...]] = field(factory=dict)
    _layouts: dict[tuple[tuple[str, ...], str | None], Layout] = field(factory=dict)

    def without(self, axes: Collection[str]) -> DefaultLayouts:
        """The layouts without the rules that split some axes."""
        axis, tensor = (
            tuple(each for each in rules if each.target.name not in axes)
            for rules in (self.axis_rules, self.tensor_rules)
        )
        return DefaultLayouts(self.mesh, self.batch, axis, tensor, cuts=self.cuts, padded=self.padded)

    @property
    def exchanges(self) -> dict[tuple[str, str], Exchange]:
        """The exchanges that rules say, by axis and mesh axis."""
        return {
            (rule.target.name, over): Exchange(rule.exchange, self.batch, rule.span)
            for rule in self.axis_rules
            if rule.exchange is not None
            for over in rule.mesh_axes
        }

    # ------------------------------------------------------------ default layouts

    def default(self, name: str, type: Type, span: Span | None = None) -> Layout:
        """The default layout of a tensor. Raises Refused (E0411) if a size does not divide evenly."""
        key = (type.names, self._alone(name))
        layout = self._layouts.get(key)
        if layout is None or any(type.has(axis) for axis in self.padded):
            states: dict[str, State] = {mesh_axis: axis for mesh_axis, _, axis in self.taken(name, type)}
            whole = self._without_padding(type, states)
            states = {mesh_axis: axis for mesh_axis, axis in states.items() if axis not in whole}
            if whole:
                return layout_of((axis, states.get(axis)) for axis in self.mesh.sharding)
            layout = self._layouts[key] = layout_of((axis, states.get(axis)) for axis in self.mesh.sharding)
            self.seen[key] = (name, type)
        self._check(name, type, layout, span)
        return layout

    def _without_padding(self, type: Type, states: Mapping[str, State]) -> set[str]:
        """The axes of a tensor that would be split, had it their padding."""
        parts = {axis: 1 for axis in self.padded if type.has(axis)}
        for mesh_axis, axis in states.items():
            if axis in parts:
                parts[str(axis)] *= self.mesh.sizes[mesh_axis]
        return {axis for axis, count in parts.items() if type.axis(axis).size % count}

    def taken(self, name: str, type: Type) -> tuple[Split, ...]:
        """The splits of a tensor's default layout, including those over mesh axes of size 1."""
        if self._alone(name) is not None:
            splits = tuple(_assigned(self.rules(name), type.names))
        elif type.names in self._taken:
            return self._taken[type.names]
        else:
            splits = self._taken[type.names] = tuple(_assigned(self.axis_rules, type.names))
        self.applied.update(rule for _, rule, _ in splits)
        return splits

    def rules(self, name: str) -> tuple[LayoutRule, ...]:
        """The rules that are tried for a tensor: those for it alone, or those for axes."""
        alone = self._alone(name)
        return self.axis_rules if alone is None else tuple(each for each in self.tensor_rules if each.names(alone))

    def late(self, name: str, type: Type) -> Iterator[tuple[LayoutRule, str, LayoutRule]]:
        """The rules for an axis of the tensor that split nothing, each with the reason and the earlier rule."""
        splits = self.taken(name, type)
        for rule in self.rules(name):
            if not type.has(rule.target.name) or any(each is rule for _, each, _ in splits):
                continue
            own = [each for each in splits if each[2] == rule.target.name]
            mesh_axis, before, axis = (own or [each for each in splits if each[0] in rule.mesh_axes])[0]
            over = f"`{mesh_axis}` of {self.mesh.sizes[mesh_axis]}"
            because = f"`{axis}` is already split over {over}" if own else f"{over} is taken by `{axis}`"
            yield rule, because, before

    def _alone(self, name: str) -> str | None:
        """The name, if a rule for one tensor refers to it."""
        return name if any(rule.names(name) for rule in self.tensor_rules) else None

    def _check(self, name: str, type: Type, layout: Layout, span: Span | None) -> None:
        """Refuse (E0411) a split that does not divide evenly."""
        sizes = self.mesh.sizes
        for axis in {state for _, state in layout.states if type.has(state)}:
            parts = prod(sizes[mesh_axis] for mesh_axis in layout.over(axis))
            size = type.axis(axis).size
            if size % parts:
                rule = next(rule for _, rule, each in self.taken(name, type) if each == axis)
                over = [(mesh_axis, sizes[mesh_axis]) for mesh_axis in layout.over(axis)]
                what, cut = f"{name}: {type}", self.cuts.get(axis)
                raise Refused([undivided(type.axis(axis), over, rule.target.span, what, span, cut)])

    # ------------------------------------------------------------ storage

    def stored(self, kind: str, name: str, master: Type, compute: Layout, flat: bool = True) -> Layout:
        """How the `kind` (`param`, `grad` or `state`) of a parameter is stored, from its compute layout; `flat`:
        whether it may be flat, which its state then decides for all kinds.
        """
        flat = flat and not any(master.has(axis) for axis in self.padded)
        over, parts = self._split_flat(name, master, compute) if flat else ((), 1)
        rules = self._over(kind, name, compute)
        if over and rules:
            form = flat_form(compute, master, parts)
            states: dict[str, State] = {**dict(compute.states), **dict.fromkeys(rules, form.axis)}
            self.applied.update(rules.values())
            return layout_of(((axis, states.get(axis)) for axis in self.mesh.sharding), form)
        states = dict(compute.states)
        for mesh_axis, rule in rules.items():
            axis = self._largest(master, states, mesh_axis)
            if axis is None:
                self.undivided.setdefault(rule, {})[name] = master
                continue
            states[mesh_axis] = axis
            self.applied.add(rule)
        return layout_of((axis, states.get(axis)) for axis in self.mesh.sharding)

    def _over(self, kind: str, name: str, compute: Layout) -> dict[str, LayoutRule]:
        """The mesh axes over which rules for classes split a `kind` of a parameter, each with the first such rule."""
        rules: dict[str, LayoutRule] = {}
        for rule in self.class_rules:
            for mesh_axis in rule.mesh_axes if rule.stores(kind, name) else ():
                if compute.state(mesh_axis) is None:
                    rules.setdefault(mesh_axis, rule)
        return rules

    def _split_flat(self, name: str, master: Type, compute: Layout) -> tuple[tuple[str, ...], int]:
        """The mesh axes over which the state of a parameter is split flat, since it has no axes for all of them, and
        the number of parts; none if it has axes, or is a number.
        """
        over = tuple(self._over("state", name, compute))
        states: dict[str, State] = dict(compute.states)
        for mesh_axis in over if master.axes else ():
            states[mesh_axis] = self._largest(master, states, mesh_axis)
            if states[mesh_axis] is None and self.mesh.sizes[mesh_axis] > 1:
                return over, prod(self.mesh.sizes[each] for each in over)
        return (), 1

    def _largest(self, master: Type, states: Mapping[str, State], mesh_axis: str) -> str | None:
        """The largest axis that is not split and divides over a mesh axis."""
        split, parts = set(states.values()), self.mesh.sizes[mesh_axis]
        whole = [axis for axis in master.axes if axis.name not in split and axis.size % parts == 0]
        return max(whole, key=lambda axis: axis.size).name if whole else None

    # ------------------------------------------------------------ rules without effect

    def warnings(self) -> Iterator[Diagnostic]:
        """W0301 for targets that split no tensor, with candidates; W0302 for mesh axes that split only storage."""
        rules = (*self.axis_rules, *self.tensor_rules, *self.class_rules)
        for rule in rules:
            if rule not in self.applied:
                notes, help = self._unapplied(rule)
                yield Diagnostic("W0301", f"`{rule}` applies to no tensor", rule.target.span, notes=notes, help=help)
        splitting = {mesh_axis for layout in self._layouts.values() for mesh_axis, _ in layout.states}
        for mesh_axis in self.mesh.sharding:
            naming = [rule for rule in rules if mesh_axis in rule.mesh_axes and rule in self.applied]
            if mesh_axis not in splitting and naming:
                ranks = f"`{mesh_axis}` of {self.mesh.sizes[mesh_axis]}"
                help = f"split the batch over it as well: `shard batch -> {mesh_axis}`"
                message = f"no value is split over {ranks}: its ranks all compute the same"
                yield Diagnostic("W0302", message, naming[0].span, help=help)

    def _unapplied(self, rule: LayoutRule) -> tuple[tuple[str, ...], str]:
        """Tensors that a rule was tried for, with what preceded it, and a remedy."""
        sizes = self.mesh.sizes
        axis = rule.target.name
        if rule.target.is_class:
            over = " or ".join(f"`{each}` of {sizes[each]}" for each in rule.mesh_axes)
            parameters = self.undivided.get(rule, {})
            because = f"no unsplit axis divides evenly by {over}, and its update needs it whole"
            notes = [f"{name}: {type}: {because}" for name, type in parameters.items()]
            help = (
                "choose sizes that divide, or an elementwise optimizer such as `adamw`"
                if notes
                else "its tensors are already split over that: remove the rule"
            )
            return tuple(notes[:EXAMPLES]), help
        notes = []
        help = f"no tensor has axis `{axis}`"
        if rule.target.path is not None:
            called = ".".join(rule.target.path)
            help = f"no parameter or value is called `{called}`: what a block returns has the name that it has there"
        for name, type in self.seen.values():
            if rule not in self.rules(name):
                continue
            late = next(((because, before) for each, because, before in self.late(name, type) if each is rule), None)
            if late is not None:
                because, before = late
                notes.append(f"{name}: {type}: {because}, `{before}` ({before.span.place})")
                together = ", ".join(dict.fromkeys((*before.mesh_axes, *rule.mesh_axes)))
                help = "move it before that rule, or give it another mesh axis"
                if before.target.name == axis and set(rule.mesh_axes) <= set(before.mesh_axes):
                    help = "remove it: that rule says it already"
                elif before.target.name == axis:
                    help = f"name all mesh axes in one rule: `shard {axis} -> {together}`"
            elif rule.target.path is not None:
                notes.append(f"{name}: {type}")
                help = f"name one of its axes: {', '.join(type.names)}"
        return tuple(notes[:EXAMPLES]), help


def default_layouts(file: spec.Spec, mesh: Mesh) -> DefaultLayouts:
    """The default layouts of shard rules. Raises Refused (E0412) if one uses the pipeline's mesh axis.

    What all ranks of the pipeline share is in parts already (`partita.compiler.passes.vocab_parallel`).
    """
    axes: list[LayoutRule] = []
    tensors: list[LayoutRule] = []
    classes: list[LayoutRule] = []
    if wrong := list(mesh_axis_conflicts(file)):
        raise Refused(wrong)
    for written in file.layout.rules if file.layout else ():
        if not isinstance(written, spec.ShardRule):
            continue
        mesh_axes = tuple(each for each in written.mesh_axes if each != mesh.pipe)
        for target in written.targets if mesh_axes else ():
            rule = LayoutRule(target, mesh_axes, written.span, written.exchange)
            if target.is_class:
                classes.append(rule)
            elif target.path is not None:
                tensors.append(rule)
            else:
                axes.append(rule)
    cuts, padded = cuts_of(file), frozenset(padded_axes(file))
    return DefaultLayouts(mesh, file.batch, tuple(axes), tuple(tensors), tuple(classes), cuts, padded)


def _assigned(rules: Iterable[LayoutRule], names: Sequence[str]) -> Iterator[Split]:
    used: set[str] = set()
    split: set[str] = set()
    for rule in rules:
        own, divided = rule.target.name, chunks(rule.target.name)
        axis = divided if divided in names else own
        if axis not in names or axis in split:
            continue
        free = [mesh_axis for mesh_axis in rule.mesh_axes if mesh_axis not in used]
        if free:
            split.add(axis)
            used.update(free)
        for mesh_axis in free:
            yield mesh_axis, rule, axis
