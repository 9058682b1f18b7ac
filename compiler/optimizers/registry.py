"""What an optimizer is, and all of them by name.

An optimizer is one module: the operation that updates a parameter, and an `Optimizer`, which is registered when the
module is imported. Its states are the operation's; their layout, memory and time follow from it.
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
    """An optimizer: how files call it, and its update.

    `update` is the operation for a call's arguments and for the weight decay of a parameter. The program calls
    `kernels.NAME`: that is `kernel`, or where there is none, the runtime's of this name. A kernel works in place on the
    tensors that the operation gives it, and returns what the operation's results are.
    """

    update: Callable[[Mapping[str, Any], float], Update]
    kernel: Callable[..., Any] | None = None


# What is registered there is an Optimizer.
OPTIMIZERS = cast("Registry[Optimizer]", builtins.OPTIMIZERS)
register = OPTIMIZERS.register


def update_of(call: Call, decays: bool) -> Update:
    """The update operation of an optimizer's call; weight decay is off for a parameter that does not decay."""
    arguments = call.arguments
    decay = float(arguments.get("weight_decay", 0.0)) if decays or arguments.get("decay") == "all" else 0.0
    return OPTIMIZERS[call.name].update(arguments, decay)
