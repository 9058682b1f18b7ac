"""The cost model: what is larger never takes less, shares are shares, and presets say where their figures are from."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.costs.devices import DEVICES, Device, Products
from partita.compiler.costs.links import LINKS, Link, Measured, link_of
from partita.compiler.costs.nodes import kernel_of, seconds, timed
from partita.compiler.costs.record import Timing, Timings
from partita.compiler.graph import Builder, Value
from partita.compiler.ops.attend import Attend
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.grouped import ROWS, GroupedWeightGradient
from partita.compiler.ops.lookup import Gather
from partita.compiler.ops.loss import Pick
from partita.compiler.ops.pointwise import pointwise
from partita.compiler.ops.reduce import Reduce
from partita.dsl.spec import Call, Mesh
from partita.dsl.types import Axis, Type

SIZES = st.integers(1, 40_000)
PRODUCTS = st.sampled_from([device.products for device in DEVICES.values()] + [Products(0.8, 64)])
LINK = st.sampled_from(list(LINKS.values()))
PARTS = st.integers(2, 4096)
BYTES = st.integers(1, 1 << 36)


def mesh(data: int, pipe: int, tensor: int, link: str = "ib200", device: str = "a100") -> Mesh:
    names = {"data": link, "pipe": "ib200", "tensor": "nvlink3"}
    axes = (("data", data), ("pipe", pipe), ("tensor", tensor))
    return Mesh("cluster", axes, Call(device, {}), {axis: Call(name, {}) for axis, name in names.items()})


@given(PRODUCTS, SIZES, SIZES, SIZES, st.integers(1, 100))
def test_a_product_reaches_a_share_of_the_peak(products: Products, rows: int, depth: int, columns: int, count: int):
    assert 0 < products.efficiency(rows, depth, columns, count) <= products.best <= 1


@given(PRODUCTS, st.tuples(SIZES, SIZES, SIZES, SIZES), st.integers(0, 3), st.integers(1, 1000))
def test_a_larger_product_never_takes_less(products: Products, sizes: tuple[int, ...], which: int, more: int):
    def time(rows: int, depth: int, columns: int, count: int) -> float:
        return rows * depth * columns * count / products.efficiency(rows, depth, columns, count)

    larger = [size + more * (i == which) for i, size in enumerate(sizes)]
    assert time(*larger) >= time(*sizes) * (1 - 1e-12)


def test_a_wave_that_is_begun_takes_as_long_as_a_whole_one():
    """108 units with tiles of 256 × 128: 109 tiles take two waves (NVIDIA's guide, §3.2), or smaller tiles."""
    products = DEVICES["a100"].products
    even, begun = (products.efficiency(256 * tiles, 4096, 128) for tiles in (108, 109))
    assert even == pytest.approx(0.79 * 4096 / (4096 + products.half))
    assert begun < 0.7 * even


def attention(length: int, device: str, window: int | None = None) -> float:
    """TFLOP/s of causal attention over 2^14 tokens, 16 heads of 128."""
    build = Builder()
    axes = (Axis("batch", 2**14 // length), Axis("heads", 16), Axis("seq", length), Axis("key", 128))
    x = build.value("x", Type("bf16", axes))
    build.apply_all(Attend("seq", "key", True, 0.1, window=window), x, x, x)
    (node,) = build.nodes
    return node.op.flops([x.type] * 3, []) / seconds(node, DEVICES[device]) / 1e12


@pytest.mark.parametrize(("length", "measured"), [(1024, 133), (4096, 173), (16_384, 189)])
def test_attention_is_as_quick_as_its_paper_measured(length: int, measured: float):
    """FlashAttention-2 on A100, causal, 128 a head, forward and backward."""
    assert attention(length, "a100") == pytest.approx(measured, rel=0.05)


@given(st.sampled_from(["a100", "h100", "b200"]), st.integers(7, 13))
def test_attention_over_more_keys_reaches_more_of_the_peak(device: str, size: int):
    assert attention(2**size, device) < attention(2 ** (size + 1), device) <= DEVICES[device].flops["bf16"] / 1e12
    assert attention(2**14, device, window=2**size) < attention(2**14, device)


@given(LINK, PARTS, BYTES, st.integers(0, 1 << 30), st.integers(0, 100), st.sampled_from((1, 2, 4, 8)))
def test_more_to_move_never_takes_less(link: Link, parts: int, bytes: int, more: int, others: int, inside: int):
    link = evolve(link, inside=inside) if link.ports else link
    for collective in (link.gather, link.add, link.exchange):
        assert sum(collective(parts, bytes + more)) >= sum(collective(parts, bytes))
        assert sum(collective(parts + others, bytes)) >= sum(collective(parts, bytes)) * (1 - 1e-12)
    assert link.add(parts, bytes)[1] >= link.gather(parts, bytes)[1]
    assert sum(link.gather(parts, bytes)) >= bytes * (parts - 1) / parts / link.bandwidth


@given(LINK, PARTS, BYTES)
def test_a_sum_takes_the_quicker_of_ring_and_tree(link: Link, parts: int, bytes: int):
    """Around a ring, nothing is sent twice, and a sum goes round twice."""
    latency, moving = link.add(parts, bytes)
    if link.protocols:
        assert latency + moving <= 2 * sum(link.gather(parts, bytes)) * (1 + 1e-12)
    assert latency + moving >= 2 * bytes * (parts - 1) / parts / link.bandwidth


KINDS = ("gather", "scatter", "add", "exchange", "pass_on")
TIMES = st.lists(st.tuples(BYTES, st.floats(1e-6, 1e-1)), min_size=1, max_size=6, unique_by=lambda each: each[0])


@given(st.sampled_from(KINDS), TIMES, st.integers(2, 64), BYTES)
def test_what_was_measured_is_what_is_said(kind: str, times: list[tuple[int, float]], parts: int, bytes: int):
    """Between sizes it lies between their times; a larger group takes longer in the proportion of the model."""
    measured = tuple(Measured(kind, 2, float(size), took) for size, took in sorted(times))
    plain = Link("wire", 1e9, 1e-5)
    link = evolve(plain, measured=measured)
    for size, took in times:
        assert sum(getattr(link, kind)(2, size)) == pytest.approx(took)
    found = sum(getattr(link, kind)(2, bytes))
    rates = max(each.seconds / each.bytes for each in measured) * bytes
    assert min(took for _, took in times) * (1 - 1e-9) <= found
    assert found <= max(*(took for _, took in times), rates) * (1 + 1e-9)
    model = sum(getattr(plain, kind)(parts, bytes)) / sum(getattr(plain, kind)(2, bytes))
    assert sum(getattr(link, kind)(parts, bytes)) == pytest.approx(found * model)
    for other in set(KINDS) - {kind}:
        assert getattr(link, other)(parts, bytes) == getattr(plain, other)(parts, bytes)


def test_small_sums_take_a_tree_and_large_ones_a_ring():
    link = Link("wire", 1e10, 5e-6)
    assert link.add(1024, 8)[0] == pytest.approx(20 * link.latency)
    assert link.add(8, 1 << 32)[0] == pytest.approx(14 * link.latency)
    assert link.gather(8, 1 << 32)[0] == pytest.approx(3 * link.latency)


def test_a_ring_takes_a_step_for_each_rank_and_the_faster_protocol():
    """NCCL's figures: 8.4 + 3.4 or 14 + 1.9 µs a step in a machine; between them 14 or 4, or what a tree's take."""
    link = LINKS["nvlink4"]
    assert link.gather(8, 1 << 10) == pytest.approx((14e-6 + 7 * 1.9e-6, 896 / (0.92 * link.bandwidth)))
    assert link.gather(8, 1 << 32)[0] == pytest.approx(8.4e-6 + 7 * 3.4e-6)
    link = link_of(mesh(512, 1, 1, "ib400", "h100"), "data")
    assert link.gather(512, 4e8)[0] == pytest.approx(14e-6 + 448 * 1.9e-6 + 63 * 4e-6)
    assert link.add(512, 8)[0] == pytest.approx(14e-6 + 2 * (7 * 1.9e-6 + 6 * 8.5e-6))
    assert link_of(mesh(64, 1, 8), "data").gather(64, 1)[0] == pytest.approx(14e-6 + 63 * 8.5e-6)


@given(LINK, st.integers(2, 1024))
def test_a_message_as_large_as_a_ring_waits_for_takes_twice_the_steps(link: Link, parts: int):
    latency, moving = link.gather(parts, link.waiting(parts))
    assert latency + moving <= 2.2 * latency
    assert link.waiting(parts + 1) >= link.waiting(parts)


@given(st.sampled_from(list(DEVICES.values())), st.integers(0, 200), st.integers(0, 50))
def test_collectives_slow_what_runs_beside_them(device: Device, blocks: int, more: int):
    assert device.beside(0) == 1
    assert 0.25 <= device.beside(blocks + more) <= device.beside(blocks) <= 1
    assert device.beside(LINKS["nvlink4"].blocks) == pytest.approx(1 / 1.4 if device.gpu else 1)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda each: each.name)
def test_narrow_operands_and_later_kernels_are_quicker(device: Device):
    """Of the peak they reach less."""
    if "f8" in device.flops:
        narrow = device.narrowed()
        assert 0.5 < narrow.products.best < device.products.best
        assert 1.5 < narrow.flops["bf16"] * narrow.products.best / device.flops["bf16"] / device.products.best < 2
    speeds = [device.generation(each).attention.best for each in sorted(device.flash)]
    assert speeds == sorted(set(speeds))
    assert all(each < device.products.best for each in speeds)


@pytest.mark.parametrize(
    ("keys", "size", "measured"),
    [
        (1024, 128, 349.56),
        (2048, 128, 443.67),
        (4096, 128, 513.07),
        (16384, 128, 604.7),
        (1024, 64, 259.13),
        (4096, 64, 384.65),
    ],
)
def test_attention_is_as_quick_as_it_was_measured_on_hopper(keys: int, size: int, measured: float):
    """TFLOP/s of cuDNN's, causal, forward and backward; on Ampere torch has FlashAttention-2."""
    device = DEVICES["h200"]
    assert device.flops["bf16"] * device.attention.efficiency(keys, size) == pytest.approx(measured * 1e12, rel=0.03)
    assert device.attention.efficiency(keys, 256) == device.attention.efficiency(keys, 128)
    assert DEVICES["h100"].attention == device.attention
    assert DEVICES["a100"].attention == DEVICES["a100"].flash[2]


@pytest.mark.parametrize("device", [each for each in DEVICES.values() if each.gpu], ids=lambda each: each.name)
def test_products_in_f32_are_not_those_of_tf32(device: Device):
    assert device.flops["f32"] == device.vector


@pytest.mark.parametrize(
    ("sizes", "ports"),
    [
        ((32, 1, 1), 8),
        ((32, 1, 2), 4),
        ((32, 1, 8), 1),
        ((32, 2, 8), 1),
        ((4, 1, 1), 1),  # within one machine: what the file says
    ],
)
def test_ranks_of_a_group_in_one_machine_use_its_ports_together(sizes: tuple[int, int, int], ports: int):
    found = mesh(*sizes)
    assert link_of(found, "data").bandwidth == pytest.approx(ports * LINKS["ib200"].bandwidth)
    assert link_of(found, "pipe", pairs=True).bandwidth == LINKS["ib200"].bandwidth
    assert link_of(found, "tensor") == LINKS["nvlink3"]


@pytest.mark.parametrize(("sizes", "away"), [((32, 1, 1), 24 / 32), ((32, 1, 2), 28 / 32), ((32, 1, 8), 31 / 32)])
def test_what_leaves_a_machine_in_an_exchange_takes_a_port_a_rank(sizes: tuple[int, int, int], away: float):
    """However many ranks of the group are there: a ring has all their ports, each rank of an exchange its own."""
    link, port = link_of(mesh(*sizes), "data"), LINKS["ib200"].bandwidth
    assert link.exchange(32, 1e9)[1] == pytest.approx(1e9 * away / port)
    assert link.pass_on(32, 1e9)[1] == pytest.approx(1e9 / port)


def test_links_that_differ_are_wires_of_their_own():
    links = {
        name: Call("link", {"bandwidth": bandwidth, "latency": 1e-6})
        for name, bandwidth in (("a", 1e9), ("b", 1e10), ("c", 1e9))
    }
    mesh = Mesh("m", (("a", 2), ("b", 2), ("c", 2)), None, links)
    a, b, c = (link_of(mesh, name).name for name in "abc")
    assert a == c != b


def test_groups_share_the_one_port_of_a_machine():
    port = LINKS["ethernet"]
    assert link_of(mesh(32, 1, 8, "ethernet"), "data").bandwidth == pytest.approx(port.bandwidth / 8)
    assert link_of(mesh(32, 1, 1, "ethernet"), "data").bandwidth == pytest.approx(port.bandwidth)
    assert link_of(mesh(32, 1, 8, "ethernet", "cpu"), "data") == port


# ---------------------------------------------------------------- oversubscribed networks

AXES = st.sampled_from(("data", "pipe"))
MESHES = st.tuples(*(st.integers(0, top).map(lambda power: 1 << power) for top in (9, 4, 3)))
RATIOS = st.floats(1, 16)
COLLECTIVES = ("gather", "scatter", "add", "exchange", "pass_on")


def narrowing(
    sizes: tuple[int, int, int], axis: str, leaf: int | None, ratio: float | None, pairs: bool = False
) -> Link:
    """The link of a mesh whose network has such leaves."""
    plain = mesh(*sizes)
    call = Call("ib200", {"leaf": leaf, "oversubscribed": ratio})
    return link_of(evolve(plain, links=plain.links | {axis: call}), axis, pairs)


@given(MESHES, AXES, st.integers(1, 4096), RATIOS, RATIOS, BYTES)
def test_narrower_uplinks_are_never_faster(sizes, axis: str, leaf: int, ratio: float, more: float, bytes: int):
    """Nor are smaller leaves; and an even network is as fast as one of which nothing is said."""
    parts = sizes[("data", "pipe").index(axis)]
    narrow, wide, larger, even, plain = (
        [sum(getattr(link, kind)(max(2, parts), bytes)) for kind in COLLECTIVES]
        + [1 / narrowing(sizes, axis, *network, pairs=True).bandwidth]
        for network in ((leaf, ratio * more), (leaf, ratio), (2 * leaf, ratio), (leaf, 1.0), (None, None))
        for link in (narrowing(sizes, axis, *network),)
    )
    slack = 1 + 1e-12
    for slower, faster in ((narrow, wide), (wide, larger), (wide, even)):
        assert all(one * slack >= other for one, other in zip(slower, faster, strict=True))
    assert even == plain


@given(MESHES, AXES, RATIOS, BYTES)
def test_what_stays_within_a_leaf_is_untouched(sizes, axis: str, ratio: float, bytes: int):
    """And what all ranks of a leaf send elsewhere has the bandwidth of the uplinks."""
    data, pipe, tensor = sizes
    span = data * pipe * tensor if axis == "data" else pipe * tensor
    parts = data if axis == "data" else pipe
    inside, plain = narrowing(sizes, axis, span, ratio), narrowing(sizes, axis, None, None)
    for kind in COLLECTIVES:
        assert getattr(inside, kind)(max(2, parts), bytes) == getattr(plain, kind)(max(2, parts), bytes)
    assert narrowing(sizes, axis, span, ratio, pairs=True).bandwidth == LINKS["ib200"].bandwidth
    if parts > 1:
        outside = narrowing(sizes, axis, span // parts, ratio, pairs=True)
        assert outside.bandwidth == pytest.approx(LINKS["ib200"].bandwidth / ratio)


@pytest.mark.parametrize(("leaf", "ring", "all_to_all"), [(8, 4, 4), (16, 2, 224 / 60), (32, 1, 192 / 60)])
def test_a_ring_crosses_a_leaf_once_whatever_its_ranks_there(leaf: int, ring: float, all_to_all: float):
    """Each group has 64 ranks, four in each machine of eight devices. Beneath a leaf of 16 are two machines: two rings
    come in, each at the speed of four ports, where the uplinks have that of 16 / 4. Most of an all-to-all crosses.
    """
    link, plain = narrowing((64, 1, 2), "data", leaf, 4.0), narrowing((64, 1, 2), "data", None, None)
    assert link.gather(64, 1e10)[1] == pytest.approx(plain.gather(64, 1e10)[1] * ring)
    assert link.exchange(64, 1e9)[1] == pytest.approx(plain.exchange(64, 1e9)[1] * all_to_all)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda each: each.name)
def test_devices_say_where_their_figures_are_from(device: Device):
    assert device.sources
    assert all(device.flops[dtype] > 0 for dtype in ("f32", "bf16", "f64"))
    assert 0 < device.streaming <= 1
    assert device.gpu == (device.name != "cpu")


@pytest.mark.parametrize("link", LINKS.values(), ids=lambda each: each.name)
def test_links_say_where_their_figures_are_from(link: Link):
    assert link.sources
    assert link.latency > 0
    assert 0.5 * link.peak <= link.bandwidth <= link.peak


def chain(length: int) -> tuple[Builder, Value, Value]:
    """A product, `length` pointwise operations on what it makes, and a sum: with the last two values."""
    build = Builder()
    a, b, c = (Axis(name, 512) for name in "abc")
    x, w = Value("x", Type("bf16", (a, b))), Value("w", Type("bf16", (b, c)))
    y = build.apply(Dot(("b",)), x, w)
    for _ in range(length):
        y = pointwise(build, "exp", y)
    return build, y, build.apply(Reduce("sum", ("c",), "f32"), y)


@given(st.integers(1, 12))
def test_a_fused_chain_moves_what_enters_and_what_leaves(length: int):
    build, y, total = chain(length)
    device = DEVICES["a100"]
    apart = [time for _, time in timed(build.nodes, device)]
    fused = [time for _, time in timed(build.nodes, device, compiled=True, keep={total})]
    kept = [time for _, time in timed(build.nodes, device, compiled=True, keep={y, total})]
    assert apart == [seconds(node, device) for node in build.nodes]
    assert fused[0] == apart[0]
    assert sum(fused) <= sum(kept) <= sum(apart)
    rate = device.bandwidth * device.streaming
    product, sums = 512 * 512 * 2, 512 * 4
    moved, arithmetic = (product + sums) / rate, 512 * 512 * (8 * length + 1) / device.vector
    assert sum(fused[1:]) == pytest.approx(device.launch + max(moved, arithmetic))
    assert sum(kept[1:]) == pytest.approx(device.launch + max(moved + product / rate, arithmetic))


def test_a_lookup_reads_rows_and_not_the_table():
    ids, small, large = Type("i64", (Axis("batch", 8),)), Axis("vocab", 100), Axis("vocab", 1_000_000)
    for op in (Gather("vocab"), Pick("vocab")):
        times = []
        for vocab in (small, large):
            axes = (vocab, Axis("embed", 16)) if isinstance(op, Gather) else (*ids.axes, vocab)
            values = (Value("ids", ids), Value("x", Type("f32", axes)))
            build = Builder()
            build.apply(op, *(values if isinstance(op, Gather) else reversed(values)))
            times.append(seconds(build.nodes[0], DEVICES["a100"]))
        assert times[0] == times[1]


def test_what_an_operation_takes_is_remembered_by_where_it_runs_and_what_it_adds_to():
    """A device computes each time once."""
    build = Builder()
    a, b, c = (Axis(name, 512) for name in "abc")
    build.apply(Dot(("b",)), Value("x", Type("f32", (a, b))), Value("w", Type("f32", (b, c))))
    (node,) = build.nodes
    shape, _ = kernel_of(node) or pytest.fail("a product is a kernel")
    measured = [
        Timing(f"{shape.name}{ending}", "f32", shape.features, shape.work, took)
        for ending, took in (("", 3.0), (".added", 4.0))
    ]
    profiled = evolve(DEVICES["cpu"], timings=Timings(tuple(measured)))
    assert [seconds(node, profiled, added) for added in (False, True, False)] == [3.0, 4.0, 3.0]
    device = evolve(DEVICES["h100"])
    on_host = [tuple(evolve(each, host=True) for each in values) for values in (node.inputs, node.outputs)]
    there = evolve(node, inputs=on_host[0], outputs=on_host[1])
    moved = 3 * 512 * 512 * 4 / device.host_bandwidth
    assert seconds(node, device) < seconds(there, device) == pytest.approx(device.launch + moved)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gradients_of_experts_are_added_by_a_kernel_of_their_own(dtype: str):
    """In bf16, whose grouped product adds nothing: they are read, and the accumulator in f32 is read and written."""
    build = Builder()
    rows, deep, wide, experts = Axis(ROWS, 4096), Axis("d", 256), Axis("e", 512), Axis("k", 8)
    x, d = (Value(axis.name, Type(dtype, (rows, axis))) for axis in (deep, wide))
    ends = Value("ends", Type("i64", (experts,)))
    build.apply(GroupedWeightGradient(("d",), "k", (experts, deep, wide)), x, ends, d)
    (node,) = build.nodes
    for device in (DEVICES["h200"], DEVICES["cpu"]):
        moved = 8 * 256 * 512 * (2 + 4 + 4) if dtype == "bf16" and device.gpu else 0
        more = device.launch + moved / (device.bandwidth * device.streaming) if moved else 0.0
        assert seconds(node, device, added=True) == pytest.approx(seconds(node, device) + more)


@pytest.mark.parametrize(("left", "right"), [("tk", "tke"), ("tke", "tk"), ("te", "tk"), ("ke", "k")])
def test_a_matrix_by_a_vector_takes_as_long_as_it_takes_to_move(left: str, right: str):
    """Weighted sums of the rows of each token, their gradients, and a product without a batch."""
    build = Builder()
    sizes = {"t": 2048, "k": 4, "e": 4096}
    operands = (Value(each, Type("bf16", tuple(Axis(n, sizes[n]) for n in each))) for each in (left, right))
    over = ("k",) if "k" in left and "k" in right else ()
    build.apply(Dot(over), *operands)
    (node,) = build.nodes
    device = DEVICES["h100"]
    moved = sum(value.type.bytes for value in (*node.inputs, *node.outputs))
    assert seconds(node, device) == pytest.approx(device.launch + moved / (device.bandwidth * device.streaming))


@given(PARTS, BYTES)
def test_ranks_keep_their_own_part_of_an_exchange(parts: int, bytes: int):
    assert Link("wire", 1e9, 1e-5).exchange(parts, bytes)[1] == pytest.approx(bytes * (parts - 1) / parts / 1e9)
