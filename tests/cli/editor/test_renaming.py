"""Other names, everywhere where they are meant, in all files: what they are in is the same program as before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.cli.editor.renaming import everywhere, rename
from partita.cli.editor.workspace import Workspace, World, replaced
from partita.compiler.pipeline import compile_spec
from partita.compiler.text.graph import graph_text
from partita.compiler.text.partitioned import stages_text
from partita.compiler.text.sharded import sharded_text
from partita.dsl.load import load, load_text
from partita.dsl.names.occurrences import Occurrence
from partita.dsl.syntax import tree
from tests.files import SPECS
from tests.marks import soak
from tests.programs import Program, programs, sharded_programs

OTHER = "_qq"  # behind a name, makes it another one
# Names that something outside goes by, and those that a path has for several things.
REFUSED = re.compile("is an input of a model|is the axis of the batch|means something else too")


def workspace(files: dict[str, str], folder: Path) -> Workspace:
    """Files on disk, in the folder of an editor."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Workspace(folders=[str(folder.resolve())])


def declarations(world: World) -> list[Occurrence]:
    """The names that the first file declares."""
    source = world.files[0].file.span.source
    return [each for each in world.names.occurrences if each.name.span.source is source and each.name is each.declared]


def at(text: str, word: str, nth: int = 0) -> tuple[int, int]:
    """Line and column of a word in a text."""
    start = -1
    for _ in range(nth + 1):
        start = text.index(word, start + 1)
    return text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)


def renamed(files: Workspace, path: str, line: int, column: int, to: str) -> dict[str, str]:
    """The texts of files, by path, with another name."""
    name = rename(files, path, line, column, to)
    return {file: replaced(files.text(file), starts, name.name, to) for file, starts in name.by_file().items()}


@contextmanager
def refused_or_not() -> Iterator[None]:
    """A name that cannot be renamed is refused for one of the known reasons."""
    try:
        yield
    except ValueError as error:
        if not REFUSED.search(str(error)):
            raise


def forms(files: Workspace, path: str) -> tuple[str, ...]:
    """What a file compiles to, and its weights."""
    spec, diagnostics = load_text(files.text(path), path, path=path, reader=files.reader())
    assert spec is not None, diagnostics[0].render()
    state = compile_spec(spec)
    tensors = [each for weights in spec.weights.values() for each in weights.tensors()]
    lines = [f"{each.names} {each.parts}" for each in tensors]
    texts = graph_text(state.step), sharded_text(state.sharded), stages_text(state.partitioned), "\n".join(lines)
    return tuple(map(numbered, texts))


def numbered(form: str) -> str:
    """A form with the names of before. Values that are called the same are numbered as they come: a metric, which keeps
    its name, may be called like a tensor that does not.
    """
    called: dict[str, dict[str, int]] = {}

    def number(found: re.Match[str]) -> str:
        name = found[1].replace(OTHER, "")
        same = called.setdefault(name, {})
        return f"{name}~{same.setdefault(found[0], len(same))}"

    return re.sub(r"(\w+\.[\w.]+)(~\d+)?", number, form).replace(OTHER, "")


QUICK = SPECS / "tiny.par"
OTHERS = sorted(set(SPECS.rglob("*.par")) - {QUICK})


@pytest.mark.soak
@pytest.mark.parametrize("path", [QUICK, *OTHERS], ids=lambda path: path.stem)
def test_with_other_names_a_file_is_the_same_program(path: Path) -> None:
    """All names, one after the other: what is left of a name would be an error, or another program."""
    before = files = Workspace().changed({str(path): path.read_text()})
    kinds = set()
    for number in range(len(declarations(files.world(str(path))))):
        each = declarations(files.world(str(path)))[number]
        span = each.name.span
        with refused_or_not():
            files = files.changed(renamed(files, str(path), span.line, span.column, each.name.text + OTHER))
            kinds.add(each.kind)
    declared = {each.kind for each in declarations(files.world(str(path)))}
    assert {"axis", "tensor", "parameter"} & declared <= kinds
    assert files.text(str(path)).replace(OTHER, "") == before.text(str(path))
    if any(isinstance(each, tree.Train) for each in files.world(str(path)).files[0].file.declarations):
        assert forms(files, str(path)) == forms(before, str(path))


@pytest.mark.parametrize("examples", [2, *soak(300)])
def test_a_random_program_is_the_same_with_another_name(examples: int) -> None:
    @given(program=programs() if examples < 10 else sharded_programs(), which=st.integers(0, 10_000))
    @settings(max_examples=examples, deadline=None)
    def same(program: Program, which: int) -> None:
        path = "/nowhere/m.par"
        before = files = Workspace().changed({path: program.text})
        names = declarations(files.world(path))
        each = names[which % len(names)]
        span = each.name.span
        with refused_or_not():
            files = files.changed(renamed(files, path, span.line, span.column, each.name.text + OTHER))
        assert forms(files, path) == forms(before, path)

    same()


