"""`check` says what it can know of sizes, without compiling, in the compiler's words: never more, and hardly less."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from partita.compiler.pipeline import compile_spec
from partita.dsl import load as loading
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.load import load_text
from tests.marks import examples
from tests.programs import Program, sharded_programs

FILE = """\
axis batch = 16, width = 12, hidden = 24
block layer_of(y: [batch, width]) {
  param up: [width, hidden] ~ kaiming()
  param down: [hidden, width] ~ kaiming()
  return dot(relu(dot(y, up, over = width)), down, over = hidden)
}
model net(x: [batch, width], wanted: [batch, width]) {
  let y = x
  repeat 4 as layer {
    let y = layer_of(y)
  }
  loss mse(y, wanted)
}
mesh cluster(data = 2, tensor = 2, pipe = 2)
layout split on cluster {
  shard batch -> data
  shard hidden -> tensor
  stage layer -> pipe
}
layout zero on cluster {
  shard batch -> data, tensor
  shard param -> data
  stage layer -> pipe
}
layout half on cluster {
  shard batch -> data
}
schedule slow = gpipe(microbatches = 4)
schedule fast = interleaved_1f1b(microbatches = 2, chunks = 2)
train {
  layout = split
  schedule = slow
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 1
}
"""


def errors(text: str, overrides: Iterable[str] = ()) -> list[Diagnostic]:
    return [each for each in load_text(text, "net.par", overrides=list(overrides))[1] if each.severity == "error"]


CASES = [
    ("", "", []),
    ("batch=12", "", ["E0411"]),  # microbatches of 3 do not divide over `data` of 2
    ("batch=6", "", ["E0406"]),
    ("hidden=7", "", ["E0411"]),
    ("slow.microbatches=3", "", ["E0406"]),
    ("schedule.microbatches=32", "", ["E0406"]),
    ("schedule=fast", "", []),
    ("schedule=fast fast.microbatches=3", "", ["E0406"]),
    ("slow.microbatches=3 schedule=fast", "", []),  # of the schedules, the one in use
    ("cluster.data=3", "", ["E0411"]),
    ("cluster.tensor=5", "", ["E0411"]),
    ("cluster.tensor=5 cluster.data=3", "", ["E0411", "E0411"]),
    ("layout=zero", "", []),
    ("layout=zero cluster.tensor=3", "", ["E0411"]),
    ("layout=half", "", ["E0402"]),
    ("layout=half cluster.tensor=1 cluster.pipe=1", "", []),
    ("layout=half cluster.tensor=1", "", ["E0402"]),
    ("hidden=7 layout=zero", "", []),  # of the layouts, the one in use
    ("", "shard hidden -> pipe", ["E0412"]),
    ("cluster.tensor=5", "shard net.layer.layer_of.up: hidden -> data", ["E0411"]),
    # What names a tensor replaces the rules for all.
    (
        "cluster.tensor=5",
        "shard net.layer.layer_of.up: hidden -> data\n  shard net.layer.layer_of.down: hidden -> data",
        [],
    ),
    ("cluster.data=5 batch=20", "shard hidden -> data", []),  # of two rules for an axis, the first
    ("cluster.pipe=8", "", ["E0403"]),
    ("schedule=fast cluster.pipe=4", "", ["E0403"]),
    ("schedule=fast layout=half cluster.tensor=1 cluster.pipe=1", "", ["E0404"]),
    ("", "place y -> pipe[2]", ["E0404"]),
    ("schedule=fast", "place y -> pipe[3]", []),
    ("", "place y -> tensor[1]", ["E0412", "E0404"]),
    ("", "stage layer -> pipe", ["E0404"]),
    ("", "shard batch -> data by zigzag", ["E0419"]),
    ("train.graphs=true", "offload state", ["E0422"]),
    ("train.sync=paired()", "offload state", []),
    ("train.sync=paired()", "offload param by mmap", ["E0401"]),
    ("train.sync=paired()", "offload layer", []),
    ("train.eval=every(2)", "", []),  # random data never end
]


@pytest.mark.parametrize(("overrides", "rule", "codes"), CASES)
def test_what_is_checked(overrides: str, rule: str, codes: list[str]) -> None:
    text = FILE.replace("  stage layer", f"  {rule}\n  stage layer", 1)
    found = errors(text, overrides.split())
    assert [each.code for each in found] == codes, [each.render() for each in found]
    for each in found:
        assert each.span is not None
        assert each.help is not None


STAGES = """\
axis batch = 4, width = 2
block f(x: [batch, width]) {
  repeat 2 as inner { param w: [width] ~ ones() let x = x * w }
  return x
}
model net(x: [batch, width]) {
  let y = x
  repeat 3 as outer { let y = f(f(y)) }
  let y = f(y)
  loss mean(y)
}
mesh cluster(pipe = RANKS)
layout split on cluster { stage NAMES -> pipe COUNTS }
schedule fast = gpipe(microbatches = 2)
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("names", "layers"), [("outer", 3), ("inner", 14), ("outer, inner", 5)])
def test_iterations_are_counted_as_the_compiler_does(names: str, layers: int) -> None:
    """Of repeats in blocks that are called in repeats; and of several, of which one is in the other."""
    for ranks, counts, fits in (
        (layers, "", True),
        (layers + 1, "", False),
        (2, f"[1, {layers - 1}]", True),
        (2, f"[1, {layers}]", False),
        (2, f"[{layers}]", False),
    ):
        text = STAGES.replace("NAMES", names).replace("COUNTS", counts).replace("RANKS", str(ranks))
        found = errors(text)
        assert bool(found) != fits, [each.render() for each in found]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading, "report_misfits", lambda *_: None)
            spec, _ = load_text(text, "net.par")
        assert spec is not None
        refused: list[Diagnostic] = []
        try:
            compile_spec(spec)
        except Refused as error:
            refused += error.diagnostics
        assert [each.render() for each in refused] == [each.render() for each in found]


