"""What is sent, kept and made when: mistakes that change no number but what a step costs; cases of passes show them."""

from tests.planted.planted import Planted


def case(name: str) -> str:
    """The test of a case of `tests/compiler/passes`."""
    return f"tests/compiler/passes/test_cases.py::test_a_pass_makes_what_is_expected[{name}]"


MISTAKES = [
    Planted(
        "bucket-started-when-it-is-read",
        "compiler/passes/buckets.py",
        "found[places[key]] = _joined(bucket)",
        "found.append(_joined(bucket))",
        case("overlap/weights_wait_for_a_collective"),
    ),
    Planted(
        "small-sums-where-they-are-read",
        "compiler/passes/overlap.py",
        "_small_sums_first(iteration if forward else _delayed(iteration))",
        "iteration if forward else _delayed(iteration)",
        case("overlap/sums_of_a_split_loss"),
    ),
    Planted(
        "weights-not-put-off",
        "compiler/passes/overlap.py",
        "iteration if forward else _delayed(iteration)",
        "iteration",
        case("overlap/weights_wait_for_a_collective"),
    ),
    Planted(
        "large-ones-in-buckets",
        "compiler/passes/buckets.py",
        "SMALL_BYTES = 64 * 2**10",
        "SMALL_BYTES = 64 * 2**20",
        case("overlap/large_ones_alone"),
    ),
    Planted(
        "long-chains-made-again",
        "compiler/passes/remat_cheap.py",
        "DEPTH = 2\n",
        "DEPTH = 20\n",
        case("remat_cheap/long_chains_are_kept"),
    ),
    Planted(
        "made-again-too-early",
        "compiler/passes/remat_cheap.py",
        "phase=_NAMES[needed[value]]",
        "phase=Phase.BACKWARD",
        case("remat_cheap/needed_for_weights_alone"),
    ),
    Planted(
        "gathered-to-be-made-again",
        "compiler/passes/remat_cheap.py",
        "    if gathered:\n",
        "    if not gathered:\n",
        case("remat_cheap/a_gathered_parameter"),
    ),
    Planted(
        "masks-sent",
        "compiler/passes/cut.py",
        "if node.phase in (Phase.FORWARD, Phase.PROLOGUE) and all(",
        "if node.phase is Phase.PROLOGUE and all(",
        case("cut/what_inputs_tell"),
    ),
    Planted(
        "norms-with-two-gradients-not-fused",
        "compiler/passes/fuse.py",
        "if of_scale is None or readers.get(of_scale.output):",
        "if of_scale is None or len(readers[d]) > 2:",
        case("fuse/layer_norm"),
    ),
    Planted(
        "made-again-of-what-another-stage-keeps",
        "compiler/passes/remat_cheap.py",
        "return until.get(value, 0) if node.stage == reader.stage else 0",
        "return until.get(value, 0)",
        case("remat_cheap/made_of_what_was_sent"),
    ),
    Planted(
        "made-again-for-the-last-reader",
        "compiler/passes/remat_cheap.py",
        "needed[each] = min(needed.get(each, 2), needed[value])",
        "needed[each] = needed[value]",
        case("remat_cheap/read_in_two_phases"),
    ),
]
