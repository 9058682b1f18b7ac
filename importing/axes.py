"""Names of axes, by votes of what they do: ids index a vocabulary, attention has heads and keys, images a height."""

from __future__ import annotations

import re
from collections import Counter
from copy import copy
from itertools import chain, combinations
from math import prod

import torch

from partita.dsl.syntax.lexer import DECLARATIONS
from partita.importing.assumed import Assumed
from partita.importing.factors import Factor, Solver, found, leaves
from partita.importing.graph import Value, is_op, number
from partita.importing.writing.names import numbered, valid
from partita.importing.writing.tree import base

MEMBERS = "members"  # experts of a group
INNER = re.compile(r"mlp|ffn|feed|fc|intermediate|dense|wi\b|expert")
WIDTHS = ("embed", "ffn", "hidden", "filters")  # roles whose sizes are often multiples of each other
LISTS = ("layers", "layer", "blocks", "block", "h", "net", "model")  # of modules, whose names say nothing
WORDS = {*DECLARATIONS, "over", "along", "into", "from"}


# Roles whose axes are joined, beside those that are one; and roles whose axes are not one where sizes are equal.
SYNONYMS = (("value", "key"), ("classes", "vocab"), ("source", "seq"))
ALONE = ("batch", "seq", "source", "vocab", "part", "features", "chosen")

# What people call the axes of kernels, of windows, and of the places at which these stand, along one to three.
KERNELS = (("taps",), ("kh", "kw"), ("kt", "kh", "kw"))
WINDOWS = (("window",), ("ph", "pw"), ("pt", "ph", "pw"))
PLACES = (("places",), ("rows", "columns"), ("frames", "rows", "columns"))


