"""Streams and events: what is launched where and behind what, by the compiler, on a GPU, and in the model of one."""

from tests.planted.planted import Planted

TINY, TIED = "verify specs/tiny.par", "verify tests/planted/files/tied.par"
ORDERS = "tests/runtime/transports/test_interleaved.py"
MANY = f"{ORDERS}::test_many_orders_of_one_program"
HOSTS = f"{ORDERS}::test_schedules_run_in_any_order_whenever_hosts_wait"
VERDICTS = f"{ORDERS}::test_ranks_deadlock_where_a_schedule_is_said_to_be_unsafe_and_nowhere_else"
LAWS = f"{ORDERS}::test_launches_of_a_program_are_lawful_and_others_are_not"
GPU = "tests/runtime/test_streams.py"

MISTAKES = [
    # ------------------------------------------------------------ what the compiler says, which its laws refuse
    Planted(
        "waits-behind-no-event",
        "compiler/streams.py",
        "after = () if post is None or post not in posted else (posted[post],)",
        "after = ()",
        TINY,
    ),
    Planted(
        "posts-behind-no-event",
        "compiler/streams.py",
        "found.append(Launch(stream, (last,), later.get(i)))",
        "found.append(Launch(stream, (), later.get(i)))",
        TINY,
    ),
    Planted(
        "posts-behind-the-start-alone",
        "compiler/streams.py",
        "        last = i\n",
        "",
        TINY,
    ),
    Planted(
        "posts-behind-actions-and-not-behind-waits",
        "compiler/streams.py",
        "        last = i\n",
        "        last = i if post is None else last\n",
        TINY,
    ),
    Planted(
        "the-end-of-another-post",
        "compiler/streams.py",
        "else (posted[post],)",
        "else (min(posted.values()),)",
        TINY,
    ),
    Planted(
        "sends-on-the-stream-of-what-computes",
        "compiler/instructions.py",
        "        return str(self.transfer.channel)\n",
        '        return COMPUTE if self.transfer.channel.direction == "backward" else str(self.transfer.channel)\n',
        TINY,
    ),
    Planted(
        "all-channels-on-one-stream",
        "compiler/instructions.py",
        "        return str(self.transfer.channel)\n",
        '        return "channels"\n',
        TINY,
    ),
    Planted(
        "collectives-on-the-stream-of-sums",
        "compiler/streams.py",
        "return {name: name for name in names}",
        "return {name: SUMS for name in names}",
        TIED,
    ),
    Planted(
        "receives-in-the-way-of-the-next-action",
        "compiler/streams.py",
        "                found[i] = action\n",
        "                pass\n",
        TIED,
    ),
    Planted(
        "receives-that-are-not-posted-in-time",
        "compiler/schedules/communication.py",
        "        _receive_in_time(schedule, outputs, inputs, lines)\n",
        "",
        "verify tests/planted/files/v.par",
    ),
    # ------------------------------------------------------------ the laws
    Planted(
        "posts-that-wait-for-nothing-accepted",
        "compiler/schedules/stream_invariants.py",
        "elif before[0] < computed[i]:",
        "elif before[0] < 0:",
        LAWS,
    ),
    Planted(
        "waits-that-wait-for-nothing-accepted",
        "compiler/schedules/stream_invariants.py",
        "if before[at] <= position:",
        "if before[at] < position:",
        LAWS,
    ),
    Planted(
        "events-that-are-yet-to-come-accepted",
        "compiler/schedules/stream_invariants.py",
        "if event >= i or event not in ended:",
        "if event not in ended:",
        LAWS,
    ),
    Planted(
        "the-start-is-behind-everything",
        "compiler/schedules/stream_invariants.py",
        "start = [1] + [0] * (len(streams) - 1)",
        "start = [len(program)] * len(streams)",
        LAWS,
    ),
    Planted(
        "channels-on-several-streams-accepted",
        "compiler/schedules/stream_invariants.py",
        "if line != launch.stream:",
        "if False:",
        LAWS,
    ),
    Planted(
        "circles-accepted",
        "compiler/schedules/stream_invariants.py",
        "    waiting = _Device.run(programs, list(map(with_waiting_host, programs, launches)))\n",
        "    waiting: Sequence[_Device] = ()\n",
        f"{ORDERS}::test_channels_that_share_a_stream_are_lawful_unless_ranks_then_wait_in_a_circle",
    ),
    Planted(
        "hosts-that-wait-in-a-circle-accepted",
        "compiler/schedules/stream_invariants.py",
        "            found[i] = evolve(found[i], after=(*found[i].after, *given))\n",
        "            found[i] = launches[i]\n",
        "tests/compiler/schedules/test_waiting_hosts.py",
    ),
    Planted(
        "what-hosts-that-wait-enqueue-later-waits-for-nothing",
        "compiler/schedules/stream_invariants.py",
        "            found[i] = evolve(found[i], after=(*found[i].after, last))\n",
        "",
        "tests/compiler/schedules/test_waiting_hosts.py",
    ),
    Planted(
        "queues-from-which-all-that-is-ready-starts",
        "compiler/schedules/hardware_queues.py",
        "                break\n            self.waiting.pop()\n",
        "                return False\n            self.waiting.clear()\n",
        "tests/compiler/schedules/test_waiting_hosts.py",
    ),
    Planted(
        "a-send-that-waits-for-nobody",
        "compiler/schedules/stream_invariants.py",
        "if other == rank:",
        "if other == rank and isinstance(instruction, PostReceive):",
        f"{ORDERS}::test_channels_that_share_a_stream_are_lawful_unless_ranks_then_wait_in_a_circle",
    ),
    Planted(
        "communicators-that-share-accepted",
        "compiler/schedules/stream_invariants.py",
        "    raise_first(_own_streams(launches, communicators))\n",
        "",
        f"{ORDERS}::test_other_communicators_have_streams_of_their_own",
    ),
    Planted(
        "launches-that-are-not-validated",
        "compiler/verify/transfers.py",
        "        check_launches(instructions, [rank.launches for rank in self.program.ranks], self.program.streams)\n",
        "",
        "tests/compiler/verify/test_messages.py::test_launches_are_held_to_the_laws",
    ),
    # ------------------------------------------------------------ what the model finds, where no law has looked before
    Planted(
        "what-computes-waits-for-no-other-stream",
        "compiler/streams.py",
        "        found.append(Launch(stream, after))\n",
        "        found.append(Launch(stream, ()))\n",
        HOSTS,
    ),
    Planted(
        "what-is-posted-waits-for-nothing-computed",
        "compiler/streams.py",
        "found.append(Launch(stream, (last,), later.get(i)))",
        "found.append(Launch(stream, (START,), later.get(i)))",
        HOSTS,
    ),
    Planted(
        "gradients-on-the-stream-of-what-computes",
        "compiler/instructions.py",
        "        return str(self.transfer.channel)\n",
        '        return COMPUTE if self.transfer.channel.direction == "backward" else str(self.transfer.channel)\n',
        HOSTS,
    ),
    Planted(
        "receives-that-a-waiting-host-waits-for",
        "compiler/streams.py",
        "                found[i] = action\n",
        "                pass\n",
        HOSTS,
    ),
    Planted(
        "receives-that-a-waiting-host-posts-too-late",
        "compiler/schedules/communication.py",
        "        _receive_in_time(schedule, outputs, inputs, lines)\n",
        "",
        HOSTS,
    ),
    Planted(
        "received-behind-what-reads-it",
        "compiler/schedules/communication.py",
        "            program.extend(WaitReceive(transfer) for _, _, transfer in inputs[rank].get(i, ()))\n"
        "            program.append(Compute(action, stages[action.chunk], i - 1 in joined[rank]))\n",
        "            program.append(Compute(action, stages[action.chunk], i - 1 in joined[rank]))\n"
        "            program.extend(WaitReceive(transfer) for _, _, transfer in inputs[rank].get(i, ()))\n",
        HOSTS,
    ),
    Planted(
        "totals-are-taken-while-the-device-computes",
        "runtime/executor.py",
        "        rest = self._streams.drained()\n        if rest is not None:\n            yield from rest\n",
        "",
        HOSTS,
    ),
    Planted(
        "tied-totals-in-each-others-way",
        "runtime/executor.py",
        "        posts.sort(key=lambda post: post[0].index)\n",
        "",
        HOSTS,
    ),
    Planted(
        "hosts-of-the-model-never-wait",
        "tests/runtime/transports/interleaved.py",
        "        return self._random.random() < self._waits\n",
        "        return False\n",
        VERDICTS,
    ),
    Planted(
        "streams-of-the-model-never-share",
        "tests/runtime/transports/interleaved.py",
        "            connection = i % (self.cluster.connections or len(self.queues))\n",
        "            connection = i\n",
        f"{ORDERS}::test_a_transfer_behind_another_of_its_channel_holds_up_its_connection",
    ),
    Planted(
        "connections-of-the-model-are-in-no-order",
        "tests/runtime/transports/interleaved.py",
        "            if first is not None and (connection not in found or first.place < found[connection].place):\n",
        "            if first is not None and (connection not in found or first.may_start()):\n",
        VERDICTS,
    ),
    # ------------------------------------------------------------ races of the runtime, found by interleavings
    Planted(
        "a-receive-buffer-used-twice",
        "runtime/instructions.py",
        "new = self.streams.allocator(type.shape, DTYPES[type.dtype], self.context.device)",
        "one = vars(stage).setdefault(f'{slot}', torch.empty(type.shape, dtype=DTYPES[type.dtype]))\n"
        "        new = lambda: one",
        MANY,
    ),
    Planted(
        "what-is-sent-is-freed-at-once",
        "runtime/instructions.py",
        "return Posting(prepare, partial(self.transport.send, transfer.channel), under_way.handles.append)",
        "return Posting(\n            prepare, partial(self.transport.send, transfer.channel), "
        "lambda _: under_way.handles.append(copied())\n        )",
        MANY,
    ),
    Planted(
        "memory-is-free-as-its-copy-starts",
        "runtime/instructions.py",
        "            return copies.between(own.device, own.host)\n",
        "            between = copies.between(own.device, own.host)\n"
        "            copies.offloaded(frame, slots, own)\n            return between\n",
        MANY,
    ),
    Planted(
        "memory-of-the-host-is-free-as-its-copy-starts",
        "runtime/instructions.py",
        "            return copies.between(own.host, own.device)\n",
        "            copies.free.append(own.host)\n            return copies.between(own.host, own.device)\n",
        MANY,
    ),
    Planted(
        "gathers-in-another-order-on-one-rank",
        "runtime/executor.py",
        "        for stage in self.stages.values():\n            stage.gather(self.context)\n",
        '        odd = self.context.coordinates.get("data", 0) % 2\n'
        "        for stage in sorted(self.stages.values(), key=lambda each: each.record.index, reverse=bool(odd)):\n"
        "            stage.gather(self.context)\n",
        MANY,
    ),
    Planted(
        "gathered-before-it-is-updated",
        "runtime/executor.py",
        "        totals, self._totals = self._totals, ()\n",
        "        totals, self._totals = self._totals, ()\n        self.gather_ahead()\n",
        f"{ORDERS}::test_updates_that_do_not_wait_are_taken_back_in_any_order",
    ),
    # ------------------------------------------------------------ a GPU's streams and events
    Planted(
        "no-event-is-waited-for-beside-what-computes",
        "runtime/streams.py",
        "            for each in after:\n                own.wait_event(each)\n",
        "",
        GPU,
    ),
    Planted(
        "what-computes-waits-for-no-event",
        "runtime/streams.py",
        "            for each in after:\n                self._current.wait_event(each)\n",
        "",
        GPU,
    ),
    Planted(
        "a-post-ends-with-what-computes",
        "runtime/streams.py",
        "event.record(own)",
        "event.record(self._current)",
        GPU,
    ),
    Planted(
        "what-waits-has-ended-as-it-starts",
        "runtime/streams.py",
        "        yield from waits\n        for each in then:\n",
        "        for _ in waits:\n            break\n        for each in then:\n",
        GPU,
    ),
    Planted(
        "the-start-of-the-step-before",
        "runtime/streams.py",
        "            event.record(self._current)\n            return own()\n",
        "            found = own()\n            event.record(self._current)\n            return found\n",
        GPU,
    ),
    Planted(
        "posts-on-the-stream-of-what-computes",
        "runtime/streams.py",
        "            with torch.cuda.stream(own):\n                post.keep(post.launch(*tensors))\n",
        "            post.keep(post.launch(*tensors))\n",
        GPU,
    ),
    Planted(
        "collectives-that-do-not-wait-for-their-operands",
        "runtime/streams.py",
        "        own.wait_stream(self._current)\n",
        "",
        GPU,
    ),
    Planted(
        "results-that-are-not-waited-for",
        "runtime/streams.py",
        "        torch.cuda.current_stream(self.streams.device).wait_event(self.event)\n",
        "",
        GPU,
    ),
    Planted(
        "nccl-runs-beside-the-stream-that-it-is-posted-on",
        "runtime/transports/posted.py",
        "    if work is not None:\n        wait(work, description)\n",
        "",
        GPU,
    ),
    Planted(
        "events-that-do-not-read-back",
        "compiler/text/streams.py",
        'START if each == "start" else int(each)',
        'int(each.replace("start", "0"))',
        f"{ORDERS}::test_any_order_computes_the_same_bits",
    ),
]
