"""Every input by which the law was once broken, and those near it, replayed; and the seeds that fuzzing begins from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.seeds import HERE
from tests.fuzz.soak import INPUT_SECONDS
from tests.fuzz.targets import TARGETS

CASES = [(name, path) for name in TARGETS for path in sorted((HERE / "corpus" / name).glob("*"))]


@pytest.mark.few(30)
@pytest.mark.timeout(INPUT_SECONDS)
@pytest.mark.parametrize(("target", "path"), CASES, ids=lambda each: each.name if isinstance(each, Path) else each)
def test_what_was_found_stays_mended(target: str, path: Path):
    TARGETS[target].run(path.read_bytes())


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS)
def test_seeds_keep_the_law(target: str):
    seeds = list(TARGETS[target].seeds())
    assert seeds
    for seed in seeds:
        TARGETS[target].run(seed)


def test_the_corpus_has_no_folder_without_a_target():
    assert {path.name for path in (HERE / "corpus").iterdir()} <= set(TARGETS)
