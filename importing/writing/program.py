"""A module's graph → the text of a file: blocks, repeats, the model, and which weights of the module are whose."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from attrs import evolve

from partita.dsl.syntax.format import format_text
from partita.importing.axes import Axes
from partita.importing.graph import Captured, Value, with_gradients
from partita.importing.said import CALL, Said, call, number_text
from partita.importing.writing.bindings import Bindings
from partita.importing.writing.blocks import placed
from partita.importing.writing.body import Body
from partita.importing.writing.file import Names
from partita.importing.writing.known import Known
from partita.importing.writing.names import block_name, numbered, valid
from partita.importing.writing.repeats import Repeats
from partita.importing.writing.scans import Scans
from partita.importing.writing.tree import Scope, base, made_of
from partita.importing.writing.weights import freezing_rules, parameters_of, weight_lines
from partita.importing.writing.writer import Writer

INPUTS = ("x", "y", "z", "u", "w")  # names of arguments that have none
CALLED = re.compile("[⟦(]")  # behind the name of a block


class CallsDiffer(Exception):
    """Calls of the module of a `path`, which share its parameters, are not calls of one block."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Program:
    """Writes the calls of modules as blocks and repeats; of modules that are `inlined`, what they compute in place."""

    def __init__(
        self, graph: Captured, axes: Axes, name: str, state: dict[str, torch.Tensor], known: Known | None = None
    ) -> None:
        self.graph, self.solver, self.known = graph, axes.solver, known or Known()
        self.bindings = Bindings(graph, axes, name, state, self.known)
        self.tree, self.file = self.bindings.tree, self.bindings.file
        self.scans = Scans(self.bindings, self.write)
        self.repeats = Repeats(self.bindings, self.write, self._call)
        outer = {
            value.place.calls[depth].kind
            for value in self.tree.values
            for depth in (0, 1)
            if depth < len(value.place.calls)
        }
        self.roots = sorted({kind.rsplit(".", 1)[-1] for kind in outer if not kind.startswith("torch.nn.")})
        self.model = Body("model", [self.tree.root], name=valid(name))
        self.shown: list[Sequence[Names]] = []  # of each output, the axes of its dimensions
        self.samples = [value for value in self.solver.values if value.op == "input" and "draw" in value.args]

    def learned(self) -> bool:
        """Whether the text, which is written, is to be written again with what is known now."""
        cut = self.file.expressions.cuts(self.bindings.can_be_named) - self.known.cut
        self.known.cut |= cut
        return bool(cut) or self.file.blocks.learned()

    def write(self, scope: Scope, body: Body) -> None:
        """Write what a call of a module computes into a body."""
        items = self._in_usual_order(scope)
        at = 0
        while at < len(items):
            item = items[at]
            at += 1
            if isinstance(item, Value):
                if item.op == "update":
                    body.lines.append(Writer(self.file, body).update(item))
                elif item.op == "top":
                    self.bindings.bind_top(item, body)
                elif item.op == "recurrent" and (cells := self.tree.cells_of(item)) is not None:
                    self.bindings.bind_cells(item, cells, body)
                elif item in self.bindings.kept and item.op != "cells":
                    self.bindings.bind(item, body)
                continue
            if item.is_loop:
                self.scans.write(item, body)
                continue
            run = self.repeats.run(items[at - 1 :])
            if len(run) > 1:
                self.repeats.write(run, body)
                at = items.index(run[-1]) + 1
            elif self.bindings.is_block(item):
                self._call(item, body)
            else:
                self.write(item, body)

    def _in_usual_order(self, scope: Scope) -> list[Value | Scope]:
        """The values and calls in a call: of what an attention reads, queries first, then keys, then values."""
        items = list(scope.items)
        for attend in (each for each in scope.items if isinstance(each, Value) and each.op == "attend"):
            read = [base(attend.args[name]) for name in "qkv"]
            last = -1
            for value in read:
                at = next((i for i, item in enumerate(items) if value in _values(item)), None)
                if at is None:
                    break
                own, between = _values(items[at]), [each for item in items[at + 1 : last + 1] for each in _values(item)]
                if any(each in self.bindings.kept and each not in read for each in between):
                    break
                if any(each in own for other in between for each in made_of(other)):
                    break
                if at < last:
                    items.insert(last, items.pop(at))
                last = max(at, last)
        return items

    # ------------------------------------------------------------ blocks

    def _call(self, scope: Scope, body: Body) -> None:
        calls = self._sharing(scope)
        inputs, outputs = self.tree.inputs_of(scope, self.tree.same(scope)), self.tree.outputs_of(scope)
        inner = Body("block", [scope], body)
        outer = Writer(self.file, body)
        heads, given, floats = list[str](), list[str](), 0
        common = self._arguments(scope, inputs)
        with self.file.expressions.of(outputs[0], scope) as written:
            arguments = [outer(value) for value in inputs]
        for i, (value, said) in enumerate(zip(inputs, arguments, strict=True)):
            first = said.dtype != "i64" and not floats
            floats += first
            own = "x" if first else common[i] or INPUTS[i % len(INPUTS)]
            likely = [valid(own), *INPUTS, f"x_{i}"]
            name = next(each for each in likely if each not in inner.bound)
            given.append(said.text)
            axes = said.memory_order
            heads.append(f"{name}: {'' if said.dtype in ('f32', 'number') else said.dtype}[{', '.join(axes)}]")
            inner.said[value] = evolve(said, text=name, binds=CALL, axes=axes)
            inner.bound[name] = value
        self.write(scope, inner)
        results = [Writer(self.file, inner)(value) for value in outputs]
        texts = [each.text for each in results]
        if len(texts) == 1 and inner.lines and inner.lines[-1].startswith(f"let {texts[0]} = "):
            texts = [inner.lines.pop().removeprefix(f"let {texts[0]} = ")]
        inner.lines.append(f"return {', '.join(texts)}")
        wanted, head = block_name(scope.kind, self.roots, self.model.name), ", ".join(heads)
        if calls:
            shared = self.file.shared(scope.path, scope.path, wanted, head, inner, body)
            if shared is None:
                raise CallsDiffer(scope.path)
            text = call(shared[0], *given, *shared[1:])
        else:
            text = self.file.block(wanted, given, head, inner, body)
        written(self.file.without_axes(text))
        self._bind_calls_before(text, body)
        if len(outputs) == 1:
            (made,) = outputs
            said = evolve(results[0], text=text, binds=CALL)
            if made not in self.bindings.kept:
                body.said[made] = said
            else:
                self.bindings.bind(made, body, said)
            return
        names = []
        for each, said in zip(outputs, results, strict=True):
            chosen = self.bindings.free(self.bindings.called.get(each, "h"), each, body)
            self.bindings.name(chosen, each, said, body)
            names.append(chosen)
        body.lines.append(f"let {', '.join(names)} = {text}")

    def _bind_calls_before(self, text: str, body: Body) -> None:
        """Calls of a block are numbered as they stand in the file: one that waits to be read comes before the next."""
        block = CALLED.split(text)[0]
        for value, said in list(body.said.items()):
            waits = CALLED.split(said.text)[0] == block and said.text not in text
            if waits and not any(said.text in line for line in body.lines):
                self.bindings.bind(value, body, said)

    def _arguments(self, scope: Scope, inputs: Sequence[Value]) -> list[str]:
        """What each argument of a block is called in all calls with such arguments; nothing, if that differs."""
        calls = [self.tree.inputs_of(each, self.tree.same(each)) for each in self.tree.kinds[scope.call.kind]]
        alike = [each for each in calls if [x.shape for x in each] == [x.shape for x in inputs]]
        names = ({self.bindings.called.get(each, "") for each in several} for several in zip(*alike, strict=True))
        return [each.pop() if len(each) == 1 else "" for each in names]

    def _sharing(self, scope: Scope) -> list[Scope]:
        """All calls of a module that is called several times in one body."""
        calls = [each for each in self.tree.same(scope) if self.bindings.owner(each) is self.bindings.owner(scope)]
        return calls if len(calls) > 1 else []

    def text(self) -> str:
        """The file."""
        body = self.model
        writer = Writer(self.file, body)
        heads = []
        for value in self.graph.inputs:
            name = valid(value.args["name"])
            if value not in self.solver.dims:
                continue
            heads.append(self._input(name, value, body))
        for value in self.samples:
            body.lines.append(self._sample(value, body))
        self.write(self.tree.root, body)
        loss = self.graph.outputs[self.graph.loss]
        said = writer(loss)
        if body.lines and body.lines[-1].startswith(f"let {said.text} = "):
            body.outputs.append("loss " + body.lines.pop().removeprefix(f"let {said.text} = "))
        else:
            body.outputs.append(f"loss {said.text}")
        for i in self.graph.shown:
            value = self.graph.outputs[i]
            name = valid(self.graph.names[i] or self.bindings.called.get(base(value), "result"))
            name = "prediction" if name in self.file.inputs else name
            there = {each.split()[1] for each in body.outputs}
            name = next(n for n in numbered(name) if n not in there)
            if value is loss:  # there is nothing else
                body.lines.append(f"let total = {body.outputs.pop().removeprefix('loss ')}")
                body.outputs += ["loss total", "output total = total"]
                self.shown.append(())
            else:
                made = writer(value)
                body.outputs.append(f"output {name} = {made.text}")
                self.shown.append(made.dims)
        model = placed(f"model {body.name}({', '.join(heads)}) {{\n{body.text}\n}}")
        weights = weight_lines(body, self.file.state, self.file.axes.sizes)
        texts = {name: placed(text) for name, text in self.file.blocks.texts.items()}
        blocks = [f"block {name}{text}" for name, text in texts.items() if _is_used(name, [*texts.values(), model])]
        frozen = freezing_rules(body, with_gradients(self.graph.outputs[self.graph.loss]))
        whole = [*blocks, model, *frozen]
        parts = [self._axes_line("\n".join([model, *whole, *weights])), self._constants_line("\n".join(whole)), *whole]
        rule = "rules" if frozen else "adamw(lr = 1e-3)"
        parts.append(f"train {{\n  data = random()\n  optimizer = {rule}\n  steps = 100\n}}")
        parts.append("weights hf {\n" + "\n".join(weights) + "\n}")
        return format_text("\n\n".join(part for part in parts if part))

    def _input(self, name: str, value: Value, body: Body) -> str:
        """An input's declaration. Merged axes are split, and of an axis of size 1 the one element is taken."""
        dims: list[str] = []
        text, names = name, self.file.distinct(self.file.axes.of(value))
        for i, own in enumerate(names):
            if own:
                usual = {2: "height", 3: "width"}.get(i, "") if value.rank == 4 else ""
                dims.append(self.file.merged(own, usual or "places"))
            if len(own) > 1:
                text = call("split", text, f"{dims[-1]} -> [{', '.join(own)}]")
            if not own:
                usual = {4: {1: "channels"}, 3: {1: "channels"}}.get(value.rank, {}).get(i, "one")
                dims.append(self.file.axes.free([usual], 1))
                text = call("gather", text, 0, along=dims[-1])
        flat = tuple(each for own in names for each in own)
        dtype = Writer(self.file, body).dtype_of(value)
        body.bound[name] = value
        body.said[value] = Said(name, tuple(names), flat, dtype=dtype)
        if text != name:
            body.lines.append(f"let {name} = {text}")
        return f"{name}: {'' if dtype == 'f32' else dtype}[{', '.join(dims)}]"

    def _sample(self, value: Value, body: Body) -> str:
        """A sample's declaration, without axes of size 1."""
        name = value.args["name"] = next(each for each in numbered(valid(value.args["name"])) if each not in body.bound)
        names = tuple(self.file.distinct(self.file.axes.of(value)))
        flat = tuple(each for own in names for each in own)
        dtype = Writer(self.file, body).dtype_of(value)
        body.bound[name] = value
        body.said[value] = Said(name, names, flat, dtype=dtype)
        return f"sample {name}: {'' if dtype == 'f32' else dtype}[{', '.join(flat)}] ~ {value.args['draw']}"

    def _axes_line(self, text: str) -> str:
        """All axes that the text has, in its order, each after those that its formula names."""
        sizes, formulas = self.file.axes.sizes, self.file.axes.related()
        used: dict[str, None] = {}

        def use(name: str) -> None:
            if name in sizes and name not in used:
                for each in re.findall(r"[A-Za-z]\w*", formulas.get(name, "")):
                    use(each)
                used[name] = None

        for name in re.findall(r"\b[A-Za-z]\w*\b(?! =(?!=))", text):  # which are no names of arguments
            use(name)
        return f"axis {', '.join(f'{name} = {formulas.get(name) or sizes[name]}' for name in used)}"

    def tables(self) -> set[str]:
        """The full names of buffers that begin with tables, without numbers of iterations."""
        return {name for name, _, each in parameters_of(self.model) if each.value.op == "table"}

    def _constants_line(self, text: str) -> str:
        used = {name: value for name, value in self.file.constants.items() if re.search(rf"\b{name}\b", text)}
        return f"const {', '.join(f'{n} = {number_text(v)}' for n, v in used.items())}" if used else ""


def _is_used(name: str, texts: Sequence[str]) -> bool:
    called = re.compile(rf"\b{name}\(|share \w+ = {name}\b")
    return any(called.search(text) for text in texts)


def _values(item: Value | Scope) -> list[Value]:
    return item.values if isinstance(item, Scope) else [item]