def test_slices_exclude_what_needs_all_positions() -> None:
    slices = "one_f_one_b(microbatches = 4, over = [batch, width], slices = 2)"
    text = FILE.replace("gpipe(microbatches = 4)", slices)
    (found,) = errors(text.replace("shard hidden -> tensor", "shard width -> tensor by zigzag"))
    assert (found.code, found.help) == ("E0419", "`shard width -> tensor`, or no slices")


def test_microbatches_that_do_not_divide_are_pointed_at_the_schedule() -> None:
    (found,) = errors(FILE.replace("gpipe(microbatches = 4)", "gpipe(microbatches = 3)"))
    assert found.code == "E0406"
    assert found.span is not None
    assert found.span.text == "gpipe(microbatches = 3)"
    assert found.notes == ("x: f32[batch=16, width=12]   (declared at net.par:7:7)",)
    assert found.help == "choose a number of microbatches that divides 16"


def test_an_override_of_microbatches_is_pointed_at_the_schedule_as_well() -> None:
    (found,) = errors(FILE, ["slow.microbatches=3"])
    assert found.span is not None
    assert found.span.text == "gpipe(microbatches = 4)"
    (found,) = errors(FILE, ["schedule=gpipe(3)"])
    assert found.span is not None
    assert (found.span.source.name, found.span.text) == ("command line", "gpipe(3)")


def test_slices_that_do_not_divide_are_called_slices() -> None:
    slices = "one_f_one_b(microbatches = 4, over = [batch, width], slices = 5)"
    (found,) = errors(FILE.replace("gpipe(microbatches = 4)", slices))
    assert (found.code, found.message) == ("E0406", "axis `width` of 12 does not divide into 5 slices")


def test_a_part_that_does_not_divide_is_told_from_the_axis() -> None:
    """Neither 2 nor 4 parts are in the file as the size of an axis."""
    (found,) = errors(FILE, ["batch=12"])
    assert found.message == "axis `batch` of 12, of which a microbatch has 3, does not divide over `data` of 2"
    assert found.help is not None
    assert "divides into 2 parts: a multiple of 8 for `batch`; or let it be padded" in found.help
    slices = "one_f_one_b(microbatches = 4, over = [batch, width], slices = 4)"
    text = FILE.replace("gpipe(microbatches = 4)", slices).replace("shard hidden -> tensor", "shard width -> tensor")
    (found,) = errors(text, ["cluster.tensor=2"])
    assert found.message == "axis `width` of 12, of which a slice has 3, does not divide over `tensor` of 2"


