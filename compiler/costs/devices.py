"""Devices: a table of their throughput, memory and bandwidth.

Presets combine published peaks with the shares of them that others have measured, each with its source. A profiled
device also has measured times of operations (`partita profile`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import ceil

from attrs import evolve, field, frozen

from partita.compiler.costs.record import Timings, recorded
from partita.dsl.reprs import Shortened
from partita.dsl.spec import Mesh

MIB, GIB = 2**20, 2**30


# Output tile sizes of cuBLAS, each with its share of the best throughput: smaller tiles reuse operands less.
# (Estimates: the guide ranks them, without numbers.)
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.87), (64, 128, 0.7), (128, 64, 0.7), (64, 64, 0.55))


@frozen
class Products:
    """The share of peak FLOP/s that a matrix product reaches.

    Without `units`: `best` for large matrices, halved if one of the three sizes is `half`. With `units`, the device's
    multiprocessors, each of which computes one output tile at a time: `best` if the largest tiles cover the output in
    full waves, halved if the depth is `half`; the fastest tile size is chosen (NVIDIA, Matrix Multiplication Background
    User's Guide, DU-09799-001, §2.3 and §3). Either way a larger product never takes less time. `filled`: products run
    beside one another, so that what a wave leaves empty is filled by the next.
    """

    best: float = 1.0
    half: float = 0.0
    units: int = 0
    filled: bool = False

    def efficiency(self, rows: int, depth: int, columns: int, count: int = 1) -> float:
        """The share for `count` products of these sizes in one kernel."""
        share = self.best * depth / (depth + self.half)
        if not self.units:
            return share * rows / (rows + self.half) * columns / (columns + self.half)
        return share * count * rows * columns / min(self._area(rows, columns, count, *tile) for tile in TILES)

    def _area(self, rows: int, columns: int, count: int, height: int, width: int, share: float) -> float:
        """The output area that all units would compute with the largest tiles in the time that these tiles take."""
        waves = count * ceil(rows / height) * ceil(columns / width) / self.units
        return (waves if self.filled else ceil(waves)) * self.units * height * width / share


# The size of heads of which most is published, and that kernels are made for.
_HEAD = 128


@frozen
class Fused:
    """The share of peak FLOP/s that attention in one kernel reaches, forward and backward together: `best` over many
    keys with heads of 128, half of that over `half`; less with smaller ones, those of `narrow` half of what the largest
    would reach if they went on like that.
    """

    best: float = 1.0
    half: float = 0.0
    narrow: float = 0.0

    def efficiency(self, length: int, size: int) -> float:
        """The share if each query goes through `length` keys, with heads of `size`; larger ones are no quicker."""
        size = min(size, _HEAD)
        share = size / (size + self.narrow) * (_HEAD + self.narrow) / _HEAD
        return self.best * share * length / (length + self.half)


@frozen(repr=False)
class Device(Shortened):
    """Peak FLOP/s of matrix products by dtype, and of other arithmetic (`vector`; 0: the same); memory in bytes;
    bandwidth in bytes/s, of which the share `streaming` is reached.

    Overheads are in seconds: `launch` for each kernel, `action` for each action of a schedule, `step` for each step. To
    launch a kernel takes the host `launching`, ahead of the device, unless a step is one graph.
    `attention` is that of the kernel which torch takes; `flash` are the generations of FlashAttention. Products of
    operands of 8 bits have a rate of their own (`f8`) on some devices, of which `narrow` times the usual share is
    reached.
    `node` is the number of devices in a machine, which are joined by a faster link than machines are. A `gpu` has its
    own memory, and programs for it are compiled by default. It is joined to the host's by `host_link` bytes/s in each
    direction, and has a share of `host_bandwidth` bytes/s of that memory; where the device is a CPU, both memories are
    one. Its libraries of products keep `workspace` bytes, and as many for a graph; torch compiles kernels with a tensor
    as large as its `cache`, from which it tries them.
    `timings` are measured, if the device is profiled. What operations take is computed once (`known`).
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    bandwidth: float
    streaming: float = 1.0
    products: Products = field(factory=Products)
    attention: Fused = field(factory=Fused)
    flash: Mapping[int, Fused] = field(factory=dict)
    launch: float = 0.0
    launching: float = 0.0
    action: float = 0.0
    step: float = 0.0
    vector: float = 0.0
    narrow: float = 1.0
    node: int = 1
    gpu: bool = False
    host_link: float = 25.6e9
    host_bandwidth: float = 5e10
    workspace: int = 0
    cache: int = 0
    timings: Timings = field(factory=Timings, eq=False, repr=False)
    sources: tuple[str, ...] = ()
    known: dict[Hashable, float] = field(factory=dict, init=False, eq=False, repr=False)

    def generation(self, flash: int) -> Device:
        """This device with a generation of FlashAttention. Raises KeyError if it has none."""
        return evolve(self, attention=self.flash[flash])

    def narrowed(self) -> Device:
        """This device with products in 8 bits where a program has them in bf16. Raises KeyError if it has none."""
        rates = {**self.flops, "bf16": self.flops["f8"]}
        return evolve(self, flops=rates, products=evolve(self.products, best=self.products.best * self.narrow))

    def beside(self, blocks: int) -> float:
        """The share of its speed that is left beside collectives that take so many multiprocessors."""
        return max(0.25, 1 / (1 + _SLOWED * blocks / _CHANNELS)) if self.products.units else 1.0


# What is computed beside collectives, on machines of A100 or H100, takes 18.9% longer on average and 40% at most, the
# more of it is overlapped (Lee et al., arXiv 2507.03114): besides multiprocessors they take memory bandwidth and power.
# So 40% is the price of the 24 channels that NCCL has there (see `links`), in proportion to their number.
_SLOWED, _CHANNELS = 0.4, 24
_BESIDE = "beside collectives: Lee et al., Characterizing Compute-Communication Overlap, arXiv 2507.03114"

# Sources of the shares. Bekman's table has the best of all shapes: A100 271.2 TFLOP/s with 1024 × 5120 × 10240, H100
# 794.5, B200 1,745; that is 0.91, 0.84 and 0.83 of peak after correcting for tiles and depth. Over a training step it
# is less. Two are fitted: A100's `best` to the ten rows of the SC21 table, H100's to all runs on H100. B200's is
# lowered in the proportion of H100's, 0.63 to 0.84.
_PRODUCTS = "S. Bekman, Machine Learning Engineering, compute/accelerator: Maximum Achievable Matmul FLOPS"
_FITTED = "best: fitted to Narayanan et al., SC21, arXiv 2104.04473, Table 1 (bench/published)"
_FITTED_H = "best: fitted to the runs on H100 in bench/published"
_LOWERED = "best: that table, lowered as H100's"
# FlashAttention-2, which torch has for Ampere: causal, 128 a head, forward and backward. On A100 133 TFLOP/s over 1,024
# keys, 173 over 4,096, 189 over 16,384: 195 · n / (n + 530). The same program on H100: up to 335. On B200 the share is
# assumed. The first generation reached 0.54 of its speed on A100 (ibid., the columns of FlashAttention, causal, 128 a
# head), and is taken to be as much slower on others. The third, on Hopper alone (arXiv 2407.08608, causal, 128 a head):
# 616 for 335 TFLOP/s forward; 1.5 to 1.75 times as quick backward, which has 5 products for 2 (known, not looked up).
_FUSED = "attention: Dao, FlashAttention-2, arXiv 2307.08691, §4.1"
_FLASH_A = {1: Fused(0.54 * 0.625, 530), 2: Fused(0.625, 530)}
_FLASH = {1: Fused(0.54 * 0.35, 530), 2: Fused(0.35, 530)}
_FLASH_H = _FLASH | {3: Fused(0.35 * 7 / (2 * 335 / 616 + 5 / 1.62), 530)}
# Since 2.11 torch has cuDNN's for Hopper and Blackwell: causal, 128 a head, forward and backward, on an H200
# 350 TFLOP/s over 1,024 keys, 444 over 2,048, 513 over 4,096, 605 over 16,384; 64 a head, 259 over 1,024 and 385 over
# 4,096. On B200 the share is assumed.
_CUDNN = "attention: cuDNN 9.19 with torch 2.11, measured on an H200 (bench/notes/gpu.md)"
_ATTENTION_H = Fused(0.64, 840, 67)
# The share is 0.90 for 100 MB, 0.75 for 10 MB.
_STREAMING = "streaming: Isaev et al., Calculon, SC23, systems/a100_80g.json"
# Bekman's table for operands of 8 bits: H100 1,402.6 of 1,979 TFLOP/s, B200 3,432.5 of 4,500.
_NARROW_H, _NARROW_B = (1402.6 / 1979) / (794.5 / 989.4), (3432.5 / 4500) / (1745 / 2250)
# PCI Express x16 in one direction, of which a share is assumed as in `links`; the memory channels of a machine's two
# processors, for each of its 8 GPUs: DDR4-3200, DDR5-4800, DDR5-5600, 8 channels each.
_HOST = "host: NVIDIA DGX A100, H100, B200, user guides"
_HOST_LINK = 0.8
_GEN4, _GEN5, _GEN5_B = (32e9, 51e9), (64e9, 77e9), (64e9, 90e9)
# An estimate: the prologue and epilogue of a tile, as a depth that takes as long. Measured: the overhead of a kernel,
# of a thousand of 16 elements in a CUDA graph on an H200 (bench/notes/gpu.md).
_DEPTH, _LAUNCH = 192.0, 0.9e-6
# The driver's 4 to 6 µs (measured by pegainfer (3), susun-blog.com), and what Python and torch take of an operation of
# ours: 2.4 µs on a CPU (bench/notes/pipelines.md).
_LAUNCHING = 7.5e-6
# What torch lets cuBLAS have (`:4096:2:16:8`; 32 MiB on Hopper and Blackwell, pytorch#89027, #175344), and cuBLASLt:
# 33 MiB in all on an H200. The second-level caches: data sheets; of H200 as torch says.
_WORKSPACE_A, _WORKSPACE_H = (8320 << 10) + MIB, 33 * MIB
_CACHE_A, _CACHE_H100, _CACHE_H200, _CACHE_B = 40 * MIB, 50 * MIB, 60 * MIB, 126 * MIB


def _gpu(
    name: str,
    flops: tuple[float, float, float, float],
    narrow: tuple[float, float] | None,
    memory: int,
    bandwidth: float,
    products: Products,
    attention: Fused,
    flash: Mapping[int, Fused],
    host: tuple[float, float],
    workspace_cache: tuple[int, int],
    *sources: str,
) -> Device:
    f32, bf16, f64, vector = flops
    rates = {"f32": f32, "bf16": bf16, "f64": f64}
    return Device(
        name,
        rates | ({"f8": narrow[0]} if narrow else {}),
        memory * GIB,
        bandwidth,
        streaming=0.85,
        products=products,
        attention=attention,
        flash=flash,
        launch=_LAUNCH,
        launching=_LAUNCHING,
        vector=vector,
        narrow=narrow[1] if narrow else 1.0,
        node=8,
        gpu=True,
        host_link=host[0] * _HOST_LINK,
        host_bandwidth=host[1],
        workspace=workspace_cache[0],
        cache=workspace_cache[1],
        sources=(*sources, _PRODUCTS, _STREAMING, _BESIDE, _HOST),
    )


# Dense FLOP/s of products in f32, bf16 and f64, and of other f32 arithmetic; those of 8 bits, which A100 does not have,
# with `narrow`. Products in f32 are not TF32's, for which torch has to be told: on an H200 they reach 51 TFLOP/s. A DGX
# or HGX machine has 8 GPUs.
_A100 = (19.5e12, 312e12, 19.5e12, 19.5e12)
_H100 = (67e12, 989.4e12, 67e12, 67e12)
_B200 = (75e12, 2.25e15, 37e12, 75e12)
_H100_NARROW, _B200_NARROW = (1.979e15, _NARROW_H), (4.5e15, _NARROW_B)
DEVICES = {
    device.name: device
    for device in (
        Device(
            "cpu",
            {"f32": 5e10, "bf16": 5e10, "f64": 2.5e10},
            16 * GIB,
            1e10,
            sources=("one core of a server processor, measured with this project's own products",),
        ),
        _gpu(
            "a100",
            _A100,
            None,
            80,
            2.039e12,
            Products(0.79, _DEPTH, 108),
            _FLASH_A[2],
            _FLASH_A,
            _GEN4,
            (_WORKSPACE_A, _CACHE_A),
            _FUSED,
            "NVIDIA A100 80GB SXM, data sheet",
            _FITTED,
        ),
        _gpu(
            "h100",
            _H100,
            _H100_NARROW,
            80,
            3.35e12,
            Products(0.63, _DEPTH, 132),
            _ATTENTION_H,
            _FLASH_H,
            _GEN5,
            (_WORKSPACE_H, _CACHE_H100),
            _CUDNN,
            "NVIDIA H100 SXM, data sheet",
            _FITTED_H,
        ),
        _gpu(
            "h200",
            _H100,
            _H100_NARROW,
            141,
            4.8e12,
            Products(0.63, _DEPTH, 132),
            _ATTENTION_H,
            _FLASH_H,
            _GEN5,
            (_WORKSPACE_H, _CACHE_H200),
            _CUDNN,
            "NVIDIA H200 SXM, data sheet",
            _FITTED_H,
        ),
        _gpu(
            "b200",
            _B200,
            _B200_NARROW,
            180,
            7.7e12,
            Products(0.62, _DEPTH, 148),
            _ATTENTION_H,
            _FLASH,
            _GEN5_B,
            (_WORKSPACE_H, _CACHE_B),
            _CUDNN,
            "NVIDIA HGX B200, data sheet",
            _LOWERED,
        ),
    )
}


def device_of(mesh: Mesh | None) -> Device:
    """The device that a mesh declares; the preset `cpu` if it declares none."""
    if mesh is None or mesh.device is None:
        return DEVICES["cpu"]
    call = mesh.device
    if call.name in DEVICES:
        return DEVICES[call.name]
    if call.name == "profile":
        record = recorded(call, mesh.ranks)
        return Device(timings=record.timings, **record.device)
    arguments = call.arguments
    flops = float(arguments["flops"])
    base = evolve(DEVICES["cpu"], name="device", flops=dict.fromkeys(("f32", "bf16", "f64"), flops), sources=())
    return evolve(base, memory=int(arguments["memory"]), bandwidth=float(arguments["bandwidth"]))
