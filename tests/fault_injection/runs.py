"""Runs of the command as a user starts them, in a folder of their own, and what they leave there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from attrs import define, field, frozen

from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.loading import Commit
from partita.runtime.checkpoint.manifest import NAME
from partita.runtime.checkpoint.store import commit_name
from partita.runtime.rank import CompiledRun
from partita.runtime.run_directory import FAULT
from partita.runtime.supervision.statuses import SAVING
from partita.runtime.tracing.flight import Position, read
from tests.commands import computed, here
from tests.fault_injection.processes import TIMEOUT, Held, marked, wait_until
from tests.runtime.checkpoint.runs import plan_of

RANKS, STEPS, INTERVAL, ALL = 2, 16, 2, 100
RUN_DIRECTORY = "run"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
STALL_SECONDS = 10  # what a busy machine does not take for an action, nor a slow disk for a save
# Everything that draws random numbers; actions long enough to be met, in steps short enough to have many.
TEXT = """
axis batch = 16, seq = 32, embed = 32, ffn = 128, vocab = 16

block mlp(x: [batch, seq, embed]) {{
  param up: [embed, ffn] ~ normal(0.1)
  param down: [ffn, embed] ~ normal(0.1)
  return x + dropout(dot(gelu(dot(rms_norm(x, over = embed), up, over = embed)), down, over = ffn), rate = 0.25)
}}

model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {{
  param wte: [vocab, embed] ~ normal(0.5)
  sample eps: [batch, embed] ~ normal(0.1)
  let x = embedding(tokens, wte, over = vocab) + eps
  repeat 4 as layer {{ let x = mlp(x) }}
  loss cross_entropy(dot(rms_norm(x, over = embed), wte, over = embed), targets, over = vocab)
}}

{layout}

schedule fast = {schedule}(microbatches = 4)

