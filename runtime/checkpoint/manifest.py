"""`manifest.json`: what a commit contains, and which run it belongs to.

Converts records to checksummed JSON and back. Reading fails closed: an unknown key, a wrong type, a size beyond its
limit, or a tensor that does not divide over the mesh as stated raises Corrupt. File names are never read: rank N's file
is `rank-N.safetensors`, or `rank-N-81f3….safetensors` if it was saved at an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from attrs import Attribute, asdict, field, frozen

from partita.compiler.layout import Flat, Layout, padded_type
from partita.compiler.mesh import Mesh
from partita.dsl import limits
from partita.dsl.diagnostic import refuse
from partita.dsl.types import FLOATS, INTEGERS, Axis, Type
from partita.runtime.bad_steps import History
from partita.runtime.checkpoint.checksummed import Reader, checked
from partita.runtime.data_files import MAX_FILES, DataFile

NAME = "manifest.json"
FORMAT, VERSION = "partita checkpoint", 5
UNTRAINED = "none"  # in place of an optimizer's name
MAX_STEPS = 1 << 53  # steps are sent to all ranks as float64
MAX_TENSORS = 1 << 20
WORD = r"[A-Za-z_][A-Za-z0-9_]*"
AXIS = rf"{WORD}(~[a-z]+)*"  # one of blocks is called after the axis that is cut
PATH = rf"{WORD}(\.[A-Za-z0-9_]+)*"
TENSOR = rf"({WORD}/)?{PATH}"
DIGEST = r"[0-9a-f]{64}"
SUFFIX = r"(-[0-9a-f]{1,16})?"
ANY = r".*"
DTYPE = "|".join((*FLOATS, *INTEGERS))
MAX_WINDOW = 10_000  # steps in a history
MAX_PATH = 4096


@frozen
class Tensor:
    """A full tensor, and which ranks saved it.

    A parameter goes by its full name, an optimizer state by `STATE/PARAMETER`. The tensor is sharded over the mesh axes
    of `layout`; along the others it is replicated, and was saved by the ranks at `at`.
    """

    name: str
    type: Type
    layout: Layout
    at: tuple[tuple[str, int], ...]


@frozen
class File:
    """The size and hash of a rank's file."""

    size: int
    sha256: str


@frozen
class Manifest:
    """A commit.

    `steps_digest` identifies the model's steps (`identity`), `settings` everything else that results depend on;
    `sources` are the texts of the `.par` files by name, the main one first. Of parameters that were imported alone,
    without states, `optimizer` is UNTRAINED: any may begin with them, and nothing is known of settings. `history` is
    what is known of earlier steps, by which later ones are judged, and `data` the files trained on. `files` are by
    rank; `suffix` is in their names.
    """

    step: int
    seed: int
    model: str
    steps_digest: str
    optimizer: str
    settings: Mapping[str, str]
    sources: Mapping[str, str] = field(repr=False)
    mesh: Mesh
    layout: str
    schedule: str
    tensors: tuple[Tensor, ...] = field(repr=False)
    files: tuple[File, ...] = field(default=(), repr=False)
    history: History = field(factory=History)
    data: tuple[DataFile, ...] = field(default=(), repr=False)
    time: int = 0  # Unix time, in seconds
    written_by: str = ""
    suffix: str = ""

    def as_json(self) -> dict[str, Any]:
        """The content of the file, without its checksum."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "written_by": self.written_by,
            "time": self.time,
            "step": self.step,
            "data": {"step": self.step, "files": [asdict(each, filter=_recorded) for each in self.data]},
            "history": asdict(self.history),
            "random": {"seed": self.seed},
            "model": {"name": self.model, "steps": self.steps_digest, "optimizer": self.optimizer},
            "settings": dict(self.settings),
            "sources": dict(self.sources),
            "mesh": [list(axis) for axis in self.mesh.axes],
            "layout": self.layout,
            "schedule": self.schedule,
            "tensors": [_tensor_json(each) for each in self.tensors],
            "suffix": self.suffix,
            "files": [asdict(each) for each in self.files],
        }

    @property
    def is_untrained(self) -> bool:
        """Whether it has parameters alone, which no optimizer has trained."""
        return self.optimizer == UNTRAINED

    def file_name(self, rank: int) -> str:
        """The name of a rank's file."""
        return file_name(rank, self.suffix)

    @property
    def bytes(self) -> int:
        """The total size of all ranks' files."""
        return sum(each.size for each in self.files)

    @property
    def mesh_text(self) -> str:
        """`data 2 × pipe 2`, `one rank`."""
        return " × ".join(f"{name} {size}" for name, size in self.mesh.axes if size > 1) or "one rank"


