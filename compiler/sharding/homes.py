"""The rules of a layout block → where each tensor lies: its home, read off its axis names, and how it is stored.

A rule applies to each tensor that has the axis, unless an earlier rule has already used that mesh axis or that axis
for it; rules for one tensor (`shard gpt.wte: embed -> tensor`) stand instead of those for axes. Rules for a class
(`shard param -> data`) say how parameters, gradients and optimizer state are stored between uses: split along the
largest axis whose local extent is still whole and divides, the first declared if several. There is no search and no
propagation: a reader can predict all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from attrs import define, field, frozen

from partita.compiler.graph import without_turns
from partita.compiler.layout import Layout, State, layout_of
from partita.compiler.mesh import Mesh
from partita.dsl import spec
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.fits import staged_twice, undivided
from partita.dsl.source import Span
from partita.dsl.types import Type

# What a class stands for: `param` implies `grad`, `grad` implies `state`.
IMPLIED = {"param": ("param", "grad", "state"), "grad": ("grad", "state"), "state": ("state",)}
# How many tensors a warning names.
EXAMPLES = 3


@frozen(eq=False)
class Wish:
    """One target of a shard rule, with the mesh axes it may take; `rule` is where the whole rule stands."""

    target: spec.Target
    mesh_axes: tuple[str, ...]
    rule: Span

    def names(self, tensor: str) -> bool:
        """Whether the target's path means this tensor: with or without turn numbers, whole or its end. One without a
        path means all.
        """
        if self.target.path is None:
            return True
        path = ".".join(self.target.path)
        return any(name == path or name.endswith("." + path) for name in (tensor, without_turns(tensor)))

    def stores(self, kind: str, parameter: str) -> bool:
        """Whether a rule for a class is about the `kind` (`param`, `grad` or `state`) of this parameter."""
        return kind in IMPLIED[self.target.name] and self.names(parameter)

    def __str__(self) -> str:
        """The rule with this target alone: `shard gpt.wte: embed -> tensor`."""
        path = f"{'.'.join(self.target.path)}: " if self.target.path else ""
        return f"shard {path}{self.target.name} -> {', '.join(self.mesh_axes)}"


# A split of a tensor: the mesh axis, the rule, and the tensor's axis.
Taken = tuple[str, Wish, str]


@define(eq=False)
class Homes:
    """Answers for one layout on one mesh; remembers which rules have applied, and to what they could not.

    `seen` has a tensor for each set of axes, `undivided` the parameters that a rule for a class leaves whole.
    """

    mesh: Mesh
    axis_wishes: tuple[Wish, ...] = ()
    tensor_wishes: tuple[Wish, ...] = ()
    class_wishes: tuple[Wish, ...] = ()
    applied: set[Wish] = field(factory=set)
    seen: dict[tuple[tuple[str, ...], str | None], tuple[str, Type]] = field(factory=dict)
    undivided: dict[Wish, dict[str, Type]] = field(factory=dict)
    _taken: dict[tuple[str, ...], tuple[Taken, ...]] = field(factory=dict)
    _layouts: dict[tuple[tuple[str, ...], str | None], Layout] = field(factory=dict)

    # ------------------------------------------------------------ homes

    def home(self, name: str, type: Type, span: Span | None = None) -> Layout:
        """The home of a tensor. Raises Refused (E0411) if a size does not divide."""
        key = (type.names, self._alone(name))
        found = self._layouts.get(key)
        if found is None:
            states: dict[str, State] = {mesh_axis: axis for mesh_axis, _, axis in self.taken(name, type)}
            found = self._layouts[key] = layout_of((axis, states.get(axis)) for axis in self.mesh.sharding)
            self.seen[key] = (name, type)
        self._check(name, type, found, span)
        return found

    def taken(self, name: str, type: Type) -> tuple[Taken, ...]:
        """The splits of a tensor's home, those over mesh axes of size 1 too."""
        if self._alone(name) is not None:
            found = tuple(_assigned(self.wishes(name), type.names))
        elif type.names in self._taken:
            return self._taken[type.names]
        else:
            found = self._taken[type.names] = tuple(_assigned(self.axis_wishes, type.names))
        self.applied.update(wish for _, wish, _ in found)
        return found

    def wishes(self, name: str) -> tuple[Wish, ...]:
        """The rules that are tried for a tensor: those for it alone, or those for axes."""
        alone = self._alone(name)
        return self.axis_wishes if alone is None else tuple(each for each in self.tensor_wishes if each.names(alone))

    def late(self, name: str, type: Type) -> Iterator[tuple[Wish, str, Wish]]:
        """The rules that are tried for a tensor that has their axis, and split nothing: why, and the rule before."""
        taken = self.taken(name, type)
        for wish in self.wishes(name):
            if not type.has(wish.target.name) or any(each is wish for _, each, _ in taken):
                continue
            own = [each for each in taken if each[2] == wish.target.name]
            mesh_axis, before, axis = (own or [each for each in taken if each[0] in wish.mesh_axes])[0]
            over = f"`{mesh_axis}` of {self.mesh.sizes[mesh_axis]}"
            because = f"`{axis}` is already split over {over}" if own else f"{over} is taken by `{axis}`"
            yield wish, because, before

    def _alone(self, name: str) -> str | None:
        """The name, if a rule for one tensor means it."""
        return name if any(wish.names(name) for wish in self.tensor_wishes) else None

    def _check(self, name: str, type: Type, layout: Layout, span: Span | None) -> None:
        """Refuse (E0411) a split that does not divide."""
        sizes = self.mesh.sizes
        for axis in {state for _, state in layout.states if type.has(state)}:
            parts = prod(sizes[mesh_axis] for mesh_axis in layout.over(axis))
            size = type.axis(axis).size
            if size % parts:
                wish = next(wish for _, wish, each in self.taken(name, type) if each == axis)
                over = [(mesh_axis, sizes[mesh_axis]) for mesh_axis in layout.over(axis)]
                raise Refused([undivided(type.axis(axis), over, wish.target.span, f"{name}: {type}", span)])

    # ------------------------------------------------------------ storage

    def stored(self, kind: str, name: str, master: Type, compute: Layout) -> Layout:
        """How the `kind` (`param`, `grad` or `state`) of a parameter is stored, from its compute layout."""
        states: dict[str, State] = dict(compute.states)
        sizes = self.mesh.sizes
        for wish in self.class_wishes:
            if not wish.stores(kind, name):
                continue
            for mesh_axis in wish.mesh_axes:
                if states.get(mesh_axis) is not None:
                    continue
                split = set(states.values())
                parts = sizes[mesh_axis]
                whole = [axis for axis in master.axes if axis.name not in split and axis.size % parts == 0]
                if not whole:
                    self.undivided.setdefault(wish, {})[name] = master
                    continue
                largest = max(whole, key=lambda axis: axis.size)
                states[mesh_axis] = largest.name
                self.applied.add(wish)
        return layout_of((axis, states.get(axis)) for axis in self.mesh.sharding)

    # ------------------------------------------------------------ rules without effect

    def warnings(self) -> Iterator[Diagnostic]:
        """W0301 for each target that no tensor was split by, with the tensors that it might have split; W0302 for each
        mesh axis that splits no tensor but between uses."""
        wishes = (*self.axis_wishes, *self.tensor_wishes, *self.class_wishes)
        for wish in wishes:
            if wish not in self.applied:
                notes, help = self._unapplied(wish)
                yield Diagnostic("W0301", f"`{wish}` applies to no tensor", wish.target.span, notes=notes, help=help)
        splitting = {mesh_axis for layout in self._layouts.values() for mesh_axis, _ in layout.states}
        for mesh_axis in self.mesh.sharding:
            naming = [wish for wish in wishes if mesh_axis in wish.mesh_axes and wish in self.applied]
            if mesh_axis not in splitting and naming:
                ranks = f"`{mesh_axis}` of {self.mesh.sizes[mesh_axis]}"
                help = f"split the batch over it as well: `shard batch -> {mesh_axis}`"
                message = f"no value is split over {ranks}: its ranks all compute the same"
                yield Diagnostic("W0302", message, naming[0].rule, help=help)

    def _unapplied(self, wish: Wish) -> tuple[tuple[str, ...], str]:
        """Tensors that a rule was tried for, with what came before it; and what can be done."""
        sizes = self.mesh.sizes
        axis = wish.target.name
        if wish.target.is_class:
            over = " or ".join(f"`{each}` of {sizes[each]}" for each in wish.mesh_axes)
            tried = self.undivided.get(wish, {})
            notes = [f"{name}: {type}: no unsplit axis divides evenly by {over}" for name, type in tried.items()]
            help = "choose sizes that divide" if notes else "its tensors are already split over that: remove the rule"
            return tuple(notes[:EXAMPLES]), help
        notes = []
        help = f"no tensor has axis `{axis}`"
        for name, type in self.seen.values():
            if wish not in self.wishes(name):
                continue
            late = next(((because, before) for each, because, before in self.late(name, type) if each is wish), None)
            if late is not None:
                because, before = late
                notes.append(f"{name}: {type}: {because}, `{before}` ({before.rule.place})")
                together = ", ".join((*before.mesh_axes, *wish.mesh_axes))
                help = "move it before that rule, or give it another mesh axis"
                if before.target.name == axis:
                    help = f"name all mesh axes in one rule: `shard {axis} -> {together}`"
            elif wish.target.path is not None:
                notes.append(f"{name}: {type}")
                help = f"name one of its axes: {', '.join(type.names)}"
        return tuple(notes[:EXAMPLES]), help


def homes_of(layout: spec.Layout | None, mesh: Mesh) -> Homes:
    """The homes of a layout's shard rules. Raises Refused (E0412) where one wants the pipeline's mesh axis."""
    axes: list[Wish] = []
    tensors: list[Wish] = []
    classes: list[Wish] = []
    if wrong := list(staged_twice(layout)):
        raise Refused(wrong)
    for rule in layout.rules if layout else ():
        if not isinstance(rule, spec.ShardRule):
            continue
        for target in rule.targets:
            wish = Wish(target, rule.mesh_axes, rule.span)
            if target.is_class:
                classes.append(wish)
            elif target.path is not None:
                tensors.append(wish)
            else:
                axes.append(wish)
    return Homes(mesh, tuple(axes), tuple(tensors), tuple(classes))


def _assigned(wishes: Iterable[Wish], names: Sequence[str]) -> Iterator[Taken]:
    used: set[str] = set()
    split: set[str] = set()
    for wish in wishes:
        axis = wish.target.name
        if axis not in names or axis in split:
            continue
        free = [mesh_axis for mesh_axis in wish.mesh_axes if mesh_axis not in used]
        if free:
            split.add(axis)
            used.update(free)
        for mesh_axis in free:
            yield mesh_axis, wish, axis