train {{
  data = random()
  optimizer = adamw(lr = cosine(peak = 0.01, warmup = 2, total = 20), weight_decay = 0.1)
  clip = 1.0
  steps = {steps}
  eval = every(5, batches = 2)
  checkpoint = every({interval}, keep = {keep})
}}
"""
LAYOUTS = {
    "pipeline": ("one_f_one_b", "mesh cluster(pipe = 2)\n\nlayout cut on cluster {\n  stage layer -> pipe\n}"),
    "zero3": (
        "gpipe",
        "mesh cluster(data = 2)\n\nlayout cut on cluster {\n  shard batch -> data\n  shard param -> data\n}",
    ),
}


def text_of(layout: str, keep: int = ALL) -> str:
    """The file of a run."""
    schedule, declared = LAYOUTS[layout]
    return TEXT.format(layout=declared, schedule=schedule, steps=STEPS, interval=INTERVAL, keep=keep)


def planned(layout: str) -> CompiledRun:
    """What the runs of a layout run."""
    return plan_of(text=text_of(layout))


@frozen
class Ended:
    """A process that has ended."""

    status: int
    out: str
    errors: str

    def __str__(self) -> str:
        return f"exit status {self.status}\n{self.out}{self.errors}"

    def said(self, number: signal.Signals) -> str | None:
        """The step that is said to be saved, of a run that this signal has ended; "" if none, None if more is said."""
        notice = f"(?:partita: {SAVING}\n)?" if number == signal.SIGINT else ""
        words = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
        saved = r"(?:: saved step (\d+); the same command goes on)?"
        found = re.fullmatch(f"{notice}partita: {words}{saved}\n", self.errors)
        return None if found is None else found[1] or ""


@define(eq=False)
class Run:
    """The runs of one file in a folder, one after another, with a directory for temporary files of their own."""

    folder: Path
    layout: str
    keep: int = ALL
    held: Held = field(factory=Held)
    story: list[str] = field(factory=list)
    process: subprocess.Popen[bytes] | None = None
    mark: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.mark = f"SURVIVAL={uuid.uuid4().hex}"
        (self.folder / "m.par").write_text(text_of(self.layout, self.keep))
        self.temporary.mkdir()

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def directory(self) -> Path:
        return self.folder / RUN_DIRECTORY

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def errors(self) -> str:
        """What the process has written to standard error so far."""
        return (self.folder / "errors").read_text()

    def start(self, *options: str, prefix: tuple[str, ...] = (sys.executable,)) -> None:
        """Start the command, as the leader of a process group, as a shell does."""
        command = [*prefix, "-m", "partita", "run", "m.par", "--run-dir", RUN_DIRECTORY, *options]
        name, _, value = self.mark.partition("=")
        environment = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", name: value}
        self.story.append(f"$ {' '.join(command)}")
        # Jobs in the background of a shell ignore Ctrl-C, and all that they start would inherit that.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with (self.folder / "out").open("wb") as out, (self.folder / "errors").open("wb") as errors:
                self.process = subprocess.Popen(
                    command, cwd=self.folder, env=environment, stdout=out, stderr=errors, process_group=0
                )
        finally:
            signal.signal(signal.SIGINT, handler)

    def alone(self, *options: str) -> None:
        """Run the file with all ranks in this process, which has torch already, with as many threads as in another."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            done = here("run", "m.par", "--run-dir", RUN_DIRECTORY, "--transport", "virtual", *options, cwd=self.folder)
        assert done.returncode == 0, done.stderr

    def finish(self) -> Ended:
        """Wait for the end of the process."""
        assert self.process is not None
        status = self.process.wait(timeout=TIMEOUT)
        ended = Ended(status, (self.folder / "out").read_text(), self.errors)
        self.story.append(str(ended))
        return ended

    def clear(self) -> None:
        """End whatever a failed test has left."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for process in marked(self.mark):
            os.kill(process, signal.SIGKILL)

    # ------------------------------------------------------------ while it runs

    def position(self, rank: int) -> Position | None:
        """How far a rank is; None where none is running."""
        names = [each for each in os.listdir(self.temporary) if re.fullmatch(r"partita-\w+", each)]
        found = (read(each, rank) for each in [*(self.temporary / name for name in names), self.directory / "flight"])
        # Those of the next attempt stand ready, and have taken few marks.
        return max((each for each in found if each is not None), key=lambda each: each.total, default=None)

    def partial(self) -> set[str]:
        """The names in the directory of the save under way."""
        for path in self.checkpoints.glob("*.partial-*/"):
            try:
                return {path.name, *os.listdir(path)}
            except FileNotFoundError:
                continue
        return set()

    # ------------------------------------------------------------ afterwards

    def records(self) -> list[dict]:
        """What the run computed."""
        return computed(self.directory)

    def commits(self) -> dict[int, tuple[str, ...]]:
        """The SHA-256 of the files of every commit, each of which is whole, by step."""
        return {step: self._hashes(step) for step in steps_in(self.checkpoints)}

    def _hashes(self, step: int) -> tuple[str, ...]:
        manifest = read_manifest(self.checkpoints, step)
        with Commit(self.checkpoints, manifest) as commit:
            assert list(commit.problems(range(len(manifest.files)))) == []
        names = {NAME, *(f"rank-{rank}.safetensors" for rank in range(RANKS))}
        assert set(os.listdir(self.checkpoints / commit_name(step))) == names
        return tuple(file.sha256 for file in manifest.files)

    def check_nothing_runs(self) -> None:
        """No process, no listening port, no temporary file."""
        wait_until(lambda: not marked(self.mark), "its processes end")
        # A process that is being killed loses its environment before its sockets.
        wait_until(lambda: not self.held.remaining(), "nothing listens, and no shared memory is left")
        wait_until(lambda: not os.listdir(self.temporary), "its temporary files are removed")

    def check_nothing_remains(self) -> None:
        """Nor anything in the run's directory but what belongs there, once a run has come to its end."""
        self.check_nothing_runs()
        assert set(os.listdir(self.directory)) - {FAULT} == {"metrics.jsonl", "checkpoints", "lock", "run.json"}
        assert set(os.listdir(self.checkpoints)) == {commit_name(step) for step in self.expected()} | {"lock"}

    def expected(self) -> list[int]:
        """The steps of the commits that stay: every so many, and one that was saved because the run was to end."""
        found = steps_in(self.checkpoints)
        asked = {step for step in found if step % INTERVAL}
        assert len(asked) <= 1
        return sorted({*range(INTERVAL, STEPS + 1, INTERVAL), *asked})[-self.keep :]
