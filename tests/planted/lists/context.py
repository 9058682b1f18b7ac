"""Long sequences: zigzag order, attention in pieces, and how keys and values get there."""

from tests.planted.planted import Planted

ATTENTION = "verify tests/planted/files/attention.par layout=ends"
SCORES = "verify tests/planted/files/scores.par layout=ends seq=8"
RUNS = "tests/compiler/ops/test_runs.py"
PIECES = "tests/runtime/kernels/test_pieces.py"
CONTEXT = "tests/training/test_context.py"

MISTAKES = [
    Planted(
        "zigzag-that-is-not",
        "compiler/ops/runs.py",
        "part = 2 * ranks - 1 - place // 2 if place % 2 else place // 2",
        "part = place",
        f"{RUNS}::test_causal_queries_see_as_many_keys_on_every_rank",
    ),
    Planted(
        "rotated-by-where-it-stands",
        "compiler/ops/position.py",
        "start = places_text(x.type.axis(self.over), self.shards)",
        "start = offset_text(x.type.axis(self.over), self.shards)",
        ATTENTION,
    ),
    Planted(
        "dropout-numbered-by-where-it-stands",
        "compiler/ops/attention.py",
        "*(places_text(axis, self.shards) for axis in axes)",
        "*(places_text(axis, tuple(cut for cut in self.shards if cut[1] != ZIGZAG)) for axis in axes)",
        SCORES,
    ),
    Planted(
        "gradient-of-an-order-in-that-order",
        "compiler/ops/zigzag.py",
        "Zigzag(self.axis, self.ranks, not self.back, self.shards)",
        "Zigzag(self.axis, self.ranks, self.back, self.shards)",
        ATTENTION,
    ),
    Planted(
        "pieces-not-rescaled",
        "runtime/kernels/pieces.py",
        "own.mul_(torch.exp(old - finite).unsqueeze(-1))",
        "own.mul_(torch.exp(old - old).nan_to_num(0.0).unsqueeze(-1))",
        ATTENTION,
    ),
    Planted(
        "keys-of-the-part-itself-all-seen",
        "runtime/kernels/pieces.py",
        "found.append(Piece(own, _from(column - k, middle, end), True))",
        "found.append(Piece(own, _from(column - k, middle, end), False))",
        ATTENTION,
    ),
    Planted(
        "later-keys-computed-and-hidden",
        "runtime/kernels/pieces.py",
        "if first < end and middle < end:",
        "if first < end and middle < (end := k + size):",
        f"{PIECES}::test_every_rank_makes_as_many_products_and_none_that_are_not_seen",
    ),
    Planted(
        "gradients-of-keys-left-in-order",
        "runtime/kernels/attention.py",
        "back(dq, -2, queries), back(dk, -2, keys), back(dv, -2, keys)",
        "back(dq, -2, queries), dk, back(dv, -2, keys)",
        ATTENTION,
    ),
    Planted(
        "segments-as-they-stand",
        "runtime/kernels/scores.py",
        "segments = in_order(self.segments, -1, keys)",
        "segments = self.segments",
        SCORES,
    ),
    Planted(
        "outputs-left-in-zigzag-order",
        "compiler/passes/zigzag.py",
        "asked=tuple((name, left.get(value, value)) for name, value in self.graph.asked),",
        "asked=self.graph.asked,",
        f"{CONTEXT}::test_outputs_stand_in_their_own_order",
    ),
    Planted(
        "any-order-will-do",
        "compiler/ops/op.py",
        "return self if self.orderless or not self.mentions(axis) else None",
        "return self",
        f"{CONTEXT}::test_wrong_files",
    ),
    Planted(
        "heads-may-be-rows",
        "compiler/passes/shard/choice.py",
        "return op.exchange(rule) == self.how and rule.operands[0] != self.batch",
        "return op.exchange(rule) == self.how",
        f"{CONTEXT}::test_wrong_files",
    ),
    Planted(
        "work-counted-as-if-even",
        "compiler/ops/attention.py",
        "return [((start, own.size),) for start in starts]",
        "return [((0, own.size),) for start in starts]",
        f"{CONTEXT}::test_the_cost_model_knows_that_the_work_is_even",
    ),
    Planted(
        "a-ring-turns-the-other-way",
        "runtime/transports/groups.py",
        "outgoing[(rank + 1) % self.size] = incoming[(rank - 1) % self.size] = received.numel()",
        "outgoing[(rank - 1) % self.size] = incoming[(rank + 1) % self.size] = received.numel()",
        "tests/runtime/transports/test_process.py::"
        "test_collectives_on_gloo_and_on_the_virtual_cluster_agree_bit_for_bit",
    ),
    Planted(
        "a-block-of-another-turn",
        "compiler/ops/attend_block.py",
        "- {self.turn}) % {self.blocks}",
        "+ {self.turn}) % {self.blocks}",
        f"{CONTEXT}::test_three_ranks_turn_a_ring",
    ),
    Planted(
        "windows-that-look-ahead-end-one-key-early",
        "runtime/kernels/pieces.py",
        "min(end, q + count - 1 + window)",
        "min(end, q + count - 2 + window)",
        f"{PIECES}::test_parts_in_zigzag_order_make_the_whole",
    ),
]
