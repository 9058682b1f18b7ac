"""What `check` says of sizes without compiling: which rules apply to a tensor, and what it calls things."""

from tests.planted.planted import Planted

SIZES = "tests/dsl/test_divisibility.py"

MISTAKES = [
    Planted(
        "rules-for-all-though-one-names-the-tensor",
        "dsl/divisibility.py",
        "_assigned(own or general, type.names)",
        "_assigned(general, type.names)",
        f"{SIZES}::test_what_is_checked",
    ),
    Planted(
        "an-axis-split-by-two-rules",
        "dsl/divisibility.py",
        "target.name in names and target.name not in split and free",
        "target.name in names and free",
        f"{SIZES}::test_what_is_checked",
    ),
    Planted(
        "parameters-in-scans-not-checked",
        "dsl/divisibility.py",
        "            elif isinstance(step, spec.Scan):\n                scopes.append((path, step.body))\n",
        "",
        f"{SIZES}::test_a_parameter_that_all_positions_of_a_scan_share_is_checked",
    ),
    Planted(
        "slices-called-microbatches",
        "dsl/divisibility.py",
        'cuts[axis] = count, "slices"',
        'cuts[axis] = count, "microbatches"',
        f"{SIZES}::test_slices_that_do_not_divide_are_called_slices",
    ),
]
