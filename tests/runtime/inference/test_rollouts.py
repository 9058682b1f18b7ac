"""Answers that a model writes while it trains, held against its own logits, `trl`'s formula and other layouts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

import partita
from partita.cli.main import main
from partita.compiler import pipeline
from partita.compiler.analysis.memory import memory_report
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.runtime.data.binding import bind
from partita.runtime.outputs import outputs
from partita.runtime.philox import stream, words
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.commands import computed
from tests.commands import partita as command
from tests.compiler.analysis.test_memory import peak_of
from tests.files import SPECS
from tests.marks import soak

ZOO = SPECS / "zoo"
SMALL = ("batch=8", "seq=10", "embed=8", "heads=2", "key=4", "ffn=8", "train.data.samples=4", "train.data.tokens=4")
ALONE = ("laptop.data=1", "laptop.pipe=1", "laptop.tensor=1")
LAYOUTS = {
    "all": ("laptop.data=2", "laptop.pipe=2", "laptop.tensor=2"),
    "zero": ("layout=zero", "laptop.data=2"),
    "chunks": ("laptop.pipe=2", "schedule=chunks", "layers=4"),
    "late": ("laptop.pipe=2", "train.validate=after(calm=1)"),
}
MESH = """
mesh laptop(data = 1, pipe = 1, tensor = 1)
layout split on laptop {
  shard batch, state -> data
  shard heads, ffn, vocab, seq -> tensor
  stage layer -> pipe
}
layout zero on laptop { shard batch, param, grad, state -> data }
schedule micro = one_f_one_b(microbatches = 2)
schedule chunks = interleaved_1f1b(microbatches = 2, chunks = 2)

