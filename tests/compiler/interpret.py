"""Runs nodes of a graph with the source that the compiler emits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from partita.compiler.graph import Node, Value
from partita.compiler.writer import HEADER, Writer
from partita.runtime.context import Context


def interpret(
    nodes: Sequence[Node], feeds: Mapping[Value, torch.Tensor], wanted: Sequence[Value], step: int = 1
) -> list[torch.Tensor]:
    """The wanted values, computed from the fed ones."""
    writer = Writer("x, c", {value: f"x[{i}]" for i, value in enumerate(feeds)})
    writer.block(nodes, set(wanted), {})
    results = []
    for value in wanted:
        argument = writer.argument(value)
        text = f"torch.tensor({argument.text}, dtype=torch.float64)" if argument.literal else argument.text
        results.append(text)
    body = [*writer.lines, f"return [{', '.join(results)}]"]
    source = HEADER.format(name="test") + "\n\ndef run(x, c):\n" + "\n".join(f"    {line}" for line in body)
    namespace: dict[str, object] = {}
    try:
        exec(compile(source, "<test>", "exec"), namespace)
        context = Context(seed=0, device=torch.device("cpu"), step=step)
        found = namespace["run"](list(feeds.values()), context)  # type: ignore[operator]
    except Exception as error:
        error.add_note(source)
        raise
    for value, tensor in zip(wanted, found, strict=True):
        assert tuple(tensor.shape) == value.type.shape, f"{value} came out as {tuple(tensor.shape)}\n{source}"
    return list(found)
