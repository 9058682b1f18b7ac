"""Plans: where a search begins, where it goes, what it writes, and what it takes for alike."""

from tests.planted.planted import Planted

PLAN = "tests/compiler/planner/test_plan.py"
ALIKE = "tests/compiler/analysis/test_alike.py"
MOVED = f"{PLAN}::test_a_plan_may_cut_collectives_and_make_updates_at_once"

CUT = "tests/compiler/passes/test_place.py"

MISTAKES = [
    Planted(
        "stages-cut-as-if-each-had-a-rank",
        "compiler/pipeline.py",
        "homes=homes_of(schedule.call, pipeline.ranks, chunks)",
        "homes=tuple(range(pipeline.ranks * chunks))",
        f"{CUT}::test_stages_of_a_rank_are_cut_together",
    ),
    Planted(
        "stages-cut-without-what-is-computed-again",
        "compiler/pipeline.py",
        "        joint = remat_scopes(_with_gradients(joint), _recompute_rules(state.spec), state.again)\n",
        "        joint = _with_gradients(joint)\n",
        f"{CUT}::test_what_is_computed_again_counts",
    ),
    Planted(
        "layers-gathered-once-since-few-would-be",
        "compiler/planner/space.py",
        "        return candidate.zero < 3 or gathered",
        "        return True or gathered",
        f"{PLAN}::test_estimates_are_near_what_is_compiled",
    ),
    Planted(
        "groups-that-a-rank-trains-in-turn-planned-as-one",
        "compiler/planner/space.py",
        "        return self.given.trained[1].groups // self.apart(candidate)\n",
        "        return 1\n",
        f"{PLAN}::test_groups_that_train_apart_are_planned",
    ),
    Planted(
        "backward-passes-apart-that-take-nothing",
        "compiler/planner/estimate.py",
        "(each.kept - each.saved, each.in_whole)",
        "(each.kept - each.saved, 0.0)",
        f"{PLAN}::test_estimates_are_near_what_is_compiled",
    ),
    Planted(
        "the-busiest-rank-keeps-what-it-has",
        "compiler/passes/place.py",
        "        most = max(busy, key=",
        "        most = min(busy, key=",
        f"{CUT}::test_the_busiest_rank_of_alike_layers_has_the_least_there_can_be",
    ),
    Planted(
        "the-full-name-of-a-call-means-all-of-its-block",
        "compiler/passes/place.py",
        '    if ".".join(path) in declared:\n        return [".".join(path)]\n',
        "",
        f"{CUT}::test_a_full_name_is_one_call_and_the_name_of_a_block_all",
    ),
    Planted(
        "rules-for-all-calls-go-before-those-for-one",
        "compiler/passes/place.py",
        "key=lambda each: len(names(each))",
        "key=lambda each: -len(names(each))",
        f"{CUT}::test_of_rules_for_a_place_the_more_exact_goes_first",
    ),
    Planted(
        "ranges-of-stages-verified-as-single-ones",
        "compiler/verify/proxy.py",
        "            starts.add(rule.last)\n",
        "            pass\n",
        "tests/compiler/verify/test_proxy.py::test_ranges_of_stages_stay_ranges",
    ),
    Planted(
        "plans-do-not-lead-away-from-the-file",
        "compiler/planner/search.py",
        "            found += [near] if near is not None else []\n",
        "",
        f"{PLAN}::test_a_file_is_improved_from_where_it_is_without_bounds",
    ),
    Planted(
        "updates-that-do-not-wait-left-out-of-the-file",
        "compiler/planner/writing.py",
        '        said["validate"] = spec.AFTER.name\n',
        "        pass\n",
        MOVED,
    ),
    Planted(
        "pieces-left-out-of-the-layout",
        "compiler/planner/space.py",
        "        if candidate.pieces > 1:\n",
        "        if candidate.pieces > 4:\n",
        MOVED,
    ),
    Planted(
        "blocks-in-blocks-forgotten",
        "compiler/planner/space.py",
        "    names = (*inner, *(outer",
        "    names = (*(), *(outer",
        f"{PLAN}::test_blocks_in_blocks_can_be_recomputed",
    ),
    Planted(
        "memory-of-a-rank-by-other-names",
        "compiler/analysis/memory.py",
        "records = [known[name] for name in dict.fromkeys(rank.parameters)]",
        'records = [known[name] for name in dict.fromkeys(rank.parameters) if not name.endswith(".0")]',
        "tests/compiler/analysis/test_memory.py::test_the_bounds_hold_where_ranks_share_a_vocabulary",
    ),
    Planted(
        "stages-alike-whatever-they-offload",
        "compiler/passes/cut.py",
        "    yield tuple(map(known, stage.offloaded))\n",
        "",
        ALIKE,
    ),
    Planted(
        "stages-alike-whatever-they-compute",
        "compiler/passes/cut.py",
        "        yield op.unnamed, sums",
        "        yield type(op), sums",
        ALIKE,
    ),
    Planted(
        "estimates-without-what-every-step-takes",
        "compiler/planner/estimate.py",
        "max(ends) * members + fixed,",
        "max(ends) * members,",
        f"{PLAN}::test_estimates_are_near_what_is_compiled",
    ),
    Planted(
        "collectives-of-a-link-as-fast-as-ever",
        "compiler/planner/sensitivity.py",
        "bandwidth=link.bandwidth * factor, collective_bandwidth=link.collective_bandwidth * factor)",
        "bandwidth=link.bandwidth * factor)",
        f"{PLAN}::test_the_runner_up_wins_where_it_is_said_to",
    ),
    Planted(
        "what-is-reserved-is-spent",
        "compiler/planner/budget.py",
        "self.seconds - self.reserved - self.begun",
        "self.seconds - self.begun",
        f"{PLAN}::test_phases_share_what_is_left_and_not_reserved",
    ),
    Planted(
        "operations-that-are-alike-counted-twice",
        "compiler/planner/budget.py",
        "(operations - alike) * OPERATION",
        "operations * OPERATION",
        f"{PLAN}::test_operations_of_stages_that_are_alike_compile_sooner",
    ),
    Planted(
        "states-are-split-from-the-second-stage-on",
        "compiler/planner/search.py",
        "for stage in (1, 2, 3))",
        "for stage in (2, 2, 3))",
        f"{PLAN}::test_each_stage_of_zero_stores_less_in_the_bound",
    ),
    Planted(
        "what-is-frozen-is-split-as-masters-are",
        "compiler/planner/search.py",
        "for stage in (1, 2, 3))",
        "for stage in (1, 2, 1))",
        f"{PLAN}::test_what_is_frozen_has_two_bytes_in_the_bound_and_is_split_in_the_last_stage_of_zero",
    ),
    Planted(
        "what-only-the-hosts-memory-holds-not-searched",
        "compiler/planner/search.py",
        "for offload in (False, True) if self.device.gpu else (False,):",
        "for offload in (False,):",
        f"{PLAN}::test_what_fits_with_its_state_in_the_hosts_memory_alone_is_planned",
    ),
    Planted(
        "a-vocabulary-is-shared-in-bubbles-alone",
        "compiler/planner/moves.py",
        "timeline.idle >= BUBBLE",
        "timeline.bubble >= BUBBLE",
        f"{PLAN}::test_a_vocabulary_is_shared_where_its_rank_has_most_to_do",
    ),
]
