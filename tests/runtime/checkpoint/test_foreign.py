"""Files of other programs: what `weights` names is read and written, and all that does not fit is refused by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from partita.cli.main import main
from partita.dsl.load import load_text
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.foreign import seen_as_ours, seen_as_theirs
from partita.runtime.checkpoint.loading import Commit

TEXT = """
axis batch = 4, embed = 4, heads = 2, key = 3, experts = 2, out = 5
const first = 1

block attn(x: [batch, embed]) {
  param wq, wk: [embed, heads, key] ~ normal(0.1)
  param gain: [heads, key] ~ ones()
  let h = dot(x, wq, over = embed) * dot(x, wk, over = embed) * gain
  return x + sum(h, over = [heads, key])
}

model m(x: [batch, embed]) {
  param up: [experts, embed, out] ~ normal(0.5)
  param table: [out, embed] ~ normal(0.5)
  param scale: [] ~ ones()
  buffer seen: i64[] ~ zeros()
  update seen = seen + 1
  repeat 2 as layer {
    let x = attn(x)
  }
  loss mean(sum(dot(x, up, over = embed), over = experts) * dot(x, table, over = embed)) * scale * first
}

train { data = random()  optimizer = adamw(lr = 0.1)  steps = 2 }

weights hf {
  attn.wq, attn.wk = "net.h.{layer}.qk.weight" [embed, + key * heads]
  attn.gain = "net.h.{layer}.gain" [1, heads, key]
  m.up = "net.experts.{experts}.up" [out, embed]
  m.table = "net.table", "head" [out, embed]
  m.scale = "net.scale"
  m.seen = "net.seen" []
  skip "*.inv_freq"
}

weights part {
  attn.gain = "gain.{layer}" [heads * key]
}
"""


def theirs() -> dict[str, Tensor]:
    """The tensors of another program."""
    generator = torch.Generator().manual_seed(1)
    found = {f"net.h.{i}.qk.weight": torch.randn(4, 12, generator=generator) for i in range(2)}
    found |= {f"net.h.{i}.gain": torch.randn(1, 2, 3, generator=generator) for i in range(2)}
    found |= {f"net.experts.{i}.up": torch.randn(5, 4, generator=generator) for i in range(2)}
    found |= {"net.table": torch.randn(5, 4, generator=generator), "net.scale": torch.tensor(2.0)}
    return {**found, "net.seen": torch.tensor(7), "net.rotary.inv_freq": torch.ones(3)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `m.par` and `theirs`, a directory of one file with a config, to be in."""
    monkeypatch.chdir(tmp_path)
    Path("m.par").write_text(TEXT)
    Path("theirs").mkdir()
    save_file(theirs(), "theirs/model.safetensors")
    Path("theirs/config.json").write_text('{"model_type": "net", "dtype": "float32"}')
    return tmp_path


