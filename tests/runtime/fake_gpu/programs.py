"""Random programs whose memory is measured: files, and the rules and overrides that they are run with.

    expressions  anything that the language can say (`tests.reference.programs`), at larger sizes
    layers       layers of language models, in pipelines of all schedules (`tests.programs`)
    files        those that are shipped, and models of `bench/models/memory`, laid out at random (`tests.zoo.layouts`)

Each kind is drawn by a number, with a precision, an optimizer and whatever else changes what a rank holds. Its sizes
are such that most of the memory is for activations, for parameters and states, or for neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random

from attrs import define, evolve, field, frozen
from hypothesis import Phase, given, settings
from hypothesis import seed as seeded

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.runtime.rank import CompiledRun, prepare
from tests.files import ROOT
from tests.programs import Program, sharded_programs
from tests.reference.compare import accepted
from tests.reference.programs import Maker
from tests.zoo.layouts import FILES, draw

MODELS = (
    *(path for path in FILES if path.stem != "gpt"),
    *2 * sorted((ROOT / "bench" / "models" / "memory").glob("*.par")),
)
LAYOUT = re.compile(r"layout (?:cut|drawn_layout) on \w+ \{\n")  # the one that is chosen
SIZE = re.compile(r"(\w+) = (\d+)(?! *[-+*/])")  # an axis of its own
ELEMENTS = 1 << 20  # of a tensor of an expression
OPTIMIZERS = (
    *("adamw(lr = 1e-3, weight_decay = 0.1)",) * 3,
    "sgd(lr = 0.1)",
    "sgd(lr = 0.1, momentum = 0.9, nesterov = true)",
    "lion(lr = 1e-3)",
    "muon(lr = 1e-3)",
    "adafactor(lr = 1e-3)",
    "adamw_8bit(lr = 1e-3, block_size = 64, min_size = 64)",
    "adagrad(lr = 0.1)",
    "rowwise_adagrad(lr = 0.1)",
)
# What else a train block says, and the rules of a layout.
SETTINGS = (
    "train.sync=local(groups=2, every=2)",
    "train.sync=local(groups=2, every=1, outer=nesterov(lr=0.7, momentum=0.9))",
    "train.sync=delayed(1)",
    "train.sync=delayed(2)",
    "train.sync=paired()",
    "train.validate=after(calm=0)",
    "train.on_bad_step=skip()",
    "train.clip=1.0",
    "train.clip=none",
    "train.ema=0.9",
    "train.compile=false",
    "train.compile=false",
    "train.graphs=true",
    "train.graphs=true",
)
RULES = (
    "offload all",
    "offload layer",
    "offload state",
    "offload param",
    "recompute all",
    "recompute auto",
    "recompute layer",
    "shard param -> data",
    "shard param -> tensor",
    "shard grad -> data",
    "shard state -> data",
    "overlap tensor in 2",
    "shard vocab -> pipe",
)
SLICES = ("schedule=gpipe(microbatches=2, slices=2)", "schedule=one_f_one_b(microbatches=2, slices=2)")
EVALUATION = "train.eval=every(2, batches=2)"


@frozen
class Drawn:
    """A file at a `place`, with the `overrides` that it needs; and `options`, rules of its layout and more overrides,
    of which those that do not fit are left out.
    """

    text: str
    place: Path
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A file, whose first line says how it is verified."""
        chosen = " ".join(f"'{each}'" for each in self.all_overrides)
        return f"# partita verify --gpu --allow-python FILE {chosen}\n{self.whole}"

    @property
    def all_overrides(self) -> tuple[str, ...]:
        return (*self.overrides, *(each for each in self.options if "=" in each))

    @property
    def whole(self) -> str:
        """The text with its rules."""
        rules = "".join(f"  {each}\n" for each in self.options if "=" not in each)
        return LAYOUT.sub(lambda found: found[0] + rules, self.text)

    def prepared(self) -> CompiledRun:
        """Compiled for GPUs. Raises Refused."""
        spec, diagnostics = load_text(self.whole, self.place.name, self.all_overrides, self.place)
        if spec is None:
            raise Refused(diagnostics)
        return prepare(evolve(spec, expect=()), gpu=True, allow_python=True)


