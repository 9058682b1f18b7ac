"""One rank's part in every collective along both axes of a square, and in transfers along a pipeline's columns.

`steps` runs on any transport. As a program it runs on Gloo and prints what came out as one JSON line.
"""

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch

from partita.compiler.instructions import Channel, Traffic
from partita.compiler.mesh import Mesh
from partita.runtime.context import Context
from partita.runtime.transports.packing import as_bytes
from partita.runtime.transports.transport import Transport

SQUARE = Mesh((("data", 2), ("tensor", 2)))
LINE = Mesh((("all", 4),))
COLUMNS = Mesh((("tensor", 2), ("pipe", 2)), "pipe")
CHANNELS = [Channel(0, 1, "forward"), Channel(1, 0, "backward")]


def buckets(rank: int) -> list[tuple[torch.Tensor, ...]]:
    """A tensor of many elements, one with gaps between them, and several of different dtypes; all of one shape."""
    generator = torch.Generator().manual_seed(rank)
    plain = torch.randn(8, 12, 500, generator=generator)
    strided = torch.randn(12, 8, 6, generator=generator).transpose(0, 1)[..., ::2]
    integers = torch.randint(-(1 << 40), 1 << 40, (8, 12), generator=generator)
    odd = torch.randint(-9, 9, (8, 12, 1), generator=generator)
    return [(plain,), (strided,), (strided.bfloat16(), integers, plain[:, :, 7], strided.bfloat16(), odd.int())]


def lists(rank: int) -> tuple[torch.Tensor, ...]:
    """Lists of ids, some empty and some full, and what belongs to them."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 6, (8, 12, 1), generator=generator)
    there = torch.arange(5) < lengths
    ids = torch.randint(0, 3, (8, 12, 5), generator=generator)
    rows = torch.randn(8, 12, 5, 3, generator=generator)
    return torch.where(there, ids, -1), torch.where(there.unsqueeze(-1), rows, 0)


def digest(tensors: tuple[torch.Tensor, ...]) -> list[str]:
    """Dtype, shape and bits of each."""
    return [f"{t.dtype} {list(t.shape)} {sha256(as_bytes(t).numpy().tobytes()).hexdigest()[:16]}" for t in tensors]


def named(transport: Transport) -> Context:
    """The collectives by name, as programs call them."""
    return Context(0, torch.device("cpu"), transport=transport)


def steps(transport: Transport, mesh: Mesh, found: dict[str, list[str]]) -> Iterator[None]:
    """All collectives of a mesh: posted together, waited for in another order."""
    transport.open(mesh, dict.fromkeys(CHANNELS, Traffic(1, 12)) if mesh.pipe else {})
    posted: dict[str, Any] = {}
    for axis in mesh.sharding:
        rows = lists(transport.rank)
        posted[f"exchange of ids {axis}"] = named(transport).exchange_rows(axis, rows[:1], (0,), (1,))
        posted[f"exchange of rows {axis}"] = named(transport).exchange_rows(axis, rows, (1, 1), (0, 0))
        for i, bucket in enumerate(buckets(transport.rank)):
            zeros, ones = (0,) * len(bucket), (1,) * len(bucket)
            posted[f"gather {axis} {i}"] = named(transport).all_gather(axis, bucket, ones)
            posted[f"scatter {axis} {i}"] = named(transport).reduce_scatter(axis, bucket, ones)
            posted[f"sum {axis} {i}"] = named(transport).all_reduce(axis, bucket)
            posted[f"maximum {axis} {i}"] = named(transport).all_reduce(axis, bucket, True)
            posted[f"exchange {axis} {i}"] = named(transport).all_to_all(axis, bucket, zeros, ones)
            posted[f"exchange back {axis} {i}"] = named(transport).all_to_all(axis, bucket, ones, zeros)
            posted[f"turn {axis} {i}"] = named(transport).turn(axis, bucket)
            scalar = torch.tensor(0.1 * (transport.rank + 1))
            posted[f"sum of scalars {axis} {i}"] = named(transport).all_reduce(axis, (scalar, scalar.bool()), i == 1)
    if mesh.pipe:
        ways = CHANNELS if mesh.pipe_rank(transport.rank) == 0 else CHANNELS[::-1]
        received = torch.zeros(3)
        handles = [
            transport.send(ways[0], torch.full((3,), float(transport.rank))),
            transport.receive(ways[1], received),
        ]
        for handle in handles:
            while not handle.done():
                yield
        found["received"] = digest((received,))
    for name in sorted(posted):
        while not posted[name].done():
            yield
        found[f"{mesh} {name}"] = digest(posted[name].result())
    handle = transport.gather_over_ranks(torch.tensor([0.1 * (transport.rank + 1)]))
    while not handle.done():
        yield
    (parts,) = handle.result()
    found[f"{mesh} total"] = digest((parts, parts.sum(0)))


def main() -> None:
    """On Gloo: transports one after the other, each with a mesh of its own."""
    from partita.runtime.supervision.identity import rank_from_environment
    from partita.runtime.supervision.rendezvous import connect
    from partita.runtime.transports.process import ConnectionLost, ProcessTransport

    identity = rank_from_environment()
    assert identity is not None
    connect(identity, "gloo")
    found: dict[str, list[str]] = {}
    for mesh in (SQUARE, LINE, COLUMNS):
        transport = ProcessTransport()
        for _ in steps(transport, mesh, found):
            raise AssertionError("a real transport waits inside its handles")
    lost = None
    if identity.rank == 1:
        # Rank 3, the other one along `tensor`, leaves without a word.
        try:
            named(transport).all_gather("tensor", (torch.ones(3),), (0,)).done()
        except ConnectionLost as error:
            lost = str(error)
    if identity.rank != 3:
        transport.close()
    # One write, so that the ranks' lines do not mix on a shared output.
    os.write(1, (json.dumps({"rank": identity.rank, "found": found, "lost": lost}) + "\n").encode())
    os._exit(0)


if __name__ == "__main__":
    main()
