"""Loops of Python over a dimension are put together again; what is none stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from partita.importing.capture import capture
from partita.importing.graph import Value, order
from partita.importing.imported import imported

Step = Callable[[Tensor, Tensor], Tensor]


class Over(nn.Module):
    """A loop that begins with zeros."""

    def __init__(self, step: Step, positions: Callable[[int], Sequence[int]], every: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.step, self.positions, self.every = step, positions, every

    def forward(self, x: Tensor) -> Tensor:
        state, made = torch.zeros_like(x[:, 0]), []
        for t in self.positions(x.size(1)):
            state = self.step(x[:, t] @ self.w, state)
            made.append(state)
        return torch.stack(made, 1).square().mean() if self.every else state.square().mean()


def values(module: nn.Module, length: int = 5) -> list[Value]:
    return order(capture(module, {"x": torch.randn(2, length, 3)}, rolled=True).written)


def count(module: nn.Module, op: str) -> int:
    return sum(each.op == op for each in values(module))


FORWARD, BACKWARD = range, lambda size: range(size - 1, -1, -1)


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("positions", [FORWARD, BACKWARD])
def test_one_step_remains(positions: Callable[[int], Sequence[int]], every: bool):
    module = Over(lambda x, state: torch.tanh(x + state), positions, every)
    assert count(module, "tanh.default") == 1
    assert len(values(module)) == len(values(module, 9)), "as many operations at each length"


def test_a_loop_is_written_as_it_runs():
    module = Over(lambda x, state: torch.tanh(x + state), BACKWARD)
    assert "scan seq backward {" in imported(module, {"x": torch.randn(2, 5, 3)}).text


@pytest.mark.parametrize("first", [1, 2])
def test_a_loop_may_run_over_a_part(first: int):
    module = Over(lambda x, state: torch.tanh(x + state), lambda size: range(first, size))
    (part,) = (each.args["x"] for each in values(module) if each.op == "scan_slice")
    assert part.shape == (2, 5 - first, 3)


@pytest.mark.parametrize(
    ("module", "op"),
    [
        (Over(lambda x, state: torch.tanh(x), FORWARD), "tanh.default"),  # nothing is carried
        (Over(lambda x, state: torch.tanh(x + state), lambda size: [0, 2, 1, 4, 3]), "tanh.default"),
        (Over(lambda x, state: torch.tanh(x + state), lambda size: range(0, size, 2)), "tanh.default"),
    ],
)
def test_what_is_no_loop_stays(module: nn.Module, op: str):
    assert count(module, "scan_result") == 0
    assert count(module, op) > 1


class Growing(nn.Module):
    """Each step reads all that was made before."""

    def forward(self, x: Tensor) -> Tensor:
        made = [x[:, 0]]
        for t in range(1, x.size(1)):
            made.append(torch.stack(made).mean(0) + x[:, t])
        return torch.stack(made).square().mean()


def test_what_grows_from_step_to_step_stays():
    assert count(Growing(), "scan_result") == 0


class Chosen(nn.Module):
    """A value of one step that is read behind the loop."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        state, made = x[:, 0] * 0, []
        for t in range(x.size(1)):
            state = torch.sin(state) + x[:, t]
            made.append(state)
        return (made[self.step] * state).mean()


@pytest.mark.parametrize("step", [0, 1])
def test_a_value_of_one_step_is_read(step: int):
    read, last = (
        each for each in values(Chosen(step)) if each.op == "select.int" and each.args["self"].op == "scan_result"
    )
    assert (read.args["index"], last.args["index"]) == (step, -1)
