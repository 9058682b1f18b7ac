"""What groups that train apart and late gradients cost by themselves: plain loops in torch, in one process.

    python bench/groups_plain.py [--steps 200] [--set KEY=VALUE ...] -- [LOOP ...]

The model of `specs/tiny.par`, which `bench/models/groups.par` trains, written by hand, from the same initial values, on
the same batches, with the same optimizer. It shares no code with what `bench/groups.py` measures beyond these. Loops:
`none`, `local` (four groups, averaged every 20 steps), `diloco` (the same, with Nesterov's outer momentum, as
arXiv:2311.08105 has it), `delayed` (the gradient of the step before), `eager`: delayed by a step, but each of four
parts of the batch has its gradient where the parameters would be after an update with its own last one, as eager
updates (arXiv:2502.12996) do for groups; and `paired`: each half of the batch is a step, and an update has the mean of
both gradients, of which the first is taken at an estimate, the update before with its first gradient alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean

import torch
from attrs import define
from peers.workload import Workload, workload
from torch import Tensor
from torch.nn import functional as F

from partita.runtime.learning_rates import learning_rates

EPSILON = 1e-5
GROUPS, EVERY = 4, 20
EVALUATED = 10  # batches

Weights = dict[str, Tensor]


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("loops", nargs="*", default=["none", "local", "diloco", "delayed", "eager", "paired"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    given = workload("../../specs/tiny.par", arguments.set)
    loops = {
        "none": partial(late, delay=0),
        "local": local,
        "diloco": partial(local, rate=0.7, momentum=0.9),
        "delayed": partial(late, delay=1),
        "eager": eager,
        "paired": paired,
    }
    print("| loop | eval loss |\n|---|---|")
    for name in arguments.loops:
        print(f"| {name} | {evaluated(given, loops[name](given, arguments.steps)):.4f} |", flush=True)


def rms_norm(x: Tensor) -> Tensor:
    """Over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


def loss(weights: Weights, tokens: Tensor, targets: Tensor) -> Tensor:
    """The model's mean loss."""
    x = weights["tiny.wte"][tokens] + weights["tiny.wpe"]
    layer = 0
    while (prefix := f"tiny.layer.{layer}.attention") + ".wq" in weights:
        h = rms_norm(x)
        q, k, v = (torch.einsum("bse,ehk->bhsk", h, weights[f"{prefix}.{each}"]) for each in ("wq", "wk", "wv"))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.einsum("bhsk,hke->bse", a, weights[f"{prefix}.wo"])
        mlp = f"tiny.layer.{layer}.mlp"
        x = x + F.gelu(rms_norm(x) @ weights[f"{mlp}.up"], approximate="tanh") @ weights[f"{mlp}.down"]
        layer += 1
    return F.cross_entropy((rms_norm(x) @ weights["tiny.wte"].T).flatten(0, 1), targets.flatten())


def gradient(weights: Weights, batch: Sequence[Tensor]) -> Weights:
    """Of the loss of a batch."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves, *batch), list(leaves.values())), strict=True))


def mean(several: Sequence[Weights]) -> Weights:
    """The mean of each tensor."""
    return {name: torch.stack([each[name] for each in several]).mean(0) for name in several[0]}


@define
class AdamW:
    """As Loshchilov and Hutter have it, with gradients whose norm is clipped. What is looked up does not decay."""

    given: Workload
    weights: Weights
    first: Weights
    second: Weights
    updates: int = 0

    @classmethod
    def of(cls, given: Workload) -> AdamW:
        """Before the first step."""
        weights = {name: weight.clone() for name, weight in given.weights.items()}
        zeros = [{name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2)]
        return cls(given, weights, *zeros)

    def after(self, gradient: Weights, step: int) -> AdamW:
        """What an update with the rate of a step makes of it."""
        arguments, train = self.given.optimizer, self.given.plan.train
        (rate,) = learning_rates(train.optimizer, step)
        b1, b2 = arguments["betas"]
        norm = torch.stack([each.norm() for each in gradient.values()]).norm()
        factor = min(1.0, train.clip / float(norm)) if train.clip else 1.0
        found = AdamW(self.given, {}, {}, {}, self.updates + 1)
        for name, weight in self.weights.items():
            g = gradient[name] * factor
            m = found.first[name] = b1 * self.first[name] + (1 - b1) * g
            v = found.second[name] = b2 * self.second[name] + (1 - b2) * g * g
            ahead = m / (1 - b1**found.updates) / ((v / (1 - b2**found.updates)).sqrt() + arguments["eps"])
            decay = 0.0 if name == "tiny.wpe" else arguments["weight_decay"]
            found.weights[name] = weight - rate * (ahead + decay * weight)
        return found


def steps(given: Workload, count: int) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """The steps, from 1, and their batches."""
    yield from enumerate((batch for batch, _ in zip(given.batches(), range(count), strict=False)), 1)


def parts(batch: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The batches of the groups."""
    return zip(*(each.chunk(GROUPS) for each in batch), strict=True)


def late(given: Workload, count: int, delay: int) -> Weights:
    """Updates with the gradients of so many steps before."""
    state, waiting = AdamW.of(given), []
    for step, batch in steps(given, count):
        waiting.append(gradient(state.weights, batch))
        if len(waiting) > delay:
            state = state.after(waiting.pop(0), step)
    return state.weights


def local(given: Workload, count: int, rate: float = 1.0, momentum: float = 0.0) -> Weights:
    """Groups with optimizers of their own, whose parameters are averaged now and then: a gradient of what they had."""
    states = [AdamW.of(given) for _ in range(GROUPS)]
    anchor = states[0].weights
    velocity = {name: torch.zeros_like(weight) for name, weight in anchor.items()}
    for step, batch in steps(given, count):
        states = [
            each.after(gradient(each.weights, part), step) for each, part in zip(states, parts(batch), strict=True)
        ]
        if step % EVERY == 0 or step == count:
            moved = {name: anchor[name] - value for name, value in mean([each.weights for each in states]).items()}
            velocity = {name: momentum * velocity[name] + value for name, value in moved.items()}
            anchor = {name: anchor[name] - rate * (moved[name] + momentum * velocity[name]) for name in anchor}
            for each in states:
                each.weights = anchor
    return anchor


def eager(given: Workload, count: int) -> Weights:
    """Late updates, which each group knows in part."""
    state, waiting = AdamW.of(given), []
    for step, batch in steps(given, count):
        ahead = [state.after(own, step).weights for own in waiting] or [state.weights] * GROUPS
        own = [gradient(weights, part) for weights, part in zip(ahead, parts(batch), strict=True)]
        if waiting:
            state = state.after(mean(waiting), step)
        waiting = own
    return state.weights


def paired(given: Workload, count: int) -> Weights:
    """Updates with two gradients, of which each is summed while the other is computed."""
    state = AdamW.of(given)
    estimate = state.weights
    for step, batch in steps(given, count):
        one, other = zip(*(each.chunk(2) for each in batch), strict=True)
        first, second = gradient(estimate, one), gradient(state.weights, other)
        estimate = state.after(first, step).weights
        state = state.after(mean([first, second]), step)
    return state.weights


def evaluated(given: Workload, weights: Weights) -> float:
    """The mean loss of what is held out."""
    names = [each.name for each in given.plan.program.inputs]
    batches = [given.dataset.holdout_batch(index) for index in range(EVALUATED)]
    with torch.no_grad():
        return fmean(float(loss(weights, *(torch.as_tensor(each[name]).long() for name in names))) for each in batches)


if __name__ == "__main__":
    main()
