"""Commands where their extras are not installed: what is missing and what installs it, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from partita.cli.command import SUMMARIES
from partita.cli.extras import EXTRAS, explained, missing
from partita.cli.main import main
from tests.files import ROOT, parts

BASE = ("attr", "attrs", "rich", "pygments", "markdown_it", "mdurl")
FILE = """\
axis batch = 8, embed = 6

model m(x: [batch, embed]) {
  param w: [embed] ~ normal(1.0)
  loss mean(x * w)
}

train {
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 2
  checkpoint = every(1, dir = "kept")
}
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that has Partita and what it always needs, and no extra."""
    folder = tmp_path_factory.mktemp("bare")
    for name in BASE:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (folder / name).symlink_to(Path(spec.origin).parent)
    (folder / "partita").mkdir()
    for path in parts(ROOT):
        (folder / "partita" / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file and its checkpoints."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "m.par").write_text(FILE)
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["run", "m.par", "--transport", "virtual"]) == 0
    finally:
        os.chdir(before)
    return folder


def ran(command: str, packages: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command by an interpreter that has these packages and its own library."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, "-S", "-B", "-m", "partita", *command.split()],
        cwd=cwd,
        env={**environment, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    "command",
    [
        "--version",
        "--help",
        "check m.par",
        "fmt --check m.par",
        "compile m.par",
        "explain m.par",
        "schedule m.par",
        "schedule m.par -o picture.json",
        "plan m.par --devices 2 --within 1",
        "checkpoint ls kept",
        "report runs/m -o page.html",
        "checkpoint list kept",
        "checkpoint show kept",
        "run --help",
        "checkpoint verify --help",
    ],
)
def test_what_needs_no_extra(command: str, bare: Path, work: Path) -> None:
    done = ran(command, bare, work)
    assert (done.returncode, done.stderr) == (0, "")


ALL = """
import sys
import tomllib
from partita.cli.command import COMMANDS
from partita.cli.main import main
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit as left:
        assert left.code == 0, name
"""


@pytest.mark.soak
def test_every_command_says_what_it_does_without_any_extra(bare: Path, work: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", ALL],
        cwd=work,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(bare)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {f"usage: partita {name}" in done.stdout for name in SUMMARIES} == {True}


@pytest.mark.soak
@pytest.mark.parametrize("call", ["train('m.par')", "verify('m.par')", "load_model('m.par')"])
def test_a_function_that_needs_torch_says_so(call: str, bare: Path, work: Path) -> None:
    code = f"import partita\ntry:\n  partita.{call}\nexcept ImportError as error:\n  print(error)"
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", code],
        cwd=work,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(bare)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    needs = "needs torch, numpy, safetensors: pip install 'partita[run]'"
    assert done.stdout == f"`partita.{call.partition('(')[0]}` {needs}\n"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run m.par", "`partita run` needs torch, numpy, safetensors: pip install 'partita[run]'"),
        ("run m.par --transport virtual", "`partita run` needs torch"),
        ("verify m.par", "`partita verify` needs torch, numpy, safetensors: pip install 'partita[run]'"),
        ("evaluate m.par", "`partita evaluate` needs torch, numpy, safetensors: pip install 'partita[run]'"),
        ("predict m.par -o out.npz", "`partita predict` needs torch"),
        ("sample m.par", "`partita sample` needs torch"),
        ("lsp", "`partita lsp` needs pygls, lsprotocol"),
        ("profile", "`partita profile` needs torch, numpy, safetensors: pip install 'partita[run]'"),
        ("checkpoint verify kept", "`partita checkpoint` needs torch, numpy, safetensors"),
        ("checkpoint export kept -o out.safetensors", "`partita checkpoint` needs torch"),
        ("checkpoint import new out.safetensors m.par", "`partita checkpoint` needs torch"),
        (
            "schedule m.par -o picture.svg",
            "drawing picture.svg needs matplotlib, numpy: pip install 'partita[plot]'",
        ),
        ("schedule m.par -o picture.png", "or name a .json file (a Chrome trace)"),
        ("run m.par --track tensorboard,wandb", "`partita run` needs torch"),
    ],
)
def test_what_needs_one(command: str, message: str, bare: Path, work: Path) -> None:
    done = ran(command, bare, work)
    assert done.returncode == 2
    assert done.stderr.startswith("partita: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not (work / "picture.svg").exists()


REFUSING = """
import sys
import tomllib

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusing())
"""
BROKEN = """
import sys
import tomllib
from importlib.machinery import ModuleSpec

class Broken:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name in NAMES else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        raise KIND(WHY, name=WHICH)

sys.meta_path.insert(0, Broken())
"""


def customized(folder: Path, code: str, **names: object) -> Path:
    """A folder whose `sitecustomize` changes what can be imported."""
    for name, value in names.items():
        code = code.replace(name, value if name == "KIND" else repr(value))
    (folder / "sitecustomize.py").write_text(code)
    return folder


def by_all(command: str, packages: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command by this interpreter with all that is installed, after what a folder changes of it."""
    return subprocess.run(
        [sys.executable, "-m", "partita", *command.split()],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("command", "names"),
    [("run m.par", ("torch",)), ("verify m.par", ("numpy",)), ("checkpoint verify kept", ("safetensors",))],
)
def test_a_single_module_that_is_missing(command: str, names: tuple[str, ...], work: Path, tmp_path: Path) -> None:
    done = by_all(command, customized(tmp_path, REFUSING, NAMES=names), work)
    what = " ".join(command.split()[:1])
    assert done.stderr == f"partita: `partita {what}` needs {names[0]}: pip install 'partita[run]'\n"
    assert done.returncode == 2


@pytest.mark.soak
def test_torch_that_is_found_and_lacks_what_it_needs(work: Path, tmp_path: Path) -> None:
    names = {"NAMES": ("torch",), "KIND": "ModuleNotFoundError", "WHY": "No module named 'numpy'", "WHICH": "numpy"}
    done = by_all("verify m.par", customized(tmp_path, BROKEN, **names), work)
    assert done.stderr == "partita: `partita verify` needs numpy: pip install 'partita[run]'\n"
    assert done.returncode == 2


@pytest.mark.soak
def test_torch_that_is_broken(work: Path, tmp_path: Path) -> None:
    why = "libcudart.so.13: cannot open shared object file"
    names = {"NAMES": ("torch",), "KIND": "ImportError", "WHY": why, "WHICH": "torch"}
    done = by_all("verify m.par", customized(tmp_path, BROKEN, **names), work)
    assert done.stderr == f"partita: `partita verify` needs torch, which cannot be imported: {why}\n"
    assert done.returncode == 2


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, modules in EXTRAS.items():
        declared = {each.split(">")[0].removesuffix("-skinny") for each in project["optional-dependencies"][extra]}
        declared = {"PIL" if each == "pillow" else each for each in declared}
        assert declared <= set(modules), extra
    for extra in ("run", "plot", "data", "tensorboard", "editor"):  # what the tests themselves need
        assert missing(extra, "this") is None
    always = {each.split(">")[0] for each in project["dependencies"]}
    assert not always & {module for modules in EXTRAS.values() for module in modules}


def test_a_module_of_no_extra_is_a_fault_of_ours() -> None:
    assert explained(ModuleNotFoundError("No module named 'partita.x'", name="partita.x"), "this") is None
    assert explained(ImportError("cannot import name 'x'"), "this") is None
