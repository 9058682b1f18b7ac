"""Documents become ids once, the ids are those of the encoder, and what is wrong with one is said with its place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from partita.dsl.diagnostic import Refused
from partita.runtime.data import cache, documents, packages, text
from partita.runtime.data.binding import identify
from partita.runtime.data.registry import open_dataset
from partita.runtime.data.windows import Windows
from tests.runtime.data.test_data import SPAN, call, ids, tokenizer_of

TEXTS = ["Hello, world", "", "ein Wörtchen 🙂 mehr\n", "x" * 300, "the quick brown fox jumps over the lazy dog"] * 3
END = "<|endoftext|>"
WIDE = tuple(ids(name, limit=1 << 16) for name in ("tokens", "targets"))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def tokenizer() -> Tokenizer:
    return tokenizer_of(TEXTS, [END, "<s>"])


def write_lines(path: Path, texts: list[str], field: str = "text") -> None:
    path.write_text("".join(json.dumps({"number": i, field: each}) + "\n" for i, each in enumerate(texts)))


def write_rows(path: Path, texts: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "other": [0] * len(texts)}), path, row_group_size=4)


def opened(name: str, root: Path, **arguments: object) -> Windows:
    dataset = open_dataset(call(name, **arguments), WIDE, 0, root)
    assert isinstance(dataset, Windows)
    return dataset


def all_ids(dataset: Windows) -> list[int]:
    return np.asarray(dataset.training).tolist()


@pytest.mark.parametrize("end", [None, "\n\n"])
def test_documents_are_their_bytes(end: str | None, tmp_path: Path):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    write_lines(tmp_path / "b.jsonl", TEXTS[::-1])
    write_rows(tmp_path / "a.parquet", TEXTS)
    write_rows(tmp_path / "b.parquet", TEXTS[::-1])
    expected = list("".join(each + (end or "") for each in TEXTS + TEXTS[::-1]).encode())
    assert all_ids(opened("jsonl", tmp_path, glob="*.jsonl", field="text", end=end)) == expected
    assert all_ids(opened("parquet", tmp_path, glob="*.parquet", column="text", end=end)) == expected


@pytest.mark.parametrize("end", [None, END])
@pytest.mark.parametrize("begins", [False, True])
def test_documents_are_what_the_tokenizer_makes_of_them(
    end: str | None, begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(documents, "MAX_AT_ONCE", 4)  # the result does not depend on it
    made = tokenizer()
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.enable_truncation(3)
    made.enable_padding(length=10)
    made.save(str(tmp_path / "tokenizer.json"))
    made.no_truncation()
    made.no_padding()
    expected = [i for each in TEXTS for i in [*made.encode(each).ids, *([0] if end else [])]]
    write_lines(tmp_path / "a.jsonl", TEXTS, "content")
    write_rows(tmp_path / "a.parquet", TEXTS)
    given = {"tokenizer": "tokenizer.json", "end": end}
    assert all_ids(opened("jsonl", tmp_path, glob="a.jsonl", field="content", **given)) == expected
    assert all_ids(opened("parquet", tmp_path, glob="a.parquet", column="text", **given)) == expected
    assert [each.name for each in identify(call("jsonl", glob="a.jsonl", **given), tmp_path)] == [
        "a.jsonl",
        "tokenizer.json",
    ]


def test_a_text_is_tokenized_in_pieces_that_end_with_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text, "PIECE", 50)
    made = tokenizer()
    made.save(str(tmp_path / "t.json"))
    lines = [f"line {i}: {'äß' * (i % 40)}\n" for i in range(60)]
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "b.txt").write_text("no end of line")
    (tmp_path / "c.txt").write_text("")
    expected = [i for each in lines for i in made.encode(each).ids] + [0, *made.encode("no end of line").ids, 0, 0]
    given = {"glob": "*.txt", "alphabet": "bytes", "holdout": 0.0}
    assert all_ids(opened("text", tmp_path, **given, tokenizer="t.json", end=END)) == expected
    plain = all_ids(opened("text", tmp_path, **given, end="|"))
    assert plain == list(("".join(lines) + "|no end of line||").encode())


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_lines_are_read(compress: Callable[[bytes], bytes], tmp_path: Path):
    write_lines(tmp_path / "plain", TEXTS)
    (tmp_path / "a.jsonl.z").write_bytes(compress((tmp_path / "plain").read_bytes()))
    dataset = opened("jsonl", tmp_path, glob="*.z", field="text")
    assert bytes(all_ids(dataset)).decode() == "".join(TEXTS)
    damaged = compress(os.urandom(5000))
    (tmp_path / "a.jsonl.z").write_bytes(damaged[: len(damaged) // 2])
    with pytest.raises(Refused) as caught:
        opened("jsonl", tmp_path, glob="*.z", field="text")
    assert caught.value.diagnostics[0].code in ("E0603", "E0616")


@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=20))
def test_any_text_survives(texts: list[str], tmp_path_factory: pytest.TempPathFactory):
    texts = [each.encode("utf-8", "ignore").decode() for each in texts] + ["enough for a window"]
    root = tmp_path_factory.mktemp("documents")
    write_lines(root / "a.jsonl", texts)
    write_rows(root / "a.parquet", texts)
    for name, argument in (("jsonl", {"field": "text"}), ("parquet", {"column": "text"})):
        assert bytes(all_ids(opened(name, root, glob=f"*.{name}", **argument))).decode() == "".join(texts)


# ---------------------------------------------------------------- wrong documents

LINE = b'{"text": "fine", "label": 3}\n'
BAD_LINES: dict[str, tuple[bytes, str, str]] = {
    "no JSON": (b'{"text": "a" "b"}', "is not JSON: Expecting ',' delimiter in column 14", "each line is one object"),
    "cut off": (b'{"text": "a', "is not JSON: Invalid control character", ""),
    "no object": (b'"text"', "is a string, not an object", "each line is one object"),
    "a list over lines": (b"[", "is not JSON", "each line is one object"),
    "no field": (b'{"body": "a", "label": 3}', "has no field `text`", '`field = "body"`'),
    "no field at all": (b"{}", "has no field `text`", "`field` names the one"),
    "null": (b'{"text": null}', "is null, not a string", ""),
    "a number": (b'{"text": 12.5}', "is a number, not a string", ""),
    "ids": (b'{"text": [1, 2]}', "is a list, not a string", ""),
    "half a character": (b'{"text": "\\ud83d"}', "it has a lone surrogate, \\ud83d", ""),
    "latin-1": (b'{"text": "\xe9"}', "is not UTF-8: byte 11 is 0xe9", ""),
    "a huge number": (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit", ""),
    "too deep": (b"[" * 100_000, "is not JSON", ""),
    "a forged name": (b'{"a\\nerror: b": 1}', "has no field `text`", ""),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(name: str, tmp_path: Path, kept: Path):
    line, message, help = BAD_LINES[name]
    (tmp_path / "a.jsonl").write_bytes(LINE * 5)
    (tmp_path / "b.jsonl").write_bytes(LINE * 3 + b"\n  \n" + line + b"\n" + LINE)
    with pytest.raises(Refused) as caught:
        opened("jsonl", tmp_path, glob="*.jsonl", field="text")
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.span) == ("E0616", SPAN), diagnostic.render()
    assert "line 6 of `b.jsonl`" in diagnostic.message
    assert message in diagnostic.message
    assert help in (diagnostic.help or "")
    assert all("\n" not in each for each in (diagnostic.message, *diagnostic.notes))
    assert [each.suffix for each in kept.iterdir() if each.suffix != ".lock"] == [".ids"]  # a.jsonl's


def test_an_endless_line_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("partita.runtime.data.jsonl.LONGEST", 1000)
    (tmp_path / "a.jsonl").write_bytes(LINE + b" " * 5000)
    with pytest.raises(Refused, match=r"line 2 of `a\.jsonl` has more than 1,000 bytes"):
        opened("jsonl", tmp_path, glob="*.jsonl", field="text")


BAD_TABLES: dict[str, tuple[dict[str, object], str, str, str]] = {
    "no column": ({"body": ["a"], "n": [1]}, "E0616", "`a.parquet` has no column `text`", '`column = "body"`'),
    "numbers": ({"text": [1, 2]}, "E0616", "`text` of `a.parquet` holds int64, not text", ""),
    "lists": ({"text": [["a"], ["b"]]}, "E0616", "holds list<", ""),
    "null": ({"text": ["a", "b", None, "c"]}, "E0616", "`text` in row 3 of `a.parquet` is null", ""),
    "bytes": ({"text": [b"a", b"\xe9"]}, "E0603", "cannot read `a.parquet`: Invalid UTF8", ""),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_bad_table_is_named(name: str, tmp_path: Path):
    table, code, message, help = BAD_TABLES[name]
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with pytest.raises(Refused) as caught:
        opened("parquet", tmp_path, glob="*.parquet", column="text")
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.span) == (code, SPAN), diagnostic.render()
    assert message in diagnostic.message
    assert help in (diagnostic.help or "")


@pytest.mark.parametrize("content", [b"", b"PAR1", b'{"text": "a"}\n', b"PAR1" + bytes(100) + b"PAR1"])
def test_what_is_no_table_is_refused(content: bytes, tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(Refused, match=r"cannot read `a\.parquet`"):
        opened("parquet", tmp_path, glob="*.parquet", column="text")


def test_kinds_of_text_are_read_alike(tmp_path: Path):
    texts = pyarrow.array(["a document", "wörter", "a document"] * 3)
    for i, each in enumerate((texts, texts.cast("large_string"), texts.cast("binary"), texts.dictionary_encode())):
        pyarrow.parquet.write_table(pyarrow.table({"text": each}), tmp_path / f"{i}.parquet")
        dataset = opened("parquet", tmp_path, glob=f"{i}.parquet", column="text")
        assert bytes(all_ids(dataset)).decode() == "".join(texts.to_pylist())


def test_unusable_tokenizers_are_refused(tmp_path: Path):
    tokenizer().save(str(tmp_path / "t.json"))
    write_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "bad.json").write_text('{"version": 1}')
    (tmp_path / "bad.bin").write_bytes(b"\xff\xfe")
    for arguments, code, message in (
        ({"tokenizer": "none.json"}, "E0601", "no file matches `none.json`"),
        ({"tokenizer": "../t.json"}, "E0602", "leads out"),
        ({"tokenizer": "bad.json"}, "E0619", "`bad.json` is not a tokenizer: "),
        ({"tokenizer": "bad.bin"}, "E0619", "`bad.bin` is not a tokenizer: "),
        ({"tokenizer": "t.json", "end": "</s>"}, "E0619", "`t.json` has no token `</s>`"),
    ):
        with pytest.raises(Refused) as caught:
            opened("jsonl", tmp_path, glob="a.jsonl", field="text", **arguments)
        (diagnostic,) = caught.value.diagnostics
        assert (diagnostic.code, diagnostic.span) == (code, SPAN), diagnostic.render()
        assert message in diagnostic.message
    assert diagnostic.notes == (f"its special tokens: `{END}`, `<s>`",)
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(Refused, match="exclude each other"):
        opened("text", tmp_path, glob="a.txt", alphabet="chars", tokenizer="t.json")
    (tmp_path / "b.txt").write_bytes(b"one\ntwo \xe9")
    with pytest.raises(Refused, match=r"`b\.txt` is not UTF-8 text: byte 8 is 0xe9"):
        opened("text", tmp_path, glob="b.txt", alphabet="bytes", tokenizer="t.json")


def test_bytes_of_a_text_are_counted_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("partita.runtime.data.text.PIECE", 4)
    tokenizer().save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthree\nfour\n\xc3\xa9\nfive \xe9\n")
    with pytest.raises(Refused, match=r"`a\.txt` is not UTF-8 text: byte 27 is 0xe9"):
        opened("text", tmp_path, glob="a.txt", alphabet="bytes", tokenizer="t.json")


def test_ids_beyond_the_vocabulary_are_refused_before_any_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("partita.runtime.data.windows.CHECKED_AT_ONCE", 0)
    tokenizer().save(str(tmp_path / "t.json"))
    write_lines(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(Refused, match=r"has the id 2\d\d, which is out of range for `tokens`"):
        open_dataset(call("jsonl", glob="a.jsonl", field="text", tokenizer="t.json"), (ids("tokens", limit=200),), 0,
                     tmp_path)  # fmt: skip


def test_a_missing_package_is_said_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def lacking(module: str) -> object:
        raise ModuleNotFoundError(name=module)

    monkeypatch.setattr(packages, "import_module", lacking)
    write_rows(tmp_path / "a.parquet", TEXTS)
    (tmp_path / "t.json").write_text("{}")
    for arguments, message in (
        ({"column": "text"}, "`parquet` needs pyarrow"),
        ({"column": "text", "tokenizer": "t.json"}, "`tokenizer` needs tokenizers"),
    ):
        with pytest.raises(Refused, match=message) as caught:
            opened("parquet", tmp_path, glob="*.parquet", **arguments)
        assert caught.value.diagnostics[0].code == "E0617"
        assert caught.value.diagnostics[0].help == "pip install 'partita[data]'"


# ---------------------------------------------------------------- what is kept


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files whose documents were read."""
    found: list[str] = []
    before = documents._encoded

    def noted(path: Path, name: str, *others: object) -> Iterator[cache.Part]:
        found.append(name)
        return before(path, name, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(documents, "_encoded", noted)
    return found


def test_documents_are_encoded_once(tmp_path: Path, made: list[str]):
    tokenizer().save(str(tmp_path / "t.json"))
    write_lines(tmp_path / "a.jsonl", TEXTS)
    write_lines(tmp_path / "b.jsonl", TEXTS[1:])

    def again(**arguments: object) -> list[str]:
        made.clear()
        first = all_ids(opened("jsonl", tmp_path, **{"glob": "*.jsonl", "field": "text", **arguments}))
        there = list(made)
        assert all_ids(opened("jsonl", tmp_path, **{"glob": "*.jsonl", "field": "text", **arguments})) == first
        assert made == there
        return there

    assert again() == ["a.jsonl", "b.jsonl"]
    assert again(end="\n") == ["a.jsonl", "b.jsonl"]
    assert again(tokenizer="t.json") == ["a.jsonl", "b.jsonl"]
    os.utime(tmp_path / "a.jsonl", (5, 5))
    (tmp_path / "b.jsonl").rename(tmp_path / "c.jsonl")
    assert again() == []
    write_lines(tmp_path / "c.jsonl", TEXTS[2:])
    write_lines(tmp_path / "d.jsonl", TEXTS[3:])
    assert again() == ["c.jsonl", "d.jsonl"]
    other = tokenizer()
    other.add_tokens(["quick"])
    other.save(str(tmp_path / "t.json"))
    assert again(tokenizer="t.json") == ["a.jsonl", "c.jsonl", "d.jsonl"]


def test_another_field_of_a_file_is_other_documents(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 60, "answer": "y" * 60}) + "\n")
    for field, letter in (("text", "x"), ("answer", "y")):
        assert set(all_ids(opened("jsonl", tmp_path, glob="a.jsonl", field=field))) == {ord(letter)}


