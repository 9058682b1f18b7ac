"""Operations of one's own: their Python runs if it is allowed and not before, and what goes wrong in it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partita.compiler.pipeline import compile_spec
from partita.compiler.text.graph import graph_text, parse_graph
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.runtime.rank import prepare
from partita.runtime.supervision.consistency import digest
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.commands import computed, here, partita
from tests.runtime.own import BACKWARD, ENTRIES, FILE, FORWARD, written

MARK = 'open("MARK", "w").write("run")\n'
VIRTUAL = ("--transport", "virtual", "--run-dir=run")
FORWARD_ONLY = ENTRIES.replace('  backward = python("kernels.py", "norm_backward")\n', "")


def checked(path: Path, *overrides: str):
    spec, diagnostics = load(path, overrides)
    assert spec is not None, "\n".join(each.render() for each in diagnostics)
    return spec


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in computed(folder / "run") if "loss" in record]


# ---------------------------------------------------------------- when it runs


@pytest.mark.soak
def test_no_other_command_runs_a_files_python(tmp_path: Path):
    path = written(tmp_path, MARK + FORWARD + BACKWARD)
    for command in (
        ("check", "own.par"),
        ("fmt", "--check", "own.par"),
        ("compile", "own.par"),
        ("compile", "own.par", "--emit", "python"),
        ("explain", "own.par"),
        ("explain", "own.par", "norm"),
        ("schedule", "own.par"),
        ("plan", "own.par", "--devices", "4", "--within", "2"),
    ):
        done = here(*command, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert not (tmp_path / "MARK").exists()
    assert path.exists()


def test_what_runs_it_must_be_told_to(tmp_path: Path):
    written(tmp_path, MARK + FORWARD + BACKWARD)
    for command in (("verify", "own.par"), ("run", "own.par", *VIRTUAL), ("run", "own.par")):
        done = here(*command, cwd=tmp_path)
        assert done.returncode == 1
        assert "error[E0620]: op `norm`" in done.stderr
        assert "own.par:4:13" in done.stderr
        assert "--allow-python" in done.stderr
        assert not (tmp_path / "MARK").exists()
    done = here("run", "own.par", *VIRTUAL, "--allow-python", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "MARK").exists()


def test_an_operation_that_is_not_called_is_not_imported(tmp_path: Path):
    written(tmp_path, MARK + FORWARD + BACKWARD, file=FILE.replace("norm(x, w)", "x * w"), norm="x * w")
    done = here("run", "own.par", *VIRTUAL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "MARK").exists()


# ---------------------------------------------------------------- what it computes


@pytest.mark.soak
@pytest.mark.parametrize("entries", [ENTRIES, FORWARD_ONLY], ids=["backward", "autograd"])
def test_it_computes_what_the_same_by_the_language_does(tmp_path: Path, entries: str):
    written(tmp_path / "own", FORWARD + BACKWARD, entries)
    done = here("run", "own.par", *VIRTUAL, "--allow-python", cwd=tmp_path / "own")
    assert done.returncode == 0, done.stderr
    by_language = FILE.replace("norm(x, w)", "rms_norm(x, over = embed, scale = w)")
    written(tmp_path / "same", file=by_language, norm="rms_norm(x, over = embed, scale = w)")
    assert here("run", "own.par", *VIRTUAL, cwd=tmp_path / "same").returncode == 0
    assert losses(tmp_path / "own") == pytest.approx(losses(tmp_path / "same"), rel=1e-4)
    found, expected = (
        [record["eval_loss"] for record in computed(tmp_path / name / "run") if "eval_loss" in record]
        for name in ("own", "same")
    )
    assert found == pytest.approx(expected, rel=1e-4)


def test_it_works_in_bf16_and_where_torch_compiles_the_rest(tmp_path: Path):
    path = written(tmp_path)
    spec = checked(path, "train.precision=bf16", "train.compile=true")
    plan = prepare(spec, allow_python=True)
    assert "c.custom('norm'" in plan.program.source
    assert "c.custom" not in "".join(
        part for part in plan.program.source.split("def ") if part.startswith(("stage0_forward_segment",))
    )
    small = prepare(checked(path, "train.precision=bf16"), allow_python=True)
    loss, norm = VirtualRun(small).step(1, batches(small.program, 0)[0])
    assert 0 < loss < 20
    assert norm > 0


POOLED = """\
axis batch = 4, seq = 6, embed = 8, ffn = 8

