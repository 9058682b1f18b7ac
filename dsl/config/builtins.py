"""Signatures of the built-ins outside of tensor arithmetic: schedules, optimizers, data, devices, measures and others.

`partita.dsl.config.settings` checks every call against these tables, so a new name needs only an entry here. The
signatures of schedules, optimizers and data sources are in their own modules (`partita.dsl.registry`), only listed
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from attrs import Factory, field, frozen

from partita.dsl.check.arguments import REQUIRED
from partita.dsl.registry import Registry
from partita.dsl.spec import BEFORE, MEAN, STOP
from partita.dsl.syntax.units import BYTES, BYTES_PER_SECOND, FLOPS, PLAIN, RATIO, SECONDS, USUAL

# ---------------------------------------------------------------- kinds of values


@frozen
class Number:
    """A number of a dimension within bounds; `above` and `below` are exclusive. `usual` is the unit of one that is
    written without.
    """

    dimension: str = PLAIN
    integer: bool = False
    minimum: float | None = None
    exclusive_minimum: float | None = None
    maximum: float | None = None
    exclusive_maximum: float | None = None
    usual: str = field(default=Factory(lambda self: USUAL[self.dimension], takes_self=True), kw_only=True)


@frozen
class OrWord:
    """A value of a kind, or one word."""

    kind: Number
    word: str


@frozen
class Keyword:
    """One of a set of words."""

    choices: tuple[str, ...]


@frozen
class Flag:
    """`true` or `false`."""


@frozen
class Text:
    """A non-empty string."""


@frozen
class TextFile:
    """The path of a text file, which is read along with the .par file that names it."""


@frozen
class PythonName:
    """A function of a Python file, `"source.py:row"`; the file is read along with the .par file that names it."""


@frozen
class ListOf:
    """A list of `count` values of one kind."""

    kind: Number
    count: int
    example: str | None = None


@frozen
class AxisName:
    """The name of a declared axis."""

    # `batch`, the default of `over`, need not be declared.


@frozen
class AxisNames:
    """The name of a declared axis, or a list of `count` names."""

    count: int


@frozen
class MeshAxisName:
    """The name of an axis of the layout's mesh."""


@frozen(eq=False)
class OneOf:
    """A call of one of the signatures. A plain number is short for `number(…)`; with `bare`, a name for a call."""

    signatures: Mapping[str, Signature]
    number: str | None = None
    bare: bool = False


@frozen(eq=False)
class SharesOf:
    """A list of calls of the signatures with their shares: `[text("a") -> 70%, text("b") -> 30%]`."""

    signatures: Mapping[str, Signature]


Kind: TypeAlias = (
    Number
    | OrWord
    | Keyword
    | Flag
    | Text
    | TextFile
    | PythonName
    | ListOf
    | AxisName
    | AxisNames
    | MeshAxisName
    | OneOf
    | SharesOf
)


@frozen(eq=False)
class Setting:
    """A parameter of a call, or a key of a table; `default` is REQUIRED if it must be given."""

    name: str
    kind: Kind
    default: Any = REQUIRED


