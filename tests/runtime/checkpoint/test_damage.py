"""Whatever happens to a checkpoint on disk is found and named, and the one before it is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from partita.cli.main import main
from partita.dsl.diagnostic import Refused
from partita.runtime.bad_steps import History
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.checksummed import checked, with_checksum
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.folders import LocalFolder
from partita.runtime.checkpoint.loading import Commit
from partita.runtime.checkpoint.manifest import VERSION
from partita.runtime.checkpoint.saving import _marker
from tests.marks import examples
from tests.runtime.checkpoint.runs import ONE_RANK, plan_of, same, tensors, trained, without_checkpoints

NEWEST = "step-00000004"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4, of eight ranks."""
    directory = tmp_path_factory.mktemp("saved")
    trained(plan_of("train.steps=4"), directory)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def link(path: Path) -> None:
    """The same content, by a link to another place."""
    elsewhere = path.parent.parent.parent / f"elsewhere-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def pickled(path: Path) -> None:
    """What would run code if anything here were unpickled."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(path.parent.parent.parent / "boom"),)

    torch.save(Bomb(), path)


def surplus_link(path: Path) -> None:
    (path.parent / "other").symlink_to("/etc/passwd")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


FIRST, LAST, MANIFEST = "rank-0.safetensors", "rank-7.safetensors", "manifest.json"
DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (LAST, truncate, "rank-7.safetensors has "),
    (LAST, lambda path: path.write_bytes(path.read_bytes() + b"\0"), "rank-7.safetensors has "),
    (LAST, lambda path: path.write_bytes(b""), "rank-7.safetensors has 0 bytes"),
    (FIRST, lambda path: flip(path, 3), "rank-0.safetensors: its SHA-256"),
    (LAST, lambda path: flip(path, 8 * path.stat().st_size - 1), "rank-7.safetensors: its SHA-256"),
    (LAST, os.unlink, "rank-7.safetensors is missing"),
    (FIRST, link, "rank-0.safetensors is a link"),
    (FIRST, surplus_link, "other is a link"),
    (FIRST, directory, "rank-0.safetensors is a directory"),
    (FIRST, pipe, "rank-0.safetensors is not a regular file"),
    (FIRST, pickled, "rank-0.safetensors has "),
    (MANIFEST, truncate, "manifest.json: its SHA-256"),
    (MANIFEST, lambda path: flip(path, 9), "manifest.json: its SHA-256"),
    (MANIFEST, os.unlink, "manifest.json is missing"),
    (MANIFEST, link, "manifest.json is a link"),
    (MANIFEST, lambda path: os.truncate(path, 1 << 40), "manifest.json has 1,099,511,627,776 bytes"),
    ("", link, "step-00000004 is a link"),
]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "damage", "named"), DAMAGES)
def test_damage_is_named_and_the_commit_before_is_used(
    name: str, damage: Callable[[Path], None], named: str, copy: Path, capsys: pytest.CaptureFixture[str]
):
    path = copy / "checkpoints" / NEWEST
    damage(path / name if name else path)
    assert main(["checkpoint", "verify", str(copy)]) == 1
    shown = capsys.readouterr().out
    assert f"{path}: damaged: {named}" in shown
    assert f"{copy}/checkpoints/step-00000002: intact (8 files" in shown

    resumed = trained(plan_of(), copy)
    assert resumed.found is not None
    assert resumed.found.step == 2
    assert list(resumed.steps) == [3, 4, 5, 6]
    assert resumed.codes == ["W0801"]
    assert f"{path} is damaged and was skipped: {named}" in resumed.said[0].message
    assert not (copy / "boom").exists()
    # Out of the way under another name, and the step saved again.
    assert os.path.lexists(copy / "checkpoints" / f"{NEWEST}.damaged")
    read_manifest(copy / "checkpoints", 4)


def test_a_step_may_be_damaged_again(copy: Path):
    for _ in range(2):
        flip(copy / "checkpoints" / NEWEST / FIRST, 12345)
        resumed = trained(plan_of("train.steps=4"), copy)
        assert resumed.found is not None
        assert resumed.found.step == 2
        assert resumed.codes == ["W0801"]
    assert sorted(os.listdir(copy / "checkpoints")) == ["lock", "step-00000002", NEWEST, f"{NEWEST}.damaged"]


@pytest.mark.soak
def test_what_is_damaged_stays_for_as_long_as_a_whole_one_would(copy: Path):
    """`keep` newer ones, and it is gone."""
    flip(copy / "checkpoints" / NEWEST / FIRST, 12345)
    for steps, there in ((6, True), (8, True), (10, False)):
        trained(plan_of(f"train.steps={steps}"), copy)
        assert (copy / "checkpoints" / f"{NEWEST}.damaged").exists() == there, steps
    assert sorted(os.listdir(copy / "checkpoints")) == ["lock", "step-00000006", "step-00000008", "step-00000010"]


@pytest.mark.soak
def test_what_follows_is_the_undisturbed_run(copy: Path, tmp_path: Path):
    flip(copy / "checkpoints" / NEWEST / FIRST, 12345)
    plan = plan_of()
    undisturbed = trained(without_checkpoints(plan), tmp_path)
    same(tensors(trained(plan, copy).run), tensors(undisturbed.run))


@pytest.mark.soak
def test_where_none_is_whole_the_run_does_not_begin_anew(copy: Path):
    for step in ("step-00000002", NEWEST):
        (copy / "checkpoints" / step / LAST).unlink()
    with pytest.raises(Refused) as refused:
        trained(plan_of(), copy)
    assert refused.value.diagnostics[0].code == "E0806"
    with pytest.raises(Refused):  # and not the next time either
        trained(plan_of(), copy)


@given(data=st.data())
@examples(100, suppress_health_check=list(HealthCheck))
def test_any_flipped_bit_is_found(data: st.DataObject, saved: Path):
    path = saved / "checkpoints"
    name = data.draw(st.sampled_from(sorted(os.listdir(path / NEWEST))))
    bit = data.draw(st.integers(0, 8 * (path / NEWEST / name).stat().st_size - 1))
    flip(path / NEWEST / name, bit)
    try:
        found = problems(path)
    finally:
        flip(path / NEWEST / name, bit)
    assert [problem.split(":")[0] for problem in found] == [name]


def problems(path: Path) -> list[str]:
    try:
        manifest = read_manifest(path, 4)
    except Corrupt as damage:
        return [str(damage)]
    with Commit(path, manifest) as commit:
        return list(commit.problems(range(8)))


@given(bit=st.integers(0))
@examples(60)
def test_a_damaged_marker_is_found(bit: int, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.getbasetemp() / "rank-0.json"
    path.write_bytes(with_checksum({"size": 12345, "sha256": "0" * 64}))
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        folder = LocalFolder(handle)
        assert _marker(path.name, folder).size == 12345
        flip(path, bit % (8 * path.stat().st_size))
        with pytest.raises(Corrupt, match=r"rank-0\.json"):
            _marker(path.name, folder)
    finally:
        os.close(handle)


# ---------------------------------------------------------------- strangers


def changed(path: Path, step: int, change: Callable[[dict], None]) -> None:
    """What a stranger can do: change a manifest and seal it again."""
    name = path / f"step-{step:08}" / MANIFEST
    value = checked(name.read_bytes()).value
    change(value)
    name.write_bytes(with_checksum(value))


def of_a_tensor(key: str, value: object) -> Callable[[dict], None]:
    return lambda manifest: manifest["tensors"][0].__setitem__(key, value)


FORGERIES: list[tuple[Callable[[dict], None], str]] = [
    (lambda m: m.pop("mesh"), "an object with"),
    (lambda m: m.__setitem__("evil", 1), "an object with"),
    (lambda m: m.__setitem__("step", True), "`step`"),
    (lambda m: m.__setitem__("step", -1), "`step`"),
    (lambda m: m.__setitem__("step", 3), "`data.step`"),
    (lambda m: (m.__setitem__("step", 3), m["data"].__setitem__("step", 3)), "of step 3"),
    (lambda m: m.__setitem__("format", "other"), "`format`"),
    (lambda m: m.__setitem__("mesh", [["data", 1 << 40]]), "`mesh[0][1]`"),
    (lambda m: m.__setitem__("mesh", [["data", 0], ["pipe", 2], ["tensor", 2]]), "`mesh`"),
    (lambda m: m.__setitem__("mesh", [["data", 8], ["data", 1]]), "`mesh`"),
    (lambda m: m["files"].pop(), "`files`"),
    (lambda m: m["files"][0].__setitem__("name", "../../etc/passwd"), "`files[0]`"),
    (lambda m: m["files"][0].__setitem__("size", 1 << 70), "`files[0].size`"),
    (lambda m: m["files"][0].__setitem__("sha256", "A" * 64), "`files[0].sha256`"),
    (lambda m: m["tensors"].append(m["tensors"][0]), "`tensors`"),
    (of_a_tensor("name", "../wte"), "`tensors[0].name`"),
    (of_a_tensor("name", "a/b/c"), "`tensors[0].name`"),
    (of_a_tensor("dtype", "object"), "`tensors[0].dtype`"),
    (of_a_tensor("axes", [["vocab", 6], ["vocab", 8]]), "`tensors[0].axes`"),
    (of_a_tensor("axes", [["vocab", 1 << 40], ["embed", 1 << 40]]), "`tensors[0].axes`"),
    (of_a_tensor("axes", [["vocab", 7], ["embed", 8]]), "`tensors[0].split`"),
    (of_a_tensor("split", [["tensor", "ffn"]]), "`tensors[0].split[0]`"),
    (of_a_tensor("split", [["tensor", "vocab"], ["tensor", "embed"]]), "`tensors[0].split`"),
    (of_a_tensor("at", []), "`tensors[0].at`"),
    (of_a_tensor("at", [["pipe", 2]]), "`tensors[0].at`"),
    (of_a_tensor("at", [["pipe", -1]]), "`tensors[0].at[0][1]`"),
]


@pytest.mark.few(16)
@pytest.mark.parametrize(("change", "named"), FORGERIES)
def test_a_forged_manifest_is_refused(change: Callable[[dict], None], named: str, copy: Path):
    changed(copy / "checkpoints", 4, change)
    with pytest.raises(Corrupt, match=r"manifest\.json") as damaged:
        read_manifest(copy / "checkpoints", 4)
    assert named in str(damaged.value)


@pytest.mark.soak
def test_a_file_that_is_not_what_the_manifest_says(copy: Path):
    """Sizes and hashes can be forged; what is in the file is looked at too."""
    path = copy / "checkpoints" / NEWEST
    shutil.copy(path / "rank-2.safetensors", path / "rank-5.safetensors")
    changed(copy / "checkpoints", 4, lambda m: m["files"].__setitem__(5, m["files"][2]))
    resumed = trained(plan_of(), copy)
    assert resumed.found is not None
    assert resumed.found.step == 2
    assert "rank-5.safetensors lacks" in resumed.said[0].message


def test_a_manifest_that_lacks_a_tensor_is_of_another_model(copy: Path):
    changed(copy / "checkpoints", 4, lambda m: m["tensors"].pop())
    with pytest.raises(Refused) as refused:
        trained(plan_of(), copy)
    assert refused.value.diagnostics[0].code == "E0804"


def test_a_later_version_is_refused_and_not_passed_over(copy: Path):
    changed(copy / "checkpoints", 4, lambda m: m.__setitem__("version", VERSION + 1))
    with pytest.raises(Refused) as refused:
        trained(plan_of(), copy)
    assert refused.value.diagnostics[0].code == "E0805"


@pytest.mark.soak
def test_a_checkpoint_of_the_first_version_is_read(copy: Path):
    """It knows nothing of bad steps, nor of the files of the data."""

    def first(manifest: dict) -> None:
        manifest["version"] = 1
        manifest["data"] = {"step": manifest["step"]}
        del manifest["history"], manifest["suffix"]

    steps = steps_in(copy / "checkpoints")
    for step in steps:
        changed(copy / "checkpoints", step, first)
    found = read_manifest(copy / "checkpoints", steps[-1])
    assert (found.history, found.data) == (History(), ())
    assert trained(plan_of(), copy).found is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["history"].update(skipped=5),  # of four steps
        lambda manifest: manifest["history"].update(losses=[1]),
        lambda manifest: manifest["history"].update(norms=["nan"]),
        lambda manifest: manifest["history"].update(norms=[0.5] * 10_001),
        lambda manifest: manifest.update(version=1),
        lambda manifest: manifest["data"].update(files=[{"name": "x", "size": -1, "sha256": "0" * 64, "modified": 0}]),
        lambda manifest: manifest["data"].update(files=[{"name": "x", "size": 1, "sha256": "0", "modified": 0}]),
    ],
)
def test_what_is_no_history_and_no_data_is_damaged(change: Callable[[dict], None], copy: Path):
    changed(copy / "checkpoints", 4, change)
    with pytest.raises(Corrupt):
        read_manifest(copy / "checkpoints", 4)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
@examples(120, suppress_health_check=list(HealthCheck))
def test_whatever_stands_in_a_manifest_it_is_read_or_damaged(data: st.DataObject, saved: Path):
    """Any value in any place, sealed: nothing but Damaged comes of it."""
    from partita.runtime.checkpoint.manifest import parse

    value = checked((saved / "checkpoints" / NEWEST / MANIFEST).read_bytes()).value
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        parse(with_checksum(value), "it")
    except Corrupt:
        pass
    except Refused:
        assert value["version"] > 1  # of a later version


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[1]", b"null", b'{"a": NaN', b'{\n"a": 1, "a": 2', b"[" * 100_000, b'{"a": 1' + b"0" * 10_000],
)
def test_what_is_no_sealed_json(text: bytes):
    from partita.runtime.checkpoint.checksummed import _tail

    for data in (text, text + _tail(text)):
        with pytest.raises(Corrupt):
            checked(data)


def test_every_rank_falls_back_when_one_finds_damage(copy: Path):
    """A file that one rank alone has checked; on one rank that loads it, and on eight of which each loads its own."""
    (copy / "checkpoints" / NEWEST / "rank-6.safetensors").write_bytes(b"x")
    for overrides in (ONE_RANK, ("cluster.data=4",), ()):
        again = copy / str(len(overrides))
        shutil.copytree(copy / "checkpoints", again / "checkpoints")
        resumed = trained(plan_of("train.steps=2", *overrides), again)
        assert resumed.found is not None
        assert resumed.found.step == 2
        assert resumed.codes == ["W0801", "W0810"]


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


@pytest.mark.parametrize("damage", [truncate, lengthen])
def test_ls_shows_what_is_damaged(damage: Callable[[Path], None], copy: Path, capsys: pytest.CaptureFixture[str]):
    damage(copy / "checkpoints" / NEWEST / LAST)
    assert main(["checkpoint", "ls", str(copy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "2", "4"]
    assert "damaged: rank-7.safetensors has" in lines[2]
