"""Steps that are captured as a graph: what is stale in it, what may not be in it, and the memory that it keeps."""

from tests.planted.planted import Planted

TESTS = "tests/runtime/test_graphs.py"
SAME = f"{TESTS}::test_a_step_that_is_captured_computes_the_same"
RANKS = f"{TESTS}::test_a_rank_launches_a_graph_and_its_update"
REFUSED = f"{TESTS}::test_what_the_host_decides_is_not_captured"

MISTAKES = [
    Planted(
        "graphs-of-the-batch-that-was-captured",
        "runtime/graphs.py",
        "            self._reads.load(batches(0), cut)\n",
        "",
        SAME,
    ),
    Planted(
        "graphs-of-the-batch-before",
        "runtime/graphs.py",
        "            self._reads.load(batches(0), cut)\n",
        "            launch()\n            self._reads.load(batches(0), cut)\n            return found\n",
        SAME,
    ),
    Planted(
        "graphs-that-are-captured-and-not-launched",
        "runtime/graphs.py",
        "            self._captured = (whole, cut), found, launch\n",
        "            self._captured = (whole, cut), found, launch\n            return found\n",
        SAME,
    ),
    Planted(
        "graphs-of-constants-made-before",
        "runtime/executor.py",
        "        yield from self._prologues(whole)\n        yield from self._microbatches(cut)\n",
        "        if not self._marks:\n            yield from self._prologues(whole)\n"
        "        yield from self._microbatches(cut)\n",
        SAME,
    ),
    Planted(
        "graphs-of-inputs-elsewhere",
        "runtime/inputs.py",
        "        if part in into:\n            return into[part].copy_(tensor, non_blocking=True)\n",
        "",
        SAME,
    ),
    Planted(
        "gathers-ahead-of-a-graph",
        "runtime/executor.py",
        "        if self._graph is None:\n            self._gather()\n",
        "        self._gather()\n",
        RANKS,
    ),
    Planted(
        "statistics-read-in-a-graph",
        "runtime/executor.py",
        "        return totals, (yield from begun(self._finish(totals, self.context), self.context))\n",
        "        found = yield from begun(self._finish(totals, self.context), self.context)\n"
        "        self._last = [float(each) for each in found]\n"
        "        return totals, found\n",
        RANKS,
    ),
    Planted(
        "graphs-with-random-numbers",
        "compiler/ops/op.py",
        '        return "draws random numbers" if self.random or self.draws else ""\n',
        '        return ""\n',
        REFUSED,
    ),
    Planted(
        "graphs-with-operations-of-the-files-own",
        "compiler/ops/custom.py",
        '        return "is an operation of the file\'s own"\n',
        '        return ""\n',
        f"{TESTS}::test_operations_of_the_files_own_are_not_captured",
    ),
    Planted(
        "graphs-that-wait-for-experts",
        "compiler/ops/experts.py",
        '    return "" if grouped else "waits for the number of rows of each expert"\n',
        '    return ""\n',
        f"{TESTS}::test_experts_are_captured_where_gpus_group_them",
    ),
    Planted(
        "graphs-that-give-their-memory-back",
        "compiler/analysis/memory.py",
        "        ends = [evolve(each, activations=max(0, graph - each.gradients)) for each in ends]\n",
        "",
        f"{TESTS}::test_a_graph_keeps_its_memory_during_the_update",
    ),
    Planted(
        "lists-that-end-before-what-is-posted",
        "compiler/schedules/stream_invariants.py",
        "        if tails[0][stream] < tails[stream][stream]:\n",
        "        if False:\n",
        "tests/runtime/transports/test_interleaved.py::test_a_list_ends_behind_all_that_is_posted",
    ),
]
