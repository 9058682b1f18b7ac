"""`partita schedule NAME --stages …`: a schedule by itself, on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from partita.cli.main import main
from tests.files import GOLDEN

ZERO_BUBBLE = json.loads((GOLDEN / "zero_bubble.json").read_text())
ROW = ZERO_BUBBLE["rows"][0]
SIZE = "--stages", str(ROW["stages"]), "--microbatches", str(ROW["microbatches"])
TIMES = "--times", f"F={ROW['T_F']},B={ROW['T_B']},W={ROW['T_W']},comm={ROW['T_comm']}"


def main_status(arguments: Sequence[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as left:  # argparse's own way
        return left.code


def found(capsys, *arguments: str) -> dict:
    """What `--json` prints."""
    assert main(["schedule", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_h2"])
def test_published_bubbles(capsys, name):
    given = found(capsys, name, *SIZE, *TIMES)
    assert round(given["bubble"], 4) == ROW["bubble"][name]
    assert given.keys() == {"bubble", "makespan", "peak_live", "placement", "actions", "queues"}
    assert len(given["actions"]) == len(given["peak_live"]) == ROW["stages"]


@pytest.mark.soak
def test_times_are_of_a_rank_whatever_its_chunks(capsys):
    given = found(capsys, "interleaved_1f1b", *SIZE, *TIMES, "--chunks", "3")
    assert given["bubble"] == pytest.approx(ROW["bubble"]["interleaved_1f1b"], abs=0.005)
    whole = found(capsys, "zb_v", "--stages", "4", "--microbatches", "8", "--chunks", "2", "--times", "F=2,B=2,W=2")
    assert (whole["bubble"], whole["peak_live"]) == (0, [8] * 4)
    # A rank's chunks take 6 a microbatch together, and the last rank begins three forwards later.
    assert whole["makespan"] == 6 * 8 + 3


PUBLISHED = json.loads((GOLDEN / "vocabulary_parallel.json").read_text())["rows"]


@pytest.mark.few(1)
@pytest.mark.parametrize("row", [row for row in PUBLISHED if row["method"].startswith("one_f_one_b")], ids=str)
def test_measured_iterations_of_unequal_stages(capsys, tmp_path, row):
    """Simulated from the times of F and B on each rank, they are within 2% of what was measured on 8 GPUs."""
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"F": row["F_us"], "B": row["B_us"], "W": 0}))
    size = "--stages", str(row["stages"]), "--microbatches", str(row["microbatches"])
    given = found(capsys, "one_f_one_b", *size, "--times", str(path))
    assert given["makespan"] / 1000 == pytest.approx(row["measured_ms"], rel=0.02)


SHARED = [row for row in PUBLISHED if not row["method"].startswith("one_f_one_b")]


@pytest.mark.soak
@pytest.mark.parametrize(
    "row",
    SHARED,
    ids=lambda row: f"{row['method']}-{row['vocabulary']}",
)
def test_measured_iterations_of_shared_vocabularies(capsys, tmp_path, row):
    """They are within 4% of what was measured, if both passes over the vocabulary take equally long, and a transfer
    200 µs: their published time is that of both together, and that of transfers is not published.
    """
    half = [time / 2 for time in row["vocabulary_pass_us"]]
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"F": row["F_us"], "B": row["B_us"], "W": 0, "S": half, "T": half, "comm": 200}))
    size = "--stages", str(row["stages"]), "--microbatches", str(row["microbatches"])
    name = "interlaced" if row["method"] == "interlaced" else "one_f_one_b"
    given = found(capsys, name, *size, "--times", str(path))
    assert given["makespan"] / 1000 == pytest.approx(row["measured_ms"], rel=0.04)


def test_times_of_stages_and_transfers(capsys, tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"F": [1, 2, 3, 4], "B": 2, "W": [0] * 4, "comm": [0.5, 0.25, 0.125]}))
    size = "--stages", "2", "--chunks", "2", "--microbatches", "1", "--times", str(path)
    # F and B of each stage, a chunk's B being 1, and each transfer twice; in a V the middle one stays on its rank.
    assert found(capsys, "looped_bfs", *size)["makespan"] == 10 + 4 + 2 * 0.875
    assert found(capsys, "zb_v", *size)["makespan"] == 10 + 4 + 2 * 0.625


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ('{"F": [1, 2, 3], "B": 1, "W": 1}', 1, "`F` has 3 times, but there are 2 stages"),
        ('{"F": 1, "B": 1, "W": 1, "comm": [1, 2]}', 1, "`comm` has 2 times, but there are 1 pairs of stages"),
        ('{"F": 1, "B": 1, "W": 1, "S": [1, 2, 3], "T": 1}', 1, "`S` has 3 times, but there are 2 ranks"),
        ('{"F": 1, "B": 1, "W": 1, "T": 1}', 1, "S and T are those of one vocabulary: give both"),
        ('{"F": 1, "B": [1, 1]}', 2, "has no times of W"),
        ('{"F": 1, "B": 1, "W": 1, "X": 1}', 2, "`X` is not one of F, B, W, comm, FB, S, T"),
        ('{"F": [1, "a"], "B": 1, "W": 1}', 2, '`F` is "a", not a time'),
        ('{"F": [-1, 1], "B": 1, "W": 1}', 2, "`-1` is not a non-negative number"),
        ('{"F": 1e999, "B": 1, "W": 1}', 2, "`inf` is not a non-negative number"),
        ('{"F": 1, "B": 1, "W": 1, "FB": [3, 3]}', 2, "`FB` is [3, 3], not a time"),
        ("[1, 2]", 2, "is not an object"),
        ("[" * 100_000, 2, "is not JSON"),
        ("{", 2, "is not JSON"),
        (None, 2, "No such file"),
    ],
)
def test_wrong_files_of_times(capsys, tmp_path, text, status, words):
    path = tmp_path / "times.json"
    if text is not None:
        path.write_text(text)
    arguments = ["schedule", "one_f_one_b", "--stages", "2", "--microbatches", "3", "--times", str(path)]
    assert main_status(arguments) == status
    assert words in capsys.readouterr().err


@pytest.mark.soak
def test_auto_searches_within_a_limit_and_says_how_good_it_is(capsys):
    limit = "--memory-limit", str(2 * ROW["stages"]), "--memory", f"F=1,W={ROW['M_W']}"
    given = found(capsys, "auto", *SIZE, *TIMES, *limit)
    assert round(given["bubble"], 4) == ROW["bubble"]["zb_2p"]
    assert given["least_bubble"] == pytest.approx(given["bubble"])
    assert given["least_cost"] == pytest.approx(given["cost"])
    assert main(["schedule", "auto", *SIZE, *TIMES, *limit]) == 0
    headline = capsys.readouterr().out.splitlines()[0]
    assert (
        headline
        == "auto: 8 ranks, 24 microbatches; step 1,236.54, bubble 4.3%; cost 1,152.6, lower bound 1,152.6 (+0.0%)"
    )


@pytest.mark.parametrize(("limit", "said"), [("2", "(+13.1%; a cheaper order may exist)"), ("10", "(+0.0%)")])
def test_a_search_that_does_not_meet_its_bound_says_so(capsys, limit, said):
    short = "--stages", "3", "--microbatches", "5", "--times", "F=1,B=1.3,W=0.7,comm=0.4", "--memory", "F=1,W=0.5"
    assert main(["schedule", "auto", *short, "--memory-limit", limit]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_pairs_that_overlap(capsys):
    """DualPipeV's closed form: 3·(2.5 + 2 − 3) beside the work of the rank with the most pairs, 14.5 of 24 units."""
    size = "--ranks", "4", "--microbatches", "8", "--times"
    apart = found(capsys, "dualpipe_v", *size, "F=2,B=2,W=2")
    overlapping = found(capsys, "dualpipe_v", *size, "F=2,B=2,W=2,FB=5")
    assert apart["actions"] == overlapping["actions"]
    assert overlapping["makespan"] < apart["makespan"]


