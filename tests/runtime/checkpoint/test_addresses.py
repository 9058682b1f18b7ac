"""Checkpoints at addresses, on servers of this machine: whole or not there, whatever happens, and the same numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import partita
from partita.cli.main import main
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.runtime import addresses
from partita.runtime.addresses import Address
from partita.runtime.checkpoint.address_store import AddressStore, steps_in
from partita.runtime.checkpoint.checkpoints import Checkpoints
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.folders import RemoteFolder
from partita.runtime.checkpoint.loading import Commit
from partita.runtime.checkpoint.manifest import Manifest
from partita.runtime.checkpoint.remote_tensors import RemoteTensors
from partita.runtime.checkpoint.settings import settings_of
from partita.runtime.checkpoint.shards import opened
from partita.runtime.data import packages
from partita.runtime.data.remote import fetched
from partita.runtime.training import StepResult
from tests.marks import soak
from tests.runtime.checkpoint import runs
from tests.runtime.checkpoint.runs import ONE_RANK, TEXT, Outcome, plan_of, same, tensors, trained
from tests.servers import S3, gs, http, refusing, s3

PLACE = Address("s3://runs/m")
# As small as a model can be, on two ranks; and one on more of them, of which all kinds of tensors are saved.
SMALL = """
axis batch = 4, a = 6, b = 8

model m(x: [batch, a]) {
  param w: [a, b] ~ normal(0.5)
  output out = dot(x, w, over = a)
  loss mse(sum(dot(x, w, over = a), over = b), sum(x, over = a))
}

mesh cluster(data = 2)

layout split on cluster {
  shard batch -> data
  shard state -> data
}