train {
  layout = split  schedule = micro
"""
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
PROMPTS = [{"prompt": text, "answer": str(i), "more": i} for i, text in enumerate(("1+1=", "22=", "(3)=", "4", "5-5="))]
REWARD = """
def score(completion_ids, **others):
    return [sum(each) % 7 + len(each) / 8 for each in completion_ids]
"""


def write(folder: Path, reward: str = REWARD, prompts: list[Any] = PROMPTS) -> Path:
    """grpo.par on a mesh, with a reward that any answer may have."""
    (folder / "sums.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    (folder / "reward.py").write_text(reward)
    (folder / "m.par").write_text((ZOO / "grpo.par").read_text().replace("\ntrain {\n", MESH))
    return folder / "m.par"


def opened(path: Path, *overrides: str) -> VirtualRun:
    """A run that has not begun."""
    spec, diagnostics = load(path, (*SMALL, *overrides))
    assert spec is not None, diagnostics
    plan = prepare(spec, allow_python=True)
    data = bind(plan.program, plan.train, path.parent).dataset
    return VirtualRun(plan.answering(data, path.parent, allow_python=True), strict=False)


def batches(run: VirtualRun, step: int) -> list[dict[str, np.ndarray]]:
    """What each rank computes a step with."""
    found: list[dict[str, np.ndarray]] = []

    def one(rank: Any) -> Any:
        prompts = rank.rollout.rollouts.training
        found.append((yield from rank.rollout.trained(prompts.batch(step), step)))

    run.cluster.run([one(rank) for rank in run.ranks])
    return found


def trained(path: Path, *overrides: str, **options: Any) -> list[dict[str, Any]]:
    """The records of the steps of a run."""
    records = partita.train(path, *SMALL, "train.steps=4", *overrides, allow_python=True, **options)
    return [{key: each[key] for key in sorted(each) if "second" not in key} for each in records]


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_answers_are_drawn_from_the_models_own_probabilities(precision: str, tmp_path: Path):
    """As its logits of whole rows have them: another program, without what is kept."""
    run = opened(write(tmp_path), f"train.precision={precision}", "train.data.temperature=0.7", "vocab=70")
    (found,) = batches(run, 3)
    tokens, targets, logprobs = (found[name] for name in ("tokens", "targets", "logprobs"))
    inputs = {"tokens": torch.from_numpy(tokens)}
    logits = outputs(run.plan.spec, run.parameters(), inputs, ["logits"])["logits"].double() / 0.7
    expected = logits.log_softmax(-1).numpy()
    exact = 1e-5 if precision == "f32" else 1e-12
    lines = {json.dumps(list(each["prompt"].encode())) for each in PROMPTS}
    lengths = set()
    for row in range(8):
        counts = np.flatnonzero(targets[row] >= 0)
        begin, count = int(counts[0]) + 1, len(counts)
        lengths.add((begin, count))
        assert list(counts) == list(range(begin - 1, begin - 1 + count))
        assert json.dumps(tokens[row, :begin].tolist()) in lines
        assert (tokens[row, begin : begin + count - 1] == targets[row, counts][:-1]).all()
        assert not tokens[row, begin + count :].any()
        assert not logprobs[row, targets[row] < 0].any()
        for place in counts:
            chosen = targets[row, place]
            assert logprobs[row, place] == pytest.approx(expected[row, place, chosen], abs=exact)
            word = words(stream(0, "rollouts", int(place) + 1, "step 3"), row, 1)[0]
            reached = np.exp(expected[row, place]).cumsum()
            assert abs(np.searchsorted(reached, (int(word) >> 11) / 2**53, "right") - chosen) == 0
        ended = targets[row, counts[-1]] == ord("\n")
        assert count == 4 or ended
        assert ord("\n") not in targets[row, counts[:-1]]
    assert len({begin for begin, _ in lengths}) > 1, "prompts of one length show little"


def test_an_answer_stops_at_its_end(tmp_path: Path):
    """Also at one of several bytes; what its prompt ends with is no part of it."""
    path = write(tmp_path)
    (found,) = batches(opened(path, "batch=64", "train.data.end=none"), 1)
    assert {int((row >= 0).sum()) for row in found["targets"]} == {4}
    answers = [row[row >= 0].tolist() for row in found["targets"]]
    within = next(each[1:3] for each in answers if ord("#") <= min(each[1:3]))
    last = found["tokens"][np.arange(64), (found["targets"] >= 0).argmax(1)]
    across = next([int(id), each[0]] for each, id in zip(answers, last, strict=True) if id == ord("=") and each[0] > 34)
    for end in (within, across):
        (again,) = batches(opened(path, "batch=64", f'train.data.end="{bytes(end).decode()}"'), 1)
        for before, row in zip(answers, again["targets"], strict=True):
            stop = next((i for i in (2, 3, 4) if before[i - 2 : i] == end), 4)
            assert row[row >= 0].tolist() == before[:stop]


def test_advantages_are_those_of_trl(tmp_path: Path):
    """`(rewards - mean) / (std + 1e-4)` of each prompt's answers: `GRPOTrainer` of trl, `scale_rewards = "group"`."""
    (found,) = batches(opened(write(tmp_path)), 1)
    answers = [row[row >= 0].tolist() for row in found["targets"]]
    rewards = torch.tensor([sum(each) % 7 + len(each) / 8 for each in answers], dtype=torch.float64).view(-1, 4)
    mean, std = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    assert std.min() > 0
    expected = ((rewards - mean) / (std + 1e-4)).flatten().numpy()
    assert found["advantages"] == pytest.approx(expected, abs=1e-6)


def test_a_whole_window_for_each_id_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path)
    (kept,) = batches(opened(path, "train.precision=f64"), 1)
    monkeypatch.setattr(pipeline, "scoring_of", partial(pipeline.scoring_of, cached=False))
    run = opened(path, "train.precision=f64", *LAYOUTS["all"])
    assert [each.code for each in run.plan.warnings] == ["W1001"]
    for anew in batches(run, 1):
        for name, array in kept.items():
            assert anew[name] == pytest.approx(array, abs=1e-12), name


