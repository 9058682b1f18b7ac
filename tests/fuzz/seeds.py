"""What fuzzing begins from, and the words that it writes: files that are right, and nearly right, of every kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from partita.compiler.schedules.generator import SCHEDULES as GENERATORS
from partita.compiler.schedules.registry import make
from partita.dsl.config.builtins import DATA, DEVICES, INITIAL, LINKS, MEASURES, OPTIMIZERS, SCHEDULES, TRAIN
from partita.dsl.functions.signatures import FUNCTIONS
from partita.dsl.syntax.lexer import language
from partita.dsl.syntax.units import UNITS
from partita.runtime.checkpoint.checksummed import _tail, with_checksum

HERE = Path(__file__).parent
SPECS = HERE.parents[1] / "specs"
WRONG = HERE.parent / "dsl" / "wrong"


def par_seeds() -> Iterator[bytes]:
    """The files that users start from, and one for each mistake."""
    for path in [*sorted(SPECS.glob("*.par")), *sorted(WRONG.glob("*.par"))]:
        if path.stat().st_size <= 8192:
            yield path.read_bytes()


def override_seeds() -> Iterator[bytes]:
    """Overrides of every kind."""
    yield b"batch=128\nlaptop.pipe=4\ntrain.steps=10\ntrain.optimizer.lr=1e-3"
    yield b"schedule=gpipe\nfast.microbatches=8\nschedule.chunks=1"
    yield b"schedule=policy(microbatches = 4, prefer = forward)\nmodel=tiny\nlayout=staged"
    yield b"train.optimizer.lr.peak=1e-3\ntrain.eval=every(10, batches = 2)\ntrain.data=stdlib(holdout = 5%)"
    yield b"train.optimizer.betas=[0.9, 0.95]\ntrain.checkpoint.keep=2\ntrain.precision=bf16"


def schedule_seeds() -> Iterator[bytes]:
    """Schedules of the registry as text."""
    for name in ("gpipe", "one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_v"):
        found = make(name, 2, GENERATORS[name].chunks or 2, 4)
        yield f"# {name}\n{found}\n".encode()
    yield b"F0.0 B0.0 W0.0 F0.1 BW0.1 # one rank\n"


def manifest_seeds() -> Iterator[bytes]:
    """A manifest without its seal, of two ranks; and files with nothing in them."""
    yield with_checksum(MANIFEST)[: -len(_tail(b""))]
    yield b"{}"
    yield b'{\n"a": [1, 2.5e3, "b", null, {"c": true}]'


MANIFEST = {
    "format": "partita checkpoint",
    "version": 2,
    "written_by": "partita 0.1.0",
    "time": 1_700_000_000,
    "step": 4,
    "data": {"step": 4, "files": [{"name": "a.txt", "size": 9, "sha256": "3" * 64, "modified": 1_700_000_000}]},
    "history": {"skipped": 1, "rewinds": 1, "losses": [0.5, 2.0], "norms": [1.0, 3.5]},
    "random": {"seed": 0},
    "model": {"name": "net", "steps": "0" * 64, "optimizer": "adamw"},
    "settings": {"seed": "0"},
    "sources": {"net.par": "axis batch = 4\n"},
    "mesh": [["data", 2], ["pipe", 1]],
    "layout": "cut",
    "schedule": "gpipe(microbatches = 2)",
    "tensors": [
        {"name": "net.w", "dtype": "f32", "axes": [["width", 4]], "split": [], "at": [["data", 0], ["pipe", 0]]},
        {
            "name": "mean/net.w",
            "dtype": "f32",
            "axes": [["width", 4]],
            "split": [["data", "width"]],
            "at": [["pipe", 0]],
        },
    ],
    "files": [{"size": 200, "sha256": "1" * 64}, {"size": 150, "sha256": "2" * 64}],
}


def tensor_seeds() -> Iterator[bytes]:
    """A file of two tensors; headers by themselves."""
    from partita.runtime.checkpoint.shards import Entry, header

    yield header([Entry("b", "i64", (1,)), Entry("w", "f32", (2, 3))]) + bytes(32)
    yield header([]) + b""
    yield header([Entry("b", "f32", (0,))])


def words() -> list[str]:
    """What the fuzzer writes in one piece: words of the language, of schedules and manifests, and numbers at limits."""
    tables = (DATA, DEVICES, INITIAL, LINKS, MEASURES, OPTIMIZERS, SCHEDULES, FUNCTIONS)
    found = [*language().words, *TRAIN.names, *(name for table in tables for name in table), *UNITS]
    found += ["F0.0", "B0.0", "W0.0", "BW0.1", "over", "causal", "batch", "embed", "f32", "i64", "size"]
    found += ["0", "1", "-1", "2.5", "1_0", "1e5", "1e300", "1e-300", "9999e300", "0.01e-300", "1e999", "9" * 41]
    found += [str(1 << 40 | 1), str(1 << 53), str(1 << 63), "true", "null", "NaN", "[[", "{{", "\\u0000", "\\ud800"]
    found += ["python", '"__init__.py"', "forward", "backward", "split", "linear", "flops"]
    found += ['"a"', '"../a"', "\\n", *sorted(set(re.findall(r"\w+", json.dumps(MANIFEST))))]
    return list(dict.fromkeys(found))
