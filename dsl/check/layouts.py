"""Layouts → `spec.Layout`: checks every axis, mesh axis and model path that their rules name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from partita.dsl import limits, spec
from partita.dsl.advice.foreign import meant
from partita.dsl.advice.report import Report, suggestion
from partita.dsl.check import constants
from partita.dsl.check.axes import Axes, positive_integer
from partita.dsl.diagnostic import refuse
from partita.dsl.names.paths import ModelNames, checked_path
from partita.dsl.syntax import tree
from partita.dsl.syntax.units import PLAIN
from partita.dsl.syntax.unparse import expression_text

PARAM, STATE = "param", "state"
MMAP = "mmap"  # may follow `by` in an `offload` rule
CLASSES = (PARAM, "grad", STATE)
# What may follow `by` in a rule for an axis: the order of its positions, and how attention exchanges along it.
ZIGZAG, GATHER, HEADS, RING = "zigzag", "gather", "heads", "ring"
EXCHANGES = (GATHER, HEADS, RING)
BY = (ZIGZAG, *EXCHANGES)


class Layouts:
    """Checks layouts against the meshes and axes of a file."""

    def __init__(self, meshes: Mapping[str, tree.Mesh], axes: Axes, report: Report) -> None:
        self.meshes, self.axes, self.report = meshes, axes, report

    def layout(self, layout: tree.Layout, known: ModelNames | None) -> spec.Layout | None:
        """The checked layout; None after reporting errors. Paths are checked only if the model's names are `known`."""
        errors = self.report.errors
        mesh = self.meshes.get(layout.mesh.text)
        if mesh is None:
            help = suggestion(layout.mesh.text, self.meshes, "there are")
            self.report.error("E0302", f"unknown mesh `{layout.mesh.text}`", layout.mesh.span, help=help)
        mesh_axes = [entry.key.text for entry in mesh.axes] if mesh else None
        rules = [self.rule(rule, mesh_axes, known) for rule in layout.rules]
        self.agree(layout)
        if self.report.errors > errors:
            return None
        checked = tuple(rule for rule in rules if rule is not None)
        return spec.Layout(layout.name.text, layout.mesh.text, checked, layout.span)

    def rule(self, rule: tree.Rule, mesh_axes: Sequence[str] | None, known: ModelNames | None) -> spec.Rule | None:
        """One checked rule; None after reporting errors."""
        with self.report:
            match rule:
                case tree.Shard():
                    self.direction(rule, mesh_axes)
                    targets = tuple(self.target(target, known) for target in rule.targets)
                    axes = tuple(self.mesh_axis(name, mesh_axes) for name in rule.mesh_axes)
                    zigzag, exchange = self.words(rule)
                    return spec.ShardRule(targets, axes, rule.span, zigzag, exchange, self.uneven(rule))
                case tree.Stage():
                    self.repeats(rule.repeats, known)
                    names = tuple(name.text for name in rule.repeats)
                    axis = self.mesh_axis(rule.mesh_axis, mesh_axes)
                    return spec.StageRule(names, axis, self.layers(rule.counts), rule.span)
                case tree.Place():
                    paths = self.paths(rule.paths, known)
                    axis = self.mesh_axis(rule.mesh_axis, mesh_axes)
                    first, last = self.stages(rule)
                    spans = tuple(path.span for path in rule.paths)
                    return spec.PlaceRule(paths, axis, first, last, rule.span, spans)
                case tree.Recompute():
                    paths = self.paths(rule.paths, known, ("all", "auto"))
                    return spec.RecomputeRule(paths, rule.span, tuple(path.span for path in rule.paths))
                case tree.Offload():
                    for path in rule.paths:
                        if str(path) in CLASSES and str(path) not in (PARAM, STATE):
                            message = f"`{path}` cannot be kept in the host's memory"
                            help = "`offload param`, `offload state`; or what a block or repeat keeps: `offload layer`"
                            raise refuse("E0418", message, path.span, help=help)
                    paths = self.paths(rule.paths, known, ("all", PARAM, STATE))
                    spans = tuple(path.span for path in rule.paths)
                    return spec.OffloadRule(paths, rule.span, spans, self.mapped(rule))
                case tree.Overlap():
                    axes = tuple(self.mesh_axis(name, mesh_axes) for name in rule.mesh_axes)
                    value = constants.evaluate(rule.pieces, self.axes.number)
                    pieces = positive_integer(value, rule.pieces, "the number of pieces")
                    return spec.OverlapRule(axes, pieces, rule.span)
        return None

    def mapped(self, rule: tree.Offload) -> bool:
        """Whether parameters are mapped into memory from files. Raises Refused (E0418)."""
        if rule.by is None:
            return False
        if rule.by.text != MMAP:
            message = f"nothing is offloaded by `{rule.by.text}`"
            raise refuse("E0418", message, rule.by.span, help=f"`by {MMAP}`, or nothing")
        for path in rule.paths:
            if str(path) in ("all", STATE):
                message = f"`{path}` cannot be mapped into memory from files: parameters can, with what is kept of them"
                raise refuse("E0418", message, path.span, help="name a table, or `param`")
        return True

    def words(self, rule: tree.Shard) -> tuple[bool, str | None]:
        """Whether a rule's axis is in zigzag order, and how attention exchanges along it. Raises Refused (E0419)."""
        for word in rule.by:
            if word.text not in BY:
                help = suggestion(word.text, BY, "there are")
                raise refuse("E0419", f"an axis is not split by `{word.text}`", word.span, help=help)
        if rule.by and (len(rule.targets) > 1 or rule.targets[0].path or rule.targets[0].name.text in CLASSES):
            message = "`by` says how one axis is split, of all tensors"
            help = "give that axis a rule of its own, such as `shard seq -> context by zigzag`"
            raise refuse("E0419", message, rule.span, help=help)
        words = [word.text for word in rule.by]
        exchanges = [word for word in words if word != ZIGZAG]
        if len(exchanges) > 1 or len(set(words)) < len(words):
            help = f"one of {', '.join(f'`{word}`' for word in EXCHANGES)}, and `{ZIGZAG}`, each at most once"
            raise refuse("E0419", f"`by {', '.join(words)}` says more than one thing", rule.by[-1].span, help=help)
        return ZIGZAG in words, exchanges[0] if exchanges else None

    def uneven(self, rule: tree.Shard) -> str | None:
        """What happens to axes that do not divide. Raises Refused (E0419)."""
        if rule.uneven is None:
            return None
        word = rule.uneven.text
        if any(target.name.text in CLASSES for target in rule.targets):
            message = f"`{word}` says how an axis is split"
            help = f"`shard heads -> tensor {word}`; what is stored in parts need not divide"
            raise refuse("E0419", message, rule.uneven.span, help=help)
        if any(each.text == ZIGZAG for each in rule.by):
            message = f"positions in zigzag order cannot be {word}"
            raise refuse("E0419", message, rule.uneven.span, help=f"leave out `{ZIGZAG}`, or `{word}`")
        return word

    def agree(self, layout: tree.Layout) -> None:
        """Report rules that say different things: of how one axis is split (E0419), or into how many pieces what is
        sent along one mesh axis is cut (E0420).
        """
        first: dict[str, tree.Shard] = {}
        overlapped: set[str] = set()
        for rule in layout.rules:
            if isinstance(rule, tree.Overlap):
                for name in rule.mesh_axes:
                    if name.text in overlapped:
                        message = f"`{name.text}` is overlapped twice"
                        self.report.error("E0420", message, name.span, help="one `overlap` for each mesh axis")
                    overlapped.add(name.text)
            if not isinstance(rule, tree.Shard):
                continue
            for target in rule.targets:
                if target.path is not None or target.name.text in CLASSES:
                    continue
                other = first.setdefault(target.name.text, rule)
                if {word.text for word in other.by} != {word.text for word in rule.by}:
                    message = f"rules split `{target.name.text}` in different ways"
                    notes = [f"`{each.span.text}`   ({each.span.place})" for each in (other, rule)]
                    help = "name all mesh axes in one rule, or say the same after `by` in both"
                    self.report.error("E0419", message, rule.span, notes=notes, help=help)

    def mesh_axis(self, name: tree.Name, mesh_axes: Sequence[str] | None) -> str:
        """The name of a mesh axis. Raises Refused (E0313) if the layout's mesh has no such axis."""
        if mesh_axes is not None and name.text not in mesh_axes:
            help = suggestion(name.text, mesh_axes, "its axes:")
            raise refuse("E0313", f"the mesh has no axis `{name.text}`", name.span, help=help)
        return name.text

    def direction(self, rule: tree.Shard, mesh_axes: Sequence[str] | None) -> None:
        """Refuse (E0202) axes of the mesh before the arrow, and axes of tensors after it."""
        targets = [target.name.text for target in rule.targets]
        over = [name.text for name in rule.mesh_axes]
        ours, theirs = {*self.axes.entries, *CLASSES}, set(mesh_axes or ())
        if theirs - ours >= set(targets) and ours - theirs >= set(over) and all(not each.path for each in rule.targets):
            at = rule.targets[0].name.span.to(rule.mesh_axes[-1].span)
            help = f"write `{', '.join(over)} -> {', '.join(targets)}`"
            raise refuse("E0202", "an axis of the tensors stands before `->`, one of the mesh after it", at, help=help)

    def target(self, target: tree.Target, known: ModelNames | None) -> spec.Target:
        """A sharding target: a class or an axis, optionally of one path."""
        path = self.paths([target.path], known)[0] if target.path is not None else None
        name = target.name.text
        if name not in CLASSES:
            if name not in self.axes.entries and (kind := meant(name, CLASSES)) is not None:
                raise refuse("E0202", f"unknown axis `{name}`", target.name.span, help=f"did you mean `{kind}`?")
            self.axes.find(target.name)
        return spec.Target(path, name, name in CLASSES, target.span)

    def paths(
        self, paths: Iterable[tree.Path], known: ModelNames | None, others: Collection[str] = ()
    ) -> tuple[tuple[str, ...], ...]:
        """The paths, of which every part is a name of the model (E0317), but for words that are `others`."""
        checked = []
        for path in paths:
            if known is not None and str(path) not in others:
                known.check(path)
            checked.append(checked_path(path, self.axes.number, known))
        return tuple(checked)

    def repeats(self, names: Iterable[tree.Name], known: ModelNames | None) -> None:
        """Check that the names in a `stage` rule are repeats of the model (E0317)."""
        for name in names:
            if known is not None and name.text not in known.repeats:
                message = f"model `{known.model}` has no repeat called `{name.text}`"
                help = suggestion(name.text, known.repeats, "its repeats:") or known.some(known.repeats)
                raise refuse("E0317", message, name.span, help=help)

    def layers(self, counts: tree.List | None) -> tuple[int, ...] | None:
        """The number of layers of each stage, if given."""
        if counts is None:
            return None
        if not counts.items:
            raise refuse("E0314", "this list of layers per stage is empty", counts.span)
        return tuple(
            positive_integer(constants.evaluate(item, self.axes.number), item, "the number of layers of a stage")
            for item in counts.items
        )

    def stages(self, rule: tree.Place) -> tuple[int, int]:
        """The first and last stage of a `place` rule. Raises Refused (E0314)."""
        numbers = []
        for written in (rule.first, rule.last or rule.first):
            value = constants.evaluate(written, self.axes.number)
            if value.dimension != PLAIN or value.value != int(value.value) or not 0 <= value.value <= limits.RANKS:
                message = f"`{expression_text(written)}` is not a valid stage: stages count from 0"
                raise refuse("E0314", message, written.span)
            numbers.append(int(value.value))
        if numbers[0] > numbers[1]:
            raise refuse("E0314", f"stages {numbers[0]} to {numbers[1]} are none", rule.first.span)
        return numbers[0], numbers[1]
