"""What is said of an operation of one's own and is not so, is found, at its place in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.dsl.load import load
from partita.runtime.python_functions import functions_of
from partita.runtime.verification.operations import examine
from tests.commands import here
from tests.runtime.own import BACKWARD, ENTRIES, FILE, FORWARD, written

FORWARD_ONLY = ENTRIES.replace('  backward = python("kernels.py", "norm_backward")\n', "")
SCALED = """

def norm_backward(d, x, w):
    return d * w, (d * x).sum((0, 1))
"""


def problems(folder: Path, kernels: str = FORWARD + BACKWARD, entries: str = ENTRIES) -> list[tuple[str, str, str]]:
    """Code, place and message of each problem."""
    spec, diagnostics = load(written(folder, kernels, entries))
    assert spec is not None, "\n".join(each.render() for each in diagnostics)
    (found,) = examine(spec.model, functions_of(spec.model, True), spec.train.precision)
    return [(each.code, f"{each.span.line}:{each.span.column}", each.message) for each in found.problems]


def test_what_is_so_is_not_found_fault_with(tmp_path: Path):
    assert problems(tmp_path) == []
    assert problems(tmp_path, FORWARD, FORWARD_ONLY) == []
    assert problems(tmp_path, FORWARD, '  forward = python("kernels.py", "norm")\n') == []


# Kernels, entries, the place of the false word, and what is said of it.
LIES = {
    "split along the normalized axis": (
        FORWARD + BACKWARD,
        ENTRIES.replace("[batch, seq]", "[batch, embed]"),
        "6:19",
        "cannot be split along `embed`: its results in 2 parts",
    ),
    "split along an axis with positions": (
        "import torch\n\n\ndef norm(x, w):\n    return x * w + torch.arange(x.shape[1])[:, None]\n",
        FORWARD_ONLY,
        "5:19",
        "cannot be split along `seq`: its results in 2 parts",
    ),
    "split along an axis that is centered, in each of several rows": (
        "def norm(x, w):\n    return (x - x.mean(0, keepdim=True)) * w\n",
        FORWARD_ONLY,
        "5:12",
        "cannot be split along `batch`",
    ),
    "split where a part is refused": (
        "def norm(x, w):\n    assert x.shape[0] % 6 == 0\n    return x * w\n",
        FORWARD_ONLY,
        "5:12",
        "cannot be split along `batch`",
    ),
    "a gradient that depends on the rows there are": (
        FORWARD + BACKWARD.replace("(d * y).sum((0, 1))", "(d * y).mean((0, 1)) * 72"),
        ENTRIES,
        "6:12",
        "its gradient for `w` cannot be split along `batch`",
    ),
    "linear in what it normalizes": (
        FORWARD + BACKWARD,
        ENTRIES.replace("[w]", "[w, x]"),
        "7:16",
        "not linear in `x`",
    ),
    "affine": (
        "def norm(x, w):\n    return x * w + 1\n",
        FORWARD_ONLY,
        "6:13",
        "not linear in `w`",
    ),
    "a gradient without its second part": (
        FORWARD + BACKWARD.replace("(g - y * (g * y).mean(-1, keepdim=True))", "g"),
        ENTRIES,
        "5:14",
        "`norm_backward` is not its gradient for `x`",
    ),
    "a gradient that is a little off": (
        FORWARD + BACKWARD.replace("(d * y).sum((0, 1))", "(d * y).sum((0, 1)) * 1.001"),
        ENTRIES,
        "5:14",
        "`norm_backward` is not its gradient for `w`",
    ),
    "a gradient for positive numbers only": (
        "def norm(x, w):\n    return x.abs() * w\n" + SCALED.replace("d * x", "d * x.abs()"),
        ENTRIES,
        "5:14",
        "`norm_backward` is not its gradient for `x`",
    ),
    "a gradient that autograd does not see whole": (
        "def norm(x, w):\n    return x * w * x.detach()\n",
        FORWARD_ONLY,
        "4:13",
        "its gradient by autograd is not its gradient for `x`",
    ),
    "a straight-through estimator": (
        "def norm(x, w):\n    return (x * w).round()\n" + SCALED,
        ENTRIES.replace("  linear = [w]\n", ""),
        "5:14",
        "`norm_backward` is not its gradient for `x`",
    ),
    "a gradient that is not linear": (
        "def norm(x, w):\n    return x * w\n\n\ndef norm_backward(d, x, w):\n"
        "    return d * w + 1e-7 * d * d, (d * x).sum((0, 1))\n",
        ENTRIES,
        "5:14",
        "`norm_backward` is not linear in the cotangent",
    ),
    "in place": (
        "def norm(x, w):\n    x *= w\n    return x.clone()\n" + SCALED,
        ENTRIES,
        "4:13",
        "`norm` changes its operand `x` in place",
    ),
    "in place, in the gradient": (
        FORWARD + BACKWARD.replace("    rate =", "    w += 1\n    rate ="),
        ENTRIES,
        "5:14",
        "`norm_backward` changes its operand `w` in place",
    ),
    "random": (
        "import torch\n\n\ndef norm(x, w):\n    return x * w * torch.rand_like(x)\n",
        FORWARD_ONLY,
        "4:13",
        "`norm` is not deterministic",
    ),
    "noise in the last digits": (
        "import torch\n\n\ndef norm(x, w):\n    return x * w * (1 + 1e-15 * torch.randn_like(x))\n",
        FORWARD_ONLY,
        "4:13",
        "`norm` is not deterministic",
    ),
    "a random gradient": (
        FORWARD + BACKWARD.replace("return rate", "return torch.rand(()).to(d) * rate"),
        ENTRIES,
        "5:14",
        "`norm_backward` is not deterministic",
    ),
    "a memory": (
        "seen = []\n\n\ndef norm(x, w):\n    seen.append(x.shape)\n    return x * w + (len(seen) > 20)\n",
        FORWARD_ONLY.replace("  linear = [w]\n", "").replace("  split = [batch, seq]\n", ""),
        "4:13",
        "`norm` keeps state",
    ),
    "another shape": (
        "def norm(x, w):\n    return (x * w).transpose(0, 1)\n",
        FORWARD_ONLY,
        "4:13",
        "the result is f32[6, 8, 8], not f32[8, 6, 8]",
    ),
}


def test_a_lie_about_the_second_result_is_found(tmp_path: Path):
    kernels = "def norm(x, w):\n    return x * w, (x - x.mean(1, keepdim=True)).sum(-1)\n"
    file = FILE.replace("-> [batch, seq, embed] {", "-> [batch, seq, embed], [batch, seq] {")
    file = file.replace("dot(norm(x, w), up", "dot(y, up").replace(
        "    let h =", "    let y, z = norm(x, w)\n    let h ="
    )
    file = file.replace("dot(NORM,", "dot(x,").replace("heads -> embed)", "heads -> embed) + expand(z, embed)")
    spec, diagnostics = load(written(tmp_path, kernels, FORWARD_ONLY.replace("  linear = [w]\n", ""), file=file))
    assert spec is not None, "\n".join(each.render() for each in diagnostics)
    (found,) = examine(spec.model, functions_of(spec.model, True), "f32")
    assert [f"{each.span.line}:{each.span.column}" for each in found.problems] == ["5:19"]


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_found_at_its_place(tmp_path: Path, name: str):
    kernels, entries, place, message = LIES[name]
    found = problems(tmp_path, kernels, entries)
    assert found, "nothing was found"
    assert found[0][0] in ("E0710", "E0622")
    assert found[0][1] == place, found
    assert message in found[0][2]


def test_verify_says_so_and_blames_nothing_else(tmp_path: Path):
    written(tmp_path, entries=ENTRIES.replace("[batch, seq]", "[batch, seq, embed]"))
    done = here("verify", "own.par", "--allow-python", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("error[") == 1
    assert "own.par:6:24" in done.stderr
    assert "operations   fail" in done.stdout
    assert "E0702" not in done.stderr


def test_what_does_not_run_in_f64_is_tried_as_it_is_and_not_decided(tmp_path: Path):
    """Kernels of a GPU seldom take f64."""
    single = FORWARD.replace("    rate =", "    assert x.dtype != torch.float64, 'no f64'\n    rate =")
    written(tmp_path, single, FORWARD_ONLY)
    done = here("verify", "own.par", "--allow-python", cwd=tmp_path)
    assert done.returncode == 4, (done.stdout, done.stderr)
    assert "warning[W0702]: op `norm` does not run in f64" in done.stderr
    assert "no f64" in done.stderr
    written(tmp_path, single, FORWARD_ONLY.replace("seq]", "seq, embed]"))
    done = here("verify", "own.par", "--allow-python", cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot be split along `embed`" in done.stderr


@pytest.mark.soak
def test_what_takes_no_small_sizes_keeps_its_own(tmp_path: Path):
    written(tmp_path, FORWARD.replace("    rate =", "    assert len(w) == 8\n    rate ="), FORWARD_ONLY)
    done = here("verify", "own.par", "--allow-python", cwd=tmp_path)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "embed 8" in done.stdout


@pytest.mark.soak
def test_a_result_that_is_never_finite_is_not_decided(tmp_path: Path):
    written(tmp_path, "def norm(x, w):\n    return x * w / 0\n", FORWARD_ONLY)
    done = here("verify", "own.par", "--allow-python", cwd=tmp_path)
    assert done.returncode == 4, (done.stdout, done.stderr)
    assert "no finite loss" in done.stderr
