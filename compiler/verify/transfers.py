"""Validates transfers between pipeline ranks: instructions carry every message of every microbatch, and no other.

The instructions of all ranks must satisfy the schedule invariants (`partita.compiler.schedules.invariants`), and be
enqueued by those of streams (`partita.compiler.schedules.stream_invariants`). In addition, posted messages are those
between stages on different ranks, on the channel between these ranks, and messages between stages of one rank are local
transfers. Each stage is reduced once, from its last action on, in which nothing adds to an accumulator whose reduction
has started. Each total of a tied parameter goes once to every other rank that has the parameter, and each total of a
statistic to every other rank that has a buffer made of it, in the same order at both ends. Each entry of the statistics
comes from the rank of the stage that computes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attrs import define

from partita.compiler.codegen.functions import StageFunctions
from partita.compiler.codegen.plan import functions_of
from partita.compiler.graph import Node, Value
from partita.compiler.instructions import Channel, Compute, Message, PostReceive, PostSend
from partita.compiler.ops.optimizer import target_of
from partita.compiler.passes.cut import PartitionedGraph
from partita.compiler.passes.early_collectives import EarlyCollectives
from partita.compiler.passes.update import UpdateGraph
from partita.compiler.program import Program, RankProgram, TiedTransfer
from partita.compiler.schedules.invariants import check_program, check_schedule
from partita.compiler.schedules.stream_invariants import check_launches
from partita.compiler.verify.checker import Checker
from partita.compiler.verify.rules import require

# A transfer of a tied parameter's total: source and destination rank, stage, parameter.
Way = tuple[int, int, int, str]


@define(eq=False)
class Transfers:
    """Checks the transfers of a program against the messages of its stages and the totals of its parameters.

    Without `invariants`, the schedule invariants are assumed to hold.
    """

    partitioned: PartitionedGraph
    update: UpdateGraph
    program: Program
    check: Checker
    invariants: bool = True

    def run(self) -> None:
        """Check all transfers."""
        invariants = (self._invariants,) if self.invariants else ()
        for verify in (*invariants, self._messages, self._reduced, self._tied, self._statistics):
            with self.check.at():
                verify()

    def _rank(self, stage: int) -> int:
        return self.program.schedule.rank_of(stage)

    def _invariants(self) -> None:
        check_schedule(self.program.schedule)
        instructions = [rank.instructions for rank in self.program.ranks]
        check_program(instructions)
        check_launches(instructions, [rank.launches for rank in self.program.ranks], self.program.streams)

    def _messages(self) -> None:
        """Posted messages and local transfers are exactly those of the partitioned graph."""
        posts = dict.fromkeys(
            (each.transfer.message, each.transfer.channel)
            for rank in self.program.ranks
            for each in rank.instructions
            if isinstance(each, (PostSend, PostReceive))
        )
        handed = Counter(
            (stage.index, each.stage, each.kind == "F")
            for stage in self.program.stages
            for each in stage.local_transfers
        )
        promised: dict[tuple[Message, Channel], None] = {}
        for message in self.partitioned.messages:
            source, destination = self._rank(message.source), self._rank(message.destination)
            if source != destination:
                promised[message, Channel(source, destination, message.direction)] = None
            else:
                handed[message.source, message.destination, message.direction == "forward"] -= 1
        for message, channel in (*posts, *promised):
            what = f"`{message.value}` from stage {message.source} to stage {message.destination}"
            require((message, channel) in promised, f"{what} is posted on channel {channel}")
            require((message, channel) in posts, f"{what} is never posted")
        for (source, destination, _), count in handed.items():
            require(not count, f"stage {source} does not transfer to stage {destination} what it needs locally")

    def _reduced(self) -> None:
        """A stage that has a reduction runs it once, after its last action."""
        for rank in self.program.ranks:
            last = {each.stage: i for i, each in enumerate(rank.instructions) if isinstance(each, Compute)}
            expected = {(i, stage) for stage, i in last.items() if "R" in self.program.stages[stage].functions}
            reductions = [(i, stage) for i, stages in rank.reductions.items() for stage in stages]
            once = len(reductions) == len(expected) and set(reductions) == expected
            require(once, f"rank {rank.rank} does not reduce each of its stages once, after its last microbatch")
        reduce = dict(self.update.reduce)
        for of in functions_of(self.partitioned, self.program.schedule):
            index = of.stage.index
            if index in reduce:
                kind = self.program.schedule.last_kind(index)
                reduced = of.reduced(kind, reduce[index], self.update.totals[index])
                self._behind(of, of.closing(kind, reduced), reduced)

    def _behind(self, of: StageFunctions, nodes: Sequence[Node], reduced: EarlyCollectives) -> None:
        """The last action has all nodes that start reductions, and adds to nothing that these have read."""
        sums = {each.name: each.value for each in of.stage.accumulators}
        read: set[Value] = set()
        start = set(reduced.start)
        for node in nodes:
            if node in start:
                read.update(node.inputs)
            target = target_of(node.op)
            require(target is None or sums[target] not in read, f"`{target}` is reduced before all is added to it")
        require(start <= set(nodes), f"stage {of.stage.index} does not start all of its reductions")

    def _tied(self) -> None:
        """Tied totals are sent and received as `wanted`, in the same order at both ends of a channel."""
        expected: list[Way] = []
        for each in self.update.parameters:
            holders = dict.fromkeys(map(self._rank, each.stages))
            for stage, name, _ in each.totals:
                source = self._rank(stage)
                expected += [(source, holder, stage, name) for holder in holders if holder != source]
        step_metrics = dict.fromkeys(
            (self._rank(stage), self._rank(holder), stage, name)
            for buffer in self.update.buffers
            for stage, name, _ in buffer.totals
            for holder in buffer.stages
        )
        expected += [way for way in step_metrics if way[0] != way[1]]
        sends = [_ways(rank, rank.sends, sent=True) for rank in self.program.ranks]
        receives = [_ways(rank, rank.receives, sent=False) for rank in self.program.ranks]
        for verb, ends in (("sent", sends), ("received", receives)):
            off = Counter(way for ways in ends for way in ways)
            off.subtract(expected)
            for (source, destination, stage, name), count in off.items():
                what = f"the total of `{name}` of stage {stage}, from rank {source} to rank {destination},"
                require(not count, f"{what} is {'not' if count < 0 else 'redundantly'} {verb}")
        for source in range(len(sends)):
            for destination in range(len(receives)):
                pair = (source, destination)
                out, into = ([w for w in ways if w[:2] == pair] for ways in (sends[source], receives[destination]))
                require(out == into, f"rank {source} sends totals in another order than rank {destination} receives")

    def _statistics(self) -> None:
        for rank in self.program.ranks:
            own = [i for i, (*_, stage) in enumerate(self.update.step_metrics) if self._rank(stage) == rank.rank]
            require(list(rank.step_metrics) == own, f"rank {rank.rank} does not give the statistics of its stages")


def _ways(rank: RankProgram, transfers: Sequence[TiedTransfer], sent: bool) -> list[Way]:
    ways = []
    for each in transfers:
        channel = each.transfer.channel
        own = channel.source if sent else channel.destination
        require(
            own == rank.rank and channel.direction == "tied",
            f"rank {rank.rank} has no end of channel {channel}",
        )
        ways.append((channel.source, channel.destination, each.stage, each.accumulator))
    return ways