def test_what_is_kept_of_all_texts_is_within_the_bound(tmp_path: Path):
    """It is more than microbatches of two rows take. The prompts are so long that both programs run."""
    path = write(tmp_path, prompts=[{"prompt": "7" * 50}, {"prompt": "8" * 51}])
    runs: list[VirtualRun] = []

    def run() -> None:
        runs.append(opened(path, "batch=64", "seq=128", "schedule=one_f_one_b(microbatches=32)"))
        for step in (1, 2):
            batches(runs[0], step)

    peak, training = peak_of(run), runs[0].plan.training
    found, alone = (memory_report(each, each.plan.ranks[0]) for each in (training, evolve(training, writes=None)))
    assert found.during == "rollouts"
    assert alone.total < peak <= found.total


@pytest.mark.parametrize("layout", ["all", *soak(*[each for each in LAYOUTS if each != "all"])])
def test_layouts_train_on_the_same_answers(layout: str, tmp_path: Path):
    path = write(tmp_path)
    own = ("train.precision=f64", *LAYOUTS[layout])
    alone = [each for each in own if "laptop" not in each and "layout" not in each and "chunks" not in each]
    found, expected = trained(path, *own), trained(path, *alone, *ALONE)
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        assert one == {key: pytest.approx(value, rel=1e-9, abs=1e-13) for key, value in other.items()}
        assert one["drift"] < 1e-12
        assert one["reward_spread"] > 0
    assert found[0]["reward"] != found[1]["reward"]


@pytest.mark.parametrize("reuse", [*soak(1), 2])
def test_a_run_resumes_with_the_answers_that_it_would_have_written(reuse: int, tmp_path: Path):
    """Bit for bit. Where several steps train on the same answers, a checkpoint waits for the last of them."""
    path = write(tmp_path)
    given = (f"train.data.reuse={reuse}", "train.checkpoint=every(3)", "train.eval=every(2)", "train.data.holdout=40%")
    whole = trained(path, *given, "train.steps=6", run_dir=tmp_path / "whole")
    saved = 3 if reuse == 1 else 4
    kept = tmp_path / "whole" / "checkpoints"
    for each in kept.iterdir():
        if each.is_dir() and not each.name.endswith(f"{saved}"):
            for file in each.iterdir():
                file.unlink()
            each.rmdir()
    resumed = trained(path, *given, "train.steps=6", run_dir=tmp_path / "whole")
    assert [each["step"] for each in resumed] == list(range(saved + 1, 7))
    assert resumed == whole[saved:]
    if reuse == 2:
        assert [each["drift"] > 1e-5 for each in whole] == [False, True] * 3
        assert [each["reward"] for each in whole[::2]] == [each["reward"] for each in whole[1::2]]
    written = [each["eval_reward"] for each in computed(tmp_path / "whole") if "eval_reward" in each]
    assert len(written) == 3


def test_a_reward_is_called_as_trl_calls_it(tmp_path: Path):
    """With lists by name: prompts, completions without their end, their ids with it, and the columns of the data."""
    reward = """
calls = []
def score(prompts, completions, completion_ids, answer, more, **others):
    assert not others
    calls.append((prompts, completions, completion_ids, answer, more))
    return [float(len(each)) for each in completions]
"""
    run = opened(write(tmp_path, reward), "laptop.data=2")
    for found in batches(run, 1):
        answers = [row[row >= 0].tolist() for row in found["targets"]]
    calls = run.ranks[0].rollout.rollouts.reward.run.__globals__["calls"]
    assert [len(each[0]) for each in calls] == [4, 4], "each rank scores its own prompts"
    prompts, completions, ids, answers_given, more = (
        [each for part in parts for each in part] for parts in zip(*calls, strict=True)
    )
    assert sorted(ids) == sorted(answers)
    fields = {each["prompt"]: (each["answer"], each["more"]) for each in PROMPTS}
    assert [fields[each] for each in prompts] == list(zip(answers_given, more, strict=True))
    assert completions == [bytes(each).decode().removesuffix("\n") for each in ids]


WRONG = {
    "`score` raised ZeroDivisionError": "return [1 / (each != 2) for each in more]",
    "`score` returned None, not a list of numbers": "return None",
    "`score` returned 1 numbers for 8 answers": "return [1.0]",
    "`score` returned nan, which is no reward": "return [float('nan') if each == 2 else 0.0 for each in more]",
    "`score` returned None, which is no reward": "return [None if each == 2 else 0.0 for each in more]",
}


