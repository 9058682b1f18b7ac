"""Records of machines: what is written is read again, wrong ones are refused, and timings are interpolated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.costs.devices import device_of
from partita.compiler.costs.links import link_of
from partita.compiler.costs.record import Timing, Timings, read
from partita.compiler.ops.op import Kernel
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load

FILE = """
axis batch = 4, embed = 8, next = embed
model m(x: [batch, embed]) {
  param w: [embed, next] ~ ones()
  loss mean(dot(x, w, over = embed))
}
mesh k(pipe = 2) {
  device = profile("machine.json")
  link = profile("machine.json")
}
layout l on k { shard batch -> pipe }
train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }
"""


LINK = {
    "bandwidth": 5e9,
    "latency": 1e-5,
    "post": 2e-5,
    "collective_bandwidth": 1e9,
    "collective_latency": 5e-5,
    "beside": 0.5,
}


DEVICE: dict[str, Any] = {
    "name": "this",
    "gpu": False,
    "flops": {"f32": 1e11, "bf16": 1e11, "f64": 5e10},
    "memory": 1 << 30,
    "bandwidth": 1e10,
    "streaming": 1.0,
    "launch": 1e-6,
    "action": 1e-5,
    "step": 1e-4,
    "workspace": 0,
    "cache": 0,
}


def record(ranks: int = 1, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ranks": ranks,
        "device": {**DEVICE, "action": ranks * 1e-5},
        "link": LINK,
        "timings": [
            ["dot", "f32", [4, 8, 8], 512, 1e-6],
            ["dot", "f32", [64, 64, 64], 524288, 1e-5],
        ],
        "collectives": [["gather", 256, 1e-4], ["gather", 1 << 20, 2e-3]],
    }
    return found | changes


def text(*records: dict[str, Any]) -> str:
    return json.dumps({"records": list(records)})


def test_a_file_names_the_record_of_its_ranks(tmp_path: Path):
    (tmp_path / "m.par").write_text(FILE)
    (tmp_path / "machine.json").write_text(text(record(4), record(1), record(2)))
    spec, diagnostics = load(tmp_path / "m.par")
    assert spec is not None, diagnostics
    device = device_of(spec.meshes["k"])
    assert device.action == 2e-5
    link = link_of(spec.meshes["k"], "pipe")
    assert link.post == 2e-5
    assert sum(link.gather(2, 1 << 20)) == pytest.approx(2e-3)


def test_the_command_line_names_it_too(tmp_path: Path):
    (tmp_path / "m.par").write_text(FILE.replace('profile("machine.json")', "h100").replace("link = h100", ""))
    (tmp_path / "machine.json").write_text(text(record()))
    spec, _ = load(tmp_path / "m.par", ['k.device=profile("machine.json")', "k.link=ib400"])
    assert spec is not None
    assert device_of(spec.meshes["k"]).name == "this"
    assert link_of(spec.meshes["k"], "pipe").name == "ib400"


def test_what_is_written_is_read_again():
    (found,) = read(text(record(3)))
    assert read(json.dumps({"records": [found.as_json()]}))[0].as_json() == found.as_json()
    assert found.ranks == 3


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ("{", "it is not valid JSON"),
        ("[]", "the file has the keys records"),
        (text(), "it holds no profile"),
        (text({}), "a record has the keys"),
        (text(record(device={})), "`device` has the keys"),
        (text(record(ranks=0)), "`ranks` must be positive"),
        (text(record(link={**LINK, "bandwidth": 0})), "`bandwidth` must be positive"),
        (text(record(link={**LINK, "bandwidth": "fast"})), "`bandwidth` must be a non-negative number"),
        (text(record(link={**LINK, "bandwidth": 1e-320})), "`bandwidth` must be positive"),
        (text(record(link={**LINK, "beside": 2})), "`beside` must be a share"),
        (text(record(device={**DEVICE, "gpu": 1})), "`gpu` is no bool"),
        (text(record(device={**DEVICE, "name": "\x1b[2J"})), "`name` is printable"),
        (text(record(device={**DEVICE, "name": "\ud800"})), "`name` is printable"),
        (text(record(timings=[{}])), "a timing is [kernel"),
        (text(record(timings=[["dot", "f32", [64], 1]])), "a timing is [kernel"),
        (text(record(timings=[["dot", "f32", [64], 1, 0]])), "seconds must be positive"),
        (text(record(timings=[["dot", "f32", [True], 1, 1]])), "a feature must be a non-negative number"),
        (text(record(collectives=[{}])), "a collective is [kind, bytes, seconds]"),
        (text(record(collectives=[["gather", 1, 0]])), "seconds must be positive"),
        ("[" * 100_000, "it is not valid JSON"),
    ],
)
def test_a_wrong_record_is_refused_with_its_cause(tmp_path: Path, wrong: str, cause: str):
    (tmp_path / "m.par").write_text(FILE)
    (tmp_path / "machine.json").write_text(wrong)
    spec, _ = load(tmp_path / "m.par")
    assert spec is not None
    with pytest.raises(Refused) as refused:
        device_of(spec.meshes["k"])
    (found,) = refused.value.diagnostics
    assert found.code == "E0413"
    assert cause in found.message
    assert found.span is not None
    assert found.span.line == 8


SIZES = st.integers(1, 4096)
MEASURED = st.lists(
    st.tuples(SIZES, SIZES, st.floats(1e-7, 1e-2)), min_size=1, max_size=8, unique_by=lambda each: each[:2]
)


@given(MEASURED, SIZES, SIZES)
def test_a_rate_lies_between_measured_ones(measured: list[tuple[int, int, float]], rows: int, columns: int):
    timings = Timings(tuple(Timing("k", "f32", (float(m), float(n)), float(m * n), s) for m, n, s in measured))
    found = timings.seconds(Kernel("k", (float(rows), float(columns)), float(rows * columns)), "f32")
    assert found is not None
    rates = [s / (m * n) for m, n, s in measured]
    assert min(rates) * (1 - 1e-9) <= found / (rows * columns) <= max(rates) * (1 + 1e-9)
    for m, n, s in measured:
        assert timings.seconds(Kernel("k", (float(m), float(n)), float(m * n)), "f32") == pytest.approx(s)
    assert timings.seconds(Kernel("other", (1.0, 1.0), 1.0), "f32") is None
    assert timings.seconds(Kernel("k", (1.0, 1.0), 1.0), "f64") is None
    # A version that knew a kernel by more features, or by fewer.
    assert timings.seconds(Kernel("k", (1.0,), 1.0), "f32") is None


def test_a_kernel_that_was_not_measured_takes_as_long_as_one_alike():
    dot = Timing("dot.added", "f32", (4.0, 4.0, 4.0), 128.0, 2e-6)
    moving = Timing("add", "f32", (1024.0,), 1024.0, 1e-6), Timing("gelu", "f32", (1024.0,), 1024.0, 4e-6)
    timings = Timings((dot, *moving))
    whole = Kernel("dot", (4.0, 4.0, 4.0), 128.0, Kernel("dot.added", (4.0, 4.0, 4.0), 128.0))
    assert timings.seconds(whole, "f32") == pytest.approx(2e-6)
    several = Kernel("grouped", (8.0, 4.0, 4.0, 4.0), 1024.0, Kernel("dot.added", (4.0, 4.0, 4.0), 1024.0))
    assert timings.seconds(several, "f32") == pytest.approx(16e-6)
    assert timings.seconds(Kernel("take_rows", (1024.0,), 1024.0), "f32") in (1e-6, 4e-6)
    assert timings.seconds(Kernel("take_rows", (1024.0,), 1024.0), "f64") is None
    assert timings.seconds(Kernel("sorted", (1024.0, 2.0), 1024.0), "f32") is None


def test_of_kernels_with_the_same_features_that_of_the_most_similar_work_counts():
    """Blocks of attention differ by what their queries see."""
    timings = Timings(tuple(Timing("attend_block", "f32", (64.0, 64.0), work, 1e-6) for work in (100.0, 400.0)))
    for work in (100.0, 400.0):
        assert timings.seconds(Kernel("attend_block", (64.0, 64.0), work), "f32") == pytest.approx(1e-6)
