"""Operations of one's own: what the compiler makes of their declarations, how they are called, what verify tries."""

from tests.planted.planted import Planted

WAYS = "tests/compiler/ops/test_sharding_rules.py::test_every_way_is_sound"
ORDERS = "tests/compiler/ops/test_ops.py::test_results_do_not_depend_on_the_order_of_axes"
RUNS = "tests/runtime/test_own_operations.py"
LIES = "tests/runtime/verification/test_operations.py::test_a_lie_is_found_at_its_place"

COSTS = "tests/compiler/costs/test_costs.py"
RECORDS = "tests/compiler/costs/test_record.py"
PROFILES = "tests/runtime/profiling/test_profile.py"

MISTAKES = [
    Planted(
        "attention-at-peak",
        "compiler/costs/nodes.py",
        "flops *= device.attention.efficiency(*seen)",
        "pass",
        f"{COSTS}::test_attention_is_as_quick_as_its_paper_measured",
    ),
    Planted(
        "heads-of-any-size-as-quick",
        "compiler/costs/devices.py",
        "return self.best * share * length",
        "return self.best * length",
        f"{COSTS}::test_attention_is_as_quick_as_it_was_measured_on_hopper",
    ),
    Planted(
        "gradients-of-experts-added-for-nothing",
        "compiler/costs/nodes.py",
        "if added and device.gpu else 0",
        "if added and not device.gpu else 0",
        f"{COSTS}::test_gradients_of_experts_are_added_by_a_kernel_of_their_own",
    ),
    Planted(
        "attention-of-one-generation",
        "compiler/costs/devices.py",
        "attention=self.flash[flash]",
        "attention=self.attention",
        f"{COSTS}::test_narrow_operands_and_later_kernels_are_quicker",
    ),
    Planted(
        "narrow-products-at-the-usual-share",
        "compiler/costs/devices.py",
        "best=self.products.best * self.narrow",
        "best=self.products.best",
        f"{COSTS}::test_narrow_operands_and_later_kernels_are_quicker",
    ),
    Planted(
        "nothing-slower-beside-collectives",
        "compiler/costs/devices.py",
        "1 / (1 + _SLOWED * blocks / _CHANNELS)",
        "1.0",
        f"{COSTS}::test_collectives_slow_what_runs_beside_them",
    ),
    Planted(
        "nothing-slower-beside-measured-collectives",
        "compiler/analysis/time.py",
        "min(each.beside for each in under_way)",
        "1.0",
        "tests/compiler/analysis/test_time.py::test_a_product_beside_a_collective_has_the_speed_that_is_left",
    ),
    Planted(
        "any-work-of-the-same-features",
        "compiler/costs/record.py",
        "abs(log(each.work / max(kernel.work, 1.0)))",
        "0.0",
        f"{RECORDS}::test_of_kernels_with_the_same_features_that_of_the_most_similar_work_counts",
    ),
    Planted(
        "pieces-like-nothing-else",
        "compiler/ops/attention.py",
        'whole._replace(name=f"{name}.pieces", alike=whole)',
        'whole._replace(name=f"{name}.pieces")',
        f"{PROFILES}::test_attention_in_pieces_is_timed_on_ranks_that_take_turns",
    ),
    Planted(
        "window-as-quick-as-all-keys",
        "compiler/ops/attention.py",
        "return length if self.window is None else min(self.window, length)",
        "return length",
        f"{COSTS}::test_attention_over_more_keys_reaches_more_of_the_peak",
    ),
    Planted(
        "own-gradients-of-replicated-operands-whole",
        "compiler/ops/custom.py",
        "tuple(name if type.has(name) else SUM for type in results),",
        "tuple(name if type.has(name) else None for type in results),",
        f"{WAYS}[custom_gradient]",
    ),
    Planted(
        "own-linear-in-all-the-others",
        "compiler/ops/custom.py",
        "[SUM if i == position else None for i in range(len(operands))]",
        "[SUM if i != position else None for i in range(len(operands))]",
        f"{WAYS}[weighted]",
    ),
    Planted(
        "own-operands-with-axes-as-they-lie",
        "compiler/ops/custom.py",
        "texts = [permuted(each.text, each.type.names, order) for each, order in zip(arguments, orders, strict=True)]",
        "texts = [each.text for each, _ in zip(arguments, orders, strict=True)]",
        f"{ORDERS}[weighted]",
    ),
    Planted(
        "own-splits-of-the-axes-that-were-replaced",
        "compiler/passes/build.py",
        "over(declared.split),",
        "tuple(declared.split),",
        f"{RUNS}::test_what_is_declared_of_axes_holds_for_those_that_replace_them",
    ),
    Planted(
        "python-run-without-being-told-to",
        "runtime/python_files.py",
        "if model is not None and model.operations and not allowed:",
        "if model is None:",
        f"{RUNS}::test_what_runs_it_must_be_told_to",
    ),
    Planted(
        "python-of-a-checkpoint-not-compared",
        "runtime/checkpoint/identity.py",
        '        **{f"op {each.name}": _code(each) for each in model.operations.values()},\n',
        "",
        f"{RUNS}::test_resuming_with_other_python_says_so",
    ),
    Planted(
        "own-functions-unknown-where-a-bad-step-is-traced",
        "runtime/faults.py",
        "        custom=rank.plan.functions,\n",
        "",
        f"{RUNS}::test_where_a_number_became_infinite_is_found_in_them_too",
    ),
    Planted(
        "slopes-wrong-at-every-point-let-pass",
        "runtime/verification/operations.py",
        "if 2 * len(wrong) > POINTS:",
        "if len(wrong) > POINTS:",
        LIES,
    ),
    Planted(
        "changed-operands-let-pass",
        "runtime/verification/operations.py",
        "if not _same(x, operands[i])]",
        "if not _same(x, given[i])]",
        LIES,
    ),
    Planted(
        "splits-of-gradients-not-tried",
        "runtime/verification/operations.py",
        "            if not self.differentiable:\n                continue\n",
        "            continue\n",
        LIES,
    ),
    Planted(
        "one-term-for-all-in-linearity",
        "runtime/verification/operations.py",
        "terms.append(operands[position] - sum(terms))",
        "terms = [operands[position]]",
        LIES,
    ),
]
