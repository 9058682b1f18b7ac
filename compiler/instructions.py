"""The instructions of a rank: its compute actions, with the posts and waits of communication and copies around them.

A *message* is a value sent between two stages in every microbatch, identified by content (value, stages, direction). A
*channel* is an ordered pair of ranks and a direction; it runs its transfers in order, one at a time, and matches them
by that order, never by tags. Posting and waiting are separate instructions: a post never blocks, a wait does.

An instruction knows its `stream` and, if it waits, the `post` of what it waits for (`partita.compiler.streams`).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import field, frozen

from partita.compiler.schedules.schedule import LOAD, OFFLOAD, Action

# The compute stream, and those of copies to the host's memory and back.
COMPUTE = "compute"
COPIES = {OFFLOAD: "copies out", LOAD: "copies in"}

# The direction of a channel through the pipeline, or that it carries totals of parameters tied across stages.
Direction: TypeAlias = Literal["forward", "backward", "tied"]


@frozen(order=True, cache_hash=True)
class Channel:
    """A connection from one pipeline rank to another, for one direction of the pipeline."""

    source: int
    destination: int
    direction: Direction

    def __str__(self) -> str:
        return f"{self.source}->{self.destination} {self.direction}"


@frozen
class Traffic:
    """An upper bound on what a step sends on a channel: the number of messages, and their total bytes."""

    messages: int
    bytes: int

    def or_more(self, other: Traffic) -> Traffic:
        """The elementwise maximum of both."""
        return Traffic(max(self.messages, other.messages), max(self.bytes, other.bytes))


@frozen(cache_hash=True)
class Message:
    """A value sent from one stage to another in every microbatch.

    `forward`: produced by F of `source`, needed by F of `destination`. `backward`: produced by B (or BW) of `source`,
    needed by B (or BW) of `destination`. `bytes` is its size in flight.
    """

    value: str
    source: int
    destination: int
    direction: Direction
    bytes: int = field(default=0, eq=False)


@frozen(cache_hash=True)
class Transfer:
    """One message of one microbatch on its channel. `index` is its position in the channel's order."""

    channel: Channel
    message: Message
    microbatch: int
    index: int = field(eq=False)

    def __str__(self) -> str:
        return f"{self.message.value} of microbatch {self.microbatch} ({self.channel})"


class _OnCompute:
    """An instruction on the compute stream: it computes, or makes later computation wait."""

    @property
    def stream(self) -> str:
        """The compute stream."""
        return COMPUTE

    @property
    def post(self) -> Instruction | None:
        """The instruction whose end it waits for."""
        return None


class _Post:
    """An instruction that starts an operation which overlaps with compute."""

    @property
    def post(self) -> Instruction | None:
        """None: it waits for nothing."""
        return None


@frozen
class _OfTransfer:
    """An instruction for one end of a transfer."""

    transfer: Transfer


class _PostTransfer(_Post, _OfTransfer):
    @property
    def stream(self) -> str:
        """That of the channel's end."""
        return str(self.transfer.channel)


@frozen
class Compute(_OnCompute):
    """Run an action; if `joined`, concurrently with the previous action. Ranks never run joined actions: these model a
    device that overlaps the two, for the simulator.
    """

    action: Action
    stage: int
    joined: bool = False

    def __str__(self) -> str:
        return str(self.action)


@frozen
class PostSend(_PostTransfer):
    """Hand a produced value to the channel. Its memory may be reused only after the matching WaitSend."""

    def __str__(self) -> str:
        return f"post-send {self.transfer}"


@frozen
class WaitSend(_OnCompute, _OfTransfer):
    """Wait until a posted send has been received."""

    def __str__(self) -> str:
        return f"wait-send {self.transfer}"

    @property
    def post(self) -> Instruction:
        """The send."""
        return PostSend(self.transfer)


@frozen
class PostReceive(_PostTransfer):
    """Hand a buffer to the channel. A host that runs ahead of its device hands it over behind the next action, unless
    that waits for it, or it is to be `at_once`.
    """

    at_once: bool = field(default=False, eq=False)

    def __str__(self) -> str:
        return f"post-receive {self.transfer}"


@frozen
class WaitReceive(_OnCompute, _OfTransfer):
    """Wait until a posted receive has arrived."""

    def __str__(self) -> str:
        return f"wait-receive {self.transfer}"

    @property
    def post(self) -> Instruction:
        """The receive."""
        return PostReceive(self.transfer)


@frozen
class PostCopy(_Post):
    """Start to copy the activations that a stage saves for a microbatch to the host's memory (O) or back (L).
    Copies of a rank in one direction run one after the other, and overlap with compute.
    """

    action: Action
    stage: int

    def __str__(self) -> str:
        return f"post {self.action}"

    @property
    def stream(self) -> str:
        """That of its direction."""
        return COPIES[self.action.kind]


@frozen
class WaitCopy(_OnCompute):
    """Wait for a copy that was started, and give back the memory that it is a copy of."""

    action: Action
    stage: int

    def __str__(self) -> str:
        return f"wait {self.action}"

    @property
    def post(self) -> Instruction:
        """The copy."""
        return PostCopy(self.action, self.stage)


Copy: TypeAlias = PostCopy | WaitCopy
Instruction: TypeAlias = Compute | PostSend | WaitSend | PostReceive | WaitReceive | Copy
