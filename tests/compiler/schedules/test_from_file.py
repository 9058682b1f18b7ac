"""`from_file`: the text is read with the file that names it, under its root, and mistakes are told at their place."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from partita.compiler.pipeline import compile_spec
from partita.dsl import limits
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.load import load, load_text
from tests.files import ROOT

FILE = """
axis batch = 4, width = 2
model net(image: [batch, width], wanted: [batch, width]) {{
  let x = image
  repeat 4 as layer {{
    param w: [width] ~ normal(0.5)
    let x = x * w
  }}
  loss mse(x, wanted)
}}
mesh line(pipe = 2)
layout cut on line {{ stage layer -> pipe }}
schedule s = {call}
train {{ layout = cut data = random() optimizer = sgd(lr = 0.1) steps = 1 }}
"""
ORDERS = "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1\nF0.0 B0.0 F0.1 B0.1 W0.0 W0.1\n"


def problem(folder: Path, orders: str | None, call: str = 'from_file("mine.sched")', *overrides: str) -> Diagnostic:
    """What is wrong, first of all, with a file that names these orders."""
    folder.mkdir(exist_ok=True)
    if orders is not None:
        (folder / "mine.sched").write_text(orders)
    (folder / "net.par").write_text(FILE.format(call=call))
    spec, diagnostics = load(folder / "net.par", overrides)
    if spec is None:
        return diagnostics[0]
    with pytest.raises(Refused) as refused:
        compile_spec(spec)
    return refused.value.diagnostics[0]


def test_it_is_read_and_run(tmp_path):
    (tmp_path / "mine.sched").write_text(ORDERS)
    (tmp_path / "net.par").write_text(FILE.format(call='from_file("mine.sched")'))
    spec, diagnostics = load(tmp_path / "net.par")
    assert spec is not None, diagnostics
    state = compile_spec(spec)
    assert f"{state.schedule}\n" == ORDERS
    assert (state.microbatches, state.pipeline.chunks) == (2, 1)


def test_a_text_in_place_of_a_file_names_the_files_beside_that(tmp_path):
    (tmp_path / "mine.sched").write_text(ORDERS)
    text = FILE.format(call='from_file("mine.sched")')
    spec, diagnostics = load_text(text, path=tmp_path / "net.par")
    assert spec is not None, diagnostics
    assert f"{compile_spec(spec).schedule}\n" == ORDERS


def test_an_override_is_relative_to_the_main_file(tmp_path, monkeypatch):
    (tmp_path / "mine.sched").write_text(ORDERS)
    (tmp_path / "net.par").write_text(FILE.format(call="gpipe(microbatches = 2)"))
    monkeypatch.chdir(tmp_path.parent)
    spec, diagnostics = load(tmp_path / "net.par", ('schedule=from_file("mine.sched")',))
    assert spec is not None, diagnostics
    assert f"{compile_spec(spec).schedule}\n" == ORDERS


def test_an_imported_file_names_what_is_beside_it(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "mine.sched").write_text(ORDERS)
    (tmp_path / "parts" / "plans.par").write_text('schedule other = from_file("mine.sched")\n')
    main = 'import "parts/plans.par"\n' + FILE.format(call="gpipe(microbatches = 2)").replace(
        "steps = 1", "steps = 1 schedule = other"
    )
    (tmp_path / "net.par").write_text(main)
    spec, diagnostics = load(tmp_path / "net.par")
    assert spec is not None, diagnostics
    assert f"{compile_spec(spec).schedule}\n" == ORDERS


@pytest.mark.parametrize("path", ["../mine.sched", "/etc/hostname", "inner/../../mine.sched"])
def test_it_stays_under_the_root(tmp_path, path):
    (tmp_path / "mine.sched").write_text(ORDERS)
    found = problem(tmp_path / "inside", None, f'from_file("{path}")')
    assert found.code == "E0010"
    assert found.message == f"`{path}` is outside the root directory"
    assert found.span.text == f'"{path}"'


def test_a_link_out_of_the_root_is_no_way_out(tmp_path):
    (tmp_path / "mine.sched").write_text(ORDERS)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "mine.sched").symlink_to(tmp_path / "mine.sched")
    assert problem(tmp_path / "inside", None).code == "E0010"


@pytest.mark.parametrize(
    ("orders", "code", "place", "words"),
    [
        (None, "E0001", None, "there is no file"),
        ("", "E0506", "mine.sched:1:1", "holds no actions"),
        ("F0.0 BW0.0\nF0.0 Q0.0\n", "E0506", "mine.sched:2:6", "`Q0.0` is not an action"),
        ("# one\nF0.0 BW0.0\n\nBW0.0 F0.0\n", "E0501", "mine.sched:4:1", "rank 1 of schedule `"),
        ("F0.0 BW0.0\nF0.0 F0.0 BW0.0\n", "E0501", "mine.sched:2:6", "runs F0.0 2 times"),
        ("F0.0 F0.1 BW0.0 BW0.1\nF0.0 BW0.0 F0.1\n", "E0501", "mine.sched:2:12", "never runs B0.1"),
        ("F0.0 F0.1 BW0.1 BW0.0\nF0.0 F0.1 BW0.0 BW0.1\n", "E0501", "mine.sched:1:17", "runs BW0.0 after BW0.1"),
        ("F0.0 BW0.0 F0.1 BW0.1\nF0.0 F0.1 BW0.0 BW0.1\n", "E0502", None, "ranks 0, 1 wait for each other"),
        ("F0.0 BW0.0\n", "E0505", "net.par:13:14", "has 1 line of actions, but the pipeline has 2 ranks"),
        ("F0.0 BW0.0\n" * 3, "E0505", "net.par:13:14", "has 3 lines of actions, but the pipeline has 2 ranks"),
    ],
)
def test_mistakes_are_told_at_their_place(tmp_path, orders, code, place, words):
    found = problem(tmp_path, orders)
    assert found.code == code, found.render()
    assert words in found.message
    if place is not None:
        assert found.span.place.endswith(place)


def test_a_mistake_on_a_long_line_is_shown_without_the_whole_line(tmp_path):
    found = problem(tmp_path, f"F0.0{' ' * 300}F0.0 BW0.0{' ' * 300}\nF0.0 BW0.0\n")
    assert found.span.place.endswith("mine.sched:1:305")
    shown = found.render().splitlines()
    assert max(map(len, shown)) < 200
    line, carets = next((line, below) for line, below in pairwise(shown) if "^" in below)
    assert line[carets.index("^") : carets.rindex("^") + 1] == "F0.0"
    assert line.count("…") == 2


def test_the_mistake_of_the_page_is_told_so(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "schedules.md").read_text()
    monkeypatch.chdir(tmp_path)
    orders = ORDERS.replace("F0.0 B0.0 F0.1 B0.1 W0.0 W0.1", "F0.0 W0.0 B0.0 F0.1 B0.1 W0.1")
    Path("mine.sched").write_text(f"# mine.sched: two ranks, two microbatches\n{orders}")
    Path("net.par").write_text(FILE.format(call='from_file("mine.sched")'))
    spec, _ = load("net.par")
    with pytest.raises(Refused) as refused:
        compile_spec(spec)
    assert refused.value.diagnostics[0].render() in page


def test_files_have_limits(tmp_path):
    found = problem(tmp_path, "#" * (limits.FILE_BYTES + 1))
    assert (found.code, found.span.text) == ("E0004", '"mine.sched"')
    found = problem(tmp_path, "F999.0 F0.999\n")
    assert found.code == "E0506"


@pytest.mark.soak
def test_files_have_a_limit_together(tmp_path):
    declared = [f'schedule s{i} = from_file("{i % 3}.sched")' for i in range(100)]
    (tmp_path / "net.par").write_text("\n".join(declared))
    for size, codes in ((limits.FILE_BYTES // 3, []), (limits.FILE_BYTES // 2, ["E0004"])):
        for i in range(3):
            (tmp_path / f"{i}.sched").write_text("#" * size)
        found = [each for each in load(tmp_path / "net.par")[1] if each.severity == "error"]
        assert sorted({each.code for each in found}) == codes
        assert all(each.span.text == '"2.sched"' for each in found)


def test_a_text_in_no_file_names_none():
    _, (found,) = load_text(FILE.format(call='from_file("mine.sched")'))
    assert found.code == "E0010"