# ---------------------------------------------------------------- several files

BLOCKS = """axis embed = 8, ffn = 16

block mlp(x: [batch, embed]) {
  param up: [embed, ffn] ~ normal(0.02)   # up, not embed
  param down: [ffn, embed] ~ normal(0.02)
  return x + dot(gelu(dot(x, up, over = embed)), down, over = ffn)
}
"""
MAIN = """import "parts/blocks.par"

axis batch = 4, embed = 4
const layers = 2

model m(x: [batch, embed], y: [batch, embed]) {
  repeat layers as layer {
    let x = mlp(mlp(x = x))
  }
  loss mse(x, y)
}

mesh cluster(data = 2, pipe = 2)

layout split on cluster {
  shard batch -> data
  shard mlp.up: ffn -> data
  shard param -> data
  stage layer -> pipe
  recompute layer.mlp, mlp_2
}

optimizer mixed {
  update mlp_2.up, m.layer.mlp.down -> sgd(lr = 0.1)
  update all -> adamw(lr = 1e-3)
}

train { model = m layout = split data = random() optimizer = mixed steps = 2 }

weights theirs {
  mlp.up = "layers.{layer}.0.up.{ffn}" [embed]
  mlp_2.up = "layers.{layer}.{layers}.up" [embed, ffn]
  mlp.down = "layers.{layer}.0.embed" [ffn, embed]
  mlp_2.down = "layers.{layer}.{layers}.embed" [ffn, embed]
}
"""
FILES = {"main.par": MAIN, "parts/blocks.par": BLOCKS}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("file", "word", "nth", "to", "main", "blocks"),
    [
        ("main.par", "mlp", 0, "ffw", 11, 1),
        ("main.par", "mlp_2.up", 0, "ffw", 11, 1),
        ("parts/blocks.par", "mlp", 0, "ffw", 11, 1),
        ("parts/blocks.par", "up", 0, "wide", 4, 2),
        ("main.par", "up: ffn", 0, "wide", 4, 2),
        ("main.par", "embed", 0, "width", 7, 5),
        ("parts/blocks.par", "ffn", 0, "hidden", 5, 4),
        ("main.par", "layers", 0, "depth", 4, 0),
        ("main.par", "layer {", 0, "turn", 8, 0),
        ("parts/blocks.par", "x:", 0, "given", 1, 3),
        ("main.par", "split", 0, "spread", 2, 0),
        ("main.par", "data", 0, "dp", 4, 0),
        ("main.par", "mixed", 0, "rules", 2, 0),
        ("main.par", "x:", 0, "z", 4, 0),
    ],
)
def test_a_name_in_all_files(file: str, word: str, nth: int, to: str, main: int, blocks: int, tmp_path: Path) -> None:
    """`main` and `blocks` are how often it stands in the two files; never in strings and comments."""
    files = workspace(FILES, tmp_path)
    path = str(tmp_path.resolve() / file)
    before = load(tmp_path / "main.par")[1]
    assert not [each for each in before if each.severity == "error"], [each.render() for each in before]
    line, column = at(FILES[file], word, nth)
    name = rename(files, path, line, column, to)
    places = [Path(each).name for each, _ in name.places]
    assert (places.count("main.par"), places.count("blocks.par")) == (main, blocks)
    for each, text in renamed(files, path, line, column, to).items():
        Path(each).write_text(text)
    assert [each.code for each in load(tmp_path / "main.par")[1]] == [each.code for each in before]
    text = (tmp_path / "main.par").read_text() + (tmp_path / "parts" / "blocks.par").read_text()
    assert "# up, not embed" in text
    assert '.embed"' in text
    assert 'parts/blocks.par"' in text


def test_axes_of_joined_parameters_are_renamed(tmp_path: Path) -> None:
    """Before the `+`, and in a sum that is a factor."""
    text = (
        "axis batch = 1, heads = 2, key = 3, states = 5\n"
        "model m(x: [batch]) {\n  param a, b: [heads, key] ~ ones()\n  param c: [heads, states] ~ ones()\n"
        "  loss mean(x) * sum(a * b, over = [heads, key]) * sum(c, over = [heads, states])\n}\n"
        "train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }\n"
        'weights one { a, b = "ab" [heads * + key] }\nweights two { a, c = "ac" [heads * (key + states)] }\n'
    )
    files = workspace({"main.par": text}, tmp_path)
    path = str(tmp_path.resolve() / "main.par")
    for word, to in (("heads", "h"), ("states", "s")):
        assert renamed(files, path, *at(text, word), to)[path] == text.replace(word, to)


