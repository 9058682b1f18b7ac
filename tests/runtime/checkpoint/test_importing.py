"""What an import says and refuses: nothing is bound silently that could be bound in another way."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from partita.cli.importing import MOST_LINES
from partita.cli.main import main
from partita.compiler.graph import without_iterations
from partita.dsl.check.formulas import Size
from partita.dsl.diagnostic import Refused, shown
from partita.dsl.names.correspondence import Line, Pattern, Weights
from partita.dsl.names.weights import parameters_of
from partita.dsl.syntax.source import Source, Span
from partita.dsl.types import Axis, Type
from partita.runtime.checkpoint.checkpoints import load
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.exchange import weights_of
from partita.runtime.checkpoint.foreign import export_foreign
from partita.runtime.checkpoint.four_bits import Parameters
from partita.runtime.checkpoint.loading import Commit
from partita.runtime.checkpoint.matching import axes_of, own_axes
from partita.runtime.checkpoint.proposals import GUESS, OPEN, proposed
from partita.runtime.checkpoint.repeated import families, set_text
from partita.runtime.training import VirtualRun
from tests.marks import examples
from tests.runtime.checkpoint.runs import ONE_RANK, plan_of, same, tensors, trained

# Matrices that are square, in one axis of three, and in no way.
SQUARE = """
axis batch = 4, embed = 4, heads = 2, key = 2, ffn = 4, out = 3

model m(x: [batch, embed]) {
  param wq: [embed, heads, key] ~ normal(0.5)
  param gain: [embed] ~ ones()
  repeat 3 as layer {
    param up: [embed, ffn] ~ normal(0.5)
    param down: [ffn, embed] ~ normal(0.5)
    let x = x + dot(dot(x * gain, up, over = embed), down, over = ffn)
  }
  param last: [embed, out] ~ normal(0.5)
  let y = dot(x, wq, over = embed)
  loss mean(y) + mean(dot(x, last, over = embed))
}

train { data = random()  optimizer = sgd(lr = 0.1)  steps = 2 }
"""
SQUARES = {"up": "embed, ffn", "down": "ffn, embed"}
TENSORS = {
    "m.wq": (4, 2, 2),
    "m.gain": (4,),
    **{f"m.layer.{i}.{name}": (4, 4) for i in range(3) for name in ("up", "down")},
    "m.last": (4, 3),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `m.par` and `m.safetensors`, of its parameters, to be in."""
    monkeypatch.chdir(tmp_path)
    Path("m.par").write_text(SQUARE)
    write()
    return tmp_path


def write(changes: dict[str, torch.Tensor] | None = None) -> None:
    given = {name: torch.arange(prod(shape)).reshape(shape) / 100 for name, shape in TENSORS.items()}
    save_file(given | (changes or {}), "m.safetensors")


