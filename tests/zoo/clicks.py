"""Makes specs/zoo/clicks.npz, the data of `dlrm.par`: `python -m tests.zoo.clicks`.

Each category of each table has a hidden taste, a short vector. Whether something is clicked on depends on the products
of the tastes of pairs of categories, on how popular they are, and on the counts.
"""

from __future__ import annotations

import numpy as np

from tests.files import SPECS

PATH = SPECS / "zoo" / "clicks.npz"
ITEMS, COUNTS, TABLES, ROWS, TASTE = 8192, 4, 6, 40, 3


def clicks() -> dict[str, np.ndarray]:
    """Counts and categories of items, and whether each was clicked on."""
    draw = np.random.Generator(np.random.PCG64(1906))
    count = draw.poisson(draw.gamma(1.0, 3.0, (ITEMS, COUNTS))).clip(0, 255)
    id = np.floor(ROWS * draw.random((ITEMS, TABLES)) ** 2).astype(np.int64)  # some are frequent
    taste = draw.normal(0.0, 0.6, (TABLES, ROWS, TASTE))
    popular = draw.normal(0.0, 1.0, (TABLES, ROWS))
    own = taste[np.arange(TABLES), id]
    pairs = np.einsum("ntk,nuk->n", own, own) - np.einsum("ntk,ntk->n", own, own)
    score = 0.5 * pairs + popular[np.arange(TABLES), id].sum(1) + np.log1p(count) @ draw.normal(0.0, 0.5, COUNTS)
    clicked = draw.random(ITEMS) < 1 / (1 + np.exp(-(score - np.median(score))))
    return {"count": count.astype(np.float16), "id": id.astype(np.uint8), "click": clicked.astype(np.float16)}


if __name__ == "__main__":
    np.savez_compressed(PATH, **clicks())