def test_arguments_of_a_schedule(capsys):
    given = found(capsys, "policy", "--stages", "2", "--microbatches", "3", "prefer=forward")
    same = found(capsys, "policy(prefer = forward)", "--stages", "2", "--microbatches", "3")
    assert given == same == found(capsys, "gpipe", "--stages", "2", "--microbatches", "3")


def test_a_schedule_in_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.sched").write_text("F0.0 F0.1 BW0.0 BW0.1\nF0.0 BW0.0 F0.1 BW0.1\n")
    given = found(capsys, 'from_file("mine.sched")', "--times", "F=1,B=1,W=1")
    assert given == found(capsys, "one_f_one_b", "--stages", "2", "--microbatches", "2")


@pytest.mark.parametrize(
    ("call", "more"),
    [
        ("interleaved_1f1b(microbatches=8, chunks=2)", []),
        ("interleaved_1f1b (8, 2)", []),
        ("interleaved_1f1b(chunks=2)", ["microbatches=8"]),
        ("interleaved_1f1b(microbatches=4, chunks=2)", ["--microbatches", "8"]),
    ],
)
def test_a_call_says_its_size(capsys, call: str, more: list[str]):
    given = found(capsys, "interleaved_1f1b", "--stages", "4", "--microbatches", "8", "--chunks", "2")
    assert found(capsys, call, "--stages", "4", *more) == given


