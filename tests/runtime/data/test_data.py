"""Data: batches are functions of (seed, step), rows can be had alone, nobody trains on the holdout.

Wrong data is refused with its code at the place of the call.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from partita.dsl.check.exclusions import OWN_DATA
from partita.dsl.diagnostic import Refused
from partita.dsl.spec import Call, PythonFunction, Share
from partita.dsl.syntax.source import Source, Span
from partita.dsl.types import Axis, Type
from partita.runtime.data.dataset import Dataset, Input
from partita.runtime.data.registry import SOURCES, Use, open_dataset
from partita.runtime.data.stdlib import sources
from partita.runtime.data.text import numbered

TEXT = "".join(chr(97 + (7 * i + i // 13) % 26) for i in range(3000))
SPAN = Span(Source("x.par", "train { data = text() }"), 15, 21)
HELD = 0.1


def call(name: str, **arguments: object) -> Call:
    return Call(name, arguments, SPAN)


def shaped(dtype: str, **sizes: int) -> Type:
    return Type(dtype, tuple(Axis(name, size) for name, size in sizes.items()))


def ids(name: str, batch: int = 6, seq: int = 5, limit: int | None = 256, dtype: str = "i64") -> Input:
    return Input(name, shaped(dtype, batch=batch, seq=seq), "batch", limit, "vocab")


WINDOWS = (ids("tokens"), ids("targets"))
ARRAYS = (
    Input("image", shaped("f32", batch=6, pixels=4), "batch"),
    Input("label", shaped("i64", batch=6), "batch", 10, "digits"),
    Input("mask", shaped("bool", pixels=4)),
)
NOISE = (
    Input("x", shaped("f32", seq=3, batch=6), "batch"),
    Input("y", shaped("i32", batch=6, seq=3), "batch", 17, "vocab"),
    Input("z", shaped("bool", seq=3)),
)


def tokenizer_of(texts: list[str], special: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=letters)
    made.train_from_iterator(texts, trainer)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    (root / "corpus").mkdir()
    (root / "corpus" / "b.txt").write_text(TEXT[1000:])
    (root / "corpus" / "a.txt").write_text(TEXT[:1000])
    np.arange(2000, dtype="<u2").tofile(root / "train.bin")
    images = np.arange(53 * 4, dtype=np.float64).reshape(53, 4)
    labels = (np.arange(53) % 10).astype(np.uint8)
    lines = [TEXT[start : start + 100] for start in range(0, 3000, 100)]
    (root / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), root / "rows.parquet")
    chats = ({"instruction": line[:50], "output": line[50:]} for line in lines)
    pairs = ({"prompt": line[:50], "chosen": line[50:], "rejected": line[:50:-1]} for line in lines)
    (root / "pairs.json").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (root / "chats.json").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    asked = ({"prompt": line[: 20 + i]} for i, line in enumerate(lines))
    (root / "asked.json").write_text("".join(json.dumps(each) + "\n" for each in asked))
    tokenizer_of(lines, ["<|endoftext|>"]).save(str(root / "tokenizer.json"))
    (root / "chat_template.jinja").write_text(CHAT)
    (root / "photos").mkdir()
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 256, (3, 4, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(root / "photos" / f"{number}.png")
    np.savez(root / "digits.npz", image=images, label=labels, mask=np.array([True, False, True, True]))
    return root


PACKED = tuple(
    ids(name, seq=150, limit=None if name == "targets" else 400)
    for name in ("tokens", "targets", "segments", "positions")
)
PAIRED = tuple(evolve(each, name=f"{side}_{each.name}") for side in ("chosen", "rejected") for each in PACKED)
MIXED = (
    Share(call("text", glob="corpus/*.txt", alphabet="chars", holdout=HELD), 0.5),
    Share(call("parquet", glob="*.parquet", column="text", holdout=0.5), 0.3),
    Share(call("stdlib", holdout=HELD), 0.2),
)

CHAT = "{% for each in messages %}{{ each.role + ': ' + each.content + '<|endoftext|>' }}{% endfor %}"

PYTHON = Source(
    "source.py",
    "import numpy\ndef row(seed, number):\n"
    "    ids = numpy.random.default_rng((seed, number)).integers(0, 256, 6)\n"
    "    return {'tokens': ids[:-1], 'targets': ids[1:]}\n",
)


def shaped_image() -> Input:
    return Input("image", shaped("f32", batch=6, rows=3, columns=4, colors=3), "batch")


# One way to open each source: the call, the inputs. Held to the registry below.
OPENED = {
    "text": (call("text", glob="corpus/*.txt", alphabet="bytes", holdout=HELD), WINDOWS),
    "text of characters": (call("text", glob="corpus/*.txt", alphabet="chars", holdout=HELD), WINDOWS),
    "stdlib": (call("stdlib", holdout=HELD), WINDOWS),
    "tokens": (call("tokens", path="train.bin", dtype="u16", holdout=HELD), (ids("tokens", limit=2000),)),
    "jsonl": (call("jsonl", glob="*.jsonl", field="text", holdout=HELD), WINDOWS),
    "parquet": (call("parquet", glob="*.parquet", column="text", holdout=HELD), WINDOWS),
    "packed": (call("jsonl", glob="*.jsonl", field="text", pack=True, holdout=HELD), PACKED),
    "chat": (call("chat", glob="chats.json", tokenizer="tokenizer.json", pack=True, cut=True, holdout=HELD), PACKED),
    "preferences": (
        call("preferences", glob="pairs.json", tokenizer=None, end="\n", cut=False, holdout=HELD),
        PAIRED,
    ),
    "rollouts": (
        call("rollouts", glob="asked.json", samples=2, reuse=1, tokens=9, tokenizer=None, end=None, holdout=HELD),
        PACKED,
    ),
    "mix": (call("mix", sources=MIXED), WINDOWS),
    "arrays": (call("arrays", path="digits.npz", holdout=HELD), ARRAYS),
    "images": (call("images", folder="photos", captions=None, holdout=HELD), (shaped_image(),)),
    "python": (call("python", function=PythonFunction(PYTHON, "row", SPAN), rows=60, holdout=HELD), WINDOWS),
    "random": (call("random"), NOISE),
}


@pytest.fixture(scope="module")
def datasets(folder: Path) -> dict[tuple[str, int], Dataset]:
    return {
        (name, seed): open_dataset(settings, inputs, seed, folder, use=Use.HOLD_OUT, allow_python=True)
        for name, (settings, inputs) in OPENED.items()
        for seed in (0, 1)
    }


def test_every_source_is_covered() -> None:
    covered = {settings.name for settings, _ in OPENED.values()}
    assert covered == set(SOURCES) - {"hub"}  # which tests of streams have


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", sorted(OPENED))
@given(data=st.data(), seed=st.sampled_from([0, 1]), step=st.integers(1, 10**6), holdout=st.booleans())
def test_rows_alone_equal_the_rows_of_the_whole(
    name: str,
    datasets: dict[tuple[str, int], Dataset],
    data: st.DataObject,
    seed: int,
    step: int,
    holdout: bool,
) -> None:
    dataset = datasets[name, seed]
    start = data.draw(st.integers(0, 6))
    rows = range(start, data.draw(st.integers(start, 6)))
    take = dataset.holdout_batch if holdout else dataset.batch
    whole, part = take(step), take(step, rows)
    for input in OPENED[name][1]:
        assert whole[input.name].shape == input.type.shape
        assert whole[input.name].flags.c_contiguous
        axis = None if input.batch_axis is None else input.type.position(input.batch_axis)
        expected = whole[input.name] if axis is None else np.take(whole[input.name], rows, axis)
        np.testing.assert_array_equal(part[input.name], expected)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", sorted(OPENED))
@given(step=st.integers(1, 10**6))
def test_a_batch_is_a_function_of_seed_and_step(
    name: str, folder: Path, datasets: dict[tuple[str, int], Dataset], step: int
) -> None:
    settings, inputs = OPENED[name]
    if name not in ("stdlib", "mix"):  # opened anew once, below: it is read from a thousand files
        assert equal(
            open_dataset(settings, inputs, 0, folder, allow_python=True).batch(step), datasets[name, 0].batch(step)
        )
    assert not equal(datasets[name, 1].batch(step), datasets[name, 0].batch(step))
    assert not equal(datasets[name, 0].batch(step + 1), datasets[name, 0].batch(step))


def test_the_standard_library_reads_the_same_twice(folder: Path, datasets: dict[tuple[str, int], Dataset]) -> None:
    settings, inputs = OPENED["stdlib"]
    assert equal(open_dataset(settings, inputs, 0, folder).batch(3), datasets["stdlib", 0].batch(3))


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("name", ["text", "text of characters", "stdlib"])
def test_targets_are_the_tokens_one_further(name: str, datasets: dict[tuple[str, int], Dataset]) -> None:
    for batch in (datasets[name, 0].batch(5), datasets[name, 0].holdout_batch(5)):
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_windows_cover_the_training_part_and_the_holdout_the_rest(
    datasets: dict[tuple[str, int], Dataset],
) -> None:
    # The ids of train.bin are their own places.
    dataset = datasets["tokens", 0]
    trained = np.concatenate([dataset.batch(step)["tokens"].ravel() for step in range(1, 2000)])
    held = np.concatenate([dataset.holdout_batch(index)["tokens"].ravel() for index in range(100)])
    # A window takes one id more than `tokens` shows, for the last target.
    assert set(trained) == set(range(1799))
    assert set(held) == set(range(1800, 1999))


@pytest.mark.parametrize("length", [1, 5])
def test_a_window_and_its_last_target_are_enough(length: int, tmp_path: Path) -> None:
    inputs = tuple(ids(name, batch=2, seq=length) for name in ("tokens", "targets"))
    for trained, held in ((length, length + 1), (length + 1, length), (length + 1, length + 1)):
        count = trained + held
        np.arange(count, dtype="<u2").tofile(tmp_path / "ids.bin")
        settings = call("tokens", path="ids.bin", dtype="u16", holdout=held / count)
        if min(trained, held) == length:
            with pytest.raises(Refused, match=rf"too short: {length} .*ids.* one window takes {length + 1}"):
                open_dataset(settings, inputs, 0, tmp_path, use=Use.HOLD_OUT)
            continue
        dataset = open_dataset(settings, inputs, 0, tmp_path, use=Use.HOLD_OUT)
        for begin, batch in ((0, dataset.batch(3)), (trained, dataset.holdout_batch(3))):
            assert batch["tokens"].tolist() == [list(range(begin, begin + length))] * 2
            assert batch["targets"].tolist() == [list(range(begin + 1, begin + length + 1))] * 2


def test_windows_are_named_by_their_first_ids(datasets: dict[tuple[str, int], Dataset]) -> None:
    # The ids of train.bin are their own places.
    dataset = datasets["tokens", 0]
    for index in range(1, 20):
        named = (
            (dataset.batch(index), dataset.row_names(index)),
            (
                dataset.holdout_batch(index),
                dataset.holdout_row_names(index),
            ),
        )
        for batch, names in named:
            assert names == [f"id {first}" for first in batch["tokens"][:, 0]]


def test_windows_are_uniform(datasets: dict[tuple[str, int], Dataset]) -> None:
    starts = np.concatenate([datasets["tokens", 0].batch(step)["tokens"][:, 0] for step in range(1, 3000)])
    counts, _ = np.histogram(starts, bins=10, range=(0, 1795))
    # Five standard deviations of a multinomial count; the draw is fixed.
    assert np.all(np.abs(counts - starts.size / 10) < 5 * np.sqrt(starts.size * 0.09)), counts


@pytest.mark.parametrize("batches", [1, 4, 20])
def test_evaluation_windows_are_spread(batches: int, datasets: dict[tuple[str, int], Dataset]) -> None:
    starts = np.sort(np.concatenate([datasets["tokens", 0].holdout_batch(i)["tokens"][:, 0] for i in range(batches)]))
    # The largest gap of the golden ratio's multiples is below 3 times the mean one, ends included.
    gaps = np.diff(np.concatenate([[1800], starts, [1995]]))
    assert gaps.max() <= 3 * 195 / len(starts) + 1, gaps


def test_evaluation_does_not_depend_on_the_seed(datasets: dict[tuple[str, int], Dataset]) -> None:
    for name in ("text", "tokens", "arrays"):
        assert equal(datasets[name, 0].holdout_batch(2), datasets[name, 1].holdout_batch(2))


def test_text_is_joined_in_the_order_of_paths(folder: Path) -> None:
    # One window that is the whole text.
    inputs = (ids("tokens", batch=1, seq=2999),)
    batch = open_dataset(call("text", glob="corpus/*.txt", alphabet="bytes", holdout=0.0), inputs, 0, folder).batch(1)
    assert bytes(batch["tokens"][0].tolist()).decode() == TEXT[:2999]


@given(st.text(min_size=1))
def test_characters_are_numbered_in_order(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    got, alphabet = numbered(text)
    assert alphabet == "".join(sorted(set(text)))
    assert "".join(alphabet[number] for number in got) == text


def test_an_input_may_have_its_axes_in_any_order(folder: Path) -> None:
    settings = OPENED["text"][0]
    turned = Input("tokens", shaped("i32", seq=5, batch=6), "batch", 256, "vocab")
    usual = open_dataset(settings, (ids("tokens"),), 0, folder).batch(3)["tokens"]
    batch = open_dataset(settings, (turned,), 0, folder).batch(3)["tokens"]
    assert batch.dtype == np.int32
    np.testing.assert_array_equal(batch, usual.T)


def test_the_standard_library_is_its_top_modules_in_order() -> None:
    import sysconfig

    folder = Path(sysconfig.get_path("stdlib"))
    found = [path.relative_to(folder) for path in sources(folder)]
    assert Path("argparse.py") in found
    assert all(len(path.parts) == 1 for path in found)
    assert found == sorted(found, key=lambda path: path.as_posix())


# ---------------------------------------------------------------- arrays


def test_an_epoch_takes_every_item_once(datasets: dict[tuple[str, int], Dataset]) -> None:
    # 48 items to train on, 6 a batch; the first pixel of item i is 4 i.
    for epoch in range(3):
        steps = range(1 + 8 * epoch, 9 + 8 * epoch)
        items = np.concatenate([datasets["arrays", 0].batch(step)["image"][:, 0] for step in steps]) / 4
        assert sorted(items) == list(range(48))
        assert list(items) != list(range(48))


def test_items_stay_together_and_evaluation_goes_through_the_rest(
    datasets: dict[tuple[str, int], Dataset],
) -> None:
    dataset = datasets["arrays", 0]
    for batch in (dataset.batch(4), dataset.holdout_batch(0)):
        items = batch["image"][:, 0] / 4
        np.testing.assert_array_equal(batch["label"], items % 10)
        np.testing.assert_array_equal(batch["image"], items[:, None] * 4 + np.arange(4))
        np.testing.assert_array_equal(batch["mask"], [True, False, True, True])
    held = [item for index in range(5) for item in dataset.holdout_batch(index)["image"][:, 0] / 4]
    assert held == [48 + i % 5 for i in range(30)]


# ---------------------------------------------------------------- random


def test_random_values_are_within_their_limits(datasets: dict[tuple[str, int], Dataset]) -> None:
    batches = [datasets["random", 0].batch(step) for step in range(1, 1000)]
    integers = np.concatenate([batch["y"].ravel() for batch in batches])
    assert set(integers) == set(range(17))
    floats = np.concatenate([batch["x"].ravel() for batch in batches])
    assert abs(floats.mean()) < 0.05
    assert abs(floats.std() - 1) < 0.05
    assert 0.45 < np.mean([batch["z"] for batch in batches]) < 0.55
    assert not equal(datasets["random", 0].batch(3), datasets["random", 0].holdout_batch(3))


# ---------------------------------------------------------------- what is refused


def wrong_files(root: Path) -> None:
    (root / "short.txt").write_text("abc")
    (root / "latin.txt").write_bytes("é".encode("latin-1") * 100)
    (root / "empty.bin").write_bytes(b"")
    (root / "odd.bin").write_bytes(b"abc")
    np.full(100, -1, "<i4").tofile(root / "negative.bin")
    (root / "not.npz").write_text("no archive")
    np.save(root / "one.npy", np.zeros(3))
    objects = {"image": np.array([{}, {}], dtype=object), "label": np.zeros(2, np.int64)}
    np.savez(root / "objects.npz", **objects)
    images, labels, mask = np.zeros((20, 4)), np.zeros(20, np.int64), np.ones(4, bool)
    np.savez(root / "nolabel.npz", image=images, mask=mask)
    np.savez(root / "wide.npz", image=np.zeros((20, 5)), label=labels, mask=mask)
    np.savez(root / "integers.npz", image=images.astype(np.int64), label=labels, mask=mask)
    np.savez(root / "uneven.npz", image=images, label=labels[:19], mask=mask)
    np.savez(root / "large.npz", image=images, label=labels + 10, mask=mask)
    for name, length in (("eleven", 11), ("twelve", 12)):
        (root / f"{name}.txt").write_text("a" * length)
    np.savez(root / "single.npz", image=images[:1], label=labels[:1], mask=mask)
    np.savez(root / "small.npz", image=images[:3], label=labels[:3], mask=mask)
    np.savez(root / "empty.npz", image=images[:0], label=labels[:0], mask=mask)
    np.savez(root / "scalar.npz", image=np.float64(1), label=labels, mask=mask)


def texts(glob: str, **arguments: object) -> Call:
    return call("text", **{"glob": glob, "alphabet": "bytes", "holdout": 0.0, **arguments})


def arrays(path: str, holdout: float = 0.0) -> Call:
    return call("arrays", path=path, holdout=holdout)


def tokens(path: str, dtype: str = "u16") -> Call:
    return call("tokens", path=path, dtype=dtype, holdout=0.0)


WRONG = {
    "no file": (texts("nothing/*.txt"), WINDOWS, "E0601", "no file matches `nothing/*.txt`"),
    "empty name": (texts(""), WINDOWS, "E0601", "not the name of a file"),
    "a folder": (tokens("corpus"), WINDOWS, "E0601", "no file matches"),
    "several files": (arrays("*.npz"), ARRAYS, "E0601", "but exactly one is needed"),
    "climbs out": (texts("../*.txt"), WINDOWS, "E0602", "leads out"),
    "climbs out within": (texts("corpus/../../*.txt"), WINDOWS, "E0602", "leads out"),
    "absolute": (tokens("/etc/passwd"), WINDOWS, "E0602", "leads out"),
    "bad pattern": (texts("**x/y"), WINDOWS, "E0603", "cannot look for"),
    "too short": (texts("short.txt"), WINDOWS, "E0604", "`short.txt` is too short: 3 ids, and one window takes 6"),
    "not UTF-8": (
        texts("latin.txt", alphabet="chars"),
        WINDOWS,
        "E0603",
        "is not UTF-8 text: byte 0 is 0xe9",
    ),
    "alphabet too large": (
        texts("corpus/*.txt", alphabet="chars"),
        (ids("tokens", limit=20),),
        "E0605",
        "26 different characters, has character 25, 'z', which is out of range for `tokens`: `vocab` has size 20",
    ),
    "bytes too large": (texts("corpus/*.txt"), (ids("tokens", limit=100),), "E0605", "has the id 122"),
    "no holdout": (texts("corpus/*.txt"), WINDOWS, "E0608", "there is no `holdout`"),
    "holdout too short": (texts("corpus/*.txt", holdout=0.001), WINDOWS, "E0604", "the holdout of"),
    "empty file": (tokens("empty.bin"), WINDOWS, "E0603", "not a whole number of u16 ids"),
    "odd file": (tokens("odd.bin"), WINDOWS, "E0603", "3 bytes"),
    "negative ids": (tokens("negative.bin", "i32"), WINDOWS, "E0605", "must not be negative"),
    "unknown input": (call("stdlib", holdout=0.1), (ids("words"),), "E0606", "no input called `words`"),
    "float input": (call("stdlib", holdout=0.1), (ids("tokens", dtype="f32"),), "E0607", "must be integers"),
    "no batch axis": (
        call("stdlib", holdout=0.1),
        (Input("tokens", shaped("i64", rows=2, seq=5), None, 256),),
        "E0607",
        "the batch and one more axis",
    ),
    "different sizes": (
        call("stdlib", holdout=0.1),
        (ids("tokens"), ids("targets", seq=4)),
        "E0607",
        "same size",
    ),
    "no archive": (arrays("not.npz"), ARRAYS, "E0603", "`not.npz` is not a numpy archive"),
    "not an archive": (arrays("one.npy"), ARRAYS, "E0603", "is one array"),
    "objects": (arrays("objects.npz"), ARRAYS[:2], "E0603", "cannot read `objects.npz`"),
    "no such array": (arrays("nolabel.npz"), ARRAYS, "E0606", "no array called `label`"),
    "wrong shape": (
        arrays("wide.npz"),
        ARRAYS,
        "E0607",
        "shape [20, 5], and the model wants [items, pixels=4]",
    ),
    "wrong dtype": (arrays("integers.npz"), ARRAYS, "E0607", "holds int64, and the model wants floats"),
    "uneven": (arrays("uneven.npz"), ARRAYS, "E0607", "different numbers of items"),
    "labels too large": (arrays("large.npz"), ARRAYS, "E0605", "has the id 10"),
    "nothing held out": (arrays("small.npz", 0.1), ARRAYS, "E0604", "less than one of the 3 items"),
    "no holdout of arrays": (arrays("small.npz"), ARRAYS, "E0608", "there is no `holdout`"),
    "no items": (arrays("empty.npz"), ARRAYS, "E0604", "`empty.npz` has no items"),
    "a scalar": (arrays("scalar.npz"), ARRAYS, "E0607", "has shape []"),
    "no batch axis at all": (arrays("small.npz"), ARRAYS[2:], "E0607", "no input has the batch axis"),
    "no limit": (call("random"), (ids("tokens", limit=None),), "E0609", "the range of the integers of `tokens`"),
}


@pytest.fixture(scope="module")
def wrong(folder: Path) -> Iterator[Path]:
    wrong_files(folder)
    return folder


@pytest.mark.parametrize(
    ("source", "inputs", "help"),
    [
        (arrays("small.npz", 0.1), ARRAYS, f"`holdout = 17%`, or {OWN_DATA}"),
        (arrays("small.npz", 0.9), ARRAYS, f"`holdout = 17%`, or {OWN_DATA}"),
        (arrays("single.npz", 0.1), ARRAYS, f"{OWN_DATA}; or use more items"),
        (texts("twelve.txt", holdout=0.1), WINDOWS, f"`holdout = 46%`, or {OWN_DATA}"),
        (texts("twelve.txt", holdout=0.9), WINDOWS, f"`holdout = 46%`, or {OWN_DATA}"),
        (texts("short.txt", holdout=0.5), WINDOWS, "use more text, or a shorter sequence"),
        (texts("eleven.txt", holdout=0.1), WINDOWS, f"{OWN_DATA}; or use more text, or a shorter sequence"),
    ],
)
def test_a_holdout_that_would_do_is_named(source: Call, inputs: tuple[Input, ...], help: str, wrong: Path) -> None:
    """Not one that would be refused as well."""
    with pytest.raises(Refused) as caught:
        open_dataset(source, inputs, 0, wrong, use=Use.HOLD_OUT)
    assert caught.value.diagnostics[0].help == help
    percent = re.match(r"`holdout = (\d+)%`", help)
    if percent is not None:
        arguments = {**source.arguments, "holdout": int(percent[1]) / 100}
        open_dataset(evolve(source, arguments=arguments), inputs, 0, wrong, use=Use.HOLD_OUT)


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_data_is_refused(name: str, wrong: Path) -> None:
    settings, inputs, code, words = WRONG[name]
    evaluates = code == "E0608" or bool(settings.arguments.get("holdout"))
    with pytest.raises(Refused) as caught:
        open_dataset(settings, inputs, 0, wrong, use=Use.HOLD_OUT if evaluates else Use.TRAIN)
    diagnostic = caught.value.diagnostics[0]
    assert (diagnostic.code, diagnostic.span) == (code, SPAN), diagnostic.render()
    assert words in diagnostic.message, diagnostic.render()


MEMORY = """
import resource, sys
from pathlib import Path
from partita.dsl.diagnostic import Refused
from partita.dsl.spec import Call, Share
from partita.dsl.types import Axis, Type
from partita.runtime.data.dataset import Input
from partita.runtime.data.registry import open_dataset

