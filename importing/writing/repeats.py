"""Layers that are alike, as repeats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import nan

from partita.importing.graph import NotUnderstood, Value
from partita.importing.said import Said, number_text
from partita.importing.writing.bindings import Bindings
from partita.importing.writing.blocks import TOKEN
from partita.importing.writing.body import Body
from partita.importing.writing.names import numbered, owners, valid
from partita.importing.writing.tree import Scope
from partita.importing.writing.writer import Writer

# A number of iterations, until these have a name: what it is called, its first and last value, and the steps.
COUNTED = re.compile(r"⟦(\w*) (\S+) (\S+) (\d+)⟧")
NEAR = 1e-5  # of the last such number: what rates are rounded by


class Repeats:
    """Writes layers; `body` writes what a call of a module computes into a body, and `call` that of a block."""

    def __init__(
        self, bindings: Bindings, body: Callable[[Scope, Body], None], call: Callable[[Scope, Body], None]
    ) -> None:
        self.bindings, self.tree, self.file, self.body, self.call = bindings, bindings.tree, bindings.file, body, call

    def run(self, items: Sequence[Value | Scope]) -> list[Scope]:
        """Calls of modules of a list that follow each other, of one class."""
        first = items[0]
        assert isinstance(first, Scope)
        run = [first]
        if first.number is None or (first.is_torch and not _is_layer(first)):
            return run
        if any(
            each.path in self.bindings.inlined for each in first.around()
        ):  # whose layers are read in several places
            return run
        for each in items[1:]:
            if isinstance(each, Value):
                if each in self.bindings.kept:
                    break
                continue
            last = run[-1].number
            if each.call.kind != first.call.kind or each.list_path != first.list_path or last is None:
                break
            if each.number != last + 1:
                break
            run.append(each)
        return run

    def write(self, run: list[Scope], body: Body) -> None:
        """Layers as repeats where they are alike, and one after the other where they are not."""
        handed = self._handed_on(run)
        if handed is None:  # such as where the first makes what all others read
            start = next((i for i in range(1, len(run) - 1) if self._handed_on(run[i:]) is not None), len(run))
            self._one_by_one(run[:start], body)
            if start < len(run):
                self.write(run[start:], body)
            return
        texts, numbers = self._bodies(run, handed, body)
        count = len(run)
        period = next(p for p in range(1, count + 1) if all(texts[i] == texts[i % p] for i in range(count)))
        if 2 * period > count > 2 and _counted(texts, numbers) is not None:
            self._repeat(run, handed, 1, body)
            return
        if 2 * period <= count and (rest := count % period):
            self._repeat(run[:-rest], handed[:-rest], period, body)
            self.write(run[-rest:], body) if rest > 1 else self._one_by_one(run[-rest:], body)
            return
        if 2 * period > count:
            longest = _longest_alike(texts)
            if longest is None:
                self._one_by_one(run, body)
                return
            for start, end in longest:
                part = run[start:end]
                self.write(part, body) if end - start > 1 else self._one_by_one(part, body)
            return
        self._repeat(run, handed, period, body)

    def _one_by_one(self, run: list[Scope], body: Body) -> None:
        for scope in run:
            several = len(self.tree.kinds[scope.call.kind]) > 1 and len(scope.values) > 2
            if several and not scope.is_torch and scope.path not in self.bindings.inlined:
                self.call(scope, body)
            else:
                self.body(scope, body)

    def _handed_on(self, run: list[Scope]) -> list[tuple[list[Value], list[Value]]] | None:
        """Of each layer what it reads of the layer before, and what it makes of it; None if these do not match."""
        # Of a module that is called several times, other calls have the same layers.
        others = [
            [each for each in self.tree.same(s) if self.bindings.owner(each) is not self.bindings.owner(s)] for s in run
        ]
        inputs = [self.tree.inputs_of(scope, own) for scope, own in zip(run, others, strict=True)]
        outputs = [self.tree.outputs_of(scope) for scope in run]
        inside = {value for scope in run for value in scope.values}
        between = {value for each in outputs[:-1] for value in each}
        if any(self.tree.is_output(v) or any(r not in inside for r in self.tree.readers(v)) for v in between):
            return None  # what a layer makes is read behind all of them
        made = set(outputs[0])
        places = [i for i, value in enumerate(inputs[1]) if value in made]
        if (
            not places
            or any(len(each) != len(inputs[0]) for each in inputs)
            or any(len(each) != len(places) for each in outputs)
        ):
            return None
        targets = [outputs[0].index(inputs[1][i]) for i in places]
        for j in range(1, len(run)):
            for i, value in enumerate(inputs[j]):
                if i in places:
                    if value is not outputs[j - 1][targets[places.index(i)]]:
                        return None
                elif value is not inputs[0][i]:
                    return None
        if any(
            self._axes_of(inputs[0][i]) != self._axes_of(out[t])
            for i, t in zip(places, targets, strict=True)
            for out in outputs
        ):
            return None
        return [([inputs[j][i] for i in places], [outputs[j][t] for t in targets]) for j in range(len(run))]

    def _axes_of(self, value: Value) -> set[str]:
        return {name for dim in self.file.axes.of(value) for name in dim}

    def _bodies(
        self, run: list[Scope], handed: list[tuple[list[Value], list[Value]]], body: Body
    ) -> tuple[list[str], dict[str, float]]:
        """The text that each layer would be, as the body of a repeat, and its constants; without any effect."""
        blocks, constants = dict(self.file.blocks.texts), dict(self.file.constants)
        around = [(each, dict(each.shared), dict(each.calls), dict(each.parameters)) for each in body.around()]
        names = self._carried(run, handed, body)
        texts = [self._iteration(run, handed, j, 1, names, body).text for j in range(len(run))]
        numbers = dict(self.file.constants)
        self.file.blocks.texts.clear()
        self.file.blocks.texts.update(blocks)
        self.file.constants.clear()
        self.file.constants.update(constants)
        for each, shared, calls, parameters in around:
            each.shared, each.calls, each.parameters = shared, calls, parameters
        return texts, numbers

    def _carried(self, run: list[Scope], handed: list[tuple[list[Value], list[Value]]], body: Body) -> list[str]:
        """What the values are called that layers hand on: by names that nothing else has which is still read."""
        chosen: list[str] = []
        for first, value in zip(*handed[0], strict=True):
            wanted = valid(self.bindings.called.get(value, "x"))
            own = [name for name, each in body.bound.items() if each is first]
            for name in (wanted, *own, "x", "y", "h", *(f"{wanted}_{k}" for k in range(2, 100))):
                old = body.bound.get(name)
                free = (
                    name not in body.bound
                    or old is first
                    or (old and not self.bindings.is_read_after(old, run[0].values[0], body))
                )
                if free and name not in chosen and name not in body.taken:
                    chosen.append(name)
                    break
        return chosen

    def _iteration(
        self,
        run: list[Scope],
        handed: list[tuple[list[Value], list[Value]]],
        start: int,
        period: int,
        names: list[str],
        body: Body,
    ) -> Body:
        inner = Body("repeat", run[start : start + period], body, "layer")
        outer = Writer(self.file, body)
        inner.taken = {name for each in body.around() for name in each.bound} - set(names)
        for j in range(start, start + period):
            for name, value, first in zip(names, handed[j][0], handed[0][0], strict=True):
                inner.said[value] = self._handed(name, value, outer(first))
                inner.bound[name] = value
            if run[j].is_torch or (period == 1 and not self._is_elsewhere(run)):
                self.body(run[j], inner)
            else:
                self.call(run[j], inner)
            writer = Writer(self.file, inner)
            results = [writer(value) for value in handed[j][1]]
            for name, value, said in zip(names, handed[j][1], results, strict=True):
                if said.text == name:
                    continue
                if len(names) == 1 and inner.lines and inner.lines[-1].startswith(f"let {said.text} = "):
                    inner.lines[-1] = f"let {name} = " + inner.lines[-1].removeprefix(f"let {said.text} = ")
                    inner.bound.pop(said.text, None)
                else:
                    inner.lines.append(f"let {name} = {said.text}")
                inner.said.pop(value, None)
        return inner

    def _is_elsewhere(self, run: Sequence[Scope]) -> bool:
        """Whether modules outside of a run of layers are such layers, too, but for their axes."""
        kinds, own = self.tree.kinds[run[0].call.kind], {each.path for each in run}
        operations = _operations(run[0])
        return any(each.path not in own and _operations(each) == operations for each in kinds)

    def _handed(self, name: str, value: Value, first: Said) -> Said:
        """A value that layers hand on: it has the axes of the first one, in dimensions of its own."""
        dims = tuple(self.file.axes.of(value))
        same = {each for dim in dims for each in dim} >= {*first.axes}
        return Said(name, dims if same else first.dims, first.axes, dtype=first.dtype)

    def _repeat(self, run: list[Scope], handed: list[tuple[list[Value], list[Value]]], period: int, body: Body) -> None:
        names = self._carried(run, handed, body)
        writer = Writer(self.file, body)
        for name, first in zip(names, handed[0][0], strict=True):
            said = writer(first)
            if said.text == name:
                continue
            last = f"let {said.text} = "
            if body.lines and body.lines[-1].startswith(last) and not self._is_read_later(first, run):
                body.lines[-1] = f"let {name} = " + body.lines[-1].removeprefix(last)
                if any(line.startswith(f"let {said.text} = ") for line in body.lines):
                    body.bound[said.text] = None  # which would be carried, if the repeat had it
                else:
                    body.bound.pop(said.text, None)
            else:
                body.lines.append(f"let {name} = {said.text}")
            self.bindings.name(name, first, said, body)
        taken = (body.calls, self.file.axes.sizes, self.file.constants)
        before = [each[0][0] for each in body.calls.values() if isinstance(each[0], list)]
        owned = [name for each in before[:1] for name in owners(f"{run[0].path}.", f"{each.scopes[0].path}.")]
        one = {1: "layer", 2: "pair"}.get(period, "period")
        likely = chain([one], (f"{name}_{one}" for name in owned), numbered(one))
        label = next(n for n in likely if body.is_free(n) and not any(n in names for names in taken))
        known = dict(self.file.constants)
        bodies = [self._iteration(run, handed, j, period, names, body) for j in range(0, len(run), period)]
        numbers = dict(self.file.constants)
        text = _counted([each.text for each in bodies], numbers)
        if text is None:
            raise NotUnderstood(f"layers of {run[0].list_path} differ")
        for each in bodies:
            each.name = label
        body.calls[label] = [list(bodies)]
        number = self.file.constant(re.sub(rf"{one}(?!s)", f"{one}s", label), len(run) // period)
        read = [COUNTED.sub("", text), *self.file.blocks.texts.values()]
        for name in {*numbers} - {*known}:
            if not any(re.search(rf"\b{name}\b", each) for each in read):
                del self.file.constants[name]  # which one iteration has for a number that grows
        text = COUNTED.sub(lambda found: self._growing(found, label, number), text)
        body.lines += [f"repeat {number} as {label} {{", *text.split("\n"), "}"]
        for carried, value, result in zip(names, handed[0][0], handed[-1][1], strict=True):
            self.bindings.name(carried, result, self._handed(carried, result, writer(value)), body)

    def _growing(self, found: re.Match[str], label: str, count: str) -> str:
        """A number of an iteration, which grows by as much from each to the next."""
        name, first, last, steps = found[1], *map(float, (found[2], found[3], found[4]))
        step = (last - first) / steps

        def said(number: float) -> str:
            return self.file.constant(name, number) if name else number_text(number)

        if not first:
            return f"{said(last)} * {label} / ({count} - 1)"
        if abs(first - step) <= NEAR * abs(last):
            return f"{said(last)} * ({label} + 1) / {count}"
        return f"{said(first)} + {said(float(f'{step:.6g}'))} * {label}"

    def _is_read_later(self, value: Value, run: list[Scope]) -> bool:
        inside = {made for scope in run for made in scope.values}
        readers = self.tree.readers(value)
        return any(
            reader not in inside and self.tree.place[reader] > self.tree.place[run[0].values[0]] for reader in readers
        )


def _counted(texts: Sequence[str], numbers: Mapping[str, float]) -> str | None:
    """The text of all iterations: of arguments that are numbers, and grow by as much from each to the next, the first
    and the last; None if more differs.
    """
    made: list[str] = []
    rows = [TOKEN.findall(text) for text in texts]
    if len({*map(len, rows)}) > 1:
        return None
    for i, column in enumerate(zip(*rows, strict=True)):
        if len({*column}) == 1:
            made.append(column[0])
            continue
        values = [numbers.get(each, float(each.replace("_", "")) if each[0].isdigit() else nan) for each in column]
        first, last, steps = values[0], values[-1], len(values) - 1
        line = [first + (last - first) * k / steps for k in range(len(values))]
        if not all(abs(one - other) <= NEAR * abs(last) for one, other in zip(values, line, strict=True)):
            return None
        if rows[0][i + 1 : i + 2] not in ([")"], [","]) or rows[0][i - 2 : i] not in ([",", " "], ["=", " "]):
            return None
        name = re.sub(r"_\d+$", "", column[-1]) if column[-1] in numbers else ""
        made.append(f"⟦{name} {first!r} {last!r} {steps}⟧")
    return "".join(made)


def _longest_alike(texts: Sequence[str]) -> list[tuple[int, int]] | None:
    """Stretches of layers with the same text; None if no two that follow each other have."""
    stretches: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(texts) + 1):
        if i == len(texts) or texts[i] != texts[start]:
            stretches.append((start, i))
            start = i
    return stretches if any(end - begin > 1 for begin, end in stretches) else None


def _operations(scope: Scope) -> list[tuple[object, ...]]:
    """What a call does, whatever its axes are."""
    told = ("function", "causal")
    return [(each.op, each.rank, *(each.args.get(name) for name in told)) for each in scope.values]


def _is_layer(scope: Scope) -> bool:
    """Whether a module of torch is a layer of several parts, such as that of a transformer."""
    return len(scope.values) > 4
