"""The rules of a layout block → where each tensor lies: its home, read off its axis names, and how it is stored.

A rule applies to each tensor that has the axis, unless an earlier rule has already used that mesh axis or that axis
for it; rules for one tensor (`shard gpt.wte: embed -> tensor`) stand instead of those for axes. Rules for a class
(`shard param -> data`) say how parameters, gradients and optimizer state are stored between uses: split along the
largest axis whose local extent is still whole and divides, the first declared if several. There is no search and no
propagation: a reader can predict all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attrs import define, field, frozen

from partita.compiler.graph import without_turns
from partita.compiler.layout import Layout, layout_of
from partita.compiler.mesh import Mesh
from partita.compiler.ops.op import State
from partita.dsl import spec
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.source import Span
from partita.dsl.types import Type

# What a class stands for: `param` implies `grad`, `grad` implies `state`.
IMPLIED = {"param": ("param", "grad", "state"), "grad": ("grad", "state"), "state": ("state",)}


@frozen(eq=False)
class Wish:
    """One target of a shard rule, with the mesh axes it may take."""

    target: spec.Target
    mesh_axes: tuple[str, ...]

    def names(self, tensor: str) -> bool:
        """Whether the target's path means this tensor: with or without turn numbers, whole or its end."""
        assert self.target.path is not None
        path = ".".join(self.target.path)
        return any(name == path or name.endswith("." + path) for name in (tensor, without_turns(tensor)))