def partita(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["checkpoint", *arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


def imported(capsys: pytest.CaptureFixture[str], *more: str, source: str = "theirs") -> tuple[int, str, str]:
    return partita(capsys, "import", "run/checkpoints", source, "m.par", "--as", "hf", *more)


def ours(path: str = "run/checkpoints") -> dict[str, Tensor]:
    manifest = read_manifest(Path(path), 0)
    with Commit(Path(path), manifest) as commit:
        return {each.name: commit.read(each.name) for each in manifest.tensors}


def shards(files: dict[str, list[str]]) -> None:
    """Instead of one file, several and an index."""
    tensors = load_file("theirs/model.safetensors")
    os.remove("theirs/model.safetensors")
    where = {name: file for file, names in files.items() for name in names}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names if name in tensors}, f"theirs/{file}")
    Path("theirs/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def halves() -> dict[str, list[str]]:
    names = sorted(theirs())
    return {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}


def change(name: str, tensor: Tensor | None) -> None:
    found = load_file("theirs/model.safetensors")
    if tensor is None:
        del found[name]
    else:
        found[name] = tensor
    save_file(found, "theirs/model.safetensors")


# ---------------------------------------------------------------- what comes in


@pytest.mark.parametrize("source", ["theirs", "theirs/model.safetensors", "theirs/model.safetensors.index.json"])
def test_every_axis_comes_to_its_place(source: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    if source.endswith("json"):
        shards(halves())
    status, out, err = imported(capsys, source=source)
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == f"run/checkpoints/step-00000000: 9 tensors from {source}"
    found, given = ours(), theirs()
    for i in range(2):
        qk = given[f"net.h.{i}.qk.weight"]
        for name, part in (("wq", qk[:, :6]), ("wk", qk[:, 6:])):
            # Theirs has `key` before `heads`.
            assert torch.equal(found[f"m.layer.{i}.attn.{name}"], part.reshape(4, 3, 2).transpose(1, 2))
        assert torch.equal(found[f"m.layer.{i}.attn.gain"], given[f"net.h.{i}.gain"][0])
        assert torch.equal(found["m.up"][i], given[f"net.experts.{i}.up"].T)
    assert torch.equal(found["m.table"], given["net.table"])
    assert (float(found["m.scale"]), int(found["m.seen"])) == (2.0, 7)
    assert not any(tensor.any() for name, tensor in found.items() if "/" in name)


def test_other_dtypes_are_cast(folder: Path, capsys: pytest.CaptureFixture[str]):
    wanted = theirs()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        save_file({k: v.to(dtype) if v.is_floating_point() else v for k, v in wanted.items()}, "theirs/x.safetensors")
        path = f"run/{dtype}"
        assert partita(capsys, "import", path, "theirs/x.safetensors", "m.par", "--as", "hf")[0] == 0
        assert torch.equal(ours(path)["m.table"], wanted["net.table"].to(dtype).float())


def test_a_part_comes_in_and_the_rest_begins_as_the_file_says(folder: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("net.table", "net.scale", "net.seen", "net.h.0.gain", "net.h.1.gain"):
        change(name, None)
    status, out, _ = imported(capsys, "--only", "up,wq,wk")
    assert status == 0
    assert "as the file begins: m.table, m.scale, m.seen, m.layer.{0..1}.attn.gain" in out
    found = ours()
    assert torch.equal(found["m.up"][1], theirs()["net.experts.1.up"].T)
    assert main(["run", "m.par", "--run-dir", "fresh", "--transport", "virtual", "train.checkpoint=every(2)"]) == 0
    assert torch.equal(found["m.layer.0.attn.gain"], torch.ones(2, 3))
    assert 0 < float(found["m.table"].std()) < 1
    capsys.readouterr()
    status, _, err = imported(capsys, "--only", "upp")
    assert (status, "error[E0409]: `--only` names no parameter: `upp`" in err) == (1, True)
    status, _, err = imported(capsys, "--only", "wq")
    assert (status, "`--only` names `m.layer.0.attn.wq`, but not `m.layer.0.attn.wk`" in err) == (1, True)


def test_what_weights_do_not_name_is_not_forgotten(folder: Path, capsys: pytest.CaptureFixture[str]):
    save_file({f"gain.{i}": torch.ones(6) for i in range(2)}, "theirs/gain.safetensors")
    arguments = ("import", "run", "theirs/gain.safetensors", "m.par", "--as", "part")
    status, _, err = partita(capsys, *arguments)
    assert status == 1
    assert "error[E0809]: `weights part` says nothing of 8 parameters\n   --> m.par:36:1\n" in err
    assert '= # which? m.layer.attn.wk = "…" [embed, heads, key]\n' in err
    assert not Path("run").exists()
    assert partita(capsys, *arguments, "--only", "gain")[0] == 0


@pytest.mark.parametrize("lacking", [True, False])
def test_the_first_part_of_names_may_be_missing_or_another(
    lacking: bool, folder: Path, capsys: pytest.CaptureFixture[str]
):
    renamed = {k.removeprefix("net.") if lacking else f"module.{k}": v for k, v in theirs().items()}
    save_file(renamed, "theirs/model.safetensors")
    status, out, _ = imported(capsys)
    assert status == 0
    assert ("its names lack `net.`" if lacking else "its names begin with `module.`") in out.splitlines()
    assert torch.equal(ours()["m.table"], theirs()["net.table"])


def test_several_names_are_of_one_tensor(folder: Path, capsys: pytest.CaptureFixture[str]):
    change("head", theirs()["net.table"].clone())
    assert imported(capsys)[0] == 0
    change("head", theirs()["net.table"] + 1)
    status, _, err = partita(capsys, "import", "other", "theirs", "m.par", "--as", "hf")
    assert (status, "error[E0817]: `net.table` and `head` differ" in err) == (1, True)
    change("net.table", None)
    assert partita(capsys, "import", "other", "theirs", "m.par", "--as", "hf")[0] == 0
    assert torch.equal(ours("other")["m.table"], theirs()["net.table"] + 1)


# ---------------------------------------------------------------- what does not fit


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "tensor", "code", "told"),
    [
        ("net.h.1.gain", None, "E0809", "lacks 1 of 9 tensors\n  = net.h.1.gain   (m.layer.1.attn.gain)"),
        ("net.seen", None, "E0809", "lacks 1 of 9 tensors\n  = net.seen   (m.seen)"),
        (
            "net.tabel",
            torch.ones(5, 4),
            "E0811",
            "1 of 11 tensors in theirs are not in `weights hf`\n   --> m.par:26:",
        ),
        ("more", torch.ones(2), "E0811", 'help: `skip "more"` drops it knowingly'),
        (
            "net.table",
            torch.ones(4, 5),
            "E0809",
            "net.table is F32[4, 5], but m.table: f32[out=5, embed=4] needs [5, 4]\n"
            '  help: in `weights hf`, is it `m.table = "net.table" [embed, out]`?',
        ),
        ("net.h.0.qk.weight", torch.ones(4, 11), "E0809", "but m.layer.attn.wq, m.layer.attn.wk needs [4, 12]"),
        ("net.table", torch.ones(5, 4, dtype=torch.int64), "E0809", "net.table is I64[5, 4]"),
        ("net.seen", torch.tensor(0.5), "E0809", "net.seen is F32[], but m.seen: i64[] needs []"),
        (
            "net.scale",
            torch.tensor(float("nan")),
            "E0813",
            "net.scale: 1 of 1 numbers are not finite as f32",
        ),
        (
            "net.table",
            torch.full((5, 4), 1e200, dtype=torch.float64),
            "E0813",
            "20 of 20 numbers are not finite as f32",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, tensor: Tensor | None, code: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    change(name, tensor)
    status, _, err = imported(capsys)
    assert status == 1
    assert f"error[{code}]" in err
    assert told in err
    assert not Path("run").exists()


def test_a_similar_name_is_proposed(folder: Path, capsys: pytest.CaptureFixture[str]):
    change("net.scael", theirs()["net.scale"])
    change("net.scale", None)
    assert 'help: in `weights hf`, is it `m.scale = "net.scael"`?' in imported(capsys)[2]


def test_damaged_files_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    whole = Path("theirs/model.safetensors").read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        Path("theirs/model.safetensors").write_bytes(whole[:length])
        status, _, err = imported(capsys)
        assert (status, "error[E0808]: model.safetensors is not a file of tensors" in err) == (1, True)
    Path("theirs/model.safetensors").unlink()
    assert "error[E0808]: theirs has neither model.safetensors nor" in imported(capsys)[2]
    Path("theirs/pytorch_model.bin").write_bytes(whole)
    assert "pickles, which can run code, are not read" in imported(capsys, source="theirs/pytorch_model.bin")[2]
    assert "error[E0808]" in imported(capsys, source="missing")[2]
    assert not Path("run").exists()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("index", "told"),
    [
        ("{", "is not an index of tensors"),
        ('{"weight_map": {"net.table": 1}}', "does not map names to files"),
        ('{"weight_map": {"net.table": "../model-1.safetensors"}}', "which is no safetensors file beside it"),
        ('{"weight_map": {"net.table": "model-9.safetensors"}}', "model-9.safetensors is missing"),
        ('{"weight_map": {"other": "model-1.safetensors"}}', "model-1.safetensors has other, which it lacks"),
        ('{"weight_map": {"head": "model-2.safetensors"}}', "which it lacks"),
    ],
)
def test_a_wrong_index_is_refused(index: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    shards(halves())
    Path("theirs/model.safetensors.index.json").write_text(index)
    status, _, err = imported(capsys)
    assert (status, "error[E0808]" in err) == (1, True)
    assert told in err


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["--as", "hg"], 1, "error[E0302]: m.par has no `weights hg`\n  help: there are `hf` and `part`"),
        (["--as", "hf", "--strict"], 2, "--strict does not go with --as"),
        (["--only", "upp"], 1, "error[E0409]: `--only` names no parameter: `upp`"),
    ],
)
def test_wrong_usage(arguments: list[str], status: int, told: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    found, _, err = partita(capsys, "import", "run", "theirs", "m.par", *arguments)
    assert found == status
    assert told in err


# ---------------------------------------------------------------- what goes out


def test_what_goes_out_is_what_came_in(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert imported(capsys)[0] == 0
    status, out, _ = partita(capsys, "export", "run", "--as", "hf", "-o", "out")
    assert status == 0
    assert out.startswith("out: 9 tensors, ")
    assert sorted(os.listdir("out")) == ["config.json", "model.safetensors"]
    found = load_file("out/model.safetensors")
    wanted = {name: tensor for name, tensor in theirs().items() if "inv_freq" not in name}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert Path("out/config.json").read_text() == Path("theirs/config.json").read_text()


RULES = "optimizer some { freeze wq, up  update all -> adamw(lr = 0.1) }"
FREEZING = RULES + TEXT.replace("adamw(lr = 0.1)", "some  precision = bf16")


def test_what_is_frozen_is_rounded_and_a_tensor_of_several_is_as_wide_as_the_widest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("m.par").write_text(FREEZING)
    Path("theirs/config.json").write_text('{"dtype": "bfloat16"}')
    assert imported(capsys)[0] == 0
    types = {name: tensor.dtype for name, tensor in ours().items() if "/" not in name and tensor.is_floating_point()}
    frozen = {"m.up", "m.layer.0.attn.wq", "m.layer.1.attn.wq"}
    assert types == {name: torch.bfloat16 if name in frozen else torch.float32 for name in types}
    assert partita(capsys, "export", "run", "--as", "hf", "-o", "out")[0] == 0
    found, given = load_file("out/model.safetensors"), theirs()
    assert torch.equal(found["net.experts.0.up"], given["net.experts.0.up"].bfloat16())
    assert torch.equal(found["net.table"], given["net.table"])
    queries, keys = given["net.h.0.qk.weight"].split(6, 1)
    assert torch.equal(found["net.h.0.qk.weight"], torch.cat([queries.bfloat16().float(), keys], 1))
    assert json.loads(Path("out/config.json").read_text()) == {"dtype": "float32"}


def test_numbers_must_not_overflow_the_narrowest_dtype_of_a_tensor(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change("net.h.0.qk.weight", torch.full((4, 12), torch.finfo(torch.float32).max))
    assert imported(capsys, "--only", "wq,wk")[0] == 0
    Path("m.par").write_text(FREEZING)
    status, _, err = partita(capsys, "import", "again", "theirs", "m.par", "--as", "hf")
    assert status == 1
    assert "error[E0813]" in err
    assert "48 of 48 numbers are not finite as bf16" in err


def test_files_have_at_most_a_size_and_an_index(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert imported(capsys)[0] == 0
    arguments = ("export", "run", "--as", "hf", "--shard-size", "100B", "--dtype", "bf16", "-o", "out")
    assert partita(capsys, *arguments)[0] == 0
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    found = {name: tensor for file in files for name, tensor in load_file(f"out/{file}").items()}
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert found["net.seen"].dtype == torch.int64
    assert torch.equal(found["net.experts.1.up"], theirs()["net.experts.1.up"].bfloat16())
    # Programs load tensors in the dtype that the config says.
    assert json.loads(Path("out/config.json").read_text()) == {"model_type": "net", "dtype": "bfloat16"}
    assert partita(capsys, "import", "again", "out", "m.par", "--as", "hf")[0] == 0


def test_names_are_those_of_the_run_or_of_a_file(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert imported(capsys)[0] == 0
    Path("m.par").write_text(TEXT.replace('"net.scale"', '"net.temperature"'))
    assert partita(capsys, "export", "run", "--as", "hf", "-o", "old")[0] == 0
    assert partita(capsys, "export", "run", "--as", "hf", "-o", "new", "m.par")[0] == 0
    assert "net.scale" in load_file("old/model.safetensors")
    assert "net.temperature" in load_file("new/model.safetensors")
    status, _, err = partita(capsys, "export", "run", "m.par", "embed=8", "--as", "hf", "-o", "other")
    assert (status, "error[E0809]: `weights hf` is of another model" in err) == (1, True)


def test_names_that_constants_are_in_need_the_file(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("m.par").write_text(TEXT.replace("net.h.{layer}.gain", "net.h.{layer + first - 1}.gain"))
    assert imported(capsys)[0] == 0
    status, _, err = partita(capsys, "export", "run", "--as", "hf", "-o", "out")
    assert (status, "error[E0818]: a name in `weights hf` depends on `first`" in err) == (1, True)
    assert partita(capsys, "export", "run", "m.par", "--as", "hf", "-o", "out")[0] == 0


def test_a_part_goes_out(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert imported(capsys)[0] == 0
    status, _, err = partita(capsys, "export", "run", "--as", "part", "-o", "out")
    assert (status, "`weights part` says nothing of 8 parameters" in err) == (1, True)
    assert partita(capsys, "export", "run", "--as", "part", "--only", "gain", "--dtype", "f16", "-o", "out")[0] == 0
    assert load_file("out/model.safetensors")["gain.0"].dtype == torch.float16


def test_means_of_weights_go_out(folder: Path, capsys: pytest.CaptureFixture[str]):
    more = ("train.ema=0.9", "train.checkpoint=every(2)")
    assert partita(capsys, "import", "run/checkpoints", "theirs", "m.par", *more, "--as", "hf")[0] == 0
    assert main(["run", "m.par", *more, "--run-dir", "run", "--transport", "virtual"]) == 0
    for which in ("trained", "ema"):
        assert partita(capsys, "export", "run", "--as", "hf", "--weights", which, "-o", which)[0] == 0
    before = theirs()["net.table"]
    trained, mean = (load_file(f"{which}/model.safetensors")["net.table"] for which in ("trained", "ema"))
    assert 0 < (mean - before).abs().max() < (trained - before).abs().max()


def test_nothing_is_replaced(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert imported(capsys)[0] == 0
    Path("out").mkdir()
    assert partita(capsys, "export", "run", "--as", "hf", "-o", "out")[0] == 0
    before = sorted(os.listdir("out"))
    status, _, err = partita(capsys, "export", "run", "--as", "hf", "-o", "out")
    assert (status, "cannot write out: Directory not empty" in err) == (2, True)
    assert partita(capsys, "export", "run", "--as", "hf", "-o", "m.par")[0] == 2
    assert sorted(os.listdir("out")) == before
    assert sorted(os.listdir()) == ["m.par", "out", "run", "theirs"]


# ---------------------------------------------------------------- parameters that share a tensor

SIZES = {"a": 2, "b": 3, "c": 4, "d": 1, "e": 5}


@st.composite
def interleaved(draw) -> tuple[str, list[tuple[str, ...]], int, int, int]:
    """A line that joins parameters: its axes; the axes of each parameter in the order of theirs; and in this order, how
    many come before the axis of theirs that is joined, how many of that are outside the join, and how many are shared
    after it.
    """
    names = draw(st.permutations(sorted(SIZES)))
    shared, own = names[: draw(st.integers(0, 3))], names[3:]
    first = draw(st.integers(0, len(shared)))
    outer = draw(st.integers(first, len(shared)))
    after = draw(st.integers(outer, len(shared)))
    terms = draw(st.lists(st.lists(st.sampled_from(own), unique=True, max_size=2), min_size=2, max_size=3))
    inner, last = shared[outer:after], shared[after:]
    products = [" * ".join([*term, *inner]) or "1" for term in terms]
    head = "".join(f"{name} * " for name in shared[first:outer])
    if len(set(products)) == 1 and draw(st.booleans()):
        joined = f"{head}+ {products[0]}"
    elif inner and draw(st.booleans()):
        joined = f"{head}({' + '.join(' * '.join(term) or '1' for term in terms)}){''.join(f' * {n}' for n in inner)}"
    else:
        joined = f"{head}({' + '.join(products)})" if head else " + ".join(products)
    axes = ", ".join([*shared[:first], joined, *last])
    return axes, [(*shared[:outer], *term, *inner, *last) for term in terms], first, outer, len(last)


@given(interleaved(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_joined_parameters_come_out_as_concatenation_says_and_back(line, random) -> None:
    """Against torch.cat of what lies inside the join."""
    axes, orders, first, outer, last = line
    ours = []
    for order in orders:
        names = random.sample(order, len(order))
        ours.append((names, torch.randn([SIZES[name] for name in names])))
    params = "\n".join(f"  param p{i}: [{', '.join(names)}] ~ ones()" for i, (names, _) in enumerate(ours))
    total = " * ".join(
        f"sum(p{i}, over = [{', '.join(names)}])" if names else f"p{i}" for i, (names, _) in enumerate(ours)
    )
    sizes = ", ".join(f"{name} = {size}" for name, size in SIZES.items())
    text = f"axis batch = 1, {sizes}\nmodel m(x: [batch]) {{\n{params}\n  loss mean(x) * {total}\n}}\n"
    text += "train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }\n"
    text += f'weights w {{ {", ".join(f"p{i}" for i in range(len(ours)))} = "t" [{axes}] }}'
    spec, diagnostics = load_text(text)
    assert spec is not None, (text, [each.render() for each in diagnostics])
    (tensor,) = spec.weights["w"].tensors()
    turned = [p.permute([names.index(name) for name in order]) for (names, p), order in zip(ours, orders, strict=True)]
    inside = [t.reshape(*t.shape[:outer], -1, *t.shape[t.dim() - last :]) for t in turned]
    whole = torch.cat(inside, outer)
    wanted = whole.reshape(*whole.shape[:first], -1, *whole.shape[whole.dim() - last :])
    assert tensor.shape == wanted.shape
    theirs = torch.full(tensor.shape, torch.nan)
    for (_, own), part in zip(ours, tensor.parts, strict=True):
        seen_as_ours(theirs, part, tensor.joined).copy_(seen_as_theirs(own, part))
        assert torch.equal(seen_as_theirs(own, part), seen_as_ours(wanted, part, tensor.joined))
    assert torch.equal(theirs, wanted)


TWICE = """
axis batch = 4, embed = 8, out = 3
block net(x: [batch, embed]) {
  param g: [embed] ~ ones()
  repeat 2 as layer {
    param w: [embed, out] ~ normal(0.3)
    let x = tanh(x + dot(dot(x * g, w, over = embed), w, over = out))
  }
  return x
}
model m(x: [batch, embed]) {
  let policy = net(x)
  let reference = net(x)
  loss mean((policy - reference) * policy) + mean(policy)
}
optimizer some { freeze net_2  update all -> sgd(lr = 0.1) }
weights hf {
  m.net.layer.w, m.net_2.layer.w = "h.{layer}.w" [out, embed]
  m.net.g = "g" [embed]
  m.net_2.g = "g" [embed]
}
train { data = random()  optimizer = some  steps = 2  checkpoint = every(2)  precision = bf16 }
"""


def test_a_tensor_may_fill_several_parameters_and_the_first_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    """A policy, and its reference, which is frozen and so kept in bf16: as long as they are alike, nothing is said."""
    Path("m.par").write_text(TWICE)
    given = {"g": torch.rand(8), "h.0.w": torch.randn(3, 8), "h.1.w": torch.randn(3, 8)}
    save_file(given, "theirs/model.safetensors")
    status, out, _ = imported(capsys)
    assert status == 0
    assert re.search(r"^m\.net_2\.layer\.\{0\.\.1\}\.w +←  h\.\{0\.\.1\}\.w  F32\[3, 8\]  \[out, embed\]$", out, re.M)
    found = ours()
    for i in range(2):
        assert torch.equal(found[f"m.net.layer.{i}.w"], given[f"h.{i}.w"].T)
        assert torch.equal(found[f"m.net_2.layer.{i}.w"], given[f"h.{i}.w"].T.bfloat16())
    assert partita(capsys, "export", "run", "--as", "hf", "-o", "same")[::2] == (0, "")
    assert main(["run", "m.par", "--run-dir", "run", "--transport", "virtual"]) == 0
    capsys.readouterr()
    status, _, err = partita(capsys, "export", "run", "--as", "hf", "-o", "policy")
    assert status == 0
    assert "warning[W0809]: parameters that differ have one tensor in `weights`: of these, one is written\n" in err
    assert "  = g is m.net.g, and not m.net_2.g\n" in err
    assert "  = h.{0..1}.w is m.net.layer.{0..1}.w, and not m.net_2.layer.{0..1}.w\n" in err
    assert partita(capsys, "export", "run", "--as", "hf", "--only", "net_2", "-o", "reference")[::2] == (0, "")
    same, policy, reference = (load_file(f"{name}/model.safetensors") for name in ("same", "policy", "reference"))
    assert all(torch.equal(same[name], given[name]) for name in given)
    assert all(torch.equal(reference[name], given[name].bfloat16()) for name in given)
    assert not any(torch.equal(policy[name].bfloat16(), reference[name]) for name in given)


INTERLEAVED = """
axis batch = 4, embed = 4, heads = 2, key = 3, value = 5, ffn = 6, experts = 2

model m(x: [batch, embed]) {
  param gate, up: [experts, embed, ffn] ~ normal(0.5)
  repeat 2 as pair {
    param wq, wk: [embed, heads, key] ~ normal(0.1)
    param wv: [embed, heads, value] ~ normal(0.1)
    let scores = sum(dot(x, wq, over = embed) * dot(x, wk, over = embed), over = key)
    let x = x + sum(scores * sum(dot(x, wv, over = embed), over = value), over = heads)
  }
  loss mean(sum(dot(x, gate, over = embed) * dot(x, up, over = embed), over = experts))
}

train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }

weights hf {
  wq, wk, wv = "h.{2 * pair}.qkv" [heads * (key + key + value), embed]
  gate, up = "experts.{experts}.gate_up" [embed, ffn * + 1]
}
"""


def test_interleaved_tensors_of_several_files_come_in_and_go_out(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("m.par").write_text(INTERLEAVED)
    given = {f"h.{i}.qkv": torch.randn(2 * 11, 4) for i in (0, 2)}
    given |= {f"experts.{i}.gate_up": torch.randn(4, 12) for i in range(2)}
    save_file(given, "theirs/model.safetensors")
    names = sorted(given)
    shards({"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]})
    status, out, err = imported(capsys)
    assert (status, err) == (0, "")
    assert "F32[22, 4]  [heads * (key + key + value), embed]" in out
    assert "F32[4, 12]  [embed, ffn * + 1]" in out
    found = ours()
    assert torch.equal(found["m.gate"][1], given["experts.1.gate_up"][:, ::2])
    assert torch.equal(found["m.up"][1], given["experts.1.gate_up"][:, 1::2])
    assert torch.equal(found["m.pair.1.wv"], given["h.2.qkv"].view(2, 11, 4)[:, 6:].permute(2, 0, 1))
    assert partita(capsys, "export", "run", "--as", "hf", "--shard-size", "300B", "-o", "out")[0] == 0
    index = json.loads(Path("out/model.safetensors.index.json").read_text())["weight_map"]
    back = {name: load_file(f"out/{file}")[name] for name, file in index.items()}
    assert back.keys() == given.keys()
    assert all(torch.equal(back[name], given[name]) for name in given)


# ---------------------------------------------------------------- how much memory it takes

LARGE = """
axis batch = 1, rows = 1024, columns = 2048
model m(x: [batch, rows]) {
  repeat 40 as layer {
    param w: [rows, columns] ~ zeros()
    let x = x + dot(dot(x, w, over = rows), w, over = columns)
  }
  loss mean(x)
}
train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }
weights hf { m.layer.w = "h.{layer}" [columns, rows] }
"""
# Runs one command, and prints by how much its own memory (not that of files, which are mapped) grew at the most.
CHILD = """
import sys, threading, time
from partita.cli.main import main
import partita.runtime.checkpoint.foreign, partita.compiler.pipeline

def own():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

before, most, done = own(), [0], threading.Event()

def watch():
    while not done.is_set():
        most[0] = max(most[0], own())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
status = main(sys.argv[1:])
done.set()
thread.join()
assert status == 0
print("grew", (most[0] - before) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="it is read from /proc")
@pytest.mark.soak
def test_a_tensor_at_a_time_is_in_memory(folder: Path):
    """Of 320 MiB in f32, in tensors of 8 MiB; the code of both commands takes some 50."""
    Path("m.par").write_text(LARGE)
    save_file({f"h.{i}": torch.ones(2048, 1024, dtype=torch.bfloat16) for i in range(40)}, "theirs/model.safetensors")
    for arguments in (
        ["import", "run/checkpoints", "theirs", "m.par", "--as", "hf"],
        ["export", "run", "--as", "hf", "-o", "out"],
    ):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, "checkpoint", *arguments], capture_output=True, text=True, check=True
        )
        grew = int(child.stdout.split("grew ")[1])
        assert grew < 120, f"{arguments[0]} took {grew} MiB"
