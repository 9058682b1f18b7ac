"""What is not used is said once a file, and nothing is said of what the command line may have chosen against."""

from __future__ import annotations

import pytest

from partita.dsl.load import load_text

FILE = """\
axis batch = 8, embed = 6
model m(x: [batch, embed]) {
  param w: [embed] ~ ones()
  loss mean(x * w)
}
mesh k(data = 2)
layout one on k { shard batch -> data }
layout two on k { shard batch -> data  shard param -> data }
layout three on k { shard batch -> data  shard state -> data }
schedule a = gpipe(microbatches = 1)
schedule b = gpipe(microbatches = 2)
train { layout = one  schedule = a  data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }
"""
THIRD = "layout three on k { shard batch -> data  shard state -> data }\n"


def warned(text: str, *overrides: str) -> list[tuple[str, str | None]]:
    found, diagnostics = load_text(text, "m.par", overrides=overrides)
    assert found is not None, [each.render() for each in diagnostics]
    assert {each.code for each in diagnostics} <= {"W0201"}
    return [(each.message, each.help) for each in diagnostics]


def test_alternatives_to_what_train_names_are_not_warned_of() -> None:
    assert warned(FILE) == []
    assert warned(FILE, "batch=16") == []


INLINE = FILE.replace("schedule = a ", "schedule = gpipe(microbatches = 4) ")


def test_what_train_passes_over_is_one_warning() -> None:
    text = INLINE.replace("train {", "optimizer o { update all -> sgd(lr = 0.2) }\ntrain {")
    assert warned(text) == [
        ("schedules `a`, `b`; optimizer `o` are not used", "`schedule=a` on the command line chooses this one")
    ]


def test_a_single_one() -> None:
    text = INLINE.replace("schedule b = gpipe(microbatches = 2)\n", "")
    assert warned(text) == [("schedule `a` is not used", "`schedule=a` on the command line chooses it")]
    assert warned(text, "schedule=a") == []


@pytest.mark.parametrize("override", ["schedule=b", "schedule=gpipe(4)", "train.schedule=b"])
def test_what_the_command_line_chooses_among_is_not_warned_of(override: str) -> None:
    assert warned(INLINE, override) == []


def test_the_help_works() -> None:
    assert load_text(FILE, overrides=["layout=two"])[0].layout.name == "two"


def test_a_library_of_alternatives_is_not_warned_of() -> None:
    text = FILE[: FILE.index("train {")]
    assert warned(text) == []


def test_a_name_with_an_underscore_is_meant() -> None:
    assert warned(INLINE.replace("schedule a", "schedule _a").replace("schedule b", "schedule _b")) == []


NONE = {"clip": "clip = 1.0", "eval": "eval = every(5)", "checkpoint": "checkpoint = every(5)"}


@pytest.mark.parametrize("key", NONE)
def test_none_takes_a_setting_away(key: str) -> None:
    """In a file and on the command line, where the file has it or not."""
    with_it = FILE.replace("steps = 1", f"steps = 1  {NONE[key]}")
    assert getattr(load_text(with_it)[0].train, key) is not None
    assert getattr(load_text(with_it, overrides=[f"train.{key}=none"])[0].train, key) is None
    assert getattr(load_text(FILE, overrides=[f"train.{key}=none"])[0].train, key) is None
    written = FILE.replace("steps = 1", f"steps = 1  {key} = none")
    assert getattr(load_text(written)[0].train, key) is None
    value = NONE[key].partition(" = ")[2]
    assert getattr(load_text(written, overrides=[f"train.{key}={value}"])[0].train, key) is not None


@pytest.mark.parametrize("setting", ["train.steps", "train.data", "train.optimizer", "train.seed", "batch", "k.data"])
def test_none_is_no_value_of_what_is_needed(setting: str) -> None:
    found, diagnostics = load_text(FILE, overrides=[f"{setting}=none"])
    assert found is None
    assert [each.severity for each in diagnostics] == ["error"]