train {
  data = random()
  optimizer = adamw(lr = 0.1)
  steps = 6
  checkpoint = every(2)
}
"""
ONE, TWO = ("cluster.data=1",), ("cluster.data=2", "cluster.pipe=1", "cluster.tensor=1")
small = partial(plan_of, text=SMALL)


def saving(interval: int = 2, keep: int = 3, place: str = str(PLACE)) -> str:
    return f'train.checkpoint=every({interval}, dir = "{place}", keep = {keep})'


@pytest.fixture(scope="module")
def running() -> Iterator[S3]:
    with s3("runs") as server:
        yield server


@pytest.fixture
def server(running: S3) -> S3:
    running.empty()
    return running


def code_of(refused: pytest.ExceptionInfo[Refused]) -> str:
    return refused.value.diagnostics[0].code


# ---------------------------------------------------------------- a run and the next


@pytest.mark.soak
@pytest.mark.parametrize(("text", "one", "two"), [(SMALL, ONE, ()), (TEXT, ONE_RANK, TWO)])
def test_a_run_resumes_from_an_address_bit_for_bit_on_any_mesh(
    text: str, one: tuple[str, ...], two: tuple[str, ...], server: S3, tmp_path: Path
):
    planned = partial(plan_of, text=text)
    trained(planned("train.steps=4", saving(keep=2), *two), tmp_path)
    assert steps_in(PLACE) == [2, 4]
    (first,) = {name.split("-")[2] for name in server.names() if "rank-0" in name and "00000004" in name} or {""}
    assert first
    resumed = trained(planned(saving(keep=2), *two), tmp_path)
    assert resumed.found is not None
    assert resumed.found.note == "resumed from s3://runs/m/step-00000004"
    whole = trained(planned(*two), tmp_path / "local")
    assert resumed.steps == {step: found for step, found in whole.steps.items() if step > 4}
    same(tensors(resumed.run), tensors(whole.run))
    # Of those that are kept, and nothing else.
    assert steps_in(PLACE) == [4, 6]
    kinds = {name.rpartition("/")[2].partition("-")[0] for name in server.names()}
    assert kinds == {"lock", "manifest.json", "rank"}
    other = trained(planned(saving(keep=2), *one), tmp_path)
    assert other.found is not None
    assert other.found.note.endswith("saved on data 2")
    same(tensors(other.run), tensors(whole.run))


def test_what_has_no_manifest_is_no_commit_and_goes_at_the_next_start(server: S3, tmp_path: Path):
    trained(small("train.steps=4", saving(), *ONE), tmp_path)
    left = [name for name in server.names() if "step-00000004/rank" in name]
    server.delete("m/step-00000004/manifest.json")
    assert steps_in(PLACE) == [2]
    resumed = trained(small("train.steps=2", saving(), *ONE), tmp_path)
    assert resumed.found is not None
    assert (resumed.found.step, resumed.codes) == (2, ["W0810"])
    assert left
    assert not set(left) & set(server.names())


@pytest.mark.soak
def test_a_damaged_commit_is_passed_over_and_its_step_saved_again(server: S3, tmp_path: Path):
    trained(small("train.steps=4", saving()), tmp_path)
    name = next(name for name in server.names() if "step-00000004/rank-1" in name)
    content = bytearray(server.get(name))
    content[-1] ^= 1
    server.put(name, bytes(content))
    resumed = trained(small("train.steps=4", saving()), tmp_path)
    assert resumed.found is not None
    assert resumed.found.step == 2
    (said,) = resumed.said
    assert said.code == "W0801"
    assert said.message.startswith("s3://runs/m/step-00000004 is damaged and was skipped: rank-1-")
    assert "m/step-00000004/manifest.json.damaged" in server.names()
    assert steps_in(PLACE) == [2, 4]
    manifest = read_manifest(PLACE, 4)
    with Commit(PLACE, manifest) as commit:
        assert list(commit.problems(range(2))) == []
    # Once so many newer ones are there, what was set aside goes.
    trained(small("train.steps=8", saving(keep=2)), tmp_path)
    assert steps_in(PLACE) == [6, 8]
    assert not [name for name in server.names() if "step-00000004" in name]
    # A file that is missing, and all of them: the run does not begin anew.
    for name in server.names():
        if "rank-0" in name:
            server.delete(name)
    with pytest.raises(Refused, match="each of the 2 checkpoints in s3://runs/m is damaged") as refused:
        trained(small("train.steps=8", saving()), tmp_path)
    assert code_of(refused) == "E0806"


def test_a_run_that_begins_takes_over(server: S3):
    one, two = AddressStore(PLACE, 1), AddressStore(PLACE, 2)
    one.lock()
    with one.save(3) as folder:
        folder.put("rank-0-1.safetensors", b"")
    two.lock()
    with pytest.raises(OSError, match="another run now writes to s3://runs/m"):
        one.commit(3, b"{}", [])
    assert steps_in(PLACE) == []
    two.commit(3, b"{}", [])
    assert steps_in(PLACE) == [3]
    one.abandon(3)
    assert server.names() == ["m/lock", "m/step-00000003/manifest.json"]


def test_an_upload_that_fails_is_not_there(server: S3, monkeypatch: pytest.MonkeyPatch):
    """In parts, as large files are sent."""
    monkeypatch.setattr(addresses, "PIECE", 1 << 10)

    def blocks(fails: bool) -> Iterator[bytes]:
        for _ in range(8):
            yield bytes(1 << 20)
        if fails:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        addresses.write(PLACE / "large", blocks(True))
    assert server.names() == []
    addresses.write(PLACE / "large", blocks(False))
    assert addresses.size_of(PLACE / "large") == 8 << 20
    assert not server.client.list_multipart_uploads(Bucket="runs").get("Uploads")


def test_what_ought_to_be_small_is_not_read_where_it_is_not(server: S3):
    folder = RemoteFolder(PLACE)
    folder.put("a.json", b"123456789")
    assert folder.read("a.json", 9) == b"123456789"
    with pytest.raises(Corrupt, match=r"a\.json has 9 bytes; at most 8 are read"):
        folder.read("a.json", 8)


@pytest.mark.soak
def test_google_cloud_storage_is_an_address_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Checkpoints, large files that are sent in parts, and data."""
    place = Address("gs://runs/m")
    with gs("runs"):
        trained(small("train.steps=4", saving(keep=2, place=str(place))), tmp_path)
        assert steps_in(place) == [2, 4]
        resumed = trained(small(saving(keep=2, place=str(place))), tmp_path)
        assert resumed.found is not None
        assert resumed.found.step == 4
        same(tensors(resumed.run), tensors(trained(small(), tmp_path / "local").run))
        assert steps_in(place) == [4, 6]
        monkeypatch.setattr(addresses, "PIECE", 1 << 10)
        addresses.write(place / "large", iter([bytes(1 << 20)] * 9))
        assert addresses.size_of(place / "large") == 9 << 20
        addresses.remove(place / "large")
        assert addresses.names_in(place) == ["lock", "step-00000004", "step-00000006"]
        addresses.put(Address("gs://runs/data/a.txt"), b"abc")
        ((name, path),) = fetched("gs://runs/data/*.txt", None)
        assert (name, path.read_bytes()) == ("gs://runs/data/a.txt", b"abc")


