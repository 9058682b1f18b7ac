"""Which library multiplies matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partita.compiler.ops import dot
from partita.dsl.load import load
from partita.runtime.data.binding import open_data
from partita.runtime.kernels import products
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.files import ROOT

FILES = ROOT / "tests" / "planted" / "files"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\n", True),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: no GenuineIntel\n", False),
        ("CPU implementer\t: 0x41\n", False),
    ],
)
def test_intels_processors_are_known(tmp_path: Path, text: str, expected: bool) -> None:
    file = tmp_path / "cpuinfo"
    assert not products._by_intel(file), "where the system says nothing"
    file.write_text(text)
    assert products._by_intel(file) is expected


@pytest.mark.skipif(not products._mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize(("rows", "depth", "columns"), [(64, 32, 48), (32, 32, 32), (1, 32, 1)])
@pytest.mark.parametrize("onednn", [False, True])
def test_both_libraries_multiply(
    monkeypatch: pytest.MonkeyPatch, rows: int, depth: int, columns: int, onednn: bool
) -> None:
    """Where a matrix is square, its operands could be exchanged unseen."""
    generator = torch.Generator().manual_seed(1)
    monkeypatch.setattr(products, "ONEDNN", onednn)
    a, b = torch.randn(rows, depth, generator=generator), torch.randn(depth, columns, generator=generator)
    for left in (a, a.t().contiguous().t()):
        for right in (b, b.t().contiguous().t()):
            total = torch.full((rows, columns), 3.0)
            torch.testing.assert_close(products.matmul(left, right), (a.double() @ b.double()).float())
            torch.testing.assert_close(products.add_matmul(total, left, right), (3 + a.double() @ b.double()).float())


@pytest.mark.soak
@pytest.mark.parametrize("name", ["axes", "skips", "tied"])
def test_products_are_the_same_where_they_count_as_large(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What is emitted for them adds into accumulators, and into what they are added to, as that of small ones does."""
    spec, diagnostics = load(FILES / f"{name}.par", ["train.precision=f64"])
    assert spec is not None, diagnostics
    found = []
    for large in (False, True):
        monkeypatch.setattr(dot.Dot, "_large", lambda *_, large=large: large)
        plan = prepare(spec)
        assert ("kernels.matmul(" in plan.program.source) is large
        run = VirtualRun(plan)
        dataset = open_data(plan.program, plan.train, FILES)
        assert dataset is not None
        run.step(1, run.ranks[0].tensors(dataset.batch(1)))
        found.append(run.gradients())
    for path, gradient in found[0].items():
        torch.testing.assert_close(found[1][path], gradient, rtol=1e-10, atol=1e-10, msg=lambda m, p=path: f"{p}: {m}")