@define(eq=False)
class Large(Maker):
    """Writes a program at sizes at which its memory is that of tensors. `growth` is what axes are larger by."""

    most_elements: int = ELEMENTS
    growth: dict[str, int] = field(factory=dict)

    def drawn_sizes(self) -> dict[str, int]:
        """The same, grown."""
        sizes = super().drawn_sizes()
        sizes |= {name: size * self.growth.get(name, 1) for name, size in sizes.items()}
        length = sizes["left"] + sizes["right"]
        return sizes | {"embed": sizes["heads"] * sizes["key"], "seq": length, "spot": length}


def grown(random: Random) -> dict[str, int]:
    """Axes of activations, of parameters, or of both."""
    rows = {name: random.choice((2, 4, 8)) for name in ("batch", "left", "right")}
    columns = {name: random.choice((4, 8, 16)) for name in ("key", "ffn", "vocab", "slots")}
    return random.choice((rows, columns, rows | columns))


def expressions(random: Random, folder: Path) -> Drawn:
    program = Large(random, random.random() < 0.8, growth=grown(random)).program()
    # Without data, of which only the types are needed; and each of its parameters reaches the loss.
    overrides = ("train.data=random()",) + ((EVALUATION,) if "eval = " in program.text else ())
    program, _ = accepted(evolve(program, arrays=()), folder, overrides)
    return Drawn(program.text, folder / "program.par", overrides)


def layers(random: Random, folder: Path) -> Drawn:
    found: list[Program] = []

    @seeded(random.getrandbits(64))
    @settings(max_examples=4, phases=[Phase.generate], database=None, deadline=None)
    @given(program=sharded_programs(most=8, scale=random.choice((2, 4, 8))))
    def drawn(program: Program) -> None:
        found.append(program)

    drawn()
    return Drawn(found[-1].text, folder / "program.par")


def files(random: Random, folder: Path) -> Drawn:
    path = random.choice(MODELS)
    drawn, text = draw(random, path), path.read_text()
    evaluates = (EVALUATION,) if "eval = every" in text else ()
    free = [each for line in text.splitlines() if line.startswith("axis ") for each in SIZE.findall(line)]
    some = random.sample(free, min(len(free), random.randint(0, 3)))
    sizes = (f"{name}={int(size) * random.choice((2, 4))}" for name, size in some if name != "batch")
    return Drawn(text + drawn.added, path, (*drawn.overrides, *evaluates), tuple(sizes))


KINDS: dict[str, Callable[[Random, Path], Drawn]] = {"expressions": expressions, "layers": layers, "files": files}


def drawn(kind: str, number: int, folder: Path) -> tuple[Drawn, CompiledRun]:
    """The program of a kind with a number, and its plan; `folder` is for files of its own. Raises Refused."""
    random = Random(f"{kind} {number}")
    found = KINDS[kind](random, folder)
    options = [f"train.precision={random.choice(('f32', 'bf16', 'bf16', 'fp8'))}"]
    options += [f"train.optimizer={random.choice(OPTIMIZERS)}"] if random.random() < 0.7 else []
    options += {each.partition("=")[0]: each for each in random.sample(SETTINGS, random.randint(0, 3))}.values()
    options += random.sample(RULES, random.randint(0, 3))
    options += [random.choice(SLICES)] if random.random() < 0.15 else []
    found = evolve(found, options=(*found.options, *options))
    while True:
        try:
            return found, found.prepared()
        except Refused:
            if not found.options:
                raise
            left_out = random.randrange(len(found.options))
            found = evolve(found, options=found.options[:left_out] + found.options[left_out + 1 :])
