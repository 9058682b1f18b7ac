"""Commands whose output goes where it cannot be written as it is: other encodings, readers that leave, full disks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import every, soak

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


@pytest.mark.parametrize("command", every(4, COMMANDS))
def test_ascii(command: str, work: Path) -> None:
    done = ran(command, work, PYTHONIOENCODING="ascii")
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == COMMANDS[command]
    assert done.stdout.isascii()
    assert done.stderr.isascii()


@pytest.mark.parametrize("encoding", ["ascii:strict", "latin-1", "koi8-r"])
def test_other_encodings(encoding: str, work: Path) -> None:
    done = ran("schedule m.par", work, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout


def test_signs_have_plain_ones(work: Path) -> None:
    text = ran("schedule m.par", work, PYTHONIOENCODING="ascii").stdout.decode()
    rich = ran("schedule m.par", work, PYTHONIOENCODING="utf-8").stdout.decode()
    assert "?" not in text, text
    assert not rich.isascii()


@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}]
)
@pytest.mark.parametrize("command", ["check wrong.par", "schedule m.par"])
def test_the_plain_locale(command: str, locale: dict[str, str], work: Path) -> None:
    done = ran(command, work, **locale)
    assert b"Traceback" not in done.stderr
    assert done.returncode == (1 if "wrong" in command else 0)


@pytest.mark.parametrize(
    "command", ["compile m.par", *soak("check wrong.par", "schedule m.par", "explain m.par", "--help")]
)
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


@pytest.mark.parametrize("command", ["check m.par", "schedule m.par", "--help", "check wrong.par"])
def test_no_standard_output_at_all(command: str, work: Path) -> None:
    line = f"{sys.executable} -m partita {command} >&-"
    done = subprocess.run(["bash", "-c", line], cwd=work, stderr=subprocess.PIPE, timeout=120, check=False)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == (1 if "wrong" in command else 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("command", ["check m.par", "schedule m.par", "--version", "compile m.par --emit python"])
def test_a_disk_that_is_full(command: str, work: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "partita", *command.split()],
            cwd=work, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, b"partita: cannot write: No space left on device\n")
