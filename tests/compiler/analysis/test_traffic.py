"""What each kind of parallelism sends for a layer of a transformer: no more than the state of the art.

The layer is that of specs/gpt.par. Counts and bytes are those of one rank for one iteration of `layer`, for each
microbatch and once a step; by ring algorithms K bytes on N ranks take 2K(N−1)/N to reduce everywhere, half of that to
gather or to reduce and scatter. Megatron-LM's figures: arXiv 1909.08053 (tensor), 2205.05198 (sequence); ZeRO's:
1910.02054.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from partita.compiler.analysis.traffic import EACH_MICROBATCH, traffic
from partita.compiler.report.causes import Iteration, communication
from partita.compiler.report.summary import summarize, tied_transfers, transfers
from partita.compiler.state import Compilation
from tests.compiler.report.layout_files import LAYERS, MICROBATCHES, transformer

DATA, TENSOR, SEQUENCE = "shard batch -> data", "shard heads, ffn, vocab -> tensor", "shard seq -> tensor"
# Elements of a layer's parameters: four matrices of attention, two of the network, four vectors of the norms.
ATTENTION, NETWORK, VECTORS = 4 * 768 * 768, 2 * 768 * 3072, 4 * 768
PARAMETERS = ATTENTION + NETWORK + VECTORS
F32, BF16, I64 = 4, 2, 8
# Lines of the file: the products of the blocks, where the tokens are looked up, the loss and a metric after it.
QUERIES, OUTPUT, FEED_FORWARD, EMBEDDING, LOSS, METRIC = 12, 16, 25, 31, 36, 37


def activation(data: int) -> int:
    """Bytes of one microbatch's [batch, seq, embed] along all mesh axes but `data`."""
    return 64 // MICROBATCHES // data * 1024 * 768 * BF16


def half(bytes: int, ranks: int) -> int:
    """What a rank sends to gather so many bytes, or to reduce and scatter them."""
    share = Fraction(bytes * (ranks - 1), ranks)
    assert share.denominator == 1
    return int(share)


def iteration_of(state: Compilation) -> Iteration:
    """The one kind of iteration."""
    (iteration,) = communication(state).iterations
    assert iteration.repeat == "gpt.layer"
    assert iteration.numbers == tuple(range(LAYERS))
    return iteration


def rows(iteration: Iteration, of: str) -> list[tuple[str, str, str, int, float]]:
    """(phase, kind, mesh axis, count, bytes) of activations or of parameters, for a microbatch and then for a step."""
    shares = (*iteration.microbatch, *iteration.step)
    return [(each.phase, each.kind, each.axis, each.count, each.bytes) for each in shares if each.of == of]


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel(ranks: int) -> None:
    iteration = iteration_of(transformer(f"tensor = {ranks}", TENSOR))
    both = 2 * 2 * half(activation(1), ranks)
    assert rows(iteration, "activations") == [
        ("forward", "all_reduce", "tensor", 2, both),
        ("backward", "all_reduce", "tensor", 2, both),
    ]
    # Gradients of the norms' vectors may be left partial until the step ends.
    assert sum(row[4] for row in rows(iteration, "parameters")) <= 2 * half(VECTORS * F32, ranks)


@pytest.mark.few(1)
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallel(ranks: int, data: int) -> None:
    """Gathered inputs are gathered again in the backward pass: two gathers more than where they are kept."""
    iteration = iteration_of(transformer(f"data = {data}, tensor = {ranks}", DATA, TENSOR, SEQUENCE))
    one = half(activation(data), ranks)
    assert rows(iteration, "activations") == [
        ("forward", "all_gather", "tensor", 2, 2 * one),
        ("forward", "reduce_scatter", "tensor", 2, 2 * one),
        ("backward", "all_gather", "tensor", 4, 4 * one),
        ("backward", "reduce_scatter", "tensor", 2, 2 * one),
    ]
    # What is replicated over `tensor` sees a part of the sequence there: small, and once a step.
    small = [row for row in rows(iteration, "parameters") if row[2] == "tensor"]
    parts = VECTORS * F32
    assert small == [("reduce", "all_reduce", "tensor", 4, 2 * half(parts, ranks))]


