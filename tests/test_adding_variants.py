"""A variant is one module: one more of each kind, made up here, is known once its module has been imported.

Each module registers one record, by which commands find all that they need of it: `check`, `compile`, `plan`, `verify`
and `run`. And no name of a variant stands in code but in its own file and its registry's.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from partita.cli.command import COMMANDS
from partita.cli.main import main
from partita.compiler.ops import OPS
from partita.dsl.config import builtins
from partita.dsl.registry import Registry
from partita.runtime.transports.registry import TRANSPORTS
from tests.commands import records
from tests.docs.pages import fences
from tests.files import ROOT

REGISTRIES: Mapping[str, Registry[Any]] = {
    "schedule": builtins.SCHEDULES,
    "optimizer": builtins.OPTIMIZERS,
    "data": builtins.DATA,
    "transport": TRANSPORTS,
    "command": COMMANDS,
}

# ---------------------------------------------------------------- one more of each

SCHEDULE = '''
"""1F1B with one more forward of warm-up on every rank."""
from partita.compiler.schedules.generator import Generator, register, whole_stage
from partita.compiler.schedules.one_f_one_b import alternate
from partita.compiler.schedules.schedule import FORWARD, FULL_BACKWARD, Action, Schedule, loop_placement
from partita.dsl.config.builtins import COUNT, MICROBATCHES, OVER, Setting


def eager(ranks, microbatches, more=1):
    if more > 9:
        raise ValueError(f"more = {more} is greedy")
    forwards, backwards = ([Action(kind, 0, m) for m in range(microbatches)] for kind in (FORWARD, FULL_BACKWARD))
    warm_ups = [min(microbatches - 1, ranks - rank - 1 + more) for rank in range(ranks)]
    actions = tuple(alternate(forwards, backwards, each) for each in warm_ups)
    return Schedule("eager", microbatches, loop_placement(ranks, 1), actions, tuple(each + 1 for each in warm_ups))


def live(ranks, chunks, microbatches):
    return tuple(min(microbatches, ranks - rank + 1) for rank in range(ranks))


register(
    Generator(
        "eager",
        (MICROBATCHES, Setting("more", COUNT, 1), OVER),
        others=("keen",),
        order=eager,
        live=live,
        bubble=whole_stage,
        planned=lambda ranks, layers, microbatches: (1,),
    )
)
'''

# The page's own example.
OPTIMIZER = next(each.text for each in fences(ROOT / "docs" / "python.md") if each.words == ("signum.py",))

DATA = '''
"""The same numbers in every batch, counted from a file's length."""
from partita.dsl.config.builtins import HOLDOUT, Setting, Text
from partita.runtime.data.files import matched, single
from partita.runtime.data.registry import Source, register


class Counted:
    def __init__(self, inputs, first):
        self.inputs, self.first = inputs, first

    def batch(self, step, rows=None):
        import numpy as np

        found = {}
        for given in self.inputs:
            kept = range(given.batch) if rows is None else rows
            shape = (len(kept), *given.type.shape[1:])
            numbers = np.arange(self.first, self.first + given.type.elements).reshape(given.type.shape)
            found[given.name] = numbers[kept.start : kept.stop].reshape(shape) % given.limit
        return found

    holdout_batch = batch

    def row_names(self, step):
        return []

    holdout_row_names = row_names


def open_counted(call, inputs, seed, root, evaluates):
    return Counted(inputs, single(call.arguments["path"], root, call.span).stat().st_size)


register(Source("counted", (Setting("path", Text()), HOLDOUT), open=open_counted, files=matched("path")))
'''

TRANSPORT = '''
"""All ranks in this process, whose collectives are counted."""
from partita.runtime.transports.registry import InProcess, register
from partita.runtime.transports.virtual import VirtualCluster, VirtualTransport

posted = []


class Tallied(VirtualTransport):
    def collective(self, kind, axis, tensors, arguments):
        posted.append(kind)
        return super().collective(kind, axis, tensors, arguments)


