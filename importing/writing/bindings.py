"""What the statements of a file are: which values are bound, and by which names."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from attrs import evolve

from partita.importing.axes import Axes
from partita.importing.graph import LEAVES, Captured, Value
from partita.importing.said import CALL, Said, call
from partita.importing.writing.body import Body
from partita.importing.writing.file import File
from partita.importing.writing.known import Known
from partita.importing.writing.names import GENERIC, own_lines, valid
from partita.importing.writing.tree import Scope, Tree, base, made_of
from partita.importing.writing.writer import Writer

SPARE = ("h", "y", "z", "u", "p", "r")  # names of values that have none
ROLES = {name[0]: rf"^\w?{name[0]}$|{name[0]}_|_{name[0]}|{name[:4]}" for name in ("query", "key", "value")}
SCANNED = ("scan_slice", "scan_carry")  # what a loop has names for
LONG = 4  # operations of an expression that is not written twice
SPLIT = re.compile(r"split\(((?:[^()]|\([^()]*\)|\((?:[^()]|\([^()]*\))*\))*), (\w+ -> \[[\w, ]+\])\)")


class Bindings:
    """Of the values of a module's graph those that are `kept`, what they are `called`, and which calls are blocks."""

    def __init__(self, graph: Captured, axes: Axes, name: str, state: dict[str, torch.Tensor], known: Known) -> None:
        self.graph, self.known, self.inlined = graph, known, known.inlined
        self.tree = Tree(axes.solver.values, axes.solver.users, graph.returned)
        self.file = File(axes, self.tree, state, known.forms)
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

    def can_be_named(self, value: Value) -> bool:
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
            named = named or self._changes_statistics_again(value)
            squared = not several and sites[0] in self.tree.readers(value) and self._is_long_twice(value, kept)
            apart = not several and self._are_apart(value, sites[0])
            if several or named or squared or apart or self._says_more(value, sites[0], kept):
                kept.add(value)
        for value in self.tree.values:
            if value.op == "scan_slice":
                kept.add(base(value.args["x"]))
            elif value.op == "scan_result":
                kept.update(base(each) for each in value.inputs)
        return {value for value in kept if value.op not in SCANNED}

    def _changes_statistics_again(self, value: Value) -> bool:
        """Whether a batch norm is one of several calls of its module, which change its buffers one after the other."""
        buffer = value.args["mean"] if value.op == "batch_norm" else None
        return buffer is not None and sum(each.op == "batch_norm" for each in self.tree.readers(buffer)) > 1

    def _says_more(self, value: Value, site: Value | Scope, kept: Collection[Value]) -> bool:
        """Whether the module has a name of its own for what several operations make."""
        if self.called.get(value, GENERIC[0]) in GENERIC or value.op != "pointwise" or isinstance(site, Scope):
            return False
        several = any(each not in kept and each.op not in LEAVES for each in map(base, value.inputs))
        forward = all(line.forward for line in own_lines(value)[-1:])
        return several and forward and self.tree.home[site] is self.tree.home[value]

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
            blocks = [scope for scope in chain if self.is_block(scope)]
            sites[blocks[-1] if blocks else reader] = None
        return list(sites)

    def _layers(self, value: Value, site: Value | Scope | None = None) -> list[Scope]:
        """The numbered modules around a value, or around where it is read."""
        scope = site if isinstance(site, Scope) else self.tree.home[value]
        return [each for each in scope.around() if each.is_loop or (each.number is not None and not each.is_torch)]

    def is_block(self, scope: Scope) -> bool:
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

    def bind(self, value: Value, body: Body, said: Said | None = None, name: str | None = None) -> None:
        """Write a value as a statement; as what is `said` of it, and by this `name`, if they are given."""
        said = Writer(self.file, body)(value) if said is None else said
        said = self.as_handed(said, value, body) if value in self.given else said
        if said.text in body.bound and body.bound[said.text] is not None and name in (None, said.text):
            body.said[value] = said
            return
        name = self.given.get(value) or self.free(name or self.called.get(value) or "h", value, body)
        whole = SPLIT.fullmatch(said.text)  # which is merged again where it is read
        body.lines.append(f"let {name} = {whole[1] if whole is not None else said.text}")
        self.name(name, value, said, body)
        if whole is not None:
            body.said[value] = evolve(said, text=f"split({name}, {whole[2]})", binds=CALL)

    def bind_top(self, value: Value, body: Body) -> None:
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
            name = self.free(usual if own is None else self.called.get(own, usual), own or value, body)
            names.append(name)
            body.bound[name] = own
            if own is not None:
                said = Said(name, tuple(dims), axes, dtype="f32" if index == 0 else "i64")
                if parts == (over,):  # of a sort, which has the axis itself
                    said = said.renamed([parts if names == (chosen,) else names for names in dims])
                body.said[own] = writer.split(said, value.args["dim"], parts)
        body.lines.append(f"let {', '.join(names)} = {call('top_k', x.text, f'{over} -> {chosen}')}")

    def bind_cells(self, value: Value, cells: Value, body: Body) -> None:
        """Bind what an LSTM makes, and its cells, which its block returns together."""
        said = Writer(self.file, body)(value)
        names = []
        for each, usual in ((value, "states"), (cells, "cells")):
            names.append(self.free(self.called.get(each, usual), each, body))
            self.name(names[-1], each, said, body)
        body.lines.append(f"let {', '.join(names)} = {said.text}")

    def name(self, name: str, value: Value, said: Said, body: Body) -> None:
        """Let a name stand for a value from here on."""
        old = body.bound.get(name)
        if old is not None:
            body.said.pop(old, None)
        body.bound[name] = value
        body.said[value] = evolve(said, text=name, binds=CALL)

    def free(self, wanted: str, value: Value, body: Body) -> str:
        """A name for a value, the wanted one or another, that nothing has which is still to be read."""
        wanted = valid(wanted)
        others = (each for each in map(valid, self.file.names.get(value, [])[1:]) if each not in self.modules)
        for name in (wanted, *others, *SPARE, *(f"{wanted}_{n}" for n in range(2, 100))):
            old = body.bound.get(name)
            mine = name in body.bound and (old is None or self.is_read_after(old, value, body))
            outer = name not in body.bound and any(name in each.bound for each in list(body.around())[1:])
            if (
                not mine
                and not outer
                and name not in body.taken
                and all(name != p.name for p in body.parameters.values())
            ):
                return name
        raise AssertionError("there are names enough")

    def is_read_after(self, value: Value, made: Value, body: Body) -> bool:
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
        calls = [each for each in around if each not in own and self.is_block(each)]
        return self.tree.outputs_of(calls[-1]) if calls else [value]

    def as_handed(self, said: Said, value: Value, body: Body) -> Said:
        """What a step makes, with the axes that it has before the first."""
        writer = Writer(self.file, body)
        names = [tuple(own) for own in writer.names_of(value)]
        dims = [new if len(own) == len(new) else own for own, new in zip(said.dims, names, strict=True)]
        said = said.renamed(dims)
        return writer.expanded(said, [own for dim in names for own in dim if own not in said.axes])

    def owner(self, scope: Scope) -> Scope:
        """The call in whose body a call is."""
        return next((each for each in scope.around() if each is not scope and self._is_own(each)), self.tree.root)

    def _is_own(self, scope: Scope) -> bool:
        """Whether a call has a body of its own: a block's, or that of a repeat of modules of its class."""
        beside = scope.parent.children if scope.parent is not None else ()
        repeated = any(each.call.kind == scope.call.kind and each.path != scope.path for each in beside)
        return self.is_block(scope) or (scope.number is not None and not scope.is_torch and repeated)
