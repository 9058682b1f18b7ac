"""What hides at the ends of a step: when collectives start, in which order, and when they are waited for."""

from tests.planted.planted import Planted

VERIFY = "verify tests/planted/files/step_ends.par"
AHEAD = "tests/compiler/passes/test_ahead.py"
EXECUTOR = "tests/runtime/test_executor.py"
TIME = "tests/compiler/analysis/test_time.py"
MEMORY = "tests/compiler/analysis/test_memory.py"
HELD = f"{MEMORY}::test_what_is_gathered_is_held_until_the_first_microbatch_waits_for_it"

MISTAKES = [
    Planted(
        "what-is-sent-to-gather-not-counted",
        "compiler/codegen/plan.py",
        "most = working_set(waiting, after, {*before, *sent}, behind)",
        "most = working_set(waiting, after, before, behind)",
        HELD,
    ),
    Planted(
        "what-is-gathered-arrives-nowhere",
        "compiler/codegen/plan.py",
        "yield evolve(node, inputs=(sent[node], *copied), outputs=(received[node],))",
        "yield evolve(node, inputs=(sent[node], *copied), outputs=())",
        HELD,
    ),
    Planted(
        "what-is-gathered-in-flight-to-the-end-of-its-F",
        "compiler/codegen/plan.py",
        "most = working_set(waiting, after, {*before, *sent}, behind)",
        "most = working_set(waiting, {*after, *sent}, {*before, *sent}, behind)",
        HELD,
    ),
    Planted(
        "gradients-reduced-behind-their-first-contribution",
        "compiler/codegen/functions.py",
        "places.setdefault(sums[target], end)",
        "places[sums[target]] = end",
        VERIFY,
    ),
    Planted(
        "gradients-reduced-as-the-last-action-begins",
        "compiler/codegen/functions.py",
        "found.setdefault(nodes[place] if place >= 0 else None, []).append(node)",
        "found.setdefault(None, []).append(node)",
        VERIFY,
    ),
    Planted(
        "parts-forgotten-before-they-are-reduced",
        "compiler/codegen/writer.py",
        "            self.block(behind, self._crossing, more=True)\n",
        "            self.block(behind, (), more=True)\n",
        VERIFY,
    ),
    Planted(
        "gathered-as-declared",
        "compiler/passes/overlap.py",
        "bucketed(by_depth(_as_read(prologue, rest)), BUCKET_BYTES, full)",
        "bucketed(by_depth(prologue), BUCKET_BYTES, full)",
        f"{AHEAD}::test_messages_are_in_the_order_of_reads_and_of_last_contributions",
    ),
    Planted(
        "messages-as-large-on-any-link",
        "compiler/passes/buckets.py",
        "return max(min(BUCKET_BYTES, max(SMALL_BYTES, link.amortizing)), link.waiting(mesh.sizes[axis]))",
        "return BUCKET_BYTES",
        f"{AHEAD}::test_a_message_takes_a_hundred_times_its_latency",
    ),
    Planted(
        "gathered-ahead-and-again",
        "runtime/stages.py",
        'if self.gathering is None and "G" in self.functions:',
        'if "G" in self.functions:',
        f"{EXECUTOR}::test_what_a_step_computes_with_can_be_gathered_ahead_once",
    ),
    Planted(
        "opened-before-what-is-gathered",
        "compiler/schedules/simulator.py",
        "end = max(end, opening.pop(instruction.stage))",
        "opening.pop(instruction.stage)",
        f"{TIME}::test_a_slow_link_is_the_step_and_a_fast_one_shows_its_last_message",
    ),
    Planted(
        "an-opening-that-waits-for-nobody",
        "compiler/program.py",
        'kind = "O" if "O" in functions else kind',
        "pass",
        "tests/runtime/supervision/test_watchdog.py::test_the_rank_that_stands_still_is_named",
    ),
]
