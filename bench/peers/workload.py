"""What all systems train: the initial values, batches and settings of a `.par` file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from attrs import frozen

from partita.dsl.load import load
from partita.dsl.spec import Spec
from partita.runtime.data.binding import open_data
from partita.runtime.data.dataset import Dataset
from partita.runtime.initial import initial
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.rank import CompiledRun, prepare

MODELS = Path(__file__).parents[1] / "models"


@frozen(eq=False)
class Workload:
    """A file's training, for whoever runs it; with the initial values of the file, unless others are `given`."""

    plan: CompiledRun
    dataset: Dataset
    given: Mapping[str, torch.Tensor] | None = None

    @cached_property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The initial values: whole tensors by their names in the file."""
        if self.given is not None:
            return self.given
        seed, found = self.plan.train.seed, {}
        for each in self.plan.program.parameters:
            array = initial(each.initial, each.type, seed, each.name, each.fans)
            found[each.name] = torch.from_numpy(array).to(DTYPES[each.type.dtype])
        return found

    @property
    def spec(self) -> Spec:
        """The checked file."""
        return self.plan.spec

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len({name.split(".")[2] for name in self.weights if ".layer." in name})

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        assert self.spec.schedule is not None
        return int(self.spec.schedule.call.arguments["microbatches"])

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """Arguments of the optimizer."""
        return self.plan.train.optimizer.calls[0].arguments

    @property
    def tokens(self) -> int:
        """Tokens of a step; rows, where there are none."""
        return self.plan.program.counted[0]

    @property
    def written(self) -> ModuleType:
        """The model written by hand: `Piece`, `loss_of` and `optimizer_of` in the module of the model's name."""
        return import_module(f"peers.{self.plan.program.name}")

    def batches(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """The batches of steps 1, 2, …: the model's inputs in their order, the last one what its output is held to."""
        inputs = self.plan.program.inputs
        for step in count(1):
            batch = self.dataset.batch(step)
            yield tuple(torch.as_tensor(batch[each.name]).to(DTYPES[each.type.dtype]) for each in inputs)


def workload(file: str, overrides: Sequence[str] = (), folder: Path = MODELS, gpu: bool = False) -> Workload:
    """Load and compile a file of `bench/models`; its data is in a folder."""
    spec, diagnostics = load(MODELS / file, tuple(overrides))
    assert spec is not None, "\n\n".join(each.render() for each in diagnostics)
    plan = prepare(spec, gpu)
    dataset = open_data(plan.program, plan.train, folder)
    assert dataset is not None
    return Workload(plan, dataset)
