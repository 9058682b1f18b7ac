"""Passes that do not show in `verify`: where things stand, what is kept, in which dtype is added up."""

from tests.planted.planted import Planted

CASES = "tests/compiler/passes/test_cases.py"
KEPT = "tests/training/test_frozen.py::test_what_is_frozen_and_read_in_earlier_iterations_alone_is_kept_once"

MISTAKES = [
    Planted(
        "frozen-parameters-that-nothing-reads-dropped",
        "compiler/passes/cut.py",
        "    kept = {each.value for each in graph.parameters if each.frozen} - read\n",
        "    kept = set()\n",
        KEPT,
    ),
    Planted(
        "frozen-parameters-that-nothing-reads-on-all-stages",
        "compiler/passes/cut.py",
        "accumulators, set() if index else kept)",
        "accumulators, kept)",
        KEPT,
    ),
    Planted(
        "what-comes-before-costs-nothing",
        "compiler/passes/place.py",
        "        found = weigh(_at(graph, _spread(graph, numbers, apart)))\n",
        "        each = [numbers.get(iteration_of(node.scope, names) or '', APART) for node in graph.nodes]\n"
        "        found = weigh(_at(graph, each))\n",
        CASES,
    ),
    Planted(
        "what-no-rule-names-where-the-last-iteration-was",
        "compiler/passes/place.py",
        "stage = max([current, *fed])",
        "stage = current",
        CASES,
    ),
    Planted(
        "losses-added-up-in-narrow-dtypes",
        "compiler/passes/microbatch.py",
        "        type = local.type.with_dtype(accumulation(local.type.dtype))\n",
        "        type = local.type\n",
        CASES,
    ),
    Planted(
        "gradients-of-backward-nodes-added-up-there",
        "compiler/passes/microbatch.py",
        "                if node.phase is Phase.BACKWARD:\n                    self.build.phase = Phase.WEIGHT\n",
        "",
        CASES,
    ),
]
