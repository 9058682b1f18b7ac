"""What a step is predicted to take: of several groups, of a delay, of copies, of one operation and one collective."""

from tests.planted.planted import Planted

TIME = "compiler/analysis/time.py"
TESTS = "tests/compiler/analysis/test_time.py"
GROUPS = f"{TESTS}::test_a_rank_trains_its_groups_one_after_the_other_and_averages_them_once_in_so_many_steps"
COSTS = "tests/compiler/costs/test_costs.py"
REMEMBERED = f"{COSTS}::test_what_an_operation_takes_is_remembered_by_where_it_runs_and_what_it_adds_to"

MISTAKES = [
    Planted(
        "ends-of-steps-hidden",
        TIME,
        "self.execution.apart and node.phase in chain(*PHASES.values())",
        "self.execution.apart",
        f"{TESTS}::test_what_microbatches_send_is_hidden_by_multiprocessors_that_multiply_nothing",
    ),
    Planted(
        "parameters-cast-for-each-microbatch",
        "compiler/analysis/execution.py",
        "new = {*node.inputs} - there",
        "new = {*node.inputs}",
        f"{TESTS}::test_products_of_layers_have_operands_of_eight_bits_which_are_cast_once",
    ),
    Planted(
        "sums-in-eight-bits",
        TIME,
        "if not node.op.combines and not narrow.isdisjoint(node.outputs)",
        "if not narrow.isdisjoint(node.outputs) or narrow",
        f"{TESTS}::test_what_products_read_in_eight_bits_is_gathered_in_eight_bits",
    ),
    Planted(
        "copy-engines-slow-products-down",
        TIME,
        "if not (self.execution.userbuffers and in_pieces(node)):",
        "if True:",
        f"{TESTS}::test_pieces_of_other_systems_are_sent_by_engines_and_multiplied_beside_one_another",
    ),
    Planted(
        "pieces-of-products-in-waves",
        "compiler/costs/devices.py",
        "(waves if self.filled else ceil(waves))",
        "ceil(waves)",
        f"{TESTS}::test_pieces_of_other_systems_are_sent_by_engines_and_multiplied_beside_one_another",
    ),
    Planted(
        "groups-of-a-rank-train-at-once",
        TIME,
        "self.members * (self.timeline.makespan + max(self.ends))",
        "self.timeline.makespan + max(self.ends)",
        GROUPS,
    ),
    Planted(
        "communication-of-one-group-is-exposed",
        TIME,
        "state.members * shown + _average(state)",
        "shown + _average(state)",
        GROUPS,
    ),
    Planted(
        "groups-are-averaged-in-every-step",
        TIME,
        "return found / state.every",
        "return found",
        GROUPS,
    ),
    Planted(
        "a-reduction-has-one-step-to-end-in",
        TIME,
        "(max(reduced) - max(without)) / state.plan.delay - step",
        "max(reduced) - max(without) - step",
        "tests/training/test_delayed.py"
        "::test_a_reduction_that_takes_several_steps_has_as_many_to_end_in_as_the_delay_says",
    ),
    Planted(
        "copies-before-an-update-take-no-time",
        TIME,
        "each.after(done[rank]) + each.copying\n",
        "each.after(done[rank])\n",
        "tests/training/test_validation.py::test_a_step_is_predicted_to_be_as_long_as_the_busiest_rank",
    ),
    Planted(
        "collectives-that-nobody-waits-for",
        TIME,
        "self.now += 2 * link.post",
        "self.now += link.post",
        f"{TESTS}::test_a_rank_posts_a_collective_and_waits_for_it",
    ),
    Planted(
        "products-take-as-long-whatever-they-add-to",
        "compiler/costs/nodes.py",
        "key = node.op.unnamed, operands, results, added",
        "key = node.op.unnamed, operands, results",
        REMEMBERED,
    ),
    Planted(
        "operations-take-as-long-wherever-they-run",
        "compiler/costs/nodes.py",
        "(tuple((value.type, value.host) for value in values)",
        "(tuple(value.type for value in values)",
        REMEMBERED,
    ),
    Planted(
        "ranks-exchange-with-themselves",
        "compiler/costs/links.py",
        "sent: float = max(parts - 1, ",
        "sent: float = max(parts, ",
        f"{COSTS}::test_ranks_keep_their_own_part_of_an_exchange",
    ),
    Planted(
        "copies-come-back-in-no-time",
        TIME,
        "found += 2 * state.plan.offloads(index) * seconds",
        "found += state.plan.offloads(index) * seconds",
        "tests/training/test_offloaded_blocks.py"
        "::test_copies_hide_where_the_link_is_fast_enough_and_microbatches_stay_where_it_is_not",
    ),
    Planted(
        "the-peak-of-one-device",
        TIME,
        "peak = state.device.flops[state.train.dtype] * state.mesh.ranks",
        "peak = state.device.flops[state.train.dtype]",
        f"{TESTS}::test_a_slow_link_is_the_step_and_a_fast_one_shows_its_last_message",
    ),
    Planted(
        "launches-that-take-no-time",
        TIME,
        "state.device.action + max(walk.arrived, launching)",
        "state.device.action + walk.arrived",
        f"{TESTS}::test_an_action_takes_as_long_as_the_host_launches_it",
    ),
    Planted(
        "graphs-whose-kernels-are-launched",
        TIME,
        "launching = 0.0 if state.train.graphs else walk.launches * state.device.launching",
        "launching = walk.launches * state.device.launching",
        f"{TESTS}::test_an_action_takes_as_long_as_the_host_launches_it",
    ),
    Planted(
        "collectives-that-nobody-launches",
        TIME,
        "                self.launches += 1\n",
        "",
        f"{TESTS}::test_collectives_are_launched_too",
    ),
]
