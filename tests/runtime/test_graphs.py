"""Steps that are captured: launched as a whole they compute what they compute one by one, to the last bit.

Graphs of CUDA are stood in for: what a step launches is recorded, with the very tensors that it reads and writes, and
done again, whatever the host may say meanwhile. So a number that the host changes from step to step, or a tensor that
is elsewhere in each, would be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load, load_text
from partita.dsl.spec import Spec
from partita.runtime.fake_gpu.rank import try_ranks
from partita.runtime.kernels.native import library
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.streams import Coroutine, HostStreams
from partita.runtime.training import VirtualRun
from tests.files import ROOT, SPECS
from tests.runtime.fake_gpu.test_ranks import right
from tests.runtime.own import written
from tests.zoo.against import random_batches
from tests.zoo.layouts import FILES, INDIVISIBLE, draw

STEPS = 4
USUAL = ["mlp", "resnet", "dlrm", "clip", "gpt2", "mixtral"]


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what is launched, and of each launch the tensors that it makes in memory of their own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[[], Any], list[int], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = partial(func, *args, **(kwargs or {}))
        found = run()
        given = {memory(each) for each in tensors((args, kwargs))}
        made = tensors(found)
        new = [i for i, each in enumerate(made) if memory(each) not in given]
        self.calls.append((run, new, [made[i] for i in new]))
        return found

    def launch(self) -> None:
        """Do all again, in the same memory."""
        for run, new, before in self.calls:
            again = tensors(run())
            for i, own in zip(new, before, strict=True):
                own.copy_(again[i])

    def undo(self) -> None:
        """Spoil what was made: a graph that is captured has not run."""
        for _, _, made in self.calls:
            for each in made:
                each.fill_(float("nan") if each.is_floating_point() else 0)


def tensors(found: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def capture(self: HostStreams, enqueued: Callable[[], Coroutine]) -> tuple[Any, Callable[[], None]]:
    with Recorded() as recorded:
        found = None
        try:
            next(enqueued())
        except StopIteration as end:
            found = end.value
    recorded.undo()
    return found, recorded.launch


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs on a CPU; and no kernels of which torch does not know."""
    monkeypatch.setattr(HostStreams, "capture", capture)
    monkeypatch.setenv(library.VARIABLE, "0")
    library._found.cache_clear()
    yield
    library._found.cache_clear()


def alone(path: Path, *overrides: str) -> Spec:
    """A file on one rank, which captures its steps."""
    added = f"""
mesh alone(data = 1)
layout whole on alone {{ shard batch -> data }}
schedule in_turn = one_f_one_b(microbatches = {1 if path.stem in INDIVISIBLE else 2})
"""
    chosen = (
        "layout=whole",
        "schedule=in_turn",
        "train.graphs=true",
        "train.compile=false",
        "train.data=random()",
        f"train.steps={STEPS}",
        *(["train.eval=every(1, batches = 1)"] if "eval = " in path.read_text() else []),
    )
    spec, diagnostics = load_text(path.read_text() + added, path.name, (*chosen, *overrides), path)
    if spec is None:
        raise Refused(diagnostics)
    return evolve(spec, expect=())


def trained(plan: CompiledRun, folder: Path) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    run, batches = VirtualRun(plan), random_batches(plan, folder)
    rates = [0.01] * len(plan.train.optimizer.calls)
    losses = [run.step(i, batches(i), *rates) for i in range(1, STEPS + 1)]
    return losses, run.parameters()


