"""What an optimizer is, and the registry of optimizers by name.

An optimizer is a module: the operation that updates a parameter, and an `Optimizer`, registered on import. Its states
are the operation's; their layout, memory and time follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from attrs import frozen

from partita.compiler.ops.optimizer import Update
from partita.dsl import builtins
from partita.dsl.builtins import Signature
from partita.dsl.registry import Registry
from partita.dsl.spec import Call


@frozen(kw_only=True, eq=False)
class Optimizer(Signature):
    """An optimizer: its signature in files, and its update.

    `update` returns the operation, given a call's arguments and the weight decay of a parameter. The program calls
    `kernels.NAME`: `kernel`, or the runtime's kernel of this name if that is None. A kernel updates the operation's
    tensors in place and returns the operation's results.
    """

    update: Callable[[Mapping[str, Any], float], Update]
    kernel: Callable[..., Any] | None = None


# All that is registered there are Optimizers.
OPTIMIZERS = cast("Registry[Optimizer]", builtins.OPTIMIZERS)
register = OPTIMIZERS.register


def update_of(call: Call, decays: bool) -> Update:
    """The update operation of an optimizer's call; `decays` is whether the parameter takes weight decay by default."""
    arguments = call.arguments
    decay = float(arguments.get("weight_decay", 0.0)) if decays or arguments.get("decay") == "all" else 0.0
    return OPTIMIZERS[call.name].update(arguments, decay)
