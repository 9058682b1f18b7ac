"""Answers to prompts that a model writes while it trains, and what they are worth: `rollouts` (on-policy).

All ranks write together, with the parameters that they train, as their layout stores them, and with kept keys and
values where the model allows that (`partita.runtime.inference.scoring`). Each row of the batch is a text of its own.
All texts are at the same position: where a longer prompt still goes on, the answer to a shorter one has begun.

What is written is a function of the parameters, the seed and the step: the id at a position of a row is drawn by a word
of a stream of its own. So a run that resumes writes what it would have written, and needs nothing that was written
before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from partita.compiler.state import Compilation, Scoring
from partita.dsl.check.language_model import ROLLOUTS
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Call
from partita.runtime.data.dataset import Batch, Dataset
from partita.runtime.data.prompts import PROMPT, Answers, Prompt, Prompts
from partita.runtime.data.whole import SeparateEvaluationData
from partita.runtime.inference.choice import drawn_in_rows
from partita.runtime.inference.conversation import conversation_of
from partita.runtime.inference.encoding import Encoding, Tokenizer, encoding_of
from partita.runtime.inference.ranks import ForwardRank
from partita.runtime.inference.rewards import Reward, check_allowed, reward_of
from partita.runtime.inference.sampling import ended
from partita.runtime.inference.scoring import Scorer
from partita.runtime.initial import unit_uniform
from partita.runtime.philox import stream, words


@frozen(eq=False)
class Rollouts:
    """What a run's answers are written with: the programs, the prompts for training and for evaluations, how ids become
    text, and what scores them.
    """

    scoring: Scoring
    training: Prompts
    evaluated: Prompts
    encoding: Encoding
    reward: Reward
    call: Call
    seed: int

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """W1001, if each token takes the whole window."""
        return (self.scoring.warning,) if self.scoring.warning is not None else ()

    @property
    def reuse(self) -> int:
        """How many steps train on the same answers."""
        return int(self.call.arguments["reuse"])


def rollouts_of(training: Compilation, data: Dataset | None, folder: Path, allow_python: bool) -> Rollouts | None:
    """What the run of a training program of a file, which is in a folder, answers the prompts of its data with; None if
    it has no such data. The file of the reward is imported. Raises Refused: E0620, E0621 for the reward.
    """
    call = training.train.data
    if training.writes is None or data is None:
        return None
    check_allowed(call.arguments["reward"], allow_python)
    prompts, evaluated = (data.training, data.dataset) if isinstance(data, SeparateEvaluationData) else (data, data)
    assert isinstance(prompts, Prompts)
    assert isinstance(evaluated, Prompts)
    encoding = encoding_of(call, folder, None)
    if prompts.conversing and isinstance(encoding, Tokenizer):
        encoding = conversation_of(encoding, call.arguments["tokenizer"], folder, call.span, {}).encoding
    reward = reward_of(call.arguments["reward"])
    return Rollouts(training.writes, prompts, evaluated, encoding, reward, call, training.train.seed)


@define(eq=False)
class Rollout:
    """One rank that answers prompts. Several steps may train on the same answers: those that are written for the first
    of them. What is kept of texts lives as long as the scorer, while they are written.
    """

    rollouts: Rollouts
    scorer: Callable[[], Scorer]
    # By the first step that trains on them: the last, and those before, whose steps may be done again or told of later.
    _written: dict[int, Answers] = field(factory=dict, init=False)

    def trained(self, batch: Mapping[str, Any], step: int) -> Generator[None, None, Batch]:
        """The inputs of a training step, of a dataset's batch with all rows."""
        first = self._first(step)
        if step == first or first not in self._written:
            answers = yield from self._answers(self.rollouts.training, batch[PROMPT], f"step {first}")
            before = self._first(first - 1)
            self._written = {each: self._written[each] for each in (before,) if each in self._written}
            self._written[first] = answers
        return self.batch_of(step)

    def evaluated(self, batch: Mapping[str, Any], index: int) -> Generator[None, None, Answers]:
        """Answers to an evaluation batch: they are drawn alike in each evaluation."""
        return self._answers(self.rollouts.evaluated, batch[PROMPT], f"evaluation {index}")

    def batch_of(self, step: int) -> Batch:
        """What a step trains on: one of the last."""
        return self.rollouts.training.answered(self._written[self._first(step)])

    def metrics_of(self, step: int) -> dict[str, float]:
        """Metrics of what a step trains on."""
        return metrics_of([self._written[self._first(step)]])

    def ends_with(self, step: int) -> bool:
        """Whether the next step trains on other answers: then all that it needs are the parameters."""
        return step % self.rollouts.reuse == 0

    def _first(self, step: int) -> int:
        return step - (step - 1) % self.rollouts.reuse

    def _answers(self, prompts: Prompts, numbers: np.ndarray, when: str) -> Generator[None, None, Answers]:
        """Answers to the prompts of these numbers, one in each row."""
        ids, begins = map(torch.from_numpy, prompts.rows_of(numbers))
        scorer = self.scorer()
        ends, logprobs = yield from self._write(scorer, ids, begins, when)
        answers = [row[first:last].tolist() for row, first, last in zip(ids, begins, ends, strict=True)]
        rewards = yield from self._rewards(scorer.rank, [prompts.prompts[each] for each in numbers], answers, prompts)
        arrays = ids.numpy(), begins.numpy(), ends.numpy(), logprobs.numpy(), rewards.numpy()
        return Answers(*arrays, prompts.samples)

    def _write(
        self, scorer: Scorer, ids: Tensor, begins: Tensor, when: str
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Write an answer into each row of `ids`, [rows, positions], behind what it `begins` with. Returns where each
        ends, and the logarithms of the probabilities with which ids were drawn.
        """
        most = begins + int(self.rollouts.call.arguments["tokens"])
        ends, logprobs = begins.clone(), torch.zeros(ids.shape, dtype=torch.float64)
        going = torch.ones(len(ids), dtype=torch.bool)
        position = int(begins.min())
        while going.any():
            yield from scorer.advance(ids[:, :position])
            drawn, logarithms = yield from self._drawn(scorer, len(ids), position, when)
            writing = going & (begins <= position)
            ids[writing, position], logprobs[writing, position] = drawn[writing], logarithms[writing]
            position += 1
            ends[writing] = position
            going &= ~(writing & ((ends == most) | self._stopped(ids, begins, position)))
        return ends, logprobs

    def _drawn(
        self, scorer: Scorer, rows: int, position: int, when: str
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """An id for each row, the same on all ranks, and the logarithm of its probability."""
        own = yield from scorer.last()
        found = torch.zeros(2, rows, dtype=torch.float64)
        if own is not None:
            here = slice(own.first, own.first + len(own.logits))
            uniform = unit_uniform(words(stream(self.rollouts.seed, ROLLOUTS, position, when), 0, rows)[here])
            temperature = float(self.rollouts.call.arguments["temperature"])
            device = own.logits.device
            found[:, here] = torch.stack(
                drawn_in_rows(own.logits, temperature, torch.from_numpy(uniform).to(device))
            ).cpu()
        drawn, logarithms = (yield from scorer.rank.sum(found)).unbind()  # of each row all ranks but one have zeros
        return drawn.long(), logarithms

    def _rewards(
        self, rank: ForwardRank, prompts: Sequence[Prompt], answers: Sequence[list[int]], of: Prompts
    ) -> Generator[None, None, Tensor]:
        """The reward of each row: each rank scores its share of the prompts, with all answers to them."""
        own = [row for row in range(len(prompts)) if row // of.samples % rank.mesh.ranks == rank.rank]
        rewards = torch.zeros(len(prompts), dtype=torch.float64)
        if own:
            chosen, ids = [prompts[row] for row in own], [answers[row] for row in own]
            texts = [self._text(prompt, each) for prompt, each in zip(chosen, ids, strict=True)]
            rewards[own] = torch.tensor(self.rollouts.reward(chosen, texts, ids), dtype=torch.float64)
        return (yield from rank.sum(rewards))

    def _stopped(self, ids: Tensor, begins: Tensor, position: int) -> Tensor:
        """Whether the answer in each row ends before a position with ids that end one."""
        stopped = torch.zeros(len(ids), dtype=torch.bool)
        for end in self.rollouts.encoding.ends:
            first = position - len(end)
            if first >= 0:
                stopped |= (begins <= first) & (ids[:, first:position] == torch.tensor(end)).all(1)
        return stopped

    def _text(self, prompt: Prompt, ids: list[int]) -> str | list[dict[str, str]]:
        """An answer without its end; as a message, if the prompt has messages."""
        encoding = self.rollouts.encoding
        end = next((end for end in encoding.ends if ended(ids, 0, (end,))), ())
        kept = ids[: len(ids) - len(end)]
        if isinstance(encoding, Tokenizer):
            text = encoding.loaded.decode(kept)
        else:
            text = "".join(encoding.text(kept))
        return text if isinstance(prompt.shown, str) else [{"role": "assistant", "content": text}]


def metrics_of(answers: Sequence[Answers]) -> dict[str, float]:
    """The mean of all rewards, their standard deviation, and the mean number of ids."""
    rewards = np.concatenate([each.rewards for each in answers])
    lengths = np.concatenate([each.ends - each.begins for each in answers])
    return {
        "reward": float(rewards.mean()),
        "reward_spread": float(rewards.std()),
        "answer_length": float(lengths.mean()),
    }
