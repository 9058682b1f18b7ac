"""`images`: pictures that Pillow wrote, as the model's axes say; the numbers of their folders, and ids of captions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from partita.dsl.diagnostic import Refused
from partita.dsl.types import Axis, Type
from partita.runtime.data import images
from partita.runtime.data.binding import identify
from partita.runtime.data.dataset import Dataset, Input
from partita.runtime.data.registry import Use, open_dataset
from tests.runtime.data.test_data import call, ids, shaped

Image = pytest.importorskip("PIL.Image")


def picture(dtype: str = "f32", **sizes: int) -> Input:
    sizes = sizes or {"colors": 3, "height": 4, "width": 6}
    return Input("image", shaped(dtype, batch=3, **sizes), "batch")


LABEL = Input("label", Type("i64", (Axis("batch", 3),)), "batch", 2, "classes")
TEXT = tuple(ids(name, 3, 8) for name in ("tokens", "targets"))
TEXT = (TEXT[0], Input("targets", TEXT[1].type, "batch", 256, "vocab", (-1,)))


def opened(root: Path, *inputs: Input, use: Use = Use.TRAIN, seed: int = 0, **arguments: object) -> Dataset:
    usual = {"folder": "photos", "captions": None, "field": "text", "cut": False, "holdout": 0.0}
    return open_dataset(call("images", **{**usual, **arguments}), inputs, seed, root, use=use)


def saved(root: Path, name: str, array: np.ndarray, **options: object) -> None:
    path = root / "photos" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array.astype(np.uint8)).save(path, **options)


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


@pytest.fixture
def photos(tmp_path: Path) -> dict[str, np.ndarray]:
    found = {f"{kind}/{i}.png": noise(10 * i + len(kind), 4, 6, 3) for kind in ("cat", "dogs") for i in range(5)}
    for name, array in found.items():
        saved(tmp_path, name, array)
    (tmp_path / "photos" / "notes.md").write_text("no image")
    return found


def test_pixels_are_those_that_were_written(photos: dict[str, np.ndarray], tmp_path: Path):
    data = opened(tmp_path, picture(), LABEL)
    seen = set()
    for step in range(1, 11):
        batch, names = data.batch(step), data.row_names(step)
        for row, name in enumerate(names):
            assert np.array_equal(batch["image"][row], np.moveaxis(photos[name], 2, 0).astype(np.float32) / 255)
            assert batch["label"][row] == name.startswith("dogs")
        seen |= set(names)
    assert seen == photos.keys()
    last = opened(tmp_path, picture("u8", height=4, width=6, colors=3))
    assert all(
        np.array_equal(each, photos[name]) for each, name in zip(last.batch(1)["image"], last.row_names(1), strict=True)
    )


def test_images_are_made_upright_fitted_and_cut_around_their_middle(tmp_path: Path):
    wide = np.zeros((8, 32, 3))  # twice as large as what is seen of it, and wider
    wide[:, 6:26] = 200
    saved(tmp_path, "a.png", wide)
    seen = opened(tmp_path, picture("u8", height=4, width=6, colors=3)).batch(1)["image"]
    assert np.abs(seen[0].astype(int) - 200).max() <= 2
    (tmp_path / "photos" / "a.png").unlink()
    turned = np.zeros((6, 4, 3), np.uint8)
    turned[0] = 250
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    saved(tmp_path, "b.png", turned, exif=exif)
    seen = opened(tmp_path, picture("u8", height=4, width=6, colors=3)).batch(1)["image"]
    assert (seen[0, :, -1] == 250).all()
    assert not seen[0, :, :-1].any()
    gray = opened(tmp_path, picture("u8", colors=1, height=4, width=6)).batch(1)["image"]
    assert gray.shape == (3, 1, 4, 6)


def test_what_is_held_out_is_of_all_folders_and_never_trained_on(photos: dict[str, np.ndarray], tmp_path: Path):
    data = opened(tmp_path, picture(), LABEL, holdout=0.4, use=Use.HOLD_OUT)
    held = set(data.holdout_row_names(0)) | set(data.holdout_row_names(1))
    assert len(held) == data.held_out == 4
    assert {each.partition("/")[0] for each in held} == {"cat", "dogs"}
    assert set().union(*(data.row_names(step) for step in range(1, 9))) == photos.keys() - held


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_captions_are_ids_of_their_images(form: str, photos: dict[str, np.ndarray], tmp_path: Path):
    texts = [(name, f"é {i}" if i else "") for i, name in enumerate([*photos, *photos][:13])]
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in texts]
    table = ["file_name,text", *(f'{name},"{text}"' for name, text in texts)]
    (tmp_path / f"c.{form}").write_text("\n".join(lines if form == "jsonl" else table) + "\n")
    data = opened(tmp_path, picture(), *TEXT, captions=f"c.{form}", end="|")
    seen = set()
    for step in range(1, 14):
        batch = data.batch(step)
        for row, name in enumerate(data.row_names(step)):
            text = bytes(each for each in batch["tokens"][row].tolist() if each).decode()
            assert np.array_equal(batch["image"][row], np.moveaxis(photos[name], 2, 0).astype(np.float32) / 255)
            count = len(text.encode())
            wanted = [*batch["tokens"][row, 1:count].tolist(), *[-1] * (8 - count + 1)]
            assert batch["targets"][row].tolist() == wanted
            seen.add((name, text.removesuffix("|")))
    assert seen == set(texts)


def test_long_captions_are_cut_where_that_is_said(photos: dict[str, np.ndarray], tmp_path: Path):
    (tmp_path / "c.jsonl").write_text(json.dumps({"file_name": next(iter(photos)), "text": "a long caption"}))
    with pytest.raises(Refused, match=r"error\[E0607\]: caption 0 of `c.jsonl` has 14 ids, and a row has 8"):
        opened(tmp_path, *TEXT, captions="c.jsonl")
    assert bytes(opened(tmp_path, *TEXT, captions="c.jsonl", cut=True).batch(1)["tokens"][0].tolist()) == b"a long c"


@pytest.mark.parametrize(
    ("inputs", "arguments", "code", "words"),
    [
        ((picture(a=2, b=4, c=6),), {}, "E0607", "`image` must have the batch, colors, rows and columns"),
        ((picture("i8"),), {}, "E0605", "an image has 255, and i8 holds -128 to 127"),
        ((TEXT[0],), {}, "E0606", "the data has no input called `tokens`"),
        ((LABEL,), {"captions": "right.jsonl"}, "E0606", "the data has no input called `label`"),
        ((picture(),), {"folder": "other"}, "E0601", "no file matches `other/**/*`"),
        (
            (picture(),),
            {"captions": "c.jsonl"},
            "E0616",
            "line 1 of `c.jsonl` names 'x.png', which is no image in `photos`",
        ),
        ((picture(),), {"captions": "c.csv"}, "E0616", "line 2 of `c.csv` has not as many fields as the first"),
    ],
)
def test_what_is_wrong_is_said(
    inputs: tuple[Input, ...],
    arguments: dict[str, object],
    code: str,
    words: str,
    photos: dict[str, np.ndarray],
    tmp_path: Path,
):
    (tmp_path / "c.jsonl").write_text('{"file_name": "x.png", "text": "a"}\n')
    (tmp_path / "right.jsonl").write_text('{"file_name": "cat/0.png", "text": "a"}\n')
    (tmp_path / "c.csv").write_text("file_name,text\ncat/0.png\n")
    with pytest.raises(Refused) as refused:
        opened(tmp_path, *inputs, **arguments)
    assert [each.code for each in refused.value.diagnostics] == [code]
    assert words in refused.value.diagnostics[0].message


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"text", "deep", "cut"])
def test_what_is_no_image_is_said_where_it_is_read(content: bytes | str, tmp_path: Path):
    saved(tmp_path, "a.png", noise(0, 40, 60, 3))
    path = tmp_path / "photos" / "a.png"
    if content == "deep":
        Image.fromarray(np.full((4, 6), 999, np.uint16)).save(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:3000])
    with pytest.raises(Refused, match=r"error\[E0603\]: `photos/a.png` cannot be read as an image"):
        opened(tmp_path, picture()).batch(1)


def test_many_images_are_known_by_their_names_and_sizes(
    photos: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "kept"))
    source = call("images", folder="photos", captions=None)
    assert len(identify(source, tmp_path)) == len(photos)
    monkeypatch.setattr(images, "MAX_READ", 9)
    before = identify(source, tmp_path)
    assert len(before) == 1
    assert identify(source, tmp_path) == before
    saved(tmp_path, "cat/more.png", noise(9, 4, 6, 3))
    assert identify(source, tmp_path) != before
