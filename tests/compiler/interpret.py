"""Runs nodes of a graph with the source that the compiler emits for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from partita.compiler.codegen.writer import HEADER, Writer
from partita.compiler.graph import Node, Value
from partita.compiler.ops.op import Argument
from partita.runtime.context import Context
from tests.compiler.ops.own import FUNCTIONS


def prepare(
    nodes: Sequence[Node], given: Sequence[Value], wanted: Sequence[Value], step: int = 1, rate: float = 0.0
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """The wanted values as a function of the given ones."""
    writer = Writer(("x", "c"), {value: Argument(f"x[{i}]", value.type) for i, value in enumerate(given)})
    writer.block(nodes, set(wanted))
    results = []
    for value in wanted:
        argument = writer.names.texts[value]
        text = f"torch.tensor({argument.text}, dtype=torch.float64)" if argument.literal else argument.text
        results.append(text)
    body = [*writer.body(), f"return [{', '.join(results)}]"]
    source = HEADER.format(name="test") + "\n\ndef run(x, c):\n" + "\n".join(f"    {line}" for line in body)
    namespace: dict[str, object] = {}
    context = Context(seed=0, device=torch.device("cpu"), step=step, update=step, rates=(rate,), functions=FUNCTIONS)

    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        try:
            if not namespace:
                exec(compile(source, "<test>", "exec"), namespace)
            found = namespace["run"](tensors, context)  # type: ignore[operator]
        except Exception as error:
            error.add_note(source)
            raise
        for value, tensor in zip(wanted, found, strict=True):
            assert tuple(tensor.shape) == value.type.shape, f"{value} came out as {tuple(tensor.shape)}\n{source}"
        return list(found)

    return run


def interpret(
    nodes: Sequence[Node], feeds: Mapping[Value, torch.Tensor], wanted: Sequence[Value], step: int = 1
) -> list[torch.Tensor]:
    """The wanted values, computed from the fed ones."""
    return prepare(nodes, list(feeds), wanted, step)(list(feeds.values()))
