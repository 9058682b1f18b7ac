"""The share of the devices' peak that a run reaches is said only where that peak is known."""

from __future__ import annotations

import pytest
import torch

from partita.dsl.load import load_text
from partita.runtime.peak_memory import peak_memory
from partita.runtime.rank import CompiledRun, prepare

FILE = """
axis batch = 8, width = 4

model m(x: [batch, width]) {
  param w: [width] ~ ones()
  loss mean(x * w)
}

mesh here(data = 2)BODY

layout split on here {
  shard batch -> data
}

train {
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 2
}
"""
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def planned(body: str) -> CompiledRun:
    spec, diagnostics = load_text(FILE.replace("BODY", body))
    assert spec is not None, diagnostics
    return prepare(spec)


@pytest.mark.parametrize(
    ("body", "device", "peak"),
    [
        ("", CPU, None),
        (" {\n  link = ib400\n}", CPU, None),
        (" {\n  device = cpu\n}", CPU, 2 * 5e10),
        (" {\n  device = h100\n}", CPU, None),
        (" {\n  device = h100\n}", GPU, 2 * 67e12),
        (" {\n  device = device(flops = 1TFLOP/s, memory = 1GiB, bandwidth = 1GB/s)\n}", CPU, 2e12),
    ],
)
def test_the_peak_is_that_of_the_device_of_the_mesh(body: str, device: torch.device, peak: float | None) -> None:
    assert planned(body).peak_flops(device) == peak


def test_a_process_knows_its_peak() -> None:
    before = peak_memory(CPU)
    kept = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_memory(CPU) >= before > len(kept)