class Cluster(VirtualCluster):
    def __init__(self, ranks, strict, seed):
        super().__init__(ranks, strict, seed)
        self._transports = tuple(Tallied(rank, ranks, self) for rank in range(ranks))


register(InProcess(name="tallied", cluster=Cluster))
'''

COMMAND = '''
"""`partita lines FILE`: how many lines a file has."""
from pathlib import Path

from partita.cli.command import command


def add_arguments(parser):
    parser.add_argument("file", type=Path)
    parser.add_argument("--blank", action="store_true", help="those without anything too")


@command("lines", add_arguments, "wc", summary="count a file's lines")
def run(arguments):
    lines = arguments.file.read_text().splitlines()
    print(len(lines if arguments.blank else list(filter(str.strip, lines))))
'''

FILE = """\
axis batch = 8, seq = 4, embed = 8, vocab = 128

model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param wte: [vocab, embed] ~ normal(0.2)
  let x = embedding(tokens, wte, over = vocab)
  repeat 4 as layer {
    param w: [embed] ~ ones()
    let x = x * w + 0.1
  }
  loss cross_entropy(dot(x, wte, over = embed), targets, over = vocab)
}

mesh line(pipe = 2, data = 2)

layout cut on line {
  shard batch -> data
  stage layer -> pipe
}

schedule order = SCHEDULE

train {
  model = m
  data = DATA
  optimizer = OPTIMIZER
  steps = 3
}
"""
USUAL = {"SCHEDULE": "one_f_one_b(microbatches = 4)", "DATA": 'text("corpus.txt")', "OPTIMIZER": "sgd(lr = 0.01)"}


@contextmanager
def added(kind: str, text: str, folder: Path) -> Iterator[Any]:
    """A module of one more variant of a kind, imported; afterwards it is forgotten."""
    registry, name = REGISTRIES[kind], f"one_more_{kind}"
    before, operations = list(registry), set(OPS)
    (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        yield import_module(name)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)
        for each in set(registry) - set(before):
            registry.unregister(each)
        for each in set(OPS) - operations:
            del OPS[each]
    assert list(registry) == before


def file(folder: Path, **parts: str) -> str:
    (folder / "corpus.txt").write_text("one more of each, and nothing else to change\n" * 20)
    text = FILE
    for part, call in {**USUAL, **parts}.items():
        text = text.replace(part, call)
    (folder / "m.par").write_text(text)
    return str(folder / "m.par")


def everywhere(path: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Every command that reads a file takes it, and it trains; there is no other place to tell of the variant."""
    for command in (["check"], ["fmt", "--check"], ["compile"], ["explain"], ["verify"]):
        assert main([*command, path]) == 0, (command, capsys.readouterr())
    assert main(["run", path, "--transport", "virtual", "--run-dir", str(folder / "run")]) == 0, capsys.readouterr()
    losses = [record["loss"] for record in records(folder / "run") if "loss" in record]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.soak
def test_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    call = "eager(microbatches = 4, more = 2)"
    path = file(tmp_path, SCHEDULE=call)
    assert main(["check", path]) == 1
    assert "unknown schedule `eager`" in capsys.readouterr().out
    with added("schedule", SCHEDULE, tmp_path):
        everywhere(path, capsys, tmp_path)
        assert main(["schedule", path]) == 0
        assert "eager: 2 ranks, 4 microbatches" in capsys.readouterr().out
        assert main(["schedule", "eager", "--stages", "4", "--microbatches", "8"]) == 0
        capsys.readouterr()
        assert main(["plan", path, "--devices", "4", "--top", "40", "--within", "5", "--json"]) == 0
        assert '"schedule": "eager"' in capsys.readouterr().out
        assert main(["compile", path, "order.more=10"]) == 1
        assert "more = 10 is greedy" in capsys.readouterr().err
        assert main(["check", path, "schedule=keen"]) == 1
        assert "did you mean `eager`?" in capsys.readouterr().out
    assert main(["check", path]) == 1


@pytest.mark.soak
def test_an_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = file(tmp_path, OPTIMIZER="signum(lr = 1e-3)")
    with added("optimizer", OPTIMIZER, tmp_path):
        everywhere(path, capsys, tmp_path)
        assert main(["plan", path, "--devices", "2", "--within", "2"]) == 0
        assert main(["run", path, "--transport", "virtual", "--run-dir", str(tmp_path / "kept"), *SAVED]) == 0
        assert main(["checkpoint", "show", str(tmp_path / "kept")]) == 0
        assert "signum" in capsys.readouterr().out


SAVED = ("train.checkpoint=every(3)",)


@pytest.mark.soak
def test_a_source_of_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = file(tmp_path, DATA='counted("corpus.txt")')
    with added("data", DATA, tmp_path):
        everywhere(path, capsys, tmp_path)
        assert main(["run", path, "--transport", "virtual", 'train.data=counted("none")']) == 1
        assert "no file matches `none`" in capsys.readouterr().err


def test_a_transport(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = file(tmp_path)
    run = ["run", path, "--transport", "tallied", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        main(run)
    assert "invalid choice: 'tallied'" in capsys.readouterr().err
    with added("transport", TRANSPORT, tmp_path) as module:
        assert main(run) == 0, capsys.readouterr()
        assert set(module.posted) == {"all-reduce"}
    assert main(["run", path, "--transport", "virtual", "--run-dir", str(tmp_path / "other")]) == 0
    assert [each["loss"] for each in records(tmp_path / "run")] == [
        each["loss"] for each in records(tmp_path / "other")
    ]


def test_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = file(tmp_path)
    with added("command", COMMAND, tmp_path):
        assert main(["lines", path, "--blank"]) == 0
        assert capsys.readouterr().out == f"{len(Path(path).read_text().splitlines())}\n"
        with pytest.raises(SystemExit):
            main(["--help"])
        assert "count a file's lines" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            main(["wc", path])
        assert "did you mean `partita lines`?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["lines", path])


@pytest.mark.parametrize("kind", REGISTRIES)
def test_a_name_is_taken_once(kind: str, tmp_path: Path):
    """Whether or not the variant that has it has been looked up before."""
    modules = {"schedule": SCHEDULE, "optimizer": OPTIMIZER, "data": DATA, "transport": TRANSPORT, "command": COMMAND}
    own = {"schedule": "eager", "optimizer": "signum", "data": "counted", "transport": "tallied", "command": "lines"}
    taken = next(iter(REGISTRIES[kind]))
    text = modules[kind].replace(f'"{own[kind]}"', f'"{taken}"').replace(f'@op("{taken}")', '@op("signum_again")')
    with pytest.raises(ValueError, match=f"there is a .* `{taken}` already"), added(kind, text, tmp_path):
        pass


# ---------------------------------------------------------------- where names stand

# The registry of each kind, the folder of its variants, and the folders in which a name could be meant as theirs:
# commands are called by words that stand for much else below them.
PLACES = {
    "schedule": (
        "dsl/config/builtins.py",
        "compiler/schedules",
        ("api", "cli", "compiler", "dsl", "runtime", "testing"),
    ),
    "optimizer": (
        "dsl/config/builtins.py",
        "compiler/optimizers",
        ("api", "cli", "compiler", "dsl", "runtime", "testing"),
    ),
    "data": ("dsl/config/builtins.py", "runtime/data", ("api", "cli", "compiler", "dsl", "runtime", "testing")),
    "transport": (
        "runtime/transports/registry.py",
        "runtime/transports",
        ("api", "cli", "compiler", "dsl", "runtime", "testing"),
    ),
    "command": ("cli/command.py", "cli", ("cli",)),
}
# Where the word means something else. Texts for people in which a name stands among others are not looked at (messages,
# their index, help for those who come from elsewhere), nor are the templates of `init` and `profile`, which are files.
ELSE = {
    "auto": {
        "compiler/passes/remat_scopes.py": "of `recompute` rules",
        "compiler/pipeline.py": "of `recompute` rules",
        "compiler/planner/space.py": "of `recompute` rules",
        "dsl/check/layouts.py": "of `recompute` rules",
        "dsl/names/occurrences.py": "of `recompute` rules",
        "dsl/syntax/parser.py": "of `recompute` rules",
        "dsl/check/plans.py": "of `recompute` rules",
    },
    "text": {
        "dsl/diagnostic.py": "a style of the terminal",
        "compiler/report/causes.py": "a key of JSON",
        "compiler/report/explain.py": "a key of JSON",
        "runtime/data/jsonl.py": "a field",
        "runtime/data/parquet.py": "a column",
        "runtime/inference/encoding.py": "the call that reads a tokenizer alone",
        "runtime/supervision/consistency.py": "a kind of value that is hashed",
        "runtime/tracking/__main__.py": "a key of JSON",
    },
    "tokens": {
        "compiler/program.py": "what throughput counts",
        "dsl/advice/packing.py": "an input of the model",
        "runtime/progress.py": "what throughput counts",
        "dsl/syntax/tables.py": "a key of the parser's table",
        "runtime/data/packing.py": "an input of the model",
        "runtime/data/windows.py": "an input of the model",
    },
    "random": {
        "compiler/ops/position.py": "an operation",
        "runtime/checkpoint/manifest.py": "a key of manifests",
        "testing/strategies.py": "a placement, and an order",
    },
    "compile": {"cli/training/standalone.py": "a setting"},
    "gloo": {"runtime/transports/process.py": "what copies in the host's memory go over, whatever the transport"},
    "adamw": {"runtime/kernels/native/library.py": "a function in C++"},
    "sgd": {"dsl/spec.py": "the default of `outer`"},
    "completion": {"cli/extras.py": "an extra of the package", "cli/main.py": "an extra of the package"},
    "schedule": {
        "cli/checkpoint.py": "what a checkpoint says",
        "cli/completion.py": "an entry of `train`",
        "cli/compile.py": "a form of the program",
        "cli/plan.py": "what a plan says",
    },
    "verify": {"cli/checkpoint.py": "an action of its own"},
    "run": {
        "cli/checkpoint.py": "an extra of the package",
        "cli/doctor.py": "an extra of the package",
        "cli/extras.py": "an extra of the package",
        "cli/importing.py": "the command that help says",
        "cli/profile.py": "an extra of the package",
        "cli/training/standalone.py": "a part of the command itself, which starts itself for each rank",
        "cli/page/run.py": "an extra of the package",
        "cli/inference.py": "an extra of the package",
        "cli/verify.py": "an extra of the package",
    },
    "checkpoint": {"cli/evaluate.py": "a key of JSON"},
    "sample": {
        "cli/training/standalone.py": "a setting of `eval`",
        "cli/page/history.py": "a key of metrics.jsonl",
        "cli/training/observer.py": "a key of metrics.jsonl",
    },
    "arrays": {"runtime/inference/rows.py": "the archive that a user names"},
}


@cache
def texts(path: Path) -> frozenset[str]:
    """All strings in a file's code."""
    constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return frozenset(each for each in constants if isinstance(each, str))


@pytest.mark.soak
@pytest.mark.parametrize("kind", REGISTRIES)
def test_names_stand_in_their_own_file_and_in_their_registry(kind: str):
    registry, home, folders = PLACES[kind]
    found = {
        (text, path.relative_to(ROOT).as_posix())
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for text in texts(path) & set(REGISTRIES[kind])
    }
    assert {(name, registry) for name in REGISTRIES[kind]} <= found
    elsewhere = {(name, path) for name, path in found if path not in (registry, f"{home}/{name}.py")}
    excused = {(name, path) for name in REGISTRIES[kind] for path in ELSE.get(name, ())}
    assert elsewhere == {each for each in excused if each[1].startswith(folders)}
