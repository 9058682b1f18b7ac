"""What the help of an error says works when it is written, and computes what was meant."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from partita.dsl.advice import foreign
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.load import load_text
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked

FILE = """axis batch = 4, row = 5, column = row, one = 1, two = 2, three = 3, waves = row, spare = row
block net(x: [batch, row]) {{
  param w: [row] ~ normal(1.0)
  return tanh(x * w)
}}
model m(x: [batch, row], y: [batch, row], z: [batch, row, column], c: [batch]) {{
  param w: [] ~ ones()
  {statements}
  loss mean(mean({result}, over = [{over}]) * c * w)
}}
mesh cluster(pipe = 2)
{layout}
train {{ data = random() optimizer = {optimizer} steps = 2 }}
"""


def text(statements: str = "", result: str = "x", over: str = "row", layout: str = "", optimizer: str = "") -> str:
    return FILE.format(
        statements=f"metric unused = mean(y) + mean(z) {statements}",
        result=result,
        over=over,
        layout=layout,
        optimizer=optimizer or "sgd(lr = 0.1)",
    )


def first_step(written: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step, and the inputs."""
    plan = prepare(checked(written, "m.par"))
    drawn = batches(plan.program, 1)[0]
    loss, _ = VirtualRun(plan).step(1, drawn, *[0.1] * len(plan.train.optimizer.calls))
    return loss, drawn


def refused(written: str) -> Diagnostic:
    """The only error of a file."""
    found, diagnostics = load_text(written, "m.par")
    assert found is None
    (error,) = [each for each in diagnostics if each.severity == "error"]
    return error


def told(error: Diagnostic) -> list[str]:
    """The pieces of code in the help."""
    return re.findall(r"`([^`]+)`", error.help or "")


