"""Ranks that compute forward only: they hold parameters in the layout of their programs, and nothing of training.

A process has all ranks of a mesh, connected in memory, or one of them (`LocalRanks`). What ranks do are generators, as
in training, and written once for both: they yield while they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from attrs import define, field, frozen

from partita.compiler.instructions import Channel, Traffic
from partita.compiler.layout import local_type
from partita.compiler.program import ParameterRecord, Program
from partita.dsl.spec import Spec
from partita.runtime.executor import Executor
from partita.runtime.global_tensors import piece_view
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.python_functions import NO_FUNCTIONS, Functions
from partita.runtime.regions import Region, pieces_of
from partita.runtime.stages import ParameterStore
from partita.runtime.tracing.flight import Flight
from partita.runtime.transports.transport import Cluster, ProcessEnd, Transport, awaited, run_alone
from partita.runtime.transports.virtual import VirtualCluster

Found = TypeVar("Found")


@frozen(eq=False)
class LocalRanks:
    """The ranks of a mesh that are in this process, and what connects them; they compute on a `device`."""

    numbers: Sequence[int]
    cluster: Cluster
    device: torch.device = field(factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """Whether the first rank of all is here: it reports for all."""
        return 0 in self.numbers


def all_ranks_local(ranks: int) -> LocalRanks:
    """All ranks in this process."""
    return LocalRanks(range(ranks), VirtualCluster(ranks, strict=False))


def one_here(transport: ProcessEnd, device: torch.device) -> LocalRanks:
    """This process as one rank."""
    return LocalRanks((transport.rank,), _Process(transport), device)


@frozen(eq=False)
class _Process:
    """The `Cluster` of a process that is one rank."""

    end: ProcessEnd

    def transport(self, rank: int) -> Transport:
        """The transport of this rank."""
        assert rank == self.end.rank, (rank, self.end.rank)
        return self.end

    def run(self, steps: Sequence[Iterator[None]]) -> None:
        """Run the rank's generator."""
        for step in steps:
            run_alone(step)


class ForwardRank:
    """One rank of forward-only programs, which share its shards of parameters and buffers: zero at first, or those that
    are `held` already by a rank of a run. Their transport must be open.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        rank: int,
        transport: Transport,
        device: torch.device,
        seed: int,
        functions: Functions = NO_FUNCTIONS,
        held: Mapping[str, torch.Tensor] | None = None,
        flight: Flight | None = None,
    ) -> None:
        self.rank = rank
        self.transport = transport
        self.device = device
        self.mesh = programs[0].mesh
        self.coordinates = self.mesh.coordinates(rank)
        self.memory = ParameterStore(dict(held or {}))
        self.records: dict[str, ParameterRecord] = {}
        for program in programs:
            for name in program.ranks[self.mesh.pipe_rank(rank)].parameters:
                record = self.records[name] = program.parameter(name)
                if name not in self.memory.masters:
                    shape = local_type(record.type, record.layout, self.mesh.sizes).shape
                    self.memory.masters[name] = torch.zeros(shape, dtype=DTYPES[record.type.dtype], device=device)
        self.executors = [
            Executor(program, rank, transport, self.memory, seed, device, True, flight=flight, custom=functions)
            for program in programs
        ]

    def pieces(self, name: str) -> Iterator[tuple[Region, torch.Tensor]]:
        """Yields the regions of a parameter that the rank holds, each with where it holds it."""
        record, shard = self.records[name], self.memory.masters[name]
        for piece in pieces_of(record.type, record.layout, self.mesh.sizes, self.coordinates):
            yield piece.region, piece_view(shard, record.layout, piece)

    def set_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take its shards of the full tensors; what it does not hold may be among them."""
        for name in values.keys() & self.records.keys():
            for region, view in self.pieces(name):
                view.copy_(values[name][region])

    def sum(self, vector: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """The sum of a small tensor over all ranks."""
        (parts,) = yield from awaited(self.transport.gather_over_ranks(vector.to(self.device)))
        return parts.sum(0).cpu()


@define(eq=False)
class Ranks:
    """The ranks of forward-only programs that are in this process."""

    here: LocalRanks
    ranks: Sequence[ForwardRank]

    def run(self, part: Callable[[ForwardRank], Generator[None, None, Found]]) -> Found:
        """Do something on all ranks; returns what the first one here finds."""
        results: dict[int, Found] = {}

        def each(rank: ForwardRank) -> Generator[None, None, None]:
            results[rank.rank] = yield from part(rank)

        self.here.cluster.run([each(rank) for rank in self.ranks])
        return results[self.ranks[0].rank]

    def shared(self, text: str | None) -> str | None:
        """A text that the first rank of all has, on all of them; None if it has none."""

        def part(rank: ForwardRank) -> Generator[None, None, str | None]:
            own = b"" if text is None or rank.rank else b"\1" + text.encode("utf-8", "surrogatepass")
            size = yield from rank.sum(torch.tensor([len(own)], dtype=torch.float64))
            vector = torch.zeros(int(size), dtype=torch.float64)
            vector[: len(own)] = torch.tensor(list(own))
            if not len(vector):
                return None
            found = yield from rank.sum(vector)
            return bytes(found[1:].int().tolist()).decode("utf-8", "surrogatepass")

        return self.run(part)

    def set_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take their shards of the full tensors."""
        for rank in self.ranks:
            rank.set_parameters(values)


def ranks_of(here: LocalRanks, programs: Sequence[Program], spec: Spec, functions: Functions = NO_FUNCTIONS) -> Ranks:
    """Connect the ranks that are here, for the programs of a file."""
    _, train = spec.trained
    ranks = []
    for number in here.numbers:
        transport = here.cluster.transport(number)
        transport.open(programs[0].mesh, joined(programs), programs[0].streams)
        ranks.append(ForwardRank(programs, number, transport, here.device, train.seed, functions))
    return Ranks(here, ranks)


def joined(programs: Sequence[Program]) -> dict[Channel, Traffic]:
    """The channels of all programs, each with the largest traffic of any."""
    channels: dict[Channel, Traffic] = {}
    for program in programs:
        for channel, traffic in program.channels.items():
            channels[channel] = traffic.or_more(channels.get(channel, traffic))
    return channels