def file_name(rank: int, suffix: str) -> str:
    """The name of a rank's file in a commit with this suffix."""
    return f"rank-{rank}{suffix}.safetensors"


def parse(data: bytes, where: str) -> Manifest:
    """Parse a manifest. Raises Corrupt; Refused (E0805) for a later version of the format."""
    reader = checked(data)
    version = reader.value.get("version")
    if reader.value.get("format") == FORMAT and type(version) is int and version > VERSION:
        raise refuse(
            "E0805",
            f"{where} is of version {version} of the format, but this Partita reads {VERSION}",
            help="use the version of Partita that wrote it, or a later one",
        )
    return _manifest(reader)


def _tensor_json(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.type.dtype,
        "axes": [[axis.name, axis.size] for axis in tensor.type.axes],
        "split": [list(state) for state in tensor.layout.states],
        "flat": 0 if tensor.layout.flat is None else tensor.layout.flat.parts,
        "padded": [list(axis) for axis in tensor.layout.padded],
        "at": [list(coordinate) for coordinate in tensor.at],
    }


def _recorded(field: Attribute[Any], value: object) -> bool:
    """Whether a field of a data file is recorded: all but its place on this machine."""
    return field.name != "path"


def _upgraded(reader: Reader) -> Reader:
    """Upgrades version 1, which had no history and did not record the data files; 2, whose files had no suffix; 3,
    which had no flat tensors; and 4, which had no padded axes.
    """
    value, version = reader.value, reader.value.get("version")
    if type(version) is int and version == 1 and "history" not in value:
        (step,) = Reader(value.get("data"), "data").record("step")
        history = {"skipped": 0, "rewinds": 0, "losses": [], "norms": []}
        value, version = {**value, "history": history, "data": {"step": step.value, "files": []}}, 2
    if type(version) is int and version == 2 and "suffix" not in value:
        value, version = {**value, "suffix": ""}, 3
    for before, added in ((3, {"flat": 0}), (4, {"padded": []})):
        if type(version) is int and version == before and isinstance(value.get("tensors"), list):
            tensors = [{**added, **each} if isinstance(each, dict) else each for each in value["tensors"]]
            version = before + 1
            value = {**value, "version": version, "tensors": tensors}
    return Reader(value, "")


def _manifest(reader: Reader) -> Manifest:
    (
        form, version, written_by, time, step, data, history, random, model, settings, sources, mesh, layout, schedule,
        tensors, suffix, files,
    ) = _upgraded(reader).record(
        "format", "version", "written_by", "time", "step", "data", "history", "random", "model", "settings", "sources",
        "mesh", "layout", "schedule", "tensors", "suffix", "files",
    )  # fmt: skip
    form.text(FORMAT)
    version.integer(VERSION, VERSION)
    number = step.integer(0, MAX_STEPS)
    cursor, read_from = data.record("step", "files")
    cursor.integer(number, number)
    skipped, rewinds, losses, norms = history.record("skipped", "rewinds", "losses", "norms")
    (seed,) = random.record("seed")
    name, steps, optimizer = model.record("name", "steps", "optimizer")
    axes = [_pair(each, maximum=limits.RANKS) for each in mesh.each(64)]
    if len(dict(axes)) != len(axes) or prod(size for _, size in axes) > limits.RANKS or any(s < 1 for _, s in axes):
        mesh.fail("a mesh")
    found_mesh = Mesh(tuple(axes))
    tensor_records = tuple(_tensor(each, found_mesh) for each in tensors.each(MAX_TENSORS))
    if len({each.name for each in tensor_records}) != len(tensor_records):
        tensors.fail("a list of tensors with different names")
    found_files = tuple(_file(each) for each in files.each(limits.RANKS))
    if len(found_files) != found_mesh.ranks:
        files.fail(f"a list of {found_mesh.ranks} files")
    return Manifest(
        number,
        seed.integer(0, (1 << 63) - 1),
        name.text(WORD),
        steps.text(DIGEST),
        optimizer.text(WORD),
        settings.table(1000, ANY, lambda each: each.text(ANY, limits.FILE_BYTES)),
        sources.table(limits.IMPORTS + 1, ANY, lambda each: each.text(ANY, limits.FILE_BYTES)),
        found_mesh,
        layout.text(ANY),
        schedule.text(ANY, 1000),
        tensor_records,
        found_files,
        History(
            skipped.integer(0, number),
            rewinds.integer(0, number),
            tuple(each.number() for each in losses.each(MAX_WINDOW)),
            tuple(each.number() for each in norms.each(MAX_WINDOW)),
        ),
        tuple(_data_file(each) for each in read_from.each(MAX_FILES)),
        time.integer(0, 1 << 40),
        written_by.text(ANY),
        suffix.text(SUFFIX),
    )


