"""Orders of schedules, the invariants that they are held to, and the transfers between."""

from tests.planted.planted import Planted

SCHEDULES = "tests/compiler/schedules/test_schedules.py"
LAWFUL = f"{SCHEDULES}::test_every_schedule_is_lawful_in_every_small_shape"
FORMS = "tests/compiler/schedules/test_forms.py"
INVARIANTS = "tests/compiler/schedules/test_invariants.py"
COMMUNICATION = "tests/compiler/schedules/test_communication.py"
TINY = "verify specs/tiny.par"
SHARED = "verify tests/planted/files/vocabulary.par"
DIVISION = "tests/compiler/verify/test_division.py"

MISTAKES = [
    Planted(
        "warm-up-one-longer",
        "compiler/schedules/one_f_one_b.py",
        "alternate(forwards, backwards, ranks - rank + slices - 2) for rank",
        "alternate(forwards, backwards, ranks - rank + slices - 1) for rank",
        LAWFUL,
    ),
    Planted(
        "warm-up-the-same-on-every-rank",
        "compiler/schedules/one_f_one_b.py",
        "alternate(forwards, backwards, ranks - rank + slices - 2) for rank",
        "alternate(forwards, backwards, 0) for rank",
        f"{SCHEDULES}::test_bubbles_are_the_closed_forms_at_equal_costs",
    ),
    Planted(
        "no-more-microbatches-in-flight-for-a-shared-vocabulary",
        "compiler/schedules/spread.py",
        "wanted = min(len(forwards), before + more)",
        "wanted = min(len(forwards), before)",
        "tests/compiler/schedules/test_spread.py::test_two_more_microbatches_are_in_flight",
    ),
    Planted(
        "logarithms-of-parts-added",
        "compiler/ops/loss.py",
        'pointwise(build, "log", total)',
        "total",
        "tests/training/test_shared_vocabulary.py",
    ),
    Planted(
        "a-term-of-a-sum-of-parts-left-out",
        "compiler/passes/spread.py",
        "            for other in others:\n",
        "            for other in others[1:]:\n",
        SHARED,
    ),
    Planted(
        "parts-numbered-from-the-last-rank",
        "compiler/passes/spread.py",
        "axis, self.over, rank)",
        "axis, self.over, len(self.ranks) - 1 - rank)",
        SHARED,
    ),
    Planted(
        "a-part-picks-targets-of-another",
        "compiler/passes/spread.py",
        'op = new.op.sharded(axis or "", self._size(node, axis or ""), self.over, len(self.ranks))',
        'op = new.op.resized(axis or "", self._size(node, axis or ""))',
        SHARED,
    ),
    Planted(
        "parts-of-a-maximum-in-every-place",
        "compiler/ops/reduce.py",
        'pointwise(build, "greater", other, peak)',
        'pointwise(build, "greater", peak, other)',
        SHARED,
    ),
    Planted(
        "the-certificate-takes-terms-of-any-rank",
        "compiler/verify/division.py",
        "        rank = self._rank(node.stage)\n",
        "        rank = next((r for r in range(9) if (node.op, operands, r) in self.shares), None)\n",
        DIVISION,
    ),
    Planted(
        "the-certificate-misses-absent-gradients",
        "compiler/verify/division.py",
        "        missing = Counter(own) - found\n",
        "        missing = found - found\n",
        DIVISION,
    ),
    Planted(
        "every-rank-looks-up-the-same-part",
        "compiler/passes/spread.py",
        "op = op.sharded(axis, self._size(node, axis), self.over, len(self.ranks))",
        "op = op.resized(axis, self._size(node, axis))",
        "tests/training/test_shared_vocabulary.py",
    ),
    Planted(
        "backwards-in-the-order-of-chunks",
        "compiler/schedules/interleaved_1f1b.py",
        "for members in groups for chunk in reversed(range(chunks)) for m in members",
        "for members in groups for chunk in range(chunks) for m in members",
        LAWFUL,
    ),
    Planted(
        "steps-of-another-block",
        "compiler/schedules/v_half.py",
        "(2, 1, 2, 1)",
        "(3, 1, 3, 1)",
        f"{SCHEDULES}::test_schedules_of_controllable_memory_hold_and_lose_what_their_paper_says",
    ),
    Planted(
        "squeezed-beyond-the-memory-of-the-block",
        "compiler/schedules/squeezing.py",
        "max(level[earlier:where]) < most",
        "max(level[earlier:where]) <= most",
        f"{SCHEDULES}::test_schedules_of_controllable_memory_hold_and_lose_what_their_paper_says",
    ),
    Planted(
        "weights-squeezed-before-their-backwards",
        "compiler/schedules/squeezing.py",
        "insort(ends, earlier)",
        "insort(ends, 0)",
        LAWFUL,
    ),
    Planted(
        "backwards-of-torch-exchanged",
        "compiler/schedules/forms/torch_csv.py",
        'BACKWARD: "I", WEIGHT: "W", FULL_BACKWARD: "B"',
        'BACKWARD: "B", WEIGHT: "W", FULL_BACKWARD: "I"',
        f"{FORMS}::test_torchs_orders_go_there_and_back",
    ),
    Planted(
        "order-of-summation-not-written",
        "compiler/schedules/forms/text.py",
        "if not schedule.ascending:",
        "if False:",
        f"{FORMS}::test_every_form_reads_back_whole",
    ),
    Planted(
        "forwards-in-any-order-as-well",
        "compiler/schedules/invariants.py",
        "schedule.ascending or part == FORWARD",
        "schedule.ascending",
        f"{FORMS}::test_looped_bfs_as_torch_runs_it_needs_consent",
    ),
    Planted(
        "ahead-of-the-plan-beyond-memory",
        "compiler/schedules/execution.py",
        "if self.held + change > self.limit:",
        "if False:",
        "tests/compiler/schedules/test_search.py::test_a_plan_that_fits_is_executed_within_memory",
    ),
    Planted(
        "busy-while-there-is-time-to-lose",
        "compiler/schedules/gap_filling.py",
        "lost + arrival - clock > idle and",
        "lost + arrival - clock <= idle and",
        "tests/compiler/schedules/test_improvement.py::test_gap_filling_by_hand",
    ),
    Planted(
        "remainder-as-a-last-group",
        "compiler/schedules/interleaved_1f1b.py",
        "if left >= ranks:",
        "if left:",
        LAWFUL,
    ),
    Planted(
        "warm-up-without-the-chunks",
        "compiler/schedules/interleaved_1f1b.py",
        "2 * (ranks - rank - 1) + (chunks - 1) * first)",
        "2 * (ranks - rank - 1) + first)",
        f"{SCHEDULES}::test_bounds_are_the_closed_forms",
    ),
    Planted(
        "backwards-of-gpipe-reversed",
        "compiler/schedules/gpipe.py",
        "order = tuple(Action(kind, 0, m) for kind in (FORWARD, FULL_BACKWARD) for m in range(microbatches))",
        "order = tuple(Action(FORWARD, 0, m) for m in range(microbatches)) + tuple(\n"
        "        Action(FULL_BACKWARD, 0, m) for m in reversed(range(microbatches))\n"
        "    )",
        LAWFUL,
    ),
    Planted(
        "lag-of-the-next-rank",
        "compiler/schedules/zb_h1.py",
        "        range(ranks),\n",
        "        range(1, ranks + 1),\n",
        SCHEDULES,
    ),
    Planted(
        "pipeline-not-filled",
        "compiler/schedules/zb_h2.py",
        "warm_ups = [2 * (ranks - rank) - 1 for rank in range(ranks)]",
        "warm_ups = [ranks - rank for rank in range(ranks)]",
        SCHEDULES,
    ),
    Planted(
        "weights-left-over",
        "compiler/schedules/lagged.py",
        "return (*order, *weights[max(0, len(backwards) - lag) :])",
        "return (*order, *weights[max(0, len(backwards) - lag + 1) :])",
        LAWFUL,
    ),
    Planted(
        "v-drains-one-too-few",
        "compiler/schedules/zb_v.py",
        '    for _ in range(rank):\n        yield "W", 0\n',
        '    for _ in range(rank - 1):\n        yield "W", 0\n',
        LAWFUL,
    ),
    Planted(
        "v-goes-down-twice",
        "compiler/schedules/schedule.py",
        "tuple(chunk * ranks + (ranks - 1 - rank if chunk % 2 else rank) for chunk in range(chunks))",
        "tuple(chunk * ranks + rank for chunk in range(chunks))",
        f"{SCHEDULES}::test_placements",
    ),
    Planted(
        "pairs-on-the-last-rank",
        "compiler/schedules/dualpipe_v.py",
        'yield ("F" if i == 0 and after == 0 else PAIRED), 0',
        "yield PAIRED, 0",
        SCHEDULES,
    ),
    Planted(
        "chunks-of-looped-bfs-backward",
        "compiler/schedules/looped_bfs.py",
        "for chunk in reversed(range(chunks)) for m in range(microbatches)]",
        "for chunk in range(chunks) for m in range(microbatches)]",
        LAWFUL,
    ),
    Planted(
        "evaluation-by-groups-of-one-less",
        "compiler/schedules/forward_only.py",
        "for m in range(start, min(start + ranks, microbatches))",
        "for m in range(start, min(start + ranks - 1, microbatches))",
        TINY,
    ),
    Planted(
        "live-activations-until-b",
        "compiler/schedules/schedule.py",
        "last = action.kind in (WEIGHT, FULL_BACKWARD)",
        'last = action.kind in ("B", FULL_BACKWARD)',
        SCHEDULES,
    ),
    Planted(
        "sends-wait-for-the-buffer-after",
        "compiler/schedules/communication.py",
        "program.append(WaitSend(transfers[transfer.index - depth]))",
        "program.append(WaitSend(transfers[transfer.index - depth + 1]))",
        TINY,
    ),
    Planted(
        "received-after-it-is-needed",
        "compiler/schedules/communication.py",
        "            program.extend(WaitReceive(transfer) for _, _, transfer in inputs[rank].get(i, ()))\n"
        "            program.append(Compute(action, schedule.placement[rank][action.chunk], i - 1 in joined[rank]))\n",
        "            program.append(Compute(action, schedule.placement[rank][action.chunk], i - 1 in joined[rank]))\n"
        "            program.extend(WaitReceive(transfer) for _, _, transfer in inputs[rank].get(i, ()))\n",
        TINY,
    ),
    Planted(
        "posted-late",
        "compiler/schedules/communication.py",
        "earliest = min(earliest, max(0, consumed - lookahead))",
        "earliest = min(earliest, consumed)",
        COMMUNICATION,
    ),
    Planted(
        "buffers-one-too-few",
        "compiler/schedules/communication.py",
        "while any(a >= b for a, b in zip(free, wanted[line.buffers :], strict=False)):",
        "while any(a > b for a, b in zip(free, wanted[line.buffers :], strict=False)):",
        COMMUNICATION,
    ),
    Planted(
        "invariant-of-order-forgets-weights",
        "compiler/schedules/invariants.py",
        "    for chunk in forward:\n        before[WEIGHT, chunk] = BACKWARD, chunk\n",
        "",
        INVARIANTS,
    ),
    Planted(
        "invariant-of-matching-forgets-sizes",
        "compiler/schedules/invariants.py",
        "if sent != received or sent.message.bytes != received.message.bytes:",
        "if sent != received:",
        INVARIANTS,
    ),
    Planted(
        "iterations-to-the-cheapest-stage",
        "compiler/passes/place.py",
        'largest, _ = _cut(total, parts, max, float("inf"))',
        'largest, _ = _cut(total, parts, min, float("inf"))',
        "tests/compiler/passes/test_place.py",
    ),
    Planted(
        "step-time-judged-as-bubble",
        "compiler/schedules/auto.py",
        "times if minimize == BUBBLE else times[::-1]",
        "times",
        "tests/compiler/schedules/test_improvement.py::test_the_file_says_what_is_minimized",
    ),
]
