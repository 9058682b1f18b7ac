"""All mistakes that are planted, by subject: a file each, whose first line says what its mistakes are about.

    test_a_delay_is_the_same_under_every_layout
      every-stage-has-the-mean-of-a-pair [paired-zero1]: DelayedGradients.completed: totals[i] {{* 0.5 =>}}

A mistake stands under what must fail with it: a test, by as much of the end of its id as makes it the only one, or
`verify FILE`. Brackets after its name complete that: with a case of the test, or overrides of the file. Then come the
function, method, class or constant that has the mistake, wherever that is defined, a method also without its class; and
what is changed in it: `OLD => NEW`, or with what stays around that, `a + {{OLD => NEW}}`, which must stand there once.

Both sides are Python: an expression or statements, or nothing. Formatting does not matter, nor how locals are called:
names of the fragment are any of them, one to one; `where FRAGMENT`, that also stands there, says which. `...` is any
expression, any arguments or any statements, `**...` any arguments by name, `if a: ...` the head of an `if`. Lines that
are indented by four go on. A file of C++ is a place, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import evolve

from tests.files import ROOT
from tests.planted.planted import VERIFY, Planted

ENTRY = re.compile(r"  (?! )(\S+?)(?: \[(.*?)\])?: ([\w.]+):(?: (.*))?")


def mistakes(title: str, *lines: str) -> list[Planted]:
    """The mistakes of a list. ValueError, with the line, where it is not one."""
    caught, found = "", list[Planted]()
    for line in lines:
        if entry := ENTRY.fullmatch(line):
            name, case, place, fragment = entry.groups("")
            more = case and (f" {case}" if caught.startswith(VERIFY) else f"[{case}]")
            found.append(Planted(name, place, fragment, caught + more))
        elif found and line.startswith("    "):
            found[-1] = evolve(found[-1], fragment=f"{found[-1].fragment}\n{line[4:]}".strip())
        elif line[:1].strip():
            caught = line if line.startswith(VERIFY) else _test(line)
        else:
            raise ValueError(f"no mistake: `{line}`")
    return found


def _tests() -> Mapping[str, Sequence[str]]:
    """The ids of all tests and their files, by the last name in them."""
    found = defaultdict[str, list[str]](list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = str(path.relative_to(ROOT))
        found[path.name].append(file)
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[name].append(f"{file}::{name}")
    return found


TESTS = _tests()


def _test(name: str) -> str:
    """The id of the test that has the name. ValueError where that is not one."""
    found = [each for each in TESTS[re.split("/|::", name)[-1]] if re.search(f"(^|/|::){re.escape(name)}$", each)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} tests are called {name}")
    return found[0]


SUBJECTS: Mapping[str, Sequence[Planted]] = {
    path.stem: mistakes(*path.read_text(encoding="utf-8").splitlines())
    for path in sorted(Path(__file__).parent.glob("*.txt"))
}
