"""Meshes, layouts, schedules, the train block and claims → their records, and the complete `Spec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from attrs import evolve

from partita.dsl import limits, spec
from partita.dsl.advice.quotes import without_quotes
from partita.dsl.advice.report import listed, suggestion
from partita.dsl.check import constants
from partita.dsl.check.adapters import checked_adapters
from partita.dsl.check.arguments import bind, parameters_of_call
from partita.dsl.check.axes import positive_integer
from partita.dsl.check.language_model import how_spelled, language_model, sources_of, spelling_of
from partita.dsl.check.layouts import CLASSES, Layouts
from partita.dsl.check.optimizers import Optimizers
from partita.dsl.config.builtins import (
    CHOICES,
    DEVICES,
    EVALUATION,
    LINKS,
    MEASURES,
    OPTIMIZERS,
    SAMPLE,
    SCHEDULES,
    TRAIN,
    OneOf,
)
from partita.dsl.config.overrides import CommandLineChoices, selected_schedule
from partita.dsl.config.settings import Settings
from partita.dsl.diagnostic import refuse
from partita.dsl.names.correspondence import Weights
from partita.dsl.names.declarations import Declarations
from partita.dsl.names.paths import known_paths
from partita.dsl.names.weights import Checker, parameters_of
from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Span


class Plans:
    """Checks everything in a file except models."""

    def __init__(
        self,
        declarations: Declarations,
        settings: Settings,
        models: dict[str, spec.Model | None],
        chosen: CommandLineChoices,
    ) -> None:
        self.declarations, self.settings, self.models, self.chosen = declarations, settings, models, chosen
        self.axes, self.report = settings.axes, settings.report
        self._used: list[tuple[str, str]] = []
        self.train_entries = declarations.train[0].table.entries if declarations.train else ()

    def whole(self) -> spec.Spec | None:
        """The `Spec` of the file; None after reporting errors."""
        meshes = {name: self.mesh(mesh) for name, mesh in self.declarations.meshes.items()}
        model_name = self.choice("model", self.declarations.models, self.chosen.model)
        layout_name = self.choice("layout", self.declarations.layouts, self.chosen.layout)
        model = self.models.get(model_name) if model_name else None
        adapters = {
            name: checked_adapters(self.settings, written, known_paths(model) if model else None)
            for name, written in self.declarations.adapters.items()
        }
        beside = adapters.get(self.chosen_adapters() or "")
        if model is not None and beside is not None:
            model = self.models[model.name] = evolve(model, adapters=beside.rules)
        layouts = {}
        checker = Layouts(self.declarations.meshes, self.axes, self.report)
        for name, written in self.declarations.layouts.items():
            # The chosen layout must match the chosen model; with a single model, every layout must.
            fits = name == layout_name or len(self.models) == 1
            layouts[name] = checker.layout(written, known_paths(model) if model and fits else None)
        schedules = {name: self.schedule(name, schedule) for name, schedule in self.declarations.schedules.items()}
        schedule = self.chosen_schedule(schedules)
        layout = layouts.get(layout_name) if layout_name else None
        mesh = meshes.get(layout.mesh) if layout else None
        rules = Optimizers(self.settings)
        optimizers = {
            name: rules.optimizer(written, known_paths(model) if model else None)
            for name, written in self.declarations.optimizers.items()
        }
        train = self.train(optimizers, model, schedule)
        if train is not None and beside is not None:
            own = evolve(train.optimizer, rules=(*beside.freezes, *train.optimizer.rules))
            train = evolve(train, optimizer=own)
        weights = {name: self.weights(written, model) for name, written in self.declarations.weights.items()}
        # If the layout is wrong, which was reported, the mesh axes are unknown.
        known = mesh is not None or not self.report.errors
        expect = self.claims([name for name, _ in mesh.axes] if mesh else [] if known else None)
        if self.report.errors:
            return None
        for kind, thing in (("model", model), ("layout", layout), ("schedule", schedule)):
            self._used += [(kind, thing.name)] if thing is not None else []
        return spec.Spec(
            self.declarations.source,
            {name: axis for name, axis in self.axes.sizes.items() if axis is not None},
            {name: mesh for name, mesh in meshes.items() if mesh is not None},
            model,
            layout,
            schedule,
            train,
            expect,
            {name: each for name, each in weights.items() if each is not None},
        )

    def used(self) -> list[tuple[str, str]]:
        """The (kind, name) of each declaration that the file or the command line uses.

        What an override replaces still counts as used by the file.
        """
        used = [("mesh", layout.mesh.text) for layout in self.declarations.layouts.values()]
        for kind, table in self.declarations.alternatives.items():
            entry = self.entry(kind)
            named = tree.single(entry.value) if entry else None
            if named is not None:
                used.append((kind, named.text))
            elif entry is None and len(table) == 1 and kind != "adapters":
                used.append((kind, next(iter(table))))
        return used + self._used

    # ------------------------------------------------------------ what train chooses

    def entry(self, key: str) -> tree.Entry | None:
        """The train block's entry with a key."""
        return next((entry for entry in self.train_entries if entry.key.text == key), None)

    def choice(self, kind: str, table: Mapping[str, object], override: tree.Expression | None) -> str | None:
        """The name of the chosen model or layout: the override, the one that `train` names, or the only one."""
        entry = self.entry(kind)
        written = override if override is not None else entry.value if entry else None
        if written is None:
            return self.only(kind, table)
        name = tree.single(written)
        if name is None:
            called = tree.bare(written)
            if isinstance(called, tree.Call) and called.name.text in table:
                self.declared_already(called)
                return None
            help = without_quotes(written, table) or (
                f"declared: {listed(table)}" if table else f"declare one: `{kind} NAME …`"
            )
            self.report.error("E0306", f"`{kind}` is the name of a {kind}", written.span, help=help)
            return None
        if name.text not in table:
            help = suggestion(name.text, table, "there are") or f"declare it: `{kind} {name.text} …`"
            self.report.error("E0302", f"unknown {kind} `{name.text}`", name.span, help=help)
            return None
        return name.text

    def chosen_adapters(self) -> str | None:
        """The adapters that `train` names, which may be `none`: with those that it does not name, nothing is done."""
        entry = self.entry("adapters")
        name = tree.single(entry.value) if entry is not None else None
        if entry is None or (name is not None and name.text == "none"):
            return None
        return self.choice("adapters", self.declarations.adapters, None)

    def declared_already(self, written: tree.Call) -> None:
        """Report that a declaration is called where its name stands (E0302)."""
        name = written.name.text
        help = f"write `{name}`, and change it where it is declared"
        self.report.error("E0302", f"`{name}` is declared already", written.span, help=help)

    def only(self, kind: str, table: Mapping[str, object]) -> str | None:
        """The only declaration of a kind; if there are several, `train` must name one (E0316)."""
        if len(table) == 1:
            return next(iter(table))
        if table and self.declarations.train:
            message = f"there are {len(table)} {kind}s, and `train` selects none"
            help = f"`{kind} = …` with one of {listed(sorted(table), 'or')}"
            self.report.error("E0316", message, self.declarations.train[0].span, help=help)
        return None

    def chosen_schedule(self, schedules: Mapping[str, spec.Schedule | None]) -> spec.Schedule | None:
        """The chosen schedule, as in `choice`; `train` may also call one in place."""
        if self.chosen.schedule is not None:
            return self.schedule(self.chosen.schedule.name.text, self.chosen.schedule)
        entry = self.entry("schedule")
        if entry is not None and isinstance(tree.bare(entry.value), tree.Call):
            schedule = selected_schedule(self.declarations)
            return self.schedule(schedule.name.text, schedule) if schedule else None
        name = self.choice("schedule", schedules, None)
        return schedules[name] if name else None

    # ------------------------------------------------------------ declarations

    def mesh(self, mesh: tree.Mesh) -> spec.Mesh | None:
        """A checked mesh; None after reporting errors."""
        errors = self.report.errors
        sizes: dict[str, int] = {}
        for entry in mesh.axes:
            name = entry.key.text
            if name in sizes:
                self.report.error("E0301", f"mesh axis `{name}` is declared twice", entry.key.span)
            if name in CLASSES or name in ("all", "auto"):
                self.report.error("E0104", f"`{name}` is reserved and cannot be declared", entry.key.span)
            sizes[name] = self.count(entry.value, f"mesh axis `{name}`", limits.RANKS) or 1
        if prod(sizes.values()) > limits.RANKS:
            message = f"mesh `{mesh.name.text}` has more than {limits.RANKS:,} ranks"
            self.report.error("E0007", message, mesh.name.span)
        device, links = None, dict[str, spec.Call]()
        seen: dict[str, Span] = {}
        for entry in mesh.table.entries if mesh.table else ():
            key = entry.key.text
            if key in seen:
                notes = [f"the first is at {seen[key].place}"]
                self.report.error("E0304", f"`{key}` is given twice", entry.key.span, notes)
            elif key == "device":
                device = self.settings.value(entry.value, OneOf(DEVICES, bare=True), "`device`")
            elif key == "link":
                links = self.links(entry.value, tuple(sizes))
            else:
                message = f"a mesh has no entry `{key}`"
                choices = suggestion(key, ("device", "link"), "there are")
                self.report.error("E0303", message, entry.key.span, help=choices)
            seen[key] = entry.key.span
        if self.report.errors > errors:
            return None
        return spec.Mesh(mesh.name.text, tuple(sizes.items()), device, links, mesh.span)

    def count(self, written: tree.Expression, what: str, largest: int) -> int | None:
        """A positive integer; None after reporting errors."""
        with self.report:
            return positive_integer(constants.evaluate(written, self.axes.number), written, what, largest)
        return None

    def links(self, written: tree.Expression, axes: Sequence[str]) -> dict[str, spec.Call]:
        """`[tensor -> nvlink4, …]`, or one link for all axes."""
        kind, bare = OneOf(LINKS, bare=True), tree.bare(written)
        links: dict[str, spec.Call] = {}
        if not isinstance(bare, tree.List):
            return dict.fromkeys(axes, self.link(bare, kind))
        for item in bare.items:
            name = tree.single(item.left) if isinstance(item, tree.Arrow) else None
            if name is None or not isinstance(item, tree.Arrow):
                form = "`[tensor -> nvlink4, data -> ib400]`"
                self.report.error("E0306", "expected `mesh axis -> link`", item.span, help=form)
            elif name.text not in axes:
                near = suggestion(name.text, axes, "its axes:")
                self.report.error("E0313", f"the mesh has no axis `{name.text}`", name.span, help=near)
            elif name.text in links:
                self.report.error("E0304", f"the link of `{name.text}` is given twice", item.span)
            else:
                links[name.text] = self.link(item.right, kind)
        return links

    def link(self, written: tree.Expression, kind: OneOf) -> spec.Call:
        """One link. Its uplinks are those of a leaf of some size, or it has none."""
        link: spec.Call = self.settings.value(written, kind, "`link`")
        present = {
            key for key in ("leaf", "oversubscribed") if link is not None and link.arguments.get(key) is not None
        }
        if len(present) == 1:
            help = "such as `leaf = 256, oversubscribed = 2`"
            self.report.error("E0210", f"`{link.name}` has `{present.pop()}` alone", written.span, help=help)
        return link

    def schedule(self, name: str, schedule: tree.Schedule) -> spec.Schedule | None:
        """A schedule with its call checked; None after reporting errors."""
        called = schedule.call.name
        declared = self.declarations.schedules.get(called.text) if called.text not in SCHEDULES else None
        if declared is not None and schedule.name is called:
            self.declared_already(schedule.call)
            return None
        if declared is not None and declared.call is not schedule.call:
            message = f"`{called.text}` is declared already, and only a built-in schedule is called"
            self.report.error("E0302", message, called.span, help=f"write `{declared.call.name.text}`")
            return None
        call = self.settings.call(schedule.call, SCHEDULES, "schedule")
        if call is None:
            return None
        over = call.arguments.get("over")
        if isinstance(over, tuple) and call.arguments["slices"] is None:
            message = f"`{call.name}` needs the number of slices of `{over[1]}`"
            self.report.error("E0210", message, schedule.call.span, help=f"such as `slices = 2`, or `over = {over[0]}`")
            return None
        checked = spec.Schedule(name, call, schedule.span)
        if checked.sequence is not None and checked.sequence[0] == checked.batch:
            message = f"`{checked.batch}` cannot be cut into microbatches and these into slices of it"
            self.report.error("E0306", message, schedule.call.span, help="name both axes: `over = [batch, seq]`")
            return None
        return checked

    def weights(self, written: tree.Weights, chosen: spec.Model | None) -> Weights | None:
        """Checked `weights`, of the model that its first path begins with, or the chosen one; None after errors."""
        paths = [line.ours[0] for line in written.lines if isinstance(line, tree.Correspondence)]
        first = paths[0].parts[0].text if paths else ""
        model = self.models.get(first, chosen)
        if model is None:
            return None
        with self.report:
            return Checker(model.name, parameters_of(model), self.axes.number, self.report).weights(written)
        return None

    # ------------------------------------------------------------ train and expect

    def chosen_optimizer(
        self, optimizers: Mapping[str, spec.Optimizer | None]
    ) -> tuple[str | None, Sequence[tree.Entry]]:
        """The declared optimizer that `train` names, or the only one if it names none; and the other entries."""
        entry = self.entry("optimizer")
        if entry is None:
            return self.only("optimizer", optimizers), self.train_entries
        called = tree.bare(entry.value)
        if isinstance(called, tree.Call) and called.name.text in optimizers and called.name.text not in OPTIMIZERS:
            self.declared_already(called)
            return called.name.text, [each for each in self.train_entries if each is not entry]
        name = tree.single(entry.value)
        if name is None or not optimizers or name.text in OPTIMIZERS:
            return None, self.train_entries
        if name.text not in optimizers:
            help = suggestion(name.text, [*optimizers, *OPTIMIZERS], "there are")
            self.report.error("E0302", f"unknown optimizer `{name.text}`", name.span, help=help)
        return name.text, [each for each in self.train_entries if each is not entry]

    def train(
        self, optimizers: Mapping[str, spec.Optimizer | None], model: spec.Model | None, schedule: spec.Schedule | None
    ) -> spec.Train | None:
        """The train block with defaults filled in; None if there is none, or after reporting errors."""
        if not self.declarations.train:
            return None
        train = self.declarations.train[0]
        chosen, entries = self.chosen_optimizer(optimizers)
        table = self.settings.table(entries, TRAIN, (*CHOICES, "optimizer") if chosen else CHOICES)
        written = {entry.key.text: entry.span for entry in train.table.entries}
        present = {*written, "optimizer"} if optimizers else written
        missing = [name for name in TRAIN.names if name in TRAIN.required and name not in present]
        if missing and table is not None:
            message = f"`train` needs {listed(missing)}"
            self.report.error("E0305", message, train.span, help=f"`{example(missing[0])}`")
        if table is None or missing:
            return None
        values: dict[str, Any] = table
        if chosen:
            self._used.append(("optimizer", chosen))
        own = values.get("optimizer")
        optimizer = optimizers.get(chosen) if chosen else spec.Optimizer.of(own) if own else None
        if optimizer is None:
            return None  # which was reported
        values["optimizer"] = optimizer
        if values["eval"] is not None and values["eval"].arguments["sample"] is not None:
            written["sample"] = self.sample_span(written["eval"])
        with self.report:
            self.agree(values, written)
            self.agree_on_text(values["data"], values["eval"])
            self.agree_on_rollouts(values, model, schedule)
            if "sample" in written:
                self.check_writes(values["data"], model, schedule, written["sample"])
            return spec.Train(**values, spans=written, span=train.span)
        return None

    def agree(self, values: Mapping[str, Any], written: Mapping[str, Span]) -> None:
        """Refuse (E0318) an entry that another one needs, or does not go with."""
        if values["on_bad_step"].name == "rewind" and values["checkpoint"] is None:
            message = "`rewind` restores a checkpoint, but there is no `checkpoint` entry"
            help = "add `checkpoint = every(500)`, or use `on_bad_step = skip`"
            raise refuse("E0318", message, written["on_bad_step"], help=help)
        if values["eval"] is not None and values["eval"].arguments["weights"] == "ema" and values["ema"] is None:
            message = "`weights = ema` reads a mean of the weights, but there is no `ema` entry that keeps one"
            raise refuse("E0318", message, written["eval"], help="add `ema = 0.999`, or leave out `weights`")
        sync, graphs = values["sync"], bool(values["graphs"])
        late, skips = values["validate"].name == "after", values["on_bad_step"].name != "stop"
        averages = sync is not None and sync.name == "local" and values["ema"] is not None
        why = "memory of one step is not that of the next"
        for own, other, together, what in (
            ("sync", "validate", late and sync is not None, "updates that are not validated before they are made yet"),
            ("sync", "on_bad_step", skips and sync is not None, "steps that are left out yet"),
            ("sync", "ema", averages, "a mean of the weights yet"),
            ("graphs", "sync", graphs and sync is not None, f"`sync` yet: {why}"),
            ("graphs", "validate", graphs and late, f"`validate` yet: {why}"),
        ):
            if together:
                message = f"`{f'sync = {sync.name}' if own == 'sync' else own}` cannot be combined with {what}"
                raise refuse("E0318", message, written.get(other), help=f"leave out `{other}`, or `{own}`")

    def agree_on_text(self, data: spec.Call, evaluation: spec.Call | None) -> None:
        """Refuse (E0318) text that becomes ids in another way than other text of this model."""
        own = evaluation.arguments["data"] if evaluation is not None else None
        parts = [*sources_of(data), *([] if own is None else sources_of(own))]
        spelled = [(part, how) for part in parts if (how := how_spelled(part)) is not None]
        for part, how in spelled:
            if how != spelled[0][1]:
                message = f"text becomes ids {how} here, and {spelled[0][1]} in other data of this model"
                help = "give all of them the same `tokenizer` or `alphabet`"
                raise refuse("E0318", message, part.span, help=help)

    def agree_on_rollouts(
        self, values: Mapping[str, Any], model: spec.Model | None, schedule: spec.Schedule | None
    ) -> None:
        """Refuse answers that no model writes (E0302, E1001), and what does not go with them (E0318)."""
        data, sync = values["data"], values["sync"]
        if all(each.name != "rollouts" for each in sources_of(data)):
            return
        if data.name != "rollouts":
            message = "`rollouts` cannot be combined with other sources: a batch has answers to whole groups of prompts"
            raise refuse("E0318", message, data.span, help="the one source `rollouts`")
        if sync is not None:
            message = "`rollouts` cannot be combined with `sync`: answers are those of the parameters that are updated"
            raise refuse("E0318", message, sync.span, help="leave out `sync`")
        reuse = data.arguments["reuse"]
        if values["steps"] % reuse:
            message = f"{values['steps']:,} steps do not end with the last of {reuse} on the same answers"
            more = -(-values["steps"] // reuse) * reuse
            raise refuse("E0318", message, data.span, help=f"`steps = {more}`, or another `reuse`")
        if model is not None:
            language_model(model, schedule.batch if schedule is not None else spec.BATCH, span=data.span)

    def sample_span(self, otherwise: Span) -> Span:
        """The place of the prompt of `eval`."""
        entry = self.entry("eval")
        call = tree.bare(entry.value) if entry is not None else None
        if not isinstance(call, tree.Call):
            return otherwise
        named = zip(parameters_of_call(call, EVALUATION[call.name.text].names), call.arguments, strict=True)
        return next((each.value.span for name, each in named if name == SAMPLE.name), otherwise)

    def check_writes(
        self, data: spec.Call, model: spec.Model | None, schedule: spec.Schedule | None, prompt: Span
    ) -> None:
        """Refuse a `sample` unless the model writes text, and the data say how text becomes ids."""
        if model is not None:
            language_model(model, schedule.batch if schedule is not None else spec.BATCH, span=prompt)
        spelling_of(data, prompt, '`tokenizer = "tokenizer.json"` of the data, that of its ids')

    def claims(self, mesh_axes: Sequence[str] | None) -> tuple[spec.Claim, ...]:
        """The claims of all expect blocks; if `mesh_axes` is None (unknown), any mesh axis is accepted."""
        settings = evolve(self.settings, mesh_axes=mesh_axes)
        claims = []
        for expect in self.declarations.expect:
            for claim in expect.claims:
                measured = self.claim(claim, settings)
                if measured is not None:
                    claims.append(measured)
        return tuple(claims)

    def claim(self, claim: tree.Claim, settings: Settings) -> spec.Claim | None:
        """One claim; None after reporting errors."""
        written = claim.measure
        name = written.name if isinstance(written, tree.Call) else written.parts[0]
        measure = MEASURES.get(name.text)
        if measure is None or (isinstance(written, tree.Path) and len(written.parts) > 1):
            help = suggestion(name.text, MEASURES, "there are")
            self.report.error("E0309", f"unknown measure `{name.text}`", written.span, help=help)
            return None
        names = tuple(setting.name for setting in measure.takes)
        if isinstance(written, tree.Path) and names:
            message = f"`{name.text}` needs {'argument' if len(names) == 1 else 'arguments'} {listed(names)}"
            axis = next(iter(settings.mesh_axes or ()), None)
            help = f"write `{name.text}({axis})`" if axis and len(names) == 1 else f"`{name.text}({', '.join(names)})`"
            self.report.error("E0210", message, written.span, help=help)
            return None
        expressions = bind(written, names, names, self.report) if isinstance(written, tree.Call) else {}
        if expressions is None:
            return None
        values = [
            settings.value(expressions[setting.name], setting.kind, f"`{setting.name}`") for setting in measure.takes
        ]
        limit = settings.value(claim.limit, measure.limit, f"the limit of `{name.text}`")
        if limit is None or None in values:
            return None
        return spec.Claim(name.text, tuple(values), claim.comparison, float(limit), claim.span)


def example(name: str) -> str:
    """An example of an entry of the train block."""
    (kind,) = (setting.kind for setting in TRAIN.settings if setting.name == name)
    calls = kind.signatures.values() if isinstance(kind, OneOf) else ()
    return f"{name} = {next((each.example for each in calls if each.example), '1_000')}"
