"""Offloading on two ranks with a device of limited memory: what trains, and what needs too much.

    python bench/offload.py [--layers 6] [--steps 2]
    python bench/offload.py --predicted

`specs/llama.par`, with its own layout (ZeRO-3) on two ranks of data parallelism, with `--layers` layers and twice as
many; each without offloading, with `offload state`, and with `offload param`. Ranks run on CPUs; live tensors of the
device are counted after each operation (`device_memory.py`), and more than the limit is refused. The limit is what the
smaller model needs without offloading. Beside what was alive stands the compiler's bound. All that train the same model
should have the same losses.

`--predicted` says what the cost model has of copies to the host and back: of a larger Llama with `offload state` on
eight H100s, ZeRO-3 and ZeRO-1, with and without clipping.
"""

from __future__ import annotations

import argparse
import os
from itertools import product
from math import inf

from measure import joined, measured, report
from rich.console import Console
from rich.table import Table

RULES = {rule: rule for rule in ("", "offload state", "offload param")}
SETTINGS = ("cluster.pipe=1", "cluster.tensor=1", "batch=8", "seq=32")
LARGE = ("cluster.pipe=1", "cluster.tensor=1", "cluster.data=8", "batch=64", "seq=2048", "vocab=32768")
WIDE = ("embed=2048", "groups=8", "key=64", "ffn=5504")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rule", default="", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--predicted", action="store_true", help="predict larger runs on H100s instead")
    arguments = parser.parse_args()
    if arguments.predicted:
        predicted()
        return
    if arguments.limit is not None:
        run(arguments.layers, arguments.rule, arguments.limit, arguments.steps)
        return
    table = Table("layers", "rule", "alive, MiB", "bound", "bound ÷ alive", "host's", "losses")
    limit = inf
    for layers in (arguments.layers, 2 * arguments.layers):
        for rule in RULES:
            given = ["--layers", layers, "--rule", rule, "--limit", limit, "--steps", arguments.steps]
            found = measured([__file__, *map(str, given)], 2, 1)
            if limit == inf:
                limit = found["peak"]
            ratio = f"{found['bound'] / found['peak']:.3f}" if found["losses"] else "-"
            alive = f"{found['peak'] / 2**20:.1f}" if found["losses"] else f"refused beyond {limit / 2**20:.1f}"
            losses = ", ".join(f"{each:.6f}" for each in found["losses"]) or "-"
            numbers = f"{found['bound'] / 2**20:.1f}", ratio, f"{found['host'] / 2**20:.1f}"
            table.add_row(str(layers), rule or "none", alive, *numbers, losses)
    Console(width=140).print(table)


def predicted() -> None:
    """Print what the cost model says of the copies of larger runs."""
    from memory import LLAMA

    from partita.compiler.analysis.time import predict
    from partita.compiler.pipeline import schedule_spec
    from partita.dsl.load import load_text

    links = "device = h100  link = [tensor -> nvlink4, pipe -> ib400, data -> ib400]"
    text = LLAMA.read_text().replace("[3, 3]", "").replace("tensor = 2)", f"tensor = 2) {{ {links} }}")
    for stored in ("param", "state"):
        text = text.replace(f"shard {stored} -> data", f"shard {stored} -> data\n  offload state")
    table = Table("layout", "precision", "clip", "step, ms", "without the rule", "copies", "exposed")
    for layout, precision, clip in product(("everything", "zero1"), ("f32", "bf16"), ("none", "1.0")):
        settings = (*LARGE, *WIDE, f"layout={layout}", f"train.precision={precision}")
        found = []
        for own in (text, text.replace("offload state", "")):
            own = own.replace("steps = 3", f"steps = 3  precision = f32  clip = {clip}")
            spec, diagnostics = load_text(own, "llama.par", settings)
            assert spec is not None, [each.render() for each in diagnostics]
            found.append(predict(schedule_spec(spec)))
        ours, theirs = found
        numbers = ours.step_time, theirs.step_time, ours.copying, ours.exposed_copies
        table.add_row(layout, precision, clip, *(f"{1e3 * each:.1f}" for each in numbers))
    Console(width=140).print(table)


def text_of(layers: int, rule: str) -> str:
    """The file with so many layers, and a rule."""
    from memory import LLAMA

    text = LLAMA.read_text().replace("repeat 6 as layer", f"repeat {layers} as layer")
    return text.replace("  shard param -> data\n", f"  shard param -> data\n  {rule}\n").replace("[3, 3]", "")


def run(layers: int, rule: str, limit: float, steps: int) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from device_memory import Device, OutOfMemory
    from memory import LLAMA, shared

    from partita.compiler.analysis.memory import memory_report
    from partita.dsl.load import load_text
    from partita.runtime.data.binding import open_data
    from partita.runtime.evaluation import results
    from partita.runtime.rank import Rank, prepare
    from partita.runtime.transports.failures import ConnectionLost
    from partita.runtime.transports.process import ProcessTransport

    spec, diagnostics = load_text(text_of(layers, RULES[rule]), "llama.par", SETTINGS)
    assert spec is not None, [each.render() for each in diagnostics]
    plan = prepare(spec)
    data = open_data(plan.program, plan.train, LLAMA.parent)
    joined()
    transport = ProcessTransport(torch.device("cpu"))
    losses: list[float] = []
    device = Device()
    with device.copying(), device:
        rank = Rank(plan, dist.get_rank(), transport, torch.device("cpu"))
        device.aside = list(shared(transport))
        device.begin(rank, limit)
        try:
            for step in range(1, steps + 1):
                for _ in rank.step(step, rank.tensors(data.batch(step)), (1e-3,)):
                    pass
                losses.append(results(rank.training)[0])
        except (OutOfMemory, ConnectionLost) as refused:  # here, or on the other rank
            print(f"{layers} layers, {rule or 'no rule'}: {refused}", flush=True)
            losses = []
    bound = memory_report(plan.training, plan.program.ranks[0])
    report({"peak": device.peak, "bound": bound.total, "host": bound.host, "losses": losses})
    if not losses:
        os._exit(0)  # the other rank may wait for ever
    transport.close()


if __name__ == "__main__":
    main()
