"""Text that a model writes, id by id: on the ranks of this process, or by one rank of a run that trains."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from partita.compiler.pipeline import scoring_of
from partita.compiler.state import Compilation, Scoring
from partita.compiler.verify.proxy import single
from partita.dsl.check.language_model import USUAL, LanguageModel, language_model
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Spec
from partita.runtime.inference.choice import Choice
from partita.runtime.inference.encoding import Encoding, Ends, encoding_of
from partita.runtime.inference.ranks import LocalRanks, Ranks, all_ranks_local, ranks_of
from partita.runtime.inference.scoring import Scorer, check_prompt
from partita.runtime.python_functions import functions_of

# Tokens that are written after each evaluation.
LENGTH = 100


def written(
    scorer: Scorer, prompt: Sequence[int], length: int, choice: Choice, ends: Ends = ()
) -> Generator[None, None, list[int]]:
    """At most `length` ids that follow a prompt of from one to `window` ids, up to its end: one rank's part."""
    text = list(prompt)
    for index in range(length):
        text.append((yield from scorer.choose(text, index, choice)))
        if ended(text, len(prompt), ends):
            return text[len(prompt) : -1]
    return text[len(prompt) :]


def ended(text: Sequence[int], start: int, ends: Ends) -> bool:
    """Whether a text ends so from `start` on."""
    return any(tuple(text[max(start, len(text) - len(end)) :]) == end for end in ends)


@frozen(eq=False)
class Writer:
    """Writes with a model, on the ranks that are in this process."""

    scoring: Scoring
    ranks: Ranks
    scorers: Mapping[int, Scorer]

    @property
    def model(self) -> LanguageModel:
        """The model."""
        return self.scoring.model

    def check_causal(self) -> None:
        """Refuse (E1001) a model that sees what follows."""
        self.ranks.run(lambda rank: self.scorers[rank.rank].check_causal())

    def written(self, prompt: Sequence[int], length: int, choice: Choice, ends: Ends = ()) -> Iterator[int]:
        """At most `length` ids that follow a prompt of from one to `window` ids, as they are chosen, up to what ends
        the text; its last id is not among them.
        """
        text = list(prompt)
        for index in range(length):
            text.append(self._next(text, index, choice))
            if ended(text, len(prompt), ends):
                return
            yield text[-1]

    def _next(self, text: Sequence[int], index: int, choice: Choice) -> int:
        return self.ranks.run(lambda rank: self.scorers[rank.rank].choose(text, index, choice))


def writer_of(
    spec: Spec, output: str = USUAL, allow_python: bool = False, here: LocalRanks | None = None, cached: bool = True
) -> Writer:
    """What writes with the model of a file, whose weights are zero at first: on one device or, with the ranks that are
    `here`, in the file's layout. Unless `cached`, each id takes the whole window. Raises Refused (E0302, E1001).
    """
    functions = functions_of(spec.trained[0], allow_python)
    gpu = here is not None and here.device.type == "cuda"
    scoring = scoring_of(single(spec) if here is None else spec, output, gpu=gpu, cached=cached)
    ranks = ranks_of(all_ranks_local(1) if here is None else here, scoring.programs, spec, functions)
    return Writer(scoring, ranks, {rank.rank: Scorer(scoring, rank) for rank in ranks.ranks})


@frozen(eq=False)
class Samples:
    """What a run writes after each evaluation: the programs, the prompt and its ids, and how ids become text."""

    scoring: Scoring
    prompt: str
    ids: Sequence[int]
    encoding: Encoding
    seed: int

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """W1001, if each token takes the whole window."""
        return (self.scoring.warning,) if self.scoring.warning is not None else ()

    def of(self, scorer: Scorer, step: int) -> Generator[None, None, str]:
        """The text after a step, with the prompt: a pure function of the parameters, the seed and the step."""
        ids = yield from written(scorer, self.ids, LENGTH, Choice(self.seed, step=step), self.encoding.ends)
        return self.prompt + "".join(self.encoding.text(ids))


def samples_of(spec: Spec, training: Compilation, folder: Path, gpu: bool = False) -> Samples | None:
    """What the run of a training program of a file, which is in a folder, writes; None if the file asks for nothing.

    Raises Refused (E0302, E06xx, E1001 to E1003), at the prompt or the data.
    """
    model, train = spec.trained
    prompt = train.eval.arguments["sample"] if train.eval is not None else None
    if prompt is None:
        return None
    span = train.spans.get("sample")
    language = language_model(model, spec.batch, span=span)
    encoding = encoding_of(train.data, folder, None)
    ids = encoding.ids(prompt, span)
    check_prompt(language, ids, span)
    scoring = scoring_of(spec, beside=training, gpu=gpu, span=span)
    return Samples(scoring, prompt, ids, encoding, train.seed)