def test_the_picture_has_numbers_without_a_unit(capsys):
    assert main(["schedule", "zb_h1", "--stages", "2", "--microbatches", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "zb_h1: 2 ranks, 3 microbatches; step 10, bubble 10.0%"
    assert lines[-2].split() == ["1", "1", "9", "10.0%", "2", "2"]
    assert lines[-1].startswith("on GPUs")


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("zb_h1",), 2, "a schedule without a program needs --stages and --microbatches"),
        (("zb_h1", "--stages", "4"), 2, "a schedule without a program needs --microbatches"),
        (("zb_h1", "--times", "F=1"), 2, "needs --stages and --microbatches"),
        (("zb_h1", *SIZE, "--times", "FB=1"), 1, "FB=1 is less than"),
        (("zb_h1", *SIZE, "--times", "F=x"), 2, "`x` is not a non-negative number"),
        (("zb_h1", *SIZE, "--times", "X=1"), 2, "`X` is not one of F, B, W, comm, FB"),
        (("zb_h1", *SIZE, "--memory", "F=-1"), 2, "`-1` is not a non-negative number"),
        (("zb_h1", "--stages", "0", "--microbatches", "1"), 2, "`0` is not a positive integer"),
        (("zb_h1(chunks=2)", "--stages", "4"), 2, "a schedule without a program needs --microbatches"),
        (("zb_h1(microbatches=4)",), 2, "a schedule without a program needs --stages"),
        (("zb_h1(microbatches=4", "--stages", "4"), 1, "`(` is never closed"),
        (("zb_h3", *SIZE), 1, "unknown schedule `zb_h3`"),
        (("interleavd_1f1b",), 1, "did you mean `interleaved_1f1b`?"),
        (("interleavd_1f1b(microbatches=4)",), 1, "did you mean `interleaved_1f1b`?"),
        (("pyproject.toml", *SIZE), 2, "pyproject.toml is a file: --stages, --microbatches are for a schedule"),
        (("zb_h1", *SIZE, "--chunks", "2"), 1, "has one stage on each rank, not 2"),
        (("zb_h1", *SIZE, "group=2"), 1, "takes no argument `group`"),
        (("zb_h2", *SIZE, "--memory-limit", "14"), 1, "error[E0504]: rank 0 of schedule `zb_h2` needs 15"),
        (("auto", *SIZE, "--memory-limit", "0.5"), 1, "rank 0 has room for 0.5 of activations"),
        (("auto(memory = 1GiB)", *SIZE), 1, "use --memory-limit"),
        (("gpipe", "--stages", "100000", "--microbatches", "1000"), 1, "at most"),
        (('from_file("/etc/hostname")', *SIZE), 1, "outside the root"),
    ],
)
def test_what_cannot_be_done_is_said(capsys, arguments, status, words):
    assert main_status(["schedule", *arguments]) == status
    assert words in capsys.readouterr().err
