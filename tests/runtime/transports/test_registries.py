"""What the language lets a file name, the runtime can do; and nothing else."""

from __future__ import annotations

from inspect import Parameter, signature

from partita.dsl.config import builtins
from partita.runtime.initial import FIXED, RANDOM
from partita.runtime.learning_rates import LEARNING_RATES


def test_learning_rates_take_the_arguments_that_the_language_gives_them() -> None:
    assert set(LEARNING_RATES) == set(builtins.LEARNING_RATES)
    for name, function in LEARNING_RATES.items():
        parameters = signature(function).parameters.values()
        keywords = {parameter.name for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY}
        assert keywords == set(builtins.LEARNING_RATES[name].names), name


def test_initial_values() -> None:
    assert {*RANDOM, *FIXED, "constant", "file"} == set(builtins.INITIAL)
    # `initial` reads the one argument, whatever it is called.
    assert all(len(each.names) <= 1 for each in builtins.INITIAL.values() if each.name != "file")
    assert set(builtins.SAMPLED) == {"normal", "uniform", "integers", "gumbel"}
