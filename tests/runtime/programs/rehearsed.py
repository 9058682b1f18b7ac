"""One of two ranks on Gloo: trains files with and without a rehearsal, and prints what came out of each as JSON."""

import json
import os
import sys
from hashlib import sha256
from pathlib import Path

import torch

from partita.dsl.load import load_text
from partita.runtime.evaluation import results
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.rank import Rank, prepare
from partita.runtime.rehearsal import leaves_nothing, rehearse
from partita.runtime.supervision.identity import rank_from_environment
from partita.runtime.supervision.rendezvous import connect
from partita.runtime.transports.packing import as_bytes
from partita.runtime.transports.process import ProcessTransport

STEPS = 3


identity = rank_from_environment()
assert identity is not None
transport = ProcessTransport(secret=connect(identity, "gloo").secret, shares=False)
for text in json.loads(Path(sys.argv[1]).read_text()):
    spec, diagnostics = load_text(text)
    assert spec is not None, diagnostics
    plan = prepare(spec)
    for rehearsed in (False, True):
        rank = Rank(plan, identity.rank, transport, torch.device("cpu"))
        if rehearsed:
            assert leaves_nothing(rank)
            for _ in rehearse(rank, transport):
                raise AssertionError("a real transport waits inside its handles")
        generator = torch.Generator().manual_seed(1)
        batches = [
            {
                each.name: torch.randint(0, 2, each.type.shape, generator=generator).to(DTYPES[each.type.dtype])
                for each in plan.program.inputs
            }
            for _ in range(STEPS)
        ]
        losses = []
        for number, batch in enumerate(batches, 1):
            for _ in rank.step(number, batch, (0.01,)):
                raise AssertionError("a real transport waits inside its handles")
            losses.append(results(rank.training)[0])
        state = sha256()
        for _, tensor in rank.kept():
            state.update(as_bytes(tensor.detach().contiguous()).numpy().tobytes())
        line = json.dumps({"rank": identity.rank, "losses": losses, "state": state.hexdigest()})
        os.write(1, f"{line}\n".encode())  # in one piece: both ranks write there
os._exit(0)
