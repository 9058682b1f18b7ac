"""What several operations are together: attention, rotary positions, norms, activations and losses."""

from partita.importing.patterns.attention import RULES as ATTENTION
from partita.importing.patterns.experts import RULES as EXPERTS
from partita.importing.patterns.losses import RULES as LOSSES
from partita.importing.patterns.norms import RULES as NORMS
from partita.importing.patterns.rotary import RULES as ROTARY

RULES = (*NORMS, *ROTARY, *ATTENTION, *EXPERTS, *LOSSES)
