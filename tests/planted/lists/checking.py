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
        'counts[axis] = count, "slice"',
        'counts[axis] = count, "microbatch"',
        f"{SIZES}::test_slices_that_do_not_divide_are_called_slices",
    ),
    Planted(
        "a-quotient-keeps-its-unit",
        "dsl/constants.py",
        "PLAIN if same else left.dimension, formula",
        "left.dimension, formula",
        "tests/dsl/test_arithmetic.py::test_units_follow_from_those_of_the_operands",
    ),
    Planted(
        "a-negative-number-keeps-its-value",
        "dsl/constants.py",
        'computed("negate", quantity.term)',
        "None",
        "tests/dsl/test_arithmetic.py::test_a_formula_follows_the_sizes_of_axes",
    ),
    Planted(
        "lines-counted-to-the-end-of-the-file",
        "dsl/reader.py",
        'data.count(b"\\n", 0, error.start)',
        'data.count(b"\\n")',
        "tests/dsl/test_imports.py::test_the_first_byte_that_is_no_text_is_named",
    ),
    Planted(
        "a-path-is-the-end-of-a-text",
        "dsl/paths.py",
        'name.split(".")[-len(path) :] == list(path)',
        'name.endswith(".".join(path))',
        "tests/compiler/test_naming.py",
    ),
    Planted(
        "any-condition-keeps-documents-apart",
        "dsl/packing.py",
        "each.mark or (each.marked and not type.is_float)",
        "each.marked",
        "tests/dsl/test_packing.py",
    ),
    Planted(
        "a-carried-state-never-begins-anew",
        "dsl/packing.py",
        "Followed(leaks=each.leaks | {number})",
        "Followed(leaks=each.leaks)",
        "tests/dsl/test_packing.py",
    ),
    Planted(
        "what-only-evaluation-reads-is-unused",
        "dsl/reach.py",
        "for training in (True, False):",
        "for training in (True,):",
        "tests/training/test_frozen.py::test_what_is_frozen_may_be_read_by_anything[evaluation-whole]",
    ),
    Planted(
        "layers-called-one-network",
        "dsl/second_calls.py",
        "if all(one - other and other - one for",
        "if all(one != other for",
        "tests/training/test_advice.py::test_what_may_be_meant_as_one_network_is_told",
    ),
    Planted(
        "a-nested-repeat-not-cut-without-a-word",
        "dsl/stages.py",
        "if name not in cut:",
        "if False:",
        "tests/training/test_advice.py::test_a_nested_repeat_is_cut_as_told",
    ),
    Planted(
        "the-number-of-an-iteration-called-a-misspelling",
        "dsl/expressions.py",
        "if repeat is not None:",
        "if False:",
        "tests/training/test_advice.py::test_the_number_of_an_iteration_is_counted_as_told",
    ),
]
