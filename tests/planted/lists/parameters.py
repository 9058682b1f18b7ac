"""Parameters in the host's memory: when copies start and arrive, what is counted, and tables in files."""

from tests.planted.planted import Planted

VERIFY = "verify tests/planted/files/parameters.par"
PARAMETERS = "tests/training/test_offloaded_parameters.py"
TABLES = "tests/training/test_tables_on_host.py"

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
]
