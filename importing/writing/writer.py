"""Expressions of a body: what the language says for a value, in terms of what is bound there."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import chain
from math import exp, log
from typing import Any

import torch
from attrs import evolve

from partita.importing.graph import LEAVES, Value, number
from partita.importing.patterns.constants import band_of
from partita.importing.said import (
    AND,
    CALL,
    COMPARISON,
    NOT,
    PRODUCT,
    SAYINGS,
    SIGN,
    SUM,
    Said,
    call,
    listed,
    number_text,
)
from partita.importing.sizes import Sized
from partita.importing.writing.body import Body, Declared
from partita.importing.writing.file import File, Names
from partita.importing.writing.names import formula_name, numbered, owners, parameter_name

FEW = 8  # numbers that are written one by one
ODD = 6  # digits that nobody writes
CLOSE = 1e-12
LARGEST = 20.0  # logarithm of a number that one writes


class Writer:
    """Says values in a body. Called with a value, it returns its text with its axes."""

    def __init__(self, file: File, body: Body) -> None:
        self.file, self.body = file, body
        self.solver, self.axes = file.solver, file.axes

    def __call__(self, value: Any) -> Said:
        """What stands for a value, or what makes it."""
        if isinstance(value, Sized):
            return self._of_sizes(value)
        if not isinstance(value, Value):
            return Said(number_text(value), dtype="number")
        known = self.body.lookup(value)
        if known is not None:
            if not known.text.isidentifier():
                self.file.expressions.read(value)
            return known
        uniform = number(value)
        if uniform is not None and value.op not in LEAVES:
            return Said(number_text(uniform), ((),) * value.rank, dtype="number")
        if value.op in ("parameter", "part", "buffer"):
            return self._parameter(value)
        saying = SAYINGS.get(value.op)
        if saying is None:
            raise value.refuse(f"`{value.op}` is not in the language")
        with self.file.expressions.of(value) as written:
            said = saying(self, value)
            written(self.file.without_axes(said.text))
        return self._bound(value, said) if self.file.is_bound(value, said.text) else said

    def _bound(self, value: Value, said: Said) -> Said:
        """A formula of constants under a name, which stands before what is being written."""
        name = next(each for each in numbered(formula_name(value)) if self.body.is_free(each))
        self.body.lines.append(f"let {name} = {said.text}")
        self.body.bound[name] = value
        self.body.said[value] = evolve(said, text=name, binds=CALL)
        return self.body.said[value]

    def _of_sizes(self, number: Sized) -> Said:
        """A number that is computed of sizes."""
        inputs = {value.args["name"]: value for value in self.solver.values if value.op == "input"}
        names = [name for one, dim in number.dims for name in self.names_of(inputs[one])[dim]]
        text = " * ".join(f"size({name})" for name in names)
        binds = PRODUCT if len(names) > 1 else CALL
        if abs(number.power) == 0.5:
            text, binds = call("sqrt", text), CALL
        coefficient = number_text(float(f"{number.coefficient:.12g}"))
        if number.power < 0:
            return Said(f"{coefficient} / {text if binds == CALL else f'({text})'}", binds=PRODUCT, dtype="number")
        if number.offset:
            sign = "-" if number.offset < 0 else "+"
            return Said(f"{text} {sign} {number_text(abs(number.offset))}", binds=SUM, dtype="number")
        if coefficient == "1":
            return Said(text, binds=binds, dtype="number")
        return Said(f"{coefficient} * {text}", binds=PRODUCT, dtype="number")

    def formula(self, x: Any, said: Said, axes: Collection[str], divides: bool) -> Said:
        """A factor of a value with these axes, or what divides it, as what one would have written: a root of a size, a
        logarithm, the one size that there is.
        """
        found = number(x)
        if found is None or isinstance(x, Sized):
            return said
        fixed = [each for each in axes if each not in self.axes.grown]
        if divides and len(axes) == len(fixed) == 1 and found > 1 and self.size_of(fixed[0]) == found:
            return evolve(said, text=f"size({fixed[0]})")
        exact = abs(float(found))
        if len(f"{exact:.12g}".replace(".", "").strip("0")) < ODD:
            return said
        sign = "-" if found < 0 else ""
        for axis in fixed:
            root = self.size_of(axis) ** 0.5
            if abs(exact / root - 1) < CLOSE:
                return evolve(said, text=f"{sign}sqrt(size({axis}))")
            if abs(exact * root - 1) < CLOSE:
                return evolve(said, text=f"{sign}1 / sqrt(size({axis}))", binds=PRODUCT)
        power = round(exp(exact)) if exact < LARGEST else 0
        if power > 1 and abs(log(power) - exact) < CLOSE:
            return evolve(said, text=f"{sign}log({number_text(power)})", binds=SIGN if sign else CALL)
        return said

    # ------------------------------------------------------------ axes

    def names_of(self, value: Value) -> list[Names]:
        """The names of a value's axes, by dimension."""
        return self.axes.of(value)

    def size_of(self, name: str) -> int:
        """The size of an axis."""
        return self.axes.sizes[name]

    def pieces_of(self, value: Value) -> list[Names]:
        """The names of what a concatenation puts together."""
        return self.axes.pieces(value)

    def dtype_of(self, value: Value) -> str:
        """A value's dtype in the language; constants are computed in f64."""
        if value.dtype == torch.bool:
            return "bool"
        return ("f64" if value.constant is not None else "f32") if value.is_float else "i64"

    def second(self, name: str) -> str:
        """Another axis of the same size."""
        return self.file.another(name)

    def apart(self, names: Names, taken: Collection[str]) -> Names:
        """Names of axes, where one that is taken has another name."""
        return self.file.apart(names, taken)

    def merged_name(self, names: Sequence[str]) -> str:
        """The axis that several are merged into; one is itself."""
        return self.file.merged(tuple(names))

    def axes_named(self, dims: Sequence[Names], taken: Sequence[str]) -> list[str]:
        """One axis for each dimension, also for those that have several, or size 1."""
        made: list[str] = []
        for names in dims:
            units = (self.file.unit(i) for i in range(len(dims) + len(taken) + 1))
            one = next(unit for unit in units if unit not in (*taken, *made))
            made.append(self.merged_name(names) if names else one)
        return made

    def differ(self, value: Value, name: str) -> bool:
        """Whether an argument of an operation is another one in other calls of the same module's class."""
        scopes = self.file.tree.kinds[self.file.tree.home[value].call.kind]
        same = (each for scope in scopes for each in scope.values if each.op == value.op)
        return len({each.args[name] for each in same}) > 1

    def unit(self, number: int) -> str:
        """One of several axes of size 1."""
        return self.file.unit(number)

    def computed(self, name: str, formula: str, size: int) -> str:
        """An axis whose size others say."""
        return self.file.computed(name, formula, size)

    def parts_of(self, name: str, *parts: tuple[str, int]) -> Names:
        """The axes that an axis is split into, given what they are called and their sizes."""
        return self.file.parts(name, parts)

    def single(self, said: Said, dims: Sequence[int]) -> tuple[Said, list[str]]:
        """A value each of whose dimensions is one axis: several are merged, and one of size 1 is made."""
        found: list[str] = []
        for dim in dims:
            dim %= len(said.dims)
            names = said.dims[dim]
            if len(names) == 1:
                found.append(names[0])
                continue
            new = (
                self.merged_name(names) if names else self.file.unit(sum(unit in said.axes for unit in self.file.units))
            )
            if not names:
                said = self.expanded(said, [new])
            elif (before := _before_split(said, names)) is not None:
                text, new = before
                axes = tuple(name for name in said.axes if name not in names[1:])
                axes = tuple(new if name == names[0] else name for name in axes)
                said = evolve(said, text=text, axes=axes)
            elif set(names) & set(said.axes):
                whole = self.expanded(said, [name for name in names if name not in said.axes])
                first = next(i for i, name in enumerate(whole.axes) if name in names)
                rest = [name for name in whole.axes if name not in names]
                axes = (*rest[:first], new, *rest[first:])
                text = call("merge", whole.text, f"[{', '.join(names)}] -> {new}")
                said = evolve(whole, text=text, axes=axes, binds=CALL)
            said = evolve(said, dims=(*said.dims[:dim], (new,), *said.dims[dim + 1 :]))
            found.append(new)
        return said, found

    def split(self, said: Said, dim: int, names: Sequence[str]) -> Said:
        """A value whose dimension is one merged axis, split again."""
        dim %= len(said.dims)
        own = said.dims[dim]
        if tuple(names) == own or len(own) != 1 or len(names) == 1:
            return said
        (one,) = own
        dims = (*said.dims[:dim], tuple(names), *said.dims[dim + 1 :])
        if one not in said.axes:
            return evolve(said, dims=dims)
        if not names:
            axes = tuple(name for name in said.axes if name != one)
            return evolve(said, text=call("sum", said.text, over=one), dims=dims, axes=axes, binds=CALL)
        axes = tuple(each for name in said.axes for each in (names if name == one else [name]))
        return evolve(
            said, text=call("split", said.text, f"{one} -> [{', '.join(names)}]"), dims=dims, axes=axes, binds=CALL
        )

    def expanded(self, said: Said, names: Sequence[str]) -> Said:
        """A value with these axes as well."""
        if not names:
            return said
        if said.dtype == "number":
            text = f"zeros([{', '.join(names)}])"
            text = text if said.text == "0" else f"{text} + {said.text}"
            return evolve(said, text=text, axes=tuple(names), binds=CALL if said.text == "0" else SUM, dtype="f32")
        inner = re.fullmatch(r"expand\((\w+), \[?([\w, ]+)\]?\)", said.text)
        text, before = (inner[1], inner[2].split(", ")) if inner is not None else (said.text, [])
        text = call("expand", text, listed([*before, *names]))
        return evolve(said, text=text, axes=(*said.axes, *names), binds=CALL)

    def filled(self, said: Said, like: Value) -> Said:
        """A number as a value with all axes of another one."""
        dims = tuple(self.file.distinct(self.names_of(like)))
        return self.expanded(evolve(said, dims=dims), [name for names in dims for name in names])

    def aligned(self, value: Value, xs: Sequence[Any]) -> tuple[list[Said], tuple[Names, ...]]:
        """Operands of an elementwise function, with the same names for the same dimensions; one has all axes."""
        said = [self(x) for x in xs]
        dims: list[Names] = []
        for i in range(value.rank):
            own: Names = ()
            for x, text in zip(xs, said, strict=True):
                at = i - (value.rank - (x.rank if isinstance(x, Value) else 0))
                if at >= 0 and text.dims[at] and not own:
                    own = text.dims[at]
            taken = {name for each in dims for name in each}
            dims.append(self.apart(own or self.names_of(value)[i], taken))
        made = []
        for x, text in zip(xs, said, strict=True):
            if isinstance(x, Value):
                lacks = value.rank - x.rank
                wanted = [new if own else () for own, new in zip(text.dims, dims[lacks:], strict=True)]
                text = self.parameter_as(x, text, wanted)
            made.append(text)
        made = self.of_one_dtype(made)
        every = tuple(dict.fromkeys(name for text in made for name in text.axes))
        if not any(set(text.axes) == set(every) for text in made):
            largest = max(range(len(made)), key=lambda i: len(made[i].axes))
            smallest = min((i for i in range(len(made)) if made[i].axes), key=lambda i: len(made[i].axes))
            chosen = smallest if largest != smallest else largest
            made[chosen] = self.expanded(made[chosen], [name for name in every if name not in made[chosen].axes])
        return made, tuple(dims)

    def of_one_dtype(self, said: list[Said]) -> list[Said]:
        """Operands in one dtype: f64 is of tables alone, and integers meet floats as these."""
        floats = {each.dtype for each in said} & {"f32", "f64"}
        if len(floats) == 2:
            said, floats = [self.in_f32(each) for each in said], {"f32"}
        if not floats and any(each.dtype == "number" and "." in each.text for each in said):
            floats = {"f64"}
        if not floats:
            return said
        (wanted,) = floats
        return [
            evolve(each, text=call("cast", each.text, wanted), binds=CALL, dtype=wanted)
            if each.dtype == "i64"
            else each
            for each in said
        ]

    def in_f32(self, said: Said) -> Said:
        """A table in the dtype of what it is used with."""
        return (
            evolve(said, text=call("cast", said.text, "f32"), binds=CALL, dtype="f32") if said.dtype == "f64" else said
        )

    def times(self, one: Said, two: Said, dims: tuple[Names, ...]) -> Said:
        """An outer product."""
        one, two = self.of_one_dtype([one, two])
        every = tuple(dict.fromkeys((*one.axes, *two.axes)))
        if set(one.axes) != set(every) and set(two.axes) != set(every):
            two = self.expanded(two, [name for name in every if name not in two.axes])
        return Said(f"{one.within(PRODUCT)} * {two.within(PRODUCT)}", dims, every, PRODUCT)

    def lower(self, query: str, key: str, causal: bool, window: int | None) -> str:
        """Which keys a query may attend to, where queries and keys have different axes."""
        row, behind = f"expand(iota({query}), {key})", f"expand(iota({query}), {key}) - iota({key})"
        terms = [f"{row} >= iota({key})"] if causal else []
        if window is not None:
            terms.append(f"{behind} < {window}" if causal else f"abs({behind}) < {window}")
        return " and ".join(terms)

    # ------------------------------------------------------------ constants

    def constant(self, name: str, value: float) -> str:
        """The name of a constant of the file."""
        return self.file.constant(name, value)

    def table(self, value: Value) -> Said:
        """A constant that nothing makes: a formula of positions."""
        elements = value.constant
        names, long = self.names_of(value), [i for i, size in enumerate(value.shape) if size > 1]
        dims = tuple(names)
        if elements is not None and len(long) == 1 and len(names[long[0]]) == 1:
            (axis,) = names[long[0]]
            first, step = (value.args.get(name) for name in ("follows", "steps"))
            first, step = (each and self(each).within(PRODUCT if i else SUM) for i, each in enumerate((first, step)))
            text = _progression(elements.flatten(), axis, first or "", step or "") or _few(elements.flatten(), axis)
            if text is not None:
                return Said(text[0], dims, (axis,), text[1], text[2])
        if elements is not None and len(long) == 2 and all(len(names[i]) == 1 for i in long):
            said = self._band(value, elements.reshape([value.shape[i] for i in long]), long)
            if said is not None:
                return said
        if elements is None:
            raise value.refuse(f"a constant {list(value.shape)} of unknown formula")
        said = self._declare(self.file.saved(value) or self.file.table(value, elements), value)
        said = said.renamed(self.file.distinct(names))  # one table may stand for several constants
        if value.dtype == torch.bool:
            return evolve(said, text=f"{said.text} != 0", binds=COMPARISON, dtype="bool")
        return evolve(said, dtype="f32" if value.is_float else "i64")

    def _band(self, value: Value, table: torch.Tensor, long: Sequence[int]) -> Said | None:
        """A table of two numbers, one of which stands where rows are behind columns by so much."""
        numbers = sorted(set(table.flatten().tolist()))
        if len(numbers) != 2:
            return None
        high = table == numbers[1]
        band, other = band_of(high), band_of(~high)
        found = band if band is not None else other
        if found is None:
            return None
        dims = list(self.names_of(value))
        (row,), (column,) = dims[long[0]], dims[long[1]]
        if row == column:
            column = self.second(column)
            dims[long[1]] = (column,)
        text, axes = _behind(row, column, *found), (row, column)
        inside, outside = (float(numbers[i]) for i in ((1, 0) if band is not None else (0, 1)))
        if table.dtype == torch.bool:
            text, binds = (text, AND) if band is not None else (f"not ({text})", NOT)
            return Said(text, tuple(dims), axes, binds, "bool")
        dtype = self.dtype_of(value)
        text = call("cast", text, dtype)
        if (inside, outside) == (1, 0):
            return Said(text, tuple(dims), axes, dtype=dtype)
        text = f"{text} * {number_text(inside - outside)}" + (f" + {number_text(outside)}" if outside else "")
        return Said(text, tuple(dims), axes, SUM, dtype)

    # ------------------------------------------------------------ parameters

    def _parameter(self, value: Value) -> Said:
        return self._declare(value, value)

    def _declare(self, value: Value, of: Value, dims: Sequence[Names] | None = None) -> Said:
        body = self.file.home_of(of, self.body)
        known = body.parameters.get(value)
        if known is None:
            names = self.file.distinct(dims if dims is not None else self.names_of(of))
            known = self._declared(value, body, tuple(names))
            body.parameters[value] = known
        body.read[value] += 1
        return Said(known.name, known.dims, known.axes)

    def _declared(self, value: Value, body: Body, dims: tuple[Names, ...]) -> Declared:
        names = value.source.args["names"]
        scope = next((s for s in body.scopes if any(n.startswith(f"{s.path}.") for n in names)), body.scopes[0])
        wanted = parameter_name(names, scope)
        if value.op == "part":
            wanted = self.file.part_name(value, wanted)
        if value.op == "part" and not body.is_free(wanted):
            wanted = f"{parameter_name(names, scope)}_{wanted.removeprefix('w').removeprefix('_')}"
        if value in self.file.yielding:
            wanted = f"w{wanted}" if len(wanted) == 1 else f"w_{wanted}"
        wanted = f"{wanted}_weight" if self.file.is_called(wanted) else wanted
        others = [own for each in body.around() for own in each.parameters.values() if own.name == wanted]
        owned = [each for own in others[:1] for each in owners(names[0], own.value.source.args["names"][0])]
        likely = [wanted, *(f"{each}_{wanted}" for each in owned)]
        name = next(n for n in chain(likely, numbered(wanted)) if body.is_free(n) and n not in self.file.blocks.texts)
        self.file.declared.add(name)
        keyword = "buffer" if value.op in ("buffer", "table") else "param"
        dtype = "" if value.is_float else "i64"
        made = Declared(name, dims, "", value, keyword, dtype, self.file.summed(value))
        table = self.file.tabled(value, made.axes)
        if table and not value.source.args["trained"]:
            made = evolve(made, keyword="buffer")  # a constant
        return evolve(made, initial=table or self.file.initial(value))

    def parameter_as(self, value: Value, said: Said, dims: Sequence[Names]) -> Said:
        """A value with other names for its axes; a parameter that is not declared yet is declared with them, and then
        dimensions of size 1 have axes, too.
        """
        if tuple(dims) == said.dims:
            return said
        whole = value
        if value.op in ("parameter", "part"):
            body = self.file.home_of(whole, self.body)
            declared = body.parameters.get(whole)
            if declared is not None and body.read[whole] == 1 and self.file.declared_for(whole, body):
                del body.parameters[whole]
                return self._declare(whole, whole, dims)
        return said.renamed([new if own else () for own, new in zip(said.dims, dims, strict=True)])

    # ------------------------------------------------------------ blocks that rules write

    def own_block(
        self,
        value: Value,
        name: str,
        inputs: Sequence[Said],
        declared: Sequence[Declared],
        lines: Sequence[str],
        called: Sequence[str] = ("x",),
    ) -> str:
        """A call of a block that has these parameters and lines, with inputs that are called so there. Several calls of
        one module share it.
        """
        inner = Body("block", self.body.scopes, self.body, lines=list(lines))
        inner.parameters = {each.value: each for each in declared}
        inputs = [evolve(each, axes=each.memory_order) for each in inputs]
        dtypes = ("" if each.dtype in ("f32", "number") else each.dtype for each in inputs)
        heads = zip(called, dtypes, inputs, strict=False)
        head = ", ".join(f"{own}: {dtype}[{', '.join(each.axes)}]" for own, dtype, each in heads)
        given = [each.text for each in inputs]
        if declared:
            first = declared[0].value
            body = self.file.home_of(first, self.body)
            if self.file.has_calls(first, value.op, body):
                key = first.source.args["names"][0]
                shared = self.file.shared(key, key.rpartition(".")[0] or name, name, head, inner, body)
                if shared is None:
                    raise value.refuse("calls of a module that differ in more than their axes")
                return call(shared[0], *given, *shared[1:])
        return self.file.block(name, given, head, inner, self.body)

    def is_called_again(self, value: Value, parameter: Value) -> bool:
        """Whether other calls of a module read a parameter of the one that computes a value."""
        return self.file.has_calls(parameter, value.op, self.file.home_of(parameter, self.body))

    def has_cells(self, value: Value) -> bool:
        """Whether something reads the cells of an LSTM."""
        return self.file.tree.cells_of(value) is not None

    def update(self, value: Value) -> str:
        """The statement that changes a buffer."""
        x = value.args["x"]
        buffer, new = self(value.args["buffer"]), self(x.args["x"] if x.op == "stop_gradient" else x)
        if value.args["buffer"] not in self.body.parameters:
            raise value.refuse("a buffer that is changed elsewhere than where it is read")
        new = new.renamed(buffer.dims)
        return (
            f"update {buffer.text} = {self.expanded(new, [each for each in buffer.axes if each not in new.axes]).text}"
        )

    def initial(self, value: Value) -> str:
        """How a parameter begins."""
        return self.file.initial(value)


