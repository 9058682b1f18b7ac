"""Files of tensors that a stranger has forged, with sizes and hashes to match: each is found out by its header."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.runtime.checkpoint.checksummed import checked, with_checksum
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.loading import Commit
from partita.runtime.checkpoint.shards import opened
from tests.runtime.checkpoint.runs import ONE_RANK, plan_of, trained

FILE, STEP = "rank-0.safetensors", "step-00000002"
NAME = "m.gain"  # of a tensor f32[8]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    trained(plan_of("train.steps=2", *ONE_RANK), directory)
    return directory / "checkpoints"


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def forged(path: Path, data: bytes) -> None:
    """Put a file in the place of rank 0's, and its size and hash into the manifest."""
    (path / STEP / FILE).write_bytes(data)
    manifest = path / STEP / "manifest.json"
    value = checked(manifest.read_bytes()).value
    value["files"][0] = {"size": len(data), "sha256": sha256(data).hexdigest()}
    manifest.write_bytes(with_checksum(value))


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes of the tensors."""
    data = (path / STEP / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: bytes, tensors: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + tensors


def problems(path: Path) -> list[str]:
    with Commit(path, read_manifest(path, 2)) as commit:
        return list(commit.problems([0]))


def test_a_file_put_together_again_is_whole(copy: Path):
    header, tensors = parts(copy)
    forged(copy, joined(json.dumps(header).encode(), tensors))
    assert problems(copy) == []


def entry(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[NAME].update(changes)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "one tensor less": lambda header: header.pop(NAME),
    "one more": lambda header: header.update(other={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "a path for a name": lambda header: header.update({"../" + NAME: header.pop(NAME)}),
    "an absolute path": lambda header: header.update({"/etc/passwd": header.pop(NAME)}),
    "another dtype": entry(dtype="I32"),
    "no dtype": entry(dtype="OBJECT"),
    "a dtype that is no word": entry(dtype=["F32"]),
    "another shape": entry(shape=[2, 4]),
    "a negative size": entry(shape=[-8]),
    "sizes beyond all memory": entry(shape=[1 << 40, 1 << 40]),
    "a size beyond 64 bits": entry(shape=[1 << 64]),
    "a size that is no integer": entry(shape=[8.5]),
    "a shape of a million axes": entry(shape=[1] * 1_000_000),
    "offsets beyond the file": entry(data_offsets=[1 << 40, (1 << 40) + 32]),
    "offsets backwards": entry(data_offsets=[32, 0]),
    "a negative offset": entry(data_offsets=[-32, 0]),
    "offsets of another tensor": lambda header: header[NAME].update(data_offsets=header["m.wte"]["data_offsets"]),
    "no offsets": lambda header: header[NAME].pop("data_offsets"),
    "three offsets": entry(data_offsets=[0, 32, 64]),
    "metadata that is no text": lambda header: header.update(__metadata__={"format": {"nested": 1}}),
    "an entry that is none": lambda header: header.update({NAME: None}),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_forged_entry_is_found(change: Callable[[dict[str, Any]], object], copy: Path):
    header, tensors = parts(copy)
    change(header)
    forged(copy, joined(json.dumps(header).encode(), tensors))
    (problem,) = problems(copy)
    assert problem.startswith(FILE)


def twice(header: bytes) -> bytes:
    """A key twice: the first is another tensor's size, the second the right one."""
    return header.replace(
        b'{"', b'{"' + NAME.encode() + b'": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "', 1
    )


TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda header: b"",
    "no JSON": lambda header: header[:-1],
    "a list": lambda header: b"[" + header + b"]",
    "bytes that are no text": lambda header: b"\xff" + header,
    "a surrogate": lambda header: header.replace(NAME.encode(), b"\\ud800"),
    "an endless nesting": lambda header: b'{"a":' + b"[" * 1_000_000,
    "a number of a million digits": lambda header: header.replace(
        b'"shape": [8]', b'"shape": [' + b"9" * 1_000_000 + b"]"
    ),
    "NaN": lambda header: header.replace(b'"shape": [8]', b'"shape": [NaN]'),
}


@pytest.mark.parametrize("change", TEXTS.values(), ids=TEXTS)
def test_a_forged_header_is_found(change: Callable[[bytes], bytes], copy: Path):
    header, tensors = parts(copy)
    before = json.dumps(header).encode()
    after = change(before)
    assert after != before
    forged(copy, joined(after, tensors))
    (problem,) = problems(copy)
    assert problem.startswith(FILE)


def test_a_name_that_stands_twice_is_read_as_one_of_the_right_form_or_found(copy: Path):
    header, tensors = parts(copy)
    forged(copy, joined(twice(json.dumps(header).encode()), tensors))
    found = problems(copy)
    with Commit(copy, read_manifest(copy, 2)) as commit:
        if not found:
            assert commit.read(NAME).shape == (8,)


@pytest.mark.parametrize("length", [0, 1, 7, 1 << 20, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
def test_a_forged_length_of_the_header_is_found(length: int, copy: Path):
    data = (copy / STEP / FILE).read_bytes()
    forged(copy, length.to_bytes(8, "little") + data[8:])
    (problem,) = problems(copy)
    assert problem.startswith(FILE)


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\0" * 8, b"PK\x03\x04" * 100])
def test_what_is_no_such_file(data: bytes, tmp_path: Path):
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(Corrupt, match=r"rank-0\.safetensors is not a file of tensors"), opened(tmp_path / FILE):
        pass


def test_nothing_waits_for_a_pipe_and_nothing_follows_into_a_folder(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "device"):
        with pytest.raises(Corrupt, match=f"{name} is not a regular file"), opened(tmp_path / name):
            pass
    with pytest.raises(Corrupt, match="missing is not a file of tensors"), opened(tmp_path / "missing"):
        pass


def test_the_whole_file_is_what_it_was(saved: Path):
    """The forgeries above are of this one."""
    header, _ = parts(saved)
    assert header[NAME]["shape"] == [8]
    with opened(saved / STEP / FILE) as file:
        assert file.get_tensor(NAME).dtype == torch.float32
