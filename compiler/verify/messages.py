"""Validates messages between stages: each is sent once, by the stage that computes it, and received once, as sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from attrs import define, field

from partita.compiler.graph import Node, Phase
from partita.compiler.instructions import Direction, Message
from partita.compiler.ops.communication import Receive, Send, Transfer
from partita.compiler.passes.cut import PartitionedGraph
from partita.compiler.verify.checker import Checker
from partita.compiler.verify.rules import Violation, require

# What identifies a message: value, source, destination, direction.
Key = tuple[str, int, int, Direction]

# The phase in which messages of a direction are both sent and received.
PHASES = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD}


@define(eq=False)
class Messages:
    """Both ends of every message. `sent` has the messages whose ends match; `depth` is the order of the stages."""

    depth: Callable[[int], int]
    sends: dict[Key, Node] = field(factory=dict)
    receives: dict[Key, Node] = field(factory=dict)
    sent: set[Key] = field(factory=set)
    count: int = 0

    @staticmethod
    def of(partitioned: PartitionedGraph, check: Checker) -> Messages:
        """Match the ends of all messages with each other and with `PartitionedGraph.messages`."""
        messages = Messages(partitioned.depth)
        received = {
            v for stage in partitioned.stages for n in stage.nodes if isinstance(n.op, Receive) for v in n.outputs
        }
        for stage in partitioned.stages:
            for node in stage.nodes:
                with check.at(node.span, f"on stage {stage.index}"):
                    if isinstance(node.op, Send):
                        messages._end(messages.sends, key_of(node, stage.index), node, "sent")
                        require(not received & {*node.inputs}, "a stage sends what it was sent itself", *node.inputs)
                    elif isinstance(node.op, Receive):
                        messages._end(messages.receives, key_of(node, stage.index), node, "received")
        for key in dict.fromkeys((*messages.sends, *messages.receives)):
            node = messages.sends.get(key) or messages.receives[key]
            with check.at(node.span, f"from stage {key[1]} to stage {key[2]}"):
                messages._match(key)
        with check.at():
            promised = Counter(partitioned.messages)
            sent = Counter(Message(*key, node.inputs[0].type.bytes) for key, node in messages.sends.items())
            require(promised == sent, "the list of messages is not that of the sends")
        return messages

    def _end(self, ends: dict[Key, Node], key: Key, node: Node, verb: str) -> None:
        name, source, destination, direction = key
        (value,) = node.inputs or node.outputs
        require(key not in ends, f"`{name}` is {verb} twice", value)
        ends[key] = node
        require(value.name == name, f"`{value.name}` is {verb} as `{name}`", value)
        require(direction in PHASES, f"`{name}` has no direction")
        forward = direction == "forward"
        onward = self.depth(source) < self.depth(destination)
        require(onward == forward and source != destination, f"`{name}` travels against its direction")
        require(node.phase is PHASES[direction], f"`{name}` is {verb} in phase {node.phase}", value)

    def _match(self, key: Key) -> None:
        self.count += 1
        send, receive = self.sends.get(key), self.receives.get(key)
        if send is None or receive is None:
            raise Violation(f"`{key[0]}` is {'received but never sent' if send is None else 'sent but never received'}")
        (source,), (target,) = send.inputs, receive.outputs
        alike = (source.type,) == (target.type,) == receive.op.infer()
        require(alike, f"the ends of `{key[0]}` differ in type", source, target)
        require(source.layout == target.layout, f"the ends of `{key[0]}` differ in layout", source, target)
        self.sent.add(key)


def key_of(node: Node, stage: int) -> Key:
    """The message that a node on `stage` sends or receives."""
    assert isinstance(node.op, Transfer), node
    return node.op.value, *node.op.stages(stage), node.op.direction
