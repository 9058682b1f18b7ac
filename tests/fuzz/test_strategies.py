"""Schedules, manifests and files of tensors drawn near what is right: refused, or all that they say they are."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.compiler.schedules.generator import SCHEDULES
from partita.compiler.schedules.registry import make
from partita.runtime.checkpoint.checksummed import _tail, with_checksum
from tests.fuzz import targets
from tests.fuzz.seeds import MANIFEST

some = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))

# ---------------------------------------------------------------- schedules

actions = st.builds("{}{}.{}".format, st.sampled_from(["F", "B", "W", "BW"]), st.integers(0, 2), st.integers(0, 3))
gaps = st.sampled_from([" ", "  ", "\t", "\n", " # F9.9\n", "\r\n", "\x0b"])


@st.composite
def nearly_lawful(draw: st.DrawFn) -> str:
    """A schedule of the registry with some of its actions moved, doubled, taken out or changed."""
    name = draw(st.sampled_from(["gpipe", "one_f_one_b", "looped_bfs", "interleaved_1f1b", "zb_h1", "zb_v"]))
    assert name in SCHEDULES
    taken = SCHEDULES[name].chunks or 2
    lines = [line.split() for line in str(make(name, draw(st.integers(1, 3)), taken, 6)).splitlines()]
    for _ in range(draw(st.integers(0, 3))):
        line = draw(st.sampled_from(lines))
        i, j = (draw(st.integers(0, len(line) - 1)) for _ in range(2))
        match draw(st.sampled_from(["exchange", "double", "remove", "change"])):
            case "exchange":
                line[i], line[j] = line[j], line[i]
            case "double":
                line.insert(j, line[i])
            case "remove" if len(line) > 1:
                del line[i]
            case _:
                line[i] = draw(actions)
    return "\n".join(" ".join(line) for line in lines)


@some
@given(nearly_lawful() | st.lists(st.tuples(actions, gaps)).map(lambda pairs: "".join(a + b for a, b in pairs)))
def test_schedules(text: str):
    targets.schedule(text.encode())


# ---------------------------------------------------------------- JSON

numbers = st.integers() | st.sampled_from([1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**400, -1]) | st.floats(0, 9)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.sampled_from(["", "..", "../w", "/w", "\ud800", "F32", "net.w", "data"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def changed(draw: st.DrawFn, whole: dict[str, Any]) -> bytes:
    """The JSON of an object with another value in any places; and perhaps a key twice, or text cut off."""
    found = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 2))):
        place: Any = found
        while True:
            key = draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
            if not (isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans())):
                break
            place = place[key]
        place[key] = draw(values)
    text = json.dumps(found).encode()
    if draw(st.booleans()):
        text = text.replace(b'{"', b'{"w": 1, "', 1)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


@some
@given(changed(MANIFEST))
def test_manifests(text: bytes):
    targets.manifest(text[:-1])  # the seal brings its brace
    targets.manifest(with_checksum(MANIFEST)[: -len(_tail(b""))] + text)


TENSORS = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
    "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]},
}


@some
@given(changed(TENSORS), st.integers(-1, 1), st.sampled_from([0, 8, 32, 40]))
def test_files_of_tensors(text: bytes, off: int, size: int):
    targets.tensors(max(0, len(text) + off).to_bytes(8, "little") + text + bytes(size))