def partita(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["checkpoint", *arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


def words(text: str, first: str) -> list[str]:
    """The line that begins with a word, in words."""
    (line,) = (line.split() for line in text.splitlines() if line.split()[:1] == [first])
    return line


# ---------------------------------------------------------------- what was bound


def test_what_is_bound_to_what_is_shown_and_layers_once(folder: Path, capsys: pytest.CaptureFixture[str]):
    status, out, err = partita(capsys, "import", "new/checkpoints", "m.safetensors", "m.par")
    assert status == 0
    up = "m.layer.{0..2}.up"
    assert re.search(r"^m.last +←  m.last  F32\[4, 3\]  \[embed, out\]$", out, re.MULTILINE)
    assert " ".join(words(out, up)) == f"{up} ← {up} F32[4, 4] [embed, ffn] ?"
    assert words(out, "m.wq")[-4:] == ["[embed,", "heads,", "key]", "?"]
    assert "warning[W0807]: 7 tensors have axes of equal size, whose order in m.safetensors is ambiguous" in err
    assert "= m.wq: f32[embed=4, heads=2, key=2]\n" in err
    assert "= m.layer.{0..2}.down: f32[ffn=4, embed=4]\n" in err


def pasted(err: str, look: bool = True) -> list[str]:
    """Appends the declaration that a message proposes to `m.par`, and removes the marks of its guesses if someone has
    looked at them; returns the options that import under its names.
    """
    declaration = err[err.index("\nweights theirs {") :]
    with open("m.par", "a") as file:
        file.write(declaration.replace(GUESS, "") if look else declaration)
    return ["--as", "theirs"]


def added(err: str) -> None:
    """Adds the lines that a message lists to the declaration at the end of `m.par`."""
    lines = [line.strip()[2:] for line in err.splitlines() if line.strip().startswith("= ")]
    text = Path("m.par").read_text()
    Path("m.par").write_text("\n".join([text[: text.rindex("}")], *lines, "}"]))


def test_lines_that_are_proposed_settle_the_order(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Nothing is settled before someone has looked: what is a guess is proposed again."""
    status, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par", "--strict")
    assert status == 1
    assert '  # guess: m.layer.up = "m.layer.{layer}.up" [embed, ffn]\n' in err
    assert '\n  m.last = "m.last" [embed, out]\n' in err
    names = pasted(err, look=False)
    status, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par", *names)
    assert status == 1
    assert "error[E0809]: `weights theirs` says nothing of 7 parameters" in err
    assert '  = # guess: m.layer.up = "m.layer.{layer}.up" [embed, ffn]\n' in err
    added(err.replace(GUESS, ""))
    assert not Path("new").exists()
    text = Path("m.par").read_text()
    assert '\nm.layer.up = "m.layer.{layer}.up" [embed, ffn]\n' in text
    Path("m.par").write_text(text.replace('.up" [embed, ffn]', '.up" [ffn, embed]'))
    status, out, err = partita(capsys, "import", "new", "m.safetensors", "m.par", *names)
    assert (status, err) == (0, "")
    assert words(out, "m.layer.{0..2}.up")[-2:] == ["[ffn,", "embed]"]
    with Commit(Path("new"), read_manifest(Path("new"), 0)) as commit:
        assert torch.equal(commit.read("m.layer.1.up"), load_file("m.safetensors")["m.layer.1.up"].T)
        assert torch.equal(commit.read("m.layer.1.down"), load_file("m.safetensors")["m.layer.1.down"])


def test_what_goes_by_other_names_is_found_by_shape_and_likeness(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Axes merged and turned, twelve layers: their numbers are in the order of numbers, not of letters."""
    text = SQUARE.replace("repeat 3", "repeat 12").replace("ffn = 4", "ffn = 7")
    Path("m.par").write_text(text)
    theirs = {"q_proj.weight": torch.randn(4, 4), "norm": torch.randn(4), "head": torch.randn(3, 4)}
    for i in range(12):
        theirs |= {f"h.{i}.fc_up.weight": torch.randn(7, 4), f"h.{i}.down.weight": torch.randn(4, 7)}
    save_file(theirs, "m.safetensors")
    status, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par")
    assert status == 1
    assert "m.safetensors lacks 27 of 27 tensors\n" in err
    names = pasted(err)
    assert '  # guess: m.layer.up = "h.{layer}.fc_up.weight" [ffn, embed]\n' in err
    assert '\n  m.layer.down = "h.{layer}.down.weight" [embed, ffn]\n' in err
    assert '  # guess: m.wq = "q_proj.weight" [embed, heads * key]\n' in err
    status, out, err = partita(capsys, "import", "new", "m.safetensors", "m.par", *names)
    assert (status, err) == (0, "")
    assert " ".join(words(out, "m.wq")) == "m.wq ← q_proj.weight F32[4, 4] [embed, heads * key]"
    with Commit(Path("new"), read_manifest(Path("new"), 0)) as commit:
        assert torch.equal(commit.read("m.layer.11.up"), theirs["h.11.fc_up.weight"].T)
        assert torch.equal(commit.read("m.wq"), theirs["q_proj.weight"].view(4, 2, 2))


def test_what_is_called_like_nothing_is_left_to_be_said(folder: Path, capsys: pytest.CaptureFixture[str]):
    save_file({"x": torch.ones(3, 5), "m.last": torch.ones(4, 3)}, "m.safetensors")
    status, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par")
    assert status == 1
    assert '\n  # which? m.layer.up = "…" [embed, ffn]\n' in err
    assert "`# which?` needs a name of theirs: write it, and remove the mark" in err
    assert '\n  m.last = "m.last" [embed, out]\n' in err


def test_names_that_the_file_says_are_named_first(folder: Path, capsys: pytest.CaptureFixture[str]):
    """And what is said to help does."""
    names = {name: name.removeprefix("m.").replace("layer.", "layer.{layer}.") for name, _ in OWN}
    lines = [f'{name} = "{names[name]}" [{axes}]' for name, axes in OWN]
    Path("m.par").write_text(
        "\n".join([SQUARE, 'weights part { m.last = "head" [embed, out] }', "weights hf {", *lines, "}"])
    )
    tensors = load_file("m.safetensors")
    save_file({name.removeprefix("m."): tensor for name, tensor in tensors.items()}, "m.safetensors")
    status, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par")
    assert status == 1
    (help,) = (line for line in err.splitlines() if "help: `--as" in line)
    assert help == "  help: `--as hf` or `--as part` imports by the names that the .par file says in `weights`"
    assert partita(capsys, "import", "new", "m.safetensors", "m.par", "--as", "hf")[0] == 0


OWN = [
    ("m.wq", "embed, heads, key"),
    ("m.gain", "embed"),
    ("m.layer.up", "embed, ffn"),
    ("m.layer.down", "ffn, embed"),
    ("m.last", "embed, out"),
]

# ---------------------------------------------------------------- what names and shapes say

BLOCKS = ("attn", "mlp", "moe")
LEAVES = ("gain", "wq", "up", "w", "weight", "norm_1")
REPEATS = {"layer": 3, "tail": 3}
AXES = "abcd"


@st.composite
def renamed(draw) -> tuple[dict[str, Type], dict[str, tuple[int, ...]], dict[str, tuple[str, ...]], dict[str, str]]:
    """Parameters of a model, and tensors of theirs, which are called alike but for the usual: the shapes of these; for
    each parameter the axes of its tensor in their order, and its name.
    """
    sizes = draw(st.lists(st.sampled_from([2, 3, 4, 5, 6, 12]), min_size=4, max_size=4, unique=draw(st.booleans())))
    places = [(*repeat, *block) for repeat in ((), ("layer",), ("tail",)) for block in ((), *((b,) for b in BLOCKS))]
    paths = draw(
        st.lists(st.tuples(st.sampled_from(places), st.sampled_from(LEAVES)), unique=True, min_size=1, max_size=7)
    )
    prefix = draw(st.sampled_from(["", "model.", "module.base."]))
    lists = draw(
        st.sampled_from([("layer", "tail"), ("layers", "h"), ("decoder.layers", "decoder.tail"), ("h", "blocks")])
    )
    suffix = draw(st.sampled_from(["", ".weight"]))
    heads = draw(st.booleans())  # what no repeat has is without the prefix
    parameters, shapes, orders, names = {}, {}, {}, {}
    for number, (place, leaf) in enumerate(paths):
        own = draw(st.lists(st.sampled_from(AXES), unique=True, min_size=1, max_size=3))
        order = draw(st.sampled_from([own, own[::-1], own[1:] + own[:1]]))
        merged = draw(st.booleans()) and [own.index(name) for name in order[-2:]] == sorted(map(own.index, order[-2:]))
        type = Type("f32", tuple(Axis(name, sizes[AXES.index(name)]) for name in own))
        shape = tuple(type.axis(name).size for name in order)
        shape = (*shape[:-2], prod(shape[-2:])) if merged and len(shape) > 1 else shape
        strange = draw(st.sampled_from([False, False, False, True]))
        repeat = place[0] if place[:1] and place[0] in REPEATS else None
        for i in range(REPEATS[repeat] if repeat else 1):
            counted = [f"{part}.{i}" if part == repeat else part for part in place]
            theirs = [f"{lists[part == 'tail']}.{i}" if part == repeat else part for part in place]
            name = ".".join(["m", *counted, leaf])
            parameters[name], orders[name] = type, tuple(order)
            end = f"zz{number}" if strange else leaf
            names[name] = ("" if heads and not place else prefix) + ".".join([*theirs, end]) + suffix
            shapes[names[name]] = shape
    return parameters, dict(sorted(shapes.items())), orders, names


@given(renamed())
@examples(100)
def test_what_is_proposed_without_a_mark_is_right(model):
    """Whatever sizes are equal: the names are those of the parameter's own tensor, and the axes are in their order."""
    parameters, shapes, orders, names = model
    lines = proposed(parameters, shapes)
    for name in parameters:
        plain = without_iterations(name)
        (line,) = (each for each in lines if re.search(rf"(^|\s){re.escape(plain)} = ", each))
        if line.startswith("#"):
            assert any(mark in line for mark in (GUESS, OPEN))
            continue
        theirs, axes = re.fullmatch(r'\S+ = "([^"]*)" \[(.*)\]', line).groups()
        number = re.search(r"\.(\d+)\.", name)
        assert re.sub(r"\{\w+\}", number[1] if number else "", theirs) == names[name]
        assert tuple(re.split(r", | \* ", axes)) == orders[name]
    event(f"{sum(not line.startswith('#') for line in lines)} of {len(lines)} are certain")


def test_where_two_are_as_near_nothing_is_certain():
    """Two lists whose names both differ, and a part of a path that only ours has."""
    type = Type("f32", (Axis("embed", 3),))
    names = [f"m.{place}.gain" for place in ("down.0", "down.1", "up.0", "up.1", "attn", "mlp")]
    theirs = {"a.0.gain": (3,), "a.1.gain": (3,), "b.0.gain": (3,), "b.1.gain": (3,), "gain": (3,)}
    lines = proposed(dict.fromkeys(names, type), theirs)
    assert sorted(line[: len(GUESS)] for line in lines) == [GUESS, GUESS, GUESS, OPEN]


@pytest.mark.parametrize("prefix", ["", "model.", "a.b."])
@pytest.mark.parametrize("repeat", ["layer", "layers", "h", "transformer.h"])
def test_what_is_called_alike_is_certain(prefix: str, repeat: str):
    types = {"up": (3, 5), "down": (5, 3), "gain": (3,)}
    parameters, shapes = {}, {}
    for place, theirs in [
        ("", ""),
        *((f"layer.{i}.{block}.", f"{repeat}.{i}.{block}.") for i in range(12) for block in BLOCKS),
    ]:
        for leaf, sizes in types.items():
            axes = tuple(Axis({3: "embed", 5: "ffn"}[size], size) for size in sizes)
            parameters[f"m.{place}{leaf}"] = Type("f32", axes)
            shapes[f"{prefix}{theirs}{leaf}.weight"] = sizes[::-1]
    lines = proposed(parameters, dict(sorted(shapes.items())))
    assert len(lines) == 12
    assert f'm.layer.moe.up = "{prefix}{repeat}.{{layer}}.moe.up.weight" [ffn, embed]' in lines
    assert not [line for line in lines if line.startswith("#")]


def test_a_missing_line_is_proposed_for_a_declaration(folder: Path, capsys: pytest.CaptureFixture[str]):
    tensors = load_file("m.safetensors")
    save_file({name.replace("m.last", "lm_head"): tensor for name, tensor in tensors.items()}, "m.safetensors")
    lines = [f'{name} = "{name}" [{axes}]' for name, axes in (("m.wq", "embed, heads, key"), ("m.gain", "embed"))]
    lines += [f'm.layer.{name} = "m.layer.{{layer}}.{name}" [{axes}]' for name, axes in SQUARES.items()]
    lines += ['m.last = "m.last" [embed, out]']
    Path("m.par").write_text("\n".join([SQUARE, "weights own {", *lines, "}"]))
    status, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par", "--as", "own")
    assert status == 1
    assert 'help: in `weights own`, is it `m.last = "lm_head" [embed, out]`?' in err


@pytest.mark.parametrize(
    ("sizes", "shape", "axes"),
    [
        ((2, 3), (3, 2), (("b",), ("a",))),
        ((2, 3), (6,), (("a", "b"),)),
        ((2, 3, 5), (5, 6), (("c",), ("a", "b"))),
        ((2, 3), (1, 3, 2), ((), ("b",), ("a",))),
        ((1, 3), (3,), None),
        ((), (), ()),
        ((2, 3), (2, 2), None),
        ((4, 3), (2, 6), None),
    ],
)
def test_axes_that_give_a_shape(sizes: tuple[int, ...], shape: tuple[int, ...], axes: object):
    type = Type("f32", tuple(Axis("abc"[i], size) for i, size in enumerate(sizes)))
    found = axes_of(type, shape)
    if axes is None and found is not None:  # an axis of size one is with another
        assert sorted(name for group in found for name in group) == list(type.names)
        assert 1 in sizes
    else:
        assert found == axes


def test_strictly_all_that_is_open_is_refused_at_once(folder: Path, capsys: pytest.CaptureFixture[str]):
    write({f"more.{i}.bias": torch.ones(1) for i in range(20)})
    status, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par", "--strict")
    assert status == 1
    assert "error[E0811]: 20 tensors are not used in m.safetensors\n  = more.{0..19}.bias\n" in err
    assert "error[E0812]: 7 tensors have axes of equal size" in err
    assert not Path("new").exists()


def test_a_matrix_that_stands_transposed_is_refused_with_the_line_that_turns_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    last = load_file("m.safetensors")["m.last"]
    write({"m.last": last.T.contiguous()})
    status, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par")
    assert status == 1
    assert "= m.last is F32[3, 4], but m.last: f32[embed=4, out=3] needs [4, 3]\n" in err
    assert '\n  m.last = "m.last" [out, embed]\n' in err
    names = [*pasted(err)]
    assert partita(capsys, "import", "new", "m.safetensors", "m.par", *names)[0] == 0
    with Commit(Path("new"), read_manifest(Path("new"), 0)) as commit:
        assert torch.equal(commit.read("m.last"), last)


def test_what_is_missing_in_every_layer_is_named_once(folder: Path, capsys: pytest.CaptureFixture[str]):
    there = load_file("m.safetensors")
    save_file({name: tensor for name, tensor in there.items() if not name.endswith(".up")}, "m.safetensors")
    _, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par")
    assert "lacks 3 of 9 tensors\n  = m.layer.{0..2}.up\n" in err
    Path("m.par").write_text(SQUARE + 'weights other { m.layer.up = "h.{layer}.w" [embed, ffn] }')
    _, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par", "--as", "other", "--only", "up")
    assert "  = h.{0..2}.w   (m.layer.{0..2}.up)\n" in err


def test_json_has_every_tensor(folder: Path, capsys: pytest.CaptureFixture[str]):
    write({"other": torch.ones(1)})
    status, out, _ = partita(capsys, "import", "new", "m.safetensors", "m.par", "--json")
    assert status == 0
    found = json.loads(out)
    assert {part["name"] for each in found["tensors"] for part in each["parameters"]} == set(TENSORS)
    (wq,) = (each for each in found["tensors"] if each["from"] == "m.wq")
    (part,) = wq["parameters"]
    assert (part["axes"], wq["ambiguous"]) == ([["embed"], ["heads"], ["key"]], ["heads", "key"])
    assert found["unused"] == ["other"]


@pytest.mark.soak
def test_of_many_names_that_do_not_repeat_some_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]):
    count = 2 * MOST_LINES
    body = "\n".join(f"  param p{i}: [features] ~ ones()\n  let x = x + p{i}" for i in range(count))
    train = "train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }"
    model = f"axis batch = 2, features = 2\nmodel m(x: [batch, features]) {{\n{body}\n  loss mean(x)\n}}\n"
    Path("m.par").write_text(model + train)
    unused = {f"u{i}": torch.ones(1) for i in range(10_000)}
    save_file({f"m.p{i}": torch.ones(2) for i in range(count)} | unused, "m.safetensors")
    status, out, _ = partita(capsys, "import", "new", "m.safetensors", "m.par")
    assert status == 0
    assert len(out.splitlines()) < MOST_LINES + 12
    assert f"and {count - MOST_LINES} more; --json lists them all" in out
    assert "  and 9,992 more; --json lists them all" in out


# ---------------------------------------------------------------- names that repeat


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("l.0.a", "h.0.b"), ("l.1.a", "h.1.b"), ("l.2.a", "h.2.b")], [("l.{0..2}.a", "h.{0..2}.b")]),
        # What is out of order shows.
        ([("l.0", "h.1"), ("l.1", "h.0")], [("l.0", "h.1"), ("l.1", "h.0")]),
        ([("l.0", "h.4"), ("l.1", "h.5")], [("l.{0..1}", "h.{4..5}")]),
        ([("pair.0", "h.0"), ("pair.1", "h.2")], [("pair.0", "h.0"), ("pair.1", "h.2")]),
        ([("l.0.e.0", "e.0.l.0"), ("l.0.e.1", "e.1.l.0"), ("l.1.e.0", "e.0.l.1"), ("l.1.e.1", "e.1.l.1")], None),
        ([(f"l.{i}.e.{j}", f"{j}") for i, j in ((0, 0), (0, 1), (1, 0), (1, 2))], None),
        ([("w1", "w1"), ("w2", "w2")], [("w1", "w1"), ("w2", "w2")]),
        ([("l.00", "x.00"), ("l.01", "x.01")], [("l.00", "x.00"), ("l.01", "x.01")]),
    ],
)
def test_only_what_follows_is_taken_together(rows: list[tuple[str, str]], expected: list[tuple[str, str]] | None):
    found = families((row, None) for row in rows)
    assert sum(each.count for each in found) == len(rows)
    if expected is not None:
        assert [each.names for each in found] == expected
    assert sorted(row for each in found for row in read(each.names, each.count)) == sorted(rows)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), unique_by=(lambda row: row[:2], lambda row: row[2:]), max_size=16))
