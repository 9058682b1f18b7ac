"""What sources define in which mistakes are planted, by name, wherever that is."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from attrs import Factory, frozen

from tests.files import SHIPPED
from tests.fragments import Holder

# What ships, and the model of devices that tests have; and the files that are not Python.
FOLDERS = ("api", *SHIPPED)
MODEL = "tests/runtime/transports/interleaved.py"
NATIVE = ".cc"
NAME = re.compile(r"^(?:    (?=def))?(?:def |class )?(\w+)", re.MULTILINE)


@frozen
class Definition:
    """A function, class, method or constant of a file."""

    file: str
    holder: Holder

    @property
    def lines(self) -> slice:
        """Which lines of the file it is."""
        node = self.holder.body[0]
        return slice(min(each.lineno for each in (node, *getattr(node, "decorator_list", ()))) - 1, node.end_lineno)


@frozen
class Sources:
    """Files, by path; and which of them may define which names."""

    texts: Mapping[str, str]
    _having: Mapping[str, Collection[str]]
    _defined: dict[str, Mapping[str, list[Definition]]] = Factory(dict)

    @classmethod
    def read(cls, root: Path) -> Sources:
        """The files under a folder."""
        files = [file for folder in FOLDERS for end in (".py", NATIVE) for file in (root / folder).rglob(f"*{end}")]
        files += [root / MODEL] if (root / MODEL).exists() else []
        return cls.of({str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in sorted(files)})

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Sources:
        having = defaultdict[str, dict[str, None]](dict)
        for file, text in texts.items():
            for name in NAME.findall(text) if file.endswith(".py") else ():
                having[name][file] = None
        return cls(texts, having)

    def definitions(self, name: str) -> list[Definition]:
        """All that a name is given to: a qualified one, or that of a method without its class."""
        files = self._having.get(name.partition(".")[0], ())
        return [definition for file in files for definition in self._in(file).get(name, ())]

    def _in(self, file: str) -> Mapping[str, list[Definition]]:
        if file not in self._defined:
            found = defaultdict[str, list[Definition]](list)
            for statement in ast.parse(self.texts[file]).body:
                for name, holder in _defined(statement):
                    found[name].append(Definition(file, holder))
            self._defined[file] = found  # whole, for other threads
        return self._defined[file]


def _defined(statement: ast.stmt) -> Iterator[tuple[str, Holder]]:
    """What a statement of a file defines: also the methods of a class."""
    itself = ast.Module([statement], [])
    match statement:
        case ast.FunctionDef(name=name):
            yield name, itself
        case ast.ClassDef(name=name, body=body):
            yield name, itself
            methods = (each for each in body if isinstance(each, ast.FunctionDef))
            for each in methods:
                method = ast.ClassDef(name, [], [], [each], [])
                yield from ((known, method) for known in (each.name, f"{name}.{each.name}"))
        case (
            ast.Assign(targets=[ast.Name(id=name)])
            | ast.AnnAssign(target=ast.Name(id=name))
            | ast.AugAssign(target=ast.Name(id=name))
        ):
            yield name, itself
