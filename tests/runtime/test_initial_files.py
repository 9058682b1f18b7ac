"""Initial values from files: each rank reads its part; what is wrong with a file is said before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from partita.cli.main import main
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun

FILE = """axis batch = 8, embed = 6, classes = 4
model net(x: [batch, embed], y: i64[batch]) {
  buffer mix: [embed, classes] ~ file("tables.safetensors", "mix")
  buffer order: i64[classes] ~ file("tables.safetensors", "order")
  param head: [embed, classes] ~ file("tables.safetensors", "head")
  loss cross_entropy(dot(x, head + mix, over = embed) + cast(order, f32), y, over = classes)
}
mesh ranks(data = 2, tensor = 2)
layout cut on ranks { shard batch -> data  shard classes -> tensor  shard state -> data }
layout uneven on ranks { shard batch -> data  shard embed -> tensor padded  shard param -> data }
train { model = net  layout = cut  data = random()  optimizer = adamw(lr = 1e-2)  steps = 2 }
"""
TABLES = {
    "mix": torch.arange(24.0).reshape(6, 4) / 8,
    "order": torch.tensor([3, 1, 200, 0], dtype=torch.uint8),
    "head": torch.arange(24.0).reshape(6, 4).to(torch.bfloat16),
}


def written(folder: Path, text: str = FILE) -> Path:
    save_file(TABLES, folder / "tables.safetensors")
    file = folder / "net.par"
    file.write_text(text)
    return file


@pytest.mark.parametrize("overrides", [(), ("layout=uneven", "ranks.tensor=4"), ("ranks.data=1", "ranks.tensor=1")])
def test_ranks_begin_with_their_parts_of_a_file(overrides: tuple[str, ...], tmp_path: Path):
    spec, diagnostics = load(written(tmp_path), overrides)
    assert spec is not None, diagnostics
    found = VirtualRun(prepare(spec)).parameters()
    assert torch.equal(found["net.mix"], TABLES["mix"])
    assert torch.equal(found["net.order"], TABLES["order"].long())
    assert torch.equal(found["net.head"], TABLES["head"].float())


def test_it_is_verified_at_other_sizes(tmp_path: Path):
    assert main(["verify", str(written(tmp_path))]) == 0


@pytest.mark.parametrize(
    ("before", "after", "code", "words"),
    [
        ("order: i64", "order: i8", "E0607", "`order` of tables.safetensors has 200, and i8 holds -128 to 127"),
        ('"mix")', '"mux")', "E0603", "has no tensor `mux`"),
        ('file("tables.safetensors", "mix")', 'file("other.safetensors", "mix")', "E0601", "there is no file"),
        ('file("tables.safetensors", "mix")', 'file("../t.safetensors", "mix")', "E0602", "outside of the directory"),
        ('file("tables.safetensors", "mix")', 'file("net.par", "mix")', "E0603", "is no file of tensors"),
        ('"mix")', '"order")', "E0607", "is not floats of the shape of `net.mix`"),
        (
            'i64[classes] ~ file("tables.safetensors", "order")',
            "i64[classes] ~ normal(1)",
            "E0205",
            "cannot initialize",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(before: str, after: str, code: str, words: str, tmp_path: Path):
    assert before in FILE
    spec, diagnostics = load(written(tmp_path, FILE.replace(before, after)))
    if spec is not None:
        with pytest.raises(Refused) as refused:
            VirtualRun(prepare(spec))
        diagnostics = refused.value.diagnostics
    assert any(each.code == code and words in each.message for each in diagnostics), diagnostics
