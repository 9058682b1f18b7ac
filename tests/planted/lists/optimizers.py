"""Optimizers, clipping, learning rates, and what decays."""

from tests.planted.planted import Planted

FILE = "tests/reference/test_files.py::test_a_file_computes_what_it_means"
RATES = "tests/runtime/test_learning_rates.py"
OPTIMIZERS = "tests/runtime/kernels/test_adamw_and_sgd.py"

OFFLOAD = "verify tests/planted/files/offload.par"

MISTAKES = [
    Planted(
        "what-the-host-updated-is-not-stored",
        "compiler/passes/update.py",
        "        if written is not each.master:\n",
        "        if part is not each.master:\n",
        "tests/training/test_offload.py",
    ),
    Planted(
        "states-on-the-device-though-offloaded",
        "compiler/passes/update.py",
        "local_type(stored, at, sizes), at, host=there))",
        "local_type(stored, at, sizes), at))",
        OFFLOAD,
    ),
    Planted(
        "the-mean-on-the-device-though-offloaded",
        "compiler/passes/update.py",
        "new.type, layout, host=there)",
        "new.type, layout)",
        OFFLOAD,
    ),
    Planted(
        "updates-run-in-either-memory",
        "compiler/verify/copies.py",
        "require(len(there | made) <= 1,",
        "require(len(there | made) <= 2,",
        "tests/training/test_offload.py",
    ),
    Planted(
        "the-host-s-memory-counted-as-the-device-s",
        "compiler/analysis/memory.py",
        "            for each in records\n            if each.host == host\n",
        "            for each in records\n",
        "tests/training/test_offload.py",
    ),
    Planted(
        "copies-to-the-host-start-in-no-time",
        "compiler/costs/nodes.py",
        "return device.launch + node.inputs[-1].type.bytes / device.host_link if device.gpu else 0.0",
        "return node.inputs[-1].type.bytes / device.host_link if device.gpu else 0.0",
        "tests/training/test_offload.py::test_small_states_in_the_host_s_memory_save_no_time",
    ),
    Planted(
        "nesterov-with-the-buffer-twice",
        "runtime/kernels/optimizers.py",
        "direction = gradient.add(buffer, alpha=momentum) if nesterov else buffer",
        "direction = buffer.add(buffer, alpha=momentum) if nesterov else buffer",
        f"{FILE}[tied]",
    ),
    Planted(
        "decay-of-sgd-decoupled",
        "runtime/kernels/optimizers.py",
        "gradient = gradient.add(parameter, alpha=decay)",
        "parameter.mul_(1 - rate * decay)",
        f"{FILE}[tied]",
    ),
    Planted(
        "gradient-dampened-in-the-buffer",
        "runtime/kernels/optimizers.py",
        "buffer.mul_(momentum).add_(gradient)",
        "buffer.mul_(momentum).add_(gradient, alpha=1 - momentum)",
        f"{FILE}[batch]",
    ),
    Planted(
        "decay-all-ignored",
        "compiler/optimizers/registry.py",
        'if decays or arguments.get("decay") == "all" else 0.0',
        "if decays else 0.0",
        f"{FILE}[tied]",
    ),
    Planted(
        "everything-decays",
        "compiler/optimizers/registry.py",
        'if decays or arguments.get("decay") == "all" else 0.0',
        "if True else 0.0",
        f"{FILE}[figures]",
    ),
    Planted(
        "embeddings-do-not-decay",
        "compiler/ops/lookup.py",
        "    reads_weights = True\n",
        "",
        f"{FILE}[windows]",
    ),
    Planted(
        "what-is-read-through-a-view-does-not-decay",
        "compiler/passes/readers.py",
        "self.readers.setdefault(root, []).append(Reader(node, position, axes))",
        "self.readers.setdefault(value, []).append(Reader(node, position, axes))",
        f"{FILE}[axes]",
    ),
    Planted(
        "betas-exchanged",
        "compiler/optimizers/adamw.py",
        "return AdamW(float(beta1), float(beta2),",
        "return AdamW(float(beta2), float(beta1),",
        f"{FILE}[skips]",
    ),
    Planted(
        "epsilon-under-the-root",
        "runtime/kernels/optimizers.py",
        "denominator = square.sqrt().div_(correction).add_(eps)",
        "denominator = square.add(eps).sqrt().div_(correction)",
        OPTIMIZERS,
    ),
    Planted(
        "second-moment-uncorrected",
        "runtime/kernels/optimizers.py",
        "correction = (1 - beta2**update) ** 0.5",
        "correction = 1 - beta2**update",
        OPTIMIZERS,
    ),
    Planted(
        "decay-behind-the-update",
        "runtime/kernels/optimizers.py",
        "    if decay:\n        parameter.mul_(1 - rate * decay)\n    mean",
        "    if decay:\n        parameter.mul_(1 - decay)\n    mean",
        OPTIMIZERS,
    ),
    Planted(
        "rate-of-the-step-before",
        "runtime/training.py",
        "rates = learning_rates(settings.optimizer, number)",
        "rates = learning_rates(settings.optimizer, max(1, number - 1))",
        f"{FILE}[figures]",
    ),
    Planted(
        "moments-corrected-by-the-step-before",
        "runtime/kernels/optimizers.py",
        "return torch.full((), float(update), device=device)",
        "return torch.full((), float(max(1, update - 1)), device=device)",
        f"{FILE}[windows]",
    ),
    Planted(
        "warm-up-begins-at-zero",
        "runtime/learning_rates.py",
        'return float(arguments["peak"] * step / warmup)',
        'return float(arguments["peak"] * (step - 1) / warmup)',
        RATES,
    ),
    Planted(
        "cosine-goes-a-whole-turn",
        "runtime/learning_rates.py",
        "(1.0 + cos(pi * _share(step, warmup, total))) / 2.0",
        "(1.0 + cos(2 * pi * _share(step, warmup, total))) / 2.0",
        RATES,
    ),
    Planted(
        "decay-begins-in-the-warm-up",
        "runtime/learning_rates.py",
        "_share(step, max(warmup, total - decay), total)",
        "_share(step, total - decay, total)",
        RATES,
    ),
    Planted(
        "gradients-scaled-up-to-the-limit",
        "compiler/passes/update.py",
        'return pointwise(build, "minimum", ratio, constant(build, 1.0, norm), name="clip")',
        'return pointwise(build, "maximum", ratio, constant(build, 1.0, norm), name="clip")',
        f"{FILE}[tied]",
    ),
    Planted(
        "clipped-without-a-root",
        "compiler/passes/update.py",
        'norm = pointwise(build, "sqrt", total, name="norm")',
        'norm = pointwise(build, "multiply", total, constant(build, 1.0, total), name="norm")',
        f"{FILE}[tied]",
    ),
    Planted(
        "norm-not-a-root",
        "runtime/evaluation.py",
        'sqrt(squares) if squares >= 0 else float("nan")',
        'squares if squares >= 0 else float("nan")',
        f"{FILE}[tied]",
    ),
    Planted(
        "norm-of-the-last-stage",
        "runtime/evaluation.py",
        "squares = sum(value for name, value in named.items() if name.startswith(SQUARE))",
        'squares = max(value for name, value in named.items() if name.startswith(SQUARE) or name == "loss")',
        f"{FILE}[tied]",
    ),
]
