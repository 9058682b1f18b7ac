"""What a GPU would mind and a CPU does not: the wrong memory, waiting, other dtypes, memory used at the wrong time."""

from tests.planted.planted import Planted

RANKS = "tests/runtime/fake_gpu/test_ranks.py::test_ranks_run_on_gpus"

MISTAKES = [
    # ------------------------------------------------------------ device
    Planted(
        "accumulators-on-the-host",
        "runtime/stages.py",
        "partial(torch.empty, type.shape, dtype=DTYPES[type.dtype], device=device)",
        "partial(torch.empty, type.shape, dtype=DTYPES[type.dtype])",
        RANKS,
    ),
    Planted(
        "statistics-on-the-host",
        "runtime/executor.py",
        "        vector = torch.zeros(self._width, dtype=torch.float64, device=context.device)",
        "        vector = torch.zeros(self._width, dtype=torch.float64)",
        RANKS,
    ),
    Planted(
        "constants-on-the-host",
        "compiler/ops/op.py",
        "dtype={TORCH_DTYPES[argument.type.dtype]}, device=c.device)",
        "dtype={TORCH_DTYPES[argument.type.dtype]})",
        RANKS,
    ),
    Planted(
        "coordinates-of-random-numbers-on-the-host",
        "runtime/kernels/positions.py",
        "torch.zeros((), dtype=torch.int64, device=c.device)",
        "torch.zeros((), dtype=torch.int64)",
        RANKS,
    ),
    Planted(
        "angles-on-the-host",
        "runtime/kernels/positions.py",
        "position = torch.arange(count, dtype=torch.float64, device=device)",
        "position = torch.arange(count, dtype=torch.float64)",
        RANKS,
    ),
    Planted(
        "numbers-of-slots-on-the-host",
        "runtime/kernels/experts.py",
        "    numbers = torch.arange(count, device=order.device)\n",
        "    numbers = torch.arange(count)\n",
        RANKS,
    ),
    # ------------------------------------------------------------ synchronisation
    Planted(
        "the-update's-number-from-the-host",
        "runtime/kernels/optimizers.py",
        "return torch.full((), float(update), device=device)",
        "return torch.tensor(float(update), device=device)",
        RANKS,
    ),
    Planted(
        "constants-from-the-host",
        "compiler/ops/op.py",
        'f"torch.full((), {argument.text}, dtype',
        'f"torch.tensor({argument.text}, dtype',
        RANKS,
    ),
    Planted(
        "inputs-that-the-host-waits-for",
        "runtime/inputs.py",
        "else tensor.to(device, non_blocking=True)",
        "else tensor.to(device)",
        RANKS,
    ),
    Planted(
        "inputs-from-memory-that-is-not-pinned",
        "runtime/inputs.py",
        "torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)",
        "torch.empty(tensor.shape, dtype=tensor.dtype)",
        RANKS,
    ),
    Planted(
        "updates-that-read-the-factor",
        "runtime/executor.py",
        "if factor is not None and self._update is not None:",
        "if factor is not None and factor > 0 and self._update is not None:",
        RANKS,
    ),
    Planted(
        "entries-that-are-counted",
        "runtime/kernels/sparse.py",
        "    return x.is_cpu and type(x) is Tensor\n",
        "    return True\n",
        RANKS,
    ),
    Planted(
        "lists-whose-lengths-are-read",
        "runtime/transports/groups.py",
        "EXCHANGE_ROWS: self._all_to_all if self.sums else self._exchange_rows,",
        "EXCHANGE_ROWS: self._exchange_rows,",
        RANKS,
    ),
    # ------------------------------------------------------------ dtype
    Planted(
        "normalized-in-f32",
        "runtime/kernels/rows.py",
        "    return (wide * rate).to(x.dtype), rate.squeeze(over)\n",
        "    return wide * rate, rate.squeeze(over)\n",
        RANKS,
    ),
    Planted(
        "rotated-in-f32",
        "runtime/kernels/positions.py",
        "    result = x.new_empty([x.shape[i] for i in order] if inverse else x.shape)\n",
        "    result = pairs.new_empty([x.shape[i] for i in order] if inverse else x.shape)\n",
        RANKS,
    ),
    Planted(
        "losses-in-f64",
        "runtime/kernels/rows.py",
        "    wide, index = widened(logits), targets.long().unsqueeze(-1)\n",
        "    wide, index = logits.double(), targets.long().unsqueeze(-1)\n",
        RANKS,
    ),
    Planted(
        "rows-of-experts-in-f32",
        "runtime/kernels/experts.py",
        "    if _by_grouped_product(x, w):\n        made = ",
        "    if _by_grouped_product(x, w):\n        x, w = x.float(), w.float()\n        made = ",
        RANKS,
    ),
    # ------------------------------------------------------------ lifetime and memory
    Planted(
        "collectives-read-before-they-are-done",
        "runtime/transports/groups.py",
        "                self.works.pop(0).done()",
        "                self.works.pop(0)",
        RANKS,
    ),
    Planted(
        "copies-that-nothing-waits-for",
        "runtime/streams.py",
        "            for each in behind:\n                self._current.wait_event(each)\n            waits = own()\n",
        "            waits = own()\n",
        RANKS,
    ),
    Planted(
        "copies-of-what-is-not-computed-yet",
        "runtime/streams.py",
        "            for each in behind:\n                own.wait_event(each)\n            with torch",
        "            with torch",
        RANKS,
    ),
    Planted(
        "totals-of-tied-parameters-before-they-arrive",
        "runtime/executor.py",
        "        for handle in handles:\n            while not handle.done():\n                yield\n",
        "        if False:\n            yield\n",
        RANKS,
    ),
    Planted(
        "scores-made-where-a-kernel-makes-none",
        "runtime/kernels/scores.py",
        "and max(q4.shape[-1], v4.shape[-1]) <= FLASH_SIZE",
        "and max(q4.shape[-1], v4.shape[-1]) > FLASH_SIZE",
        f"{RANKS[: RANKS.index('::')]}::test_attention_makes_no_scores_on_gpus",
    ),
    Planted(
        "scores-made-of-keys-before-the-queries",
        "runtime/kernels/scores.py",
        "return fits and (not self.placed or 0 <= self.start <= k4.shape[-2] - q4.shape[-2])",
        "return fits and not self.start",
        f"{RANKS[: RANKS.index('::')]}::test_attention_makes_no_scores_on_gpus_whatever_its_sizes",
    ),
    Planted(
        "padded-rows-that-take-no-memory",
        "compiler/ops/attention.py",
        "larger = rounded_up(max(along, wide), ROWS_OF)",
        "larger = max(along, wide)",
        f"{RANKS[: RANKS.index('::')]}::test_attention_makes_no_scores_on_gpus_whatever_its_sizes",
    ),
    Planted(
        "memory-is-that-of-the-stream-that-frees-it",
        "runtime/fake_gpu/watch.py",
        "if not all(self._behind(memory.stream, each)",
        "if not all(self._behind(self.current, each)",
        "tests/runtime/fake_gpu/test_watch.py::test_memory_is_freed_after_other_streams",
    ),
    Planted(
        "parts-that-outlive-what-is-gathered-from-them",
        "compiler/codegen/emit.py",
        "            if held:\n                writer.add(Clear(held))\n",
        "",
        f"{RANKS[: RANKS.index('::')]}::test_what_was_gathered_from_is_freed",
    ),
]
