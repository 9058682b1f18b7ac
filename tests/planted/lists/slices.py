"""Slices of the sequence as microbatches: their orders, and what they leave to each other."""

from tests.planted.planted import Planted

ORDERS = "tests/compiler/schedules/test_slices.py"
SLICES = "verify tests/planted/files/slices.par"
TRAINING = "tests/training/test_slices.py"
MEMORY = "tests/compiler/analysis/test_memory_of_slices.py"

MISTAKES = [
    Planted(
        "backwards-of-slices-in-ascending-order",
        "compiler/schedules/schedule.py",
        "return microbatch if kind == FORWARD else part * slices + slices - 1 - own",
        "return microbatch",
        f"{ORDERS}::test_the_order_of_the_paper",
    ),
    Planted(
        "no-longer-warm-up-for-slices",
        "compiler/schedules/one_f_one_b.py",
        "alternate(forwards, backwards, ranks - rank + slices - 2) for rank",
        "alternate(forwards, backwards, ranks - rank - 1) for rank",
        f"{ORDERS}::test_every_order_is_lawful_and_holds_what_it_declares",
    ),
    Planted(
        "slices-interleaved-from-the-last-to-the-first",
        "compiler/schedules/interleaved_1f1b.py",
        "groups = [range(start * slices, end * slices) for start, end in pairwise(starts)]",
        "groups = [range(start * slices, end * slices)[::-1] for start, end in pairwise(starts)]",
        f"{ORDERS}::test_every_order_is_lawful_and_holds_what_it_declares",
    ),
    Planted(
        "gradients-of-keys-from-one-slice-alone",
        "runtime/kernels/slices.py",
        "total.add_(term)",
        "total.copy_(term)",
        SLICES,
    ),
    Planted(
        "what-slices-share-outlives-them",
        "runtime/instructions.py",
        "shared.clear()",
        "pass",
        SLICES,
    ),
    Planted(
        "every-slice-at-the-first-positions",
        "compiler/ops/position.py",
        'SLICE: "c.slice"}',
        'SLICE: "0"}',
        SLICES,
    ),
    Planted(
        "slices-of-the-next-microbatch",
        "runtime/stages.py",
        "for frame in self.frames[i * self.slices : (i + 1) * self.slices]:",
        "for frame in self.frames[i :: len(self.shared)]:",
        SLICES,
    ),
    Planted(
        "what-all-slices-have-counts-in-each",
        "compiler/passes/slices.py",
        "return self._once(value) if want == SUM else self._part(value, str(want), node)",
        "return self.local[value] if want == SUM else self._part(value, str(want), node)",
        SLICES,
    ),
    Planted(
        "gradients-of-places-at-the-first-ones",
        "runtime/kernels/slices.py",
        "whole.narrow(dim, start, part.shape[dim]).copy_(part)",
        "whole.narrow(dim, 0, part.shape[dim]).copy_(part)",
        SLICES,
    ),
    Planted(
        "metrics-of-rows-count-in-each-slice",
        "compiler/passes/microbatch.py",
        "if SUM in (state, along) and None in (state, along):",
        "if along == SUM and state is None:",
        SLICES,
    ),
    Planted(
        "the-last-query-does-not-see-itself",
        "runtime/kernels/pieces.py",
        "end = min(end, q + count)",
        "end = min(end, q + count - 1)",
        SLICES,
    ),
    Planted(
        "keys-of-slices-take-no-memory",
        "compiler/analysis/memory.py",
        'kept += stage.shared["F"]',
        "kept += 0",
        f"{MEMORY}::test_the_bound_holds_and_is_near",
    ),
    Planted(
        "keys-and-values-of-slices-in-one-tensor",
        "compiler/passes/slices.py",
        "OfSlices(found.name, type)",
        "OfSlices(str(type), type)",
        SLICES,
    ),
    Planted(
        "any-cut-of-a-sequence-is-certified",
        "compiler/verify/slices.py",
        "require(op.slices <= {slices}",
        "require(len(op.slices) <= 1",
        f"{TRAINING}::test_the_certificate_refuses_wrong_slices",
    ),
]
