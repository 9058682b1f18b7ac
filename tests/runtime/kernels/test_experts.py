"""Choices, products by expert and slots, held to what they mean a row at a time."""

from __future__ import annotations

import pytest
import torch

from partita.runtime.kernels import experts
from partita.runtime.kernels.compiling import compiled


def test_of_equal_elements_the_first_are_chosen():
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, -0.0, 0.0, 0.0]])
    assert experts.top_k(x, 3).tolist() == [[1, 2, 4], [0, 1, 2]]
    assert experts.top_k(torch.zeros(7, 100), 4).tolist() == [[0, 1, 2, 3]] * 7


def rows(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [rows, depth], w [experts, depth, columns], ids [rows, choices] with an expert that nobody chooses, and d."""
    generator = torch.Generator().manual_seed(seed)
    x, w, d = (torch.randn(shape, generator=generator).to(dtype) for shape in ((10, 16), (5, 16, 24), (10, 3, 24)))
    ids = torch.randint(0, 4, (10, 3), generator=generator)
    return x, w, ids + (ids >= 2), d


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("start", [None, 0, 2])
def test_each_row_is_multiplied_by_its_matrix(monkeypatch: pytest.MonkeyPatch, grouped: bool, start: int | None):
    """By the loop over the experts, and by torch's grouped product; also in a shard from expert 2 on."""
    dtype = torch.bfloat16 if grouped else torch.float32
    monkeypatch.setattr(experts, "_by_grouped_product", lambda x, w: grouped)
    x, w, ids, d = rows(1, dtype)
    own = w if not start else w[start:]
    first = start or 0
    found = experts.routed_dot(x.view(10, 1, 16), own, ids, 0, start)
    total = torch.zeros_like(own)
    experts.add_routed(total, x.view(10, 1, 16), ids, d, 0, start)
    summed = torch.zeros(own.shape)
    for i in range(10):
        for j in range(3):
            number = int(ids[i, j]) - first
            expected = x[i].float() @ own[number].float() if number >= 0 else torch.zeros(24)
            torch.testing.assert_close(found[i, j].float(), expected, rtol=2e-2 if grouped else 1e-5, atol=1e-4)
            if number >= 0:
                summed[number] += x[i].float()[:, None] * d[i, j].float()
    torch.testing.assert_close(total.float(), summed, rtol=2e-2 if grouped else 1e-5, atol=1e-1 if grouped else 1e-5)


def test_an_id_outside_has_no_row():
    x, w, ids, d = rows(2, torch.float64)
    ids[3] = torch.tensor([-1, 5, 10**12])
    found = experts.routed_dot(x.view(10, 1, 16), w, ids, 0, 0)
    assert not found[3].any()
    total = experts.add_routed(torch.zeros_like(w), x.view(10, 1, 16), ids, d, 0, 0)
    assert torch.equal(total, experts.add_routed(torch.zeros_like(w), x[:, None], ids, d * (ids < 5)[..., None], 0, 0))


def test_gradients_are_added_in_the_dtype_of_the_accumulator():
    x, w, ids, d = rows(3, torch.bfloat16)
    total = torch.ones(w.shape)
    assert experts.add_routed(total, x.view(10, 1, 16), ids, d, 0) is total
    own = experts.add_routed(torch.zeros_like(w), x.view(10, 1, 16), ids, d, 0)
    assert torch.equal(total, 1 + own.float())


def test_first_choices_have_slots_before_second_ones_and_then_positions():
    """Two slots for each of two experts; choices vary slowest."""
    ids = torch.tensor([[[0, 1], [0, 1], [1, 0], [0, 1]]])  # [batch, positions, choices]
    order = ids.permute(0, 2, 1)
    slots = experts.slot_index(order.reshape(1, -1)).view(1, 2, 4)
    assert slots.tolist() == [[[0, 1, 0, 2], [1, 2, 3, 3]]]
    x = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
    inside = experts.dispatch(x.view(1, 1, 4, 1), order, slots, 1, (0, 2), (0, 2))
    assert inside[..., 0].tolist() == [[[1.0, 2.0], [3.0, 1.0]]]  # 4 finds no slot at all
    found = experts.collect(inside, order, slots, 1, (0, 2), (0, 2))
    assert found[..., 0].tolist() == [[[1.0, 2.0, 3.0, 0.0], [1.0, 0.0, 0.0, 0.0]]]
    assert experts.load(order, 1, 2, torch.float32).tolist() == [[4.0, 4.0]]
    assert experts.load(order, 1, 1, torch.float32, 1).tolist() == [[4.0]]


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_compiled_by_torch_they_compute_the_same():
    x, w, ids, d = rows(4, torch.float32)

    def function(x, w, ids, d):
        u = torch.nn.functional.silu(experts.routed_dot(x.view(10, 1, 16), w, ids, 0))
        g = experts.add_routed(torch.zeros(5, 16, 24), x.view(10, 1, 16), ids, d, 0)
        slots = experts.slot_index(ids.reshape(1, -1)).view(1, 10, 3)
        inside = experts.dispatch(x.view(1, 10, 1, 16), ids.view(1, 10, 3), slots, 1, (0, 5), (0, 4))
        return u, g, experts.collect(inside, ids.view(1, 10, 3), slots, 1, (0, 5), (0, 4)), experts.top_k(x, 3)

    for a, b in zip(compiled(function)(x, w, ids, d), function(x, w, ids, d), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
