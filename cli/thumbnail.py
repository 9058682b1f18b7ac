"""Images as text: two pixels a character in 24-bit colours, or their brightness by characters where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

COLUMNS, LINES = 48, 24  # at most
COLORS = (1, 3, 4)  # how many an image has
DARK_TO_BRIGHT = " .:-=+*#%@"


def thumbnail(array: np.ndarray, colored: bool) -> Iterator[str]:
    """An image, with its colors first or last: what it is, and what it looks like. Floats are from 0 to 1, or brought
    there.
    """
    import numpy as np

    low, high = float(array.min()), float(array.max())
    pixels = np.moveaxis(array, 0, 2) if array.shape[0] in COLORS and array.shape[2] not in COLORS[1:] else array
    yield f"image: {array.dtype}{list(array.shape)}, from {low:.4g} to {high:.4g}, {array.mean():.4g} on average"
    if array.dtype.kind == "f":
        scale = 1.0 if low >= 0 and high <= 1 else high - low
        pixels = (pixels - (0 if scale == 1 else low)) / (scale or 1.0) * 255
    tall = 2 if colored else 1  # pixels of a character
    step = max(pixels.shape[0] / (LINES * tall), pixels.shape[1] / COLUMNS, 1.0)
    # A character is twice as high as it is wide.
    rows = np.arange(0, pixels.shape[0], step if colored else 2 * step).astype(int)
    pixels = pixels[rows][:, np.arange(0, pixels.shape[1], step).astype(int)].clip(0, 255)
    if not colored:
        levels = (pixels[:, :, :3].mean(2) / 256 * len(DARK_TO_BRIGHT)).astype(int)
        yield from ("".join(DARK_TO_BRIGHT[each] for each in line).rstrip() for line in levels)
        return
    pixels = np.broadcast_to(pixels, (*pixels.shape[:2], 3)) if pixels.shape[2] == 1 else pixels[:, :, :3]
    pixels = np.concatenate([pixels, np.zeros((len(pixels) % 2, *pixels.shape[1:]))]).astype(int)
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        cells = (f"\x1b[38;2;{r};{g};{b};48;2;{x};{y};{z}m▀" for (r, g, b), (x, y, z) in zip(upper, lower, strict=True))
        yield "".join(cells) + "\x1b[0m"
