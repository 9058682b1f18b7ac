"""What it costs that an allocator finds no memory, frees what it keeps, and tries again: torch's FSDP near the limit.

    python bench/allocator_retries.py [GIB ...]

One rank of eight trains MPT 30B as MosaicML does (`bench/published/mosaicml.json`): FSDP of torch, gradients reduced in
f32, checkpoints of layers, AdamW, a sequence of 8,192 tokens in a microbatch. Collectives do nothing, and the seven
others are not there; all else is real. First it may have all memory, also with half as many tokens, then so many GiB of
it. For each a line of JSON: the tokens, seconds and retries of each microbatch, and the peaks of what was allocated and
reserved. Without a GPU it runs at a tiny size, where nothing is limited.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
EMBED, HEADS, LAYERS, VOCAB, SEQ = (7168, 56, 48, 50_368, 8192) if GPU else (64, 4, 3, 512, 64)
RANKS, MICROBATCHES, GIB = 8, 4, 1 << 30


class Block(nn.Module):
    """A layer: attention, and two products with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.first, self.second = (nn.LayerNorm(EMBED, bias=False) for _ in range(2))
        self.qkv, self.out = linear(EMBED, 3 * EMBED), linear(EMBED, EMBED)
        self.up, self.down = linear(EMBED, 4 * EMBED), linear(4 * EMBED, EMBED)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, embed] to the same."""
        batch, seq, _ = x.shape
        heads = (each.view(batch, seq, HEADS, -1).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        x = x + self.out(a.reshape(batch, seq, EMBED))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Mpt(nn.Module):
    """The model, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, EMBED), nn.Embedding(SEQ, EMBED)
        self.layers = nn.ModuleList(checkpoint_wrapper(Block()) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(EMBED, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of [batch, seq]."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCAB).float(), targets.view(-1))


def materialized(module: nn.Module) -> None:
    """Give a module's own parameters memory and values."""
    module.to_empty(device=DEVICE, recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.02)


def main() -> None:
    """Measure, and print a line for each limit."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with torch.device("meta"):
        whole = Mpt()
    model = FullyShardedDataParallel(
        whole,
        auto_wrap_policy=ModuleWrapPolicy({CheckpointWrapper}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        limit_all_gathers=True,
        use_orig_params=True,
        device_id=DEVICE,
        param_init_fn=materialized,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def microbatch(seq: int) -> tuple[float, int]:
        before, start = retries(), perf_counter()
        tokens, targets = (torch.randint(0, VOCAB, (1, seq), device=DEVICE) for _ in range(2))
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        if GPU:
            torch.cuda.synchronize()
        return perf_counter() - start, retries() - before

    def update() -> None:
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    microbatch(SEQ // 4)
    update()
    for limit, seq in ((None, SEQ), (None, SEQ // 2), *((float(each), SEQ) for each in sys.argv[1:])):
        limited(limit)
        try:
            took = [microbatch(seq) for _ in range(MICROBATCHES)]
        except torch.OutOfMemoryError as error:
            print(json.dumps({"GiB": limit, "tokens": seq, "out of memory": str(error).partition(".")[0]}))
            return
        update()
        seconds, retried = ([each[i] for each in took] for i in range(2))
        peaks = torch.cuda.memory_stats() if GPU else {}
        kinds = {kind: peaks.get(f"{kind}_bytes.all.peak", 0) / GIB for kind in ("allocated", "reserved")}
        print(json.dumps({"GiB": limit, "tokens": seq, "seconds": seconds, "retries": retried, **kinds}), flush=True)


def retries() -> int:
    """How often the allocator has found no memory so far."""
    return int(torch.cuda.memory_stats()["num_alloc_retries"]) if GPU else 0


def limited(gib: float | None) -> None:
    """Let the allocator have so much memory (None: all), and begin with nothing that it keeps."""
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else gib * GIB / total)


if __name__ == "__main__":
    main()
