"""Completion as a user of bash has it: a real shell reads the script, and completes a line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import here
from tests.files import SPECS

# Completes the line that is given as words, as bash does when a user presses tab at its end.
ASK = """
partita() { "$PYTHON" -m partita "$@"; }
eval "$(partita completion bash)"
ask() {
  COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9
  read -ra COMP_WORDS <<< "$COMP_LINE"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
  _python_argcomplete partita
  printf '%s\\n' "${COMPREPLY[@]}"; echo "--"
}
"""


def completed(folder: Path, *lines: str) -> list[list[str]]:
    """What bash offers at the end of each line."""
    asked = "\n".join(f"ask {line!r}" for line in lines)
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "-c", ASK + asked],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [[word.strip() for word in each.split()] for each in done.stdout.split("--\n")][: len(lines)]


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_what_may_follow(tmp_path: Path) -> None:
    (tmp_path / "gpt.par").write_text((SPECS / "gpt.par").read_text())
    (tmp_path / "notes.txt").write_text("")
    files, keys, layouts, names = completed(
        tmp_path,
        "partita check ",
        "partita run gpt.par cluster.",
        "partita run gpt.par layout=",
        "partita explain gpt.par gpt.w",
    )
    assert "gpt.par" in files
    assert "notes.txt" not in files
    assert "--json" in files
    assert {"cluster.data=", "cluster.pipe=", "cluster.device="} <= set(keys)
    assert layouts == ["megatron"]
    assert {"gpt.wte", "gpt.wpe"} <= set(names)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(shell: str, tmp_path: Path) -> None:
    done = here("completion", shell, cwd=tmp_path)
    assert done.returncode == 0
    assert "partita" in done.stdout
    assert "_ARGCOMPLETE" in done.stdout


def test_without_argcomplete_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.cli.extras._there", lambda name: name != "argcomplete")
    done = here("completion", "bash", cwd=tmp_path)
    expected = "partita: `partita completion` needs argcomplete: pip install 'partita[completion]'\n"
    assert (done.returncode, done.stderr) == (2, expected)