@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel_reduces_each_gradient_once_a_step(ranks: int) -> None:
    iteration = iteration_of(transformer(f"data = {ranks}", DATA))
    assert rows(iteration, "activations") == []
    assert iteration.microbatch == ()
    assert rows(iteration, "parameters") == [("reduce", "all_reduce", "data", 10, 2 * half(PARAMETERS * F32, ranks))]


@pytest.mark.parametrize("ranks", [2, 4])
def test_zero_1_scatters_gradients_and_gathers_parameters_once_a_step(ranks: int) -> None:
    iteration = iteration_of(transformer(f"data = {ranks}", DATA, "shard state -> data"))
    assert iteration.microbatch == ()
    assert rows(iteration, "parameters") == [
        ("prologue", "all_gather", "data", 10, half(PARAMETERS * BF16, ranks)),
        ("reduce", "reduce_scatter", "data", 10, half(PARAMETERS * F32, ranks)),
    ]


def test_zero_2_scatters_gradients_of_each_microbatch() -> None:
    iteration = iteration_of(transformer("data = 4", DATA, "shard grad -> data"))
    assert rows(iteration, "parameters") == [
        ("backward", "reduce_scatter", "data", 10, half(PARAMETERS * BF16, 4)),
        ("prologue", "all_gather", "data", 10, half(PARAMETERS * BF16, 4)),
    ]
    assert {share.phase for share in iteration.microbatch} == {"backward"}


def test_zero_3_gathers_parameters_once_a_step_where_memory_holds_them() -> None:
    iteration = iteration_of(transformer("data = 4", DATA, "shard param -> data"))
    assert rows(iteration, "parameters") == [
        ("backward", "reduce_scatter", "data", 10, half(PARAMETERS * BF16, 4)),
        ("prologue", "all_gather", "data", 10, half(PARAMETERS * BF16, 4)),
    ]


