"""The house: imports point one way, the front needs no torch, every registry is whole."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from partita.compiler.ops import OPS, Op, traits
from tests.files import ROOT

# What each folder may import of the others.
MAY_IMPORT = {
    "dsl": {"dsl", "grammars"},
    "compiler": {"dsl", "compiler"},
    "runtime": {"dsl", "compiler", "runtime"},
    "importing": {"dsl", "compiler", "runtime", "importing"},
    "cli": {"dsl", "compiler", "runtime", "importing", "cli"},
    "testing": {"dsl", "compiler", "testing"},
    "api": {"dsl", "compiler", "runtime", "importing", "cli", "overrides", "arguments"},
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All that is in a file."""
    return list(ast.walk(tree_of(path)))


def imports(path: Path):
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno
            if node.module == "partita":
                for alias in node.names:
                    yield f"partita.{alias.name}", node.lineno


@pytest.mark.few(1)
@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_imports_point_one_way(folder: str):
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name, line in imports(path):
            if name.startswith("partita."):
                part = name.split(".")[1]
                assert part in MAY_IMPORT[folder], f"{path.relative_to(ROOT)}:{line} imports {name}"


@pytest.mark.soak
def test_the_front_needs_neither_torch_nor_numpy():
    modules = [
        "partita." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("dsl", "compiler")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    code = "import sys\n" + "\n".join(f"import {name}" for name in modules)
    code += "\nheavy = [m for m in ('torch', 'numpy', 'rich', 'matplotlib') if m in sys.modules]\n"
    code += "sys.exit(f'imported {heavy}' if heavy else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_there_is_no_folder_that_shadows_the_package():
    assert not (ROOT / "partita").exists()


def test_the_package_can_be_used_where_it_lies():
    """Types are checked by way of `.types`, and so is what `make gpu` runs where nothing can be installed."""
    lies = {path.name for path in (ROOT / "api").glob("*.py")} | {name for name in MAY_IMPORT if name != "api"}
    found = {path.name: path.resolve() for path in (ROOT / ".types" / "partita").iterdir() if path.exists()}
    assert lies <= found.keys()
    assert {each.parent for each in found.values()} == {ROOT, ROOT / "api"}


# ---------------------------------------------------------------- circles


def modules() -> dict[str, Path]:
    """All modules that ship, by name."""
    return {
        "partita." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in MAY_IMPORT
        for path in (ROOT / folder).rglob("*.py")
    }


def imported(path: Path, known: Collection[str]) -> set[str]:
    """The modules that one imports: anywhere, within functions and for types alone too."""
    found = set()
    for node in nodes_of(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {""}


def test_no_modules_import_each_other():
    """But for an operation and the nodes that it stands in."""
    known = modules()
    allowed = {("partita.compiler.graph", "partita.compiler.ops.op")}
    graph = TopologicalSorter(
        {
            name: {other for other in imported(path, known) if other != name and (name, other) not in allowed}
            for name, path in known.items()
        }
    )
    graph.prepare()  # raises CycleError, which names the circle


# ---------------------------------------------------------------- imports within functions

# What takes long to import, or that not every installation has. Nothing else is imported within functions.
HEAVY = {"torch", "numpy", "safetensors", "transformers", "rich", "matplotlib", "pygls", "argcomplete"}
# And these, which no ordinary run needs: suggestions for misspelt names, the versions in a manifest, and the
# compiler, which `check` needs for gradients in a model alone and which takes twice as long to import as `check`.
RARE = {"difflib", "importlib.metadata", "partita.compiler.pipeline"}
# `import partita`, and commands that need no runtime, import nothing before it is used.
LIGHT = ("partita.api", "partita.cli.main")


def at_the_top(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a module that are done when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, (ast.If, ast.Try)) and "TYPE_CHECKING" not in ast.unparse(node).split("\n")[0]:
            yield from at_the_top(node)


def names_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def own(name: str, known: Collection[str]) -> str:
    """The module of ours that a name belongs to; nothing where it is none."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


@pytest.mark.soak
def test_imports_within_functions_keep_something_heavy_out():
    known = modules()
    trees = {name: tree_of(path) for name, path in known.items()}
    direct = {name: [each for node in at_the_top(tree) for each in names_of(node)] for name, tree in trees.items()}

    @cache
    def heavy(name: str) -> frozenset[str]:
        """What importing a module of ours, or another one, brings."""
        module = own(name, known)
        if not module:
            return frozenset({name, name.partition(".")[0]} & HEAVY)
        return frozenset().union(*map(heavy, direct[module]))

    needless = []
    for name, tree in trees.items():
        for function in ast.walk(tree):
            if name in LIGHT or not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node in ast.walk(function):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    brought = {each for each in names_of(node) if heavy(each) - heavy(name)}
                    rare = any(each == part or each.startswith(f"{part}.") for each in names_of(node) for part in RARE)
                    inner = any(each.startswith("torch.") for each in names_of(node))  # more of it
                    if not (brought or rare or inner):
                        needless.append(f"{known[name].relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert needless == []


# ---------------------------------------------------------------- what cannot be missing is said by types

# Where `assert x is not None` stands for a type that says so. Less is better: lower it where there is less.
ASSERTED = 20


def test_types_say_what_cannot_be_missing():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules().values()
        for node in nodes_of(path)
        if isinstance(node, ast.Assert) and ast.unparse(node.test).endswith(" is not None")
    ]
    assert len(found) <= ASSERTED, "\n".join(sorted(found))


# ---------------------------------------------------------------- operations answer for themselves

# How often the house asks which operation one is. A pass asks for a trait (`partita.compiler.ops.op`), unless it is
# about that one operation. Less is better: lower it where there is less.
ASKED = 25


def which_op(tree: ast.AST, names: Collection[str]) -> Iterator[int]:
    """The lines that ask of which class an operation is, or whether it has one of some names."""
    classes = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("partita.compiler.ops")
        for alias in node.names
        if alias.name in kinds_of_ops()
    }
    tables = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and mentioned(node.value) & classes
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    known = classes | tables
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, which]) | ast.MatchClass(cls=which):
                asked = bool(mentioned(which) & known)
            case ast.Compare(left=ast.Call(func=ast.Name("type")), comparators=compared):
                asked = any(mentioned(each) & known for each in compared)
            case ast.Compare(left=ast.Attribute(attr="name" | "label"), comparators=compared):
                texts = {each.value for side in compared for each in ast.walk(side) if isinstance(each, ast.Constant)}
                asked = bool(texts & set(names)) and "op" in mentioned(node.left)
            case _:
                asked = False
        if asked:
            yield node.cls.lineno if isinstance(node, ast.MatchClass) else node.lineno


def mentioned(node: ast.AST) -> set[str]:
    """The names and attributes in an expression."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


@cache
def kinds_of_ops() -> set[str]:
    return {kind.__name__ for op in OPS.values() for kind in op.__mro__ if issubclass(kind, Op) and kind is not Op}


@pytest.mark.soak
def test_passes_do_not_ask_which_operation_one_is():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in modules().values() for line in which_op(tree_of(path), OPS)]
    assert len(found) <= ASKED, "\n".join(sorted(found))


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(node.op, Dot)",
        "isinstance(op, (str, Gather))",
        "VIEWS = (Dot, Gather)\nany(isinstance(each.op, (*VIEWS, str)) for each in nodes)",
        "type(node.op) is Dot",
        "node.op.name in ('dot', 'gather')",
        "match node.op:\n  case Dot(over=over): pass",
    ],
)
def test_whoever_asks_is_found(text: str):
    text = f"from partita.compiler.ops.dot import Dot\nfrom partita.compiler.ops.lookup import Gather\n{text}"
    assert len(list(which_op(ast.parse(text), OPS))) == 1


