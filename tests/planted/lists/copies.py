"""Copies of what blocks keep to the host's memory: of what, when, how long, and what of it is counted."""

from tests.planted.planted import Planted

VERIFY = "verify tests/planted/files/copies.par"
SCHEDULES = "tests/compiler/schedules/test_offload.py"
BLOCKS = "tests/training/test_offloaded_blocks.py"

MISTAKES = [
    Planted(
        "views-come-back-contiguous",
        "runtime/host_copies.py",
        "frame[slot] = tensor.set_(memory, view.offset, view.shape, view.strides)",
        "frame[slot] = tensor.set_(memory, view.offset, view.shape)",
        f"{BLOCKS}::test_a_view_comes_back_with_the_strides_that_it_had",
    ),
    Planted(
        "all-views-of-the-first-memory",
        "runtime/host_copies.py",
        "memory = kept.device[view.memory]",
        "memory = kept.device[0]",
        VERIFY,
    ),
    Planted(
        "each-view-copied-apart",
        "runtime/host_copies.py",
        "place, _ = pieces.setdefault(memory.data_ptr(), (len(pieces), memory))",
        "place, _ = pieces.setdefault(len(pieces), (len(pieces), memory))",
        f"{BLOCKS}::test_a_view_comes_back_with_the_strides_that_it_had",
    ),
    Planted(
        "the-device-keeps-what-was-copied",
        "runtime/host_copies.py",
        "            frame[slot] = None\n",
        "            pass\n",
        f"{BLOCKS}::test_a_view_comes_back_with_the_strides_that_it_had",
    ),
    Planted(
        "memory-of-the-host-never-used-again",
        "runtime/host_copies.py",
        "            self.free.append(kept.host)\n",
        "            pass\n",
        f"{BLOCKS}::test_streams_of_a_gpu_copy_in_time",
    ),
    Planted(
        "memory-of-the-host-used-at-once",
        "runtime/host_copies.py",
        "        return kept\n",
        "        self.free.append(kept.host)\n        return kept\n",
        f"{BLOCKS}::test_streams_of_a_gpu_copy_in_time",
    ),
    Planted(
        "the-copies-of-another-microbatch",
        "runtime/instructions.py",
        "stage.record.copied, (instruction.stage, microbatch)",
        "stage.record.copied, (instruction.stage, 0)",
        VERIFY,
    ),
    Planted(
        "what-was-copied-stays-with-the-host",
        "runtime/instructions.py",
        "            stage.on_host.remove(microbatch)\n",
        "",
        f"{BLOCKS}::test_every_schedule_copies_and_computes_the_same",
    ),
    Planted(
        "backward-passes-that-do-not-wait",
        "compiler/schedules/communication.py",
        "        for each in self.awaited.get(position, ()):\n            yield WaitCopy, each\n",
        "",
        VERIFY,
    ),
    Planted(
        "copied-back-after-the-backward-pass",
        "compiler/schedules/offload.py",
        "self.loads.setdefault(position, []).append(Action(LOAD, *pair))",
        "self.loads.setdefault(i + 1, []).append(Action(LOAD, *pair))",
        VERIFY,
    ),
    Planted(
        "orders-that-copy-as-they-please",
        "compiler/schedules/invariants.py",
        "_bounded, _copied_between)",
        "_bounded)",
        f"{SCHEDULES}::test_orders_that_copy_wrongly_are_refused",
    ),
    Planted(
        "instructions-that-copy-as-they-please",
        "compiler/schedules/invariants.py",
        "    raise_first(_copied(programs))\n",
        "",
        f"{SCHEDULES}::test_instructions_that_copy_wrongly_are_refused",
    ),
    Planted(
        "copies-of-a-rank-all-at-once",
        "compiler/schedules/offload.py",
        "ended = max(free, reached[first]) + copies[pair[0]]",
        "ended = reached[first] + copies[pair[0]]",
        f"{SCHEDULES}::test_copies_are_lawful_and_delay_nothing",
    ),
    Planted(
        "copied-back-as-late-as-if-alone",
        "compiler/schedules/offload.py",
        "latest = min(latest, self.times[last].start) - copies[pair[0]]",
        "latest = self.times[last].start - copies[pair[0]]",
        f"{SCHEDULES}::test_copies_are_lawful_and_delay_nothing",
    ),
    Planted(
        "one-direction-waits-for-the-other",
        "compiler/schedules/simulator.py",
        "linked.get((rank, instruction.action.kind))",
        'linked.get((rank, "O"))',
        f"{SCHEDULES}::test_copies_are_lawful_and_delay_nothing",
    ),
    Planted(
        "memory-is-free-as-the-copy-starts",
        "compiler/analysis/memory.py",
        "        elif isinstance(instruction, WaitCopy) and instruction.action.kind == OFFLOAD:\n",
        "        elif isinstance(instruction, PostCopy) and instruction.action.kind == OFFLOAD:\n",
        f"{BLOCKS}::test_memory_is_free_from_the_end_of_one_copy_to_the_start_of_the_other",
    ),
    Planted(
        "memory-is-taken-as-the-copy-ends",
        "compiler/analysis/memory.py",
        "        elif isinstance(instruction, PostCopy) and instruction.action.kind == LOAD:\n            kept +=",
        "        elif isinstance(instruction, WaitCopy) and instruction.action.kind == LOAD:\n            kept +=",
        f"{BLOCKS}::test_memory_is_free_from_the_end_of_one_copy_to_the_start_of_the_other",
    ),
    Planted(
        "the-host-keeps-one-microbatch",
        "compiler/analysis/memory.py",
        "            most[each.stage] = max(most[each.stage], now[each.stage])\n",
        "            most[each.stage] = 1\n",
        f"{BLOCKS}::test_the_host_keeps_what_the_device_does_not",
    ),
    Planted(
        "views-of-parameters-copied",
        "compiler/passes/offload.py",
        "maker = makers.get(tensor)",
        "maker = makers.get(value)",
        VERIFY,
    ),
    Planted(
        "what-slices-share-copied",
        "compiler/passes/offload.py",
        " and not maker.op.of_slices:",
        ":",
        "verify tests/planted/files/slices.par",
    ),
    Planted(
        "views-left-on-the-device",
        "compiler/passes/offload.py",
        "if value in kept and behind.get(value, value) in inside)",
        "if value in kept and value in inside)",
        f"{BLOCKS}::test_the_host_keeps_what_the_device_does_not",
    ),
    Planted(
        "more-slots-than-values",
        "compiler/codegen/assemble.py",
        "copied=tuple(emitter.slots.slot(value) for value in stage.offloaded)",
        "copied=tuple(range(len(emitter.slots.of)))",
        VERIFY,
    ),
]