def _pair(reader: Reader, maximum: int) -> tuple[str, int]:
    """`["data", 2]`."""
    entries = list(reader.each(2))
    if len(entries) != 2:
        reader.fail("a name and a number")
    return entries[0].text(AXIS), entries[1].integer(0, maximum)


def _tensor(reader: Reader, mesh: Mesh) -> Tensor:
    name, dtype, axes, split, parts, more, at = reader.record("name", "dtype", "axes", "split", "flat", "padded", "at")
    type = Type(
        dtype.text(DTYPE),
        tuple(Axis(*_pair(each, limits.AXIS_SIZE)) for each in axes.each(64)),
    )
    if len(set(type.names)) != len(type.names) or not 0 < type.elements <= limits.ELEMENTS:
        axes.fail("a list of different axes with sizes")
    count = parts.integer(0, limits.RANKS)
    flat = Flat(type.axes, count) if count else None
    known = type.names if flat is None else (*type.names, flat.axis)
    states = []
    for each in split.each(64):
        pair = [entry.text(AXIS) for entry in each.each(2)]
        if len(pair) != 2 or pair[0] not in mesh.sizes or pair[1] not in known:
            each.fail("a mesh axis and an axis of the tensor")
        states.append((pair[0], pair[1]))
    order = [axis for axis, _ in mesh.axes]
    if len(dict(states)) < len(states):
        split.fail("a list of different mesh axes")
    padded = tuple(_pair(each, limits.AXIS_SIZE) for each in more.each(64))
    if any(not type.has(axis) or type.axis(axis).size > size for axis, size in padded) or (padded and flat):
        more.fail("a list of axes of the tensor with the sizes to which they are padded")
    layout = Layout(tuple(states), flat, padded)
    if flat is not None and (not type.axes or flat.parts % prod(mesh.sizes[over] for over in layout.over(flat.axis))):
        parts.fail("a number of parts of a flat tensor")
    for axis in padded_type(type, layout).axes:
        if axis.size % prod(mesh.sizes[over] for over in layout.over(axis.name)):
            split.fail(f"a sharding of {axis}")
    coordinates = tuple(_pair(each, limits.RANKS) for each in at.each(64))
    if [axis for axis, _ in coordinates] != [axis for axis in order if axis not in dict(states)]:
        at.fail("a list of the other mesh axes")
    if any(index >= mesh.sizes[axis] for axis, index in coordinates):
        at.fail("a place on the mesh")
    return Tensor(name.text(TENSOR, 2 * limits.NAME_CHARACTERS * limits.SCOPES), type, layout, coordinates)


def _file(reader: Reader) -> File:
    size, sha256 = reader.record("size", "sha256")
    return File(size.integer(8, 1 << 62), sha256.text(DIGEST))


def _data_file(reader: Reader) -> DataFile:
    name, size, sha256, modified = reader.record("name", "size", "sha256", "modified")
    return DataFile(
        name.text(ANY, MAX_PATH), size.integer(0, 1 << 62), sha256.text(DIGEST), modified.integer(-(1 << 40), 1 << 40)
    )
