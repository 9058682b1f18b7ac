"""Loops over a dimension, as scans."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from attrs import evolve

from partita.importing.graph import LEAVES, Value
from partita.importing.loops import Loop
from partita.importing.said import CALL, Said
from partita.importing.writing.bindings import Bindings
from partita.importing.writing.body import Body
from partita.importing.writing.tree import Scope, base
from partita.importing.writing.writer import Writer


class Scans:
    """Writes loops; `body` writes what a call of a module computes into a body."""

    def __init__(self, bindings: Bindings, body: Callable[[Scope, Body], None]) -> None:
        self.bindings, self.tree, self.file, self.body = bindings, bindings.tree, bindings.file, body

    def write(self, scope: Scope, body: Body) -> None:
        """Write a loop over a dimension."""
        results = [each for each in self.tree.values if each.op == "scan_result" and self._is_of(each, scope)]
        nexts, loop = results[0].args["nexts"], results[0].args["loop"]
        inner = Body("scan", [scope], body, calls=body.calls, parameters=body.parameters, shared=body.shared)
        seq = self._read_in_steps(scope, loop, inner, body)
        handed = self._begin(dict(zip(nexts, loop.carries, strict=True)), scope, results, inner, body)
        self.body(scope, inner)
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
        return self.tree.values[at - 1] if at else self.bindings.graph.inputs[0]

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
        name = self.bindings.free(self.bindings.called.get(value, "x"), self._before(scope), body)
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
            name = self.bindings.free(self.bindings.called.get(base(value)) or "h", self._before(scope), body)
            axes = [own for dim in outer.names_of(value) for own in dim]
            begun = Said("0", ((),) * value.rank, dtype="number") if carry is None else outer(carry.args["begin"])
            begun = outer.expanded(begun, [each for each in axes if each not in begun.axes])
            body.lines.append(f"let {name} = {begun.text}")
            body.taken.add(name)
            inner.bound[name] = carry
            handed[value] = name
            if carry is not None:
                inner.said[carry] = Said(name, tuple(map(tuple, outer.names_of(carry))), begun.axes)
            if value in self.bindings.kept and (carry is None or not self.bindings.is_read_after(carry, value, inner)):
                self.bindings.given[value] = name
        body.taken -= {*handed.values()}
        inner.taken |= {*handed.values()}
        body.bound.update(dict.fromkeys(handed.values()))
        return handed

    def _hand_on(self, handed: dict[Value, str], body: Body) -> None:
        """Let the names that a loop hands on be what its step has made."""
        writer = Writer(self.file, body)
        left: list[tuple[str, Value, Said]] = []
        for value, name in handed.items():
            said = self.bindings.as_handed(writer(value), value, body)
            if said.text == name and body.bound.get(name) is value:
                continue
            left.append((name, value, said))
        names = {name for name, _, _ in left}
        apart = len(left) > 1 and any(names & {*re.findall(r"\w+", said.text)} for _, _, said in left)
        for i, (name, value, said) in enumerate(left):
            if apart:
                new = self.bindings.free(f"new_{name}", value, body)
                body.lines.append(f"let {new} = {said.text}")
                left[i] = (name, value, evolve(said, text=new, binds=CALL))
        for name, value, said in left:
            body.lines.append(f"let {name} = {said.text}")
            self.bindings.name(name, value, said, body)
