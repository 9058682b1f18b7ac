"""Logits of the next id: what computes them, with the weights of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from attrs import evolve
from torch import Tensor

from partita.compiler.passes.decode import STATE, NotInParts
from partita.compiler.passes.larger_batch import with_rows
from partita.compiler.passes.microbatch import OUTPUT
from partita.compiler.pipeline import compile_outputs
from partita.compiler.verify.proxy import single
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.spec import Spec
from partita.runtime.addresses import Place
from partita.runtime.executor import Executor
from partita.runtime.inference.language_model import USUAL, LanguageModel, language_model
from partita.runtime.inference.weights import Report, read_weights
from partita.runtime.outputs import Outputs, Tensors
from partita.runtime.python_functions import functions_of
from partita.runtime.rank import Plan
from partita.runtime.training import VirtualRun

# How much the logits at a position may change with ids after it, relative to the largest.
UNCHANGED = 1e-4
# Positions of a prompt that are computed at once.
AT_ONCE = 32


class Scorer(Protocol):
    """Computes the logits of the id that follows some ids."""

    model: LanguageModel

    def set_parameters(self, parameters: Tensors) -> None:
        """Take parameters by full name."""

    def logits(self, ids: Sequence[int]) -> Tensor:
        """The logits after `ids`, of which there are from one to as many as the sequence is long: [vocab]."""


class Recomputing:
    """Computes the whole window for each id. Positions after the ids hold the id 0."""

    def __init__(self, given: Spec, output: str = USUAL, allow_python: bool = False) -> None:
        self.outputs = Outputs(given, (output,), allow_python)
        self.model = language_model(given, self.outputs.inputs, output)

    def set_parameters(self, parameters: Tensors) -> None:
        """Take parameters by full name."""
        self.outputs.set_parameters(parameters)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """The logits after `ids`."""
        return self._logits(ids, 0)

    def check_causal(self, ids: Sequence[int]) -> None:
        """Refuse (E1001) a model whose logits at the last of `ids` change with what is after it."""
        ids = ids[: max(1, self.model.window - 1)]
        one, other = (self._logits(ids, id) for id in (0, self.model.vocab.size - 1))
        if len(ids) < self.model.window and float((one - other).abs().max()) > UNCHANGED * float(one.abs().max()):
            what = f"`{self.model.output}` at a position depend on later `{self.model.tokens}`"
            raise refuse(
                "E1001",
                f"the model sees what follows: {what}",
                self.outputs.model.span,
                help="attention that looks back only: `causal = true`",
            )

    def _logits(self, ids: Sequence[int], padding: int) -> Tensor:
        model = self.model
        padded = torch.tensor([*ids, *[padding] * (model.window - len(ids))])
        inputs = {
            each.name: model.in_rows(model.values(each.name, padded, 0), each.type) for each in self.outputs.inputs
        }
        return model.scores(self.outputs(inputs)[model.output], len(ids) - 1)


class Keeping:
    """Computes each position once, and keeps what later ones need of it (`partita.compiler.passes.decode`).

    Raises NotInParts for a model that needs all positions at once.
    """

    def __init__(self, given: Spec, model: LanguageModel, allow_python: bool = False) -> None:
        self.model = model
        sequence = model.sequence.name
        one, several = (
            compile_outputs(single(given), (model.output,), (sequence, min(size, model.window)))
            for size in (1, AT_ONCE)
        )
        plan = Plan(given, one, several, functions_of(given.model, allow_python))
        self._inputs = one.program.inputs
        self._run = VirtualRun(plan, strict=False)
        (self._rank,) = self._run.ranks
        masters = self._rank.memory.masters
        self._states = [tensor for name, tensor in masters.items() if name.startswith(STATE)]
        (stage,) = one.program.stages
        (record,) = (each for each in stage.accumulators if each.name.startswith(OUTPUT))
        self._logits = stage.index, record.name
        self._order = [record.type.position(name) for name in model.logits.names]
        self._seen: list[int] = []

    def set_parameters(self, parameters: Tensors) -> None:
        """Take parameters by full name."""
        self._run.set_parameters(parameters)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """The logits after `ids`: computes those that do not go on from the ids of the call before."""
        seen = len(self._seen)
        if seen >= len(ids) or self._seen != list(ids[:seen]):
            for state in self._states:
                state.zero_()
            seen = 0
        rank = self._rank
        several = rank.evaluation
        while several is not None and len(ids) - seen > AT_ONCE:
            self._step(several, ids[seen : seen + AT_ONCE], seen)
            seen += AT_ONCE
        for position in range(seen, len(ids)):
            self._step(rank.training, ids[position : position + 1], position)
        self._seen = list(ids)
        return self.model.scores(rank.training.totals[self._logits].permute(self._order), 0)

    def _step(self, executor: Executor, ids: Sequence[int], position: int) -> None:
        """Compute the positions of some ids, from a position on."""
        model = self.model
        executor.context.position = position
        tokens = torch.tensor(ids)
        types = {each.name: each.type for each in executor.program.inputs}
        batch = {name: model.in_rows(model.values(name, tokens, position), types[name]) for name in model.names}
        self._run.cluster.run([executor.step(0, batch)])


def scorer_of(
    given: Spec,
    folder: Path,
    report: Report,
    place: Place | None = None,
    output: str = USUAL,
    allow_python: bool = False,
    weights: str = "trained",
) -> Scorer:
    """What computes the logits of a file, which is in a folder, with the weights of its run or those at a `place`.

    Reports (W1001) why a model has to compute the whole window for each id. Raises Refused (E0302, E0804 to E0808,
    E1001).
    """
    given = of_one_row(given)
    anew = Recomputing(given, output, allow_python)
    read = read_weights(given, folder, anew.outputs.parameters, report, place, weights)
    scorer: Scorer = anew
    try:
        scorer = Keeping(given, anew.model, allow_python)
    except NotInParts as reason:
        message = f"each token computes all of `{anew.model.sequence.name}` anew: {reason.what}"
        report(Diagnostic("W1001", message, reason.span))
    scorer.set_parameters(read.parameters)
    if scorer is anew:
        anew.check_causal([0])
    return scorer


def of_one_row(given: Spec) -> Spec:
    """The file with one row in its batch; the file itself if other sizes depend on the rows."""
    model, _ = given.trained
    try:
        return evolve(given, model=with_rows(model, given.batch, 1))
    except Refused:
        return given


def check_prompt(model: LanguageModel, ids: Sequence[int]) -> None:
    """Refuse (E1002) a prompt that the model cannot take."""
    if not ids:
        raise refuse("E1002", "the prompt is empty", help="give at least one character, or leave out --prompt")
    if len(ids) > model.window:
        what = f"the prompt has {len(ids):,} tokens, and `{model.sequence.name}` has {model.window:,}"
        raise refuse("E1002", what, help="shorten the prompt")
    if max(ids) >= model.vocab.size:
        what = f"the prompt has the id {max(ids)}, and `{model.vocab.name}` has size {model.vocab.size}"
        raise refuse("E1002", what, help="the tokenizer must be that with which the model was trained: --tokenizer")
