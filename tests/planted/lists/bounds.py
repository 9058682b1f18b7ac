"""The memory bound: what collectives and messages hold, and what they really do."""

from tests.planted.planted import Planted

HELD = "tests/bench/test_collectives.py"
ALLOCATED = "tests/bench/test_workspace.py"
WITHIN = "tests/compiler/analysis/test_memory.py::test_a_function_holds_what_its_collectives_do_until_it_waits"
SENT = "tests/compiler/codegen/test_ownership.py::test_what_is_made_to_be_sent_ends_as_it_has_been_copied"
MEMORY = "compiler/analysis/memory.py"
EVALUATIONS = "tests/compiler/analysis/test_memory.py"
SUM = "tests/compiler/analysis/test_memory.py::test_what_is_sent_is_held_until_all_has_arrived"
ALONE = "tests/compiler/analysis/test_memory.py::test_a_gradient_alone_is_sent_as_it_is"
FLAT = "tests/compiler/analysis/test_memory.py::test_a_flat_gradient_is_held_until_it_is_summed"
MESSAGES = (
    "tests/compiler/analysis/test_memory.py"
    "::test_messages_are_held_from_where_they_are_posted_to_where_they_are_waited_for"
)
DRAWN = "tests/runtime/fake_gpu/test_ranks.py::test_memory_is_bounded_where_numbers_are_drawn"

LIBRARIES = "tests/compiler/analysis/test_memory.py::test_what_libraries_keep_is_always_there"