def test_zero_3_gathers_parameters_in_each_pass_where_memory_does_not_hold_them() -> None:
    """The norms' shifts are not wanted in the backward pass."""
    iteration = iteration_of(transformer("data = 4", DATA, "shard param -> data", memory="256MiB"))
    assert rows(iteration, "parameters") == [
        ("forward", "all_gather", "data", 10, half(PARAMETERS * BF16, 4)),
        ("backward", "all_gather", "data", 8, half((PARAMETERS - VECTORS // 2) * BF16, 4)),
        ("backward", "reduce_scatter", "data", 10, half(PARAMETERS * BF16, 4)),
    ]
    assert iteration.step == ()


def test_all_of_it_together_is_the_sum() -> None:
    """Tensor, sequence and ZeRO-1 data parallel: what each sends by itself, of the parts that the others leave."""
    iteration = iteration_of(transformer("data = 2, tensor = 2", DATA, TENSOR, SEQUENCE, "shard state -> data"))
    one = half(activation(2), 2)
    elements = (ATTENTION + NETWORK) // 2 + VECTORS
    assert rows(iteration, "activations") == [
        ("forward", "all_gather", "tensor", 2, 2 * one),
        ("forward", "reduce_scatter", "tensor", 2, 2 * one),
        ("backward", "all_gather", "tensor", 4, 4 * one),
        ("backward", "reduce_scatter", "tensor", 2, 2 * one),
    ]
    assert rows(iteration, "parameters") == [
        ("prologue", "all_gather", "data", 10, half(elements * BF16, 2)),
        ("reduce", "reduce_scatter", "data", 10, half(elements * F32, 2)),
        ("reduce", "all_reduce", "tensor", 4, 2 * half(VECTORS // 2 * F32, 2)),
    ]


def by_parameter(state: Compilation) -> dict[str, Counter[tuple[str, str, str]]]:
    """How often a step (phase, kind, mesh axis) moves each parameter, or its gradient."""
    found: dict[str, Counter[tuple[str, str, str]]] = {}
    for each in traffic(state):
        if each.parameter is not None:
            counts = found.setdefault(each.parameter, Counter())
            counts[each.phase.name.lower(), each.kind, each.axis] += each.count
    return found


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("", {("reduce", "all_reduce", "data"): 1}),
        ("shard state -> data", {("reduce", "reduce_scatter", "data"): 1, ("prologue", "all_gather", "data"): 1}),
    ],
)
def test_no_parameter_is_reduced_twice(rule: str, expected: dict[tuple[str, str, str], int]) -> None:
    """Those outside the layers too; the embedding is used at both ends."""
    state = transformer("data = 2", DATA, rule)
    found = by_parameter(state)
    assert len(found) == 10 * LAYERS + 2
    for name, counts in found.items():
        assert counts == expected, name


@pytest.mark.parametrize(("memory", "most"), [("80GiB", 1), ("256MiB", 2 * MICROBATCHES)])
def test_zero_3_gathers_no_parameter_more_often(memory: str, most: int) -> None:
    """Once a step, or twice each microbatch; the embedding is read twice forward, from one gathered copy."""
    found = by_parameter(transformer("data = 2", DATA, "shard param -> data", memory=memory))
    gathers = {
        name: sum(times for (_, kind, _), times in counts.items() if kind == "all_gather")
        for name, counts in found.items()
    }
    assert len(gathers) == 10 * LAYERS + 2
    assert max(gathers.values()) == most
    assert min(gathers.values()) >= 1


SPLIT_VOCABULARY = [(TENSOR,), (TENSOR, SEQUENCE), (DATA, TENSOR, SEQUENCE, "shard param -> data")]
ACCURACY = "metric right = accuracy(dot(x, wte, over = embed), targets, over = vocab)"


@pytest.mark.few(1)
@pytest.mark.parametrize("rules", SPLIT_VOCABULARY)
def test_logits_are_never_moved(rules: tuple[str, ...]) -> None:
    """Lookup, loss and accuracy work on a part of the classes; nor does the table leave its part."""
    state = transformer("tensor = 4" if DATA not in rules else "data = 2, tensor = 2", *rules, metric=ACCURACY)
    moved = [each for each in traffic(state) if each.parameter is None]
    lines = {each.span.line for each in moved if each.span}
    assert {EMBEDDING, LOSS, METRIC} <= lines
    for each in moved:
        assert "vocab" not in each.type.names, each
    assert not [each for each in traffic(state) if each.parameter == "gpt.wte" and each.axis == "tensor"]


def test_split_classes_move_figures_of_tokens_alone() -> None:
    """The loss: a maximum and two sums, one number a token each, and nothing in the backward pass. Accuracy: the
    maximum of logits as they are, and the first index that has it. The lookup: a sum of rows."""
    tokens = 64 // MICROBATCHES * 1024
    found = {
        cause.span.line: [(e.phase.name.lower(), e.kind, e.type.names, e.cost.total.bytes) for e in cause.moved]
        for cause in communication(transformer("tensor = 4", TENSOR, metric=ACCURACY)).causes
        if cause.span is not None
    }
    figures = MICROBATCHES * 2 * half(tokens * F32, 4)
    assert found[LOSS] == 3 * [("forward", "all_reduce", ("batch", "seq"), figures)]
    assert found[METRIC] == [
        ("forward", "all_reduce", ("batch", "seq"), MICROBATCHES * 2 * half(tokens * BF16, 4)),
        ("forward", "all_reduce", ("batch", "seq"), MICROBATCHES * 2 * half(tokens * I64, 4)),
    ]
    rows = MICROBATCHES * 2 * half(activation(1), 4)
    assert found[EMBEDDING] == [("forward", "all_reduce", ("batch", "seq", "embed"), rows)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_and_sequence_are_exchanged(ranks: int) -> None:
    """DeepSpeed-Ulysses (arXiv 2309.14509): the sequence is split but in attention, where heads are."""
    heads = "shard attention.q: heads, attention.k: heads, attention.v: heads, attention.a: heads -> tensor"
    iteration = iteration_of(transformer(f"tensor = {ranks}", SEQUENCE, heads))
    forward, backward = rows(iteration, "activations")
    part = activation(1) // ranks
    assert forward == ("forward", "all_to_all", "tensor", 4, 4 * half(part, ranks))
    assert backward[:3] == ("backward", "all_to_all", "tensor")
    assert backward[3] <= 8


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pipeline_sends_an_activation_forward_and_a_gradient_back(ranks: int) -> None:
    """Once between two stages, in the parts in which sequence parallelism has them."""
    rules = (DATA, TENSOR, SEQUENCE, "stage layer -> pipe")
    found = transfers(transformer(f"data = 2, pipe = 2, tensor = {ranks}", *rules))
    part = activation(2) // ranks
    assert [(each["direction"], each["bytes"], each["count"]) for each in found] == [
        ("forward", part, MICROBATCHES),
        ("backward", part, MICROBATCHES),
    ]


def test_a_tied_parameter_is_exchanged_once_a_step() -> None:
    """The embedding stands at both ends: each stage sends its sum of the gradient to the other, reduced, in parts."""
    rules = (DATA, TENSOR, SEQUENCE, "shard state -> data", "stage layer -> pipe")
    state = transformer("data = 2, pipe = 2, tensor = 2", *rules)
    part = 50_304 * 768 * F32 // 4
    assert [(each["from"], each["to"], each["bytes"], each["count"]) for each in tied_transfers(state)] == [
        (0, 1, part, 1),
        (1, 0, part, 1),
    ]
    assert len(transfers(state)) == 2


@pytest.mark.soak
def test_compile_counts_the_whole_step() -> None:
    """`collectives` of `compile --json`: every microbatch and layer, with the bytes of rings."""
    state = transformer("tensor = 4", TENSOR)
    found = summarize(state).as_json()["collectives"]
    (attention,) = [each for each in found if each["line"] == OUTPUT and each["phase"] == "forward"]
    assert attention["kind"] == "all_reduce"
    assert attention["axis"] == "tensor"
    assert attention["count"] == LAYERS * MICROBATCHES
    assert attention["bytes"] == LAYERS * MICROBATCHES * 2 * half(activation(1), 4)
    activations = [each for each in traffic(state) if each.phase in EACH_MICROBATCH and each.type.has("embed")]
    # Two forward and two backward in each layer, that of the embedding, and that of the gradient of the logits' input.
    assert sum(each.count for each in activations) == (4 * LAYERS + 2) * MICROBATCHES


def test_compile_says_which_line_sends_what() -> None:
    state = transformer("data = 2, tensor = 2", DATA, TENSOR, SEQUENCE, "shard state -> data")
    found = {
        (each["line"], each["phase"], each["kind"], each["axis"]): (each["count"], each["bytes"])
        for each in summarize(state).as_json()["collectives"]
    }
    times = LAYERS * MICROBATCHES
    one = (times, times * half(activation(2), 2))
    assert found[QUERIES, "forward", "all_gather", "tensor"] == one
    assert found[OUTPUT, "forward", "reduce_scatter", "tensor"] == one
    assert found[FEED_FORWARD, "forward", "all_gather", "tensor"] == one
    assert found[FEED_FORWARD, "forward", "reduce_scatter", "tensor"] == one
    assert found[OUTPUT, "backward", "all_gather", "tensor"] == one
    assert found[QUERIES, "backward", "reduce_scatter", "tensor"] == one
    queries = 3 * 768 * 768 // 2  # wq, wk and wv are declared in one line
    assert found[7, "reduce", "reduce_scatter", "data"] == (LAYERS * 3, LAYERS * half(queries * F32, 2))
    assert found[7, "prologue", "all_gather", "data"] == (LAYERS * 3, LAYERS * half(queries * BF16, 2))
