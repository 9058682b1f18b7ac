"""Fuzzing for a given time: all targets by turns, each under `tests.fuzz.driver`, and what came of it in numbers.

Everything stands in a folder (`.fuzz` at the top of the repository): `TARGET/corpus`, inputs that reached something
new, from which the next run goes on; `TARGET/found`, inputs that broke the law; and `totals.jsonl`, a line for each
turn, so that the numbers of all runs can be added up. What is found goes to `tests/fuzz/corpus/TARGET`, where
`make test` replays it, together with its mend.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import asdict, frozen

from tests.fuzz.seeds import HERE
from tests.fuzz.targets import RUNNABLE, TARGETS

ROOT = HERE.parents[1]
FOLDER = ROOT / ".fuzz"
TURN_SECONDS = 120.0
INPUT_SECONDS = 10  # after which an input counts as a hang
MOST_BYTES = 8192
MOST_FOUND = 20  # of a target in one run: whoever has found so many has found the same one again
# What a run of all is to come to, in one piece or several.
WANTED_SECONDS, WANTED_EXECUTIONS = 7200.0, 500_000


@frozen
class Turn:
    """One turn of a target."""

    target: str
    executions: int
    seconds: float
    found: tuple[str, ...] = ()


def fuzz(seconds: float, targets: Iterable[str] = tuple(TARGETS), folder: Path = FOLDER) -> list[Turn]:
    """Fuzz targets by turns for so many seconds in all; a line is printed and written for each turn."""
    targets = list(targets)
    turn = min(TURN_SECONDS, seconds / len(targets))
    end = time.monotonic() + seconds
    turns: list[Turn] = []
    while (left := end - time.monotonic()) > 1:
        target = targets[len(turns) % len(targets)]
        turns.append(_turn(target, min(turn, left), folder / target))
        with (folder / "totals.jsonl").open("a") as file:
            file.write(json.dumps(asdict(turns[-1])) + "\n")
        print(_line(target, turns[-1].executions, turns[-1].seconds, len(turns[-1].found)), flush=True)
    return turns


def _turn(target: str, seconds: float, folder: Path) -> Turn:
    """Run a target's driver, again after each finding, for so many seconds."""
    corpus, found = folder / "corpus", folder / "found"
    for each in (corpus, found):
        each.mkdir(parents=True, exist_ok=True)
    for seed in RUNNABLE[target].seeds():
        (corpus / f"seed-{hashlib.sha1(seed).hexdigest()}").write_bytes(seed)
    start, executions, inputs = time.monotonic(), 0, list[str]()
    while len(inputs) < MOST_FOUND and (left := int(seconds - (time.monotonic() - start))) >= 1:
        options = [f"-max_total_time={left}", f"-timeout={INPUT_SECONDS}", f"-max_len={MOST_BYTES}"]
        options += ["-print_final_stats=1", "-rss_limit_mb=0", f"-artifact_prefix={found}/"]
        places = [str(corpus), *(str(path) for path in (HERE / "corpus" / target,) if path.is_dir())]
        command = [sys.executable, "-m", "tests.fuzz.driver", target, *options, *places]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
        executions += _executions(done.stderr)
        if done.returncode == 0:
            break
        print(done.stdout[-4000:] + done.stderr[-4000:], flush=True)
        written = re.findall(r"Test unit written to .*/(\S+)", done.stderr)
        assert written, f"the driver of {target} failed by itself"
        inputs += written
    return Turn(target, executions, time.monotonic() - start, tuple(sorted(set(inputs))))


def _executions(output: str) -> int:
    """How many inputs libFuzzer says that it has run."""
    counts = re.findall(r"stat::number_of_executed_units: (\d+)", output) or re.findall(r"^#(\d+)\s", output, re.M)
    return int(counts[-1]) if counts else 0


def totals(turns: Iterable[Mapping[str, object]]) -> str:
    """A table of what each target has come to, and all together."""
    executions, seconds, found = dict.fromkeys(TARGETS, 0), dict.fromkeys(TARGETS, 0.0), dict.fromkeys(TARGETS, 0)
    for each in turns:
        target = str(each["target"])
        executions[target] += int(str(each["executions"]))
        seconds[target] += float(str(each["seconds"]))
        found[target] += len(list(each["found"]))  # type: ignore[call-overload]
    lines = [_line(target, executions[target], seconds[target], found[target]) for target in TARGETS]
    lines.append(_line("all", sum(executions.values()), sum(seconds.values()), sum(found.values())))
    lines.append(f"of {WANTED_EXECUTIONS:,} executions and {WANTED_SECONDS / 3600:g} h that are wanted")
    return "\n".join(lines)


def _line(target: str, executions: int, seconds: float, found: int) -> str:
    speed = executions / seconds if seconds else 0.0
    return f"{target:10} {executions:>10,} executions {seconds:>8.0f} s {speed:>7.0f}/s  {found} found"


def written(folder: Path = FOLDER) -> list[dict[str, object]]:
    """The turns of all runs so far."""
    path = folder / "totals.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
