"""Command-line overrides: `key=value` → changes of the declarations, before anything is checked.

An override replaces an expression of the syntax tree by one with its own span, so that it is checked as if it were in
the file, and errors in it point to the command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from attrs import evolve, frozen

from partita.dsl.advice.foreign import FOLLOWS, PARALLEL, meant
from partita.dsl.advice.report import Report, listed, nearest, suggestion
from partita.dsl.check.arguments import parameters_of_call
from partita.dsl.config.builtins import CHOICES, DEFAULT_SCHEDULE, MESH, OPTIMIZERS, SCHEDULES, TRAIN, Kind, OneOf
from partita.dsl.config.settings import called
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.names.declarations import Declarations
from partita.dsl.syntax import tree
from partita.dsl.syntax.parser import parse_expression
from partita.dsl.syntax.source import Source, Span

PLACE = "command line"
OVERRIDDEN = (
    "axes, constants, `MESH.AXIS`, `train.KEY`, `SCHEDULE.ARGUMENT` and `OPTIMIZER.TARGET.ARGUMENT` can be overridden"
)
MOST_SHOWN = 3  # of the suggested names
_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@frozen
class CommandLineChoices:
    """What the command line chose instead of `train`."""

    model: tree.Expression | None = None
    layout: tree.Expression | None = None
    schedule: tree.Schedule | None = None
    optimizer: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of declarations that it chose."""
        chosen = tuple(kind for kind in CHOICES if getattr(self, kind, None) is not None)
        return (*chosen, "optimizer") if self.optimizer else chosen


def apply_overrides(declarations: Declarations, overrides: Sequence[str], report: Report) -> CommandLineChoices:
    """Apply overrides, changing the tables of `declarations`; errors are reported.

    They apply in order, except that choices (`schedule=…`) come last: a built-in that replaces a declared schedule
    inherits the arguments that the command line gives to that one, in either order.
    """
    read: list[tuple[tuple[tree.Name, ...], tree.Expression]] = []
    for text in overrides:
        with report:
            key, value = _read(Source(PLACE, text), report)
            if value is not None:
                read.append((key, value))
    chosen = CommandLineChoices()
    for key, value in sorted(read, key=lambda pair: _chooses(pair[0])):
        with report:
            chosen = _Override(declarations, chosen, key, value).applied()
    return chosen


def _chooses(key: tuple[tree.Name, ...]) -> bool:
    """Whether a key chooses the model, the layout or the schedule."""
    names = [name.text for name in key]
    return names[0] in CHOICES or (names[0] == "train" and len(names) > 1 and names[1] in CHOICES)


def _read(source: Source, report: Report) -> tuple[tuple[tree.Name, ...], tree.Expression | None]:
    key, sign, _ = source.text.partition("=")
    if not sign or not _KEY.fullmatch(key.strip()):
        help = "in one word, such as `batch=128`, `cluster.pipe=4` or `train.steps=10`"
        if os.path.isdir(source.text):
            help = f"a directory is named by an option: `--run-dir {source.text}`"
        raise refuse("E0315", "an override is written key=value", Span(source, 0, len(source.text)), help=help)
    names, start = [], key.index(key.strip())
    for part in key.strip().split("."):
        names.append(tree.Name(part, span=Span(source, start, start + len(part))))
        start += len(part) + 1
    return tuple(names), parse_expression(source, report, len(key) + 1)


