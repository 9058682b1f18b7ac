"""`partita verify`: what is proved of a file, and what is tested.

The file's program is compiled, which checks the invariants of its schedule and messages (E05xx) and bounds its memory;
the file's claims are checked. Translation validation checks every operation and every resharding against its rule,
without running any (`partita.compiler.verify.equivalence`). And a proxy is run
(`partita.runtime.verification.execution`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from time import perf_counter
from typing import Any

from attrs import evolve, frozen

from partita.compiler.analysis.memory import ELSEWHERE
from partita.compiler.graph import Phase
from partita.compiler.ops.collective import AllGather
from partita.compiler.pipeline import compile_run
from partita.compiler.report.claims import Outcome as Held
from partita.compiler.report.claims import failures, outcomes
from partita.compiler.report.summary import Summary, summarize
from partita.compiler.schedules.hardware_queues import queues
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import Validation, validate
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.reprs import Pictured, count, outline
from partita.dsl.spec import Spec
from partita.dsl.syntax.units import BYTES, written
from partita.runtime.fake_gpu.rank import FakeGpuResult, try_ranks
from partita.runtime.fake_gpu.watch import Fault
from partita.runtime.python_files import OperationFailed, require_python
from partita.runtime.python_functions import functions_of
from partita.runtime.rank import prepare
from partita.runtime.verification.execution import HELP, Execution, verify_execution
from partita.runtime.verification.experiment import Inconclusive
from partita.runtime.verification.operations import Examined, examine


class Outcome(StrEnum):
    """The verdict: everything holds; something does not; or the proofs hold, and no proxy could be compared."""

    VERIFIED = "verified"
    WRONG = "wrong"
    UNDECIDED = "not decided"


@frozen(eq=False)
class Verification(Pictured):
    """The results of verifying a file. `peak_memory` is the bound of each rank in bytes, `memory` what its device has,
    if the mesh declares one. `operations` are the file's own.

    `validations` are those of the training program and, if the file evaluates, of the evaluation program. `execution`
    is None if no proxy is conclusive; `reason` (W0702) says why. `gpu` is what came of running ranks on GPUs that are
    not there, if that was asked for; `queues` are those of the hardware that the streams of a rank need. `refusals`:
    the program is too large (E0704). `claims` are those of the file's `expect` blocks.
    """

    name: str
    actions: int
    messages: int
    queues: int
    peak_memory: tuple[int, ...]
    memory: int | None
    validations: tuple[Validation, ...]
    operations: tuple[Examined, ...]
    execution: Execution | None
    gpu: tuple[FakeGpuResult, ...] | None
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
        """The number of ranks."""
        return len(self.peak_memory)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Everything that is wrong."""
        problems = [problem for validation in self.validations for problem in validation.problems]
        execution = self.execution.diagnostics if self.execution else ()
        own = [problem for operation in self.operations for problem in operation.problems]
        return (*self.refusals, *problems, *own, *execution, *_on_gpus(self.gpu or ()), *failures(self.claims))

    @property
    def outcome(self) -> Outcome:
        """The verdict."""
        if self.diagnostics:
            return Outcome.WRONG
        decided = self.execution is not None and all(each.doubt is None for each in self.operations)
        return Outcome.VERIFIED if decided else Outcome.UNDECIDED

    @property
    def passed(self) -> bool:
        """Whether the program is verified."""
        return self.outcome is Outcome.VERIFIED

    def as_json(self) -> dict[str, Any]:
        """The object of `verify --json`, a stable format."""
        return {
            "name": self.name,
            "passed": self.passed,
            "outcome": str(self.outcome),
            "ranks": self.ranks,
            "actions": self.actions,
            "messages": self.messages,
            "queues": self.queues,
            "peak_memory": list(self.peak_memory),
            "memory": self.memory,
            "certificate": {
                "passed": all(each.passed for each in self.validations),
                "nodes": sum(each.nodes for each in self.validations),
                "moves": sum(each.reshardings for each in self.validations),
            },
            "operations": [
                {"name": each.name, "passed": not each.problems, "tried": each.tried} for each in self.operations
            ],
            "execution": self.execution.as_json() if self.execution else None,
            "gpu": None if self.gpu is None else [each.as_json() for each in self.gpu],
            "expectations": [each.as_json() for each in self.claims],
            "diagnostics": [each.as_json() for each in (*self.diagnostics, *([self.reason] if self.reason else []))],
            "seconds": self.seconds,
        }


