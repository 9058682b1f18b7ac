"""Groups that train apart, and updates with gradients of earlier steps."""

from tests.planted.planted import Planted

VERIFY = "verify tests/planted/files/groups.par"
LOCAL = "tests/training/test_local.py"
BY_HAND = f"{LOCAL}::test_groups_are_runs_of_their_own_that_are_averaged"
DELAYED = "tests/training/test_delayed.py"
LATE = f"{DELAYED}::test_an_update_has_the_gradients_of_as_many_steps_before"

MISTAKES = [
    Planted(
        "a-step-split-over-groups",
        "compiler/mesh.py",
        "if size > 1 and name not in (self.pipe, self.apart))",
        "if size > 1 and name != self.pipe)",
        VERIFY,
    ),
    Planted(
        "one-group-of-a-rank-averaged",
        "compiler/passes/outer.py",
        "held = [build.moved(each, state) for each in masters]",
        "held = [build.moved(each, state) for each in masters[:1]]",
        f"{VERIFY} cluster.data=2",
    ),
    Planted(
        "one-group-of-a-rank-goes-on-alone",
        "compiler/passes/outer.py",
        "None, Phase.OUTER) for each in masters]",
        "None, Phase.OUTER) for each in masters[:1]]",
        f"{VERIFY} cluster.data=2",
    ),
    Planted(
        "the-average-of-no-other-rank",
        "compiler/passes/outer.py",
        "summed = layout_of(((over, states.get(over)) for over in self.mesh.sharding), state.flat)",
        "summed = state",
        VERIFY,
    ),
    Planted(
        "copies-in-the-order-of-parameters",
        "runtime/executor.py",
        "tuple(memory.masters[name] for memory in self._memories for name in names)",
        "tuple(memory.masters[name] for name in names for memory in self._memories)",
        f"{BY_HAND}[mean]",
    ),
    Planted(
        "a-group-s-statistics-in-the-first-row",
        "runtime/executor.py",
        "vector[first + index] = scalar",
        "vector[index] = scalar",
        VERIFY,
    ),
    Planted(
        "the-sum-instead-of-the-mean",
        "runtime/kernels/optimizers.py",
        "gradient = torch.sub(anchor, total / groups)",
        "gradient = torch.sub(anchor, total)",
        f"{BY_HAND}[nesterov]",
    ),
    Planted(
        "heavy-ball-for-nesterov",
        "runtime/kernels/optimizers.py",
        "anchor.add_(gradient.add_(velocity, alpha=momentum), alpha=-rate)",
        "anchor.add_(velocity, alpha=-rate)",
        f"{BY_HAND}[nesterov]",
    ),
    Planted(
        "groups-draw-alike",
        "runtime/groups.py",
        "(seed + group * _STEP) % _SEEDS",
        "seed % _SEEDS",
        f"{BY_HAND}[mean]",
    ),
    Planted(
        "all-groups-read-the-first-rows",
        "runtime/inputs.py",
        "rows = batch[part.name].chunk(self._groups, position)[self.group]",
        "rows = batch[part.name].chunk(self._groups, position)[0]",
        f"{BY_HAND}[mean]",
    ),
    Planted(
        "no-average-after-the-last-step",
        "dsl/spec.py",
        '(step % int(self.local.arguments["every"]) == 0 or step == self.steps)',
        'step % int(self.local.arguments["every"]) == 0',
        f"{BY_HAND}[sgd]",
    ),
    Planted(
        "all-groups-saved-by-one",
        "runtime/checkpoint/parts.py",
        "place is None or mesh.apart is None or dict(at)[mesh.apart] == place",
        "place is None or mesh.apart is None or dict(at)[mesh.apart] == 0",
        f"{LOCAL}::test_a_run_of_groups_resumes_with_the_same_bits_in_the_middle_of_a_round",
    ),
    Planted(
        "the-average-counted-in-every-step",
        "compiler/analysis/traffic.py",
        "times * moved / self.every,",
        "times * moved,",
        f"{LOCAL}::test_communication_falls_by_the_interval",
    ),
    Planted(
        "one-group-in-the-memory-bound",
        "compiler/analysis/memory.py",
        "members * kept(each, each.states) + kept(each, each.besides)",
        "kept(each, each.states) + kept(each, each.besides)",
        f"{LOCAL}::test_the_memory_bound_counts_every_group",
    ),
    Planted(
        "the-newest-gradients-first", "runtime/late.py", "self._kept.popleft() if", "self._kept.pop() if", f"{LATE}[2]"
    ),
    Planted(
        "gradients-of-all-steps-in-one-place",
        "runtime/stages.py",
        "            for _ in range(delay)\n",
        "            for _ in range(0)\n",
        f"{LATE}[1]",
    ),
    Planted(
        "steps-that-update-nothing-counted-as-updates",
        "runtime/executor.py",
        "number, rates, update - self.program.delay",
        "number, rates, update",
        f"{LATE}[1]",
    ),
    Planted(
        "an-update-before-there-are-gradients",
        "runtime/executor.py",
        "if good and self._late.ready else None",
        "if good else None",
        f"{LATE}[1]",
    ),
    Planted(
        "every-stage-resumes-with-the-whole-gradient",
        "runtime/late.py",
        "return gradient.clone() if stage == first else torch.zeros_like(gradient)",
        "return gradient.clone()",
        f"{DELAYED}::test_a_run_with_a_delay_resumes_with_the_same_bits[1]",
    ),
    Planted(
        "late-gradients-take-no-memory",
        "compiler/analysis/memory.py",
        "(1 + program.delay if each.parameter else 1) * each.type.bytes",
        "each.type.bytes",
        f"{DELAYED}::test_the_memory_bound_counts_late_gradients",
    ),
    Planted(
        "a-reduction-that-nothing-hides",
        "compiler/analysis/time.py",
        "        summed = max(without) - found.makespan\n",
        "",
        f"{DELAYED}::test_a_reduction_hides_behind_the_next_step",
    ),
    Planted(
        "ids-out-of-range-are-averaged",
        "runtime/executor.py",
        "mean = torch.where(sums, total, total / (1 + len(others)))",
        "mean = total / (1 + len(others))",
        f"{LOCAL}::test_ids_that_are_out_of_range_are_counted_and_not_averaged",
    ),
    Planted(
        "a-group-is-updated-whatever-its-norm",
        "runtime/executor.py",
        "yield from self.update(self.factor if fine else None)",
        "yield from self.update(self.factor)",
        f"{LOCAL}::test_a_group_whose_step_is_bad_is_not_updated",
    ),
    Planted(
        "whole-batches-of-the-first-group",
        "runtime/inputs.py",
        "tensor.chunk(self._groups, type.position(self._batch))[self.group]",
        "tensor.chunk(self._groups, type.position(self._batch))[0]",
        f"{LOCAL}::test_what_is_computed_of_a_whole_batch_is_of_the_rows_of_a_group",
    ),
    Planted(
        "totals-of-two-steps-at-once",
        "runtime/executor.py",
        "if any(rank.sends for rank in self.program.ranks):",
        "if False:",
        f"{DELAYED}::test_all_ranks_meet_before_totals_of_the_next_step_are_sent",
    ),
    Planted(
        "rows-of-the-step-whose-update-is-bad",
        "runtime/training.py",
        "delay = rank.plan.program.delay if wrong.figure == NORM else 0",
        "delay = 0",
        f"{DELAYED}::test_a_norm_that_is_not_finite_is_that_of_a_step_before",
    ),
    Planted(
        "copies-of-one-group-are-told",
        "compiler/analysis/time.py",
        "copying = state.members * max(",
        "copying = max(",
        "tests/training/test_offloaded_blocks.py::test_a_rank_copies_for_each_of_its_groups",
    ),
    Planted(
        "traffic-of-one-group-of-a-rank",
        "compiler/analysis/traffic.py",
        "resharding, state.members * state.microbatches, state.members, rank",
        "resharding, state.microbatches, state.members, rank",
        f"{LOCAL}::test_what_a_rank_sends_for_each_of_its_groups_is_counted",
    ),
]
