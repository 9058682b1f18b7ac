"""Sparse parameters: which are, rows by distinct id, their exchange between ranks, and updates of rows alone."""

from tests.planted.planted import Planted

SPLIT = "verify tests/planted/files/tables.par"
TABLES = "tests/training/test_tables.py"
ON_SPLITS = f"{TABLES}::test_on_every_split_rows_alone_make_the_update_of_all"
PROCESSES = "tests/runtime/transports/test_process.py"
WHY = f"{TABLES}::test_what_cannot_be_sparse_says_why"

MISTAKES = [
    Planted(
        "ids-that-occur-twice-count-once",
        "runtime/kernels/sparse.py",
        "        sums.index_add_(0, slots, values)\n",
        "        sums[slots] = values\n",
        SPLIT,
    ),
    Planted(
        "the-last-id-is-dropped",
        "runtime/kernels/sparse.py",
        ".scatter_(0, slots, ordered - group * rows)\n",
        ".scatter_(\n        0, slots, torch.where(number < new.sum() - 1, ordered - group * rows, -1)\n    )\n",
        SPLIT,
    ),
    Planted(
        "every-rank-takes-the-first-block",
        "compiler/ops/sparse.py",
        "        start = offset_text(self.block, self.shards)\n",
        '        start = "0"\n',
        SPLIT,
    ),
    Planted(
        "rows-of-the-next-block",
        "runtime/kernels/sparse.py",
        "    ids = ids.long() - start * rows\n",
        "    ids = ids.long() - (start + 1) * rows\n",
        SPLIT,
    ),
    Planted(
        "entries-that-there-are-not-are-updated",
        "runtime/kernels/sparse.py",
        "    there = ids >= 0\n    given = ",
        "    there = ids >= -1\n    given = ",
        f"{TABLES}::test_rows_that_are_not_looked_up_stay_as_they_are_to_the_bit",
    ),
    Planted(
        "states-are-updated-in-a-copy",
        "runtime/kernels/sparse.py",
        "in zip(stored, own, strict=True)",
        "in zip(stored[:1], own[:1], strict=True)",
        SPLIT,
    ),
    Planted(
        "microbatches-in-one-place",
        "compiler/ops/optimizer.py",
        'return f"{target}[c.microbatch].copy_({view})"',
        'return f"{target}[0].copy_({view})"',
        SPLIT,
    ),
    Planted(
        "only-the-first-source-is-merged",
        "runtime/kernels/sparse.py",
        "        inside = own >= 0\n",
        "        inside = own >= 0\n        if sources:\n            inside[1:] = False\n",
        SPLIT,
    ),
    Planted(
        "only-the-first-lookup-of-a-table-counts",
        "compiler/passes/update.py",
        "        if len(ids) == 1:\n            return ids[0], rows[0]\n",
        "        if ids:\n            return ids[0], rows[0]\n",
        SPLIT,
    ),
    Planted(
        "places-among-all-tables",
        "runtime/kernels/sparse.py",
        "_spread(slots % (blocks * count), inside",
        "_spread(slots % count, inside",
        SPLIT,
    ),
    Planted(
        "looked-up-in-the-first-block",
        "runtime/kernels/sparse.py",
        ".clamp(min=0) + place[shared + 1] * block\n",
        ".clamp(min=0) + 0 * place[shared + 1] * block\n",
        "tests/compiler/ops/test_blockwise.py::test_replacement_equals_the_node",
    ),
    Planted(
        "id-zero-is-not-sent",
        "runtime/transports/groups.py",
        "        there = sent[0] >= 0\n",
        "        there = sent[0] > 0\n",
        f"{PROCESSES}::test_collectives_on_gloo_and_on_the_virtual_cluster_agree_bit_for_bit",
    ),
    Planted(
        "lists-arrive-as-long-as-they-were-sent",
        "runtime/transports/groups.py",
        "device=there.device) < arriving.unsqueeze(-1)\n",
        "device=there.device) < lengths.unsqueeze(-1)\n",
        f"{PROCESSES}::test_collectives_on_gloo_and_on_the_virtual_cluster_agree_bit_for_bit",
    ),
    Planted(
        "weight-decay-of-the-rows-alone",
        "compiler/optimizers/adagrad.py",
        "        return not self.decay\n",
        "        return True\n",
        WHY,
    ),
    Planted(
        "momentum-of-the-rows-alone",
        "compiler/optimizers/sgd.py",
        "        return not self.momentum and not self.decay\n",
        "        return not self.decay\n",
        WHY,
    ),
    Planted(
        "means-of-the-rows-alone",
        "compiler/passes/sparse.py",
        "elif train.ema is not None:",
        "elif train.ema is not None and train.ema > 1:",
        WHY,
    ),
    Planted(
        "tables-that-a-product-reads-are-sparse",
        "compiler/passes/sparse.py",
        "any(each is None for each in terms)",
        "all(each is None for each in terms)",
        WHY,
    ),
    Planted(
        "any-other-rows-are-updated",
        "compiler/verify/ending.py",
        "        require(found == touched, f",
        "        require(found is not None, f",
        f"{TABLES}::test_an_update_of_other_rows_than_the_gradient_has_is_reported",
    ),
    Planted(
        "weight-decay-of-whole-rows-alone",
        "compiler/optimizers/rowwise_adagrad.py",
        "return not self.decay",
        "return True",
        "tests/training/test_tables.py::test_what_cannot_be_sparse_says_why",
    ),
    Planted(
        "evaluations-that-are-not-told-of-tables",
        "compiler/pipeline.py",
        "sparse=training.tables.over, iterations",
        "iterations",
        "tests/training/test_tables.py::test_an_evaluation_reads_tables_as_training_stores_them",
    ),
    Planted(
        "evaluations-that-may-read-anything",
        "compiler/verify/reading.py",
        "        there = record.type == own.type and record.layout == layout\n",
        "        there = record.type == own.type\n",
        "tests/training/test_tables.py::test_an_evaluation_reads_tables_as_training_stores_them",
    ),
    Planted(
        "what-output-parts-make-for-input-parts-is-theirs",
        "compiler/passes/spread.py",
        "if value in self.kind and self._divides(value)}",
        "if value in self.kind}",
        "tests/training/test_shared_vocabulary.py::test_the_numbers_are_those_of_one_device",
    ),
]