MISTAKES = [
    Planted(
        "a-graph-works-where-the-step-does",
        MEMORY,
        "(2 if state.plan.captured else 1) * state.device.workspace",
        "state.device.workspace",
        LIBRARIES,
    ),
    Planted(
        "kernels-are-tried-in-no-memory",
        MEMORY,
        "(state.device.cache if state.compiles else 0)",
        "(state.device.cache if state.plan.captured else 0)",
        LIBRARIES,
    ),
    Planted(
        "tensors-of-a-bucket-end-anywhere",
        "compiler/ops/buffers.py",
        "-(-type.bytes // parts // ALIGNMENT) * ALIGNMENT",
        "type.bytes // parts",
        HELD,
    ),
    Planted(
        "shards-that-lie-apart-arrive-in-place",
        "compiler/ops/collective.py",
        "in_place=_outermost(operands[0], self.axes[0]), lent=(0,))",
        "in_place=True, lent=(0,))",
        HELD,
    ),
    Planted(
        "shards-that-lie-apart-are-sent-as-they-are",
        "compiler/ops/collective.py",
        "lent = (position,) if len(own) == 1 and _outermost(type, axis) else ()",
        "lent = (position,) if len(own) == 1 else ()",
        HELD,
    ),
    Planted(
        "one-part-of-a-sum-arrives",
        "compiler/ops/collective.py",
        "found += Buffers(sent, rows, part, lent=lent) if adds",
        "found += Buffers(sent, part, part, lent=lent) if adds",
        HELD,
    ),
    Planted(
        "sums-are-not-filled-up",
        "compiler/ops/collective.py",
        "filled = row + -row % (self.parts * BYTES[type.dtype])",
        "filled = row",
        HELD,
    ),
    Planted(
        "rows-that-arrive-are-put-nowhere",
        "compiler/ops/sparse.py",
        "adding=marks + max(type.bytes for type in operands))",
        "adding=0)",
        HELD,
    ),
    Planted(
        "what-is-turned-is-not-copied",
        "compiler/ops/ring.py",
        "return Buffers(row, row, in_place=True) if",
        "return Buffers(0, row, in_place=True) if",
        HELD,
    ),
    Planted(
        "what-was-gathered-is-kept",
        "runtime/transports/groups.py",
        "        yield [post(all_gather_single, received.view(-1), sent.rows.view(-1))]\n        sent.free()\n",
        "        yield [post(all_gather_single, received.view(-1), sent.rows.view(-1))]\n",
        HELD,
    ),
    Planted(
        "what-was-scattered-is-kept",
        "runtime/transports/groups.py",
        "            yield [post(dist.all_to_all_single, received, numbers)]\n            sent.free()\n",
        "            yield [post(dist.all_to_all_single, received, numbers)]\n",
        HELD,
    ),
    Planted(
        "what-was-summed-is-kept",
        "runtime/transports/groups.py",
        "            sent.free()\n            part = total(flat.view(self.size, -1).unbind(), maximum)\n",
        "            part = total(flat.view(self.size, -1).unbind(), maximum)\n",
        HELD,
    ),
    Planted(
        "messages-that-are-sent-take-no-memory",
        MEMORY,
        "messages += leaving[instruction.stage, DIRECTION[kind]] - arriving[instruction.stage, DIRECTION[kind]]",
        "messages -= arriving[instruction.stage, DIRECTION[kind]]",
        MESSAGES,
    ),
    Planted(
        "messages-that-have-arrived-stay",
        MEMORY,
        "leaving[instruction.stage, DIRECTION[kind]] - arriving[instruction.stage, DIRECTION[kind]]",
        "leaving[instruction.stage, DIRECTION[kind]]",
        MESSAGES,
    ),
    Planted(
        "gradients-are-reduced-in-no-memory",
        MEMORY,
        "most = max(most, now + stage.reducing)",
        "most = max(most, now)",
        ALONE,
    ),
    Planted(
        "what-threads-have-sent-is-gone-at-once",
        "compiler/analysis/in_flight.py",
        "inputs=(received, *(operands if adds else ())),",
        "inputs=(received,),",
        FLAT,
    ),
    Planted(
        "the-batch-in-whole-takes-no-memory",
        MEMORY,
        "return 0 if state.device.gpu else ceil(sum(sizes) / state.plan.batches)",
        "return 0",
        SUM,
    ),
    Planted(
        "parts-of-all-batches-of-an-evaluation-are-there-at-once",
        MEMORY,
        "rows = int(type.axis(part.batch).size / program.batches)",
        "rows = type.axis(part.batch).size",
        f"{EVALUATIONS}::test_a_part_is_of_one_batch_of_an_evaluation",
    ),
    Planted(
        "training-keeps-nothing-beside-an-evaluation",
        MEMORY,
        'there = _between(state, rank) + MemoryReport("", _computed_with',
        'there = _between(evaluation, own) + MemoryReport("", _computed_with',
        f"{EVALUATIONS}::test_an_evaluation_is_part_of_a_run",
    ),
    Planted(
        "an-evaluation-is-not-part-of-the-bound",
        "compiler/pipeline.py",
        "return _with_evaluation(training, evaluation), evaluation",
        "return training, evaluation",
        f"{EVALUATIONS}::test_an_evaluation_is_part_of_a_run",
    ),
    Planted(
        "initial-values-take-no-memory",
        MEMORY,
        "(0 if state.device.gpu else max(made, default=0))",
        "0",
        "tests/compiler/analysis/test_memory.py"
        "::test_a_large_parameter_is_made_in_the_host_s_memory_before_the_first_step",
    ),
    Planted(
        "kernels-need-no-memory",
        "compiler/analysis/liveness.py",
        "(_workspace(node, adding.get(node), apart) if there else 0)",
        "0",
        "tests/compiler/analysis/test_memory.py::test_what_a_kernel_needs_is_held_while_it_runs_where_it_runs",
    ),
    Planted(
        "gradients-of-updates-are-never-parts",
        MEMORY,
        "apart=strided((*reductions, *nodes))",
        "apart=strided(nodes)",
        "tests/runtime/test_graphs.py::test_a_graph_keeps_its_memory_during_the_update",
    ),
    Planted(
        "batches-are-read-in-the-dtype-that-computes",
        MEMORY,
        'max(BYTES["f32"] if each.is_float else 0, BYTES[each.dtype])',
        "BYTES[each.dtype]",
        "tests/bench/test_memory.py",
    ),
    Planted(
        "kernels-need-memory-wherever-they-run",
        "compiler/analysis/liveness.py",
        "(_workspace(node, adding.get(node), apart) if there else 0)",
        "_workspace(node, adding.get(node), apart)",
        "tests/compiler/analysis/test_memory.py::test_what_a_kernel_needs_is_held_while_it_runs_where_it_runs",
    ),
    Planted(
        "random-numbers-are-made-of-nothing",
        "compiler/ops/position.py",
        "return random_bytes(self.distribution, results[0].elements)",
        "return 0",
        DRAWN,
    ),
    Planted(
        "what-is-made-to-be-sent-is-kept",
        "compiler/codegen/writer.py",
        "            ended += self._read(units[i])\n",
        "",
        SENT,
    ),
    Planted(
        "collectives-of-a-microbatch-hold-nothing",
        "compiler/analysis/in_flight.py",
        "            if unit[0] in flights:\n",
        "            if unit[0] in flights and not run:\n",
        WITHIN,
    ),
    Planted(
        "collectives-of-a-microbatch-are-over-at-once",
        "compiler/analysis/in_flight.py",
        "                flying.update(dict.fromkeys(node.outputs, flights[node]))\n",
        "                units += ([each] for each in flights[node].end)\n",
        WITHIN,
    ),
    Planted(
        "some-of-a-bucket-is-kept",
        "compiler/analysis/in_flight.py",
        "found = {value: tensor for each in flights.values() for value, tensor in each.behind.items()}",
        "found: dict[Value, Value] = {}",
        WITHIN,
    ),
    Planted(
        "exponentials-take-no-memory",
        "compiler/ops/loss.py",
        '        """The exponentials."""\n        return wide_bytes(operands[0])\n',
        '        """The exponentials."""\n        return 0\n',
        ALLOCATED,
    ),
    Planted(
        "matrices-are-never-copied",
        "compiler/ops/op.py",
        "        if order[at : at + len(own)] != own:\n",
        "        if len(own) > len(order):\n",
        ALLOCATED,
    ),
    Planted(
        "rows-of-other-shards-take-no-memory",
        "compiler/ops/lookup.py",
        "(rows.with_dtype(target.dtype).bytes if copied else 0)",
        "0",
        ALLOCATED,
    ),
]
