"""Files at addresses, read from an S3 server on this machine: copied once, and anew when they change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.dsl.diagnostic import Refused
from partita.dsl.syntax.source import Span
from partita.runtime.data import cache, packages
from partita.runtime.data.binding import identify
from partita.runtime.data.registry import open_dataset
from partita.runtime.data.windows import Windows
from partita.runtime.inference.encoding import encoding_of
from tests.runtime.data.test_data import ARRAYS, SPAN, call, ids
from tests.servers import S3, http, s3

TOKENS = (ids("tokens", limit=1 << 16),)
LINES = [{"text": f"document {i} " * 3} for i in range(20)]


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3("corpus") as found:
        yield found


@pytest.fixture
def bucket(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "kept"))
    server.empty()
    put = server.put
    put("shards/0.bin", np.arange(700, dtype="<u2").tobytes())
    put("shards/1.bin", np.arange(700, 2000, dtype="<u2").tobytes())
    for part in (0, 1):
        lines = "".join(json.dumps(each) + "\n" for each in LINES[part * 10 : part * 10 + 10])
        put(f"text/{part}.jsonl", lines.encode())
    return put


def read(name: str, root: Path, **arguments: object) -> list[int]:
    dataset = open_dataset(call(name, **arguments), TOKENS, 0, root)
    assert isinstance(dataset, Windows)
    return np.asarray(dataset.training).tolist()


@pytest.mark.soak
def test_objects_are_read_as_files(bucket: Any, tmp_path: Path):
    assert read("tokens", tmp_path, path="s3://corpus/shards/*.bin") == list(range(2000))
    text = "".join(each["text"] for each in LINES)
    assert bytes(read("jsonl", tmp_path, glob="s3://corpus/text/*.jsonl", field="text")).decode() == text
    assert bytes(read("text", tmp_path, glob="s3://corpus/text/0.jsonl", alphabet="bytes", end="|")).endswith(b"}\n|")
    np.save(tmp_path / "a.npy", np.arange(50))
    bucket("a.npy", (tmp_path / "a.npy").read_bytes())
    assert read("tokens", tmp_path, path="s3://corpus/a.npy") == list(range(50))
    np.savez(tmp_path / "d.npz", image=np.zeros((20, 4)), label=np.zeros(20, int), mask=np.ones(4, bool))
    bucket("d.npz", (tmp_path / "d.npz").read_bytes())
    items = open_dataset(call("arrays", path="s3://corpus/d.npz"), ARRAYS, 0, tmp_path)
    assert items.batch(1)["image"].shape == (6, 4)
    files = identify(call("tokens", path="s3://corpus/shards/*.bin"), tmp_path)
    assert [(each.name, each.size) for each in files] == [
        ("s3://corpus/shards/0.bin", 1400),
        ("s3://corpus/shards/1.bin", 2600),
    ]


def test_objects_are_copied_once_and_anew_when_they_change(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copied: list[str] = []
    before = cache.file

    def noted(name: str, fetch: Callable[[str], None], span: Span | None) -> Path:
        return before(name, lambda path: (copied.append(name), fetch(path))[1], span)  # type: ignore[func-returns-value]

    monkeypatch.setattr(cache, "file", noted)
    for _ in range(3):
        assert read("tokens", tmp_path, path="s3://corpus/shards/*.bin") == list(range(2000))
    assert len(copied) == len(set(copied)) == 2
    bucket("shards/1.bin", np.arange(1, 1301, dtype="<u2").tobytes())
    assert read("tokens", tmp_path, path="s3://corpus/shards/1.bin") == list(range(1, 1301))
    assert len(copied) == len(set(copied)) == 3
    assert not list((tmp_path / "kept").glob("*.part"))


@pytest.mark.soak
def test_what_is_wrong_with_an_address_is_said(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bucket("text/1.jsonl", b'{"text": "a"}\n{"body": 1}\n')

    def refused(name: str, **arguments: object) -> tuple[str, str]:
        with pytest.raises(Refused) as caught:
            read(name, tmp_path, **arguments)
        (found,) = caught.value.diagnostics
        assert found.span == SPAN
        return found.code, found.message

    assert refused("tokens", path="s3://corpus/none.bin") == ("E0601", "nothing is at `s3://corpus/none.bin`")
    assert refused("tokens", path="s3://corpus/none/*.bin") == ("E0601", "nothing is at `s3://corpus/none/*.bin`")
    assert refused("tokens", path="s3://nowhere/a.bin")[0] == "E0601"
    assert refused("tokens", path="file:///etc/passwd")[0] == "E0602"
    assert refused("tokens", path="local://a")[0] == "E0602"
    code, message = refused("jsonl", glob="s3://corpus/text/*.jsonl", field="text")
    assert (code, message) == ("E0616", "line 2 of `s3://corpus/text/1.jsonl` has no field `text`")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    code, message = refused("tokens", path="s3://corpus/shards/0.bin")
    assert (code, message.startswith("cannot read `s3://corpus/shards/0.bin`: ")) == ("E0603", True)
    s3fs.S3FileSystem.clear_instance_cache()

    def lacking(module: str) -> object:
        raise ModuleNotFoundError(name=module)

    monkeypatch.setattr(packages, "import_module", lacking)
    assert refused("tokens", path="s3://corpus/shards/0.bin") == ("E0617", "`s3://` needs fsspec")


# ---------------------------------------------------------------- other servers


def test_files_of_a_web_server_are_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "kept"))
    folder = tmp_path / "files"
    folder.mkdir()
    np.arange(900, dtype="<u2").tofile(folder / "a.bin")
    (folder / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in LINES))
    with http(folder) as url:
        assert read("tokens", tmp_path, path=f"{url}/a.bin") == list(range(900))
        text = "".join(each["text"] for each in LINES)
        assert bytes(read("jsonl", tmp_path, glob=f"{url}/a.jsonl", field="text")).decode() == text
        (file,) = identify(call("tokens", path=f"{url}/a.bin"), tmp_path)
        assert (file.name, file.size) == (f"{url}/a.bin", 1800)
        # It is copied anew when it changes; not when it is there already.
        np.arange(5, 700, dtype="<u2").tofile(folder / "a.bin")
        assert read("tokens", tmp_path, path=f"{url}/a.bin") == list(range(5, 700))
        with pytest.raises(Refused) as caught:
            read("tokens", tmp_path, path=f"{url}/none.bin")
        (found,) = caught.value.diagnostics
        assert (found.code, found.message) == ("E0601", f"nothing is at `{url}/none.bin`")
    with pytest.raises(Refused) as caught:
        read("tokens", tmp_path, path=f"{url}/a.bin")
    (found,) = caught.value.diagnostics
    assert (found.code, found.message.startswith(f"cannot read `{url}/a.bin`: ")) == ("E0603", True)


@pytest.mark.parametrize("end", [None, "~"])
def test_characters_are_numbered_alike_for_training_and_for_sampling(end: str | None, bucket: Any, tmp_path: Path):
    """Of files at an address as well, and with what ends each of them."""
    bucket("chars/0.txt", "ab€".encode())
    bucket("chars/1.txt", b"zy" * 20)
    text = call("text", glob="s3://corpus/chars/*.txt", alphabet="chars", end=end)
    encoding = encoding_of(text, tmp_path, None)
    spelled = f"ab€{end or ''}{'zy' * 20}{end or ''}"
    arguments = {"alphabet": "chars", "end": end}
    assert read("text", tmp_path, glob="s3://corpus/chars/*.txt", **arguments) == encoding.ids(spelled)
    assert "".join(encoding.text(encoding.ids(spelled))) == spelled