@frozen
class _Override:
    declarations: Declarations
    chosen: CommandLineChoices
    key: tuple[tree.Name, ...]
    value: tree.Expression

    def applied(self) -> CommandLineChoices:
        """Apply the override; returns what is chosen afterwards."""
        declarations, (first, *rest) = self.declarations, self.key
        if first.text == "train" and rest and rest[0].text in CHOICES:
            first, *rest = rest
        if first.text == "schedule":
            return evolve(self.chosen, schedule=self._schedule(rest))
        if first.text == "model" and not rest:
            return evolve(self.chosen, model=self.value)
        if first.text == "layout" and not rest:
            return evolve(self.chosen, layout=self.value)
        if first.text == "adapters" and not rest:
            self._train((first,))
        elif first.text == "train" and rest:
            self._train(tuple(rest))
            if [name.text for name in rest] == ["optimizer"]:
                return evolve(self.chosen, optimizer=True)
        elif first.text in (*declarations.axes, *declarations.constants) and not rest:
            table = declarations.axes if first.text in declarations.axes else declarations.constants
            table[first.text] = evolve(table[first.text], value=self.value)
        elif first.text in declarations.meshes and len(rest) == 1:
            declarations.meshes[first.text] = self._mesh(declarations.meshes[first.text], rest[0])
        elif first.text in declarations.optimizers and rest:
            declarations.optimizers[first.text] = self._optimizer(declarations.optimizers[first.text], rest)
        elif first.text in declarations.schedules and len(rest) == 1:
            declarations.schedules[first.text] = with_argument(declarations.schedules[first.text], rest[0], self.value)
        else:
            help = self._found() or OVERRIDDEN
            raise refuse("E0315", f"there is no `{self.written}` to override", first.span, help=help)
        return self.chosen

    @property
    def written(self) -> str:
        """The key as it is written."""
        return ".".join(name.text for name in self.key)

    def _found(self) -> str | None:
        """Help for an unknown key."""
        last = self.key[-1].text
        keys, parts = likely_keys(self.declarations, self.written)
        if keys and parts:
            return f"such as {listed(keys, 'or')}"
        if keys:
            return f"did you mean {listed(keys, 'or')}?"
        if last in PARALLEL:
            return f"that is a mesh axis: `mesh … ({PARALLEL[last]} = 2)`"
        return FOLLOWS.get(last)

    def _mesh(self, mesh: tree.Mesh, axis: tree.Name) -> tree.Mesh:
        names = _axes(mesh)
        if axis.text in MESH and axis.text not in names:
            others = [each for each in mesh.table.entries if each.key.text != axis.text] if mesh.table else []
            entry = tree.Entry(axis, self.value, span=self.value.span)
            return evolve(mesh, table=tree.Table((*others, entry), span=mesh.span))
        if axis.text not in names:
            message = f"mesh `{mesh.name.text}` has no axis `{axis.text}`"
            known = [*names, *MESH] if nearest(axis.text, MESH) else names
            raise refuse("E0313", message, axis.span, help=suggestion(axis.text, known, "its axes:"))
        entries = tuple(evolve(e, value=self.value) if e.key.text == axis.text else e for e in mesh.axes)
        return evolve(mesh, axes=entries)

    def _train(self, path: tuple[tree.Name, ...]) -> None:
        if not self.declarations.train:
            raise refuse("E0315", "there is no train block to override", self.key[0].span)
        train, (key, *rest) = self.declarations.train[0], path
        kinds = {setting.name: setting.kind for setting in TRAIN.settings}
        if key.text not in (*kinds, "adapters"):
            help = self._found() or suggestion(key.text, [*kinds, *CHOICES], "there are")
            raise refuse("E0303", f"`train` has no entry `{key.text}`", key.span, help=help)
        entries = list(train.table.entries)
        position = next((i for i, entry in enumerate(entries) if entry.key.text == key.text), None)
        before = entries[position].value if position is not None else None
        name = tree.single(before) if before is not None else None
        optimizers = self.declarations.optimizers
        if rest and key.text == "optimizer" and name is not None and name.text in optimizers:
            optimizers[name.text] = self._only_rule(optimizers[name.text], rest)
            return
        value = _replaced(before, kinds[key.text], key, rest, self.value) if key.text in kinds else self.value
        entry = tree.Entry(key, value, span=self.value.span)
        if position is None:
            entries.append(entry)
        else:
            entries[position] = entry
        self.declarations.train[0] = evolve(train, table=evolve(train.table, entries=tuple(entries)))

    def _only_rule(self, optimizer: tree.Optimizer, rest: Sequence[tree.Name]) -> tree.Optimizer:
        """`train.optimizer.ARGUMENT`, of a declared optimizer: an argument of the only rule that takes it. What several
        take has a value in each, which need not be the same.
        """
        rules = {
            rule: OPTIMIZERS[rule.call.name.text].names
            for rule in optimizer.rules
            if isinstance(rule, tree.UpdateRule) and rule.call.name.text in OPTIMIZERS
        }
        name, argument = optimizer.name.text, rest[0].text
        taking = [rule for rule, names in rules.items() if argument in names]
        if not taking:
            help = suggestion(argument, {each for names in rules.values() for each in names}, "there are")
            raise refuse("E0209", f"no rule of optimizer `{name}` takes argument `{argument}`", rest[0].span, help=help)
        if len(taking) > 1:
            keys = listed([f"{name}.{rule.targets[0]}.{argument}" for rule in taking], "or")
            message = f"{len(taking)} rules of optimizer `{name}` take argument `{argument}`"
            raise refuse("E0315", message, rest[0].span, help=f"name one by its target: {keys}")
        call = _replaced(taking[0].call, OneOf(OPTIMIZERS), rest[0], rest, self.value)
        assert isinstance(call, tree.Call)
        return _with_call(optimizer, taking[0], call)

    def _optimizer(self, optimizer: tree.Optimizer, rest: Sequence[tree.Name]) -> tree.Optimizer:
        """`OPTIMIZER.TARGET` replaces the call of the rule that has this target, `OPTIMIZER.TARGET.ARGUMENT` an
        argument of it.
        """
        texts = [each.text for each in rest]
        targets = {str(path): rule for rule in optimizer.rules for path in rule.targets}
        for end in range(len(rest), 0, -1):
            rule = targets.get(".".join(texts[:end]))
            if isinstance(rule, tree.UpdateRule):
                call = _replaced(rule.call, OneOf(OPTIMIZERS), rest[end - 1], rest[end:], self.value)
                if not isinstance(call, tree.Call):
                    raise refuse(
                        "E0306", "a rule updates by a call", self.value.span, help="such as `adamw(lr = 1e-3)`"
                    )
                return _with_call(optimizer, rule, call)
            if rule is not None:
                frozen = ", ".join(map(str, rule.targets))
                raise refuse("E0315", f"`freeze {frozen}` has no arguments to override", rest[end - 1].span)
        message = f"no rule of optimizer `{optimizer.name.text}` has the target `{'.'.join(texts)}`"
        inside = [f"{optimizer.name.text}.{path}.{texts[-1]}" for path in targets]
        matching = [each for each in full_names(self.declarations) if each in inside]
        help = f"did you mean {listed(matching, 'or')}?" if len(rest) == 1 and matching else None
        help = help or suggestion(texts[0], list(targets), "its targets:")
        raise refuse("E0315", message, rest[0].span, help=help)

    def _schedule(self, rest: Sequence[tree.Name]) -> tree.Schedule:
        """`schedule=…`: a declared one, or a built-in that inherits the arguments it takes; or `schedule.KEY=…`."""
        declared = self.declarations.schedules
        current = self.chosen.schedule or selected_schedule(self.declarations)
        if rest:
            if current is None or len(rest) > 1:
                help = f"`schedule={DEFAULT_SCHEDULE}({rest[0].text}=…)` chooses one" if current is None else None
                message = "there is no schedule" if current is None else f"`{rest[0].text}` has no arguments"
                raise refuse("E0315", f"{message} to override", rest[-1].span, help=help)
            return with_argument(current, rest[0], self.value)
        value, name = tree.bare(self.value), tree.single(self.value)
        if name is not None and name.text in declared:
            return declared[name.text]
        call = value if isinstance(value, tree.Call) else tree.Call(name, (), span=name.span) if name else None
        if call is not None and call.name.text in declared and call.name.text not in SCHEDULES:
            raise self._declared(call, current)
        if call is None or call.name.text not in SCHEDULES:
            shown = call.name.text if call else "this"
            help = called(shown, SCHEDULES, declared)
            raise refuse("E0302", f"unknown schedule `{shown}`", self.value.span, help=help)
        present, inherited = _named(call), _named(current.call) if current is not None else {}
        takes = SCHEDULES[call.name.text].names
        more = tuple(each for key, each in inherited.items() if key in takes and key not in present)
        return tree.Schedule(call.name, evolve(call, arguments=(*call.arguments, *more)), span=self.value.span)

    def _declared(self, call: tree.Call, current: tree.Schedule | None) -> Refused:
        """The error (E0302) that a declared schedule is called, as only built-ins are; `current` is the chosen one."""
        name = call.name.text
        arguments = _named(call, self.declarations.schedules[name].call.name.text)
        words = [f"{name}.{key}={each.value.span.text}" for key, each in arguments.items()]
        if current is None or current.name.text != name or not words:
            words.insert(0, f"schedule={name}")
        return refuse("E0302", f"`{name}` is declared already", self.value.span, help=f"instead: `{' '.join(words)}`")


