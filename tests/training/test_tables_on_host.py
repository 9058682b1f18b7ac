"""Tables in the host's memory, or in files that are mapped into it (`offload TABLE`, `offload TABLE by mmap`): only the
rows of a step are copied.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partita.compiler.analysis.memory import memory_report
from partita.compiler.ops.host import CopyOut, Prefetch, ToDevice, ToHost
from partita.compiler.pipeline import compile_spec
from partita.compiler.verify.equivalence import validate
from partita.runtime import kernels
from partita.runtime.checkpoint.shards import Entry, Shard
from partita.runtime.data.binding import open_data
from partita.runtime.mapped import copy_file, mapped_tensor
from partita.runtime.regions import in_slabs
from partita.runtime.training import VirtualRun
from tests.commands import computed, partita
from tests.files import checked
from tests.marks import soak
from tests.training.test_partition import plan_of

FILE = """\
axis batch = 8, items = 3, embed = 4, rows = ROWS, ffn = 5

model m(ids: i64[batch, items], y: [batch, embed]) {
  param table: [rows, embed] ~ normal(0.2)
  param w: [embed, ffn] ~ normal(0.3)
  param back: [ffn, embed] ~ normal(0.3)
  let x = sum(embedding(ids, table, over = rows), over = items)
  loss mse(dot(tanh(dot(x, w, over = embed)), back, over = ffn), y)
}
mesh pair(data = 2)
layout split on pair {
  shard batch -> data
  RULES
}
optimizer chosen { update table -> OPTIMIZER update all -> sgd(lr = 0.1) }
train { optimizer = chosen data = random() precision = PRECISION steps = 2 clip = 0.5 eval = every(1, batches = 1) }
"""


def text_of(rules: str, optimizer: str = "adagrad(lr = 0.1)", precision: str = "f32", rows: int = 600) -> str:
    found = FILE.replace("RULES", rules).replace("OPTIMIZER", optimizer).replace("PRECISION", precision)
    return found.replace("ROWS", str(rows))


def trained(text: str, tmp_path: Path) -> list[torch.Tensor]:
    plan = plan_of(text)
    assert validate(plan.training).problems == ()
    assert plan.evaluation is not None
    assert validate(plan.evaluation).problems == ()
    run = VirtualRun(plan)
    data = open_data(plan.program, plan.train, tmp_path)
    found = [torch.tensor(run.step(n, run.ranks[0].tensors(data.batch(n)), 0.1, 0.1)) for n in (1, 2)]
    found.append(torch.tensor(run.evaluate(run.ranks[0].tensors(data.holdout_batch(0)))[0]))
    for rank in run.ranks:
        found += [*rank.memory.masters.values(), *rank.memory.states.values()]
    return found


CASES = [
    ("shard rows -> data", "adagrad(lr = 0.1)", "f32", " by mmap"),
    ("", "adamw(lr = 0.1, sparse = true)", "bf16", ""),
    *soak(
        *(
            (rules, optimizer, precision, where)
            for rules in ("", "shard rows -> data", "shard embed -> data")
            for optimizer in ("adagrad(lr = 0.1)", "rowwise_adagrad(lr = 0.1)", "sgd(lr = 0.1)", "adamw(lr = 0.1)")
            for precision in ("f64", "bf16")
            for where in ("", " by mmap")
        )
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("rules", "optimizer", "precision", "where"), CASES)
def test_the_numbers_are_the_same_to_the_last_bit(rules, optimizer, precision, where, tmp_path, monkeypatch):
    expected = trained(text_of(rules, optimizer, precision), tmp_path)
    monkeypatch.setattr(kernels, "to_host", torch.clone)
    monkeypatch.setattr(kernels, "to_device", lambda x, context: x.clone())
    found = trained(text_of(f"{rules} offload table{where}", optimizer, precision), tmp_path)
    assert all(map(torch.equal, expected, found))


def test_only_the_rows_of_a_step_are_copied():
    """Whatever the number of rows; the device's memory does not depend on it either."""
    found = []
    for rows in (6_000, 6_000_000):
        state = compile_spec(checked(text_of("shard rows -> data offload table", rows=rows), "tables.par"))
        nodes = [node for stage in state.partitioned.stages for node in stage.nodes]
        nodes += [node for each in state.update.parameters for node in each.update]
        copies = [node for node in nodes if node.op in (ToHost(), CopyOut(), ToDevice(), Prefetch())]
        report = memory_report(state, state.plan.ranks[0])
        assert report.host == 2 * rows // 2 * 4 * 4
        found.append(([(node.op.name, node.output.type) for node in copies], report.total))
    assert found[0] == found[1]
    kinds = [name for name, _ in found[0][0]]
    assert "prefetch" not in kinds
    assert kinds.count("to_host") >= 1  # ids of the lookup
    assert kinds.count("copy_out") == 2  # ids and rows of the gradient


