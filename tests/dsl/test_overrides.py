"""`key=value` on the command line."""

import re

import pytest

from partita.dsl.load import load_text
from tests.dsl.test_settings import TEXT, loaded

MORE = TEXT.replace(
    "schedule s",
    "layout other on k {\n  shard batch -> data\n  stage layer -> pipe\n}\n"
    "schedule t = looped_bfs(microbatches = 2, chunks = 3)\nschedule s",
)
MORE = MORE.replace("train {", "train {\n  layout = l\n  schedule = s")


def test_axes_and_what_depends_on_them():
    text = TEXT.replace("embed = 6", "embed = 6, ffn = 8 * embed / 3")
    found = loaded(text, "embed=12")
    assert (found.axes["embed"].size, found.axes["ffn"].size) == (12, 32)
    assert found.model.body.types[0].axis("embed").size == 12


@pytest.mark.few(14)
@pytest.mark.parametrize(
    ("overrides", "read", "expected"),
    [
        (["k.pipe=8"], lambda s: s.mesh.size("pipe"), 8),
        (["train.steps=10"], lambda s: s.train.steps, 10),
        (["train.seed = 7"], lambda s: s.train.seed, 7),
        (["train.clip=0.5"], lambda s: s.train.clip, 0.5),
        (["train.optimizer.lr=1e-3"], lambda s: s.train.optimizer.calls[0].arguments["lr"].arguments, {"value": 1e-3}),
        (["train.optimizer.momentum=0"], lambda s: s.train.optimizer.calls[0].arguments["momentum"], 0),
        (["train.optimizer.nesterov=true"], lambda s: s.train.optimizer.calls[0].arguments["nesterov"], True),
        (
            ["train.optimizer.lr=linear(1e-3, total=5)", "train.optimizer.lr.peak=2e-3"],
            lambda s: s.train.optimizer.calls[0].arguments["lr"].arguments,
            {"peak": 2e-3, "warmup": 0, "total": 5, "floor": 0.0},
        ),
        (["train.data=stdlib(holdout=5%)"], lambda s: s.train.data.arguments, {"holdout": 0.05}),
        (["train.data.holdout=5%"], lambda s: s.train.data.arguments["holdout"], 0.05),
        (["train.eval.batches=3"], lambda s: s.train.eval.arguments["batches"], 3),
        (["layout=other"], lambda s: s.layout.name, "other"),
        (["train.layout=other"], lambda s: s.layout.name, "other"),
        (["model=m"], lambda s: s.model.name, "m"),
        (["schedule=t"], lambda s: (s.schedule.name, s.schedule.call.arguments["chunks"]), ("t", 3)),
        (["schedule=gpipe"], lambda s: s.schedule.call.arguments, {"microbatches": 4, "over": "batch", "slices": None}),
        (["schedule=gpipe(2)"], lambda s: s.schedule.call.arguments["microbatches"], 2),
        (["schedule=looped_bfs"], lambda s: s.schedule.call.arguments["chunks"], 2),
        (["schedule=looped_bfs(chunks=5)"], lambda s: s.schedule.call.arguments["chunks"], 5),
        (["schedule.microbatches=1"], lambda s: s.schedule.call.arguments["microbatches"], 1),
        (["train.schedule.chunks=1"], lambda s: s.schedule.call.arguments["chunks"], 1),
        (["s.group=4"], lambda s: s.schedule.call.arguments["group"], 4),
        (["schedule=gpipe", "schedule.microbatches=1"], lambda s: s.schedule.call.arguments["microbatches"], 1),
        (["schedule=t", "t.chunks=7"], lambda s: s.schedule.call.arguments["chunks"], 7),
        (["schedule=looped_bfs", "s.chunks=7"], lambda s: s.schedule.call.arguments["chunks"], 7),
        (["batch=2", "batch=16"], lambda s: s.axes["batch"].size, 16),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_overrides(overrides, read, expected):
    assert read(loaded(MORE, *overrides)) == expected


@pytest.mark.parametrize(
    ("written", "override", "expected"),
    [
        ("(gpipe(microbatches = 4))", "schedule.microbatches=2", {"microbatches": 2}),
        ("interleaved_1f1b(chunks = 2, 4)", "schedule.microbatches=2", {"chunks": 2, "microbatches": 2}),
        ("interleaved_1f1b(chunks = 2, 4)", "schedule=looped_bfs", {"chunks": 2, "microbatches": 4}),
        ("interleaved_1f1b(chunks = 2, 4)", "schedule.chunks=3", {"chunks": 3, "microbatches": 4}),
    ],
)
def test_schedules_however_they_are_written(written, override, expected):
    arguments = loaded(MORE.replace("schedule = s", f"schedule = {written}"), override).schedule.call.arguments
    assert {key: arguments[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("override", "code", "column", "help"),
    [
        ("batch", "E0315", 1, "`batch=128`"),
        ("=3", "E0315", 1, None),
        ("a-b=3", "E0315", 1, None),
        ("bach=3", "E0315", 1, "`batch`"),
        ("batch.x=3", "E0315", 1, None),
        ("k.pip=3", "E0313", 3, "`pipe`"),
        ("train.step=3", "E0303", 7, "`train.steps`"),
        ("train.steps=", "E0103", 13, "expression"),
        ("train.steps=1 2", "E0103", 15, None),
        ("train.steps=0", "E0308", 13, None),
        ("train.steps=1GiB", "E0307", 13, None),
        ("train.steps.x=1", "E0315", 13, None),
        ("train.optimizer.rate=1", "E0209", 17, None),
        ("layout=nothing", "E0302", 8, None),
        ("schedule=gpip", "E0302", 10, "`gpipe`"),
        ("schedule.chunk=3", "E0209", 10, "`chunks`"),
        ("batch=0", "E0310", 7, None),
        ("batch=1 / 0", "E0224", 7, None),
        ("embed=batch * other_axis", "E0202", 15, None),
    ],
)
def test_wrong_overrides_point_to_the_command_line(override, code, column, help):
    found, diagnostics = load_text(MORE, overrides=[override])
    assert found is None
    (diagnostic,) = diagnostics
    shown = diagnostic.render()
    assert (diagnostic.code, diagnostic.span.source.name, diagnostic.span.column) == (
        code,
        "command line",
        column,
    ), shown
    if help is not None:
        assert help in diagnostic.help, shown


RULES = """
axis batch = 4, embed = 6
model m(x: [batch, embed]) {
  param up, down: [embed] ~ ones()
  param a, b: [batch, embed] ~ ones()
  loss mean(x * up * down * a * b)
}
optimizer one { freeze up  update all -> adamw(lr = 0.1) }
optimizer mixed {
  update a, b -> muon(lr = 0.02)
  update down -> lion(lr = cosine(0.1, total = 9))
  update all -> adamw(lr = 0.1)
}
train { data = random()  optimizer = mixed  steps = 2 }
"""


@pytest.mark.parametrize(
    ("overrides", "target", "argument", "expected"),
    [
        (["train.optimizer=one", "train.optimizer.lr=0.5"], "all", "lr", 0.5),
        (["train.optimizer.momentum=0.5"], "a", "momentum", 0.5),
        (["mixed.b.lr=0.5"], "a", "lr", 0.5),
        (["mixed.down.lr.peak=0.5"], "down", "lr", 0.5),
    ],
)
def test_an_argument_of_rules_is_that_of_the_only_one_that_takes_it(overrides, target, argument, expected):
    spec, diagnostics = load_text(RULES, overrides=overrides)
    assert spec is not None, [each.render() for each in diagnostics]
    (rule,) = (each for each in spec.train.optimizer.rules if (target,) in each.targets)
    found = rule.call.arguments[argument]
    assert (next(iter(found.arguments.values())) if argument == "lr" else found) == expected


@pytest.mark.parametrize(
    ("override", "code", "help"),
    [
        ("train.optimizer.lr=1", "E0315", "name one by its target: `mixed.a.lr`, `mixed.down.lr` or `mixed.all.lr`"),
        (
            "train.optimizer.lr.peak=1",
            "E0315",
            "name one by its target: `mixed.a.lr`, `mixed.down.lr` or `mixed.all.lr`",
        ),
        ("train.optimizer.weight_dcay=1", "E0209", "did you mean `weight_decay`?"),
    ],
)
def test_an_argument_of_several_rules_names_each(override, code, help):
    _, diagnostics = load_text(RULES, overrides=[override])
    assert [(each.code, each.help) for each in diagnostics if each.severity == "error"] == [(code, help)]
    for key in re.findall(r"`([\w.]+\.lr)`", help):
        assert load_text(RULES, overrides=[f"{key}=0.5"])[0] is not None, key


def test_overrides_without_a_train_block():
    found, diagnostics = load_text("axis a = 1\n", overrides=["train.steps=3"])
    assert found is None
    assert [d.code for d in diagnostics] == ["E0315"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("schedule=t(chunks=7)", ("t", 7)),
        ("schedule=t(8, 5)", ("t", 5)),
        ("schedule=s(chunks=1)", ("s", 1)),
    ],
)
def test_a_declared_schedule_that_is_called(override, expected):
    found, (diagnostic,) = load_text(MORE, overrides=[override], fitting=False)
    assert found is None
    assert diagnostic.message == f"`{expected[0]}` is declared already"
    written = diagnostic.help.removeprefix("instead: `").removesuffix("`").split()
    schedule = loaded(MORE, *written).schedule
    assert (schedule.name, schedule.call.arguments["chunks"]) == expected
