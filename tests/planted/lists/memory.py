"""Copies in memory: what a slot holds, who has a copy, which is the newest, and which slot is filled next."""

from tests.planted.planted import Planted

COPIES = "tests/runtime/checkpoint/test_copies.py"
ANY_MESH = f"{COPIES}::test_what_is_left_is_read_on_any_mesh"

MISTAKES = [
    Planted(
        "slot-is-not-cleared-before-it-is-filled",
        "runtime/checkpoint/slots.py",
        "        self.clear()\n",
        "",
        f"{COPIES}::test_a_slot_whose_writer_is_killed_is_empty",
    ),
    Planted(
        "label-of-a-slot-without-its-checksum",
        "runtime/checkpoint/slots.py",
        "if checksum != _checksum(sizes, text):",
        "if False:",
        f"{COPIES}::test_a_slot_that_is_not_as_written_is_empty",
    ),
    Planted(
        "partner-on-the-same-host",
        "runtime/checkpoint/copies.py",
        "(*order[at + 1 :], *order[:at])",
        "order",
        f"{COPIES}::test_a_partner_is_on_another_host_and_has_one_to_receive_from",
    ),
    Planted(
        "oldest-copy-first",
        "runtime/checkpoint/copies.py",
        "for each in reversed(order) if found[each].whole",
        "for each in order if found[each].whole",
        f"{COPIES}::test_the_newest_step_is_one_of_which_there_are_all_shards",
    ),
    Planted(
        "shards-of-two-attempts-are-one-step",
        "runtime/checkpoint/slots.py",
        "return self.step, self.attempt, self.ranks",
        "return self.step, 0, self.ranks",
        f"{COPIES}::test_shards_of_two_attempts_are_no_step",
    ),
    Planted(
        "shard-sent-to-a-host-that-has-it",
        "runtime/checkpoint/copies.py",
        "            if hosts[rank] in places:\n                continue\n",
        "",
        f"{COPIES}::test_shards_come_from_hosts_that_have_them_and_only_where_they_are_not",
    ),
    Planted(
        "copy-that-failed-counts",
        "runtime/checkpoint/copies.py",
        "if self._thread is not None and not failed:",
        "if self._thread is not None:",
        ANY_MESH,
    ),
    Planted(
        "copy-in-place-of-what-was-read",
        "runtime/checkpoint/copies.py",
        "return cls(slots, int(labels[0] is not None and labels[0].generation == kept))",
        "return cls(slots, 0)",
        ANY_MESH,
    ),
    Planted(
        "received-shard-under-the-own-rank",
        "runtime/checkpoint/copies.py",
        "evolve(label, rank=source)",
        "label",
        ANY_MESH,
    ),
    Planted(
        "what-was-judged-is-forgotten",
        "runtime/checkpoint/checkpoints.py",
        "        self.rank.judge.history = saved.history\n        if copying.several:",
        "        if copying.several:",
        f"{COPIES}::test_a_run_resumes_from_the_newest_that_is_whole",
    ),
]
