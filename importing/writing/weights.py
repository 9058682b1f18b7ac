"""The parameters of a file, and which weights of the module they are."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from partita.importing.graph import Value
from partita.importing.writing.body import Body, Declared
from partita.importing.writing.tree import Scope

# The repeats around a parameter, each with the number of an iteration and its modules.
Around = list[tuple[str, int, list[Scope]]]


def parameters_of(model: Body) -> list[tuple[str, Around, Declared]]:
    """All parameters: their full name, and the repeats around."""
    found: list[tuple[str, Around, Declared]] = []

    def visit(body: Body, path: str, around: Around) -> None:
        for each in body.parameters.values():
            found.append((f"{path}.{each.name}", around, each))
        for several in body.calls.values():
            for inner in several:
                if isinstance(inner, list):
                    for i, iteration in enumerate(inner):
                        visit(iteration, f"{path}.{iteration.name}", [*around, (iteration.name, i, iteration.scopes)])
                else:
                    visit(inner, f"{path}.{inner.name}", around)

    visit(model, model.name, [])
    return found


def weight_lines(model: Body, state: Collection[str], sizes: Mapping[str, int]) -> list[str]:
    """Which weights of the module, of those that it saves, each parameter is; `sizes` are those of axes."""
    entries = [each for each in parameters_of(model) if each[2].value.op != "table"]
    lines: dict[tuple[tuple[str, ...], bool], dict[str, Declared]] = {}
    for name, around, declared in entries:
        source = declared.value.source
        theirs = tuple(_theirs(each, around) for each in source.args["names"])
        lines.setdefault((theirs, declared.value.op == "part"), {}).setdefault(name, declared)
    every = {name for ours in lines.values() for name in ours}
    written = []
    for (theirs, _), named in lines.items():
        # Parts follow each other as they lie in the whole.
        ours = dict(sorted(named.items(), key=lambda each: each[1].value.args.get("start", 0)))
        names = ", ".join(_short(name, every) for name in ours)
        quoted = ", ".join(f'"{name}"' for name in theirs)
        written.append(f"{names} = {quoted} [{', '.join(_dims(list(ours.values()), sizes))}]")
    read = {name for _, _, each in entries for name in each.value.source.args["names"]}
    if skipped := _skipped([name for name in state if name not in read], read):
        written.append(f"skip {', '.join(skipped)}")
    return written


def freezing_rules(model: Body, trained: Collection[Value]) -> list[str]:
    """The rules of an optimizer that freezes what is not trained; none if everything is."""
    entries = parameters_of(model)
    every = {name for name, _, _ in entries}
    frozen = dict.fromkeys(
        _short(name, every)
        for name, _, each in entries
        if each.keyword == "param" and not (each.value.source.args["trained"] and each.value in trained)
    )
    if not frozen:
        return []
    return [f"optimizer rules {{\n  freeze {', '.join(frozen)}\n  update all -> adamw(lr = 1e-3)\n}}"]


def _skipped(left: Sequence[str], read: Collection[str]) -> list[str]:
    """Patterns of what the module saves and the file has not: masks that are formulas, counts of batches."""
    patterns = {re.sub(r"\.\d+(?=\.)", ".*", name): name for name in left}
    every = [
        pattern if not any(fnmatchcase(name, pattern) for name in read) else name for pattern, name in patterns.items()
    ]
    return [f'"{pattern}"' for pattern in every]


def _theirs(name: str, around: Around) -> str:
    """A name of theirs, where numbers of layers are formulas of iterations."""
    for label, _, scopes in around:
        for scope in scopes:
            if not name.startswith(f"{scope.path}."):
                continue
            index = next(i for each, i, _ in around if each == label)
            offset = (scope.number or 0) - index * len(scopes)
            formula = label if len(scopes) == 1 else f"{len(scopes)} * {label}"
            formula += f" + {offset}" if offset else ""
            path = scope.list_path
            name = f"{path}.{{{formula}}}{name[len(scope.path) :]}"
            break
    return name


def _short(name: str, every: set[str]) -> str:
    """The end of a full name that tells a parameter from all others."""
    parts = name.split(".")
    for count in range(2, len(parts)):
        end = ".".join(parts[-count:])
        if sum(each == end or each.endswith(f".{end}") for each in every) == 1:
            return end
    return name


def _dims(ours: Sequence[Declared], sizes: Mapping[str, int]) -> list[str]:
    dims = [" * ".join(own) or "1" for own in ours[0].dims]
    if ours[0].value.op == "part":
        at, within = ours[0].value.args["dim"], ours[0].value.args["within"]
        around = next(i for i in range(9) if math.prod(sizes[name] for name in ours[0].dims[at][:i]) == within)
        each = [" * ".join(part.dims[at][around:]) or "1" for part in ours]
        parts = f"+ {each[0]}" if len({*each}) == 1 else " + ".join(each)
        before = " * ".join(ours[0].dims[at][:around])
        dims[at] = parts if not around else f"{before} * {parts if len({*each}) == 1 else f'({parts})'}"
    return dims