op pooled(x: [batch, seq, embed]) -> [batch, embed] {
  forward = python("kernels.py", "pooled")
  split = [batch, embed]
  linear = [x]
}

model m(x: [batch, seq, ffn]) {
  param down: [ffn, embed] ~ kaiming()
  let y = pooled(dot(x, down, over = ffn))
  loss mean(y * y)
}

mesh m(tensor = 2)
layout l on m { shard ffn -> tensor }

train {
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 1
}
"""


def test_a_linear_operand_stays_a_partial_sum(tmp_path: Path):
    """What is linear commutes with the sum over ranks, which then is one of fewer elements."""
    kernels = "def pooled(x):\n    return x.mean(1)\n"
    state = compile_spec(checked(written(tmp_path, kernels, file=POOLED)))
    (node,) = (each for each in state.sharded.graph.nodes if each.op.name == "custom")
    assert [str(value.layout) for value in (*node.inputs, *node.outputs)] == ["sum/tensor"] * 2
    plain = compile_spec(checked(written(tmp_path, kernels, file=POOLED.replace("  linear = [x]\n", ""))))
    (node,) = (each for each in plain.sharded.graph.nodes if each.op.name == "custom")
    assert not node.inputs[0].layout.partial
    written(tmp_path, kernels, file=POOLED)
    done = here("verify", "own.par", "--allow-python", cwd=tmp_path)
    assert done.returncode == 0, (done.stdout, done.stderr)


def test_the_batch_must_be_declared_to_be_split_into_microbatches(tmp_path: Path):
    path = written(tmp_path, entries=ENTRIES.replace("[batch, seq]", "[seq]"))
    with pytest.raises(Refused) as caught:
        compile_spec(checked(path))
    (found,) = caught.value.diagnostics
    assert (found.code, found.span.line) == ("E0407", 17)
    assert "`split = [batch]`" in found.help
    state = compile_spec(checked(path, "fast.microbatches=1"))
    found = [each for each in state.warnings if each.code == "W0310"]
    assert [each.span.line for each in found] == [17, 20]
    assert "along `data` of 2 all compute `norm` for the whole `batch`" in found[0].message
    assert not compile_spec(checked(written(tmp_path))).warnings


def test_its_graph_is_read_back(tmp_path: Path):
    graph = compile_spec(checked(written(tmp_path))).step
    text = graph_text(graph, places=False)
    assert "custom(%lm.x, %lm.w; function='norm', operands=(('batch', 'seq', 'embed'), ('embed',))" in text
    assert graph_text(parse_graph(text), places=False) == text


def test_called_over_other_axes_it_takes_them_in_the_declared_order(tmp_path: Path):
    kernels = "def cut(x):\n    return x[:, 1:] - x[:, :-1]\n"
    file = """\
axis batch = 4, seq = 6, less = seq - 1, rows = 6, fewer = rows - 1

op cut(x: [batch, seq]) -> [batch, less] {
  forward = python("kernels.py", "cut")
  split = [batch]
  linear = [x]
}

block twice(x: [batch, seq]) {
  return cut(x) * cut(x)
}

model m(x: [batch, seq], y: [rows, batch]) {
  param w: [] ~ ones()
  loss mean(twice(x)) * w + mean(cut(y * w, seq -> rows, less -> fewer))
  metric same = mean(twice(rename(x, seq -> rows), seq -> rows, less -> fewer))
}

train {
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 1
}
"""
    path = written(tmp_path, kernels, file=file)
    plan = prepare(checked(path, "train.precision=f64"), allow_python=True)
    (batch, *_) = batches(plan.program, 0)
    run = VirtualRun(plan)
    loss, _ = run.step(1, batch)
    x, y = batch["x"].double(), batch["y"].double()
    squares = (x[:, 1:] - x[:, :-1]).square().mean()
    assert loss == pytest.approx(float(squares + (y[1:] - y[:-1]).mean()), rel=1e-9)
    done = here("verify", "own.par", "--allow-python", cwd=tmp_path)
    assert done.returncode == 0, (done.stdout, done.stderr)


MOMENTS = """\
import torch


