"""Number literals: exact values with units.

A quantity is a fraction in the base unit of its dimension (bytes, bytes/s, FLOP/s, seconds; a ratio of 8% is 0.08), so
that arithmetic on sizes is exact.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import floor, log10

from attrs import field, frozen

from partita.dsl import limits
from partita.dsl.advice.report import listed, nearest
from partita.dsl.check.formulas import Formula, Size, Term
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.syntax.source import Span

PLAIN, RATIO, BYTES, BYTES_PER_SECOND, FLOPS, SECONDS = (
    "plain number",
    "ratio",
    "size in bytes",
    "rate in bytes per second",
    "rate in FLOP/s",
    "time",
)
EXAMPLES = {
    PLAIN: "100",
    RATIO: "8%",
    BYTES: "80GiB",
    BYTES_PER_SECOND: "900GB/s",
    FLOPS: "989TFLOP/s",
    SECONDS: "5us",
}

# The unit of a number that is written without one.
USUAL = {PLAIN: "", RATIO: "%", BYTES: "GiB", BYTES_PER_SECOND: "GB/s", FLOPS: "TFLOP/s", SECONDS: "s"}

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}

# unit -> (dimension, factor to the base unit)
UNITS: dict[str, tuple[str, Fraction]] = {
    "%": (RATIO, Fraction(1, 100)),
    **{f"{p}B": (BYTES, Fraction(f)) for p, f in (*_DECIMAL.items(), *_BINARY.items())},
    **{f"{p}B/s": (BYTES_PER_SECOND, Fraction(f)) for p, f in (*_DECIMAL.items(), *_BINARY.items())},
    **{f"{p}FLOP/s": (FLOPS, Fraction(f)) for p, f in _DECIMAL.items()},
    "ns": (SECONDS, Fraction(1, 10**9)),
    "us": (SECONDS, Fraction(1, 10**6)),
    "ms": (SECONDS, Fraction(1, 10**3)),
    "s": (SECONDS, Fraction(1)),
    "min": (SECONDS, Fraction(60)),
    "h": (SECONDS, Fraction(3600)),
}

# Units of other notations -> the unit here, and how many of it they are.
OTHERS: dict[str, tuple[str, Fraction]] = {
    name: (unit, Fraction(count))
    for names, unit, count in (
        ("k K", "", 10**3),
        ("m M mil", "", 10**6),
        ("bn", "", 10**9),
        ("pct percent", "%", 1),
        ("g G", "GB", 1),
        ("T", "TB", 1),
        ("Gbps Gb/s Gbit/s", "GB/s", Fraction(1, 8)),
        ("Mbps Mb/s Mbit/s", "MB/s", Fraction(1, 8)),
        ("GBps", "GB/s", 1),
        ("TBps", "TB/s", 1),
        ("TFLOPS TFLOPs TFLOP TFlops TF tflops", "TFLOP/s", 1),
        ("PFLOPS PFLOPs PFLOP PFlops PF pflops", "PFLOP/s", 1),
        ("GFLOPS GFLOPs GFLOP GFlops GF gflops", "GFLOP/s", 1),
        ("nsec nanoseconds", "ns", 1),
        ("usec microseconds mus", "us", 1),
        ("msec milliseconds", "ms", 1),
        ("sec secs second seconds", "s", 1),
        ("mins minute minutes", "min", 1),
        ("hr hrs hour hours", "h", 1),
    )
    for name in names.split()
}

# Units in which results are written, largest first.
_WRITTEN = {
    PLAIN: ("",),
    RATIO: ("%",),
    BYTES: ("PiB", "TiB", "GiB", "MiB", "KiB", "B"),
    BYTES_PER_SECOND: ("TB/s", "GB/s", "MB/s", "KB/s", "B/s"),
    FLOPS: ("PFLOP/s", "TFLOP/s", "GFLOP/s", "FLOP/s"),
    SECONDS: ("s", "ms", "us", "ns"),
}

_NUMBER = re.compile(r"([0-9_]+)(?:\.([0-9_]+))?(?:[eE]([+-]?[0-9]+))?(.*)", re.DOTALL)


@frozen
class Quantity:
    """A number, exact unless it is a float, and its dimension (one of those above).

    `formula` says how it was computed, if axis sizes took part in it.
    """

    value: Fraction | float
    dimension: str = PLAIN
    formula: Size | Formula | None = field(default=None, eq=False)

    @property
    def term(self) -> Term:
        """The number as an operand of a formula."""
        return self.value if self.formula is None else self.formula


def read(text: str, span: Span) -> Quantity:
    """The quantity of a number token. Raises Refused (E0006, E0106, E0107)."""
    match = _NUMBER.fullmatch(text)
    assert match is not None, "the lexer knows what a number is"
    whole, decimals, exponent, unit = match[1], match[2] or "", match[3] or "0", match[4]
    for part in (whole, decimals):
        if part.endswith("_") or "__" in part or part.startswith("_"):
            raise refuse("E0106", f"misplaced `_` in number `{shortened(text)}`", span, help="write `10_000`")
    digits = (whole + decimals).replace("_", "")
    if len(digits) > limits.DIGITS:
        raise refuse("E0006", f"number `{shortened(text)}` has too many digits", span, help=f"at most {limits.DIGITS}")
    if len(exponent) > 6 or abs(int(exponent)) > limits.EXPONENT:
        raise _out_of_range(text, span, f"exponents range from -{limits.EXPONENT} to {limits.EXPONENT}")
    if unit and unit not in UNITS:
        raise refuse("E0107", f"unknown unit `{shortened(unit)}`", span, help=_other(text, unit))
    value = Fraction(int(digits)) * Fraction(10) ** (int(exponent) - len(decimals.replace("_", "")))
    dimension, factor = UNITS[unit] if unit else (PLAIN, 1)
    if not in_range(value * factor):
        raise _out_of_range(text, span, "nonzero numbers range from 1e-300 to 1e300")
    return Quantity(value * factor, dimension)


def _other(text: str, unit: str) -> str:
    """Help for a number with an unknown unit."""
    number = text.removesuffix(unit)
    meant, count = OTHERS.get(unit, (nearest(unit, UNITS), Fraction(1)))
    if meant is None and not unit.endswith(("B", "/s")):
        return f"write `{number} * {unit}`, if that is meant"
    if meant is None:
        return f"units are as in {listed(each for kind, each in EXAMPLES.items() if kind != PLAIN)}"
    scaled = Fraction(number.replace("_", "")) * count
    if count != 1:
        number = f"{int(scaled):_}" if scaled.denominator == 1 else f"{float(scaled):g}"
    return f"write `{number}{meant}`"


def in_range(value: Fraction) -> bool:
    """Whether an exact value is zero, or converts to a finite, nonzero float."""
    return not value or Fraction(1, limits.LARGEST) <= abs(value) <= limits.LARGEST


def _out_of_range(text: str, span: Span, help: str) -> Refused:
    return refuse("E0006", f"number `{shortened(text)}` is out of range", span, help=help)


def shortened(text: str, length: int = 40) -> str:
    """The text, truncated if it is long; for messages."""
    return text if len(text) <= length else text[: length - 1] + "…"


def written(value: float, dimension: str, digits: int = 3) -> str:
    """A result in the notation of the language, with `digits` significant digits: `1.5GiB`, `8.4%`, `12_400`."""
    factors = [(unit, float(UNITS[unit][1]) if unit else 1.0) for unit in _WRITTEN[dimension]]
    unit, factor = next((each for each in factors if abs(value) >= each[1]), factors[-1])
    scaled = value / factor
    decimals = max(0, digits - 1 - floor(log10(abs(scaled)))) if scaled else 0
    text = f"{scaled:_.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + unit
