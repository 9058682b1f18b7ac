"""What travels between ranks: the instructions carry every message of every microbatch, and no other.

The instructions of all ranks are held to the laws (`partita.compiler.laws`: matched, in time, without deadlock). What
is checked beside: the messages that they carry are those between stages of different ranks, on the channel that joins
these ranks, and stages of one rank hand over theirs. After the last microbatch every stage is reduced once, and each
total of a tied parameter goes once to every other rank that has the parameter, both ends in one order; each entry of
the statistics comes from the rank of the stage that makes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attrs import define

from partita.compiler.certificate.report import Checker
from partita.compiler.certificate.rules import demand
from partita.compiler.instructions import ONWARD, TIED, Channel, Compute, Message, PostReceive, PostSend
from partita.compiler.laws import check_program, check_schedule
from partita.compiler.partition.cut import PartitionedGraph
from partita.compiler.partition.update import UpdateGraph
from partita.compiler.program import Program, RankProgram, TiedTransfer

# A total of a tied parameter on its way: ranks, the stage that makes it, the parameter.
Way = tuple[int, int, int, str]


@define(eq=False)
class Transfers:
    """The transfers of a program, held against the messages of its stages and the totals of its parameters.

    Without `laws`, the instructions are taken to be lawful.
    """

    partitioned: PartitionedGraph
    update: UpdateGraph
    program: Program
    check: Checker
    laws: bool = True

    def run(self) -> None:
        """Check all of them."""
        laws = (self._lawful,) if self.laws else ()
        for held in (*laws, self._messages, self._reduced, self._tied, self._statistics):
            with self.check.at():
                held()

    def _home(self, stage: int) -> int:
        return self.program.schedule.home(stage)[0]

    def _lawful(self) -> None:
        check_schedule(self.program.schedule)
        check_program([rank.instructions for rank in self.program.ranks])

    def _messages(self) -> None:
        """What is posted, and handed over, is what is promised."""
        posts = dict.fromkeys(
            (each.transfer.message, each.transfer.channel)
            for rank in self.program.ranks
            for each in rank.instructions
            if isinstance(each, (PostSend, PostReceive))
        )
        handed = Counter(
            (stage.index, each.stage, each.kind == "F") for stage in self.program.stages for each in stage.hand_overs
        )
        promised: dict[tuple[Message, Channel], None] = {}
        for message in self.partitioned.messages:
            source, destination = self._home(message.source), self._home(message.destination)
            if source != destination:
                promised[message, Channel(source, destination, message.direction)] = None
            else:
                handed[message.source, message.destination, message.direction == ONWARD] -= 1
        for message, channel in (*posts, *promised):
            what = f"`{message.value}` from stage {message.source} to stage {message.destination}"
            demand((message, channel) in promised, f"{what} is posted on channel {channel}")
            demand((message, channel) in posts, f"{what} is never posted")
        for (source, destination, _), count in handed.items():
            demand(not count, f"stage {source} does not transfer to stage {destination} what it needs locally")

    def _reduced(self) -> None:
        """A stage with something to reduce does so once, when it has run for the last time."""
        for rank in self.program.ranks:
            last = {each.stage: i for i, each in enumerate(rank.instructions) if isinstance(each, Compute)}
            wanted = {(i, stage) for stage, i in last.items() if "R" in self.program.stages[stage].functions}
            found = [(i, stage) for i, stages in rank.reductions.items() for stage in stages]
            once = len(found) == len(wanted) and set(found) == wanted
            demand(once, f"rank {rank.rank} does not reduce each of its stages once, after its last microbatch")

    def _tied(self) -> None:
        """Totals travel as `wanted`; both ends of a channel have them in one order."""
        wanted: list[Way] = []
        for each in self.update.parameters:
            holders = dict.fromkeys(map(self._home, each.stages))
            for stage, _ in each.totals:
                source = self._home(stage)
                wanted += [(source, holder, stage, each.name) for holder in holders if holder != source]
        sends = [_ways(rank, rank.sends, sent=True) for rank in self.program.ranks]
        receives = [_ways(rank, rank.receives, sent=False) for rank in self.program.ranks]
        for done, ends in (("sent", sends), ("received", receives)):
            off = Counter(way for ways in ends for way in ways)
            off.subtract(wanted)
            for (source, destination, stage, name), count in off.items():
                what = f"the total of `{name}` of stage {stage}, from rank {source} to rank {destination},"
                demand(not count, f"{what} is {'not' if count < 0 else 'redundantly'} {done}")
        for source in range(len(sends)):
            for destination in range(len(receives)):
                pair = (source, destination)
                out, into = ([w for w in ways if w[:2] == pair] for ways in (sends[source], receives[destination]))
                demand(out == into, f"rank {source} sends totals in another order than rank {destination} receives")

    def _statistics(self) -> None:
        for rank in self.program.ranks:
            own = [i for i, (*_, stage) in enumerate(self.update.statistics) if self._home(stage) == rank.rank]
            demand(list(rank.statistics) == own, f"rank {rank.rank} does not give the statistics of its stages")


def _ways(rank: RankProgram, transfers: Sequence[TiedTransfer], sent: bool) -> list[Way]:
    found = []
    for each in transfers:
        channel = each.transfer.channel
        own = channel.source if sent else channel.destination
        demand(own == rank.rank and channel.direction == TIED, f"rank {rank.rank} has no end of channel {channel}")
        found.append((channel.source, channel.destination, each.stage, each.accumulator))
    return found
