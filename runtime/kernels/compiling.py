"""What torch compiles: segments of emitted functions, one graph each, of static shapes.

A segment is already a graph, a function of tensors without branches. So it goes straight to Inductor, the backend of
torch.compile: Dynamo's guards and AOTAutograd's checks of arguments take as long per call as a small segment's
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from partita.runtime.kernels.registry import kernel

_tracing = False
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def is_tracing() -> bool:
    """Whether a segment is being compiled: kernels then use plain operations, not their fastest implementation."""
    return _tracing


def without_fake_mode(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Run a function outside of fake-tensor mode while a segment is compiled: its result, a table that is kept, becomes
    a constant of the segment.
    """

    @wraps(function)
    def made(*args: _Given.args, **named: _Given.kwargs) -> _Made:
        if not is_tracing():
            return function(*args, **named)
        with unset_fake_temporarily():
            return function(*args, **named)

    return made


@kernel
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled by torch at its first call, and again for tensors with other strides. It may add to
    tensors that it is given.
    """
    variants: dict[tuple[tuple[int, ...], ...], tuple[Callable[[list[Tensor]], Any], bool]] = {}

    def call(*tensors: Tensor) -> Any:
        strides = tuple([tensor.stride() for tensor in tensors])
        if strides not in variants:
            variants[strides] = _compile(function, tensors)
        run, alone = variants[strides]
        results = run(list(tensors))
        return results[0] if alone else results

    return call


def _compile(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> tuple[Callable[[list[Tensor]], Any], bool]:
    """Inductor's code for the function on such tensors, and whether its result is a single tensor."""
    import torch._inductor.config
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    # Ranks compile concurrently, about one per core: without worker processes, which would outlive a killed rank.
    torch._inductor.config.compile_threads = 1
    alone = False

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal alone
        output = function(*tensors)
        alone = isinstance(output, Tensor)
        return (output,) if alone else output or ()

    trace = make_fx(functionalize(results), select_decomp_table(), tracing_mode="fake", _allow_non_fake_inputs=True)
    with _under_way():
        # Creates the tables that kernels cache (`without_fake_mode`), which become constants as it is traced. Stand-ins
        # have no memory: operation by operation, a segment may need more than a step has.
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            results(*map(mode.from_tensor, tensors))
        graph = trace(*tensors)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    # With fake inputs of the tracing mode: only then torch caches the compiled code on disk.
    stand_ins = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with tracing(TracingContext(stand_ins[0].fake_mode)):
        return compile_fx_inner(graph, stand_ins), alone


@contextmanager
def _under_way() -> Iterator[None]:
    global _tracing
    _tracing = True
    try:
        yield
    finally:
        _tracing = False
