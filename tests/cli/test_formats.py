"""Diagnostics for other programs: as their schemas want them, with the same status, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from partita.cli.formats import FORMATS
from partita.cli.main import main
from tests.files import ROOT, SPECS

BAD = """axis batch = 8, width = 32, depth = 4

model bad(x: [batch, width]) {
  param w: [width] ~ ones()
  let y = dot(x, w, over = depth)   # 100%: "<x>"
  loss mean(x * ww)
}
"""
GOOD = BAD.replace("depth)", "width)").replace("ww", "y").replace(", depth = 4", "")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in, 100%").mkdir()
    Path("in, 100%/bad.par").write_text(BAD)
    Path("good.par").write_text(GOOD)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main([*arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, captured.out


def test_sarif_has_a_result_for_each_place(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "check", "good.par", "in, 100%/bad.par", "--format", "sarif")
    assert status == 1
    log = json.loads(text)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = [each["id"] for each in run["tool"]["driver"]["rules"]]
    assert rules == ["E0203", "E0201"]
    places = []
    for each in run["results"]:
        assert rules[each["ruleIndex"]] == each["ruleId"]
        assert each["level"] == "error"
        assert "\nhelp: " in each["message"]["text"]
        place = each["locations"][0]["physicalLocation"]
        region = place["region"]
        line = BAD.splitlines()[region["startLine"] - 1]
        places.append((place["artifactLocation"]["uri"], line[region["startColumn"] - 1 : region["endColumn"] - 1]))
    assert places == [("in%2C%20100%25/bad.par", "depth"), ("in%2C%20100%25/bad.par", "ww")]


def test_junit_has_a_case_for_each_file(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "check", "good.par", "in, 100%/bad.par", "--format", "junit")
    assert status == 1
    (suite,) = ElementTree.fromstring(text)
    assert {name: suite.get(name) for name in ("name", "tests", "failures", "errors", "skipped")} == {
        "name": "partita check",
        "tests": "2",
        "failures": "1",
        "errors": "0",
        "skipped": "0",
    }
    good, bad = suite
    assert (good.get("name"), len(good)) == ("good.par", 0)
    (failure,) = bad
    assert failure.get("type") == "E0203"
    assert '# 100%: "<x>"' in (failure.text or "")


def test_github_has_a_command_for_each_place(capsys: pytest.CaptureFixture[str]) -> None:
    """As @actions/core escapes them: https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts."""
    status, text = said(capsys, "check", "in, 100%/bad.par", "--format", "github")
    assert status == 1
    first, second = text.splitlines()
    assert first.startswith("::error file=in%2C 100%25/bad.par,line=5,col=28,title=E0203::`x` has no axis `depth`")
    assert "%0Ahelp: " in first
    assert second.startswith("::error file=in%2C 100%25/bad.par,line=6,col=17,title=E0201::unknown name `ww`")


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_right_has_none(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "compile", str(SPECS / "mlp.par"), "--format", form)
    assert status == 0
    assert text == "" if form == "github" else "error" not in text.replace('errors="0"', "")


def test_warnings_and_claims_are_said_alike(capsys: pytest.CaptureFixture[str]) -> None:
    Path("claims.par").write_text((SPECS / "mlp.par").read_text() + "\nexpect { peak_memory <= 1KiB }\n")
    status, text = said(capsys, "compile", "claims.par", "--format", "github")
    assert status == 1
    assert text.startswith("::error file=claims.par,line=")
    status, text = said(capsys, "verify", "claims.par", "--format", "junit")
    assert status == 1
    assert ElementTree.fromstring(text)[0].get("failures") == "1"


def test_a_file_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "in, 100%/bad.par", "--format", "sarif", "-o", "found.sarif"]) == 1
    assert capsys.readouterr().out == ""
    assert len(json.loads(Path("found.sarif").read_text())["runs"][0]["results"]) == 2


def test_one_format_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "good.par", "--json", "--format", "sarif"]) == 2
    assert "choose one" in capsys.readouterr().err


def test_the_action_says_what_is_wrong_in_all_files() -> None:
    """What it runs, with the environment that it declares, in a shell as GitHub starts one."""
    action = yaml.safe_load((ROOT / "integrations" / "github" / "action.yml").read_text())
    step = action["runs"]["steps"][-1]
    names = {"FILES": "files", "COMMAND": "command", "ARGUMENTS": "arguments"}
    assert step["env"] == {name: f"${{{{ inputs.{own} }}}}" for name, own in names.items()}
    given = {name: action["inputs"][own]["default"] for name, own in names.items()}
    Path("deep").mkdir()
    Path("deep/bad.par").write_text(BAD)
    found = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        env={**os.environ, **given, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stderr
    assert [line.split(",line=")[0] for line in found.stdout.splitlines()] == [
        *["::error file=deep/bad.par"] * 2,
        *["::error file=in%2C 100%25/bad.par"] * 2,
    ]


@pytest.mark.parametrize(("hook", "changed"), [("partita-check", False), ("partita-fmt", True)])
def test_hooks_take_several_files(hook: str, changed: bool) -> None:
    """As pre-commit runs them: with the names of files behind the entry."""
    hooks = {each["id"]: each for each in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    command, *options = hooks[hook]["entry"].split()
    Path("other.par").write_text(GOOD.replace("  loss", "      loss"))
    before = Path("other.par").read_text()
    assert command == "partita"
    assert main([*options, "good.par", "other.par"]) == 0
    assert (Path("other.par").read_text() != before) == changed
    if not changed:
        assert main([*options, "good.par", "in, 100%/bad.par"]) == 1
