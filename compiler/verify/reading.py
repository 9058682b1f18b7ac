"""An evaluation finds parameters as training stores them: it is compiled apart, and reads the same memory."""

from __future__ import annotations

from partita.compiler.ops.groups import ANCHOR
from partita.compiler.ops.optimizer import EMA
from partita.compiler.program import Program
from partita.compiler.verify.rules import require

MEANS = (EMA, ANCHOR)


def check_reading(program: Program, stored: Program, means: bool) -> None:
    """Raises Violation unless every parameter that a program reads is of the type and in the layout in which the other
    stores it, or its mean, where a program reads `means`.
    """
    for record in program.parameters:
        own = stored.parameter(record.name)
        mean = means and any(each.name in MEANS for each in (*own.states, *own.companions))
        layout = own.state_layout if mean else own.layout
        same = record.type == own.type and record.layout == layout
        require(same, f"`{record.name}` is read as {record.layout}, and stored as {layout}")