def _before_split(said: Said, names: Names) -> tuple[str, str] | None:
    """What a value was before its axis was split into these, and that axis."""
    found = re.fullmatch(rf"split\((.*), (\w+) -> \[{', '.join(names)}\]\)", said.text)
    return (found[1], found[2]) if found is not None and said.binds == CALL else None


def _behind(row: str, column: str, least: int | None, most: int | None) -> str:
    """Where a row is behind a column by so much."""
    if least == most:
        return f"expand(iota({row}), {column}) == iota({column})" + (f" + {least}" if least else "")
    behind = f"expand(iota({row}), {column}) - iota({column})"
    terms = [f"{behind} >= {least}" if least else f"expand(iota({row}), {column}) >= iota({column})"] * (
        least is not None
    )
    terms += [f"{behind} <= {most}"] if most is not None else []
    return " and ".join(terms)


def _few(elements: torch.Tensor, axis: str) -> tuple[str, int, str] | None:
    """A few numbers, one for each position of an axis."""
    if elements.dtype == torch.bool or len(elements) > FEW:
        return None
    *numbers, text = (number_text(each) for each in elements.tolist())
    for i, each in reversed(list(enumerate(numbers))):
        text = call("where", f"iota({axis}) == {i}", each, text)
    if elements.is_floating_point():
        return text, CALL, "f32"
    return call("cast", text, "i64"), CALL, "i64"


