"""What is stored flat: its zeros, the order of its elements, where its parts are."""

from tests.planted.planted import Planted

VERIFY = "verify tests/planted/files/flat.par"
REGIONS = "tests/runtime/test_regions.py::test_flat_parts_are_elements_in_order"
PATHS = "tests/compiler/passes/shard/test_resharding.py"
TRAINING = "tests/training/test_flat.py"
CHECKPOINTS = f"{TRAINING}::test_checkpoints_know_nothing_of_flat_parts"

MISTAKES = [
    Planted(
        "what-fills-up-counts",
        "runtime/kernels/flat.py",
        "found[x.numel() :].zero_()",
        "found[x.numel() :].fill_(1.0)",
        VERIFY,
    ),
    Planted(
        "elements-behind-the-zeros",
        "runtime/kernels/flat.py",
        "found[: x.numel()].view(x.shape).copy_(x)",
        "found[found.numel() - x.numel() :].view(x.shape).copy_(x)",
        VERIFY,
    ),
    Planted(
        "whole-tensors-from-the-second-element-on",
        "compiler/ops/collective.py",
        ".flatten().narrow(0, 0, ",
        ".flatten().roll(-1).narrow(0, 0, ",
        VERIFY,
    ),
    Planted(
        "elements-in-the-order-of-the-operand",
        "compiler/ops/collective.py",
        "text = permuted(x.text, x.type.names, self.order)",
        "text = x.text",
        f"{PATHS}::test_elements_are_in_the_order_of_the_form",
    ),
    Planted(
        "a-gradient-flat-in-another-form",
        "compiler/passes/shard/shard.py",
        "        return layout_of(states.items(), stored.flat)",
        "        return layout_of(states.items(), stored.flat and evolve(stored.flat, parts=2 * stored.flat.parts))",
        f"{VERIFY} layout=gradients",
    ),
    Planted(
        "parts-in-the-other-order",
        "runtime/regions.py",
        "index = index * sizes[name] + coordinates[name]\n    return tuple(pieces",
        "index = index * sizes[name] + (sizes[name] - 1 - coordinates[name])\n    return tuple(pieces",
        REGIONS,
    ),
    Planted(
        "last-element-of-a-part-left-out",
        "runtime/regions.py",
        "pieces_between(region, index * size, (index + 1) * size)",
        "pieces_between(region, index * size, (index + 1) * size - (size > 1))",
        REGIONS,
    ),
    Planted(
        "rows-of-a-piece-from-the-first-on",
        "runtime/checkpoint/parts.py",
        "begin = piece.start + (rows[row].start - piece.region[row].start) * prod(shape[row + 1 :])",
        "begin = piece.start",
        CHECKPOINTS,
    ),
    Planted(
        "last-flat-part-not-read",
        "runtime/checkpoint/parts.py",
        "range(first // size, last // size + 1)",
        "range(first // size, max(first // size + 1, last // size))",
        CHECKPOINTS,
    ),
    Planted(
        "one-element-too-many-saved",
        "runtime/checkpoint/parts.py",
        "return (max((piece.stop for piece in pieces), default=0),)",
        "return (1 + max((piece.stop for piece in pieces), default=-1),)",
        CHECKPOINTS,
    ),
]