@define(eq=False)
class Homes:
    """Answers for one layout on one mesh; remembers which rules have applied."""

    mesh: Mesh
    axis_wishes: tuple[Wish, ...] = ()
    tensor_wishes: tuple[Wish, ...] = ()
    class_wishes: tuple[Wish, ...] = ()
    applied: set[spec.Target] = field(factory=set)
    _by_names: dict[tuple[str, ...], tuple[tuple[str, spec.Target, str], ...]] = field(factory=dict)
    _layouts: dict[tuple[tuple[str, ...], str | None], Layout] = field(factory=dict)

    # ------------------------------------------------------------ homes

    def home(self, name: str, type: Type, span: Span | None = None) -> Layout:
        """The home of a tensor. Raises Refused (E0411) if a size does not divide."""
        override = self._tensor(name) if self.tensor_wishes else None
        key = (type.names, override)
        found = self._layouts.get(key)
        if found is None:
            taken = self.reasons(name, type)
            states: dict[str, State] = {mesh_axis: axis for mesh_axis, _, axis in taken}
            found = self._layouts[key] = layout_of((axis, states.get(axis)) for axis in self.mesh.sharding)
        self.check(name, type, found, span)
        return found

    def reasons(self, name: str, type: Type) -> tuple[tuple[str, spec.Target, str], ...]:
        """(mesh axis, the rule's target, tensor axis) for each split of a tensor's home, mesh axes of size 1 too."""
        if self.tensor_wishes and (tensor := self._tensor(name)) is not None:
            wishes: Iterable[Wish] = [w for w in self.tensor_wishes if w.names(tensor)]
            found = tuple(_assigned(wishes, type.names))
        elif type.names in self._by_names:
            return self._by_names[type.names]
        else:
            found = self._by_names[type.names] = tuple(_assigned(self.axis_wishes, type.names))
        self.applied.update(target for _, target, _ in found)
        return found

    def _tensor(self, name: str) -> str | None:
        """The name under which a rule for one tensor means this one, or the one whose cotangent or copy it is."""
        name = name.split("~")[0].removesuffix(".again")
        if name.startswith("d(") and name.endswith(")"):
            name = name[2:-1]
        return name if any(wish.names(name) for wish in self.tensor_wishes) else None

    def check(self, name: str, type: Type, layout: Layout, span: Span | None) -> None:
        """Refuse (E0411) a split that does not divide."""
        sizes = self.mesh.sizes
        for axis in {state for _, state in layout.states if type.has(state)}:
            parts = 1
            for mesh_axis in layout.over(axis):
                parts *= sizes[mesh_axis]
            size = type.axis(axis).size
            if size % parts:
                targets = [t for m, t, a in self.reasons(name, type) if a == axis and m in layout.over(axis)]
                over = " × ".join(f"`{m}` of {sizes[m]}" for m in layout.over(axis))
                raise refuse(
                    "E0411",
                    f"axis `{axis}` of {size} does not divide over {over}",
                    targets[0].span if targets else span,
                    notes=[f"{name}: {type}" + (f"   (declared at {span.place})" if span else "")],
                    help=f"choose sizes by which `{axis}` divides into {parts} parts in every microbatch",
                )

    # ------------------------------------------------------------ storage

    def stored(self, kind: str, name: str, master: Type, compute: Layout) -> Layout:
        """How the `kind` (`param`, `grad` or `state`) of a parameter is stored, from its compute layout."""
        states: dict[str, State] = dict(compute.states)
        sizes = self.mesh.sizes
        for wish in self.class_wishes:
            if kind not in IMPLIED[wish.target.name]:
                continue
            if wish.target.path is not None and not wish.names(name):
                continue
            for mesh_axis in wish.mesh_axes:
                if states.get(mesh_axis) is not None:
                    continue
                split = set(states.values())
                parts = sizes[mesh_axis]
                whole = [axis for axis in master.axes if axis.name not in split and axis.size % parts == 0]
                if not whole:
                    continue
                largest = max(whole, key=lambda axis: axis.size)
                states[mesh_axis] = largest.name
                self.applied.add(wish.target)
        return layout_of((axis, states.get(axis)) for axis in self.mesh.sharding)

    # ------------------------------------------------------------ rules without effect

    def warnings(self) -> Iterator[Diagnostic]:
        """W0301 for each target that no tensor was split by."""
        for wish in (*self.axis_wishes, *self.tensor_wishes, *self.class_wishes):
            target = wish.target
            if target in self.applied:
                continue
            what = f"{'.'.join(target.path)}: {target.name}" if target.path else target.name
            over = ", ".join(wish.mesh_axes)
            if target.is_class:
                help = "a parameter is stored split along an axis that is whole and divides: none is here"
            elif target.path is not None:
                help = f"it has no axis `{target.name}`, or an earlier rule for it takes the mesh axis"
            else:
                help = f"wherever `{target.name}` stands, an earlier rule takes the mesh axis: move this one before it"
            yield Diagnostic("W0301", f"`shard {what} -> {over}` applies to no tensor", target.span, help=help)


def homes_of(layout: spec.Layout | None, mesh: Mesh) -> Homes:
    """The homes of a layout's shard rules. Raises Refused (E0412) where one wants the pipeline's mesh axis."""
    axes: list[Wish] = []
    tensors: list[Wish] = []
    classes: list[Wish] = []
    rules = layout.rules if layout else ()
    for rule in rules:
        if not isinstance(rule, spec.ShardRule):
            continue
        if mesh.pipe in rule.mesh_axes:
            staged = [r.span for r in rules if isinstance(r, (spec.StageRule, spec.PlaceRule))]
            raise refuse(
                "E0412",
                f"mesh axis `{mesh.pipe}` is the pipeline's, and cannot split tensors as well",
                rule.span,
                notes=[f"`{span.text}`   ({span.place})" for span in staged[:1]],
                help="use another mesh axis for one of the two",
            )
        for target in rule.targets:
            wish = Wish(target, rule.mesh_axes)
            if target.is_class:
                classes.append(wish)
            elif target.path is not None:
                tensors.append(wish)
            else:
                axes.append(wish)
    return Homes(mesh, tuple(axes), tuple(tensors), tuple(classes))


def _assigned(wishes: Iterable[Wish], names: Sequence[str]) -> Iterator[tuple[str, spec.Target, str]]:
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
            yield mesh_axis, wish.target, axis
