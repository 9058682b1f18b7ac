"""`partita verify`: what is proved of one file, and what is tried.

The program of the file as it stands is compiled, which holds its schedule and messages to the laws (E05xx) and bounds
its memory; the file's claims are held against it. It is certified: every operation and every change of layout is
checked against its rule, without running any (`partita.compiler.certificate`). And a shrunken copy is run
(`partita.runtime.verification.execution`).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from time import perf_counter
from typing import Any

from attrs import frozen

from partita.compiler.certificate import Certificate, certify
from partita.compiler.graph import Phase
from partita.compiler.ops.collective import AllGather
from partita.compiler.pipeline import compile_run
from partita.compiler.report.claims import Outcome as Held
from partita.compiler.report.claims import failures, outcomes
from partita.compiler.report.summary import Summary, summarize
from partita.compiler.state import Compilation
from partita.dsl.brief import count, outline
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Spec
from partita.runtime.verification.execution import Execution, verify_execution
from partita.runtime.verification.experiment import Undecided


class Outcome(StrEnum):
    """What `verify` comes to: all holds; something does not; or the proofs hold, and no copy could be compared."""

    VERIFIED = "verified"
    WRONG = "wrong"
    UNDECIDED = "not decided"


@frozen(eq=False)
class Verification:
    """All that `verify` finds out about a file. `peak_memory` is the bound of each rank in bytes, `memory` what its
    device has, where the mesh declares one.

    `certificates` are those of the programs of training and, where the file evaluates, of evaluation. `execution` is
    None where no small copy of the file tells right from wrong; the `reason` (W0702) says why. `refusals` say that it
    is too large (E0704). `claims` are those of its `expect` blocks.
    """

    name: str
    actions: int
    messages: int
    peak_memory: tuple[int, ...]
    memory: int | None
    certificates: tuple[Certificate, ...]
    execution: Execution | None
    reason: Diagnostic | None
    claims: tuple[Held, ...]
    refusals: tuple[Diagnostic, ...]
    warnings: tuple[Diagnostic, ...]
    seconds: float

    def __repr__(self) -> str:
        facts = (self.outcome, count(self.ranks, "rank"), f"{self.seconds:.1f} s")
        return outline("Verification of", self.name, facts)

    @property
    def ranks(self) -> int:
        """The number of ranks of the whole mesh."""
        return len(self.peak_memory)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """What is wrong."""
        problems = [problem for certificate in self.certificates for problem in certificate.problems]
        execution = self.execution.diagnostics if self.execution else ()
        return (*self.refusals, *problems, *execution, *failures(self.claims))

    @property
    def outcome(self) -> Outcome:
        """What all that comes to."""
        if self.diagnostics:
            return Outcome.WRONG
        return Outcome.VERIFIED if self.execution is not None else Outcome.UNDECIDED

    @property
    def passed(self) -> bool:
        """Whether the program is verified."""
        return self.outcome is Outcome.VERIFIED

    def as_json(self) -> dict[str, Any]:
        """The stable object of `verify --json`."""
        return {
            "name": self.name,
            "passed": self.passed,
            "outcome": str(self.outcome),
            "ranks": self.ranks,
            "actions": self.actions,
            "messages": self.messages,
            "peak_memory": list(self.peak_memory),
            "memory": self.memory,
            "certificate": {
                "passed": all(each.passed for each in self.certificates),
                "nodes": sum(each.nodes for each in self.certificates),
                "moves": sum(each.moves for each in self.certificates),
            },
            "execution": self.execution.as_json() if self.execution else None,
            "expectations": [each.as_json() for each in self.claims],
            "diagnostics": [each.as_json() for each in (*self.diagnostics, *([self.reason] if self.reason else []))],
            "seconds": self.seconds,
        }


def verify(given: Spec) -> Verification:
    """Verify a file. Raises Refused for one that does not compile."""
    start = perf_counter()
    state, evaluation = compile_run(given)
    certificates = tuple(certify(each, laws=False) for each in (state, evaluation) if each is not None)
    summary, mesh = summarize(state), state.mesh
    memory = state.device.memory if given.mesh and given.mesh.device else None
    refusals = list(_too_large(state, summary, memory))
    execution = reason = None
    try:
        execution = verify_execution(given, _hoists(state))
    except Undecided as undecided:
        reason = undecided.diagnostic
    return Verification(
        given.name,
        sum(len(actions) for actions in state.schedule.actions),
        sum(transfer["count"] for transfer in summary.transfers),
        tuple(summary.peak_memory[mesh.pipe_rank(rank)] for rank in range(mesh.ranks)),
        memory,
        certificates,
        execution,
        reason,
        outcomes(state, summary),
        tuple(refusals),
        state.warnings,
        perf_counter() - start,
    )


def _too_large(state: Compilation, summary: Summary, memory: int | None) -> Iterator[Diagnostic]:
    """A program that needs more than the memory of its device."""
    ranks = range(len(summary.peak_memory))
    worst = max(ranks, key=lambda rank: summary.peak_memory[rank])
    most = summary.peak_memory[worst]
    if memory is not None and most > memory:
        mesh = state.spec.mesh
        column = f"rank {worst} of the pipeline" if len(ranks) > 1 else "each rank"
        yield Diagnostic(
            "E0704",
            f"{column} needs {most / 2**30:,.1f} GiB, but `{state.device.name}` has {memory / 2**30:,.1f} GiB",
            mesh.span if mesh else None,
            help="`shard param`, `recompute`, more ranks or fewer microbatches in flight need less",
        )


def _hoists(state: Compilation) -> bool:
    """Whether no parameter is gathered in a microbatch."""
    graph = state.sharded.graph
    stored = {parameter.value for parameter in graph.parameters}
    return not any(
        isinstance(node.op, AllGather) and node.phase is not Phase.PROLOGUE and stored.intersection(node.inputs)
        for node in graph.nodes
    )
