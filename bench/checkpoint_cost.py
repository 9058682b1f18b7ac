"""What saving in the background costs the training loop, and how much memory it takes.

    python bench/checkpoint_cost.py [--pairs N] [--steps N] [--batch N] [--dir DIR]

A transformer of 51 million parameters with AdamW trains on 4,096 tokens a step, in one process with all cores, so that
the thread that writes has no core of its own. Windows of ten steps alternate: one with a checkpoint at its beginning,
which must be on disk by its end, and one without. Shown are the windows' times and their ratio, of which the median
counts; the same in seconds of the processor, which other programs on the machine change less; how long training stood
still for the copy; and by how much the process grew, in copies of what the rank saves. A virtual machine's speed may
change by more than what is looked for: so the processor's time for saves by themselves, one after another, is shown as
a part of a window's, too.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import tempfile
from pathlib import Path
from time import perf_counter, process_time

SAVES = 7

TEXT = """
axis batch = {batch}, seq = 256, embed = 512, heads = 8, key = 64, ffn = 2048, vocab = 8192

block attention(x: [batch, seq, embed]) {{
  param wq, wk, wv: [embed, heads, key] ~ normal(0.02)
  param wo: [heads, key, embed] ~ normal(0.02)
  let h = rms_norm(x, over = embed)
  let a = attend(dot(h, wq, over = embed), dot(h, wk, over = embed), dot(h, wv, over = embed),
                 over = seq, along = key, causal = true)
  return x + dot(a, wo, over = [heads, key])
}}

block mlp(x: [batch, seq, embed]) {{
  param up: [embed, ffn] ~ normal(0.02)
  param down: [ffn, embed] ~ normal(0.02)
  return x + dot(gelu(dot(rms_norm(x, over = embed), up, over = embed)), down, over = ffn)
}}

model gpt(tokens: i64[batch, seq], targets: i64[batch, seq]) {{
  param wte: [vocab, embed] ~ normal(0.02)
  let x = embedding(tokens, wte, over = vocab)
  repeat 15 as layer {{ let x = mlp(attention(x)) }}
  loss cross_entropy(dot(rms_norm(x, over = embed), wte, over = embed), targets, over = vocab)
}}

schedule parts = gpipe(microbatches = 4)

train {{ data = random()  optimizer = adamw(lr = 1e-3)  steps = 1_000  checkpoint = every(10, keep = 1) }}
"""


def memory() -> int:
    """The most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def percent(ratio: float) -> str:
    """How much more than 1."""
    return f"{100 * (ratio - 1):+.1f}%"


def main() -> None:
    """Measure and print."""
    import torch

    from partita.dsl.load import load_text
    from partita.runtime.checkpoint.checkpoints import Checkpoints
    from partita.runtime.checkpoint.settings import settings_of
    from partita.runtime.data.binding import open_data
    from partita.runtime.rank import Rank, prepare
    from partita.runtime.transports.virtual import VirtualCluster

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3, help="windows with and without (default 3 of each)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a window (default 10)")
    parser.add_argument("--batch", type=int, default=16, help="rows of 256 tokens a step (default 16)")
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary directory)")
    arguments = parser.parse_args()

    spec, diagnostics = load_text(TEXT.format(batch=arguments.batch), "gpt.par")
    assert spec is not None, [each.render() for each in diagnostics]
    plan = prepare(spec)
    cluster = VirtualCluster(1, strict=False)
    rank = Rank(plan, 0, cluster.transport(0), torch.device("cpu"))
    directory = Path(tempfile.mkdtemp(dir=arguments.dir))
    settings = settings_of(spec, directory, directory)
    assert settings is not None
    checkpoints = Checkpoints(rank, settings, lambda each: print(each.render()))
    dataset = open_data(plan.program, plan.train, directory)
    assert dataset is not None
    step = 0

    def window(saves: bool) -> tuple[float, float, float]:
        """Seconds of a window, seconds of the processor, and seconds of the copy."""
        nonlocal step
        start, worked = perf_counter(), process_time()
        copied = 0.0
        if saves:
            cluster.run([checkpoints.save(step)])
            copied = perf_counter() - start
        for _ in range(arguments.steps):
            step += 1
            cluster.run([rank.step(step, rank.tensors(dataset.batch(step)), (1e-3,))])
        if saves:
            cluster.run([checkpoints.finish()])
        return perf_counter() - start, process_time() - worked, copied

    try:
        cluster.run([checkpoints.resume()])
        window(False)  # what is slow once
        grown = memory()
        ratios, work, plain = [], [], []
        for pair in range(arguments.pairs):
            # Each comes first in turn, so that a machine that becomes slower is not held against one of them.
            order = (True, False) if pair % 2 else (False, True)
            times = {saves: window(saves) for saves in order}
            ratios.append(times[True][0] / times[False][0])
            work.append(times[True][1] / times[False][1])
            plain.append(times[False][1])
            print(
                f"{arguments.steps} steps: {times[False][0]:.2f} s without, {times[True][0]:.2f} s with a checkpoint "
                f"({percent(ratios[-1])}; of the processor {percent(work[-1])}), {times[True][2]:.2f} s for the copy",
                flush=True,
            )
        alone = []
        for _ in range(SAVES):
            worked = process_time()
            step += 1
            cluster.run([checkpoints.save(step)])
            cluster.run([checkpoints.finish()])
            alone.append(process_time() - worked)
        save = statistics.median(alone)
        print(
            f"a save by itself: {save:.2f} s of the processor ({min(alone):.2f} to {max(alone):.2f}), "
            f"{100 * save / statistics.median(plain):.1f}% of {arguments.steps} steps' {statistics.median(plain):.1f} s"
        )
        saved = sum(each.bytes for each in checkpoints._shard.entries)
        wall, processor = (percent(statistics.median(each)) for each in (ratios, work))
        print(f"median of {len(ratios)}: {wall}, of the processor {processor}")
        print(f"memory: +{(memory() - grown) / saved:.2f} copies of the {saved / 2**20:.0f} MiB that the rank saves")
    finally:
        checkpoints.close()
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
