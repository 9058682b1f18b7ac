"""What is trained on a GPU is what is trained on the CPU; the CPU itself is tried by `make test`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from partita.compiler.analysis.memory import peak_memory
from partita.compiler.streams import along
from partita.dsl.load import load
from partita.runtime.data.binding import open_data
from partita.runtime.evaluation import results
from partita.runtime.rank import CompiledRun, Rank, prepare
from partita.runtime.training import VirtualRun
from partita.runtime.transports.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, TURN
from partita.runtime.transports.groups import AxisGroup
from partita.runtime.transports.process import ProcessTransport
from partita.runtime.transports.registry import TRANSPORTS, Processes
from partita.runtime.transports.transport import ProcessEnd
from tests.commands import computed, partita
from tests.files import SPECS
from tests.marks import DEVICES, DEVICES_OF_RUNS

STEPS, RATE = 3, 1e-3
SMALL = ("batch=8", "seq=32", "embed=64", "heads=2", "fast.microbatches=4", "train.data=random()", "train.eval=none")
FOUR_CHUNKS = ("laptop.pipe=1", "fast.chunks=4")
CPU = torch.device("cpu")


def planned(file: str, *overrides: str, gpu: bool = False) -> CompiledRun:
    found, diagnostics = load(str(SPECS / file), overrides)
    assert found is not None, "\n\n".join(each.render() for each in diagnostics)
    return prepare(found, gpu)


def numbers(plan: CompiledRun, run: VirtualRun) -> list[float]:
    """Losses and gradient norms of some steps, and the sum of each parameter after them."""
    dataset = open_data(plan.program, plan.train, SPECS)
    assert dataset is not None
    found = [
        each
        for number in range(1, STEPS + 1)
        for each in run.step(number, run.ranks[0].tensors(dataset.batch(number)), RATE)
    ]
    return found + [float(tensor.double().sum()) for _, tensor in sorted(run.parameters().items())]


def close(plan: CompiledRun, found: list[float], expected: list[float], tolerance: float) -> None:
    """In bf16 and eight bits, a gradient near zero may get another sign, with which Adam's first updates are another:
    then the losses and norms after them are compared, and not the sums of parameters.
    """
    count = len(expected) if plan.train.precision == "f32" else 2 * STEPS
    assert found[:count] == pytest.approx(expected[:count], rel=tolerance, abs=tolerance)


# ---------------------------------------------------------------- the executor


@pytest.mark.soak
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("file", "overrides", "tolerance"),
    [
        ("tiny.par", SMALL, 2e-4),
        ("tiny.par", (*SMALL, "train.precision=bf16"), 2e-2),
        ("tiny.par", (*SMALL, "train.precision=fp8"), 3e-2),
        (
            "llama.par",
            ("batch=8", "seq=16", "embed=64", "ffn=96", "vocab=64", "train.data=random()", "train.precision=f32"),
            5e-4,
        ),
    ],
    ids=["tiny", "tiny in bf16", "tiny in fp8", "llama"],
)
def test_training_on_a_device_is_training_on_the_cpu(
    file: str, overrides: tuple[str, ...], tolerance: float, device: str
) -> None:
    plan = planned(file, *overrides, "train.compile=false", gpu=device == "cuda")
    there = numbers(plan, VirtualRun(plan, device=torch.device(device)))
    plain = planned(file, *overrides, "train.compile=false")
    close(plan, there, numbers(plain, VirtualRun(plain)), tolerance)


@pytest.mark.parametrize("device", DEVICES_OF_RUNS)
@pytest.mark.parametrize(("precision", "tolerance"), [("f32", 2e-4), ("fp8", 3e-2)])
def test_a_compiled_program_trains_the_same(precision: str, tolerance: float, device: str) -> None:
    gpu, there = device == "cuda", torch.device(device)
    settings = (*SMALL, f"train.precision={precision}")
    plain, compiled = (planned("tiny.par", *settings, f"train.compile={each}", gpu=gpu) for each in ("false", "true"))
    first, second = (numbers(plan, VirtualRun(plan, device=there)) for plan in (plain, compiled))
    close(plain, second, first, tolerance)


@pytest.mark.few(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["offload layer", "offload state"])
def test_what_lies_in_the_hosts_memory_comes_back(rule: str, device: str, tmp_path: Path) -> None:
    """Streams that copy wait for those that compute, and the other way round: the numbers do not change. State in the
    host's memory is updated there, by the CPU's own kernels.
    """
    text = (SPECS / "tiny.par").read_text()
    (tmp_path / "off.par").write_text(text.replace("  stage layer -> pipe", f"  stage layer -> pipe\n  {rule}"))
    gpu, there = device == "cuda", torch.device(device)
    plain = planned("tiny.par", *SMALL, "train.compile=false", gpu=gpu)
    off = planned(str(tmp_path / "off.par"), *SMALL, "train.compile=false", gpu=gpu)
    first, second = (numbers(plan, VirtualRun(plan, device=there)) for plan in (plain, off))
    assert second == (first if rule == "offload layer" or not gpu else pytest.approx(first, rel=1e-5, abs=1e-5))


# ---------------------------------------------------------------- one rank, connected


@contextmanager
def connected(device: str, tmp_path: Path) -> Iterator[tuple[Processes, ProcessEnd]]:
    """A process group of this process alone, by the transport of the device, and an end of it."""
    kind = next(each for each in TRANSPORTS.values() if isinstance(each, Processes) and each.gpu == (device == "cuda"))
    tmp_path.mkdir(exist_ok=True)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(kind.backend, store=store, rank=0, world_size=1)
    end = kind.end(torch.device(device, 0) if device == "cuda" else CPU, b"")
    try:
        yield kind, end
    finally:
        end.close()


@pytest.mark.parametrize("device", DEVICES)
def test_collectives_with_one_rank_change_nothing(device: str, tmp_path: Path) -> None:
    with connected(device, tmp_path) as (kind, end):
        assert isinstance(end, ProcessTransport)
        own = end._streams, along("data"), end._posting
        group = AxisGroup("data", 1, dist.new_group([0]), kind.gpu, *own)
        bucket = tuple(torch.randn(6, 4, device=end.device).to(dtype) for dtype in (torch.float32, torch.bfloat16))
        arguments = {ALL_GATHER: (0,), REDUCE_SCATTER: (0,), ALL_REDUCE: (False,), ALL_TO_ALL: (0, 1), TURN: ()}
        for each, given in arguments.items():
            found = group.collective(each, bucket, (given, given)).result()
            assert all(map(torch.equal, found, bucket)), each
        (parts,) = end.gather_over_ranks(bucket[0]).result()
        assert torch.equal(parts, bucket[0].unsqueeze(0))


def steps_of(plan: CompiledRun, rank: Rank) -> list[float]:
    """Losses and gradient norms of some steps."""
    dataset = open_data(plan.program, plan.train, SPECS)
    assert dataset is not None
    found = []
    for number in range(1, STEPS + 1):
        for _ in rank.step(number, rank.tensors(dataset.batch(number)), (RATE,)):
            raise AssertionError("a real transport waits inside its handles")
        loss, _, norm = results(rank.training)
        found += [loss, norm]
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("device", DEVICES)
def test_a_pipeline_of_four_chunks_on_one_rank(device: str, tmp_path: Path) -> None:
    plan = planned("tiny.par", *SMALL, *FOUR_CHUNKS, "train.compile=false", gpu=device == "cuda")
    with connected(device, tmp_path) as (_, end):
        found = steps_of(plan, Rank(plan, 0, end, end.device))
    reference = planned("tiny.par", *SMALL, *FOUR_CHUNKS, "train.compile=false")
    assert found == pytest.approx(numbers(reference, VirtualRun(reference))[: 2 * STEPS], rel=2e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_steps_that_are_captured_are_the_same(precision: str, device: str, tmp_path: Path) -> None:
    """To the last bit, with the messages of a pipeline: the first step runs as ever, the second is captured and
    launched, the third is launched.
    """
    settings = (*SMALL, *FOUR_CHUNKS, f"train.precision={precision}", "train.compile=false")
    found = []
    for graphs in ("false", "true"):
        plan = planned("tiny.par", *settings, f"train.graphs={graphs}", gpu=device == "cuda")
        with connected(device, tmp_path / graphs) as (_, end):
            rank = Rank(plan, 0, end, end.device)
            losses = steps_of(plan, rank)
            found.append((losses, [master.cpu().clone() for master in rank.memory.masters.values()]))
    (first, before), (second, after) = found
    assert second == first
    assert all(map(torch.equal, before, after))


LARGE = ("seq=1000", "vocab=512", "batch=32", "embed=400", "heads=4", "key=100", "fast.microbatches=2")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        ("train.precision=f32",),
        ("train.precision=bf16",),
        ("train.precision=bf16", "seq=1001", "key=25"),
        ("train.precision=bf16", "train.graphs=true"),
        ("train.precision=fp8", "key=128", "embed=512", "seq=1024"),
    ],
    ids=", ".join,
)
def test_steps_take_no_more_memory_than_their_bound(settings: tuple[str, ...], tmp_path: Path) -> None:
    """What was asked of the allocator at most, which may round it up."""
    one = ("laptop.device=h200", "laptop.pipe=1", "fast.chunks=1", "train.compile=false")
    plan = planned("tiny.par", *SMALL, *one, *LARGE, *settings, gpu=True)
    bound = peak_memory(plan.training, plan.training.plan.ranks[0])
    with connected("cuda", tmp_path) as (_, end):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rank = Rank(plan, 0, end, end.device)
        steps_of(plan, rank)
    most = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    print(f"{settings}: {most:,} bytes of {bound:,}, {most / bound:.3f}")
    assert most <= bound


@pytest.mark.parametrize("device", DEVICES)
def test_copies_to_the_host_are_pinned_and_arrive(device: str) -> None:
    from partita.runtime.kernels.host import to_host

    there = torch.randn(1 << 16, device=device)
    expected = there.cpu().clone()
    here = to_host(there)
    assert torch.equal(here, expected)
    assert (here.device.type, here.is_pinned()) == ("cpu", device == "cuda")


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("device", DEVICES_OF_RUNS)
def test_a_checkpoint_of_a_device_is_resumed_on_the_cpu(device: str, tmp_path: Path) -> None:
    transport = "nccl" if device == "cuda" else "gloo"
    command = ["run", str(SPECS / "tiny.par"), *SMALL, *FOUR_CHUNKS, "train.checkpoint=every(2)"]
    whole = partita(*command, "train.steps=4", "--run-dir", "whole", "--transport", "gloo", cwd=tmp_path)
    first = partita(*command, "train.steps=2", "--run-dir", "run", "--transport", transport, cwd=tmp_path)
    second = partita(*command, "train.steps=4", "--run-dir", "run", "--transport", "gloo", cwd=tmp_path)
    assert [each.returncode for each in (whole, first, second)] == [0, 0, 0], first.stderr + second.stderr
    assert partita("checkpoint", "verify", "run", cwd=tmp_path).returncode == 0
    found, expected = ({each["step"]: each["loss"] for each in computed(tmp_path / name)} for name in ("run", "whole"))
    assert found == pytest.approx(expected, rel=2e-4)


@pytest.mark.gpu
def test_the_doctor_finds_nothing_wrong(tmp_path: Path) -> None:
    done = partita("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
