"""Initial values, and the streams of random words that they are made of."""

from tests.planted.planted import Planted

FILE = "tests/reference/test_files.py::test_a_file_computes_what_it_means"
INITIAL = "tests/runtime/test_initial.py"

MISTAKES = [
    Planted(
        "seed-not-given",
        "runtime/rank.py",
        "self.plan.train.seed, name, record.fans)",
        "0, name, record.fans)",
        f"{FILE}[tied]",
    ),
    Planted(
        "one-stream-for-all-parameters",
        "runtime/initial.py",
        'return _draw(call, type, stream(seed, "initial", 0, name), fan, region)',
        'return _draw(call, type, stream(seed, "initial", 0, name.split(".")[-1]), fan, region)',
        f"{FILE}[attention]",
    ),
    Planted(
        "fans-exchanged",
        "compiler/ops/dot.py",
        "return summed, max(1, type.elements // summed)",
        "return max(1, type.elements // summed), summed",
        f"{FILE}[figures]",
    ),
    Planted(
        "fan-in-of-all-axes",
        "compiler/ops/dot.py",
        "summed = prod(type.axis(name).size for name in self.over)",
        "summed = type.elements // type.axes[-1].size",
        f"{FILE}[axes]",
    ),
    Planted(
        "later-slabs-begin-at-a-wrong-word",
        "runtime/initial.py",
        "start = (row * shape[axis] + index) * inner_size",
        "start = (row * shape[axis] + first) * inner_size",
        INITIAL,
    ),
    Planted(
        "slabs-drawn-from-their-own-start",
        "runtime/initial.py",
        "start = (row * shape[axis] + index) * inner_size",
        "start = (row * shape[axis] + index - first) * inner_size",
        INITIAL,
    ),
    Planted(
        "every-slab-of-a-whole-tensor-the-first",
        "runtime/initial.py",
        "start = (row * shape[axis] + index) * inner_size",
        "start = (row * shape[axis] + (index if first or last < shape[axis] else first)) * inner_size",
        INITIAL,
    ),
    Planted(
        "kaiming-for-sigmoids",
        "runtime/initial.py",
        "unit_normal(word) * sqrt(2.0 / fan[0])",
        "unit_normal(word) * sqrt(1.0 / fan[0])",
        f"{FILE}[figures]",
    ),
    Planted(
        "xavier-by-fan-in",
        "runtime/initial.py",
        "sqrt(6.0 / (fan[0] + fan[1]))",
        "sqrt(6.0 / (2 * fan[0]))",
        f"{FILE}[figures]",
    ),
    Planted(
        "uniform-from-zero",
        "runtime/initial.py",
        "return (unit_uniform(word) * 2.0 - 1.0) * bound",
        "return unit_uniform(word) * bound",
        f"{FILE}[figures]",
    ),
    Planted(
        "radius-and-angle-of-one-half",
        "runtime/initial.py",
        "angle = (word & np.uint64(0xFFFFFFFF)).astype(np.float64)",
        "angle = (word >> np.uint64(32)).astype(np.float64)",
        INITIAL,
    ),
    Planted(
        "words-skipped-twice",
        "runtime/philox.py",
        "random_raw(skipped + count)[skipped:]",
        "random_raw(2 * skipped + count)[2 * skipped :]",
        INITIAL,
    ),
    Planted(
        "the-stream-of-another-purpose",
        "runtime/philox.py",
        'text = f"{seed}/{purpose}/{step}/{name}"',
        'text = f"{seed}/{step}/{name}"',
        f"{INITIAL}::test_the_stream_does_not_change_between_versions",
    ),
    Planted(
        "states-split-along-the-smallest-axis",
        "compiler/passes/shard/defaults.py",
        "return max(whole, key=lambda axis: axis.size)",
        "return min(whole, key=lambda axis: axis.size)",
        "tests/compiler/passes/shard/test_defaults.py",
    ),
    Planted(
        "states-split-along-the-last-axis",
        "compiler/passes/shard/defaults.py",
        "return max(whole, key=lambda axis: axis.size)",
        "return max(reversed(whole), key=lambda axis: axis.size)",
        "tests/compiler/passes/shard/test_defaults.py",
    ),
    Planted(
        "gradients-stored-as-states-only",
        "compiler/passes/shard/defaults.py",
        '"grad": ("grad", "state"), "state"',
        '"grad": ("state",), "state"',
        "tests/compiler/passes/shard/test_defaults.py",
    ),
]
