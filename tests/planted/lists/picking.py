"""Elements picked by ids, and cumulative sums: gradients, what shards contribute, what is added to blocks."""

from tests.planted.planted import Planted

DERIVATIVE = "tests/compiler/ops/test_ops.py::test_gradient_is_the_derivative"
BLOCKS = "tests/compiler/ops/test_blockwise.py::test_replacement_equals_the_node"
WAYS = "tests/compiler/ops/test_sharding_rules.py::test_every_way_is_sound"
IGNORED = "tests/reference/test_ignored_targets.py"
VERIFY = "verify tests/planted/files/picking.par"

MISTAKES = [
    Planted(
        "gradient-of-sums-in-the-same-direction",
        "compiler/ops/cumsum.py",
        "CumulativeSum(self.over, not self.backward, self.exclusive), d)",
        "CumulativeSum(self.over, self.backward, self.exclusive), d)",
        f"{DERIVATIVE}[cumsum]",
    ),
    Planted(
        "sums-split-as-if-they-began-anew",
        "compiler/ops/cumsum.py",
        "if self.block or name != self.over]",
        "]",
        f"{WAYS}[cumsum]",
    ),
    Planted(
        "blocks-begin-with-their-own-sum",
        "runtime/kernels/cumsum.py",
        "    if exclusive:\n",
        "    if False:\n",
        BLOCKS,
    ),
    Planted(
        "what-precedes-blocks-not-set-to-zero",
        "runtime/kernels/cumsum.py",
        "        sums.select(along, -1 if backward else 0).zero_()\n",
        "",
        BLOCKS,
    ),
    Planted(
        "what-precedes-blocks-not-added",
        "runtime/kernels/cumsum.py",
        "    if before is not None:\n",
        "    if before is None and block:\n",
        f"{VERIFY} layout=positions",
    ),
    Planted(
        "one-hot-of-a-shard-from-zero",
        "compiler/ops/lookup.py",
        'f"{text}{start_argument(self.axis, self.shards)})"',
        'f"{text})"',
        VERIFY,
    ),
    Planted(
        "mean-over-ignored-targets-too",
        "compiler/passes/functions.py",
        'counts = pointwise(build, "not_equal", targets',
        'counts = pointwise(build, "greater_equal", targets',
        IGNORED,
    ),
    Planted(
        "accuracy-of-ignored-targets-too",
        "compiler/passes/functions.py",
        "evolve(site, operands=(logits, targets, *fixed))",
        'evolve(site, operands=(logits, targets, *fixed), options={"over": site.options["over"]})',
        IGNORED,
    ),
    Planted(
        "nothing-divided-by-nothing",
        "compiler/passes/functions.py",
        'whole = pointwise(build, "where", none, constant(build, 1.0, whole), whole)',
        "none = whole",
        IGNORED,
    ),
    Planted(
        "ignored-ids-counted-as-out-of-range",
        "compiler/passes/guard.py",
        "    if ignored is not None:\n        counts",
        "    if False:\n        counts",
        IGNORED,
    ),
    Planted(
        "either-for-both",
        "compiler/ops/pointwise.py",
        '"logical_and": Function("{0} & {1}"',
        '"logical_and": Function("{0} | {1}"',
        "tests/reference/test_files.py::test_a_file_computes_what_it_means[picking]",
    ),
]
