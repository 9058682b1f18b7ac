"""What comes from strangers runs nothing, and a run opens nothing to them.

The sources are searched for what could execute data or be reached from elsewhere; a run that is under way is watched
from outside: its sockets through /proc, and what it unpickles by an audit hook.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault_injection.processes import private_networks
from tests.files import ROOT

FOLDERS = ("api", "cli", "compiler", "dsl", "runtime", "testing")

# What executes data, by its last name; where it may stand all the same, and why.
EXECUTING = {
    "eval": {},
    "exec": {
        "runtime/stages.py": "the functions that the compiler has emitted",
        "runtime/python_files.py": "what the user allows by --allow-python",
    },
    "compile": {
        "runtime/stages.py": "the same",
        "runtime/kernels/compiling.py": "torch compiles the same",
        "runtime/python_files.py": "what the user allows",
    },
    "__import__": {},
    "import_module": {
        "dsl/registry.py": "one of the modules that a registry lists",
        "compiler/ops/__init__.py": "the modules of its own folder",
        "runtime/kernels/__init__.py": "the modules of its own folder",
        "runtime/data/packages.py": "a package of an extra, which a source names",
        "runtime/data/registry.py": "the module beside it that opens a source",
        "cli/import.py": "the module of a command line, which naming it permits to run",
        "dsl/reprs.py": "what notebooks show, by a name that stands there",
        "runtime/supervision/fork_server.py": "modules of this package, by names that stand there",
    },
    "system": {},
    "popen": {},
    "literal_eval": {"compiler/text/graph.py": "literals are no code"},
}
# Modules that unpickle, download or serve; and who may serve all the same.
SERVING = {
    "runtime/supervision/fork_server.py": ("runpy", "`python -m partita`, in a forked process"),
    "cli/page/server.py": ("http", "urllib", "a page, on the loopback interface and for those who have its token"),
    "cli/editor/server.py": ("asyncio", "an editor, over the pipe from which it was started"),
    "cli/editor/features.py": ("asyncio", "the same"),
    "cli/formats.py": ("urllib", "`urllib.parse` quotes the paths of files"),
}
MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "runpy", "code",
    "http", "urllib", "requests", "socketserver", "xmlrpc", "ftplib", "smtplib", "asyncio", "multiprocessing",
}  # fmt: skip


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a file by its dotted name: `torch.load`, `eval`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


# ---------------------------------------------------------------- the sources


@pytest.mark.soak
@pytest.mark.parametrize("folder", FOLDERS)
def test_sources_execute_no_data(folder: str):
    for path, called, node in ((each, *call) for each in sources(folder) for call in calls(each)):
        name = path.relative_to(ROOT).as_posix()
        last = called.rpartition(".")[2]
        if last in EXECUTING and not called.startswith(("re.", "self.")):
            assert name in EXECUTING[last] or called.startswith("partita."), f"{place(path, node)} calls {called}"
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert keywords.get("shell", "False") == "False", place(path, node)
        if called in ("np.load", "numpy.load"):
            assert keywords.get("allow_pickle") == "False", place(path, node)
        # torch's own files are pickles, and so are the objects that its collectives take.
        assert called not in ("torch.load", "torch.save", "torch.hub.load"), place(path, node)
        assert not re.search(r"(gather|cast|scatter|send|recv)_object(_list|s)?$", last), (
            f"{place(path, node)}: {called}"
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("folder", FOLDERS)
def test_sources_import_nothing_that_unpickles_or_serves(folder: str):
    for path, node in ((each, node) for each in sources(folder) for node in ast.walk(tree_of(each))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            *allowed, _ = SERVING.get(path.relative_to(ROOT).as_posix(), ("",))
            first = name.partition(".")[0]
            assert first in allowed or first not in MODULES, f"{place(path, node)} imports {name}"


@pytest.mark.soak
@pytest.mark.parametrize("folder", FOLDERS)
def test_no_source_says_pickle(folder: str):
    """Nor by the names of others: an attribute, an import."""
    for path, node in ((each, node) for each in sources(folder) for node in ast.walk(tree_of(each))):
        word = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None) or ""
        assert "pickle" not in str(word).lower(), place(path, node)


# ---------------------------------------------------------------- a run under way

WATCHED = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc to list what listens")
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
LISTENS, UNCONNECTED = "0A", "07"  # states of /proc/net/tcp and udp

# Loaded by every Python of the run before anything else: writes down what is unpickled.
HOOK = """
import os, sys
def hook(event, arguments):
    if event == "pickle.find_class":
        with open(os.environ["UNPICKLED"], "a") as file:
            file.write(f"{arguments}\\n")
sys.addaudithook(hook)
"""


def descendants(process: int) -> set[int]:
    """A process and all that it has started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {process}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def open_ends(processes: set[int], seen_from: int | str = "self") -> set[tuple[str, str]]:
    """The kind and local address of all sockets of processes to which a stranger could send something, who is in the
    network of the process from which they are seen."""
    inodes = set()
    for process in processes:
        try:
            handles = list(Path(f"/proc/{process}/fd").iterdir())
        except OSError:
            continue
        for handle in handles:
            try:
                inodes.add(os.readlink(handle))
            except OSError:
                continue
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        try:
            lines = Path(f"/proc/{seen_from}/net/{kind}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            waits = fields[3] == LISTENS if kind.startswith("tcp") else fields[3] == UNCONNECTED
            if waits and f"socket:[{fields[9]}]" in inodes:
                found.add((kind, fields[1].split(":")[0]))
    return found


@pytest.mark.soak
@WATCHED
def test_a_run_listens_on_loopback_only_and_unpickles_nothing(tmp_path: Path):
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "hook"), os.environ.get("PYTHONPATH", "")]),
        "UNPICKLED": str(tmp_path / "unpickled"),
    }
    overrides = ["batch=8", "seq=16", "embed=32", "key=8", "train.steps=100000", "train.checkpoint=every(1)"]
    command = [sys.executable, "-m", "partita", "run", str(ROOT / "specs" / "tiny.par"), *overrides, "--run-dir=run"]
    seen: set[tuple[str, str]] = set()
    reached: set[tuple[str, str]] = set()
    metrics = tmp_path / "run" / "metrics.jsonl"
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 120
            while not metrics.exists() or metrics.read_text().count("\n") < 5:
                assert process.poll() is None, (tmp_path / "out").read_text()
                assert time.monotonic() < deadline, (tmp_path / "out").read_text()
                ours = descendants(process.pid)
                seen |= {end for each in ours for end in open_ends(ours, each)}
                reached |= open_ends(ours)
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGINT)
            status = process.wait(timeout=60)
    assert status == 130, (tmp_path / "out").read_text()
    assert seen, "Gloo listens for its peers; if not, this test sees nothing"
    assert {address for _, address in seen} <= LOOPBACK, seen
    assert not (reached and private_networks()), "ranks have a network of their own, where the system allows it"
    assert not (tmp_path / "unpickled").exists(), (tmp_path / "unpickled").read_text()


def test_the_hook_sees_what_is_unpickled(tmp_path: Path):
    """So that the test above can fail."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "UNPICKLED": str(tmp_path / "unpickled")}
    code = "import pickle, os; pickle.loads(pickle.dumps(os.getcwd))"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert "getcwd" in (tmp_path / "unpickled").read_text()