def likely_keys(declarations: Declarations, written: str) -> tuple[list[str], bool]:
    """Keys of a file that one that it has not may stand for, the likeliest first: full names that it is a part of, that
    contain or resemble it (`lr` ends `train.optimizer.lr`), or that others call so. And whether they are inside of what
    it names, or what there is instead.
    """
    whole = list(dict.fromkeys(full_names(declarations)))
    before, _, last = written.rpartition(".")
    axes = [f"{name}.{axis}" for name, mesh in declarations.meshes.items() for axis in _axes(mesh)]
    named = [each for each in axes if each.endswith(f".{PARALLEL.get(last, last)}")]
    if "mesh" in (before, last):
        return (named or axes)[:MOST_SHOWN], not named
    if within := [each for each in whole if each.startswith(f"{written}.")]:
        return within[:MOST_SHOWN], True
    if last in PARALLEL:
        return named[:MOST_SHOWN], False
    ends = {each.rpartition(".")[2] for each in whole}
    near = nearest(written, whole)
    for end in (last, meant(last, ends), None if last in FOLLOWS or near is not None else nearest(last, ends)):
        matching = [each for each in whole if each.rpartition(".")[2] == end]
        if matching:
            return ([near] if near in matching and "." in written else matching[:MOST_SHOWN]), False
    if last in FOLLOWS:
        return [], False
    if near is not None:
        return [near], False
    first = nearest(written.partition(".")[0], {each.partition(".")[0] for each in whole})
    if first is None or first == written.partition(".")[0]:
        return [], False
    return ([first] if first in whole else [each for each in whole if each.startswith(f"{first}.")][:MOST_SHOWN]), False


