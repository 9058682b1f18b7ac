"""What is emitted: alike turns and stages share functions, so that the source does not grow with depth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from partita.compiler.pipeline import compile_spec
from partita.dsl.load import load

SPECS = Path(__file__).parents[2] / "specs"


def source(*overrides: str) -> str:
    spec, diagnostics = load(SPECS / "tiny.par", overrides)
    assert spec is not None, "\n\n".join(d.render() for d in diagnostics)
    return compile_spec(spec).program.source


def functions(text: str) -> list[str]:
    return re.findall(r"(?m)^def (\w+)", text)


def test_stages_share_their_functions():
    """Four stages: the first embeds, the last has the head, those between are one."""
    names = functions(source())
    assert [name for name in names if name.endswith("_forward") and name.startswith("stage")] == [
        "stage0_forward",
        "stage1_forward",
        "stage3_forward",
    ]
    assert sum(name.startswith("layer_forward") for name in names) == 1
    # The first turn's input needs no cotangent's sum with anything else; its backward is the others'.
    assert sum(name.startswith("layer_backward") for name in names) <= 2


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
def test_source_lines_are_one_an_operation(schedule: str):
    text = source("laptop.pipe=1", f"schedule={schedule}")
    body = text[text.index("def layer_forward") :].split("\n\n")[0]
    for line in body.splitlines()[1:]:
        assert re.match(r"    (\w+(, \w+)* = .*# .*tiny\.par:\d+|del .*|return .*)$", line), line


def test_emitted_source_holds_only_names_of_ours():
    """A hostile name in a file stays a name: it can shadow nothing, and reaches the source only as part of one."""
    text = source()
    allowed = set(re.findall(r"[\w.]+", text))
    assert "eval" not in allowed
    assert "exec" not in allowed
    assert "import" in allowed  # the header's two imports
    assert text.count("import") == 2
