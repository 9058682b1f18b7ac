"""Ours equals torch: loss, every gradient, and the parameters after three updates, in float64, however it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partita.dsl.load import load
from partita.runtime.data.binding import open_data
from partita.runtime.learning_rates import learning_rate
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.files import SPECS
from tests.training.reference import MODELS, optimizer

# Sizes that make a test fast; the arithmetic is the same.
TINY = ("batch=8", "seq=16", "embed=16", "heads=2", "key=8", "train.data=random()", "train.eval=every(1)")
LLAMA = ("batch=8", "seq=8", "embed=16", "groups=2", "heads=2", "key=4", "ffn=24", "vocab=32")
STAGES_ONLY = Path(__file__).parent / "files"


def spec_of(path: Path, *overrides: str):
    spec, diagnostics = load(path, ["train.precision=f64", *overrides])
    assert spec is not None, "\n\n".join(d.render() for d in diagnostics)
    return spec


CASES = [
    ("tiny.par", (*TINY, "schedule=gpipe"), 1),
    ("tiny.par", (*TINY, "fast.microbatches=1"), 2),
    ("tiny.par", TINY, 2),
    ("tiny.par", (*TINY, "laptop.pipe=4", "schedule=one_f_one_b", "schedule.microbatches=4"), 4),
    ("tiny.par", (*TINY, "laptop.pipe=1", "fast.chunks=4"), 1),
    ("llama_stages.par", LLAMA, 2),
    ("llama_stages.par", (*LLAMA, "cluster.pipe=3", "fast.chunks=2", "layout=even"), 3),
    ("mlp_single.par", ("batch=16",), 1),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("file", "overrides", "ranks"), CASES)
def test_equals_torch(file: str, overrides: tuple[str, ...], ranks: int):
    path = SPECS / file if (SPECS / file).exists() else STAGES_ONLY / file
    if "schedule=gpipe" in overrides:
        overrides = (*overrides, "laptop.pipe=1")
    plan = prepare(spec_of(path, *overrides))
    assert plan.ranks == ranks
    run = VirtualRun(plan, seed=1)
    dataset = open_data(plan.program, plan.train, path.parent)
    assert dataset is not None
    model = MODELS[plan.program.name]
    parameters = {name: p.clone().requires_grad_() for name, p in run.parameters().items()}
    # Values of order 1 whatever the file declares, so that nothing is hidden by small numbers.
    generator = torch.Generator().manual_seed(5)
    for name, p in parameters.items():
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.5)
        for rank in run.ranks:
            if name in rank.memory.masters:
                rank.memory.masters[name].copy_(p.detach())
    (call,) = plan.train.optimizer.calls
    arguments = {k: v for k, v in call.arguments.items() if k not in ("lr", "decay")}
    reference = optimizer(call.name, parameters, lr=1.0, **arguments)
    for step in range(1, 4):
        rate = learning_rate(call.arguments["lr"], step)
        batch = run.ranks[0].tensors(dataset.batch(step))
        loss, norm = run.step(step, batch, rate)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.zero_grad()
        expected = model(parameters, batch)
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        for name, gradient in run.gradients().items():
            torch.testing.assert_close(
                gradient,
                parameters[name].grad,
                rtol=1e-10,
                atol=1e-10,
                msg=lambda m, n=name: f"gradient of {n}: {m}",
            )
        clip = plan.train.clip
        total = torch.nn.utils.clip_grad_norm_(parameters.values(), clip if clip else float("inf"))
        assert norm == pytest.approx(total.item(), rel=1e-10)
        reference.step()
        for name, value in run.parameters().items():
            torch.testing.assert_close(
                value,
                parameters[name].detach(),
                rtol=1e-10,
                atol=1e-10,
                msg=lambda m, n=name, k=step: f"{n} after {k}: {m}",
            )
    assert all(not stage.in_flight for rank in run.ranks for stage in rank.training.stages.values())