ONE = torch.tensor(1.0)
POINTWISE = {
    "expm1": lambda x, _: torch.expm1(x),
    "exp2": lambda x, _: torch.exp2(x),
    "sinh": lambda x, _: torch.sinh(x),
    "cosh": lambda x, _: torch.cosh(x),
    "tan": lambda x, _: torch.tan(x),
    "ceil": lambda x, _: torch.ceil(x),
    "trunc": lambda x, _: torch.trunc(x),
    "pow": lambda x, _: x * x,
    "selu": lambda x, _: functional.selu(x),
    "celu": lambda x, _: functional.celu(x),
    "elu": lambda x, _: functional.elu(x),
    "leaky_relu": lambda x, _: functional.leaky_relu(x),
    "relu6": lambda x, _: functional.relu6(x),
    "prelu": lambda x, _: functional.prelu(x, ONE),
    "mish": lambda x, _: functional.mish(x),
    "softsign": lambda x, _: functional.softsign(x),
    "hardsigmoid": lambda x, _: functional.hardsigmoid(x),
    "hardswish": lambda x, _: functional.hardswish(x),
    "hardtanh": lambda x, _: functional.hardtanh(x),
    "glu": lambda x, y: functional.glu(torch.cat([x, y], -1)),
    "swiglu": lambda x, y: functional.silu(x) * y,
    "geglu": lambda x, y: functional.gelu(x, approximate="tanh") * y,
    "reciprocal": lambda x, _: 1 / x,
    "lerp": lambda x, y: torch.lerp(x, y, ONE),
    "log1p": lambda x, _: torch.log1p(x),
    "log2": lambda x, _: torch.log2(x),
    "log10": lambda x, _: torch.log10(x),
    "prod": lambda x, _: x.prod(1, keepdim=True).expand_as(x),
}
POSITIVE = {"log1p", "log2", "log10", "prod"}
# A replacement that gives it the axis of the batch, the axes of its mean, and what is meant.
MATRICES = {
    "diag": ("{}", "row", lambda z: z.diagonal(dim1=1, dim2=2).mean(1)),
    "trace": ("expand({}, row)", "row", lambda z: z.diagonal(dim1=1, dim2=2).sum(1)),
    "eye": ("z * {}", "row, column", lambda z: (z * torch.eye(5)).mean((1, 2))),
    "outer": ("{}", "row, column", lambda z: (z[:, :, :1] * z[:, :1]).mean((1, 2))),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("name", POINTWISE)
def test_what_stands_for_a_function_of_another_framework(name: str) -> None:
    said = re.findall(r"`([^`]+)`", foreign.FUNCTIONS[name])
    result = said[0].replace("over = axis", "over = row")
    statements = "let x = abs(x) + 0.1" if name in POSITIVE else ""
    if name == "prod":
        result = f"expand({result}, row)"
    loss, given = first_step(text(statements, result))
    x = given["x"].abs() + 0.1 if name in POSITIVE else given["x"]
    expected = (POINTWISE[name](x, given["y"]).mean(1) * given["c"]).mean()
    assert loss == pytest.approx(float(expected), rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("name", MATRICES)
def test_what_stands_for_a_function_of_matrices(name: str) -> None:
    form, over, meant = MATRICES[name]
    said = form.format(re.findall(r"`([^`]+)`", foreign.FUNCTIONS[name])[0])
    column, row = "gather(z, 0, along = column)", "gather(z, 0, along = row)"
    values = f"let x = {column} let y = {row}" if name == "outer" else "let x = z"
    loss, given = first_step(text(values, said, over))
    assert loss == pytest.approx(float((meant(given["z"]) * given["c"]).mean()), rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("part", [0, 1])
def test_a_fourier_transform_is_two_products(part: int) -> None:
    real, imaginary, angle, axis = re.findall(r"`([^`]+)`", foreign.FUNCTIONS["fft"])
    coefficients = f"relu({(real, imaginary)[part]})"  # their plain sum is told by one element
    written = text(angle, coefficients, "waves").replace("seq", "row")
    assert axis.replace("seq", "row").removeprefix("axis ") in written
    loss, given = first_step(written)
    found = torch.fft.fft(given["x"])
    expected = (found.real, found.imag)[part].relu()
    assert loss == pytest.approx(float((expected.mean(1) * given["c"]).mean()), rel=1e-4, abs=1e-5)


# ---------------------------------------------------------------- axes


@pytest.mark.parametrize(
    ("wrong", "result", "over", "meant"),
    [
        ("rename(z, [row, column] -> [column, row])", "r * z", "row, column", lambda z: z.mT * z),
        ("rename(z, [row, column] -> [spare, waves])", "r * r", "spare, waves", lambda z: z * z),
        ("slice(z, [row, column] -> [two, three])", "r * r", "two, three", lambda z: z[:, :2, :3] ** 2),
        ("rename(slice(z, row -> one), [one, column] -> row)", "r * r", "row", lambda z: z[:, :1] ** 2),
        ("rename(slice(z, column -> one), row -> [row, one])", None, "", None),
    ],
)
def test_an_arrow_with_lists_is_written_as_told(
    wrong: str, result: str | None, over: str, meant: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    error = refused(text(f"let r = {wrong}", "x"))
    assert error.code == "E0223"
    (said,) = told(error)
    if result is None:
        assert said == "split(slice(z, column -> one), row -> [row, one])"
        return
    loss, given = first_step(text(f"let r = {said}", result, over))
    assert loss == pytest.approx(float((meant(given["z"]).mean((1, 2)) * given["c"]).mean()), rel=2e-5, abs=1e-6)


def test_tensors_are_stacked_as_told() -> None:
    error = refused(text("let r = stack(x, y)"))
    said, axes = told(error)
    assert axes.removeprefix("axis ") in FILE
    loss, given = first_step(text(f"let r = {said}", "gather(r, 0, along = two) * relu(gather(r, 1, along = two))"))
    expected = (given["x"] * given["y"].relu()).mean(1)
    assert loss == pytest.approx(float((expected * given["c"]).mean()), rel=2e-5, abs=1e-6)


# ---------------------------------------------------------------- iterations


def test_a_block_is_given_the_number_of_an_iteration_as_told() -> None:
    statements = "repeat 4 as layer { let x = x * 0.1 + net(x) }"
    wrong = text(statements, layout="layout l on cluster { stage layer -> pipe }")
    wrong = wrong.replace("(x * w)", "(x * w * (1 + layer))").replace("normal(1.0)", "ones()")
    error = refused(wrong)
    assert (error.code, error.message) == (
        "E0201",
        "`layer` is the number of an iteration, which is known inside the repeat alone",
    )
    assert [note.startswith("the repeat is at m.par:") for note in error.notes] == [True]
    block, name = told(error)
    assert name == "layer"
    more = block.removeprefix("block net(…").removesuffix(")")
    right = wrong.replace("x: [batch, row])", f"x: [batch, row]{more})", 1).replace("net(x)", "net(x, layer)")
    loss, given = first_step(right)
    x = given["x"]
    for number in range(4):
        x = x * 0.1 + torch.tanh(x * (1 + number))
    assert loss == pytest.approx(float((x.mean(1) * given["c"]).mean()), rel=2e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ("freeze layer.0", "freeze"),
        ("update m.layer.0.net.w -> sgd(lr = 0.5)", "update"),
        ("recompute net, layer.1", "layout"),
        ("offload layer.1", "layout"),
        ("stage layer[0..1] -> pipe", "layout"),
    ],
)
def test_a_rule_for_some_iterations_is_written_as_told(wrong: str, place: str) -> None:
    def written(rule: str) -> str:
        if place == "layout":
            return text(SEVERAL, layout=f"layout l on cluster {{ {rule} }}")
        return f"optimizer some {{ {rule} update all -> sgd(lr = 0.1) }}\n" + text(SEVERAL, optimizer="some")

    error = refused(written(wrong))
    assert error.code == "E0103"
    one, several = told(error)
    if wrong.startswith("stage"):
        assert first_step(written(one.replace("…", "pipe")))
        several = several.replace("…", "pipe")
        assert first_step(written(f"{several}  place layer[2..3] -> pipe[1]  stage layer -> pipe"))
        return
    more = "  stage layer -> pipe" if place == "layout" else ""
    for said in (one, several):
        assert first_step(written(wrong.replace("layer.0", said).replace("layer.1", said) + more))


SEVERAL = "repeat 4 as layer { let x = net(x) }"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_nested_repeat_is_cut_as_told(ranks: int) -> None:
    statements = "repeat 2 as group { repeat 3 as layer { let x = net(x) } let x = net(x) }"

    def written(rule: str) -> str:
        return text(statements, layout=f"layout l on cluster {{ {rule} }}").replace("pipe = 2", f"pipe = {ranks}")

    error = refused(written("stage group, layer -> pipe"))
    assert error.message == "`layer` is inside `group`, and stages have whole iterations of `group`"
    both, one, _ = told(error)
    loss, _ = first_step(text(statements))
    assert first_step(written(both))[0] == pytest.approx(loss, rel=1e-6)
    if ranks == 2:
        assert first_step(written(one))[0] == pytest.approx(loss, rel=1e-6)


# ---------------------------------------------------------------- second calls

TWICE = """axis batch = 4, row = 5
block net(x: [batch, row]) {{ param w: [row] ~ normal(1.0) return tanh(x * w) }}
block scaled(x: [batch, row]) {{ return 2 * x }}
model m(x: [batch, row], y: [batch, row]) {{
  {body}
}}
train {{ data = random() optimizer = sgd(lr = 0.1) steps = 2 }}
"""


def second_calls(body: str) -> list[Diagnostic]:
    found, diagnostics = load_text(TWICE.format(body=body), "m.par")
    assert found is not None, diagnostics
    return [each for each in diagnostics if each.code == "W0204"]


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("let d = net(x) - net(y)  loss mean(d * d)", 1),
        ("sample n: [batch, row] ~ normal(1.0)  let d = net(x) * net(tanh(n) + scaled(y))  loss mean(d)", 1),
        ("repeat 2 as layer { let x = net(x) let y = net(y) }  loss mean(x * y)", 1),
        ("loss mean(net(x) * net(y) * net(x + y))", 0),  # a kit of layers
        ("loss mean(net(x) * net(x) * y)", 0),  # as queries and keys have it
        ("loss mean(net(net(x)) * y)", 0),  # layers
        ("loss mean(net(tanh(x)) + net(sin(x)) + y)", 0),  # branches
        ("let h = net(x) loss mean(net(h + y))", 0),
        ("loss mean(net(x) * scaled(x) * scaled(y))", 0),  # nothing is trained there
    ],
)
def test_what_may_be_meant_as_one_network_is_told(body: str, count: int) -> None:
    assert len(second_calls(body)) == count


def test_one_network_is_called_twice_as_told() -> None:
    (found,) = second_calls("let d = net(x) - net(y)  loss mean(d * d)")
    declared = re.match("for one network, `(.*)` before, and call `(.*)` twice", found.help or "")
    assert declared is not None
    share, both = declared.groups()
    right = TWICE.format(body=f"{share}  let d = {both}(x) - {both}(y)  loss mean(d * d)")
    spec, diagnostics = load_text(right.replace("block scaled(x: [batch, row]) { return 2 * x }", ""), "m.par")
    assert spec is not None
    assert not diagnostics
    plan = prepare(spec)
    assert [each.name for each in plan.program.parameters] == ["m.both.w"]
    drawn = batches(plan.program, 1)[0]
    run = VirtualRun(plan)
    w = run.parameters()["m.both.w"].clone()
    d = torch.tanh(drawn["x"] * w) - torch.tanh(drawn["y"] * w)
    assert run.step(1, drawn, 0.1)[0] == pytest.approx(float((d * d).mean()), rel=2e-5)
