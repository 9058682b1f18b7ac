"""Gradients of both programs that `verify` compares, which come from one pass; and the differences of the loss."""

from tests.planted.planted import Planted

TIED = "verify tests/planted/files/tied_and_stopped.par"
DERIVATIVES = "tests/runtime/verification/test_derivatives.py"

MISTAKES = [
    *(
        Planted(
            f"first-contribution-alone-{seed}",
            "compiler/passes/differentiate.py",
            "for d, reader in contributions[parameter.value]:",
            "for d, reader in contributions[parameter.value][:1]:",
            f"{TIED} train.seed={seed}",
        )
        for seed in range(5)
    ),
    *(
        Planted(
            f"twice-the-loss-{seed}",
            "compiler/passes/differentiate.py",
            "Constant(1.0, graph.loss.type.dtype)",
            "Constant(2.0, graph.loss.type.dtype)",
            f"{TIED} train.seed={seed}",
        )
        for seed in range(5)
    ),
    Planted(
        "slope-of-another-function",
        "compiler/ops/pointwise.py",
        'Function("torch.tanh({0})", _of_result("tanh_gradient"), flops=10)',
        'Function("torch.tanh({0})", _of_result("sigmoid_gradient"), flops=10)',
        TIED,
    ),
    Planted(
        "stopped-values-follow-parameters",
        "runtime/verification/derivatives.py",
        'f"{name} = c.held.setdefault({value.name!r}, {name}.clone())"',
        'f"c.held.setdefault({value.name!r}, {name}.clone())"',
        f"{DERIVATIVES}::test_gradients_are_derivatives_of_a_loss_with_what_has_no_gradient",
    ),
    Planted(
        "bends-taken-for-wrong-gradients",
        "runtime/verification/derivatives.py",
        "abs(found - expected) > BEND * bend",
        "True",
        f"{DERIVATIVES}::test_a_bend_at_the_very_point_is_no_wrong_gradient",
    ),
    Planted(
        "derivatives-not-looked-at",
        "runtime/verification/execution.py",
        "return (*self.differences, *self.derivatives.diagnostics)",
        "return self.differences",
        f"{DERIVATIVES}::test_gradients_of_twice_the_loss_are_found",
    ),
]
