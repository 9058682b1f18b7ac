"""What a call that does not fit most likely means, as the text to write instead; shown as help."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import permutations

from attrs import evolve

from partita.dsl.diagnostic import Refused
from partita.dsl.functions.signatures import Tensor
from partita.dsl.spec import BATCH
from partita.dsl.syntax import tree

LONGEST = 100  # characters of a call that is written out
MOST = 4  # arguments that are tried in another order
# Functions that work along the axis of features, the last one of what they take.
OF_FEATURES = frozenset(("softmax", "log_softmax", "logsumexp", "layer_norm", "rms_norm", "arg_max"))
# Functions that work along positions: the first axis that is not the batch.
OF_POSITIONS = frozenset(("cumsum", "shift", "rope", "linear_scan", "delta_rule", "attend"))


def likely(function: str, slot: str, tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """The axes that an argument of a function most likely names, by those of the tensors before it; () if unknown."""
    if not tensors:
        return ()
    first, *others = (tensor.type.names for tensor in tensors)
    rest = first[-1:]
    match function, slot:
        case "dot", "over" if others:
            shared = tuple(name for name in first if name in others[0])
            # All that a parameter shares with a value, but only one axis of two values.
            return shared if BATCH not in shared else shared[-1:]
        case (("cross_entropy" | "token_nll" | "accuracy"), "over") if others:
            rest = tuple(name for name in first if name not in others[0])
        case "embedding", "over" if others:
            rest = tuple(name for name in others[0] if name not in first)[:1]
        case "gather", "along":
            rest = tuple(name for name in first if not others or name not in others[0])[:1]
        case _, "over" if function in OF_POSITIONS:
            rest = tuple(name for name in first if name != BATCH)[:1]
        case ("rope", "pairs") | ("attend", "along"):
            pass
        case _, "over" if function in OF_FEATURES:
            pass
        case _:
            return ()
    return rest if len(rest) == 1 else ()


def named(axes: Collection[str]) -> str:
    """Axes as they are written: one, or a list."""
    return next(iter(axes)) if len(axes) == 1 else f"[{', '.join(axes)}]"


def completed(call: tree.Call, missing: Mapping[str, Collection[str]]) -> str:
    """Help that adds the axes, or the value, of missing arguments to a call."""
    added = ", ".join(f"{slot} = {named(axes)}" for slot, axes in missing.items())
    text = _text(call)
    if text is None:
        return f"add `{added}`"
    begun = text.removesuffix(")") if text.endswith(")") else f"{text}("
    return f"write `{begun}{'' if begun.endswith('(') else ', '}{added})`"


def reordered(
    refused: Refused, call: tree.Call, arguments: Mapping[str, tree.Argument], fits: Callable[[Mapping[str, str]], bool]
) -> Refused:
    """What is said of a call that was refused, also if some of its arguments, by name, fit in another order.

    `fits` says whether they do, of the name of the argument that takes the place of each.
    """
    names = tuple(arguments)
    orders = permutations(names) if 2 <= len(names) <= MOST else ()
    fitting = [order for order in orders if order != names and fits(dict(zip(names, order, strict=True)))]
    text = (
        _exchanged(call, [(arguments[a], arguments[b]) for a, b in zip(names, fitting[0], strict=True)])
        if fitting
        else None
    )
    if text is None:
        return refused
    help = f"write `{text}`" if len(fitting) == 1 else f"such as `{text}`"
    (wrong,) = refused.diagnostics
    return Refused([evolve(wrong, span=call.span, help=f"arguments swapped? {help}")])


def exchanged(call: tree.Call, one: tree.Argument, other: tree.Argument) -> str | None:
    """Help that exchanges two arguments of a call; None if that is long."""
    text = _exchanged(call, [(one, other), (other, one)])
    return f"arguments swapped? write `{text}`" if text is not None else None


def _exchanged(call: tree.Call, pairs: Sequence[tuple[tree.Argument, tree.Argument]]) -> str | None:
    """The text of a call with some arguments, in the order of the text, replaced by others; None if it is long."""
    if _text(call) is None:
        return None
    source, parts, end = call.span.source.text, list[str](), call.span.start
    for written, other in pairs:
        span = written.value.span
        parts += [source[end : span.start], source[other.value.span.start : other.value.span.end]]
        end = span.end
    return " ".join("".join([*parts, source[end : call.span.end]]).split())


def _text(call: tree.Call) -> str | None:
    """The text of a call on one line; None if it is long, or has comments."""
    text = call.span.source.text[call.span.start : call.span.end]
    line = " ".join(text.split())
    return line if len(line) <= LONGEST and "#" not in text else None