def _with_call(optimizer: tree.Optimizer, rule: tree.UpdateRule, call: tree.Call) -> tree.Optimizer:
    """An optimizer in which a rule has another call."""
    changed = evolve(rule, call=call)
    return evolve(optimizer, rules=tuple(changed if each is rule else each for each in optimizer.rules))


def _axes(mesh: tree.Mesh) -> list[str]:
    return [entry.key.text for entry in mesh.axes]


def full_names(declarations: Declarations) -> Iterator[str]:
    """The full names of all that can be overridden."""
    yield from (*declarations.axes, *declarations.constants)
    yield from CHOICES
    for name, mesh in declarations.meshes.items():
        yield from (f"{name}.{each}" for each in (*_axes(mesh), *MESH))
    for name, schedule in declarations.schedules.items():
        yield from _arguments(name, schedule.call, OneOf(SCHEDULES))
    for name, optimizer in declarations.optimizers.items():
        for rule in optimizer.rules:
            if isinstance(rule, tree.UpdateRule):
                for path in rule.targets:
                    yield f"{name}.{path}"
                    yield from _arguments(f"{name}.{path}", rule.call, OneOf(OPTIMIZERS))
    if declarations.train:
        written = {entry.key.text: entry.value for entry in declarations.train[0].table.entries}
        for setting in TRAIN.settings:
            yield f"train.{setting.name}"
            if setting.name in written:
                yield from _arguments(f"train.{setting.name}", written[setting.name], setting.kind)
        if "schedule" in written:
            yield from _arguments("schedule", written["schedule"], OneOf(SCHEDULES))