# ---------------------------------------------------------------- text is what comes last

CODEGEN = ROOT / "compiler" / "codegen"
# How a value's name becomes one of Python's, and a file's name a comment: all that reads a text there.
SPELLING = {"place", "identifier", "local_stem", "_call", "_is_functions"}
READS_TEXT = {
    *("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit", "find"),
    *("splitlines", "index", "rindex", "rfind", "replace", "translate", "isidentifier", "isdigit", "strip", "lstrip"),
}
# Of a scope's path: the name of the repeat that a turn belongs to. Of the text of a function that is done.
PATHS = {"iteration.split('.')", "part.strip('\\n')"}


def test_codegen_looks_nothing_up_in_text():
    """It knows what it asks for from nodes and statements: there is no regular expression, no search, no mark."""
    for path in sorted(CODEGEN.glob("*.py")):
        tree = tree_of(path)
        assert not {"re", "regex", "fnmatch", "tokenize", "ast"} & {name for name, _ in imports(path)}, path
        spelling = {
            each
            for function in tree.body
            if path.name == "names.py" and isinstance(function, ast.FunctionDef) and function.name in SPELLING
            for each in ast.walk(function)
        }
        for node in ast.walk(tree):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert all(each.isprintable() or each == "\n" for each in node.value), f"{place} marks text"
            if node in spelling:
                continue
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS_TEXT:
                assert ast.unparse(node) in PATHS, f"{place} reads text: {ast.unparse(node)}"
            if isinstance(node, ast.Compare) and any(isinstance(each, (ast.In, ast.NotIn)) for each in node.ops):
                sides = [ast.unparse(each) for each in (node.left, *node.comparators)]
                assert not any(each.endswith((".text", ".name", "text", "source")) for each in sides[1:]), place


def test_codegen_knows_few_kinds_of_operations():
    """Those whose statements have a form of their own, and what `partita.compiler.ops.traits` says of others."""
    found = set[str]()
    for path in sorted(CODEGEN.glob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                what, kind = map(ast.unparse, node.args)
                if what.endswith("op"):
                    found.add(kind)
    known = {name for name, each in vars(traits).items() if isinstance(each, type)}
    assert found - known == {
        *["Accumulate", "Collective", "Dot", "Expand", "Receive", "Send", "Transfer", "Update"],
        "ASYNC_COPIES",
        "MULTI_KERNEL",
    }


def test_the_base_of_operations_is_small():
    """What one class alone says is asked of that class; what a few say is a base of `partita.compiler.ops.traits`."""
    members = {name for name in {*vars(Op), *Op.__annotations__} if not name.startswith("_")}
    assert len(members) <= 45
    classes = Op.__subclasses__()
    for each in classes:
        classes += each.__subclasses__()
    said = {name: sum(name in vars(each) for each in classes) for name in members}
    # Builders of graphs, which know no operation, ask for numbers.
    assert {name for name, count in said.items() if count == 1} == {"literal"}
