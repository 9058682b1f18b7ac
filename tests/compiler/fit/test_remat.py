"""`recompute auto`: nothing where the program fits, else what is cheapest, until it does; the numbers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

import partita
from partita.cli.main import main
from partita.compiler.analysis.memory import peak_memory
from partita.compiler.fit.remat import candidates_of
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import validate
from partita.dsl.diagnostic import Refused
from tests.compiler.report.layout_files import GPT
from tests.files import checked

FILE = """
axis batch = 64, embed = 64, ffn = 512, few = 32
block wide(x: [batch, embed]) {{
  param up: [embed, ffn] ~ normal(0.1)
  param down: [ffn, embed] ~ normal(0.1)
  return x + dot(gelu(dot(rms_norm(x, over = embed), up, over = embed)), down, over = ffn)
}}
block narrow(x: [batch, embed]) {{
  param up: [embed, few] ~ normal(0.1)
  param down: [few, embed] ~ normal(0.1)
  return x + dot(tanh(dot(rms_norm(x, over = embed), up, over = embed)), down, over = few)
}}
model net(x: [batch, embed]) {{
  repeat 4 as layer {{ let x = narrow(wide(x)) }}
  loss mean(x * x)
}}
mesh m(pipe = 2) {{ device = device(flops = 1TFLOP/s, memory = {memory}, bandwidth = 100GB/s) }}
layout split on m {{ stage layer -> pipe {rules} }}
schedule s = {schedule}
train {{ model = net layout = split schedule = s data = random() optimizer = sgd(lr = 0.1) steps = 2 }}
"""
FLUSH = "gpipe(microbatches = 8)"


def text(memory: str = "1GiB", rules: str = "recompute auto", schedule: str = FLUSH) -> str:
    return FILE.format(memory=memory, rules=rules, schedule=schedule)


def compiled(memory: str = "1GiB", rules: str = "recompute auto", schedule: str = FLUSH) -> Compilation:
    return compile_spec(checked(text(memory, rules, schedule), "net.par"))


def bounds(state: Compilation) -> list[int]:
    return [peak_memory(state, rank) for rank in state.program.ranks]


def source(state: Compilation) -> str:
    return state.program.source


def test_what_fits_is_left_alone() -> None:
    assert source(compiled()) == source(compiled(rules=""))
    assert not compiled().again


def test_blocks_come_first_and_turns_last() -> None:
    """A wide block saves more for the time that it takes; each rank has two of the iterations, which are alike."""
    first, second = candidates_of(compiled())
    names = ["wide", "wide", "narrow", "narrow"]
    assert [path.split(".")[-1] for path in first[:4]] == [path.split(".")[-1] for path in second[:4]] == names
    assert set(first[4:]) == {"net.layer.0", "net.layer.1"}
    assert set(second[4:]) == {"net.layer.2", "net.layer.3"}


@pytest.mark.soak
def test_as_little_as_lets_the_bound_fit() -> None:
    """Down to what is left where everything is computed again: the bound keeps within each limit, and one candidate
    less on a rank would not do.
    """
    largest, least = max(bounds(compiled())), max(bounds(compiled(rules="recompute all")))
    order = candidates_of(compiled())
    for limit in range(largest - 1, least, -(largest - least) // 5):
        state = compiled(f"{limit}B")
        assert max(bounds(state)) <= limit
        assert state.again
        assert validate(state).passed
        for own in order:
            taken = [path for path in own if path in state.again]
            assert taken == own[: len(taken)]


def test_what_does_not_fit_is_as_small_as_it_gets() -> None:
    state = compiled("1KiB")
    assert state.again == {f"net.layer.{iteration}" for iteration in range(4)}
    assert bounds(state) == bounds(compiled(rules="recompute all"))


def test_only_the_ranks_that_need_it_compute_again() -> None:
    """In 1F1B the first rank has more microbatches in flight."""
    schedule = "one_f_one_b(microbatches = 8)"
    first, second = bounds(compiled(schedule=schedule))
    assert first > second
    state = compiled(f"{(first + second) // 2}B", schedule=schedule)
    assert state.again
    assert {path.split(".")[2] for path in state.again} <= {"0", "1"}


@pytest.mark.soak
def test_a_schedule_that_is_searched_for_fits_by_itself_where_it_can() -> None:
    """specs/gpt.par with ever less memory: where no order is within it, there is one with iterations computed again."""

    def searched(rule: str, memory: int) -> Compilation:
        given = GPT.replace("stage layer -> pipe", f"stage layer -> pipe {rule}").replace("repeat 12", "repeat 4")
        override = f"schedule=auto(microbatches=16, chunks=1, memory={memory}B)"
        return compile_spec(checked(given, "gpt.par", [override]))

    memory = max(bounds(searched("", 2**40)))
    assert not searched("recompute auto", memory).again
    while True:
        memory = memory * 19 // 20
        try:
            searched("", memory)
        except Refused:
            break
    state = searched("recompute auto", memory)
    assert state.again == {f"gpt.layer.{iteration}" for iteration in range(4)}
    assert max(bounds(state)) <= memory


def test_the_numbers_stay_the_same(tmp_path: Path) -> None:
    losses = []
    for memory, rules in (("1GiB", ""), ("1KiB", "recompute auto")):
        (tmp_path / "net.par").write_text(text(memory, rules), encoding="utf-8")
        losses.append([record["loss"] for record in partita.train(tmp_path / "net.par")])
    assert losses[0] == losses[1]


def test_compile_says_what_is_computed_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "net.par").write_text(text("1KiB"), encoding="utf-8")
    assert main(["compile", str(tmp_path / "net.par")]) == 0
    assert "recompute auto: net.layer of iterations 0 to 3\n" in capsys.readouterr().out
