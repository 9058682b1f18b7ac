"""Rules of an optimizer: the first that matches a parameter is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.cli.main import main
from partita.compiler.passes.assign import assign
from partita.compiler.passes.build import build
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.dsl.diagnostic import Refused
from tests.files import checked

MODEL = """
axis batch = 4, seq = 4, embed = 6, wide = 6, ffn = 8, heads = 2, key = 3, vocab = 5, experts = 2

block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ normal(0.1)
  param gain: [embed] ~ ones()
  return dot(dot(x * gain, up, over = embed), up, over = ffn)
}

block nothing(x: [batch, seq, embed]) {
  return x
}

model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param wte: [vocab, embed] ~ normal(0.1)
  param wpe: [seq, embed] ~ normal(0.1)
  param wq: [embed, heads, key] ~ normal(0.1)
  param square: [wide, ffn] ~ normal(0.1)
  param bias: [heads, key] ~ zeros()
  param expert: [experts, embed, ffn] ~ normal(0.1)
  param inner: [embed] ~ normal(0.1)
  let x = nothing(embedding(tokens, wte, over = vocab) + wpe)
  repeat 2 as layer {
    let x = mlp(mlp(x))
  }
  let q = merge(dot(x, wq, over = embed) + bias, [heads, key] -> embed)
  let o = dot(q, rename(square, wide -> embed), over = embed)
  let e = dot(expand(x, experts), expert, over = embed)
  let logits = dot(x, wte, over = embed)
  loss mean(o) + mean(e) + mean(dot(x, inner, over = embed)) + cross_entropy(logits, targets, over = vocab)
}

optimizer o {
RULES
}

