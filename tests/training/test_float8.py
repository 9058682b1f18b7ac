"""`precision = fp8`: which products, what they compute, and that neither layout nor schedule changes them."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from partita.compiler.costs.devices import DEVICES
from partita.compiler.costs.nodes import seconds
from partita.compiler.ops.collective import Collective
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.dsl.load import load
from partita.dsl.spec import Spec
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.verify import verify
from tests.files import SPECS, checked
from tests.marks import examples
from tests.programs import Program, programs, sharded_programs
from tests.training.test_partition import close, trained

PARAMETERS = ("w1", "w2", "head")
FILE = """
axis batch = 6, wide = 10, ffn = 14, out = 10, classes = 5
model m(x: [batch, wide], t: i64[batch]) {
  param w1: [wide, ffn] ~ kaiming()
  param w2: [out, ffn] ~ kaiming()
  param head: [wide, classes] ~ kaiming()
  let h = gelu(dot(x, w1, over = wide))
  let y = x + rename(dot(h, w2, over = ffn), out -> wide)
  loss cross_entropy(dot(y, head, over = wide), t, over = classes)
}
train { data = random() optimizer = sgd(lr = 0.1) precision = fp8 steps = 2 }
"""


def in_f64(spec: Spec) -> Spec:
    """The same with its products in eight bits, and everything else in f64."""
    _, train = spec.trained
    return evolve(spec, train=evolve(train, precision="f64", float8=True))


# ---------------------------------------------------------------- an independent reference


def narrow(x: torch.Tensor, over: int) -> torch.Tensor:
    """What e4m3 leaves of x, by row of one dimension: by the definition of floats, without torch's."""
    largest = x.abs().amax(over, keepdim=True)
    scale = 2.0 ** torch.ceil(torch.log2(largest / 448))
    scaled = x / scale
    step = 2.0 ** (torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - 3)
    return torch.round(scaled / step) * step * scale


class Linear(torch.autograd.Function):
    """[n, k] times [k, m], forward and for the left gradient of narrow operands."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return narrow(x, 1) @ narrow(w, 0)

    @staticmethod
    def backward(ctx, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return narrow(d, 1) @ narrow(w, 1).t(), x.t() @ d


def test_losses_and_gradients_are_those_of_autograd_on_narrow_operands() -> None:
    plan = prepare(in_f64(checked(FILE, "m.par")))
    run = VirtualRun(plan)
    torch.manual_seed(1)
    batch = {"x": torch.randn(6, 10, dtype=torch.float64), "t": torch.randint(0, 5, (6,))}
    weights = {name: run.parameters()[f"m.{name}"].clone().requires_grad_() for name in PARAMETERS}
    loss, _ = run.step(1, batch, 0.0)
    h = torch.nn.functional.gelu(Linear.apply(batch["x"], weights["w1"]), approximate="tanh")
    y = batch["x"] + Linear.apply(h, weights["w2"].t())
    expected = torch.nn.functional.cross_entropy(y @ weights["head"], batch["t"])
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, value in run.gradients().items():
        assert torch.allclose(value, weights[name.removeprefix("m.")].grad, rtol=1e-10, atol=1e-12), name


def test_eight_bits_make_a_difference() -> None:
    batch = {"x": torch.randn(6, 10, dtype=torch.float64), "t": torch.randint(0, 5, (6,))}
    narrow, wide = (
        VirtualRun(prepare(each)).step(1, batch, 0.0)[0]
        for each in (in_f64(checked(FILE, "m.par")), checked(FILE, "m.par", ("train.precision=f64",)))
    )
    assert 1e-5 < abs(narrow - wide) < 0.1


# ---------------------------------------------------------------- however it is cut


def check(program: Program, seed: int, tmp_path) -> None:
    whole, cut = (
        trained(prepare(in_f64(checked(program.text, "random.par", overrides))), seed, tmp_path)
        for overrides in (program.single, ())
    )
    for (a, b), (a_, b_) in zip(whole[0][::2], cut[0][::2], strict=True):
        assert (a, b) == pytest.approx((a_, b_), rel=1e-9)
    for name, value in whole[1].items():
        close(cut[1][name], value, f"gradient of {name}")


@given(program=programs() | sharded_programs(), seed=st.integers(0, 1000))
@examples(2, suppress_health_check=list(HealthCheck))
def test_partitioned_equals_whole(program: Program, seed: int, tmp_path_factory) -> None:
    note(program.text)
    check(program, seed, tmp_path_factory.getbasetemp())


@pytest.mark.soak
@given(program=programs() | sharded_programs(), seed=st.integers(0, 1000))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_partitioned_equals_whole_at_length(program: Program, seed: int, tmp_path_factory) -> None:
    note(program.text)
    check(program, seed, tmp_path_factory.getbasetemp())


SMALL = ("batch=8", "seq=16", "embed=32", "ffn=48", "vocab=32", "train.precision=fp8")


def compiled(file: str, *overrides: str) -> Compilation:
    found, diagnostics = load(str(SPECS / file), overrides)
    assert found is not None, diagnostics
    return compile_spec(found)


@pytest.mark.soak
def test_everything_that_is_verified_holds() -> None:
    found, _ = load(str(SPECS / "llama.par"), SMALL)
    assert found is not None
    assert verify(found).passed


@pytest.mark.soak
def test_a_split_row_has_one_scale_and_what_is_gathered_has_eight_bits() -> None:
    """`wo` and `down` of Llama sum over axes that tensor parallelism splits: maxima are reduced over its ranks. Before
    other products sequences are gathered.
    """
    sizes = ("seq=4096", "embed=4096", "groups=8", "heads=4", "key=128", "ffn=14336", "vocab=32000")
    state = compiled("llama.par", *sizes, "cluster.device=h100", "cluster.link=nvlink4", "train.precision=fp8")
    moved = {
        (node.op.name, value.name)
        for node in state.sharded.graph.nodes
        if isinstance(node.op, Collective)
        for value in node.inputs
    }
    layer = "llama.layer.2"
    for name in ("attention.a", "attention.wo", "mlp.multiply", "mlp.down"):
        assert ("all_reduce", f"{layer}.{name}.largest") in moved
    for name in ("attention.h", "mlp.h"):
        assert ("all_gather", f"{layer}.{name}.float8") in moved


@pytest.mark.soak
def test_the_precision_of_the_rest_is_that_of_bf16() -> None:
    narrow, wide = (compiled("tiny.par", f"train.precision={each}") for each in ("fp8", "bf16"))
    for own, other in zip(narrow.program.parameters, wide.program.parameters, strict=True):
        assert (own.type, [each.type for each in own.states]) == (other.type, [each.type for each in other.states])
    products = {
        name: [n for n in s.joint.nodes if n.op.name == name] for s in [narrow] for name in ("float8_dot", "dot")
    }
    # Of 24 products in 4 layers, forward and for activations; of the rest and of parameters, plain ones.
    assert len(products["float8_dot"]) == 48
    assert len(products["dot"]) == 24 + 3
    assert narrow.flops == wide.flops


def test_devices_that_multiply_faster_in_eight_bits_are_predicted_to() -> None:
    state = compiled("tiny.par", "train.precision=fp8")
    product = next(node for node in state.joint.nodes if node.op.name == "float8_dot")
    plain = evolve(DEVICES["cpu"], flops={"f32": 1e9, "bf16": 1e9, "f64": 1e9})
    faster = evolve(plain, flops={**plain.flops, "f8": 2e9}, narrow=0.9)
    assert seconds(product, faster) == pytest.approx(seconds(product, plain) / 1.8)
