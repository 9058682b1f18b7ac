"""What a value of another kind most likely means, as the text to write instead; shown as help."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from string import ascii_letters

from partita.dsl.advice.quotes import NUMBER, without_quotes
from partita.dsl.check.arguments import REQUIRED
from partita.dsl.check.constants import shown
from partita.dsl.config.builtins import DataSignature, Number, OneOf, Signature, Text
from partita.dsl.syntax import tree, units
from partita.dsl.syntax.units import Quantity

TRUE = frozenset(("true", "yes", "on", "1"))
FALSE = frozenset(("false", "no", "off", "0", "none"))
# A number without a unit from here on is one of the base unit: bytes rather than GiB.
LARGE = 10**6


def truth(written: tree.Expression) -> str | None:
    """Help for something else where `true` or `false` is needed."""
    text = written.span.text.strip('"').lower()
    return "write `true`" if text in TRUE else "write `false`" if text in FALSE else None


def with_unit(quantity: Quantity, kind: Number, written: tree.Expression) -> str | None:
    """Help for a number whose unit is not that of its kind: the number as it is written with that."""
    text = _with_unit(quantity, kind, written)
    return f"write `{text}`" if text is not None else None


def _with_unit(quantity: Quantity, kind: Number, written: tree.Expression) -> str | None:
    value, text = Fraction(quantity.value), written.span.text
    match quantity.dimension, kind.dimension:
        case units.RATIO, units.PLAIN:
            return None if kind.integer else f"{float(value):g}"
        case units.PLAIN, units.RATIO:
            return f"{shown(Quantity(value * 100 if abs(value) <= 1 else value))}%"
        case units.BYTES, units.BYTES_PER_SECOND if NUMBER.fullmatch(text):
            return f"{text}/s"
        case units.BYTES_PER_SECOND, units.BYTES if NUMBER.fullmatch(text):
            return text.removesuffix("/s")
        case units.PLAIN, _ if 1 <= value < LARGE:
            return f"{shown(quantity)}{kind.usual}"
        case units.PLAIN, dimension:
            factors = {unit: factor for unit, (kind, factor) in units.UNITS.items() if kind == dimension}
            fitting = [unit for unit, factor in factors.items() if 1 <= value / factor < 1000]
            whole = [unit for unit in fitting if (value / factors[unit]).denominator == 1]
            return next((f"{shown(Quantity(value / factors[unit]))}{unit}" for unit in (*whole, *fitting)), None)
        case _, units.PLAIN if NUMBER.fullmatch(text):
            return text.rstrip("/%" + ascii_letters)
    return None


def as_call(written: tree.Expression, kind: OneOf) -> str | None:
    """Help for a number or a string where a call of one of several signatures is needed: that call of it."""
    if isinstance(written, tree.String):
        number = without_quotes(written) if kind.number is not None else None
        return named(written, kind.signatures, kind.bare) or number or _read(written, kind.signatures)
    if len(kind.signatures) > 1 or not isinstance(written, tree.Number | tree.Path):
        return None
    (signature,) = kind.signatures.values()
    needed = [setting for setting in signature.settings if setting.default is REQUIRED]
    if len(needed) == 1 and isinstance(needed[0].kind, Number):
        return f"write `{signature.name}({written.span.text})`"
    return None


# Arguments that are needed, as an example has them.
SAMPLES = {
    "microbatches": "8",
    "chunks": "2",
    "lr": "1e-3",
    "peak": "1e-3",
    "total": "1_000",
    "warmup": "100",
    "decay": "100",
    "every": "100",
    "value": "0.1",
    "deviation": "0.02",
    "bound": "0.1",
}


def call_of(signature: Signature) -> str:
    """A call of a signature: its example, or with samples of what it needs, if there are such of all."""
    needed = [each for each in signature.names if each in signature.required]
    samples = ", ".join(f"{each} = {SAMPLES[each]}" for each in needed) if SAMPLES.keys() >= {*needed} else "…"
    return signature.example or f"{signature.name}({samples})"


def named(written: tree.String, signatures: Mapping[str, Signature], bare: bool = False) -> str | None:
    """Help for the name of a signature in quotes; if `bare`, a name is a call."""
    signature = signatures.get(written.value)
    if signature is None:
        return None
    return f"write `{signature.name if bare and not signature.required else call_of(signature)}`, without quotes"


def _read(written: tree.String, signatures: Mapping[str, Signature]) -> str | None:
    """The call that reads a file of this name."""
    reading = [each for each in signatures.values() if isinstance(each, DataSignature)]
    takes = [each for each in reading if each.settings and each.settings[0].kind == Text()]
    name = written.value.lower()
    signature = next((each for each in takes if name.endswith(each.endings)), takes[0] if takes else None)
    return f"write `{signature.name}({written.text})`" if signature is not None else None
