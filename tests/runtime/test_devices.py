"""Which devices ranks compute on, on machines with GPUs that are told here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from partita.cli.training import devices
from partita.cli.training.devices import (
    CONNECTIONS,
    ENVIRONMENT,
    GROWING,
    UNROUNDED,
    check_graphs,
    chosen,
    gpus_here,
    shared_queues,
)
from partita.cli.training.room import little_memory
from partita.compiler.analysis.memory import peak_memory
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.runtime.rank import prepare
from partita.runtime.transports.nccl import SHARING
from tests.files import SPECS, checked


@pytest.mark.parametrize(
    ("transport", "gpus", "ranks", "name"),
    [
        (None, 8, 8, "nccl"),
        (None, 8, 2, "nccl"),
        (None, 0, 8, "gloo"),
        ("gloo", 8, 8, "gloo"),
        ("gloo", 1, 8, "gloo"),
        ("virtual", 1, 8, "virtual"),
        (None, 1, 8, None),
        (None, 4, 8, None),
        ("nccl", 4, 8, None),
    ],
)
def test_gpus_that_are_visible_are_used_or_nothing_starts(
    transport: str | None, gpus: int, ranks: int, name: str | None
) -> None:
    if name is not None:
        assert chosen(transport, gpus, ranks).name == name
        return
    with pytest.raises(Refused) as refused:
        chosen(transport, gpus, ranks)
    assert [each.code for each in refused.value.diagnostics] == ["E0611"]
    assert "--transport gloo" in (refused.value.diagnostics[0].help or "")


def test_graphs_are_for_one_rank_on_a_gpu() -> None:
    for overrides, gpu, refused in (
        (["train.graphs=true", "laptop.pipe=1"], True, False),
        (["train.graphs=true", "laptop.pipe=2"], False, False),
        (["train.graphs=false", "laptop.pipe=2"], True, False),
        (["train.graphs=true", "laptop.pipe=2"], True, True),
    ):
        spec, diagnostics = load("specs/tiny.par", overrides)
        assert spec is not None, diagnostics
        if not refused:
            check_graphs(spec, gpu)
            continue
        with pytest.raises(Refused, match="`graphs` is for one rank on a GPU, and there are 2"):
            check_graphs(spec, gpu)


def test_ranks_share_a_gpu_where_nccl_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARING, "1")
    assert chosen("nccl", 1, 2).name == "nccl"
    for transport, gpus in (("nccl", 0), (None, 1)):  # and where they are asked to
        with pytest.raises(Refused):
            chosen(transport, gpus, 2)


def test_cuda_is_told_before_it_starts_and_the_user_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENVIRONMENT, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # what is set is taken back after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    gpus_here()
    told = {name: os.environ[name] for name in ENVIRONMENT}
    memory = told.pop("PYTORCH_ALLOC_CONF")
    others = {name: value for name, value in ENVIRONMENT.items() if name in told}
    assert told == {**others, "CUDA_DEVICE_MAX_CONNECTIONS": "16"}
    assert memory == f"{GROWING},{UNROUNDED}"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setattr(devices, "version", lambda name: "2.11.0+cu130")  # which does not know the other
    gpus_here()
    assert os.environ["PYTORCH_ALLOC_CONF"] == GROWING
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    gpus_here()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_a_schedule_whose_streams_must_not_share_a_queue_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Some of one's own: each rank would have to start a transfer that is behind what waits for the other's."""
    (tmp_path / "own.sched").write_text(
        "F0.0 F0.1 F1.0 F2.0 BW2.0 F1.1 F2.1 BW1.0 BW2.1 BW0.0 BW1.1 BW0.1\n"
        "F0.0 F0.1 F1.0 F2.0 BW2.0 BW1.0 F1.1 F2.1 BW0.0 BW2.1 BW1.1 BW0.1\n"
    )
    (tmp_path / "m.par").write_text((SPECS / "tiny.par").read_text().replace("repeat 4", "repeat 6"))
    overrides = [f'schedule=from_file("{tmp_path}/own.sched")']
    spec, diagnostics = load(str(tmp_path / "m.par"), overrides)
    assert spec is not None, diagnostics
    plan = prepare(spec)
    for given, said in (("4", True), ("5", False), ("32", False)):
        monkeypatch.setenv(CONNECTIONS, given)
        assert ([each.code for each in shared_queues(plan)] == ["W0607"]) == said, given


def test_an_evaluation_whose_streams_must_not_share_a_queue_is_warned_of(monkeypatch: pytest.MonkeyPatch):
    """Forward passes alone in a V, where a rank's two stages send in both directions: two values pass each cut."""
    monkeypatch.setenv(CONNECTIONS, "2")
    for kept, evaluates, said in (("x + y", True, True), ("x", True, False), ("x + y", False, False)):
        text = TWO_PATHS.format(kept=kept, eval="eval = every(1, batches = 1)" if evaluates else "")
        plan = prepare(checked(text, "paths.par"))
        assert ([each.code for each in shared_queues(plan)] == ["W0607"]) == said, (kept, evaluates)


TWO_PATHS = """
axis batch = 2, embed = 4, out = 3
model m(x: [batch, embed], targets: i64[batch]) {{
  let y = x * 0.5
  repeat 2 as layer {{ param w: [embed] ~ ones()  let x = tanh(x * w) }}
  repeat 2 as layer {{ let y = y * 0.5 + x }}
  param head: [out, embed] ~ kaiming()
  loss cross_entropy(dot({kept}, head, over = embed), targets, over = out)
}}
mesh line(pipe = 2)
layout cut on line {{ stage layer -> pipe }}
schedule s = dualpipe_v(microbatches = 2)
train {{ model = m layout = cut schedule = s data = random() optimizer = sgd(lr = 0.1) steps = 2 {eval} }}
"""


def test_memory_that_nccl_and_others_hold_is_not_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is held against the bound of its own part of the pipeline, with what torch has reserved already."""
    spec, diagnostics = load("specs/tiny.par", [])
    assert spec is not None, diagnostics
    state = prepare(spec).training
    bounds = [peak_memory(state, each) for each in state.plan.ranks]
    assert bounds[0] != bounds[1]
    reserved = 1 << 20
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    for rank, bound in enumerate(bounds):
        for more in (0, -1):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=bound - reserved + more: (free, 80 << 30))
            doubt = little_memory(state, rank, torch.device("cuda", rank))
            assert (doubt is not None) == (more < 0)
            assert doubt is None or (doubt.code == "W0608" and f"rank {rank}" in doubt.message)
