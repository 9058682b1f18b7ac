"""A module's graph → the text of a file: blocks, repeats, the model, and which weights of the module are whose."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import chain

import torch
from attrs import evolve

from partita.dsl.syntax.format import format_text
from partita.importing.axes import Axes
from partita.importing.graph import LEAVES, Captured, NotUnderstood, Value, with_gradients
from partita.importing.loops import Loop
from partita.importing.said import CALL, Said, call, number_text
from partita.importing.writing.blocks import placed
from partita.importing.writing.body import Body
from partita.importing.writing.file import File, Names
from partita.importing.writing.known import Known
from partita.importing.writing.names import block_name, numbered, owners, valid
from partita.importing.writing.tree import Scope, Tree, base, made_of
from partita.importing.writing.weights import freezing_rules, parameters_of, weight_lines
from partita.importing.writing.writer import Writer

SPARE = ("h", "y", "z", "u", "p", "r")  # names of values that have none
INPUTS = ("x", "y", "z", "u", "w")
ROLES = {name[0]: rf"^\w?{name[0]}$|{name[0]}_|_{name[0]}|{name[:4]}" for name in ("query", "key", "value")}
SCANNED = ("scan_slice", "scan_carry")  # what a loop has names for
LONG = 4  # operations of an expression that is not written twice


CALLED = re.compile("[⟦(]")  # behind the name of a block
SPLIT = re.compile(r"split\(((?:[^()]|\([^()]*\)|\((?:[^()]|\([^()]*\))*\))*), (\w+ -> \[[\w, ]+\])\)")


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
        solver, self.inlined = axes.solver, self.known.inlined
        self.tree = Tree(solver.values, solver.users, graph.returned)
        self.file = File(axes, self.tree, state, self.known.forms)
        # A parameter is called like its module, and a value gives way; but where it is what a weight of a short name
        # makes, the weight does.
        self.modules = {part for path in state for part in path.split(".")}
        makers = {v: self._maker(v, name) for v, name in self.file.called.items() if name in self.modules}
        self.file.yielding = {weight for weight in makers.values() if weight is not None}
        self.called = {v: name for v, name in self.file.called.items() if makers.get(v, v) is not None}
        for each in self.tree.values:
            if each.op == "cross_entropy" and len(self.called.get(base(each.args["x"]), "")) < 2:
                self.called[base(each.args["x"])] = "logits"
        for each in graph.changes:
            self.called[each.args["x"]] = f"new_{each.args['buffer'].args['names'][0].rpartition('.')[2]}"
        outer = {
            value.place.calls[depth].kind
            for value in self.tree.values
            for depth in (0, 1)
            if depth < len(value.place.calls)
        }
        self.roots = sorted({kind.rsplit(".", 1)[-1] for kind in outer if not kind.startswith("torch.nn.")})
        self.model = Body("model", [self.tree.root], name=valid(name))
        self.shown: list[Sequence[Names]] = []  # of each output, the axes of its dimensions
        self.samples = [value for value in solver.values if value.op == "input" and "draw" in value.args]
        self.given: dict[Value, str] = {}  # names that loops hand on, of what their steps make
        self.kept = self._kept()

    def _maker(self, value: Value, name: str) -> Value | None:
        """The weight of a linear layer or a table of this name, if that is short, whose result a value is."""
        while value.op == "pointwise" and value.args["function"] == "add" and base(value.args["xs"][1]).op in LEAVES:
            value = base(value.args["xs"][0])
        for each in map(base, value.inputs) if value.op in ("einsum", "embedding") and len(name) < LONG else ():
            if each.op == "parameter" and any(own.split(".")[-2:-1] == [name] for own in each.args["names"]):
                return each
        return None

    def learned(self) -> bool:
        """Whether the text, which is written, is to be written again with what is known now."""
        cut = self.file.expressions.cuts(self._can_be_named) - self.known.cut
        self.known.cut |= cut
        return bool(cut) or self.file.blocks.learned()

    # ------------------------------------------------------------ what is a statement

    def _can_be_named(self, value: Value) -> bool:
        """Whether a value is one of the program, and no product whose bias is still to be added."""
        if value not in self.tree.home:
            return False
        readers = self.tree.readers(value)
        biased = len(readers) == 1 and readers[0].op == "pointwise" and readers[0].args["function"] == "add"
        return not (biased and any(base(each).op in ("parameter", "part") for each in readers[0].inputs))

    def _kept(self) -> set[Value]:
        """Values that are bound: those that several read, what layers hand on, and what has a name where it matters."""
        kept: set[Value] = set()
        attended = {
            base(value.args[name]): name for value in self.tree.values if value.op == "attend" for name in "vkq"
        }
        for value, name in attended.items():
            if not re.search(ROLES[name], self.called.get(value, "")):
                self.called[value] = name
        for value in self.tree.values:
            sites = self._sites(value)
            several = len(sites) != 1 or self.tree.is_output(value)
            named = value.op in ("attend", "top") or value in attended or value in self.known.cut
            squared = not several and sites[0] in self.tree.readers(value) and self._is_long_twice(value, kept)
            if several or named or squared or self._are_apart(value, sites[0]):
                kept.add(value)
        for value in self.tree.values:
            if value.op == "scan_slice":
                kept.add(base(value.args["x"]))
            elif value.op == "scan_result":
                kept.update(base(each) for each in value.inputs)
        return {value for value in kept if value.op not in SCANNED}

    def _is_long_twice(self, value: Value, kept: Collection[Value]) -> bool:
        """Whether one operation reads a value twice, as a square does, which is no short expression: a block, written
        twice, would have two sets of parameters, and a dropout two masks.
        """
        (reader,) = self.tree.readers(value)
        if sum(base(each) is value for each in reader.inputs) < 2:
            return False
        made, waiting = 0, [value]
        while waiting and made < LONG:
            each = waiting.pop()
            made = made + 1 if each.op == "pointwise" else LONG
            waiting += [x for x in made_of(each) if x not in kept and x.op not in LEAVES]
        return made >= LONG

    def _are_apart(self, value: Value, site: Value | Scope) -> bool:
        """Whether a value is read in another layer than that which makes it."""
        return self._layers(value) != self._layers(self.tree.readers(value)[0], site)

    def _sites(self, value: Value) -> list[Value | Scope]:
        """Where a value is read: by values, or by calls of blocks."""
        own = set(self.tree.home[value].around())
        sites: dict[Value | Scope, None] = {}
        for reader in self.tree.readers(value):
            chain = [scope for scope in self.tree.home[reader].around() if scope not in own]
            blocks = [scope for scope in chain if self._is_block(scope)]
            sites[blocks[-1] if blocks else reader] = None
        return list(sites)

    def _layers(self, value: Value, site: Value | Scope | None = None) -> list[Scope]:
        """The numbered modules around a value, or around where it is read."""
        scope = site if isinstance(site, Scope) else self.tree.home[value]
        return [each for each in scope.around() if each.is_loop or (each.number is not None and not each.is_torch)]

    # ------------------------------------------------------------ bodies

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
                    self._bind_top(item, body)
                elif item in self.kept:
                    self._bind(item, body)
                continue
            if item.is_loop:
                self._scan(item, body)
                continue
            run = self._run(items[at - 1 :])
            if len(run) > 1:
                self._layers_of(run, body)
                at = items.index(run[-1]) + 1
            elif self._is_block(item):
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
                if any(each in self.kept and each not in read for each in between):
                    break
                if any(each in own for other in between for each in made_of(other)):
                    break
                if at < last:
                    items.insert(last, items.pop(at))
                last = max(at, last)
        return items

    def _bind(self, value: Value, body: Body, said: Said | None = None, name: str | None = None) -> None:
        said = Writer(self.file, body)(value) if said is None else said
        said = self._as_handed(said, value, body) if value in self.given else said
        if said.text in body.bound and body.bound[said.text] is not None and name in (None, said.text):
            body.said[value] = said
            return
        name = self.given.get(value) or self._free(name or self.called.get(value) or "h", value, body)
        whole = SPLIT.fullmatch(said.text)  # which is merged again where it is read
        body.lines.append(f"let {name} = {whole[1] if whole is not None else said.text}")
        self._name(name, value, said, body)
        if whole is not None:
            body.said[value] = evolve(said, text=f"split({name}, {whole[2]})", binds=CALL)

    def _bind_top(self, value: Value, body: Body) -> None:
        """Bind the values and the ids that `top_k` chooses, which it returns together."""
        if value in body.said:
            return
        same = ("x", "dim", "count")
        both = [v for v in self.tree.values if v.op == "top" and all(v.args[k] == value.args[k] for k in same)]
        writer = Writer(self.file, body)
        x, (over,) = writer.single(writer(value.args["x"]), [value.args["dim"]])
        dims: list[tuple[str, ...]] = [*x.dims]
        dims[value.args["dim"]] = writer.names_of(value)[value.args["dim"]]
        parts = dims[value.args["dim"]]
        chosen = writer.merged_name(parts)
        chosen = writer.second(over) if chosen == over else chosen
        dims[value.args["dim"]] = (chosen,)
        axes = tuple(chosen if name == over else name for name in x.axes)
        names = []
        for index, usual in enumerate(("weight", "id")):
            own = next((v for v in both if v.args["index"] == index), None)
            name = self._free(usual, own or value, body)
            names.append(name)
            body.bound[name] = own
            if own is not None:
                said = Said(name, tuple(dims), axes, dtype="f32" if index == 0 else "i64")
                if parts == (over,):  # of a sort, which has the axis itself
                    said = said.renamed([parts if names == (chosen,) else names for names in dims])
                body.said[own] = writer.split(said, value.args["dim"], parts)
        body.lines.append(f"let {', '.join(names)} = {call('top_k', x.text, f'{over} -> {chosen}')}")

    def _name(self, name: str, value: Value, said: Said, body: Body) -> None:
        old = body.bound.get(name)
        if old is not None:
            body.said.pop(old, None)
        body.bound[name] = value
        body.said[value] = evolve(said, text=name, binds=CALL)

    def _free(self, wanted: str, value: Value, body: Body) -> str:
        wanted = valid(wanted)
        others = (each for each in map(valid, self.file.names.get(value, [])[1:]) if each not in self.modules)
        for name in (wanted, *others, *SPARE, *(f"{wanted}_{n}" for n in range(2, 100))):
            old = body.bound.get(name)
            mine = name in body.bound and (old is None or self._is_read_after(old, value, body))
            outer = name not in body.bound and any(name in each.bound for each in list(body.around())[1:])
            if (
                not mine
                and not outer
                and name not in body.taken
                and all(name != p.name for p in body.parameters.values())
            ):
                return name
        raise AssertionError("there are names enough")

    def _is_read_after(self, value: Value, made: Value, body: Body) -> bool:
        """Whether something that is still to be written in a block, or in the model, reads a value."""
        inside = body.inside
        waiting, met = [value], {value}
        while waiting:
            each = waiting.pop()
            for reader in self.tree.readers(each):
                if reader in met:
                    continue
                met.add(reader)
                if inside is not None and reader not in inside:
                    if each in inside:  # which a block returns at its end
                        return True
                    continue
                if reader not in self.tree.place or self.tree.place[reader] > self.tree.place.get(made, -1):
                    return True
                waiting += [each for each in self._handed_out(reader, body) if each not in self.kept]
        return self.tree.is_output(value)

    def _handed_out(self, value: Value, body: Body) -> list[Value]:
        """What stands for a value in a body: the results of the call of a block that computes it, or itself."""
        own = {scope for each in body.scopes for scope in each.around()}
        around = self.tree.home[value].around() if value in self.tree.home else ()
        calls = [each for each in around if each not in own and self._is_block(each)]
        return self.tree.outputs_of(calls[-1]) if calls else [value]

    # ------------------------------------------------------------ blocks

    def _is_block(self, scope: Scope) -> bool:
        """Whether a call is one of a block: of a class that is used several times and has parameters of its own."""
        if scope.is_torch or scope.is_loop or scope.number is not None or len(self.tree.kinds[scope.call.kind]) < 2:
            return False
        if scope.path in self.inlined:
            return False
        if len(self.tree.same(scope)) < 2 and any(
            child.number is not None and not child.is_torch for child in scope.children
        ):
            return False
        parameters = {each for value in scope.values for each in value.inputs if base(each).op in ("parameter", "part")}
        return len(scope.values) > 2 and bool(parameters)

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
            if made not in self.kept:
                body.said[made] = said
            else:
                self._bind(made, body, said)
            return
        names = []
        for each, said in zip(outputs, results, strict=True):
            chosen = self._free(self.called.get(each, "h"), each, body)
            self._name(chosen, each, said, body)
            names.append(chosen)
        body.lines.append(f"let {', '.join(names)} = {text}")

    def _bind_calls_before(self, text: str, body: Body) -> None:
        """Calls of a block are numbered as they stand in the file: one that waits to be read comes before the next."""
        block = CALLED.split(text)[0]
        for value, said in list(body.said.items()):
            waits = CALLED.split(said.text)[0] == block and said.text not in text
            if waits and not any(said.text in line for line in body.lines):
                self._bind(value, body, said)

    def _arguments(self, scope: Scope, inputs: Sequence[Value]) -> list[str]:
        """What each argument of a block is called in all calls with such arguments; nothing, if that differs."""
        calls = [self.tree.inputs_of(each, self.tree.same(each)) for each in self.tree.kinds[scope.call.kind]]
        alike = [each for each in calls if [x.shape for x in each] == [x.shape for x in inputs]]
        names = ({self.called.get(each, "") for each in several} for several in zip(*alike, strict=True))
        return [each.pop() if len(each) == 1 else "" for each in names]

    def _sharing(self, scope: Scope) -> list[Scope]:
        """All calls of a module that is called several times in one body."""
        calls = [each for each in self.tree.same(scope) if self._owner(each) is self._owner(scope)]
        return calls if len(calls) > 1 else []

    def _owner(self, scope: Scope) -> Scope:
        """The call in whose body a call is."""
        return next((each for each in scope.around() if each is not scope and self._is_own(each)), self.tree.root)

    def _is_own(self, scope: Scope) -> bool:
        """Whether a call has a body of its own: a block's, or that of a repeat of modules of its class."""
        beside = scope.parent.children if scope.parent is not None else ()
        repeated = any(each.call.kind == scope.call.kind and each.path != scope.path for each in beside)
        return self._is_block(scope) or (scope.number is not None and not scope.is_torch and repeated)

    # ------------------------------------------------------------ loops

    def _scan(self, scope: Scope, body: Body) -> None:
        """Write a loop over a dimension."""
        results = [each for each in self.tree.values if each.op == "scan_result" and self._is_of(each, scope)]
        nexts, loop = results[0].args["nexts"], results[0].args["loop"]
        inner = Body("scan", [scope], body, calls=body.calls, parameters=body.parameters, shared=body.shared)
        seq = self._read_in_steps(scope, loop, inner, body)
        handed = self._begin(dict(zip(nexts, loop.carries, strict=True)), scope, results, inner, body)
        self.write(scope, inner)
        self._hand_on(handed, inner)
        body.local |= {*inner.bound}
        body.lines += [f"scan {seq}{' backward' if loop.backward else ''} {{", *inner.lines, "}"]
        for result in results:
            said, name = inner.said[result.args["x"]], handed[result.args["x"]]
            body.said[result] = Said(name, ((seq,), *said.dims), (seq, *said.axes), dtype=said.dtype)
            body.bound[name] = result

    def _is_of(self, result: Value, scope: Scope) -> bool:
        """Whether a result is that of a loop's step."""
        loop = result.args["loop"]
        return any(each in scope.values for each in (*loop.carries, *loop.slices))

    def _before(self, scope: Scope) -> Value:
        """What the program computes just before a call; an input, if that is nothing."""
        at = self.tree.place[scope.values[0]]
        return self.tree.values[at - 1] if at else self.graph.inputs[0]

    def _read_in_steps(self, scope: Scope, loop: Loop, inner: Body, body: Body) -> str:
        """Let the step of a loop read what has its axis position by position, or all of it under another name of the
        axis; returns the axis.
        """
        outer, seq = Writer(self.file, body), ""
        for each in loop.slices:
            dim = each.args["dim"]
            said, (seq,) = outer.single(outer(each.args["x"]), [dim])
            said = self._named(said, base(each.args["x"]), scope, body)
            rest = (*said.dims[:dim], *said.dims[dim + 1 :])
            inner.said[each] = evolve(said, dims=rest, axes=tuple(name for name in said.axes if name != seq))
        for value in self.tree.inputs_of(scope):
            readers = (user for user in scope.values if any(base(each) is value for each in user.inputs))
            if value.op in LEAVES[1:] or all(user.op == "scan_slice" for user in readers):
                continue
            said = outer(value)
            if seq in said.axes:
                dims = [tuple(outer.second(seq) if own == seq else own for own in dim) for dim in said.dims]
                inner.said[value] = self._named(said.renamed(dims), value, scope, body)
        return seq

    def _named(self, said: Said, value: Value, scope: Scope, body: Body) -> Said:
        """What is said before a call, under a name."""
        if said.text.isidentifier():
            return said
        name = self._free(self.called.get(value, "x"), self._before(scope), body)
        body.lines.append(f"let {name} = {said.text}")
        body.bound[name] = None
        return evolve(said, text=name, binds=CALL)

    def _begin(
        self, carried: dict[Value, Value], scope: Scope, results: Sequence[Value], inner: Body, body: Body
    ) -> dict[Value, str]:
        """Bind what a loop hands on before its first step; returns the names."""
        outer, handed = Writer(self.file, body), dict[Value, str]()
        for value in dict.fromkeys([*carried, *(each.args["x"] for each in results)]):
            carry = carried.get(value)
            name = self._free(self.called.get(base(value)) or "h", self._before(scope), body)
            axes = [own for dim in outer.names_of(value) for own in dim]
            begun = Said("0", ((),) * value.rank, dtype="number") if carry is None else outer(carry.args["begin"])
            begun = outer.expanded(begun, [each for each in axes if each not in begun.axes])
            body.lines.append(f"let {name} = {begun.text}")
            body.taken.add(name)
            inner.bound[name] = carry
            handed[value] = name
            if carry is not None:
                inner.said[carry] = Said(name, tuple(map(tuple, outer.names_of(carry))), begun.axes)
            if value in self.kept and (carry is None or not self._is_read_after(carry, value, inner)):
                self.given[value] = name
        body.taken -= {*handed.values()}
        inner.taken |= {*handed.values()}
        body.bound.update(dict.fromkeys(handed.values()))
        return handed

    def _as_handed(self, said: Said, value: Value, body: Body) -> Said:
        """What a step makes, with the axes that it has before the first."""
        writer = Writer(self.file, body)
        names = [tuple(own) for own in writer.names_of(value)]
        dims = [new if len(own) == len(new) else own for own, new in zip(said.dims, names, strict=True)]
        said = said.renamed(dims)
        return writer.expanded(said, [own for dim in names for own in dim if own not in said.axes])

    def _hand_on(self, handed: dict[Value, str], body: Body) -> None:
        """Let the names that a loop hands on be what its step has made."""
        writer = Writer(self.file, body)
        left: list[tuple[str, Value, Said]] = []
        for value, name in handed.items():
            said = self._as_handed(writer(value), value, body)
            if said.text == name and body.bound.get(name) is value:
                continue
            left.append((name, value, said))
        names = {name for name, _, _ in left}
        apart = len(left) > 1 and any(names & {*re.findall(r"\w+", said.text)} for _, _, said in left)
        for i, (name, value, said) in enumerate(left):
            if apart:
                new = self._free(f"new_{name}", value, body)
                body.lines.append(f"let {new} = {said.text}")
                left[i] = (name, value, evolve(said, text=new, binds=CALL))
        for name, value, said in left:
            body.lines.append(f"let {name} = {said.text}")
            self._name(name, value, said, body)

    # ------------------------------------------------------------ repeats

    def _run(self, items: Sequence[Value | Scope]) -> list[Scope]:
        """Calls of modules of a list that follow each other, of one class."""
        first = items[0]
        assert isinstance(first, Scope)
        run = [first]
        if first.number is None or (first.is_torch and not _is_layer(first)):
            return run
        if any(each.path in self.inlined for each in first.around()):  # whose layers are read in several places
            return run
        for each in items[1:]:
            if isinstance(each, Value):
                if each in self.kept:
                    break
                continue
            last = run[-1].number
            if each.call.kind != first.call.kind or each.list_path != first.list_path or last is None:
                break
            if each.number != last + 1:
                break
            run.append(each)
        return run

    def _layers_of(self, run: list[Scope], body: Body) -> None:
        """Layers as repeats where they are alike, and one after the other where they are not."""
        handed = self._handed_on(run)
        if handed is None:  # such as where the first makes what all others read
            start = next((i for i in range(1, len(run) - 1) if self._handed_on(run[i:]) is not None), len(run))
            self._one_by_one(run[:start], body)
            if start < len(run):
                self._layers_of(run[start:], body)
            return
        texts = self._bodies(run, handed, body)
        count = len(run)
        period = next(p for p in range(1, count + 1) if all(texts[i] == texts[i % p] for i in range(count)))
        if 2 * period <= count and (rest := count % period):
            self._repeat(run[:-rest], handed[:-rest], period, body)
            self._layers_of(run[-rest:], body) if rest > 1 else self._one_by_one(run[-rest:], body)
            return
        if 2 * period > count:
            longest = _longest_alike(texts)
            if longest is None:
                self._one_by_one(run, body)
                return
            for start, end in longest:
                part = run[start:end]
                self._layers_of(part, body) if end - start > 1 else self._one_by_one(part, body)
            return
        self._repeat(run, handed, period, body)

    def _one_by_one(self, run: list[Scope], body: Body) -> None:
        for scope in run:
            several = len(self.tree.kinds[scope.call.kind]) > 1 and len(scope.values) > 2
            if several and not scope.is_torch and scope.path not in self.inlined:
                self._call(scope, body)
            else:
                self.write(scope, body)

    def _handed_on(self, run: list[Scope]) -> list[tuple[list[Value], list[Value]]] | None:
        """Of each layer what it reads of the layer before, and what it makes of it; None if these do not match."""
        # Of a module that is called several times, other calls have the same layers.
        others = [[each for each in self.tree.same(s) if self._owner(each) is not self._owner(s)] for s in run]
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

    def _bodies(self, run: list[Scope], handed: list[tuple[list[Value], list[Value]]], body: Body) -> list[str]:
        """The text that each layer would be, as the body of a repeat; without any effect."""
        blocks, constants = dict(self.file.blocks.texts), dict(self.file.constants)
        around = [(each, dict(each.shared), dict(each.calls), dict(each.parameters)) for each in body.around()]
        names = self._carried(run, handed, body)
        texts = [self._iteration(run, handed, j, 1, names, body).text for j in range(len(run))]
        self.file.blocks.texts.clear()
        self.file.blocks.texts.update(blocks)
        self.file.constants.clear()
        self.file.constants.update(constants)
        for each, shared, calls, parameters in around:
            each.shared, each.calls, each.parameters = shared, calls, parameters
        return texts

    def _carried(self, run: list[Scope], handed: list[tuple[list[Value], list[Value]]], body: Body) -> list[str]:
        """What the values are called that layers hand on: by names that nothing else has which is still read."""
        chosen: list[str] = []
        for first, value in zip(*handed[0], strict=True):
            wanted = valid(self.called.get(value, "x"))
            for name in (wanted, "x", "y", "h", *(f"{wanted}_{k}" for k in range(2, 100))):
                old = body.bound.get(name)
                free = (
                    name not in body.bound
                    or old is first
                    or (old and not self._is_read_after(old, run[0].values[0], body))
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
                self.write(run[j], inner)
            else:
                self._call(run[j], inner)
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
            self._name(name, first, said, body)
        taken = (body.calls, self.file.axes.sizes, self.file.constants)
        before = [each[0][0] for each in body.calls.values() if isinstance(each[0], list)]
        owned = [name for each in before[:1] for name in owners(f"{run[0].path}.", f"{each.scopes[0].path}.")]
        likely = chain(["layer"], (f"{name}_layer" for name in owned), numbered("layer"))
        label = next(n for n in likely if body.is_free(n) and not any(n in names for names in taken))
        bodies = [self._iteration(run, handed, j, period, names, body) for j in range(0, len(run), period)]
        texts = {each.text for each in bodies}
        if len(texts) > 1:
            raise NotUnderstood(f"layers of {run[0].list_path} differ")
        for each in bodies:
            each.name = label
        body.calls[label] = [list(bodies)]
        several = "layers" if period == 1 else "pairs" if period == 2 else "periods"
        number = self.file.constant(re.sub("layer(?!s)", several, label), len(run) // period)
        body.lines += [f"repeat {number} as {label} {{", *bodies[0].text.split("\n"), "}"]
        for carried, value, result in zip(names, handed[0][0], handed[-1][1], strict=True):
            self._name(carried, result, self._handed(carried, result, writer(value)), body)

    def _is_read_later(self, value: Value, run: list[Scope]) -> bool:
        inside = {made for scope in run for made in scope.values}
        readers = self.tree.readers(value)
        return any(
            reader not in inside and self.tree.place[reader] > self.tree.place[run[0].values[0]] for reader in readers
        )

    # ------------------------------------------------------------ the file

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
            name = valid(self.graph.names[i] or self.called.get(base(value), "result"))
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
        weights = weight_lines(body, self.file.state)
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

        for name in re.findall(r"[A-Za-z]\w*", text):
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


def _longest_alike(texts: Sequence[str]) -> list[tuple[int, int]] | None:
    """Stretches of layers with the same text; None if no two that follow each other have."""
    stretches: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(texts) + 1):
        if i == len(texts) or texts[i] != texts[start]:
            stretches.append((start, i))
            start = i
    return stretches if any(end - begin > 1 for begin, end in stretches) else None


def _values(item: Value | Scope) -> list[Value]:
    return item.values if isinstance(item, Scope) else [item]


def _operations(scope: Scope) -> list[tuple[object, ...]]:
    """What a call does, whatever its axes are."""
    told = ("function", "causal")
    return [(each.op, each.rank, *(each.args.get(name) for name in told)) for each in scope.values]


def _is_layer(scope: Scope) -> bool:
    """Whether a module of torch is a layer of several parts, such as that of a transformer."""
    return len(scope.values) > 4
