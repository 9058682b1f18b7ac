"""`check` and `fmt` as a user calls them."""

import argparse
import inspect
import json
import subprocess
import sys

import pytest

import partita
from partita.cli.command import COMMANDS
from partita.cli.main import OPTIONS, _parser, main
from partita.dsl.advice import foreign
from partita.dsl.load import load_text
from partita.runtime.supervision import capacity
from tests.files import SPECS

WRONG = "axis a = 1\nmodel m(x: [a]) {\n  loss sum(y)\n}\n"


@pytest.fixture
def wrong(tmp_path):
    path = tmp_path / "wrong.par"
    path.write_text(WRONG)
    return path


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.par")), ids=lambda path: path.name)
def test_check_passes_on_the_examples(path, capsys):
    assert main(["check", str(path)]) == 0
    assert "error" not in capsys.readouterr().out


def test_check_shows_diagnostics_and_a_summary(wrong, capsys):
    assert main(["check", str(wrong)]) == 1
    out = capsys.readouterr().out
    assert "error[E0201]: unknown name `y`" in out
    assert f"{wrong}:3:12" in out
    assert out.endswith(f"{wrong}: 1 error\n")


def test_check_as_json_is_stable(wrong, capsys):
    assert main(["check", "--json", str(wrong)]) == 1
    (diagnostic,) = json.loads(capsys.readouterr().out)
    for key in ("code", "severity", "message", "file", "line", "column", "help"):
        assert key in diagnostic
    assert (diagnostic["code"], diagnostic["line"], diagnostic["column"]) == ("E0201", 3, 12)
    assert main(["check", "--json", str(SPECS / "gpt.par")]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_overrides_stand_before_and_after_options(capsys):
    arguments = ["check", str(SPECS / "gpt.par"), "batch=128", "--json", "cluster.pipe=1", "seq=0"]
    assert main(arguments) == 1
    assert [d["code"] for d in json.loads(capsys.readouterr().out)] == ["E0310"]


@pytest.mark.parametrize("arguments", [["check"], ["chek", "x"], ["check", "x", "--nope"], []])
def test_wrong_usage_is_status_2(arguments, capsys):
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2


def test_control_characters_do_not_reach_the_terminal(tmp_path, capsys):
    path = tmp_path / "x.par"
    path.write_text("axis a = \x1b]0;title\x07 1\n")
    assert main(["check", str(path)]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_fmt_writes_in_place_and_keeps_the_mode(tmp_path, capsys):
    path = tmp_path / "x.par"
    path.write_text("axis   a=1 # one\n")
    path.chmod(0o640)
    assert main(["fmt", "--check", str(path)]) == 1
    assert path.read_text() == "axis   a=1 # one\n"
    assert main(["fmt", str(path)]) == 0
    assert path.read_text() == "axis a = 1  # one\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert main(["fmt", "--check", str(path)]) == 0
    assert list(tmp_path.iterdir()) == [path]


def test_fmt_leaves_a_file_alone_that_does_not_parse(tmp_path, capsys):
    path, good = tmp_path / "x.par", tmp_path / "good.par"
    path.write_text("axis   a=\n")
    good.write_text("axis   a=1\n")
    assert main(["fmt", str(path), str(good)]) == 1
    assert path.read_text() == "axis   a=\n"
    assert good.read_text() == "axis a = 1\n"
    assert "E0103" in capsys.readouterr().err


def test_fmt_to_another_file(tmp_path, capsys):
    path = tmp_path / "x.par"
    path.write_text("axis   a=1\r\n")
    assert main(["fmt", str(path), "-o", "-"]) == 0
    assert capsys.readouterr().out == "axis a = 1\n"
    assert main(["fmt", str(path), "-o", str(tmp_path / "out.par")]) == 0
    assert (tmp_path / "out.par").read_bytes() == b"axis a = 1\n"
    assert path.read_bytes() == b"axis   a=1\r\n"


def test_check_imports_neither_torch_nor_what_builds_the_grammar():
    """And of the compiler and the runtime no more than the variants that the file names are made of."""
    code = (
        "import sys; from partita.cli.main import main; status = main(['check', sys.argv[1]]);"
        "heavy = ('torch', 'numpy', 'lark', 'rich', 'matplotlib', 'hypothesis');"
        "ours = {'.'.join(name.split('.')[1:3]) for name in sys.modules if name.startswith('partita.')};"
        "print([name for name in heavy if name in sys.modules],"
        "      sorted(name for name in ours if name.startswith(('compiler.', 'runtime.')))); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(SPECS / "gpt.par")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    variants = ["compiler.instructions", "compiler.layout", "compiler.ops", "compiler.optimizers", "compiler.schedules"]
    assert done.stdout.splitlines()[-1] == f"[] {[*variants, 'runtime.data']}"


@pytest.mark.soak
def test_a_reader_that_leaves_gives_no_traceback(tmp_path):
    path = tmp_path / "x.par"
    path.write_text("".join(f"axis a{i} = 1\n" for i in range(3000)))
    command = f"{sys.executable} -m partita check {path} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert "W0201" in done.stdout


WITHOUT_SCHEDULE = (
    "axis batch = 4\nmodel m(x: [batch]) { param w: [] ~ ones()  loss mean(x) * w }\n"
    "train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }\n"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train m.par", "there is no command `train`; did you mean `partita run`?"),
        ("chek m.par", "there is no command `chek`; did you mean `partita check`?"),
        ("help", "did you mean `partita --help`?"),
        ("version", "did you mean `partita --version`?"),
        ("m.par", "a file follows a command: `partita run m.par`"),
        ("frobnicate m.par", "there are init, import, check, fmt, compile"),
        ("run m.par --steps 3", "unrecognized arguments: --steps 3; settings take no dashes: train.steps=3\n"),
        ("run m.par --train.steps=3", "settings take no dashes: train.steps=3"),
        ("check m.par --batch-size 3", "settings take no dashes: batch=3\n"),
        ("check m.par --lr", "settings take no dashes: train.optimizer.lr=…\n"),
        ("plan m.par --gpus 8", "did you mean `--devices`?"),
        ("run m.par --checkpoint runs/m", "settings take no dashes: train.checkpoint=…"),
        ("sample m.par --checkpoint runs/m", "did you mean `--run-dir`?"),
        ("sample m.par --max-new-tokens 10", "did you mean `--length`?"),
        ("run m.par --output-dir runs/m", "did you mean `--run-dir`?"),
        ("run m.par --wandb", "did you mean `--track`?"),
        ("run m.par --resume", "a run goes on by itself from the newest checkpoint in its directory"),
        ("run m.par --schedule 1f1b", "its name is `one_f_one_b`; settings take no dashes: schedule=…"),
        ("run m.par --device cuda", "a run takes a GPU for each rank where there are any"),
        ("run m.par --mesh data=2", "ranks are those of a declared mesh"),
        ("run mesh.par --mesh data=2", "settings take no dashes: c.tensor=…\n"),
        ("run mesh.par --mesh tp=4", "settings take no dashes: c.tensor=4\n"),
        ("checkpoint ls --run-dir runs/m", "it takes no option: `DIR`"),
        ("run m.par --trace", "expected one argument: `--trace DIR`"),
        ("check m.par --hidden-size=3", "unrecognized arguments: --hidden-size=3\n"),
        ("check m.par --epochs=3", "training length is given in steps: `train.steps`\n"),
        ("check other.par --steps=3", "unrecognized arguments: --steps=3\n"),
        ("run m.par --trnsport gloo", "did you mean `--transport`?\n"),
        ("sample m.par --temp 1", "did you mean `--temperature`?\n"),
        ("fmt m.par --lr=3", "unrecognized arguments: --lr=3\n"),
        ("check m.par -v", "unrecognized arguments: -v\n"),
    ],
)
def test_a_command_or_option_that_there_is_not(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.par").write_text(WITHOUT_SCHEDULE)
    (tmp_path / "mesh.par").write_text("mesh c(tensor = 2)")
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sample m.par runs/m", "a directory is named by an option: `--run-dir runs/m`"),
        ("sample runs/m", "`--run-dir runs/m` names the run whose model is used"),
        ("checkpoint ls m.par", "DIR is a directory; runs of that file save to `runs/m`"),
        ("run m.par device=cuda", "a run takes a GPU for each rank where there are any"),
        ("run m.par train.gradient_accumulation_steps=4", "`schedule accumulate = gpipe(microbatches = 4)`"),
        ("run m.par train.log_every=4", "every step is recorded"),
    ],
)
def test_a_word_where_another_belongs(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/m").mkdir(parents=True)
    (tmp_path / "m.par").write_text(WITHOUT_SCHEDULE)
    assert main(arguments.split()) in (1, 2)
    assert message in capsys.readouterr().err


def test_what_stands_for_a_word_of_others_exists():
    options = {action.dest for name in COMMANDS for action in actions(_parser([name])[1])}
    arguments = {name for each in partita.__all__ for name in inspect.signature(getattr(partita, each)).parameters}
    for word, ours in foreign.OPTIONS.items():
        assert {*ours} <= options | arguments, word
    # Pasted, the schedule is right.
    text = WITHOUT_SCHEDULE.replace("train {", "schedule accumulate = gpipe(microbatches = 4)\ntrain {")
    spec, diagnostics = load_text(text)
    assert spec is not None, diagnostics


def actions(parser):
    for action in parser._actions:
        yield action
        for each in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from actions(each)


@pytest.mark.parametrize("name", ["chec\x1b]0;k", "\n", "x" * 10_000])
def test_any_word_instead_of_a_command(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name])
    assert stopped.value.code == 2
    assert "\x1b" not in capsys.readouterr().err


def test_what_others_call_a_command_is_none_of_ours():
    others = [word for each in COMMANDS.values() for word in each.others]
    assert not {*others, *OPTIONS} & set(COMMANDS)
    assert len(others) == len(set(others))


def test_what_does_not_fit_into_memory_is_said_in_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(capacity, "memory", lambda: 1 << 80)  # or else it is refused before it starts
    (tmp_path / "large.par").write_text(
        "axis batch = 4, embed = 1_099_511_627_776, wide = 1_048_576\n"
        "model m(x: [batch]) {\n  param w: [embed, wide] ~ ones()\n  loss mean(x) * mean(w)\n}\n"
        "train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }\n"
    )
    assert main(["run", str(tmp_path / "large.par"), "--transport", "virtual"]) == 3
    error = capsys.readouterr().err
    assert "partita: out of memory: you tried to allocate 4611686018427387904 bytes" in error
    assert "Traceback" not in error
