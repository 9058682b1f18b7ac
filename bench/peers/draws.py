"""The initial values and batches that nanoGPT draws from a seed, by one generator and in its order."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from partita.runtime.data.dataset import Batch
from partita.runtime.data.windows import Windows
from peers.workload import Workload

DEVIATION = 0.02
SHARE = 0.9  # of the text that is trained on


@frozen(eq=False)
class Draws:
    """A `Dataset` of windows at drawn places. All evaluations have the batches that nanoGPT's last one has."""

    training: np.ndarray
    holdout: np.ndarray
    length: int
    places: list[list[int]]
    held_out: list[list[int]]

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The windows of a training step."""
        return self._cut(self.training, self.places[step - 1], rows)

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The windows of an evaluation batch."""
        return self._cut(self.holdout, self.held_out[index], rows)

    def _cut(self, ids: np.ndarray, places: list[int], rows: range | None) -> Batch:
        chosen = places if rows is None else [places[row] for row in rows]
        windows = np.stack([ids[place : place + self.length + 1] for place in chosen]).astype(np.int64)
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def drawn(work: Workload, seed: int) -> Workload:
    """The workload with the initial values and batches of nanoGPT's seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = _weights(work, generator)
    return evolve(work, given=weights, dataset=_batches(work, generator))


def _weights(work: Workload, generator: torch.Generator) -> Mapping[str, Tensor]:
    """As `GPT.__init__` draws them: the modules' own values, then all anew, then the projections into the residual
    stream once more. torch keeps a matrix [out, in].
    """
    wte, wpe = (work.weights[f"nanogpt.{each}"] for each in ("wte", "wpe"))
    (vocab, embed), positions = wte.shape, len(wpe)
    ffn = work.weights["nanogpt.layer.0.mlp.up"].shape[1]
    shapes = [(3 * embed, embed), (embed, embed), (ffn, embed), (embed, ffn)] * work.layers
    tokens, places = torch.empty(vocab, embed), torch.empty(positions, embed)
    matrices = [torch.empty(shape) for shape in shapes]
    for each in (tokens, places):
        nn.init.normal_(each, generator=generator)
    for each in (*matrices, tokens):
        nn.init.kaiming_uniform_(each, a=sqrt(5), generator=generator)
    for each in (tokens, places, *matrices, tokens):  # the output's matrix is that of the tokens
        nn.init.normal_(each, 0.0, DEVIATION, generator=generator)
    for each in matrices[1::2]:
        nn.init.normal_(each, 0.0, DEVIATION / sqrt(2 * work.layers), generator=generator)
    found = {"nanogpt.wte": tokens, "nanogpt.wpe": places}
    for layer in range(work.layers):
        qkv, out, up, down = (each.t() for each in matrices[4 * layer : 4 * layer + 4])
        attention, mlp = (f"nanogpt.layer.{layer}.{each}" for each in ("attention", "mlp"))
        found |= {f"{attention}.w{name}": part for name, part in zip("qkv", qkv.split(embed, 1), strict=True)}
        found |= {f"{attention}.wo": out, f"{mlp}.up": up, f"{mlp}.down": down}
    ones = {name: each for name, each in work.weights.items() if name not in found}
    return ones | {name: each.reshape(work.weights[name].shape).to(wte.dtype) for name, each in found.items()}


def _batches(work: Workload, generator: torch.Generator) -> Draws:
    """As its training loop draws them: the first batch, and in every step what it evaluates and then the next batch."""
    windows = work.dataset
    assert isinstance(windows, Windows)
    settings = work.plan.train
    interval, evaluated = (int(settings.eval.arguments[each]) for each in ("interval", "batches"))
    ids = np.concatenate([windows.training, windows.holdout])
    training, holdout = np.split(ids, [int(SHARE * len(ids))])
    rows = windows.inputs[0].batch

    def places(part: np.ndarray) -> list[int]:
        return torch.randint(len(part) - windows.length, (rows,), generator=generator).tolist()

    found, held_out = [places(training)], []
    for step in range(settings.steps + 1):
        if step % interval == 0:
            held_out = [[places(part) for _ in range(evaluated)] for part in (training, holdout)][1]
        found.append(places(training))
    return Draws(training, holdout, windows.length, found, held_out)
