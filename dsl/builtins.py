"""What a file may call outside of tensor arithmetic: schedules, optimizers, data, initial values, devices, claims.

Tables of signatures; `partita.dsl.settings` holds every call against them, so that an entry here is all that a new
name needs. Defaults here are the language's. Of what there is a choice of, a signature stands in the module of the
schedule, optimizer or source of data itself (`partita.dsl.registry`), and here is the list of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from attrs import field, frozen

from partita.dsl.arguments import REQUIRED
from partita.dsl.registry import Registry
from partita.dsl.spec import STOP
from partita.dsl.units import BYTES, BYTES_PER_SECOND, FLOPS, PLAIN, RATIO, SECONDS

# ---------------------------------------------------------------- kinds of values


@frozen
class Number:
    """A number of a dimension within bounds; `above` and `below` exclude the bound itself."""

    dimension: str = PLAIN
    integer: bool = False
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None


@frozen
class Word:
    """One of some words."""

    choices: tuple[str, ...]


@frozen
class Flag:
    """`true` or `false`."""


@frozen
class Text:
    """A string that is not empty."""


@frozen
class Beside:
    """The path of a text beside the file, which is read with it."""


@frozen
class Several:
    """A list of so many values of one kind."""

    kind: Number
    count: int


@frozen
class AxisName:
    """The name of a declared axis."""

    # `batch` is assumed where `over` is not written, and a file need not have it.


@frozen
class MeshAxisName:
    """The name of an axis of the layout's mesh."""


@frozen(eq=False)
class Calls:
    """A call of one of the signatures. A plain number stands for `number(…)`; with `bare`, a name for a call."""

    signatures: Mapping[str, Signature]
    number: str | None = None
    bare: bool = False


Kind: TypeAlias = Number | Word | Flag | Text | Beside | Several | AxisName | MeshAxisName | Calls


@frozen(eq=False)
class Setting:
    """A parameter of a call, or a key of a table. `default` is REQUIRED where it must be given."""

    name: str
    kind: Kind
    default: Any = REQUIRED


@frozen(eq=False)
class Signature:
    """A name that may be called, with its parameters in order. `others` is how it is called elsewhere; `example` a call
    of it, for help.
    """

    name: str
    settings: tuple[Setting, ...] = field(default=())
    others: tuple[str, ...] = field(default=(), kw_only=True)
    example: str | None = field(default=None, kw_only=True)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return tuple(setting.name for setting in self.settings)

    @property
    def required(self) -> frozenset[str]:
        """Those without a default."""
        return frozenset(setting.name for setting in self.settings if setting.default is REQUIRED)


def _table(*signatures: Signature) -> dict[str, Signature]:
    return {signature.name: signature for signature in signatures}


POSITIVE, NOT_NEGATIVE = Number(above=0), Number(least=0)
COUNT, INDEX = Number(integer=True, least=1, most=1 << 31), Number(integer=True, least=0, most=1 << 31)
SHARE = Number(RATIO, least=0, below=1)

# ---------------------------------------------------------------- schedules

# What schedules take: all of them, those of any number of chunks, those that are made within memory or a placement.
MICROBATCHES = Setting("microbatches", COUNT)
OVER = Setting("over", AxisName(), "batch")
CHUNKS = Setting("chunks", COUNT)
BOUND = Setting("memory", Number(BYTES, above=0), None)
PLACEMENT = Setting("placement", Word(("loop", "v")), "loop")

SCHEDULES: Registry[Signature] = Registry(
    "schedule",
    "partita.compiler.schedules",
    (
        "gpipe",
        "one_f_one_b",
        "interleaved_1f1b",
        "looped_bfs",
        "zb_h1",
        "zb_h2",
        "zb_v",
        "dualpipe_v",
        "auto",
        "policy",
        "from_file",
    ),
)
# What a file without a schedule has.
DEFAULT_SCHEDULE = "one_f_one_b"

# ---------------------------------------------------------------- train

_PEAK, _FLOOR = Setting("peak", POSITIVE), Setting("floor", NOT_NEGATIVE, 0.0)
_WARMUP, _TOTAL = Setting("warmup", INDEX, 0), Setting("total", COUNT)

LEARNING_RATES = _table(
    Signature("constant", (Setting("value", NOT_NEGATIVE),)),
    Signature("linear", (_PEAK, _WARMUP, _TOTAL, _FLOOR)),
    Signature("cosine", (_PEAK, _WARMUP, _TOTAL, _FLOOR)),
    Signature("wsd", (_PEAK, _WARMUP, _TOTAL, Setting("decay", COUNT), _FLOOR)),
)

# What optimizers take.
LR = Setting("lr", Calls(LEARNING_RATES, number="constant"))
WEIGHT_DECAY = Setting("weight_decay", NOT_NEGATIVE, 0.0)
DECAY = Setting("decay", Word(("dot", "all")), "dot")
BETA = Number(least=0, below=1)

