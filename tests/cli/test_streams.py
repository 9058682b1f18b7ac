"""Commands whose output goes where it cannot be written as it is: other encodings, readers that leave, full disks."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from partita.cli.colors import is_colored
from partita.cli.source import rendered
from partita.dsl.load import load_text
from tests.marks import every

FILE = """\
axis batch = 8, embed = 6

model m(x: [batch, embed]) {
  repeat 4 as layer {
    param w: [embed, embed2] ~ normal(1.0)
    let x = rename(dot(x, w, over = embed), embed2 -> embed)
  }
  loss mean(x)
}

mesh k(data = 2, pipe = 2)

layout l on k {
  shard batch -> data
  stage layer -> pipe
}

schedule s = one_f_one_b(microbatches = 4)

train {
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 2
}
""".replace("embed = 6", "embed = 6, embed2 = 6")
WRONG = "axis größe = 1\nmodel m(x: [a]) {\n  loss sum(y → z)\n}\n"
# Each with its exit status.
COMMANDS = {
    "check m.par": 0,
    "check wrong.par": 1,
    "check m.par batch=7": 1,
    "fmt --check m.par": 0,
    "compile m.par": 0,
    "explain m.par": 0,
    "explain m.par w": 0,
    "schedule m.par": 0,
    "plan m.par --devices 2 --within 1": 0,
    "run m.par foo=→": 1,
    "checkpoint ls .": 1,
    "compile m.par --emit python": 0,
    "--help": 0,
    "nothing →": 2,
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "m.par").write_text(FILE)
    (folder / "wrong.par").write_text(WRONG, encoding="utf-8")
    return folder


def ran(command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "partita", *command.split()],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", every(8, COMMANDS))
def test_ascii(command: str, work: Path) -> None:
    done = ran(command, work, PYTHONIOENCODING="ascii")
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == COMMANDS[command]
    assert done.stdout.isascii()
    assert done.stderr.isascii()


@pytest.mark.soak
@pytest.mark.parametrize("encoding", ["ascii:strict", "latin-1", "koi8-r"])
def test_other_encodings(encoding: str, work: Path) -> None:
    done = ran("schedule m.par", work, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout


@pytest.mark.soak
def test_signs_have_plain_ones(work: Path) -> None:
    text = ran("schedule m.par", work, PYTHONIOENCODING="ascii").stdout.decode()
    rich = ran("schedule m.par", work, PYTHONIOENCODING="utf-8").stdout.decode()
    assert "?" not in text, text
    assert not rich.isascii()


@pytest.mark.soak
@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}]
)
@pytest.mark.parametrize("command", ["check wrong.par", "schedule m.par"])
def test_the_plain_locale(command: str, locale: dict[str, str], work: Path) -> None:
    done = ran(command, work, **locale)
    assert b"Traceback" not in done.stderr
    assert done.returncode == (1 if "wrong" in command else 0)


@pytest.mark.soak
@pytest.mark.parametrize("command", ["compile m.par", "check wrong.par", "schedule m.par", "explain m.par", "--help"])
def test_a_reader_that_leaves(command: str, work: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "partita", *command.split()],
        cwd=work,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    told = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(120) in (0, COMMANDS[command])
    assert "Traceback" not in told
    assert "Broken pipe" not in told
    assert "Exception ignored" not in told


@pytest.mark.soak
@pytest.mark.parametrize("command", ["check m.par", "schedule m.par", "--help", "check wrong.par"])
def test_no_standard_output_at_all(command: str, work: Path) -> None:
    line = f"{sys.executable} -m partita {command} >&-"
    done = subprocess.run(["bash", "-c", line], cwd=work, stderr=subprocess.PIPE, timeout=120, check=False)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == (1 if "wrong" in command else 0)


@pytest.mark.soak
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("command", ["check m.par", "schedule m.par", "--version", "compile m.par --emit python"])
def test_a_disk_that_is_full(command: str, work: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "partita", *command.split()],
            cwd=work, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, b"partita: cannot write: No space left on device\n")


# ---------------------------------------------------------------- colours

ANSI = re.compile(rb"\x1b\[[0-9;]*m")


def on_a_terminal(command: str, cwd: Path, **environment: str) -> bytes:
    """What a command writes to a terminal, both streams together."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "partita", *command.split()],
        cwd=cwd,
        env={**NO_COLORS, "TERM": "xterm", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                parts.append(os.read(ours, 1 << 16))
            except OSError:  # the other end is closed
                break
            if not parts[-1]:
                break
        process.wait(60)
    os.close(ours)
    return b"".join(parts).replace(b"\r\n", b"\n")


COLORS = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")
NO_COLORS = {name: value for name, value in os.environ.items() if name not in COLORS}


@pytest.mark.soak
@pytest.mark.parametrize("command", ["check wrong.par", "compile wrong.par"])
def test_diagnostics_are_coloured_on_a_terminal_and_say_the_same(command: str, work: Path) -> None:
    plain = subprocess.run(
        [sys.executable, "-m", "partita", *command.split()],
        cwd=work,
        env=NO_COLORS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    ).stdout
    assert b"\x1b" not in plain
    shown = on_a_terminal(command, work)
    assert b"\x1b[1;31merror[E0101]\x1b[0m" in shown
    assert ANSI.sub(b"", shown) == plain
    for setting in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"CLICOLOR": "0"}, {"FORCE_COLOR": "0"}):
        assert on_a_terminal(command, work, **setting) == plain


@pytest.mark.parametrize(
    ("environment", "terminal", "colored"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"CLICOLOR_FORCE": "1"}, False, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"FORCE_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"CLICOLOR": "0"}, True, False),
        ({"CLICOLOR": "1"}, False, False),
    ],
)
def test_when_there_are_colours(environment: dict[str, str], terminal: bool, colored: bool) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    assert is_colored(Stream(), environment) is colored


def test_a_file_cannot_colour_what_is_said_of_it() -> None:
    (found,) = load_text('axis a = "\x1b[31m"')[1]

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = rendered(found, Terminal())
    assert "\x1b[31m" not in shown
    assert "\ufffd[31m" in shown