def test_a_mapped_table_is_no_memory_of_the_host():
    state = compile_spec(checked(text_of("offload table by mmap", rows=6_000_000), "tables.par"))
    assert memory_report(state, state.plan.ranks[0]).host == 0
    assert [each.name for each in state.program.parameters if each.mapped] == ["m.table"]


# ---------------------------------------------------------------- files


def test_a_file_has_pages_where_it_is_written(tmp_path: Path):
    size = 1 << 28
    tensor = mapped_tensor(tmp_path / "rank-0" / "table", (size // 256, 64), torch.float32)
    assert not tensor.any() if size < 1 << 20 else tensor[::100_000].sum() == 0
    tensor[5] = 1.0
    tensor[-3] = 2.0
    for file in (tmp_path / "rank-0" / "table", tmp_path / "copy"):
        if file.name == "copy":
            copy_file(tmp_path / "rank-0" / "table", file)
        found = torch.from_file(str(file), False, tensor.numel(), dtype=torch.float32).view(tensor.shape)
        assert found[5].sum() == 64
        assert found[-3].sum() == 128
        assert file.stat().st_size == size
        assert file.stat().st_blocks * 512 < size // 64
    again = mapped_tensor(tmp_path / "rank-0" / "table", (3, 2), torch.float64)
    assert not again.any()
    assert tensor[5].sum() == 64  # an earlier mapping keeps its own


def test_a_snapshot_of_a_mapped_tensor_is_a_copy_of_its_file(tmp_path: Path):
    entries = (Entry("a", "f32", (3, 2)), Entry("b", "f32", (6,)), Entry("c", "f64", (2,)))
    table = mapped_tensor(tmp_path / "b", (6,), torch.float32)
    tensors = (torch.arange(6.0).view(3, 2), table, torch.ones(2, dtype=torch.float64))
    table.copy_(torch.arange(6.0))
    expected = Shard(entries, tuple(each.clone() for each in tensors))
    shard = Shard(entries, tensors, {"b": tmp_path / "b"})
    for each in (expected, shard):
        each.take()
    table.fill_(-1)
    assert b"".join(shard.blocks()) == b"".join(expected.blocks())
    assert shard._copy is not None
    assert shard._copy.numel() == 24 + 16


@pytest.mark.parametrize("shape", [(7, 3), (4,), (), (2, 5, 3)])
@pytest.mark.parametrize("elements", [1, 6, 100])
def test_slabs_cover_a_region_once(shape: tuple[int, ...], elements: int):
    whole = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape)
    region = tuple(slice(size // 3, size) for size in shape)
    part = torch.full_like(whole[region], -1)
    for rows, inside in in_slabs(region, elements):
        assert (part[rows] == -1).all()
        part[rows] = whole[inside]
        assert part[rows].numel() <= max(elements, part[:1].numel() if shape else 1)
    assert torch.equal(part, whole[region])


@pytest.mark.soak
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path):
    """Two processes with a mapped table, interrupted after one step, end as those that were not."""
    text = text_of("shard rows -> data offload table by mmap")
    (tmp_path / "tables.par").write_text(text)
    for name, steps in (("whole", (4,)), ("parts", (2, 4))):
        for count in steps:
            settings = f"train.steps={count}", "train.checkpoint=every(1)"
            done = partita("run", "tables.par", *settings, f"--run-dir={name}", cwd=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / name / "mapped" / "rank-1" / "m.table").stat().st_size == 300 * 4 * 4
    assert computed(tmp_path / "whole")[-1] == computed(tmp_path / "parts")[-1]
