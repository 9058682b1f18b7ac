"""A whole rank runs on a GPU that is not there: nothing is in the wrong memory, waits, or is used at the wrong time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch
from attrs import evolve

from partita.compiler.analysis.memory import peak_memory
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load, load_text
from partita.dsl.spec import Spec
from partita.runtime.fake_gpu import rank
from partita.runtime.fake_gpu.rank import FakeGpuResult, representatives, try_rank, try_ranks
from partita.runtime.fake_gpu.watch import Kind
from partita.runtime.kernels import scores
from partita.runtime.rank import CompiledRun, prepare
from tests.files import ROOT, SPECS
from tests.marks import every, soak
from tests.zoo.layouts import FILES, draw

PLANTED = ROOT / "tests" / "planted" / "files"
# Between them, all that a rank does otherwise on a GPU than on a CPU.
CASES = {
    "gpu": (PLANTED / "gpu.par", ()),
    "as_written": (PLANTED / "gpu.par", ("cluster.pipe=1", "train.compile=false", "train.precision=f32")),
    "copies": (PLANTED / "copies.par", ("schedule=one_f_one_b(microbatches=2)",)),
    "tables": (PLANTED / "tables.par", ()),
    "experts": (SPECS / "zoo" / "mixtral.par", ("train.precision=bf16",)),
    "four_bits": (SPECS / "zoo" / "qlora.par", ()),
    "groups": (PLANTED / "groups.par", ()),
    "offloaded_state": (PLANTED / "offload.par", ("train.clip=none",)),
    "offloaded_groups": (PLANTED / "parameters.par", ("train.sync=local(groups=4,every=1)",)),
    "offloaded_anchors": (PLANTED / "groups.par", ("layout=host", "train.optimizer=sgd(lr=0.1)", "train.sync.every=1")),
    "offloaded_pairs": (PLANTED / "offload.par", ("train.ema=none", "train.precision=bf16", "train.sync=paired()")),
    "validated_later": (PLANTED / "validation.par", ()),
    **{path.stem: (path, ()) for path in sorted((ROOT / "bench" / "models" / "memory").glob("*.par"))},
}
# Of these a program is small.
OFFLOADED = ("offloaded_state", "offloaded_groups", "offloaded_anchors", "offloaded_pairs")
SMALL = ("tables", "experts", "groups", *OFFLOADED, "expert_biases", "two_towers")


def spec_of(path: Path, *overrides: str) -> Spec:
    spec, diagnostics = load(path, overrides)
    assert spec is not None, diagnostics
    return evolve(spec, expect=())


def right(tried: FakeGpuResult) -> None:
    assert not tried.faults, "\n".join(f"{each.kind}: {each.message}\n  {each.place}" for each in tried.faults)
    assert tried.launches
    assert 0 < tried.peak <= tried.bound


@pytest.mark.parametrize("case", [*SMALL, *soak(*(each for each in CASES if each not in SMALL))])
def test_ranks_run_on_gpus(case: str):
    path, overrides = CASES[case]
    for tried in try_ranks(prepare(spec_of(path, *overrides), gpu=True)):
        right(tried)


@pytest.mark.soak
def test_what_is_above_the_bound_is_what_is_reported():
    """The line of the fault and the table that is printed have the same figures."""
    with patch.object(rank, "peak_memory", lambda *given: peak_memory(*given) // 2):
        tried = try_rank(prepare(spec_of(PLANTED / "gpu.par"), gpu=True), 0)
    (fault,) = tried.faults
    assert fault.kind is Kind.MEMORY
    assert fault.message == f"{tried.peak} bytes are allocated, of at most {tried.bound}"
    assert tried.peak > tried.bound
    assert "kernels." in fault.place or "torch." in fault.place


DRAWN = """axis batch = 8, seq = 32, heads = 2, key = 8
model m(x: [batch, seq, heads, key]) {
  param w: [key] ~ ones()
  sample noise: [batch, seq, heads, key] ~ DISTRIBUTION
  let h = USE
  loss mean(h)
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("distribution", ["normal(1.0)", "uniform(1.0)"])
@pytest.mark.parametrize(
    "use",
    [
        "(x + noise) * w",
        "dropout(x * w, 0.5) + noise",
        "attend(x * w, x, x, over = seq, along = key, dropout = 0.5) + noise",
    ],
)
def test_memory_is_bounded_where_numbers_are_drawn(distribution: str, use: str):
    spec, diagnostics = load_text(DRAWN.replace("DISTRIBUTION", distribution).replace("USE", use))
    assert spec is not None, diagnostics
    for tried in try_ranks(prepare(spec, gpu=True)):
        right(tried)


def test_a_step_that_is_taken_back_frees_nothing_that_is_still_copied():
    path = SPECS / "zoo" / "llama3.par"
    added = """
    mesh two(data = 2)
    layout away on two { offload param  offload state  shard batch -> data  shard state -> data }
    schedule turns = one_f_one_b(microbatches = 2)
    """
    chosen = ("layout=away", "schedule=turns", "train.compile=false", "train.clip=none", "layers=1")
    spec, diagnostics = load_text(path.read_text() + added, path.name, (*chosen, "train.validate=after(calm=0)"), path)
    assert spec is not None, diagnostics
    right(try_rank(prepare(spec, gpu=True), 1))


@pytest.mark.soak
def test_the_host_waits_once_a_step():
    """For the statistics; all else is launched ahead."""
    (tried,) = try_ranks(prepare(spec_of(SPECS / "zoo" / "llama3.par"), gpu=True))
    assert tried.waits == ("all ranks decide by the statistics of a step whether it is good",)


@pytest.fixture(params=["flash", "cudnn"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernel of attention that a GPU prefers: Ampere's, or Hopper's."""
    with patch.object(scores, "prefers_cudnn", lambda device: request.param == "cudnn"):
        yield request.param


@pytest.mark.few(1)
def test_attention_makes_no_scores_on_gpus(kernel: str):
    """And no copies of keys that heads share."""
    plan = prepare(spec_of(PLANTED / "gpu.par"), gpu=True)
    tried = try_rank(plan, 0)
    right(tried)
    forward, backward = (
        [each for each in tried.launches if each.operation == f"_scaled_dot_product_{kernel}_attention{which}"]
        for which in ("", "_backward")
    )
    assert len(forward) == len(backward) == plan.program.microbatches
    queries, keys = 4 * 32 * 2 * 2 * 8 * 2, 4 * 32 * 2 * 8 * 2  # rows, positions, groups, heads, key, bytes
    assert {each.read for each in forward} == {queries + 2 * keys}


ODD = """axis batch = 4, seq = SEQ, heads = 3, key = KEY, value = VALUE
model m(x: [batch, seq, heads, key], ids: i64[batch, seq]) {
  param w: [key] ~ ones()
  param u: [value] ~ ones()
  let v = expand(sum(x, over = key), value) * u
  loss mean(attend(x * w, x, v, over = seq, along = key OPTIONS))
}
mesh cluster(context = PARTS)
layout split on cluster { SHARD }
train {
  model = m
  layout = split
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 1
  compile = false
  precision = PRECISION
}
"""
OPTIONS = ["", ", causal = true", ", causal = true, window = 7", ", window = 5", ", causal = true, segments = ids"]


def odd(**words: object) -> CompiledRun:
    """A plan for GPUs of `ODD` with words of its own."""
    text = ODD
    for word, by in {"PARTS": 1, "SHARD": "", **words}.items():
        text = text.replace(word, str(by))
    spec, diagnostics = load_text(text)
    assert spec is not None, diagnostics
    return prepare(spec, gpu=True)


PRECISIONS = ["f32", "bf16"]
SHARDS = ["", "shard batch -> context", "shard seq -> context", "shard seq -> context by zigzag"]
ODD_SIZES = [(33, 8, 8), (64, 6, 6), (100, 12, 20), (20, 20, 12)]  # of `seq`, `key` and `value`


@pytest.mark.parametrize(
    ("precision", "shard", "sizes", "options"), every(70, [*product(PRECISIONS, SHARDS, ODD_SIZES, OPTIONS)], first=7)
)
def test_attention_makes_no_scores_on_gpus_whatever_its_sizes(
    precision: str, shard: str, sizes: tuple[int, int, int], options: str, kernel: str
):
    """Kernels want rows in eights and queries in thirty-twos: what they want is padded, within the bound.

    Of 70 cases `make test` tries one.
    """
    seq, key, value = sizes
    if "seq" in shard and seq % 4:
        pytest.skip("does not divide")
    words = {"SEQ": seq, "KEY": key, "VALUE": value, "PARTS": 2 if shard else 1, "SHARD": shard}
    plan = odd(**words, OPTIONS=options, PRECISION=precision)
    tried = try_rank(plan, representatives(plan)[-1])
    right(tried)
    assert any("attention" in each.operation for each in tried.launches)


@pytest.mark.parametrize(
    ("options", "key", "precision"), every(7, [*product(OPTIONS, [128, 136, 256, 264], PRECISIONS)], first=2)
)
def test_scores_are_made_of_heads_that_are_too_large_and_counted(key: int, options: str, precision: str):
    """Memory-efficient attention is right up to heads of 128, which are those that torch tests."""
    (tried,) = try_ranks(odd(SEQ=1000, KEY=key, VALUE=8, OPTIONS=options, PRECISION=precision))
    right(tried)
    flash = precision == "bf16" and "segments" not in options
    assert any("attention" in each.operation for each in tried.launches) == (key <= (256 if flash else 128))


@pytest.mark.soak
def test_a_layer_of_llama_launches_no_more_than_by_hand():
    """Plain torch with autograd and FlashAttention has 20 kernels forward, and 42 backward with sums of gradients in
    f32 (`bench/kernels.py`). One kernel updates all parameters.
    """
    text = (SPECS / "llama.par").read_text().replace("repeat 6", "repeat 2").replace("pipe [3, 3]", "pipe")
    sizes = ["embed=256", "groups=2", "heads=2", "key=64", "ffn=512", "seq=512", "batch=4"]
    mesh = ["layout=zero1", "cluster.data=1", "cluster.pipe=1", "cluster.tensor=1"]
    run = ["schedule=one_f_one_b(microbatches=2)", "train.precision=bf16", "train.compile=false"]
    spec, diagnostics = load_text(text, "llama.par", (*sizes, *mesh, *run))
    assert spec is not None, diagnostics
    (tried,) = try_ranks(prepare(evolve(spec, expect=()), gpu=True))
    right(tried)
    phases = "layer_forward", "layer_backward"
    found = [sum(each.function.startswith(phase) for each in tried.launches) for phase in phases]
    assert found == [4 * 20, 4 * 33]  # two layers, two microbatches
    assert Counter(each.operation for each in tried.launches)["_fused_adamw_"] == 1


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ranks_of_all_files_run_on_gpus(path: Path, precision: str):
    for tried in try_ranks(prepare(spec_of(path, f"train.precision={precision}"), gpu=True)):
        right(tried)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ranks_run_on_gpus_however_files_are_laid_out(path: Path, seed: int):
    laid_out(path, seed)


@pytest.mark.parametrize("sizes", [("layers=1", "embed=64", "ffn=64"), *soak((("embed=64",),))])
def test_what_was_gathered_from_is_freed(sizes: tuple[str, ...]):
    """Parts in bf16 of what two mesh axes store, one of which is gathered from what the other one was: before the first
    layer runs.
    """
    laid_out(SPECS / "zoo" / "vit.par", 3, *sizes)


def laid_out(path: Path, seed: int, *sizes: str) -> None:
    drawn = draw(Random(f"{path.stem} on GPUs {seed}"), path)
    more = (f"train.precision={('f32', 'bf16')[seed % 2]}", *(["train.compile=false"] if seed % 3 == 0 else []))
    spec, _ = load_text(path.read_text() + drawn.added, path.name, (*drawn.overrides, *more, *sizes), path)
    try:
        plan = prepare(evolve(spec, expect=()), gpu=True) if spec is not None else None
    except Refused:
        plan = None
    if plan is None:
        pytest.skip("does not fit")
    try:
        right(try_rank(plan, representatives(plan)[-1]))
    except AssertionError as error:
        error.add_note(str(drawn))
        raise


@pytest.mark.soak
def test_nothing_of_it_is_left():
    before = torch.Tensor.__getitem__, torch.cuda.Stream, torch.tensor
    try_ranks(prepare(spec_of(PLANTED / "tables.par"), gpu=True))
    assert (torch.Tensor.__getitem__, torch.cuda.Stream, torch.tensor) == before
    assert torch.arange(3)[1:].tolist() == [1, 2]
    assert not torch.distributed.is_initialized()