def _arguments(prefix: str, written: tree.Expression, kind: Kind) -> Iterator[str]:
    """The full names of a call's arguments, and recursively of theirs."""
    call = tree.bare(written)
    signature = kind.signatures.get(call.name.text) if isinstance(kind, OneOf) and isinstance(call, tree.Call) else None
    if signature is None or not isinstance(call, tree.Call):
        return
    arguments = {argument.name.text: argument.value for argument in call.arguments if argument.name}
    for setting in signature.settings:
        yield f"{prefix}.{setting.name}"
        if setting.name in arguments:
            yield from _arguments(f"{prefix}.{setting.name}", arguments[setting.name], setting.kind)


def selected_schedule(declarations: Declarations) -> tree.Schedule | None:
    """The schedule that `train` names, or the only one declared."""
    for train in declarations.train:
        for entry in train.table.entries:
            if entry.key.text == "schedule":
                value = tree.bare(entry.value)
                if isinstance(value, tree.Call):
                    return tree.Schedule(value.name, value, span=value.span)
                name = tree.single(value)
                return declarations.schedules.get(name.text) if name else None
    return next(iter(declarations.schedules.values())) if len(declarations.schedules) == 1 else None


def _named(call: tree.Call, schedule: str | None = None) -> dict[str, tree.Argument]:
    """The arguments of the call of a schedule by parameter; of another `schedule` than it calls, if one is given."""
    signature = SCHEDULES.get(schedule or call.name.text)
    keys = parameters_of_call(call, signature.names if signature else ())
    return {
        key: argument if argument.name is not None else evolve(argument, name=tree.Name(key, span=argument.span))
        for key, argument in zip(keys, call.arguments, strict=True)
        if key is not None
    }


def with_argument(schedule: tree.Schedule, key: tree.Name, value: tree.Expression) -> tree.Schedule:
    """A schedule with one argument replaced or added."""
    kind = OneOf(SCHEDULES)
    call = _replaced(schedule.call, kind, schedule.name, [key], value)
    assert isinstance(call, tree.Call)
    return evolve(schedule, call=call)


def _replaced(
    before: tree.Expression | None, kind: Kind, what: tree.Name, path: Sequence[tree.Name], value: tree.Expression
) -> tree.Expression:
    """An expression with the argument at a path replaced or added."""
    if not path:
        return value
    call = tree.bare(before) if before is not None else None
    signature = kind.signatures.get(call.name.text) if isinstance(kind, OneOf) and isinstance(call, tree.Call) else None
    if not isinstance(call, tree.Call) or signature is None:
        raise refuse("E0315", f"`{what.text}` has no arguments to override", path[0].span)
    key, *rest = path
    inner = next((setting.kind for setting in signature.settings if setting.name == key.text), None)
    if inner is None:
        help = suggestion(key.text, signature.names, "it takes")
        raise refuse("E0209", f"`{signature.name}` takes no argument `{key.text}`", key.span, help=help)
    arguments = list(call.arguments)
    for position, (name, argument) in enumerate(zip(parameters_of_call(call, signature.names), arguments, strict=True)):
        if name == key.text:
            new = _replaced(argument.value, inner, key, rest, value)
            arguments[position] = evolve(argument, value=new)
            return evolve(call, arguments=tuple(arguments))
    new = _replaced(None, inner, key, rest, value)
    return evolve(call, arguments=(*arguments, tree.Argument(key, new, span=value.span)))
