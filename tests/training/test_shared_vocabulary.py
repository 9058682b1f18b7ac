"""`shard vocab -> pipe`: all ranks of the pipeline share the lookup and the output layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from attrs import evolve

from partita.compiler.analysis.memory import peak_memory
from partita.compiler.analysis.time import predict
from partita.compiler.pipeline import compile_outputs, compile_spec, schedule_spec
from partita.compiler.report.explain import explain
from partita.compiler.report.summary import summarize
from partita.compiler.schedules.forms.json_form import as_json
from partita.compiler.schedules.forms.text import write
from partita.compiler.verify.equivalence import validate
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from tests.compiler.test_text import check_every_pass
from tests.marks import soak
from tests.training.test_partition import check

FILE = """\
axis batch = 8, seq = 4, embed = 6, ffn = 8, vocab = 12

model lm(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(0.2)
  param head: [vocab, embed] ~ normal(0.05)
  let x = embedding(tokens, table, over = vocab)
  repeat 4 as layer {
    param up: [embed, ffn] ~ normal(0.3)
    param down: [ffn, embed] ~ normal(0.3)
    let x = x + dot(gelu(dot(x, up, over = embed)), down, over = ffn)
  }
  let logits = dot(layer_norm(x, over = embed), head, over = embed)
  loss cross_entropy(logits, targets, over = vocab)
  metric right = accuracy(logits, targets, over = vocab)
  metric counted = accuracy(logits, where(targets == 3, -1, targets), over = vocab, ignore = -1)
}
mesh two(pipe = 2, tensor = 1)
layout cut on two {
  RULE
  stage layer -> pipe
}
layout whole on two { }
schedule s = one_f_one_b(microbatches = 4)
train {
  model = lm
  layout = cut
  schedule = s
  data = random()
  optimizer = adamw(lr = 0.01)
  precision = f64
  clip = 0.5
  steps = 2
  eval = every(1, batches = 1)
}
"""
ORDER = "one_f_one_b(microbatches = 4)"
WHOLE = ("two.pipe=1", "two.tensor=1", "layout=whole", "schedule=gpipe(microbatches=1)")
# Rows that are penalized: a gradient of parameters alone, which is added to that of the output layer.
PENALIZED = {
    "cross_entropy(logits, targets, over = vocab)": (
        "0.5 * mse(logits, dot(x, table, over = embed)) + 0.01 * sum(table * table)"
    )
}
# Lookups in layers, too, whose gradients are that of what the output layer reads, with nothing between.
AGAIN = {
    "    param up: [embed, ffn] ~ normal(0.3)\n    param down: [ffn, embed] ~ normal(0.3)\n": "",
    "dot(gelu(dot(x, up, over = embed)), down, over = ffn)": "embedding(tokens, table, over = vocab)",
    "layer_norm(x, over = embed)": "x",
}
TIED = {"  param head: [vocab, embed] ~ normal(0.05)\n": "", "head, over": "table, over"}


def text_of(rule: str = "shard vocab -> pipe", order: str = ORDER, changes: Mapping[str, str] | None = None) -> str:
    text = FILE.replace("RULE", rule).replace(ORDER, order)
    for old, new in (changes or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def refused(text: str):
    given, diagnostics = load_text(text, "lm.par")
    if given is None:
        return next(each for each in diagnostics if each.severity == "error")
    with pytest.raises(Refused) as found:
        compile_spec(given)
    return found.value.diagnostics[0]


CASES = [
    ("shard vocab -> pipe", ORDER, {}),
    ("shard vocab -> pipe", "interleaved_1f1b(microbatches = 4, chunks = 2)", TIED),
    ("shard vocab -> pipe", ORDER, {**PENALIZED, **TIED}),
    ("shard vocab -> pipe", "interleaved_1f1b(microbatches = 4, chunks = 2)", AGAIN),
    ("shard vocab -> pipe", ORDER, {**AGAIN, **TIED}),
    *soak(
        ("shard vocab -> pipe, tensor", "zb_v(microbatches = 4)", {**TIED, "tensor = 1": "tensor = 2"}),
        ("shard vocab -> pipe\n  shard ffn -> tensor", "zb_h1(microbatches = 4)", {"tensor = 1": "tensor = 2"}),
        ("shard vocab -> pipe\n  recompute all", "interlaced(microbatches = 4)", {}),
        ("shard vocab -> pipe\n  shard param, batch -> tensor", ORDER, {**TIED, "tensor = 1": "tensor = 2"}),
        ("shard vocab -> pipe", "auto(microbatches = 4, chunks = 2)", TIED),
        ("shard vocab -> pipe", "policy(microbatches = 4, split_backward = true)", {}),
        ("shard vocab -> pipe", "gpipe(microbatches = 2)", {"pipe = 2": "pipe = 4", "steps": "ema = 0.9 steps"}),
    ),
]


@pytest.mark.parametrize(("rule", "order", "changes"), CASES)
def test_the_numbers_are_those_of_one_device(rule, order, changes, tmp_path):
    text = text_of(rule, order, changes=changes)
    check(SimpleNamespace(text=text, single=WHOLE), 3, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("changes", [{}, TIED])
def test_what_its_passes_make_reads_back_as_the_same(changes):
    given, _ = load_text(text_of(changes=changes), "lm.par")
    assert given is not None
    check_every_pass(given)


@pytest.mark.few(1)
@pytest.mark.parametrize("changes", [{}, TIED])
def test_copies_of_its_gradients_to_the_host_are_waited_for(changes):
    """Reductions begin them, as nothing is clipped, and updates know the parts of a parameter by their own names."""
    given, _ = load_text(
        text_of("shard vocab -> pipe\n  offload state", changes={**changes, "  clip = 0.5\n": ""}), "lm.par"
    )
    assert given is not None
    assert validate(compile_spec(given)).passed


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mine.sched", "mine.json"])
def test_a_written_order_with_its_passes_is_taken_as_it_is(name, tmp_path):
    """`compile --emit schedule` and `schedule --json` say what all ranks share, and `from_file` puts in no more."""
    order = "interleaved_1f1b(microbatches = 4, chunks = 2)"
    given, _ = load_text(text_of(order=order), "lm.par")
    schedule = compile_spec(given).schedule
    form = write(schedule) if name.endswith(".sched") else json.dumps(as_json(schedule))
    (tmp_path / name).write_text(form)
    for rule in ("shard vocab -> pipe", ""):
        again, diagnostics = load_text(text_of(rule, f'from_file("{name}")'), path=tmp_path / "lm.par")
        assert again is not None, diagnostics
        if rule:
            assert compile_spec(again).schedule == evolve(schedule, name=str(tmp_path / name))
        else:
            with pytest.raises(Refused, match="has passes over what all ranks share"):
                compile_spec(again)


@pytest.mark.few(1)
@pytest.mark.parametrize("changes", [{}, TIED])
def test_the_certificate(changes):
    given, _ = load_text(text_of(changes=changes), "lm.par")
    state = compile_spec(given)
    assert validate(state).passed, [each.render() for each in validate(state).problems]
    # Each rank holds half of the rows, the table's once even where it is the output layer too.
    table = state.program.parameter("lm.table")
    assert (str(table.layout), table.type.axis("vocab").size) == ("vocab/pipe", 12)
    assert {state.program.stages[stage].rank for stage in table.stages} == {0, 1}
    assert not [each for rank in state.program.ranks for each in rank.sends]


def compiled(order: str):
    given, _ = load_text(text_of(order=order), "lm.par")
    return schedule_spec(given)


@pytest.mark.soak
def test_a_search_finds_what_is_best_with_the_passes_over_parts():
    names = ("one_f_one_b", "zb_h1", "zb_h2", "gpipe")
    named = {name: compiled(f"{name}(microbatches = 4)") for name in names}
    costs = {name: predict(state, exposed=False).timeline.cost for name, state in named.items()}
    state = compiled("auto(microbatches = 4)")
    found = predict(state, exposed=False).timeline
    assert state.schedule.search.cost == pytest.approx(found.cost)
    assert found.cost <= min(costs.values()) * (1 + 1e-9)
    assert max(found.busy) * (1 - 1e-9) <= state.schedule.search.least <= found.cost * (1 + 1e-9)
    least = named["one_f_one_b"]
    limit = max(peak_memory(least, rank) for rank in least.plan.ranks)
    state = compiled(f"auto(microbatches = 4, memory = {limit}B)")
    assert max(peak_memory(state, rank) for rank in state.plan.ranks) <= limit


@pytest.mark.few(1)
@pytest.mark.parametrize("changes", [{}, TIED])
def test_reports_count_what_each_rank_holds(changes):
    """All ranks together hold as much as with the vocabulary on some of them; no part is called tied that is not."""
    states = []
    for rule in ("shard vocab -> pipe", ""):
        given, _ = load_text(text_of(rule, changes=changes), "lm.par")
        states.append(compile_spec(given))
    shared, last = map(summarize, states)
    own = [
        (sum(each.parameters for each in found.memory), sum(each.state for each in found.memory))
        for found in (shared, last)
    ]
    copies = 12 * 6 * 8 * (1, 2)[bool(changes)] - 12 * 6 * 8
    assert own[0] == (own[1][0] - copies, own[1][1] - 2 * copies)
    assert {name for stage in shared.stages for name in stage.tied} == ({"lm.table"} if changes else set())
    assert shared.parameters == last.parameters
    assert [(each.parameters, each.elements, each.state) for each in shared.rules] == [
        (each.parameters, each.elements, each.state) for each in last.rules
    ]
    (table,) = explain(states[0], "lm.table")
    assert (table.names, table.type.axis("vocab").size, table.local.axis("vocab").size) == (("lm.table",), 12, 6)
    assert "in 2 parts" in table.role


@pytest.mark.parametrize(
    ("text", "code", "line", "column", "words"),
    [
        (text_of("shard seq -> pipe"), "E0412", 19, 3, "cannot also split `seq`"),
        (text_of("shard lm.head: vocab -> pipe"), "E0412", 19, 3, "cannot also split `vocab`"),
        (text_of("shard state -> pipe"), "E0412", 19, 3, "cannot also split `state`"),
        (text_of(changes={"vocab = 12": "vocab = 13"}), "E0411", 19, 9, "does not divide over `pipe` of 2"),
        (
            text_of(
                changes={
                    "logits, targets, over = vocab)\n  metric": "log_softmax(logits, over = vocab), targets, "
                    "over = vocab)\n  metric"
                }
            ),
            "E0417",
            19,
            9,
            "`log_softmax(logits, over = vocab)` needs all of it at once",
        ),
        (
            text_of(
                changes={
                    "adamw(lr = 0.01)": "rowwise_adagrad(lr = 0.01)",
                    "head: [vocab, embed]": "head: [embed, vocab]",
                }
            ),
            "E0417",
            5,
            9,
            "`lm.head` cannot be split over the pipeline: its optimizer updates it as a whole",
        ),
        (
            text_of(changes={"adamw(lr = 0.01)": "adafactor(lr = 0.01)"}),
            "E0417",
            4,
            9,
            "its optimizer updates it as a whole",
        ),
        (
            text_of(
                changes={
                    "  metric right": "  buffer size: [] ~ zeros()\n  update size = mean(head * head)\n  metric right",
                }
            ),
            "E0417",
            15,
            17,
            "`lm.head` cannot be split over the pipeline: the update of `lm.size` reads it",
        ),
    ],
)
def test_wrong_files(text, code, line, column, words):
    found = refused(text)
    assert (found.code, found.span.line, found.span.column) == (code, line, column), found.render()
    assert words in found.message
    assert found.help


def test_an_output_that_has_the_vocabulary_is_said_to_be_needed_whole():
    loss = "loss cross_entropy(logits, targets, over = vocab)\n"
    given, _ = load_text(text_of(changes={loss: f"{loss}  output logits = logits\n"}), "lm.par")
    with pytest.raises(Refused, match="output `logits` is needed whole"):
        compile_outputs(given)