def test_a_parameter_that_all_positions_of_a_scan_share_is_checked() -> None:
    text = FILE.replace("axis batch", "axis seq = 3, batch").replace("x: [batch, width]", "x: [batch, seq, width]")
    text = text.replace(
        "  let y = x\n", "  let y = zeros([batch, width])\n  scan seq {\n    let y = layer_of(y + x)\n  }\n"
    )
    head, rest = text.split("  repeat 4", 1)
    text = f"{head}{rest.split('  }', 1)[1]}".replace("  stage layer -> pipe\n", "").replace("pipe = 2", "pipe = 1")
    assert [each.code for each in errors(text, ["hidden=7"])] == ["E0411"]
    assert not errors(text)


def test_a_size_that_does_not_divide_names_the_tensor_in_full() -> None:
    (found,) = errors(FILE, ["hidden=7"])
    assert found.notes == ("net.layer.layer_of.up: f32[width=12, hidden=7]   (declared at net.par:3:9)",)
    assert found.span is not None
    assert (found.span.line, found.span.text) == (17, "hidden")


def test_a_parameter_that_is_placed_where_it_is_not_read_names_the_lines_that_read_it() -> None:
    text = FILE.replace("  let y = x\n", "  param w: [width] ~ ones()\n  let y = x * w\n")
    text = text.replace("  loss mse(y, wanted)", "  loss mse(y * w, wanted)")
    text = text.replace("  stage layer", "  place w -> pipe[0]\n  stage layer", 1)
    with pytest.raises(Refused) as refused:
        compile_spec(load_text(text, "net.par")[0])
    (found,) = refused.value.diagnostics
    assert found.code == "E0404"
    assert "`net.w` is placed on 0, but stage 1 reads it" in found.message
    assert found.notes == ("stage 1: `y * w`   (net.par:13:12)",)


# ---------------------------------------------------------------- random programs


@st.composite
def changes(draw: st.DrawFn, program: Program) -> list[str]:
    """Up to two overrides of sizes: of axes, the mesh and the number of microbatches."""
    head, rest = program.text.split("\n", 1)
    axes = re.findall(r"(\w+) = \d+", head)
    mesh = re.findall(r"(\w+) = \d+", next(line for line in rest.splitlines() if line.startswith("mesh ")))
    keys = [*axes, *(f"cluster.{name}" for name in mesh if name != "pipe"), "schedule.microbatches"]
    chosen = draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2, unique=True))
    return [f"{key}={draw(st.integers(1, 12))}" for key in chosen]


OF_SIZES = {"E0402", "E0406", "E0411", "E0412"}


@given(st.data())
@examples(8, suppress_health_check=list(HealthCheck))
def test_check_and_compile_agree(data: st.DataObject) -> None:
    """What check reports, compile refuses; what compile refuses of an input or a parameter, check reports."""
    program = data.draw(sharded_programs())
    overrides = data.draw(changes(program))
    reported = errors(program.text, overrides)
    if {each.code for each in reported} - OF_SIZES:
        return  # other sizes do not go together: there is nothing to compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "report_misfits", lambda *_: None)
        spec, _ = load_text(program.text, "net.par", overrides=overrides)
    assert spec is not None
    refused: tuple[Diagnostic, ...] = ()
    try:
        compile_spec(spec)
    except Refused as error:
        refused = error.diagnostics
    if reported:
        assert refused, [each.render() for each in reported]
        assert {each.code for each in refused} <= {each.code for each in reported}
    for each in refused:
        tensor = each.notes[0].split(":")[0] if each.code in OF_SIZES and each.notes else ""
        declared = tensor.rpartition(".")[2] in ("tokens", "targets", "wte", "up", "down", "wq", "wk", "wv", "wo")
        assert not declared or reported, each.render()
