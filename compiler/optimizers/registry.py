"""What an optimizer is, and the registry of optimizers by name.

An optimizer is a module: the operation that updates a parameter, and an `Optimizer`, registered on import. Its states
are the operation's; their layout, memory and time follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from attrs import evolve, frozen

from partita.compiler.ops.optimizer import Update
from partita.dsl.config import builtins
from partita.dsl.config.builtins import TURNS, Flag, Setting, Signature
from partita.dsl.registry import Registry
from partita.dsl.spec import Call
from partita.dsl.types import Type


@frozen
class Matrix:
    """A parameter as its first product reads it: the axes that it sums, those along which the parameter is a stack of
    matrices, and the rest.
    """

    inner: tuple[str, ...]
    stacked: tuple[str, ...]
    outer: tuple[str, ...]


@frozen(kw_only=True)
class Trained:
    """A parameter as an optimizer sees it: the type of its master, the weight decay that applies to it, and how the
    model reads it: as a `matrix`, or as a table whose `rows` are looked up.
    """

    type: Type
    decay: float
    matrix: Matrix | None
    rows: tuple[str, ...]


# Of a table, update only the rows that a step looks up, though the optimizer would change others as well.
SPARSE = Setting("sparse", Flag(), False)

# Optimizers divide by the size of the gradient. In `verify`, by no less than this, times the norm of all gradients.
MIN_GRADIENT = 1e-3


def with_larger_eps(arguments: Mapping[str, Any], norm: float) -> Mapping[str, Any]:
    """The `proxy` of an optimizer whose `eps` is added to, or is the least of, the size of the gradient."""
    return {**arguments, "eps": max(float(arguments["eps"]), MIN_GRADIENT * norm)}


@frozen(kw_only=True, eq=False)
class Optimizer(Signature):
    """An optimizer: its signature in files, and its update.

    `update` returns the operation, given a call's arguments and a parameter. The program calls `kernels.NAME`:
    `kernel`, or the runtime's kernel of this name if that is None. A kernel updates the operation's tensors in place
    and returns the operation's results. `unfit` says why a parameter cannot be updated in this way; None if it can.

    `verify` runs programs with small tensors and random numbers, by the arguments that `proxy` returns, given the
    file's and the norm of all gradients: where a gradient is rounding noise, the update must be no more than that. With
    `scaled`, the length of an update does not depend on that of the gradient.
    """

    update: Callable[[Mapping[str, Any], Trained], Update]
    kernel: Callable[..., Any] | None = None
    unfit: Callable[[Trained], str | None] = lambda parameter: None
    proxy: Callable[[Mapping[str, Any], float], Mapping[str, Any]] = lambda arguments, norm: arguments
    scaled: bool = False


# All that is registered there are Optimizers.
OPTIMIZERS = cast("Registry[Optimizer]", builtins.OPTIMIZERS)


def register(optimizer: Optimizer) -> None:
    """Register an optimizer, whose rules may take turns."""
    OPTIMIZERS.register(evolve(optimizer, settings=(*optimizer.settings, *TURNS)))


def decay_of(call: Call, decays: bool) -> float:
    """The weight decay of a parameter; `decays` is whether it takes any by default."""
    arguments = call.arguments
    return float(arguments.get("weight_decay", 0.0)) if decays or arguments.get("decay") == "all" else 0.0