def test_files_that_are_open_count_as_they_are(tmp_path: Path) -> None:
    """Two files that import a third share its names; the third is open and has one line more."""
    other = 'import "parts/blocks.par"\naxis batch = 1\n'
    files = workspace({**FILES, "other.par": other}, tmp_path)
    root = tmp_path.resolve()
    blocks = str(root / "parts" / "blocks.par")
    files = files.changed({blocks: "axis more = 1\n" + BLOCKS})
    texts = renamed(files, str(root / "main.par"), *at(MAIN, "mlp.up"), "ffw")
    assert texts[blocks] == "axis more = 1\n" + BLOCKS.replace("mlp", "ffw")
    assert texts[str(root / "main.par")] == MAIN.replace("mlp", "ffw")
    assert len(texts) == 2


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("file", "word", "to", "why"),
    [
        ("main.par", "embed", "batch", "`batch` is the axis of the batch by this name"),
        ("main.par", "embed", "layers", "`layers` is taken: a const at main.par:4:7"),
        ("main.par", "layers", "ffn", "`ffn` is taken: an axis at blocks.par:1:17"),
        ("main.par", "mlp", "two words", "`two words` is not a name"),
        ("main.par", "mlp", "block", "`block` is a keyword"),
        ("main.par", "split", "auto", "`auto` is a keyword"),
        ("main.par", "split", "é", "`é` is not a name"),
        ("main.par", "split", "x" * 201, "at most 200 characters"),
        ("main.par", "mlp", "gelu", "`check` would then say E0218 at blocks.par:6:18: block `gelu` calls itself"),
        ("main.par", "batch", "rows", "`batch` is the axis of the batch by this name"),
        ("parts/blocks.par", "up", "down", "`down` is taken: a parameter at blocks.par:5:9"),
        ("parts/blocks.par", "up", "x", "`x` is taken: a tensor at"),
        ("main.par", "loss", "x", "there is no name here that a file declares"),
        ("main.par", "random", "x", "there is no name here that a file declares"),
    ],
)
def test_why_a_name_is_refused(file: str, word: str, to: str, why: str, tmp_path: Path) -> None:
    files = workspace(FILES, tmp_path)
    path = str(tmp_path.resolve() / file)
    with pytest.raises(ValueError, match=re.escape(why)):
        rename(files, path, *at(FILES[file], word), to)


def test_what_cannot_follow_is_refused(tmp_path: Path) -> None:
    two = """axis batch = 2, a = 4
block one(x: [batch, a]) { param w: [a] ~ ones() return x * w }
block two(x: [batch, a]) { param w: [a] ~ ones() return x * w }
model m(x: [batch, a]) { loss mean(one(two(x))) }
mesh c(data = 2)
layout l on c { shard w: a -> data }
train { data = npz("x.npz") optimizer = sgd(lr = 1) steps = 1 }
"""
    files = workspace({"m.par": two, "broken.par": 'import "m.par"\naxis', "alone.par": "axis a = 1\n"}, tmp_path)
    path = str(tmp_path.resolve() / "m.par")
    with pytest.raises(ValueError, match=re.escape("`broken.par` has syntax errors")):
        rename(files, path, *at(two, "a = 4"), "b")
    (tmp_path / "broken.par").unlink()
    with pytest.raises(ValueError, match=re.escape("at m.par:6:23, `w` means something else too")):
        rename(files, path, *at(two, "w:"), "v")
    with pytest.raises(ValueError, match=re.escape("`w` means several things here")):
        rename(files, path, *at(two, "w: a ->"), "v")
    with pytest.raises(ValueError, match=re.escape("`x` is an input of a model: `data` yields it by this name")):
        rename(files, path, *at(two, "x: [batch, a]) { loss"), "v")
    # A name of another file that shares nothing stays.
    assert {Path(each).name for each, _ in rename(files, path, *at(two, "a = 4"), "b").places} == {"m.par"}


def test_references_are_found_from_any_place_of_a_name(tmp_path: Path) -> None:
    files = workspace(FILES, tmp_path)
    path = str(tmp_path.resolve() / "main.par")
    world = files.world(path)
    for each in world.names.occurrences:
        if (
            world.files[0].file.span.source is each.name.span.source
            and len(world.declared[world.place(each.name.span)]) == 1
        ):
            assert world.place(each.name.span) in everywhere(files, path, each).places
