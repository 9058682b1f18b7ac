"""Recurrences: their loops, their gradients, and what ranks exchange where positions are split."""

from tests.planted.planted import Planted

FILE = "tests/reference/test_files.py::test_a_file_computes_what_it_means"
KERNEL = "tests/runtime/kernels/test_linear_scan.py"
DERIVATIVE = "tests/compiler/ops/test_ops.py::test_gradient_is_the_derivative"
BLOCKS = "tests/compiler/ops/test_blockwise.py::test_replacement_equals_the_node"
WAYS = "tests/compiler/ops/test_sharding_rules.py::test_every_way_is_sound"
VERIFY = "verify tests/planted/files/recurrences.par"

MISTAKES = [
    Planted(
        "gradient-by-the-factor-of-the-same-position",
        "runtime/kernels/linear_scan.py",
        "factors = x[_edge(count, backward)[1]]",
        "factors = x[rest]",
        f"{DERIVATIVE}[linear_scan]",
    ),
    Planted(
        "gradient-of-factors-by-the-state-after",
        "runtime/kernels/linear_scan.py",
        "step, edge = (1, count - 1) if backward else (-1, 0)",
        "step, edge = (0, count - 1) if backward else (0, 0)",
        f"{DERIVATIVE}[linear_scan]",
    ),
    Planted(
        "gradient-in-the-same-direction",
        "runtime/kernels/linear_scan.py",
        "_follow(factors, z[rest], g, state, not backward)",
        "_follow(factors, z[rest], g, state, backward)",
        f"{DERIVATIVE}[linear_scan-backward]",
    ),
    Planted(
        "states-of-ranks-with-their-own-last-one",
        "runtime/kernels/linear_scan.py",
        "    if exclusive:\n        out.copy_(_moved(out, start, backward))\n",
        "",
        VERIFY,
    ),
    Planted(
        "states-before-blocks-always-from-the-start",
        "compiler/ops/linear_scan.py",
        "after = states_before(build, a, products, axis, block, not self.backward)",
        "after = states_before(build, a, products, axis, block, self.backward)",
        BLOCKS,
    ),
    Planted(
        "what-flows-back-without-the-factor",
        "compiler/ops/linear_scan.py",
        'products = pointwise(build, "multiply", d, a)',
        "products = d",
        BLOCKS,
    ),
    Planted(
        "ends-of-blocks-at-the-wrong-end",
        "compiler/ops/linear_scan.py",
        "{0 if self.backward else self.block - 1}",
        "{self.block - 1}",
        BLOCKS,
    ),
    Planted(
        "last-states-kept-by-the-next-block",
        "compiler/ops/linear_scan.py",
        "Shift(axis, -1 if self.backward else 1)",
        "Shift(axis, 1)",
        BLOCKS,
    ),
    Planted(
        "scanned-axis-split-without-blocks",
        "compiler/ops/linear_scan.py",
        "if self.block or name != self.over]",
        "if self.block or name]",
        WAYS,
    ),
    Planted(
        "gradient-of-a-common-factor-in-each-part",
        "compiler/ops/linear_scan.py",
        "(name if results[0].has(name) else SUM, name),",
        "(name if results[0].has(name) else None, name),",
        f"{WAYS}[linear_scan_gradient]",
    ),
    Planted(
        "chunks-begin-with-their-own-end",
        "runtime/kernels/linear_scan.py",
        "between[first : first + chunks]",
        "between[1 - first : 1 - first + chunks]",
        KERNEL,
    ),
    Planted(
        "left-over-positions-left-out",
        "runtime/kernels/linear_scan.py",
        "    if whole < count:\n",
        "    if whole > count:\n",
        KERNEL,
    ),
    Planted(
        "blocks-from-the-end-after-their-last-position",
        "runtime/kernels/linear_scan.py",
        "        state = made[0 if backward else -1]\n",
        "        state = made[-1]\n",
        KERNEL,
    ),
    Planted(
        "state-in-bf16",
        "runtime/kernels/linear_scan.py",
        "    x = widened(x)\n",
        "",
        KERNEL,
    ),
    Planted(
        "shift-the-same-way-back",
        "compiler/ops/shape.py",
        "Shift(self.over, -self.by)",
        "Shift(self.over, self.by)",
        f"{DERIVATIVE}[shift]",
    ),
    Planted(
        "states-before-at-the-wrong-end",
        "compiler/ops/scan.py",
        "narrow({dim}, {1 if self.backward else 0}, {size - 1})",
        "narrow({dim}, {0 if self.backward else 1}, {size - 1})",
        f"{FILE}[recurrences]",
    ),
    Planted(
        "gradient-of-a-loop-in-its-own-direction",
        "compiler/ops/scan_gradient.py",
        "backward=not backward,",
        "backward=backward,",
        f"{FILE}[recurrences]",
    ),
    Planted(
        "gradient-of-each-position-alone",
        "compiler/ops/scan_gradient.py",
        'whole = pointwise(inner, "add", through[i], direct[i]) if i in direct else through[i]',
        "whole = direct.get(i, through[i])",
        f"{FILE}[recurrences]",
    ),
    Planted(
        "one-mask-for-all-positions",
        "compiler/passes/loops.py",
        "sliced = node.op.draws or any(",
        "sliced = any(",
        f"{FILE}[recurrences]",
    ),
    Planted(
        "sum-of-the-last-position",
        "runtime/kernels/scan.py",
        "sums = [total + x for total, x in zip(sums, terms, strict=True)]",
        "sums = [x for _, x in zip(sums, terms, strict=True)]",
        f"{FILE}[recurrences]",
    ),
    Planted(
        "sums-over-positions-in-bf16",
        "runtime/kernels/scan.py",
        "[widened(x) for x in terms]",
        "list(terms)",
        "tests/runtime/kernels/test_scan.py",
    ),
]
