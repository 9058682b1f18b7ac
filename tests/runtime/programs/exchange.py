"""One rank of an exchange: transfers on two channels each way, waited for in the reverse order, and a sum.

Prints what it received as one JSON line. With `--leave` rank 1 leaves without a word before the end. With `--much` the
channels are said to send more than shared memory is used for; with `--apart` the ranks believe to be on two machines.
With `--pingpong` 20,000 messages go to and fro, some after a while.
"""

import json
import os
import sys
from pathlib import Path
from random import Random
from time import sleep

import torch

from partita.compiler.instructions import Channel, Traffic
from partita.compiler.mesh import Mesh
from partita.runtime.supervision.identity import rank_from_environment
from partita.runtime.supervision.rendezvous import connect
from partita.runtime.transports import same_host
from partita.runtime.transports.process import ConnectionLost, ProcessTransport
from partita.runtime.transports.shared import LIMIT, POLL_SECONDS, Incoming, Outgoing

identity = rank_from_environment()
assert identity is not None
connect(identity, "gloo")
if "--apart" in sys.argv:
    same_host.BOOT = Path(f"/proc/{os.getpid()}/cmdline") if identity.rank else same_host.BOOT
transport = ProcessTransport()
rank, other = transport.rank, 1 - transport.rank
ways = ("backward", "forward")
large = 300_000  # elements: far more than any socket buffers
traffic = Traffic(4, 8 * (large + 3) if "--much" not in sys.argv else LIMIT + 1)
channels = {Channel(a, b, way): traffic for way in ways for a, b in ((rank, other), (other, rank))}
transport.open(Mesh((("pipe", 2),), "pipe"), channels)

receives = [
    (way, i, transport.receive(Channel(other, rank, way), buffer), buffer)
    for way in ways
    for i in range(4)
    for buffer in [torch.full((large if i % 2 else 3,), -1.0)]
]
sends = []
for i in range(4):
    for number, way in enumerate(ways):
        tensor = torch.full((large if i % 2 else 3,), 100.0 * rank + 10.0 * number + i)
        sends.append(transport.send(Channel(rank, other, way), tensor))
for _, _, handle, _ in reversed(receives):
    assert handle.done()
for handle in sends:
    assert handle.done()
got = {f"{way} {i}": sorted(set(buffer.tolist())) for way, i, _, buffer in receives}

if "--pingpong" in sys.argv:
    out, into = (Channel(a, b, "forward") for a, b in ((rank, other), (other, rank)))
    random = Random(rank)
    for i in range(20_000):
        # Beside the moment at which a rank that waits lies down to sleep.
        if random.random() < 0.02:
            sleep(random.choice((0.0, 0.5e-3, POLL_SECONDS, 1.2e-3)))
        tensor, buffer = torch.full((3,), 2.0 * i + rank), torch.zeros(3)
        transport.send(out, tensor)
        transport.receive(into, buffer).done()
        assert buffer.tolist() == [2.0 * i + other] * 3, (i, buffer)

# 0.1 + 0.2 and so on: what matters is that every rank has the same bits.
total = torch.tensor([0.1 * (rank + 1), 1e8 * (-1) ** rank], dtype=torch.float32)
total = transport.gather_over_ranks(total).result()[0].sum(0)

listening = []
for name in ("/proc/net/tcp", "/proc/net/tcp6"):
    if os.path.exists(name):
        mine = {
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        }
        for line in Path(name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                listening.append(fields[1].split(":")[0])

busy_wait = transport.busy_wait
shared = sum(isinstance(end, Outgoing | Incoming) for end in transport._channels.values())
lost = None
if "--leave" in sys.argv:
    if rank == 1:
        os._exit(0)
    try:
        transport.receive(Channel(other, rank, "forward"), torch.empty(3)).done()
    except ConnectionLost as error:
        lost = str(error)
transport.close()
record = {
    "rank": rank,
    "got": got,
    "total": [value.hex() for value in total.tolist()],
    "listening": listening,
    "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    "threads": torch.get_num_threads(),
    "lost": lost,
    "shared": shared,
    "busy_wait": busy_wait,
}
# One write, so that the ranks' lines do not mix on a shared output.
os.write(1, (json.dumps(record) + "\n").encode())