inputs = (Input("x", Type("f32", (Axis("batch", 4), Axis("features", 1000))), "batch", None, None),)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    open_dataset(Call("arrays", {"path": sys.argv[1], "holdout": 0.0}), inputs, 0, Path())
    print("opened")
except Refused as refused:
    print(refused.diagnostics[0].message)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def packed(path: Path, header: bytes, zeros: int) -> None:
    """An archive whose array `x` has a header and so many zeros, compressed, written without taking memory."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w", force_zip64=True) as member,
    ):
        member.write(header)
        for _ in range(zeros >> 20):
            member.write(bytes(1 << 20))


def npy_header(shape: str, version: bytes = b"\x01\x00", length: int | None = None) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = (len(text) if length is None else length).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + size + text


@pytest.mark.soak
@pytest.mark.parametrize(
    ("header", "zeros", "told"),
    [
        (npy_header("(131072, 1000)"), 100 << 20, "and its arrays would take 524,288,000"),
        (npy_header("(1099511627776, 1000)"), 1 << 20, "and its arrays would take 4,398,046,511,104,000"),
        (npy_header("(131072, 1001)"), 100 << 20, "has shape [131072, 1001]"),
        (npy_header("(4, 1000)", b"\x02\x00", 500 << 20), 100 << 20, "cannot read `x.npz`: "),
        (b"", 100 << 20, "has an entry that is not an array"),
    ],
    ids=["as large as it says", "larger than it is", "another shape", "an endless header", "no array"],
)
def test_a_small_archive_cannot_take_all_memory(header: bytes, zeros: int, told: str, tmp_path: Path) -> None:
    """It is refused by what it says, before it is unpacked."""
    packed(tmp_path / "x.npz", header, zeros)
    assert (tmp_path / "x.npz").stat().st_size < 1 << 20
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, "x.npz"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    message, kilobytes = done.stdout.splitlines()
    assert told in message
    assert int(kilobytes) < 50_000


@pytest.mark.soak
def test_what_is_compressed_as_data_is_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are not all alike in an archive of any size; others in a small one, or uncompressed."""
    inputs = (Input("x", shaped("f32", batch=4, pixels=1000), "batch", None, None),)
    zeros = np.zeros((5_000, 1000), np.float32)
    sparse = zeros.copy()
    sparse[:, ::20] = np.random.default_rng(0).integers(0, 256, (5_000, 50))
    np.savez_compressed(tmp_path / "zeros.npz", x=zeros)
    np.savez_compressed(tmp_path / "sparse.npz", x=sparse)
    np.savez(tmp_path / "plain.npz", x=zeros)

    def opened(name: str) -> Dataset:
        return open_dataset(arrays(f"{name}.npz"), inputs, 0, tmp_path)

    for name in ("zeros", "sparse", "plain"):
        assert opened(name).batch(1)["x"].shape == (4, 1000)
    monkeypatch.setattr("partita.runtime.data.items.MIN_UNPACKED", 1 << 20)
    for name in ("sparse", "plain"):
        assert opened(name).batch(1)["x"].shape == (4, 1000)
    with pytest.raises(Refused, match="which does not compress"):
        opened("zeros")


