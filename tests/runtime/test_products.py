"""Which library multiplies matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partita.runtime.kernels import products


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
def test_both_libraries_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(64, 32), torch.randn(32, 48)
    for onednn in (False, True):
        monkeypatch.setattr(products, "ONEDNN", onednn)
        total = torch.ones(64, 48)
        torch.testing.assert_close(products.matmul(a, b), (a.double() @ b.double()).float())
        torch.testing.assert_close(products.add_matmul(total, a, b), (1 + a.double() @ b.double()).float())