def moments(x, w):
    return (x * w).mean(-1), x.square().mean(-1), (x > 0).sum(-1)
"""

MOMENTS_BACKWARD = """

def moments_backward(d, e, x, w):
    n = x.shape[-1]
    return (d[..., None] * w + 2 * e[..., None] * x) / n, (d[..., None] * x).sum((0, 1)) / n
"""

SEVERAL = """\
axis batch = 8, seq = 6, embed = 8

op moments(x: [batch, seq, embed], w: [embed]) -> [batch, seq], [batch, seq], i64[batch, seq] {
  forward = python("kernels.py", "moments")
  backward = python("kernels.py", "moments_backward")
  split = [batch, seq]
}

model m(x: [batch, seq, embed]) {
  param w, v: [embed] ~ normal(1.0)
  let mean, square, count = moments(x * v, w)
  let _mean, other, _count = moments(x, w)
  loss mean(square * square) + mean(mean * other * cast(count, f32))
}

mesh m(data = 2, tensor = 2)

layout l on m {
  shard batch -> data
  shard seq, embed -> tensor
}

schedule s = gpipe(microbatches = 2)

train {
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 2
}
"""


@pytest.mark.soak
@pytest.mark.parametrize("backward", [True, False], ids=["backward", "autograd"])
def test_an_operation_may_have_several_results(tmp_path: Path, backward: bool):
    """Each may be used or not; those that are not have no cotangent."""
    file = SEVERAL if backward else SEVERAL.replace('  backward = python("kernels.py", "moments_backward")\n', "")
    path = written(tmp_path, MOMENTS + MOMENTS_BACKWARD, file=file)
    done = here("verify", "own.par", "--allow-python", cwd=tmp_path)
    assert done.returncode == 0, (done.stdout, done.stderr)
    plan = prepare(checked(path, "train.precision=f64"), allow_python=True)
    (batch, *_) = batches(plan.program, 0)
    run = VirtualRun(plan)
    w, v = (
        torch.tensor(run.parameters()[f"m.{name}"].tolist(), dtype=torch.float64, requires_grad=True) for name in "wv"
    )
    loss, norm = run.step(1, batch)
    x = batch["x"].double()
    y = x * v
    mean, square, count = (y * w).mean(-1), y.square().mean(-1), (y > 0).sum(-1)
    expected = square.square().mean() + (mean * x.square().mean(-1) * count).mean()
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-9)
    assert norm == pytest.approx(float((w.grad.square().sum() + v.grad.square().sum()).sqrt()), rel=1e-9)


def test_what_is_wrong_with_one_of_several_results_is_said(tmp_path: Path):
    for body, said in (
        ("x[..., 0]", "`moments` must return 3 results, not `Tensor`"),
        ("x[..., 0], x[..., 1]", "`moments` must return 3 results, not 2 values"),
        ("x[..., 0], x[0, ..., 1], x[..., 0].long()", "the result 2 is f32[3], not f32[2, 3]"),
    ):
        written(tmp_path, f"def moments(x, w):\n    return {body}\n" + MOMENTS_BACKWARD, file=SEVERAL)
        done = here("run", "own.par", *VIRTUAL, "--allow-python", cwd=tmp_path)
        assert done.returncode == 1
        assert said in done.stderr, done.stderr


def test_what_is_declared_of_axes_holds_for_those_that_replace_them(tmp_path: Path):
    entries = ENTRIES.replace("size(embed)", "size(seq)")
    file = FILE.replace("seq = 6", "seq = 6, rows = 12").replace(
        "  loss ",
        "  param v: [rows, embed] ~ ones()\n  let y = norm(expand(v, batch), w, seq -> rows)\n  loss mean(y) + ",
    )
    graph = compile_spec(checked(written(tmp_path, entries=entries, file=file))).forward
    found = {
        (each.op.operands[0], each.op.split_along, each.op.each) for each in graph.nodes if each.op.name == "custom"
    }
    assert found == {
        (("batch", "seq", "embed"), ("batch", "seq"), 24.0),
        (("batch", "rows", "embed"), ("batch", "rows"), 48.0),
    }


def test_where_a_number_became_infinite_is_found_in_them_too(tmp_path: Path):
    written(tmp_path, "def norm(x, w):\n    return x * w / 0\n", FORWARD_ONLY)
    done = here("run", "own.par", *VIRTUAL, "--allow-python", cwd=tmp_path)
    assert done.returncode == 3
    assert "norm" in done.stderr
    assert "own.par:16:17" in done.stderr


# ---------------------------------------------------------------- what belongs to a run


def test_the_python_is_part_of_what_ranks_compare(tmp_path: Path):
    one = checked(written(tmp_path / "one"))
    other = checked(written(tmp_path / "other"))
    assert digest(one) == digest(other)
    assert digest(checked(written(tmp_path / "other", FORWARD + "\n" + BACKWARD))) != digest(one)


def test_a_number_is_compared_however_it_was_computed(tmp_path: Path):
    text = "axis batch = 4\nmodel m(x: [batch]) {\n  param w: [] ~ ones()\n  loss mean(x * NUMBER) * w\n}\n"
    path, plain = tmp_path / "sizes.par", tmp_path / "plain.par"
    path.write_text(text.replace("NUMBER", "(size(batch) / 8)"))
    plain.write_text(text.replace("NUMBER", "0.5"))
    assert digest(checked(path)) == digest(checked(plain))
    assert digest(checked(path)) != digest(checked(path, "batch=8"))


def test_how_an_operation_is_written_is_not_compared(tmp_path: Path):
    entries = (
        ENTRIES.replace("[batch, seq]", "[seq, batch]").replace("[w]", "w").replace("  forward", "  # it\n\n  forward")
    )
    file = FILE.replace("embed = 8", "embed = 2 * rows, rows = 4")
    one, other = (checked(written(tmp_path, entries=each, file=file)) for each in (ENTRIES, entries))
    assert digest(one) == digest(other)
    assert digest(checked(written(tmp_path, file=file.replace("2 * rows", "8")))) == digest(one)
    changed = (ENTRIES.replace("[batch, seq]", "seq"), ENTRIES.replace("  linear = [w]\n", ""))
    for each in changed:
        assert digest(checked(written(tmp_path, entries=each, file=file))) != digest(one)


def test_resuming_with_other_python_says_so(tmp_path: Path):
    file = FILE.replace("steps = 3", "steps = 2\n  checkpoint = every(1)")
    written(tmp_path, file=file)
    run = ("run", "own.par", *VIRTUAL, "--allow-python")
    assert here(*run, cwd=tmp_path).returncode == 0
    written(tmp_path, FORWARD + "\n" + BACKWARD, file=file)
    done = here(*run, "train.steps=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "W0804" in done.stderr
    assert "op norm was norm (" in done.stderr


# ---------------------------------------------------------------- what goes wrong

WRONG = {
    "syntax": ("def norm(x, w:\n", "E0621", "SyntaxError: '(' was never closed (kernels.py:1)"),
    "import": ("import norm_that_is_not_there\n" + FORWARD, "E0621", "kernels.py:1 in <module>"),
    "exit": ("import sys\nsys.exit(0)\n" + FORWARD, "E0621", "SystemExit: 0"),
    "absent": ("# norm\n", "E0621", "`kernels.py` has no `norm`"),
    "number": ("norm = 3\n", "E0621", "`norm` of `kernels.py` is not a function, but `int`"),
    "nothing": ("def norm(x, w):\n    x * w\n", "E0622", "the result is nothing, not a tensor f32[4, 6, 8]"),
    "list": ("def norm(x, w):\n    return [x]\n", "E0622", "the result is `list`, not a tensor f32[4, 6, 8]"),
    "shape": ("def norm(x, w):\n    return x[0]\n", "E0622", "the result is f32[6, 8], not f32[4, 6, 8]"),
    "dtype": (
        "def norm(x, w):\n    return (x * w).double()\n",
        "E0622",
        "the result is f64[4, 6, 8], not f32[4, 6, 8]",
    ),
    "device": ("def norm(x, w):\n    return x.to('meta')\n", "E0622", "the result is on meta"),
    "raises": (
        "def norm(x, w):\n    return inner(x)\n\n\ndef inner(x):\n    return x @ x\n",
        "E0622",
        "kernels.py:6 in inner",
    ),
    "arguments": (
        "def norm(x):\n    return x\n",
        "E0622",
        "TypeError: norm() takes 1 positional argument but 2 were given",
    ),
    "exits": ("def norm(x, w):\n    raise SystemExit(3)\n", "E0622", "`norm` raised SystemExit"),
    "no gradient": (
        "def norm(x, w):\n    return (x * w).detach()\n",
        "E0622",
        "autograd finds no path from the operands",
    ),
    "in place": ("def norm(x, w):\n    return x.mul_(w)\n", "E0622", "`norm` raised RuntimeError"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_in_python_is_a_diagnostic(tmp_path: Path, name: str):
    kernels, code, said = WRONG[name]
    written(tmp_path, kernels, FORWARD_ONLY, file=FILE.replace("  eval = every(2, batches = 2)\n", ""))
    done = here("run", "own.par", "m.data=1", "m.tensor=1", *VIRTUAL, "--allow-python", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert f"error[{code}]: op `norm`: " in done.stderr
    assert "own.par:4:13" in done.stderr
    assert said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert "partita/" not in done.stderr


GRADIENTS = {
    "one": ("return d", "`norm_backward` must return 2 gradients, one for each float operand, not 1 values"),
    "nothing": ("pass", "`norm_backward` must return 2 gradients, one for each float operand, not `NoneType`"),
    "three": ("return d, w, None", "`norm_backward` must return 2 gradients, one for each float operand, not 3 values"),
    "none": ("return d, None", "the gradient of `w` is nothing, not a tensor f32[8]"),
    "shape": ("return d, d", "the gradient of `w` is f32[4, 6, 8], not f32[8]"),
    "raises": ("return 1 / 0", "ZeroDivisionError: division by zero"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", GRADIENTS)
def test_what_is_wrong_with_gradients_is_a_diagnostic(tmp_path: Path, name: str):
    body, said = GRADIENTS[name]
    written(tmp_path, f"{FORWARD}\n\ndef norm_backward(d, x, w):\n    {body}\n")
    done = here("run", "own.par", "m.data=1", "m.tensor=1", *VIRTUAL, "--allow-python", cwd=tmp_path)
    assert done.returncode == 1
    assert "error[E0622]: op `norm`: " in done.stderr
    assert "own.par:5:14" in done.stderr
    assert said in done.stderr, done.stderr


ONE_RANK = """
import os


def norm(x, w):
    if os.environ.get("PARTITA_RANK") == "1":
        raise ValueError("only here")
    return x * w
"""


@pytest.mark.soak
@pytest.mark.parametrize("kernels", [ONE_RANK, ONE_RANK.replace('== "1"', "is not None")], ids=["one", "all"])
def test_a_failure_on_any_rank_ends_all(tmp_path: Path, kernels: str):
    written(tmp_path, kernels, FORWARD_ONLY)
    done = partita("run", "own.par", "m.tensor=1", "--run-dir=run", "--allow-python", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error[E0622]") in (1, 2)  # on a busy machine the second may come to speak
    assert "ValueError: only here" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.soak
def test_processes_compute_what_one_does(tmp_path: Path):
    written(tmp_path)
    done = partita("run", "own.par", "--run-dir=run", "--allow-python", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path)
    assert here("run", "own.par", *VIRTUAL[:2], "--run-dir=other", "--allow-python", cwd=tmp_path).returncode == 0
    assert found == pytest.approx([r["loss"] for r in computed(tmp_path / "other") if "loss" in r], rel=1e-6)