def test_a_strangers_names_make_no_line_of_their_own(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **{"a\nforged: ok": np.zeros(3)})
    with pytest.raises(Refused) as caught:
        open_dataset(arrays("x.npz"), ARRAYS[:1], 0, tmp_path)
    assert caught.value.diagnostics[0].notes == ("its arrays: a\\nforged: ok",)


IDS = np.arange(5000, dtype="<u2") % 256


def saved(path: Path) -> dict[str, str]:
    """Files of other formats, written by the programs that write them, and the words that name each."""
    np.save(path / "ids.npy", IDS)
    np.savez(path / "ids.npz", ids=IDS)
    np.savez_compressed(path / "packed.npz", ids=IDS)
    (path / "ids.bin.gz").write_bytes(gzip.compress(IDS.tobytes()))
    (path / "ids.bin.bz2").write_bytes(bz2.compress(IDS.tobytes()))
    (path / "ids.bin.xz").write_bytes(lzma.compress(IDS.tobytes()))
    with zipfile.ZipFile(path / "ids.zip", "w") as archive:
        archive.writestr("ids.bin", IDS.tobytes())
    save_file({"ids": IDS.astype(np.int32)}, path / "ids.safetensors")
    save_file({f"layer.{i}": IDS[:1].astype(np.int32) for i in range(3000)}, path / "many.safetensors")
    # No writer of Parquet is among what the tests need: how such a file begins and ends (its format, "File format").
    (path / "ids.parquet").write_bytes(b"PAR1" + IDS.tobytes() + (4).to_bytes(4, "little") + b"PAR1")
    return {
        "ids.npy": "a numpy array",
        "ids.npz": "a numpy archive",
        "packed.npz": "a numpy archive",
        "ids.bin.gz": "compressed with gzip",
        "ids.bin.bz2": "compressed with bzip2",
        "ids.bin.xz": "compressed with xz",
        "ids.zip": "a zip archive",
        "ids.safetensors": "a safetensors file",
        "many.safetensors": "a safetensors file",
        "ids.parquet": "a Parquet table",
    }


