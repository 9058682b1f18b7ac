"""Files of the zoo compute what implementations that others wrote compute."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.marks import soak
from tests.zoo.against import Against

MODELS = sorted(path.stem for path in (Path(__file__).parent / "models").glob("[a-z]*.py"))
# Those that every run of the tests compares.
ALWAYS = ("gpt2", "llama3", "vit")


def model(name: str) -> Against:
    found = import_module(f"tests.zoo.models.{name}").MODEL
    assert isinstance(found, Against)
    return found


NAMES = [each for name in MODELS for each in ([name] if name in ALWAYS else soak(name))]


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_the_same_logits(name: str):
    model(name).same_logits()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_numbers(name: str):
    model(name).same_numbers()


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_the_same_training(name: str):
    model(name).same_training()
