"""What is sent, kept and made when: mistakes that change no number but what a step costs; cases of passes show them."""

from tests.planted.planted import Planted


def case(name: str) -> str:
    """The test of a case of `tests/compiler/passes`."""
    return f"tests/compiler/test_passes.py::test_a_pass_makes_what_is_expected[{name}]"


MISTAKES = [
    Planted(
        "bucket-started-when-it-is-read",
        "compiler/partition/buckets.py",
        "found[places[key]] = _joined(bucket)",
        "found.append(_joined(bucket))",
        case("overlap/weights_wait_for_a_collective"),
    ),
    Planted(
        "small-sums-where-they-are-read",
        "compiler/partition/overlap.py",
        "_small_sums_first(turn if forward else _delayed(turn))",
        "turn if forward else _delayed(turn)",
        case("overlap/sums_of_a_split_loss"),
    ),
    Planted(
        "weights-not-put-off",
        "compiler/partition/overlap.py",
        "turn if forward else _delayed(turn)",
        "turn",
        case("overlap/weights_wait_for_a_collective"),
    ),
    Planted(
        "large-ones-in-buckets",
        "compiler/partition/buckets.py",
        "SMALL_BYTES = 64 * 2**10",
        "SMALL_BYTES = 64 * 2**20",
        case("overlap/large_ones_alone"),
    ),
    Planted(
        "long-chains-made-again",
        "compiler/lowering/rematerialize.py",
        "DEPTH = 2\n",
        "DEPTH = 20\n",
        case("rematerialize/long_chains_are_kept"),
    ),
    Planted(
        "made-again-too-early",
        "compiler/lowering/rematerialize.py",
        "phase=_NAMES[needed[value]]",
        "phase=Phase.BACKWARD",
        case("rematerialize/needed_for_weights_alone"),
    ),
    Planted(
        "gathered-to-be-made-again",
        "compiler/lowering/rematerialize.py",
        "    if gathered:\n",
        "    if not gathered:\n",
        case("rematerialize/a_gathered_parameter"),
    ),
    Planted(
        "masks-sent",
        "compiler/partition/cut.py",
        "if node.phase in (Phase.FORWARD, Phase.PROLOGUE) and all(",
        "if node.phase is Phase.PROLOGUE and all(",
        case("cut/what_inputs_tell"),
    ),
    Planted(
        "norms-with-two-gradients-not-fused",
        "compiler/lowering/fuse.py",
        "or readers.get(to_scale.output) or readers.get(to_shift.output)",
        "or len(readers[scaled.inputs[0]]) > 2",
        case("fuse/layer_norm"),
    ),
]
