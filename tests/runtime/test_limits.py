"""What is too large for a machine is refused before it is made, and so are forged archives of arrays."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from partita.cli.main import main
from partita.cli.training import room
from partita.compiler.pipeline import compile_spec
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.dsl.spec import Call
from partita.dsl.types import Axis, Type
from partita.runtime.data.dataset import Input
from partita.runtime.data.items import open_items
from partita.runtime.supervision import capacity
from tests.files import SPECS

# ---------------------------------------------------------------- one machine


@pytest.mark.parametrize("transport", [[], ["--transport", "virtual"]])
def test_a_file_does_not_fill_a_machine_with_ranks(transport: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    command = ["run", str(SPECS / "llama.par"), "cluster.data=1000", "batch=16000"]
    assert main([*command, *transport, "--run-dir", str(tmp_path / "run")]) == 1
    shown = capsys.readouterr().err
    assert "error[E0613]: mesh `cluster` has 4,000 ranks; at most 256 can be started on one machine" in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("mebibytes", "overrides", "transport", "help"),
    [
        (420, ["laptop.pipe=4"], [], None),
        (340, ["laptop.pipe=4"], [], "`--transport virtual` runs all ranks in one process"),
        (340, ["laptop.pipe=4"], ["--transport", "virtual"], None),
        (400, ["laptop.pipe=4", "embed=1024", "key=256"], [], "use a smaller mesh or batch"),
        (400, ["laptop.pipe=4", "embed=1024", "key=256"], ["--transport", "virtual"], "use a smaller mesh or batch"),
    ],
)
def test_what_does_not_fit_the_memory_is_refused_before_a_rank_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    mebibytes: int,
    overrides: list[str],
    transport: list[str],
    help: str | None,
):
    """By the bounds of the tensors and what processes hold; one that fits goes on, here to a place it cannot have."""
    monkeypatch.setattr(capacity, "memory", lambda: mebibytes << 20)
    monkeypatch.setattr(room, "FORKS", True)
    (tmp_path / "run").write_text("")
    command = ["run", str(SPECS / "tiny.par"), "batch=8", "seq=32", *overrides, "schedule=one_f_one_b"]
    status = main([*command, *transport, "--run-dir", str(tmp_path / "run")])
    shown = capsys.readouterr().err
    assert (status, "E0626" in shown) == ((2, False) if help is None else (1, True)), shown
    assert help is None or f"help: {help}" in shown


@pytest.mark.few(1)
@pytest.mark.parametrize("cores", [1, 2])
def test_more_ranks_than_cores_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, cores: int
):
    monkeypatch.setattr(capacity, "cores", lambda: cores)
    (tmp_path / "run").write_text("")
    assert main(["run", str(SPECS / "tiny.par"), "--run-dir", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr().err
    assert ("warning[W0606]: 2 ranks share 1 core" in shown) == (cores == 1), shown
    assert ("help: `--transport virtual` runs all ranks" in shown) == (cores == 1), shown


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there are GPUs")
def test_nccl_without_gpus_is_refused_before_a_rank_starts(tmp_path: Path, capsys: pytest.CaptureFixture):
    run = tmp_path / "run"
    assert main(["run", str(SPECS / "tiny.par"), "--transport", "nccl", "--run-dir", str(run)]) == 1
    assert "error[E0611]: ranks on this machine: 2; GPUs (NCCL needs one per rank): 0" in capsys.readouterr().err
    assert not run.exists()


# ---------------------------------------------------------------- archives of arrays


def npy(shape: str, dtype: str = "<f4", data: bytes = bytes(16)) -> bytes:
    """An array as numpy writes it, with any text for its shape."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


ARRAYS: dict[str, bytes] = {
    "larger than all memory": npy("(1152921504606846976,)"),
    "larger than 64 bits": npy(f"({'9' * 30},)"),
    "of a negative size": npy("(-4,)"),
    "objects": npy("(1,)", "|O"),
    "cut off": npy("(4,)")[:-1],
    "a header without end": npy("(4,").replace(b", }", b", ("),
    "a header that is code": npy("__import__('os').mkdir('boom')"),
    "a header nested too deeply": npy("(" * 300),
    "no array": b"hello",
    "nothing": b"",
}


@pytest.mark.parametrize("content", ARRAYS.values(), ids=ARRAYS)
def test_a_forged_array_is_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("a.npz", "w") as archive:
        archive.writestr("x.npy", content)
    refused(tmp_path)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"\x00\x00\x08\x00", b"\x01\x00\x08\x00"),  # encrypted
        (b"\x00\x00\x08\x00", b"\x00\x00\x63\x00"),  # compressed by a method that nobody knows
        (b"x.npy", b"y.npy"),
        (b"NUMPY", b"MUMPY"),
        (b"PK\x05\x06", b"PK\x06\x05"),
    ],
)
def test_a_forged_archive_is_refused(before: bytes, after: bytes, tmp_path: Path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy("(4,)").replace(b"NUMPY", after if before == b"NUMPY" else b"NUMPY"))
    path.write_bytes(path.read_bytes().replace(before, after))
    refused(tmp_path)


def refused(folder: Path) -> None:
    inputs = (Input("x", Type("f32", (Axis("batch", 4),)), "batch", None),)
    with pytest.raises(Refused) as found:
        open_items(Call("arrays", {"path": "a.npz", "holdout": 0.0}), inputs, 0, folder, False)
    assert {each.code for each in found.value.diagnostics} <= {"E0603", "E0606"}


# ---------------------------------------------------------------- programs

DEEP = """
axis batch = 4, width = 2
model net(image: [batch, width], wanted: [batch, width]) {
  let x = image
  repeat 4_000 as layer {
    param w: [width] ~ normal(0.5)
    let x = x * w
  }
  loss mse(x, wanted)
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""


def test_a_program_has_a_limit():
    found, diagnostics = load_text(DEEP.replace("4_000", "900_000"))
    assert found is not None, diagnostics
    with pytest.raises(Refused, match=r"error\[E0008\]: model `net` expands to 1,800,001 steps; at most 100,000"):
        compile_spec(found)


@pytest.mark.soak
def test_compiling_takes_memory_in_proportion_to_the_program(tmp_path: Path):
    """A stage of thousands of iterations, within an address space of 600 MiB."""
    (tmp_path / "deep.par").write_text(DEEP)
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))\n"
        "from partita.cli.main import main; raise SystemExit(main(['compile', 'deep.par']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