@pytest.mark.parametrize("message", WRONG)
def test_a_reward_that_fails_is_told_of_with_its_row(message: str, tmp_path: Path):
    path = write(tmp_path, f"def score(more, **others):\n    {WRONG[message]}\n")
    with pytest.raises(Refused, match=re.escape(message)) as refused:
        trained(path, *ALONE)
    (found,) = refused.value.diagnostics
    assert found.code == "E0622"
    assert found.span is not None
    assert found.span.text == '"reward.py:score"'
    if "[" in message or "numbers" in message:
        return
    assert found.notes[:2] == ("for line 3 of `sums.jsonl`", "prompt: (3)=")
    assert found.notes[2].startswith("answer: ")


def test_nothing_of_a_reward_is_run_before_it_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(write(tmp_path, "raise SystemExit('run')\ndef score(): pass\n"))
    for name in ("check", "verify", "data"):
        assert main([name, path, *SMALL, *ALONE]) == 0, capsys.readouterr().err
    with pytest.raises(Refused, match=r"error\[E0620\]: the reward of `rollouts` runs Python code from `.*reward.py`"):
        partita.train(path, *SMALL)
    with pytest.raises(Refused, match=r"error\[E0621\]"):
        partita.train(path, *SMALL, allow_python=True)


OTHERS = {
    "E0306 `reward` is a Python file and the name": 'train.data=rollouts("sums.jsonl", reward = "reward.py")',
    "E0330 `reward.py` has no `scores`": 'train.data=rollouts("sums.jsonl", reward = "reward.py:scores")',
    "E0607 a batch has 8 rows, which are no whole number": "train.data.samples=3",
    "E0607 line 1 of `sums.jsonl` has 4 ids, which with an answer of 8": "train.data.tokens=8",
    "E0318 4 steps do not end with the last of 3": "train.data.reuse=3",
    "E0318 `rollouts` cannot be combined with `sync`": "train.sync=delayed(1)",
    "E0302 model `grpo` has no output `logits`": "train.data.tokens=3",
    "E0605 `sums.jsonl` has the id 61": "vocab=50",
    "E0608 this data has no end": 'train.eval=every(2, data = rollouts("sums.jsonl", reward = "reward.py:score", '
    "samples = 4, tokens = 4), batches = all)",
    "E0318 `rollouts` cannot be combined with other sources": "train.data=mix(["
    'rollouts("sums.jsonl", reward = "reward.py:score", samples = 4, tokens = 4) -> 100%])',
}


@pytest.mark.parametrize("expected", OTHERS)
def test_what_cannot_be_is_refused_before_the_run(expected: str, tmp_path: Path):
    code, _, message = expected.partition(" ")
    path = write(tmp_path)
    if code == "E0302":
        path.write_text(path.read_text().replace("output logits", "output scores"))
    with pytest.raises(Refused, match=re.escape(f"error[{code}]: {message}")):
        trained(path, *ALONE, OTHERS[expected])