@frozen(eq=False)
class Signature:
    """A callable name with its parameters in order.

    `others` are its names in other frameworks; `example` is a call of it, for help. Of `ordered` arguments the
    first is at most the second.
    """

    name: str
    settings: tuple[Setting, ...] = field(default=())
    others: tuple[str, ...] = field(default=(), kw_only=True)
    example: str | None = field(default=None, kw_only=True)
    ordered: tuple[str, str] | None = field(default=None, kw_only=True)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameter names."""
        return tuple(setting.name for setting in self.settings)

    @property
    def required(self) -> frozenset[str]:
        """The names of parameters without a default."""
        return frozenset(setting.name for setting in self.settings if setting.default is REQUIRED)


@frozen(kw_only=True, eq=False)
class DataSignature(Signature):
    """A source of data. `textual`: its ids are those of text, bytes unless a call says otherwise. `named`: it yields
    what it calls by a name; otherwise whatever inputs a model has. `endings` are those of the files that it reads.
    """

    textual: bool = False
    named: bool = True
    endings: tuple[str, ...] = ()


@frozen(kw_only=True, eq=False)
class ScheduleSignature(Signature):
    """A schedule. `chunks` is the number of stages on each rank, None if the call or its file gives it."""

    chunks: int | None = 1


def _table(*signatures: Signature) -> dict[str, Signature]:
    return {signature.name: signature for signature in signatures}


POSITIVE, NOT_NEGATIVE = Number(exclusive_minimum=0), Number(minimum=0)
COUNT, INDEX = Number(integer=True, minimum=1, maximum=1 << 31), Number(integer=True, minimum=0, maximum=1 << 31)
SHARE = Number(RATIO, minimum=0, exclusive_maximum=1)

# ---------------------------------------------------------------- schedules

# Parameters that schedules share.
MICROBATCHES = Setting("microbatches", COUNT)
OVER = Setting("over", AxisName(), "batch")
# Of schedules whose microbatches may be slices of a sequence: over the batch, or over both.
OVER_BOTH, SLICES = Setting("over", AxisNames(2), "batch"), Setting("slices", COUNT, None)
CHUNKS = Setting("chunks", COUNT)
BOUND = Setting("memory", Number(BYTES, exclusive_minimum=0), None)
PLACEMENT = Setting("placement", Keyword(("loop", "v")), "loop")

SCHEDULES: Registry[ScheduleSignature] = Registry(
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
        "v_half",
        "v_min",
        "dualpipe_v",
        "interlaced",
        "auto",
        "policy",
        "from_file",
    ),
)
# The schedule of a file that has none.
DEFAULT_SCHEDULE = "one_f_one_b"

# ---------------------------------------------------------------- train

_PEAK, _FLOOR = Setting("peak", POSITIVE), Setting("floor", NOT_NEGATIVE, 0.0)
_WARMUP, _TOTAL = Setting("warmup", INDEX, 0), Setting("total", COUNT)
FACTOR = Number(exclusive_minimum=0, exclusive_maximum=1)

LEARNING_RATES = _table(
    Signature("constant", (Setting("value", NOT_NEGATIVE),)),
    Signature("linear", (_PEAK, _WARMUP, _TOTAL, _FLOOR), ordered=("warmup", "total")),
    Signature("cosine", (_PEAK, _WARMUP, _TOTAL, _FLOOR), ordered=("warmup", "total")),
    Signature("wsd", (_PEAK, _WARMUP, _TOTAL, Setting("decay", COUNT), _FLOOR), ordered=("warmup", "total")),
    Signature("inverse_sqrt", (_PEAK, Setting("warmup", COUNT), _FLOOR)),
    Signature("stepwise", (_PEAK, _WARMUP, Setting("every", COUNT), Setting("factor", FACTOR, 0.1), _FLOOR)),
)

# Parameters that optimizers share.
LR = Setting("lr", OneOf(LEARNING_RATES, number="constant"))
WEIGHT_DECAY = Setting("weight_decay", NOT_NEGATIVE, 0.0)
DECAY = Setting("decay", Keyword(("dot", "all")), "dot")
BETA = Number(minimum=0, exclusive_maximum=1)

# Of all optimizers: which updates a rule takes part in.
TURNS = (Setting("every", COUNT, 1), Setting("from", COUNT, 1))

OPTIMIZERS: Registry[Signature] = Registry(
    "optimizer",
    "partita.compiler.optimizers",
    ("adamw", "sgd", "lion", "adafactor", "muon", "adamw_8bit", "adagrad", "rowwise_adagrad", "python"),
)

# What stands beside a matrix that is frozen. `alpha`: None for the rank.
_ADAPTER = (Setting("rank", COUNT), Setting("alpha", POSITIVE, None), Setting("dropout", SHARE, 0.0))
ADAPTERS = _table(Signature("lora", _ADAPTER, example="lora(rank = 8)"), Signature("dora", _ADAPTER))

# How what is frozen is stored.
FORMATS = _table(Signature("nf4", (Setting("block", Number(integer=True, minimum=2, maximum=1 << 12), 64),)))

# Of data sources that can hold out a fraction.
HOLDOUT = Setting("holdout", SHARE, 0.0)

DATA: Registry[DataSignature] = Registry(
    "source of data",
    "partita.runtime.data",
    (
        *("text", "jsonl", "parquet", "chat", "preferences", "rollouts", "hub", "tokens", "mix", "stdlib"),
        *("arrays", "images", "python", "random"),
    ),
)

# Which weights an evaluation reads: those that are trained, or the mean that `ema` keeps of them.
WEIGHTS = Setting("weights", Keyword(("trained", "ema")), "trained")
# All batches of an evaluation set.
ALL = "all"
BATCHES, OWN_DATA = Setting("batches", OrWord(COUNT, ALL), 10), Setting("data", OneOf(DATA), None)
# The prompt of a text that is written after each evaluation.
SAMPLE = Setting("sample", Text(), None)
EVALUATION = _table(
    Signature("every", (Setting("interval", COUNT), BATCHES, WEIGHTS, OWN_DATA, SAMPLE), example="every(100)")
)
CHECKPOINT = _table(
    Signature(
        "every",
        (
            Setting("interval", COUNT),
            Setting("dir", Text(), None),
            Setting("keep", COUNT, 3),
            Setting("copies", COUNT, None),
        ),
        example="every(100)",
    )
)

# A step is bad if its loss or norm is above `spike` times the median of the last `window` good steps.
_SPIKE, _WINDOW = (
    Setting("spike", Number(exclusive_minimum=1), None),
    Setting("window", Number(integer=True, minimum=1, maximum=10_000), 100),
)
BAD_STEPS = _table(
    Signature("stop", (_SPIKE, _WINDOW)),
    Signature("skip", (Setting("at_most", COUNT, 10), _SPIKE, _WINDOW)),
    Signature("rewind", (Setting("at_most", COUNT, 3), _SPIKE, _WINDOW)),
)

# An update waits for the loss and the norm of its step, or is made at once where `calm` steps in a row went as assumed.
VALIDATION = _table(Signature("before"), Signature("after", (Setting("calm", Number(integer=True, minimum=0), 10),)))

# Groups train apart, each on its share of the batch, and are averaged `every` so many steps: an outer optimizer takes
# the difference of what they began with and their mean for a gradient. Or updates are made of gradients some steps old;
# or of those of two steps, of which the first is an estimate.
_OUTER = _table(
    Signature("sgd", (Setting("lr", POSITIVE, MEAN.arguments["lr"]),)),
    Signature("nesterov", (Setting("lr", POSITIVE), Setting("momentum", BETA))),
)
_GROUPS, _LATE = (Number(integer=True, minimum=1, maximum=most) for most in (1024, 8))
SYNC = _table(
    Signature("local", (Setting("groups", _GROUPS), Setting("every", COUNT), Setting("outer", OneOf(_OUTER), MEAN))),
    Signature("delayed", (Setting("steps", _LATE),)),
    Signature("paired"),
)

# The entries in CHOICES name declarations and are resolved separately.
TRAIN = Signature(
    "train",
    (
        Setting("data", OneOf(DATA)),
        Setting("optimizer", OneOf(OPTIMIZERS)),
        Setting("steps", Number(integer=True, minimum=1, maximum=1 << 62)),
        Setting("precision", Keyword(("f32", "bf16", "f64", "fp8")), "f32"),
        Setting("clip", POSITIVE, None),
        Setting("ema", BETA, None),
        Setting("seed", Number(integer=True, minimum=0, maximum=(1 << 63) - 1), 0),
        Setting("compile", Flag(), None),
        Setting("graphs", Flag(), False),
        Setting("eval", OneOf(EVALUATION), None),
        Setting("checkpoint", OneOf(CHECKPOINT), None),
        Setting("on_bad_step", OneOf(BAD_STEPS, bare=True), STOP),
        Setting("validate", OneOf(VALIDATION, bare=True), BEFORE),
        Setting("sync", OneOf(SYNC), None),
    ),
)
CHOICES = ("model", "layout", "schedule", "adapters")

# ---------------------------------------------------------------- parameters and samples

RANDOM = (
    Signature("normal", (Setting("deviation", NOT_NEGATIVE),), example="normal(0.02)"),
    Signature("uniform", (Setting("bound", NOT_NEGATIVE),), example="uniform(0.1)"),
)
INITIAL = _table(
    *RANDOM,
    Signature("zeros"),
    Signature("ones"),
    Signature("constant", (Setting("value", Number()),)),
    Signature("xavier"),
    Signature("kaiming"),
    Signature("file", (Setting("path", Text()), Setting("name", Text())), example='file("tables.safetensors", "name")'),
)
SAMPLED = _table(
    *RANDOM,
    Signature("integers", (Setting("limit", COUNT),), example="integers(1_000)"),
    Signature("gumbel"),
)

# ---------------------------------------------------------------- rotary positions

_FACTOR, _ORIGINAL = Setting("factor", Number(minimum=1)), Setting("original", COUNT)

# How `rope` stretches its wavelengths for sequences longer than the `original` ones.
ROPE_SCALINGS = _table(
    Signature("llama3", (_FACTOR, _ORIGINAL, Setting("low", POSITIVE, 1.0), Setting("high", POSITIVE, 4.0))),
    Signature(
        "yarn",
        (
            _FACTOR,
            _ORIGINAL,
            Setting("fast", POSITIVE, 32.0),
            Setting("slow", POSITIVE, 1.0),
            Setting("attention", POSITIVE, None),
            Setting("truncate", Flag(), True),
        ),
    ),
)

# ---------------------------------------------------------------- mesh

# Entries of a mesh.
MESH = ("device", "link")

# A file written by `partita profile`, as a device or a link.
_PROFILE = Signature("profile", (Setting("path", TextFile()),))

# The numbers behind these names are in `partita.compiler.costs`.
DEVICES = _table(
    _PROFILE,
    *(Signature(name) for name in ("cpu", "a100", "h100", "h200", "b200")),
    Signature(
        "device",
        (
            Setting("flops", Number(FLOPS, minimum=1)),
            Setting("memory", Number(BYTES, integer=True, minimum=1)),
            Setting("bandwidth", Number(BYTES_PER_SECOND, minimum=1)),
        ),
    ),
)
# Of a network: devices beneath a switch whose uplinks have so many times less bandwidth than its downlinks together.
_UPLINKS = (Setting("leaf", COUNT, None), Setting("oversubscribed", Number(minimum=1, maximum=1000), None))
LINKS = _table(
    _PROFILE,
    *(Signature(name) for name in ("memory", "nvlink3", "nvlink4", "nvlink5", "pcie4", "pcie5")),
    *(Signature(name, _UPLINKS) for name in ("ib200", "ib400", "ib800", "ethernet")),
    Signature(
        "link",
        (
            Setting("bandwidth", Number(BYTES_PER_SECOND, minimum=1)),
            Setting("latency", Number(SECONDS, minimum=0, maximum=60, usual="us")),
            *_UPLINKS,
        ),
    ),
)

# What is called in declarations and settings.
TABLES = (
    SCHEDULES,
    ADAPTERS,
    OPTIMIZERS,
    LEARNING_RATES,
    DATA,
    INITIAL,
    EVALUATION,
    CHECKPOINT,
    BAD_STEPS,
    DEVICES,
    LINKS,
)

# ---------------------------------------------------------------- expect


@frozen(eq=False)
class Measure:
    """A measure that claims may bound: the kind of its limit, and its arguments."""

    limit: Number
    takes: tuple[Setting, ...] = ()


_ALONG = Setting("axis", MeshAxisName())
_COLLECTIVE = Setting("kind", Keyword(("all_reduce", "all_gather", "reduce_scatter", "all_to_all")))
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
