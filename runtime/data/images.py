"""`images(folder, captions, …)`: images, each with the text of a line of `captions`, or with the number of its folder.

`image` is a picture as the model's axes say: made upright, resized so that it covers the rows and columns, and cut to
them around its middle; floats from 0 to 1, or integers from 0 to 255. `label` is the number of the folder in `folder`
that it is in, by name. `captions` is a file of lines of JSON, or of CSV, as imagefolder of the package datasets has
them: an item for each line, with the image that `file_name` names in `folder`. Of its text there are `tokens`,
`targets`, `segments` and `positions`, as rows of one document have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partita.dsl.config.builtins import HOLDOUT, Flag, Setting, Text
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data.files import END, TOKENIZER, matching, single, with_tokenizer
from partita.runtime.data.registry import Source, opened_by, register

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
MAX_READ = 1_000  # images that are read to know them; of more, names and sizes are compared


def pictures(folder: str, root: Path, span: Span | None) -> dict[str, Path]:
    """The images in a folder and the folders in it, by their names there, sorted. Raises Refused (E0601 to E0603)."""
    start = root / folder
    found = [path for path in matching(f"{folder}/**/*", root, span) if path.suffix.lower() in ENDINGS]
    if not found:
        few = ", ".join(ENDINGS[:4])
        raise refuse("E0601", f"`{folder}` has no images", span, notes=[f"looked for {few}, … in {start.resolve()}"])
    return {path.relative_to(start).as_posix(): path for path in found}


def _files(call: Call, root: Path) -> list[tuple[str, Path]]:
    folder, captions = call.arguments["folder"], call.arguments["captions"]
    found = pictures(folder, root, call.span)
    more = [] if captions is None else [(captions, single(captions, root, call.span))]
    if len(found) <= MAX_READ:
        return [*((f"{folder}/{name}", path) for name, path in found.items()), *more]
    return [(f"names and sizes in {folder}", _list(list(found.items()), call.span)), *more]


def _list(found: Sequence[tuple[str, Path]], span: Span | None) -> Path:
    """A file of the cache that lists images and their sizes."""
    from partita.runtime.data import cache

    text = "".join(f"{path.stat().st_size} {name}\n" for name, path in found)
    return cache.kept(text, "images", span)


register(
    Source(
        "images",
        (
            Setting("folder", Text()),
            Setting("captions", Text(), None),
            Setting("field", Text(), "text"),
            TOKENIZER,
            END,
            Setting("cut", Flag(), False),
            HOLDOUT,
        ),
        example='images("photos", captions = "photos/metadata.jsonl")',
        open=opened_by("pictures", "open_images"),
        textual=True,
        files=with_tokenizer(_files),
    )
)
