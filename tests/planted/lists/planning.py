"""Plans: where a search begins, where it goes, and what it writes."""

from tests.planted.planted import Planted

PLAN = "tests/compiler/planner/test_plan.py"
MOVED = f"{PLAN}::test_a_plan_may_cut_collectives_and_make_updates_at_once"

MISTAKES = [
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
]
