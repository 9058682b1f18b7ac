"""Rows of several sources: as often as their shares say, each source in its own order, whoever asks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.dsl.spec import Call, Share
from partita.dsl.types import Axis, Type
from partita.runtime.checkpoint.identity import text_of
from partita.runtime.data.binding import identify
from partita.runtime.data.dataset import Input
from partita.runtime.data.mixture import BLOCK, Mixture
from partita.runtime.data.registry import SOURCES, Use, open_dataset
from partita.runtime.inference.encoding import encoding_of
from tests.runtime.data.test_data import SPAN, call, ids

BATCH = 8
ITEMS = (Input("x", Type("i64", (Axis("batch", BATCH),)), "batch", 5000, "v"),)
TOKENS = tuple(ids(name, BATCH, 5, 1 << 16) for name in ("tokens", "targets"))


def mixed(root: Path, shares: list[float], seed: int = 0) -> Mixture:
    """Each source has 50 items that say which it is: 1000 times its number, and from there on; 10 are held out."""
    for source in range(len(shares)):
        np.savez(root / f"{source}.npz", x=1000 * source + np.arange(50))
    sources = [Share(call("arrays", path=f"{i}.npz", holdout=0.2), each) for i, each in enumerate(shares)]
    dataset = open_dataset(call("mix", sources=tuple(sources)), ITEMS, seed, root, use=Use.HOLD_OUT)
    assert isinstance(dataset, Mixture)
    return dataset


SHARES = st.lists(st.integers(1, 20), min_size=1, max_size=5).map(lambda each: [one / sum(each) for one in each])


@pytest.mark.soak
@given(shares=SHARES, seed=st.integers(0, 5), blocks=st.integers(1, 2000))
def test_shares_are_kept_to_the_row(
    shares: list[float], seed: int, blocks: int, tmp_path_factory: pytest.TempPathFactory
):
    dataset = mixed(tmp_path_factory.mktemp("mix"), shares, seed)
    assert sum(dataset._count(blocks, each) for each in range(len(shares))) == blocks * BLOCK
    for source, share in enumerate(shares):
        assert abs(dataset._count(blocks, source) - share * blocks * BLOCK) < 1.01
    steps = 2 * BLOCK // BATCH
    sources = np.concatenate([dataset.batch(step)["x"] for step in range(1, steps + 1)]) // 1000
    counts = np.bincount(sources, minlength=len(shares))
    assert (np.abs(counts - 2 * BLOCK * np.array(shares)) < 1.01).all()


def test_each_source_goes_through_its_own_epochs(tmp_path: Path):
    dataset = mixed(tmp_path, [0.7, 0.2, 0.1])
    rows = np.concatenate([dataset.batch(step)["x"] for step in range(1, 200)])
    orders = []
    for source in range(3):
        own = rows[rows // 1000 == source] % 1000
        epochs = own[: len(own) // 40 * 40].reshape(-1, 40)
        assert len(epochs) >= 3
        assert (np.sort(epochs, 1) == np.arange(40)).all()
        assert (epochs[0] != epochs[1]).any()
        orders.append(epochs[0].tolist())
        # Alone, with the seed that it has in the mixture, a source yields the same rows.
        alone = np.concatenate([dataset.sources[source].batch(step)["x"] for step in range(1, 10)]) % 1000
        assert own[: len(alone)].tolist() == alone.tolist()
    assert orders[0] != orders[1] != orders[2]


@given(
    step=st.integers(1, 10**6),
    one=st.integers(0, BATCH),
    other=st.integers(0, BATCH),
    holdout=st.booleans(),
    seed=st.integers(0, 3),
)
def test_rows_are_functions_of_seed_and_step(
    step: int, one: int, other: int, holdout: bool, seed: int, tmp_path_factory: pytest.TempPathFactory
):
    root = tmp_path_factory.mktemp("mix")
    dataset, again = mixed(root, [0.55, 0.45], seed), mixed(root, [0.55, 0.45], seed)
    rows = range(min(one, other), max(one, other))
    take, take_again = (dataset.holdout_batch, again.holdout_batch) if holdout else (dataset.batch, again.batch)
    whole = take(step)["x"]
    assert (take_again(step, rows)["x"] == whole[rows.start : rows.stop]).all()
    names = again.holdout_row_names(step) if holdout else again.row_names(step)
    for value, name in zip(whole.tolist(), names, strict=True):
        assert name == f"source {value // 1000 + 1} (`arrays`): item {value % 1000}"


def test_all_held_out_rows_are_those_of_each_source(tmp_path: Path):
    dataset = mixed(tmp_path, [0.9, 0.1])
    assert dataset.held_out == 20
    assert dataset.held_out_rows(range(20))["x"].tolist() == [*range(40, 50), *range(1040, 1050)]
    assert dataset.held_out_rows([19, 0])["x"].tolist() == [1049, 40]
    held = {i for index in range(50) for i in dataset.holdout_batch(index)["x"].tolist()}
    assert held == {*range(40, 50), *range(1040, 1050)}
    sources = (Share(call("random"), 0.5), Share(call("arrays", path="0.npz", holdout=0.2), 0.5))
    assert open_dataset(call("mix", sources=sources), ITEMS, 0, tmp_path).held_out is None


def test_files_of_all_sources_are_known_once(tmp_path: Path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name * 100)
    np.stack([np.arange(3000), np.full(3000, 3)], 1).astype("<u2").tofile(tmp_path / "c.bin")
    texts = [Share(call("text", glob=glob, alphabet="bytes"), 0.25) for glob in ("*.txt", "b.txt")]
    given = call("mix", sources=(*texts, Share(call("tokens", path="c.bin"), 0.5)))
    assert [each.name for each in identify(given, tmp_path)] == ["a.txt", "b.txt", "c.bin"]
    assert [each.code for each in SOURCES["mix"].warnings(given, tmp_path)] == ["W0603"]
    text = text_of(Call("mix", {"sources": tuple(texts[:1])}))
    assert text == "mix(sources = [text(glob = *.txt, alphabet = bytes) -> 0.25])"


def test_what_is_wrong_with_a_source_is_said_at_it(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a text " * 100)
    good = Share(call("text", glob="a.txt", alphabet="bytes"), 0.5)
    other = Call("text", {"glob": "none.txt", "alphabet": "bytes"}, None)
    with pytest.raises(Refused, match="no file matches `none") as caught:
        open_dataset(call("mix", sources=(good, Share(other, 0.5))), TOKENS, 0, tmp_path)
    assert caught.value.diagnostics[0].span is None
    with pytest.raises(Refused, match="there is no `holdout`") as caught:
        open_dataset(call("mix", sources=(good, good)), TOKENS, 0, tmp_path, use=Use.HOLD_OUT)
    assert caught.value.diagnostics[0].span == SPAN
    table = Input("x", Type("f32", (Axis("features", 3),)))
    with pytest.raises(Refused, match="`mix` takes rows, and `x` has none"):
        open_dataset(call("mix", sources=(good, good)), (table, *TOKENS), 0, tmp_path)


def test_characters_have_one_number_in_all_texts_of_a_model(tmp_path: Path):
    """In each source of a mixture, in what evaluates, and in what is written."""
    for name, text in {"a.txt": "abcd" * 50, "b.txt": "dz" * 50}.items():
        (tmp_path / name).write_text(text)
    texts = [call("text", glob=glob, alphabet="chars") for glob in ("a.txt", "b.txt")]
    mixed = call("mix", sources=tuple(Share(each, 0.5) for each in texts))
    alphabet = "abcdz"
    dataset = open_dataset(mixed, TOKENS, 0, tmp_path)
    rows = {"".join(alphabet[id] for id in row) for step in range(1, 20) for row in dataset.batch(step)["tokens"]}
    assert rows == {"abcda", "bcdab", "cdabc", "dabcd", "dzdzd", "zdzdz"}
    for trained, known in ((mixed, alphabet), (texts[1], "dz")):
        assert encoding_of(trained, tmp_path, None).ids("dz") == [known.index("d"), known.index("z")]
    evaluated = open_dataset(texts[1], TOKENS, 0, tmp_path, use=Use.EVALUATE, trained=mixed)
    assert set(np.unique(evaluated.holdout_batch(0)["tokens"])) == {3, 4}
    with pytest.raises(Refused, match=r"`b\.txt` has .z., which is not in the text"):
        open_dataset(texts[1], TOKENS, 0, tmp_path, use=Use.EVALUATE, trained=texts[0])


FILE = """axis batch = 4, seq = 8, vocab = 256, embed = 4
const part = 30%
model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {{
  param table: [vocab, embed] ~ normal(0.1)
  loss cross_entropy(dot(embedding(tokens, table, over = vocab), table, over = embed), targets, over = vocab)
}}
train {{
  data = {data}
  optimizer = sgd(lr = 0.1)
  steps = 2
}}
"""
GOOD = {
    'mix([text("a") -> 70%, tokens("b", dtype = u8) -> 30%])': [0.7, 0.3],
    'mix([text("a") -> 1 - part, text("b") -> part])': [0.7, 0.3],
    'mix([text("a") -> 1, text("b") -> 3])': [0.25, 0.75],
    'mix([text("a") -> 100%])': [1.0],
    'mix([mix([text("a") -> 50%, text("b") -> 50%]) -> 1, stdlib() -> 1])': [0.5, 0.5],
}
WRONG = {
    'mix(text("a"))': ("E0306", 'text("a")'),
    'mix(text("a") -> 70%)': ("E0306", 'text("a") -> 70%'),
    "mix([])": ("E0306", "[]"),
    'mix([text("a")])': ("E0306", 'text("a")'),
    'mix([text("a") -> 50%, text("b")])': ("E0306", 'text("b")'),
    'mix([text("a") -> 50%, text("b") -> 40%])': ("E0308", '[text("a") -> 50%, text("b") -> 40%]'),
    'mix([text("a") -> 0%, text("b") -> 100%])': ("E0308", "0%"),
    'mix([text("a") -> -1, text("b") -> 3])': ("E0308", "-1"),
    'mix([text("a") -> 50%, text("b") -> 1])': ("E0307", "1"),
    'mix([text("a") -> 3GiB])': ("E0307", "3GiB"),
    'mix([texts("a") -> 1])': ("E0309", "texts"),
    "mix([text(3) -> 1])": ("E0306", "3"),
    'mix(["a" -> 1])': ("E0306", '"a"'),
}


@pytest.mark.parametrize("data", GOOD)
def test_shares_of_a_file(data: str):
    spec, diagnostics = load_text(FILE.format(data=data))
    assert spec is not None, [each.render() for each in diagnostics]
    assert spec.train is not None
    assert [each.share for each in spec.train.data.arguments["sources"]] == pytest.approx(GOOD[data])


@pytest.mark.parametrize("data", WRONG)
def test_wrong_shares_are_refused_at_their_place(data: str):
    code, place = WRONG[data]
    spec, diagnostics = load_text(FILE.format(data=data))
    assert spec is None
    (found,) = [each for each in diagnostics if each.severity == "error"]
    assert (found.code, found.span.text if found.span else None) == (code, place), found.render()