def test_files_of_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    limited = (ids("tokens", limit=1 << 16),)
    for name, words in saved(tmp_path).items():
        for bare in (name, f"{Path(name).stem}.disguised"):  # its content says what a file is, not its name
            (tmp_path / name).rename(tmp_path / bare)
            read = [] if bare.endswith(".npy") else [tokens(bare), tokens(bare, "u8")]
            calls = [*read, texts(bare)]
            for settings in calls if "numpy" in words else [*calls, arrays(bare)]:
                with pytest.raises(Refused) as caught:
                    open_dataset(settings, limited, 0, tmp_path)
                assert f"`{bare}` is {words}" in caught.value.diagnostics[0].message
            (tmp_path / bare).rename(tmp_path / name)


MAGIC = (
    b"\x93NUMPY",
    b"PK\x03\x04",
    b"\x1f\x8b\x08\0",
    b"\x28\xb5\x2f\xfd",
    b"PAR1",
    bytes([40, 0, 0, 0, 0, 0, 0, 0, 123]),
)


@pytest.mark.parametrize("magic", MAGIC)
def test_ids_that_begin_as_another_format_are_ids(magic: bytes, tmp_path: Path) -> None:
    (tmp_path / "ids.bin").write_bytes(magic + b"\xff" * (2000 + len(magic) % 2))
    open_dataset(tokens("ids.bin"), (ids("tokens", limit=1 << 16),), 0, tmp_path)