class Axes:
    """The names of all axes. `names` has one for each factor, `sizes` those of all, also of axes made by merges."""

    def __init__(self, solver: Solver, wanted: dict[str, list[str]], assumed: Assumed) -> None:
        self.solver, self.assumed = solver, assumed
        self.names: dict[Factor, str] = {}
        self.sizes: dict[str, int] = {}
        self.formulas: dict[str, str] = {}
        self.roles: dict[str, str] = {}  # what axes would be called if there were no others
        self.grown: set[str] = set()  # which are longer where inputs are
        self.fixed: set[str] = set()  # over which windows stride, or whose size matters elsewhere
        self._join_batches(wanted)
        for value in solver.values:
            self._vote(value, wanted)
        for pieces in solver.pieces.values():
            parts = [leaves(dim) for dim in pieces]
            if ["rotated"] in [[_best(each)[0] for each in part] for part in parts]:
                for (factor,) in (part for part in parts if len(part) == 1 and not part[0].names):
                    factor.names["unrotated"] += 1
        self._join_by_role()
        factors = [factor for value in solver.values for dim in solver.dims[value] for factor in leaves(dim)]
        factors += [factor for dims in solver.pieces.values() for dim in dims for factor in leaves(dim)]
        best: dict[str, int] = {}  # the most votes that an axis has for a name
        for factor in factors:
            name, votes = _best(factor)
            best[name] = max(votes, best.get(name, 0))
        owners = self._owners()
        for factor in sorted(dict.fromkeys(factors), key=lambda each: -best[_best(each)[0]]):
            _, most = _best(factor)
            # A name with a number is better than one that says something else. People do call a second sequence source.
            likely = [n for n, votes in factor.names.most_common() if 3 * votes >= most or n == "source"] or ["part"]
            owned = [name for owner in owners.get(factor, ()) for name in _owned(likely[0], owner)]
            other = likely[0] == "batch" and self.sizes.get("batch") == factor.size
            owned = ["other_batch"] if other else owned
            self.names[factor] = self.free([*likely, *owned], factor.size)
            if other:
                self.formulas[self.names[factor]] = "batch"
            self.roles[self.names[factor]] = likely[0]
        for value in solver.values:
            if value.op in ("conv", "patches"):
                self._derive(value)
            elif value.op == "take" and value.args["ids"].constant is not None:  # places of as many as there are
                self.fixed.update(self.of(value.args["x"])[value.args["dim"]])
        self._of_sizes()
        for value in solver.values:
            if value.op == "concat":
                self._sum_up(value)
        for value in solver.values:
            if value.op == "slice":
                self._rest(value)

    def copy(self) -> Axes:
        """The same names, to which a file adds its own."""
        made = copy(self)
        made.sizes, made.formulas, made.fixed = dict(self.sizes), dict(self.formulas), set(self.fixed)
        return made

    def free(self, wanted: list[str], size: int) -> str:
        """The first of some names that is free, or the first with a number; an axis of this size has it from now on."""
        names = chain(wanted, numbered(wanted[0]))
        name = next(each for each in names if each not in self.sizes and each not in WORDS)
        self.sizes[name] = size
        return name

    def follow(self, name: str, formula: str) -> None:
        """Let the size of an axis be a formula of others, if it has none, and none of these follows it."""
        if name in self.formulas:
            return
        waiting = re.findall(r"[A-Za-z]\w*", formula)
        while waiting:
            each = waiting.pop()
            if each == name:
                return
            waiting += re.findall(r"[A-Za-z]\w*", self.formulas.get(each, ""))
        self.formulas[name] = formula

    def _of_sizes(self) -> None:
        """Axes whose size follows that of an input's: a sequence without its last position, two batches together."""
        free: dict[str, tuple[int, int]] = {}
        for value in self.solver.values:
            for axes, size, other in zip(self.of(value), value.shape, value.twin or value.shape, strict=True):
                if size != other:
                    self.grown.update(axes)
                if value.op == "input" and size != other and len(axes) == 1:
                    free[axes[0]] = size, other
        for value in self.solver.values:
            for axes, size, other in zip(self.of(value), value.shape, value.twin or value.shape, strict=True):
                if len(axes) != 1 or size == other or axes[0] in free or axes[0] in self.formulas:
                    continue
                formulas = [name for name, sizes in free.items() if sizes == (size, other)]
                formulas += [  # no two inputs grow by the same ratio
                    f"{size // own} * {name}" if size > own else f"{name} / {own // size}"
                    for name, (own, longer) in free.items()
                    if max(own, size) % min(own, size) == 0 and size * longer == other * own
                ]
                formulas += [
                    f"{name} {'+' if size > own else '-'} {abs(size - own)}"
                    for name, (own, longer) in free.items()
                    if other - size == longer - own
                ]
                if formulas:
                    self.formulas[axes[0]] = formulas[0]
                else:
                    self.fixed.update(name for name in free if name != "batch")

    def _rest(self, value: Value) -> None:
        """All but the first places are as many less, of what grows; or what else was put together there."""
        x, dim = value.args["x"], value.args["dim"]
        (whole, part), shapes = (self.of(each)[dim] for each in (x, value)), (x.shape[dim], value.shape[dim])
        twins = [(each.twin or each.shape)[dim] for each in (x, value)]
        grows = twins[0] != shapes[0] and twins[0] - twins[1] == shapes[0] - shapes[1]
        if not len(whole) == len(part) == 1 or part[0] in self.formulas or whole == part:
            return
        first, *rest = self.formulas.get(whole[0], "").split(" + ")
        if rest and self.sizes.get(first) == value.args["start"] == shapes[0] - shapes[1]:
            self.follow(part[0], " + ".join(rest))
        elif grows:
            self.follow(part[0], f"{whole[0]} - {shapes[0] - shapes[1]}")

    def _derive(self, value: Value) -> None:
        """Places of windows are the axis over which they stride, divided, where that is so."""
        places = self.of(value)
        image = self.of(value.args["x"])
        first = len(image) - len(value.args["stride"])
        for i, stride in enumerate(value.args["stride"], first):
            old, new = image[i], places[i]
            if len(old) != 1 or old == new:
                continue
            self.fixed.add(old[0])
            (own,) = new if len(new) == 1 else ("",)
            if own and self.sizes[old[0]] == stride * self.sizes[own]:
                by = str(stride)
                if value.op == "conv" and lie_side_by_side(value):
                    (by,) = self.of(value.args["kernel"])[i]
                if self.formulas.get(own) == f"{old[0]} / {stride}":
                    del self.formulas[own]  # which a window says better
                self.follow(own, f"{old[0]} / {by}")

    def _sum_up(self, value: Value) -> None:
        """The size of a concatenation is the sum of what is put together."""
        axes, pieces = self.of(value)[value.args["dim"]], self.pieces(value)
        given = {name for each in self.solver.values if each.op == "input" for dim in self.of(each) for name in dim}
        follow = {word for each in pieces for name in each for word in self.formulas.get(name, "").split()}
        if follow & {*axes}:
            return
        known = {*axes, *given}  # a file at another size of an input would be valid, whatever else follows it
        if len(axes) == 1 and axes[0] not in self.formulas and not any(known & {*each} for each in pieces):
            terms = Counter(" * ".join(each) for each in pieces)
            self.follow(axes[0], " + ".join(f"{n} * {each}" if n > 1 else each for each, n in terms.items()))

    def related(self) -> dict[str, str]:
        """Sizes that people write as what they are of others: widths that are several times another one, and heads that
        a width is divided into.
        """
        found = dict(self.formulas)
        for name, size in self.sizes.items():
            role = self.roles.get(name)
            for one in (role, "embed"):
                if name in found or role not in WIDTHS or one is None or one == name or one in found:
                    continue
                if one in self.sizes and size % self.sizes[one] == 0:
                    times = size // self.sizes[one]
                    found[name] = f"{times} * {one}" if times > 1 else one
        heads = [name for name in ("groups", "heads") if name in self.sizes]
        width = prod(self.sizes[name] for name in ("key", *heads) if name in self.sizes)
        if heads and "key" in self.sizes and self.sizes.get("embed") == width and not {"key", "embed"} & {*found}:
            found["key"] = "embed / " + (f"({' * '.join(heads)})" if len(heads) > 1 else heads[0])
        return found

    def sized(self, name: str) -> str:
        """The axis whose size another one always has; itself, if there is none."""
        formula = self.formulas.get(name, "")
        return formula if formula in self.sizes else name

    def of(self, value: Value) -> list[tuple[str, ...]]:
        """The names of a value's axes, by dimension."""
        return [tuple(self.names[each] for each in axes) for axes in self.solver.axes(value)]

    def pieces(self, value: Value) -> list[tuple[str, ...]]:
        """The names of what a concatenation puts together."""
        return [tuple(self.names[each] for each in leaves(dim)) for dim in self.solver.pieces[value]]

    # ------------------------------------------------------------ votes

    def _vote(self, value: Value, wanted: dict[str, list[str]]) -> None:
        dims = [leaves(dim) for dim in self.solver.dims[value]]

        def vote(dim: list[Factor], weight: int, *names: str) -> None:
            if len(dim) == len(names):
                for factor, name in zip(dim, names, strict=True):
                    factor.names[name] += weight

        args = value.args
        if value.op == "input":
            self._vote_input(value, dims, vote, wanted.get(args["name"]))
        elif value.op == "embedding":
            table = [leaves(dim) for dim in self.solver.dims[args["table"]]]
            ids = args["ids"]
            if base(ids).op == "top":  # a bias of each expert
                vote(table[0], 120, "experts")
                return
            if ids.constant is not None:
                vote(table[0], 100, "positions" if number(ids) is None else "types")
            elif "pos" in str(args["table"].args.get("names", "")):
                vote(table[0], 100, "positions")
            else:
                vote(table[0], 90, "classes" if ids.rank == 1 and base(ids).op == "input" else "vocab")
            vote(table[-1], 60, "embed")
        elif value.op == "norm":
            vote(dims[args["dims"][-1]], 20, "embed")
        elif value.op == "attend":
            q, k, v = ([leaves(dim) for dim in self.solver.dims[args[name]]] for name in "qkv")
            vote(q[-1], 200, "key")
            vote(v[-1], 20, "value")
            if value.rank == 4:
                vote(q[1], 200, "heads")
                vote(q[1], 200, "groups", "heads")
            vote(q[-2], 20, "seq")
            vote(k[-2], 10, "source")
        elif value.op == "rope":
            vote(dims[-1], 30, "rotated")
        elif value.op in ("cross_entropy", "token_nll"):
            x = [leaves(dim) for dim in self.solver.dims[args["x"]]]
            vote(x[1] if len(x) > 1 else x[0], 50, "classes")
            for dim in x[2:]:
                vote(dim, 30, "seq")
        elif value.op == "conv":
            kernel = [leaves(dim) for dim in self.solver.dims[args["kernel"]]]
            for dim, name in zip(kernel[2:], KERNELS[value.rank - 3], strict=True):
                vote(dim, 80, name)
            for dim, name in zip(dims[2:], PLACES[value.rank - 3], strict=True):
                vote(dim, 10, name)
            vote(kernel[0], 5, "filters" if args["groups"] == 1 else "channels")
            if value.rank == 3:
                for dim, name in zip(self.solver.dims[args["x"]][1:], ("channels", "frames"), strict=True):
                    vote(leaves(dim), 160 if base(args["x"]).op == "input" else 1, name)
        elif value.op == "concat":
            for dim in self.solver.pieces[value]:
                if [each.size for each in leaves(dim)] == [1]:
                    vote(leaves(dim), 1, "one")
        elif value.op == "pointwise" and args["function"] == "cos":
            vote(dims[-1], 2, "frequencies")
        elif value.op == "enlarge":
            for dim in self.solver.dims[args["x"]][3::2]:
                vote(leaves(dim), 1, "copies")
            for dim, name in zip(dims[2:], ("height", "width"), strict=False):
                vote(dim, 1, name)
        elif value.op == "slice" and base(args["x"]).op == "parameter":
            vote(leaves(self.solver.dims[args["x"]][args["dim"]]), 50, "positions")
        elif value.op == "patches":
            count = len(args["size"])
            for dim, name in zip(dims[-count:], WINDOWS[count - 1], strict=True):
                vote(dim, 80, name)
            for dim, name in zip(dims[-2 * count : -count], PLACES[count - 1], strict=True):
                vote(dim, 8, name)
        elif value.op == "routed":
            table = [leaves(dim) for dim in self.solver.dims[args["w"]]]
            vote(table[0], 120, "experts")
            vote(table[0], 120, "expert_groups", MEMBERS)
            for letter, dim in zip(args["letters"][1:], table[1:], strict=True):
                vote(dim, 8 if letter in args["out"] else 5, "ffn" if letter in args["out"] else "embed")
                vote(dim, 8, "ffn", "half")
        elif value.op == "ctc_loss":
            x, targets = ([leaves(dim) for dim in self.solver.dims[args[name]]] for name in ("log_p", "targets"))
            for dim, weight, name in ((x[0], 20, "frames"), (x[2], 50, "classes"), (targets[1], 100, "labels")):
                vote(dim, weight, name)
        elif value.op == "linear_scan":
            vote(dims[-1], 40, "states")
            if value.rank == 5:  # [batch, seq, heads, head, states], as in Mamba-2
                vote(dims[2], 200, "heads")
                vote(dims[2], 200, "groups", "heads")
                vote(dims[3], 40, "head")
        elif value.op == "recurrent":
            vote(dims[-1], 15, "hidden")
        elif value.op == "select" and is_op(args["x"], "input") and args["x"].dtype == torch.int64:
            (field,) = leaves(self.solver.dims[args["x"]][args["dim"]]) or (None,)
            if field is not None:
                field.names.pop("seq", None)
                field.names["fields"] += 150
        elif value.op == "top":
            vote(dims[args["dim"]], 70, "chosen")
        elif value.op == "einsum":
            self._vote_product(value, vote)

    def _vote_input(self, value: Value, dims: list[list[Factor]], vote: object, wanted: list[str] | None) -> None:
        assert callable(vote)
        ids = value.dtype == torch.int64
        usual: list[list[str]] = {
            2: [["batch"], ["seq" if ids else "features"]],
            3: [["batch"], ["seq"], ["features"]],
            4: [["batch"], ["channels"], ["height"], ["width"]],
        }.get(len(dims), [["batch"], *([] for _ in dims[1:])])
        names = [name.split("*") for name in wanted] if wanted is not None else usual
        weight = 2000 if wanted is not None else 150
        for i, (dim, each) in enumerate(zip(dims, names, strict=False)):
            vote(dim, 1000 if i == 0 and wanted is None else weight, *each)

    def _vote_product(self, value: Value, vote: object) -> None:
        assert callable(vote)
        for names, x in zip(value.args["letters"], value.args["xs"], strict=True):
            weight = base(x)
            if weight.op not in ("parameter", "part"):
                continue
            inner = INNER.search(weight.source.args["names"][0].lower())
            if weight.rank > 3:  # a convolution of single places
                for dim in self.solver.dims[x]:
                    vote(leaves(dim), 5, "filters")
                continue
            for letter, dim in zip(names, self.solver.dims[x], strict=True):
                if letter in value.args["out"]:
                    vote(leaves(dim), 5 if inner else 4, "ffn" if inner else "hidden")
                else:
                    vote(leaves(dim), 3, "embed")

    def _join_batches(self, wanted: dict[str, list[str]]) -> None:
        """Inputs that have as many examples have one batch, also where each of one meets all of another."""
        inputs = [value for value in self.solver.values if value.op == "input" and value.rank]
        inputs = [value for value in inputs if wanted.get(value.args["name"], ["batch"])[0] == "batch"]
        for one, other in combinations(inputs, 2):
            lengths = [(each.shape[0], (each.twin or each.shape)[0]) for each in (one, other)]
            if lengths[0] == lengths[1]:
                self.solver.unify(self.solver.dims[one][0], self.solver.dims[other][0], other)

    def _join_by_role(self) -> None:
        """Axes that people call one: those of a role, such as the heads of all layers, and those of values and of keys,
        of classes and of the vocabulary. They are joined if they have the same size, and grow alike, and no value has
        both, which changes no meaning.
        """
        beside: dict[Factor, set[Factor]] = {}
        larger: dict[Factor, int] = {}
        for value in self.solver.values:
            dims = self.solver.axes(value)
            every = list(dict.fromkeys(each for dim in dims for each in dim))
            for dim, size in zip(dims, value.twin or value.shape, strict=True):
                larger.update(dict.fromkeys(dim, size) if len(dim) == 1 else {})
            for each in every:
                beside.setdefault(each, set()).update(every)
        roles: dict[str, list[Factor]] = {}
        for each in beside:
            roles.setdefault(_best(each)[0], []).append(each)
        same = ((name, name) for name in roles if name not in ALONE) if self.assumed.joined else ()
        for one, other in (*same, *SYNONYMS):
            for a in roles.get(one, []):
                if found(a) is not a:
                    continue
                for b in roles.get(other, []):
                    if b is a or found(b) is not b or a.size != b.size or b in beside[a]:
                        continue
                    if larger.get(a, a.size) != larger.get(b, b.size):
                        continue
                    self.solver.unify([a], [b], self.solver.values[0])
                    b.names[other] += sum(b.names.values())
                    beside[b] |= beside[a]
                    for each in [*beside[b]]:
                        beside[each].add(b)
                    break

    def _owners(self) -> dict[Factor, list[str]]:
        """The modules that most of an axis's parameters are in, innermost first, without those that all parameters are
        in; else the name that they all have; of an axis that no parameter has, the input that has it.
        """
        paths: dict[Factor, list[list[str]]] = {}
        for value in self.solver.values:
            if value.op in ("parameter", "part"):
                whole = value.source.args["names"][0].split(".")
                path = [one for one in whole[:-1] if not one.isdigit() and one not in LISTS]
                for each in (each for dim in self.solver.axes(value) for each in dim):
                    paths.setdefault(each, []).append(path)
        every = [path for each in paths.values() for path in each]
        owners: dict[Factor, list[str]] = {}
        for value in self.solver.values:
            for each in (each for dim in self.solver.axes(value) for each in dim):
                if value.op == "input" and each not in paths:
                    owners.setdefault(each, [value.args["name"]])
        for factor, its in paths.items():
            for depth in range(1, max(map(len, its)) + 1):
                prefix, count = Counter(tuple(path[:depth]) for path in its if len(path) >= depth).most_common(1)[0]
                if 3 * count < 2 * len(its):
                    break
                if any(tuple(path[:depth]) != prefix for path in every) and valid(prefix[-1]) == prefix[-1]:
                    owners.setdefault(factor, []).insert(0, valid(prefix[-1].lower().removesuffix("_model")))
            last = {path[-1] for path in its if path}
            if len(last) == 1 and factor not in owners and any(path[-1:] != [*last] for path in every):
                owners[factor] = [valid(each.lower()) for each in last]
        return owners


def _owned(role: str, owner: str) -> list[str]:
    """What an axis of a role is called that parameters of a module have, if others have the role as well."""
    if not owner:
        return []
    if role.removesuffix("s") in owner:
        return [owner]
    return [f"{owner}_{role}"] if len(owner) <= 10 else []


def _best(factor: Factor) -> tuple[str, int]:
    return factor.names.most_common(1)[0] if factor.names else ("part", 0)


def lie_side_by_side(value: Value) -> bool:
    """Whether the windows of a convolution lie side by side."""
    sizes, stride = value.args["kernel"].shape[2:], value.args["stride"]
    apart = all(not any(each) for each in value.args["padding"]) and {*value.args["dilation"]} == {1}
    return apart and tuple(sizes) == tuple(stride) and min(sizes) > 1