def test_a_family_is_exactly_its_rows_in_order(numbers: list[tuple[int, int, int, int]]):
    """Whoever reads the ranges side by side reads the rows that were given, and no others."""
    rows = [(f"a.{i}.b.{j}", f"c.{k}.d.{m}") for i, j, k, m in numbers]
    found = families((row, None) for row in rows)
    assert sorted(row for each in found for row in read(each.names, each.count)) == sorted(rows)


def read(names: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """The rows of a family, its names read side by side as a shell reads braces."""

    def numbers(text: str) -> list[int]:
        bounds = text.strip("{}").split("..")
        if len(bounds) == 3:
            return list(range(int(bounds[0]), int(bounds[1]) + 1, int(bounds[2])))
        runs = [piece.split("..") for piece in text.strip("{}").split(",")]
        return [n for run in runs for n in range(int(run[0]), int(run[-1]) + 1)]

    def choices(name: str) -> list[str]:
        parts = re.split(r"(\{[^}]*\})", name)
        return ["".join(each) for each in product(*([p] if p[:1] != "{" else map(str, numbers(p)) for p in parts))]

    columns = [choices(name) for name in names]
    assert {len(column) for column in columns} == {count}
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([7], "7"), ([0, 1, 2], "{0..2}"), ([0, 2, 4], "{0..4..2}"), ([0, 1, 5], "{0..1,5}"), ([3, 9], "{3,9}")],
)
def test_sets_of_numbers(numbers: list[int], text: str):
    assert set_text(numbers) == text


