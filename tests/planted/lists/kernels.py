"""Kernels, and what is emitted around them: products, rows, attention, positions, random numbers, dtypes."""

from tests.planted.planted import Planted

FILE = "tests/reference/test_files.py::test_a_file_computes_what_it_means"
WAYS = "tests/compiler/test_ways.py::test_every_way_is_sound"
ORDERS = "tests/compiler/test_ops.py::test_results_do_not_depend_on_the_order_of_axes"
DERIVATIVE = "tests/compiler/test_ops.py::test_gradient_is_the_derivative"
PRODUCTS = "tests/runtime/test_products.py"
DTYPES = "tests/compiler/test_dtypes.py"
PASSES = "tests/compiler/test_passes.py::test_a_pass_makes_what_is_expected"

MISTAKES = [
    Planted(
        "large-products-overwrite-their-accumulator",
        "runtime/kernels/products.py",
        "return total.add_(_product(a, b)) if _by_onednn(a) else total.addmm_(a, b)",
        "return total.copy_(_product(a, b)) if _by_onednn(a) else total.addmm_(a, b, beta=0)",
        PRODUCTS,
    ),
    Planted(
        "large-products-emitted-over-their-accumulator",
        "compiler/ops/dot.py",
        'return f"kernels.add_matmul({total}, {left}, {right})"',
        'return f"{total}.copy_(kernels.matmul({left}, {right}))"',
        PRODUCTS,
    ),
    Planted(
        "operands-exchanged-where-square",
        "runtime/kernels/products.py",
        "        return torch.mm(a, b)\n",
        "        return torch.mm(b, a) if a.shape == b.shape else torch.mm(a, b)\n",
        PRODUCTS,
    ),
    Planted(
        "weight-not-turned-for-onednn",
        "runtime/kernels/products.py",
        "_linear_pointwise.default(a, b.t(), None,",
        "_linear_pointwise.default(a, b if a.shape == b.shape else b.t(), None,",
        PRODUCTS,
    ),
    Planted(
        "summed-axes-in-each-operands-order",
        "compiler/ops/dot.py",
        "            self._matrix(self.b, self.depth, self.columns),\n",
        "            self._matrix(\n"
        "                self.b,\n"
        "                tuple(axis for axis in self.b.type.axes if axis in self.depth),\n"
        "                self.columns,\n"
        "            ),\n",
        f"{FILE}[axes]",
    ),
    Planted(
        "batch-axes-of-a-product-in-another-order",
        "compiler/ops/dot.py",
        "return permuted(text, plan.product_axes, results[0].names)",
        "return permuted(text, plan.product_axes, plan.product_axes)",
        f"{ORDERS}[dot-batch]",
    ),
    Planted(
        "turned-matrix-taken-for-a-straight-one",
        "compiler/ops/dot.py",
        "return list(names) == turned and turned != straight",
        "return list(names) == turned and turned != straight or len(first) > 1 and list(names)[-1] != straight[-1]",
        f"{FILE}[axes]",
    ),
    Planted(
        "queries-of-a-part-see-from-the-start",
        "runtime/kernels/attention.py",
        'return False, q4.new_full((q4.shape[-2], k4.shape[-2]), float("-inf")).triu(start + 1)',
        'return False, q4.new_full((q4.shape[-2], k4.shape[-2]), float("-inf")).triu(1)',
        "verify tests/planted/files/attention.par",
    ),
    Planted(
        "queries-do-not-see-themselves",
        "runtime/kernels/attention.py",
        "device=q4.device).tril(start)",
        "device=q4.device).tril(start - 1)",
        f"{FILE}[attention]",
    ),
    Planted(
        "mask-instead-of-causal",
        "runtime/kernels/attention.py",
        "mask = below if mask is None else mask & below",
        "mask = below if mask is None else mask",
        f"{FILE}[attention]",
    ),
    Planted(
        "bias-scaled",
        "runtime/kernels/attention.py",
        "scores = scores + _extra(bias, q, k, groups)",
        "scores = scores + _extra(bias, q, k, groups) * scale",
        f"{FILE}[attention]",
    ),
    Planted(
        "gradient-of-scores-not-scaled",
        "runtime/kernels/attention.py",
        "ds = (ds * scale).to(q4.dtype)",
        "ds = ds.to(q4.dtype)",
        f"{FILE}[attention]",
    ),
    Planted(
        "gradients-of-repeated-keys-of-one-head",
        "runtime/kernels/attention.py",
        "gradient = gradient.sum(tuple(range(len(batch), len(batch) + len(own))))",
        "gradient = gradient.select(len(batch), 0)",
        f"{FILE}[attention]",
    ),
    Planted(
        "rotation-of-a-part-from-the-start",
        "runtime/kernels/positions.py",
        "cos, sin = cos[start:], sin[start:]",
        "cos, sin = cos[: x.shape[-2]], sin[: x.shape[-2]]",
        "verify tests/planted/files/attention.par",
    ),
    Planted(
        "angles-by-the-whole-axis",
        "runtime/kernels/positions.py",
        "rate = base ** (-torch.arange(half, dtype=torch.float64, device=device) / half)",
        "rate = base ** (-torch.arange(half, dtype=torch.float64, device=device) / (2 * half))",
        f"{FILE}[axes]",
    ),
    Planted(
        "one-word-for-radius-and-angle",
        "runtime/kernels/positions.py",
        "other = _mixed((index.expand(tuple(shape)) * 2 + 2) * _MIX[2] + stream)",
        "other = _mixed((index.expand(tuple(shape)) * 2 + 1) * _MIX[2] + stream)",
        f"{FILE}[axes]",
    ),
    Planted(
        "random-numbers-the-same-every-step",
        "runtime/kernels/positions.py",
        "stream = _scalar_mixed(c.seed, c.step, key)",
        "stream = _scalar_mixed(c.seed, 1, key)",
        f"{FILE}[axes]",
    ),
    Planted(
        "dropout-keeps-what-it-drops",
        "runtime/kernels/positions.py",
        "return unit >= scale",
        "return unit < scale",
        f"{FILE}[axes]",
    ),
    Planted(
        "dropout-scaled-by-the-rate",
        "compiler/ops/position.py",
        "{1 / (1 - self.rate)!r}",
        "{1 / self.rate!r}",
        f"{FILE}[axes]",
    ),
    Planted(
        "scale-of-a-sample-lost",
        "compiler/lowering/build.py",
        "            scale = float(value)\n",
        "            scale = float(value) and 1.0\n",
        f"{FILE}[axes]",
    ),
    Planted(
        "rows-of-other-parts-not-zero",
        "runtime/kernels/rows.py",
        "return rows.masked_fill_(_over_rows(outside, rows), 0)",
        "return rows",
        "verify specs/gpt.par",
    ),
    Planted(
        "rows-of-other-parts-added",
        "runtime/kernels/rows.py",
        "        values = values.masked_fill(_over_rows(outside, values), 0)\n",
        "",
        "verify specs/gpt.par",
    ),
    Planted(
        "targets-of-other-parts-taken",
        "runtime/kernels/rows.py",
        "        taken = taken.masked_fill(outside.unsqueeze(-1), 0)\n",
        "",
        "verify specs/gpt.par",
    ),
    Planted(
        "first-row-beyond-counts-as-inside",
        "runtime/kernels/rows.py",
        "return ids.remainder(count), (ids < 0) | (ids >= count)",
        "return ids.remainder(count), (ids < 0) | (ids > count)",
        "verify specs/gpt.par",
    ),
    Planted(
        "index-without-the-start-of-its-part",
        "runtime/kernels/rows.py",
        "return torch.where(found, -(best.squeeze(-1) + start), _NOWHERE)",
        "return torch.where(found, -best.squeeze(-1), _NOWHERE)",
        "verify specs/llama.par",
    ),
    Planted(
        "gradient-of-a-norm-not-centred",
        "runtime/kernels/rows.py",
        "    if center:\n        result -= wide_d.mean(over, keepdim=True)\n",
        "",
        "tests/compiler/test_ops.py::test_gradient_is_the_derivative",
    ),
    Planted(
        "gradient-of-a-shift-by-the-scale",
        "runtime/kernels/rows.py",
        "for x in (d * y, d))",
        "for x in (d * y, d * scale))",
        "tests/compiler/test_ops.py::test_results_do_not_depend_on_the_order_of_axes",
    ),
    Planted(
        "sum-left-out-in-a-kernel",
        "runtime/kernels/rows.py",
        "    return inner if plus is None else inner.add_(plus)\n",
        "    return inner\n",
        "tests/compiler/test_sums.py",
    ),
    Planted(
        "derivative-of-gelu-in-blocks",
        "runtime/kernels/pointwise.py",
        "_gelu_derivative(part, of_part).mul_(d_part)",
        "_gelu_derivative(part, of_part)",
        "tests/runtime/test_pointwise.py",
    ),
    Planted(
        "cube-of-gelu",
        "runtime/kernels/pointwise.py",
        "CUBE = 0.044715",
        "CUBE = 0.44715",
        "tests/runtime/test_pointwise.py",
    ),
    Planted(
        "sums-in-half-precision",
        "compiler/ops/op.py",
        'return "f32" if dtype == "bf16" else dtype',
        "return dtype",
        DTYPES,
    ),
    Planted(
        "losses-in-half-precision",
        "compiler/lowering/functions.py",
        "wide = [cast(site.build, value, accumulation(value.type.dtype)) for value in (a, b)]",
        "wide = [a, b]",
        f"{PASSES}[build/differences_in_bf16]",
    ),
    Planted(
        "softmax-in-half-precision",
        "compiler/lowering/functions.py",
        "    x = cast(site.build, x, accumulation(x.type.dtype))\n    peak",
        "    peak",
        f"{PASSES}[build/softmax_in_bf16]",
    ),
    Planted(
        "masters-in-half-precision",
        "compiler/lowering/build.py",
        "value.type.with_dtype(accumulation(value.type.dtype)),",
        "value.type,",
        DTYPES,
    ),
    Planted(
        "comparisons-in-the-dtype-of-their-result",
        "compiler/lowering/build.py",
        "dtype = tensors[0].type.dtype if tensors else accumulation(self.precision)",
        'dtype = "i64"',
        f"{FILE}[figures]",
    ),
]
