"""Images with captions or labels as items: what `images` yields (`partita.runtime.data.images`). Pillow reads them."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from partita.dsl.diagnostic import refuse, shown
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.dsl.types import INTEGERS
from partita.runtime.data.dataset import Input
from partita.runtime.data.documents import check_documents, documents
from partita.runtime.data.encoders import encoder_of
from partita.runtime.data.epochs import permutation
from partita.runtime.data.files import single
from partita.runtime.data.images import pictures
from partita.runtime.data.items import Items, split_items
from partita.runtime.data.jsonl import records, text_of
from partita.runtime.data.packages import package
from partita.runtime.data.packed_rows import check_lengths, rows_alone
from partita.runtime.data.packing import NAMES, Packed, check_ignored
from partita.runtime.data.registry import Use
from partita.runtime.data.windows import check_largest, length_of
from partita.runtime.dtypes import outside

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by the number of colors
# What has more than eight bits of a color, which would be cut off.
DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


@frozen(eq=False)
class Pictures:
    """The images of items, by their paths, as an input has them, but for the batch: what `Items` takes them from."""

    paths: Sequence[tuple[str, Path]]
    rows: int
    columns: int
    colors: int
    colors_first: bool
    floats: bool
    span: Span | None

    def __getitem__(self, chosen: np.ndarray) -> np.ndarray:
        """The images of some items. Raises Refused (E0603, E0617)."""
        with ThreadPoolExecutor() as pool:
            images = [*pool.map(self._read, chosen.tolist())]
        read = np.array(images, np.uint8).reshape(len(chosen), self.rows, self.columns, self.colors)
        ordered = np.moveaxis(read, 3, 1) if self.colors_first else read
        return ordered.astype(np.float32) / np.float32(255) if self.floats else ordered

    def _read(self, item: int) -> np.ndarray:
        """An image, u8[rows, columns, colors]."""
        pillow, ops = (package(f"PIL.{each}", "images", "`images`", self.span) for each in ("Image", "ImageOps"))
        name, path = self.paths[item]
        try:
            with pillow.open(path) as image:
                if image.mode in DEEP:
                    raise ValueError(f"it has colors of more than 8 bits, {image.mode}")
                upright = ops.exif_transpose(image).convert(MODES[self.colors])
                fitted = ops.fit(upright, (self.columns, self.rows), pillow.Resampling.BICUBIC)
                return np.asarray(fitted).reshape(self.rows, self.columns, self.colors)
        except (OSError, ValueError, SyntaxError, EOFError, pillow.DecompressionBombError) as error:
            reason = shown(str(error).split("\n")[0])
            raise refuse("E0603", f"`{name}` cannot be read as an image: {reason}", self.span) from error


@frozen(eq=False)
class Captions:
    """What an input has of the captions of items."""

    packed: Packed
    model_input: Input

    def __getitem__(self, chosen: np.ndarray) -> np.ndarray:
        """The captions of some items, one a row."""
        filled = self.packed.filled(self.packed.training, chosen)[self.model_input.name]
        return np.moveaxis(filled, self.model_input.batch_position, 0)


def open_images(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Items:
    """The items of a folder of images. Raises Refused (E06xx)."""
    arguments, span = call.arguments, call.span
    folder = arguments["folder"]
    found = pictures(folder, root, span)
    if arguments["captions"] is None:
        items, texts = list(found), None
    else:
        items, texts = _captioned(call, root, found)
    # What is held out is of all folders, and of all parts of a file of captions.
    order = permutation(0, 0, len(items))
    names = [items[i] for i in order]
    arrays: dict[str, Any] = {}
    written = tuple(each for each in inputs if each.name in NAMES)
    packed = _packed(call, root, texts, order, written, seed) if texts is not None and written else None
    for model_input in inputs:
        if model_input.name == "image":
            paths = [(f"{folder}/{name}", found[name]) for name in names]
            arrays["image"] = _pictures(paths, model_input, span)
        elif model_input.name == "label" and texts is None:
            arrays["label"] = _labels(names, folder, model_input, span)
        elif packed is not None and model_input.name in NAMES:
            arrays[model_input.name] = Captions(packed, model_input)
        else:
            yields = ("image", *(NAMES if texts is not None else ("label",)))
            help = "`captions = …` names a file with text" if model_input.name in NAMES else None
            message = f"the data has no input called `{model_input.name}`"
            raise refuse("E0606", message, span, notes=[f"it yields: {', '.join(yields)}"], help=help)
    training = split_items(call, use, len(items), f"`{folder}`", "images" if texts is None else "captions")
    return Items(inputs, arrays, {}, training, len(items), seed, names)


def _pictures(paths: Sequence[tuple[str, Path]], model_input: Input, span: Span | None) -> Pictures:
    """The images as an input has them. Raises Refused (E0605, E0607)."""
    type = model_input.type
    sizes = [axis.size for axis in type.axes if axis.name != model_input.batch_axis]
    ends = [sizes[0], sizes[-1]] if len(sizes) == 3 else []
    colors = next((each for each in MODES if each in ends), 0)
    if not colors or model_input.batch_axis is None or type.dtype == "bool":
        raise refuse(
            "E0607",
            "`image` must have the batch, colors, rows and columns; or the batch, rows, columns and colors",
            span,
            notes=[f"image: {type}", "colors are 1, 3 (red, green, blue) or 4 (and how opaque)"],
            help="declare it as `image: [batch, colors, height, width]`",
        )
    if not type.is_float:
        check_largest(255, model_input, "an image", span)
        if wrong := outside(np.array([0, 255]), type.dtype):
            raise refuse("E0605", f"an image {wrong}", span, help="declare `image` as u8")
    first = sizes[0] == colors
    rows, columns = sizes[1:] if first else sizes[:2]
    return Pictures(paths, rows, columns, colors, first, type.is_float, span)


def _labels(names: Sequence[str], folder: str, model_input: Input, span: Span | None) -> np.ndarray:
    """The number of the folder that each image is in. Raises Refused (E0605, E0607)."""
    type = model_input.type
    if type.names != (model_input.batch_axis,) or type.dtype not in INTEGERS:
        notes = [f"label: {type}"]
        raise refuse("E0607", "`label` must be an integer", span, notes=notes, help="`label: i64[batch]`")
    outer = next((name for name in names if "/" not in name), None)
    if outer is not None:
        help = f"a folder of each class in `{folder}`; or, without `label` in the model, images alone"
        raise refuse("E0607", f"`{folder}/{outer}` is in no folder whose number could be its `label`", span, help=help)
    classes = sorted({name.partition("/")[0] for name in names})
    numbers = {name: number for number, name in enumerate(classes)}
    check_largest(len(classes) - 1, model_input, f"`{folder}`, with {len(classes)} folders,", span)
    return np.array([numbers[name.partition("/")[0]] for name in names])


# ------------------------------------------------------------ captions


def _captioned(call: Call, root: Path, found: Mapping[str, Path]) -> tuple[list[str], list[str]]:
    """The image and the text of each line. Raises Refused (E0601 to E0603, E0616)."""
    arguments, span = call.arguments, call.span
    folder, captions = arguments["folder"], arguments["captions"]
    path = single(captions, root, span)
    read = _csv(path, captions, span) if path.suffix.lower() == ".csv" else records(path, captions, span)
    names, texts = list[str](), list[str]()
    for record, where in read:
        name = record.get("file_name")
        if not isinstance(name, str) or name not in found:
            help = f'`file_name` is relative to `{folder}`: {{"file_name": "{next(iter(found))}", "text": "…"}}'
            raise refuse(
                "E0616", f"{where} names {shown(repr(name))}, which is no image in `{folder}`", span, help=help
            )
        names.append(name)
        texts.append(text_of(record, where, arguments["field"], span))
    if not names:
        raise refuse("E0604", f"`{captions}` has no captions", span)
    return names, texts


def _csv(path: Path, name: str, span: Span | None) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of a table, and which line each ends on. Raises Refused (E0616)."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, strict=True)
            for row in table:
                where = f"line {table.line_num} of `{name}`"
                if None in row or None in row.values():
                    raise refuse("E0616", f"{where} has not as many fields as the first", span)
                yield dict(row), where
    except (csv.Error, UnicodeDecodeError) as error:
        raise refuse("E0616", f"`{name}` is no table: {shown(str(error))}", span) from error


def _packed(
    call: Call, root: Path, texts: Sequence[str], order: np.ndarray, inputs: tuple[Input, ...], seed: int
) -> Packed:
    """The captions as rows of one document each. Raises Refused (E06xx)."""
    arguments, span = call.arguments, call.span
    captions, length = arguments["captions"], length_of(inputs, span)
    check_ignored(inputs, "the last id of a document has no target", span)
    files = [(captions, single(captions, root, span))]
    how = f"captions {arguments['field']}"
    corpus = documents(files, lambda path, name: ((text, True) for text in texts), how, encoder_of(call, root), span)
    check_documents(corpus, inputs, f"`{captions}`", span)
    if not arguments["cut"]:
        check_lengths(
            corpus, length, lambda number: f"caption {number} of `{captions}`", "what is longer is left out", span
        )
    rows = rows_alone(corpus, order, length)
    return Packed(inputs, corpus.ids, None, rows, rows, length, seed, f"`{captions}`", span)
