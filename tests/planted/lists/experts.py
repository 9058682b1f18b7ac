"""Mixtures of experts: who is chosen, which matrix a row meets, who finds a slot, and what ranks exchange."""

from tests.planted.planted import Planted

FILE = "tests/reference/test_files.py::test_a_file_computes_what_it_means[experts]"
VERIFY = "verify tests/planted/files/experts.par"
KERNELS = "tests/runtime/kernels/test_experts.py"
GROUPED = "tests/compiler/ops/test_grouped.py"
ORDERS = "tests/compiler/verify/test_row_orders.py"
TRAFFIC = "tests/compiler/analysis/test_expert_traffic.py"

MISTAKES = [
    Planted(
        "experts-of-the-first-rank-on-every-rank",
        "runtime/kernels/experts.py",
        "    index = index - start\n    return",
        "    return",
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
        "compiler/ops/grouped.py",
        ".index_select(0, {places.text})",
        "",
        VERIFY,
    ),
    Planted(
        "rows-put-back-by-the-order-that-sorted-them",
        "runtime/kernels/experts.py",
        "return made.index_select(0, places).view(",
        "return made.index_select(0, order).view(",
        KERNELS,
    ),
    Planted(
        "rows-summed-by-the-order-that-sorted-them",
        "compiler/passes/group.py",
        "                _, places, _ = self._order(key, node)",
        "                places, _, _ = self._order(key, node)",
        VERIFY,
    ),
    Planted(
        "rows-of-the-neighbouring-token",
        "runtime/kernels/experts.py",
        'torch.div(order, inner, rounding_mode="trunc")',
        "order % len(flat)",
        GROUPED,
    ),
    Planted(
        "rows-of-nobody-left-as-they-were",
        "runtime/kernels/experts.py",
        "    made[done:] = 0\n",
        "    made[done:] = 1\n",
        KERNELS,
    ),
    Planted(
        "rows-taken-before-their-ids-are-known",
        "compiler/passes/group.py",
        "known = self.made.get(key.ids, -1) < self.made[node.output]",
        "known = True",
        VERIFY,
    ),
    Planted(
        "rows-of-two-orders-mixed",
        "compiler/verify/row_orders.py",
        "require(self.rows[value][0] is order, f",
        "require(True, f",
        ORDERS,
    ),
    Planted(
        "sums-over-the-rows-in-any-order",
        "compiler/ops/dot.py",
        "return not any(name in rows for name in self.over)",
        "return True",
        ORDERS,
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
        "if exchanged and own and not moved.layout.partial:",
        "if not exchanged and own and not moved.layout.partial:",
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
