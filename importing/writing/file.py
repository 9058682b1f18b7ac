"""What a file has so far: axes, constants, blocks, and what parameters are called."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import combinations
from math import prod

import torch

from partita.importing.axes import MEMBERS, Axes
from partita.importing.factors import place_of
from partita.importing.graph import Value
from partita.importing.rows import stored
from partita.importing.said import call, number_text
from partita.importing.writing import initial
from partita.importing.writing.blocks import ARROWS, Blocks, Form
from partita.importing.writing.body import NESTED, Body
from partita.importing.writing.known import LINE, SHORT, Expressions
from partita.importing.writing.names import called, numbered, valid
from partita.importing.writing.tree import VIEWS, Tree, base

Names = tuple[str, ...]
TABLES = "tables.safetensors"  # beside the file, with what no formula says
OWN = ("batch_norm", "group_norm")  # blocks of the importer's, which are called over many axes
LAYER = re.compile(r"_l\d+(?:_reverse)?$")  # behind the names of what a layer of torch's LSTM or GRU has
FAR = 4  # how many operations behind a part of a weight a value may be that it is called after


def _text(head: str, inner: Body) -> str:
    return f"({head}) {{\n{inner.text}\n}}"


class File:
    """What is written so far, of a graph whose axes are solved. `state` is what the module saves."""

    def __init__(self, axes: Axes, tree: Tree, state: dict[str, torch.Tensor], forms: dict[str, list[Form]]) -> None:
        self.solver, self.tree, self.state = axes.solver, tree, state
        self.axes, self.constants = axes.copy(), dict[str, float]()
        self.expressions = Expressions()
        self.names = called(tree)
        self.called = {value: names[0] for value, names in self.names.items()}
        self.inputs = {value.args["name"] for value in axes.solver.values if value.op == "input"}
        self.blocks = Blocks(self.axes.sizes, self.constants, forms, not axes.assumed.joined)
        self.seconds: dict[str, str] = {}
        self.merges: dict[Names, str] = {}
        self.units: list[str] = []
        self.splits: dict[tuple[str, int], str] = {}
        self.saved_constants: dict[str, Value] = {}
        self.declared: set[str] = set()  # names of parameters, which no block has
        self.tables: dict[str, Value] = {}
        self.yielding: set[Value] = set()  # weights whose names are those of what they make
        self.written: set[Value] = set()  # constants that are tables

    # ------------------------------------------------------------ axes and constants

    def without_axes(self, text: str) -> str:
        """A text in which all axes have names of the same length, and all numbers, so that blocks that differ in these
        have the same lines.
        """
        text = re.sub(rf"\b({'|'.join(OWN)})\w*\(", " " * 40, ARROWS.sub(r"\1", text))
        text = re.sub(r"size\(\w+\)|(?<!\w)\d[\d_.e-]*", "8", text)
        named = ((self.axes.sizes, "axis"), (self.constants, "8"))
        return re.sub(r"\w+", lambda word: next((each for names, each in named if word[0] in names), word[0]), text)

    def another(self, name: str) -> str:
        """Another axis of the same size."""
        if name not in self.seconds:
            self.seconds[name] = self.axes.free(
                [f"{name}_out" if name == "embed" else f"other_{name}"], self.axes.sizes[name]
            )
            self.axes.formulas[self.seconds[name]] = name
        return self.seconds[name]

    def apart(self, names: Names, taken: Collection[str]) -> Names:
        """Names of axes, where one that is taken, or is there already, has another name."""
        made: list[str] = []
        for name in names:
            while name in taken or name in made:
                name = self.another(name)
            made.append(name)
        return tuple(made)

    def distinct(self, dims: Sequence[Names]) -> list[Names]:
        """Names of dimensions, where an axis that is there already has another name."""
        made: list[Names] = []
        for own in dims:
            made.append(self.apart(own, {name for each in made for name in each}))
        return made

    def merged(self, names: Names, wanted: str = "places") -> str:
        """The axis that several are merged into; one is itself, and none an axis of size 1."""
        if len(names) == 1:
            return names[0]
        if names not in self.merges:
            size = prod(self.axes.sizes[name] for name in names)
            wanted = "experts" if MEMBERS in names else wanted
            if wanted in self.axes.formulas or self.axes.sizes.get(wanted) != size or wanted == "places":
                wanted = self.axes.free([wanted if len(names) > 1 else "one"], size)
                self.axes.formulas[wanted] = " * ".join(names)
            self.merges[names] = wanted
        return self.merges[names]

    def unit(self, number: int) -> str:
        """One of several axes of size 1."""
        while len(self.units) <= number:
            self.units.append(self.axes.free(["one"], 1))
        return self.units[number]

    def computed(self, name: str, formula: str, size: int) -> str:
        """An axis whose size others say."""
        key = (formula,)
        if key not in self.merges:
            self.merges[key] = self.axes.free([name], size)
            self.axes.formulas[self.merges[key]] = formula
        return self.merges[key]

    def parts(self, name: str, wanted: Sequence[tuple[str, int]]) -> Names:
        """The axes that an axis is split into."""
        for part, size in wanted:  # which are nowhere but between the split and a merge
            if (part, size) not in self.splits:
                self.splits[part, size] = self.axes.free([part], size)
        names = tuple(self.splits[each] for each in wanted)
        self.axes.follow(names[-1], " / ".join([name, *names[:-1]]))
        return names

    def is_bound(self, value: Value, text: str) -> bool:
        """Whether a formula of constants has a name: one that is long, or that several read and that is not short."""
        if value.constant is None or value.op in VIEWS:
            return False
        several = sum(base(each) is value for user in self.solver.users[value] for each in user.inputs) > 1
        return len(self.without_axes(text)) > (2 * SHORT if several else LINE)

    def constant(self, name: str, value: float) -> str:
        """The name of a constant with this value, such as `eps`."""
        for known, its in self.constants.items():
            if its == value and re.fullmatch(rf"{name}(_\d+)?", known):
                return known
        taken = (self.constants, self.axes.sizes, self.inputs)
        chosen = next(each for each in numbered(name) if not any(each in names for names in taken))
        self.constants[chosen] = value
        return chosen

    def saved(self, value: Value) -> Value | None:
        """A constant that the module saves with its parameters, as a buffer, if one call alone reads it."""
        name = value.args.get("name", "")
        same = [each for each in self.solver.values if each.op == "constant" and each.args.get("name") == name]
        calls = {self.tree.home[reader] for each in same for reader in self.tree.readers(each)}
        if name not in self.state or not value.is_float or len(calls) > 1:
            return None
        if name not in self.saved_constants:
            made = Value(
                "buffer", {"names": [name], "data": value.constant, "trained": False}, value.shape, value.dtype
            )
            self.saved_constants[name] = made
        return self.saved_constants[name]

    def table(self, value: Value, elements: torch.Tensor) -> Value:
        """A constant that no formula says, whose elements are in a file beside."""
        elements = elements if elements.is_floating_point() else elements.long()
        elements = elements.reshape([each.size for dim in self.solver.axes(value) for each in dim]).contiguous()
        usual = valid(str(value.args.get("name", "")).rpartition(".")[2] or "table")
        self.written.add(value)
        kept = {name: each.args["data"] for name, each in self.tables.items()}
        name = next(n for n in numbered(usual) if n not in kept or torch.equal(kept[n], elements))
        args = {"names": [name], "data": elements, "trained": False}
        return self.tables.setdefault(name, Value("table", args, value.shape, elements.dtype))

    # ------------------------------------------------------------ parameters

    def initial(self, value: Value) -> str:
        """How a parameter begins: as those at the same place of other layers do."""
        if value.op == "table":
            return f'file("{TABLES}", "{value.args["names"][0]}")'
        key, fans = place_of(value.source), self._fans(value)
        same = (v for v in self.solver.values if v.op == "parameter" and place_of(v) == key)
        alike = [v.args["data"] for v in same if v is value.source or self._fans(v) == fans]
        every = torch.cat([stored(each).flatten().double() for each in alike or [value.source.args["data"]]])
        if every.device.type == "meta":
            return initial.constant(0.0)
        first = float(every[0])
        short = float(f"{first:.6g}")
        drawn = value.op != "buffer" and not bool((every == every.round()).all())
        if drawn and every.numel() <= initial.FEW and (beside := self._weight_beside(value)) is not None:
            return self.initial(beside)  # as far as so few tell
        if every.numel() == 1 and value.op != "buffer" and torch.tensor(short).float() != torch.tensor(first).float():
            return f"normal({number_text(float(f'{abs(first):.1g}'))})"  # no number that one would have written
        if bool((every == every[0]).all()):
            return initial.constant(short if torch.tensor(short).float() == torch.tensor(first).float() else first)
        if value.op == "buffer":
            return "zeros()"  # what it is comes with the weights
        return initial.drawn(every, fans, self._variances(value), len(alike))

    def _weight_beside(self, bias: Value) -> Value | None:
        """The weight of which a parameter is the bias, if the weight's distribution follows a size, as torch's do."""
        module, _, leaf = bias.source.args["names"][0].rpartition(".")
        weights = (v for v in self.solver.values if v.op == "parameter" and v.args["names"][0] == f"{module}.weight")
        found = next(weights, None) if leaf == "bias" else None
        return found if found is not None and self.initial(found).startswith("uniform(1 / sqrt(") else None

    def _variances(self, value: Value) -> dict[str, float]:
        """Variances that distributions of a parameter may have beside those of its fans: of both ends of a matrix, of
        what it makes, and of some of its axes.
        """
        whole = value.source
        if whole.rank < 2:
            return {}
        sizes = self.axes.sizes
        text = {dim: " * ".join(f"size({own})" for own in names) for dim, names in enumerate(self.axes.of(value))}
        rows, columns = text[0] or "1", " * ".join(filter(None, (text[dim] for dim in range(1, whole.rank)))) or "1"
        parts = whole.shape[0] // prod(sizes[own] for own in self.axes.of(value)[0]) if value.op == "part" else 1
        rows = f"{parts} * {rows}" if parts > 1 else rows
        made, read = whole.shape[0] * prod(whole.shape[2:]), prod(whole.shape[1:])
        beside = " * ".join(filter(None, [rows, *(text[dim] for dim in range(2, whole.rank))]))
        found = {f"sqrt(2 / ({rows} + {columns}))": 2 / (whole.shape[0] + read)} if whole.rank == 2 else {}
        found[f"sqrt(2 / ({beside}))"] = 2 / made
        names = [own for dim in self.axes.of(value) for own in dim]
        for count in (1, 2):
            for some in combinations(names, count):
                product = " * ".join(f"size({own})" for own in some)
                found.setdefault(f"1 / sqrt({product})", 1 / prod(sizes[own] for own in some))
        return found

    def _fans(self, value: Value) -> dict[str, int]:
        """Sizes that a bound of a parameter's distribution may follow: of what its module sums over, or has hidden."""
        name = value.source.args["names"][0]
        path, _, leaf = name.rpartition(".")
        if not leaf.startswith(("weight", "bias")):  # of none of torch's modules
            return {}
        layer = LAYER.findall(leaf)
        beside = []
        for each in self.solver.values:
            if each.op in ("parameter", "part"):
                module, _, other = each.source.args["names"][0].rpartition(".")
                if module == path and LAYER.findall(other) == layer:
                    beside.append(each)
        found: dict[str, int] = {}
        recurrent = [each for each in beside if "_hh" in each.source.args["names"][0]]  # which says how all begin
        for each in recurrent or beside:
            if each.rank > 1:
                names = [own for dim in self.axes.of(each)[1:] for own in dim]
                text = " * ".join(f"size({own})" for own in names) or "1"
                found[text] = prod(self.axes.sizes[own] for own in names)
        return found

    def tabled(self, value: Value, axes: Sequence[str]) -> str:
        """A parameter that begins with a table, of these axes; nothing if it does not."""
        key = place_of(value.source)
        alike = [v.args for v in self.solver.values if v.op == "parameter" and place_of(v) == key]
        data = [each["data"] for each in alike]
        if value.op != "parameter" or any(stored(each) is not each for each in data):
            return ""
        whole = {v: v.args["data"].numel() for v in self.solver.values if v.op == "parameter"}
        frozen = sum(count for v, count in whole.items() if not v.args["trained"]) / sum(whole.values())
        if not initial.is_table(data, bool(value.args["trained"]), frozen):
            return ""
        names = [name for dim in self.axes.of(value) for name in dim]
        elements = data[0].detach().reshape([self.axes.sizes[name] for name in names])
        if {*names} != {*axes}:
            return ""
        name = value.args["names"][0].removesuffix(".weight").rpartition(".")[2]
        elements = elements.permute([names.index(each) for each in axes]).float().contiguous()
        usual = next(
            n for n in numbered(name) if n not in self.tables or torch.equal(self.tables[n].args["data"], elements)
        )
        args = {"names": [usual], "data": elements, "trained": False}
        made = self.tables.setdefault(usual, Value("table", args, tuple(elements.shape), elements.dtype))
        return self.initial(made)

    def part_name(self, part: Value, whole: str) -> str:
        """What a part of a weight is called: after the value that is made with it, if no other part is."""
        bias, name = "_bias" in whole, self._made_with(part, whole)
        others = [v for v in self._parts_of(part) if v.args["start"] != part.args["start"]]
        if not name or any(self._made_with(each, whole) == name for each in others):
            return f"{whole}_{part.args['number']}"
        if len(name) == 1:
            return f"{'b' if bias else 'w'}{name}"
        return f"{name}_bias" if bias else f"w_{name}"

    def _made_with(self, part: Value, whole: str) -> str:
        if name := self._gated(part) or self._attended(part) or self._worded(part, whole):
            return name
        users = self.tree.readers(part)
        for _ in range(FAR):
            name = next((self.called[user] for user in users if user in self.called), "")
            if name or len({*users}) != 1 or (users[0].op == "pointwise" and len(users[0].inputs) > 2):
                break
            users = self.tree.readers(users[0])
        return name

    def _parts_of(self, part: Value) -> list[Value]:
        """The parts of the weight of which a value is one."""
        return [each for each in self.tree.users[part.source] if each.op == "part"]

    def _worded(self, part: Value, whole: str) -> str:
        """Which of the words in a weight's name a part is, if there are as many: `gate` of `gate_up_proj`."""
        words = [word for word in whole.split("_") if word not in ("proj", "weight", "bias", "in", "linear", "fc")]
        parts = {each.args["number"] for each in self._parts_of(part)}
        number: int = part.args["number"]
        said = all(len(word) > 1 or word in "qkv" for word in words)
        return words[number] if said and len(words) == len(parts) else ""

    def _attended(self, part: Value) -> str:
        """`q`, `k` or `v`, where the one thing that is made of a part is that of an attention."""
        value = part
        for _ in range(FAR):
            users = self.tree.readers(value)
            if len(users) != 1 or users[0].op == "concat":
                return ""
            if users[0].op == "attend":
                return next(name for name in "qkv" if base(users[0].args[name]) is value)
            value = users[0]
        return ""

    def _gated(self, part: Value) -> str:
        """What people call a part of a gated unit: the `gate`, of which a function is taken, or `up`."""
        users = self.tree.readers(part)
        if len(users) != 1 or users[0].op != "routed":
            return ""
        (reader,) = self.tree.readers(users[0])[:1] or [part]
        if reader.op == "pointwise" and len(reader.inputs) == 1:
            return "gate"
        product = reader.op == "pointwise" and reader.args["function"] == "multiply"
        return "up" if product and any(each.op == "pointwise" for each in reader.inputs) else ""

    def home_of(self, value: Value, body: Body) -> Body:
        """The body that declares a parameter: the innermost with all of its readers, in all calls of its modules."""
        readers = self.tree.readers(value)
        for each in body.around():
            inside = {made for scope in each.scopes for call in self.tree.same(scope) for made in call.values}
            if each.kind not in NESTED or (each.kind == "repeat" and all(reader in inside for reader in readers)):
                return each
        return body

    def has_calls(self, value: Value, op: str, body: Body) -> bool:
        """Whether several operations of a kind read a parameter, or the same part of one, in a body."""
        same = [value]
        if value.op == "part":
            same = [each for each in self._parts_of(value) if each.args["start"] == value.args["start"]]
        inside = {made for scope in body.scopes for made in scope.values}
        return len({each for part in same for each in self.tree.readers(part) if each.op == op and each in inside}) > 1

    def summed(self, value: Value) -> tuple[int, ...]:
        """The dimensions of a weight that products sum over, if all that read it are products; those of a window, and
        the channels, if all are convolutions.
        """
        readers = self.tree.readers(value)
        if readers and all(each.op == "conv" and base(each.args["kernel"]) is value for each in readers):
            return (*range(2, value.rank), 1)
        if not readers or any(each.op != "einsum" or base(each.args["xs"][-1]) is not value for each in readers):
            return ()
        letters, out = readers[0].args["letters"][-1], readers[0].args["out"]
        if len(letters) != value.rank:
            return ()
        return tuple(i for i, letter in enumerate(letters) if letter not in out)

    def declared_for(self, value: Value, body: Body) -> bool:
        """Whether nothing has read a parameter yet but what is being written."""
        name = body.parameters[value].name
        return not any(re.search(rf"\b{name}\b", line) for line in body.lines)

    def is_called(self, name: str) -> bool:
        """Whether a block has a name, or one of its calls, which are numbered."""
        return name in self.blocks.texts or re.sub(r"_\d+$", "", name) in self.blocks.texts

    def block(self, wanted: str, given: Sequence[str], head: str, inner: Body, body: Body) -> str:
        """A call of a block with this text, with these values."""
        called, numbers = self.blocks.defined(wanted, _text(head, inner), self.declared, inner.scopes[0].path)
        name = called.partition("⟦")[0]
        before = body.calls.setdefault(name, [])
        before.append(inner)
        inner.name = name if len(before) == 1 else f"{name}_{len(before)}"
        return call(called, *given, *numbers)

    def shared(self, key: str, path: str, wanted: str, head: str, inner: Body, body: Body) -> tuple[str, ...] | None:
        """What the calls of a module share that is at a path: a name, and the axes that this call renames. None if it
        is no call of the first one's block. The `key` tells apart what one module has several of.
        """
        known = body.shared.get(key)
        if known is not None:
            pairs = self.blocks.renamed(self.blocks.texts[known[1]], _text(head, inner))
            return None if pairs is None else (known[0], *pairs)
        usual = valid(re.sub(r".*\.(?=\D)", "", path).replace(".", "_"))
        wanted = wanted if wanted != usual or wanted in self.blocks.texts else f"{wanted}_block"
        text = _text(head, inner)
        block = next(each for each in numbered(wanted) if self.blocks.texts.setdefault(each, text) == text)
        taken = (self.blocks.texts, self.axes.sizes)
        name = next(n for n in numbered(usual) if not any(n in names for names in taken) and body.is_free(n))
        body.shared[key] = name, block
        inner.name = name
        body.calls[name] = [inner]
        return (name,)
