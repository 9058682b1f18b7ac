"""Products in eight bits: which, of what, and scaled by what."""

from tests.planted.planted import Planted

KERNELS = "tests/runtime/kernels/test_float8.py"
TRAINING = "tests/training/test_float8.py"
CASES = "tests/compiler/passes/test_cases.py"
RULES = "tests/compiler/ops/test_sharding_rules.py"

MISTAKES = [
    Planted(
        "rows-fill-half-the-range",
        "runtime/kernels/float8.py",
        "- (8 << fraction)",
        "- (7 << fraction)",
        KERNELS,
    ),
    Planted(
        "rows-at-the-bound-overflow",
        "runtime/kernels/float8.py",
        "((1 << fraction) // 4 - 1)",
        "((1 << fraction) // 8 - 1)",
        KERNELS,
    ),
    Planted(
        "infinities-vanish",
        "runtime/kernels/float8.py",
        "return scale + (wide - wide)",
        "return scale",
        KERNELS,
    ),
    Planted(
        "columns-not-scaled-back",
        "runtime/kernels/float8.py",
        ".mul_(left.to(dtype)).mul_(right.to(dtype))",
        ".mul_(left.to(dtype))",
        TRAINING,
    ),
    Planted(
        "gradient-of-a-parameter-in-eight-bits",
        "compiler/ops/dot.py",
        "position = next((i for i, value in enumerate((a, b)) if value is weight), None)",
        "position = None if weight is None else 0",
        TRAINING,
    ),
    Planted(
        "gradient-of-an-activation-in-sixteen",
        "compiler/ops/dot.py",
        "position = next((i for i, value in enumerate((a, b)) if value is weight), None)",
        "position = None",
        TRAINING,
    ),
    Planted(
        "largest-of-the-numbers-not-of-their-magnitudes",
        "compiler/passes/float8.py",
        'sizes = pointwise(build, "abs", value)',
        "sizes = value",
        TRAINING,
    ),
    Planted(
        "one-quantization-for-both-passes",
        "compiler/passes/float8.py",
        "key = value, frozenset(over), node.stage, node.phase",
        "key = value, node.stage",
        CASES,
    ),
    Planted(
        "router-in-eight-bits",
        "compiler/passes/float8.py",
        "if node.op.decides or passes:",
        "if passes:",
        CASES,
    ),
    Planted(
        "parts-of-a-row-with-scales-of-their-own",
        "compiler/ops/float8.py",
        "return aligned_rules(operands, results)",
        "return tuple(ShardingRule((n, None), (n,)) for n in results[0].names)",
        RULES,
    ),
    Planted(
        "sum-over-a-split-row-taken-for-whole",
        "compiler/ops/float8.py",
        "summed = tuple(ShardingRule((name, name, None, None), (SUM,)) for name in self.over)",
        "summed = tuple(ShardingRule((name, name, None, None), (None,)) for name in self.over)",
        "verify specs/llama.par batch=8 seq=16 embed=32 ffn=48 vocab=32 train.precision=fp8",
    ),
]