def test_a_large_file_is_another_when_it_was_written_again(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Of which only blocks are hashed, between which it may have changed."""
    monkeypatch.setattr(documents, "WHOLE", 10)
    write_lines(tmp_path / "a.jsonl", TEXTS)
    for time in (5, 5, 6):
        os.utime(tmp_path / "a.jsonl", (time, time))
        opened("jsonl", tmp_path, glob="a.jsonl", field="text")
    assert made == ["a.jsonl"] * 2


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_entry_is_made_anew(damage: bytes | None, tmp_path: Path, kept: Path, made: list[str]):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    first = all_ids(opened("jsonl", tmp_path, glob="*.jsonl", field="text"))
    (path,) = kept.glob("*.ids")
    path.write_bytes(path.read_bytes()[8:] if damage is None else damage)
    assert all_ids(opened("jsonl", tmp_path, glob="*.jsonl", field="text")) == first
    assert made == ["a.jsonl"] * 2


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "file" / "kept"))
    with pytest.raises(Refused, match="cannot keep data in") as caught:
        opened("jsonl", tmp_path, glob="*.jsonl", field="text")
    assert caught.value.diagnostics[0].code == "E0618"
    assert "PARTITA_CACHE" in str(caught.value.diagnostics[0].help)


def test_where_ids_are_kept(monkeypatch: pytest.MonkeyPatch):
    assert cache.directory() == Path(os.environ["PARTITA_CACHE"])
    monkeypatch.delenv("PARTITA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.directory() == Path("/somewhere/partita")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.directory() == Path.home() / ".cache/partita"


WRITER = """
import sys, time
import numpy as np
from partita.runtime.data import cache

def parts():
    for i in range(5):
        yield np.full(3 << 20, i, np.uint8), True
        print("part", flush=True)
        time.sleep(float(sys.argv[1]))

found = cache.entry("abc", parts, np.dtype("u1"), None)
print("ids", len(found.ids), found.ends.tolist(), found.largest, flush=True)
"""


def writer(seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(seconds)], stdout=subprocess.PIPE, text=True)


@pytest.mark.soak
def test_of_several_processes_one_makes_it_and_a_killed_one_leaves_nothing(kept: Path):
    killed = writer(100)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "part\n"
    others = [writer(0), writer(0)]
    try:
        end = monotonic() + 60
        while not list(kept.glob("*.part")) and monotonic() < end:
            sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        outputs = sorted(each.communicate(timeout=60)[0] for each in others)
    finally:
        for each in (killed, *others):
            each.kill()
            each.communicate()
    last = f"ids {15 << 20} {[(3 << 20) * i for i in range(1, 6)]} 4\n"
    assert outputs == [last, "part\n" * 5 + last]
    assert [each.name for each in kept.iterdir()] == ["abc.ids"]
