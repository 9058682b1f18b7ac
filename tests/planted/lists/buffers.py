"""Buffers: what their updates are made of, when and where they are made, and what evaluation reads."""

from tests.planted.planted import Planted

FILE = "tests/reference/test_files.py::test_a_file_computes_what_it_means"
BUFFERS = "tests/compiler/passes/test_buffers.py"
RESUME = "tests/runtime/checkpoint/test_buffers.py"
SPLIT = "verify tests/planted/files/buffers.par"
# Whatever the random data are: signs may be alike.
BY_SIGN = [
    f"verify {file} train.seed={seed}"
    for file in (
        "tests/planted/files/balanced_by_sign.par",
        "tests/planted/files/balanced_by_sign.par layout=piped",
        "specs/zoo/deepseek_v3.par schedule=gpipe(microbatches=2)",
    )
    for seed in range(5)
]

MISTAKES = [
    Planted(
        "updates-of-buffers-read-updated-parameters",
        "compiler/codegen/assemble.py",
        "    writer.block(update.buffer_updates(order.keys()), set())\n",
        "    late = update.buffer_updates(order.keys())\n",
        f"{FILE}[buffers]",
    ),
    Planted(
        "buffers-stored-one-by-one",
        "compiler/passes/update.py",
        "return [*bucketed(by_depth(self.nodes_of(buffers)), BUCKET_BYTES), *(each.store for each in buffers)]",
        "return [node for each in buffers for node in (*self.nodes_of([each]), each.store)]",
        f"{FILE}[buffers]",
    ),
    *(
        Planted(
            f"statistics-of-one-microbatch-{number}",
            "compiler/passes/microbatch.py",
            'return self._accumulated(f"{STATISTIC}{value.name}", value, None if value in self.producers else reader)',
            'self.state[value] = None; return self._accumulated(f"{STATISTIC}{value.name}", value, None)',
            caught,
        )
        for number, caught in enumerate([SPLIT, *BY_SIGN])
    ),
    Planted(
        "ends-of-updates-in-every-microbatch",
        "compiler/passes/buffers.py",
        "        if node in late and any(value in roots for value in node.outputs):\n",
        "        if node in late and not node.op.differentiable and any(value in roots for value in node.outputs):\n",
        SPLIT,
    ),
    Planted(
        "ends-of-updates-in-half-precision",
        "compiler/passes/buffers.py",
        "op = node.op.widened()",
        "op = node.op",
        f"{BUFFERS}::test_updates_are_computed_in_full_precision",
    ),
    Planted(
        "statistics-stay-on-their-stage",
        "compiler/codegen/plan.py",
        "    needed += [(each.stages, each.totals) for each in update.buffers]\n",
        "",
        f"{FILE}[buffers]",
    ),
    Planted(
        "buffers-kept-where-training-reads-them",
        "compiler/passes/buffers.py",
        "evolve(p, kept=tuple(sorted(kept[p.value] - read[p.value])))",
        "evolve(p, kept=())",
        f"{FILE}[buffers]",
    ),
    Planted(
        "parameters-not-kept-where-buffers-are",
        "compiler/passes/buffers.py",
        "                if not kept[buffer] <= kept[other]:\n",
        "                if not kept[buffer] <= kept[other] and other in reads:\n",
        f"{FILE}[buffers]",
    ),
    Planted(
        "evaluation-chooses-as-training",
        "compiler/passes/mode.py",
        "node.inputs[1 if known[node.inputs[0]] else 2]",
        "node.inputs[1]",
        f"{FILE}[buffers]",
    ),
    Planted(
        "evaluation-updates-buffers",
        "compiler/passes/mode.py",
        "return without_dead(evolve(chosen, updates=()))",
        "return with_stages(without_dead(chosen), batch, stages_of(graph, batch))",
        f"{FILE}[buffers]",
    ),
    Planted(
        "buffers-divided-by-zero-rules",
        "compiler/passes/shard/shard.py",
        "if not parameter.buffer:  # rules for classes are for what is trained",
        "if True:",
        f"{BUFFERS}::test_rules_for_classes_are_for_what_is_trained",
    ),
    Planted(
        "buffers-in-the-gradient-norm",
        "compiler/passes/differentiate.py",
        "trained = [p for p in graph.parameters if p.trained]",
        "trained = [p for p in graph.parameters if not p.frozen]",
        f"{BUFFERS}::test_buffers_have_no_gradient",
    ),
    Planted(
        "buffers-not-in-checkpoints",
        "runtime/checkpoint/parts.py",
        "    for record in program.parameters:\n        name =",
        "    for record in (each for each in program.parameters if each.states):\n        name =",
        f"{RESUME}::test_a_resumed_run_is_the_undisturbed_one_bit_for_bit",
    ),
    Planted(
        "a-model-is-the-same-with-other-updates",
        "runtime/checkpoint/identity.py",
        "updates = [[[each.buffer, each.value] for each in body.updates]] if body.updates else []",
        "updates = list[object]()",
        f"{RESUME}::test_another_update_is_another_model",
    ),
]
