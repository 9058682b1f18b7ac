"""Kernels in C++: what fills up a vector or a tile, causality, factors, threads, strides, and what is loaded."""

from tests.planted.planted import Planted

FOLDER = "runtime/kernels/native"
NATIVE = "tests/runtime/kernels/test_native.py"
POINTWISE = "tests/runtime/kernels/test_pointwise.py"

MISTAKES = [
    Planted(
        "unseen-keys-of-the-last-tile-get-gradients",
        f"{FOLDER}/attention.cc",
        "      memset(slopes + own * BLOCK, 0, (across - own) * BLOCK * sizeof(float));\n",
        "",
        NATIVE,
    ),
    Planted(
        "a-query-sees-the-next-key",
        f"{FOLDER}/attention.cc",
        "return s.causal ? ~first(key - query) : first(LANES);",
        "return s.causal ? ~first(key - query - 1) : first(LANES);",
        NATIVE,
    ),
    Planted(
        "gradient-of-queries-without-their-scale",
        f"{FOLDER}/attention.cc",
        "s.dq[2], made, count, width, s.size, scale);",
        "s.dq[2], made, count, width, s.size, 1.0f);",
        NATIVE,
    ),
    Planted(
        "variance-counts-what-fills-up-a-vector",
        f"{FOLDER}/rows.cc",
        "      if (n - i < LANES) each = first(n - i) ? each : Vector{};\n",
        "",
        NATIVE,
    ),
    Planted(
        "gradient-of-a-scale-is-the-first-thread's",
        f"{FOLDER}/rows.cc",
        "for (ptrdiff_t part = 1; part < threads; part++)",
        "for (ptrdiff_t part = threads; part < threads; part++)",
        NATIVE,
    ),
    Planted(
        "what-is-added-to-the-gradient-of-a-norm-is-lost",
        f"{FOLDER}/rows.cc",
        "        if (plus) each += load(plus + row * n + i, n - i);\n",
        "",
        NATIVE,
    ),
    Planted(
        "the-last-row-of-a-matrix-is-not-turned",
        f"{FOLDER}/transpose.cc",
        "store(to + (column + i) * rows + row, square[i], down);",
        "store(to + (column + i) * rows + row, square[i], down < LANES ? down - 1 : down);",
        NATIVE,
    ),
    Planted(
        "a-part-of-a-matrix-turned-as-if-dense",
        "runtime/kernels/products.py",
        "if functions is None or not source.is_contiguous():",
        "if functions is None:",
        NATIVE,
    ),
    Planted(
        "the-last-elements-of-a-parameter-not-updated",
        f"{FOLDER}/updates.cc",
        "for (ptrdiff_t j = 0; j < own[4]; j += LANES) {",
        "for (ptrdiff_t j = 0; j + LANES <= own[4]; j += LANES) {",
        NATIVE,
    ),
    Planted(
        "decay-of-a-mean-taken-twice",
        f"{FOLDER}/updates.cc",
        "first += of_mean * (d - first);",
        "first += of_mean * (d - first) - of_mean * (1.0f - of_mean) * first;",
        NATIVE,
    ),
    Planted(
        "squares-behind-the-end-of-a-block",
        f"{FOLDER}/updates.cc",
        "for (; j < end; j += LANES) {",
        "for (; j + LANES <= end; j += LANES) {",
        NATIVE,
    ),
    Planted(
        "kernels-read-tensors-that-lie-otherwise-as-if-dense",
        "runtime/kernels/pointwise.py",
        "d, x = (each.contiguous() for each in ((d, x) if",
        "d, x = (each for each in ((d, x) if",
        POINTWISE,
    ),
    Planted(
        "a-library-that-others-wrote-is-loaded",
        f"{FOLDER}/library.py",
        "            if not _ours(each):\n",
        "            if False:\n",
        NATIVE,
    ),
]
