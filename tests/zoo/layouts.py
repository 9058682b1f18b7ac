"""Random layouts of the files that are shipped: the model stays, what says how it is distributed is drawn."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from random import Random

from attrs import evolve, frozen

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load, load_text
from partita.dsl.spec import Body, Repeat, Spec
from tests.files import SPECS

FILES = sorted(SPECS.glob("*.par")) + sorted((SPECS / "zoo").glob("*.par"))
# What needs the whole batch at once cannot be split into microbatches.
INDIVISIBLE = frozenset({"clip", "mean_teacher", "moco", "resnet", "sam", "siamese"})
MOST_RANKS = 16
# Schedules, and the chunks of a rank that they may have.
SCHEDULES = {
    "gpipe": (1,),
    "one_f_one_b": (1,),
    "interleaved_1f1b": (1, 2),
    "looped_bfs": (1, 2),
    "zb_h1": (1,),
    "zb_h2": (1,),
    "zb_v": (2,),
    "v_half": (2,),
    "v_min": (2,),
    "dualpipe_v": (2,),
    "interlaced": (1,),
}
# Schedules whose number of chunks is their own, and not an argument.
OWN_CHUNKS = ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v", "interlaced")
# What a drawn layout may be refused for: sizes that do not divide, or that a schedule does not go with.
MISFITS = {"E0402", "E0403", "E0404", "E0406", "E0411", "E0505"}
# And a model whose loss is no mean over its batch for microbatches.
WHOLE_BATCH = {"E0407"}


@frozen
class Drawn:
    """A shipped file with a mesh, a layout and a schedule in addition, and the overrides that choose them."""

    path: Path
    added: str
    overrides: tuple[str, ...]

    def spec(self) -> Spec:
        """What it means; what it claims of its own layout is left out. Raises Refused."""
        text = self.path.read_text() + self.added
        spec, diagnostics = load_text(text, self.path.name, self.overrides, self.path)
        if spec is None:
            raise Refused(diagnostics)
        return evolve(spec, expect=())

    def padded(self) -> Drawn:
        """The same, with all axes padded that do not divide."""
        return evolve(self, added=re.sub(r"(shard (?!param|grad|state).*)", r"\1 padded", self.added))

    def with_rows(self, rows: int) -> Drawn:
        """The same with another batch."""
        return evolve(self, overrides=tuple(f"batch={rows}" if "batch=" in each else each for each in self.overrides))

    def __str__(self) -> str:
        return f"{self.path.name} {' '.join(self.overrides)}\n{self.added}"


def draw(random: Random, path: Path) -> Drawn:
    """Lay a file out at random: batch over data, most of the other axes over what is left, and a pipeline if it can."""
    spec, diagnostics = load(path)
    if spec is None:
        raise Refused(diagnostics)
    model, _ = spec.trained
    repeats = [(step.name, step.count) for step in model.body.steps if isinstance(step, Repeat)]
    kinds = random.sample(("data", "tensor", "context", "pipe"), random.randint(1, 3))
    if "pipe" in kinds and not repeats:
        kinds.remove("pipe")
    mesh = {name: random.choice((2, 2, 2, 3, 4)) for name in kinds} or {"data": 2}
    while prod(mesh.values()) > MOST_RANKS:
        mesh[max(mesh, key=lambda name: mesh[name])] = 2
    pipe = mesh.get("pipe", 1)
    name = random.choice([name for name, chunks in SCHEDULES.items() if pipe > 1 or 1 in chunks])
    chunks = random.choice(SCHEDULES[name])
    microbatches = pipe * random.choice((1, 2)) if pipe > 1 else random.choice((1, 2, 4))
    rules = _rules(random, spec, {each: size for each, size in mesh.items() if each != "pipe"})
    if pipe > 1:
        rules.append(f"stage {', '.join(dict.fromkeys(each for each, _ in repeats))} -> pipe")
    arguments = f"microbatches = {microbatches}" + ("" if name in OWN_CHUNKS else f", chunks = {chunks}")
    added = f"\nmesh drawn_mesh({', '.join(f'{each} = {size}' for each, size in mesh.items())})\n"
    added += "layout drawn_layout on drawn_mesh {\n" + "".join(f"  {rule}\n" for rule in rules) + "}\n"
    added += f"schedule drawn_schedule = {name}({arguments})\n"
    overrides = ["layout=drawn_layout", "schedule=drawn_schedule"]
    if "batch" in spec.axes:
        overrides.append(f"batch={mesh.get('data', 1) * microbatches * random.choice((1, 2))}")
    return Drawn(path, added, tuple(overrides))


def _rules(random: Random, spec: Spec, splitting: dict[str, int]) -> list[str]:
    """Rules for all mesh axes but the pipeline's, with what is stored split in addition."""
    model, _ = spec.trained
    names = sorted((_names(model.body) & set(spec.axes)) - {"batch"})  # a literal size is an axis, too
    rules = []
    for axis in splitting:
        if axis == "data" and "batch" in spec.axes:
            rules.append("shard batch -> data")
        if axis != "data" or random.random() < 0.3:
            fitting = [name for name in names if spec.axes[name].size % splitting[axis] == 0] or names
            some = random.sample(fitting, min(len(fitting), random.choice((1, 2, 4, 8))))
            rules.append(f"shard {', '.join(some)} -> {axis}")
    random.shuffle(rules)
    if splitting and random.random() < 0.5:
        over = random.sample(sorted(splitting), random.randint(1, min(2, len(splitting))))
        rules.append(f"shard {random.choice(('param', 'grad', 'state'))} -> {', '.join(over)}")
    if any(isinstance(step, Repeat) for step in model.body.steps) and random.random() < 0.25:
        rules.append("recompute all")
    return rules


def _names(body: Body) -> set[str]:
    """The axes of a model's tensors."""
    found = {axis.name for type in body.types for axis in type.axes}
    for step in body.steps:
        inner = getattr(step, "body", None)
        if inner is not None:
            found |= _names(inner)
    return found
