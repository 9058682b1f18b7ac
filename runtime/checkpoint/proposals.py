"""The lines of `weights` that a message proposes, for tensors that an import could not bind, or not for certain.

A line is proposed for a parameter in all its iterations at once, as a declaration has it, and can be pasted as it is. A
guess is a comment, so that nothing is imported by it before someone has looked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from partita.compiler.graph import without_iterations
from partita.dsl.diagnostic import shown
from partita.dsl.grouping import grouped
from partita.dsl.names.correspondence import Groups, Parameter, product_text
from partita.dsl.types import Type
from partita.runtime.checkpoint.matching import Match, Shape, matches, own_axes
from partita.runtime.checkpoint.repeated import Family, families

MAX_PROPOSED = 4  # lines in a sentence
MAX_LINES = 100  # lines of a declaration
GUESS, OPEN = "# guess: ", "# which? "
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "{": "\\{", "}": "\\}", "\n": "\\n", "\t": "\\t"})


def line(family: Family[Groups]) -> str | None:
    """The line for a family of our names, theirs, and the axes of theirs; None if no line can say it."""
    ours, theirs = family.patterns
    path, repeats = list[str](), list[str]()
    for part in ours.split("."):
        if part == "*":
            repeats.append(path[-1])
        elif not part.isdecimal():
            path.append(part)
    text = theirs.translate(ESCAPES)
    if text.count("*") != len(repeats) or len(set(repeats)) < len(repeats):
        return None
    for name in repeats:
        text = text.replace("*", f"{{{name}}}", 1)
    return _written(".".join(path), text, family.shared)


def template(parameter: Parameter) -> str:
    """The line for a parameter that theirs calls as ours."""
    parts = list(parameter.path)
    for position, _ in parameter.repeats:
        parts[position] = f"{parts[position]}.{{{parts[position]}}}"
    return _written(parameter.name, ".".join(parts), own_axes(parameter.type))


def _written(ours: str, theirs: str, groups: Groups) -> str:
    axes = ", ".join(map(product_text, groups))
    return f'{ours} = "{shown(theirs)}"' + f" [{axes}]" * bool(axes)


def lines(rows: Iterable[tuple[str, str, Groups]], parameters: Collection[str]) -> list[str]:
    """The lines for some of the `parameters`: our name, theirs, and the axes of theirs.

    Of a parameter that only some iterations are given of, or that has another form in some, there is none.
    """
    counts = Counter(map(without_iterations, parameters))
    written = []
    for name, members in grouped(rows, lambda row: without_iterations(row[0])).items():
        alike = families(((ours, theirs), axes) for ours, theirs, axes in members)
        if len(members) == counts[name] and len(alike) == 1:
            written.append(line(alike[0]))
    return [each for each in written if each is not None]


def proposed(parameters: Mapping[str, Type], tensors: Mapping[str, Shape]) -> list[str]:
    """A line for each of some parameters, in our order: certain, marked as a guess, or open."""
    return [_proposal(family, match) for family, match in matches(parameters, tensors)]


def _proposal(family: Family[Type], match: Match | None) -> str:
    if match is not None:
        rows = zip(family.members, match.theirs.members, strict=True)
        together = families(((ours[0], theirs[0]), match.axes) for ours, theirs in rows)
        written = line(together[0]) if len(together) == 1 else None
        if written is not None:
            return f"{GUESS}{written}" if match.guess else written
    return f"{OPEN}{_written(without_iterations(family.members[0][0]), '…', own_axes(family.shared))}"


def declared(proposals: Sequence[str], name: str) -> str:
    """How some lines are said in a file, and the declaration of them, to be pasted."""
    marks = (
        (GUESS, "fits by shape, but another tensor or order of axes might as well: check it"),
        (OPEN, "needs a name of theirs: write it"),
    )
    legend = [
        f"`{mark.strip()}` {why}, and remove the mark" for mark, why in marks if any(mark in each for each in proposals)
    ]
    more = [f"# … {len(proposals) - MAX_LINES:,} more"] if len(proposals) > MAX_LINES else []
    body = "\n".join(f"  {each}" for each in (*proposals[:MAX_LINES], *more))
    paste = f"say in the .par file what it calls them, and import with `--as {name}`"
    return f"{'; '.join([paste, *legend])}\nweights {name} {{\n{body}\n}}"