train { data = random()  optimizer = o  steps = 1 }
"""


def compiled(*rules: str) -> Compilation:
    return compile_spec(checked(MODEL.replace("RULES", "\n".join(f"  {rule}" for rule in rules)), "m.par"))


def rules_of(*rules: str) -> dict[str, str]:
    """The rule of each parameter without iteration numbers."""
    found = {}
    for name, rule in compiled(*rules).rules.items():
        short = ".".join(part for part in name.split(".")[1:] if not part.isdigit())
        assert found.setdefault(short, str(rule)) == str(rule)
    return found


def named(found: dict[str, str], rule: str) -> set[str]:
    return {name for name, each in found.items() if each == rule}


def test_classes_follow_how_parameters_are_read():
    for target, wanted in {
        "matrices": {"wte", "wq", "square", "expert", "layer.mlp.up", "layer.mlp_2.up"},
        "embeddings": {"wte"},
        "vectors": {"wpe", "bias", "inner", "layer.mlp.gain", "layer.mlp_2.gain"},
    }.items():
        found = rules_of(f"update {target} -> sgd(lr = 0.1)", "freeze all")
        assert named(found, f"update {target} -> sgd") == wanted


def test_the_first_rule_that_matches_is_that_of_a_parameter():
    found = rules_of("update embeddings -> sgd(lr = 0.1)", "freeze matrices", "update all -> adamw(lr = 0.1)")
    assert found["wte"] == "update embeddings -> sgd"
    assert found["wq"] == found["layer.mlp.up"] == "freeze matrices"
    assert found["bias"] == "update all -> adamw"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("up", {"layer.mlp.up", "layer.mlp_2.up"}),
        (
            "mlp",
            {"layer.mlp.up", "layer.mlp.gain", "layer.mlp_2.up", "layer.mlp_2.gain"},
        ),  # both are calls of the block
        ("mlp_2", {"layer.mlp_2.up", "layer.mlp_2.gain"}),
        ("layer.mlp", {"layer.mlp.up", "layer.mlp.gain", "layer.mlp_2.up", "layer.mlp_2.gain"}),
        ("m.layer.mlp", {"layer.mlp.up", "layer.mlp.gain"}),  # the full name of the first call
        ("m.layer.mlp_2", {"layer.mlp_2.up", "layer.mlp_2.gain"}),
        ("layer", {"layer.mlp.up", "layer.mlp.gain", "layer.mlp_2.up", "layer.mlp_2.gain"}),
        ("m.wte", {"wte"}),
        ("mlp_2.up", {"layer.mlp_2.up"}),
    ],
)
def test_a_path_is_a_parameter_or_all_within_a_block_or_repeat(path: str, wanted: set[str]):
    assert named(rules_of(f"freeze {path}", "update all -> sgd(lr = 0.1)"), f"freeze {path}") == wanted


def test_what_is_frozen_costs_neither_gradient_nor_state_nor_backward():
    state = compiled("update square -> sgd(lr = 0.1, momentum = 0.9)", "freeze all")
    assert [each.parameter for each in state.sharded.graph.accumulators if each.parameter] == ["m.square"]
    assert [record.name for record in state.program.parameters if record.states] == ["m.square"]
    assert [each.name for each in state.update.parameters] == ["m.square"]
    # `square` is read by a `dot` behind the layers: nothing before it is differentiated.
    backward = {node.scope for node in state.step.nodes if node.phase in ("B", "W")}
    assert backward == {"m"}
    assert len(compiled("update all -> sgd(lr = 0.1)").step.nodes) > 1.5 * len(state.step.nodes)


def test_matrices_are_as_the_product_reads_them():
    """Summed axes by others; an axis that the other operand has too makes a stack."""
    state = compiled("update matrices -> muon(lr = 0.1)", "update all -> sgd(lr = 0.1)")
    found = {name: (op.inner, op.stacked) for name, op in state.updates.items() if op.name == "muon"}
    assert found == {
        "m.wte": (("embed",), ()),
        "m.wq": (("embed",), ()),
        "m.square": (("wide",), ()),
        "m.expert": (("embed",), ("experts",)),
        **{f"m.layer.{i}.{mlp}.up": (("embed",), ()) for i in (0, 1) for mlp in ("mlp", "mlp_2")},
    }


def test_what_an_optimizer_cannot_update_is_left_to_the_next_rule():
    """A class and a block may have such parameters: vectors for each head, and kernels of depthwise convolutions."""
    rules = ["update layer -> muon(lr = 0.1)", "update matrices -> muon(lr = 0.2)", "update all -> sgd(lr = 0.1)"]
    state = compiled(*rules)
    found = rules_of(*rules)
    assert named(found, "update layer -> muon") == {"layer.mlp.up", "layer.mlp_2.up"}
    assert named(found, "update matrices -> muon") == {"wte", "wq", "square", "expert"}
    assert named(found, "update all -> sgd") == {"wpe", "bias", "inner", "layer.mlp.gain", "layer.mlp_2.gain"}
    assert state.unfit.keys() == {f"m.layer.{i}.{mlp}.gain" for i in (0, 1) for mlp in ("mlp", "mlp_2")}
    (unfit,) = state.unfit["m.layer.0.mlp.gain"]
    assert (str(unfit.rule), unfit.why) == (
        rules[0].partition("(")[0],
        "it updates matrices, and no `dot` or `conv` reads this as one",
    )
    assert state.unfit.keys().isdisjoint(name for name, rule in state.rules.items() if "muon" in str(rule))


DEPTHWISE = """
axis batch = 4, seq = 8, embed = 8, kw = 4, out = 4
model m(x: [batch, seq, embed]) {
  repeat 2 as layer {
    param k: [kw, embed] ~ normal(0.3)
    let x = conv(x, k, seq -> seq, groups = embed, padding = [[3, 0]])
  }
  param w: [embed, out] ~ normal(0.3)
  let y = dot(x, w, over = embed)
  loss mean(y * y)
}
optimizer o { update matrices -> muon(lr = 0.02)  update all -> adamw(lr = 1e-3) }
train { data = random()  optimizer = o  steps = 2 }
"""


def test_compile_and_explain_say_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "m.par"
    file.write_text(DEPTHWISE)
    why = "it updates matrices, and what reads this takes it for a stack of vectors"
    assert main(["compile", str(file)]) == 0
    assert f"`update matrices -> muon` leaves m.layer.k to a later rule: {why}" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["explain", str(file), "k"]) == 0
    shown = capsys.readouterr().out
    assert "optimizer: update all -> adamw" in shown
    assert f"not `update matrices -> muon`: {why}" in shown
    left = compile_spec(checked(DEPTHWISE.replace("update matrices", "freeze w update matrices"), "m.par"))
    assert [each.message for each in left.warnings] == [
        "`matrices` in `update matrices -> muon` applies to no parameter"
    ]
    assert f"m.layer.0.k is left to `update all -> adamw` (m.par:12:67): {why}" in left.warnings[0].notes
    assert left.warnings[0].help == "move it before that rule, or remove it"  # of `freeze w`


WRONG = [
    (["update wte -> sgd(lr = 0.1)"], "E0414", "no rule of optimizer `o` applies to parameter `m.wpe`", (16, 9)),
    (["freeze wte, layer", "freeze all"], "E0415", "trains nothing", (33, 1)),
    (["update bias -> muon(lr = 0.1)", "freeze all"], "E0416", "no `dot` or `conv` reads this as one", (34, 10)),
    (["update inner -> muon(lr = 0.1)", "freeze all"], "E0416", "sums over all of its axes", (34, 10)),
    (["update m.layer.mlp.gain -> muon(lr = 0.1)", "freeze all"], "E0416", "`m.layer.0.mlp.gain`", (34, 10)),
    (["update layer -> muon(lr = 0.1)", "freeze wte"], "E0416", "`muon` cannot update `m.layer.0.mlp.gain`", (34, 10)),
    (["freeze wte", "update q -> sgd(lr = 0.1)"], "E0409", "`q` is not a parameter", (35, 10)),
    (["freeze wte, nothing", "update all -> sgd(lr = 0.1)"], "E0409", "`nothing` is not a parameter", (34, 15)),
    (["freeze layer.wte", "update all -> sgd(lr = 0.1)"], "E0409", "`layer.wte` is not a parameter", (34, 10)),
]


@pytest.mark.parametrize(("rules", "code", "text", "place"), WRONG)
def test_rules_that_do_not_fit_are_refused(rules: list[str], code: str, text: str, place: tuple[int, int]):
    with pytest.raises(Refused) as refused:
        compiled(*rules)
    first = refused.value.diagnostics[0]
    assert (first.code, first.span and (first.span.line, first.span.column)) == (code, place), first.render()
    assert text in first.message
    assert first.help


def test_an_optimizer_that_only_freezes_is_refused_even_if_there_are_no_parameters():
    text = "axis batch = 2\nmodel m(x: [batch]) { loss mean(x) }\noptimizer o { freeze all }\n"
    given = checked(text + "train { data = random() optimizer = o steps = 1 }", "m.par")
    with pytest.raises(Refused) as refused:
        compile_spec(given)
    assert [each.code for each in refused.value.diagnostics] == ["E0415"]


def test_a_parameter_without_a_rule_is_named_once_for_each_declaration():
    with pytest.raises(Refused) as refused:
        compiled("update wte, wpe, wq, square, bias, expert, inner -> sgd(lr = 0.1)")
    assert [each.message.split("`")[-2] for each in refused.value.diagnostics] == [
        "m.layer.0.mlp.up",
        "m.layer.0.mlp.gain",
    ]


def test_a_rule_without_parameters_gives_a_warning():
    state = compiled("freeze matrices", "update embeddings, vectors -> sgd(lr = 0.1)", "update all -> sgd(lr = 0.1)")
    first, second = state.warnings
    assert (first.code, first.message) == (
        "W0301",
        "`embeddings` in `update embeddings, vectors -> sgd` applies to no parameter",
    )
    assert "m.wte is matched by `freeze matrices`" in first.notes[0]
    assert second.message == "`all` in `update all -> sgd` applies to no parameter"


def test_rules_are_assigned_on_the_model_alone():
    """They do not depend on the layout or the precision."""
    given = checked(MODEL.replace("RULES", "  freeze wte\n  update all -> adafactor(lr = 0.1)"), "m.par")
    model, train = given.trained
    found = [assign(build(model, precision), train.optimizer).rules for precision in ("f32", "bf16")]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("type", "loss"), [("[embed]", "mean(x * w)"), ("[embed, out]", "mean(dot(x, w, over = [embed, out]))")]
)
def test_an_optimizer_without_rules_is_told_to_have_some(type: str, loss: str):
    text = f"""