OPTIMIZERS: Registry[Signature] = Registry("optimizer", "partita.compiler.optimizers", ("adamw", "sgd"))

# What sources of data take that hold a part of it out.
HOLDOUT = Setting("holdout", SHARE, 0.0)

DATA: Registry[Signature] = Registry(
    "source of data", "partita.runtime.data", ("text", "stdlib", "tokens", "arrays", "random")
)

EVALUATION = _table(Signature("every", (Setting("interval", COUNT), Setting("batches", COUNT, 10))))
CHECKPOINT = _table(
    Signature("every", (Setting("interval", COUNT), Setting("dir", Text(), None), Setting("keep", COUNT, 3)))
)

# By how many times a loss or norm is beyond the median of so many steps before it.
_SPIKE, _WINDOW = (
    Setting("spike", Number(above=1), None),
    Setting("window", Number(integer=True, least=1, most=10_000), 100),
)
BAD_STEPS = _table(
    Signature("stop", (_SPIKE, _WINDOW)),
    Signature("skip", (Setting("at_most", COUNT, 10), _SPIKE, _WINDOW)),
    Signature("rewind", (Setting("at_most", COUNT, 3), _SPIKE, _WINDOW)),
)

# `model`, `layout` and `schedule` name what is declared; they are looked up before the other entries.
TRAIN = Signature(
    "train",
    (
        Setting("data", Calls(DATA)),
        Setting("optimizer", Calls(OPTIMIZERS)),
        Setting("steps", Number(integer=True, least=1, most=1 << 62)),
        Setting("precision", Word(("f32", "bf16", "f64")), "f32"),
        Setting("clip", POSITIVE, None),
        Setting("seed", Number(integer=True, least=0, most=(1 << 63) - 1), 0),
        Setting("compile", Flag(), None),
        Setting("eval", Calls(EVALUATION), None),
        Setting("checkpoint", Calls(CHECKPOINT), None),
        Setting("on_bad_step", Calls(BAD_STEPS, bare=True), STOP),
    ),
)
CHOICES = ("model", "layout", "schedule")

# ---------------------------------------------------------------- parameters and samples

RANDOM = (
    Signature("normal", (Setting("deviation", NOT_NEGATIVE),)),
    Signature("uniform", (Setting("bound", NOT_NEGATIVE),)),
)
INITIAL = _table(
    *RANDOM,
    Signature("zeros"),
    Signature("ones"),
    Signature("constant", (Setting("value", Number()),)),
    Signature("xavier"),
    Signature("kaiming"),
)
SAMPLED = _table(*RANDOM)

# ---------------------------------------------------------------- mesh

# Entries of a mesh.
MESH = ("device", "link")

# What `partita profile` has written, of a device and of a link.
_PROFILE = Signature("profile", (Setting("path", Beside()),))

# The figures behind these names stand in `partita.compiler.costs`.
DEVICES = _table(
    _PROFILE,
    *(Signature(name) for name in ("cpu", "a100", "h100", "h200", "b200")),
    Signature(
        "device",
        (
            Setting("flops", Number(FLOPS, least=1)),
            Setting("memory", Number(BYTES, integer=True, least=1)),
            Setting("bandwidth", Number(BYTES_PER_SECOND, least=1)),
        ),
    ),
)
LINKS = _table(
    _PROFILE,
    *(
        Signature(name)
        for name in ("memory", "nvlink3", "nvlink4", "nvlink5", "pcie4", "pcie5", "ib200", "ib400", "ib800", "ethernet")
    ),
    Signature(
        "link",
        (
            Setting("bandwidth", Number(BYTES_PER_SECOND, least=1)),
            Setting("latency", Number(SECONDS, least=0, most=60)),
        ),
    ),
)

# ---------------------------------------------------------------- expect


@frozen(eq=False)
class Measure:
    """What a claim may be about: what its limit measures, and what it takes in parentheses."""

    limit: Number
    takes: tuple[Setting, ...] = ()


_ALONG = Setting("axis", MeshAxisName())
_COLLECTIVE = Setting("kind", Word(("all_reduce", "all_gather", "reduce_scatter", "all_to_all")))
MEASURES = {
    "peak_memory": Measure(Number(BYTES)),
    "bubble": Measure(Number(RATIO)),
    "step_time": Measure(Number(SECONDS)),
    "tokens_per_second": Measure(Number()),
    "mfu": Measure(Number(RATIO)),
    "exposed_communication": Measure(Number(RATIO)),
    "bytes": Measure(Number(BYTES), (_ALONG,)),
    "collectives": Measure(Number(), (_ALONG,)),
    "count": Measure(Number(), (_COLLECTIVE, _ALONG)),
}
