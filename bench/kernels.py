"""Every kernel that a Llama layer launches on a GPU, beside plain torch: launches, and bytes that they move.

    python bench/kernels.py [--list] [--microbatches 4] [KEY=VALUE ...]
    python bench/kernels.py --compiled

No GPU is needed: tensors have shapes alone (`partita.runtime.fake_gpu`). One operation of ATen is one launch on both
sides, composite ones as torch takes them apart, and views are none; a launch reads its operands and writes its results
once. Figures are means of a layer and microbatch in one step, forward and backward with the sums of gradients, without
the optimizer.

Plain torch is the leanest layer that we know how to write with autograd: fused RMS norm, rotary positions as complex
numbers (three launches, as in torchtitan), FlashAttention by SDPA, with keys shared by heads as the kernel takes them.
Its parameters are bf16 and so are its gradients; with `masters` it adds these up in f32, as Partita does.

With `--compiled`, both are compiled: what Inductor generates for a GPU is counted (`generated.py`), a kernel of its own
or an operation that it calls as one launch, with the bytes that Inductor counts. It needs the package `triton`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from attrs import evolve, frozen
from generated import Generated, inductor_for_gpu
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from partita.runtime.fake_gpu import rank
from partita.runtime.fake_gpu.device import fake_gpu
from partita.runtime.fake_gpu.watch import Launch, Watch
from partita.runtime.kernels import compiling

LLAMA = Path(__file__).parents[1] / "specs" / "llama.par"
# A layer of Llama 3.2 1B.
SIZES = {"embed": 2048, "groups": 8, "heads": 4, "key": 64, "ffn": 8192, "seq": 2048}
ROWS = 2  # of a microbatch


@frozen
class Side:
    """What one program launches: the kernels of all its microbatches and layers, forward and backward."""

    name: str
    forward: list[Launch]
    backward: list[Launch]
    share: float  # of a layer and microbatch

    def row(self) -> list[str]:
        """Launches and bytes."""
        both = [*self.forward, *self.backward]
        counts = [
            f"{len(each) * self.share:.2f}".rstrip("0").rstrip(".") for each in (self.forward, self.backward, both)
        ]
        moved = [f"{_moved(each) * self.share / 1e6:,.1f}" for each in (self.forward, self.backward, both)]
        return [self.name, *counts, *moved]


def _moved(launches: list[Launch]) -> int:
    return sum(each.read + each.written for each in launches)


def ours(microbatches: int, overrides: list[str]) -> Side:
    """The layers of `specs/llama.par` on one rank, in bf16."""
    from partita.dsl.load import load
    from partita.runtime.fake_gpu.rank import try_ranks
    from partita.runtime.rank import prepare

    chosen = [f"{name}={size}" for name, size in SIZES.items()]
    chosen += ["layout=zero1", "cluster.data=1", "cluster.pipe=1", "cluster.tensor=1", "train.precision=bf16"]
    chosen += [
        f"batch={ROWS * microbatches}",
        f"schedule=one_f_one_b(microbatches={microbatches})",
        "train.compile=false",
    ]
    spec, diagnostics = load(LLAMA, (*chosen, *overrides))
    assert spec is not None, diagnostics
    plan = prepare(evolve(spec, expect=()), gpu=True)
    (tried,) = try_ranks(plan)
    assert not tried.faults, tried.faults
    layers = 6
    forward, backward = (
        [each for each in tried.launches if each.function.startswith(f"layer_{which}")]
        for which in ("forward", "backward")
    )
    return Side("Partita", forward, backward, 1 / (microbatches * layers))


class Layer:
    """A layer of plain torch."""

    def __init__(self, masters: bool) -> None:
        embed, ffn, key = SIZES["embed"], SIZES["ffn"], SIZES["key"]
        heads = SIZES["groups"] * SIZES["heads"]
        shapes = {
            "wq": (heads * key, embed), "wk": (SIZES["groups"] * key, embed), "wv": (SIZES["groups"] * key, embed),
            "wo": (embed, heads * key), "gate": (ffn, embed), "up": (ffn, embed), "down": (embed, ffn),
            "first": (embed,), "second": (embed,),
        }  # fmt: skip
        self.masters = masters
        self.parameters = {name: _new(*shape).requires_grad_() for name, shape in shapes.items()}
        self.totals = {name: _new(*shape, dtype=torch.float32) for name, shape in shapes.items()}
        self.angles = _new(1, SIZES["seq"], 1, key // 2, dtype=torch.complex64)

    def __call__(self, x: Tensor) -> Tensor:
        """Of [batch, seq, embed]."""
        p, (batch, seq, _) = self.parameters, x.shape
        h = _norm(x, p["first"])
        q, k, v = (linear(h, p[name]).view(batch, seq, -1, SIZES["key"]) for name in ("wq", "wk", "wv"))
        q, k = self._turned(q), self._turned(k)
        a, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, True
        )
        x = x + linear(a.transpose(1, 2).reshape(batch, seq, -1), p["wo"])
        h = _norm(x, p["second"])
        return x + linear(silu(linear(h, p["gate"])) * linear(h, p["up"]), p["down"])

    def _turned(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2)) * self.angles
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    def accumulate(self) -> None:
        """With masters, gradients are added up in f32."""
        if self.masters:
            for name, parameter in self.parameters.items():
                self.totals[name].add_(parameter.grad)
                parameter.grad = None


# torch's fused RMS norm, which is one kernel on a GPU alone: one launch here, too, and one of its gradient.
_library = torch.library.Library("bench", "DEF")
_library.define("rms_norm(Tensor x, Tensor scale) -> (Tensor, Tensor)")
_library.define("rms_norm_backward(Tensor d, Tensor x, Tensor rate, Tensor scale) -> (Tensor, Tensor)")
_library.impl(
    "rms_norm", lambda x, scale: (torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)), "Meta"
)
_library.impl("rms_norm_backward", lambda d, x, rate, scale: (torch.empty_like(x), torch.empty_like(scale)), "Meta")


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, scale: Tensor) -> Tensor:
        y, rate = torch.ops.bench.rms_norm(x, scale)
        context.save_for_backward(x, rate, scale)
        return y

    @staticmethod
    def backward(context: Any, d: Tensor) -> Any:
        return torch.ops.bench.rms_norm_backward(d, *context.saved_tensors)


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return _Norm.apply(x, scale)


def _new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plain(microbatches: int, masters: bool) -> Side:
    """As many microbatches through one layer of plain torch."""
    layer, watch = Layer(masters), Everything("meta")
    forward, backward = list[Launch](), list[Launch]()
    with watch:
        for _ in range(microbatches):
            x, d = (_new(ROWS, SIZES["seq"], SIZES["embed"]) for _ in range(2))
            watch.taken()
            y = layer(x.requires_grad_())
            forward += watch.taken()
            y.backward(d)
            layer.accumulate()
            backward += watch.taken()
    return Side(f"plain torch{', masters' if masters else ''}", forward, backward, 1 / microbatches)


class Everything(Watch):
    """Counts launches on any device."""

    def __init__(self, there: str) -> None:
        super().__init__(torch.bfloat16, there=there)

    def _devices(self, *_: Any) -> None:
        """Any."""


# ---------------------------------------------------------------- compiled


def compiled(microbatches: int, overrides: list[str]) -> list[Side]:
    """The same layers, compiled on both sides."""
    with patch.object(rank, "_not_compiled", _compiled_for_gpu):
        mine = ours(microbatches, [*overrides, "train.compile=true"])
    forward, backward = _plain_graphs()
    sides = [evolve(mine, name="Partita, compiled")]
    for masters in (False, True):
        layer, watch = Layer(masters), Everything("meta")
        with watch:
            for _ in range(microbatches):
                for parameter in layer.parameters.values():
                    new = torch.empty_like(parameter)
                    parameter.grad = new if masters or parameter.grad is None else parameter.grad.add_(new)
                layer.accumulate()
        sums = watch.taken()
        both = _launched(forward, "") * microbatches, _launched(backward, "") * microbatches + sums
        sides.append(Side(f"torch.compile{', masters' if masters else ''}", *both, 1 / microbatches))
    return sides


def _launched(graph: Generated, function: str) -> list[Launch]:
    """The kernels of a graph; the first stands for the bytes of all."""
    return [Launch(name, function, "", 0 if i else graph.bytes, 0) for i, name in enumerate(graph.launches)]


@contextmanager
def _compiled_for_gpu(watch: Watch) -> Iterator[None]:
    """Segments launch what Inductor generates for them. The first call of each is its compilation."""
    compile = compiling._compile

    def counted(function: Any, tensors: Any, totals: int) -> Any:
        before = list(watch.launches)
        watch.limit = sys.maxsize  # compiling takes memory, and keeps what it has traced
        with inductor_for_gpu() as found:
            compile(function, tensors, totals)
        watch.launches = before
        (graph,) = found

        def run(given: list[Tensor]) -> Any:
            before = list(watch.launches)
            with watch.segment():
                results = function(*given)
            watch.launches = before + _launched(graph, function.__name__)
            return results

        return run, False

    with patch.object(compiling, "_compile", counted):
        yield


def _plain_graphs() -> list[Generated]:
    """The forward and the backward graph of a compiled layer of plain torch. They are traced with tensors of the CPU,
    since autograd asks devices whether they are there, and then moved.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    graphs: list[Generated] = []

    def moved(graph: Any, inputs: Any, **options: Any) -> Any:
        results = [None if each is None else each.meta["val"] for each in graph.graph.output_node().args[0]]
        with fake_gpu(Watch(torch.bfloat16)):
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                given = [_like(each.meta["val"], "cuda") for each in graph.graph.find_nodes(op="placeholder")]
            for each in graph.graph.nodes:
                if "device" in each.kwargs:
                    each.kwargs = {**each.kwargs, "device": torch.device("cuda", 0)}
            graph.recompile()
            FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
            with inductor_for_gpu() as found, tracing(TracingContext(mode)):
                compile_fx_inner(graph, given, is_backward=options.get("is_backward", False))
        graphs.extend(found)

        def run(_: Any) -> list[Any]:
            return [_like(each, "cpu") for each in results]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    parameters = {name: torch.empty_like(each, device="cpu") for name, each in Layer(False).parameters.items()}
    x = torch.empty(ROWS, SIZES["seq"], SIZES["embed"], dtype=torch.bfloat16)
    cos, sin = torch.empty(2, SIZES["seq"], SIZES["key"] // 2)
    for each in (x, *parameters.values()):
        each.requires_grad_()
    layer = torch.compile(_layer, backend=partial(compile_fx, inner_compile=moved))
    layer(x, cos, sin, parameters).backward(torch.empty_like(x))
    return graphs


def _like(value: Any, device: str) -> Any:
    """A tensor of the same form, with any numbers."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _layer(x: Tensor, cos: Tensor, sin: Tensor, p: dict[str, Tensor]) -> Tensor:
    """`Layer` with everything that torch.compile can fuse written out."""
    key = SIZES["key"]

    def turned(x: Tensor) -> Tensor:
        a, b = torch.split(x.float(), key // 2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    h = rms_norm(x, x.shape[-1:], p["first"], 1e-5)
    q, k, v = (linear(h, p[name]).unflatten(-1, (-1, key)).transpose(1, 2) for name in ("wq", "wk", "wv"))
    a, *_ = torch.ops.aten._scaled_dot_product_flash_attention(turned(q), turned(k), v, 0.0, True)
    x = x + linear(a.transpose(1, 2).flatten(2), p["wo"])
    h = rms_norm(x, x.shape[-1:], p["second"], 1e-5)
    return x + linear(silu(linear(h, p["gate"])) * linear(h, p["up"]), p["down"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--list", action="store_true", help="every kernel, with how often it is launched")
    parser.add_argument("--compiled", action="store_true", help="both compiled")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.compiled:
        sides = compiled(arguments.microbatches, arguments.overrides)
    else:
        sides = [ours(arguments.microbatches, arguments.overrides)]
        sides += [plain(arguments.microbatches, masters) for masters in (False, True)]
    table = Table("a layer and microbatch", *("launches F", "B", "both", "MB moved F", "B", "both"))
    for side in sides:
        table.add_row(*side.row())
    console = Console(width=140)
    console.print(table)
    if arguments.list:
        for side in sides:
            console.print(_listed(side))


def _listed(side: Side) -> Any:
    """The kernels of one side by operation."""
    table = Table(side.name, "launches", "MB read", "MB written")
    for phase, launches in (("F", side.forward), ("B", side.backward)):
        counts = Counter(each.operation for each in launches)
        for operation, count in counts.most_common():
            own = [each for each in launches if each.operation == operation]
            sums = [sum(getattr(each, what) for each in own) * side.share / 1e6 for what in ("read", "written")]
            table.add_row(f"{phase} {operation}", f"{count * side.share:.2f}", *(f"{each:,.1f}" for each in sums))
    return table


if __name__ == "__main__":
    main()
