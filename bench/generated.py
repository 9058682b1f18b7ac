"""What Inductor generates for a GPU that is not there.

Inductor asks a GPU for its properties, which are here those of an H100, and writes kernels in Triton, whose package
must be installed and needs no GPU. What it has written is read, and neither translated nor run: of each graph, the
kernels that its code launches, its own and others, and the bytes that Inductor counts them to read and write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from attrs import frozen

from partita.runtime.fake_gpu.device import CAPABILITY

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, warp_size=32,
    total_memory=80 << 30, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    regs_per_multiprocessor=65536, shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10, L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip

# A kernel of its own, a call of another, and what the code around kernels computes: sums of partial sums, and casts.
LAUNCH = re.compile(r"(\w+)\.run\(|(extern_kernels\.\w+|torch\.ops\.[\w.]+)\(|\.(sum|to|copy_|zero_|fill_)\(")


@frozen
class Generated:
    """The code of one graph: the kernels that it launches, and the bytes that these read and write."""

    launches: tuple[str, ...]
    bytes: int


def launches(code: str) -> tuple[str, ...]:
    """The kernels that the code of a graph launches, in order."""
    body = code[code.index("def call(") : code.index("runner = ")]
    return tuple("".join(filter(None, found)) for found in LAUNCH.findall(body))


@contextmanager
def inductor_for_gpu() -> Iterator[list[Generated]]:
    """Inductor generates code for tensors of FakeTensorMode on `cuda`, which is noted and cannot be run."""
    import torch._inductor.config
    import torch.utils._triton as triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.graph import GraphLowering

    found: list[Generated] = []

    def written(graph: Any) -> SimpleNamespace:
        code, _ = graph.codegen()
        found.append(Generated(launches(code.value), graph.count_bytes()[0]))
        return SimpleNamespace(call=lambda inputs: inputs, __file__="", key="", runner=None)

    instead: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", lambda device=None: H100),
        (torch.cuda, "_get_device_properties", lambda device: H100),
        (torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "get_rng_state", lambda device=None: torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda state, device=None: None),
        (torch.cuda, "_exchange_device", lambda device: 0),
        (torch.cuda, "_maybe_exchange_device", lambda device: 0),
        (CudaInterface, "get_compute_capability", staticmethod(lambda device=None: 90)),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (triton, "triton_hash_with_backend", lambda: ""),
        (GraphLowering, "compile_to_module", written),
    ]
    kept = [each for each in vars(triton).values() if hasattr(each, "cache_clear")]
    with ExitStack() as stack:
        for of, name, value in instead:
            stack.enter_context(patch.object(of, name, value, create=True))
        stack.enter_context(torch._inductor.config.patch(compile_threads=1, force_disable_caches=True))
        for each in kept:  # whether there is a GPU
            each.cache_clear()
            stack.callback(each.cache_clear)
        yield found
