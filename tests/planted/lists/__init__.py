"""All mistakes that are planted, by subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.planted.lists import (
    buffers,
    checkpoints,
    context,
    convolution,
    data,
    experts,
    gradients,
    initial,
    kernels,
    operations,
    optimizers,
    orders,
    partitioning,
    picking,
    recurrences,
    rules,
    schedules,
    slices,
    step_ends,
    tables,
    transports,
    using,
    watching,
)
from tests.planted.planted import Planted

SUBJECTS: Mapping[str, Sequence[Planted]] = {
    "partitioning": partitioning.MISTAKES,
    "orders": orders.MISTAKES,
    "gradients": gradients.MISTAKES,
    "optimizers": optimizers.MISTAKES,
    "rules": rules.MISTAKES,
    "tables": tables.MISTAKES,
    "convolution": convolution.MISTAKES,
    "data": data.MISTAKES,
    "slices": slices.MISTAKES,
    "kernels": kernels.MISTAKES,
    "experts": experts.MISTAKES,
    "picking": picking.MISTAKES,
    "operations": operations.MISTAKES,
    "recurrences": recurrences.MISTAKES,
    "schedules": schedules.MISTAKES,
    "step_ends": step_ends.MISTAKES,
    "initial": initial.MISTAKES,
    "transports": transports.MISTAKES,
    "checkpoints": checkpoints.MISTAKES,
    "buffers": buffers.MISTAKES,
    "watching": watching.MISTAKES,
    "using": using.MISTAKES,
    "context": context.MISTAKES,
}