# ---------------------------------------------------------------- servers that are gone


@pytest.mark.soak
def test_training_goes_on_without_the_server_and_saves_when_it_is_back(
    server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is gone when step 4 is saved, and back as soon as that is said."""

    class Said(list[Diagnostic]):
        def append(self, each: Diagnostic) -> None:
            super().append(each)
            if each.code == "W0802":
                server.start()

    step = Outcome.step

    def told(outcome: Outcome, result: StepResult) -> None:
        step(outcome, result)
        if result.step == 3:
            for thread in threading.enumerate():
                if thread.name == "partita-checkpoint":  # that of step 2
                    thread.join()
            server.stop()

    monkeypatch.setattr(Outcome, "step", told)
    monkeypatch.setattr(runs, "Outcome", partial(Outcome, said=Said()))
    outcome = trained(small(saving(), *ONE), tmp_path)
    assert list(outcome.steps) == [1, 2, 3, 4, 5, 6]
    assert not outcome.unsaved
    (lost,) = (each for each in outcome.said if each.code == "W0802")  # that it waited may be said as well
    assert lost.message.startswith("step 4 was not saved: rank 0: Could not connect to the endpoint URL")
    assert steps_in(PLACE) == [2, 6]


def test_a_server_that_is_gone_at_the_start_is_said(server: S3, tmp_path: Path):
    trained(small("train.steps=2", saving(), *ONE), tmp_path)
    server.stop()
    try:
        with pytest.raises(Refused, match="cannot write to s3://runs/m: Could not connect") as refused:
            trained(small(saving(), *ONE), tmp_path)
        assert code_of(refused) == "E0802"
        with pytest.raises(Refused, match="cannot read s3://runs/m: Could not connect") as refused:
            steps_in(PLACE)
        assert code_of(refused) == "E0819"
    finally:
        server.start()
    assert steps_in(PLACE) == [2]


@pytest.mark.soak
def test_a_server_that_is_lost_while_ranks_load_stops_all_of_them(
    server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And damages nothing: the commit is not taken for a damaged one."""
    trained(small("train.steps=2", saving()), tmp_path)
    loaded = Checkpoints._loaded

    def lost(checkpoints: Checkpoints, saved: Manifest) -> bool:
        if checkpoints.rank.rank == 1:
            raise Refused((Diagnostic("E0819", "cannot read it"),))
        return loaded(checkpoints, saved)

    monkeypatch.setattr(Checkpoints, "_loaded", lost)
    with pytest.raises(Refused):
        trained(small(saving()), tmp_path)
    assert steps_in(PLACE) == [2]


@pytest.mark.soak
def test_what_is_not_permitted_is_said(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import s3fs

    with refusing() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(Refused, match="cannot write to s3://runs/m: Access Denied") as refused:
            trained(small(saving(), *ONE), tmp_path)
        assert code_of(refused) == "E0802"
        with pytest.raises(Refused, match=r"cannot read s3://runs/m: (Access Denied|Forbidden)") as refused:
            steps_in(PLACE)
        assert code_of(refused) == "E0819"
    monkeypatch.undo()
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(Refused, match="cannot write to s3://elsewhere/m: ") as refused:
        trained(small(saving(place="s3://elsewhere/m"), *ONE), tmp_path)
    assert code_of(refused) == "E0802"


@pytest.mark.parametrize(
    ("place", "code", "told"),
    [
        ("ftp://host/m", "E0602", "nothing can be written to `ftp://host/m`"),
        ("https://host/m", "E0602", "nothing can be written to `https://host/m`"),
        ("file:///tmp/m", "E0602", "nothing can be written to `file:///tmp/m`"),
        ("s3://bucket", "E0801", "`s3://bucket` is not a folder of a bucket"),
        ("s3:///", "E0801", "`s3:///` is not a folder of a bucket"),
    ],
)
def test_addresses_that_cannot_be(place: str, code: str, told: str, tmp_path: Path):
    plan = plan_of(text=SMALL.replace("every(2)", f'every(2, dir = "{place}")'))
    with pytest.raises(Refused) as refused:
        settings_of(plan.spec, tmp_path, tmp_path)
    (found,) = refused.value.diagnostics
    assert (found.code, found.message) == (code, told)
    assert found.span is not None
    assert (found.span.line, found.span.column) == (21, 3)


def test_a_package_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch):
    def lacking(module: str) -> object:
        raise ModuleNotFoundError(name=module)

    monkeypatch.setattr(packages, "import_module", lacking)
    with pytest.raises(Refused) as refused:
        steps_in(PLACE)
    (found,) = refused.value.diagnostics
    assert (found.code, found.message, found.help) == ("E0617", "`s3://` needs fsspec", "pip install 'partita[remote]'")


# ---------------------------------------------------------------- commands


@pytest.fixture
def folder(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `m.par` to be in, whose run is at the address and in `local`."""
    monkeypatch.chdir(tmp_path)
    Path("m.par").write_text(SMALL.replace("every(2)", f'every(2, dir = "{PLACE}")'))
    trained(small("train.steps=2", saving()), tmp_path)
    return tmp_path


def checkpoint(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["checkpoint", *arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


@pytest.mark.soak
def test_commands_take_addresses(server: S3, folder: Path, capsys: pytest.CaptureFixture[str]):
    (row,) = json.loads(checkpoint(capsys, "ls", str(PLACE), "--json")[1])
    assert (row["step"], row["ranks"], row["problem"]) == (2, 2, None)
    assert "s3://runs/m/step-00000002" in checkpoint(capsys, "show", f"{PLACE}/step-00000002/")[1]
    status, out, _ = checkpoint(capsys, "verify", str(PLACE))
    assert (status, out.startswith("s3://runs/m/step-00000002: intact (2 files")) == (0, True)
    # Out to an address, and in from there, to another one.
    assert checkpoint(capsys, "export", str(PLACE), "-o", "s3://runs/out/m.safetensors", "--states")[0] == 0
    assert checkpoint(capsys, "export", str(PLACE), "-o", "m.safetensors", "--states")[0] == 0
    assert server.get("out/m.safetensors") == Path("m.safetensors").read_bytes()
    status, out, _ = checkpoint(capsys, "import", "s3://runs/new", "s3://runs/out/m.safetensors", "m.par")
    assert status == 0
    assert 'checkpoint = every(2, dir = "s3://runs/new", keep = 3)    in the train block of m.par' in out
    manifest = read_manifest(Address("s3://runs/new"), 0)
    with Commit(Address("s3://runs/new"), manifest) as commit:
        same({name: commit.read(name) for name in load_file("m.safetensors")}, load_file("m.safetensors"))
    assert "already has checkpoints" in checkpoint(capsys, "import", "s3://runs/new", "m.safetensors", "m.par")[2]
    server.put(next(name for name in server.names() if "m/step-00000002/rank-0" in name), b"short")
    status, out, _ = checkpoint(capsys, "verify", str(PLACE))
    assert (status, "has 5 bytes instead of" in out) == (1, True)
    for arguments, code in (
        (["ls", "s3://runs/none"], "E0807"),
        (["ls", "s3://none/none"], "E0807"),
        (["ls", "ftp://host/m"], "E0602"),
        (["export", str(PLACE), "-o", "https://host/m.safetensors"], "E0602"),
        (["import", "s3://runs/x", "s3://runs/none.safetensors", "m.par"], "E0808"),
        (["import", "https://host/x", "m.safetensors", "m.par"], "E0602"),
    ):
        status, _, err = checkpoint(capsys, *arguments)
        assert (status, f"error[{code}]" in err) == (1, True), (arguments, err)


@pytest.mark.soak
def test_models_of_others_come_from_addresses_and_go_there(
    server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    text = "axis batch = 4, a = 6, b = 5\nmodel m(x: [batch, a]) {\n  param w: [a, b] ~ ones()\n"
    text += "  loss mean(dot(x, w, over = a))\n}\n"
    train = 'train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }\nweights hf { m.w = "w" [b, a] }\n'
    Path("m.par").write_text(text + train)
    Path("theirs").mkdir()
    save_file({"w": torch.randn(5, 6)}, "theirs/model.safetensors")
    Path("theirs/config.json").write_text('{"model_type": "m"}')
    for path in Path("theirs").iterdir():
        server.put(str(path), path.read_bytes())
    options = ["m.par", "--as", "hf"]
    assert checkpoint(capsys, "import", "s3://runs/in", "s3://runs/theirs", *options)[0] == 0
    assert checkpoint(capsys, "export", "s3://runs/in", "--as", "hf", "-o", "s3://runs/out")[0] == 0
    assert [name for name in server.names() if name.startswith("out/")] == ["out/config.json", "out/model.safetensors"]
    Path("found.safetensors").write_bytes(server.get("out/model.safetensors"))
    same(load_file("found.safetensors"), load_file("theirs/model.safetensors"))
    status, _, err = checkpoint(capsys, "export", "s3://runs/in", "--as", "hf", "-o", "s3://runs/out")
    assert (status, "cannot write s3://runs/out: Directory not empty" in err) == (2, True)
    # Over HTTP as well.
    with http(tmp_path) as url:
        assert checkpoint(capsys, "import", "web", f"{url}/theirs", *options)[0] == 0
        assert checkpoint(capsys, "import", "single", f"{url}/theirs/model.safetensors", *options)[0] == 0
    with http(tmp_path, ranges=False) as url:
        status, _, err = checkpoint(capsys, "import", "none", f"{url}/theirs", *options)
        assert status == 1
        assert not Path("none").exists()


def test_a_model_is_loaded_from_an_address(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("m.par").write_text(SMALL)
    made = partita.train("m.par", 'train.checkpoint=every(6, dir = "s3://runs/t")', *ONE)
    x = torch.randn(3, 6)
    model = partita.load_model("m.par", run="s3://runs/t")
    assert str(model.checkpoint) == "s3://runs/t/step-00000006"
    assert torch.equal(model({"x": x})["out"], x @ made.parameters["m.w"])
    # What was copied from there stands anywhere: in a directory, and behind a server of files.
    for name in server.names():
        if name.startswith("t/step"):
            path = tmp_path / "copied" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(server.get(name))
    assert torch.equal(partita.load_model("m.par", run="copied/t").parameters["m.w"], made.parameters["m.w"])
    with http(tmp_path / "copied") as url:
        for place in (f"{url}/t", f"{url}/t/step-00000006"):
            assert torch.equal(partita.load_model("m.par", run=place).parameters["m.w"], made.parameters["m.w"])
        with pytest.raises(Refused, match="there is no checkpoint in"):
            partita.load_model("m.par", run=f"{url}/none")
    with http(tmp_path / "copied", ranges=False) as url, pytest.raises(Refused, match="range requests") as refused:
        partita.load_model("m.par", run=f"{url}/t/step-00000006")
    assert code_of(refused) == "E0819"


# ---------------------------------------------------------------- files of tensors


def test_a_file_at_an_address_is_read_as_a_file(server: S3, tmp_path: Path):
    tensors = {
        "a": torch.randn(6, 4, 3),
        "b": torch.arange(5, dtype=torch.int64),
        "c": torch.randn(3).bfloat16(),
        "d": torch.tensor(2.5),
        "e": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "t.safetensors")
    content = (tmp_path / "t.safetensors").read_bytes()
    server.put("t.safetensors", content)
    regions = [(slice(0, 6), slice(0, 4), slice(0, 3)), (slice(2, 4), slice(1, 3), slice(2, 3)), (slice(3, 3),) * 3]
    with opened(Address("s3://runs/t.safetensors")) as ours, opened(tmp_path / "t.safetensors") as theirs:
        assert set(ours.keys()) == set(theirs.keys())
        for name in tensors:
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert torch.equal(ours.get_tensor(name), tensors[name])
        for region in regions:
            assert torch.equal(ours.get_slice("a")[region], tensors["a"][region])
    damaged = [b"", content[:7], content[:100], content[:-1], b"\xff" * 100, (2).to_bytes(8, "little") + b"[]"]
    length = int.from_bytes(content[:8], "little")
    for old, new in ((b'"F32"', b'"F99"'), (b'"data_offsets"', b'"data_0ffsets"'), (b"[6,4,3]", b"[9,4,3]")):
        assert old in content[: 8 + length]
        damaged.append(content.replace(old, new))
    for each in damaged:
        server.put("t.safetensors", each)
        with pytest.raises(Corrupt, match=r"t\.safetensors is not a file of tensors"):
            RemoteTensors.of(Address("s3://runs/t.safetensors"))


def test_a_directory_of_the_version_before_is_read(tmp_path: Path):
    from tests.runtime.checkpoint.test_damage import changed

    trained(small("train.steps=2", *ONE), tmp_path)

    def before(manifest: dict) -> None:
        manifest["version"] = 2
        del manifest["suffix"]

    changed(tmp_path / "checkpoints", 2, before)
    assert read_manifest(tmp_path / "checkpoints", 2).suffix == ""
    changed(tmp_path / "checkpoints", 2, lambda manifest: manifest.update(version=3, suffix="/../x"))
    with pytest.raises(Corrupt, match="suffix"):
        read_manifest(tmp_path / "checkpoints", 2)


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("moment", soak(*range(8)))
def test_a_run_that_is_killed_while_it_saves_leaves_its_last_checkpoint(
    moment: int, server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two processes, killed at several moments of saves; the run that follows ends as one that nobody struck."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.par").write_text(TEXT)
    options = [saving(1), "train.steps=8", "train.eval=none", *TWO]
    run = [sys.executable, "-m", "partita", "run", "m.par", *options, "--transport", "gloo"]
    process = subprocess.Popen(
        run, env=server.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    end = time.monotonic() + 120
    seen: set[int] = set()
    while time.monotonic() < end and process.poll() is None:
        names = server.names()
        seen |= set(steps_in(PLACE))
        partial = [name for name in names if f"step-0000000{moment // 2 + 2}/rank" in name]
        if len(partial) > moment % 2 * 2:
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    left = steps_in(PLACE)
    assert set(left) >= set(sorted(seen)[-1:])
    for step in left:
        manifest = read_manifest(PLACE, step)
        with Commit(PLACE, manifest) as commit:
            assert list(commit.problems(range(2))) == []
    end = time.monotonic() + 30
    while time.monotonic() < end:  # the killed run's directory is free
        done = subprocess.run(run, env=server.environment, capture_output=True, text=True, timeout=300, check=False)
        if "E0803" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    manifest = read_manifest(PLACE, 8)
    whole = trained(plan_of("train.steps=8", "train.eval=none", *TWO), tmp_path / "whole")
    with Commit(PLACE, manifest) as commit:
        same({name: commit.read(name) for name in tensors(whole.run)}, tensors(whole.run))


@pytest.mark.soak
def test_a_run_whose_server_dies_ends_as_one_whose_disk_is_full(server: S3, tmp_path: Path):
    """It trains to its end, says what it could not save, and exits with status 3."""
    (tmp_path / "m.par").write_text(TEXT)
    options = [saving(100), "train.steps=400", "train.eval=none", *TWO]
    run = [sys.executable, "-m", "partita", "run", "m.par", *options, "--transport", "gloo"]
    process = subprocess.Popen(
        run, cwd=tmp_path, env=server.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not steps_in(PLACE):
        assert process.poll() is None
        time.sleep(0.05)
    server.stop()
    try:
        out, err = process.communicate(timeout=300)
    finally:
        server.start()
    assert process.returncode == 3, out + err
    assert "step 400/400" in out
    assert "W0802]: step 400 was not saved" in err
    assert "Traceback" not in err
    assert steps_in(PLACE)