@pytest.mark.parametrize(
    ("written", "read", "right"),
    [("<u2", "u8", "u16"), ("<u4", "u16", "u32"), ("<i8", "u32", "i64"), ("<i8", "u16", "i64"), ("<u4", "u8", "u32")],
)
def test_ids_of_more_bytes_than_dtype_says_are_refused(written: str, read: str, right: str, tmp_path: Path) -> None:
    (IDS % 250 + 1).astype(written).tofile(tmp_path / "ids.bin")
    with pytest.raises(Refused, match="every other id of") as caught:
        open_dataset(tokens("ids.bin", read), (ids("tokens", limit=1 << 16),), 0, tmp_path)
    assert f"dtype = {right}" in str(caught.value.diagnostics[0].help)
    np.zeros(5000, written).tofile(tmp_path / "ids.bin")  # all 0: that says nothing
    open_dataset(tokens("ids.bin", read), (ids("tokens", limit=1 << 16),), 0, tmp_path)


def test_several_missing_arrays_are_reported_together(wrong: Path) -> None:
    inputs = (*ARRAYS, Input("weight", shaped("f32", batch=6), "batch"))
    with pytest.raises(Refused) as caught:
        open_dataset(arrays("nolabel.npz"), inputs, 0, wrong)
    assert [diagnostic.message for diagnostic in caught.value.diagnostics] == [
        "`nolabel.npz` has no array called `label`",
        "`nolabel.npz` has no array called `weight`",
    ]