def _progression(elements: torch.Tensor, axis: str, begins: str = "", steps: str = "") -> tuple[str, int, str] | None:
    """An arithmetic or geometric progression, of the positions of an axis: its text, how it binds, and its dtype.
    `begins` is what its first number is, and `steps` by what it goes on, if that follows sizes.
    """
    if elements.dtype == torch.bool:
        return None
    exact = elements.double()
    first, step = (float(f"{float(each):.6g}") for each in (exact[0], exact[1] - exact[0]))
    positions = torch.arange(len(exact), dtype=torch.float64)
    if torch.equal((first + step * positions).to(elements.dtype), elements):
        whole = not elements.is_floating_point()
        text = f"iota({axis})" if whole else f"cast(iota({axis}), f64)"
        binds = CALL
        if step != 1:
            text, binds = f"{text} * {steps or number_text(step)}", PRODUCT
        if first:
            text, binds = f"{text} + {begins or number_text(first)}", SUM
        return text, binds, "i64" if whole else "f64"
    if bool((exact > 0).all()) and torch.allclose(exact.log().diff(), exact.log().diff()[:1], rtol=1e-5):
        rate = float((exact[-1].log() - exact[0].log()) / (len(exact) - 1))
        text = f"exp(cast(iota({axis}), f64) * {_named(rate, len(exact))})"
        if first != 1:
            text = f"{number_text(first)} * {text}"
        return text, PRODUCT, "f64"
    return None


def _named(rate: float, count: int) -> str:
    """The logarithm of a ratio, of a base that one would write if there is one: -log(10_000) / 8."""
    for steps in (count, count - 1, 2 * count):
        whole = float(f"{2.718281828459045 ** (-rate * steps):.6g}")
        if whole == int(whole) and whole > 1:
            return f"(-log({number_text(whole)}) / {steps})"
    return f"({number_text(rate)})"
