"""What the certificate demands of a program: a demand that is dropped lets pass what is wrong."""

from tests.planted.planted import Planted

ENDING = "tests/compiler/verify/test_ending.py"
NODES = f"{ENDING}::test_no_node_can_be_left_out_or_done_again_or_read_something_else"
RECORDS = "tests/compiler/verify/test_messages.py::test_no_record_can_say_anything_else"
STEPS = "tests/compiler/verify/test_reshardings.py"

MISTAKES = [
    Planted(
        "outer-splits-changed-around-inner-ones",
        "compiler/verify/rules.py",
        "            innermost = not is_split(axis) or axis not in inner\n",
        "            innermost = True\n",
        f"{STEPS}::test_what_is_certified_makes_what_the_layouts_say",
    ),
    Planted(
        "inner-taken-for-outer-mesh-axes",
        "compiler/verify/rules.py",
        "for other in order[order.index(op.over) + 1 :]}",
        "for other in order[: order.index(op.over)]}",
        f"{STEPS}::test_what_is_certified_makes_what_the_layouts_say",
    ),
    Planted(
        "what-is-left-of-unequal-shards-not-missed",
        "compiler/verify/rules.py",
        "require(self.whole(source) == self.whole(target), ",
        "require(self.whole(source).names == self.whole(target).names, ",
        f"{STEPS}::test_shards_are_of_one_size",
    ),
    Planted(
        "groups-that-do-not-go-on-from-the-anchor",
        "compiler/verify/outer.py",
        "        left = [master for master in each.masters if master not in stored]\n",
        "        left = each.masters if not stored else ()\n",
        NODES,
    ),
    Planted(
        "any-sum-is-that-over-groups",
        "compiler/verify/outer.py",
        "require(values[summed] == total, f",
        "require(summed in values, f",
        NODES,
    ),
    Planted(
        "averages-of-one-copy-twice",
        "compiler/verify/outer.py",
        "require(list(numbers) == copies, ",
        "require(len(numbers) == len(copies), ",
        NODES,
    ),
    Planted(
        "averages-in-any-memory",
        "compiler/verify/outer.py",
        "            memories(node)\n",
        "",
        f"{ENDING}::test_nothing_that_is_kept_can_lie_otherwise",
    ),
    Planted(
        "new-values-stored-over-anything",
        "compiler/verify/updates.py",
        "require(target is each.master, f",
        "require(target is not new, f",
        NODES,
    ),
    Planted(
        "any-new-value-is-stored",
        "compiler/verify/updates.py",
        "require(values[stores[0]] == new, f",
        "require(values[stores[0]] is not None, f",
        NODES,
    ),
    Planted(
        "what-is-kept-besides-of-parts-not-looked-at",
        "compiler/verify/records.py",
        "                self._besides(own, besides.get(name, ()), older)\n",
        "                if declared.part is None:\n"
        "                    self._besides(own, besides.get(name, ()), older)\n",
        RECORDS,
    ),
    Planted(
        "updates-of-one-step-or-two",
        "compiler/verify/records.py",
        "require(self.program.paired == self.paired, ",
        "require(True, ",
        RECORDS,
    ),
    Planted(
        "ranks-train-any-number-of-groups",
        "compiler/verify/records.py",
        "            require(self.program.members == self.members, trains)\n",
        "",
        RECORDS,
    ),
    Planted(
        "late-gradients-of-any-type",
        "compiler/verify/records.py",
        "same = each.type == record.type and not each.copy and not each.host",
        "same = not each.copy and not each.host",
        RECORDS,
    ),
]
