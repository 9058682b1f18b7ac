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

With `--compiled`, both are compiled by Inductor for this CPU, at small sizes: a Llama of one layer, one microbatch.
A kernel that Inductor generates is a launch, and so is an operation that it calls. What it would fuse on a GPU is not
known here.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear, silu

from partita.runtime.fake_gpu.watch import Launch, Watch

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

SMALL = {"embed": 64, "groups": 2, "heads": 2, "key": 32, "ffn": 96, "seq": 32, "vocab": 128}
# What Inductor's code calls besides kernels of its own.
CALL = re.compile(r"\s*(\w+ = )?(extern_kernels\.|torch\.ops\.)\w+")
STEP = ("layer_", "stage0_forward", "stage0_whole_backward", "stage0_closing")


def compiled() -> tuple[list[str], list[str]]:
    """Launches of both: generated kernels, operations that are called, and all."""
    from torch._inductor import metrics
    from torch._inductor.utils import run_and_get_code

    from partita.dsl.load import load_text
    from partita.runtime.kernels import compiling
    from partita.runtime.rank import prepare
    from partita.runtime.training import VirtualRun

    text = LLAMA.read_text().replace("repeat 6", "repeat 1").replace("pipe [3, 3]", "pipe")
    chosen = [f"{name}={size}" for name, size in SMALL.items()]
    chosen += ["layout=zero1", "cluster.data=1", "cluster.pipe=1", "cluster.tensor=1", "train.precision=bf16"]
    chosen += ["batch=2", "schedule=one_f_one_b(microbatches=1)", "train.compile=true"]
    spec, diagnostics = load_text(text, "llama.par", tuple(chosen))
    assert spec is not None, diagnostics
    run = VirtualRun(prepare(evolve(spec, expect=())))
    generated: list[int] = []
    original = compiling._compile

    def counted(function: Any, tensors: Any) -> Any:
        before = metrics.generated_kernel_count
        found = original(function, tensors)
        if function.__name__.startswith(STEP):
            generated.append(metrics.generated_kernel_count - before)
        return found

    compiling._compile = counted
    shape = 2, SMALL["seq"]
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")}
    run.step(1, batch, 1e-3)
    with Everything("cpu") as watch:
        run.step(2, batch, 1e-3)
    called = [each for each in watch.launches if each.function.startswith(STEP)]
    called = [each for each in called if each.operation not in ("detach", "alias")]
    model = Small()
    torch._inductor.config.force_disable_caches = True
    before = metrics.generated_kernel_count
    _, codes = run_and_get_code(lambda: sum(torch.compile(model.figures)(**batch)).backward())
    theirs = metrics.generated_kernel_count - before
    calls = [line for code in codes for line in code.splitlines() if CALL.match(line)]
    return _counts("Partita", sum(generated), len(called)), _counts("torch.compile", theirs, len(calls))


def _counts(name: str, generated: int, called: int) -> list[str]:
    return [name, str(generated), str(called), str(generated + called)]


class Small:
    """The same model of plain torch, on this CPU."""

    def __init__(self) -> None:
        embed, heads, groups, key, ffn = (SMALL[name] for name in ("embed", "heads", "groups", "key", "ffn"))
        queries = groups * heads * key
        shapes = {
            "wq": (queries, embed), "wk": (groups * key, embed), "wv": (groups * key, embed), "wo": (embed, queries),
            "gate": (ffn, embed), "up": (ffn, embed), "down": (embed, ffn), "first": (embed,), "second": (embed,),
            "last": (embed,), "embed_in": (SMALL["vocab"], embed), "embed_out": (SMALL["vocab"], embed),
        }  # fmt: skip
        self.p = {name: (torch.randn(shape) * 0.02).bfloat16().requires_grad_() for name, shape in shapes.items()}
        angle = torch.arange(SMALL["seq"])[:, None] * 500_000.0 ** (-torch.arange(key // 2) / (key // 2))
        self.cos, self.sin = angle.cos(), angle.sin()

    def figures(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The mean cross entropy, and the accuracy, in f32."""
        p, key = self.p, SMALL["key"]
        x = torch.nn.functional.embedding(tokens, p["embed_in"])
        h = torch.nn.functional.rms_norm(x, x.shape[-1:], p["first"], 1e-5)
        q, k, v = (linear(h, p[n]).unflatten(-1, (-1, key)).transpose(1, 2) for n in ("wq", "wk", "wv"))
        a = torch.nn.functional.scaled_dot_product_attention(
            self._turned(q), self._turned(k), v, is_causal=True, enable_gqa=True
        )
        x = x + linear(a.transpose(1, 2).flatten(2), p["wo"])
        h = torch.nn.functional.rms_norm(x, x.shape[-1:], p["second"], 1e-5)
        x = x + linear(silu(linear(h, p["gate"])) * linear(h, p["up"]), p["down"])
        logits = linear(torch.nn.functional.rms_norm(x, x.shape[-1:], p["last"], 1e-5), p["embed_out"]).float()
        accuracy = (logits.argmax(-1) == targets).float().mean()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), accuracy

    def _turned(self, x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        turned = torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1)
        return turned.to(x.dtype)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--list", action="store_true", help="every kernel, with how often it is launched")
    parser.add_argument("--compiled", action="store_true", help="both compiled, for this CPU")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.compiled:
        table = Table("a Llama of one layer", "generated kernels", "operations called", "launches")
        for row in compiled():
            table.add_row(*row)
        Console(width=140).print(table)
        return
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
