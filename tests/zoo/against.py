"""A `.par` model held against the same model of `transformers`, with the same weights.

    MODEL = Against(
        file="llama3.par",
        overrides=("embed=32", "vocab=64"),
        theirs=lambda: LlamaForCausalLM(LlamaConfig(hidden_size=32, vocab_size=64)),
    )

Each is a module of `tests/zoo/models`. Ours is what a user runs: the file compiled by `compile_run` for one device, and
executed by the runtime. Both compute in f32. A number is the same where it is within 1e-5 of the largest of its tensor;
a gradient that is zero in exact arithmetic is rounding noise of the others, so no gradient is held to less than 1e-5 of
a hundredth of all gradients.

Which of theirs is which of ours is what `weights hf` in the file says, of the names under which theirs is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from partita.compiler.verify.proxy import single
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.dsl.names.correspondence import Weights
from partita.dsl.spec import Spec
from partita.runtime.checkpoint.foreign import seen_as_ours, seen_as_theirs
from partita.runtime.data.binding import open_data
from partita.runtime.outputs import outputs
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.training import VirtualRun
from tests.files import SPECS

ZOO = SPECS / "zoo"
TOLERANCE = 1e-5
# Of all gradients, how much the least scale of one of them is.
LEAST = 1e-2
STEPS = 20
# The step for which an evaluation draws its random numbers.
EVALUATION = 0
RATE, DECAY = 1e-3, 0.1

Batch = Mapping[str, Tensor]


def language(model: nn.Module, batch: Batch) -> Tensor:
    """The logits of a language model."""
    return model(batch["tokens"]).logits


def next_tokens(logits: Tensor, batch: Batch) -> Tensor:
    """The loss of a language model."""
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


@frozen(kw_only=True, eq=False)
class Against:
    """A file of ours, whose one output is its logits, and a module of theirs.

    `logits` are of their module and a batch of our inputs, and `loss` of these logits and the batch. Batches are random
    or those of `batch`, a function of the step; these may also have what only theirs reads, such as what ours draws.
    `padding`, of a batch, is where logits mean nothing. `tolerance`: how far numbers may be apart, of the largest.
    `training`: theirs trains in the state in which dropout drops, which batch normalization needs.
    """

    file: str | Path
    overrides: tuple[str, ...] = ()
    theirs: Callable[[], nn.Module]
    logits: Callable[[nn.Module, Batch], Tensor] = language
    loss: Callable[[Tensor, Batch], Tensor] = next_tokens
    batch: Callable[[int], Batch] | None = None
    padding: Callable[[Batch], Tensor] | None = None
    tolerance: float = TOLERANCE
    training: bool = False

    def same_logits(self) -> None:
        """The output is the same, as in evaluation."""
        both = self._both()
        batch = both.batches(1 if self.batch is None else EVALUATION)
        (found,) = outputs(both.run.plan.spec, both.parameters(), both.inputs(batch)).values()
        with torch.no_grad():
            expected = self.logits(both.module.eval(), batch)
        if self.padding is not None:
            found, expected = (logits.masked_fill(self.padding(batch), 0.0) for logits in (found, expected))
        check("logits", found, expected, tolerance=self.tolerance)

    def same_numbers(self, batches: int = 3) -> None:
        """Loss and every gradient are the same on some batches."""
        both = self._both()
        for step in range(1, batches + 1):
            batch = both.batches(step)
            loss, _ = both.run.step(step, both.inputs(batch))
            both.module.zero_grad()
            expected = self._loss(both, batch)
            expected.backward()
            check(f"loss of batch {step}", torch.tensor(loss), expected.detach(), tolerance=self.tolerance)
            gradients = both.parameters(gradients=True)
            norm = float(sum(gradient.square().sum() for gradient in gradients.values())) ** 0.5
            for name, gradient in both.run.gradients().items():
                check(f"gradient of {name}", gradient, gradients[name], LEAST * norm, self.tolerance)

    def same_training(self, steps: int = STEPS) -> None:
        """Training with AdamW gives the same losses. All parameters decay, which torch does by default."""
        both = self._both(f"train.optimizer=adamw(lr = {RATE}, weight_decay = {DECAY}, decay = all)", "train.clip=none")
        optimizer = torch.optim.AdamW(both.module.parameters(), lr=RATE, weight_decay=DECAY)
        for step in range(1, steps + 1):
            batch = both.batches(step)
            loss, _ = both.run.step(step, both.inputs(batch), RATE)
            optimizer.zero_grad()
            expected = self._loss(both, batch)
            expected.backward()
            optimizer.step()
            check(f"loss of step {step}", torch.tensor(loss), expected.detach(), tolerance=self.tolerance)

    def _loss(self, both: Both, batch: Batch) -> Tensor:
        return self.loss(self.logits(both.module, batch), batch)

    def _both(self, *overrides: str) -> Both:
        """Both models, with the same random weights."""
        torch.manual_seed(5)
        module = self.theirs().train(self.training)
        draw(module)
        path = ZOO / self.file
        data = () if self.batch is not None else ("train.data=random()",)
        spec = loaded(path, "train.precision=f32", "train.eval=none", *data, *self.overrides, *overrides)
        plan = prepare(single(spec))
        run = VirtualRun(plan)
        both = Both(run, module, spec.weights["hf"], self.batch or random_batches(plan, path.parent))
        run.set_parameters(both.parameters())
        return both


@frozen(eq=False)
class Both:
    """Ours, compiled and ready to run, and theirs."""

    run: VirtualRun
    module: nn.Module
    weights: Weights
    batches: Callable[[int], Batch]

    def inputs(self, batch: Batch) -> Batch:
        """What ours reads of a batch."""
        return {each.name: batch[each.name] for each in self.run.plan.program.inputs}

    def parameters(self, gradients: bool = False) -> dict[str, Tensor]:
        """Their weights and buffers, or gradients, as ours. Raises AssertionError unless each has a counterpart."""
        tensors = dict(chain(self.module.named_buffers(), self.module.named_parameters()))
        kept = {name for name, tensor in self.module.state_dict().items() if tensor is not None}
        values = {name: _values(each, gradients) for name, each in tensors.items() if name in kept}
        from transformers.core_model_loading import revert_weight_conversion  # slow: not for those who collect tests

        saved = revert_weight_conversion(self.module, values)
        found: dict[str, Tensor] = {}
        for theirs in self.weights.tensors():
            whole = next(saved.pop(name) for name in theirs.names if name in saved)
            assert tuple(whole.shape) == theirs.shape, f"{theirs.names[0]}: {tuple(whole.shape)} is not {theirs.shape}"
            for part in theirs.parts:
                ours = found.setdefault(part.name, torch.empty(part.type.shape, dtype=whole.dtype))
                seen_as_theirs(ours, part).copy_(seen_as_ours(whole.contiguous(), part, theirs.joined))
        assert found.keys() == {each.name for each in self.run.plan.program.parameters}
        lost = [name for name in saved if not any(fnmatch(name, pattern) for pattern in self.weights.skipped)]
        assert not lost, f"of theirs nothing is said of {lost}"
        return found


def _values(tensor: Tensor, gradients: bool) -> Tensor:
    if not gradients:
        return tensor.detach()
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def loaded(path: Path, *overrides: str) -> Spec:
    """A file's meaning. Raises Refused."""
    spec, diagnostics = load(path, overrides)
    if spec is None:
        raise Refused(diagnostics)
    return spec


def random_batches(plan: CompiledRun, folder: Path) -> Callable[[int], Batch]:
    """The batches of a file's own data."""
    dataset = open_data(plan.program, plan.train, folder)
    return lambda step: {
        name: torch.as_tensor(array) for name, array in (dataset.batch(step) if dataset else {}).items()
    }


def draw(module: nn.Module) -> None:
    """Draw their parameters anew, so that nothing is hidden by zeros, ones and small numbers."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.2 * noise)


def check(what: str, found: Tensor, expected: Tensor, least: float = 0.0, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError if a tensor is not the same."""
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} is not {tuple(expected.shape)}"
    assert bool(expected.isfinite().all()), f"{what} is not finite in theirs"
    off = float((found.double() - expected.double()).abs().max())
    scale = max(float(expected.abs().max()), least)
    assert off <= tolerance * scale, f"{what}: off by {off:.3g}, where the largest is {scale:.3g}"