axis batch = 4, embed = 3, out = 2
model m(x: [batch, embed, out]) {{
  param w: {type} ~ ones()
  loss {loss}
}}
train {{ data = random()  optimizer = muon(lr = 0.1)  steps = 1 }}
"""
    with pytest.raises(Refused) as refused:
        compile_spec(checked(text, "m.par"))
    (found,) = refused.value.diagnostics
    assert found.code == "E0416"
    rules = "optimizer mixed { update matrices -> muon(…)  update all -> adamw(…) }"
    assert found.help == f"an optimizer with rules, and its name here: `{rules}`"
    advised = text.replace("muon(lr = 0.1)", "mixed") + rules.replace("…", "lr = 0.1")
    assert {op.name for op in compile_spec(checked(advised, "m.par")).updates.values()} == {"adamw"}


@pytest.mark.parametrize(
    ("rules", "help", "advised"),
    [
        (
            ["update bias -> muon(…)", "update all -> sgd(…)"],
            "another optimizer for it: `update bias -> adamw(…)`",
            ["update bias -> adamw(…)", "update all -> sgd(…)"],
        ),
        (
            ["freeze wte, wpe, wq, square, bias, expert, inner", "update layer -> muon(…)"],
            "a rule behind this one, for what it leaves: `update all -> adamw(…)`",
            ["freeze wte, wpe, wq, square, bias, expert, inner", "update layer -> muon(…)", "update all -> adamw(…)"],
        ),
        (
            ["update wte -> sgd(…)", "update all -> muon(…)"],
            "`update matrices -> muon(…)`, and a rule behind it, for what it leaves: `update all -> adamw(…)`",
            ["update wte -> sgd(…)", "update matrices -> muon(…)", "update all -> adamw(…)"],
        ),
    ],
)
def test_what_a_refusal_advises_works(rules: list[str], help: str, advised: list[str]):
    with pytest.raises(Refused) as refused:
        compiled(*(rule.replace("…", "lr = 0.1") for rule in rules))
    (found,) = refused.value.diagnostics
    assert (found.code, found.help) == ("E0416", help)
    compiled(*(rule.replace("…", "lr = 0.1") for rule in advised))


def test_a_kernel_of_single_channels_is_no_matrix():
    with pytest.raises(Refused, match="what reads this takes it for a stack of vectors"):
        compile_spec(checked(DEPTHWISE.replace("optimizer = o", "optimizer = muon(lr = 0.1)"), "depthwise.par"))
