"""What `compile` counts is what ranks send: one step on the virtual cluster, every collective noted down."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from partita.compiler.analysis.traffic import traffic
from partita.dsl.load import load
from partita.runtime.context import Context
from partita.runtime.data.binding import open_data
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.files import SPECS

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SMALL = ("seq=16", "embed=16", "key=4", "ffn=16", "vocab=32", "train.steps=1")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama.par", ("batch=8", "layout=everything")),
        ("llama.par", ("batch=8", "layout=zero1")),
        ("gpt.par", ("batch=8", "schedule.microbatches=4", "train.data=random()", "train.precision=f32")),
    ],
)
def test_counts_are_those_of_a_step(monkeypatch: pytest.MonkeyPatch, name: str, overrides: tuple[str, ...]) -> None:
    spec, diagnostics = load(SPECS / name, (*SMALL, *overrides))
    assert spec is not None, diagnostics
    messages: dict[int, Counter[tuple[str, str]]] = {}
    tensors: dict[int, Counter[tuple[str, str]]] = {}
    held: dict[int, Counter[tuple[str, str]]] = {}
    for kind in KINDS:
        original = getattr(Context, kind)

        def noted(self: Context, axis: str, given: Any, *rest: Any, kind: str = kind, original: Any = original) -> Any:
            assert self.transport is not None
            rank = self.transport.rank
            messages.setdefault(rank, Counter())[kind, axis] += 1
            tensors.setdefault(rank, Counter())[kind, axis] += len(given)
            held.setdefault(rank, Counter())[kind, axis] += sum(each.nbytes for each in given)
            return original(self, axis, given, *rest)

        monkeypatch.setattr(Context, kind, noted)
    plan = prepare(spec)
    VirtualRun(plan, strict=False).train(open_data(plan.program, plan.train, SPECS))
    records = traffic(plan.training)
    assert records
    for rank in range(plan.ranks):
        own = [each for each in records if each.rank == plan.program.mesh.pipe_rank(rank)]
        for found, counted in (
            (tensors, lambda each: each.count),
            (messages, lambda each: each.launches),
            (held, lambda each: each.count * each.type.bytes),
        ):
            expected: dict[tuple[str, str], float] = {}
            for each in own:
                expected[each.kind, each.axis] = expected.get((each.kind, each.axis), 0) + counted(each)
            assert found[rank] == {key: pytest.approx(value) for key, value in expected.items()}
