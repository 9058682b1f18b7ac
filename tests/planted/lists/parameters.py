"""Parameters in the host's memory: when copies start and arrive, what is counted, and tables in files; and gradients on
their way there.
"""

from tests.planted.planted import Planted

VERIFY = "verify tests/planted/files/parameters.par"
PARAMETERS = "tests/training/test_offloaded_parameters.py"
TABLES = "tests/training/test_tables_on_host.py"
STATES = "tests/training/test_offload.py"
EARLY = f"{STATES}::test_what_is_read_or_written_before_it_has_landed_is_found"
COMING = f"{STATES}::test_gradients_are_on_their_way_while_the_backward_pass_runs"
WATCH = "tests/runtime/fake_gpu/test_watch.py::test_the_host_reads_what_has_landed"
GPU = "tests/runtime/fake_gpu/test_ranks.py::test_ranks_run_on_gpus[offloaded_state]"

MISTAKES = [
    Planted(
        "layers-that-do-not-wait-for-their-copies",
        "compiler/passes/prefetch.py",
        "            begun = [self._node(Arrive(), coming, copy, reader, self.root)]\n",
        "            begun, copy = [], coming\n",
        VERIFY,
    ),
    Planted(
        "copies-that-begin-when-they-are-needed",
        "compiler/passes/prefetch.py",
        "units[i - 1][0] if i else unit[0], unit[0])",
        "unit[0], unit[0])",
        f"{PARAMETERS}::test_what_a_layer_reads_is_on_its_way_before_the_layer_before_it_begins",
    ),
    Planted(
        "all-parameters-on-the-device-at-once",
        "compiler/passes/prefetch.py",
        "units[i - 1][0] if i else unit[0], unit[0])",
        "units[0][0], unit[0])",
        f"{PARAMETERS}::test_the_device_holds_the_parameters_of_two_layers",
    ),
    Planted(
        "a-table-copied-for-its-rows",
        "compiler/passes/prefetch.py",
        "return rows and node.output.type.bytes < value.type.bytes",
        "return rows and node.output.type.bytes > value.type.bytes",
        f"{TABLES}::test_only_the_rows_of_a_step_are_copied",
    ),
    Planted(
        "lookups-in-the-device-s-memory",
        "compiler/passes/prefetch.py",
        "evolve(node, inputs=(*ids, self.there[table]), outputs=(rows,)),",
        "evolve(node, inputs=(*given, self.there[table]), outputs=(rows,)),",
        "verify tests/planted/files/parameters.par layout=tables",
    ),
    Planted(
        "parameters-read-wherever-they-lie",
        "compiler/verify/copies.py",
        "there = parameter.value.host == (parameter.name in self.on_host)",
        "there = parameter.value.host or parameter.name not in self.on_host",
        f"{PARAMETERS}::test_parameters_in_the_wrong_memory_are_found",
    ),
    Planted(
        "copies-that-outlive-their-phase",
        "compiler/verify/copies.py",
        "same = copied is None or copied.phase is node.phase",
        "same = copied is None or copied.phase is not None",
        f"{PARAMETERS}::test_what_reads_too_early_or_in_the_wrong_memory_is_found",
    ),
    Planted(
        "copies-that-nothing-runs-beside",
        "compiler/analysis/time.py",
        "            elif node.op.ahead:\n",
        "            elif node.op.ahead and node.op.sends:\n",
        f"{PARAMETERS}::test_copies_run_beside_what_is_computed",
    ),
    Planted(
        "casts-on-the-host-counted-as-the-device-s",
        "compiler/analysis/memory.py",
        "if _cast(each) and not each.value.host]",
        "if _cast(each)]",
        f"{PARAMETERS}::test_the_device_holds_the_parameters_of_two_layers",
    ),
    Planted(
        "files-counted-as-the-host-s-memory",
        "compiler/analysis/memory.py",
        "for name, size in part.items() if name not in mapped)",
        "for name, size in part.items() if name not in mapped or size)",
        f"{TABLES}::test_a_mapped_table_is_no_memory_of_the_host",
    ),
    Planted(
        "work-that-does-not-wait-for-a-copy",
        "runtime/kernels/host.py",
        "        arrived.done()\n",
        "        pass\n",
        f"{PARAMETERS}::test_streams_of_a_gpu_wait_for_each_other",
    ),
    Planted(
        "a-snapshot-that-changes",
        "runtime/checkpoint/shards.py",
        "yield from _blocks(_snapshot(file), entry.bytes)",
        "yield from _blocks(file, entry.bytes)",
        f"{TABLES}::test_a_snapshot_of_a_mapped_tensor_is_a_copy_of_its_file",
    ),
    Planted(
        "copies-of-files-without-holes",
        "runtime/mapped.py",
        "    return begin, os.lseek(file, begin, os.SEEK_HOLE)\n",
        "    return start, os.fstat(file).st_size\n",
        f"{TABLES}::test_a_file_has_pages_where_it_is_written",
    ),
    Planted(
        "slabs-from-the-beginning",
        "runtime/regions.py",
        "yield (slice(start - first.start, stop - first.start),), (slice(start, stop), *rest)",
        "yield (slice(start, stop),), (slice(start, stop), *rest)",
        f"{TABLES}::test_slabs_cover_a_region_once",
    ),
    # ------------------------------------------------------------ gradients on their way
    Planted(
        "gradients-copied-once-the-backward-pass-is-over",
        "compiler/passes/ahead.py",
        "later = [place for place in last if place > places[makers[node.inputs[0]]]]",
        "later = [place for place in last if place < 0]",
        f"{COMING}[shard state -> data]",
    ),
    Planted(
        "sums-copied-before-all-is-added",
        "compiler/codegen/functions.py",
        "            if node.op.ahead and node.inputs[0] in begun:\n                place = max(place, last)\n",
        "            if node.op.ahead:\n                place = last\n",
        "verify tests/planted/files/offload.par train.clip=none two.data=1",
    ),
    Planted(
        "copies-that-start-with-their-own-update",
        "compiler/passes/ahead.py",
        "if following > i + 1 and under_way + sizes[following] > max(sizes):",
        "if following > i and under_way + sizes[following] > 0:",
        f"{STATES}::test_copies_of_an_update_start_before_the_update_before",
    ),
    Planted(
        "updates-of-what-has-not-landed",
        "compiler/passes/update.py",
        "return self._apply(Land(), coming, value, layout=value.layout, name=value.name)",
        "return coming",
        "verify tests/planted/files/offload.par train.clip=none",
    ),
    Planted(
        "clipped-gradients-copied-as-they-were",
        "compiler/passes/update.py",
        "if self.clip is not None or self.delayed or parameter not in self.offloaded:",
        "if self.delayed or parameter not in self.offloaded:",
        "verify tests/planted/files/offload.par",
    ),
    Planted(
        "updates-in-the-order-of-parameters-though-gradients-come-in-another",
        "compiler/passes/update.py",
        "order.update({name: i - len(names) - len(first) for i, name in enumerate(first)})",
        "pass",
        f"{COMING}[shard state -> data]",
    ),
    Planted(
        "reads-of-what-has-not-landed-unseen",
        "compiler/verify/copies.py",
        "early = value in coming and not (lands and value is node.inputs[0])",
        "early = False",
        EARLY,
    ),
    Planted(
        "writes-to-what-is-on-its-way-unseen",
        "compiler/verify/copies.py",
        "copied[behind.get(source, source)] += 1",
        "copied[behind.get(source, source)] += 0",
        EARLY,
    ),
    Planted(
        "copies-that-nothing-waits-for-unseen",
        "compiler/verify/copies.py",
        "require(not coming, ",
        "require(True, ",
        EARLY,
    ),
    Planted(
        "a-gradient-of-another-parameter-unseen",
        "compiler/verify/updates.py",
        "same = len(each.stages) == 1 and values[each.coming] == values[each.gradient]",
        "same = len(each.stages) == 1",
        EARLY,
    ),
    Planted(
        "a-host-that-does-not-wait-for-what-it-reads",
        "runtime/kernels/host.py",
        "        coming.done()\n",
        "        pass\n",
        GPU,
    ),
    Planted(
        "reads-of-the-host-unseen",
        "runtime/fake_gpu/watch.py",
        "if memory is not None and memory.written is not None and not self._ended(memory.written):",
        "if memory is None and self._ended(memory.written):",
        WATCH,
    ),
    Planted(
        "writes-of-the-host-unseen",
        "runtime/fake_gpu/watch.py",
        "if memory is not None and not all(map(self._ended, memory.uses)):",
        "if memory is None and not all(map(self._ended, memory.uses)):",
        WATCH,
    ),
    Planted(
        "what-the-host-waits-for-forgotten",
        "runtime/fake_gpu/watch.py",
        "            self.seen[stream] = max(self.seen.get(stream, 0), reached)\n",
        "            pass\n",
        WATCH,
    ),
    Planted(
        "gradients-on-the-host-not-counted",
        "compiler/analysis/memory.py",
        "working_set(line_by_line(moved), coming, coming, roots(moved), size=host_bytes)",
        "working_set(line_by_line(moved), (), (), roots(moved), size=host_bytes)",
        f"{STATES}::test_the_host_has_room_for_all_gradients_that_are_coming",
    ),
    Planted(
        "a-host-that-computes-on-the-device",
        "compiler/analysis/time.py",
        "            if self._on_host(node):\n",
        "            if self._on_host(node) and not own:\n",
        f"{STATES}::test_most_of_the_copies_hide",
    ),
    Planted(
        "what-two-layers-read-is-kept-in-between",
        "compiler/passes/prefetch.py",
        "            copies = {value: copy for value, copy in copies.items() if value in read}\n",
        "",
        f"{PARAMETERS}::test_what_the_first_layer_reads_and_the_last_is_copied_for_each",
    ),
]
