"""A parameter that only `stop_gradient` leads to is refused unless it is frozen, and the help says how to do that."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from partita.cli.main import main
from partita.compiler.pipeline import compile_spec
from partita.compiler.verify.equivalence import validate
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.runtime.trained import train
from tests.files import checked
from tests.marks import soak

FILE = """\
axis batch = 8, embed = 6
model m(x: [batch, embed]) {
  param w: [embed] ~ normal(1.0)
  param v: [embed] ~ normal(1.0)
  let y = USE
  loss mean(y * v)
}
train {
  data = random()
  optimizer = adamw(lr = 0.1)
  steps = 3
  checkpoint = every(1, dir = "kept", keep = 3)
}
"""
MEASURE = "accuracy(expand(w, batch), iota(batch), over = embed)"
USES = {
    "x * stop_gradient(w)": "`stop_gradient(w)`   (m.par:5:15)",
    "stop_gradient(x * w)": "`stop_gradient(x * w)`   (m.par:5:11)",
    f"x * {MEASURE}": f"`{MEASURE}`   (m.par:5:15)",
}


@pytest.mark.parametrize("use", USES)
def test_the_refusal_names_what_has_no_gradient(use: str) -> None:
    spec, (diagnostic,) = load_text(FILE.replace("USE", use), "m.par")
    assert spec is None
    assert diagnostic.code == "E0408"
    assert "reaches the loss only through operations without a gradient" in diagnostic.message
    assert USES[use] in diagnostic.notes


def test_several_places_are_named_in_their_order() -> None:
    text = FILE.replace("USE", "stop_gradient(x * w) + stop_gradient(x - w)")
    _, (diagnostic,) = load_text(text, "m.par")
    places = [note for note in diagnostic.notes if "m.par:" in note]
    assert places == ["`stop_gradient(x * w)`   (m.par:5:11)", "`stop_gradient(x - w)`   (m.par:5:34)"]


def test_a_parameter_that_nothing_reads_is_told_otherwise() -> None:
    _, diagnostics = load_text(FILE.replace("USE", "x"), "m.par")
    found = next(each for each in diagnostics if each.code == "E0408")
    assert found.message == "parameter `w` does not reach the loss"
    assert found.help == "use it, or remove it"


@pytest.mark.parametrize("extra", ["", "clip = 0.5", "precision = bf16"])
def test_the_advice_freezes_it(extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = FILE.replace("USE", "x * stop_gradient(w)").replace("steps = 3", f"steps = 3 {extra}")
    _, (diagnostic,) = load_text(text, "m.par")
    advised = re.search(r"write `([^`]+)`", diagnostic.help or "")
    assert advised is not None
    rules = f"optimizer rules {{ {advised[1]} update all -> adamw(lr = 0.1) }}\n"
    text = text.replace("x * stop_gradient(w)", "x * w").replace("adamw(lr = 0.1)", "rules")
    (tmp_path / "m.par").write_text(rules + text)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "m.par", "--transport", "virtual"]) == 0
    first, last = (load_file(tmp_path / "kept" / f"step-{step:08}" / "rank-0.safetensors") for step in (1, 3))
    assert first["m.w"].abs().max() > 0
    assert (first["m.w"] == last["m.w"]).all()
    assert (first["m.v"] != last["m.v"]).all()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("target", ["w", "m.w", "vectors"])
def test_what_is_frozen_may_be_used_without_a_gradient(use: str, target: str) -> None:
    train = "update v -> sgd(lr = 0.1) freeze" if target == "vectors" else "freeze"
    rules = f"optimizer rules {{ {train} {target} update all -> adamw(lr = 0.1) }}\n"
    text = rules + FILE.replace("USE", use).replace("optimizer = adamw(lr = 0.1)", "optimizer = rules")
    spec, diagnostics = load_text(text, "m.par")
    assert spec is not None, diagnostics
    state = compile_spec(spec)
    assert {each.name for each in state.update.parameters} == {"m.v"}
    assert validate(state).passed


def test_adapters_may_freeze_what_is_used_without_a_gradient() -> None:
    text = FILE.replace("USE", "stop_gradient(x * w)").replace("v: [embed]", "v: [embed, outputs]")
    text = text.replace("y * v", "dot(y, v, over = embed)").replace("steps = 3", "steps = 3 adapters = few")
    rules = "axis outputs = 3 adapters few { lora v -> lora(rank = 2) freeze all }\n"
    spec, diagnostics = load_text(rules + text, "m.par")
    assert spec is not None, diagnostics
    assert {each.name for each in compile_spec(spec).update.parameters} == {"m.v.lora_a", "m.v.lora_b"}


def test_a_freeze_of_another_parameter_is_none_of_this_one() -> None:
    text = FILE.replace("USE", "x * stop_gradient(w)").replace("optimizer = adamw(lr = 0.1)", "optimizer = rules")
    spec, (diagnostic,) = load_text("optimizer rules { freeze v update all -> adamw(lr = 0.1) }\n" + text, "m.par")
    assert spec is None
    assert diagnostic.code == "E0408"
    # Only the compiler knows that an earlier rule trains it.
    rules = "optimizer rules { update w -> sgd(lr = 0.1) freeze vectors }\n"
    spec, diagnostics = load_text(rules + text, "m.par")
    assert spec is not None, diagnostics
    with pytest.raises(Refused) as refused:
        compile_spec(spec)
    assert [(each.code, each.message) for each in refused.value.diagnostics] == [
        ("E0408", "parameter `m.w` does not reach the loss with a gradient")
    ]


def test_what_is_frozen_and_used_by_nothing_is_refused() -> None:
    rules = "optimizer rules { freeze w update all -> adamw(lr = 0.1) }\n"
    text = FILE.replace("USE", "x").replace("optimizer = adamw(lr = 0.1)", "optimizer = rules")
    _, diagnostics = load_text(rules + text, "m.par")
    assert [each.code for each in diagnostics] == ["E0408"]


UNREAD = """\
axis batch = 4, embed = 4
model m(x: [batch, embed], y: [batch, embed]) {
  let h = x
  let g = x
  repeat 2 as layer {
    param v, u: [embed] ~ normal(0.5)
    let h = h * g * u
    let g = g * v
  }
  loss mse(h, y)
}
optimizer rules { freeze v update all -> sgd(lr = 0.1) }
mesh two(pipe = 2)
layout stages on two { stage layer -> pipe }
schedule s = gpipe(microbatches = 2)
train {
  layout = stages
  schedule = s
  data = random()
  optimizer = rules
  steps = 2
  checkpoint = every(2, dir = "kept")
}
"""


def test_what_is_frozen_and_read_in_earlier_iterations_alone_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.par").write_text(UNREAD)
    monkeypatch.chdir(tmp_path)
    spec, _ = load_text(UNREAD, "m.par")
    assert spec is not None
    state = compile_spec(spec)
    assert validate(state).passed
    stages = {each.name: each.stages for each in state.program.parameters}
    assert stages == {"m.layer.0.v": (0,), "m.layer.0.u": (0,), "m.layer.1.v": (0,), "m.layer.1.u": (1,)}
    assert main(["run", "m.par", "--transport", "virtual"]) == 0
    kept = [load_file(tmp_path / "kept" / "step-00000002" / f"rank-{rank}.safetensors") for rank in range(2)]
    assert [sorted(each) for each in kept] == [["m.layer.0.u", "m.layer.0.v", "m.layer.1.v"], ["m.layer.1.u"]]


FOLLOWED = """\
optimizer rules { freeze w update all -> sgd(lr = 0.1) }
axis batch = 8, embed = 6
model m(x: [batch, embed]) {
  param w: [embed] ~ normal(1.0)
  param v: [embed] ~ normal(1.0)
  buffer followed: [embed] ~ zeros()
  update followed = followed + w * w
  loss mean(x * w * v + followed)
}
mesh two(data = 2)
layout rows on two { shard batch -> data  RULE }
train { layout = rows data = random() optimizer = rules precision = bf16 steps = 2 eval = every(1, batches = 1) }
"""


@pytest.mark.parametrize("rule", ["", "shard param -> data"])
def test_an_update_of_a_buffer_reads_what_is_frozen_as_the_model_does(rule: str) -> None:
    state = compile_spec(checked(FOLLOWED.replace("RULE", rule), "m.par"))
    types = {each.name: each.type.dtype for each in state.program.parameters}
    assert types == {"m.w": "bf16", "m.v": "f32", "m.followed": "f32"}
    assert validate(state).passed
    trained = train(state.spec, Path()).parameters
    assert trained["m.followed"].abs().max() > 0
    assert torch.equal(trained["m.followed"], 2 * trained["m.w"].float().square())


READ = """\
optimizer rules { freeze head, more update all -> adamw(lr = 0.1) }
axis batch = 8, embed = 4, classes = 6
block probe(x: [batch, embed]) {
  param more: [embed, classes] ~ normal(1.0)
  return dot(x, more, over = embed)
}
model m(x: [batch, embed], y: [batch, embed]) {
  param head: [embed, classes] ~ normal(1.0)
  buffer seen: [classes] ~ zeros()
  let h = x
  let probed = probe(x)
  repeat 2 as layer {
    param w: [embed] ~ normal(1.0)
    let h = tanh(h * w)
  }
  READ
  loss mse(h, y)
}
mesh two(data = 2)
mesh four(pipe = 2, data = 2)
mesh one(data = 1)
layout whole on one { }
layout rows on two { shard batch -> data  shard param -> data }
layout classes on two { shard batch -> data  shard classes -> data  offload param }
layout stages on four { stage layer -> pipe  shard batch -> data  shard grad -> data }
schedule s = gpipe(microbatches = 2)
train {
  layout = whole
  schedule = s
  data = arrays("data.npz", holdout = 50%)
  optimizer = rules
  steps = 2
  precision = f64
  eval = every(1, batches = 1)
  checkpoint = every(2, dir = "kept")
}
"""
READERS = {
    "metric": "metric other = mean(dot(h, head, over = embed) * probed)",
    "output": "output logits = dot(h, head, over = embed) + probed",
    "update": """
  update seen = seen + mean(dot(stop_gradient(h), head, over = embed) + probed, over = batch)
  metric total = sum(seen)""",
    "evaluation": "metric other = mean(where(training(), 0.0, dot(h, head, over = embed) + probed))",
    "ids": """
  let best = arg_max(probed, over = classes)
  metric other = mean(cast(arg_max(head, over = classes), f32)) + mean(cast(best, f32))""",
}


@pytest.mark.parametrize("layout", ["whole", *soak("rows", "classes", "stages")])
@pytest.mark.parametrize("read", READERS)
def test_what_is_frozen_may_be_read_by_anything(
    read: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = READ.replace("READ", READERS[read])
    (tmp_path / "m.par").write_text(text)
    monkeypatch.chdir(tmp_path)
    arrays = np.random.default_rng(1)
    np.savez("data.npz", x=arrays.standard_normal((16, 4)), y=arrays.standard_normal((16, 4)))
    state = compile_spec(checked(text, "m.par", (f"layout={layout}",)))
    assert validate(state).passed
    assert {each.name for each in state.update.parameters} == {"m.layer.0.w", "m.layer.1.w"}
    alone = train(checked(text, "m.par", ("train.checkpoint=none",)), tmp_path).parameters
    found = train(checked(text, "m.par", (f"layout={layout}", "train.checkpoint=none")), tmp_path).parameters
    assert alone.keys() == found.keys()
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value)
    assert main(["run", "m.par", f"layout={layout}", "--transport", "virtual"]) == 0
    kept = [load_file(each) for each in sorted((tmp_path / "kept" / "step-00000002").glob("*.safetensors"))]
    assert {"m.head", "m.probe.more"} <= {name for each in kept for name in each}
    assert main(["verify", "m.par", f"layout={layout}"]) == 0
    if read == "output":
        assert main(["predict", "m.par", f"layout={layout}", "-o", "predicted.npz", "--transport", "virtual"]) == 0


def test_what_only_a_metric_reads_is_refused_with_a_way_out() -> None:
    text = READ.replace("READ", READERS["metric"]).replace("freeze head, more ", "")
    spec, diagnostics = load_text(text, "m.par")
    assert spec is None
    assert [each.code for each in diagnostics] == ["E0408", "E0408"]
    written = [re.search(r"write `([^`]+)`", each.help or "") for each in diagnostics]
    rules = " ".join(each[1] for each in written if each is not None)
    assert load_text(text.replace("{ update all", f"{{ {rules} update all"), "m.par")[0] is not None
