"""Measuring several systems in one run: alternately, each in processes of its own, with medians and spreads."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from partita.runtime.supervision.identity import rank_from_environment
from partita.runtime.supervision.launcher import launch
from partita.runtime.supervision.rendezvous import connect

RESULT = "BENCH_RESULT"  # the file to which the first rank writes what it has measured


def measured(
    command: Sequence[str], ranks: int, threads: int, torchrun: bool = False, python: str = sys.executable
) -> dict[str, Any]:
    """What the first rank of `command` reports, run as so many processes with so many threads each by a `python`.

    They are started as `partita run` starts them, which binds each to its cores, or as `torchrun` does, which does not.
    """
    with TemporaryDirectory() as directory:
        file = Path(directory, "result.json")
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), RESULT: str(file)}
        if torchrun:
            torchs = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            status = subprocess.run([*torchs, *command], env=environment, check=False).returncode
        else:
            status = launch([python, *command], ranks, environment=environment)
        if status:
            sys.exit(f"{' '.join(command)} ended with {status}")
        return json.loads(file.read_text())


def joined(backend: str = "gloo") -> None:
    """For a process that is measured: connect it, as the rank that it is, with the others, until it ends: threads of
    Gloo that are left to the interpreter's end may abort it.
    """
    import torch.distributed as dist

    identity = rank_from_environment()
    assert identity is not None
    connect(identity, backend)
    atexit.register(dist.destroy_process_group)


def report(result: Mapping[str, Any]) -> None:
    """For a process that is measured: hand over a result. That of the first rank counts, whoever calls this."""
    identity = rank_from_environment()
    assert identity is not None
    if identity.rank == 0:
        Path(os.environ[RESULT]).write_text(json.dumps(result))


def profiled(ranks: str, file: Path) -> None:
    """Write the machine's record (`partita profile`)."""
    command = [sys.executable, "-m", "partita", "profile", "--ranks", ranks, "-o", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def trained(arguments: Sequence[str], steps: int, **environment: str) -> list[float]:
    """Tokens a second of each step of `partita run` with these arguments."""
    with TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "partita", "run", *arguments, f"train.steps={steps}", "--run-dir", directory]
        variables = {**os.environ, **environment}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        records = map(json.loads, Path(directory, "metrics.jsonl").read_text().splitlines())
        return [record["tokens_per_second"] for record in records if "tokens_per_second" in record]


def alternately(systems: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Figures of every system, one from each in turn: what else the machine does hits all alike."""
    figures: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds):
        for name in _turned(list(systems), number):
            figures[name].append(systems[name]())
            print(f"round {number + 1}/{rounds}  {name}  {figures[name][-1]:.4g}", file=sys.stderr, flush=True)
    return figures


def _turned(names: list[str], number: int) -> Iterator[str]:
    """Every second round backwards, so that nobody always comes first."""
    return iter(names if number % 2 == 0 else names[::-1])


def agree(losses: Mapping[str, Sequence[float]], absolute: float = 0.0, relative: float = 0.0) -> None:
    """All systems train the same: no loss, which must be finite, is further than that from the first system's."""
    first, *others = losses
    for system in others:
        pairs = zip(losses[first], losses[system], strict=True)
        same = all(abs(a - b) < absolute + relative * abs(a) for a, b in pairs)
        assert same, f"{system} trains something else than {first}: {losses[system]}, not {losses[first]}"


def show(title: str, unit: str, figures: Mapping[str, Sequence[float]], reference: str) -> None:
    """A table: median and range of each system's figures, and the median of the ratios to the reference by round."""
    columns = ("", "median", "range", f"{reference} ÷ this, by round")
    table = Table(*columns, title=f"{title} ({unit})", title_justify="left")
    for name, values in figures.items():
        ratios = sorted(base / value for base, value in zip(figures[reference], values, strict=True))
        ratio = f"{median(ratios):.2f}  ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        table.add_row(name, f"{median(values):.4g}", f"{min(values):.4g} to {max(values):.4g}", ratio)
    Console(width=110).print(table)


def ratios_table(title: str, systems: tuple[str, str], cases: Mapping[str, Sequence[str]], rounds: int) -> None:
    """A table of two systems that one process measures in turn, by case: a round of every case, then the next one.

    Each command reports the seconds of both, pair by pair. A round's ratio, of the second system to the first, is the
    median of its pairs'; shown are the median and the range of the rounds', and the medians of the times.
    """
    found: dict[str, list[dict[str, list[float]]]] = {case: [] for case in cases}
    for number in range(rounds):
        for case, command in cases.items():
            found[case].append(measured(command, 1, 1))
            print(f"round {number + 1}/{rounds}  {case}  {_ratio(found[case][-1], systems):.3f}", file=sys.stderr)
    columns = ("", *systems, f"{systems[1]} ÷ {systems[0]}, by round")
    table = Table(*columns, title=title, title_justify="left")
    for case, results in found.items():
        ratios = sorted(_ratio(each, systems) for each in results)
        times = (f"{1e3 * median(median(each[system]) for each in results):.4g}" for system in systems)
        table.add_row(case, *times, f"{median(ratios):.2f}  ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    Console(width=110).print(table)


def _ratio(result: Mapping[str, Sequence[float]], systems: tuple[str, str]) -> float:
    first, second = (result[system] for system in systems)
    return median(b / a for a, b in zip(first, second, strict=True))