def test_ids_of_a_large_file_are_checked_as_they_are_used(wrong: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.runtime.data.windows.CHECKED_AT_ONCE", 100)
    dataset = open_dataset(tokens("train.bin"), (ids("tokens", limit=50),), 0, wrong)
    with pytest.raises(Refused) as caught:
        _ = [dataset.batch(step) for step in range(1, 100)]
    assert caught.value.diagnostics[0].code == "E0605"


# ---------------------------------------------------------------- ids that look like halves of others


def doubted(values: np.ndarray, wrote: str, read: str, folder: Path) -> bool:
    values.astype({"u8": "u1", "u16": "<u2", "u32": "<u4"}[wrote]).tofile(folder / "ids.bin")
    found = SOURCES["tokens"].warnings(tokens("ids.bin", read), folder)
    assert [each.code for each in found] in ([], ["W0603"])
    return bool(found)


@pytest.mark.parametrize(
    ("wrote", "read", "vocab"), [("u32", "u16", 100_000), ("u32", "u8", 5_000), ("u16", "u8", 1_000)]
)
def test_ids_that_are_read_in_halves_are_doubted(wrote: str, read: str, vocab: int, tmp_path: Path):
    values = np.minimum(np.random.default_rng(1).zipf(1.2, 20_000), vocab - 1)
    assert doubted(values, wrote, read, tmp_path)
    assert not doubted(values, wrote, wrote, tmp_path)


@given(seed=st.integers(0, 10**6), size=st.integers(1_100, 5_000), most=st.sampled_from([2, 200, 60_000]))
def test_ids_that_are_drawn_alike_are_not(seed: int, size: int, most: int, tmp_path_factory: pytest.TempPathFactory):
    generator = np.random.default_rng(seed)
    values = generator.integers(0, most, size) if seed % 2 else np.minimum(generator.zipf(1.3, size), most - 1)
    assert not doubted(values, "u16", "u16", tmp_path_factory.mktemp("ids"))
