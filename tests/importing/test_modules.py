"""Modules of one's own become files that are equal to them, and what cannot is refused in a line with its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn

import partita
from partita.dsl.diagnostic import Refused
from partita.importing.from_torch import example_of, file_of, proven
from partita.importing.graph import NotUnderstood
from partita.importing.prove import prove
from tests.importing import modules

LOSS = "cross_entropy(logits, label)"


@pytest.mark.parametrize(
    ("build", "inputs", "loss", "gradients", "buffers"),
    [
        (modules.masked, modules.tokens, None, 36, 0),
        (modules.dropped, modules.tokens, None, 36, 0),
        (modules.MLP, modules.rows, LOSS, 4, 0),
        (modules.Convolutions, modules.images, None, 10, 4),
        (modules.Moving, modules.rows, LOSS, 10, 0),
    ],
)
def test_a_file_is_equal_to_its_module(
    build: Callable[[], nn.Module],
    inputs: Callable[[], Mapping[str, Tensor]],
    loss: str | None,
    gradients: int,
    buffers: int,
):
    example = example_of(build(), inputs(), loss)
    before = {name: each.clone() for name, each in example.module.state_dict().items()}
    proof = proven(example, file_of(example))
    assert proof.holds
    assert proof.error < 1e-12
    assert (proof.tensors, proof.buffers) == (gradients, buffers)
    assert len(proof.sizes) > 2
    for name, each in example.module.state_dict().items():
        assert torch.equal(each, before[name]), name


class Dropping(nn.Module):
    """Stochastic depth as people write it, and channels that are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.channels = nn.Linear(6, 4), nn.Dropout1d(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        stays = h.new_empty((len(h), 1, 1)).bernoulli_(0.9)
        return (self.channels(h) * stays.div_(0.9)).square().mean()


def test_what_is_dropped_of_rows_and_channels_is_dropped_as_often():
    text = file_of(example_of(Dropping(), {"x": torch.randn(3, 5, 6)}), axes={"x": ["batch", "seq", "embed"]}).text
    assert "const drop = 0.3, drop_2 = 0.1" in text
    assert "dropout(zeros([batch, seq]) + 1, drop)" in text
    assert "dropout(zeros([batch]) + 1, drop_2)" in text


def test_dropout_is_where_it_was():
    example = example_of(modules.masked(), modules.tokens())
    text = file_of(example).text
    assert "drop = 0.1" in text
    assert "dropout = drop" in text
    assert "ignore = -1" in text


@pytest.mark.parametrize(
    ("right", "wrong", "place"),
    [
        ("gelu(", "relu(", "gradient|loss"),
        ("causal = true", "causal = false", "gradient|loss"),
        ("output logits = ", "output logits = 2 * ", "output `logits`"),
    ],
)
def test_a_mistake_in_a_file_is_found(right: str, wrong: str, place: str):
    example = example_of(modules.plain(), modules.tokens())
    file = file_of(example)
    assert right in file.text
    text = file.text.replace(right, wrong).replace("relu(dot(x, mlp_0, over = embed) + mlp_0_bias, exact = true)", "")
    text = text.replace(", exact = true", "") if wrong == "relu(" else text
    with pytest.raises(NotUnderstood, match=place):
        prove(example.module, example.inputs, evolve(file, text=text))


def test_statistics_that_are_kept_wrongly_are_found():
    example = example_of(modules.Convolutions(), modules.images())
    file = file_of(example)
    text = file.text.replace("0.9 * running_mean + 0.1 * m", "0.8 * running_mean + 0.2 * m")
    assert text != file.text
    with pytest.raises(NotUnderstood, match="running_mean` after a step"):
        prove(example.module, example.inputs, evolve(file, text=text))


def test_names_are_those_of_the_module_and_of_the_user():
    text = partita.from_torch(
        modules.MLP(), modules.rows(), loss=LOSS, axes={"x": ["batch", "pixels"]}, name="net", prove=False
    )
    assert "model net(x: [batch, pixels], label: i64[batch])" in text
    assert "output logits = " in text
    assert '"up.weight"' in text
    assert "module." not in text


@pytest.mark.parametrize(
    ("build", "inputs", "loss", "code", "message"),
    [
        (modules.Branch, modules.rows, LOSS, "E1202", r"modules\.py:\d+\): what is computed depends on numbers"),
        (modules.Fails, modules.rows, LOSS, "E1201", "cannot be called with the example inputs"),
        (modules.MLP, modules.row, LOSS, "E1201", "batch of one"),
        (modules.MLP, modules.rows, None, "E1201", "`forward` of the module takes no `label`"),
        (modules.MLP, lambda: {"x": torch.ones(4, 6)}, None, "E1201", "returns no loss"),
        (modules.MLP, modules.rows, "nll(logits, label)", "E1204", "is none of"),
        (modules.MLP, modules.rows, "cross_entropy(logits, ", "E1204", "is none of"),
        (modules.MLP, modules.rows, "cross_entropy(logits, labels)", "E1204", "names `labels`, which is neither"),
        (modules.Sizes, modules.rows, LOSS, "E1202", r"modules\.py:\d+\): the number 2 depends on sizes"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_its_place(
    build: Callable[[], nn.Module],
    inputs: Callable[[], Mapping[str, Tensor]],
    loss: str | None,
    code: str,
    message: str,
):
    module, given = build(), inputs()
    with pytest.raises(Refused, match=message) as refused:
        partita.from_torch(module, given, loss=loss)
    assert [each.code for each in refused.value.diagnostics] == [code]


def test_axes_of_inputs_are_checked():
    for axes, message in (({"y": ["a"]}, "given of `y`"), ({"x": ["a"]}, "1 axes are given of `x`, which has 2")):
        with pytest.raises(Refused, match=message):
            partita.from_torch(modules.MLP(), modules.rows(), loss=LOSS, axes=axes)


class Table(modules.MLP):
    """It looks numbers up that have no formula."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor([[5, 2, 0], [1, 4, 3]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x + x[:, self.order].sum((1, 2))[:, None])))


def test_tables_lie_in_a_file_that_is_named(tmp_path: Path):
    with pytest.raises(Refused, match="constants of the module have no formula: order") as refused:
        partita.from_torch(Table(), modules.rows(), loss=LOSS)
    assert '`tables = "table.safetensors"`' in str(refused.value)
    file = tmp_path / "table.par"
    file.write_text(partita.from_torch(Table(), modules.rows(), loss=LOSS, tables=tmp_path / "own.safetensors"))
    assert 'buffer order: i64[part, part_2] ~ file("own.safetensors", "order")' in file.read_text()
    assert partita.verify(file).passed


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Backward(modules.MLP):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Reversed.apply(self.up(x))
        return self.down(torch.tanh(made))


class Shuffled(modules.MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[torch.randperm(len(x))])


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, _ = self.rnn(x)
        return out.square().mean(), out, torch.linalg.svdvals(out)


def test_outputs_that_cannot_be_said_are_left_out():
    example = example_of(Spectral(), {"x": torch.randn(3, 4, 6)})
    file = file_of(example)
    assert file.text.startswith("# Outputs beside the loss are left out: the module (test_modules.py:")
    assert "output total = total" in file.text
    assert proven(example, file).holds


class Masked(modules.MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.where(x.new_empty(x.shape).bernoulli_(0.3) == 1, 0.0, x))


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        (Backward, "E1203", r"the gradient of `up\.\w+` is not that of what is computed"),
        (Shuffled, "E1202", r"test_modules\.py:\d+\): random numbers are drawn"),
        (Masked, "E1202", r"test_modules\.py:\d+\): zeros and ones that are drawn are rounded here"),
    ],
)
def test_what_no_graph_has_is_refused(module: Callable[[], nn.Module], code: str, message: str):
    with pytest.raises(Refused, match=message) as refused:
        partita.from_torch(module(), modules.rows(), loss=LOSS)
    assert [each.code for each in refused.value.diagnostics] == [code]