def test_answers_of_a_model_that_sees_what_follows_are_refused(tmp_path: Path):
    path = write(tmp_path)
    path.write_text(path.read_text().replace("causal = true", "causal = false"))
    with pytest.raises(Refused, match="the model sees what follows"), pytest.warns(UserWarning, match="W1001"):
        trained(path, *ALONE)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "a"}, "line 1 of `sums.jsonl` has no `prompt`"),
        ({"prompt": 3}, "`prompt` in line 1 of `sums.jsonl` is a number"),
        ({"prompt": ""}, "`prompt` in line 1 of `sums.jsonl` is empty"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "has messages, and bytes no template"),
    ],
)
def test_a_line_without_a_prompt_is_refused(line: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(Refused, match=re.escape(message)):
        opened(write(tmp_path, prompts=[line]))


def test_inputs_that_rollouts_do_not_have_are_refused(tmp_path: Path):
    path = write(tmp_path)
    text = path.read_text()
    for old, new, message in (
        ("logprobs: [batch, seq]", "logprobs: [batch]", "`logprobs` of rollouts are floats over [batch, seq]"),
        ("ignore = -1", "", "what is no answer has no target, and this model ignores none"),
        ("advantages", "advantage", "the data has no input called `advantage`"),
    ):
        changed = re.sub(re.escape(old), new, text).replace(", )", ")")
        path.write_text(changed.replace("over = vocab, )", "over = vocab)"))
        with pytest.raises(Refused, match=re.escape(message)):
            opened(path)


def test_messages_are_written_by_the_template_of_the_tokenizer(tmp_path: Path):
    pytest.importorskip("transformers")
    from tests.runtime.data.test_chat import CHATML, written

    theirs = written(tmp_path, CHATML)
    chat = [{"role": "user", "content": "what is it?"}]
    reward = (
        "def score(prompts, completions, **others):\n    return [len(each[0]['content']) for each in completions]\n"
    )
    path = write(tmp_path, reward, [{"prompt": chat}])
    data = 'train.data=rollouts("sums.jsonl", reward = "reward.py:score", samples = 4, tokens = 4, tokenizer = "own")'
    run = opened(path, data, "vocab=400", "seq=64")
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    (found,) = batches(run, 1)
    assert (theirs.convert_tokens_to_ids("<|im_end|>"),) in run.plan.rollouts.encoding.ends
    for tokens, targets in zip(found["tokens"], found["targets"], strict=True):
        assert tokens[: len(expected)].tolist() == expected
        assert (targets[: len(expected) - 1] < 0).all()
        assert targets[len(expected) - 1] >= 0


# ---------------------------------------------------------------- whole runs


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """grpo.par as it stands, on a mesh."""
    path = write(tmp_path, (ZOO / "reward.py").read_text())
    (tmp_path / "sums.jsonl").write_bytes((ZOO / "sums.jsonl").read_bytes())
    return path


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["laptop.data=2", "laptop.pipe=2"])
def test_sums_are_learned_on_two_ranks(layout: str, sums: Path):
    """From nothing, in some minutes: the reward of the last steps, the most being 1, is at least 0.9."""
    given = ("run", sums.name, layout, "--transport", "gloo", "--allow-python", "--run-dir", "r")
    done = command(*given, cwd=sums.parent, timeout=1800)
    assert done.returncode == 0, done.stderr
    records = [each for each in computed(sums.parent / "r") if "reward" in each]
    assert sum(each["reward"] for each in records[:10]) / 10 < 0.05
    assert sum(each["reward"] for each in records[-10:]) / 10 >= 0.9
    assert max(each["drift"] for each in records) < 1e-5


@pytest.mark.soak
def test_two_layouts_have_the_same_numbers_while_they_learn(sums: Path):
    """Rounding, of which training makes ten times as much in each ten steps, changes no answer of fifty."""
    found, expected = (
        partita.train(sums, "train.precision=f64", "train.steps=50", layout, allow_python=True)
        for layout in ("laptop.data=2", "laptop.pipe=2")
    )
    assert len(found) == 50
    for one, other in zip(found, expected, strict=True):
        assert one["reward"] == other["reward"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-10)
    assert max(each["reward"] for each in found) > 0.1


@pytest.mark.soak
@pytest.mark.parametrize("reuse", [1, 2])
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(reuse: int, sums: Path):
    folder = sums.parent
    given = ("run", sums.name, "laptop.data=2", "batch=64", "train.steps=60", f"train.data.reuse={reuse}")
    given += ("train.checkpoint=every(5)", "--transport", "gloo", "--allow-python", "--run-dir")
    whole = command(*given, "whole", cwd=folder)
    assert whole.returncode == 0, whole.stderr
    metrics = folder / "killed" / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-m", "partita", *given, "killed"], cwd=folder, env=ONE_THREAD)
    while not metrics.exists() or metrics.read_text().count('"reward"') < 23:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    again = command(*given, "killed", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "resumed from" in again.stdout
    assert computed(folder / "killed") == computed(folder / "whole")