def verify(spec: Spec, allow_python: bool = False, gpu: bool = False) -> Verification:
    """Verify a file; with `gpu` also that its ranks run on GPUs. Its own operations run only with `allow_python`.

    Raises Refused if it does not compile, or needs to run Python code (E0620).
    """
    start = perf_counter()
    require_python(spec, allow_python)
    state, evaluation = compile_run(spec)
    evaluated = () if evaluation is None else (validate(evaluation, invariants=False, training=state),)
    validations = (validate(state, invariants=False), *evaluated)
    summary, mesh = summarize(state), state.mesh
    memory = state.device.memory if spec.mesh and spec.mesh.device else None
    refusals = list(_too_large(state, summary, memory))
    execution = reason = None
    operations = examine(state.model, functions_of(state.model, allow_python), state.train.dtype)
    # What does not hold to its declaration computes something else in parts: that is no bug of Partita.
    if not any(each.problems for each in operations):
        reason = next((each.doubt for each in operations if each.doubt is not None), None)
        try:
            if all(each.exact for each in operations):
                execution = verify_execution(spec, _hoists(state), allow_python)
        except Inconclusive as undecided:
            reason = undecided.diagnostic
        except OperationFailed as failed:
            (cause,) = failed.diagnostics
            message = "the proxy of the file does not run"
            reason = evolve(cause, code="W0702", message=message, notes=(cause.message, *cause.notes))
    return Verification(
        spec.name,
        sum(len(actions) for actions in state.schedule.actions),
        sum(transfer["count"] for transfer in summary.transfers),
        queues([rank.instructions for rank in state.plan.ranks]),
        tuple(summary.peak_memory[mesh.pipe_rank(rank)] for rank in range(mesh.ranks)),
        memory,
        validations,
        tuple(operations),
        execution,
        tuple(try_ranks(prepare(spec, True, allow_python))) if gpu else None,
        reason,
        outcomes(state, summary),
        tuple(refusals),
        state.warnings,
        perf_counter() - start,
    )


def _on_gpus(ranks: Iterable[FakeGpuResult]) -> Iterator[Diagnostic]:
    """Yields E0706 for each fault of ranks on GPUs, and names the first of them that has it."""
    first_ranks: dict[Fault, int] = {}
    for each in ranks:
        for fault in each.faults:
            first_ranks.setdefault(fault, each.rank)
    for fault, rank in first_ranks.items():
        notes = (f"at {fault.place}",) if fault.place else ()
        yield Diagnostic("E0706", f"on a GPU, rank {rank}: {fault.kind}: {fault.message}", None, notes, HELP)


def _too_large(state: Compilation, summary: Summary, memory: int | None) -> Iterator[Diagnostic]:
    """Yields E0704 for a program that needs more memory than its device has."""
    ranks = range(len(summary.peak_memory))
    worst = max(ranks, key=lambda rank: summary.peak_memory[rank])
    peak = summary.peak_memory[worst]
    if memory is not None and peak > memory:
        mesh = state.spec.mesh
        where = ELSEWHERE.get(summary.memory[worst].during)
        when = "" if where is None else f" {where}"
        column = f"rank {worst} of the pipeline" if len(ranks) > 1 else "each rank"
        yield Diagnostic(
            "E0704",
            f"{column} needs {written(peak, BYTES, 4)}{when}, but `{state.device.name}` has "
            f"{written(memory, BYTES, 4)}",
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
