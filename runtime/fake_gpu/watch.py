"""What is watched of every operation that a rank launches on a GPU that is not there.

    device            functions and kernels make and read tensors of the device only, but for what lies in the host's
                      memory (`offload`)
    synchronisation   the host waits for the device only where a function says so and why (`runtime.declared`): nowhere
                      else is a number read, depends a shape on data, or is memory copied that is not pinned
    dtype             stages compute products in the precision of the file or in a dtype that it names; f64 is for
                      statistics, for functions that say so, and for files that name it
    lifetime          no memory is read before what is written to it, overwritten before it is read, or freed while
                      another stream may still use it: by the order of streams (`runtime.fake_gpu.streams`); nor does
                      the host so, in functions and kernels, with its own that a stream copies from or to
    graph             what is captured makes the host wait for nothing, and ends on the stream that began it
    memory            what is alive at once, and what a step leaves; a graph keeps what is alive at most while it is
                      captured
    failure           whatever is raised

One operation of ATen is one launch, composite ones as torch takes them apart; views launch nothing. A launch reads its
operands and writes its results once.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from math import prod
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.runtime.declared import IN_F64, WAITS
from partita.runtime.fake_gpu.streams import Clock, Stream

aten = torch.ops.aten
HERE = Path(__file__).parent
RUNTIME = HERE.parent
KERNELS = RUNTIME / "kernels"
EMITTED = "<emitted "

# Products, with the positions of their factors: the dtype of these is that of the arithmetic.
PRODUCTS: dict[Any, tuple[int, ...]] = {
    aten.mm: (0, 1), aten.bmm: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2), aten.addmm_: (1, 2),
    aten.baddbmm_: (1, 2), aten.convolution: (0, 1), aten.convolution_backward: (0, 1, 2), aten._grouped_mm: (0, 1),
    aten._scaled_dot_product_flash_attention: (0, 1, 2), aten._flash_attention_forward: (0, 1, 2),
    aten._scaled_dot_product_flash_attention_backward: (0, 1, 2, 3), aten._flash_attention_backward: (0, 1, 2, 3),
    aten._scaled_dot_product_cudnn_attention: (0, 1, 2),
    aten._scaled_dot_product_cudnn_attention_backward: (0, 1, 2, 3),
    aten._scaled_dot_product_efficient_attention: (0, 1, 2),
    aten._scaled_dot_product_efficient_attention_backward: (0, 1, 2, 3),
}  # fmt: skip
# They read a number or a shape from the device.
READS = {aten._local_scalar_dense, aten.item, aten.equal, aten.is_nonzero}
# They launch nothing.
NOTHING = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.set_, aten.detach_}
SMALL = 1 << 10  # elements of a tensor that counts as a number


class Kind(StrEnum):
    """What may be wrong."""

    DEVICE = "device"
    SYNCHRONISATION = "synchronisation"
    DTYPE = "dtype"
    LIFETIME = "lifetime"
    GRAPH = "graph"
    MEMORY = "memory"
    FAILURE = "failure"


@frozen
class Fault:
    """Something that is wrong, where in the code."""

    kind: Kind
    message: str
    place: str


@frozen
class Launch:
    """A kernel: its operation, the function of the program that launches it, and the bytes that it reads and writes."""

    operation: str
    function: str
    line: str
    read: int
    written: int
    compiled: bool = False


class Stopped(Exception):
    """The host needs to know what the device would compute, which nobody does."""


class Graph:
    """`torch.cuda.CUDAGraph`: what its launches read and write."""

    def __init__(self) -> None:
        self.read: set[_Memory] = set()
        self.written: set[_Memory] = set()
        self.replay: Callable[[], None] = self._nothing  # launches it

    def _nothing(self) -> None:
        raise AssertionError("nothing is captured")


@define(eq=False)
class _Memory:
    """A piece of memory: its size, on which stream it was allocated, and who has used it last."""

    bytes: int
    stream: Stream
    device: str
    written: tuple[int, int] | None = None
    read: dict[int, int] = field(factory=dict)
    pinned: bool = False
    graph: Graph | None = None  # to which it belongs

    @property
    def uses(self) -> list[tuple[int, int]]:
        """When streams have last read it, and when it was last written."""
        return [*self.read.items(), *([self.written] if self.written is not None else [])]


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches what is launched. `faults` are what is wrong; `launches` the kernels since they were last `taken`; `live`
    and `peak` the bytes that are allocated on the device, now and at most.

    Where more than `limit` are allocated, `above` has the most, and the place. `precision` is that of the arithmetic;
    `wide` are other dtypes of products that the file names. `offloads`: the program keeps something in the host's
    memory. `doubles`: the file names f64. `there` is the type of the device.
    """

    def __init__(
        self,
        precision: torch.dtype,
        offloads: bool = False,
        wide: Iterable[torch.dtype] = (),
        doubles: bool = False,
        there: str = "cuda",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.there = there
        self.precisions = {precision, *wide}
        self.offloads = offloads
        self.doubles = doubles
        self.faults: list[Fault] = []
        self.launches: list[Launch] = []
        self.waits: list[str] = []  # why the host has waited
        self.seen: Clock = {}  # what has ended when the host goes on
        self.live = self.peak = 0
        self.limit = sys.maxsize
        self.above = (0, "")
        self.compiling = False
        self.capturing: Graph | None = None
        self.reserved = 0  # by graphs
        self.default = Stream(self.waited, "the stream that computes")
        self.current = self.default
        self._memory: dict[int, tuple[Any, _Memory]] = {}
        self._moments: dict[int, int] = {}  # the last launch on each stream, by their numbers

    # ------------------------------------------------------------ what is told

    def fault(self, kind: Kind, message: str, place: str = "") -> None:
        """Something is wrong at a place: here, if none is given."""
        fault = Fault(kind, message, place or _place(_frames()))
        if fault not in self.faults:
            self.faults.append(fault)

    def waited(self, how: str, clock: Clock | None = None) -> None:
        """The host waits for what streams have been given; without a clock, for the current one."""
        for stream, reached in (self.current.clock if clock is None else clock).items():
            self.seen[stream] = max(self.seen.get(stream, 0), reached)
        why = _says(WAITS)
        if self.capturing is not None:
            self.fault(Kind.GRAPH, f"the host waits for the device while a graph is captured: {how}")
        if why is None:
            self.fault(Kind.SYNCHRONISATION, f"the host waits for the device: {how}")
        else:
            self.waits.append(why)

    def taken(self) -> list[Launch]:
        """The launches since the last call."""
        launches, self.launches = self.launches, []
        return launches

    @contextmanager
    def segment(self) -> Iterator[None]:
        """What is launched is compiled to other kernels, which need no memory for what they do not return."""
        peak, self.peak = self.peak, 0
        before, self.compiling = self.compiling, True
        try:
            yield
        finally:
            self.compiling = before
            self.peak = peak
            self._rise()

    @contextmanager
    def capture(self, graph: Graph, **_: Any) -> Iterator[None]:
        """`torch.cuda.graph`: what is launched is behind all that was, and is launched by `graph.replay` again. What it
        allocates is not for others any more.
        """
        self.waited("torch.cuda.graph")
        own = Stream(self.waited, "the stream that is captured")
        own.wait_stream(self.current)
        before, live, peak = self.current, self.live, self.peak
        self.current, self.peak, self.capturing = own, self.live, graph
        used = dict(self._moments)
        try:
            yield
        finally:
            self.capturing, self.current = None, before
        for name, moment in self._moments.items():
            if used.get(name) != moment and not own.behind((name, moment)):
                self.fault(Kind.GRAPH, "a stream that was launched on while a graph was captured does not end in it")
        self.reserved += self.peak - live
        self.live, self.peak = self.peak, max(peak, self.peak)
        before.wait_stream(own)
        graph.replay = lambda: self._launched(graph)

    def _launched(self, graph: Graph) -> None:
        """A graph is launched on the current stream."""
        moment = self.current.step()
        for memory in graph.read:
            self._is_read(moment, memory, "what a graph reads")
        for memory in graph.written:
            self._is_written(moment, memory, "what a graph writes")
        self.launches.append(Launch("graph", "", "", 0, 0, True))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Launch on a stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # ------------------------------------------------------------ operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket
        if operation in READS:
            return self._read(func, args)
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        waits = self._copied(operation, args, kwargs, operands)
        try:
            output = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self.waited(f"`{operation}`: a shape depends on data")
            raise Stopped(f"the shape of `{operation}` depends on data") from error
        results = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        self._note(func, operation, args, kwargs, operands, results)
        if waits:
            self.waited(waits)
        return output

    def _note(
        self,
        func: Any,
        operation: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        written = _written(func, args, kwargs)
        for each in written:
            self._of(each)  # what was there before it was watched is no result
        new = [each for each in results if self._known(each) is None]
        for each in new:
            self._allocated(each, bool(kwargs.get("pin_memory")))
        if func.is_view or (not new and not written) or operation in NOTHING:
            return
        on_device = [each for each in (*operands, *results) if each.device.type == self.there]
        self._devices(operation, operands, results, bool(on_device))
        changed = [*written, *(each for each in results if any(each is one for one in new))]
        read = [each for each in operands if not any(each is one for one in _only_written(func, args, kwargs))]
        if not on_device:
            if _in_functions():
                self._used_by_host(read, changed)
            return
        self._dtypes(operation, args, results)
        self.used(read, changed)
        code = _function()
        self.launches.append(
            Launch(
                str(operation).removeprefix("aten."),
                *code,
                sum(map(_bytes, read)),
                sum(map(_bytes, changed)),
                self.compiling,
            )
        )

    def used(self, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """Something is launched on the current stream that reads and writes memory."""
        moment = self.current.step()
        self._moments[moment[0]] = moment[1]
        for tensor in read:
            self._is_read(moment, self._of(tensor), _named(tensor))
        for tensor in written:
            self._is_written(moment, self._of(tensor), _named(tensor))

    def _is_read(self, moment: tuple[int, int], memory: _Memory, name: str) -> None:
        if memory.written is not None and not self._behind(self.current, memory.written):
            self.fault(Kind.LIFETIME, f"{name} is read before what is written to it has arrived")
        memory.read[moment[0]] = moment[1]
        if self.capturing is not None:
            self.capturing.read.add(memory)

    def _is_written(self, moment: tuple[int, int], memory: _Memory, name: str) -> None:
        if not all(each == moment or self._behind(self.current, each) for each in memory.uses):
            self.fault(Kind.LIFETIME, f"{name} is overwritten while another stream may still use it")
        memory.written = moment
        if self.capturing is not None:
            self.capturing.written.add(memory)

    def _used_by_host(self, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """The host reads and writes its own memory."""
        for tensor in read:
            memory = self._known(tensor)
            if memory is not None and memory.written is not None and not self._ended(memory.written):
                self.fault(Kind.LIFETIME, f"the host reads {_named(tensor)} before what is written to it has arrived")
        for tensor in written:
            memory = self._known(tensor)
            if memory is not None and not all(map(self._ended, memory.uses)):
                self.fault(Kind.LIFETIME, f"the host overwrites {_named(tensor)} while a stream may still use it")

    def _ended(self, moment: tuple[int, int]) -> bool:
        """Whether something that was launched has ended when the host goes on."""
        return self.seen.get(moment[0], 0) >= moment[1]

    def _behind(self, stream: Stream, moment: tuple[int, int]) -> bool:
        """Whether what a stream is given now is behind something that was launched."""
        return stream.behind(moment) or self._ended(moment)

    def _read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The host reads a number of the device. Whoever may is told something plausible."""
        tensor = args[0]
        if tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            return func(*args)
        if tensor.device.type == self.there:
            self.waited(f"`{func.overloadpacket}` reads a number")
            if _says(WAITS) is None:
                raise Stopped("the host reads a number")
        if tensor.dtype == torch.bool:
            return False
        return 0.0 if tensor.is_floating_point() else 0

    def _copied(self, operation: Any, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> str:
        """Copies between host and device wait unless they need not: how, if one does."""
        if operation is aten._to_copy:
            source, target = args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type
            pinned = args[0] if source == "cpu" else None
        elif operation is aten.copy_ and len(operands) == 2:
            target, source = (each.device.type for each in operands)
            pinned = operands[1] if source == "cpu" else operands[0]
        else:
            return ""
        if source == target:
            return ""
        background = kwargs.get("non_blocking") or (operation is aten.copy_ and len(args) > 2 and args[2])
        if not background:
            return f"a copy from {source} to {target}, which is not in the background"
        if pinned is not None and not self._of(pinned).pinned:
            return f"a copy from {source} to {target} of memory that is not pinned"
        return ""

    def _devices(
        self, operation: Any, operands: list[torch.Tensor], results: list[torch.Tensor], on_device: bool
    ) -> None:
        """Functions and kernels work on the device."""
        if operation in (aten._to_copy, aten.copy_) or not _in_functions():
            return
        host = [each for each in (*operands, *results) if each.device.type == "cpu"]
        if host and (on_device or not self.offloads):
            self.fault(Kind.DEVICE, f"`{operation}` of {_named(host[0])} on the host")

    def _dtypes(self, operation: Any, args: tuple[Any, ...], results: list[torch.Tensor]) -> None:
        factors = PRODUCTS.get(operation, ())
        for position in factors:
            dtype = args[position].dtype
            if dtype not in self.precisions and args[position].is_floating_point() and _in_stages():
                self.fault(Kind.DTYPE, f"`{operation}` computes in {dtype}, the file in {_list(self.precisions)}")
        for each in results:
            wide = each.dtype == torch.float64 and not self.doubles and torch.float64 not in self.precisions
            if wide and each.numel() > SMALL and _in_functions() and not _says(IN_F64):
                self.fault(Kind.DTYPE, f"`{operation}` makes {_named(each)} in f64")

    # ------------------------------------------------------------ memory

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in pinned memory of the host."""
        return self._of(tensor).pinned

    def device_of(self, memory: torch.UntypedStorage) -> torch.device:
        """Where a piece of memory would be."""
        entry = self._memory.get(memory._cdata)
        return torch.device("cpu" if entry is None else entry[1].device)

    def _known(self, tensor: torch.Tensor) -> _Memory | None:
        entry = self._memory.get(tensor.untyped_storage()._cdata)
        return None if entry is None or entry[0]() is None else entry[1]

    def _of(self, tensor: torch.Tensor) -> _Memory:
        return self._known(tensor) or self._allocated(tensor, False)

    def _allocated(self, tensor: torch.Tensor, pinned: bool) -> _Memory:
        storage = tensor.untyped_storage()
        key, device = storage._cdata, tensor.device.type
        memory = _Memory(storage.nbytes(), self.current, device, pinned=pinned, graph=self.capturing)
        self._memory[key] = weakref.ref(storage, lambda _: self._freed(key, memory)), memory
        if device == self.there:
            self.live += memory.bytes
            self._rise()
        return memory

    def _rise(self) -> None:
        """More may be allocated than before."""
        self.peak = max(self.peak, self.live)
        if self.live > max(self.limit, self.above[0]) and not self.compiling:
            self.above = self.live, _place(_frames())

    def given_back(self, storage: torch.UntypedStorage) -> None:
        """A piece of memory is freed, whoever refers to it."""
        entry = self._memory.get(storage._cdata)
        if entry is not None:
            self._free(entry[1])

    def _freed(self, key: int, memory: _Memory) -> None:
        if self._memory.get(key, (None, None))[1] is memory:
            del self._memory[key]
        if memory.bytes:
            self._free(memory)

    def _free(self, memory: _Memory) -> None:
        captured = memory.graph is not None and memory.graph is not self.capturing  # it stays the graph's
        if memory.device != self.there or captured:
            return
        if not all(self._behind(memory.stream, each) for each in memory.uses):
            self.fault(Kind.LIFETIME, f"{memory.bytes} bytes are freed while another stream may still use them")
        self.live -= memory.bytes
        memory.bytes = 0


def _bytes(tensor: torch.Tensor) -> int:
    """What a kernel moves of a tensor: elements that are repeated in memory once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return tensor.element_size() * prod(sizes)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that an operation writes."""
    operands = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            operands += [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return operands


def _only_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that an operation writes without reading: results, and what is filled or copied to."""
    if func.overloadpacket in (aten.copy_, aten.fill_, aten.zero_, aten._foreach_zero_):
        return tree_leaves(args[0])
    return [each for name in kwargs if name.startswith("out") for each in tree_leaves(kwargs[name])]


def _named(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _list(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))


# ---------------------------------------------------------------- where


class _Part(IntEnum):
    """What part of the program a function belongs to: none of it, the runtime, its kernels, or what is emitted."""

    OTHER = 0
    RUNTIME = 1
    KERNELS = 2
    EMITTED = 3


_parts: dict[CodeType, _Part] = {}


def _part(code: CodeType) -> _Part:
    part = _parts.get(code)
    if part is None:
        name = code.co_filename
        if name.startswith(EMITTED):
            part = _Part.EMITTED
        elif name.startswith(str(HERE)) or not name.startswith(str(RUNTIME)):
            part = _Part.OTHER
        else:
            part = _Part.KERNELS if name.startswith(str(KERNELS)) else _Part.RUNTIME
        _parts[code] = part
    return part


def _frames() -> Iterator[FrameType]:
    """The frames of our own code, innermost first, without those of this folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _part(frame.f_code):
            yield frame
        frame = frame.f_back


def _place(frames: Iterable[FrameType]) -> str:
    """The line that launches, and the line of the program that has it called."""
    lines: list[str] = []
    for frame in frames:
        code = frame.f_code
        if _part(code) is _Part.EMITTED:
            lines.append(f"{code.co_name}: {linecache.getline(code.co_filename, frame.f_lineno).strip()}")
            break
        if not lines:
            lines.append(f"{Path(code.co_filename).relative_to(RUNTIME.parent)}:{frame.f_lineno}")
    return "; ".join(lines)


def of(error: Exception) -> str:
    """Where an error was raised."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if _part(frame.f_code)]
    return _place(reversed(frames))


def _function() -> tuple[str, str]:
    """The innermost function of the program, and its line."""
    for frame in _frames():
        if _part(frame.f_code) is _Part.EMITTED:
            return frame.f_code.co_name, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return "", ""


def _in_functions() -> bool:
    """Whether a function of the program or a kernel launches, and no other part of the runtime."""
    frame = next(_frames(), None)
    return frame is not None and _part(frame.f_code) >= _Part.KERNELS


def _in_stages() -> bool:
    """Whether a function of a stage launches, and not the update, whose arithmetic is the optimizer's."""
    function, _ = _function()
    return bool(function) and not function.startswith("rank")


def _says(of: dict[CodeType, str]) -> str | None:
    """Why something may happen here, if a function says so."""
    return next((of[frame.f_code] for frame in _frames() if frame.f_code in of), None)
