"""Mixtures of experts: who is chosen, which matrix a row meets, who finds a slot, and what ranks exchange."""

from tests.planted.planted import Planted

FILE = "tests/reference/test_files.py::test_a_file_computes_what_it_means[experts]"
VERIFY = "verify tests/planted/files/experts.par"
KERNELS = "tests/runtime/kernels/test_experts.py"
TRAFFIC = "tests/compiler/analysis/test_expert_traffic.py"

MISTAKES = [
    Planted(
        "experts-of-the-first-rank-on-every-rank",
        "runtime/kernels/experts.py",
        "        index = index - start\n        outside",
        "        outside",
        VERIFY,
    ),
    Planted(
        "slots-of-the-first-rank-on-every-rank",
        "runtime/kernels/experts.py",
        "expert, slot = ids.long() - experts[0], slots - places[0]",
        "expert, slot = ids.long(), slots - places[0]",
        VERIFY,
    ),
    Planted(
        "second-choices-before-first-ones",
        "dsl/routing.py",
        "    return (*choices, over.name)",
        "    return (over.name, *choices)",
        "tests/dsl/test_routing.py::test_types_and_options",
    ),
    Planted(
        "slots-given-out-by-position",
        "compiler/ops/slots.py",
        "        order = [*others, *self.order]\n        shape",
        "        order = [*others, *reversed(self.order)]\n        shape",
        FILE,
    ),
    Planted(
        "any-of-equal-elements-chosen",
        "runtime/kernels/experts.py",
        "x.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()",
        "x.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :count].neg() + x.shape[-1] - 1",
        KERNELS,
    ),
    Planted(
        "rows-left-in-the-order-of-their-experts",
        "runtime/kernels/experts.py",
        "return made.index_select(0, places).view(",
        "return made.view(",
        FILE,
    ),
    Planted(
        "rows-put-back-by-the-order-that-sorted-them",
        "runtime/kernels/experts.py",
        "return made.index_select(0, places).view(",
        "return made.index_select(0, order).view(",
        KERNELS,
    ),
    Planted(
        "matrices-of-experts-complete-on-every-rank",
        "compiler/ops/experts.py",
        "return (*kept, *summed, ShardingRule((None, self.along, None), (SUM,)), *linear)",
        "return (*kept, *summed, ShardingRule((None, self.along, None), (None,)), *linear)",
        VERIFY,
    ),
    Planted(
        "gradients-of-the-experts-of-other-tokens-left-out",
        "compiler/ops/experts.py",
        "rows = tuple(ShardingRule(states(name), (SUM,)) for name in operands[2].names if not table.has(name))",
        "rows = tuple(ShardingRule(states(name), (None,)) for name in operands[2].names if not table.has(name))",
        VERIFY,
    ),
    Planted(
        "gathered-router-reduced-nowhere",
        "compiler/passes/shard/shard.py",
        "return Result(value.type, self.layouts[parameter].compute, True, not self._moves(parameter))",
        "return Result(value.type, self.layouts[parameter].compute, True, True)",
        TRAFFIC,
    ),
    Planted(
        "exchanged-again-for-the-backward-pass",
        "compiler/passes/shard/copies.py",
        "if exchanged and not crosses and not known.weight:",
        "if not exchanged and not crosses and not known.weight:",
        TRAFFIC,
    ),
    Planted(
        "tokens-exchanged-after-each-operation",
        "compiler/passes/shard/choice.py",
        "key = _rounded(seconds + RULE_PENALTY * forbidden), least, partial, _rounded(before)",
        "key = _rounded(seconds + RULE_PENALTY * forbidden), least, partial, 0.0",
        TRAFFIC,
    ),
]