# ---------------------------------------------------------------- how to train from it


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("directory", "checkpoint", "entry"),
    [
        ("new/checkpoints", None, "checkpoint = every(100)"),
        ("runs/m/checkpoints", None, "checkpoint = every(100)"),
        ("new/checkpoints", "every(7)", None),
        ("runs/m/checkpoints", "every(7)", None),
        ("weights/old", "every(7, keep = 5)", 'checkpoint = every(7, dir = "weights/old", keep = 5)'),
        ("weights/old", 'every(7, dir = "weights/old")', None),
        ("new/checkpoints", 'every(7, dir = "weights/old", keep = 5)', "checkpoint = every(7, keep = 5)"),
        ("../elsewhere/it's new", "every(7)", None),
        ("../elsewhere/new", None, "checkpoint = every(100)"),
    ],
)
def test_what_is_said_to_train_from_it_does(
    directory: str, checkpoint: str | None, entry: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """The entry put into the file and the commands given, a run begins with what was imported."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    text = SQUARE if checkpoint is None else SQUARE.replace("steps = 2", f"steps = 2  checkpoint = {checkpoint}")
    Path("m.par").write_text(text)
    write()
    status, out, _ = partita(capsys, "import", directory, "m.safetensors", "m.par", "batch=8")
    assert status == 0
    lines = [line.strip() for line in out.splitlines()]
    lines = lines[lines.index("to train from this checkpoint") + 1 :]
    entries = [line for line in lines if line.startswith("checkpoint = ")]
    assert entries == ([f"{entry}    in the train block of m.par"] if entry else [])
    if entry:
        Path("m.par").write_text(SQUARE.replace("steps = 2", f"steps = 2  {entry}"))
    for line in lines:
        if line.startswith("mkdir"):
            assert os.system(line) == 0
    assert "batch=8" in shlex.split(lines[-1])
    assert main([*shlex.split(lines[-1])[1:], "--transport", "virtual"]) == 0
    assert "step 0/2  resumed from " in capsys.readouterr().out


CONSTANT = """
axis batch = 8, embed = 4, ffn = 8

model m(x: [batch, embed]) {
  param gain: [embed] ~ ones()
  param up: [embed, ffn] ~ constant(0.5)
  param down: [ffn, embed] ~ constant(-0.25)
  let y = dot(tanh(dot(x * gain, up, over = embed)), down, over = ffn)
  loss mse(y, 2 * x)
}

mesh cluster(data = 2)
layout split on cluster { shard batch -> data }
layout _zero on cluster { shard batch -> data  shard state -> data }

optimizer _mixed {
  freeze gain
  update up -> muon(lr = 0.1)
  update all -> adamw_8bit(lr = 0.1)
}

train { data = random()  layout = split  optimizer = adamw(lr = 0.1)  steps = 4  checkpoint = every(4) }
"""


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.optimizer=sgd(lr = 0.1)", "train.seed=3"],
        ["train.optimizer=sgd(lr = 0.1, momentum = 0.9)", "layout=_zero"],
        ["train.optimizer=lion(lr = 0.1)", "train.ema=0.5"],
        ["train.optimizer=adafactor(lr = 0.1)", "train.clip=1.0"],
        ["train.optimizer=_mixed", "layout=_zero", "train.ema=0.9"],
        ["train.sync=delayed(1)"],
        ["train.sync=paired()", "train.optimizer=lion(lr = 0.1)"],
        ["train.sync=local(groups = 2, every = 2, outer = nesterov(lr = 0.7, momentum = 0.9))"],
        ["train.precision=bf16", "train.optimizer=_mixed"],
    ],
)
def test_any_optimizer_begins_with_what_was_imported_as_with_initial_values(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Bit for bit what a run becomes that begins with the same numbers, and without a word on settings."""
    monkeypatch.chdir(tmp_path)
    Path("m.par").write_text(CONSTANT)
    given = {"m.gain": torch.ones(4), "m.up": torch.full((4, 8), 0.5), "m.down": torch.full((8, 4), -0.25)}
    save_file(given, "m.safetensors")
    assert partita(capsys, "import", "run/checkpoints", "m.safetensors", "m.par")[0] == 0
    assert "optimizer   none" in partita(capsys, "show", "run")[1]
    for directory in ("run", "fresh"):
        assert main(["run", "m.par", *overrides, "--run-dir", directory, "--transport", "virtual"]) == 0
        output = capsys.readouterr()
        assert "W0804" not in output.err
        assert ("resumed from" in output.out) == (directory == "run")
    places = [Path("run/checkpoints"), Path("fresh/checkpoints")]
    one, other = (Commit(place, read_manifest(place, 4)) for place in places)
    with one, other:
        assert one.manifest.tensors == other.manifest.tensors
        assert len(one.manifest.tensors) > len(given) or "sgd(lr = 0.1)" in str(overrides)
        assert all(torch.equal(one.read(each.name), other.read(each.name)) for each in one.manifest.tensors)
        assert not torch.equal(one.read("m.up"), given["m.up"])


def test_a_rewind_to_what_was_imported_forgets_what_was_trained(folder: Path, capsys: pytest.CaptureFixture[str]):
    """On all ranks: states are as before the first step, whatever they have become."""
    plan = plan_of("train.ema=0.5", "train.optimizer=adamw(lr = 0.1)", text=CONSTANT)
    Path("m.par").write_text(CONSTANT)
    save_file({name: t + 1 for name, t in VirtualRun(plan).parameters().items()}, "m.safetensors")
    assert partita(capsys, "import", "run", "m.safetensors", "m.par")[0] == 0
    run = VirtualRun(plan)
    for rank in run.ranks:
        for tensor in (*rank.memory.masters.values(), *rank.memory.states.values()):
            tensor.fill_(7)
        with Commit(Path("run"), read_manifest(Path("run"), 0)) as commit:
            load(rank, commit)
    given = load_file("m.safetensors")
    expected = {name: given[name.rpartition("/")[2]] for name in tensors(run)}
    kept = [name for name in expected if "/" in name and not name.startswith("ema/")]
    assert len(kept) == 6
    same(tensors(run), expected | {name: torch.zeros_like(expected[name]) for name in kept})


def test_means_of_what_was_imported_are_its_parameters(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert partita(capsys, "import", "run", "m.safetensors", "m.par")[0] == 0
    for weights in ("trained", "ema"):
        assert partita(capsys, "export", "run", "-o", f"{weights}.safetensors", "--weights", weights)[0] == 0
    assert Path("ema.safetensors").read_bytes() == Path("trained.safetensors").read_bytes()


@pytest.mark.parametrize("first", ["run/checkpoints", "run"])
def test_nothing_is_imported_beside_checkpoints(first: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    """Nor into a run's directory, where it would be taken for what the run has saved."""
    assert partita(capsys, "import", first, "m.safetensors", "m.par")[0] == 0
    status, _, err = partita(capsys, "import", "run", "m.safetensors", "m.par")
    assert (status, f"error[E0802]: {first} already has checkpoints" in err) == (1, True)


def test_an_override_does_not_hide_the_entry_that_is_wanted(folder: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint = 'train.checkpoint=every(7, dir = "other")'
    status, out, _ = partita(capsys, "import", "new/checkpoints", "m.safetensors", "m.par", "batch=8", checkpoint)
    assert status == 0
    assert "checkpoint = every(7, keep = 3)    in the train block of m.par" in out
    assert out.splitlines()[-1] == "  partita run m.par batch=8 --run-dir new"


# ---------------------------------------------------------------- numbers

NAN, INF, LARGE = float("nan"), float("inf"), torch.full((4, 3), 1e300, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("m.gain", torch.tensor([1.0, NAN, 2.0, -INF]), "2 of 4 numbers are not finite as f32, the first at [1]: nan"),
        ("m.last", LARGE, "12 of 12 numbers are not finite as f32, the first at [0, 0]: 1e+300"),
        (
            "m.gain",
            torch.tensor([1, 2, 3, INF]).bfloat16(),
            "1 of 4 numbers are not finite as f32, the first at [3]: inf",
        ),
    ],
)
def test_numbers_that_cannot_be_trained_from_are_refused(
    name: str, tensor: torch.Tensor, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    write({name: tensor})
    status, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par")
    assert status == 1
    assert f"error[E0813]: m.safetensors has numbers that cannot be trained from\n  = {name}: {told}" in err
    assert not Path("new").exists()


def test_a_scalar_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    train = "train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }"
    Path("m.par").write_text(
        f"axis batch = 2\nmodel m(x: [batch]) {{ param s: [] ~ ones()  loss mean(x) * s }}\n{train}\n"
    )
    save_file({"m.s": torch.tensor(float("nan"))}, "m.safetensors")
    status, _, err = partita(capsys, "import", "new", "m.safetensors", "m.par")
    assert status == 1
    assert "m.s: 1 of 1 numbers are not finite as f32, the first at []: nan" in err
    save_file({"m.s": torch.tensor(2.0)}, "m.safetensors")
    assert partita(capsys, "import", "new", "m.safetensors", "m.par")[0] == 0


# ---------------------------------------------------------------- names of strangers

FORGED = "x\nm.par: ok\n\x1b[2J\u202e"


@pytest.mark.soak
def test_a_name_makes_no_line_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Wherever it is shown: unused, bound, missing, proposed, of a wrong shape, and as that of a number."""
    escaped = "x\\nm.par: ok\\n\\x1b[2J\\u202e"
    name = FORGED.replace("\n", "\\n")
    declared = f'{SQUARE}weights other {{ m.last = "{name}" [embed, out] }}'
    bound = ["--as", "other", "--only", "last"]
    last = torch.zeros(4, 3)
    cases: list[tuple[dict[str, torch.Tensor] | None, list[str]]] = [
        ({FORGED: torch.ones(1)}, []),
        ({FORGED: torch.ones(1)}, ["--strict"]),
        (None, []),
        ({FORGED: last}, bound),
        ({"x": last}, bound),
        ({FORGED: last.T.contiguous()}, bound),
        ({FORGED: last / 0}, bound),
    ]
    for changes, options in cases:
        Path("m.par").write_text(declared if options else SQUARE)
        if changes is None or options == bound:
            save_file(changes or {FORGED: last}, "m.safetensors")
        else:
            write(changes)
        shutil.rmtree("new", ignore_errors=True)
        _, out, err = partita(capsys, "import", "new", "m.safetensors", "m.par", *options)
        together = out + err
        assert escaped in together
        assert "\nm.par: ok" not in together
        assert not set(together) & {"\x1b", "\u202e"}


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_shown_is_one_line_and_stays_as_it_is(text: str):
    assert shown(text).isprintable()
    assert shown(shown(text)) == shown(text)
    if text.isprintable():
        assert shown(text) == text


def test_a_manifest_makes_no_line_of_its_own(saved: Path, capsys: pytest.CaptureFixture[str]):
    from tests.runtime.checkpoint.test_damage import changed

    def forge(manifest: dict) -> None:
        manifest.update(layout="a\nforged", schedule="b\nforged")
        manifest["settings"] = {"c\nforged": "d\nforged"}
        manifest["written_by"] = "e\nforged"

    changed(saved, 2, forge)
    for arguments in (["ls", str(saved)], ["show", str(saved)]):
        out = partita(capsys, *arguments)[1]
        assert "forged" in out
        assert not [line for line in out.splitlines() if line.startswith("forged")]
    resumed = trained(plan_of("train.steps=2", *ONE_RANK), saved.parent)
    assert all(len(note.splitlines()) == 1 for each in resumed.said for note in each.notes)
    assert "W0804" in resumed.codes


# ---------------------------------------------------------------- what export writes


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    trained(plan_of("train.steps=2", *ONE_RANK), directory)
    return directory / "checkpoints"


@pytest.fixture
def saved(once: Path, tmp_path: Path) -> Path:
    shutil.copytree(once, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


@pytest.mark.soak
@given(name=st.text(st.characters(exclude_categories=()), min_size=1, max_size=20))
@example("__metadata__")
@example("\ud800")
@example("\ud83d\ude00")
@example("\0")
@examples(12)
def test_what_is_exported_can_be_loaded_under_any_name_or_is_refused(once: Path, name: str):
    """The name of one tensor, and then a part of those of several."""
    out = once.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    with Commit(once, read_manifest(once, 2)) as commit:
        try:
            export_foreign(parameters(commit), out, named(name), only=["wte", "up"])
        except Refused:
            assert name == "__metadata__" or not is_text(name)
            return
        found = load_file(out / "model.safetensors")
        assert found.keys() == {name, *(f"{name}.{i}" for i in range(4))}
        assert torch.equal(found[name], commit.read("m.wte"))
        assert torch.equal(found[f"{name}.3"], commit.read("m.layer.3.mlp.up"))


def parameters(commit: Commit) -> Parameters:
    return Parameters(commit, weights_of(commit.manifest, "trained"), {})


def named(name: str) -> Weights:
    """A declaration that names a parameter so, and calls others of several layers by it and their number."""
    span, parameters = Span(Source("m.par", ""), 0, 0), parameters_of(plan_of(*ONE_RANK).spec.trained[0])
    (wte,) = (each for each in parameters if each.name == "m.wte")
    (up,) = (each for each in parameters if each.name.endswith(".up"))
    lines = [
        Line((each,), (Pattern(parts, span),), (own_axes(each.type),), None, (), span)
        for each, parts in ((wte, (name,)), (up, (f"{name}.", Size("layer", 4))))
    ]
    return Weights("other", "m", tuple(lines), (), span)


def is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@pytest.mark.soak
def test_names_that_are_longer_than_can_be_read_are_refused(once: Path):
    with (
        Commit(once, read_manifest(once, 2)) as commit,
        pytest.raises(Refused, match="more than the 100,000,000 bytes"),
    ):
        export_foreign(parameters(commit), once.parent / "long", named("x" * 26_000_000), only=["wte", "up"])
    assert not (once.parent / "long").exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "link to nothing", "directory"])
def test_nothing_but_a_file_is_replaced(
    kind: str, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A name that leads to a device is a link, as /dev/stdout is; a device itself cannot be made here."""
    place, there = saved.parent / "place", saved.parent / "there"
    there.write_text("kept")
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind != "device":
        place.symlink_to("there" if kind == "link" else "nothing")
    else:
        place = Path("/dev/null")
        if os.access("/dev", os.W_OK):
            # Should it not be refused, nothing may come of it.
            monkeypatch.setattr(os, "rename", lambda *_, **__: pytest.fail("the device was replaced"))
    status_before = os.lstat(place)
    status, _, err = partita(capsys, "export", str(saved), "-o", str(place))
    assert status == 2
    assert f"partita: cannot write {place}: " in err
    assert os.lstat(place).st_ino == status_before.st_ino
    assert there.read_text() == "kept"
    assert not (saved.parent / "nothing").exists()
    assert not [name for name in os.listdir(saved.parent) if name.startswith(".")]


def test_a_file_is_replaced(saved: Path, capsys: pytest.CaptureFixture[str]):
    out = saved.parent / "m.safetensors"
    assert partita(capsys, "export", str(saved), "-o", str(out), "--states")[0] == 0
    assert len(load_file(out)) > 10
    assert partita(capsys, "export", str(saved), "-o", str(out))[0] == 0
    assert len(load_file(out)) == 10
