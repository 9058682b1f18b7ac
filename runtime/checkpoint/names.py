"""Name maps: what another program calls our tensors, and in which order it keeps their axes.

A map is a JSON object from our names to theirs; a `*` on both sides matches the same part between dots. If their axes
differ, an object lists for each of theirs the ones of ours that are merged in it, slowest first:

    {"llama.embed_in": "model.embed_tokens.weight",
     "llama.layer.*.attention.wq": {"name": "model.layers.*.self_attn.q_proj.weight",
                                    "axes": ["groups heads key", "embed"]}}

Names that are not in the map stay as they are. Optimizer states follow their parameter: `mean/` and its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from partita.dsl.diagnostic import Refused, refuse, shown
from partita.dsl.report import suggestion
from partita.dsl.types import Type
from partita.runtime.checkpoint.manifest import Tensor

MOST_BYTES = 1 << 20
PART = r"([^./]+)"
METADATA = "__metadata__"  # reserved by the format


@frozen
class Form:
    """How a tensor is stored in another file: its name, and for each of its axes the ones of ours merged in it.

    `settled`: the axes are given by a map; otherwise they are assumed to be ours, in our order.
    """

    name: str
    axes: tuple[tuple[str, ...], ...]
    settled: bool = False

    def shape(self, type: Type) -> tuple[int, ...]:
        """The tensor's shape in the other file."""
        return tuple(prod(type.axis(name).size for name in group) for group in self.axes)

    def theirs(self, tensor: torch.Tensor, type: Type) -> torch.Tensor:
        """Converts our tensor to the form of the other file, contiguous."""
        order = [type.position(name) for group in self.axes for name in group]
        return tensor.permute(order).reshape(self.shape(type)).contiguous()

    def ours(self, tensor: torch.Tensor, type: Type) -> torch.Tensor:
        """Converts a tensor of the other file to ours, contiguous."""
        names = [name for group in self.axes for name in group]
        split = tensor.reshape([type.axis(name).size for name in names])
        return split.permute([names.index(name) for name in type.names]).contiguous()


def read_names(path: Path) -> Mapping[str, Any]:
    """The content of a map file. Raises Refused (E0810)."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        found = json.loads(data, object_pairs_hook=_once)
    except OSError as error:
        raise refuse("E0810", f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise refuse("E0810", f"{path} is not valid JSON: {shown(str(error))}") from error
    if not isinstance(found, dict):
        raise refuse("E0810", f"{path} is not a JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"`{key}` appears in it twice")
        found[key] = value
    return found


def forms(tensors: Iterable[Tensor], names: Mapping[str, Any]) -> dict[str, Form]:
    """The form of each tensor, by our name. Raises Refused (E0810)."""
    for key in names:
        # Several wildcards in one part could make matching backtrack forever.
        if any("*" in part and part != "*" for part in key.split(".")):
            raise _wrong(key, "can have `*` only for a whole part between dots")
    patterns = [(key, re.compile(re.escape(key).replace(r"\*", PART))) for key in names]
    found: dict[str, Form] = {}
    used = set()
    tensors = tuple(tensors)
    for tensor in tensors:
        state, _, parameter = tensor.name.rpartition("/")
        form = Form(parameter, tuple((name,) for name in tensor.type.names))
        for key, pattern in patterns:
            match = pattern.fullmatch(parameter)
            if match is not None:
                used.add(key)
                form = _form(key, names[key], match.groups(), tensor.type)
                break
        found[tensor.name] = evolve(form, name=f"{state}/{form.name}") if state else form
    _check(names, found, used, [tensor.name for tensor in tensors])
    return found


def _form(key: str, given: object, parts: Iterable[str], type: Type) -> Form:
    name, axes, settled = given, [list(type.names[i : i + 1]) for i in range(len(type.names))], False
    if isinstance(given, dict):
        if not {"name"} <= set(given) <= {"name", "axes"}:
            raise _wrong(key, "has the entries `name` and, if need be, `axes`")
        name = given["name"]
        settled = "axes" in given
        written = given.get("axes", list(type.names))
        if not isinstance(written, list) or not all(isinstance(group, str) for group in written):
            raise _wrong(key, 'has `axes` as a list such as ["heads key", "embed"]')
        axes = [group.split() for group in written]
    if not isinstance(name, str) or not name:
        raise _wrong(key, "is mapped to a name, or an object")
    if sorted(axis for group in axes for axis in group) != sorted(type.names):
        raise _wrong(key, f"has each of its axes once: {', '.join(type.names)}")
    own = list(parts)
    if name.count("*") != len(own):
        raise _wrong(key, f"has {len(own)} `*`, and so must `{name}`")
    name = re.sub(r"\*", lambda _: own.pop(0), name)
    if name == METADATA or not _is_utf8(name):
        raise _wrong(key, f"is mapped to `{name}`, which cannot be the name of a tensor in a safetensors file")
    return Form(name, tuple(map(tuple, axes)), settled)


def _is_utf8(name: str) -> bool:
    """Whether a name has no lone surrogates, which JSON can express but UTF-8 cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(names: Mapping[str, Any], found: Mapping[str, Form], used: set[str], known: list[str]) -> None:
    for key in names:
        if key not in used:
            message = f"the map names `{shown(key)}`, but there is no such tensor"
            raise refuse("E0810", message, help=suggestion(key, known))
    taken: dict[str, str] = {}
    for ours, form in found.items():
        other = taken.setdefault(form.name, ours)
        if other != ours:
            raise refuse("E0810", f"`{other}` and `{ours}` would both be called `{shown(form.name)}`")


def _wrong(key: str, text: str) -> Refused:
    return refuse("E0810", shown(f"in the map, `{key}` {text}"))
