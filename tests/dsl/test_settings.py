"""Settings come out complete and in plain units; layouts and claims as they are written."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.dsl import spec
from partita.dsl.config.builtins import DATA, DEVICES, INITIAL, LEARNING_RATES, LINKS, OPTIMIZERS, SCHEDULES
from partita.dsl.load import load_text
from partita.dsl.syntax.source import Source, Span
from partita.dsl.syntax.units import UNITS, Quantity, read

TEXT = """\
axis batch = 8, seq = 8, embed = 6
block f(x: [batch, embed]) {
  param w: [embed] ~ ones()
  return x * w
}
model m(x: [batch, embed]) {
  repeat 4 as layer {
    let x = f(x)
  }
  loss mean(x)
}
mesh k(data = 2, tensor = 1, pipe = 2 * 2) {
  device = device(flops = 989TFLOP/s, memory = 80GiB, bandwidth = 3.35TB/s)
  link = [data -> ib400, pipe -> link(bandwidth = 50GB/s, latency = 5us, leaf = 32, oversubscribed = 1.5)]
}
layout l on k {
  shard m.layer.f.w: embed, batch, state -> data, tensor
  stage layer -> pipe [1, 2, 1, 0 + 0 + 1]
  place x, f.w -> pipe[1..2]
  place x -> pipe[0]
  recompute f, all
}
schedule s = interleaved_1f1b(4, chunks = 2)
train {
  data = text("corpus/*.txt", holdout = 10%)
  optimizer = sgd(3e-4, momentum = 0.9)
  steps = 1_000
  precision = bf16
  eval = every(50)
  checkpoint = every(10, dir = "runs/a b", keep = 2, copies = 5)
}
expect {
  peak_memory <= 72GiB
  bubble < 8%
  collectives(pipe) <= 8
  mfu >= 40%
}
"""


def loaded(text=TEXT, *overrides):
    """Whether the stages can be cut so is not asked."""
    found, diagnostics = load_text(text, overrides=overrides, fitting=False)
    assert found is not None, "\n".join(d.render() for d in diagnostics)
    return found


def test_everything_is_complete_and_plain():
    found = loaded()
    mesh = found.mesh
    assert mesh.axes == (("data", 2), ("tensor", 1), ("pipe", 4))
    assert mesh.device == spec.Call("device", {"flops": 989e12, "memory": 80 * 2**30, "bandwidth": 3.35e12})
    assert mesh.links == {
        "data": spec.Call("ib400", {"leaf": None, "oversubscribed": None}),
        "pipe": spec.Call("link", {"bandwidth": 50e9, "latency": 5e-6, "leaf": 32, "oversubscribed": 1.5}),
    }
    assert found.schedule.name == "s"
    arguments = {"microbatches": 4, "chunks": 2, "group": None, "over": "batch", "slices": None}
    assert found.schedule.call == spec.Call("interleaved_1f1b", arguments)
    train = found.train
    data = {"glob": "corpus/*.txt", "alphabet": "bytes", "holdout": 0.1, "tokenizer": None, "end": None}
    assert train.data == spec.Call("text", data)
    assert train.optimizer.calls[0].arguments["lr"] == spec.Call("constant", {"value": 3e-4})
    assert train.optimizer.calls[0].arguments["decay"] == "dot"
    assert (train.steps, train.precision, train.clip, train.seed) == (1000, "bf16", None, 0)
    evaluated = {"interval": 50, "batches": 10, "weights": "trained", "data": None, "sample": None}
    assert train.eval == spec.Call("every", evaluated)
    assert train.checkpoint == spec.Call("every", {"interval": 10, "dir": "runs/a b", "keep": 2, "copies": 5})
    assert train.spans["steps"].line == 27
    claims = [(c.measure, c.argument, c.comparison, c.limit) for c in found.expect]
    assert claims == [
        ("peak_memory", (), "<=", 72 * 2**30),
        ("bubble", (), "<", 0.08),
        ("collectives", ("pipe",), "<=", 8),
        ("mfu", (), ">=", 0.4),
    ]


def test_rules_are_as_written():
    shard, stage, place, one, recompute = loaded().layout.rules
    assert [(t.path, t.name, t.is_class) for t in shard.targets] == [
        (("m", "layer", "f", "w"), "embed", False),
        (None, "batch", False),
        (None, "state", True),
    ]
    assert shard.mesh_axes == ("data", "tensor")
    assert (stage.repeats, stage.mesh_axis, stage.counts) == (("layer",), "pipe", (1, 2, 1, 1))
    assert (place.paths, place.first, place.last) == ((("x",), ("f", "w")), 1, 2)
    assert (one.first, one.last) == (0, 0)
    assert recompute.paths == (("f",), ("all",))


def test_what_is_left_open_is_none():
    found = loaded("axis a = 1\n")
    assert (found.model, found.layout, found.schedule, found.train, found.mesh) == (None,) * 5


def test_the_only_ones_are_chosen_and_a_schedule_may_be_called_in_place():
    assert loaded().layout.name == "l"
    text = TEXT.replace("train {", "train {\n  schedule = gpipe(microbatches = 2)")
    assert loaded(text).schedule.call.name == "gpipe"


@pytest.mark.few(7)
@pytest.mark.parametrize("unit", sorted(UNITS))
@given(whole=st.integers(0, 10**6), thousandths=st.integers(0, 999), exponent=st.integers(-5, 5))
def test_numbers_are_read_exactly(unit, whole, thousandths, exponent):
    dimension, factor = UNITS[unit]
    text = f"{whole}.{thousandths:03}e{exponent}{unit}"
    quantity = read(text, Span(Source("text", text), 0, len(text)))
    exact = Fraction(whole * 1000 + thousandths, 1000) * Fraction(10) ** exponent * factor
    assert quantity == Quantity(exact, dimension)


@pytest.mark.parametrize(
    ("text", "plain"),
    [("80GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("8%", Fraction(8, 100)), ("5us", Fraction(5, 10**6)), ("2min", 120)],
)
def test_units_are_what_they_say(text, plain):
    assert read(text, Span(Source("text", text), 0, len(text))).value == plain


@pytest.mark.parametrize(
    ("written", "name", "at_most", "spike"),
    [
        ("", "stop", None, None),
        ("on_bad_step = stop", "stop", None, None),
        ("on_bad_step = stop(spike = 4)", "stop", None, 4),
        ("on_bad_step = skip", "skip", 10, None),
        ("on_bad_step = skip(at_most = 2, spike = 1.5)", "skip", 2, 1.5),
        ("on_bad_step = rewind checkpoint = every(5)", "rewind", 3, None),
    ],
)
def test_bad_steps_end_a_run_unless_the_file_says_otherwise(written, name, at_most, spike):
    head = "axis batch = 4 model m(x: [batch]) { param w: [batch] ~ ones() loss mean(x * w) }"
    text = f"{head} train {{ data = random() optimizer = sgd(lr = 0.1) steps = 3 {written} }}"
    train = loaded(text).train
    found = train.on_bad_step
    assert (found.name, found.arguments.get("at_most"), found.arguments["spike"]) == (name, at_most, spike)
    assert found.arguments["window"] == 100
    assert (
        spec.Train(train.data, train.optimizer, 3).on_bad_step
        == loaded(text, "train.on_bad_step=stop").train.on_bad_step
    )


@pytest.mark.parametrize(
    ("written", "name", "calm"),
    [
        ("", "before", None),
        ("validate = before", "before", None),
        ("validate = after", "after", 10),
        ("validate = after(calm = 0)", "after", 0),
    ],
)
def test_updates_wait_unless_the_file_says_otherwise(written, name, calm):
    head = "axis batch = 4 model m(x: [batch]) { param w: [batch] ~ ones() loss mean(x * w) }"
    train = loaded(f"{head} train {{ data = random() optimizer = sgd(lr = 0.1) steps = 3 {written} }}").train
    assert (train.validate.name, train.validate.arguments.get("calm")) == (name, calm)
    assert train.late == (name == "after")


TABLES = (SCHEDULES, OPTIMIZERS, LEARNING_RATES, DATA, INITIAL, DEVICES, LINKS)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: next(iter(table)))
def test_tables_are_keyed_by_name_and_required_arguments_come_first(table):
    for name, signature in table.items():
        assert signature.name == name
        names = signature.names
        assert len(set(names)) == len(names)
        if "peak" not in names:
            assert set(names[: len(signature.required)]) == signature.required


def test_the_names_of_devices_and_links_are_the_cost_models():
    from partita.compiler.costs import devices, links

    assert set(DEVICES) == {*devices.DEVICES, "device", "profile"}
    assert set(LINKS) == {*links.LINKS, "link", "profile"}