def same(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        plan = prepare(alone(path))
        one = trained(plan, folder)
    except Refused as refused:
        if not {each.code for each in refused.diagnostics} <= {"E0422", "E0609"}:
            raise
        pytest.skip("draws random numbers, waits, or has ids of which nothing says how many there are")
    assert plan.program.captured
    monkeypatch.setattr(HostStreams, "capture", None)
    other = trained(plan, folder)
    assert one[0] == other[0]
    assert len({loss for loss, _ in one[0]}) > 1, "batches and parameters differ from step to step"
    for name, parameter in one[1].items():
        assert torch.equal(parameter, other[1][name]), name


@pytest.mark.few(1)
@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", USUAL)
def test_a_step_that_is_captured_computes_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    same(next(path for path in FILES if path.stem == name), tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("path", [each for each in FILES if each.stem != "gpt"], ids=lambda path: path.stem)
def test_steps_of_all_files_compute_the_same(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """But for one of which all that a step makes, which the record keeps, is more than the memory here."""
    same(path, tmp_path, monkeypatch)


def on_gpus(path: Path, *overrides: str, added: str = "") -> int:
    """Runs ranks on GPUs that are not there; how many launches the last step of each takes at most."""
    text = path.read_text() + added
    spec, diagnostics = load_text(text, path.name, ("train.graphs=true", *overrides), path)
    if spec is None:
        raise Refused(diagnostics)
    plan = prepare(evolve(spec, expect=()), gpu=True)
    most = 0
    for tried in try_ranks(plan):
        right(tried)
        assert [each.operation for each in tried.launches].count("graph") == 1
        most = max(most, len(tried.launches))
    return most


@pytest.mark.soak
@pytest.mark.parametrize(("name", "most"), [("tiny", 40), ("llama", 25)])
def test_a_rank_launches_a_graph_and_its_update(name: str, most: int):
    """Without graphs, up to 667 and 1,156."""
    assert on_gpus(SPECS / f"{name}.par", "train.precision=bf16", "train.compile=false") <= most


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_steps_are_captured_on_gpus_however_files_are_laid_out(path: Path, seed: int):
    drawn = draw(Random(f"{path.stem} in graphs {seed}"), path)
    more = (f"train.precision={('f32', 'bf16')[seed % 2]}", *(["train.compile=false"] if seed % 3 == 0 else []))
    try:
        on_gpus(path, *drawn.overrides, *more, added=drawn.added)
    except Refused:
        pytest.skip("does not fit, or cannot be captured")


RANDOM = """axis batch = 8, embed = 8
model m(x: [batch, embed]) {
  param w: [embed] ~ ones()
  loss mean(LOSS)
}
layout split { RULES }
train {
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 1
  graphs = true
  MORE
}
"""


def refused(loss: str = "x * w", rules: str = "", more: str = "") -> list[tuple[str, str]]:
    text = RANDOM.replace("LOSS", loss).replace("MORE", more)
    text = text.replace("layout split { RULES }\n", f"layout split {{ {rules} }}\n" if rules else "")
    spec, diagnostics = load_text(text)
    if spec is None:
        return [(each.code, each.message) for each in diagnostics]
    try:
        prepare(spec)
    except Refused as error:
        return [(each.code, each.message) for each in error.diagnostics]
    return []


def test_what_the_host_decides_is_not_captured():
    assert refused() == []
    ((code, message),) = refused("dropout(x * w, rate = 10%)")
    assert (code, message) == ("E0422", "a step cannot be captured: this draws random numbers")
    ((code, message),) = refused(more="sync = delayed(1)")
    assert code == "E0318"
    assert message.startswith("`graphs` cannot be combined with `sync` yet")
    ((code, message),) = refused(more="validate = after")
    assert code == "E0318"


def test_dropout_of_adapters_is_not_captured():
    text = (SPECS / "zoo" / "lora.par").read_text().replace("alpha = 8)", "alpha = 8, dropout = 10%)")
    spec, _ = load_text(text.replace("train {", "train {\n  graphs = true"))
    assert spec is not None
    with pytest.raises(Refused, match="a step cannot be captured: this draws random numbers"):
        prepare(spec)


def test_operations_of_the_files_own_are_not_captured(tmp_path: Path):
    spec, _ = load(written(tmp_path / "own"), ("train.graphs=true",))
    assert spec is not None
    with pytest.raises(Refused, match="this is an operation of the file's own"):
        prepare(spec, allow_python=True)


def test_experts_are_captured_where_gpus_group_them():
    path = SPECS / "zoo" / "qwen3_moe.par"
    on_gpus(path, "train.precision=bf16", "train.compile=false")
    with pytest.raises(Refused, match="this waits for the number of rows of each expert"):
        on_gpus(path, "train.precision=f32", "train.compile=false")


MATRICES = """axis batch = 64, embed = 512, more = 512
model m(x: [batch, embed]) {
  param w: [embed, more] ~ normal(0.1)
  param u: [more, embed] ~ normal(0.1)
  loss mean(dot(gelu(dot(x, w, over = embed)), u, over = more))
}
train { data = random() optimizer = muon(lr = 0.1) steps = 1 compile = false }
"""


# With states of a part of each parameter: of columns, which do not follow each other in memory.
PARTS = """
mesh cluster(data = 2)
layout parts on cluster { shard state -> data }
"""


@pytest.mark.parametrize(
    ("overrides", "added"),
    [
        ((), ""),
        (("train.optimizer=adamw(lr=0.1)", "layout=parts", "embed=511", "train.clip=none"), PARTS),
        (("train.optimizer=adamw(lr=0.1)", "layout=parts", "embed=511", "train.clip=1.0"), PARTS),
    ],
    ids=["muon", "adamw", "adamw, clipped"],
)
def test_a_graph_keeps_its_memory_during_the_update(overrides: tuple[str, ...], added: str, tmp_path: Path):
    """And so does the bound, here of updates that take much."""
    path = tmp_path / "matrices.par"
    path.write_text(MATRICES)
    on_gpus(path, *overrides, added=added)


def test_copies_to_the_host_are_not_captured():
    text = (ROOT / "tests" / "planted" / "files" / "offload.par").read_text()
    spec, found = load_text(text, "o.par", ("train.graphs=true",))
    assert spec is None
    assert {(each.code, each.message) for each in found if each.severity == "error"} == {
        ("E0422", "a step cannot be captured: the host waits for what is copied to its memory")
    }
