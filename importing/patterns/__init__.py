"""What several operations are together: attention, rotary positions, norms, activations and losses."""

from collections.abc import Sequence
from functools import partial

from partita.importing.patterns.attention import Rule, rules
from partita.importing.patterns.convolutions import RULES as CONVOLUTIONS
from partita.importing.patterns.experts import RULES as EXPERTS
from partita.importing.patterns.losses import RULES as LOSSES
from partita.importing.patterns.norms import RULES as NORMS
from partita.importing.patterns.rotary import RULES as ROTARY
from partita.importing.patterns.rotary import part
from partita.importing.patterns.scalings import Scaling
from partita.importing.patterns.views import RULES as VIEWS


def patterns(scalings: Sequence[tuple[float, Scaling]], attended: bool) -> list[Rule]:
    """All patterns, given how positions of a module may be scaled, and whether all queries have keys."""
    rotary = [partial(rule, scalings=scalings) for rule in ROTARY]
    return [*VIEWS, *CONVOLUTIONS, *NORMS, *rotary, part, *rules(attended), *EXPERTS, *LOSSES]
