"""Models that write, with random weights of order one."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import torch

from partita.compiler.passes.decode import STATE
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.dsl.spec import Spec
from partita.runtime.inference.ranks import ForwardRank
from partita.runtime.inference.sampling import Writer, writer_of
from tests.files import SPECS, checked

ZOO = SPECS / "zoo"


def loaded(path: Path, *overrides: str) -> Spec:
    """A file's meaning. Raises Refused."""
    spec, diagnostics = load(path, overrides)
    if spec is None:
        raise Refused(diagnostics)
    return spec


def model(statements: str, seq: int = 16) -> Spec:
    """A small model, by what makes `h` of embeddings `x`. `eps` and `z` have the axes of `x` without the sequence."""
    return checked(
        f"""
        axis batch = 2, seq = {seq}, time = seq, embed = 8, out = embed, embed_out = embed, vocab = 13
        axis taps = 3, one = 1, two = 2, four = 4
        model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {{
          param table: [vocab, embed] ~ normal(1.0)
          let x = embedding(tokens, table, over = vocab)
          sample eps: [batch, embed] ~ normal(1.0)
          let z = eps
          {statements}
          let logits = dot(h, table, over = embed)
          loss cross_entropy(logits, targets, over = vocab)
          output logits = logits
        }}
        train {{ data = random() optimizer = sgd(lr = 0.1) steps = 1 }}
        """,
        "m.par",
    )


def drawn(writer: Writer) -> dict[str, torch.Tensor]:
    """Random weights that keep activations of order one, the same for all writers of a model."""
    records = writer.ranks.ranks[0].executors[0].program.parameters
    generator = torch.Generator().manual_seed(0)
    types = {each.name: each.type for each in sorted(records, key=lambda each: each.name)}
    return {
        name: torch.randn(type.shape, generator=generator) / (type.shape[0] ** 0.5 if len(type.shape) > 1 else 3)
        for name, type in types.items()
        if not name.startswith(STATE)
    }


def both(given: Spec) -> tuple[Writer, Writer]:
    """The two ways in which logits are computed, with the same weights. Raises NotInParts."""
    anew, keeping = (writer_of(given, cached=kept) for kept in (False, True))
    if keeping.scoring.anew is not None:
        raise keeping.scoring.anew
    weights = drawn(anew)
    anew.ranks.set_parameters(weights)
    keeping.ranks.set_parameters(weights)
    return anew, keeping


def logits_of(writer: Writer, ids: list[int]) -> torch.Tensor:
    """The logits after ids, which one rank has."""
    found: dict[int, torch.Tensor] = {}

    def part(rank: ForwardRank) -> Generator[None, None, None]:
        logits = yield from writer.scorers[rank.rank].logits(ids)
        if logits is not None:
            found[rank.rank] = logits

    writer.ranks.run(part)
    (logits,) = found.values()
    return logits


def difference(given: Spec, lengths: list[int]) -> float:
    """The largest difference of the logits after so many ids, relative to the largest; before them, after another id
    than they begin with, of which nothing may be left.
    """
    anew, keeping = both(given)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, anew.model.vocab.size, (anew.model.window,), generator=generator).tolist()
    found = 0.0
    for text in ([(ids[0] + 1) % anew.model.vocab.size], *(ids[:length] for length in lengths)):
        one, other = logits_of(anew, text), logits_of(keeping, text)
        assert float(one.std()) > 0
        found = max(found, float((one - other).abs().max() / one.abs().max()))
    return found
